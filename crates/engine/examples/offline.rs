//! Many prompts at once, without streaming:
//!
//! ```text
//! cargo run --release -p deepinfer --example offline -- MODEL_DIR
//! ```

use deepinfer::checkpoint::Source;
use deepinfer::engine::{Engine, EngineConfig};
use deepinfer::request::{Request, SamplingParams};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = std::env::args().nth(1).ok_or("usage: offline MODEL_DIR")?;
    let engine = Engine::open(Source::directory(model), &EngineConfig::default(), &mut |_, _| {})?;

    let params = SamplingParams { max_tokens: Some(32), ..SamplingParams::greedy() };
    let prompts = ["The capital of France is", "2 + 2 =", "Once upon a time"];
    let requests = prompts.iter().map(|&p| Request::text(p, params.clone())).collect();

    let results = engine.generate(requests, |p| eprint!("\r{} of {} done", p.done, p.total));
    eprintln!();
    for (prompt, result) in prompts.iter().zip(results) {
        match result {
            Ok(completion) => println!("{prompt:?} -> {:?}", completion.text),
            Err(error) => println!("{prompt:?} failed: {error}"),
        }
    }
    Ok(())
}
