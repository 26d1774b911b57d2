//! Tool calls that a model wrote, in V4.1's markup.
//!
//! Where D is the token `｜DSML｜`, and a value is bare text if `string="true"`, JSON otherwise:
//!
//! ```text
//! <D calls>
//! <D invoke name="NAME">
//! <D parameter name="KEY" string="true">VALUE</D parameter>
//! <D parameter name="KEY" string="false">JSON</D parameter>
//! </D invoke>
//! </D calls>
//! ```
//!
//! A value may hold anything but that token, also text that is spelled like it.

use deepinfer::tokenizer::{Decoder, Tokenizer};
use serde::de::IgnoredAny;
use serde_json::Value;
use std::collections::BTreeSet;

/// How the token is spelled.
const DSML: &str = "｜DSML｜";

/// A tool call that a model wrote.
#[derive(Clone, Debug, PartialEq)]
pub struct Made {
    /// Name of the tool.
    pub name: String,
    /// Its arguments: the text of a JSON object. Values that the model wrote as JSON are in its own
    /// words, so that numbers keep all their digits.
    pub arguments: String,
}

/// Reads the tool calls at the end of a turn. `text` is the engine's text of `ids`; its answer begins
/// at byte `answer`. Returns what the answer says before the calls, which may be followed by white
/// space; `None` if there are no calls, or they are not complete and well formed.
pub fn tool_calls<'t>(
    tokenizer: &Tokenizer,
    ids: &[u32],
    text: &'t str,
    answer: usize,
) -> Option<(&'t str, Vec<Made>)> {
    let mut reader = Reader { text, at: answer, tokens: tokens(tokenizer, ids) };
    let before = reader.until("<")?;
    reader.take(" calls>")?;
    let mut calls = Vec::new();
    while reader.tag("<").is_some() {
        reader.take(" invoke name=\"")?;
        calls.push(reader.call()?);
    }
    reader.tag("</")?;
    reader.take(" calls>")?;
    (!calls.is_empty()).then_some((before, calls))
}

/// Bytes of the engine's text of `ids` at which the token begins. `None` if the tokenizer has no such
/// token: then it is text.
fn tokens(tokenizer: &Tokenizer, ids: &[u32]) -> Option<BTreeSet<usize>> {
    let token = tokenizer.special_id(DSML)?;
    let (mut decoder, mut text) = (Decoder::new(true), String::new());
    let mut found = BTreeSet::new();
    for &id in ids {
        decoder.push(tokenizer, id, &mut text);
        if id == token {
            found.insert(text.len().saturating_sub(DSML.len()));
        }
    }
    Some(found)
}

struct Reader<'t> {
    text: &'t str,
    /// Byte that comes next.
    at: usize,
    tokens: Option<BTreeSet<usize>>,
}

