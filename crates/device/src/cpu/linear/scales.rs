//! Scales as the kernels read them, and rows that end inside a chunk.

use crate::cpu::lanes::{self, LANES};
use crate::formats::ue8m0;
use crate::tensor::{Format, StoredMatrix};

/// Values that [`expand`] writes for a row: `per_chunk` for each chunk of `STEPS` times 16 columns.
#[inline(always)]
pub(super) fn len<const STEPS: usize>(w: &StoredMatrix, per_chunk: usize) -> usize {
    w.cols.div_ceil(STEPS * LANES) * per_chunk
}

/// The scales of row `r`: one a chunk of 32 columns (`per_chunk` 1), or one a lane of a chunk of 64
/// columns (`per_chunk` 16), where lanes 0 to 7 hold the first 32 columns. A group that the row does
/// not reach has scale 1.
#[inline(always)]
pub(super) fn expand(w: &StoredMatrix, r: usize, per_chunk: usize, out: &mut [f32]) {
    let bytes = w.row_scales(r);
    if per_chunk == 1 {
        for (byte, out) in bytes.iter().zip(out) {
            *out = ue8m0::decode(*byte);
        }
    } else {
        for (bytes, out) in bytes.chunks(2).zip(out.as_chunks_mut::<LANES>().0) {
            let second = bytes.get(1).map_or(1.0, |byte| ue8m0::decode(*byte));
            out[..8].fill(ue8m0::decode(bytes[0]));
            out[8..].fill(second);
        }
    }
}

/// The inverses of scales; whether all are normal numbers far enough from the ends of the range for
/// every weight to be exact.
#[inline(always)]
pub(super) fn invert(scales: &[f32], out: &mut [f32]) -> bool {
    let mut good = true;
    for (scale, out) in scales.iter().zip(out) {
        *out = 1.0 / scale;
        good &= *scale >= f32::MIN_POSITIVE && *scale <= 2f32.powi(113);
    }
    good
}

/// `out = x * scale` in lane order; whether every product is exact.
#[inline(always)]
pub(super) fn multiply<const STEPS: usize>(
    x: &[f32],
    scales: &[f32],
    inverse: &[f32],
    out: &mut [f32],
) -> bool {
    let mut wrong = [0u32; LANES];
    let scales = scales.as_chunks::<LANES>().0.iter().zip(inverse.as_chunks::<LANES>().0);
    let chunks = x.as_chunks::<LANES>().0.chunks_exact(STEPS);
    let out = out.as_chunks_mut::<LANES>().0.chunks_exact_mut(STEPS);
    for (((scale, inverse), x), out) in scales.zip(chunks).zip(out) {
        for s in 0..STEPS {
            for l in 0..LANES {
                let product = x[s][l] * scale[l];
                out[s][l] = product;
                wrong[l] |= (product * inverse[l]).to_bits() ^ x[s][l].to_bits();
            }
        }
    }
    wrong == [0; LANES]
}

/// The last, partial chunk of `R` rows, filled up with zeros.
pub(super) struct Tail<const R: usize>([[u8; 64]; R]);

impl<const R: usize> Tail<R> {
    /// `None` if the rows end with a chunk. A whole chunk is `chunk_bytes` long.
    #[inline(always)]
    pub(super) fn of(w: &StoredMatrix, rows: [&[u8]; R], chunk_bytes: usize) -> Option<Self> {
        let chunk = lanes::chunk(w.format);
        if w.cols.is_multiple_of(chunk) {
            return None;
        }
        let from = w.cols / chunk * chunk_bytes;
        Some(Self(rows.map(|row| {
            let rest = &row[from..];
            let mut bytes = [0; 64];
            bytes[..rest.len()].copy_from_slice(rest);
            if w.format == Format::Fp4Row32 && !w.cols.is_multiple_of(2) {
                bytes[rest.len() - 1] &= 0x0F;
            }
            bytes
        })))
    }

    #[inline(always)]
    pub(super) fn starts(&self) -> [*const u8; R] {
        std::array::from_fn(|r| self.0[r].as_ptr())
    }
}
