//! The operations of the model: one list, implemented by every device.
//!
//! Conventions that hold for all of them:
//! - Shapes are row-major; `rows` is the first dimension and may be 0 (then nothing happens).
//!   Buffers may be longer than the operation needs; the rest is left alone.
//! - Outputs are passed in. Nothing allocates device memory inside a step.
//! - `Act` is the type of activations: f32 on a CPU, bf16 on a GPU. Sums, norms and mixing are f32.
//! - A row's result depends on that row's inputs alone, never on how many rows stand beside it, nor
//!   on the number of threads: every reduction has one order, a function of the reduced length and
//!   the stored format.
//! - Calls are asynchronous; `download` and `sync` block.
//! - Rows of a step are grouped by sequence, positions ascending by one inside a sequence.

use crate::error::DeviceError;
use crate::random::{self, Random, RandomMatrix};
use crate::tensor::{Element, Expert, RowFormat, StoredMatrix};

/// Marks an absent index or a destination that is not written.
pub const ABSENT: u32 = u32::MAX;

/// What a recorded series of operations depends on: which series it is, and its sizes.
pub type GraphKey = [u32; 4];

/// Operations that may run beside others, until [`Device::join`].
#[derive(Debug, Default)]
#[must_use = "what the branch writes is there when it has been joined"]
pub struct Branch(pub(crate) usize);

/// Result of a device operation.
pub type Result<T> = std::result::Result<T, DeviceError>;

/// Where the rows of a step are: built once a step for the encoder's rows and once for the rows
/// that the decoder keeps, and read by every layer.
pub struct RowMap<D: Device> {
    /// Rows in this map.
    pub rows: usize,
    /// Sequences in this map.
    pub sequences: usize,
    /// `[rows]`: the row's sequence, an index into the arrays below.
    pub sequence: D::Buffer<u32>,
    /// `[rows]`: absolute position.
    pub position: D::Buffer<u32>,
    /// `[rows]`: first position in the row's window.
    pub window_from: D::Buffer<u32>,
    /// `[rows]`: one past the last position in the row's window.
    pub window_to: D::Buffer<u32>,
    /// `[sequences]`: positions from here on are rows of this step, earlier ones are in the ring.
    pub fresh_from: D::Buffer<u32>,
    /// `[sequences]`: row (of this map) of position `fresh_from`.
    pub first_row: D::Buffer<u32>,
    /// `[sequences]`: slot of the sequence's rings.
    pub slot: D::Buffer<u32>,
    /// `[sequences, max_pages]`: page numbers, by position.
    pub pages: D::Buffer<u32>,
    /// Width of `pages`.
    pub max_pages: usize,
}

/// Compressed rows or index keys in pages: row `c` of a sequence is cache row
/// `pages[c / rows_per_page] * rows_per_page + c % rows_per_page` (64-bit arithmetic).
pub struct PagedRows<'a, D: Device> {
    /// `[pages * rows_per_page, row_bytes]`.
    pub cache: &'a D::Buffer<u8>,
    /// Stored form of a row.
    pub format: RowFormat,
    /// Values in a row.
    pub width: usize,
    /// Rows in a page.
    pub rows_per_page: usize,
    /// Tokens in a group: a query at `p` sees the first `(p + 1) / ratio` rows.
    pub ratio: usize,
}

/// A layer's window keys: a ring a sequence, and the rows of this step.
pub struct WindowRows<'a, D: Device> {
    /// `[slots * ring_len, row_bytes]`; position `p` of slot `s` is row `s * ring_len + p % ring_len`.
    pub ring: &'a D::Buffer<u8>,
    /// Positions in a ring.
    pub ring_len: usize,
    /// `[rows, row_bytes]`: this step's rows, encoded.
    pub fresh: &'a D::Buffer<u8>,
    /// Stored form of a row, in both.
    pub format: RowFormat,
}

/// Inputs of [`Device::attend`].
pub struct Attention<'a, D: Device> {
    /// `[rows, heads, head_dim]`, rotated.
    pub q: &'a D::Buffer<D::Act>,
    /// Heads.
    pub heads: usize,
    /// Width of a head, of a window row and of a compressed row.
    pub head_dim: usize,
    /// Where the rows are.
    pub map: &'a RowMap<D>,
    /// Window keys (and values).
    pub window: WindowRows<'a, D>,
    /// Selected compressed rows, for compressed layers.
    pub selected: Option<Selected<'a, D>>,
    /// `[heads]`: logit of the sink, whose value is zero.
    pub sink: &'a D::Buffer<f32>,
    /// Factor on every dot product.
    pub scale: f32,
}

