//! Settings of an engine.

use super::EngineError;
use crate::drafting::{CostCurve, KnownDrafts};
use deepinfer_device::DeviceChoice;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

/// How prompt tokens go through the decoder layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PrefillMode {
    /// Every token runs every layer.
    Off,
    /// The decoder runs for the suffix that later tokens depend on: same tokens as `Off`, bit for
    /// bit.
    #[default]
    Exact,
    /// The decoder runs for the last [`EngineConfig::keep_tokens`] prompt tokens, whose windows are
    /// cut there: what the released model is served with. Changes logits.
    Compact,
    /// The logits of `Compact` at the cost of `Off`: its oracle.
    Mask,
}

impl PrefillMode {
    /// Its name on a command line.
    pub const fn name(self) -> &'static str {
        match self {
            PrefillMode::Off => "off",
            PrefillMode::Exact => "exact",
            PrefillMode::Compact => "compact",
            PrefillMode::Mask => "mask",
        }
    }
}

impl FromStr for PrefillMode {
    type Err = EngineError;

    fn from_str(text: &str) -> Result<Self, EngineError> {
        match text {
            "off" => Ok(Self::Off),
            "exact" => Ok(Self::Exact),
            "compact" => Ok(Self::Compact),
            "mask" => Ok(Self::Mask),
            _ => Err(EngineError::not_understood("prefill", text, "off, exact, compact or mask")),
        }
    }
}

/// Where prefixes of earlier requests are kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PrefixCache {
    /// Nowhere.
    Off,
    /// In the pages that requests do not need.
    #[default]
    Device,
    /// There, and in host memory.
    Host,
    /// There, in host memory, and in a directory that survives a restart.
    Disk(PathBuf),
}

impl FromStr for PrefixCache {
    type Err = EngineError;

    fn from_str(text: &str) -> Result<Self, EngineError> {
        match (text, text.strip_prefix("disk:")) {
            ("off", _) => Ok(Self::Off),
            ("device", _) => Ok(Self::Device),
            ("host", _) => Ok(Self::Host),
            (_, Some(dir)) if !dir.is_empty() => Ok(Self::Disk(dir.into())),
            _ => Err(EngineError::not_understood(
                "prefix-cache",
                text,
                "off, device, host or disk:DIR",
            )),
        }
    }
}

/// How many tokens are drafted ahead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DraftMode {
    /// None.
    Off,
    /// This many, at most the checkpoint's block.
    Fixed(usize),
    /// The checkpoint's block, of which as many drafts are verified as pay off, by their confidences
    /// and measured step times; none where drafting does not pay. None if the checkpoint has no
    /// draft stages.
    #[default]
    Auto,
}

impl FromStr for DraftMode {
    type Err = EngineError;

    fn from_str(text: &str) -> Result<Self, EngineError> {
        match text {
            "off" | "0" => Ok(Self::Off),
            "auto" => Ok(Self::Auto),
            _ => match text.parse() {
                Ok(n) => Ok(Self::Fixed(n)),
                Err(_) => Err(EngineError::not_understood("draft", text, "off, auto or a number")),
            },
        }
    }
}

/// How a draft is accepted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DraftScheme {
    /// If it is the token that the model chooses at its place: drafts and model draw with the same
    /// noise. The same tokens come out as without drafting.
    #[default]
    Shared,
    /// With a chance that follows from both probabilities ([`crate::sampler::rejection`]): tokens
    /// are distributed as without drafting, but others come out, which depend on what runs beside
    /// them. Tokens chosen at temperature 0 are the same.
    Rejection,
}

impl FromStr for DraftScheme {
    type Err = EngineError;

    fn from_str(text: &str) -> Result<Self, EngineError> {
        match text {
            "shared" => Ok(Self::Shared),
            "rejection" => Ok(Self::Rejection),
            _ => Err(EngineError::not_understood("draft-scheme", text, "shared or rejection")),
        }
    }
}

