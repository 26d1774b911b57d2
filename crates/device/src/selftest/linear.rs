//! Products with weights in stored form.

use super::buffers::{Random, act, output, output_act, part, read, read_act};
use super::{Operation, Output, Runner, Trouble};
use crate::ops::Device;
use crate::tensor::{Format, StoredMatrix};
use std::ops::Range;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Plain,
    /// f32 results, times a factor.
    F32,
    /// Block-diagonal with so many groups.
    Grouped(usize),
}

struct Linear {
    kind: Kind,
    w: StoredMatrix,
    x: Vec<f32>,
}

impl Linear {
    fn new(random: &mut Random, kind: Kind, w: StoredMatrix, rows: usize) -> Self {
        let groups = if let Kind::Grouped(groups) = kind { groups } else { 1 };
        let x = random.values(rows * groups * w.cols);
        Self { kind, w, x }
    }
}

impl Operation for Linear {
    type Ready<D: Device> = D::Matrix;

    fn name(&self) -> &'static str {
        match self.kind {
            Kind::Plain => "linear",
            Kind::F32 => "linear_f32",
            Kind::Grouped(_) => "grouped_linear",
        }
    }

    fn shape(&self) -> String {
        let groups = match self.kind {
            Kind::Grouped(groups) => format!(", {groups} groups"),
            _ => String::new(),
        };
        format!("{:?} {} x {}{groups}", self.w.format, self.w.rows, self.w.cols)
    }

    fn bound(&self) -> f64 {
        if self.kind == Kind::F32 { 1e-5 } else { 3e-3 }
    }

    fn prepare<D: Device>(&self, device: &D) -> Result<D::Matrix, Trouble> {
        Ok(device.matrix(self.w.clone())?)
    }

    fn run<D: Device>(
        &self,
        device: &D,
        w: &D::Matrix,
        rows: Range<usize>,
    ) -> Result<Output, Trouble> {
        let groups = if let Kind::Grouped(groups) = self.kind { groups } else { 1 };
        let x = act(device, part(&self.x, groups * self.w.cols, &rows))?;
        let (n, len) = (rows.len(), rows.len() * self.w.rows);
        if self.kind == Kind::F32 {
            let mut out = output::<D, f32>(device, len)?;
            device.linear_f32(&x, w, 0.75, n, &mut out)?;
            return Ok(Output::Rounded(read(device, &out)?));
        }
        let mut out = output_act(device, len)?;
        match self.kind {
            Kind::Grouped(groups) => device.grouped_linear(&x, w, groups, n, &mut out)?,
            _ => device.linear(&x, w, n, &mut out)?,
        }
        Ok(Output::Rounded(read_act(device, &out)?))
    }
}

pub(super) fn run<D: Device>(runner: &mut Runner<'_, D>) {
    use Format::{Bf16, F32, Fp4Row32, Fp8Block32};
    let quick = [
        (Kind::Plain, Fp8Block32, 67, 192, 4097),
        (Kind::Plain, Fp8Block32, 1280, 5120, 1536),
        (Kind::Plain, Fp4Row32, 96, 160, 1536),
        (Kind::Plain, Bf16, 33, 72, 1536),
        (Kind::F32, Bf16, 384, 5120, 1536),
        (Kind::F32, F32, 24, 320, 1536),
        (Kind::Grouped(3), Fp8Block32, 96, 64, 1536),
    ];
    let real = [
        (Kind::Plain, Fp8Block32, 32768, 1280, 1536),
        (Kind::Plain, Fp8Block32, 512, 5120, 4097),
        (Kind::Plain, Fp8Block32, 5120, 8192, 1536),
        (Kind::Grouped(8), Fp8Block32, 8192, 4096, 1536),
        (Kind::F32, Bf16, 129_280, 5120, 129),
    ];
    let cases = quick.iter().chain(if runner.options.quick { &real[..0] } else { &real[..] });
    for (kind, format, rows, cols, most) in cases {
        let most = runner.most(*most);
        let random = &mut runner.random;
        let w = random.matrix(*format, *rows, *cols);
        let linear = Linear::new(random, *kind, w, most);
        runner.check(&linear, most);
    }
}
