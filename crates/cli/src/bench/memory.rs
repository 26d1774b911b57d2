//! Private memory of this process: what is not a mapped file.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

/// Watches the private memory.
pub struct PeakPrivate {
    peak: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl PeakPrivate {
    /// Looks every few milliseconds from now on.
    pub fn start() -> Self {
        let (peak, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (state, end) = (peak.clone(), stop.clone());
        let watch = move || {
            while !end.load(Relaxed) {
                state.fetch_max(private_bytes().unwrap_or(0), Relaxed);
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        let thread = std::thread::Builder::new().name("memory".into()).spawn(watch).ok();
        Self { peak, stop, thread }
    }

    /// The most so far, in MB; 0 where the system does not say.
    pub fn megabytes(&self) -> f64 {
        self.peak.fetch_max(private_bytes().unwrap_or(0), Relaxed);
        self.peak.load(Relaxed) as f64 / 1e6
    }
}

impl Drop for PeakPrivate {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn private_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    let kilobytes: u64 = line.trim().trim_end_matches(" kB").parse().ok()?;
    Some(kilobytes * 1024)
}