impl<'t> Reader<'t> {
    fn rest(&self) -> &'t str {
        self.text.get(self.at..).unwrap_or_default()
    }

    /// Takes exactly this.
    fn take(&mut self, what: &str) -> Option<()> {
        self.rest().starts_with(what).then(|| self.at += what.len())
    }

    /// Whether the token begins at byte `at`.
    fn is_token(&self, at: usize) -> bool {
        self.tokens.as_ref().is_none_or(|tokens| tokens.contains(&at))
    }

    /// Takes white space and the start of a tag: `open` and the token.
    fn tag(&mut self, open: &str) -> Option<()> {
        let start = self.at + self.rest().len() - self.rest().trim_start().len();
        let here = self.text.get(start..)?;
        let found = here.strip_prefix(open)?.starts_with(DSML) && self.is_token(start + open.len());
        found.then(|| self.at = start + open.len() + DSML.len())
    }

    /// Takes everything up to the next start of such a tag, and that start. Returns what is before.
    fn until(&mut self, open: &str) -> Option<&'t str> {
        let start = format!("{open}{DSML}");
        let found = self.rest().match_indices(&start).map(|(at, _)| at);
        let found = found.into_iter().find(|at| self.is_token(self.at + at + open.len()))?;
        let before = &self.rest()[..found];
        self.at += found + start.len();
        Some(before)
    }

    /// Takes a name and the quote that ends it.
    fn name(&mut self) -> Option<&'t str> {
        let (name, _) = self.rest().split_once('"')?;
        self.at += name.len() + 1;
        Some(name)
    }

    /// Takes a call, after the quote before its name.
    fn call(&mut self) -> Option<Made> {
        let name = self.name()?.to_owned();
        self.take(">")?;
        let mut arguments = Vec::new();
        while self.tag("<").is_some() {
            self.take(" parameter name=\"")?;
            let key = Value::from(self.name()?);
            self.take(" string=\"")?;
            let kind = self.name()?;
            self.take(">")?;
            let value = self.until("</")?;
            self.take(" parameter>")?;
            let value = match kind {
                "true" => Value::from(value).to_string(),
                "false" => serde_json::from_str::<IgnoredAny>(value)
                    .is_ok()
                    .then(|| value.trim().to_owned())?,
                _ => return None,
            };
            arguments.push(format!("{key}:{value}"));
        }
        self.tag("</")?;
        self.take(" invoke>")?;
        Some(Made { name, arguments: format!("{{{}}}", arguments.join(",")) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokenizer() -> Tokenizer {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/tiny-a/tokenizer.json");
        Tokenizer::from_bytes(std::fs::read(path).expect("it is there")).expect("it loads")
    }

    /// A call of `f` with this parameter.
    fn call(kind: bool, value: &str) -> String {
        format!(
            "<｜DSML｜ invoke name=\"f\">\n<｜DSML｜ parameter name=\"a\" string=\"{kind}\">{value}\
             </｜DSML｜ parameter>\n</｜DSML｜ invoke>\n"
        )
    }

    fn block(calls: &str) -> String {
        format!("Well.\n\n<｜DSML｜ calls>\n{calls}</｜DSML｜ calls>")
    }

    /// What is read out of a text whose special tokens are tokens.
    fn read(text: &str) -> Option<(String, Vec<Made>)> {
        let tokenizer = tokenizer();
        let ids = tokenizer.encode_scanning_specials(text).expect("it encodes");
        let (before, calls) = tool_calls(&tokenizer, &ids, text, 0)?;
        Some((before.to_owned(), calls))
    }

    fn made(arguments: &str) -> Made {
        Made { name: "f".into(), arguments: arguments.into() }
    }

    #[test]
    fn tool_calls_are_read_back() {
        let text = block(
            "<｜DSML｜ invoke name=\"set_timer\">\n\
             <｜DSML｜ parameter name=\"minutes\" string=\"false\">74</｜DSML｜ parameter>\n\
             <｜DSML｜ parameter name=\"label\" string=\"true\">tea</｜DSML｜ parameter>\n\
             </｜DSML｜ invoke>\n<｜DSML｜ invoke name=\"f\">\n\n</｜DSML｜ invoke>\n",
        );
        let timer =
            Made { name: "set_timer".into(), arguments: r#"{"minutes":74,"label":"tea"}"#.into() };
        assert_eq!(read(&text), Some(("Well.\n\n".into(), vec![timer, made("{}")])));
        assert_eq!(read("no calls here"), None);
        assert_eq!(read(&block("")), None);
    }

    /// A value ends at its closing tag, whatever it holds.
    #[test]
    fn values_are_whole() {
        for (kind, value, arguments) in [
            (true, "<p>hi</p>", r#"{"a":"<p>hi</p>"}"#),
            (true, "", r#"{"a":""}"#),
            (true, "\n x \n", r#"{"a":"\n x \n"}"#),
            (true, "x parameter name=\"y\"", r#"{"a":"x parameter name=\"y\""}"#),
            (true, "invoke name=\"g\">\n</ calls>", r#"{"a":"invoke name=\"g\">\n</ calls>"}"#),
            (false, r#"{"a":"</b>"}"#, r#"{"a":{"a":"</b>"}}"#),
            (false, r#" ["<b></b>", null]"#, r#"{"a":["<b></b>", null]}"#),
            (false, "12345678901234567890123", r#"{"a":12345678901234567890123}"#),
        ] {
            let expected = vec![made(arguments); 2];
            let text = block(&call(kind, value).repeat(2));
            assert_eq!(read(&text), Some(("Well.\n\n".into(), expected)), "{value}");
            serde_json::from_str::<Value>(arguments).expect("it is JSON");
        }
        assert_eq!(read(&block(&call(false, "{\"a\":"))), None);
    }

    /// Text that is spelled like the markup is text.
    #[test]
    fn only_tokens_are_markup() {
        let tokenizer = tokenizer();
        let spelled = format!("x{}", block(&call(true, "y")));
        let text = [spelled.as_str(), &block(&call(true, &spelled))].concat();
        let mut ids = Vec::new();
        for (i, part) in text.split(&spelled).enumerate() {
            if i > 0 {
                ids.extend(tokenizer.encode(&spelled).expect("it encodes"));
            }
            ids.extend(tokenizer.encode_scanning_specials(part).expect("it encodes"));
        }
        assert_eq!(tokenizer.decode(&ids), text);
        let arguments = format!("{{\"a\":{}}}", Value::from(spelled.as_str()));
        let expected = (format!("{spelled}Well.\n\n"), vec![made(&arguments)]);
        let (before, calls) = tool_calls(&tokenizer, &ids, &text, 0).expect("a call");
        assert_eq!((before.to_owned(), calls), expected);
        // The answer alone counts.
        let calls = tool_calls(&tokenizer, &ids, &text, spelled.len() + 1).expect("a call");
        assert_eq!(calls.0, "ell.\n\n");
        let plain = tokenizer.encode(&text).expect("it encodes");
        assert_eq!(tool_calls(&tokenizer, &plain, &text, 0), None);
    }

    #[test]
    fn calls_that_were_cut_off_are_none() {
        let calls = [call(true, "<p>hi</p>"), call(false, r#"{"a":"</b>"}"#)];
        let text = block(&calls.concat());
        for end in (0..text.len()).filter(|&end| text.is_char_boundary(end)) {
            assert_eq!(read(&text[..end]), None, "{}", &text[..end]);
        }
        assert_eq!(read(&text).map(|(_, calls)| calls.len()), Some(2));
    }
}
