//! Files of requests, as users of `deepinfer batch` see them.

mod program;

use program::{QUESTION, demo, run, tiny};
use std::path::Path;
use std::process::{Command, Stdio};

#[test]
fn a_batch_goes_on_where_it_ended() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let line = |id: &str, body: &str| {
        format!(
            "{{\"custom_id\":\"{id}\",\"method\":\"POST\",\"url\":\"/v1/completions\",\
             \"body\":{body}}}\n"
        )
    };
    let body = r#"{"prompt":"text","max_tokens":4,"temperature":0}"#;
    let input = line("a", body) + &line("b", body) + &line("c", r#"{"prompt":"x","suffix":"y"}"#);
    std::fs::write(path("in"), input).expect("it writes");
    let batch = || run(&["batch", "--model", &tiny(), &path("in"), &path("out")]);
    let first = batch();
    assert_eq!(first.status.code(), Some(1), "one request is refused");
    let text = std::fs::read_to_string(path("out")).expect("answers");
    assert_eq!(text.lines().count(), 3);
    assert!(text.contains("body.suffix"));

    // A crash in the middle of the last line.
    std::fs::write(path("out"), &text[..text.len() - 20]).expect("it writes");
    let second = batch();
    let resumed = std::fs::read_to_string(path("out")).expect("answers");
    assert_eq!(resumed.lines().count(), 3, "{}", String::from_utf8_lossy(&second.stderr));
    let answers = |text: &str| {
        let parse = |l: &str| serde_json::from_str::<serde_json::Value>(l).expect("whole lines");
        let mut list: Vec<String> = text
            .lines()
            .map(parse)
            .map(|v| format!("{} {}", v["custom_id"], v["response"]["body"]["choices"][0]["text"]))
            .collect();
        list.sort();
        list
    };
    assert_eq!(answers(&text), answers(&resumed));

    // What was refused is run again, and has one line.
    let input = line("a", body) + &line("b", body) + &line("c", body);
    std::fs::write(path("in"), input).expect("it writes");
    assert!(batch().status.success());
    let mended = std::fs::read_to_string(path("out")).expect("answers");
    let parse = |l: &str| serde_json::from_str::<serde_json::Value>(l).expect("whole lines");
    let mut ids: Vec<String> = mended.lines().map(|l| parse(l)["custom_id"].to_string()).collect();
    ids.sort();
    assert_eq!(ids, ["\"a\"", "\"b\"", "\"c\""]);
    assert!(mended.lines().all(|l| parse(l)["error"].is_null()));
}

