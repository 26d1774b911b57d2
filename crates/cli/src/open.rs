//! Opens a checkpoint and loads the model, with progress.

use crate::args::ModelArgs;
use crate::failure::{Failure, Outcome};
use crate::{demo, text};
use anyhow::Context;
use deepinfer::checkpoint::{Checkpoint, Source};
use deepinfer::engram::Engram;
use deepinfer::model::Model;
use deepinfer::tokenizer::Tokenizer;
use deepinfer_device::{Cpu, Cuda, Device, DeviceChoice};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::num::NonZeroUsize;
use std::sync::Arc;

/// A loaded model.
pub struct Loaded<D: Device> {
    pub device: Arc<D>,
    pub model: Arc<Model<D>>,
}

/// A model on one of the devices.
pub enum AnyLoaded {
    Cpu(Loaded<Cpu>),
    Cuda(Loaded<Cuda>),
}

/// Where the model comes from.
pub fn source(args: &ModelArgs) -> Outcome<Source> {
    match &args.model {
        Some(folder) if !folder.is_dir() => Err(Failure::Usage(format!(
            "--model {}: there is no such folder; give one that holds config.json and safetensors \
             files",
            folder.display()
        ))),
        Some(folder) if !folder.join("config.json").is_file() => Err(Failure::Usage(format!(
            "--model {}: the folder has no config.json; give one that holds a checkpoint",
            folder.display()
        ))),
        Some(folder) => Ok(Source::directory(folder)),
        None if demo::MODEL.is_empty() => Err(Failure::Usage(
            "this program was built without the demo model; give a checkpoint with --model DIR"
                .into(),
        )),
        None => Ok(Source::Embedded(demo::MODEL)),
    }
}

/// Opens the checkpoint: everything but tensor data is read and checked.
pub fn checkpoint(args: &ModelArgs) -> Outcome<Checkpoint> {
    let source = source(args)?;
    let place = source.place();
    Ok(Checkpoint::open(source).with_context(|| format!("cannot open {place}"))?)
}

/// What a checkpoint lacks to be run: the tokenizer, tensors.
pub fn missing(checkpoint: &Checkpoint) -> Vec<String> {
    let tokenizer = (!checkpoint.has_tokenizer()).then(|| "tokenizer.json".to_owned());
    tokenizer.into_iter().chain(checkpoint.missing()).collect()
}

/// The first of these names, and how many there are.
pub fn named(names: &[String]) -> String {
    match names.len() {
        0..=3 => names.join(", "),
        all => format!("{} and {} more", names[..3].join(", "), text::count(all as u64 - 3)),
    }
}

/// Opens and loads, on the device that the command line names.
pub fn any_model(
    args: &ModelArgs,
    device: DeviceChoice,
    threads: Option<NonZeroUsize>,
) -> Outcome<AnyLoaded> {
    match device.resolve() {
        DeviceChoice::Cuda(ordinal) => {
            let device = gpu(ordinal)?;
            Ok(AnyLoaded::Cuda(load(args, device)?))
        }
        DeviceChoice::Cpu | DeviceChoice::Auto => Ok(AnyLoaded::Cpu(model(args, threads)?)),
    }
}

/// Opens and loads, on the CPU.
pub fn model(args: &ModelArgs, threads: Option<NonZeroUsize>) -> Outcome<Loaded<Cpu>> {
    load(args, Cpu::new(threads.map(NonZeroUsize::get)).map_err(anyhow::Error::new)?)
}

fn load<D: Device>(args: &ModelArgs, device: D) -> Outcome<Loaded<D>> {
    let mut checkpoint = checkpoint(args)?;
    let place = checkpoint.source().place();
    let device = Arc::new(device);
    let mut load = || -> anyhow::Result<Loaded<D>> {
        let tokenizer = Tokenizer::from_bytes(checkpoint.tokenizer_json()?)?;
        let bar = bar("loading", 0);
        let engram = Engram::new(&checkpoint.config().text_config, &tokenizer)?;
        let model = Model::load(&*device, &mut checkpoint, engram, &mut |done, all| {
            bar.set_length(all as u64);
            bar.set_position(done as u64);
        })?;
        bar.finish_and_clear();
        Ok(Loaded { device: device.clone(), model: Arc::new(model) })
    };
    Ok(load().with_context(|| format!("cannot load {place}"))?)
}

/// A GPU, with progress while its kernels are loaded.
pub fn gpu(ordinal: usize) -> Outcome<Cuda> {
    let bar = bar("loading kernels", 0);
    let device = Cuda::open_with(ordinal, &mut |done, all| {
        bar.set_length(all as u64);
        bar.set_position(done as u64);
    });
    bar.finish_and_clear();
    Ok(device.map_err(anyhow::Error::new)?)
}

/// A progress bar on standard error; nothing where that is no terminal.
pub fn bar(what: &'static str, length: usize) -> ProgressBar {
    let target = match std::io::stderr().is_terminal() {
        true => ProgressDrawTarget::stderr(),
        false => ProgressDrawTarget::hidden(),
    };
    let bar = ProgressBar::with_draw_target(Some(length as u64), target);
    let style = ProgressStyle::with_template("{prefix} {wide_bar} {pos}/{len} {msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.set_prefix(what);
    bar
}
