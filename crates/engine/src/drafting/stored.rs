//! Curves of earlier starts.

use super::CostCurve;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Older curves are measured again.
const LIFETIME: Duration = Duration::from_secs(7 * 24 * 3600);

/// A curve whose first point is off by more than this factor belongs to another state of the
/// machine.
const DRIFT: f64 = 1.3;

/// A file in the cache directory that holds the curve of one device, checkpoint and shape.
#[derive(Clone, Debug)]
pub struct StoredCosts {
    path: PathBuf,
}

#[derive(Serialize, Deserialize)]
struct Contents {
    /// When it was measured, in seconds of Unix time.
    time: u64,
    curve: CostCurve,
}

impl StoredCosts {
    /// The file in `dir` for whatever `key` names.
    pub fn new(dir: &Path, key: &[u8]) -> Self {
        let digest = Sha256::digest(key);
        let name: String = digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
        Self { path: dir.join(format!("costs-{name}.json")) }
    }

    /// The curve, if it is there, young enough, and `first`, the seconds of a step of one row as
    /// measured now, agrees with it.
    pub fn read(&self, first: f64) -> Option<CostCurve> {
        let bytes = std::fs::read(&self.path).ok()?;
        let Contents { time, curve } = serde_json::from_slice(&bytes).ok()?;
        let curve = CostCurve::new(curve.steps, curve.drafts);
        let age = now().checked_sub(time)?;
        let ratio = curve.step(1) / first;
        let valid = curve.steps.iter().chain(&curve.drafts).all(|&(_, s)| s.is_finite() && s > 0.0);
        let young = age < LIFETIME.as_secs();
        (valid && young && (1.0 / DRIFT..DRIFT).contains(&ratio)).then_some(curve)
    }

    /// Writes the curve. A failure costs only time at the next start.
    pub fn write(&self, curve: &CostCurve) -> std::io::Result<()> {
        let dir = self.path.parent().unwrap_or(Path::new("."));
        std::fs::create_dir_all(dir)?;
        let contents = Contents { time: now(), curve: curve.clone() };
        // Another process may read or write at the same time.
        let part = self.path.with_extension(format!("{}.part", std::process::id()));
        std::fs::write(&part, serde_json::to_vec(&contents)?)?;
        std::fs::rename(part, &self.path)
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn curves_come_back_while_they_fit() {
        let dir = tempfile::tempdir().expect("a directory");
        let dir = dir.path().join("new");
        let file = StoredCosts::new(&dir, b"a");
        assert_eq!(file.read(1.0), None);
        let curve = CostCurve::new(vec![(1, 1.0), (2, 1.7)], vec![(1, 0.3)]);
        file.write(&curve).expect("can be written");
        assert_eq!(file.read(1.1), Some(curve));
        assert_eq!(file.read(1.5), None, "the machine was slower then");
        assert_eq!(file.read(0.5), None);
        assert_eq!(StoredCosts::new(&dir, b"b").read(1.0), None, "another checkpoint");

        let old = Contents { time: now() - LIFETIME.as_secs() - 1, curve: Default::default() };
        std::fs::write(&file.path, serde_json::to_vec(&old).expect("JSON")).expect("written");
        assert_eq!(file.read(1.0), None);
        std::fs::write(&file.path, b"{").expect("written");
        assert_eq!(file.read(1.0), None);
    }
}
