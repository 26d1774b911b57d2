//! Devices that store activations in bf16: forced runs, and the likelihood of free ones.

use super::force::Forcer;
use super::record::Recorder;
use super::reference::Continuation;
use super::report::{Check, Report, Status, Tally};
use super::run::Runner;
use super::tolerance::rounded;
use super::trace::Forced;
use super::{Options, Progress, Reference, Variant, Verifier, VerifyError, updates};
use crate::model::{Model, NoProbe};
use deepinfer_device::{Cpu, Device};
use std::sync::Arc;

/// Compares a device that stores activations in bf16, layer by layer, with the reference and with
/// the same model on the CPU, which is compared with the reference on the way. Both then run
/// freely, and the mean negative log likelihoods of the reference's tokens are compared; once more
/// with the CPU's choices of rows and experts.
pub fn verify_rounding<D: Device>(
    (device, model): (&Arc<D>, &Arc<Model<D>>),
    (cpu, cpu_model): (&Arc<Cpu>, &Arc<Model<Cpu>>),
    reference: &Reference,
    variants: &[Variant],
    progress: Progress<'_>,
) -> Result<Report, VerifyError> {
    let report = Report::default();
    let mut own = Verifier { device, model, reference, report: report.clone() };
    let mut exact = Verifier { device: cpu, model: cpu_model, reference, report };
    let index = &reference.index;
    let total = variants.len() * (index.prompts.len() + index.vision.len());
    let mut done = 0;
    own.token_map()?;
    for prompt in &index.prompts {
        own.check_prompt(&prompt.name, &prompt.ids)?;
    }
    for &variant in variants {
        let mut runners = (own.runner(variant)?, exact.runner(variant)?);
        let mut likelihood = Likelihood::default();
        for prompt in &index.prompts {
            progress(done, total, &format!("{} {}", variant.name(), prompt.name));
            done += 1;
            let (ids, name) = (prompt.ids.as_slice(), &prompt.name);
            let Some((pass, next)) = exact.pass(variant, prompt)? else { continue };
            let forced = pass.clone().forced(variant.cpu_name(), variant);
            let trace = exact.forced(&mut runners.1, forced, ids, Vec::new(), next)?;
            own.report.checks.append(&mut exact.report.checks);
            let pass = pass.forced(variant.forced_name(), variant);
            updates::compare(&mut own, &mut runners.0, &pass, ids, Vec::new(), next, &trace)?;
            likelihood.add(&mut runners, ids, next)?;
            runners.0.restart();
            runners.0.run(ids, Vec::new(), &mut NoProbe)?;
            own.hashes(&runners.0, name, &format!("{name}.engram_hash"), ids.len())?;
        }
        for k in 0..index.vision.len() {
            progress(done, total, &format!("{} vision.{k}", variant.name()));
            done += 1;
            let Some(prompt) = exact.image_prompt(variant, k)? else { continue };
            let (ids, image, next) = (&prompt.ids, &prompt.image, Continuation::default());
            let forced = prompt.pass.clone().forced(variant.cpu_name(), variant);
            let trace = exact.forced(&mut runners.1, forced, ids, image.clone(), &next)?;
            own.report.checks.append(&mut exact.report.checks);
            let pass = prompt.pass.forced(variant.forced_name(), variant);
            updates::compare(&mut own, &mut runners.0, &pass, ids, image.clone(), &next, &trace)?;
        }
        own.report.checks.append(&mut exact.report.checks);
        own.report.checks.extend(likelihood.checks(variant));
    }
    progress(total, total, "");
    own.unused(&Options { variants: variants.to_vec(), forced: true });
    Ok(own.report)
}

/// Negative log likelihoods of the reference's tokens: what the device's lie above the CPU's.
#[derive(Default)]
struct Likelihood {
    /// Of each token, on the CPU.
    exact: Vec<f64>,
    /// On the device, which runs freely.
    free: Vec<f64>,
    /// On the device, which takes the CPU's choices of rows and experts.
    steered: Vec<f64>,
}

impl Likelihood {
    fn add<D: Device>(
        &mut self,
        (own, exact): &mut (Runner<D>, Runner<Cpu>),
        ids: &[u32],
        next: &Continuation,
    ) -> Result<(), VerifyError> {
        let text = [ids, &next.greedy].concat();
        let c = exact.text().clone();
        let mut chosen = Recorder::new(&c);
        exact.restart();
        self.exact.extend(exact.session.nll(0, &text, &mut chosen)?);
        own.restart();
        self.free.extend(own.session.nll(0, &text, &mut NoProbe)?);
        let choices = Forced::choices(&chosen, text.len() - 1, &c);
        let (model, recorder) = (own.session.model.clone(), Recorder::new(&c));
        let mut steered = Forcer::new(Arc::new(c), model.layers(), recorder, &choices, None);
        own.restart();
        self.steered.extend(own.session.nll(0, &text, &mut steered)?);
        Ok(())
    }

    /// A line about `own`; chance is allowed on top of the bound.
    fn line(&self, variant: Variant, quantity: &'static str, own: &[f64], chance: f64) -> Check {
        let count = own.len().max(1) as f64;
        let mean = |x: &[f64]| x.iter().sum::<f64>() / count;
        let (device, cpu) = (mean(own), mean(&self.exact));
        let spread = own.iter().zip(&self.exact).map(|(a, b)| (a - b - device + cpu).powi(2));
        let error = (spread.sum::<f64>() / count / count).sqrt();
        let tolerance = rounded::NLL + chance * error;
        let mut tally = Tally::numbers(variant.name(), "all", quantity, tolerance);
        tally.floats(&[(device - cpu) as f32], &[0.0], |_| "the mean".to_owned());
        tally.note(format!(
            "{} tokens: {device:.5} nats on the device, {cpu:.5} on the CPU; standard error of the \
             difference {error:.1e}",
            own.len()
        ));
        Check { relative_rms: None, ..tally.check() }
    }

    /// The free run passes if it is within the bound. If not, that says nothing: where weights are
    /// random, a choice that flips moves all that follows. Then the run with the same choices tells.
    fn checks(&self, variant: Variant) -> Vec<Check> {
        if self.exact.is_empty() {
            return Vec::new();
        }
        let mut free = self.line(variant, "nll_free", &self.free, 0.0);
        if free.status == Status::Fail && free.max_error.is_some_and(f64::is_finite) {
            free.status = Status::NotCompared;
            let note = free.note.get_or_insert_default();
            note.push_str("; choices differ, so that it is judged with the CPU's choices");
        }
        let steered = self.line(variant, "nll_same_choices", &self.steered, rounded::CHANCE);
        vec![free, steered]
    }
}
