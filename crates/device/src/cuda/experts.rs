//! Routed and shared experts.
//!
//! Rows are sorted by expert on the device; see `kernels/experts.cu` for the products.

use super::launch::{Arg, MAX_SHARED, args, u32_of};
use super::memory::{Buffer, Memory, Ptr};
use super::stored::{Matrix, readable};
use super::{Cuda, lock};
use crate::error::DeviceError;
use crate::ops::Result;
use crate::tensor::{Expert, Format, StoredMatrix};
use half::bf16;

/// Rows that share one pass over the weights: bounds the scratch memory.
const ROW_BLOCK: usize = 1024;
/// Threads of a block that multiplies.
const THREADS: usize = 128;
/// Pairs of a row and an expert in a block, where few rows meet at an expert, and where many do.
const FEW: usize = 8;
const MANY: usize = 64;

/// The routed experts of one layer.
pub struct Experts {
    count: usize,
    /// None without experts.
    weights: Option<Expert<Projection>>,
}

/// One projection of all experts, one after the other.
struct Projection {
    values: Memory,
    scales: Memory,
    layout: Layout,
}

/// How a projection lies in memory.
#[derive(Clone, Copy)]
struct Layout {
    format: Format,
    rows: usize,
    cols: usize,
    data: Ptr,
    row_stride: usize,
    scale: Ptr,
    scale_rows: usize,
    scale_stride: usize,
    scale_row0: usize,
}

impl Layout {
    fn of(m: &Matrix) -> Self {
        Self {
            format: m.format,
            rows: m.rows,
            cols: m.cols,
            data: m.data,
            row_stride: m.row_stride,
            scale: m.scale,
            scale_rows: 0,
            scale_stride: m.scale_stride,
            scale_row0: m.scale_row0,
        }
    }

    /// The members of the kernels' `Weights`.
    fn slots(&self) -> [u64; 8] {
        [
            self.data.slot(),
            (self.rows * self.row_stride) as u64,
            self.row_stride as u64,
            self.scale.slot(),
            (self.scale_rows * self.scale_stride) as u64,
            self.scale_stride as u64,
            self.scale_row0 as u64,
            if self.format == Format::Fp8Block32 { 32 } else { 1 },
        ]
    }

    /// The middle of the kernels' names.
    fn name(&self) -> &'static str {
        match self.format {
            Format::Fp4Row32 => "fp4",
            Format::Fp8Block32 | Format::Fp8Row32 => "fp8",
            Format::F32 | Format::Bf16 => "bf16",
        }
    }

    /// Refuses what the kernels cannot read.
    fn check(&self) -> Result<()> {
        let unsupported = |reason: &str| DeviceError::Unsupported {
            device: "cuda",
            format: format!("{:?}", self.format),
            rows: self.rows,
            cols: self.cols,
            reason: reason.to_owned(),
        };
        if self.format == Format::F32 {
            return Err(unsupported("experts are fp4, fp8 or bf16 here"));
        }
        if !self.cols.is_multiple_of(32) {
            return Err(unsupported("columns of experts come in groups of 32 here"));
        }
        Ok(())
    }
}

