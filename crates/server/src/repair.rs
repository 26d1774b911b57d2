//! Tool-call arguments that are JSON, whatever the model writes.
//!
//! The output parser turns the markup of a call into pieces of a JSON object and trusts the values
//! that the markup marks as JSON. A model may mark bare text so, leave out quotes, or end in the
//! middle. Text passes through here as it comes; everything else waits until it is complete, and
//! what is no JSON becomes a JSON string.

use serde::de::IgnoredAny;

/// The arguments of one call.
#[derive(Debug, Default)]
pub struct Arguments {
    state: State,
    /// Names written so far.
    names: usize,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Start,
    Name(String),
    /// After the colon.
    Value,
    Text(Text),
    Json(String),
    AfterValue,
    End,
}

/// Inside a JSON string.
#[derive(Debug, Default)]
struct Text {
    /// The start of an escape whose end is still to come, without the backslash.
    escape: Option<String>,
}

impl Arguments {
    /// Takes the parser's next piece; returns what the arguments grow by.
    pub fn push(&mut self, piece: &str) -> String {
        let mut out = String::new();
        match (&mut self.state, piece) {
            (State::Start, "{}") => {
                out.push_str("{}");
                self.state = State::End;
            }
            (State::Start, _) => {
                out.push('{');
                self.state = State::Name(String::new());
            }
            (State::Name(name), ": ") => {
                self.names += 1;
                let name = std::mem::take(name);
                out.push_str(&as_string(&name));
                out.push_str(": ");
                self.state = State::Value;
            }
            (State::Name(name), _) => name.push_str(piece),
            // The parser opens text with a piece of its own; JSON that is a string comes as any
            // other JSON.
            (State::Value, "\"") => {
                out.push('"');
                self.state = State::Text(Text::default());
            }
            (State::Value, _) => {
                self.state = State::Json(String::new());
                out.push_str(&self.push(piece));
            }
            (State::Text(_), _) => out.push_str(&self.push_text(piece)),
            (State::Json(json), ", " | "}") if is_complete(json) => {
                out.push_str(&as_value(json));
                out.push_str(&self.after_value(piece));
            }
            (State::Json(json), _) => json.push_str(piece),
            (State::AfterValue, ", " | "}") => out.push_str(&self.after_value(piece)),
            (State::AfterValue | State::End, _) => {}
        }
        out
    }

    fn after_value(&mut self, piece: &str) -> String {
        self.state = match piece {
            "}" => State::End,
            _ => State::Name(String::new()),
        };
        piece.to_owned()
    }

    /// Characters of a JSON string up to the quote that ends it. Characters that a JSON string
    /// cannot hold as they are get escaped.
    fn push_text(&mut self, piece: &str) -> String {
        let State::Text(text) = &mut self.state else { return String::new() };
        let mut out = String::new();
        for character in piece.chars() {
            if let Some(mut escape) = text.escape.take() {
                escape.push(character);
                match escape_kind(&escape) {
                    Escape::Open => text.escape = Some(escape),
                    Escape::Valid => out.push_str(&format!("\\{escape}")),
                    Escape::Broken => out.push_str(&broken(&escape)),
                }
                continue;
            }
            match character {
                '\\' => text.escape = Some(String::new()),
                '"' => {
                    out.push('"');
                    self.state = State::AfterValue;
                    break;
                }
                control if control < ' ' => {
                    out.push_str(&format!("\\u{:04x}", u32::from(control)));
                }
                _ => out.push(character),
            }
        }
        out
    }

    /// Ends the arguments, complete or not; returns what they grow by.
    pub fn finish(&mut self) -> String {
        let state = std::mem::replace(&mut self.state, State::End);
        match state {
            State::Start => "{}".into(),
            State::End => String::new(),
            State::AfterValue => "}".into(),
            State::Value => "null}".into(),
            State::Text(text) => {
                let escape = text.escape.map(|escape| broken(&escape)).unwrap_or_default();
                format!("{escape}\"}}")
            }
            State::Json(json) => {
                // The bracket that closes the object is part of what waits.
                let value = json.strip_suffix('}').filter(|_| !is_json(&json)).unwrap_or(&json);
                format!("{}}}", as_value(value))
            }
            State::Name(name) if name.trim().is_empty() && self.names == 0 => "}".into(),
            State::Name(name) => format!("{}: null}}", as_string(&name)),
        }
    }
}

enum Escape {
    Open,
    Valid,
    Broken,
}

