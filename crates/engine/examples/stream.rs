//! Text as it is produced, blocking or in any async executor:
//!
//! ```text
//! cargo run --release -p deepinfer --example stream -- MODEL_DIR "Once upon a time"
//! ```

use deepinfer::checkpoint::Source;
use deepinfer::engine::{Engine, EngineConfig};
use deepinfer::request::{Event, Request, SamplingParams};
use std::io::Write;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let model = arguments.next().ok_or("usage: stream MODEL_DIR [PROMPT]")?;
    let prompt = arguments.next().unwrap_or_else(|| "Once upon a time".into());
    let engine = Engine::open(Source::directory(model), &EngineConfig::default(), &mut |_, _| {})?;

    let params =
        SamplingParams { max_tokens: Some(64), temperature: 0.8, ..SamplingParams::default() };
    // In async code: `while let Some(event) = handle.next_event().await`.
    for event in engine.submit(Request::text(prompt, params))? {
        match event {
            Event::PromptRead { cached, .. } => eprintln!("({cached} prompt tokens were cached)"),
            Event::Tokens { text, .. } => {
                print!("{text}");
                std::io::stdout().flush()?;
            }
            Event::Finished { reason, usage } => println!("\n({reason:?}, {usage:?})"),
            Event::Failed(error) => return Err(error.into()),
        }
    }
    Ok(())
}
