//! How many bytes a step reads, and how many multiply-adds it makes.

use deepinfer::checkpoint::{Checkpoint, Part};
use deepinfer::model::{Probe, Scratch};
use deepinfer_device::Device;
use deepinfer_device::ops::Result;

/// Weights of the language model by how often a step reads them.
pub struct Work {
    /// Read whole in every step.
    dense_bytes: f64,
    /// One routed expert of one layer, on average.
    expert_bytes: f64,
    /// One row of the embedding, and the n-gram rows of a token.
    token_bytes: f64,
    /// Weights that every row is multiplied with, the head left out.
    dense_weights: f64,
    /// Weights of one routed expert.
    expert_weights: f64,
    /// Routed experts that a row uses, over all layers.
    experts_a_row: f64,
    /// Weights of the head.
    head_weights: f64,
}

impl Work {
    /// Counts the tensors of a checkpoint. The draft stages and the vision tower are not run.
    pub fn new(checkpoint: &Checkpoint) -> Self {
        let c = &checkpoint.config().text_config;
        let experts = (c.num_hidden_layers * c.n_routed_experts) as f64;
        let mut work = Self {
            dense_bytes: 0.0,
            expert_bytes: 0.0,
            token_bytes: 0.0,
            dense_weights: 0.0,
            expert_weights: (3 * c.hidden_size * c.moe_intermediate_size) as f64,
            experts_a_row: (c.num_hidden_layers * c.num_experts_per_tok) as f64,
            head_weights: (c.vocab_size * c.hidden_size) as f64,
        };
        let row = c.engram_head_dim + c.engram_head_dim.div_ceil(32);
        work.token_bytes += (c.engram_layer_ids.len() * c.hash_columns() * row) as f64;
        for t in checkpoint.tensors() {
            let matrix = t.shape.len() == 2 && !t.name.ends_with(".scale");
            let weights = if matrix { t.shape.iter().product::<u64>() as f64 } else { 0.0 };
            match t.part {
                Part::Draft | Part::Vision | Part::EngramTable | Part::Other => {}
                Part::Embedding => work.token_bytes += t.bytes as f64 / c.vocab_size as f64,
                Part::Experts => work.expert_bytes += t.bytes as f64 / experts,
                Part::Head => work.dense_bytes += t.bytes as f64,
                _ => {
                    work.dense_bytes += t.bytes as f64;
                    work.dense_weights += weights;
                }
            }
        }
        work
    }

    /// Bytes of weights read by `steps` steps of `rows` rows in which `experts` experts were read
    /// (each once a step and layer, whatever the rows that share it).
    pub fn bytes(&self, steps: usize, rows: usize, experts: usize) -> f64 {
        steps as f64 * (self.dense_bytes + rows as f64 * self.token_bytes)
            + experts as f64 * self.expert_bytes
    }

    /// Floating-point operations of products with weights: two for each weight and row. Attention
    /// over cached rows is not counted.
    pub fn flops(&self, rows: usize, outputs: usize) -> f64 {
        2.0 * (rows as f64 * (self.dense_weights + self.experts_a_row * self.expert_weights)
            + outputs as f64 * self.head_weights)
    }
}

/// Counts the distinct experts of each layer and step.
pub struct Counting {
    /// Experts that a row uses.
    pub experts_per_row: usize,
    /// Their number.
    pub experts: usize,
}

impl<D: Device> Probe<D> for Counting {
    fn routed(&mut self, d: &D, _l: usize, rows: usize, s: &mut Scratch<D>) -> Result<()> {
        let mut ids = vec![0u32; rows * self.experts_per_row];
        d.download(&s.expert_ids, 0, &mut ids)?;
        ids.sort_unstable();
        ids.dedup();
        self.experts += ids.len();
        Ok(())
    }
}
