//! Tool calls: the grammar and the prompt encoder spell the format alike.

mod grammar_util;

use deepinfer::grammar::{CompileError, GrammarSpec, Tool, ToolCalls, ToolChoice};
use deepseek_recipe_core::conversation::Conversation;
use deepseek_recipe_core::messages::{InputMessage, ToolCall};
use deepseek_recipe_core::prompt::Prompt;
use deepseek_recipe_encoding::PromptEncoding;
use deepseek_recipe_encoding::dsv41::DeepseekV41Encoding;
use grammar_util::{PLAIN, Rng, SMALL, Small, byte_tokens, write};
use serde_json::{Map, Value, json};

const DSML: &str = "｜DSML｜";

/// The answer of an assistant turn with this text and these calls, as the encoder renders it,
/// one token a byte but for the special tokens.
fn rendered(small: &Small, text: &str, calls: &[(String, Value)]) -> (String, Vec<u32>) {
    let calls: Vec<ToolCall> = calls
        .iter()
        .map(|(name, arguments)| ToolCall {
            id: "c".into(),
            name: name.clone(),
            arguments: arguments.to_string(),
        })
        .collect();
    let user = InputMessage::User { content: Prompt::plain("q"), image_sources: Vec::new() };
    let assistant = InputMessage::Assistant {
        content: text.to_owned(),
        reasoning_content: None,
        tool_calls: Some(calls),
        prefix: false,
    };
    let conversation = Conversation {
        messages: vec![user, assistant],
        thinking_mode: false,
        ..Conversation::default()
    };
    let rendered = DeepseekV41Encoding::new().render_conversation(&conversation);
    let start = rendered.prompt.find("</think>").unwrap() + "</think>".len();
    let end = rendered.prompt.rfind("<｜end▁of▁sentence｜>").unwrap();
    let mut tokens = Vec::new();
    let mut at = start;
    for range in &rendered.special_ranges {
        if range.start < start || range.end > end {
            continue;
        }
        tokens.extend(byte_tokens(&rendered.prompt[at..range.start]));
        let name = &rendered.prompt[range.clone()];
        match small.vocabulary.special(name) {
            Some(id) => tokens.push(id),
            None => tokens.extend(byte_tokens(name)),
        }
        at = range.end;
    }
    tokens.extend(byte_tokens(&rendered.prompt[at..end]));
    (rendered.prompt[start..end].to_owned(), tokens)
}

const WORDS: [&str; 12] = [
    "",
    "a",
    "two words",
    "line\nbreak",
    "\"quoted\"",
    "<tag>",
    "</",
    "日本 🙂",
    "\\n {\"a\": 1}",
    "\n</x>\n",
    "tab\tend ",
    "a < b && c > d </b>",
];

/// A parameter schema and a value that matches it.
fn parameter(rng: &mut Rng) -> (Value, Value) {
    let word = Value::from(*rng.pick(&WORDS));
    match rng.below(14) {
        0 => (json!({"type": "string"}), word),
        1 => (json!({"type": "integer"}), json!(rng.below(100_000) as i64 - 500)),
        2 => (json!({"type": "number"}), json!(rng.below(1000) as f64 / 8.0 - 3.0)),
        3 => (json!({"type": "boolean"}), json!(rng.below(2) == 0)),
        4 => (json!({"enum": ["up", "down", "up and away"]}), json!("up")),
        5 => (
            json!({"type": ["string", "null"]}),
            if rng.below(2) == 0 { word } else { Value::Null },
        ),
        6 => (json!({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 40}]}), word),
        7 => (json!({"type": "array", "items": {"type": "string"}}), json!([word, "x"])),
        8 => (
            json!({"type": "object", "properties": {"k": {"type": "string"}, "n": {"type": "integer"}}, "required": ["k"], "additionalProperties": false}),
            json!({"k": word, "n": 3}),
        ),
        9 => (
            json!({"type": "string", "pattern": "^[a-z]+[0-9]?$|x$"}),
            json!(*rng.pick(&["abc", "z9", "</x"])),
        ),
        10 => (json!({"type": "string", "format": "date"}), json!("2024-02-29")),
        11 => (json!({}), if rng.below(2) == 0 { word } else { json!([{"a": [1.5, null]}]) }),
        12 => (json!({"$ref": "#/$defs/level"}), json!(*rng.pick(&["low", "high"]))),
        _ => (
            json!({"enum": ["auto", 1, 2, null]}),
            rng.pick(&[json!("auto"), json!(2), Value::Null]).clone(),
        ),
    }
}

struct Case {
    tools: Vec<Tool>,
    calls: Vec<(String, Value)>,
}

