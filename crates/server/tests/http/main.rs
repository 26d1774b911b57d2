//! The server over a scripted engine.
#![allow(missing_docs)]

mod agents;
mod chat;
mod common;
mod completions;
mod form;
mod fuzz;
mod hostile;
mod matrix;
mod messages;
mod network;
mod openapi;
mod operation;
mod responses;
