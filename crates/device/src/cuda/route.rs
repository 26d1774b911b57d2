//! Choosing experts.

use super::Cuda;
use super::launch::{MAX_SHARED, args, u32_of};
use super::memory::{Buffer, Ptr};
use crate::error::DeviceError;
use crate::ops::{Result, Routing};

/// Threads of a block, which has a row.
const THREADS: usize = 128;

/// # Panics
/// If more experts are wanted than there are.
pub(super) fn route(
    cuda: &Cuda,
    args: &Routing<'_, Cuda>,
    rows: usize,
    ids: &mut Buffer<u32>,
    weights: &mut Buffer<f32>,
) -> Result<()> {
    let Routing { experts, k, .. } = *args;
    assert!(k <= experts, "{k} of {experts} experts");
    let operation = "route";
    // A score and a rank for each expert.
    let shared = 8 * experts;
    if shared > MAX_SHARED {
        let most = MAX_SHARED / 8;
        let limit = format!("{experts} experts, and its kernel takes {most}");
        return Err(DeviceError::Limit { operation, limit });
    }
    let kernel_args = args![
        args.scores.head(rows * experts),
        args.bias.head(experts),
        args.bias_image.map_or(Ptr::NULL, |bias| bias.head(experts)),
        args.image.head(rows),
        u32_of(experts),
        u32_of(k),
        args.scale,
        ids.head(rows * k),
        weights.head(rows * k),
    ];
    cuda.launch(operation, "route", [rows, 1, 1], THREADS, shared, kernel_args)
}
