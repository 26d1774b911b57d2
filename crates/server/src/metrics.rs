//! What the server counts, and the text format of Prometheus.

use crate::error::ApiError;
use crate::inference::{Figures, Times};
use crate::run::Accounts;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Upper ends of the buckets of times, in seconds.
const ENDS: [f64; 14] =
    [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];

/// Counters of the server. One lock, taken a few times a request.
#[derive(Debug, Default)]
pub struct Metrics {
    counts: Mutex<Counts>,
    produced: AtomicU64,
}

#[derive(Debug, Default)]
struct Counts {
    /// By route and status.
    http: BTreeMap<(&'static str, u16), u64>,
    /// By protocol and outcome.
    answers: BTreeMap<(&'static str, &'static str), u64>,
    /// By protocol: prompt, cached and output tokens.
    tokens: BTreeMap<&'static str, [u64; 3]>,
    first_token: Spread,
    total: Spread,
    ended_in_thinking: u64,
    replayed_tokens: u64,
}

#[derive(Debug, Default)]
struct Spread {
    counts: [u64; ENDS.len() + 1],
    sum: f64,
}

impl Spread {
    fn add(&mut self, time: Duration) {
        let seconds = time.as_secs_f64();
        let bucket = ENDS.iter().position(|&end| seconds <= end).unwrap_or(ENDS.len());
        self.counts[bucket] += 1;
        self.sum += seconds;
    }

    fn times(&self, name: &'static str, help: &'static str) -> Times {
        let counts = self.counts.to_vec();
        Times { name, help, ends: ENDS.to_vec(), counts, sum: self.sum }
    }
}

impl Metrics {
    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tokens that answers have grown by.
    pub fn produce(&self, n: usize) {
        self.produced.fetch_add(n as u64, Relaxed);
    }

    /// Tokens of all answers until now, of those that still grow too.
    pub fn produced(&self) -> u64 {
        self.produced.load(Relaxed)
    }

    /// A response went out on `route`.
    pub fn http(&self, route: &'static str, status: u16) {
        *self.lock().http.entry((route, status)).or_default() += 1;
    }

    /// An answer ended, or was cut.
    pub fn answer(&self, protocol: &'static str, outcome: &'static str, accounts: &Accounts) {
        let mut counts = self.lock();
        *counts.answers.entry((protocol, outcome)).or_default() += 1;
        let tokens = counts.tokens.entry(protocol).or_default();
        tokens[0] += accounts.prompt_tokens as u64;
        tokens[1] += accounts.cached_tokens as u64;
        tokens[2] += accounts.output_tokens as u64;
        if let Some(time) = accounts.first_token {
            counts.first_token.add(time);
        }
        counts.total.add(accounts.total);
    }

    /// A turn ended before its thinking did.
    pub fn ended_in_thinking(&self) {
        self.lock().ended_in_thinking += 1;
    }

    /// Tokens of earlier answers stood in a prompt as they had been produced.
    pub fn replayed(&self, tokens: usize) {
        self.lock().replayed_tokens += tokens as u64;
    }

    /// Everything, in Prometheus's text format.
    pub fn text(&self, open: usize, healthy: bool, figures: &Figures) -> String {
        let mut out = Text::default();
        out.one("healthy", "gauge", "Whether the engine answers", u64::from(healthy));
        out.one("open_requests", "gauge", "Requests that the server works on", open as u64);
        {
            let counts = self.lock();
            out.head("http_requests_total", "counter", "Responses by route and status");
            for ((route, status), n) in &counts.http {
                out.line(
                    "http_requests_total",
                    &format!("route=\"{route}\",status=\"{status}\""),
                    n,
                );
            }
            out.head("answers_total", "counter", "Answers by protocol and how they ended");
            for ((protocol, outcome), n) in &counts.answers {
                let labels = format!("protocol=\"{protocol}\",outcome=\"{outcome}\"");
                out.line("answers_total", &labels, n);
            }
            let kinds = [
                ("prompt_tokens_total", "Tokens of prompts"),
                ("cached_prompt_tokens_total", "Of these, tokens from the prefix cache"),
                ("output_tokens_total", "Tokens of answers"),
            ];
            for (i, (name, help)) in kinds.into_iter().enumerate() {
                out.head(name, "counter", help);
                for (protocol, tokens) in &counts.tokens {
                    out.line(name, &format!("protocol=\"{protocol}\""), &tokens[i]);
                }
            }
            let name = "ended_in_thinking_total";
            out.one(name, "counter", "Turns that ended inside thinking", counts.ended_in_thinking);
            let help = "Prompt tokens taken from earlier answers as they were produced";
            out.one("replayed_tokens_total", "counter", help, counts.replayed_tokens);
            out.times(&counts.first_token.times("first_token", "Until the first token"));
            out.times(&counts.total.times("answer", "Until the end of an answer"));
        }
        out.engine(figures);
        out.0
    }
}

/// How an answer ended, for the counter.
pub fn outcome(result: Result<deepinfer::request::FinishReason, &ApiError>) -> &'static str {
    use deepinfer::request::FinishReason;
    match result {
        Ok(FinishReason::Stop) => "stop",
        Ok(FinishReason::Length) => "length",
        Ok(FinishReason::Aborted) => "aborted",
        Err(ApiError::Busy { .. }) => "refused",
        Err(_) => "failed",
    }
}