impl Projection {
    fn new(cuda: &Cuda, all: &[&StoredMatrix]) -> Result<Self> {
        let first = all[0];
        let mut layout = Layout {
            format: first.format,
            rows: first.rows,
            cols: first.cols,
            data: Ptr::NULL,
            row_stride: first.format.row_bytes(first.cols),
            scale: Ptr::NULL,
            scale_rows: 0,
            scale_stride: 0,
            scale_row0: first.scale_row0,
        };
        layout.check()?;
        for m in all {
            let same = (m.format, m.rows, m.cols, m.scale_row0)
                == (first.format, first.rows, first.cols, first.scale_row0);
            if !same {
                return Err(DeviceError::Unsupported {
                    device: "cuda",
                    format: format!("{:?}", m.format),
                    rows: m.rows,
                    cols: m.cols,
                    reason: format!("the first expert of the layer has {first:?} here"),
                });
            }
        }
        let shape = first.format.scale_shape(first.rows + first.scale_row0, first.cols);
        (layout.scale_rows, layout.scale_stride) = shape.unwrap_or((0, 0));
        let (row, bytes) = (layout.row_stride, layout.rows * layout.row_stride);
        let (groups, scale_bytes) = (layout.scale_stride, layout.scale_rows * layout.scale_stride);
        let context = &cuda.context;
        let values = Memory::new(context, "experts", all.len() * bytes)?;
        let scales = Memory::new(context, "the scales of experts", all.len() * scale_bytes)?;
        (layout.data, layout.scale) = (values.ptr(), scales.ptr());
        let mut staging = lock(&cuda.staging);
        for (i, m) in all.iter().enumerate() {
            let to = values.ptr().add(i * bytes);
            staging.upload_rows(context, &m.data, m.rows, row, m.row_stride, to, row)?;
            let (rows, to) = (layout.scale_rows, scales.ptr().add(i * scale_bytes));
            staging.upload_rows(context, &m.scale, rows, groups, m.scale_stride, to, groups)?;
        }
        drop(staging);
        Ok(Self { values, scales, layout })
    }
}