fn case(rng: &mut Rng, strict: bool) -> Case {
    let names = ["get_weather", "f", "mcp__server-1__do.it", "Überlegen", "search web"];
    let mut tools = Vec::new();
    let mut values: Vec<Vec<(String, Value, bool)>> = Vec::new();
    for name in names.iter().take(1 + rng.below(names.len())) {
        let mut properties = Map::new();
        let mut required = Vec::new();
        let mut own = Vec::new();
        for i in 0..rng.below(5) {
            let key = ["city", "n", "arg_2", "日", "x.y"][i].to_owned();
            let (schema, value) = parameter(rng);
            let needed = rng.below(2) == 0;
            if needed {
                required.push(Value::from(key.clone()));
            }
            properties.insert(key.clone(), schema);
            own.push((key, value, needed));
        }
        let closed = rng.below(3) > 0;
        let mut parameters = json!({
            "type": "object", "properties": properties, "required": required,
            "$defs": {"level": {"enum": ["low", "high"]}}
        });
        if closed {
            parameters["additionalProperties"] = json!(false);
        } else if rng.below(2) == 0 {
            own.push(("more".into(), parameter_of_any(rng), false));
        }
        tools.push(Tool { name: (*name).to_owned(), parameters, strict });
        values.push(own);
    }
    let mut calls = Vec::new();
    for _ in 0..1 + rng.below(3) {
        let i = rng.below(tools.len());
        let mut arguments: Vec<_> =
            values[i].iter().filter(|(_, _, needed)| *needed || rng.below(2) == 0).collect();
        // Clients and models write arguments in any order.
        for j in (1..arguments.len()).rev() {
            arguments.swap(j, rng.below(j + 1));
        }
        let object: Map<String, Value> =
            arguments.into_iter().map(|(k, v, _)| (k.clone(), v.clone())).collect();
        calls.push((tools[i].name.clone(), Value::Object(object)));
    }
    Case { tools, calls }
}

fn parameter_of_any(rng: &mut Rng) -> Value {
    rng.pick(&[json!("free text"), json!(3), json!({"a": []}), Value::Null]).clone()
}

/// Whatever the encoder renders for random calls, the grammar accepts every byte of it.
#[test]
fn what_the_encoder_renders_is_accepted() {
    for seed in 0..150 {
        for small in [&*SMALL, &*PLAIN] {
            let mut rng = Rng::new(seed);
            let strict = rng.below(3) > 0;
            let Case { tools, calls } = case(&mut rng, strict);
            let text = *rng.pick(&WORDS);
            let choice = match rng.below(3) {
                0 => ToolChoice::Required,
                1 if calls.iter().all(|(name, _)| *name == calls[0].0) => {
                    ToolChoice::Named(calls[0].0.clone())
                }
                _ => ToolChoice::Auto,
            };
            // Only a free answer has text before its calls.
            let text = if choice == ToolChoice::Auto { text } else { "" };
            let parallel = calls.len() > 1;
            let (prompt, tokens) = rendered(small, text, &calls);
            assert!(
                prompt.starts_with(&format!("{text}\n\n<{DSML} calls>\n<{DSML} invoke name=\""))
            );
            let spec = ToolCalls { tools, choice, parallel, opened: false };
            let context = format!("seed {seed}: {spec:?}\n{prompt}");
            let grammar = small
                .compile(GrammarSpec::ToolCalls(spec.clone()))
                .unwrap_or_else(|e| panic!("{e}\n{context}"));
            let mut matcher = grammar.matcher(None).unwrap();
            let taken = matcher.validate(&tokens).unwrap();
            assert_eq!(
                taken,
                tokens.len(),
                "stuck before {:?}\n{context}",
                String::from_utf8_lossy(&small.text(&tokens[taken..]))
            );
            matcher.replay(&tokens).unwrap();
            assert!(matcher.is_finished(), "{context}");
            matcher.accept(small.eos).unwrap();
            // The prompt of a required call already holds the opening.
            if spec.choice != ToolChoice::Auto {
                let opening = if small.vocabulary.special(DSML).is_some() {
                    3 + 1 + 8
                } else {
                    3 + DSML.len() + 8
                };
                let opened = ToolCalls { opened: true, ..spec };
                let mut matcher = small.matcher(GrammarSpec::ToolCalls(opened));
                matcher.replay(&tokens[opening..]).unwrap_or_else(|e| panic!("{e}\n{context}"));
                assert!(matcher.is_finished());
            }
        }
    }
}

