//! Figures of a running engine: counters and histograms. Reading them disturbs nothing.

use crate::request::FinishReason;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// A number that only grows, or is set.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    fn add(&self, n: usize) {
        self.0.fetch_add(n as u64, Relaxed);
    }

    fn set(&self, n: usize) {
        self.0.store(n as u64, Relaxed);
    }

    /// Its value.
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Upper ends of a histogram's buckets, in seconds; the last bucket has none.
pub const BUCKETS: [f64; 16] = [
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 100.0,
];

/// Durations by size.
#[derive(Debug, Default)]
pub struct Histogram {
    buckets: [AtomicU64; BUCKETS.len() + 1],
    micros: AtomicU64,
}

impl Histogram {
    fn add(&self, seconds: f64) {
        let bucket = BUCKETS.iter().position(|&end| seconds <= end).unwrap_or(BUCKETS.len());
        self.buckets[bucket].fetch_add(1, Relaxed);
        self.micros.fetch_add((seconds * 1e6) as u64, Relaxed);
    }

    /// Durations in each bucket of [`BUCKETS`], and above all of them.
    pub fn counts(&self) -> [u64; BUCKETS.len() + 1] {
        std::array::from_fn(|i| self.buckets[i].load(Relaxed))
    }

    /// All durations together, in seconds.
    pub fn sum(&self) -> f64 {
        self.micros.load(Relaxed) as f64 / 1e6
    }
}

/// Longest draft that acceptance is counted for by position.
pub const DRAFT_POSITIONS: usize = 16;

/// Figures of a running engine.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Requests with a place, now.
    pub running: Counter,
    /// Requests without one, now.
    pub waiting: Counter,
    /// Requests that ended by themselves.
    pub finished: Counter,
    /// Requests whose caller gave up.
    pub aborted: Counter,
    /// Requests that ended with an error, those that a full queue refused included.
    pub failed: Counter,
    /// Prompt tokens of admitted requests.
    pub prompt_tokens: Counter,
    /// Of these, tokens whose state came from the prefix cache.
    pub cached_tokens: Counter,
    /// Prompt rows run (those computed again included).
    pub prefill_rows: Counter,
    /// Other rows run.
    pub decode_rows: Counter,
    /// Rows that went on through the decoder layers.
    pub decoder_rows: Counter,
    /// Tokens produced.
    pub output_tokens: Counter,
    /// Tokens drafted, by position in the block.
    pub drafted: [Counter; DRAFT_POSITIONS],
    /// Drafts verified, by position in the block.
    pub verified: [Counter; DRAFT_POSITIONS],
    /// Drafts accepted, by position in the block.
    pub accepted: [Counter; DRAFT_POSITIONS],
    /// Places taken away with the state saved on the host.
    pub swapped: Counter,
    /// Places taken away with the state to be computed again.
    pub recomputed: Counter,
    /// Entries of the prefix cache that could not be written to disk.
    pub disk_failed: Counter,
    /// Entries of the prefix cache that came faster than the disk takes them.
    pub disk_skipped: Counter,
    /// Seconds of steps that only decode.
    pub decode_steps: Histogram,
    /// Seconds of steps that read prompts.
    pub prefill_steps: Histogram,
    /// Seconds of drafting in a step.
    pub draft_steps: Histogram,
    /// Seconds that requests waited for their first place.
    pub queue_times: Histogram,
}

impl Metrics {
    pub(crate) fn set_queues(&self, running: usize, waiting: usize) {
        self.running.set(running);
        self.waiting.set(waiting);
    }

    pub(crate) fn queued_for(&self, time: Duration) {
        self.queue_times.add(time.as_secs_f64());
    }

    pub(crate) fn prefix(&self, prompt: usize, cached: usize) {
        self.prompt_tokens.add(prompt);
        self.cached_tokens.add(cached);
    }

    pub(crate) fn disk_losses(&self, losses: crate::cache::tiers::Losses) {
        self.disk_failed.set(losses.failed);
        self.disk_skipped.set(losses.skipped);
    }

    pub(crate) fn preempted(&self, swapped: bool) {
        if swapped { &self.swapped } else { &self.recomputed }.add(1);
    }

    pub(crate) fn drafts(&self, drafted: usize, verified: usize, accepted: usize) {
        self.drafted.iter().take(drafted).for_each(|c| c.add(1));
        self.verified.iter().take(verified).for_each(|c| c.add(1));
        self.accepted.iter().take(accepted).for_each(|c| c.add(1));
    }

    pub(crate) fn produced(&self) {
        self.output_tokens.add(1);
    }

    pub(crate) fn failed(&self) {
        self.failed.add(1);
    }

    pub(crate) fn ended(&self, reason: FinishReason) {
        match reason {
            FinishReason::Aborted => self.aborted.add(1),
            _ => self.finished.add(1),
        }
    }

    pub(crate) fn step(
        &self,
        prefill_rows: usize,
        decode_rows: usize,
        decoder_rows: usize,
        seconds: f64,
        draft_seconds: f64,
    ) {
        self.prefill_rows.add(prefill_rows);
        self.decode_rows.add(decode_rows);
        self.decoder_rows.add(decoder_rows);
        if prefill_rows > 0 { &self.prefill_steps } else { &self.decode_steps }.add(seconds);
        if draft_seconds > 0.0 {
            self.draft_steps.add(draft_seconds);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_fall_into_their_buckets() {
        let histogram = Histogram::default();
        [0.0001, 0.003, 0.003, 1000.0].into_iter().for_each(|s| histogram.add(s));
        let counts = histogram.counts();
        assert_eq!((counts[0], counts[3], counts[BUCKETS.len()]), (1, 2, 1));
        assert!((histogram.sum() - 1000.0061).abs() < 1e-3);
    }
}
