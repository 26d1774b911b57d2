//! `deepinfer inspect`.

use crate::args::Inspect;
use crate::failure::Outcome;
use crate::{open, text};
use deepinfer::cache::CacheFormat;
use deepinfer::checkpoint::{Checkpoint, Part};
use deepinfer::config::ModelConfig;
use deepinfer::engine::{EngineConfig, EngineError};
use deepinfer::plan_memory::MemoryPlan;
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::Write;

/// What is in a checkpoint.
#[derive(Serialize)]
struct Contents {
    place: String,
    layers: usize,
    draft_stages: usize,
    vocabulary: usize,
    hidden_size: usize,
    longest_sequence: usize,
    tensors: usize,
    shards: usize,
    bytes: u64,
    parts: Vec<PartSize>,
    per_layer: Vec<LayerSize>,
    caches: Vec<CacheLine>,
    /// Tensors that the configuration needs, and the tokenizer, as far as they are not there.
    missing: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    list: Option<Vec<TensorLine>>,
}

#[derive(Serialize)]
struct PartSize {
    part: &'static str,
    tensors: usize,
    bytes: u64,
}

#[derive(Serialize)]
struct LayerSize {
    layer: usize,
    draft_stage: bool,
    kind: String,
    bytes: u64,
}

#[derive(Serialize)]
struct CacheLine {
    format: &'static str,
    bytes_per_token: f64,
    bytes_per_sequence: u64,
}

#[derive(Serialize)]
struct TensorLine {
    name: String,
    dtype: String,
    shape: Vec<u64>,
    bytes: u64,
    shard: String,
}

/// Prints it.
pub fn run(args: &Inspect) -> Outcome {
    let checkpoint = open::checkpoint(&args.model)?;
    let contents = contents(&checkpoint, args.tensors)?;
    if args.json {
        text::json(&contents)?;
    } else {
        print(&contents)?;
    }
    Ok(())
}

fn contents(checkpoint: &Checkpoint, list: bool) -> Result<Contents, EngineError> {
    let config = checkpoint.config();
    let c = &config.text_config;
    let mut parts: BTreeMap<Part, (usize, u64)> = BTreeMap::new();
    let mut layers: BTreeMap<(bool, usize), u64> = BTreeMap::new();
    let mut shards = std::collections::BTreeSet::new();
    let (mut tensors, mut bytes) = (0, 0);
    for t in checkpoint.tensors() {
        let part = parts.entry(t.part).or_default();
        *part = (part.0 + 1, part.1 + t.bytes);
        if let Some(layer) = t.layer {
            *layers.entry((t.part == Part::Draft, layer)).or_default() += t.bytes;
        }
        shards.insert(t.shard.to_owned());
        (tensors, bytes) = (tensors + 1, bytes + t.bytes);
    }
    let parts = Part::ALL
        .iter()
        .filter_map(|p| {
            let (tensors, bytes) = *parts.get(p)?;
            Some(PartSize { part: p.name(), tensors, bytes })
        })
        .collect();
    let per_layer = layers
        .into_iter()
        .map(|((draft_stage, layer), bytes)| LayerSize {
            layer,
            draft_stage,
            kind: if draft_stage { "draft stage".into() } else { kind(config, layer) },
            bytes,
        })
        .collect();
    let mut caches = Vec::new();
    for (format, cache_format) in
        [("released", CacheFormat::Released), ("exact", CacheFormat::Exact)]
    {
        let settings = EngineConfig { cache_format, ..EngineConfig::default() };
        let plan = MemoryPlan::new(checkpoint, &settings)?;
        caches.push(CacheLine {
            format,
            bytes_per_token: plan.token_bytes,
            bytes_per_sequence: plan.sequence_bytes,
        });
    }
    let list = list.then(|| {
        let line = |t: deepinfer::checkpoint::TensorInfo<'_>| TensorLine {
            name: t.name.to_owned(),
            dtype: format!("{:?}", t.dtype),
            shape: t.shape.to_vec(),
            bytes: t.bytes,
            shard: t.shard.to_owned(),
        };
        checkpoint.tensors().map(line).collect()
    });
    Ok(Contents {
        place: checkpoint.source().place(),
        layers: c.num_hidden_layers,
        draft_stages: c.num_nextn_predict_layers,
        vocabulary: c.vocab_size,
        hidden_size: c.hidden_size,
        longest_sequence: c.max_position_embeddings,
        tensors,
        shards: shards.len(),
        bytes,
        parts,
        per_layer,
        caches,
        missing: open::missing(checkpoint),
        list,
    })
}