/// Compressed rows chosen for each query.
pub struct Selected<'a, D: Device> {
    /// `[rows, k]`: rows of the sequence, ascending; [`ABSENT`] from the first absent one on.
    pub indices: &'a D::Buffer<u32>,
    /// Width of `indices`.
    pub k: usize,
    /// The rows they name.
    pub keys: PagedRows<'a, D>,
}

/// Inputs of [`Device::select`].
pub struct Selection<'a, D: Device> {
    /// `[rows, heads, width]`: index queries, rotated and rounded.
    pub q: &'a D::Buffer<D::Act>,
    /// `[rows, heads]`: head weights, constant factors included.
    pub weights: &'a D::Buffer<f32>,
    /// Index heads.
    pub heads: usize,
    /// Where the rows are.
    pub map: &'a RowMap<D>,
    /// Index keys.
    pub keys: PagedRows<'a, D>,
    /// How many rows to choose.
    pub k: usize,
}

/// Candidate blocks: a coarse choice made by one layer and used by later ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CandidateShape {
    /// Index rows in a block.
    pub block_size: usize,
    /// Blocks kept for each query.
    pub blocks: usize,
}

/// What [`Device::select`] does about candidate blocks.
pub enum Candidates<'a, D: Device> {
    /// Choose among all visible rows.
    All,
    /// Choose among all visible rows, and publish the best blocks `[rows, blocks]`, ascending,
    /// [`ABSENT`] from the first absent one on.
    Publish(CandidateShape, &'a mut D::Buffer<u32>),
    /// Choose among the visible rows of the published blocks.
    Within(CandidateShape, &'a D::Buffer<u32>),
}

/// Weights of one hyper-connection site.
pub struct MixWeights<D: Device> {
    /// `[(2 + S) * S, S * H]` f32.
    pub function: D::Matrix,
    /// `[(2 + S) * S]`.
    pub base: D::Buffer<f32>,
    /// `[3]`: factors of pre, post and comb.
    pub scale: D::Buffer<f32>,
}

/// Sizes and constants of the residual streams.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StreamShape {
    /// Streams, S.
    pub streams: usize,
    /// Width of a stream, H.
    pub hidden: usize,
    /// Sinkhorn iterations.
    pub iterations: usize,
    /// Added in the Sinkhorn divisions and to `pre`.
    pub hc_eps: f32,
    /// Added to mean squares.
    pub norm_eps: f32,
}

/// Coefficients that a hyper-connection site hands on.
pub struct Mix<D: Device> {
    /// `[rows, S]`: how the NEXT site collapses the streams.
    pub pre: D::Buffer<f32>,
    /// `[rows, S]`: how this sublayer's output is added.
    pub post: D::Buffer<f32>,
    /// `[rows, S, S]`: how the streams are mixed; the first index is summed over.
    pub comb: D::Buffer<f32>,
}

/// How [`Device::route`] chooses experts.
pub struct Routing<'a, D: Device> {
    /// `[rows, experts]`: gate products.
    pub scores: &'a D::Buffer<f32>,
    /// Routed experts.
    pub experts: usize,
    /// Experts a token uses.
    pub k: usize,
    /// `[experts]`: added for the choice only.
    pub bias: &'a D::Buffer<f32>,
    /// `[experts]`: used for image rows instead of `bias`.
    pub bias_image: Option<&'a D::Buffer<f32>>,
    /// `[rows]`: 1 for image rows.
    pub image: &'a D::Buffer<u8>,
    /// Factor on the normalized weights.
    pub scale: f32,
}

/// How one row of logits is turned into a token.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct SampleRow {
    /// Key of the noise.
    pub seed: u64,
    /// Absolute position of the token to produce.
    pub position: u32,
    /// Which of a request's samples (n > 1).
    pub sample: u32,
    /// 0: the largest logit wins, the lower id on ties; no noise, no filters.
    pub temperature: f32,
    /// Kept probability mass, 1.0 = all.
    pub top_p: f32,
    /// Kept tokens, 0 = all.
    pub top_k: u32,
    /// Least probability relative to the best token's, 0 = off.
    pub min_p: f32,
}

