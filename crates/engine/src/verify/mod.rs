//! Compares a model with reference numbers: a folder with `reference.json` and
//! `reference.safetensors`, made by another implementation from the same checkpoint.
//!
//! A free run computes a prompt in one pass and compares everything on the way, then continues
//! greedily and drafts at the reference's anchors. A forced run makes each layer start from the
//! reference's values (`force`), so that one layer's error is seen alone: for positions that no
//! two roundings of the arithmetic agree on, and for devices of lower precision.
//!
//! A device that stores activations in bf16 is compared by forced runs only ([`verify_rounding`]).
//! Before it the CPU makes the same run, compared with the reference as ever, and so gives what
//! references do not hold (`trace.rs`): then every layer and every draft stage starts from given
//! values, and what it adds is judged alone (`updates.rs`).

mod compare;
mod drafts;
mod error;
mod force;
mod record;
mod reference;
mod report;
mod rounding;
mod run;
mod tolerance;
mod trace;
mod updates;
mod vision;

pub use error::VerifyError;
pub use reference::{Continuation, DraftBlock, Index, Prompt, Reference, VisionPrompt};
pub use report::{Check, Report, Status};
pub use rounding::verify_rounding;

use crate::cache::CacheFormat;
use crate::model::Model;
use compare::Pass;
use deepinfer_device::{Device, RowFormat};
use force::{Excused, Forcer, ScoreError};
use record::{Recorder, Rows};
use report::Tally;
use run::{Runner, argmax};
use std::sync::Arc;
use tolerance::Tolerances;
use trace::{Forced, Trace};

/// Which half of a reference is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// Caches as computed ([`CacheFormat::Exact`]).
    F32,
    /// Caches rounded as released ([`CacheFormat::Released`]).
    Quantized,
}

impl Variant {
    /// Name in the reference.
    pub fn name(self) -> &'static str {
        match self {
            Variant::F32 => "f32",
            Variant::Quantized => "quantized",
        }
    }

    fn forced_name(self) -> &'static str {
        match self {
            Variant::F32 => "f32/forced",
            Variant::Quantized => "quantized/forced",
        }
    }

    fn drafts_name(self) -> &'static str {
        match self {
            Variant::F32 => "f32/drafts",
            Variant::Quantized => "quantized/drafts",
        }
    }

    fn cpu_name(self) -> &'static str {
        match self {
            Variant::F32 => "f32/cpu",
            Variant::Quantized => "quantized/cpu",
        }
    }

    fn cache_format(self) -> CacheFormat {
        match self {
            Variant::F32 => CacheFormat::Exact,
            Variant::Quantized => CacheFormat::Released,
        }
    }
}

/// What to compare.
#[derive(Clone, Debug)]
pub struct Options {
    /// Halves of the reference.
    pub variants: Vec<Variant>,
    /// Forced runs only.
    pub forced: bool,
}

/// Called with the prompts done, the prompts in all, and what is next.
pub type Progress<'a> = &'a mut dyn FnMut(usize, usize, &str);

/// Runs every prompt of `reference` and compares. The device computes with f32 activations
/// ([`runs_free`]); for others there is [`verify_rounding`].
pub fn verify<D: Device>(
    device: &Arc<D>,
    model: &Arc<Model<D>>,
    reference: &Reference,
    options: &Options,
    progress: Progress<'_>,
) -> Result<Report, VerifyError> {
    let mut verifier = Verifier { device, model, reference, report: Report::default() };
    if !runs_free(&**device) {
        return Err(VerifyError::Rounds);
    }
    let index = &reference.index;
    let total = options.variants.len() * (index.prompts.len() + index.vision.len());
    let mut done = 0;
    verifier.token_map()?;
    for prompt in &index.prompts {
        verifier.check_prompt(&prompt.name, &prompt.ids)?;
    }
    for &variant in &options.variants {
        let mut runner = verifier.runner(variant)?;
        for prompt in &index.prompts {
            progress(done, total, &format!("{} {}", variant.name(), prompt.name));
            verifier.prompt(&mut runner, variant, prompt, options.forced)?;
            done += 1;
        }
        for k in 0..index.vision.len() {
            progress(done, total, &format!("{} vision.{k}", variant.name()));
            verifier.vision(&mut runner, variant, k, options.forced)?;
            done += 1;
        }
    }
    progress(total, total, "");
    verifier.unused(options);
    Ok(verifier.report)
}

struct Verifier<'a, D: Device> {
    device: &'a Arc<D>,
    model: &'a Arc<Model<D>>,
    reference: &'a Reference,
    report: Report,
}

