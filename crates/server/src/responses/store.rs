//! Responses that can be asked for again and continued: the newest ones that fit.

use serde_json::Value;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A response and the conversation that it belongs to.
#[derive(Clone, Debug)]
pub struct Stored {
    /// The response as it was sent.
    pub response: Value,
    /// All items before it: those of earlier responses and those of its own request.
    pub input: Arc<Vec<Value>>,
    /// Whose key asked for it; nobody else sees it.
    pub owner: Option<String>,
    /// Ends it, while it runs in the background.
    pub cancel: Option<Arc<tokio::sync::Notify>>,
}

/// Keeps responses, the oldest leave first.
pub struct Store {
    inner: Mutex<Inner>,
    most_bytes: usize,
}

#[derive(Default)]
struct Inner {
    by_id: HashMap<String, (Stored, usize)>,
    order: VecDeque<String>,
    bytes: usize,
}

impl Store {
    /// A store for responses of about `most_bytes` bytes together.
    pub fn new(most_bytes: usize) -> Self {
        Self { inner: Mutex::default(), most_bytes }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a response, or replaces what is kept under its id.
    pub fn put(&self, id: &str, stored: Stored) {
        let bytes =
            id.len() + size(&stored.response) + stored.input.iter().map(size).sum::<usize>();
        let mut inner = self.lock();
        match inner.by_id.insert(id.to_owned(), (stored, bytes)) {
            Some((_, before)) => inner.bytes -= before,
            None => inner.order.push_back(id.to_owned()),
        }
        inner.bytes += bytes;
        while inner.bytes > self.most_bytes {
            let Some(oldest) = inner.order.pop_front() else { break };
            if let Some((_, bytes)) = inner.by_id.remove(&oldest) {
                inner.bytes -= bytes;
            }
        }
    }

    /// Replaces what is kept under `id`; does nothing if it has been forgotten.
    pub fn replace(&self, id: &str, stored: Stored) {
        if self.lock().by_id.contains_key(id) {
            self.put(id, stored);
        }
    }

    /// What is kept under `id`, if it is `owner`'s.
    pub fn get(&self, id: &str, owner: Option<&str>) -> Option<Stored> {
        let inner = self.lock();
        let (stored, _) = inner.by_id.get(id)?;
        (stored.owner.as_deref() == owner).then(|| stored.clone())
    }

    /// Forgets what is kept under `id`, if it is `owner`'s. Returns whether it was there.
    pub fn remove(&self, id: &str, owner: Option<&str>) -> bool {
        let mut inner = self.lock();
        let owned = |(stored, _): &(Stored, usize)| stored.owner.as_deref() == owner;
        if !inner.by_id.get(id).is_some_and(owned) {
            return false;
        }
        if let Some((_, bytes)) = inner.by_id.remove(id) {
            inner.bytes -= bytes;
        }
        inner.order.retain(|other| other != id);
        true
    }
}

/// About how much memory a value takes.
fn size(value: &Value) -> usize {
    32 + match value {
        Value::String(text) => text.len(),
        Value::Array(list) => list.iter().map(size).sum(),
        Value::Object(map) => map.iter().map(|(name, value)| name.len() + size(value)).sum(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn stored(text: &str, owner: Option<&str>) -> Stored {
        Stored {
            response: json!({"text": text}),
            input: Arc::default(),
            owner: owner.map(str::to_owned),
            cancel: None,
        }
    }

    #[test]
    fn the_oldest_leave_and_owners_see_their_own() {
        let store = Store::new(1000);
        store.put("a", stored(&"x".repeat(400), None));
        store.put("b", stored(&"x".repeat(400), Some("me")));
        assert!(store.get("a", None).is_some());
        assert!(store.get("b", None).is_none());
        assert!(store.get("b", Some("me")).is_some());
        store.put("c", stored(&"x".repeat(400), None));
        assert!(store.get("a", None).is_none(), "a was the oldest");
        assert!(!store.remove("b", Some("you")));
        assert!(store.remove("b", Some("me")));
        assert!(store.remove("c", None));
        let inner = store.lock();
        assert_eq!((inner.bytes, inner.order.len()), (0, 0));
    }
}
