//! Earlier answers as they were produced.
//!
//! A client sends an answer back as text, without its reasoning perhaps, or with its arguments
//! written another way. Rendered and encoded again it gives other tokens than the model produced,
//! and the prefix cache misses from there on. So the tokens of answers are kept, under the prompt
//! that they followed; where a later prompt has the same beginning and an answer that says the same,
//! the kept tokens take its place.

use deepinfer::chat::InputMessage;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What an answer says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Said {
    /// Text.
    pub content: String,
    /// Thinking.
    pub reasoning: String,
    /// Names and arguments of calls.
    pub calls: Vec<(String, String)>,
}

/// Keeps answers, the ones used longest ago leave first.
pub struct Memory {
    inner: Mutex<Inner>,
    most_bytes: usize,
}

type Place = [u8; 32];

#[derive(Default)]
struct Inner {
    by_place: HashMap<Place, Kept>,
    order: VecDeque<(Place, u64)>,
    uses: u64,
    bytes: usize,
}

struct Kept {
    tokens: Arc<[u32]>,
    said: Arc<Said>,
    bytes: usize,
    last_use: u64,
}

/// Special tokens that enclose an answer.
#[derive(Clone, Copy, Debug)]
pub struct Marks {
    /// Before each answer, one token before its text.
    pub assistant: u32,
    /// After it.
    pub end: u32,
}