impl Experts {
    /// Copies the experts of a layer to the device. All have one shape and format.
    pub(super) fn new(cuda: &Cuda, stored: Vec<Expert<StoredMatrix>>) -> Result<Self> {
        let stored = readable(stored)?;
        let count = stored.len();
        if count == 0 {
            return Ok(Self { count, weights: None });
        }
        let project = |of: fn(&Expert<StoredMatrix>) -> &StoredMatrix| {
            Projection::new(cuda, &stored.iter().map(of).collect::<Vec<_>>())
        };
        let weights =
            Expert { w1: project(|e| &e.w1)?, w3: project(|e| &e.w3)?, w2: project(|e| &e.w2)? };
        let layouts = [&weights.w1, &weights.w3, &weights.w2].map(|p| p.layout);
        check_fit(layouts, layouts[0].cols)?;
        Ok(Self { count, weights: Some(weights) })
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Bytes of device memory.
    pub fn bytes(&self) -> usize {
        let projections = self.weights.as_ref().map(|w| [&w.w1, &w.w3, &w.w2]);
        projections.into_iter().flatten().map(|p| p.values.bytes() + p.scales.bytes()).sum()
    }
}

/// w1, w3 and w2 of an expert fit together and have this hidden size.
fn check_fit([w1, w3, w2]: [Layout; 3], hidden: usize) -> Result<()> {
    let inner = w1.rows;
    let wanted =
        [("w1", w1, (inner, hidden)), ("w3", w3, (inner, hidden)), ("w2", w2, (hidden, inner))];
    for (name, w, (rows, cols)) in wanted {
        if (w.rows, w.cols) != (rows, cols) || w.format != w1.format {
            return Err(DeviceError::Unsupported {
                device: "cuda",
                format: format!("{:?}", w.format),
                rows: w.rows,
                cols: w.cols,
                reason: format!(
                    "{name} of an expert must be {rows} x {cols} here, as {:?}",
                    w1.format
                ),
            });
        }
        w.check()?;
    }
    Ok(())
}

/// The pairs that a product runs over.
#[derive(Clone, Copy)]
struct Pairs {
    /// Sorted by expert, with tiles; null: as they come.
    order: Ptr,
    tiles: Ptr,
    count: usize,
    /// Blocks along the pairs.
    blocks: usize,
    /// Pairs in a block.
    width: usize,
}

/// `h` of pairs, `[pairs, inner]`, then their `y`, `[pairs, hidden]`. `divisor`: pairs of a row of x.
fn run_experts(
    cuda: &Cuda,
    [w1, w3, w2]: [Layout; 3],
    pairs: Pairs,
    x: Ptr,
    divisor: usize,
    limit: f32,
    h: Ptr,
    y: Ptr,
) -> Result<()> {
    let slots = |first: &Layout, second: &Layout, x: Ptr, divisor: usize| {
        let mut slots = Vec::with_capacity(26);
        slots.extend(first.slots());
        slots.extend(second.slots());
        slots.extend([
            x.slot(),
            h.slot(),
            y.slot(),
            pairs.order.slot(),
            pairs.tiles.slot(),
            pairs.count as u64,
            divisor as u64,
            first.rows as u64,
            first.cols as u64,
            limit.slot(),
        ]);
        slots
    };
    let name = |half: &str| format!("experts_{half}_{}_{}", w1.name(), pairs.width);
    let operation = "experts_forward";
    let up = slots(&w1, &w3, x, divisor.max(1));
    let blocks = [w1.rows.div_ceil(16), pairs.blocks, 1];
    cuda.launch(operation, &name("up"), blocks, THREADS, 0, &up)?;
    let down = slots(&w2, &w2, h, 1);
    let blocks = [w2.rows.div_ceil(32), pairs.blocks, 1];
    cuda.launch(operation, &name("down"), blocks, THREADS, 0, &down)
}

pub(super) fn experts_forward(
    cuda: &Cuda,
    x: &Buffer<bf16>,
    experts: &Experts,
    shared: &Expert<Matrix>,
    ids: &Buffer<u32>,
    weights: &Buffer<f32>,
    k: usize,
    limit: f32,
    rows: usize,
    out: &mut Buffer<bf16>,
) -> Result<()> {
    let operation = "experts_forward";
    let shared = [&shared.w1, &shared.w3, &shared.w2].map(Layout::of);
    let hidden = shared[0].cols;
    check_fit(shared, hidden)?;
    let routed = experts.weights.as_ref().map(|w| [&w.w1, &w.w3, &w.w2].map(|p| p.layout));
    if let Some(routed) = routed {
        check_fit(routed, hidden)?;
    }
    let sort_bytes = 8 * experts.count;
    if sort_bytes > MAX_SHARED {
        let limit = format!("{} experts, and its kernels take {}", experts.count, MAX_SHARED / 8);
        return Err(DeviceError::Limit { operation, limit });
    }
    for first in (0..rows).step_by(ROW_BLOCK) {
        let rows = ROW_BLOCK.min(rows - first);
        let x = x.range(first * hidden, rows * hidden);
        let (ids, weights) = (ids.range(first * k, rows * k), weights.range(first * k, rows * k));
        let out = out.range(first * hidden, rows * hidden);
        let pairs = rows * k;
        let mut scratch = cuda.scratch();
        let y = scratch.take::<f32>((pairs + rows) * hidden)?;
        if let (Some(routed), true) = (routed, pairs > 0) {
            let width = if pairs <= FEW * experts.count { FEW } else { MANY };
            let blocks = pairs.min(experts.count) + pairs / width;
            let order = scratch.take::<u32>(pairs)?;
            let tiles = scratch.take::<u32>(1 + 3 * blocks)?;
            let h = scratch.take::<bf16>(pairs * routed[0].rows)?;
            let sort =
                args![ids, u32_of(pairs), u32_of(experts.count), u32_of(width), order, tiles,];
            cuda.launch(operation, "experts_order", [1, 1, 1], 1024, sort_bytes, sort)?;
            let pairs = Pairs { order, tiles, count: pairs, blocks, width };
            run_experts(cuda, routed, pairs, x, k, limit, h, y)?;
        }
        let width = if rows <= FEW { FEW } else { MANY };
        let h = scratch.take::<bf16>(rows * shared[0].rows)?;
        let all = Pairs {
            order: Ptr::NULL,
            tiles: Ptr::NULL,
            count: rows,
            blocks: rows.div_ceil(width),
            width,
        };
        run_experts(cuda, shared, all, x, 1, limit, h, y.add(4 * pairs * hidden))?;
        let combine = args![y, weights, u32_of(k), u32_of(rows), u32_of(hidden), out];
        let blocks = [hidden.div_ceil(512), rows, 1];
        cuda.launch(operation, "experts_combine", blocks, 256, 0, combine)?;
    }
    Ok(())
}
