//! Why a comparison could not be made.

use deepinfer_device::DeviceError;
use std::path::PathBuf;

/// Why a comparison could not be made. That numbers differ is no error: see [`Report`](super::Report).
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// A file could not be read.
    #[error("{path}: {source}; a reference folder holds reference.json and reference.safetensors")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// `reference.json` is not as expected.
    #[error("{path}: {source}")]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// `reference.safetensors` is damaged.
    #[error("{path}: {source}")]
    Tensors {
        /// The file.
        path: PathBuf,
        /// Why.
        source: safetensors::SafeTensorError,
    },
    /// A tensor that goes with another one is not there.
    #[error("{path}: tensor {name} is missing")]
    Missing {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
    },
    /// A tensor has another shape than the checkpoint gives.
    #[error(
        "reference tensor {name} has shape {found:?}, the checkpoint gives {expected:?}: they do \
         not belong together"
    )]
    Shape {
        /// The tensor.
        name: String,
        /// Its shape.
        found: Vec<usize>,
        /// What the checkpoint gives.
        expected: Vec<usize>,
    },
    /// A tensor has an unexpected element type.
    #[error("reference tensor {name} has type {found}, expected {expected}")]
    Dtype {
        /// The tensor.
        name: String,
        /// Its type.
        found: String,
        /// What would do.
        expected: &'static str,
    },
    /// A tensor of a layer that the checkpoint lacks.
    #[error(
        "reference tensor {name}: the checkpoint has {layers} layers; they do not belong together"
    )]
    Layer {
        /// The tensor.
        name: String,
        /// Layers of the checkpoint.
        layers: usize,
    },
    /// A prompt cannot be run.
    #[error("prompt {name} of the reference: {reason}")]
    Prompt {
        /// Its name.
        name: String,
        /// Why not.
        reason: String,
    },
    /// The device stores activations in bf16, and free runs ask for f32.
    #[error("the device stores activations in bf16: it is compared beside the CPU, layer by layer")]
    Rounds,
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}
