//! The demo model, if it was there when this program was built.

include!(concat!(env!("OUT_DIR"), "/demo.rs"));