/// Reads an answer back: its text, and name and arguments of every call.
fn read(answer: &str) -> (String, Vec<(String, Value)>) {
    let Some((text, block)) = answer.split_once(&format!("\n\n<{DSML} calls>\n")) else {
        return (answer.to_owned(), Vec::new());
    };
    let block = block.strip_suffix(&format!("\n</{DSML} calls>")).expect("the block ends");
    let mut calls = Vec::new();
    for call in block.split(&format!("<{DSML} invoke name=\"")).skip(1) {
        let (name, rest) = call.split_once("\">\n").unwrap();
        let body =
            rest.trim_end_matches('\n').strip_suffix(&format!("\n</{DSML} invoke>")).unwrap();
        let mut arguments = Map::new();
        for parameter in body.split(&format!("<{DSML} parameter name=\"")).skip(1) {
            let (key, rest) = parameter.split_once("\" string=\"").unwrap();
            let (flag, rest) = rest.split_once("\">").unwrap();
            let value =
                rest.trim_end_matches('\n').strip_suffix(&format!("</{DSML} parameter>")).unwrap();
            let value = match flag {
                "true" => Value::from(value),
                _ => serde_json::from_str(value).unwrap_or_else(|e| panic!("{value:?}: {e}")),
            };
            assert!(
                arguments.insert(key.to_owned(), value).is_none() || key == "more",
                "{key} twice"
            );
        }
        calls.push((name.to_owned(), Value::Object(arguments)));
    }
    (text.to_owned(), calls)
}

/// Random answers drawn from the masks are calls of listed tools with arguments that validate.
#[test]
fn what_is_written_are_valid_calls() {
    let (mut ended, mut made) = (0, 0);
    for seed in 0..150 {
        let mut rng = Rng::new(seed + 5000);
        let Case { mut tools, .. } = case(&mut rng, true);
        for tool in &mut tools {
            tool.parameters["additionalProperties"] = json!(false);
        }
        let parallel = rng.below(2) == 0;
        let choice = match rng.below(3) {
            0 => ToolChoice::Required,
            1 => ToolChoice::Named(tools[0].name.clone()),
            _ => ToolChoice::Auto,
        };
        let spec =
            ToolCalls { tools: tools.clone(), choice: choice.clone(), parallel, opened: false };
        let mut matcher = SMALL.matcher(GrammarSpec::ToolCalls(spec));
        let Some(tokens) = write(&mut matcher, &SMALL.vocabulary, &SMALL.bytes, &mut rng, 60)
        else {
            continue;
        };
        ended += 1;
        let answer = String::from_utf8(SMALL.text(&tokens)).unwrap();
        let (_, calls) = read(&answer);
        if choice != ToolChoice::Auto {
            assert!(!calls.is_empty(), "{answer}");
        }
        assert!(parallel || calls.len() <= 1, "{answer}");
        for (name, arguments) in calls {
            made += 1;
            if let ToolChoice::Named(only) = &choice {
                assert_eq!(name, *only);
            }
            let tool = tools.iter().find(|t| t.name == name).expect("a listed tool");
            let validator = jsonschema::options()
                .should_validate_formats(true)
                .build(&tool.parameters)
                .unwrap();
            let why: Vec<String> =
                validator.iter_errors(&arguments).map(|e| e.to_string()).collect();
            assert!(why.is_empty(), "{answer}\n{}\n{why:?}", tool.parameters);
        }
    }
    assert!(ended > 75 && made > 50, "{ended} answers ended, with {made} calls");
}

fn tool(name: &str, parameters: Value) -> Tool {
    Tool { name: name.into(), parameters, strict: true }
}

fn required(tools: Vec<Tool>) -> GrammarSpec {
    GrammarSpec::ToolCalls(ToolCalls {
        tools,
        choice: ToolChoice::Required,
        parallel: false,
        opened: true,
    })
}

/// One call of tool f with these arguments, spelled by hand.
fn call(body: &str) -> Vec<u32> {
    let text = format!("<{DSML} invoke name=\"f\">\n{body}\n</{DSML} invoke>\n</{DSML} calls>");
    let mut tokens = Vec::new();
    for (i, part) in text.split(DSML).enumerate() {
        if i > 0 {
            tokens.push(SMALL.dsml);
        }
        tokens.extend(byte_tokens(part));
    }
    tokens
}

fn argument(key: &str, string: bool, value: &str) -> String {
    format!("<{DSML} parameter name=\"{key}\" string=\"{string}\">{value}</{DSML} parameter>")
}

