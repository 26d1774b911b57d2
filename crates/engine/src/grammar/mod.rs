//! Structured output: answers that must match a schema, an expression, a grammar, a list, or the
//! format of tool calls.
//!
//! A [`Compiler`] turns a [`GrammarSpec`] into a [`Grammar`] on its own threads; every sequence
//! then follows it with a [`Matcher`] of its own. All of it is plain code on the host.
//!
//! ```
//! use deepinfer::grammar::{Compiler, CompilerLimits, GrammarSpec, GrammarVocabulary};
//!
//! // A vocabulary of single bytes, with id 256 as the end of a sequence.
//! let bytes: Vec<Vec<u8>> = (0..=255u8).map(|b| vec![b]).chain([vec![]]).collect();
//! let vocabulary = GrammarVocabulary::new(&bytes, &[(256, "<eos>".into())], &[256])?;
//! let compiler = Compiler::new(vocabulary.clone(), CompilerLimits::default());
//!
//! let grammar = compiler.compile(GrammarSpec::Choice(vec!["yes".into(), "no".into()]))?;
//! let mut matcher = grammar.matcher(None)?;
//! let mut mask = vec![0u32; vocabulary.mask_words()];
//! matcher.mask(&mut mask)?;
//! let allowed = |mask: &[u32], token: u32| mask[token as usize / 32] >> (token % 32) & 1 == 1;
//! assert!(allowed(&mask, b'y'.into()) && allowed(&mask, b'n'.into()) && !allowed(&mask, 256));
//!
//! // Drafts are checked before they are spent; nothing changes.
//! assert_eq!(matcher.validate(&[b'n'.into(), b'o'.into(), b't'.into()])?, 2);
//!
//! matcher.accept(b'n'.into())?;
//! matcher.accept(b'o'.into())?;
//! assert!(matcher.is_finished());
//! matcher.rollback(1)?;
//! assert!(!matcher.is_finished());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod compiler;
mod error;
mod guard;
mod lower;
mod matcher;
mod parser;
mod schema;
mod spec;
mod tools;
mod trigger;
mod vocabulary;

pub use compiler::{Compiler, CompilerLimits, Grammar, Pending};
pub use error::{CompileError, MatchError, SetupError};
pub use matcher::Matcher;
pub use spec::{GrammarSpec, Tool, ToolCalls, ToolChoice};
pub use trigger::Trigger;
pub use vocabulary::GrammarVocabulary;
