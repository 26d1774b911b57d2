//! Prompts with images: their language part.

use super::compare::Pass;
use super::force::Excused;
use super::record::Recorder;
use super::reference::Continuation;
use super::report::{Check, Tally};
use super::run::{Runner, argmax};
use super::tolerance::Tolerances;
use super::{Variant, Verifier, VerifyError};
use crate::model::Model;
use crate::plan::IMAGE;
use deepinfer_device::Device;

/// A prompt with an image.
pub(super) struct ImagePrompt<'a> {
    pub pass: Pass<'a>,
    /// Token ids; image positions are marked.
    pub ids: Vec<u32>,
    /// `[image positions, H]`: what enters there.
    pub image: Vec<f32>,
    /// `[rows, H]`.
    embeddings: Vec<f32>,
}

impl<'a, D: Device> Verifier<'a, D> {
    /// Prompt `k` with an image: its image rows enter with the reference's embeddings. `None`, with
    /// a line that says why, if it cannot be run.
    pub(super) fn image_prompt(
        &mut self,
        variant: Variant,
        k: usize,
    ) -> Result<Option<ImagePrompt<'a>>, VerifyError> {
        let prompt = &self.reference.index.vision[k];
        let (name, rows) = (format!("vision.{k}"), prompt.ids.len());
        self.check_prompt(&name, &prompt.ids)?;
        self.same_ids(&name, &format!("{name}.ids"), &prompt.ids)?;
        let model: &'a Model<D> = self.model;
        let text = &model.config.text_config;
        let tensor = format!("{name}.embeddings");
        let pass = Pass {
            reference: self.reference,
            config: text,
            variant: variant.name(),
            drafts: variant.drafts_name(),
            prompt: name.clone(),
            prefix: format!("{name}.{}", variant.name()),
            rows,
            stream_positions: (0..rows).collect(),
            limit: rows,
            tolerances: Tolerances::free(variant),
            excused: Excused::new(),
        };
        let missing = match model.config.image_token_id {
            None => Some("the checkpoint has no image token"),
            Some(_) if !self.reference.contains(&tensor) => {
                Some("the reference has no input embeddings for it")
            }
            Some(_) => None,
        };
        if let Some(reason) = missing {
            let mut tally = pass.sets("prompt");
            tally.note(reason);
            self.report.checks.push(tally.check());
            return Ok(None);
        }
        let embeddings = self.reference.floats(&tensor, &[rows, text.hidden_size])?;
        let image_token = model.config.image_token_id;
        let is_image = |p: &usize| Some(prompt.ids[*p]) == image_token;
        let image: Vec<f32> = (0..rows)
            .filter(is_image)
            .flat_map(|p| &embeddings[p * text.hidden_size..][..text.hidden_size])
            .copied()
            .collect();
        let ids: Vec<u32> =
            (0..rows).map(|p| if is_image(&p) { IMAGE } else { prompt.ids[p] }).collect();
        self.image_positions(&name, &prompt.ids)?;
        Ok(Some(ImagePrompt { pass, ids, image, embeddings }))
    }

    /// Compares prompt `k` with an image.
    pub(super) fn vision(
        &mut self,
        runner: &mut Runner<D>,
        variant: Variant,
        k: usize,
        forced_only: bool,
    ) -> Result<(), VerifyError> {
        let Some(prompt) = self.image_prompt(variant, k)? else { return Ok(()) };
        let ImagePrompt { pass, ids, image, embeddings } = prompt;
        if forced_only {
            let pass = pass.forced(variant.forced_name(), variant);
            let next = Continuation::default();
            return self.forced(runner, pass, &ids, image, &next).map(drop);
        }
        let (name, rows, text) = (pass.prompt.clone(), pass.rows, pass.config);
        let prompt = &self.reference.index.vision[k];
        let mut recorder = Recorder::new(text);
        runner.restart();
        let logits = runner.run(&ids, image, &mut recorder)?;
        let hashes = format!("{name}.engram_hash");
        self.hashes(runner, &name, &hashes, rows)?;
        let mut start = pass.numbers("embeddings", 0.0);
        start.floats(&recorder.start(), &embeddings, |i| {
            format!("position {}", i / text.hidden_size)
        });
        self.report.checks.push(start.check());
        let published = |layer, keys| Ok(runner.published(layer, keys, rows)?);
        pass.compare(&recorder, &published, &logits, &mut self.report.checks)?;
        let next = match variant {
            Variant::F32 => prompt.f32.as_ref(),
            Variant::Quantized => prompt.quantized.as_ref(),
        };
        let mut greedy = pass.sets("greedy");
        match next.and_then(|n| n.next_token) {
            Some(token) => {
                let own = argmax(&logits[(rows - 1) * text.vocab_size..]);
                greedy.equal(own == token, || format!("next token: {own} instead of {token}"));
            }
            None => greedy.note("not in the reference"),
        }
        self.report.checks.push(greedy.check());
        Ok(())
    }

    /// Image positions are those that hold the image token.
    fn image_positions(&mut self, name: &str, ids: &[u32]) -> Result<(), VerifyError> {
        let tensor = format!("{name}.token_types");
        let done = |c: &Check| c.quantity == "image_positions" && c.prompt == name;
        if !self.reference.contains(&tensor) || self.report.checks.iter().any(done) {
            return Ok(());
        }
        let mut tally = Tally::sets("-", name, "image_positions");
        let types = self.reference.integers(&tensor, &[ids.len()])?;
        for (p, (&id, kind)) in ids.iter().zip(types).enumerate() {
            let image = Some(id) == self.model.config.image_token_id;
            tally.equal(image == (kind >= 0), || format!("position {p}: token type {kind}"));
        }
        self.report.checks.push(tally.check());
        Ok(())
    }
}
