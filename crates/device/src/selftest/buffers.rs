//! Inputs, and outputs that notice what was not written and what should not have been.

use super::Trouble;
use crate::formats::encode_row;
use crate::ops::{Device, RowMap};
use crate::tensor::{Element, Expert, Format, RowFormat, StoredMatrix};
use std::ops::Range;

/// Elements behind an output that must stay as they are.
const GUARD: usize = 131;
/// Fills activations before an operation.
const POISON: f32 = -77_824.0;

/// Random numbers.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(super) fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    pub(super) fn below(&mut self, n: usize) -> usize {
        (self.word() % n as u64) as usize
    }

    /// Between -2 and 2, most near 0; exact in bf16, so that every device gets the same input.
    pub(super) fn values(&mut self, len: usize) -> Vec<f32> {
        let value = |bytes: &[u8]| (i32::from(bytes[0]) + i32::from(bytes[1]) - 255) as f32 / 128.0;
        let mut out = Vec::with_capacity(len + 4);
        while out.len() < len {
            out.extend(self.word().to_le_bytes().chunks_exact(2).map(value));
        }
        out.truncate(len);
        out
    }

    /// Integers from -`most` to `most`.
    pub(super) fn integers(&mut self, len: usize, most: usize) -> Vec<f32> {
        (0..len).map(|_| self.below(2 * most + 1) as f32 - most as f32).collect()
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut out = Vec::with_capacity(len + 8);
        while out.len() < len {
            out.extend(self.word().to_le_bytes());
        }
        out.truncate(len);
        out
    }

    /// A matrix of random codes with scales that make products of about the size of their input.
    pub(super) fn matrix(&mut self, format: Format, rows: usize, cols: usize) -> StoredMatrix {
        let (scale_rows, groups) = format.scale_shape(rows, cols).unwrap_or((0, 0));
        let small = -(cols as f32).log2() / 2.0;
        let (data, exponent) = match format {
            Format::F32 | Format::Bf16 => {
                let factor = small.exp2();
                let values = self.values(rows * cols);
                let values: Vec<half::bf16> =
                    values.iter().map(|x| half::bf16::from_f32(x * factor)).collect();
                let bytes = |x: &half::bf16| match format {
                    Format::F32 => x.to_f32().to_le_bytes().to_vec(),
                    _ => x.to_le_bytes().to_vec(),
                };
                (values.iter().flat_map(bytes).collect(), 0.0)
            }
            Format::Fp8Block32 | Format::Fp8Row32 => {
                let mut codes = self.bytes(rows * cols);
                // Not beyond 1.875 and not NaN: all magnitudes of those exponents.
                codes.iter_mut().for_each(|code| *code &= 0xbf);
                (codes, small)
            }
            Format::Fp4Row32 => (self.bytes(rows * format.row_bytes(cols)), small - 1.0),
        };
        let scale = |byte: u8| (127.0 + exponent.round()) as u8 - byte % 3;
        let scales: Vec<u8> = self.bytes(scale_rows * groups).into_iter().map(scale).collect();
        StoredMatrix::new(format, rows, cols, data.into(), scales.into())
    }

    pub(super) fn expert(
        &mut self,
        format: Format,
        hidden: usize,
        inner: usize,
    ) -> Expert<StoredMatrix> {
        Expert {
            w1: self.matrix(format, inner, hidden),
            w3: self.matrix(format, inner, hidden),
            w2: self.matrix(format, hidden, inner),
        }
    }

    /// Cache rows of random values.
    pub(super) fn stored_rows(&mut self, rows: usize, width: usize, format: RowFormat) -> Vec<u8> {
        encoded(&self.values(rows * width), width, format)
    }
}

/// Rows of `width` values, rounded to `format` and stored.
pub(super) fn encoded(x: &[f32], width: usize, format: RowFormat) -> Vec<u8> {
    let mut out = vec![0; x.len() / width * format.row_bytes(width)];
    for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(format.row_bytes(width))) {
        encode_row(format, x, out);
    }
    out
}

/// Rows `range` of an array of rows.
pub(super) fn part<'a, E>(x: &'a [E], width: usize, range: &Range<usize>) -> &'a [E] {
    &x[range.start * width..range.end * width]
}

pub(super) fn input<D: Device, E: Element>(
    device: &D,
    host: &[E],
) -> Result<D::Buffer<E>, Trouble> {
    let mut buffer = device.alloc(host.len())?;
    device.upload(host, &mut buffer, 0)?;
    Ok(buffer)
}

