//! The engine as commands use it.

use crate::args::{DraftArgs, EngineArgs, ModelArgs, RunArgs, SamplingArgs, Switch};
use crate::failure::{Failure, Outcome};
use crate::named::{self, Knobs};
use crate::{open, text};
use anyhow::Context;
use deepinfer::engine::{Engine, EngineConfig, EngineError, PrefixCache};
use deepinfer::request::SamplingParams;
use deepinfer::settings::Settings;
use deepinfer::tokenizer::Tokenizer;
use std::num::NonZeroUsize;
use std::str::FromStr;

/// Opens the checkpoint and starts an engine, for a command with these `knobs`.
pub fn start(model: &ModelArgs, config: &EngineConfig, knobs: &Knobs) -> Outcome<Engine> {
    let source = open::source(model)?;
    let place = source.place();
    let bar = open::bar("loading", 0);
    let mut progress = |done: usize, all: usize| {
        bar.set_length(all as u64);
        bar.set_position(done as u64);
    };
    let engine = Engine::open(source, config, &mut progress);
    bar.finish_and_clear();
    match engine {
        Ok(engine) => Ok(engine),
        Err(error) if error.is_setting() => Err(named::setting(&error, knobs)),
        Err(EngineError::DoesNotFit(error)) => {
            let why = anyhow::anyhow!(error.told(knobs.advice));
            Err(why.context(format!("cannot run {place}")).into())
        }
        Err(error) => Err(anyhow::Error::new(error).context(format!("cannot run {place}")).into()),
    }
}

/// Reads a setting of the engine from its text.
pub fn setting<T: FromStr<Err = EngineError>>(text: &str) -> Outcome<T> {
    text.parse().map_err(|e: EngineError| named::setting(&e, &named::ENGINE))
}

/// Settings for one sequence at a time, of at most `tokens` tokens.
pub fn single(run: &RunArgs, draft: &DraftArgs, tokens: usize) -> Outcome<EngineConfig> {
    Ok(EngineConfig {
        max_batch_tokens: 256,
        prefill_chunk: 256,
        max_seqs: 1,
        kv_tokens: tokens,
        device_snapshots: 0,
        swap_bytes: 0,
        prefix_cache: PrefixCache::Off,
        draft: setting(&draft.draft)?,
        draft_scheme: setting(&draft.draft_scheme)?,
        costs_dir: Settings::get().cache_dir.clone(),
        cache_format: run.kv.into(),
        device: run.device,
        threads: run.threads.map(NonZeroUsize::get),
        ..EngineConfig::default()
    })
}

/// Settings for many requests.
pub fn many(args: &EngineArgs, run: &RunArgs) -> Outcome<EngineConfig> {
    let d = EngineConfig::default();
    let number = |n: Option<NonZeroUsize>, default| n.map_or(default, NonZeroUsize::get);
    let size = |option, size: &Option<String>, default| match size {
        Some(size) => text::size(option, size).map_err(Failure::Usage),
        None => Ok(default),
    };
    let host = size("--host-cache", &args.host_cache, d.host_cache_bytes as u64)?;
    let max_batch_tokens = number(args.max_batch_tokens, d.max_batch_tokens);
    Ok(EngineConfig {
        max_batch_tokens,
        max_seqs: number(args.max_seqs, d.max_seqs),
        prefill_chunk: number(args.prefill_chunk, d.prefill_chunk.min(max_batch_tokens)),
        kv_tokens: number(args.kv_tokens, d.kv_tokens),
        fill_memory: args.kv_tokens.is_none(),
        prefix_cache: args.prefix_cache.as_deref().map_or(Ok(d.prefix_cache), setting)?,
        host_cache_bytes: usize::try_from(host).unwrap_or(usize::MAX),
        disk_cache_bytes: size("--disk-cache", &args.disk_cache, d.disk_cache_bytes)?,
        prefill: args.prefill.as_deref().map_or(Ok(d.prefill), setting)?,
        draft: setting(&args.draft.draft)?,
        draft_scheme: setting(&args.draft.draft_scheme)?,
        costs_dir: Settings::get().cache_dir.clone(),
        overlap: args.overlap.map_or(d.overlap, |s| s == Switch::On),
        graphs: args.graphs.map_or(d.graphs, |s| s == Switch::On),
        cache_format: run.kv.into(),
        device: run.device,
        threads: run.threads.map(NonZeroUsize::get),
        ..EngineConfig::default()
    })
}

/// Parameters of a request, with `max_tokens` where the command line has none.
pub fn sampling(
    args: &SamplingArgs,
    tokenizer: &Tokenizer,
    max_tokens: Option<usize>,
) -> Outcome<SamplingParams> {
    let mut bad_words = Vec::new();
    for word in &args.bad_words {
        // A word inside a text usually stands after a space.
        for text in [word.clone(), format!(" {word}")] {
            bad_words.push(tokenizer.encode(&text).context("--bad-words")?);
        }
    }
    Ok(SamplingParams {
        temperature: args.temperature,
        top_p: args.top_p,
        top_k: u32::try_from(args.top_k).unwrap_or(0),
        min_p: args.min_p,
        repetition_penalty: args.repetition_penalty,
        presence_penalty: args.presence_penalty,
        frequency_penalty: args.frequency_penalty,
        seed: args.seed,
        max_tokens: args.max_tokens.map(NonZeroUsize::get).or(max_tokens),
        stop: args.stop.clone(),
        stop_tokens: args.stop_token_ids.clone(),
        ignore_eos: args.ignore_eos,
        min_tokens: args.min_tokens,
        bad_words,
        allowed_tokens: args.allowed_token_ids.clone(),
        logit_bias: args.logit_bias.clone(),
        ..SamplingParams::default()
    })
}

/// The tokenizer of a running engine: every command opens engines that have one.
pub fn tokenizer(engine: &Engine) -> Outcome<&Tokenizer> {
    let tokenizer = engine.tokenizer().context("the engine has no tokenizer")?;
    Ok(tokenizer.as_ref())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use clap::Parser;

    #[test]
    fn caches_are_as_large_as_the_options_say() {
        let sizes = |options: &[&str]| {
            let line = [&["deepinfer", "batch", "in", "out"], options].concat();
            let Command::Batch(batch) = Cli::parse_from(line).command else {
                panic!("it is batch")
            };
            let config = many(&batch.engine, &batch.run).expect("sizes");
            (config.host_cache_bytes, config.disk_cache_bytes)
        };
        assert_eq!(sizes(&[]), (1 << 30, 16 << 30));
        let options = ["--host-cache", "2MiB", "--disk-cache", "300GB"];
        assert_eq!(sizes(&options), (2 << 20, 300_000_000_000));
        assert_eq!(sizes(&["--host-cache", "0"]).0, 0);
    }
}
