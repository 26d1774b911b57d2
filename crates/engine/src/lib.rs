//! DeepSeek-V4.1 inference.

pub mod cache;
pub mod chat;
pub mod checkpoint;
pub mod config;
pub mod engine;
pub mod engram;
#[doc(hidden)]
pub mod fuzz;
pub mod model;
pub mod plan;
pub mod request;
pub mod session;
pub mod settings;
pub mod synth;
pub mod tokenizer;
