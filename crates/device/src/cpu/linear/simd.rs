//! What the kernels ask of an instruction set.

use crate::cpu::lanes::LANES;

/// Most activation rows of a register tile.
pub(super) const MAX_MR: usize = 6;
/// Most weight rows of one.
pub(super) const MAX_NR: usize = 4;

/// Sixteen lanes of f32 in registers. Every method needs a processor that has the instruction set,
/// and is inlined into a function that enables it.
pub(super) trait Simd: Copy {
    /// The lanes.
    type V: Copy;

    /// Zeros.
    unsafe fn zero() -> Self::V;
    /// 16 values at `p`.
    unsafe fn load(p: *const f32) -> Self::V;
    /// Stores 16 values at `p`.
    unsafe fn store(p: *mut f32, v: Self::V);
    /// Tells the processor that the line at `p` is wanted soon. Any address will do.
    unsafe fn prefetch(p: *const u8);
    /// `x * y + acc`, rounded once.
    unsafe fn fma(x: Self::V, y: Self::V, acc: Self::V) -> Self::V;
    /// `x * y`.
    unsafe fn mul(x: Self::V, y: Self::V) -> Self::V;
    /// `a` in lanes 0 to 7, `b` in lanes 8 to 15.
    unsafe fn halves(a: f32, b: f32) -> Self::V;
    /// Activation rows of a register tile, at most [`MAX_MR`].
    const MR: usize;
    /// Weight rows of a register tile, at most [`MAX_NR`].
    const NR: usize;
    /// [`tile`] for the first `count` (1 to `MR`) activation rows and `NR` weight rows.
    unsafe fn tile(
        count: usize,
        x: &[*const f32; MAX_MR],
        w: *const f32,
        steps: usize,
        first: bool,
        acc: *mut f32,
    );
    /// The lanes added by halves, as [`lanes::tree`](crate::cpu::lanes::tree) does.
    unsafe fn tree(v: Self::V) -> f32;

    /// The same for 16 vectors: `NR` at `acc`, as many `stride` values later, and so on.
    #[inline(always)]
    unsafe fn trees(acc: *const f32, stride: usize) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        for (j, out) in out.iter_mut().enumerate() {
            // SAFETY: the caller's pointer covers the vectors, and the processor has the instruction
            // set.
            unsafe {
                let v = Self::load(acc.add(j / Self::NR * stride + j % Self::NR * LANES));
                *out = Self::tree(v);
            }
        }
        out
    }
}

/// Bytes of the scales of a chunk where each lane has one of its own, an f32.
pub(super) const EXPANDED: usize = LANES * size_of::<f32>();

/// How a chunk of a stored row becomes weights in lane order: `STEPS` times 16.
pub(super) trait Decode<S: Simd, const STEPS: usize>: Copy {
    /// Stored bytes of a chunk.
    const BYTES: usize;
    /// Bytes of scales of a chunk: none, one as it is stored, or [`EXPANDED`].
    const SCALES: usize;

    /// The dequantized weights of the chunk at `codes`. Reads `BYTES` bytes there and `SCALES`
    /// bytes at `scale`.
    unsafe fn weights(self, codes: *const u8, scale: *const u8) -> [S::V; STEPS];
    /// The same with all scales 1.
    unsafe fn codes(self, codes: *const u8) -> [S::V; STEPS];
}

/// f32 weights: nothing to look up.
#[derive(Clone, Copy)]
pub(super) struct F32;

/// bf16 weights.
#[derive(Clone, Copy)]
pub(super) struct Bf16;

/// `R` stored rows times `M` activation rows, all in lane order: `chunks` whole chunks, then one
/// more that the stored rows have at `tail`. `SCALED` multiplies by the scales at `scale` (one
/// pointer a row, advancing by `SCALES` a chunk); otherwise the activations have been multiplied.
#[inline(always)]
pub(super) unsafe fn dots<
    S,
    D,
    const STEPS: usize,
    const M: usize,
    const R: usize,
    const SCALED: bool,
>(
    decode: D,
    x: [*const f32; M],
    rows: [*const u8; R],
    scales: [*const u8; R],
    chunks: usize,
    tail: Option<[*const u8; R]>,
    ahead: usize,
) -> [[f32; M]; R]
where
    S: Simd,
    D: Decode<S, STEPS>,
{
    // SAFETY: the caller's pointers cover `chunks` chunks (and one more of x and scales if there is
    // a tail), and the processor has the instruction set.
    unsafe {
        let mut acc = [[S::zero(); M]; R];
        for c in 0..chunks {
            if D::BYTES >= 64 || (c * D::BYTES).is_multiple_of(64) {
                for r in 0..R {
                    S::prefetch(rows[r].wrapping_add(c * D::BYTES + ahead));
                }
            }
            step::<S, D, STEPS, M, R, SCALED>(
                decode,
                x,
                rows.map(|p| p.add(c * D::BYTES)),
                scales,
                c,
                &mut acc,
            );
        }
        if let Some(tail) = tail {
            step::<S, D, STEPS, M, R, SCALED>(decode, x, tail, scales, chunks, &mut acc);
        }
        let mut out = [[0.0; M]; R];
        for r in 0..R {
            for m in 0..M {
                out[r][m] = S::tree(acc[r][m]);
            }
        }
        out
    }
}

/// Chunk `c` of [`dots`].
#[inline(always)]
unsafe fn step<S, D, const STEPS: usize, const M: usize, const R: usize, const SCALED: bool>(
    decode: D,
    x: [*const f32; M],
    codes: [*const u8; R],
    scales: [*const u8; R],
    c: usize,
    acc: &mut [[S::V; M]; R],
) where
    S: Simd,
    D: Decode<S, STEPS>,
{
    // SAFETY: as for `dots`.
    unsafe {
        for r in 0..R {
            let w = if SCALED {
                decode.weights(codes[r], scales[r].add(c * D::SCALES))
            } else {
                decode.codes(codes[r])
            };
            for s in 0..STEPS {
                for m in 0..M {
                    let x = S::load(x[m].add((c * STEPS + s) * LANES));
                    acc[r][m] = S::fma(x, w[s], acc[r][m]);
                }
            }
        }
    }
}

/// Adds `steps` steps of `MR` activation rows times `NR` weight rows, all f32 in lane order, to the
/// lanes at `acc` (`[MR, NR, 16]`); from zero if `first`. Weights are `[steps, NR, 16]` at `w`.
#[inline(always)]
pub(super) unsafe fn tile<S: Simd, const MR: usize, const NR: usize>(
    x: &[*const f32; MAX_MR],
    w: *const f32,
    steps: usize,
    first: bool,
    acc: *mut f32,
) {
    // SAFETY: the caller's pointers cover `steps` steps and the accumulators, and the processor has
    // the instruction set.
    unsafe {
        let mut lanes = [[S::zero(); NR]; MR];
        if !first {
            for m in 0..MR {
                for n in 0..NR {
                    lanes[m][n] = S::load(acc.add((m * NR + n) * LANES));
                }
            }
        }
        for s in 0..steps {
            let mut ws = [S::zero(); NR];
            for n in 0..NR {
                ws[n] = S::load(w.add((s * NR + n) * LANES));
            }
            for m in 0..MR {
                let x = S::load(x[m].add(s * LANES));
                for n in 0..NR {
                    lanes[m][n] = S::fma(x, ws[n], lanes[m][n]);
                }
            }
        }
        for m in 0..MR {
            for n in 0..NR {
                S::store(acc.add((m * NR + n) * LANES), lanes[m][n]);
            }
        }
    }
}
