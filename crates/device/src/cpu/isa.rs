//! Instruction sets that the CPU code has versions for.

/// An instruction set, each including the ones before it. All of them give the same bits; they
/// differ in speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain Rust, for every processor.
    Scalar,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// The same and AVX-512 VBMI (byte permutes over whole tables).
    Avx512Vbmi,
}

impl Isa {
    /// All of them, the plainest first.
    pub const ALL: [Isa; 4] = [Isa::Scalar, Isa::Avx2, Isa::Avx512, Isa::Avx512Vbmi];

    /// The best one that this processor has.
    #[cfg(target_arch = "x86_64")]
    pub fn detect() -> Self {
        let avx2 = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        let avx512 = avx2
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        if avx512 && is_x86_feature_detected!("avx512vbmi") {
            Isa::Avx512Vbmi
        } else if avx512 {
            Isa::Avx512
        } else if avx2 {
            Isa::Avx2
        } else {
            Isa::Scalar
        }
    }

    /// The best one that this processor has.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn detect() -> Self {
        Isa::Scalar
    }

    /// Those that this processor has, the plainest first.
    pub fn available() -> impl Iterator<Item = Isa> {
        let best = Self::detect();
        Self::ALL.into_iter().filter(move |isa| *isa <= best)
    }
}
