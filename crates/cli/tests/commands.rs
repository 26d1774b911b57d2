//! The program as its users see it.

mod program;

use program::{QUESTION, demo, json, run, testdata, tiny};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

#[test]
fn generate_gives_the_reference_tokens_drafted_or_not_on_any_threads() {
    let reference = std::fs::read(testdata("tiny-a/reference.json")).expect("it is there");
    let reference: serde_json::Value = serde_json::from_slice(&reference).expect("it is JSON");
    let prompt = &reference["prompts"][0];
    let ids: Vec<String> =
        prompt["ids"].as_array().expect("ids").iter().map(ToString::to_string).collect();
    for (threads, draft) in [("1", "off"), ("2", "auto"), ("2", "3")] {
        let output = run(&[
            "generate",
            "--model",
            &tiny(),
            "--token-ids",
            &ids.join(","),
            "--max-tokens",
            "8",
            "--kv",
            "exact",
            "--ignore-eos",
            "--device",
            "cpu",
            "--threads",
            threads,
            "--draft",
            draft,
            "--json",
        ]);
        let expected = &prompt["f32"]["greedy"].as_array().expect("tokens")[..8];
        assert_eq!(json(&output)["tokens"].as_array().expect("tokens"), expected);
    }
}

#[test]
fn the_same_seed_gives_the_same_tokens() {
    let sample = |seed: &str| {
        let output = run(&[
            "generate",
            "--model",
            &tiny(),
            "--prompt",
            "Some text",
            "--temperature",
            "1",
            "--seed",
            seed,
            "--max-tokens",
            "16",
            "--json",
        ]);
        json(&output)["tokens"].clone()
    };
    assert_eq!(sample("5"), sample("5"));
    assert_ne!(sample("5"), sample("6"));
}

#[test]
fn sampling_options_count() {
    let generate = |more: &[&str]| {
        let mut args = vec!["generate", "--prompt", "Some text", "--max-tokens", "6", "--json"];
        let model = tiny();
        args.extend(["--model", &model, "--ignore-eos"]);
        args.extend(more);
        json(&run(&args))
    };
    let ids = |found: &serde_json::Value| -> Vec<u64> {
        let ids = found["tokens"].as_array().expect("a list");
        ids.iter().map(|id| id.as_u64().expect("an id")).collect()
    };
    let free = ids(&generate(&[]));
    assert_eq!(free.len(), 6);
    let third = free[2].to_string();
    let end = 1 + free.iter().position(|&id| id == free[2]).expect("it is there");
    assert_eq!(ids(&generate(&["--stop-token-ids", &third])), free[..end]);
    let late = generate(&["--stop-token-ids", &third, "--min-tokens", "5"]);
    assert!(ids(&late).len() > 5);
    assert!(!ids(&generate(&["--logit-bias", &format!("{third}=-100")])).contains(&free[2]));
    assert!(ids(&generate(&["--allowed-token-ids", "40,41"])).iter().all(|&id| id / 2 == 20));
    let word = generate(&["--top-k", "-1", "--allowed-token-ids", "40"])["text"].clone();
    let word = word.as_str().expect("text");
    let banned = ids(&generate(&["--allowed-token-ids", "40,41", "--bad-words", &word[..1]]));
    assert!(!banned.contains(&40), "{word:?}: {banned:?}");
    let scored = generate(&["--logprobs", "2", "--prompt-logprobs", "0"]);
    let tokens = scored["logprobs"].as_array().expect("a list");
    assert_eq!(tokens.len(), 6);
    for (token, id) in tokens.iter().zip(&free) {
        assert_eq!(
            (&token["token"], &token["top"][0][0]),
            (&serde_json::json!(id), &serde_json::json!(id))
        );
        assert_eq!(token["top"].as_array().map(Vec::len), Some(2));
        assert!(token["logprob"].as_f64().expect("a number") <= 0.0);
    }
    let prompt = scored["prompt_tokens"].as_u64().expect("a count") as usize;
    assert_eq!(scored["prompt_logprobs"].as_array().map(Vec::len), Some(prompt - 1));
}

