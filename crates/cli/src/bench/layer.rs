//! `deepinfer bench layer`: layers of the released sizes with random weights, made on the device.

mod marks;
mod measure;
mod print;
mod rig;
mod timed;
mod work;

use crate::args::BenchLayer;
use crate::failure::{Failure, Outcome};
use crate::text;
use deepinfer::synth::{self, Options, Plan, Preset};
use deepinfer_device::{Cpu, DeviceChoice};
use measure::{Case, Measure, Mode};
use rig::{Bytes, Rig, Sizes, geometry, page_bytes};
use serde::Serialize;
use std::num::NonZeroUsize;
use std::str::FromStr;
use std::sync::Arc;
use timed::Timed;
use work::stored_bytes;

/// Layers: so many, or as many as fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slice {
    /// So many.
    Layers(usize),
    /// As many as the device's memory holds.
    Most,
}

impl FromStr for Slice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.parse()) {
            ("max", _) => Ok(Slice::Most),
            (_, Ok(n)) if (6..=40).contains(&n) => Ok(Slice::Layers(n)),
            _ => Err("a number from 6 to 40, or max".into()),
        }
    }
}

/// What was measured.
#[derive(Serialize)]
struct Report {
    device: String,
    /// Whether the sizes are the released ones.
    released: bool,
    layers: usize,
    draft_stages: usize,
    hidden: usize,
    experts: usize,
    /// Rows of each n-gram table, and where they lie together, in bytes.
    engram_rows: Vec<u64>,
    engram_bytes: u64,
    seed: u64,
    read_gb_per_s: f64,
    /// Bytes of device memory; none on a CPU.
    memory: Option<Memory>,
    cases: Vec<Case>,
}

#[derive(Clone, Copy, Serialize)]
struct Memory {
    all: usize,
    free: usize,
    #[serde(flatten)]
    bytes: Bytes,
}

/// Most rows of a case.
const MOST_ROWS: usize = 1 << 20;

/// Measures and prints.
pub fn run(args: &BenchLayer) -> Outcome {
    for (name, sizes) in [("--rows", &args.rows), ("--prefill", &args.prefill)] {
        if let Some(size) = sizes.iter().find(|size| **size > MOST_ROWS) {
            return Err(Failure::Usage(format!("{name} {size}: at most {MOST_ROWS} rows")));
        }
    }
    match args.device.resolve() {
        DeviceChoice::Cuda(ordinal) => {
            let slice = args.slice.unwrap_or(Slice::Layers(6));
            measure(&Arc::new(crate::open::gpu(ordinal)?), args, Some(slice), &GPU)
        }
        DeviceChoice::Cpu | DeviceChoice::Auto => {
            if args.slice.is_some() || args.engram_rows.is_some() {
                let text = "the CPU measures a small shape; leave --slice and --engram-rows out";
                return Err(Failure::Usage(text.into()));
            }
            let threads = args.threads.map(NonZeroUsize::get);
            measure(&Arc::new(Cpu::new(threads)?), args, None, &CPU)
        }
    }
}

/// Cases that are measured unless the command line names others.
struct Defaults {
    rows: &'static [usize],
    prefill: &'static [usize],
    context: &'static [usize],
}

const GPU: Defaults = Defaults {
    rows: &[1, 2, 4, 8, 16, 32, 64, 128],
    prefill: &[1024, 4096, 16384],
    context: &[16384, 131_072, 1_048_576],
};
const CPU: Defaults = Defaults { rows: &[1, 4], prefill: &[64], context: &[256, 1024] };

/// The numbers of an option, or what stands for them. 0 alone means none.
fn numbers(given: &[usize], otherwise: &[usize]) -> Vec<usize> {
    let numbers = if given.is_empty() { otherwise } else { given };
    numbers.iter().copied().filter(|n| *n > 0).collect()
}

