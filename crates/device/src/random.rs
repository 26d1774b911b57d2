//! Random weights and cache rows, for measurements and tests. Each byte is a function of a key and
//! of its place, so that any part can be made alone, on any thread or device, and is always the
//! same. Codes are never NaN, and numbers have the size of a model's.

use crate::ops::{Device, Result};
use crate::splitmix;
use crate::tensor::{Format, RowFormat, StoredMatrix};
use bytes::Bytes;
use half::bf16;

/// What an array of bytes holds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Content {
    /// E4M3 codes of magnitude 2^-3 to 2: finite, no zeros.
    Fp8,
    /// Pairs of E2M1 codes, all sixteen equally often.
    Fp4,
    /// UE8M0 bytes: this one or the next.
    Scale(u8),
    /// `mean` plus or minus at most `spread`, evenly.
    Bf16 {
        /// Middle.
        mean: f32,
        /// Largest deviation.
        spread: f32,
    },
    /// The same in f32.
    F32 {
        /// Middle.
        mean: f32,
        /// Largest deviation.
        spread: f32,
    },
    /// Base of the stream mixing for so many streams, in f32: about 1/S of each stream is read,
    /// outputs are added with weight 1, streams stay apart.
    MixBase {
        /// Streams, S.
        streams: usize,
    },
    /// Rows of a cache, of so many values each.
    Rows {
        /// Stored form.
        format: RowFormat,
        /// Values in a row.
        width: usize,
    },
}

/// An array of random bytes. Word `i`, of 8 bytes, is made of the number
/// [`splitmix::mix`]`(key + i * STEP)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Random {
    /// What the numbers become.
    pub content: Content,
    /// Another key gives other numbers.
    pub key: u64,
}

/// How bytes of codes are made: rows of `row` bytes, of which the first `codes` are
/// `random & keep | set`, and the others `least + (random & spread)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Codes {
    pub(crate) row: u64,
    pub(crate) codes: u64,
    pub(crate) keep: u8,
    pub(crate) set: u8,
    pub(crate) least: u8,
    pub(crate) spread: u8,
}

impl Codes {
    fn byte(&self, place: u64, random: u8) -> u8 {
        if place % self.row < self.codes {
            random & self.keep | self.set
        } else {
            self.least + (random & self.spread)
        }
    }
}

/// How an array is made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Recipe {
    /// Bytes of codes and scales.
    Codes(Codes),
    /// `mean + spread * u` with u from -1 to 1.
    Bf16 { mean: f32, spread: f32 },
    /// The same.
    F32 { mean: f32, spread: f32 },
    /// Small, and made on the host.
    MixBase { streams: usize },
}

impl Content {
    /// How it is made.
    pub(crate) fn recipe(self) -> Recipe {
        let codes = |(keep, set), (least, spread), (codes, row): (usize, usize)| {
            let (codes, row) = (codes as u64, row as u64);
            Recipe::Codes(Codes { row, codes, keep, set, least, spread })
        };
        const FP8: (u8, u8) = (0x9f, 0x20);
        const FP4: (u8, u8) = (0xff, 0);
        match self {
            Content::Fp8 => codes(FP8, (0, 0), (1, 1)),
            Content::Fp4 => codes(FP4, (0, 0), (1, 1)),
            Content::Scale(least) => codes((0, 0), (least, 1), (0, 1)),
            Content::Bf16 { mean, spread } => Recipe::Bf16 { mean, spread },
            Content::F32 { mean, spread } => Recipe::F32 { mean, spread },
            Content::MixBase { streams } => Recipe::MixBase { streams },
            Content::Rows { format, width } => {
                let row = format.row_bytes(width);
                match format {
                    // Scales of 1/2 and 1.
                    RowFormat::Fp8x32 => codes(FP8, (126, 1), (width, row)),
                    // E4M3 scales from 1/4 to below 1/2.
                    RowFormat::Nvfp4x16 => codes(FP4, (0x28, 7), (width.div_ceil(2), row)),
                    // Scales of 1/4 and 1/2.
                    RowFormat::Mxfp4x32 => codes(FP4, (125, 1), (width.div_ceil(2), row)),
                    RowFormat::F32 => Recipe::F32 { mean: 0.0, spread: 1.7 },
                    RowFormat::Bf16 => Recipe::Bf16 { mean: 0.0, spread: 1.7 },
                }
            }
        }
    }
}

impl Random {
    /// Writes the bytes from `start` (a multiple of 8) on into `out`.
    pub fn fill(&self, start: u64, out: &mut [u8]) {
        debug_assert!(start.is_multiple_of(8));
        let first = start / 8;
        match self.content.recipe() {
            // Whole arrays of codes, or of scales: a word at a time.
            Recipe::Codes(c) if c.row == 1 => {
                let all = |byte: u8| u64::from_le_bytes([byte; 8]);
                let (keep, set) = match c.codes {
                    1 => (all(c.keep), all(c.set)),
                    _ => (all(c.spread), 0),
                };
                let least = if c.codes == 1 { 0 } else { all(c.least) };
                self.words(first, out, |random, _| (random & keep | set) + least);
            }
            Recipe::Codes(c) => self.words(first, out, |random, index| {
                let random = random.to_le_bytes();
                let byte = |b: usize| c.byte(8 * index + b as u64, random[b]);
                u64::from_le_bytes(std::array::from_fn(byte))
            }),
            Recipe::Bf16 { mean, spread } => self.words(first, out, |random, _| {
                let lane = |i: u32| {
                    let unit = f32::from((random >> (16 * i)) as i16) / 32768.0;
                    u64::from(bf16::from_f32(mean + spread * unit).to_bits()) << (16 * i)
                };
                lane(0) | lane(1) | lane(2) | lane(3)
            }),
            Recipe::F32 { mean, spread } => {
                self.words(first, out, |random, _| f32_pair(random, |_, unit| mean + spread * unit))
            }
            Recipe::MixBase { streams } => self.words(first, out, |random, index| {
                f32_pair(random, |lane, unit| {
                    mix_base(streams, 2 * index as usize + lane) + 0.2 * unit
                })
            }),
        }
    }

