//! HTTP over an engine: OpenAI's and Anthropic's protocols, and what operators need.
//!
//! [`App`] holds the engine behind [`Inference`]; [`router`] is the paths; [`serve`] is the server.

mod app;
mod chat;
mod completions;
mod convert;
mod error;
mod fields;
mod form;
mod inference;
mod live;
mod load;
mod messages;
mod metrics;
mod openapi;
mod output;
mod repair;
mod replay;
mod responses;
mod router;
mod run;
mod sampling;
pub mod scripted;
mod serve;
mod sse;
mod status;
mod text;
mod tls;
mod traces;
mod turn;
mod usage;
mod watch;
mod write_limit;

pub use app::{App, Config, SelfTest};
pub use error::{ApiError, Shape};
pub use inference::{Figures, Inference, Info, Times};
pub use live::{Live, NoTokenizer};
pub use load::{Key, KeyError};
pub use router::router;
pub use serve::{ServeError, serve, serve_until};
pub use tls::{Tls, TlsError};
pub use traces::{Traces, TracesError};