#[test]
fn answers_have_the_form_asked_for() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).expect("is written");
        path.display().to_string()
    };
    let generate = |more: &[&str]| {
        let mut args = vec!["generate", "--prompt", "Some text", "--max-tokens", "60", "--json"];
        let model = tiny();
        args.extend(["--model", &model, "--temperature", "1", "--seed", "3"]);
        args.extend(more);
        run(&args)
    };
    let text = |more: &[&str]| json(&generate(more))["text"].as_str().expect("text").to_owned();
    let words = text(&["--regex", "[a-c]{2,5}x"]);
    assert!(words.ends_with('x') && words.len() <= 6, "{words}");
    assert!(["left", "right"].contains(&text(&["--choice", "left,right"]).as_str()));
    let grammar = file("grammar", "start: \"<\" /[ab]{1,4}/ \">\"");
    assert!(text(&["--grammar", &grammar]).starts_with('<'));
    let schema = file("schema", r#"{"enum": ["one", 2]}"#);
    let value = text(&["--json-schema", &schema]);
    assert!(["\"one\"", "2"].contains(&value.trim()), "{value}");

    // Each continuation is its own, and thinking ends where it must.
    let several = json(&generate(&["--n", "3", "--regex", "[a-z]{8}"]));
    let texts: Vec<_> = several.as_array().expect("a list").iter().map(|a| &a["text"]).collect();
    assert!(texts.len() == 3 && texts[0] != texts[1] && texts[1] != texts[2], "{texts:?}");
    let limited = |budget: usize| {
        let tokens = budget.to_string();
        let rest = ["--thinking-budget", &tokens, "--choice", "yes,no"];
        json(&generate(&[&["--chat", "--effort", "low"][..], &rest].concat()))
    };
    let (four, two) = (limited(4), limited(2));
    assert!(["yes", "no"].contains(&four["text"].as_str().expect("text")), "{four}");
    assert_eq!(four["tokens"][4], two["tokens"][2], "the end of thinking");

    let bad = file("bad", r#"{"items": {"type": "text"}}"#);
    // What is wrong with a form names its option, and the place.
    let (lark, none) = (file("lark", "start: ("), file("none", "{"));
    for (option, value, wanted) in [
        ("--json-schema", bad.as_str(), "/items"),
        ("--json-schema", &none, "EOF"),
        ("--json-schema", "/nonexistent", "cannot read /nonexistent"),
        ("--grammar", &lark, "Expected"),
        ("--grammar", "/nonexistent", "cannot read /nonexistent"),
        ("--regex", "(", "unclosed group"),
    ] {
        let refused = generate(&[option, value]);
        let text = String::from_utf8_lossy(&refused.stderr);
        assert_eq!(refused.status.code(), Some(2), "{option} {value}: {text}");
        assert!(text.contains(&format!("error: {option}: ")) && text.contains(wanted), "{text}");
    }
}

#[test]
fn verify_passes_and_fails_with_its_exit_code() {
    let passing = run(&["verify", "--model", &tiny(), "--reference", &tiny(), "--json"]);
    let report = json(&passing);
    assert_eq!(report["passed"], true);
    assert!(report["checks"].as_array().expect("lines").len() > 50);

    // The same weights, another factor.
    let folder = tempfile::tempdir().expect("a folder");
    let config = std::fs::read_to_string(testdata("tiny-a/config.json")).expect("it is there");
    for entry in std::fs::read_dir(testdata("tiny-a")).expect("it is there") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().expect("a name");
        std::fs::copy(&path, folder.path().join(name)).expect("it copies");
    }
    let changed =
        config.replace("\"routed_scaling_factor\": 1.5", "\"routed_scaling_factor\": 1.4");
    assert_ne!(config, changed);
    std::fs::write(folder.path().join("config.json"), changed).expect("it writes");
    let model = folder.path().display().to_string();
    let failing = run(&["verify", "--model", &model, "--reference", &tiny(), "--kv", "exact"]);
    assert_eq!(failing.status.code(), Some(1));
    let text = String::from_utf8_lossy(&failing.stdout);
    assert!(text.contains("FAIL") && text.contains("first at layer 0"), "{text}");
}

