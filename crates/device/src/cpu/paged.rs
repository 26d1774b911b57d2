//! Where the rows of a step and their keys lie.

use crate::cpu::Cpu;
use crate::ops::{PagedRows, RowMap};

/// The sequence of row `row` of a map, as an index into the map's sequence arrays.
pub(crate) fn sequence_of(map: &RowMap<Cpu>, row: usize) -> usize {
    map.sequence[row] as usize
}

/// Compressed rows that row `row` sees.
pub(crate) fn visible(map: &RowMap<Cpu>, row: usize, ratio: usize) -> usize {
    ((u64::from(map.position[row]) + 1) / ratio.max(1) as u64) as usize
}

/// The stored bytes of compressed row `index` of a sequence.
pub(crate) fn paged_row<'a>(
    keys: &PagedRows<'a, Cpu>,
    map: &RowMap<Cpu>,
    sequence: usize,
    index: usize,
) -> &'a [u8] {
    let page = map.pages[sequence * map.max_pages + index / keys.rows_per_page] as usize;
    let row = page * keys.rows_per_page + index % keys.rows_per_page;
    let bytes = keys.format.row_bytes(keys.width);
    &keys.cache[row * bytes..][..bytes]
}
