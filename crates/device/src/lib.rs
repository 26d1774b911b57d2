//! Number formats, tensors and the operations of DeepSeek-V4.1, on a CPU and on NVIDIA GPUs.
//!
//! [`ops::Device`] lists every operation of the model with its contract; [`cpu::Cpu`] is the
//! reference. A model is written once over that trait.

pub mod bench;
pub mod choice;
pub mod cpu;
pub mod cuda;
pub mod error;
pub mod formats;
mod inputs;
pub mod ops;
pub mod random;
pub mod selftest;
pub mod splitmix;
pub mod tensor;

pub use choice::{DeviceChoice, UnknownDevice};
pub use cpu::Cpu;
pub use cuda::Cuda;
pub use error::DeviceError;
pub use ops::Device;
pub use tensor::{Element, Expert, Format, RowFormat, StoredMatrix};
