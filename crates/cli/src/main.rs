//! The deepinfer command.
fn main() {}
