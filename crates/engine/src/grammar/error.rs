//! What can go wrong before and while a grammar is used.

use thiserror::Error;

/// Why a [`GrammarSpec`](super::GrammarSpec) was refused. Every case is the caller's to correct;
/// none is ever answered by generating without the constraint.
///
/// `path` is a JSON pointer (RFC 6901) into the schema, with `""` for its root. For tool calls it
/// starts at the tool's `parameters`, and the error is wrapped in [`CompileError::Tool`].
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CompileError {
    /// A keyword's value has the wrong shape.
    #[error("schema at \"{path}\": \"{keyword}\" {reason}")]
    Malformed {
        /// Where.
        path: String,
        /// Which keyword, `""` where the schema itself is neither an object nor a boolean.
        keyword: String,
        /// What it must be and what it was.
        reason: String,
    },
    /// A keyword, or a use of one, that cannot be enforced.
    #[error("schema at \"{path}\": \"{keyword}\" is not supported: {reason}")]
    Unsupported {
        /// Where.
        path: String,
        /// Which keyword.
        keyword: String,
        /// Why, and what to write instead.
        reason: String,
    },
    /// A `pattern` or a key of `patternProperties` is not a regular expression that can be used.
    #[error("schema at \"{path}\": pattern /{pattern}/ cannot be used: {reason}")]
    BadPattern {
        /// Where.
        path: String,
        /// The pattern as given.
        pattern: String,
        /// The parser's complaint.
        reason: String,
    },
    /// `enum` lists nothing.
    #[error("schema at \"{path}\": \"enum\" is empty, so no value can match")]
    EmptyEnum {
        /// Where.
        path: String,
    },
    /// `$ref` leads nowhere. Only references inside the same document are followed.
    #[error("schema at \"{path}\": \"$ref\" {reference:?} {reason}")]
    UnknownRef {
        /// Where.
        path: String,
        /// The reference as given.
        reference: String,
        /// Why it cannot be followed.
        reason: String,
    },
    /// No finite document matches: a reference that leads back to itself, or a required value
    /// that contains itself.
    #[error("schema at \"{path}\": \"$ref\" never ends, so no finite document can match")]
    Endless {
        /// Where.
        path: String,
    },
    /// Bounds that exclude every value.
    #[error("schema at \"{path}\": contradiction: {reason}")]
    Contradiction {
        /// Where.
        path: String,
        /// Which bounds.
        reason: String,
    },
    /// A regular expression that cannot be used.
    #[error("regular expression: {reason}")]
    BadRegex {
        /// The parser's complaint.
        reason: String,
    },
    /// Grammar text that cannot be used.
    #[error("grammar: {reason}")]
    BadGrammar {
        /// The parser's complaint, with line and column where it has them.
        reason: String,
    },
    /// A choice list without choices, or a tool grammar without the tools that it needs.
    #[error("{what} is empty, so nothing can match")]
    Empty {
        /// Which list.
        what: &'static str,
    },
    /// A tool's definition was refused.
    #[error("tool {name:?}: {error}")]
    Tool {
        /// The tool's name.
        name: String,
        /// Why.
        error: Box<CompileError>,
    },
    /// A tool's name that the call format cannot spell, that occurs twice, or that is not listed.
    #[error("tool {name:?}: {reason}")]
    BadTool {
        /// The tool's name.
        name: String,
        /// Why.
        reason: String,
    },
    /// Over a size limit.
    #[error("{what}: {size} is over the limit of {limit}")]
    TooBig {
        /// What was counted.
        what: &'static str,
        /// How much of it there is; where counting stopped early, one more than the limit.
        size: usize,
        /// The limit.
        limit: usize,
    },
    /// The grammar needs more states or symbols than the limits allow.
    #[error("grammar is too complex: {reason}")]
    TooComplex {
        /// Which limit.
        reason: String,
    },
    /// Compiling took longer than the limit.
    #[error("grammar was not compiled within {limit_ms} ms; simplify it")]
    TooSlow {
        /// The limit in milliseconds.
        limit_ms: u64,
    },
    /// Too many compilations at once.
    #[error("{waiting} grammars are waiting to be compiled; try again")]
    Busy {
        /// How many.
        waiting: usize,
    },
    /// The compiler failed in a way that says nothing about the request (a panic, for instance).
    #[error("grammar compiler failed: {reason}")]
    Fault {
        /// What is known.
        reason: String,
    },
}

/// Why a [`Matcher`](super::Matcher) refused a call.
///
/// After [`MatchError::Fault`] the matcher is dead and every call returns the same error; the
/// other cases leave it as it was.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum MatchError {
    /// The grammar does not allow this token here.
    #[error("token {token} is not allowed by the grammar at output position {position}")]
    Rejected {
        /// The token.
        token: u32,
        /// How many tokens had been accepted before it.
        position: usize,
    },
    /// The id is not in the vocabulary.
    #[error("token {token} is outside the vocabulary of {vocab}")]
    OutOfRange {
        /// The token.
        token: u32,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// The mask buffer has the wrong length.
    #[error("mask has {got} words, must have {want}")]
    MaskSize {
        /// Its length.
        got: usize,
        /// ceil(vocabulary / 32), times the rows.
        want: usize,
    },
    /// More tokens to take back than were accepted.
    #[error("cannot take back {asked} tokens, only {have} were accepted")]
    Rollback {
        /// How many were asked for.
        asked: usize,
        /// How many there are.
        have: usize,
    },
    /// The grammar library failed, panicked or ran over a limit. The request must end.
    #[error("grammar failed at output position {position}: {reason}")]
    Fault {
        /// How many tokens had been accepted.
        position: usize,
        /// What is known.
        reason: String,
    },
}

/// Why a vocabulary or a trigger cannot be built.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SetupError {
    /// An id that is not in the vocabulary.
    #[error("{what} {token} is outside the vocabulary of {vocab}")]
    OutOfRange {
        /// What the id stands for.
        what: &'static str,
        /// The id.
        token: u32,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// A list that must not be empty.
    #[error("{what} must not be empty")]
    Empty {
        /// Which.
        what: &'static str,
    },
    /// The token table could not be prepared.
    #[error("cannot prepare the vocabulary: {reason}")]
    Fault {
        /// What is known.
        reason: String,
    },
}