#[test]
fn wrong_command_lines_say_what_to_do() {
    for (args, expected) in [
        (&["generate", "--model", "/nonexistent", "--prompt", "a"][..], "no such folder"),
        (&["generate", "--model", &tiny()], "--prompt"),
        (
            &["generate", "--model", &tiny(), "--prompt", "a", "--draft", "99"],
            "--draft: cannot draft 99",
        ),
        (&["generate", "--model", &tiny(), "--token-ids", "99999"], "99999"),
        (&["generate", "--model", &tiny(), "--prompt", "a", "--top-p", "7"], "--top-p is 7"),
        (
            &["generate", "--model", &tiny(), "--prompt", "a", "--stop-token-ids", "9999"],
            "--stop-token-ids",
        ),
        (&["generate", "--model", &tiny(), "--prompt", "a", "--bad-words", ""], "--bad-words"),
        (
            &["generate", "--model", &tiny(), "--prompt", "a", "--draft-scheme", "x"],
            "--draft-scheme is",
        ),
        (&["generate", "--model", &tiny(), "--prompt", "a", "--threads", "2000"], "--threads"),
        (
            &["generate", "--model", &tiny(), "--prompt-file", "/nonexistent"],
            "--prompt-file: cannot",
        ),
        (
            &["generate", "--model", "/", "--prompt", "a"],
            "--model /: the folder has no config.json",
        ),
        (&["chat", "--model", &tiny(), "--temperature", "-1"], "--temperature is -1"),
        (&["chat", "--model", &tiny(), "--effort", "much"], "--effort"),
        (&["eval", "--tasks", "/nonexistent"], "--tasks: cannot read /nonexistent"),
        (&["eval", "--prefill", "x"], "--prefill is"),
        (
            &["verify", "--model", &tiny(), "--reference", "/nonexistent"],
            "--reference: /nonexistent",
        ),
        (
            &["batch", "--model", &tiny(), "/nonexistent", "/dev/null"],
            "INPUT: cannot read /nonexistent",
        ),
        (&["serve", "--model", &tiny(), "--kv-tokens", "3"], "--kv-tokens is 3"),
        (&["plan", "--model", &tiny(), "--kv-tokens", "3"], "--kv-tokens is 3"),
        (&["serve", "--model", &tiny(), "--host-cache", "4"], "--host-cache 4 is 4 bytes"),
        (&["serve", "--model", &tiny(), "--disk-cache", "much"], "--disk-cache much"),
        (&["synth", "--out", "/tmp/x", "--preset", "flash-layers:1"], "--preset: flash-layers:1"),
        (&["synth", "--out", "/tmp/x", "--positions", "0"], "--positions"),
        (&["generate", "--model", &tiny(), "--prompt", "a", "--logit-bias", "x"], "ID=X"),
        (&["generate", "--model", &tiny(), "--prompt", "a", "--top-k", "-2"], "-2"),
        (&["synth", "--out", "/tmp/x", "--preset", "huge"], "huge"),
        (&["plan", "--model", &tiny(), "--memory", "much"], "much"),
        (&["plan", "--model", &tiny(), "--memory", "64"], "64 bytes"),
        (&["frobnicate"], "frobnicate"),
    ] {
        let output = run(args);
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {text}");
        assert!(text.contains(expected), "{args:?}: {text}");
    }
}

