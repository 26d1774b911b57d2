//! DeepSeek-V4.1 inference.

pub mod checkpoint;
pub mod config;
pub mod plan;
