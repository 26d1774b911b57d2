//! Tasks: files of JSON lines, compressed with gzip or not.

use crate::conversation::{Message, Tool};
use anyhow::{Context, Result};
use flate2::read::GzDecoder;
use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::Path;

/// One question.
#[derive(Clone, Debug, Deserialize)]
pub struct Item {
    /// Name, for messages.
    pub id: String,
    /// Which task it belongs to.
    pub task: String,
    /// Whether the model thinks first.
    pub thinking: bool,
    /// How thoroughly.
    #[serde(default)]
    pub effort: Option<String>,
    #[serde(rename = "messages")]
    raw_messages: Vec<Value>,
    #[serde(skip)]
    pub messages: Vec<Message>,
    /// Tools that may be called.
    #[serde(default)]
    pub tools: Vec<Tool>,
    /// `json_object`, or nothing.
    #[serde(default)]
    pub response_format: Option<String>,
    /// How the answer is judged.
    pub score: Score,
    /// The right answer.
    pub expected: Value,
    /// Most tokens to produce.
    pub max_tokens: usize,
    /// Part of the quick suite.
    #[serde(default)]
    pub quick: bool,
}

/// How an answer is judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Score {
    /// The text is the expected one.
    Exact,
    /// Both are the same JSON value.
    Json,
    /// One call of the expected tool with the expected arguments.
    ToolCall,
    /// Not at all: free text, for measuring drafts.
    None,
}

impl Item {
    /// Whether a message holds an image.
    pub fn has_image(&self) -> bool {
        self.raw_messages.iter().any(|m| {
            let parts = m["content"].as_array();
            parts.is_some_and(|parts| parts.iter().any(|p| p["type"] == "image_url"))
        })
    }

    /// Whether the answer is text that drafting is measured on.
    pub fn draws_text(&self) -> bool {
        matches!(self.score, Score::None | Score::Json)
    }
}

/// Reads every `.jsonl` and `.jsonl.gz` file of a folder.
pub fn read_folder(folder: &Path) -> Result<Vec<Item>> {
    let entries =
        std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut paths: Vec<_> = entries.filter_map(Result::ok).map(|e| e.path()).collect();
    paths.sort();
    let mut items = Vec::new();
    for path in paths {
        let name = path.to_string_lossy().into_owned();
        if is_tasks(&name) {
            let content = std::fs::read(&path).with_context(|| format!("cannot read {name}"))?;
            items.extend(read(&name, &content)?);
        }
    }
    Ok(items)
}

/// Reads files inside this program.
pub fn read_embedded(files: &[(&str, &[u8])]) -> Result<Vec<Item>> {
    let mut items = Vec::new();
    for (name, content) in files.iter().filter(|(name, _)| is_tasks(name)) {
        items.extend(read(name, content)?);
    }
    Ok(items)
}

/// The items of these tasks, or all if none is named.
///
/// # Errors
/// If there is no task of a name.
pub fn only(mut items: Vec<Item>, names: &[String]) -> Result<Vec<Item>, String> {
    let there: BTreeSet<&str> = items.iter().map(|item| item.task.as_str()).collect();
    if let Some(name) = names.iter().find(|name| !there.contains(name.as_str())) {
        let there: Vec<&str> = there.into_iter().collect();
        return Err(format!("--only: there is no task {name:?}; tasks: {}", there.join(", ")));
    }
    items.retain(|item| names.is_empty() || names.contains(&item.task));
    Ok(items)
}

/// The first `count` items of every task.
pub fn first_of_each(mut items: Vec<Item>, count: usize) -> Vec<Item> {
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    items.retain(|item| {
        let seen = seen.entry(item.task.clone()).or_default();
        *seen += 1;
        *seen <= count
    });
    items
}

fn is_tasks(name: &str) -> bool {
    name.ends_with(".jsonl") || name.ends_with(".jsonl.gz")
}

fn read(name: &str, content: &[u8]) -> Result<Vec<Item>> {
    let mut text = String::new();
    let read = match name.ends_with(".gz") {
        true => GzDecoder::new(content).read_to_string(&mut text),
        false => (&mut &*content).read_to_string(&mut text),
    };
    read.with_context(|| format!("cannot read {name}"))?;
    let mut items = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let at = || format!("{name} line {}", number + 1);
        let mut item: Item = serde_json::from_str(line).with_context(at)?;
        if !item.has_image() {
            let messages = Value::Array(item.raw_messages.clone());
            item.messages = serde_json::from_value(messages).with_context(at)?;
        }
        items.push(item);
    }
    Ok(items)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_and_faults_are_placed() {
        let line = r#"{"id": "a-0", "task": "a", "thinking": false, "score": "exact",
            "messages": [{"role": "user", "content": "x"}], "expected": "y", "max_tokens": 3}"#
            .replace('\n', " ");
        let items = read("a.jsonl", format!("{line}\n\n{line}\n").as_bytes()).expect("two items");
        assert_eq!(items.len(), 2);
        assert!(!items[0].quick && !items[0].has_image());
        let other = line.replace("\"task\": \"a\"", "\"task\": \"b\"");
        let both = read("a.jsonl", format!("{line}\n{line}\n{other}\n").as_bytes()).expect("three");
        let tasks = |items: Vec<Item>| items.into_iter().map(|item| item.task).collect::<Vec<_>>();
        assert_eq!(tasks(first_of_each(both.clone(), 1)), ["a", "b"]);
        assert_eq!(tasks(first_of_each(both.clone(), 2)), ["a", "a", "b"]);
        assert_eq!(tasks(only(both.clone(), &["b".to_owned()]).expect("is there")), ["b"]);
        assert_eq!(tasks(only(both.clone(), &[]).expect("all")), ["a", "a", "b"]);
        let error = only(both, &["a".to_owned(), "c".to_owned()]).expect_err("is refused");
        assert!(error.contains("\"c\"") && error.contains("a, b"), "{error}");
        let error = read("a.jsonl", format!("{line}\nno\n").as_bytes()).expect_err("is refused");
        assert!(format!("{error:#}").contains("a.jsonl line 2"), "{error:#}");
    }
}
