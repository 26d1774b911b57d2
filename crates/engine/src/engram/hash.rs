//! From compressed token ids to table rows.

use super::EngramError;
use super::numpy_random::Generator;
use crate::config::TextConfig;
use std::collections::HashSet;

/// The hash functions of every Engram layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hasher {
    ngram: usize,
    heads: usize,
    pad: u32,
    layers: Vec<LayerHash>,
}

/// The constants of one Engram layer. Columns are ordered by n-gram size, then head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerHash {
    /// Factor of each token of the window, newest first.
    pub multipliers: Vec<i64>,
    /// Bucket size of each column.
    pub primes: Vec<u64>,
    /// First row of each column.
    pub offsets: Vec<u64>,
}

impl LayerHash {
    /// Rows of the layer's table.
    pub fn table_rows(&self) -> u64 {
        self.primes.iter().sum()
    }
}

/// Largest least size of a column: finding primes beyond takes for ever, and nobody has the memory.
const MOST_ROWS: u64 = 1 << 32;

impl Hasher {
    /// The hash functions of `config`, whose Engram fields are validated. `pad` is the compressed
    /// id of the padding token.
    pub fn new(config: &TextConfig, pad: u32) -> Result<Self, EngramError> {
        if config.engram_vocab_size > MOST_ROWS {
            let (rows, most) = (config.engram_vocab_size, MOST_ROWS);
            return Err(EngramError::TableSize { rows, most });
        }
        let ngram = config.engram_max_ngram_size;
        let columns = config.hash_columns();
        let mut used = HashSet::new();
        let mut layers = Vec::new();
        for (index, &layer) in config.engram_layer_ids.iter().enumerate() {
            let mut primes = Vec::with_capacity(columns);
            for _ in 2..=ngram {
                let mut candidate = config.engram_vocab_size;
                for _ in 0..config.engram_n_heads {
                    while used.contains(&candidate) || !is_prime(candidate) {
                        candidate += 1;
                    }
                    used.insert(candidate);
                    primes.push(candidate);
                }
            }
            let mut offsets = Vec::with_capacity(columns);
            let mut rows = 0;
            for prime in &primes {
                offsets.push(rows);
                rows += prime;
            }
            if let Some(&stated) = config.engram_num_embeddings.get(index)
                && stated != rows
            {
                return Err(EngramError::TableRows { layer, computed: rows, stated });
            }
            let compressed = config.engram_compressed_vocab_size as u64;
            let bound = (i64::MAX as u64 / compressed.max(1) / 2).max(1);
            let multipliers = Generator::new(10_007 * layer as u64)
                .integers(bound, ngram)
                .into_iter()
                .map(|draw| (draw as i64).wrapping_mul(2).wrapping_add(1))
                .collect();
            layers.push(LayerHash { multipliers, primes, offsets });
        }
        Ok(Self { ngram, heads: config.engram_n_heads, pad, layers })
    }

    /// Tokens of a window: the longest n-gram.
    pub fn window_len(&self) -> usize {
        self.ngram
    }

    /// Rows that one token gathers from one table.
    pub fn columns(&self) -> usize {
        (self.ngram - 1) * self.heads
    }

    /// The compressed id that stands for absent tokens.
    pub fn pad(&self) -> u32 {
        self.pad
    }

    /// Constants by place in `engram_layer_ids`.
    pub fn layers(&self) -> &[LayerHash] {
        &self.layers
    }

    /// Fills the window of a token. `newest_first` gives the compressed ids of the token itself and
    /// of its predecessors, `None` for an image token. Where they end (the sequence starts) and
    /// from the first image token on, the window holds the pad id; an image token's own window is
    /// all pad.
    pub fn fill_window(
        &self,
        newest_first: impl IntoIterator<Item = Option<u32>>,
        window: &mut [u32],
    ) {
        let mut tokens = newest_first.into_iter();
        let mut blocked = false;
        for slot in window {
            let token = if blocked { None } else { tokens.next().flatten() };
            blocked |= token.is_none();
            *slot = token.unwrap_or(self.pad);
        }
    }

    /// Table rows for one token in the layer at place `layer_index`: `window` has the token's
    /// compressed id first, then its predecessors' ([`Hasher::fill_window`]). `out[column]` is the
    /// row, the column's offset added.
    ///
    /// # Panics
    /// If `window` or `out` is shorter than [`Hasher::window_len`] or [`Hasher::columns`], or there
    /// is no such layer.
    pub fn rows(&self, layer_index: usize, window: &[u32], out: &mut [u64]) {
        let layer = &self.layers[layer_index];
        let product = |i: usize| i64::from(window[i]).wrapping_mul(layer.multipliers[i]);
        let mut mixed = product(0);
        let mut column = 0;
        for i in 1..self.ngram {
            mixed ^= product(i);
            for _ in 0..self.heads {
                let prime = layer.primes[column];
                let bucket = mixed.rem_euclid(prime as i64) as u64;
                out[column] = layer.offsets[column] + bucket;
                column += 1;
            }
        }
    }
}

fn is_prime(n: u64) -> bool {
    if n < 4 {
        return n >= 2;
    }
    if n.is_multiple_of(2) {
        return false;
    }
    let mut divisor = 3;
    while divisor * divisor <= n {
        if n.is_multiple_of(divisor) {
            return false;
        }
        divisor += 2;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn primes_below_fifty() {
        let primes: Vec<u64> = (0..50).filter(|&n| is_prime(n)).collect();
        assert_eq!(primes, [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47]);
    }

    #[test]
    fn windows_stop_at_images_and_at_the_start() {
        let hasher = Hasher { ngram: 4, heads: 1, pad: 9, layers: Vec::new() };
        let fill = |tokens: &[Option<u32>]| {
            let mut window = [0; 4];
            hasher.fill_window(tokens.iter().copied(), &mut window);
            window
        };
        assert_eq!(fill(&[Some(1), Some(2), Some(3), Some(4), Some(5)]), [1, 2, 3, 4]);
        assert_eq!(fill(&[Some(1), Some(2)]), [1, 2, 9, 9]);
        assert_eq!(fill(&[Some(1), None, Some(3), Some(4)]), [1, 9, 9, 9]);
        assert_eq!(fill(&[None, Some(2), Some(3), Some(4)]), [9, 9, 9, 9]);
    }
}
