//! Scheduled verification against fixed draft lengths, with drafts of imposed chances:
//!
//! ```text
//! cargo bench -p deepinfer --bench drafting -- MODEL_DIR
//! ```
//! For 1, 4 and 16 sequences: tokens a second of every fixed length (a quick look), then the best
//! of them and scheduled verification in turn, medians of 9 pairs. For one sequence also the
//! speed-up over no drafting, and the one that acceptance and the cost curve predict. About five
//! minutes on two cores with `synth --preset bench`.

use deepinfer::cache::tiers::Tiers;
use deepinfer::checkpoint::{Checkpoint, Source};
use deepinfer::drafting::{CostCurve, KnownDrafts};
use deepinfer::engine::{DraftMode, EngineConfig, PrefixCache};
use deepinfer::engram::Engram;
use deepinfer::metrics::Metrics;
use deepinfer::model::Model;
use deepinfer::output::OutputText;
use deepinfer::request::{Event, RequestHandle, RequestId, SamplingParams, event_queue};
use deepinfer::schedule::{Scheduler, Shape};
use deepinfer::sequence::{Arrival, Form};
use deepinfer::step::{Inline, StepLoop};
use deepinfer::tokenizer::Tokenizer;
use deepinfer::worker::ModelWorker;
use deepinfer_device::Cpu;
use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

/// Half of the blocks are easy to guess, half are hard.
const PROFILES: [[f32; 5]; 2] = [[0.9, 0.85, 0.8, 0.75, 0.7], [0.5, 0.4, 0.3, 0.2, 0.1]];

const SEQUENCES: [usize; 3] = [1, 4, 16];
const PAIRS: usize = 9;
const PROMPT: usize = 4;
const OUTPUT: usize = 64;

/// A model, and how texts go on in it.
struct Bench {
    device: Arc<Cpu>,
    model: Arc<Model<Cpu>>,
    known: Arc<KnownDrafts>,
    curve: CostCurve,
}

/// An engine whose steps are made one by one, with a number of requests that never ends.
struct Runner {
    steps: StepLoop<Inline<ModelWorker<Cpu>>>,
    metrics: Arc<Metrics>,
    handles: Vec<(usize, RequestHandle)>,
    sequences: usize,
    next: u64,
    known: Arc<KnownDrafts>,
}

/// What steps that only decode gave.
#[derive(Clone, Copy, Default)]
struct Sum {
    tokens: usize,
    seconds: f64,
    /// Seconds that the curve says.
    predicted: f64,
}

impl Sum {
    fn speed(&self) -> f64 {
        self.tokens as f64 / self.seconds
    }
}

impl Bench {
    fn runner(&self, draft: DraftMode, sequences: usize) -> Result<Runner, Box<dyn Error>> {
        let config = EngineConfig {
            draft,
            max_seqs: sequences,
            max_batch_tokens: 256,
            prefill_chunk: 128,
            kv_tokens: 128 * 2 * sequences,
            prefix_cache: PrefixCache::Off,
            known_drafts: Some(self.known.clone()),
            ..EngineConfig::default()
        };
        let mut shape = Shape::new(&self.model.config, &config, b"bench")?;
        shape.costs = self.curve.clone();
        let (device, model) = (self.device.clone(), self.model.clone());
        let worker = ModelWorker::new(device, model, &shape, config.cache_format)?;
        let metrics = Arc::new(Metrics::default());
        let scheduler = Scheduler::new(shape, Tiers::default(), metrics.clone());
        let executor = Inline::new(worker.with_settings(&config));
        let steps = StepLoop::new(scheduler, executor, false);
        let (handles, known) = (Vec::new(), self.known.clone());
        Ok(Runner { steps, metrics, handles, sequences, next: 0, known })
    }