pub(super) fn act<D: Device>(device: &D, host: &[f32]) -> Result<D::Buffer<D::Act>, Trouble> {
    let mut buffer = device.alloc(host.len())?;
    device.upload_act(host, &mut buffer, 0)?;
    Ok(buffer)
}

/// An element that no operation produces by chance.
pub(super) trait Pattern: Element {
    const PATTERN: Self;
}
impl Pattern for f32 {
    const PATTERN: f32 = POISON;
}
impl Pattern for u32 {
    const PATTERN: u32 = 0xdead_beef;
}
impl Pattern for u8 {
    const PATTERN: u8 = 0xa5;
}

/// A buffer with these elements and a guard behind them.
pub(super) fn guarded<D: Device, E: Pattern>(
    device: &D,
    host: &[E],
) -> Result<D::Buffer<E>, Trouble> {
    input(device, &[host, &[E::PATTERN; GUARD]].concat())
}

/// An output of `len` elements, filled with the pattern.
pub(super) fn output<D: Device, E: Pattern>(
    device: &D,
    len: usize,
) -> Result<D::Buffer<E>, Trouble> {
    input(device, &vec![E::PATTERN; len + GUARD])
}

/// Activations with a guard behind them.
pub(super) fn guarded_act<D: Device>(
    device: &D,
    host: &[f32],
) -> Result<D::Buffer<D::Act>, Trouble> {
    act(device, &[host, &[POISON; GUARD]].concat())
}

pub(super) fn output_act<D: Device>(device: &D, len: usize) -> Result<D::Buffer<D::Act>, Trouble> {
    guarded_act(device, &vec![POISON; len])
}

/// The elements before the guard.
pub(super) fn read<D: Device, E: Pattern>(
    device: &D,
    buffer: &D::Buffer<E>,
) -> Result<Vec<E>, Trouble> {
    let mut host = vec![E::default(); device.len(buffer)];
    device.download(buffer, 0, &mut host)?;
    let guard = host.split_off(host.len() - GUARD);
    if guard.iter().any(|x| *x != E::PATTERN) {
        return Err(Trouble::Overrun);
    }
    Ok(host)
}

pub(super) fn read_act<D: Device>(
    device: &D,
    buffer: &D::Buffer<D::Act>,
) -> Result<Vec<f32>, Trouble> {
    let mut host = vec![0.0; device.len(buffer)];
    device.download_act(buffer, 0, &mut host)?;
    let guard = host.split_off(host.len() - GUARD);
    if guard.iter().any(|x| *x != POISON) {
        return Err(Trouble::Overrun);
    }
    Ok(host)
}

/// A step on the host.
#[derive(Clone, Default)]
pub(super) struct HostMap {
    pub(super) sequence: Vec<u32>,
    pub(super) position: Vec<u32>,
    pub(super) window_from: Vec<u32>,
    pub(super) window_to: Vec<u32>,
    pub(super) fresh_from: Vec<u32>,
    pub(super) first_row: Vec<u32>,
    pub(super) slot: Vec<u32>,
    pub(super) pages: Vec<u32>,
    pub(super) max_pages: usize,
}

impl HostMap {
    /// Rows of one sequence in slot 0: positions `range` with causal windows, and these pages.
    pub(super) fn one(range: Range<usize>, window: usize, pages: &[u32]) -> Self {
        let positions = || range.clone().map(|p| p as u32);
        Self {
            sequence: vec![0; range.len()],
            position: positions().collect(),
            window_from: positions().map(|p| (p + 1).saturating_sub(window as u32)).collect(),
            window_to: positions().map(|p| p + 1).collect(),
            fresh_from: vec![range.start as u32],
            first_row: vec![0],
            slot: vec![0],
            pages: pages.to_vec(),
            max_pages: pages.len(),
        }
    }

    pub(super) fn upload<D: Device>(&self, device: &D) -> Result<RowMap<D>, Trouble> {
        Ok(RowMap {
            rows: self.sequence.len(),
            sequences: self.slot.len(),
            sequence: input(device, &self.sequence)?,
            position: input(device, &self.position)?,
            window_from: input(device, &self.window_from)?,
            window_to: input(device, &self.window_to)?,
            fresh_from: input(device, &self.fresh_from)?,
            first_row: input(device, &self.first_row)?,
            slot: input(device, &self.slot)?,
            pages: input(device, &self.pages)?,
            max_pages: self.max_pages,
        })
    }
}
