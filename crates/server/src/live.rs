//! The engine behind the seam.

use crate::inference::{Figures, Inference, Info, Times};
use deepinfer::engine::Engine;
use deepinfer::grammar::GrammarSpec;
use deepinfer::metrics::{BUCKETS, Counter, Histogram};
use deepinfer::request::{Request, RequestError, RequestHandle};

/// A running engine.
pub struct Live {
    engine: Engine,
    info: Info,
}

/// The protocols speak text, so an engine without a tokenizer cannot be served.
#[derive(Debug, thiserror::Error)]
#[error("the engine has no tokenizer, so it cannot be served; open it from a checkpoint with one")]
pub struct NoTokenizer;

impl Live {
    /// Serves `engine`. `fingerprint` names weights and numerics.
    pub fn new(engine: Engine, fingerprint: Option<String>) -> Result<Self, NoTokenizer> {
        let tokenizer = engine.tokenizer().ok_or(NoTokenizer)?.clone();
        let bounds = engine.bounds();
        let (vocab, max_tokens) = (bounds.vocab, bounds.max_tokens);
        let queue_limit = engine.queue_limit();
        Ok(Self { info: Info { tokenizer, vocab, max_tokens, queue_limit, fingerprint }, engine })
    }
}

impl Inference for Live {
    fn submit(&self, request: Request) -> Result<RequestHandle, RequestError> {
        self.engine.submit(request)
    }

    fn submit_all(&self, request: Request) -> Result<Vec<RequestHandle>, RequestError> {
        self.engine.submit_all(request)
    }

    fn check_grammar(&self, grammar: &GrammarSpec) -> Result<(), RequestError> {
        self.engine.check_grammar(grammar)
    }

    fn info(&self) -> &Info {
        &self.info
    }

    fn figures(&self) -> Figures {
        let m = self.engine.metrics();
        // Positions after the last draft ever made say nothing.
        let counts = |counters: &[Counter]| -> Vec<u64> {
            let used = m.drafted.iter().rposition(|c| c.get() > 0).map_or(0, |last| last + 1);
            counters.iter().take(used).map(Counter::get).collect()
        };
        let times = |name, help, histogram: &Histogram| Times {
            name,
            help,
            ends: BUCKETS.to_vec(),
            counts: histogram.counts().to_vec(),
            sum: histogram.sum(),
        };
        Figures {
            running: m.running.get(),
            waiting: m.waiting.get(),
            finished: m.finished.get(),
            aborted: m.aborted.get(),
            failed: m.failed.get(),
            prompt_tokens: m.prompt_tokens.get(),
            cached_tokens: m.cached_tokens.get(),
            prefill_rows: m.prefill_rows.get(),
            decode_rows: m.decode_rows.get(),
            output_tokens: m.output_tokens.get(),
            drafted: counts(&m.drafted),
            verified: counts(&m.verified),
            accepted: counts(&m.accepted),
            swapped: m.swapped.get(),
            recomputed: m.recomputed.get(),
            disk_failed: m.disk_failed.get(),
            disk_skipped: m.disk_skipped.get(),
            times: vec![
                times("engine_decode_step", "Steps that only decode", &m.decode_steps),
                times("engine_prefill_step", "Steps that read prompts", &m.prefill_steps),
                times("engine_draft_step", "Drafting in a step", &m.draft_steps),
                times("engine_queue", "Waiting for a first place", &m.queue_times),
            ],
        }
    }

    fn check(&self) -> Result<(), String> {
        match self.engine.held() {
            Some(_) => Ok(()),
            None => Err(self.engine.ended().unwrap_or_else(|| "it has stopped".into())),
        }
    }

    fn beats(&self) -> u64 {
        self.engine.pulse().beats()
    }
}