    /// The first `len` bytes.
    pub fn bytes(&self, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.fill(0, &mut out);
        out
    }

    /// Writes words made of (random word, index of the word).
    fn words(&self, first: u64, out: &mut [u8], word: impl Fn(u64, u64) -> u64) {
        let value = |place: usize| {
            let index = first + place as u64;
            let state = self.key.wrapping_add(index.wrapping_mul(splitmix::STEP));
            word(splitmix::mix(state), index).to_le_bytes()
        };
        let (chunks, rest) = out.as_chunks_mut::<8>();
        let whole = chunks.len();
        for (place, chunk) in chunks.iter_mut().enumerate() {
            *chunk = value(place);
        }
        let length = rest.len();
        rest.copy_from_slice(&value(whole)[..length]);
    }
}

/// Two f32 made of (place in the pair, random number from -1 to 1).
fn f32_pair(random: u64, value: impl Fn(usize, f32) -> f32) -> u64 {
    let lane = |i: usize| {
        let unit = (random >> (32 * i)) as i32 as f32 / 2_147_483_648.0;
        u64::from(value(i, unit).to_bits()) << (32 * i)
    };
    lane(0) | lane(1)
}

/// Middle of the stream-mixing base at `place`: pre, post, then the mixing matrix by rows.
fn mix_base(streams: usize, place: usize) -> f32 {
    match place.checked_sub(2 * streams) {
        None if place < streams => -(streams.max(2) as f32 - 1.0).ln(),
        None => 0.0,
        Some(at) if at / streams == at % streams => 2.0,
        Some(_) => 0.0,
    }
}

/// A matrix of random numbers: values, and scales where the format has them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RandomMatrix {
    /// Number format.
    pub format: Format,
    /// Output features of a linear layer.
    pub rows: usize,
    /// Input features of a linear layer.
    pub cols: usize,
    /// Values, of the format's type.
    pub values: Random,
    /// Scales; left out by plain formats.
    pub scales: Random,
}

impl RandomMatrix {
    /// The matrix in host memory.
    pub fn stored(&self) -> StoredMatrix {
        let (rows, cols) = (self.rows, self.cols);
        let data = self.values.bytes(rows * self.format.row_bytes(cols));
        let scale = match self.format.scale_shape(rows, cols) {
            Some((rows, groups)) => self.scales.bytes(rows * groups),
            None => Vec::new(),
        };
        StoredMatrix::new(self.format, rows, cols, Bytes::from(data), Bytes::from(scale))
    }

    /// The largest scale byte that occurs.
    pub(crate) fn largest_scale(&self) -> u8 {
        match self.scales.content {
            Content::Scale(least) if self.format.scale_shape(1, 1).is_some() => least + 1,
            _ => 0,
        }
    }
}

/// Bytes made on the host at a time: whole words.
const PIECE: usize = 1 << 20;

/// [`Device::random_bytes`] by way of the host.
pub(crate) fn upload_bytes<D: Device>(
    device: &D,
    random: &Random,
    bytes: usize,
    out: &mut D::Buffer<u8>,
) -> Result<()> {
    let mut piece = vec![0; PIECE.min(bytes)];
    for start in (0..bytes).step_by(PIECE) {
        let piece = &mut piece[..PIECE.min(bytes - start)];
        random.fill(start as u64, piece);
        device.upload(piece, out, start)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::decode_row;

    #[test]
    fn parts_are_those_of_the_whole() {
        let rows = |format, width| Content::Rows { format, width };
        let contents = [
            Content::Fp8,
            Content::Fp4,
            Content::Scale(120),
            Content::Bf16 { mean: 1.0, spread: 0.5 },
            Content::F32 { mean: 0.0, spread: 2.0 },
            Content::MixBase { streams: 4 },
            rows(RowFormat::Fp8x32, 40),
            rows(RowFormat::Nvfp4x16, 48),
            rows(RowFormat::Mxfp4x32, 128),
        ];
        for content in contents {
            let random = Random { content, key: 9 };
            let whole = random.bytes(5003);
            let mut part = vec![0; 5003 - 1024];
            random.fill(1024, &mut part);
            assert_eq!(part, whole[1024..], "{content:?}");
            assert_ne!(whole, Random { content, key: 8 }.bytes(5003), "{content:?}");
        }
    }

    #[test]
    fn cache_rows_are_finite_and_of_size_one() {
        for (format, width) in [
            (RowFormat::Fp8x32, 512),
            (RowFormat::Nvfp4x16, 512),
            (RowFormat::Mxfp4x32, 128),
            (RowFormat::Bf16, 96),
            (RowFormat::F32, 33),
        ] {
            let bytes = format.row_bytes(width);
            let all = Random { content: Content::Rows { format, width }, key: 3 }.bytes(64 * bytes);
            let mut squares = 0.0;
            let mut row = vec![0.0; width];
            for stored in all.chunks_exact(bytes) {
                decode_row(format, stored, &mut row);
                squares += row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
            }
            let size = (squares / (64 * width) as f64).sqrt();
            assert!((0.5..2.0).contains(&size), "{format:?}: {size}");
        }
    }
}
