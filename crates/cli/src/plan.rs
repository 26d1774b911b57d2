//! `deepinfer plan`.

use crate::args::Plan;
use crate::failure::{Failure, Outcome};
use crate::{named, open, text};
use anyhow::Context;
use deepinfer::engine::EngineConfig;
use deepinfer::plan_memory::{MemoryPlan, available_memory};
use deepinfer_device::{Cuda, DeviceChoice};

/// Shows what a model needs of a machine, and fails where it does not fit.
pub fn run(args: &Plan) -> Outcome {
    let available = match &args.memory {
        None => None,
        Some(size) => Some(text::size("--memory", size).map_err(Failure::Usage)?),
    };
    let checkpoint = open::checkpoint(&args.model)?;
    let missing = checkpoint.missing();
    if !missing.is_empty() {
        let (place, names) = (checkpoint.source().place(), open::named(&missing));
        let why = format!("{place} lacks tensors that its configuration needs: {names}");
        return Err(anyhow::anyhow!("{why}; is the download complete?").into());
    }
    if !checkpoint.has_tokenizer() {
        tell!("tokenizer.json is missing: the model can be planned for, but not run");
    }
    let d = EngineConfig::default();
    let config = EngineConfig {
        max_seqs: args.max_seqs.unwrap_or(d.max_seqs),
        kv_tokens: args.kv_tokens.unwrap_or(d.kv_tokens),
        max_batch_tokens: args.max_batch_tokens.unwrap_or(d.max_batch_tokens),
        cache_format: args.kv.into(),
        device: args.device,
        ..d
    };
    let knobs = &named::PLAN;
    let plan = MemoryPlan::new(&checkpoint, &config).map_err(|e| named::setting(&e, knobs))?;
    let (verdict, gpu) = match (args.device.resolve(), available) {
        (DeviceChoice::Cuda(_), Some(bytes)) => (plan.check_gpu(bytes), Some(bytes)),
        (DeviceChoice::Cuda(ordinal), None) => {
            let free = Cuda::open(ordinal).and_then(|device| device.memory());
            let free = free.with_context(|| format!("cannot use {}", args.device))?.0 as u64;
            let host = available_memory().map_or(Ok(()), |available| plan.check_tables(available));
            (host.and(plan.check_gpu(free)), Some(free))
        }
        (_, Some(bytes)) => (plan.check(bytes), None),
        (_, None) => (plan.check_host(), None),
    };
    let positions = checkpoint.config().text_config.max_position_embeddings;
    // What `--kv-tokens` would be on its own.
    let fills = gpu
        .filter(|_| verdict.is_ok())
        .map(|free| plan.tokens_that_fill(free.saturating_sub(plan.device_weights), positions));
    if args.json {
        text::json(&serde_json::json!({
            "plan": plan,
            "available_bytes": gpu.or(available),
            "fits": verdict.is_ok(),
            "tokens_that_fill": fills,
        }))?;
    } else {
        print(&plan, gpu.is_some(), fills)?;
    }
    Ok(verdict.map_err(|error| anyhow::anyhow!(error.told(knobs.advice)))?)
}

/// What the plan says, on a GPU or not; with what its pages would hold, where that is known.
fn print(plan: &MemoryPlan, gpu: bool, fills: Option<usize>) -> std::io::Result<()> {
    let line = |name: &str, value: String| vec![name.to_owned(), value];
    let bytes = |name: &str, n: u64| line(name, text::bytes(n));
    let weights = if gpu { "weights" } else { "weights, read in place from the mapped files" };
    let mut rows = vec![line(weights, String::new())];
    let mut total = 0;
    for (part, &n) in &plan.mapped_weights {
        rows.push(bytes(&format!("  {part}"), n));
        total += n;
    }
    rows.push(bytes("  all", total));
    rows.push(line("allocated at the start", String::new()));
    let slots = plan.sequences + plan.snapshots;
    rows.push(bytes(&format!("  {slots} slots of sequences and snapshots"), plan.slot_pool_bytes));
    let tokens = text::count(plan.pool_tokens as u64);
    rows.push(bytes(&format!("  pages for {tokens} tokens"), plan.page_pool_bytes));
    rows.push(bytes("  work space of a step", plan.scratch_bytes));
    rows.push(bytes("  all", plan.allocated_bytes));
    rows.push(bytes(
        "host memory for prefixes and preempted requests, at most",
        plan.host_cache_bytes,
    ));
    rows.push(line("a sequence, whatever its length", text::bytes(plan.sequence_bytes)));
    rows.push(line("a token", format!("{:.1} B", plan.token_bytes)));
    rows.push(line("sequences at a time", text::count(plan.sequences as u64)));
    rows.push(line("longest sequence", text::count(plan.longest_sequence as u64)));
    for tokens in [1024, 8192, 65536] {
        let fit = text::count(plan.sequences_of(tokens) as u64);
        rows.push(line(&format!("sequences of {} tokens", text::count(tokens as u64)), fit));
    }
    if gpu {
        rows.push(bytes("weights in the GPU's memory", plan.device_weights));
        rows.push(bytes("n-gram tables in page-locked host memory", plan.host_tables));
    }
    if let Some(tokens) = fills {
        rows.push(line("tokens that the rest of it holds", text::count(tokens as u64)));
    }
    text::table(&rows)
}
