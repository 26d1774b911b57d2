//! Strings without quotes: the part of a schema that is a string, as a Lark terminal.

use regex_syntax::hir::{Hir, HirKind, Look};
use serde_json::Value;

use crate::grammar::error::CompileError;
use crate::grammar::lower::quote;
use crate::grammar::schema::{Document, string_format};

/// Most alternatives before a combination of unions is refused.
const MAX_ALTERNATIVES: usize = 64;
/// References are followed this deep; the schema was checked for endless ones.
const DEPTH: usize = 32;

/// One way to be a string: all of these hold.
#[derive(Debug, Clone, Default)]
struct Text {
    /// One of these, if given.
    literals: Option<Vec<String>>,
    /// Matches each of these whole (Lark regular expressions).
    expressions: Vec<String>,
    least: u64,
    most: Option<u64>,
}

/// The strings that match `schema`, as the body of a terminal; `None` where there are none.
pub(super) fn terminal(
    root: &Value,
    schema: &Value,
    path: &str,
) -> Result<Option<String>, CompileError> {
    let reader = Reader { root, path };
    let mut options = Vec::new();
    for text in reader.read(schema, DEPTH)? {
        options.extend(text.write());
    }
    Ok((!options.is_empty()).then(|| options.join(" | ")))
}

impl Text {
    fn and(&self, other: &Self) -> Self {
        let literals = match (&self.literals, &other.literals) {
            (Some(a), Some(b)) => Some(a.iter().filter(|x| b.contains(x)).cloned().collect()),
            (a, b) => a.clone().or_else(|| b.clone()),
        };
        Self {
            literals,
            expressions: [&self.expressions[..], &other.expressions[..]].concat(),
            least: self.least.max(other.least),
            most: match (self.most, other.most) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            },
        }
    }

    fn write(&self) -> Option<String> {
        let mut parts = Vec::new();
        let mut sized = self.least > 0 || self.most.is_some();
        if let Some(literals) = &self.literals {
            let fits = |text: &&String| {
                let length = text.chars().count() as u64;
                length >= self.least && self.most.is_none_or(|most| length <= most)
            };
            let quoted: Vec<String> = literals.iter().filter(fits).map(|t| quote(t)).collect();
            if quoted.is_empty() {
                return None;
            }
            parts.push(format!("({})", quoted.join(" | ")));
            sized = false;
        }
        parts.extend(self.expressions.iter().map(|e| format!("/{e}/")));
        if sized {
            let most = self.most.map_or_else(String::new, |most| most.to_string());
            parts.push(format!("/(?s:.{{{},{most}}})/", self.least));
        }
        if parts.is_empty() {
            parts.push("/(?s:.*)/".to_owned());
        }
        Some(parts.join(" & "))
    }
}

struct Reader<'a> {
    root: &'a Value,
    path: &'a str,
}

impl Reader<'_> {
    fn read(&self, schema: &Value, depth: usize) -> Result<Vec<Text>, CompileError> {
        let map = match schema {
            Value::Bool(false) => return Ok(Vec::new()),
            Value::Object(map) if depth > 0 => map,
            _ => return Ok(vec![Text::default()]),
        };
        let names = match map.get("type") {
            Some(Value::Array(list)) => list.as_slice(),
            Some(one) => std::slice::from_ref(one),
            None => &[],
        };
        if !names.is_empty() && !names.iter().any(|n| n == "string") {
            return Ok(Vec::new());
        }
        let mut own = Text::default();
        let only_strings = |list: &[Value]| {
            list.iter().filter_map(|v| v.as_str().map(str::to_owned)).collect::<Vec<_>>()
        };
        if let Some(value) = map.get("const") {
            own.literals = Some(only_strings(std::slice::from_ref(value)));
        }
        if let Some(Value::Array(list)) = map.get("enum") {
            own = own.and(&Text { literals: Some(only_strings(list)), ..Text::default() });
        }
        let count = |keyword: &str| map.get(keyword).and_then(Value::as_f64).map(|n| n as u64);
        own.least = count("minLength").unwrap_or(0);
        own.most = count("maxLength");
        if let Some(pattern) = map.get("pattern").and_then(Value::as_str) {
            own.expressions.push(self.whole(pattern)?);
        }
        if let Some(format) = map.get("format").and_then(Value::as_str).and_then(string_format) {
            own.expressions.push(llguidance::regex_to_lark(&format, "dw"));
        }
        let mut found = vec![own];
        for keyword in ["anyOf", "oneOf"] {
            if let Some(Value::Array(list)) = map.get(keyword) {
                let mut any = Vec::new();
                for schema in list {
                    any.extend(self.read(schema, depth - 1)?);
                }
                found = self.product(&found, &any)?;
            }
        }
        if let Some(Value::Array(list)) = map.get("allOf") {
            for schema in list {
                found = self.product(&found, &self.read(schema, depth - 1)?)?;
            }
        }
        if let Some(reference) = map.get("$ref").and_then(Value::as_str) {
            let pointer = Document::pointer(reference).unwrap_or_default();
            let target = self.root.pointer(&pointer).unwrap_or(&Value::Bool(true));
            found = self.product(&found, &self.read(target, depth - 1)?)?;
        }
        Ok(found)
    }

    fn product(&self, a: &[Text], b: &[Text]) -> Result<Vec<Text>, CompileError> {
        if a.len() * b.len() > MAX_ALTERNATIVES {
            return Err(CompileError::Unsupported {
                path: self.path.to_owned(),
                keyword: "anyOf".to_owned(),
                reason: "too many combinations of string alternatives".to_owned(),
            });
        }
        Ok(a.iter().flat_map(|x| b.iter().map(|y| x.and(y))).collect())
    }

    /// A pattern of JSON schema may match anywhere; this one matches the whole string.
    fn whole(&self, pattern: &str) -> Result<String, CompileError> {
        let refused = |reason: String| CompileError::BadPattern {
            path: self.path.to_owned(),
            pattern: pattern.to_owned(),
            reason,
        };
        let ascii = llguidance::regex_to_lark(pattern, "dw");
        let hir = regex_syntax::Parser::new().parse(&ascii).map_err(|e| refused(e.to_string()))?;
        let branches = match hir.kind() {
            HirKind::Alternation(branches) => branches.clone(),
            _ => vec![hir],
        };
        let mut parts = Vec::new();
        for branch in &branches {
            parts.push(anchored(branch).ok_or_else(|| {
                refused(
                    "^ and $ are understood only at the ends of a pattern or alternative"
                        .to_owned(),
                )
            })?);
        }
        Ok(llguidance::regex_to_lark(&parts.join("|"), ""))
    }
}

/// Text that matches where one alternative is found somewhere.
fn anchored(branch: &Hir) -> Option<String> {
    let parts = match branch.kind() {
        HirKind::Concat(parts) => parts.clone(),
        _ => vec![branch.clone()],
    };
    let is = |part: &Hir, look| *part.kind() == HirKind::Look(look);
    let start = parts.iter().take_while(|p| is(p, Look::Start)).count();
    let end = parts[start..].iter().rev().take_while(|p| is(p, Look::End)).count();
    let middle = &parts[start..parts.len() - end];
    if middle.iter().any(|part| !part.properties().look_set().is_empty()) {
        return None;
    }
    let body: String = middle.iter().map(|part| format!("(?:{part})")).collect();
    let any = |anchored: bool| if anchored { "" } else { "(?s:.*)" };
    Some(format!("(?:{}{body}{})", any(start > 0), any(end > 0)))
}