/// What a backbone layer does.
fn kind(config: &ModelConfig, layer: usize) -> String {
    let c = &config.text_config;
    let mut words = Vec::new();
    match c.compress_ratios.get(layer).copied().unwrap_or(0) {
        0 => words.push("window only".to_owned()),
        ratio => words.push(format!("ratio {ratio}")),
    }
    if c.is_kv_source(layer) {
        words.push("publishes rows".into());
    }
    if c.is_index_source(layer) {
        words.push("selects".into());
    }
    if c.candidate_source_layer_id == Some(layer) {
        words.push("publishes candidates".into());
    }
    if c.engram_layer_ids.contains(&layer) {
        words.push("n-gram memory".into());
    }
    if c.decoder_start() == Some(layer) {
        words.push("decoder starts".into());
    }
    words.join(", ")
}

fn print(c: &Contents) -> std::io::Result<()> {
    let mut out = std::io::stdout();
    writeln!(out, "{}", c.place)?;
    writeln!(
        out,
        "{} layers, {} draft stages, hidden size {}, vocabulary {}, sequences up to {} tokens",
        c.layers,
        c.draft_stages,
        c.hidden_size,
        text::count(c.vocabulary as u64),
        text::count(c.longest_sequence as u64)
    )?;
    writeln!(
        out,
        "{} tensors in {} files, {}\n",
        text::count(c.tensors as u64),
        c.shards,
        text::bytes(c.bytes)
    )?;
    if !c.missing.is_empty() {
        writeln!(out, "missing, so that the model cannot be run: {}\n", open::named(&c.missing))?;
    }
    let share = |bytes: u64| format!("{:.1}%", 100.0 * bytes as f64 / (c.bytes.max(1)) as f64);
    let head = |cells: &[&str]| cells.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>();
    let mut rows = vec![head(&["part", "tensors", "bytes", "share"])];
    for p in &c.parts {
        rows.push(vec![
            p.part.to_owned(),
            text::count(p.tensors as u64),
            text::bytes(p.bytes),
            share(p.bytes),
        ]);
    }
    text::table(&rows)?;
    writeln!(out)?;
    let mut rows = vec![head(&["layer", "bytes", "share", ""])];
    for l in &c.per_layer {
        let name = if l.draft_stage { format!("draft {}", l.layer) } else { l.layer.to_string() };
        rows.push(vec![name, text::bytes(l.bytes), share(l.bytes), l.kind.clone()]);
    }
    text::table(&rows)?;
    writeln!(out)?;
    let mut rows = vec![head(&["caches", "bytes a token", "bytes a sequence"])];
    for k in &c.caches {
        let token = format!("{:.1}", k.bytes_per_token);
        rows.push(vec![k.format.to_owned(), token, text::count(k.bytes_per_sequence)]);
    }
    text::table(&rows)?;
    if let Some(list) = &c.list {
        writeln!(out)?;
        let mut rows = vec![head(&["tensor", "type", "shape", "bytes", "file"])];
        for t in list {
            let shape = format!("{:?}", t.shape);
            rows.push(vec![
                t.name.clone(),
                t.dtype.clone(),
                shape,
                text::count(t.bytes),
                t.shard.clone(),
            ]);
        }
        text::table(&rows)?;
    }
    Ok(())
}
