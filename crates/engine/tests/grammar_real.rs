//! Grammars over the real tokenizer's 129,280 tokens.

mod files;
mod grammar_util;

use std::sync::{Arc, LazyLock};

use deepinfer::grammar::{
    Compiler, CompilerLimits, GrammarSpec, GrammarVocabulary, Tool, ToolCalls, ToolChoice, Trigger,
};
use deepinfer::tokenizer::Tokenizer;
use deepseek_recipe_core::conversation::Conversation;
use deepseek_recipe_core::messages::{InputMessage, ToolCall};
use deepseek_recipe_core::prompt::Prompt;
use deepseek_recipe_encoding::PromptEncoding;
use deepseek_recipe_encoding::dsv41::DeepseekV41Encoding;
use grammar_util::{Rng, allows, mask, write};
use serde_json::{Value, json};

/// Ids of the model; the tokenizer has as many.
const SIZE: usize = 129_280;

struct Real {
    tokenizer: Tokenizer,
    vocabulary: Arc<GrammarVocabulary>,
    compiler: Compiler,
}

static REAL: LazyLock<Real> = LazyLock::new(|| {
    let tokenizer = Tokenizer::from_bytes(files::real_tokenizer()).unwrap();
    let eos = tokenizer.eos().unwrap();
    let vocabulary = GrammarVocabulary::of_tokenizer(&tokenizer, SIZE, &[eos]).unwrap();
    let compiler = Compiler::new(vocabulary.clone(), CompilerLimits::default());
    Real { tokenizer, vocabulary, compiler }
});

fn bytes() -> Vec<Vec<u8>> {
    (0..SIZE as u32).map(|id| REAL.tokenizer.token_bytes(id).to_vec()).collect()
}

#[test]
fn random_documents_validate() {
    let path = files::testdata("schemas.json");
    let corpus: Vec<Value> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let bytes = bytes();
    let mut written = 0;
    for (i, entry) in corpus.iter().enumerate().skip(3).step_by(6) {
        if entry["draft4"] == true || entry["draft7"] == true {
            continue;
        }
        let schema = &entry["schema"];
        let grammar = REAL.compiler.compile(GrammarSpec::JsonSchema(schema.clone())).unwrap();
        let mut matcher = grammar.matcher(None).unwrap();
        let mut rng = Rng::new(i as u64);
        let Some(tokens) = write(&mut matcher, &REAL.vocabulary, &bytes, &mut rng, 12) else {
            continue;
        };
        let text: Vec<u8> = tokens.iter().flat_map(|&t| bytes[t as usize].clone()).collect();
        let text = String::from_utf8(text).unwrap();
        let Ok(document) = serde_json::from_str::<Value>(&text) else {
            // A number such as 1e999 is JSON that this reader does not hold.
            assert!(text.contains(['e', 'E']), "{}: {text}", entry["name"]);
            continue;
        };
        let validator = jsonschema::options()
            .with_draft(jsonschema::Draft::Draft202012)
            .should_validate_formats(true)
            .build(schema)
            .unwrap();
        assert!(validator.is_valid(&document), "{}: {text}", entry["name"]);
        written += 1;
    }
    assert!(written >= 20, "{written}");
}

/// Calls of earlier turns, in the tokens that the prompt has.
#[test]
fn rendered_calls_are_accepted() {
    let tools = vec![
        Tool {
            name: "write_file".into(),
            parameters: json!({"type": "object", "properties": {
                "path": {"type": "string"}, "content": {"type": "string"},
                "mode": {"enum": ["create", "append"]}, "retries": {"type": "integer"},
                "tags": {"type": ["array", "null"], "items": {"type": "string"}}},
                "required": ["path", "content"], "additionalProperties": false}),
            strict: true,
        },
        Tool { name: "note".into(), parameters: json!({}), strict: false },
    ];
    let calls: Vec<(&str, Value)> = vec![
        (
            "write_file",
            json!({"content": "a\n\n<b></b> </｜DSML｜ parameter>\n", "path": "/tmp/x y"}),
        ),
        ("note", json!({"text": "日本語 🙂", "n": 3, "deep": {"a": [1, {"b": null}]}})),
        (
            "write_file",
            json!({"path": "", "mode": "append", "tags": ["x", "\"y\""], "content": "}", "retries": -1}),
        ),
        ("note", json!({})),
    ];
    let calls: Vec<ToolCall> = calls
        .into_iter()
        .map(|(name, arguments)| ToolCall {
            id: "c".into(),
            name: name.into(),
            arguments: arguments.to_string(),
        })
        .collect();
    let messages = vec![
        InputMessage::User { content: Prompt::plain("q"), image_sources: Vec::new() },
        InputMessage::Assistant {
            content: "I will <write> it down.".into(),
            reasoning_content: None,
            tool_calls: Some(calls),
            prefix: false,
        },
    ];
    let conversation = Conversation { messages, thinking_mode: false, ..Conversation::default() };
    let rendered = DeepseekV41Encoding::new().render_conversation(&conversation);
    let ids =
        REAL.tokenizer.encode_with_specials(&rendered.prompt, &rendered.special_ranges).unwrap();
    let think_end = REAL.tokenizer.special_id("</think>").unwrap();
    let start = ids.iter().position(|&id| id == think_end).unwrap();
    let eos = REAL.tokenizer.eos().unwrap();
    let end = ids.iter().rposition(|&id| id == eos).unwrap();

    let spec = ToolCalls { tools, choice: ToolChoice::Auto, parallel: true, opened: false };
    let grammar = REAL.compiler.compile(GrammarSpec::ToolCalls(spec)).unwrap();
    // As after thinking: from the end of thinking on, to the end of the turn.
    let trigger = Arc::new(Trigger::new(vec![think_end], None).unwrap());
    let mut matcher = grammar.matcher(Some(trigger)).unwrap();
    assert_eq!(matcher.validate(&ids[start..=end]).unwrap(), end + 1 - start);
    for &id in &ids[start..end] {
        if matcher.is_active() {
            assert!(allows(&mask(&mut matcher, &REAL.vocabulary), id));
        }
        matcher.accept(id).unwrap();
    }
    assert!(matcher.is_finished());
    matcher.accept(eos).unwrap();
}

/// No text of a JSON document is a special token, whatever it looks like.
#[test]
fn special_tokens_are_never_text() {
    let grammar = REAL.compiler.compile(GrammarSpec::JsonObject).unwrap();
    let mut matcher = grammar.matcher(None).unwrap();
    matcher.replay(&REAL.tokenizer.encode("{\"a\": \"").unwrap()).unwrap();
    let inside = mask(&mut matcher, &REAL.vocabulary);
    for name in ["<think>", "</think>", "｜DSML｜", "<｜User｜>", "<｜image｜>"] {
        let id = REAL.tokenizer.special_id(name).unwrap();
        assert!(!allows(&inside, id), "{name}");
    }
    let spelled = REAL.tokenizer.encode("</think> <｜User｜>\"}").unwrap();
    assert_eq!(matcher.validate(&spelled).unwrap(), spelled.len());
    assert!(GrammarVocabulary::of_tokenizer(&REAL.tokenizer, 1000, &[1]).is_err());
}