    /// Makes `count` steps that only decode.
    fn run(&self, runner: &mut Runner, count: usize) -> Result<Sum, Box<dyn Error>> {
        let mut sum = Sum::default();
        let mut made = 0;
        while made < count {
            runner.fill();
            let m = &runner.metrics;
            let before = (m.prefill_rows.get(), m.decode_rows.get(), m.drafted[0].get());
            let start = Instant::now();
            runner.steps.step()?;
            let seconds = start.elapsed().as_secs_f64();
            let m = &runner.metrics;
            let prompts = m.prefill_rows.get() > before.0;
            let rows = (m.decode_rows.get() - before.1) as usize;
            let drafting = (m.drafted[0].get() - before.2) as usize;
            let tokens = runner.drain();
            if prompts {
                continue;
            }
            made += 1;
            sum.tokens += tokens;
            sum.seconds += seconds;
            let drafting = if drafting > 0 { self.curve.draft(drafting) } else { 0.0 };
            sum.predicted += self.curve.step(rows) + drafting;
        }
        Ok(sum)
    }
}

impl Runner {
    /// Starts requests for those that have ended.
    fn fill(&mut self) {
        while self.handles.len() < self.sequences {
            let text = (0..self.sequences)
                .find(|i| self.handles.iter().all(|(used, _)| used != i))
                .unwrap_or_default();
            let (prompt, output) = &self.known.texts[text];
            let params = SamplingParams { ignore_eos: true, ..SamplingParams::default() };
            let id = RequestId(self.next);
            self.next += 1;
            let (sink, handle) = event_queue(id);
            let length = if output.is_empty() { OUTPUT } else { output.len() };
            self.steps.scheduler.submit(Arrival {
                id,
                priority: 0,
                salt: None,
                params,
                prompt: prompt.clone(),
                seed: text as u64,
                form: Form::Free,
                leader: None,
                max_len: prompt.len() + length,
                text: OutputText::new(None, Vec::new()),
                sink,
                time: Instant::now(),
            });
            self.handles.push((text, handle));
        }
    }

    /// Reads events; returns how many tokens came.
    fn drain(&mut self) -> usize {
        let mut tokens = 0;
        self.handles.retain(|(_, handle)| {
            while let Some(event) = handle.try_recv() {
                if let Event::Tokens { tokens: new, .. } = event {
                    tokens += new.len();
                }
            }
            !handle.is_done()
        });
        tokens
    }
}

