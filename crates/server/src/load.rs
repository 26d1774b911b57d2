//! Who may ask, how much, and how much is being asked: keys, limits, tickets.

use crate::error::ApiError;
use crate::run::Accounts;
use deepinfer::request::{Reading, RequestHandle};
use sha2::{Digest, Sha256};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};

/// A caller's key and its limits.
#[derive(Debug)]
pub struct Key {
    /// Name for logs and metrics; the key itself appears nowhere.
    pub name: String,
    digest: [u8; 32],
    /// Most requests at a time.
    pub concurrency: Option<usize>,
    /// Most tokens a minute, prompts and answers together.
    pub tokens_per_minute: Option<u64>,
    /// Largest part of the engine's queue that its requests may fill, above 0 and at most 1.
    pub queue_share: Option<f64>,
    running: AtomicUsize,
    bucket: Mutex<Bucket>,
    /// Its requests that may be waiting in the engine.
    queue: Mutex<Vec<Weak<Reading>>>,
}

/// Tokens that may be used now. Fills up over a minute; may be overdrawn by an answer, whose length
/// nobody knows before.
#[derive(Debug)]
struct Bucket {
    tokens: f64,
    filled: Instant,
}

/// A key file that cannot be read.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum KeyError {
    /// A line that is not understood.
    #[error(
        "line {line}: {word:?} is not understood; a line is KEY [name=NAME] [concurrency=N] \
         [tokens_per_minute=N] [queue_share=PART]"
    )]
    Word {
        /// Number of the line, from 1.
        line: usize,
        /// The word.
        word: String,
    },
    /// The same key twice.
    #[error("line {line}: this key is there already")]
    Twice {
        /// Number of the line, from 1.
        line: usize,
    },
    /// No key at all: nobody could ask for anything.
    #[error("there is no key in it")]
    Empty,
}

impl Key {
    fn new(secret: &str, number: usize) -> Self {
        Self {
            name: format!("key{number}"),
            digest: Sha256::digest(secret.as_bytes()).into(),
            concurrency: None,
            tokens_per_minute: None,
            queue_share: None,
            running: AtomicUsize::new(0),
            bucket: Mutex::new(Bucket { tokens: 0.0, filled: Instant::now() }),
            queue: Mutex::default(),
        }
    }

    /// Reads a key file: one key a line, `#` starts a comment.
    pub fn parse_file(text: &str) -> Result<Vec<Arc<Key>>, KeyError> {
        let mut keys: Vec<Key> = Vec::new();
        for (number, line) in text.lines().enumerate() {
            let line_number = number + 1;
            let mut words = line.split('#').next().unwrap_or_default().split_whitespace();
            let Some(secret) = words.next() else { continue };
            let mut key = Key::new(secret, keys.len() + 1);
            for word in words {
                let unknown = || KeyError::Word { line: line_number, word: word.to_owned() };
                match word.split_once('=') {
                    Some(("name", name)) if !name.is_empty() => key.name = name.to_owned(),
                    Some(("concurrency", n)) => {
                        key.concurrency = Some(n.parse().map_err(|_| unknown())?);
                    }
                    Some(("tokens_per_minute", n)) => {
                        let n: u64 = n.parse().map_err(|_| unknown())?;
                        key.tokens_per_minute = Some(n);
                        key.bucket =
                            Mutex::new(Bucket { tokens: n as f64, filled: Instant::now() });
                    }
                    Some(("queue_share", part)) => {
                        let part: f64 = part.parse().map_err(|_| unknown())?;
                        if !(part > 0.0 && part <= 1.0) {
                            return Err(unknown());
                        }
                        key.queue_share = Some(part);
                    }
                    _ => return Err(unknown()),
                }
            }
            if keys.iter().any(|other| other.digest == key.digest) {
                return Err(KeyError::Twice { line: line_number });
            }
            keys.push(key);
        }
        match keys.is_empty() {
            true => Err(KeyError::Empty),
            false => Ok(keys.into_iter().map(Arc::new).collect()),
        }
    }

