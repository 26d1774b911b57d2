//! DeepSeek-V4.1 inference.

pub mod plan;
