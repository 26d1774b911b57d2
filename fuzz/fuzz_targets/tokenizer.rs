#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| deepinfer::fuzz::tokenizer(bytes));
