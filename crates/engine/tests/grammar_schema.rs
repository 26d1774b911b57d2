//! The schema corpus: whatever a grammar lets through validates, and what it must let through it
//! does.

mod grammar_util;

use deepinfer::grammar::GrammarSpec;
use grammar_util::{Rng, SMALL, accepts, write};
use serde_json::Value;

fn corpus() -> Vec<Value> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/schemas.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn validator(entry: &Value) -> jsonschema::Validator {
    let draft = if entry["draft4"] == true {
        jsonschema::Draft::Draft4
    } else if entry["draft7"] == true {
        jsonschema::Draft::Draft7
    } else {
        jsonschema::Draft::Draft202012
    };
    let mut options = jsonschema::options().should_validate_formats(true);
    if entry["schema"].get("$schema").is_none() {
        options = options.with_draft(draft);
    }
    options.build(&entry["schema"]).unwrap_or_else(|e| panic!("{}: {e}", entry["name"]))
}

#[test]
fn the_corpus_covers_every_keyword() {
    let corpus = corpus();
    assert!(corpus.len() >= 150, "{}", corpus.len());
    let text = serde_json::to_string(&corpus).unwrap();
    for keyword in [
        "type",
        "enum",
        "const",
        "properties",
        "required",
        "additionalProperties",
        "items",
        "prefixItems",
        "minItems",
        "maxItems",
        "pattern",
        "format",
        "minLength",
        "maxLength",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "anyOf",
        "oneOf",
        "allOf",
        "$ref",
        "$defs",
        "patternProperties",
        "minProperties",
        "maxProperties",
        "additionalItems",
        "uniqueItems",
        "definitions",
    ] {
        assert!(text.contains(&format!("\"{keyword}\":")), "{keyword} does not occur");
    }
}

/// More digits in a row than an f64 holds.
fn has_long_integer(text: &str) -> bool {
    text.split(|c: char| !c.is_ascii_digit()).any(|digits| digits.len() > 15)
}

/// Random documents, drawn token by token from the masks, validate.
#[test]
fn what_is_written_validates() {
    const SEEDS: u64 = 12;
    let mut failures = Vec::new();
    let (mut written, mut huge) = (0, 0);
    for (i, entry) in corpus().iter().enumerate() {
        let name = entry["name"].as_str().unwrap();
        let validator = validator(entry);
        let grammar = match SMALL.compile(GrammarSpec::JsonSchema(entry["schema"].clone())) {
            Ok(grammar) => grammar,
            Err(error) => {
                failures.push(format!("{name}: {error}"));
                continue;
            }
        };
        let mut ended = 0;
        for seed in 0..SEEDS {
            let mut rng = Rng::new(seed * 1000 + i as u64);
            let mut matcher = grammar.matcher(None).unwrap();
            let steps = 4 + rng.below(40);
            let Some(tokens) =
                write(&mut matcher, &SMALL.vocabulary, &SMALL.bytes, &mut rng, steps)
            else {
                continue;
            };
            ended += 1;
            let text = String::from_utf8(SMALL.text(&tokens)).unwrap();
            match serde_json::from_str::<Value>(&text) {
                Ok(document) if validator.is_valid(&document) => written += 1,
                // The validator calculates in f64.
                Ok(_) if has_long_integer(&text) => huge += 1,
                Ok(document) => {
                    let why = validator.iter_errors(&document).next().unwrap().to_string();
                    failures.push(format!("{name}: {text}: {why}"));
                }
                // JSON, but with a number beyond what this reader holds (1e999).
                Err(error) if error.to_string().contains("out of range") => huge += 1,
                Err(error) => failures.push(format!("{name}: {text}: {error}")),
            }
        }
        // "hard": random text does not stumble upon an ending that matches.
        if ended < SEEDS * 3 / 4 && entry["hard"] != true {
            failures.push(format!("{name}: only {ended} of {SEEDS} documents came to an end"));
        }
    }
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
    assert!(written > 1800 && huge < written / 100, "{written} written, {huge} with huge numbers");
}

/// The examples of the corpus: what must be let through is, byte for byte, and what must not is not.
#[test]
fn examples() {
    let mut failures = Vec::new();
    for entry in corpus() {
        let name = entry["name"].as_str().unwrap();
        let Ok(grammar) = SMALL.compile(GrammarSpec::JsonSchema(entry["schema"].clone())) else {
            failures.push(format!("{name}: refused"));
            continue;
        };
        let validator = validator(&entry);
        let texts = |key: &str| -> Vec<String> {
            serde_json::from_value(entry.get(key).cloned().unwrap_or(Value::Array(vec![]))).unwrap()
        };
        for text in texts("yes") {
            // The example itself must be right.
            let document: Value = serde_json::from_str(&text).unwrap();
            assert!(validator.is_valid(&document), "{name}: {text} is no example");
            if !accepts(&SMALL, &grammar, &text) {
                failures.push(format!("{name}: refuses {text}"));
            }
        }
        for text in texts("no") {
            if let Ok(document) = serde_json::from_str::<Value>(&text) {
                // Some formats bound more than the validator knows of.
                let wrong = !validator.is_valid(&document) || entry["narrower"] == true;
                assert!(wrong, "{name}: {text} is a valid example");
            }
            if accepts(&SMALL, &grammar, &text) {
                failures.push(format!("{name}: lets {text} through"));
            }
        }
    }
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}