/// What a free pass leaves for the comparisons that follow it.
struct Lengths {
    rows: usize,
    limit: usize,
}

impl<'a, D: Device> Verifier<'a, D> {
    fn runner(&self, variant: Variant) -> Result<Runner<D>, VerifyError> {
        let index = &self.reference.index;
        let longest = |p: &Prompt| {
            let greedy = [&p.quantized, &p.f32].map(|c| c.as_ref().map_or(0, |c| c.greedy.len()));
            p.ids.len() + greedy[0].max(greedy[1])
        };
        let texts = index.prompts.iter().map(longest).max().unwrap_or(0);
        let images = index.vision.iter().map(|p| p.ids.len()).max().unwrap_or(0);
        let positions = texts.max(images) + self.model.config.text_config.dspark_block_size + 1;
        Ok(Runner::new(self.device, self.model, variant.cache_format(), positions)?)
    }

    fn check_prompt(&self, name: &str, ids: &[u32]) -> Result<(), VerifyError> {
        let vocab = self.model.config.text_config.vocab_size;
        let fail = |reason| Err(VerifyError::Prompt { name: name.to_owned(), reason });
        match ids.iter().find(|&&id| id as usize >= vocab) {
            Some(id) => fail(format!("token {id} is not in the vocabulary of {vocab}")),
            None if ids.is_empty() => fail("it is empty".to_owned()),
            None => Ok(()),
        }
    }

    fn stream_positions(&self, name: &str, rows: usize) -> Result<Vec<usize>, VerifyError> {
        let tensor = format!("{name}.stream_positions");
        if !self.reference.contains(&tensor) {
            return Ok((0..rows).collect());
        }
        let shape = self.reference.shape(&tensor)?;
        let positions = self.reference.integers(&tensor, &shape)?;
        positions
            .into_iter()
            .map(|p| match usize::try_from(p) {
                Ok(p) if p < rows => Ok(p),
                _ => Err(VerifyError::Prompt {
                    name: name.to_owned(),
                    reason: format!("stream position {p} lies outside its {rows} tokens"),
                }),
            })
            .collect()
    }

