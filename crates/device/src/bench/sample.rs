//! The choice of a token.

use super::cases::{Cases, Ready, Shared};
use super::{Measure, Work};
use crate::ops::SampleRow;

const VOCABULARY: usize = 129_280;

pub(super) fn add<D: Measure>(cases: &mut Cases<D>) {
    let plain = SampleRow { temperature: 1.0, seed: 1, position: 7, ..SampleRow::greedy() };
    let kinds = [
        ("greedy", SampleRow::greedy()),
        ("temperature", plain),
        ("top-k 50", SampleRow { top_k: 50, ..plain }),
        ("top-p 0.95", SampleRow { top_p: 0.95, ..plain }),
    ];
    for &rows in cases.extent.of(&[1], &[1, 8], &[1, 128]) {
        let bytes = (4 * rows * VOCABULARY) as f64;
        let logits: Shared<Vec<D::Buffer<f32>>> = Shared::new();
        for (name, row) in kinds {
            let logits = logits.clone();
            let shape = format!("{name}, {VOCABULARY} tokens, {rows} rows");
            cases.add("sample", shape, move |maker| {
                let copies = maker.copies(bytes);
                let logits = logits
                    .get(|| (0..copies).map(|_| maker.values(rows * VOCABULARY, 4.0)).collect())?;
                let mut tokens = maker.device.alloc(rows)?;
                let params = vec![row; rows];
                let work = Work { bytes, ..Work::default() };
                Ready::new(work, copies, move |device: &D, i| {
                    device.sample(&logits[i], VOCABULARY, &params, &mut tokens)
                })
            });
        }
    }
}
