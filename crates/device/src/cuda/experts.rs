//! Routed and shared experts.
//!
//! Rows are sorted by expert on the device; see `kernels/experts.cu` for the products.

use super::launch::{Arg, MAX_SHARED, args, u32_of};
use super::memory::{Buffer, Memory, Ptr};
use super::scratch::ScratchGuard;
use super::stored::{Matrix, readable};
use super::{Cuda, lock};
use crate::error::DeviceError;
use crate::ops::Result;
use crate::random::RandomMatrix;
use crate::tensor::{Expert, Format, StoredMatrix};
use half::bf16;
use std::ops::Range;

/// Rows that share one pass over the weights.
const ROW_BLOCK: usize = 4096;
/// Bytes of the experts' outputs, before they are summed, that are kept at a time.
const OUTPUTS: usize = 96 << 20;
/// Pairs of a row and an expert in a block, where few rows meet at an expert, and where many do.
const FEW: usize = 8;
const MANY: usize = 64;
/// Pairs an expert, in the mean, up to which few are taken to meet.
const FEW_MEET: usize = 6;
/// Threads of a block.
const THREADS: usize = 128;
/// Up to so many pairs have a block each, unsorted.
const UNSORTED: usize = 12;

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

    /// Bytes of one expert's values.
    fn bytes(&self) -> usize {
        self.rows * self.row_stride
    }

    /// Bytes of one expert's scales.
    fn scale_bytes(&self) -> usize {
        self.scale_rows * self.scale_stride
    }

    /// The members of the kernels' `Weights`.
    fn slots(&self) -> [u64; 8] {
        [
            self.data.slot(),
            self.bytes() as u64,
            self.row_stride as u64,
            self.scale.slot(),
            self.scale_bytes() as u64,
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
    /// Memory for the same projection of `count` experts.
    fn blank(
        cuda: &Cuda,
        count: usize,
        format: Format,
        (rows, cols): (usize, usize),
        scale_row0: usize,
    ) -> Result<Self> {
        let row_stride = format.row_bytes(cols);
        let shape = format.scale_shape(rows + scale_row0, cols);
        let (scale_rows, scale_stride) = shape.unwrap_or((0, 0));
        let mut layout = Layout {
            format,
            rows,
            cols,
            data: Ptr::NULL,
            row_stride,
            scale: Ptr::NULL,
            scale_rows,
            scale_stride,
            scale_row0,
        };
        layout.check()?;
        let context = &cuda.context;
        let values = Memory::new(context, "experts", count * layout.bytes())?;
        let scales = Memory::new(context, "the scales of experts", count * layout.scale_bytes())?;
        (layout.data, layout.scale) = (values.ptr(), scales.ptr());
        Ok(Self { values, scales, layout })
    }

    fn new(cuda: &Cuda, all: &[&StoredMatrix]) -> Result<Self> {
        let first = all[0];
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
        let shape = (first.rows, first.cols);
        let this = Self::blank(cuda, all.len(), first.format, shape, first.scale_row0)?;
        let (layout, context) = (&this.layout, &cuda.context);
        let (row, groups) = (layout.row_stride, layout.scale_stride);
        let mut staging = lock(&cuda.staging);
        for (i, m) in all.iter().enumerate() {
            let to = layout.data.add(i * layout.bytes());
            staging.upload_rows(context, &m.data, m.rows, row, m.row_stride, to, row)?;
            let (rows, to) = (layout.scale_rows, layout.scale.add(i * layout.scale_bytes()));
            staging.upload_rows(context, &m.scale, rows, groups, m.scale_stride, to, groups)?;
        }
        drop(staging);
        Ok(this)
    }

    /// All of the first one's format and shape.
    fn random(cuda: &Cuda, all: &[&RandomMatrix]) -> Result<Self> {
        let first = all[0];
        let this = Self::blank(cuda, all.len(), first.format, (first.rows, first.cols), 0)?;
        let layout = &this.layout;
        let (bytes, scale_bytes) = (layout.bytes(), layout.scale_bytes());
        for (i, m) in all.iter().enumerate() {
            cuda.random_fill(&m.values, 1, bytes, bytes, layout.data.add(i * bytes))?;
            if scale_bytes > 0 {
                let to = layout.scale.add(i * scale_bytes);
                cuda.random_fill(&m.scales, 1, scale_bytes, scale_bytes, to)?;
            }
        }
        Ok(this)
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
        Self::of(count, weights)
    }

    /// The same, made on the device. All have one shape and format.
    pub(super) fn random(cuda: &Cuda, all: &[Expert<RandomMatrix>]) -> Result<Self> {
        let count = all.len();
        if count == 0 {
            return Ok(Self { count, weights: None });
        }
        let project = |of: fn(&Expert<RandomMatrix>) -> &RandomMatrix| {
            Projection::random(cuda, &all.iter().map(of).collect::<Vec<_>>())
        };
        let weights =
            Expert { w1: project(|e| &e.w1)?, w3: project(|e| &e.w3)?, w2: project(|e| &e.w2)? };
        Self::of(count, weights)
    }

    fn of(count: usize, weights: Expert<Projection>) -> Result<Self> {
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
        if (w.rows, w.cols) != (rows, cols) || (name == "w3" && w.format != w1.format) {
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

/// Pairs of a row and an expert, and where their values lie.
#[derive(Clone, Copy)]
struct Pairs {
    weights: [Layout; 3],
    /// Sorted by expert, with tiles; null: as they come.
    order: Ptr,
    tiles: Ptr,
    /// Experts of unsorted pairs, a block a pair; null: one expert.
    ids: Ptr,
    count: usize,
    /// Blocks along the pairs, and pairs in a block.
    blocks: usize,
    width: usize,
    /// Rows of activations, and pairs of a row.
    x: Ptr,
    divisor: usize,
    h: Ptr,
    y: Ptr,
    limit: f32,
}

/// One product of pairs: `h = silu(w1 x) * w3 x`, or output features of `y = w2 h`.
#[derive(Clone)]
enum Product {
    Up,
    Down(Range<usize>),
}

impl Product {
    /// The start of the kernels' names.
    fn name(&self) -> &'static str {
        match self {
            Product::Up => "experts_up",
            Product::Down(_) => "experts_down",
        }
    }

    /// Output features of a block.
    fn features(&self, width: usize) -> usize {
        match (self, width == FEW) {
            (Product::Up, true) => 16,
            (Product::Down(_), true) => 32,
            (Product::Up, false) => 64,
            (Product::Down(_), false) => 128,
        }
    }
}

impl Pairs {
    /// Output features of a product.
    fn features(&self, product: &Product) -> Range<usize> {
        match product {
            Product::Up => 0..self.weights[0].rows,
            Product::Down(features) => features.clone(),
        }
    }

    /// Blocks along the features.
    fn feature_blocks(&self, product: &Product) -> usize {
        self.features(product).len().div_ceil(product.features(self.width))
    }

    /// The middle of a product's kernel name: how its weights are stored.
    fn format(&self, product: &Product) -> &'static str {
        match product {
            Product::Up => self.weights[0].name(),
            Product::Down(_) => self.weights[2].name(),
        }
    }

    /// The members of the kernels' `Args`.
    fn slots(&self, product: &Product) -> Vec<u64> {
        let [w1, w3, w2] = &self.weights;
        let (first, second, x, divisor) = match product {
            Product::Up => (w1, w3, self.x, self.divisor),
            Product::Down(_) => (w2, w2, self.h, 1),
        };
        let features = self.features(product);
        let mut slots = Vec::with_capacity(28);
        slots.extend(first.slots());
        slots.extend(second.slots());
        slots.extend([
            x.slot(),
            self.h.slot(),
            self.y.slot(),
            self.order.slot(),
            self.tiles.slot(),
            self.ids.slot(),
            self.count as u64,
            divisor.max(1) as u64,
            features.start as u64,
            features.len() as u64,
            first.cols as u64,
            self.limit.slot(),
        ]);
        slots
    }

    fn run(&self, cuda: &Cuda, product: &Product) -> Result<()> {
        let format = self.format(product);
        let (rows, shared) = if self.width == FEW { ("few", 0) } else { ("many", staged(format)) };
        let kernel = format!("{}_{rows}_{format}", product.name());
        let blocks = [self.feature_blocks(product), self.blocks, 1];
        cuda.launch("experts_forward", &kernel, blocks, THREADS, shared, &self.slots(product))
    }
}

/// Bytes of the shared memory of a block for many pairs: for each slab of 128 columns that is there at
/// once, the activations of all pairs, and the codes of 128 weight rows.
fn staged(format: &str) -> usize {
    let (slabs, code_bits) = match format {
        "fp4" => (3, 4),
        "fp8" => (3, 8),
        _ => (2, 16),
    };
    slabs * 128 * (2 * MANY + 128 * code_bits / 8)
}

/// A product of the routed experts and of the shared one.
fn run_both(cuda: &Cuda, routed: Option<&Pairs>, shared: &Pairs, product: &Product) -> Result<()> {
    let Some(routed) = routed else { return shared.run(cuda, product) };
    let formats = (routed.format(product), shared.format(product));
    if formats != ("fp4", "fp8") || routed.width != FEW || shared.width != FEW {
        routed.run(cuda, product)?;
        return shared.run(cuda, product);
    }
    let features = routed.feature_blocks(product).max(shared.feature_blocks(product));
    let mut slots = routed.slots(product);
    slots.extend(shared.slots(product));
    let kernel = format!("{}_both", product.name());
    let blocks = [features, routed.blocks + 1, 1];
    cuda.launch("experts_forward", &kernel, blocks, THREADS, 0, &slots)
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
        let count = rows * k;
        // Output features at a time.
        let room = OUTPUTS / size_of::<f32>() / (count + rows) / 128 * 128;
        let step = room.clamp(128, hidden.next_multiple_of(128));
        let mut scratch = cuda.scratch();
        let y = scratch.take::<f32>((count + rows) * step.min(hidden))?;
        let routed = match routed {
            Some(weights) if count > 0 => {
                let h = scratch.take::<bf16>(count * weights[0].rows)?;
                let mut pairs = Pairs {
                    weights,
                    order: Ptr::NULL,
                    tiles: Ptr::NULL,
                    ids,
                    count,
                    blocks: count,
                    width: FEW,
                    x,
                    divisor: k,
                    h,
                    y,
                    limit,
                };
                if count > UNSORTED {
                    sort(cuda, &mut scratch, experts.count, &mut pairs)?;
                }
                Some(pairs)
            }
            _ => None,
        };
        let width = if rows <= FEW { FEW } else { MANY };
        let shared = Pairs {
            weights: shared,
            order: Ptr::NULL,
            tiles: Ptr::NULL,
            ids: Ptr::NULL,
            count: rows,
            blocks: rows.div_ceil(width),
            width,
            x,
            divisor: 1,
            h: scratch.take::<bf16>(rows * shared[0].rows)?,
            y,
            limit,
        };
        run_both(cuda, routed.as_ref(), &shared, &Product::Up)?;
        for from in (0..hidden).step_by(step) {
            let to = hidden.min(from + step);
            // The shared expert's outputs follow those of the pairs.
            let shared = Pairs { y: y.add(size_of::<f32>() * count * (to - from)), ..shared };
            run_both(cuda, routed.as_ref(), &shared, &Product::Down(from..to))?;
            let combine = args![
                y,
                weights,
                u32_of(k),
                u32_of(rows),
                u32_of(to - from),
                u32_of(hidden),
                out.add(size_of::<bf16>() * from),
            ];
            let blocks = [(to - from).div_ceil(512), rows, 1];
            cuda.launch(operation, "experts_combine", blocks, 256, 0, combine)?;
        }
    }
    Ok(())
}

/// Sorts pairs by expert, and cuts them into tiles.
fn sort(
    cuda: &Cuda,
    scratch: &mut ScratchGuard<'_>,
    experts: usize,
    pairs: &mut Pairs,
) -> Result<()> {
    let count = pairs.count;
    pairs.width = if count <= FEW_MEET * experts { FEW } else { MANY };
    pairs.blocks = count.min(experts) + count / pairs.width;
    pairs.order = scratch.take::<u32>(count)?;
    pairs.tiles = scratch.take::<u32>(1 + 3 * pairs.blocks)?;
    let args = args![
        pairs.ids,
        u32_of(count),
        u32_of(experts),
        u32_of(pairs.width),
        pairs.order,
        pairs.tiles,
    ];
    cuda.launch("experts_forward", "experts_order", [1, 1, 1], 1024, 8 * experts, args)
}