#[test]
fn batches_keep_to_forms() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let line = |id: &str, extra: &str| {
        format!(
            "{{\"custom_id\":\"{id}\",\"url\":\"/v1/chat/completions\",\"body\":{{\"messages\":\
             [{{\"role\":\"user\",\"content\":\"x\"}}],\"max_tokens\":90,\"seed\":3,{extra}}}}}\n"
        )
    };
    let tool = r#""tools":[{"type":"function","function":{"name":"run","strict":true,
        "parameters":{"type":"object","properties":{"n":{"enum":[1,2]}},"required":["n"],"additionalProperties":false}}}]"#
        .replace('\n', "");
    let input = [
        line("a", r#""response_format":{"type":"choice","choice":["left","right"]}"#),
        line("b", &format!(r#"{tool},"tool_choice":"required","parallel_tool_calls":false"#)),
        line("c", r#""response_format":{"type":"regex","regex":"("}"#),
    ];
    std::fs::write(path("in"), input.concat()).expect("it writes");
    run(&["batch", "--model", &tiny(), &path("in"), &path("out")]);
    let text = std::fs::read_to_string(path("out")).expect("answers");
    let answer = |id: &str| {
        let mut lines = text.lines().map(serde_json::from_str::<serde_json::Value>);
        let found = lines.find_map(|l| l.ok().filter(|l| l["custom_id"] == id));
        found.expect("an answer")["response"]["body"].clone()
    };
    let message = |id: &str| answer(id)["choices"][0]["message"].clone();
    assert!(["left", "right"].contains(&message("a")["content"].as_str().unwrap_or_default()));
    let call = &message("b")["tool_calls"][0]["function"];
    assert_eq!(call["name"], "run", "{text}");
    assert!([r#"{"n":1}"#, r#"{"n":2}"#].contains(&call["arguments"].as_str().unwrap_or("")));
    assert!(answer("c")["error"]["message"].as_str().is_some_and(|m| m.contains("grammar")));
}

#[test]
fn a_batch_ends_before_a_stop_string() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let line = |id: &str, stop: &[&str]| {
        let messages = serde_json::json!([{"role": "user", "content": QUESTION}]);
        let body = serde_json::json!({
            "messages": messages, "temperature": 0, "reasoning_effort": "high", "stop": stop,
            "max_tokens": 300,
        });
        serde_json::json!({"custom_id": id, "url": "/v1/chat/completions", "body": body})
    };
    let input = format!("{}\n{}\n", line("whole", &[]), line("stopped", &["81"]));
    std::fs::write(path("in"), input).expect("it writes");
    let output = run(&["batch", "--model", &demo(), &path("in"), &path("out")]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = std::fs::read_to_string(path("out")).expect("answers");
    let message = |id: &str| {
        let mut lines = text.lines().map(serde_json::from_str::<serde_json::Value>);
        let found = lines.find_map(|l| l.ok().filter(|l| l["custom_id"] == id));
        found.expect("an answer")["response"]["body"]["choices"][0]["message"].clone()
    };
    let part = |message: &serde_json::Value, name: &str| {
        message[name].as_str().unwrap_or_else(|| panic!("{name}: {message}")).to_owned()
    };
    let (whole, stopped) = (message("whole"), message("stopped"));
    assert!(part(&whole, "content").contains("81"), "{whole}");
    for name in ["content", "reasoning_content"] {
        assert!(!part(&whole, name).contains("</think>"), "{whole}");
        let before = part(&whole, name).split("81").next().map(str::to_owned);
        let kept = part(&stopped, name);
        assert!(!kept.contains("81"), "{stopped}");
        // Nothing but the end is missing.
        assert!(kept.is_empty() || Some(kept) == before, "{stopped} {whole}");
    }
}

/// A folder with a file `in` of one request.
fn one_request() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let request =
        r#"{"custom_id":"a","url":"/v1/completions","body":{"prompt":"x","max_tokens":2}}"#;
    std::fs::write(folder.path().join("in"), request).expect("it writes");
    folder
}

#[test]
fn a_batch_leaves_other_files_alone() {
    let folder = one_request();
    let path = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(path("notes"), "precious notes without newline").expect("it writes");
    let model = tiny();
    for output in ["notes", "in"] {
        let before = std::fs::read(path(output)).expect("it is there");
        let done = run(&["batch", "--model", &model, &path("in"), &path(output)]);
        assert_eq!(done.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&done.stderr).contains("give another"));
        assert_eq!(std::fs::read(path(output)).expect("it is there"), before);
    }
    // Devices are written to, and not read.
    for (device, code) in [("/dev/null", 0), ("/dev/full", 1)] {
        if Path::new(device).exists() {
            let done = run(&["batch", "--model", &model, &path("in"), device]);
            let text = String::from_utf8_lossy(&done.stderr);
            assert_eq!(done.status.code(), Some(code), "{device}: {text}");
            assert_eq!(text.matches("error: cannot write the answers").count(), code as usize);
        }
    }
}

/// A run whose answers nobody reads has not done its work.
#[cfg(target_os = "linux")]
#[test]
fn answers_that_nobody_reads_are_an_error() {
    let folder = one_request();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let done = Command::new(env!("CARGO_BIN_EXE_deepinfer"))
        .args(["batch", "--model", &tiny(), &path("in"), "/dev/stdout"])
        .stdout(writer)
        .stderr(Stdio::piped())
        .output()
        .expect("the program starts");
    let text = String::from_utf8_lossy(&done.stderr);
    assert_eq!(done.status.code(), Some(1), "{text}");
    assert_eq!(text.matches("error: cannot write the answers").count(), 1, "{text}");
}