#[derive(Default)]
struct Text(String);

impl Text {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "# HELP deepinfer_{name} {help}\n# TYPE deepinfer_{name} {kind}");
    }

    fn line(&mut self, name: &str, labels: &str, value: &impl std::fmt::Display) {
        let _ = match labels {
            "" => writeln!(self.0, "deepinfer_{name} {value}"),
            _ => writeln!(self.0, "deepinfer_{name}{{{labels}}} {value}"),
        };
    }

    fn one(&mut self, name: &str, kind: &str, help: &str, value: u64) {
        self.head(name, kind, help);
        self.line(name, "", &value);
    }

    fn times(&mut self, times: &Times) {
        let name = format!("{}_seconds", times.name);
        self.head(&name, "histogram", times.help);
        let mut below = 0;
        for (i, count) in times.counts.iter().enumerate() {
            below += count;
            let end = times.ends.get(i).map_or("+Inf".to_owned(), f64::to_string);
            self.line(&format!("{name}_bucket"), &format!("le=\"{end}\""), &below);
        }
        self.line(&format!("{name}_sum"), "", &times.sum);
        self.line(&format!("{name}_count"), "", &below);
    }

    fn engine(&mut self, figures: &Figures) {
        let gauges = [
            ("engine_running_requests", "Requests that have a place", figures.running),
            ("engine_waiting_requests", "Requests that wait for one", figures.waiting),
        ];
        for (name, help, value) in gauges {
            self.one(name, "gauge", help, value);
        }
        let counters = [
            ("engine_finished_requests_total", "Requests that ended", figures.finished),
            ("engine_aborted_requests_total", "Requests given up", figures.aborted),
            ("engine_failed_requests_total", "Requests that failed", figures.failed),
            ("engine_prompt_tokens_total", "Prompt tokens admitted", figures.prompt_tokens),
            (
                "engine_cached_tokens_total",
                "Of these, from the prefix cache",
                figures.cached_tokens,
            ),
            ("engine_prefill_rows_total", "Prompt rows computed", figures.prefill_rows),
            ("engine_decode_rows_total", "Other rows computed", figures.decode_rows),
            ("engine_output_tokens_total", "Tokens produced", figures.output_tokens),
            ("engine_swapped_total", "Requests moved to host memory", figures.swapped),
            ("engine_recomputed_total", "Requests to be computed again", figures.recomputed),
            (
                "engine_disk_writes_failed_total",
                "Entries of the prefix cache that could not be written to disk",
                figures.disk_failed,
            ),
            (
                "engine_disk_writes_skipped_total",
                "Entries of the prefix cache that came faster than the disk takes them",
                figures.disk_skipped,
            ),
        ];
        for (name, help, value) in counters {
            self.one(name, "counter", help, value);
        }
        let drafts = [
            ("engine_drafted_tokens_total", "Tokens drafted, by position", &figures.drafted),
            ("engine_verified_tokens_total", "Drafts verified, by position", &figures.verified),
            ("engine_accepted_tokens_total", "Drafts accepted, by position", &figures.accepted),
        ];
        for (name, help, counts) in drafts {
            self.head(name, "counter", help);
            for (position, n) in counts.iter().enumerate() {
                self.line(name, &format!("position=\"{position}\""), n);
            }
        }
        for times in &figures.times {
            self.times(times);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_add_up() {
        let metrics = Metrics::default();
        let accounts = |millis| Accounts {
            prompt_tokens: 3,
            output_tokens: 2,
            first_token: Some(Duration::from_millis(millis)),
            total: Duration::from_millis(millis),
            ..Accounts::default()
        };
        metrics.answer("chat", "stop", &accounts(1));
        metrics.answer("chat", "stop", &accounts(70));
        metrics.answer("chat", "length", &accounts(1_000_000));
        let figures = Figures { disk_failed: 3, disk_skipped: 4, ..Figures::default() };
        let text = metrics.text(5, true, &figures);
        for line in [
            "deepinfer_open_requests 5",
            "deepinfer_engine_disk_writes_failed_total 3",
            "deepinfer_engine_disk_writes_skipped_total 4",
            "deepinfer_answers_total{protocol=\"chat\",outcome=\"stop\"} 2",
            "deepinfer_prompt_tokens_total{protocol=\"chat\"} 9",
            "deepinfer_first_token_seconds_bucket{le=\"0.05\"} 1",
            "deepinfer_first_token_seconds_bucket{le=\"0.1\"} 2",
            "deepinfer_first_token_seconds_bucket{le=\"+Inf\"} 3",
            "deepinfer_first_token_seconds_count 3",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is missing in\n{text}");
        }
    }
}