fn measure<D: Timed>(
    device: &Arc<D>,
    args: &BenchLayer,
    slice: Option<Slice>,
    defaults: &Defaults,
) -> Outcome {
    let rows = numbers(&args.rows, defaults.rows);
    let prefill = numbers(&args.prefill, defaults.prefill);
    let contexts = numbers(&args.context, defaults.context);
    let mut options = Options::new(Preset::Tiny);
    options.engram_rows = args.engram_rows;
    if slice.is_some() {
        options.preset = Preset::FlashLayers(6);
    }
    let mut plan = synth::plan(&options)?;
    let c = &plan.config.text_config;
    let (Some(&context), sequences) =
        (contexts.iter().max(), rows.iter().max().copied().unwrap_or(1))
    else {
        return Err(Failure::Usage("--context needs a number of positions above 0".into()));
    };
    if context > c.max_position_embeddings {
        return Err(Failure::Usage(format!(
            "--context {context} exceeds the {} positions of the model",
            c.max_position_embeddings
        )));
    }
    let chunk = args.chunk.get();
    let longest = prefill.iter().max().copied().unwrap_or(1).min(chunk);
    let sizes = Sizes { rows: longest.max(sequences * c.dspark_block_size), sequences, context };
    let layers = match slice {
        Some(Slice::Most) => most_layers(&**device, &plan, sizes)?,
        Some(Slice::Layers(layers)) => layers,
        None => c.num_hidden_layers,
    };
    if slice.is_some() && layers != 6 {
        options.preset = Preset::FlashLayers(layers);
        plan = synth::plan(&options)?;
    }

    let read_rate = device.limits(&mut device.yardstick()?)?.memory;
    let mut rig = Rig::new(device, &plan, sizes, args.seed)?;
    let memory = device.memory()?;
    let memory = memory.map(|(free, all)| Memory { all, free, bytes: rig.bytes });
    let mut cases = Vec::new();
    let mut measure = Measure { rig: &mut rig, plan: &plan, read_rate };
    for &context in &contexts {
        for &rows in &rows {
            cases.push(measure.decode(rows, context)?);
        }
        for &rows in prefill.iter().filter(|rows| **rows <= context) {
            cases.push(measure.prefill(Mode::Prefill, rows, context, chunk)?);
            cases.push(measure.prefill(Mode::Prompt, rows, context, chunk)?);
        }
    }
    for &rows in &rows {
        cases.extend(measure.draft_stage(rows, context)?);
    }
    let c = &plan.config.text_config;
    let row = (c.engram_head_dim + c.engram_head_dim.div_ceil(32)) as u64;
    let report = Report {
        device: device.describe(),
        released: slice.is_some(),
        layers,
        draft_stages: c.num_nextn_predict_layers,
        hidden: c.hidden_size,
        experts: c.n_routed_experts,
        engram_rows: c.engram_num_embeddings.clone(),
        engram_bytes: row * c.engram_num_embeddings.iter().sum::<u64>(),
        seed: args.seed,
        read_gb_per_s: read_rate / 1e9,
        memory,
        cases,
    };
    if args.json { Ok(text::json(&report)?) } else { Ok(print::report(&report, args.operations)?) }
}

/// As many layers as fit beside caches for all sequences and the work space of a step. `plan` is
/// that of six layers.
fn most_layers<D: Timed>(device: &D, plan: &Plan, sizes: Sizes) -> Outcome<usize> {
    let Some((free, _)) = device.memory()? else { return Ok(6) };
    let c = &plan.config.text_config;
    let bytes = |prefix: &str| -> usize {
        let specs = plan.specs.iter().filter(|s| s.name.starts_with(prefix));
        let specs = specs.filter(|s| !s.name.ends_with("engram.embed.weight"));
        specs.map(|s| stored_bytes(s, c.hc_mult) as usize).sum()
    };
    let vision = ["vision.", "aligner.", "image_"].map(bytes).iter().sum::<usize>();
    let geometry = geometry(c);
    let pages = sizes.sequences * geometry.pages_for(sizes.context);
    // Work space: about 0.5 MB a row, logits, and what a device keeps for itself.
    let work = sizes.rows * (512 << 10) + 4 * sizes.sequences * c.vocab_size + rig::MARGIN;
    let fixed = bytes("") - vision + pages * page_bytes(device, c, &geometry) + work;
    let more = free.saturating_sub(fixed) / bytes("layers.3.");
    Ok((6 + more).min(40))
}
