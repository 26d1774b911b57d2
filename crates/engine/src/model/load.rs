//! From a checkpoint to a model: every tensor by its name, shape and part.

use super::attention::{Attention, AttentionShape, Source};
use super::draft::{DraftModel, Stage};
use super::experts::Experts;
use super::memory::Memory;
use super::rope::Rope;
use super::select::{CandidateRole, Indexer};
use super::streams::Site;
use super::{Layer, Model};
use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::config::{ModelConfig, TextConfig};
use crate::engram::Engram;

use deepinfer_device::ops::{CandidateShape, MixWeights};
use deepinfer_device::{Device, DeviceError, Expert};

/// Why a model could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The checkpoint is damaged or is not what its configuration says.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The device refused a weight.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

type Result<T> = std::result::Result<T, LoadError>;

/// Told how far loading has come: parts done, parts in all.
pub type Progress<'a> = &'a mut dyn FnMut(usize, usize);

impl<D: Device> Model<D> {
    /// Builds a model from an opened checkpoint; consumes every tensor of the language model and
    /// of the draft stages, and skips the vision tower on purpose. `engram` is the n-gram front end
    /// of the checkpoint's configuration and tokenizer.
    pub fn load(
        device: &D,
        checkpoint: &mut Checkpoint,
        engram: Option<Engram>,
        progress: Progress<'_>,
    ) -> Result<Self> {
        let config = checkpoint.config().clone();
        let model = Self::build(device, checkpoint, config, engram, progress)?;
        checkpoint.finish(&["vision.", "aligner.", "image_start", "image_end", "image_newline"])?;
        Ok(model)
    }

    /// Builds a model of `config` from `weights`.
    pub(super) fn build(
        device: &D,
        weights: &mut impl Weights<D>,
        config: ModelConfig,
        engram: Option<Engram>,
        progress: Progress<'_>,
    ) -> Result<Self> {
        let c = &config.text_config;
        let (h, v) = (c.hidden_size, c.vocab_size);
        let stages = c.num_nextn_predict_layers;
        let parts = c.num_hidden_layers + stages + 1;
        let mut loader = Loader { device, weights, config: &config, engram: engram.as_ref() };

        let embed = loader.matrix("embed.weight", v, h)?;
        let head = loader.matrix("head.weight", v, h)?;
        let norm = loader.vector("norm.weight", h)?;
        progress(1, parts);
        let mut layers = Vec::with_capacity(c.num_hidden_layers);
        for index in 0..c.num_hidden_layers {
            layers.push(loader.layer(index)?);
            progress(2 + index, parts);
        }
        let draft = match stages {
            0 => None,
            _ => Some(loader.draft(|done| progress(1 + c.num_hidden_layers + done, parts))?),
        };
        let rope = Rope::new(c);
        Ok(Self { embed, layers, norm, head, draft, engram, rope, config })
    }
}

/// Where weights come from, by the names of the released layout.
pub(super) trait Weights<D: Device> {
    /// A matrix, on the device.
    fn matrix(&mut self, device: &D, name: &str, rows: usize, cols: usize) -> Result<D::Matrix>;
    /// A small array, row-major.
    fn array(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>>;
    /// The `count` routed experts `prefix.0`, `prefix.1`, ..., on the device.
    fn experts(
        &mut self,
        device: &D,
        prefix: &str,
        count: usize,
        intermediate: usize,
        hidden: usize,
    ) -> Result<D::Experts>;
    /// Whether there is a tensor of that name.
    fn has(&self, name: &str) -> bool;
}

impl<D: Device> Weights<D> for Checkpoint {
    fn matrix(&mut self, device: &D, name: &str, rows: usize, cols: usize) -> Result<D::Matrix> {
        Ok(device.matrix(self.take_matrix(name, rows, cols)?)?)
    }

    fn array(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        Ok(self.take_array(name, shape)?)
    }

    fn experts(
        &mut self,
        device: &D,
        prefix: &str,
        count: usize,
        intermediate: usize,
        hidden: usize,
    ) -> Result<D::Experts> {
        let expert = |j| self.take_expert(&format!("{prefix}.{j}"), intermediate, hidden);
        let all = (0..count).map(expert).collect::<std::result::Result<_, _>>()?;
        Ok(device.experts(all)?)
    }

    fn has(&self, name: &str) -> bool {
        self.contains(name)
    }
}

struct Loader<'a, D: Device, W> {
    device: &'a D,
    weights: &'a mut W,
    config: &'a ModelConfig,
    engram: Option<&'a Engram>,
}

