//! Rows of caches: encoding, rounding in place, decoding.

use super::buffers::{act, guarded_act, input, output, output_act, part, read, read_act};
use super::{Operation, Output, Runner, Trouble};
use crate::ops::{ABSENT, Device};
use crate::tensor::{Format, RowFormat, StoredMatrix};
use half::bf16;
use std::ops::Range;

#[derive(Clone, Copy)]
enum Kind {
    Encode,
    Round,
    Decode,
}

struct Rows {
    kind: Kind,
    format: RowFormat,
    width: usize,
    x: Vec<f32>,
    stored: Vec<u8>,
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.iter().map(|b| u32::from(*b)).collect()
}

impl Operation for Rows {
    type Ready<D: Device> = ();

    fn name(&self) -> &'static str {
        match self.kind {
            Kind::Encode => "encode_rows",
            Kind::Round => "round_rows",
            Kind::Decode => "decode_rows",
        }
    }

    fn shape(&self) -> String {
        format!("{:?} of {}", self.format, self.width)
    }

    fn prepare<D: Device>(&self, _: &D) -> Result<(), Trouble> {
        Ok(())
    }

    fn run<D: Device>(&self, device: &D, (): &(), rows: Range<usize>) -> Result<Output, Trouble> {
        let (width, n, bytes) = (self.width, rows.len(), self.format.row_bytes(self.width));
        let x = part(&self.x, width, &rows);
        let bits = |x: Vec<f32>| x.iter().map(|x| x.to_bits()).collect();
        Ok(Output::Exact(match self.kind {
            Kind::Encode => {
                let mut out = output::<D, u8>(device, n * bytes)?;
                device.encode_rows(&act(device, x)?, width, self.format, n, &mut out)?;
                words(&read(device, &out)?)
            }
            Kind::Round => {
                let mut x = guarded_act(device, x)?;
                device.round_rows(&mut x, width, self.format, n)?;
                bits(read_act(device, &x)?)
            }
            Kind::Decode => {
                // Rows from all over the place; some are absent, and stay as they are.
                let count = self.stored.len() / bytes;
                let number =
                    |row: usize| if row % 5 == 3 { ABSENT } else { (7 * row % count) as u32 };
                let indices: Vec<u32> = rows.map(number).collect();
                let (src, indices) = (input(device, &self.stored)?, input(device, &indices)?);
                let mut out = output_act(device, n * width)?;
                device.decode_rows(&src, width, self.format, &indices, n, &mut out)?;
                bits(read_act(device, &out)?)
            }
        }))
    }
}

/// Rows of a table.
struct Lookup {
    table: StoredMatrix,
    of_memory: bool,
}

impl Operation for Lookup {
    type Ready<D: Device> = D::Matrix;

    fn name(&self) -> &'static str {
        if self.of_memory { "engram_gather" } else { "embed" }
    }

    fn shape(&self) -> String {
        format!("{:?} of {}", self.table.format, self.table.cols)
    }

    fn prepare<D: Device>(&self, device: &D) -> Result<D::Matrix, Trouble> {
        Ok(device.matrix(self.table.clone())?)
    }

    fn run<D: Device>(
        &self,
        device: &D,
        table: &D::Matrix,
        rows: Range<usize>,
    ) -> Result<Output, Trouble> {
        let n = rows.len();
        let mut out = output_act(device, n * self.table.cols)?;
        let ids = rows.map(|row| 7 * row % self.table.rows);
        if self.of_memory {
            let ids: Vec<u64> = ids.map(|id| id as u64).collect();
            device.engram_gather(table, &input(device, &ids)?, n, &mut out)?;
        } else {
            let ids: Vec<u32> =
                ids.map(|id| if id % 5 == 3 { ABSENT } else { id as u32 }).collect();
            device.embed(table, &input(device, &ids)?, n, &mut out)?;
        }
        Ok(Output::Exact(read_act(device, &out)?.iter().map(|x| x.to_bits()).collect()))
    }
}

/// Rows turned round, put back, and joined to themselves.
struct Moved {
    width: usize,
    x: Vec<f32>,
}

impl Operation for Moved {
    type Ready<D: Device> = ();

    fn name(&self) -> &'static str {
        "gather, scatter_rows, concat"
    }

    fn shape(&self) -> String {
        format!("{} values", self.width)
    }

    fn prepare<D: Device>(&self, _: &D) -> Result<(), Trouble> {
        Ok(())
    }

    fn run<D: Device>(&self, device: &D, (): &(), rows: Range<usize>) -> Result<Output, Trouble> {
        let (width, n) = (self.width, rows.len());
        let x = act(device, part(&self.x, width, &rows))?;
        let mut turned = output_act(device, n * width)?;
        let mut back = output_act(device, n * width)?;
        let mut out = output_act(device, 2 * n * width)?;
        let order: Vec<u32> = (0..n as u32).rev().collect();
        let places: Vec<u64> = order.iter().map(|i| u64::from(*i)).collect();
        device.gather_rows(&x, width, &input(device, &order)?, n, &mut turned)?;
        device.scatter_rows(&turned, width, &input(device, &places)?, n, &mut back)?;
        device.concat(&x, width, &back, width, n, &mut out)?;
        read_act(device, &turned)?;
        read_act(device, &back)?;
        Ok(Output::Exact(read_act(device, &out)?.iter().map(|x| x.to_bits()).collect()))
    }
}

pub(super) fn run<D: Device>(runner: &mut Runner<'_, D>) {
    let shapes = [
        (RowFormat::Fp8x32, 512),
        (RowFormat::Nvfp4x16, 512),
        (RowFormat::Mxfp4x32, 128),
        (RowFormat::Fp8x32, 47),
        (RowFormat::Nvfp4x16, 47),
        (RowFormat::Mxfp4x32, 33),
    ];
    let most = runner.most(usize::MAX);
    for (format, width) in shapes {
        for kind in [Kind::Encode, Kind::Round, Kind::Decode] {
            let mut x = runner.random.values(most * width);
            // Rows of very different size.
            for (i, row) in x.chunks_exact_mut(width).enumerate() {
                let factor = 2f32.powi((i % 31) as i32 - 15);
                row.iter_mut().for_each(|x| *x *= factor);
            }
            let stored = runner.random.stored_rows(most, width, format);
            runner.check(&Rows { kind, format, width, x, stored }, most);
        }
    }
    let tables = [
        (Format::Bf16, 5120),
        (Format::Bf16, 47),
        (Format::Fp8Block32, 5120),
        (Format::Fp8Row32, 256),
        (Format::Fp8Row32, 47),
        (Format::Fp4Row32, 100),
    ];
    for (format, cols) in tables {
        let table = runner.random.matrix(format, 331, cols);
        let of_memory = format == Format::Fp8Row32;
        runner.check(&Lookup { table, of_memory }, most);
    }
    for width in [5120, 47] {
        // Values that every device holds as they are.
        let mut x = runner.random.values(most * width);
        x.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
        runner.check(&Moved { width, x }, most);
    }
}
