//! Products with the instruction sets of x86-64.

use super::Rows;
use super::avx2::{Avx2, Fp4Avx2, Fp8Avx2};
use super::avx512::{Avx512, Fp4Avx512, Fp8Vbmi};
use super::few::few;
use super::many::many;
use super::simd::{Bf16, F32};
use crate::tensor::{Format, StoredMatrix};
use std::ops::Range;

/// Defines the products of an instruction set: for each format, how codes are widened (in `STEPS`
/// steps a chunk), and up to how many activation rows are multiplied with how many stored rows at a
/// time. For more activation rows, stored rows are widened to f32 first.
macro_rules! products {
    ($name:ident, $features:literal, $simd:ty, $tiles:tt,
        { $($format:pat => $decode:expr, $steps:literal;)* } $(else $other:ident)?) => {
        #[target_feature(enable = $features)]
        pub(super) fn $name(x: &Rows, w: &StoredMatrix, n: Range<usize>, out: &mut [f32]) {
            match w.format {
                $($format => {
                    let args = ($decode, x, w, n, out);
                    by_rows!($simd, $steps, args, $tiles)
                })*
                $(_ => $other(x, w, n, out),)?
            }
        }
    };
}

macro_rules! by_rows {
    ($simd:ty, $steps:literal, $args:ident,
        { $($m:literal x $r:literal),* }) => {{
        let (decode, x, w, n, out) = $args;
        match x.len() {
            0 => {}
            // SAFETY: the caller enables the instruction set; rows are in the lane order of `w`.
            $(rows if rows <= $m => unsafe {
                few::<$simd, _, $steps, $m, $r>(decode, x, w, n, out)
            },)*
            // SAFETY: as above.
            _ => unsafe { many::<$simd, _, $steps>(decode, x, w, n, out) },
        }
    }};
}

products!(block_avx2, "avx2,fma,f16c", Avx2, { 1 x 4, 2 x 4, 4 x 2 }, {
    Format::F32 => F32, 1;
    Format::Bf16 => Bf16, 1;
    Format::Fp8Block32 | Format::Fp8Row32 => Fp8Avx2, 4;
    Format::Fp4Row32 => Fp4Avx2, 2;
});
products!(
    block_avx512,
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c",
    Avx512,
    { 1 x 4, 2 x 4, 3 x 4, 4 x 4, 5 x 2, 6 x 2, 7 x 2, 8 x 2 },
    {
        Format::F32 => F32, 1;
        Format::Bf16 => Bf16, 1;
        Format::Fp4Row32 => Fp4Avx512::new(), 2;
    } else block_avx2
);
products!(
    block_vbmi,
    "avx512vbmi,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c",
    Avx512,
    { 1 x 4, 2 x 4, 3 x 4, 4 x 4, 5 x 3, 6 x 3, 7 x 2, 8 x 2 },
    {
        Format::Fp8Block32 | Format::Fp8Row32 => Fp8Vbmi::new(), 4;
    } else block_avx512
);
