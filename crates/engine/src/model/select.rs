//! Which compressed rows a query attends to.

use super::batch::RowSet;
use super::probe::Probe;
use super::scratch::Scratch;
use crate::cache::Caches;
use deepinfer_device::Device;
use deepinfer_device::ops::{CandidateShape, Candidates, Result, Selection};

/// A layer's part in the coarse choice of candidate blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CandidateRole {
    /// Chooses among all visible rows.
    None,
    /// Also publishes the best blocks.
    Publish(CandidateShape),
    /// Chooses inside the published blocks only.
    Within(CandidateShape),
}

/// Weights of one layer's indexer.
pub struct Indexer<D: Device> {
    /// `[heads * dim, q_lora]`.
    pub wq_b: D::Matrix,
    /// `[heads, H]`.
    pub weights: D::Matrix,
    /// Index heads.
    pub heads: usize,
    /// Width of an index key.
    pub dim: usize,
    /// Rotated dims, the last of a head.
    pub rope_dims: usize,
    /// Rows to choose.
    pub k: usize,
    /// Layer that owns the keys.
    pub owner: usize,
    /// Candidate blocks.
    pub role: CandidateRole,
}

/// Index queries and the weights of their heads, for every query of `set`, in layer `layer`.
pub fn queries<D: Device>(
    device: &D,
    indexer: &Indexer<D>,
    layer: usize,
    set: &RowSet<D>,
    s: &mut Scratch<D>,
    probe: &mut impl Probe<D>,
) -> Result<()> {
    let rows = set.map.rows;
    let (heads, dim) = (indexer.heads, indexer.dim);
    device.linear(&s.qr, &indexer.wq_b, rows, &mut s.index_q)?;
    let angles = set.angles(true);
    device.rope(&mut s.index_q, angles, heads, dim, indexer.rope_dims, false, rows)?;
    probe.index_queries(device, layer, rows, indexer, s)?;
    device.round_rows(&mut s.index_q, dim, s.formats.index, rows * heads)?;
    let factor = (dim as f32).powf(-0.5) * (heads as f32).powf(-0.5);
    device.linear_f32(&s.x, &indexer.weights, factor, rows, &mut s.index_weights)
}

/// `scratch.selected` = the rows that those queries choose.
pub fn select<D: Device>(
    device: &D,
    indexer: &Indexer<D>,
    caches: &Caches<D>,
    set: &RowSet<D>,
    s: &mut Scratch<D>,
) -> Result<()> {
    let Some(keys) = caches.index_keys(indexer.owner) else { return Ok(()) };
    let args = Selection {
        q: &s.index_q,
        weights: &s.index_weights,
        heads: indexer.heads,
        map: &set.map,
        keys,
        k: indexer.k,
    };
    let candidates = match indexer.role {
        CandidateRole::None => Candidates::All,
        CandidateRole::Publish(shape) => Candidates::Publish(shape, &mut s.candidates),
        CandidateRole::Within(shape) => Candidates::Within(shape, &s.candidates),
    };
    s.selected_k = indexer.k;
    device.select(&args, candidates, &mut s.selected)
}