/// What the characters after a backslash are.
fn escape_kind(escape: &str) -> Escape {
    let Some(digits) = escape.strip_prefix('u') else {
        let known = matches!(escape, "\"" | "\\" | "/" | "b" | "f" | "n" | "r" | "t");
        return if known { Escape::Valid } else { Escape::Broken };
    };
    match (digits.len(), u32::from_str_radix(digits, 16)) {
        (0, _) => Escape::Open,
        (_, Err(_)) => Escape::Broken,
        (4, Ok(code)) if char::from_u32(code).is_some() => Escape::Valid,
        (4, Ok(_)) => Escape::Broken,
        _ => Escape::Open,
    }
}

/// A backslash that escapes nothing, as text.
fn broken(escape: &str) -> String {
    let text = serde_json::Value::from(format!("\\{escape}")).to_string();
    text[1..text.len() - 1].to_owned()
}

/// Whether a value that is not text may end here.
fn is_complete(json: &str) -> bool {
    is_json(json) || !json.trim_start().starts_with(['{', '[', '"'])
}

fn is_json(text: &str) -> bool {
    serde_json::from_str::<IgnoredAny>(text).is_ok()
}

fn as_value(text: &str) -> String {
    match is_json(text) {
        true => text.to_owned(),
        false => serde_json::Value::from(unquoted(text.trim())).to_string(),
    }
}

/// What stands in quotes, if quotes stand around it.
fn unquoted(text: &str) -> &str {
    text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).unwrap_or(text)
}

/// A name in quotes, or one whose quotes are missing or broken.
fn as_string(text: &str) -> String {
    match serde_json::from_str::<String>(text) {
        Ok(_) => text.trim().to_owned(),
        Err(_) => serde_json::Value::from(unquoted(text.trim())).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn joined(pieces: &[&str]) -> Value {
        let mut arguments = Arguments::default();
        let mut text: String = pieces.iter().map(|piece| arguments.push(piece)).collect();
        text.push_str(&arguments.finish());
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{text:?}: {e}"))
    }

    #[test]
    fn valid_arguments_pass_unchanged() {
        let pieces = [
            "{", "\"a", "b\"", ": ", "\"", "x \\\" y", "\"", ", ", "\"c\"", ": ", "[1, ", "2]", "}",
        ];
        assert_eq!(joined(&pieces), json!({"ab": "x \" y", "c": [1, 2]}));
        assert_eq!(joined(&["{}"]), json!({}));
        let nested = ["{", "\"c\"", ": ", "{\"d\"", ": ", "1", ", ", "\"e\": 2", "}", "}"];
        assert_eq!(joined(&nested), json!({"c": {"d": 1, "e": 2}}));
    }

    #[test]
    fn text_that_is_marked_as_json_becomes_text() {
        let pieces = ["{", "\"unit\"", ": ", "celsius", ", ", "\"n\"", ": ", "1e3", "}"];
        assert_eq!(joined(&pieces), json!({"unit": "celsius", "n": 1e3}));
        assert_eq!(joined(&["{", "\"a\"", ": ", "[1, oops", "}"]), json!({"a": "[1, oops"}));
        assert_eq!(joined(&["{", "\"a\"", ": ", "\"raw\nline\"", "}"]), json!({"a": "raw\nline"}));
        assert_eq!(joined(&["{", "plain", ": ", "1", "}"]), json!({"plain": 1}));
    }

    #[test]
    fn arguments_that_break_off_are_closed() {
        assert_eq!(joined(&[]), json!({}));
        assert_eq!(joined(&["{"]), json!({}));
        assert_eq!(joined(&["{", "\"a\""]), json!({"a": null}));
        assert_eq!(joined(&["{", "\"a\"", ": "]), json!({"a": null}));
        assert_eq!(joined(&["{", "\"a\"", ": ", "\"", "te"]), json!({"a": "te"}));
        assert_eq!(joined(&["{", "\"a\"", ": ", "1"]), json!({"a": 1}));
        assert_eq!(joined(&["{", "\"a\"", ": ", "1", ", "]), json!({"a": 1, "": null}));
    }

    proptest! {
        #[test]
        fn any_pieces_give_json(
            pieces in prop::collection::vec(
                prop_oneof![
                    Just("{".to_owned()), Just("}".into()), Just("{}".into()), Just(": ".into()),
                    Just(", ".into()), Just("\"".into()), Just("\\".into()), "[a-z\"\\\\ \n]{0,4}",
                ],
                0..20,
            )
        ) {
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            joined(&pieces);
        }
    }
}
