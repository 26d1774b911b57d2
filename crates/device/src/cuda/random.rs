//! Random weights and cache rows, made in place: `kernels/random.cu`.

use super::Cuda;
use super::experts::Experts;
use super::launch::args;
use super::memory::{Buffer, Ptr};
use super::stored::{Matrix, largest_scale};
use crate::ops::{Device, Result};
use crate::random::{Random, RandomMatrix, Recipe, upload_bytes};
use crate::tensor::Expert;

/// Threads of a block, each with a word of 8 bytes.
const THREADS: usize = 256;

/// Whether kernels that read the matrix in registers can apply its scales.
fn fits(m: &RandomMatrix) -> bool {
    m.largest_scale() <= largest_scale(m.format)
}

impl Cuda {
    /// Makes `lines` lines of `line` bytes that start `stride` bytes apart at `to`; bytes between
    /// them are left alone.
    ///
    /// # Panics
    /// If the content is made on the host.
    pub(super) fn random_fill(
        &self,
        random: &Random,
        lines: usize,
        line: usize,
        stride: usize,
        to: Ptr,
    ) -> Result<()> {
        // Lines without gaps are one.
        let (lines, line, stride) =
            if line == stride { (1, lines * line, lines * stride) } else { (lines, line, stride) };
        let count = lines * line;
        let blocks = [count.div_ceil(8 * THREADS), 1, 1];
        let (operation, key) = ("random", random.key);
        match random.content.recipe() {
            Recipe::Codes(c) => {
                let args = args![
                    to,
                    count as u64,
                    line as u64,
                    stride as u64,
                    key,
                    c.row,
                    c.codes,
                    u32::from(c.keep),
                    u32::from(c.set),
                    u32::from(c.least),
                    u32::from(c.spread),
                ];
                self.launch(operation, "random_bytes", blocks, THREADS, 0, args)
            }
            Recipe::Bf16 { mean, spread } | Recipe::F32 { mean, spread } => {
                let wide = matches!(random.content.recipe(), Recipe::F32 { .. });
                let (kernel, size) = if wide { ("random_f32", 4) } else { ("random_bf16", 2) };
                let in_numbers = |bytes: usize| (bytes / size) as u64;
                let args = args![
                    to,
                    in_numbers(count),
                    in_numbers(line),
                    in_numbers(stride),
                    key,
                    mean,
                    spread,
                ];
                self.launch(operation, kernel, blocks, THREADS, 0, args)
            }
            Recipe::MixBase { .. } => panic!("{:?} is made on the host", random.content),
        }
    }
}

pub(super) fn matrix(cuda: &Cuda, m: &RandomMatrix) -> Result<Matrix> {
    if !fits(m) {
        return cuda.matrix(m.stored());
    }
    let matrix = cuda.blank(m.format, m.rows, m.cols, 0)?;
    let line = m.format.row_bytes(m.cols);
    cuda.random_fill(&m.values, m.rows, line, matrix.row_stride, matrix.data)?;
    if let Some((rows, groups)) = m.format.scale_shape(m.rows, m.cols) {
        cuda.random_fill(&m.scales, rows, groups, groups, matrix.scale)?;
    }
    Ok(matrix)
}

pub(super) fn experts(cuda: &Cuda, all: &[Expert<RandomMatrix>]) -> Result<Experts> {
    let matrices = || all.iter().flat_map(|e| [&e.w1, &e.w3, &e.w2]);
    if matrices().all(fits) {
        return Experts::random(cuda, all);
    }
    let stored = |e: &Expert<RandomMatrix>| Expert {
        w1: e.w1.stored(),
        w3: e.w3.stored(),
        w2: e.w2.stored(),
    };
    Experts::new(cuda, all.iter().map(stored).collect())
}

pub(super) fn bytes(
    cuda: &Cuda,
    random: &Random,
    bytes: usize,
    out: &mut Buffer<u8>,
) -> Result<()> {
    if let Recipe::MixBase { .. } = random.content.recipe() {
        return upload_bytes(cuda, random, bytes, out);
    }
    cuda.random_fill(random, 1, bytes, bytes, out.head(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::test_gpu;
    use crate::random::Content;
    use crate::tensor::Format;

    /// The bytes of a matrix, gaps left out.
    fn contents(cuda: &Cuda, m: &Matrix) -> (Vec<u8>, Vec<u8>) {
        let line = m.format.row_bytes(m.cols);
        let mut padded = vec![0u8; m.rows * m.row_stride];
        cuda.download_elements(m.data, &mut padded).expect("downloads");
        let values = padded.chunks_exact(m.row_stride).flat_map(|row| &row[..line]).copied();
        let (rows, groups) = m.format.scale_shape(m.rows, m.cols).unwrap_or((0, 0));
        let mut scales = vec![0u8; rows * groups];
        cuda.download_elements(m.scale, &mut scales).expect("downloads");
        (values.collect(), scales)
    }

    #[test]
    fn matrices_are_those_of_the_host() {
        let Some(cuda) = test_gpu() else { return };
        let plain = |format| match format {
            Format::F32 => Content::F32 { mean: 0.25, spread: 1.5 },
            Format::Bf16 => Content::Bf16 { mean: 0.25, spread: 1.5 },
            Format::Fp4Row32 => Content::Fp4,
            Format::Fp8Block32 | Format::Fp8Row32 => Content::Fp8,
        };
        let formats =
            [Format::F32, Format::Bf16, Format::Fp8Block32, Format::Fp8Row32, Format::Fp4Row32];
        for format in formats {
            for (rows, cols) in [(64, 128), (33, 100), (7, 5120), (1, 32)] {
                let m = RandomMatrix {
                    format,
                    rows,
                    cols,
                    values: Random { content: plain(format), key: 5 },
                    scales: Random { content: Content::Scale(119), key: 6 },
                };
                let stored = m.stored();
                let (values, scales) = contents(&cuda, &matrix(&cuda, &m).expect("fits"));
                assert_eq!(values, stored.data, "{format:?} {rows} x {cols}");
                assert_eq!(scales, stored.scale, "{format:?} {rows} x {cols}");
            }
        }
    }
}
