//! From logits to a token.

use super::buffers::{guarded, input, output, part, read};
use super::{Operation, Output, Runner, Trouble};
use crate::ops::{BiasEntry, Device, PenaltyRow, SampleRow, TokenCount};
use std::ops::Range;

struct Sample {
    vocab: usize,
    /// What kind of logits.
    kind: &'static str,
    logits: Vec<f32>,
    rows: Vec<SampleRow>,
}

impl Operation for Sample {
    type Ready<D: Device> = ();

    fn name(&self) -> &'static str {
        "sample"
    }

    fn shape(&self) -> String {
        format!("{} tokens{}", self.vocab, self.kind)
    }

    fn prepare<D: Device>(&self, _: &D) -> Result<(), Trouble> {
        Ok(())
    }

    fn run<D: Device>(&self, device: &D, (): &(), rows: Range<usize>) -> Result<Output, Trouble> {
        let logits = input(device, part(&self.logits, self.vocab, &rows))?;
        let mut tokens = output(device, rows.len())?;
        device.sample(&logits, self.vocab, &self.rows[rows], &mut tokens)?;
        Ok(Output::Exact(read(device, &tokens)?))
    }
}

/// Penalties, bias and a mask on each row of logits.
struct Process {
    vocab: usize,
    logits: Vec<f32>,
}

impl Operation for Process {
    type Ready<D: Device> = ();

    fn name(&self) -> &'static str {
        "penalize, add_bias, mask_logits"
    }

    fn shape(&self) -> String {
        format!("{} tokens", self.vocab)
    }

    fn prepare<D: Device>(&self, _: &D) -> Result<(), Trouble> {
        Ok(())
    }

    fn run<D: Device>(&self, device: &D, (): &(), rows: Range<usize>) -> Result<Output, Trouble> {
        let vocab = self.vocab;
        let mut logits = guarded(device, part(&self.logits, vocab, &rows))?;
        let first = rows.start;
        let rows = || rows.clone().map(|row| (row, (row - first) as u32));
        let penalty = |row: usize| PenaltyRow {
            repetition: 1.0 + (row % 4) as f32 / 8.0,
            presence: (row % 3) as f32 / 4.0,
            frequency: (row % 5) as f32 / 16.0,
        };
        let penalties: Vec<PenaltyRow> = rows().map(|(row, _)| penalty(row)).collect();
        let counts: Vec<TokenCount> = rows()
            .flat_map(|(row, at)| {
                (0..20u32).map(move |i| TokenCount {
                    row: at,
                    token: (i * 13 + row as u32) % vocab as u32,
                    generated: i % 4,
                    prompt: i % 3,
                })
            })
            .collect();
        let entries: Vec<BiasEntry> = rows()
            .flat_map(|(row, at)| {
                let token = move |i: u32| (i / 2 * 5 + row as u32) % vocab as u32;
                let bias = |i: u32| [1.5, -0.37, 1e7, -1e7][i as usize % 4];
                (0..8u32).map(move |i| BiasEntry { row: at, token: token(i), bias: bias(i) })
            })
            .collect();
        let masked: Vec<u32> = rows().filter(|(row, _)| row % 2 == 1).map(|(_, at)| at).collect();
        let words = vocab.div_ceil(32);
        let mask: Vec<u32> = rows()
            .filter(|(row, _)| row % 2 == 1)
            .flat_map(|(row, _)| {
                (0..words).map(move |w| ((row * 31 + w) as u32).wrapping_mul(0x9e37_79b9))
            })
            .collect();
        device.penalize(&mut logits, vocab, &penalties, &counts)?;
        device.add_bias(&mut logits, vocab, &entries)?;
        device.mask_logits(&mut logits, vocab, &masked, &mask)?;
        let logits: Vec<f32> = read(device, &logits)?;
        Ok(Output::Exact(logits.iter().map(|x| x.to_bits()).collect()))
    }
}

pub(super) fn run<D: Device>(runner: &mut Runner<'_, D>) {
    for (vocab, most) in [(1001, 1536), (129_280, if runner.options.quick { 7 } else { 129 })] {
        let most = runner.most(most);
        let random = &mut runner.random;
        let logits: Vec<f32> = random.values(most * vocab).iter().map(|x| 5.0 * x).collect();
        let rows: Vec<SampleRow> = (0..most)
            .map(|i| SampleRow {
                seed: random.word(),
                position: i as u32 * 77,
                sample: i as u32 % 3,
                temperature: [0.6, 1.0, 0.0, 1.7][i % 4],
                top_p: [0.95, 1.0, 0.5][i / 2 % 3],
                top_k: [0, 50, 0, 3, 100_000][i / 3 % 5],
                min_p: [0.0, 0.1][i / 5 % 2],
            })
            .collect();
        let process = Process { vocab, logits: logits.clone() };
        runner.check(&process, most);
        // Few distinct logits, so that filters cut among equal ones, and what no model should say.
        let coarse = |x: f32| (2.0 * x).round() / 16.0;
        let odd = [f32::NAN, f32::NEG_INFINITY, -0.0, -1e30, 0.0];
        let ties = |(i, x): (usize, &f32)| if i % 97 < 5 { odd[i % 97] } else { coarse(*x) };
        let equal = logits.iter().enumerate().map(ties).collect();
        // One logit far above all others: they share a bucket of distances.
        let mut far = logits.clone();
        far.chunks_exact_mut(vocab).for_each(|row| row[vocab / 3] = 300.0);
        let kinds = [("", logits), (", many of them equal", equal), (", one far above", far)];
        for (kind, logits) in kinds {
            runner.check(&Sample { vocab, kind, logits, rows: rows.clone() }, most);
        }
    }
}
