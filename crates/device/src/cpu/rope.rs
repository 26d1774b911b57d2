//! Rotary position embedding of adjacent pairs.

use crate::cpu::Cpu;
use crate::cpu::dispatch::by_isa;

pub(crate) fn rope(
    cpu: &Cpu,
    x: &mut [f32],
    angles: &[f32],
    heads: usize,
    head_dim: usize,
    rope_dims: usize,
    inverse: bool,
    rows: usize,
) {
    assert!(rope_dims <= head_dim && rope_dims.is_multiple_of(2), "{rope_dims} of {head_dim}");
    cpu.for_rows(x, heads * head_dim, rows, 4 * heads * rope_dims, |first, x| {
        let count = x.len() / (heads * head_dim);
        let angles = &angles[first * rope_dims..][..count * rope_dims];
        rotate(cpu.isa(), x, angles, heads, head_dim, rope_dims, inverse);
    });
}

by_isa! {
    fn rotate(
        x: &mut [f32],
        angles: &[f32],
        heads: usize,
        head_dim: usize,
        rope_dims: usize,
        inverse: bool,
    ) {
        if rope_dims == 0 {
            return;
        }
        let sign = if inverse { -1.0 } else { 1.0 };
        let rows = x.chunks_exact_mut(heads * head_dim).zip(angles.chunks_exact(rope_dims));
        for (row, angles) in rows {
            for head in row.chunks_exact_mut(head_dim) {
                let pairs = head[head_dim - rope_dims..].as_chunks_mut::<2>().0;
                for (pair, angle) in pairs.iter_mut().zip(angles.as_chunks::<2>().0) {
                    let [a, b] = *pair;
                    let (cos, sin) = (angle[0], angle[1] * sign);
                    *pair = [a.mul_add(cos, -(b * sin)), a.mul_add(sin, b * cos)];
                }
            }
        }
    }
}