#[test]
fn a_plan_that_does_not_fit_fails_with_the_numbers() {
    let output = run(&["plan", "--model", &tiny(), "--memory", "1MB"]);
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("1.00 MB available; lower --kv-tokens"), "{text}");
    // More than any machine has: 5 TB.
    let model = tiny();
    let much = ["--model", &model, "--device", "cpu", "--kv-tokens", "65000000000"];
    let output = run(&[&["serve", "--port", "0"], &much[..]].concat());
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("TB needed (") && text.contains("; lower --kv-tokens"), "{text}");
    let gpu = run(&["plan", "--model", &tiny(), "--memory", "64GB", "--device", "cuda:0"]);
    let told = String::from_utf8_lossy(&gpu.stdout);
    assert!(gpu.status.success() && !told.contains("mapped files"), "{told}");
    assert!(told.contains("n-gram tables in page-locked host memory"), "{told}");
    let fits = run(&["plan", "--model", &tiny(), "--memory", "64GB", "--json"]);
    assert_eq!(json(&fits)["fits"], true);
}

#[test]
fn inspect_accounts_for_every_byte() {
    let contents = json(&run(&["inspect", "--model", &tiny(), "--json", "--tensors"]));
    let sum = |list: &str| {
        let items = contents[list].as_array().expect("a list");
        items.iter().map(|i| i["bytes"].as_u64().expect("bytes")).sum::<u64>()
    };
    assert_eq!(sum("parts"), contents["bytes"].as_u64().expect("bytes"));
    assert_eq!(sum("list"), contents["bytes"].as_u64().expect("bytes"));
}

#[test]
fn what_a_checkpoint_lacks_is_said() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().display().to_string();
    let copy = |name: &str| {
        let path = testdata("tiny-a").join(name);
        std::fs::copy(path, folder.path().join(name)).expect("it copies");
    };
    copy("config.json");
    let index = folder.path().join("model.safetensors.index.json");
    std::fs::write(&index, r#"{"weight_map": {}}"#).expect("it writes");
    let inspect = |more: &[&str]| run(&[&["inspect", "--model", &model], more].concat());
    let plan = || run(&["plan", "--model", &model, "--device", "cpu"]);

    let text = String::from_utf8_lossy(&inspect(&[]).stdout).into_owned();
    assert!(text.contains("cannot be run: tokenizer.json, embed.weight, "), "{text}");
    let all = json(&inspect(&["--json"]))["missing"].as_array().map(Vec::len);
    assert!(all.is_some_and(|n| n > 300), "{all:?}");
    let refused = plan();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains("lacks tensors") && said.contains("embed.weight"), "{said}");

    // All tensors, and no tokenizer.
    copy("model.safetensors.index.json");
    for i in 1..=3 {
        copy(&format!("model-0000{i}-of-00003.safetensors"));
    }
    assert_eq!(json(&inspect(&["--json"]))["missing"], serde_json::json!(["tokenizer.json"]));
    let planned = plan();
    let said = String::from_utf8_lossy(&planned.stderr);
    assert!(planned.status.success() && said.contains("tokenizer.json is missing"), "{said}");
    copy("tokenizer.json");
    assert_eq!(json(&inspect(&["--json"]))["missing"], serde_json::json!([]));
    assert_eq!(String::from_utf8_lossy(&plan().stderr), "");
}

#[test]
fn synth_writes_what_generate_reads() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("model").display().to_string();
    assert!(run(&["synth", "--out", &out, "--preset", "tiny", "--seed", "3"]).status.success());
    let args = ["generate", "--model", &out, "--prompt", "text", "--max-tokens", "3", "--json"];
    let output = json(&run(&args));
    assert!(output["output_tokens"].as_u64().is_some_and(|n| n > 0));
    // A folder that holds something is left alone.
    let again = run(&["synth", "--out", &out]);
    assert_eq!(again.status.code(), Some(2));
}

