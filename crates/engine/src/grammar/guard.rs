//! The border to the grammar library: errors and panics become text.

use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Longest message kept; the library can quote whole grammars.
const MAX_MESSAGE: usize = 1000;

/// Runs `f`; an error or a panic inside comes back as its message. State that `f` was changing
/// when it panicked must not be used again.
pub(super) fn caught<T>(f: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(result) => result,
        Err(payload) => {
            let message = payload
                .downcast_ref::<&str>()
                .map(|s| (*s).to_owned())
                .or_else(|| payload.downcast_ref::<String>().cloned())
                .unwrap_or_else(|| "no message".to_owned());
            Err(text(format_args!("panic: {message}")))
        }
    }
}

/// An error's message, its causes joined by colons, without backtraces and cut to a length that
/// can be logged.
pub(super) fn text(error: impl Display) -> String {
    let mut message = format!("{error:#}");
    for mark in ["\n<backtrace>", "\n<non-verbose/>", "\n<state>"] {
        if let Some(at) = message.find(mark) {
            message.truncate(at);
        }
    }
    if message.len() > MAX_MESSAGE {
        let mut end = MAX_MESSAGE;
        while !message.is_char_boundary(end) {
            end -= 1;
        }
        message.truncate(end);
        message.push_str("...");
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panics_become_messages() {
        let caught_one = caught::<()>(|| panic!("made {}", "up"));
        assert_eq!(caught_one, Err("panic: made up".to_owned()));
        assert_eq!(caught(|| Ok(3)), Ok(3));
        assert_eq!(caught::<()>(|| Err("plain".into())), Err("plain".to_owned()));
    }

    #[test]
    fn long_messages_are_cut_between_characters() {
        let long = "é".repeat(MAX_MESSAGE);
        let cut = text(&long);
        assert!(cut.len() <= MAX_MESSAGE + 3 && cut.ends_with("..."));
        assert_eq!(text("a\n<backtrace>\nmain"), "a");
    }
}
