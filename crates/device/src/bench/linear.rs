//! Products with weights in stored form.

use super::cases::{Cases, Ready, Shared, act};
use super::{Extent, Measure, Work};
use crate::inputs::input;
use crate::tensor::Format;

pub(super) fn add<D: Measure>(cases: &mut Cases<D>) {
    let rows = cases.extent.of(&[1, 32], &[1, 8, 32, 128, 512], &[1, 8, 32, 128, 4096]);
    for (n, k) in [(1280, 5120), (32768, 1280), (5120, 8192)] {
        let weights: Shared<Vec<D::Matrix>> = Shared::new();
        for &m in rows {
            let weights = weights.clone();
            cases.add("linear", format!("fp8 {n} x {k}, M {m}"), move |maker| {
                let format = Format::Fp8Block32;
                let stored = maker.stored(format, n, k).stored_bytes();
                let copies = maker.copies(stored as f64);
                let weights =
                    weights.get(|| (0..copies).map(|_| maker.matrix(format, n, k)).collect())?;
                let x = maker.acts(m * k)?;
                let mut out = maker.device.alloc(m * n)?;
                let bytes = stored + act::<D>() * m * (n + k);
                let work = Work { bytes: bytes as f64, ..products(m, n, k) };
                Ready::new(work, copies, move |device: &D, i| {
                    device.linear(&x, &weights[i], m, &mut out)
                })
            });
        }
    }
    head(cases);
}

/// Operations of a product.
pub(super) fn products(m: usize, n: usize, k: usize) -> Work {
    Work { operations: 2.0 * m as f64 * n as f64 * k as f64, ..Work::default() }
}

/// The head, and the embedding, whose table has the same shape.
fn head<D: Measure>(cases: &mut Cases<D>) {
    const HIDDEN: usize = 5120;
    // A part of the vocabulary where it must not take long.
    let vocab = if cases.extent == Extent::Full { 129_280 } else { 32_768 };
    let table: Shared<D::Matrix> = Shared::new();
    let of_head = table.clone();
    cases.add("linear_f32", format!("bf16 {vocab} x {HIDDEN}, M 1"), move |maker| {
        let table = of_head.get(|| maker.matrix(Format::Bf16, vocab, HIDDEN))?;
        let x = maker.acts(HIDDEN)?;
        let mut out = maker.device.alloc(vocab)?;
        let bytes = 2 * vocab * HIDDEN + act::<D>() * HIDDEN + 4 * vocab;
        let work = Work { bytes: bytes as f64, ..products(1, vocab, HIDDEN) };
        Ready::new(work, 1, move |device: &D, _| device.linear_f32(&x, &table, 1.0, 1, &mut out))
    });
    for &rows in cases.extent.of(&[128], &[1, 128, 512], &[1, 128, 4096]) {
        let table = table.clone();
        cases.add("embed", format!("of {vocab} x {HIDDEN}, {rows} rows"), move |maker| {
            let table = table.get(|| maker.matrix(Format::Bf16, vocab, HIDDEN))?;
            // A row of the table and of the output, and the token.
            let bytes = (rows * (HIDDEN * (2 + act::<D>()) + 4)) as f64;
            let copies = maker.copies(bytes);
            let mut tokens = Vec::new();
            for _ in 0..copies {
                let some = maker.numbers(rows, vocab);
                tokens.push(input(maker.device, &some)?);
            }
            let mut out = maker.device.alloc(rows * HIDDEN)?;
            let work = Work { bytes, ..Work::default() };
            Ready::new(work, copies, move |device: &D, i| {
                device.embed(&table, &tokens[i], rows, &mut out)
            })
        });
    }
}