/// Ctrl-C stops an answer; the talk goes on.
#[cfg(unix)]
#[test]
fn an_interrupt_ends_the_answer_and_not_the_talk() {
    use std::io::{Read, Write};
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("model").display().to_string();
    // Room for an answer of minutes.
    let made = run(&["synth", "--out", &model, "--preset", "tiny", "--positions", "60000"]);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let options = ["--model", &model, "--ignore-eos", "--effort", "none"];
    let mut talk = begin_talk(folder.path(), &options);
    let mut input = talk.stdin.take().expect("a pipe");
    let mut output = talk.stdout.take().expect("a pipe");
    // One answer only: what is left of it in the pipe would look like the beginning of a second.
    let mut begun = [0; 16];
    input.write_all(b"hello\n").expect("it listens");
    output.read_exact(&mut begun).expect("an answer begins");
    // The shell's own: a program of that name need not be there.
    let sent = Command::new("sh").args(["-c", &format!("kill -INT {}", talk.id())]).status();
    assert!(sent.expect("the shell starts").success());
    input.write_all(b"/effort\n/quit\n").expect("it listens");
    let mut rest = String::new();
    let mut bytes = Vec::new();
    output.read_to_end(&mut bytes).expect("it ends");
    rest.push_str(&String::from_utf8_lossy(&bytes));
    let end = talk.wait_with_output().expect("it ends");
    let errors = String::from_utf8_lossy(&end.stderr);
    assert!(end.status.success(), "{errors}");
    assert!(rest.contains("effort none"), "the talk went on: {errors}");
    assert_eq!(errors.matches("(stopped)").count(), 1, "{errors}");
}

#[test]
fn text_far_beyond_the_context_is_refused_before_it_is_encoded() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let text = "somewhat long ".repeat(5_000);
    std::fs::write(path("text"), &text).expect("it writes");
    let model = tiny();
    for more in [&[][..], &["--chat"]] {
        let args = ["generate", "--model", &model, "--prompt-file", &path("text")];
        let done = run(&[&args[..], more].concat());
        let said = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(2), "{said}");
        assert!(said.contains("bytes of text have") && said.contains("tokens or more"), "{said}");
    }
    let done = talk(&format!("{text}\n/effort\n"));
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(said.contains("tokens or more") && said.contains("/reset starts again"), "{said}");
    assert!(String::from_utf8_lossy(&done.stdout).contains("effort none"), "the talk goes on");
    let bodies = [
        ("completions", serde_json::json!({"prompt": text})),
        ("chat/completions", serde_json::json!({"messages": [{"role": "user", "content": text}]})),
    ];
    let line = |(url, body): &(&str, serde_json::Value)| {
        let url = format!("/v1/{url}");
        serde_json::json!({"custom_id": url, "url": url, "body": body}).to_string()
    };
    std::fs::write(path("in"), bodies.each_ref().map(line).join("\n")).expect("it writes");
    run(&["batch", "--model", &model, &path("in"), &path("out")]);
    let answers = std::fs::read_to_string(path("out")).expect("answers");
    assert_eq!(answers.lines().filter(|l| l.contains("tokens or more")).count(), 2, "{answers}");
}

/// A talk over pipes that keeps its history in `folder`.
fn begin_talk(folder: &Path, options: &[&str]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_deepinfer"))
        .arg("chat")
        .args(options)
        .env("XDG_DATA_HOME", folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts")
}

/// What a talk says to these lines.
fn talk(lines: &str) -> Output {
    use std::io::Write;
    let folder = tempfile::tempdir().expect("a folder");
    let mut talk = begin_talk(folder.path(), &["--model", &tiny()]);
    let mut input = talk.stdin.take().expect("a pipe");
    input.write_all(lines.as_bytes()).expect("it listens");
    drop(input);
    talk.wait_with_output().expect("it ends")
}

#[test]
fn a_talk_is_not_saved_over_a_file_unasked() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("talk.json");
    let name = file.display().to_string();
    let said = |lines: String| {
        let done = talk(&lines);
        assert!(done.status.success());
        String::from_utf8_lossy(&done.stderr).into_owned()
    };
    let saved = || std::fs::read_to_string(&file).expect("it is there");
    assert_eq!(said(format!("/save {name}\n")), "");
    assert_eq!(saved(), "[]\n");
    std::fs::write(&file, "precious notes, longer than a talk").expect("it writes");
    let errors = said(format!("/save {name}\n"));
    assert!(errors.contains(&format!("{name} exists; /save! {name}")), "{errors}");
    assert_eq!(saved(), "precious notes, longer than a talk");
    assert_eq!(said(format!("/save! {name}\n")), "");
    assert_eq!(saved(), "[]\n");
    assert!(said("/save!\n".to_owned()).contains("/save! needs a file name"));
}