impl Memory {
    /// A memory of about `most_bytes` bytes; 0 keeps nothing.
    pub fn new(most_bytes: usize) -> Self {
        Self { inner: Mutex::default(), most_bytes }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the answer `tokens` to `prompt`. Only callers with the same `scope` get it back.
    pub fn keep(&self, scope: &str, prompt: &[u32], tokens: Vec<u32>, said: Said) {
        let mut hash = start(scope);
        feed(&mut hash, prompt);
        let place: Place = hash.finalize().into();
        let calls: usize = said.calls.iter().map(|(name, a)| name.len() + a.len()).sum();
        let bytes = 256 + 4 * tokens.len() + said.content.len() + said.reasoning.len() + calls;
        if bytes > self.most_bytes {
            return;
        }
        let mut inner = self.lock();
        let last_use = inner.touch(place);
        let kept = Kept { tokens: tokens.into(), said: Arc::new(said), bytes, last_use };
        if let Some(before) = inner.by_place.insert(place, kept) {
            inner.bytes -= before.bytes;
        }
        inner.bytes += bytes;
        while inner.bytes > self.most_bytes {
            let Some((oldest, at)) = inner.order.pop_front() else { break };
            // Used again since: it stands further back as well.
            if inner.by_place.get(&oldest).is_some_and(|kept| kept.last_use == at)
                && let Some(kept) = inner.by_place.remove(&oldest)
            {
                inner.bytes -= kept.bytes;
            }
        }
    }

    fn find(&self, place: Place) -> Option<(Arc<[u32]>, Arc<Said>)> {
        let mut inner = self.lock();
        if !inner.by_place.contains_key(&place) {
            return None;
        }
        let last_use = inner.touch(place);
        let kept = inner.by_place.get_mut(&place)?;
        kept.last_use = last_use;
        Some((kept.tokens.clone(), kept.said.clone()))
    }

    /// Puts kept answers into `prompt`, the rendering of `messages`. Returns the new prompt and how
    /// many of its tokens are kept ones.
    pub fn replay(
        &self,
        scope: &str,
        prompt: Vec<u32>,
        messages: &[InputMessage],
        marks: Marks,
    ) -> (Vec<u32>, usize) {
        let answers: Vec<&InputMessage> =
            messages.iter().filter(|m| matches!(m, InputMessage::Assistant { .. })).collect();
        let count = prompt.iter().filter(|&&id| id == marks.assistant).count();
        // The last mark may open the next answer.
        if answers.is_empty() || count < answers.len() || count > answers.len() + 1 {
            return (prompt, 0);
        }
        let mut out = Vec::with_capacity(prompt.len() + 256);
        let mut hash = start(scope);
        let mut hashed = 0;
        let mut kept_tokens = 0;
        let mut rest = prompt.as_slice();
        for message in answers {
            let Some(mark) = rest.iter().position(|&id| id == marks.assistant) else { break };
            // The mark is followed by the beginning or the end of thinking.
            let begin = (mark + 2).min(rest.len());
            out.extend_from_slice(&rest[..begin]);
            rest = &rest[begin..];
            let Some(end) = rest.iter().position(|&id| id == marks.end) else { break };
            feed(&mut hash, &out[hashed..]);
            hashed = out.len();
            let place: Place = hash.clone().finalize().into();
            match self.find(place) {
                Some((tokens, said)) if says(message, &said) => {
                    out.extend_from_slice(&tokens);
                    kept_tokens += tokens.len();
                }
                _ => out.extend_from_slice(&rest[..=end]),
            }
            rest = &rest[end + 1..];
        }
        out.extend_from_slice(rest);
        (out, kept_tokens)
    }
}

impl Inner {
    fn touch(&mut self, place: Place) -> u64 {
        self.uses += 1;
        self.order.push_back((place, self.uses));
        // Old entries of places that were used again are dropped when they come to the front; this
        // keeps them few.
        if self.order.len() > 2 * self.by_place.len() + 64 {
            let by_place = &self.by_place;
            let uses = self.uses;
            self.order.retain(|(place, at)| {
                *at == uses || by_place.get(place).is_some_and(|kept| kept.last_use == *at)
            });
        }
        self.uses
    }
}

fn start(scope: &str) -> Sha256 {
    let mut hash = Sha256::new();
    hash.update((scope.len() as u64).to_le_bytes());
    hash.update(scope);
    hash
}

fn feed(hash: &mut Sha256, tokens: &[u32]) {
    let bytes: Vec<u8> = tokens.iter().flat_map(|id| id.to_le_bytes()).collect();
    hash.update(bytes);
}

/// Whether a message of a history is the answer `said`, as clients send it back.
fn says(message: &InputMessage, said: &Said) -> bool {
    let InputMessage::Assistant { content, reasoning_content, tool_calls, prefix: false } = message
    else {
        return false;
    };
    let reasoning = reasoning_content.as_deref().unwrap_or_default().trim();
    let calls = tool_calls.as_deref().unwrap_or_default();
    content.trim() == said.content.trim()
        && (reasoning.is_empty() || reasoning == said.reasoning.trim())
        && calls.len() == said.calls.len()
        && calls.iter().zip(&said.calls).all(|(call, (name, arguments))| {
            call.name == *name && same_json(&call.arguments, arguments)
        })
}

fn same_json(a: &str, b: &str) -> bool {
    let read = |text: &str| serde_json::from_str::<Value>(text).ok();
    a == b || read(a).is_some_and(|a| Some(a) == read(b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use deepinfer::chat::{ToolCall, assistant, user};

    const MARKS: Marks = Marks { assistant: 1, end: 2 };

    fn said(content: &str, reasoning: &str) -> Said {
        Said { content: content.into(), reasoning: reasoning.into(), calls: Vec::new() }
    }

    #[test]
    fn an_answer_that_says_the_same_is_put_back() {
        let memory = Memory::new(10_000);
        // user 10; answer 20 21, produced as 30 31 32.
        memory.keep("", &[10, 1, 5], vec![30, 31, 32, 2], said("hello", "why"));
        let prompt = vec![10, 1, 5, 20, 21, 2, 11, 1, 5];
        let history = |answer: InputMessage| [user("x"), answer, user("y")];
        let replay =
            |scope: &str, answer| memory.replay(scope, prompt.clone(), &history(answer), MARKS);
        let replayed = (vec![10, 1, 5, 30, 31, 32, 2, 11, 1, 5], 4);
        assert_eq!(replay("", assistant("hello\n", None)), replayed);
        assert_eq!(replay("", assistant("hello", Some("why".into()))), replayed);
        assert_eq!(replay("", assistant("hello", Some("not".into()))), (prompt.clone(), 0));
        assert_eq!(replay("", assistant("other", None)), (prompt.clone(), 0));
        assert_eq!(replay("else", assistant("hello", None)), (prompt.clone(), 0));
    }

    #[test]
    fn later_answers_follow_the_kept_ones() {
        let memory = Memory::new(10_000);
        memory.keep("", &[10, 1, 5], vec![30, 2], said("a", ""));
        memory.keep("", &[10, 1, 5, 30, 2, 11, 1, 5], vec![40, 2], said("b", ""));
        let prompt = vec![10, 1, 5, 20, 2, 11, 1, 5, 21, 2, 12, 1, 5];
        let history = [user("x"), assistant("a", None), user("y"), assistant("b", None), user("z")];
        let (replayed, kept) = memory.replay("", prompt, &history, MARKS);
        assert_eq!(replayed, [10, 1, 5, 30, 2, 11, 1, 5, 40, 2, 12, 1, 5]);
        assert_eq!(kept, 4);
    }

    #[test]
    fn arguments_are_compared_as_json() {
        let call = |arguments: &str| InputMessage::Assistant {
            content: String::new(),
            reasoning_content: Some(String::new()),
            tool_calls: Some(vec![ToolCall {
                id: "c".into(),
                name: "f".into(),
                arguments: arguments.into(),
            }]),
            prefix: false,
        };
        let mut said = said("", "thought");
        said.calls.push(("f".into(), "{\"a\": 1, \"b\": [2]}".into()));
        assert!(says(&call("{\"b\":[2],\"a\":1}"), &said));
        assert!(!says(&call("{\"b\":[2],\"a\":2}"), &said));
        assert!(!says(&assistant("", None), &said));
    }

    #[test]
    fn the_memory_is_bounded_and_forgets_what_is_not_used() {
        let memory = Memory::new(4000);
        for i in 0..100u32 {
            memory.keep("", &[i, 1, 5], vec![i, 2], said("a", ""));
            let prompt = vec![0, 1, 5, 9, 2, 1, 5];
            let history = [user("x"), assistant("a", None)];
            assert_eq!(memory.replay("", prompt, &history, MARKS).1, 2, "the first is used");
        }
        let inner = memory.lock();
        assert!(inner.bytes <= 4000 && inner.by_place.len() < 20);
        assert!(inner.order.len() <= 2 * inner.by_place.len() + 65);
    }
}
