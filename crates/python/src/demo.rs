//! The demo model, if it was there when this package was built.
// Its tasks are not used here.
#![allow(dead_code)]

include!(concat!(env!("OUT_DIR"), "/demo.rs"));
