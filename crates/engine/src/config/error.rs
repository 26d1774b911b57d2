//! What can be wrong with a configuration.

/// A `config.json` that this engine cannot run. Messages name the field and its value.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Not JSON, a missing field, or a value of the wrong type.
    #[error("config.json: {source}")]
    Json {
        /// The parser's message, with line and column or the field's name.
        source: serde_json::Error,
    },
    /// `architectures` does not name the one that this engine runs.
    #[error("config.json: architectures is {found:?}; this engine runs {expected:?} only")]
    Architecture {
        /// What the file says.
        found: Vec<String>,
        /// What is needed.
        expected: &'static str,
    },
    /// `model_type` is another model's. A prefix is not enough: `deepseek_v4` is another model.
    #[error("config.json: {field} is {found:?}; expected {expected:?}")]
    ModelType {
        /// `model_type`, or that of a section.
        field: &'static str,
        /// What the file says; empty if nothing.
        found: String,
        /// What is needed.
        expected: &'static str,
    },
    /// A field has a value that this engine does not implement.
    #[error("config.json: {field} is {found}; this engine implements {supported} only")]
    Unsupported {
        /// Field, with its section.
        field: String,
        /// Its value.
        found: String,
        /// What is implemented.
        supported: String,
    },
    /// A field that this engine does not know, and that is switched on.
    #[error(
        "config.json: {field} is {found}, and this engine does not implement that field; the model \
         would compute something else without it"
    )]
    UnknownField {
        /// Field, with its section.
        field: String,
        /// Its value.
        found: String,
    },
    /// A number outside its range.
    #[error("config.json: {field} is {found}; it must be {rule}")]
    OutOfRange {
        /// Field, with its section.
        field: String,
        /// Its value.
        found: String,
        /// What is allowed, with the other values that it depends on.
        rule: String,
    },
    /// `compress_ratios` needs one entry a layer and one a draft stage.
    #[error(
        "config.json: compress_ratios has {found} entries; {layers} layers and {drafts} draft \
         stages need {}", layers + drafts
    )]
    RatioCount {
        /// Entries in the file.
        found: usize,
        /// `num_hidden_layers`.
        layers: usize,
        /// `num_nextn_predict_layers`.
        drafts: usize,
    },
    /// A KV source does not select rows.
    #[error(
        "config.json: KV source layer {layer} is not in index_source_layer_ids {index_sources:?}; \
         every layer of kv_source_layer_ids must be"
    )]
    KvSourceDoesNotSelect {
        /// The KV source.
        layer: usize,
        /// The selecting layers.
        index_sources: Vec<usize>,
    },
    /// A compressed layer has no rows to read.
    #[error(
        "config.json: layer {layer} has compression ratio {ratio}, but the nearest KV source at or \
         before it is {}; it needs one of the same ratio",
        source_text(source_layer)
    )]
    NoKvSource {
        /// The layer.
        layer: usize,
        /// Its ratio.
        ratio: usize,
        /// The nearest source and its ratio.
        source_layer: Option<(usize, usize)>,
    },
    /// A layer would use rows selected from another KV than its own.
    #[error(
        "config.json: layer {layer} reads the KV of layer {kv_source}, but the nearest selecting \
         layer {index_source} selects from another"
    )]
    IndexSourceOfOtherKv {
        /// The layer.
        layer: usize,
        /// Its KV source.
        kv_source: usize,
        /// The nearest selecting layer.
        index_source: usize,
    },
    /// The decoder (from the first ratio-1 layer on) must be uniform.
    #[error(
        "config.json: layer {layer} ({what}) comes after the decoder's start, layer {start} (the \
         first of ratio 1); from there on every layer has ratio 1 and reads that layer's KV"
    )]
    AfterDecoderStart {
        /// The offending layer.
        layer: usize,
        /// What is wrong with it.
        what: String,
        /// First layer of ratio 1.
        start: usize,
    },
}

fn source_text(source: &Option<(usize, usize)>) -> String {
    match source {
        None => "absent".into(),
        Some((layer, ratio)) => format!("layer {layer} of ratio {ratio}"),
    }
}