#[test]
fn arguments_follow_the_schema() {
    let parameters = json!({
        "type": "object",
        "properties": {
            "a": {"type": "integer", "minimum": 0},
            "b": {"type": "string", "minLength": 2, "maxLength": 3},
            "c": {"enum": ["x", 1]}
        },
        "required": ["a"],
        "additionalProperties": false
    });
    let grammar = SMALL.compile(required(vec![tool("f", parameters)])).unwrap();
    let a = argument("a", false, "1");
    let b = argument("b", true, "日本");
    let accepts = |body: &str| grammar.matcher(None).unwrap().replay(&call(body)).is_ok();
    assert!(accepts(&a));
    assert!(accepts(&format!("{a}\n{b}")) && accepts(&format!("{b}\n{a}")), "any order");
    assert!(!accepts("") && !accepts(&b), "a is required");
    assert!(!accepts(&format!("{a}\n{a}")), "each once");
    assert!(!accepts(&argument("a", true, "1")), "an integer is no text");
    assert!(!accepts(&argument("a", false, "-1")));
    assert!(!accepts(&format!("{a}\n{}", argument("b", true, "x"))), "too short");
    assert!(!accepts(&format!("{a}\n{}", argument("b", false, "\"xx\""))), "text has no quotes");
    assert!(accepts(&format!("{a}\n{}", argument("c", true, "x"))));
    assert!(accepts(&format!("{a}\n{}", argument("c", false, "1"))));
    assert!(!accepts(&format!("{a}\n{}", argument("c", false, "2"))));
    assert!(!accepts(&format!("{a}\n{}", argument("d", false, "2"))), "not listed");
    assert!(!accepts(&format!("{a}{b}")) && !accepts(&format!("{a}\n\n{b}")), "one line break");
}

/// Text that spells the closing tag with ordinary tokens is part of the value, as it is for the
/// encoder and the output parser.
#[test]
fn the_tag_as_text_is_text() {
    let parameters =
        json!({"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]});
    let mut matcher = SMALL.matcher(required(vec![tool("f", parameters)]));
    let spelled = format!("</{DSML} parameter>");
    let arguments = json!({"s": spelled});
    let (_, tokens) = rendered(&SMALL, "", &[("f".into(), arguments)]);
    matcher.replay(&tokens[12..]).unwrap();
    assert!(matcher.is_finished());
}

#[test]
fn refused_tools() {
    let closed = json!({"type": "object", "additionalProperties": false});
    let refused = |tools: Vec<Tool>, choice: ToolChoice| {
        let spec = ToolCalls { tools, choice, parallel: true, opened: false };
        SMALL.compile(GrammarSpec::ToolCalls(spec)).map(|_| ()).unwrap_err()
    };
    assert_eq!(
        refused(vec![], ToolChoice::Auto),
        CompileError::Empty { what: "the list of tools" }
    );
    let twice = vec![tool("f", closed.clone()), tool("f", closed.clone())];
    assert!(
        matches!(refused(twice, ToolChoice::Auto), CompileError::BadTool { name, .. } if name == "f")
    );
    let named = ToolChoice::Named("g".into());
    let one = vec![tool("f", closed.clone())];
    assert!(matches!(refused(one, named), CompileError::BadTool { name, .. } if name == "g"));
    for name in ["", "a\"b", "a\nb"] {
        let error = refused(vec![tool(name, closed.clone())], ToolChoice::Auto);
        assert!(matches!(error, CompileError::BadTool { .. }), "{name:?}: {error:?}");
    }
    let cases = [
        (json!({"type": "string"}), "", "type"),
        (
            json!({"type": "object", "properties": {"p": {"type": "string", "not": {}}}}),
            "/properties/p",
            "not",
        ),
        (
            json!({"type": "object", "properties": {"p": {"items": {"contains": {}}}}}),
            "/properties/p/items",
            "contains",
        ),
        (json!({"type": "object", "anyOf": [{"required": ["a"]}]}), "", "anyOf"),
    ];
    for (parameters, path, keyword) in cases {
        let error = refused(vec![tool("f", parameters)], ToolChoice::Required);
        let CompileError::Tool { name, error } = error else { panic!("{error:?}") };
        assert_eq!(name, "f");
        assert!(
            matches!(&*error, CompileError::Unsupported { path: p, keyword: k, .. }
            if p == path && k == keyword),
            "{error:?}"
        );
    }
    // Without strict, the schema is the model's guide only.
    let loose = Tool { name: "f".into(), parameters: json!({"not": {}}), strict: false };
    let spec =
        ToolCalls { tools: vec![loose], choice: ToolChoice::Auto, parallel: true, opened: false };
    assert!(SMALL.compile(GrammarSpec::ToolCalls(spec)).is_ok());
}
