//! The library's parsers: one prototype a grammar, and a copy for each sequence.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use llguidance::TokenParser;
use llguidance::api::StopReason;

use super::guard::{caught, text};

/// The parsers of one grammar.
///
/// Every sequence has a copy of the prototype, which shares nothing, so that a panic in one cannot
/// reach another. A copy is not used again after its sequence: the library's way back to the start
/// of the grammar has led to masks of another place in it.
pub(super) struct Parsers {
    prototype: Mutex<TokenParser>,
}

impl Parsers {
    pub fn new(prototype: TokenParser) -> Arc<Self> {
        Arc::new(Self { prototype: Mutex::new(prototype) })
    }

    /// A parser at the start of the grammar.
    pub fn lease(&self) -> Result<Lease, String> {
        let parser = caught(|| Ok(lock(&self.prototype).deep_clone()))?;
        Ok(Lease { parser: Some(parser) })
    }
}

/// A parser in use.
pub(super) struct Lease {
    /// `None` after a failure.
    parser: Option<TokenParser>,
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
        Ok(Self { parser: Some(parser) })
    }
}

pub(super) fn is_complete(parser: &TokenParser) -> bool {
    parser.stop_reason() != StopReason::NotStopped
}

/// Locks are held only over code that leaves the data whole, so a poisoned one is usable.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