#[test]
fn efforts_have_one_list_of_words() {
    for word in ["minimal", "ultra", "medium", "33"] {
        let done = talk(&format!("/effort {word}\n"));
        assert_eq!(String::from_utf8_lossy(&done.stderr), "", "{word}");
    }
    let expected = "none, minimal, low, medium, high, xhigh, max, ultra or a number from 0 to 100";
    let told = talk("/effort much\n");
    let help = run(&["generate", "--help"]);
    let wrong = run(&["generate", "--prompt", "x", "--chat", "--effort", "much"]);
    assert_eq!(wrong.status.code(), Some(2));
    for (text, option) in
        [(told.stderr, "much"), (help.stdout, "--effort"), (wrong.stderr, "--effort")]
    {
        let text = String::from_utf8_lossy(&text).split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(text.contains(expected) && text.contains(option), "{text}");
    }
}

#[test]
fn a_chat_ends_before_a_stop_string() {
    let generate = |effort: &str, more: &[&str]| {
        let model = demo();
        let mut args = vec!["generate", "--model", &model, "--chat", "--prompt", QUESTION];
        args.extend(["--temperature", "0", "--effort", effort, "--max-tokens", "300"]);
        run(&[&args[..], more].concat())
    };
    for effort in ["none", "high"] {
        let whole = json(&generate(effort, &["--json"]));
        assert!(whole["text"].as_str().is_some_and(|text| text.contains("81")), "{whole}");
        assert!(!whole.to_string().contains("</think>"), "{whole}");
        let printed = generate(effort, &[]);
        let printed = String::from_utf8_lossy(&printed.stdout).into_owned();
        assert!(printed.contains("81") && !printed.contains("</think>"), "{printed}");

        let stopped = json(&generate(effort, &["--json", "--stop", "81"]));
        assert_eq!(stopped["finish_reason"], "stop");
        for part in [&stopped["text"], &stopped["thinking"]] {
            assert!(part.as_str().is_some_and(|part| !part.contains("81")), "{stopped}");
        }
        let printed = generate(effort, &["--stop", "81"]);
        assert!(printed.status.success());
        let printed = String::from_utf8_lossy(&printed.stdout).into_owned();
        assert!(!printed.contains("81"), "{printed}");
    }
}

#[test]
fn eval_runs_on_the_device_it_is_told() {
    let folder = tempfile::tempdir().expect("a folder");
    let item = r#"{"id": "a-0", "task": "a", "thinking": false, "score": "exact", "quick": true,
        "messages": [{"role": "user", "content": "x"}], "expected": "y", "max_tokens": 3}"#;
    let task = folder.path().join("a.jsonl");
    std::fs::write(task, item.replace('\n', " ")).expect("it writes");
    let tasks = folder.path().display().to_string();
    let eval =
        |device: &str| run(&["eval", "--model", &tiny(), "--tasks", &tasks, "--device", device]);
    assert!(eval("cpu").status.success());
    let refused = |more: &[&str], why: &str| {
        let model = tiny();
        let output = run(&[&["eval", "--model", &model, "--tasks", &tasks], more].concat());
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && text.contains(why), "{text}");
    };
    refused(&["--count", "0"], "--count");
    refused(&["--count", "3", "--suite", "full"], "--suite");
    refused(&["--only", "a,b"], "no task \"b\"");
    refused(&["--keep-tokens", "40"], "--prefill exact");
    refused(&["--keep-tokens", "40", "--prefill", "off"], "--prefill off");
    let output = eval("cuda:99");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("cannot run"), "{text}");
}