/// Settings of an engine. None of them changes the tokens of a request, except
/// [`PrefillMode::Compact`], [`PrefillMode::Mask`], their [`EngineConfig::keep_tokens`],
/// [`DraftScheme::Rejection`], and the cache format.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineConfig {
    /// Most rows in a step.
    pub max_batch_tokens: usize,
    /// Most requests that run at a time.
    pub max_seqs: usize,
    /// Most rows of one prompt in a step.
    pub prefill_chunk: usize,
    /// Tokens that the page pool holds.
    pub kv_tokens: usize,
    /// Whether the pool takes more tokens where the device has memory of its own: what is free there
    /// when the weights are loaded.
    pub fill_memory: bool,
    /// Most tokens of one sequence, output included; `None`: what model and pool allow.
    pub max_seq_tokens: Option<usize>,
    /// How cache rows are stored.
    pub cache_format: crate::cache::CacheFormat,
    /// How prompts are read.
    pub prefill: PrefillMode,
    /// Prompt tokens that the decoder runs for in [`PrefillMode::Compact`].
    pub keep_tokens: usize,
    /// Where prefixes are kept.
    pub prefix_cache: PrefixCache,
    /// Snapshots of sequences kept on the device for the prefix cache.
    pub device_snapshots: usize,
    /// Host memory for prefixes, in bytes.
    pub host_cache_bytes: usize,
    /// Disk space for prefixes, in bytes: all files of the directory, those of other settings
    /// included.
    pub disk_cache_bytes: u64,
    /// Host memory for requests that lost their place on the device, in bytes; requests that do not
    /// fit are computed again.
    pub swap_bytes: usize,
    /// How many tokens are drafted ahead.
    pub draft: DraftMode,
    /// How a draft is accepted.
    pub draft_scheme: DraftScheme,
    /// Divide the logits of the drafts' confidences, by position in the block, the last one from
    /// there on; none: 1.
    pub confidence_temperatures: Vec<f32>,
    /// Where step times that were measured for [`DraftMode::Auto`] are kept for later starts;
    /// `None`: they are measured at every start.
    pub costs_dir: Option<PathBuf>,
    /// Drafts of known chances instead of the checkpoint's, for tests and measurements.
    pub known_drafts: Option<Arc<KnownDrafts>>,
    /// Step times that [`DraftMode::Auto`] plans with instead of measured ones, for tests and
    /// measurements. Steps that take longer still count as longer.
    pub known_costs: Option<CostCurve>,
    /// Plan a step while the device runs the one before.
    pub overlap: bool,
    /// Launch steps that only decode as a whole, on devices that can record them.
    pub graphs: bool,
    /// What the model runs on.
    pub device: DeviceChoice,
    /// Threads of a CPU device; `None`: all.
    pub threads: Option<usize>,
    /// Most requests that wait.
    pub max_queued_requests: usize,
    /// Most prompt tokens that wait.
    pub max_queued_tokens: usize,
    /// Longest time that a request waits for its first step.
    pub max_wait: Option<Duration>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            max_batch_tokens: 1024,
            max_seqs: 16,
            prefill_chunk: 512,
            kv_tokens: 1 << 16,
            fill_memory: false,
            max_seq_tokens: None,
            cache_format: crate::cache::CacheFormat::default(),
            prefill: PrefillMode::default(),
            keep_tokens: 140,
            prefix_cache: PrefixCache::default(),
            device_snapshots: 64,
            host_cache_bytes: 1 << 30,
            disk_cache_bytes: 16 << 30,
            swap_bytes: 1 << 30,
            draft: DraftMode::default(),
            draft_scheme: DraftScheme::default(),
            confidence_temperatures: Vec::new(),
            costs_dir: None,
            known_drafts: None,
            known_costs: None,
            overlap: true,
            graphs: true,
            device: DeviceChoice::Cpu,
            threads: None,
            max_queued_requests: 4096,
            max_queued_tokens: 16 << 20,
            max_wait: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_read_from_text() {
        assert_eq!("compact".parse::<PrefillMode>().ok(), Some(PrefillMode::Compact));
        assert!("fast".parse::<PrefillMode>().is_err());
        assert_eq!(
            "disk:/x".parse::<PrefixCache>().ok(),
            Some(PrefixCache::Disk(PathBuf::from("/x")))
        );
        assert!("disk:".parse::<PrefixCache>().is_err());
        assert_eq!("3".parse::<DraftMode>().ok(), Some(DraftMode::Fixed(3)));
        assert_eq!("off".parse::<DraftMode>().ok(), Some(DraftMode::Off));
        let error = "many".parse::<DraftMode>().expect_err("is refused").to_string();
        assert!(error.contains("many") && error.contains("auto"), "{error}");
    }
}