    /// The key that equals `secret`. Takes the same time whichever it is, or none.
    pub fn find(keys: &[Arc<Key>], secret: &[u8]) -> Option<Arc<Key>> {
        let digest: [u8; 32] = Sha256::digest(secret).into();
        let mut found = u64::MAX;
        for (i, key) in keys.iter().enumerate() {
            let equal: Choice = key.digest.ct_eq(&digest);
            found = u64::conditional_select(&found, &(i as u64), equal);
        }
        keys.get(found as usize).cloned()
    }

    /// Counts a request, or says why there must not be one more now.
    fn enter(&self) -> Result<(), ApiError> {
        if let Some(limit) = self.tokens_per_minute {
            let mut bucket = self.bucket.lock().unwrap_or_else(PoisonError::into_inner);
            let rate = limit as f64 / 60.0;
            let passed = bucket.filled.elapsed().as_secs_f64();
            bucket.tokens = (bucket.tokens + passed * rate).min(limit as f64);
            bucket.filled = Instant::now();
            if bucket.tokens < 0.0 {
                let message = format!("key {:?} has used its {limit} tokens a minute", self.name);
                let retry_after = Duration::from_secs_f64((-bucket.tokens / rate).min(3600.0));
                return Err(ApiError::Busy { message, retry_after });
            }
        }
        let running = self.running.fetch_add(1, Relaxed);
        if let Some(limit) = self.concurrency.filter(|&limit| running >= limit) {
            self.running.fetch_sub(1, Relaxed);
            let message = format!("key {:?} has {limit} requests running, its limit", self.name);
            return Err(ApiError::Busy { message, retry_after: Duration::from_secs(1) });
        }
        Ok(())
    }

    /// Most requests of its that may wait in a queue of `limit`.
    fn most_waiting(&self, limit: usize) -> usize {
        self.queue_share.map_or(limit, |part| (part * limit as f64).ceil() as usize)
    }

    /// Its requests that wait in the engine, of at most `limit`, or why there must not be `more`.
    fn queue(
        &self,
        limit: usize,
        more: usize,
    ) -> Result<MutexGuard<'_, Vec<Weak<Reading>>>, ApiError> {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let waits = |reading: &Weak<Reading>| {
            reading.upgrade().is_some_and(|reading| reading.admitted().is_none())
        };
        queue.retain(waits);
        let most = self.most_waiting(limit);
        let waiting = queue.len();
        if waiting.saturating_add(more) > most {
            let message = format!(
                "key {:?} may have {most} requests waiting, one for each answer; {waiting} wait, and \
                 this request asks for {more}",
                self.name
            );
            return Err(ApiError::Busy { message, retry_after: Duration::from_secs(1) });
        }
        Ok(queue)
    }

    fn use_tokens(&self, n: usize) {
        if self.tokens_per_minute.is_some() {
            self.bucket.lock().unwrap_or_else(PoisonError::into_inner).tokens -= n as f64;
        }
    }
}

/// Held as long as a request runs.
#[derive(Clone, Default)]
pub struct Ticket {
    key: Option<Arc<Entered>>,
    _open: Option<Arc<Open>>,
    prompts: Prompts,
    ended: Ended,
}

/// Accounts of a request's answers that have ended, or were cut.
#[derive(Clone, Default)]
pub struct Ended(Arc<Mutex<Vec<Accounts>>>);

impl Ended {
    /// All of them.
    pub fn all(&self) -> Vec<Accounts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// One more.
    pub fn add(&self, accounts: Accounts) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(accounts);
    }
}

/// How far the prompts of a request's answers have been read.
#[derive(Clone, Default)]
pub struct Prompts(Arc<Mutex<Vec<Prompt>>>);

struct Prompt {
    tokens: usize,
    reading: Arc<Reading>,
}

impl Prompts {
    /// Tokens that have been read, and tokens in all.
    pub fn read(&self) -> (usize, usize) {
        let prompts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let sum = |(read, all): (usize, usize), prompt: &Prompt| {
            (read + prompt.reading.read(), all + prompt.tokens)
        };
        prompts.iter().fold((0, 0), sum)
    }
}

struct Entered(Arc<Key>);

impl Drop for Entered {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Relaxed);
    }
}

