//! Why an engine could not start.

use crate::checkpoint::CheckpointError;
use crate::engram::EngramError;
use crate::model::LoadError;
use crate::plan_memory::DoesNotFit;
use crate::tokenizer::TokenizerError;
use deepinfer_device::DeviceError;

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
    /// A setting that is too small for the others.
    #[error("{name} is {value}; with these settings it must be at least {least}")]
    TooSmall {
        /// The setting.
        name: &'static str,
        /// What was given.
        value: usize,
        /// The least that works.
        least: usize,
    },
    /// A setting that is too large.
    #[error("{name} is {value}; it must be at most {most}")]
    TooLarge {
        /// The setting.
        name: &'static str,
        /// What was given.
        value: usize,
        /// The most that works.
        most: usize,
    },
    /// A pool that holds no sequence.
    #[error(
        "kv_tokens is {value}; it must be at least {least}: a page holds {page_tokens} tokens (whole \
         groups of every compression ratio of the checkpoint), and beside its own a sequence needs \
         room for {slack}, which drafts may take"
    )]
    PoolTooSmall {
        /// What was given.
        value: usize,
        /// The least that works.
        least: usize,
        /// Tokens in a page.
        page_tokens: usize,
        /// Positions that a sequence may need past its end.
        slack: usize,
    },
    /// A checkpoint that has no room for drafts.
    #[error(
        "the checkpoint has {positions} positions, but drafts take {slack} of them and a request at \
         least 2; draft fewer tokens"
    )]
    TooFewPositions {
        /// Of the checkpoint.
        positions: usize,
        /// Positions that a sequence may need past its end.
        slack: usize,
    },
    /// More drafts than the checkpoint can make.
    #[error("cannot draft {wanted} tokens ahead: the checkpoint drafts blocks of at most {block}")]
    DraftLength {
        /// What was given.
        wanted: usize,
        /// The checkpoint's block; 0 if it has no draft stages.
        block: usize,
    },
    /// The checkpoint cannot be read.
    #[error(transparent)]
    Checkpoint(Box<CheckpointError>),
    /// Its tokenizer cannot be read.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// Its tokenizer does not give the n-gram memory that it was trained with.
    #[error(transparent)]
    Engram(Box<EngramError>),
    /// Its weights cannot be used.
    #[error(transparent)]
    Load(Box<LoadError>),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// There is not enough memory.
    #[error(transparent)]
    DoesNotFit(#[from] DoesNotFit),
    /// The directory of the prefix cache cannot be used.
    #[error(
        "cannot use {dir} for the prefix cache: {reason}; give a directory that can be written to and \
         has room"
    )]
    CacheDir {
        /// The directory.
        dir: String,
        /// What the system said.
        reason: std::io::Error,
    },
    /// A thread could not start.
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
}

impl EngineError {
    /// Whether the caller's settings are at fault: wrong in themselves, together, or for this
    /// checkpoint.
    pub fn is_setting(&self) -> bool {
        matches!(
            self,
            Self::Setting { .. }
                | Self::TooSmall { .. }
                | Self::TooLarge { .. }
                | Self::PoolTooSmall { .. }
                | Self::TooFewPositions { .. }
                | Self::DraftLength { .. }
        )
    }

    /// The setting whose value is at fault, with which the message begins; absent where there is no
    /// such one.
    pub fn setting(&self) -> Option<&'static str> {
        match self {
            Self::Setting { name, .. }
            | Self::TooSmall { name, .. }
            | Self::TooLarge { name, .. } => Some(name),
            Self::PoolTooSmall { .. } => Some("kv_tokens"),
            _ => None,
        }
    }

    pub(super) fn not_understood(name: &'static str, value: &str, expected: &'static str) -> Self {
        Self::Setting { name, value: value.to_owned(), expected }
    }
}

impl From<CheckpointError> for EngineError {
    fn from(error: CheckpointError) -> Self {
        Self::Checkpoint(Box::new(error))
    }
}

impl From<EngramError> for EngineError {
    fn from(error: EngramError) -> Self {
        Self::Engram(Box::new(error))
    }
}

impl From<LoadError> for EngineError {
    fn from(error: LoadError) -> Self {
        Self::Load(Box::new(error))
    }
}
