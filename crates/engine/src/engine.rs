//! The engine.
mod config;
pub use config::{DraftMode, EngineConfig, PrefillMode, PrefixCache};

/// Why an engine could not start.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A setting that is not understood.
    #[error("{name} is {value:?}; it must be {expected}")]
    Setting {
        /// The setting.
        name: &'static str,
        /// What was given.
        value: String,
        /// What it may be.
        expected: &'static str,
    },
}

impl EngineError {
    fn setting(name: &'static str, value: &str, expected: &'static str) -> Self {
        Self::Setting { name, value: value.to_owned(), expected }
    }
}