/// A request that counts as open.
struct Open(Arc<AtomicUsize>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

impl Ticket {
    /// A ticket for a request with `key`; `open` counts requests.
    pub fn take(key: Option<&Arc<Key>>, open: &Arc<AtomicUsize>) -> Result<Self, ApiError> {
        let key = match key {
            Some(key) => {
                key.enter()?;
                Some(Arc::new(Entered(key.clone())))
            }
            None => None,
        };
        open.fetch_add(1, Relaxed);
        let open = Some(Arc::new(Open(open.clone())));
        Ok(Self { key, _open: open, ..Self::default() })
    }

    /// Submits a job with a prompt of so many tokens, if its key may have as many more waiting in
    /// the queue of `limit` requests as there are `answers`; more than ever fit are refused. There is a handle for each of them.
    pub fn submit(
        &self,
        limit: usize,
        prompt: usize,
        answers: usize,
        submit: impl FnOnce() -> Result<Vec<RequestHandle>, ApiError>,
    ) -> Result<Vec<RequestHandle>, ApiError> {
        // Whoever comes again could not be served either.
        let most = self.key.as_ref().map_or(limit, |key| key.0.most_waiting(limit));
        if answers > most.max(1) {
            let message = format!(
                "n: {answers} answers take as many places of the queue, and {most} are there for them"
            );
            return Err(ApiError::invalid("n", message));
        }
        let queue = match &self.key {
            Some(key) if key.0.queue_share.is_some() => Some(key.0.queue(limit, answers)?),
            _ => None,
        };
        let handles = submit()?;
        if let Some(mut queue) = queue {
            queue.extend(handles.iter().map(|handle| Arc::downgrade(&handle.reading())));
        }
        self.produced(prompt);
        let mut prompts = self.prompts.0.lock().unwrap_or_else(PoisonError::into_inner);
        let read = |handle: &RequestHandle| Prompt { tokens: prompt, reading: handle.reading() };
        prompts.extend(handles.iter().map(read));
        Ok(handles)
    }

    /// How far its prompts have been read.
    pub fn prompts(&self) -> Prompts {
        self.prompts.clone()
    }

    /// The accounts of its answers that have ended.
    pub fn ended(&self) -> Ended {
        self.ended.clone()
    }

    /// Counts tokens of an answer.
    pub fn produced(&self, n: usize) {
        if let Some(key) = &self.key {
            key.0.use_tokens(n);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_files_are_checked() {
        let text = "# keys\n\nsk-a name=alice concurrency=2\nsk-b  tokens_per_minute=60 # bob\n";
        let keys = Key::parse_file(text).expect("two keys");
        assert_eq!(keys.len(), 2);
        assert_eq!(keys[0].name, "alice");
        assert_eq!(Key::find(&keys, b"sk-b").map(|key| key.name.clone()), Some("key2".into()));
        assert!(Key::find(&keys, b"sk-").is_none());
        assert!(Key::find(&keys, b"").is_none());
        for part in ["0", "1.5", "-1", "nan", "x"] {
            let text = format!("a queue_share={part}");
            assert!(matches!(Key::parse_file(&text), Err(KeyError::Word { .. })), "{text}");
        }
        assert!(matches!(Key::parse_file("a b"), Err(KeyError::Word { line: 1, .. })));
        assert_eq!(Key::parse_file("a\na").expect_err("twice"), KeyError::Twice { line: 2 });
        assert_eq!(Key::parse_file("# none").expect_err("empty"), KeyError::Empty);
    }

    #[test]
    fn limits_hold_and_are_given_back() {
        let open = Arc::new(AtomicUsize::new(0));
        let keys = Key::parse_file("k concurrency=1 tokens_per_minute=10").expect("a key");
        let first = Ticket::take(Some(&keys[0]), &open).expect("the first");
        assert!(matches!(Ticket::take(Some(&keys[0]), &open), Err(ApiError::Busy { .. })));
        first.produced(10_000);
        drop(first);
        assert_eq!(open.load(Relaxed), 0);
        let refused = Ticket::take(Some(&keys[0]), &open).err();
        assert!(
            matches!(refused, Some(ApiError::Busy { retry_after, .. }) if retry_after.as_secs() > 60)
        );
    }
}