impl<D: Device, W: Weights<D>> Loader<'_, D, W> {
    fn c(&self) -> &TextConfig {
        &self.config.text_config
    }

    fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<D::Matrix> {
        self.weights.matrix(self.device, name, rows, cols)
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<D::Buffer<f32>> {
        let host = self.weights.array(name, &[len])?;
        self.upload(&host)
    }

    fn upload(&self, host: &[f32]) -> Result<D::Buffer<f32>> {
        let mut buffer = self.device.alloc(host.len())?;
        self.device.upload(host, &mut buffer, 0)?;
        Ok(buffer)
    }

    fn layer(&mut self, index: usize) -> Result<Layer<D>> {
        let prefix = format!("layers.{index}");
        let c = self.c();
        let (hidden, experts, k) = (c.hidden_size, c.n_routed_experts, c.num_experts_per_tok);
        let targets = c.dspark_target_layer_ids.iter().enumerate();
        let feature_columns =
            targets.filter(|&(_, &t)| t == index).map(|(at, _)| at * hidden).collect();
        let depth = c.decoder_start().and_then(|start| index.checked_sub(start));
        let reads = c.kv_source(index);
        let is_source = c.is_kv_source(index);
        let selects = c.is_index_source(index);
        let mut attention = self.attention(&prefix, reads)?;
        if is_source {
            attention.source = Some(self.source(&prefix, index)?);
        }
        if let (Some(owner), true) = (reads, selects) {
            attention.indexer = Some(self.indexer(&prefix, index, owner)?);
        }
        Ok(Layer {
            index,
            memory: self.memory(&prefix, index)?,
            feature_columns,
            depth,
            attention_site: self.site(&prefix, "attn")?,
            attention,
            experts_site: self.site(&prefix, "ffn")?,
            experts: self.experts(&prefix, experts, k, true)?,
        })
    }

    fn site(&mut self, prefix: &str, part: &str) -> Result<Site<D>> {
        let (h, s, n) = (self.c().hidden_size, self.c().hc_mult, self.c().hc_mix());
        Ok(Site {
            mix: MixWeights {
                function: self.matrix(&format!("{prefix}.hc_{part}_fn"), n, s * h)?,
                base: self.vector(&format!("{prefix}.hc_{part}_base"), n)?,
                scale: self.vector(&format!("{prefix}.hc_{part}_scale"), 3)?,
            },
            norm: self.vector(&format!("{prefix}.{part}_norm.weight"), h)?,
        })
    }

    fn attention(&mut self, prefix: &str, reads: Option<usize>) -> Result<Attention<D>> {
        let c = self.c();
        let shape = AttentionShape {
            hidden: c.hidden_size,
            heads: c.num_attention_heads,
            head_dim: c.head_dim,
            rope_dims: c.qk_rope_head_dim,
            q_lora: c.q_lora_rank,
            groups: c.o_groups,
            o_lora: c.o_lora_rank,
            eps: c.rms_norm_eps,
        };
        let (h, d, all) = (shape.hidden, shape.head_dim, shape.heads * shape.head_dim);
        let low = shape.groups * shape.o_lora;
        let p = format!("{prefix}.attn");
        Ok(Attention {
            shape,
            wq_a: self.matrix(&format!("{p}.wq_a.weight"), shape.q_lora, h)?,
            q_norm: self.vector(&format!("{p}.q_norm.weight"), shape.q_lora)?,
            wq_b: self.matrix(&format!("{p}.wq_b.weight"), all, shape.q_lora)?,
            wkv: self.matrix(&format!("{p}.wkv.weight"), d, h)?,
            kv_norm: self.vector(&format!("{p}.kv_norm.weight"), d)?,
            sink: self.vector(&format!("{p}.attn_sink"), shape.heads)?,
            wo_a: self.matrix(&format!("{p}.wo_a.weight"), low, all / shape.groups)?,
            wo_b: self.matrix(&format!("{p}.wo_b.weight"), h, low)?,
            reads,
            source: None,
            indexer: None,
        })
    }

    fn source(&mut self, prefix: &str, index: usize) -> Result<Source<D>> {
        let c = self.c();
        let (h, d, i) = (c.hidden_size, c.head_dim, c.index_head_dim);
        let (ratio, rope_dims, eps) =
            (c.compress_ratios[index], c.qk_rope_head_dim, c.rms_norm_eps);
        let p = format!("{prefix}.attn");
        let gate = format!("{p}.compressor.wgate.weight");
        Ok(Source {
            ratio,
            wkv: self.matrix(&format!("{p}.compressor.wkv.weight"), d, h)?,
            wgate: if ratio > 1 { Some(self.matrix(&gate, d, h)?) } else { None },
            norm: self.vector(&format!("{p}.compressor.norm.weight"), d)?,
            wk: self.matrix(&format!("{p}.indexer.wk.weight"), i, d)?,
            k_norm: self.vector(&format!("{p}.indexer.k_norm.weight"), i)?,
            head_dim: d,
            index_dim: i,
            rope_dims,
            eps,
        })
    }

    fn indexer(&mut self, prefix: &str, index: usize, owner: usize) -> Result<Indexer<D>> {
        let c = self.c();
        let (heads, dim, h) = (c.index_n_heads, c.index_head_dim, c.hidden_size);
        let (q_lora, rope_dims, k) = (c.q_lora_rank, c.qk_rope_head_dim, c.index_topk);
        let shape =
            CandidateShape { block_size: c.candidate_block_size, blocks: c.candidate_topk_blocks };
        let role = if c.candidate_source_layer_id == Some(index) {
            CandidateRole::Publish(shape)
        } else if c.uses_candidates(index) {
            CandidateRole::Within(shape)
        } else {
            CandidateRole::None
        };
        let p = format!("{prefix}.attn.indexer");
        Ok(Indexer {
            wq_b: self.matrix(&format!("{p}.wq_b.weight"), heads * dim, q_lora)?,
            weights: self.matrix(&format!("{p}.weights_proj.weight"), heads, h)?,
            heads,
            dim,
            rope_dims,
            k,
            owner,
            role,
        })
    }

    fn experts(
        &mut self,
        prefix: &str,
        count: usize,
        k: usize,
        images: bool,
    ) -> Result<Experts<D>> {
        let (h, i) = (self.c().hidden_size, self.c().moe_intermediate_size);
        let (scale, limit) = (self.c().routed_scaling_factor, self.c().swiglu_limit);
        let p = format!("{prefix}.ffn");
        let routed = self.weights.experts(self.device, &format!("{p}.experts"), count, i, h)?;
        let e = format!("{p}.shared_experts");
        let shared = Expert {
            w1: self.matrix(&format!("{e}.w1.weight"), i, h)?,
            w3: self.matrix(&format!("{e}.w3.weight"), i, h)?,
            w2: self.matrix(&format!("{e}.w2.weight"), h, i)?,
        };
        let bias_image = format!("{p}.gate.bias_vl");
        let bias_image = match self.weights.has(&bias_image) {
            true => Some(self.vector(&bias_image, count)?).filter(|_| images),
            false => None,
        };
        Ok(Experts {
            gate: self.matrix(&format!("{p}.gate.weight"), count, h)?,
            bias: self.vector(&format!("{p}.gate.bias"), count)?,
            bias_image,
            routed,
            shared,
            count,
            k,
            scale,
            limit,
        })
    }

    fn memory(&mut self, prefix: &str, index: usize) -> Result<Option<Memory<D>>> {
        let c = self.c();
        let Some(ordinal) = c.engram_index(index) else { return Ok(None) };
        let (h, s) = (c.hidden_size, c.hc_mult);
        let (columns, width) = (c.hash_columns(), c.engram_head_dim);
        let rows = self.engram.map_or(0, |e| e.hasher.layers()[ordinal].table_rows()) as usize;
        let p = format!("{prefix}.engram");
        let q = self.weights.array(&format!("{p}.q_weight"), &[s, h])?;
        let k = self.weights.array(&format!("{p}.k_weight"), &[s, h])?;
        let weight: Vec<f32> = q.iter().zip(&k).map(|(q, k)| q * k).collect();
        Ok(Some(Memory {
            ordinal,
            table: self.matrix(&format!("{p}.embed.weight"), rows, width)?,
            wkv: self.matrix(&format!("{p}.wkv.weight"), h * (s + 1), columns * width)?,
            weight: self.upload(&weight)?,
            columns,
        }))
    }

    fn draft(&mut self, mut progress: impl FnMut(usize)) -> Result<DraftModel<D>> {
        let c = self.c();
        let (h, v, rank, n) =
            (c.hidden_size, c.vocab_size, c.dspark_markov_rank, c.num_nextn_predict_layers);
        let (experts, k) = (c.dspark_n_routed_experts, c.dspark_num_experts_per_tok);
        let targets = c.dspark_target_layer_ids.len();
        let confidence_input = c.dspark_confidence_input;
        let (block, eps) = (c.dspark_block_size, c.rms_norm_eps);
        // Validated to be there where draft stages are.
        let noise = c.dspark_noise_token_id.unwrap_or_default();
        let mut stages = Vec::with_capacity(n);
        for stage in 0..n {
            let prefix = format!("mtp.{stage}");
            stages.push(Stage {
                attention_site: self.site(&prefix, "attn")?,
                attention: self.attention(&prefix, None)?,
                experts_site: self.site(&prefix, "ffn")?,
                experts: self.experts(&prefix, experts, k, false)?,
            });
            progress(stage + 1);
        }
        let last = format!("mtp.{}", n - 1);
        Ok(DraftModel {
            main_proj: self.matrix("mtp.0.main_proj.weight", h, targets * h)?,
            main_norm: self.vector("mtp.0.main_norm.weight", h)?,
            stages,
            norm: self.vector(&format!("{last}.norm.weight"), h)?,
            markov_embed: self.matrix(&format!("{last}.markov_head.embed.weight"), v, rank)?,
            markov_head: self.matrix(&format!("{last}.markov_head.head.weight"), v, rank)?,
            rank,
            confidence: self.matrix(&format!("{last}.confidence_head.proj.weight"), 1, h + rank)?,
            confidence_input,
            block,
            noise,
            eps,
        })
    }
}
