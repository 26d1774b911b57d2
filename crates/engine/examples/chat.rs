//! A conversation of two turns; the second starts from the cached state of the first:
//!
//! ```text
//! cargo run --release -p deepinfer --example chat -- MODEL_DIR
//! ```

use deepinfer::chat::{ChatTemplate, Conversation, Effort, Options, assistant, user};
use deepinfer::checkpoint::Source;
use deepinfer::engine::{Engine, EngineConfig};
use deepinfer::request::{Request, SamplingParams};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = std::env::args().nth(1).ok_or("usage: chat MODEL_DIR")?;
    let engine = Engine::open(Source::directory(model), &EngineConfig::default(), &mut |_, _| {})?;
    let tokenizer = engine.tokenizer().ok_or("the checkpoint has a tokenizer")?.clone();
    let template = ChatTemplate::new(&tokenizer)?;
    let options = Options { effort: Some(Effort::NONE) };

    let mut conversation = Conversation::default();
    for question in ["What is 2 + 3?", "And times 4?"] {
        conversation.messages.push(user(question));
        let prompt = template.render(&conversation, &options)?;
        let params = SamplingParams {
            max_tokens: Some(64),
            stop_tokens: vec![template.end_of_turn()?],
            ..SamplingParams::greedy()
        };
        let answer = engine.submit(Request::tokens(prompt, params))?.wait()?;
        println!("> {question}\n{}", answer.text);
        let usage = answer.usage;
        eprintln!("({} of {} prompt tokens cached)", usage.cached_tokens, usage.prompt_tokens);
        conversation.messages.push(assistant(answer.text, None));
    }
    Ok(())
}
