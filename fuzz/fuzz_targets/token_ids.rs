#![no_main]

use deepinfer::config::ModelConfig;
use deepinfer::engram::Engram;
use deepinfer::tokenizer::Tokenizer;
use std::sync::LazyLock;

static MODEL: LazyLock<(Tokenizer, Engram)> = LazyLock::new(|| {
    let config = include_bytes!("../../testdata/tiny-a/config.json");
    let config = ModelConfig::from_json(config).expect("a good configuration");
    let tokenizer = include_bytes!("../../testdata/tiny-a/tokenizer.json");
    let tokenizer = Tokenizer::from_bytes(tokenizer).expect("a good tokenizer");
    let engram = Engram::new(&config.text_config, &tokenizer).expect("fitting sizes");
    (tokenizer, engram.expect("Engram layers"))
});

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    deepinfer::fuzz::token_ids(&MODEL.0, &MODEL.1, bytes)
});