#[test]
fn tasks_that_are_too_long_are_not_run_and_the_others_are() {
    let folder = tempfile::tempdir().expect("a folder");
    let item = |id: &str, task: &str, most: usize| {
        serde_json::json!({
            "id": id, "task": task, "thinking": false, "score": "exact", "quick": true,
            "messages": [{"role": "user", "content": "x"}], "expected": "y", "max_tokens": most,
        })
        .to_string()
    };
    let items = [item("a-0", "a", 3), item("b-0", "b", 3), item("b-1", "b", 1 << 40)];
    let tasks = folder.path().display().to_string();
    std::fs::write(folder.path().join("all.jsonl"), items.join("\n")).expect("it writes");
    let model = tiny();
    let args = ["eval", "--model", &model, "--tasks", &tasks];
    let report = json(&run(&[&args[..], &["--json"]].concat()));
    let scored = report["tasks"].as_array().expect("tasks");
    assert_eq!((scored.len(), &scored[0]["name"]), (1, &"a".into()), "{report}");
    let reason = report["not_run"]["b"].as_str().expect("a reason");
    assert!(reason.starts_with("b-1 wants 1099511"), "{reason}");
    let output = run(&[&args[..], &["--only", "b"]].concat());
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("no task that can be run: b: b-1"));
}

#[test]
fn input_without_end_is_refused() {
    if Path::new("/dev/zero").exists() {
        let model = tiny();
        for args in [
            &["generate", "--model", &model, "--prompt-file", "/dev/zero"][..],
            &["generate", "--model", &model, "--prompt", "x", "--grammar", "/dev/zero"],
            &["batch", "--model", &model, "/dev/zero", "/dev/null"],
        ] {
            let done = run(args);
            let text = String::from_utf8_lossy(&done.stderr);
            assert_eq!(done.status.code(), Some(2), "{args:?}: {text}");
            assert!(text.contains("more than 67108864 bytes"), "{args:?}: {text}");
        }
    }
}

#[test]
fn bench_reports_every_figure() {
    let output = run(&[
        "bench",
        "--model",
        &tiny(),
        "--prompt-tokens",
        "16",
        "--new-tokens",
        "2",
        "--batch",
        "2",
        "--repeats",
        "1",
        "--json",
    ]);
    let report = json(&output);
    for key in [
        "prefill_tokens_per_s",
        "prefill_gflop_per_s",
        "gemm_gflop_per_s",
        "prefill_share_of_gemm",
        "decode_tokens_per_s",
        "decode_bytes_per_token",
        "decode_gb_per_s",
        "memory_read_gb_per_s",
        "decode_share_of_memory_read",
        "fp8_share_of_memory_read",
        "fp4_share_of_memory_read",
        "peak_private_mb",
    ] {
        assert!(report[key].as_f64().is_some_and(|x| x > 0.0), "{key}: {}", report[key]);
    }
}

