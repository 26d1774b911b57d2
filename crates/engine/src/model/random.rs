//! Models of random weights, made in a device's memory: for measurements at sizes that no file
//! holds.

use super::Model;
use super::load::{LoadError, Progress, Weights};
use crate::checkpoint::CheckpointError;
use crate::checkpoint::layout::TensorSpec;
use crate::engram::Engram;
use crate::synth::{self, Plan};
use deepinfer_device::random::RandomMatrix;
use deepinfer_device::{Device, Expert};
use std::collections::HashMap;

type Result<T> = std::result::Result<T, LoadError>;

impl<D: Device> Model<D> {
    /// The model of the checkpoint that [`synth::write_plan`] makes of `plan` and `seed`, without
    /// the checkpoint. `engram` is the n-gram front end of the plan's configuration and tokenizer.
    ///
    /// # Errors
    /// If the device's memory does not hold it.
    pub fn random(
        device: &D,
        plan: &Plan,
        seed: u64,
        engram: Option<Engram>,
        progress: Progress<'_>,
    ) -> Result<Self> {
        let specs = plan.specs.iter().map(|spec| (spec.name.as_str(), spec)).collect();
        let streams = plan.config.text_config.hc_mult;
        let mut weights = RandomWeights { specs, streams, seed };
        Self::build(device, &mut weights, plan.config.clone(), engram, progress)
    }
}

/// The tensors of a plan.
struct RandomWeights<'a> {
    specs: HashMap<&'a str, &'a TensorSpec>,
    streams: usize,
    seed: u64,
}

impl RandomWeights<'_> {
    fn spec(&self, name: &str, shape: &[usize]) -> Result<&TensorSpec> {
        let spec = self.specs.get(name).filter(|spec| spec.shape == shape);
        let missing = || CheckpointError::MissingTensor { tensor: name.to_owned() };
        Ok(spec.copied().ok_or_else(missing)?)
    }

    fn random_matrix(&self, name: &str, rows: usize, cols: usize) -> Result<RandomMatrix> {
        Ok(synth::matrix(self.spec(name, &[rows, cols])?, self.streams, self.seed))
    }
}

impl<D: Device> Weights<D> for RandomWeights<'_> {
    fn matrix(&mut self, device: &D, name: &str, rows: usize, cols: usize) -> Result<D::Matrix> {
        Ok(device.random_matrix(&self.random_matrix(name, rows, cols)?)?)
    }

    fn array(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let tensors = synth::stored(self.spec(name, shape)?, self.streams, self.seed);
        let values = &tensors[0];
        let bytes = values.random.bytes(values.bytes() as usize);
        Ok(match values.dtype {
            "F32" => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            _ => {
                let number = |b: &[u8; 2]| half::bf16::from_le_bytes(*b).to_f32();
                bytes.as_chunks().0.iter().map(number).collect()
            }
        })
    }

    fn experts(
        &mut self,
        device: &D,
        prefix: &str,
        count: usize,
        intermediate: usize,
        hidden: usize,
    ) -> Result<D::Experts> {
        let (i, h) = (intermediate, hidden);
        let expert = |j: usize| {
            Ok(Expert {
                w1: self.random_matrix(&format!("{prefix}.{j}.w1.weight"), i, h)?,
                w3: self.random_matrix(&format!("{prefix}.{j}.w3.weight"), i, h)?,
                w2: self.random_matrix(&format!("{prefix}.{j}.w2.weight"), h, i)?,
            })
        };
        let all: Vec<Expert<RandomMatrix>> = (0..count).map(expert).collect::<Result<_>>()?;
        Ok(device.random_experts(&all)?)
    }

    fn has(&self, name: &str) -> bool {
        self.specs.contains_key(name)
    }
}
