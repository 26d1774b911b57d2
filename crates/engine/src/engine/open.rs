//! From a checkpoint to a running engine.

use super::identity::identity;
use super::{Engine, EngineConfig, EngineError, PrefixCache};
use crate::cache::tiers::Tiers;
use crate::checkpoint::{Checkpoint, Source};
use crate::drafting::{CostCurve, StoredCosts};
use crate::engram::Engram;
use crate::model::Model;
use crate::plan_memory::{MemoryPlan, available_memory};
use crate::schedule::Shape;
use crate::tokenizer::Tokenizer;
use crate::worker::ModelWorker;
use deepinfer_device::{Cpu, Cuda, Device, DeviceChoice};
use std::sync::Arc;

impl Engine {
    /// Opens a checkpoint on the device of `config`. `progress` is told how many of how many parts are loaded.
    pub fn open(
        source: Source,
        config: &EngineConfig,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self, EngineError> {
        let checkpoint = Checkpoint::open(source)?;
        match config.device.resolve() {
            DeviceChoice::Cuda(ordinal) => {
                let plan = MemoryPlan::new(&checkpoint, config)?;
                available_memory().map_or(Ok(()), |available| plan.check_tables(available))?;
                let device = Cuda::open_with(ordinal, progress)?;
                plan.check_gpu(device.memory()?.0 as u64)?;
                let info = device.info();
                let name = format!("cuda {} {:?}", info.name, info.capability);
                Self::open_on(device, &name, checkpoint, config, progress)
            }
            DeviceChoice::Cpu | DeviceChoice::Auto => {
                MemoryPlan::new(&checkpoint, config)?.check_host()?;
                let device = Cpu::new(config.threads)?;
                let name = format!("cpu {:?}", device.isa());
                Self::open_on(device, &name, checkpoint, config, progress)
            }
        }
    }

    fn open_on<D: Device>(
        device: D,
        name: &str,
        mut checkpoint: Checkpoint,
        config: &EngineConfig,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self, EngineError> {
        let device = Arc::new(device);
        let tokenizer = Arc::new(Tokenizer::from_bytes(checkpoint.tokenizer_json()?)?);
        let mut identity = identity(&checkpoint, &tokenizer)?;
        identity.extend(name.bytes());
        let engram = Engram::new(&checkpoint.config().text_config, &tokenizer)?;
        let model = Model::load(&*device, &mut checkpoint, engram, progress)?;
        let mut config = config.clone();
        if let (true, Some(free)) = (config.fill_memory, device.free_memory()?) {
            let plan = MemoryPlan::new(&checkpoint, &config)?;
            let positions = checkpoint.config().text_config.max_position_embeddings;
            config.kv_tokens = plan.tokens_that_fill(free, positions);
        }
        Self::new(device, Arc::new(model), Some(tokenizer), &identity, &config)
    }

    /// An engine over a loaded model. `identity` names checkpoint, device and
    /// instruction set, for the prefix cache.
    pub fn new<D: Device>(
        device: Arc<D>,
        model: Arc<Model<D>>,
        tokenizer: Option<Arc<Tokenizer>>,
        identity: &[u8],
        config: &EngineConfig,
    ) -> Result<Self, EngineError> {
        let mut shape = Shape::new(&model.config, config, identity)?;
        let worker = ModelWorker::new(device, model, &shape, config.cache_format)?;
        let mut worker = worker.with_settings(config);
        if shape.adapt_drafts && shape.drafts > 0 {
            shape.costs = costs(&mut worker, &shape, config)?;
        }
        (shape.slot_bytes, shape.page_bytes) = worker.cache_bytes();
        let tiers = match &config.prefix_cache {
            PrefixCache::Off | PrefixCache::Device => Tiers::default(),
            PrefixCache::Host => Tiers::host(config.host_cache_bytes),
            PrefixCache::Disk(dir) => {
                let bytes = (config.host_cache_bytes, config.disk_cache_bytes);
                Tiers::disk(bytes.0, dir, bytes.1, &shape.identity).map_err(|reason| {
                    EngineError::CacheDir { dir: dir.display().to_string(), reason }
                })?
            }
        };
        Self::with_worker(worker, shape, tiers, tokenizer, config.overlap)
    }
}

/// What steps cost on this device: as told, or measured now or at an earlier start.
fn costs<D: Device>(
    worker: &mut ModelWorker<D>,
    shape: &Shape,
    config: &EngineConfig,
) -> Result<CostCurve, EngineError> {
    if let Some(CostCurve { steps, drafts }) = config.known_costs.clone() {
        return Ok(CostCurve::new(steps, drafts));
    }
    let Some(dir) = &config.costs_dir else { return Ok(worker.measure_costs(shape, |_| None)?) };
    let mut key = shape.identity.clone();
    let sizes = format!(
        " seqs {} drafts {} {:?} graphs {} threads {:?} on {} processors {:?}",
        shape.max_seqs,
        shape.drafts,
        config.draft_scheme,
        config.graphs,
        config.threads,
        std::thread::available_parallelism().map_or(0, usize::from),
        processor(),
    );
    key.extend(sizes.bytes());
    let stored = StoredCosts::new(dir, &key);
    let mut found = false;
    let curve = worker.measure_costs(shape, |first| {
        let curve = stored.read(first);
        found = curve.is_some();
        curve
    })?;
    if !found {
        // A directory that cannot be written costs time at the next start, nothing else.
        let _ = stored.write(&curve);
    }
    Ok(curve)
}

/// The processor's name, where the system tells it.
fn processor() -> Option<String> {
    let info = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    info.lines().find(|line| line.starts_with("model name")).map(str::to_owned)
}