/// What each prompt goes on with.
fn outputs(bench: &Bench, count: usize) -> Result<Vec<Vec<u32>>, Box<dyn Error>> {
    let mut runner = bench.runner(DraftMode::Off, count)?;
    runner.fill();
    while runner.steps.step()? {}
    let mut outputs = vec![Vec::new(); count];
    for (text, handle) in runner.handles {
        outputs[text] = handle.wait()?.ids();
    }
    Ok(outputs)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

fn compare(bench: &Bench, sequences: usize) -> Result<(), Box<dyn Error>> {
    // Fewer steps where each takes longer.
    let steps = (12 / sequences).max(3);
    let mut fixed = Vec::new();
    for length in 0..=5 {
        let mut runner = bench.runner(DraftMode::Fixed(length), sequences)?;
        bench.run(&mut runner, 1)?;
        let speed = bench.run(&mut runner, steps.min(8))?.speed();
        println!("{sequences:>3} sequences, {length} drafts: {speed:.2} tokens/s");
        fixed.push((speed, runner, length));
    }
    fixed.sort_by(|a, b| b.0.total_cmp(&a.0));
    let (_, mut best, length) = fixed.remove(0);
    let mut auto = bench.runner(DraftMode::Auto, sequences)?;
    // Long enough to know whether drafting pays at all.
    bench.run(&mut auto, if sequences == 1 { 40 } else { 10 })?;
    let mut off = bench.runner(DraftMode::Off, 1)?;
    bench.run(&mut off, 1)?;
    let (mut ratios, mut gains) = (Vec::new(), Vec::new());
    let mut all = [Sum::default(); 2];
    let first = bench.curve.step(1);
    let mut predicted = Vec::new();
    for pair in 0..PAIRS {
        let mut sums = [Sum::default(); 2];
        for turn in [pair % 2, 1 - pair % 2] {
            let runner = if turn == 0 { &mut auto } else { &mut best };
            sums[turn] = bench.run(runner, steps)?;
            all[turn].tokens += sums[turn].tokens;
            all[turn].seconds += sums[turn].seconds;
        }
        ratios.push(sums[0].speed() / sums[1].speed());
        if sequences == 1 {
            gains.push(sums[0].speed() / bench.run(&mut off, steps)?.speed());
            predicted.push(sums[0].tokens as f64 * first / sums[0].predicted);
        }
    }
    let m = &auto.metrics;
    let counts = |c: &[deepinfer::metrics::Counter]| -> Vec<u64> {
        c.iter().take(5).map(deepinfer::metrics::Counter::get).collect()
    };
    println!(
        "{sequences:>3} sequences: scheduled {:.2}, {length} drafts {:.2} tokens/s; ratio {:.3} \
         (at least 0.95 is wanted)\n    drafted {:?}, verified {:?}, accepted {:?}",
        all[0].speed(),
        all[1].speed(),
        median(ratios),
        counts(&m.drafted),
        counts(&m.verified),
        counts(&m.accepted),
    );
    if sequences == 1 {
        let (gain, predicted) = (median(gains), median(predicted));
        println!(
            "    one sequence: {gain:.2} times without drafting, predicted {predicted:.2}; off by \
             {:.0}% (at most 15% is wanted)",
            100.0 * (gain / predicted - 1.0).abs()
        );
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1).filter(|a| !a.starts_with("--"));
    let Some(model) = arguments.next() else {
        println!("no MODEL_DIR given");
        return Ok(());
    };
    let start = Instant::now();
    let mut checkpoint = Checkpoint::open(Source::directory(model))?;
    let tokenizer = Tokenizer::from_bytes(checkpoint.tokenizer_json()?)?;
    let device = Arc::new(Cpu::new(None)?);
    let engram = Engram::new(&checkpoint.config().text_config, &tokenizer)?;
    let model = Arc::new(Model::load(&*device, &mut checkpoint, engram, &mut |_, _| {})?);
    let vocab = model.config.text_config.vocab_size as u32;

    let most = SEQUENCES[SEQUENCES.len() - 1];
    let prompt = |i: usize| (0..PROMPT).map(|j| 3 + (i * 97 + j * 31) as u32 % 400).collect();
    let mut known = KnownDrafts {
        texts: (0..most).map(|i| (prompt(i), Vec::new())).collect(),
        profiles: PROFILES.iter().map(|p| p.to_vec()).collect(),
        seed: 1,
        vocab,
    };
    let mut bench = Bench {
        device: device.clone(),
        model: model.clone(),
        known: Arc::new(known.clone()),
        curve: CostCurve::default(),
    };
    let texts = outputs(&bench, most)?;
    known.texts.iter_mut().zip(texts).for_each(|((_, output), text)| *output = text);
    bench.known = Arc::new(known);
    println!("{most} texts of {OUTPUT} tokens: {:.0} s", start.elapsed().as_secs_f64());

    let config =
        EngineConfig { max_seqs: most, kv_tokens: 128 * 2 * most, ..EngineConfig::default() };
    let shape = Shape::new(&model.config, &config, b"bench")?;
    let measuring = Instant::now();
    let mut worker = ModelWorker::new(device, model, &shape, config.cache_format)?;
    bench.curve = worker.measure_costs(&shape, |_| None)?;
    drop(worker);
    println!("cost curve: {:.0} s", measuring.elapsed().as_secs_f64());
    let line = |points: &[(usize, f64)]| {
        let each = points.iter().map(|(size, seconds)| format!("{size}: {:.0}", 1e3 * seconds));
        each.collect::<Vec<_>>().join(", ")
    };
    println!("  steps by rows, ms: {}", line(&bench.curve.steps));
    println!("  drafting by sequences, ms: {}", line(&bench.curve.drafts));
    for sequences in SEQUENCES {
        compare(&bench, sequences)?;
    }
    println!("{:.0} s in all", start.elapsed().as_secs_f64());
    Ok(())
}