#[test]
fn a_device_tests_itself() {
    let report = json(&run(&["selftest", "--device", "cpu", "--quick", "--json"]));
    assert_eq!(report["failed"], 0, "{report}");
    assert!(report["passed"].as_u64().is_some_and(|n| n > 20));
    let output = run(&["selftest", "--device", "cuda:one"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("cuda:N"));
}

#[test]
fn completions_and_man_pages_are_written() {
    let script = run(&["completions", "bash"]);
    assert!(String::from_utf8_lossy(&script.stdout).contains("deepinfer"));
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().display().to_string();
    assert!(run(&["man", "--out", &out]).status.success());
    assert!(folder.path().join("deepinfer-verify.1").exists());
}

#[test]
fn bench_ops_reports_figures_that_can_be_drawn() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (file, picture) = (path("cpu.json"), path("cpu.svg"));
    let output =
        run(&["bench", "ops", "--device", "cpu", "--quick", "--only", "RMS_norm", "--json"]);
    let report = json(&output);
    assert!(report["device"].as_str().is_some_and(|name| name.starts_with("cpu, ")));
    for key in ["memory_gigabytes_per_second", "teraflops", "launch_microseconds"] {
        let limit = &report["limits"][key];
        assert!(limit.as_f64().is_some_and(|x| x > 0.0), "{key}: {limit}");
    }
    let rows = report["rows"].as_array().expect("rows");
    assert!(!rows.is_empty() && report["skipped"] == serde_json::json!([]));
    for row in rows {
        assert_eq!(row["operation"], "rms_norm");
        let number = |key: &str| row[key].as_f64().filter(|x| *x > 0.0).expect(key);
        let (time, least) = (number("microseconds"), number("least_microseconds"));
        assert!((number("share") - least / time).abs() < 1e-6 * number("share"));
        assert!(number("gigabytes_per_second") > 0.0 && row["teraflops"].is_null());
        assert!(["memory", "launch"].contains(&row["limit"].as_str().expect("a limit")));
    }

    std::fs::write(&file, &output.stdout).expect("it writes");
    let drawn = run(&["bench", "plot", &file, "--out", &picture]);
    assert!(drawn.status.success(), "{}", String::from_utf8_lossy(&drawn.stderr));
    let svg = std::fs::read_to_string(&picture).expect("the picture");
    for row in rows {
        let shape = row["shape"].as_str().expect("a shape");
        assert!(svg.contains(&format!(">{shape}</text>")), "{shape}");
    }

    let text = |args: &[&str]| {
        let output = run(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(text(&["bench", "plot", &file, "--out", &file]).contains("one of the files to read"));
    let message = text(&["bench", "plot", &path("none.json"), "--out", &picture]);
    assert!(message.contains("cannot read") && message.contains("none.json"), "{message}");
    let message = text(&["bench", "plot", &picture, "--out", &path("b.svg")]);
    assert!(message.contains("no output of deepinfer bench ops"), "{message}");
    let message = text(&["bench", "ops", "--device", "cpu", "--only", "softmax"]);
    assert!(message.contains("softmax") && message.contains("linear"), "{message}");
}

/// Numbers that nobody means are refused by name: no panic, no endless work.
#[test]
fn huge_numbers_are_refused() {
    const HUGE: &str = "18446744073709551615";
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("out").display().to_string();
    for (args, wanted) in [
        (vec!["bench", "--prompt-tokens", HUGE], "tokens"),
        (vec!["bench", "--new-tokens", HUGE], "tokens"),
        (vec!["bench", "layer", "--device", "cpu", "--rows", HUGE], "--rows"),
        (vec!["bench", "layer", "--device", "cpu", "--prefill", HUGE], "--prefill"),
        (vec!["plan", "--max-seqs", HUGE], "--max-seqs"),
        (vec!["plan", "--max-batch-tokens", HUGE], "--max-batch-tokens"),
        (vec!["plan", "--kv-tokens", HUGE], "--kv-tokens"),
        (vec!["synth", "--out", &out, "--engram-rows", HUGE], "engram"),
        (vec!["generate", "--prompt", "x", "--threads", HUGE], "threads"),
    ] {
        let done = run(&args);
        let text = String::from_utf8_lossy(&done.stderr);
        assert!(matches!(done.status.code(), Some(1 | 2)), "{args:?}: {text}");
        assert!(text.contains(wanted) && !text.contains("panicked"), "{args:?}: {text}");
    }
}
