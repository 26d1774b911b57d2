//! Transposition of a tile of keys.

use crate::cpu::Isa;
use crate::cpu::dispatch::LANES;
use crate::cpu::tile::TILE;

/// `out[d * TILE + j] = rows[j * stride + d]` for [`TILE`] rows of `width`.
pub(crate) fn transpose(isa: Isa, rows: &[f32], stride: usize, width: usize, out: &mut [f32]) {
    let whole = width / LANES * LANES;
    for from in (0..TILE).step_by(LANES) {
        for at in (0..whole).step_by(LANES) {
            let rows = &rows[from * stride + at..];
            square(isa, rows, stride, &mut out[at * TILE + from..]);
        }
        for j in from..from + LANES {
            for d in whole..width {
                out[d * TILE + j] = rows[j * stride + d];
            }
        }
    }
}

/// The same for 16 rows and columns.
fn square(isa: Isa, rows: &[f32], stride: usize, out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if isa >= Isa::Avx512 {
        // SAFETY: a device holds an `Isa` only if the processor has it.
        return unsafe { square_avx512(rows, stride, out) };
    }
    let _ = isa;
    for j in 0..LANES {
        for (d, x) in rows[j * stride..][..LANES].iter().enumerate() {
            out[d * TILE + j] = *x;
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn square_avx512(rows: &[f32], stride: usize, out: &mut [f32]) {
    use std::arch::x86_64::*;

    let zero = _mm512_setzero_ps();
    let mut r = [zero; 16];
    for j in 0..16 {
        let row = &rows[j * stride..][..LANES];
        // SAFETY: `row` has 16 values.
        r[j] = unsafe { _mm512_loadu_ps(row.as_ptr()) };
    }
    // Pairs of rows, by value and then by pair: `u[4 i + k]` holds in its 128-bit part `p` column
    // `4 p + k` of rows `4 i .. 4 i + 4`.
    let mut t = [zero; 16];
    for i in 0..8 {
        t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    let low = |a, b| _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
    let high =
        |a, b| _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
    let mut u = [zero; 16];
    for i in 0..4 {
        u[4 * i] = low(t[4 * i], t[4 * i + 2]);
        u[4 * i + 1] = high(t[4 * i], t[4 * i + 2]);
        u[4 * i + 2] = low(t[4 * i + 1], t[4 * i + 3]);
        u[4 * i + 3] = high(t[4 * i + 1], t[4 * i + 3]);
    }
    // Parts of a column are brought together: even parts first, then odd ones.
    const EVEN: i32 = 0b10_00_10_00;
    const ODD: i32 = 0b11_01_11_01;
    let mut columns = [zero; 16];
    for k in 0..4 {
        let even = _mm512_shuffle_f32x4::<EVEN>(u[k], u[4 + k]);
        let odd = _mm512_shuffle_f32x4::<ODD>(u[k], u[4 + k]);
        let even_below = _mm512_shuffle_f32x4::<EVEN>(u[8 + k], u[12 + k]);
        let odd_below = _mm512_shuffle_f32x4::<ODD>(u[8 + k], u[12 + k]);
        columns[k] = _mm512_shuffle_f32x4::<EVEN>(even, even_below);
        columns[8 + k] = _mm512_shuffle_f32x4::<ODD>(even, even_below);
        columns[4 + k] = _mm512_shuffle_f32x4::<EVEN>(odd, odd_below);
        columns[12 + k] = _mm512_shuffle_f32x4::<ODD>(odd, odd_below);
    }
    for (d, column) in columns.into_iter().enumerate() {
        let out = &mut out[d * TILE..][..LANES];
        // SAFETY: `out` has 16 values.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), column) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_finds_its_place() {
        for (width, stride) in [(64, 64), (128, 128), (16, 20), (5, 5), (40, 48)] {
            let rows: Vec<f32> = (0..TILE * stride).map(|i| i as f32).collect();
            for isa in Isa::available() {
                let mut out = vec![-1.0; width * TILE];
                transpose(isa, &rows, stride, width, &mut out);
                for j in 0..TILE {
                    for d in 0..width {
                        assert_eq!(out[d * TILE + j], rows[j * stride + d], "{isa:?} {j} {d}");
                    }
                }
            }
        }
    }
}
