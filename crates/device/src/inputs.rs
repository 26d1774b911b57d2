//! Random inputs of operations, for tests and measurements.

use crate::formats::encode_row;
use crate::ops::{Device, Result, RowMap};
use crate::tensor::{Element, Expert, Format, RowFormat, StoredMatrix};
use std::ops::Range;

/// Random numbers.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.word() % n as u64) as usize
    }

    /// Between -2 and 2, most near 0; exact in bf16, so that every device gets the same input.
    pub(crate) fn values(&mut self, len: usize) -> Vec<f32> {
        let value = |bytes: &[u8]| (i32::from(bytes[0]) + i32::from(bytes[1]) - 255) as f32 / 128.0;
        let mut out = Vec::with_capacity(len + 4);
        while out.len() < len {
            out.extend(self.word().to_le_bytes().chunks_exact(2).map(value));
        }
        out.truncate(len);
        out
    }

    /// Integers from -`most` to `most`.
    pub(crate) fn integers(&mut self, len: usize, most: usize) -> Vec<f32> {
        (0..len).map(|_| self.below(2 * most + 1) as f32 - most as f32).collect()
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut out = Vec::with_capacity(len + 8);
        while out.len() < len {
            out.extend(self.word().to_le_bytes());
        }
        out.truncate(len);
        out
    }

    /// A matrix of random codes with scales that make products of about the size of their input.
    pub(crate) fn matrix(&mut self, format: Format, rows: usize, cols: usize) -> StoredMatrix {
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

    pub(crate) fn expert(
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
    pub(crate) fn stored_rows(&mut self, rows: usize, width: usize, format: RowFormat) -> Vec<u8> {
        encoded(&self.values(rows * width), width, format)
    }
}

/// Rows of `width` values, rounded to `format` and stored.
pub(crate) fn encoded(x: &[f32], width: usize, format: RowFormat) -> Vec<u8> {
    let mut out = vec![0; x.len() / width * format.row_bytes(width)];
    for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(format.row_bytes(width))) {
        encode_row(format, x, out);
    }
    out
}

/// Rows `range` of an array of rows.
pub(crate) fn part<'a, E>(x: &'a [E], width: usize, range: &Range<usize>) -> &'a [E] {
    &x[range.start * width..range.end * width]
}

pub(crate) fn input<D: Device, E: Element>(device: &D, host: &[E]) -> Result<D::Buffer<E>> {
    let mut buffer = device.alloc(host.len())?;
    device.upload(host, &mut buffer, 0)?;
    Ok(buffer)
}

pub(crate) fn act<D: Device>(device: &D, host: &[f32]) -> Result<D::Buffer<D::Act>> {
    let mut buffer = device.alloc(host.len())?;
    device.upload_act(host, &mut buffer, 0)?;
    Ok(buffer)
}

/// A step on the host.
#[derive(Clone, Default)]
pub(crate) struct HostMap {
    pub(crate) sequence: Vec<u32>,
    pub(crate) position: Vec<u32>,
    pub(crate) window_from: Vec<u32>,
    pub(crate) window_to: Vec<u32>,
    pub(crate) fresh_from: Vec<u32>,
    pub(crate) first_row: Vec<u32>,
    pub(crate) slot: Vec<u32>,
    pub(crate) pages: Vec<u32>,
    pub(crate) max_pages: usize,
}

impl HostMap {
    /// Rows of one sequence in slot 0: positions `range` with causal windows, and these pages.
    pub(crate) fn one(range: Range<usize>, window: usize, pages: &[u32]) -> Self {
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

    /// A row in each of `slots`, every one at position `last` of a sequence of its own; all have
    /// these pages.
    pub(crate) fn alone(last: usize, window: usize, slots: Range<u32>, pages: &[u32]) -> Self {
        let rows = slots.len();
        let one = Self::one(last..last + 1, window, pages);
        let each = |x: &[u32]| vec![x[0]; rows];
        Self {
            sequence: (0..rows as u32).collect(),
            position: each(&one.position),
            window_from: each(&one.window_from),
            window_to: each(&one.window_to),
            fresh_from: each(&one.fresh_from),
            first_row: (0..rows as u32).collect(),
            slot: slots.collect(),
            pages: pages.repeat(rows),
            max_pages: pages.len(),
        }
    }

    pub(crate) fn upload<D: Device>(&self, device: &D) -> Result<RowMap<D>> {
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
