//! `deepinfer batch`: a file of requests in OpenAI's batch format.
//!
//! Every answer is written as a whole line as soon as it is there, so that a run that was cut off
//! goes on where it ended: ids that have an answer are not run again, half a line is cut away, and
//! so are the errors of requests that are run again.

mod answer;
mod body;
mod input;
mod output;

use crate::args::Batch;
use crate::failure::{Failure, Outcome};
use crate::{engine, named, open};
use body::{Job, Kind, Line};
use deepinfer::chat::ChatTemplate;
use deepinfer::engine::{Engine, EngineConfig};
use deepinfer::request::{Completion, RequestHandle};
use output::Output;
use std::collections::VecDeque;
use std::time::Duration;

/// A request under way.
struct Running {
    id: String,
    kind: Kind,
    handle: RequestHandle,
    completion: Completion,
}

/// Runs all requests that have no answer yet.
pub fn run(args: &Batch) -> Outcome {
    let lines = input::read(&args.input)?;
    let ids = lines.iter().map(Line::id).collect();
    let mut output = output::open(&args.output, &args.input, &ids)?;
    let open = |line: &&Line| !output.done.contains(line.id());
    let left: VecDeque<&Line> = lines.iter().filter(open).collect();
    if output.cut > 0 {
        tell!(
            "cut away half a line, {} bytes, at the end of {}",
            output.cut,
            args.output.display()
        );
    }
    if left.len() < lines.len() {
        tell!("{} of {} answers are there already", lines.len() - left.len(), lines.len());
    }
    if output.failed > 0 {
        tell!("{} requests had failed and are run again", output.failed);
    }
    let config = config(args)?;
    let engine = engine::start(&args.model, &config, &named::ENGINE)?;
    let failed = serve(&engine, left, &mut output, config.max_seqs.saturating_mul(2))?;
    output.finish()?;
    if failed > 0 {
        tell!("{failed} requests failed; their lines say why");
        return Err(Failure::Check);
    }
    Ok(())
}

/// Settings of the engine. How much waits is bounded by what is submitted at once: a queue that is
/// full is no reason to refuse a request of a file.
fn config(args: &Batch) -> Outcome<EngineConfig> {
    Ok(EngineConfig {
        max_queued_requests: usize::MAX,
        max_queued_tokens: usize::MAX,
        ..engine::many(&args.engine, &args.run)?
    })
}

/// Keeps `at_once` requests under way and writes answers as they come. Returns how many failed.
fn serve(
    engine: &Engine,
    mut left: VecDeque<&Line>,
    output: &mut Output,
    at_once: usize,
) -> Outcome<usize> {
    let tokenizer = engine::tokenizer(engine)?;
    // Checkpoints without a chat format can still complete plain text.
    let template = ChatTemplate::new(tokenizer).ok();
    let bar = open::bar("answering", left.len());
    let mut failed = 0;
    let mut running: Vec<Running> = Vec::new();
    let mut write = |line: String| -> Outcome {
        output.write(&line)?;
        bar.inc(1);
        Ok(())
    };
    while !left.is_empty() || !running.is_empty() {
        while running.len() < at_once
            && let Some(line) = left.pop_front()
        {
            let job = line.job(tokenizer, template.as_ref(), engine.bounds().max_tokens);
            let started = job.and_then(|Job { request, kind }| {
                let handle = engine.submit(request).map_err(|e| e.to_string())?;
                Ok((handle, kind))
            });
            match started {
                Ok((handle, kind)) => {
                    let (id, completion) = (line.id().to_owned(), Completion::default());
                    running.push(Running { id, kind, handle, completion });
                }
                Err(reason) => {
                    failed += 1;
                    write(answer::refused(line.id(), &reason))?;
                }
            }
        }
        let mut still = Vec::with_capacity(running.len());
        for mut request in running {
            let mut ended = None;
            while ended.is_none()
                && let Some(event) = request.handle.try_recv()
            {
                match request.completion.push(event) {
                    Ok(false) => {}
                    Ok(true) => ended = Some(Ok(())),
                    Err(error) => ended = Some(Err(error)),
                }
            }
            match ended {
                None => still.push(request),
                Some(Ok(())) => {
                    let body = answer::body(&request.kind, tokenizer, &request.completion);
                    write(answer::done(&request.id, body))?;
                }
                Some(Err(error)) => {
                    failed += 1;
                    write(answer::refused(&request.id, &error.to_string()))?;
                }
            }
        }
        running = still;
        if !running.is_empty() {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    bar.finish_and_clear();
    Ok(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use clap::Parser;

    /// More requests, and more tokens of prompts, than a server lets wait.
    #[test]
    fn a_long_queue_refuses_nothing() {
        let Command::Batch(args) = Cli::parse_from(["deepinfer", "batch", "in", "out"]).command
        else {
            panic!("another command");
        };
        let config = config(&args).expect("settings");
        assert_eq!(
            (config.max_queued_requests, config.max_queued_tokens),
            (usize::MAX, usize::MAX)
        );
    }
}