    /// What is compared for a prompt, in a free run, and what follows the prompt; `None`, with a
    /// line that says so, if the reference does not have it.
    fn pass<'p>(
        &mut self,
        variant: Variant,
        prompt: &'p Prompt,
    ) -> Result<Option<(Pass<'a>, &'p Continuation)>, VerifyError> {
        let name = &prompt.name;
        let continuation = match variant {
            Variant::F32 => prompt.f32.as_ref(),
            Variant::Quantized => prompt.quantized.as_ref(),
        };
        let rows = prompt.ids.len();
        let limit = continuation.and_then(|next| next.first_unstable_position).unwrap_or(rows);
        let model: &'a Model<D> = self.model;
        let pass = Pass {
            reference: self.reference,
            config: &model.config.text_config,
            variant: variant.name(),
            drafts: variant.drafts_name(),
            prompt: name.clone(),
            prefix: format!("{}.{name}", variant.name()),
            rows,
            stream_positions: self.stream_positions(name, rows)?,
            limit,
            tolerances: Tolerances::free(variant),
            excused: Excused::new(),
        };
        // The ids are in both files.
        self.same_ids(name, &format!("{name}.ids"), &prompt.ids)?;
        if continuation.is_none() {
            let mut tally = pass.sets("prompt");
            tally.note("not in the reference");
            self.report.checks.push(tally.check());
        }
        Ok(continuation.map(|next| (pass, next)))
    }

    fn prompt(
        &mut self,
        runner: &mut Runner<D>,
        variant: Variant,
        prompt: &Prompt,
        forced_only: bool,
    ) -> Result<(), VerifyError> {
        let Some((pass, next)) = self.pass(variant, prompt)? else { return Ok(()) };
        let free = self.report.checks.len();
        if !forced_only {
            self.free(runner, &pass, &prompt.ids, next)?;
        }
        let crossed = self.report.checks[free..].iter().any(Check::may_have_crossed);
        let between = self.report.checks.len();
        let unstable = pass.limit < pass.rows;
        if forced_only || unstable || (variant == Variant::Quantized && crossed) {
            // Where everything can be compared freely, the forced run says nothing more.
            let pass = pass.forced(variant.forced_name(), variant);
            self.forced(runner, pass, &prompt.ids, Vec::new(), next)?;
        }
        let checks = &mut self.report.checks;
        let layers_pass = !checks[between..].iter().any(|c| c.status == Status::Fail);
        if variant == Variant::Quantized && between > free && layers_pass {
            checks[free..between].iter_mut().for_each(Check::accept_crossing);
        }
        Ok(())
    }

    fn free(
        &mut self,
        runner: &mut Runner<D>,
        pass: &Pass<'_>,
        ids: &[u32],
        next: &Continuation,
    ) -> Result<(), VerifyError> {
        let rows = ids.len();
        let mut recorder = Recorder::new(pass.config);
        runner.restart();
        let logits = runner.run(ids, Vec::new(), &mut recorder)?;
        self.hashes(runner, &pass.prompt, &format!("{}.engram_hash", pass.prompt), rows)?;
        let published = |layer, keys| Ok(runner.published(layer, keys, rows)?);
        pass.compare(&recorder, &published, &logits, &mut self.report.checks)?;
        self.greedy(runner, pass, &logits, next)?;

        let mut bits = pass.sets("chunked_prefill");
        for chunk in [1, 7] {
            runner.restart();
            let chunked = runner.run_chunks(ids, chunk)?;
            let differ = chunked.iter().zip(&logits).position(|(a, b)| a.to_bits() != b.to_bits());
            let vocab = pass.config.vocab_size;
            bits.equal(differ.is_none(), || {
                let at = differ.unwrap_or(0);
                format!("chunks of {chunk}: logit {} of position {}", at % vocab, at / vocab)
            });
        }
        bits.note("own results: bits in chunks of 1 and 7 against one pass");
        self.report.checks.push(bits.check());
        let lengths = Lengths { rows, limit: pass.limit };
        drafts::compare(self, runner, pass, ids, next, &lengths, None).map(drop)
    }

    /// Compares what every layer makes of the reference's values. Returns everything about the
    /// prompt.
    fn forced(
        &mut self,
        runner: &mut Runner<D>,
        mut pass: Pass<'_>,
        ids: &[u32],
        embeddings: Vec<f32>,
        next: &Continuation,
    ) -> Result<Trace, VerifyError> {
        let forced = Forced::read(self.reference, pass.config, &pass)?;
        let config = Arc::new(pass.config.clone());
        let layers = self.model.layers();
        let error = ScoreError {
            relative: pass.tolerances.score,
            rounded: runner.session.caches.formats.index != self.device.exact_rows(),
        };
        let recorder = Recorder::new(pass.config);
        let mut probe = Forcer::new(config, layers, recorder, &forced, Some(error));
        runner.restart();
        let logits = runner.run(ids, embeddings, &mut probe)?;
        pass.excused = std::mem::take(&mut probe.excused);
        let own = probe.recorder;
        let published = |layer: usize, keys| {
            let layer = &own.layers[layer];
            let rows = if keys { &layer.keys } else { &layer.compressed };
            Ok(rows.as_ref().map(Rows::decoded).unwrap_or_default())
        };
        let before = self.report.checks.len();
        pass.compare(&own, &published, &logits, &mut self.report.checks)?;
        if pass.stream_positions.len() < pass.rows {
            for check in &mut self.report.checks[before..] {
                let sparse = format!(
                    "streams are in the reference at {} of {} positions; the others go on from the \
                     own results of the layer before",
                    pass.stream_positions.len(),
                    pass.rows
                );
                if check.quantity == "streams" {
                    check.note = Some(sparse);
                }
            }
        }
        let lengths = Lengths { rows: ids.len(), limit: ids.len() };
        let features = (!forced.features.is_empty()).then_some(forced.features.as_slice());
        let drafts = drafts::compare(self, runner, &pass, ids, next, &lengths, features)?;
        Trace::new(&pass, forced, own, logits, drafts)
    }

    /// Greedy continuation by decode steps, along the reference's tokens.
    fn greedy(
        &mut self,
        runner: &mut Runner<D>,
        pass: &Pass<'_>,
        logits: &[f32],
        next: &Continuation,
    ) -> Result<(), VerifyError> {
        let mut tally = pass.sets("greedy");
        let stable = next.greedy_stable_steps.unwrap_or(next.greedy.len());
        let vocab = pass.config.vocab_size;
        let mut last = logits[logits.len() - vocab..].to_vec();
        let mut later = (0, 0);
        for (step, &token) in next.greedy.iter().enumerate() {
            let own = argmax(&last);
            let gap = next.argmax_gap.get(step).copied().unwrap_or(f64::INFINITY);
            if step >= stable {
                later = (later.0 + usize::from(own == token), later.1 + 1);
            } else if own != token && gap <= 2.0 * pass.tolerances.logits {
                tally.note(format!("step {step}: token {own} and {token} are {gap:.1e} apart"));
            } else {
                tally.equal(own == token, || format!("step {step}: {own} instead of {token}"));
            }
            last = runner.run(&[token], Vec::new(), &mut crate::model::NoProbe)?;
        }
        if next.greedy.is_empty() {
            tally.note("not in the reference");
        }
        if later.1 > 0 {
            let (equal, all) = later;
            tally.note(format!(
                "from step {stable} on roundings of the reference disagree: {equal} of {all} equal"
            ));
        }
        self.report.checks.push(tally.check());
        Ok(())
    }

    fn same_ids(&mut self, name: &str, tensor: &str, ids: &[u32]) -> Result<(), VerifyError> {
        if self.reference.contains(tensor) {
            let other = self.reference.integers(tensor, &[ids.len()])?;
            if !other.iter().copied().eq(ids.iter().map(|&id| i64::from(id))) {
                return Err(VerifyError::Prompt {
                    name: name.to_owned(),
                    reason: "reference.json and reference.safetensors have different ids"
                        .to_owned(),
                });
            }
        }
        Ok(())
    }

    /// Table rows of every token, for each n-gram memory. They do not depend on the cache format.
    fn hashes(
        &mut self,
        runner: &Runner<D>,
        prompt: &str,
        tensor: &str,
        rows: usize,
    ) -> Result<(), VerifyError> {
        let done = |c: &Check| c.quantity == "hash_ids" && c.prompt == prompt;
        if self.report.checks.iter().any(done) {
            return Ok(());
        }
        let mut tally = Tally::sets("-", prompt, "hash_ids");
        let text = &self.model.config.text_config;
        let (memories, columns) = (text.engram_layer_ids.len(), text.hash_columns());
        if self.reference.contains(tensor) {
            let reference = self.reference.integers(tensor, &[rows, memories, columns])?;
            let own = &runner.session.batch.memory_row_ids;
            for (i, &expected) in reference.iter().enumerate() {
                let (p, memory, column) =
                    (i / columns / memories, i / columns % memories, i % columns);
                let found = own[memory].get(p * columns + column).copied();
                let equal = found.and_then(|id| i64::try_from(id).ok()) == Some(expected);
                tally.equal(equal, || {
                    let layer = text.engram_layer_ids[memory];
                    format!("layer {layer} position {p} column {column}: {found:?} instead of {expected}")
                });
            }
        } else {
            tally.note("not in the reference");
        }
        self.report.checks.push(tally.check());
        Ok(())
    }

    fn token_map(&mut self) -> Result<(), VerifyError> {
        const TENSOR: &str = "engram.token_map";
        let mut tally = Tally::sets("-", "-", "token_map");
        if let (true, Some(engram)) = (self.reference.contains(TENSOR), self.model.engram()) {
            let own = engram.map.ids();
            let reference = self.reference.integers(TENSOR, &self.reference.shape(TENSOR)?)?;
            for (id, &expected) in reference.iter().enumerate() {
                let own = own.get(id).copied();
                tally.equal(own.map(i64::from) == Some(expected), || {
                    format!("token {id}: {own:?} instead of {expected}")
                });
            }
        } else {
            tally.note("not in the reference");
        }
        self.report.checks.push(tally.check());
        Ok(())
    }

    /// A line for every kind of tensor that nothing was compared with.
    fn unused(&mut self, options: &Options) {
        let all = [Variant::F32, Variant::Quantized];
        let left_out: Vec<&str> =
            all.iter().filter(|v| !options.variants.contains(v)).map(|v| v.name()).collect();
        for (pattern, count) in self.reference.unused() {
            if pattern.split('.').any(|part| left_out.contains(&part)) {
                continue;
            }
            let reason = if pattern.ends_with("rounding_noise") {
                "it describes the reference itself"
            } else if ["patches", "features", "aligned"]
                .map(|t| format!("vision.*.{t}"))
                .contains(&pattern)
            {
                "the vision tower is not run; image rows enter with the reference's embeddings"
            } else if options.forced {
                "a forced run does not compute it"
            } else {
                "no comparison knows it"
            };
            let mut tally = Tally::sets("-", &pattern, "other tensors");
            tally.note(format!("{count} tensors: {reason}"));
            self.report.checks.push(tally.check());
        }
    }
}

/// Whether a device computes with the precision that free runs ask for.
pub fn runs_free<D: Device>(device: &D) -> bool {
    device.exact_rows() == RowFormat::F32
}