impl SampleRow {
    /// The largest logit wins.
    pub const fn greedy() -> Self {
        Self { seed: 0, position: 0, sample: 0, temperature: 0.0, top_p: 1.0, top_k: 0, min_p: 0.0 }
    }
}

/// One count of a token in a row's text, for the penalties.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct TokenCount {
    /// Row of the logits.
    pub row: u32,
    /// Token id.
    pub token: u32,
    /// Occurrences in the generated part.
    pub generated: u32,
    /// Occurrences in the prompt.
    pub prompt: u32,
}

/// Penalties of one row.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct PenaltyRow {
    /// Divides positive and multiplies negative logits of tokens seen in prompt or output; 1 = off.
    pub repetition: f32,
    /// Subtracted once for tokens seen in the output; 0 = off.
    pub presence: f32,
    /// Subtracted for each occurrence in the output; 0 = off.
    pub frequency: f32,
}

/// One addition to a logit; negative infinity forbids the token.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct BiasEntry {
    /// Row of the logits.
    pub row: u32,
    /// Token id.
    pub token: u32,
    /// Added.
    pub bias: f32,
}

/// A processor that runs the model. See the module text for what holds for every operation.
pub trait Device: Send + Sync + Sized + 'static {
    /// Activations.
    type Act: Element;
    /// Memory of this device.
    type Buffer<E: Element>: Send + Sync;
    /// A weight matrix in its stored form, `[out features, in features]`.
    type Matrix: Send + Sync;
    /// The routed experts of one layer.
    type Experts: Send + Sync;
    /// Recorded series of operations. See [`Device::replay`].
    type Graphs: Send;

    // ---- memory ----

    /// A zeroed buffer of `len` elements.
    fn alloc<E: Element>(&self, len: usize) -> Result<Self::Buffer<E>>;
    /// Elements in a buffer.
    fn len<E: Element>(&self, buffer: &Self::Buffer<E>) -> usize;
    /// Copies host elements to `dst[offset..]`.
    fn upload<E: Element>(&self, src: &[E], dst: &mut Self::Buffer<E>, offset: usize)
    -> Result<()>;
    /// Copies `src[offset..][..dst.len()]` to the host; blocks until it is there.
    fn download<E: Element>(
        &self,
        src: &Self::Buffer<E>,
        offset: usize,
        dst: &mut [E],
    ) -> Result<()>;
    /// Copies `len` elements.
    fn copy<E: Element>(
        &self,
        src: &Self::Buffer<E>,
        src_offset: usize,
        dst: &mut Self::Buffer<E>,
        dst_offset: usize,
        len: usize,
    ) -> Result<()>;
    /// Copies `len` elements inside a buffer. The ranges do not overlap.
    fn copy_within<E: Element>(
        &self,
        buffer: &mut Self::Buffer<E>,
        src_offset: usize,
        dst_offset: usize,
        len: usize,
    ) -> Result<()>;
    /// Host activations, rounded to the device's type.
    fn upload_act(
        &self,
        src: &[f32],
        dst: &mut Self::Buffer<Self::Act>,
        offset: usize,
    ) -> Result<()>;
    /// Activations as f32; blocks.
    fn download_act(
        &self,
        src: &Self::Buffer<Self::Act>,
        offset: usize,
        dst: &mut [f32],
    ) -> Result<()>;
    /// Waits for all calls so far.
    fn sync(&self) -> Result<()>;
    /// Bytes that are free on a device with memory of its own.
    fn free_memory(&self) -> Result<Option<u64>> {
        Ok(None)
    }
    /// Runs `f`, a series of operations on this device, where they start soonest: a CPU runs it on
    /// a thread of its pool. Operations called elsewhere give the same results.
    fn run<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        f()
    }
    /// The cache format that keeps rows as computed.
    fn exact_rows(&self) -> RowFormat;
    /// A place for recorded series, on a device that starts a series sooner as a whole than
    /// operation by operation.
    fn graphs(&self) -> Option<Self::Graphs> {
        None
    }
    /// Runs `f`, a series of operations, or repeats what it did when it was last run under `key`.
    ///
    /// The caller ensures that, under one key, `f` always does the same with the same buffers, only
    /// their contents differ; that these buffers live as long as `graphs`; and that `f` neither
    /// uploads, downloads, allocates nor waits.
    fn replay(
        &self,
        graphs: &mut Self::Graphs,
        key: GraphKey,
        mut f: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        let _ = (graphs, key);
        f()
    }
    /// Runs `f`, operations on `rows` rows, which may run beside those that are called after it, until
    /// [`Device::join`].
    ///
    /// The caller ensures that until then neither of the two writes what the other reads or writes,
    /// and that inside [`Device::replay`] every branch is joined. Not inside another branch.
    fn beside(&self, rows: usize, f: impl FnOnce() -> Result<()>) -> Result<Branch> {
        let _ = rows;
        f()?;
        Ok(Branch::default())
    }
    /// What is called from here on comes after the branch.
    fn join(&self, branch: Branch) -> Result<()> {
        let _ = branch;
        Ok(())
    }

    // ---- weights ----

    /// Makes a stored matrix usable. A CPU reads it in place.
    fn matrix(&self, stored: StoredMatrix) -> Result<Self::Matrix>;
    /// Makes the routed experts of a layer usable.
    fn experts(&self, stored: Vec<Expert<StoredMatrix>>) -> Result<Self::Experts>;

    // ---- random weights and rows, for measurements and tests ----

    /// The matrix of [`RandomMatrix::stored`], made in the device's memory.
    fn random_matrix(&self, m: &RandomMatrix) -> Result<Self::Matrix> {
        self.matrix(m.stored())
    }
    /// The same for the routed experts of a layer, all of one shape and format.
    fn random_experts(&self, all: &[Expert<RandomMatrix>]) -> Result<Self::Experts> {
        let stored = |e: &Expert<RandomMatrix>| Expert {
            w1: e.w1.stored(),
            w3: e.w3.stored(),
            w2: e.w2.stored(),
        };
        self.experts(all.iter().map(stored).collect())
    }
    /// Fills the first `bytes` bytes of `out` with those of [`Random::fill`].
    fn random_bytes(
        &self,
        random: &Random,
        bytes: usize,
        out: &mut Self::Buffer<u8>,
    ) -> Result<()> {
        random::upload_bytes(self, random, bytes, out)
    }

    // ---- rows ----

    /// `out[i] = src[indices[i]]` for rows of `width` elements. An [`ABSENT`] index leaves its row alone.
    fn gather_rows<E: Element>(
        &self,
        src: &Self::Buffer<E>,
        width: usize,
        indices: &Self::Buffer<u32>,
        rows: usize,
        out: &mut Self::Buffer<E>,
    ) -> Result<()>;
    /// `out[indices[i]] = src[i]` for rows of `width` elements. Indices are distinct; `u64::MAX` is
    /// skipped.
    fn scatter_rows<E: Element>(
        &self,
        src: &Self::Buffer<E>,
        width: usize,
        indices: &Self::Buffer<u64>,
        rows: usize,
        out: &mut Self::Buffer<E>,
    ) -> Result<()>;
    /// Rounds rows of `width` activations to `format` and stores them: `[rows, row_bytes]`.
    fn encode_rows(
        &self,
        x: &Self::Buffer<Self::Act>,
        width: usize,
        format: RowFormat,
        rows: usize,
        out: &mut Self::Buffer<u8>,
    ) -> Result<()>;
    /// Rounds rows of `width` activations to what `format` can hold, in place. The `exact` formats
    /// leave them alone.
    fn round_rows(
        &self,
        x: &mut Self::Buffer<Self::Act>,
        width: usize,
        format: RowFormat,
        rows: usize,
    ) -> Result<()>;
    /// `out[i]` is what the stored row `indices[i]` of `src` holds: `[rows, width]`. An [`ABSENT`]
    /// index leaves its row alone.
    fn decode_rows(
        &self,
        src: &Self::Buffer<u8>,
        width: usize,
        format: RowFormat,
        indices: &Self::Buffer<u32>,
        rows: usize,
        out: &mut Self::Buffer<Self::Act>,
    ) -> Result<()>;

    // ---- dense ----

    /// `out[i] = table[tokens[i]]`: `[rows, H]`. An [`ABSENT`] token leaves its row alone.
    fn embed(
        &self,
        table: &Self::Matrix,
        tokens: &Self::Buffer<u32>,
        rows: usize,
        out: &mut Self::Buffer<Self::Act>,
    ) -> Result<()>;
    /// `out = x * rsqrt(mean(x^2) + eps) * weight`, rows of `width`.
    fn rms_norm(
        &self,
        x: &Self::Buffer<Self::Act>,
        weight: &Self::Buffer<f32>,
        eps: f32,
        width: usize,
        rows: usize,
        out: &mut Self::Buffer<Self::Act>,
    ) -> Result<()>;
    /// `out = x @ w^T`: `[rows, in] -> [rows, out features]`.
    fn linear(
        &self,
        x: &Self::Buffer<Self::Act>,
        w: &Self::Matrix,
        rows: usize,
        out: &mut Self::Buffer<Self::Act>,
    ) -> Result<()>;
    /// The same with an f32 result (gate, head, head weights), times `factor`.
    fn linear_f32(
        &self,
        x: &Self::Buffer<Self::Act>,
        w: &Self::Matrix,
        factor: f32,
        rows: usize,
        out: &mut Self::Buffer<f32>,
    ) -> Result<()>;
    /// Block-diagonal linear: `w` is `[groups * o, i]`, `x` is `[rows, groups * i]`; group `g` of the
    /// output `[rows, groups * o]` is rows `g*o..` of `w` times group `g` of `x`.
    fn grouped_linear(
        &self,
        x: &Self::Buffer<Self::Act>,
        w: &Self::Matrix,
        groups: usize,
        rows: usize,
        out: &mut Self::Buffer<Self::Act>,
    ) -> Result<()>;
    /// Rotates the last `rope_dims` of each of `heads` heads of `head_dim` by adjacent pairs
    /// (2i, 2i + 1), in place. `angles` is `[rows, rope_dims / 2, 2]`: cosine and sine of each pair.
    /// `inverse` rotates back.
    fn rope(
        &self,
        x: &mut Self::Buffer<Self::Act>,
        angles: &Self::Buffer<f32>,
        heads: usize,
        head_dim: usize,
        rope_dims: usize,
        inverse: bool,
        rows: usize,
    ) -> Result<()>;

    // ---- residual streams ----

    /// Every stream of a row becomes `x`: `[rows, H] -> [rows, S, H]`.
    fn streams_start(
        &self,
        x: &Self::Buffer<Self::Act>,
        shape: &StreamShape,
        rows: usize,
        streams: &mut Self::Buffer<Self::Act>,
    ) -> Result<()>;
    /// `out = sum_s pre[s] * stream[s]`, s ascending: `[rows, H]`.
    fn streams_collapse(
        &self,
        streams: &Self::Buffer<Self::Act>,
        pre: &Self::Buffer<f32>,
        shape: &StreamShape,
        rows: usize,
        out: &mut Self::Buffer<Self::Act>,
    ) -> Result<()>;
    /// `out` = the norm of the collapsed streams, with `shape.norm_eps`; `collapsed` is work space.
    fn streams_collapse_norm(
        &self,
        streams: &Self::Buffer<Self::Act>,
        pre: &Self::Buffer<f32>,
        weight: &Self::Buffer<f32>,
        shape: &StreamShape,
        rows: usize,
        collapsed: &mut Self::Buffer<Self::Act>,
        out: &mut Self::Buffer<Self::Act>,
    ) -> Result<()> {
        self.streams_collapse(streams, pre, shape, rows, collapsed)?;
        self.rms_norm(collapsed, weight, shape.norm_eps, shape.hidden, rows, out)
    }
    /// `mix = (function @ flat) * rsqrt(mean(flat^2) + norm_eps)` over the S*H values of a row, then
    /// `pre = sigmoid(mix[0..S] * scale0 + base) + hc_eps`, `post = 2 sigmoid(mix[S..2S] * scale1 +
    /// base)`, `comb = sinkhorn(mix[2S..] * scale2 + base)` as `[S, S]`: softmax over the last axis,
    /// + eps; divided by column sums (+ eps); then `iterations - 1` times rows, then columns.
    fn streams_mix(
        &self,
        streams: &Self::Buffer<Self::Act>,
        weights: &MixWeights<Self>,
        shape: &StreamShape,
        rows: usize,
        out: &mut Mix<Self>,
    ) -> Result<()>;
    /// `stream[j] = post[j] * y + sum_i comb[i, j] * stream[i]`, in place.
    fn streams_update(
        &self,
        streams: &mut Self::Buffer<Self::Act>,
        y: &Self::Buffer<Self::Act>,
        mix: &Mix<Self>,
        shape: &StreamShape,
        rows: usize,
    ) -> Result<()>;
    /// Mean over the streams, written to columns `column..column + H` of rows of `out_width`.
    fn streams_mean(
        &self,
        streams: &Self::Buffer<Self::Act>,
        shape: &StreamShape,
        rows: usize,
        out: &mut Self::Buffer<Self::Act>,
        out_width: usize,
        column: usize,
    ) -> Result<()>;

    // ---- attention ----

    /// Softmax-weighted mean of each group's values, by channel: for group `g` and channel `c`,
    /// `sum_j softmax_j(score_j[c]) * value_j[c]` over its `ratio` members in order. Member `m` is
    /// row `m` of this step, or, with the top bit set, row `m & 0x7fff_ffff` of `pending`
    /// (`[_, 2, width]`: value, then score). Output `[groups, width]`.
    fn pool_groups(
        &self,
        values: &Self::Buffer<Self::Act>,
        scores: &Self::Buffer<Self::Act>,
        pending: &Self::Buffer<f32>,
        members: &Self::Buffer<u32>,
        ratio: usize,
        width: usize,
        groups: usize,
        out: &mut Self::Buffer<Self::Act>,
    ) -> Result<()>;
    /// Stores a step's (value, score) rows into `pending` `[_, 2, width]` at `indices`; `u64::MAX`
    /// is skipped. Runs after [`Device::pool_groups`] of the step.
    fn store_pending(
        &self,
        values: &Self::Buffer<Self::Act>,
        scores: &Self::Buffer<Self::Act>,
        indices: &Self::Buffer<u64>,
        width: usize,
        rows: usize,
        pending: &mut Self::Buffer<f32>,
    ) -> Result<()>;
    /// Chooses the `k` visible rows with the largest score `sum_h relu(q_h . key) * weights_h`
    /// (h ascending) for every query: `out` is `[rows, k]`, ascending, [`ABSENT`] at the end. Equal
    /// scores: the lower row wins. With [`Candidates::Publish`] the scores are also reduced to
    /// blocks (maximum) and the best blocks published; the block of the last visible row is always
    /// one of them; equal maxima: the lower block wins. Scratch does not grow with the context.
    fn select(
        &self,
        args: &Selection<'_, Self>,
        candidates: Candidates<'_, Self>,
        out: &mut Self::Buffer<u32>,
    ) -> Result<()>;
    /// Attention of every row over its selected rows, its window and the sink: `[rows, heads,
    /// head_dim]`. Keys are values. The keys of a query (selected ascending, then window ascending)
    /// are cut into pieces of 64; pieces are merged in that order, then the sink.
    fn attend(&self, args: &Attention<'_, Self>, out: &mut Self::Buffer<Self::Act>) -> Result<()>;

    // ---- experts ----

    /// `s = sqrt(softplus(score))`; the `k` experts with the largest `s + bias` (lower id on ties),
    /// in that order: `ids` `[rows, k]`; `weights` `[rows, k]` are their `s` over the sum of the
    /// chosen `s` (+ 1e-20), times `scale`.
    fn route(
        &self,
        args: &Routing<'_, Self>,
        rows: usize,
        ids: &mut Self::Buffer<u32>,
        weights: &mut Self::Buffer<f32>,
    ) -> Result<()>;
    /// `out = sum_slot weights[slot] * expert(x) + shared(x)`, slots ascending, the shared expert
    /// last; `expert(x) = w2 (silu(min(w1 x, limit)) * clamp(w3 x, -limit, limit))`.
    fn experts_forward(
        &self,
        x: &Self::Buffer<Self::Act>,
        experts: &Self::Experts,
        shared: &Expert<Self::Matrix>,
        ids: &Self::Buffer<u32>,
        weights: &Self::Buffer<f32>,
        k: usize,
        limit: f32,
        rows: usize,
        out: &mut Self::Buffer<Self::Act>,
    ) -> Result<()>;

    // ---- n-gram memory ----

    /// Tells the device that these table rows are wanted soon. A hint.
    fn engram_prefetch(&self, table: &Self::Matrix, row_ids: &[u64]) {
        let _ = (table, row_ids);
    }
    /// `out[i] = table[row_ids[i]]`, dequantized: `[count, table columns]`.
    fn engram_gather(
        &self,
        table: &Self::Matrix,
        row_ids: &Self::Buffer<u64>,
        count: usize,
        out: &mut Self::Buffer<Self::Act>,
    ) -> Result<()>;
    /// For stream s of a row with key `k_s` and value `v` (`kv` is `[rows, S + 1, H]`: keys, then
    /// the value): `dot = <stream_s * weight_s, k_s> * rsqrt(mean(stream_s^2) + eps) *
    /// rsqrt(mean(k_s^2) + eps) * H^-0.5`, `gate = sigmoid(sign(dot) * sqrt(max(|dot|, 1e-6)))`
    /// with `sign(0) = 0`, and `stream_s += gate * v`. `weight` is `[S, H]`, the product of the two
    /// norm weights. Rows with `image` 1 are left alone.
    fn engram_update(
        &self,
        streams: &mut Self::Buffer<Self::Act>,
        kv: &Self::Buffer<Self::Act>,
        weight: &Self::Buffer<f32>,
        image: &Self::Buffer<u8>,
        shape: &StreamShape,
        rows: usize,
    ) -> Result<()>;

    // ---- output ----

    /// Row `i` of `out` (`[rows, a_width + b_width]`) is row `i` of `a`, then row `i` of `b`.
    fn concat(
        &self,
        a: &Self::Buffer<Self::Act>,
        a_width: usize,
        b: &Self::Buffer<Self::Act>,
        b_width: usize,
        rows: usize,
        out: &mut Self::Buffer<Self::Act>,
    ) -> Result<()>;
    /// `out[out_rows[i]] += x[i]` for `rows` rows of `width` f32, `i` ascending. [`ABSENT`] is
    /// skipped.
    fn add_rows_f32(
        &self,
        x: &Self::Buffer<f32>,
        width: usize,
        rows: usize,
        out: &mut Self::Buffer<f32>,
        out_rows: &Self::Buffer<u32>,
    ) -> Result<()>;
    /// Applies penalties to logits `[rows, vocab]`, in place: `counts` lists every token that occurs
    /// in a row's text, once. `penalties` is by row of the logits. First the repetition penalty,
    /// then `frequency * generated`, then `presence` is subtracted.
    fn penalize(
        &self,
        logits: &mut Self::Buffer<f32>,
        vocab: usize,
        penalties: &[PenaltyRow],
        counts: &[TokenCount],
    ) -> Result<()>;
    /// Adds to single logits, in place, in the order given.
    fn add_bias(
        &self,
        logits: &mut Self::Buffer<f32>,
        vocab: usize,
        entries: &[BiasEntry],
    ) -> Result<()>;
    /// Sets the logits of forbidden tokens to negative infinity. `mask` holds `ceil(vocab / 32)`
    /// words for each row listed in `mask_rows`; bit `i % 32` of word `i / 32` allows token `i`.
    fn mask_logits(
        &self,
        logits: &mut Self::Buffer<f32>,
        vocab: usize,
        mask_rows: &[u32],
        mask: &[u32],
    ) -> Result<()>;
    /// Chooses a token for each row of logits `[rows, vocab]` (processed above, not yet divided by
    /// the temperature); `tokens` is `[rows]`. At temperature 0 (or below) the largest logit wins,
    /// without filters or noise. Otherwise, with `x = (logit - largest logit) / T`, the token is
    /// `argmax(x + g(seed, sample, position, token))` over the tokens that survive all filters. The
    /// lower id wins ties.
    ///
    /// Filters cut the order (logit descending, id ascending; zeros are equal), each on its own:
    /// top-k keeps the first `k`; top-p keeps a token iff the mass strictly before it does not
    /// exceed `p`; min-p keeps a token iff `e^x >= min_p`. The best token always survives. A token's
    /// mass is the integer `floor(e^x * 2^40)`, over the sum of all; `p` counts in steps of 2^-32.
    /// `g = -ln(-ln(u))` is Gumbel noise of the first two words of Philox4x32-10 with key = seed and
    /// counter = (position, token, sample, 0).
    ///
    /// Tokens whose logit is negative infinity or NaN are never chosen; a row without any other
    /// yields [`ABSENT`].
    fn sample(
        &self,
        logits: &Self::Buffer<f32>,
        vocab: usize,
        rows: &[SampleRow],
        tokens: &mut Self::Buffer<u32>,
    ) -> Result<()>;
}
