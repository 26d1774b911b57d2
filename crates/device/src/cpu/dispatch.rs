//! One source, one machine version an instruction set.

/// Defines `fn name(isa: Isa, args...)` whose body is compiled once for each instruction set and
/// chosen at run time. The body is written over lanes (`[f32; 16]`, `f32::mul_add`), so that every
/// version computes the same bits and the compiler vectorizes each as far as its set allows.
/// Functions that the body calls must be `#[inline(always)]`.
macro_rules! by_isa {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block) => {
        $(#[$meta])*
        $vis fn $name(isa: $crate::cpu::Isa, $($arg: $ty),*) {
            #[inline(always)]
            fn body($($arg: $ty),*) $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            fn avx512($($arg: $ty),*) {
                body($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($arg: $ty),*) {
                body($($arg),*)
            }

            match isa {
                $crate::cpu::Isa::Scalar => body($($arg),*),
                // SAFETY: a device holds an `Isa` only if the processor has it.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::Isa::Avx2 => unsafe { avx2($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::Isa::Avx512 | $crate::cpu::Isa::Avx512Vbmi => unsafe {
                    avx512($($arg),*)
                },
                #[cfg(not(target_arch = "x86_64"))]
                _ => body($($arg),*),
            }
        }
    };
}
pub(crate) use by_isa;

/// Values that are summed side by side. Element `i` of a row belongs to lane `i % LANES`.
pub(crate) const LANES: usize = 16;

/// Sum of the lanes, by halves: `l` and `l + 8`, then `l + 4`, `l + 2`, `l + 1`.
#[inline(always)]
pub(crate) fn tree(mut lanes: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for l in 0..half {
            lanes[l] += lanes[l + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// `sum x[i] * y[i]`: fused multiply-adds in each lane, ascending, then [`tree`].
#[inline(always)]
pub(crate) fn dot(x: &[f32], y: &[f32]) -> f32 {
    let y = &y[..x.len()];
    let mut acc = [0.0f32; LANES];
    let (xs, x_rest) = x.as_chunks::<LANES>();
    let (ys, y_rest) = y.as_chunks::<LANES>();
    for (a, b) in xs.iter().zip(ys) {
        for l in 0..LANES {
            acc[l] = a[l].mul_add(b[l], acc[l]);
        }
    }
    for (l, (a, b)) in x_rest.iter().zip(y_rest).enumerate() {
        acc[l] = a.mul_add(*b, acc[l]);
    }
    tree(acc)
}
