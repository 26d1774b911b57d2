//! Which processor to run on, as a user names it.

use crate::cuda::Cuda;
use std::fmt;
use std::str::FromStr;

/// A device by name: `auto`, `cpu` or `cuda:N` (`cuda` is `cuda:0`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DeviceChoice {
    /// The first GPU that can run the kernels, else the CPU.
    Auto,
    /// The CPU.
    #[default]
    Cpu,
    /// A GPU by its number.
    Cuda(usize),
}

/// A device name that is none.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("no device is called {0:?}: say auto, cpu or cuda:N")]
pub struct UnknownDevice(String);

impl DeviceChoice {
    /// `cpu` or `cuda:N`: what `auto` means on this machine, and other choices as they are.
    pub fn resolve(self) -> Self {
        if self != DeviceChoice::Auto {
            return self;
        }
        let devices = Cuda::devices().unwrap_or_default();
        let usable = devices.iter().find(|d| d.is_supported());
        usable.map_or(DeviceChoice::Cpu, |d| DeviceChoice::Cuda(d.ordinal))
    }
}

impl FromStr for DeviceChoice {
    type Err = UnknownDevice;

    fn from_str(text: &str) -> Result<Self, UnknownDevice> {
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            _ => {
                let number = text.strip_prefix("cuda:").and_then(|n| n.parse().ok());
                number.map(Self::Cuda).ok_or_else(|| UnknownDevice(text.to_owned()))
            }
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceChoice::Auto => f.write_str("auto"),
            DeviceChoice::Cpu => f.write_str("cpu"),
            DeviceChoice::Cuda(n) => write!(f, "cuda:{n}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_written() {
        for text in ["auto", "cpu", "cuda:0", "cuda:7"] {
            assert_eq!(text.parse::<DeviceChoice>().map(|d| d.to_string()), Ok(text.to_owned()));
        }
        assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
        for text in ["", "gpu", "cuda:", "cuda:x", "CPU"] {
            let error = text.parse::<DeviceChoice>().expect_err("is none").to_string();
            assert!(error.contains("cuda:N"), "{error}");
        }
    }

    #[test]
    fn auto_is_one_of_the_others() {
        assert_ne!(DeviceChoice::Auto.resolve(), DeviceChoice::Auto);
        assert_eq!(DeviceChoice::Cuda(9).resolve(), DeviceChoice::Cuda(9));
    }
}
