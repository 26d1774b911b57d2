//! Rows of caches as kernels take them.

use super::Cuda;
use super::launch::Arg;
use crate::ops::{PagedRows, RowMap};
use crate::tensor::RowFormat;

/// The number by which kernels know a format.
pub(super) fn format_number(format: RowFormat) -> u32 {
    match format {
        RowFormat::F32 => 0,
        RowFormat::Bf16 => 1,
        RowFormat::Fp8x32 => 2,
        RowFormat::Nvfp4x16 => 3,
        RowFormat::Mxfp4x32 => 4,
    }
}

/// Bytes, 16 at most, that addresses of rows are a multiple of.
pub(super) fn alignment(row_bytes: usize) -> u32 {
    1 << row_bytes.trailing_zeros().min(4)
}

/// The members of the kernels' `Paged`.
pub(super) fn slots(keys: &PagedRows<'_, Cuda>, map: &RowMap<Cuda>) -> [u64; 7] {
    let row_bytes = keys.format.row_bytes(keys.width);
    [
        keys.cache.head(0).slot(),
        map.pages.head(map.sequences * map.max_pages).slot(),
        row_bytes as u64,
        map.max_pages as u64,
        keys.rows_per_page as u64,
        format_number(keys.format).slot(),
        alignment(row_bytes).slot(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_rows_are_read_in_words() {
        assert_eq!(alignment(RowFormat::Fp8x32.row_bytes(512)), 16);
        assert_eq!(alignment(RowFormat::Nvfp4x16.row_bytes(512)), 16);
        assert_eq!(alignment(RowFormat::Mxfp4x32.row_bytes(128)), 4);
        assert_eq!(alignment(27), 1);
    }
}
