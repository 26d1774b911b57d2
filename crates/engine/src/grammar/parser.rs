//! The library's parsers: one prototype a grammar, and copies that are used again.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use llguidance::TokenParser;
use llguidance::api::StopReason;

use super::guard::{caught, text};

/// Copies of a grammar's parser that wait to be used again.
const SPARE: usize = 8;
/// A copy that has grown beyond this many lexer states is not kept: what it learned is worth less
/// than its memory, and it must not come near the limit of states in another sequence.
const SPARE_STATES: usize = 10_000;

/// The parsers of one grammar.
///
/// A parser learns the states that it meets, and meeting one again costs microseconds instead of
/// milliseconds. So a copy whose sequence has ended goes to the next one, knowledge included. A
/// copy is used by one sequence at a time and shares nothing, so that a panic in one cannot reach
/// another.
pub(super) struct Parsers {
    prototype: Mutex<TokenParser>,
    spare: Mutex<Vec<TokenParser>>,
}

impl Parsers {
    pub fn new(prototype: TokenParser) -> Arc<Self> {
        Arc::new(Self { prototype: Mutex::new(prototype), spare: Mutex::default() })
    }

    /// A parser at the start of the grammar.
    pub fn lease(self: &Arc<Self>) -> Result<Lease, String> {
        let parser = match lock(&self.spare).pop() {
            Some(parser) => parser,
            None => caught(|| Ok(lock(&self.prototype).deep_clone()))?,
        };
        Ok(Lease { parser: Some(parser), home: self.clone() })
    }

    #[cfg(test)]
    pub fn spares(&self) -> usize {
        lock(&self.spare).len()
    }
}

/// A parser in use.
pub(super) struct Lease {
    /// `None` after a failure.
    parser: Option<TokenParser>,
    home: Arc<Parsers>,
}

impl Lease {
    /// Calls the library. After an error or a panic the parser's state is unknown, and it is gone.
    pub fn run<T>(
        &mut self,
        f: impl FnOnce(&mut TokenParser) -> Result<T, String>,
    ) -> Result<T, String> {
        let Some(parser) = self.parser.as_mut() else {
            return Err("the parser is gone after an earlier failure".to_owned());
        };
        let result = caught(|| f(parser));
        if result.is_err() {
            self.parser = None;
        }
        result
    }

    /// Whether nothing can follow.
    pub fn is_complete(&self) -> bool {
        self.parser.as_ref().is_some_and(is_complete)
    }

    /// Takes the token if the grammar allows it, and says whether it does.
    pub fn accept(&mut self, token: u32) -> Result<bool, String> {
        self.run(|parser| {
            if !parser.validate_token(token).map_err(text)? {
                return Ok(false);
            }
            if parser.consume_token(token).map_err(text)? != 0 {
                return Err("the grammar asks to take back tokens".to_owned());
            }
            parser.check_stop().map_err(text)?;
            Ok(true)
        })
    }

    /// An independent copy in the same state.
    pub fn copy(&mut self) -> Result<Self, String> {
        let parser = self.run(|parser| Ok(parser.deep_clone()))?;
        Ok(Self { parser: Some(parser), home: self.home.clone() })
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let reset = self.run(|parser| {
            parser.reset().map_err(text)?;
            Ok(parser.parser.lexer_stats().num_states)
        });
        let mut spare = lock(&self.home.spare);
        if let (Ok(states), Some(parser)) = (reset, self.parser.take())
            && states <= SPARE_STATES
            && spare.len() < SPARE
        {
            spare.push(parser);
        }
    }
}

pub(super) fn is_complete(parser: &TokenParser) -> bool {
    parser.stop_reason() != StopReason::NotStopped
}

/// Locks are held only over code that leaves the data whole, so a poisoned one is usable.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
