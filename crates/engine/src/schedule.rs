//! Decides what each step does. No device in scope: plain data in ([`Done`](crate::work::Done)), plain data out
//! ([`Work`](crate::work::Work)).

mod admit;
mod commit;
mod fork;
mod hit;
mod plan;
mod policy;
mod preempt;
mod remember;
mod shape;

pub use shape::{Shape, geometry};

use crate::cache::pages::Pools;
use crate::cache::prefix::PrefixIndex;
use crate::cache::tiers::Tiers;
use crate::drafting::Policy;
use crate::metrics::Metrics;
use crate::request::{FinishReason, RequestError, RequestId};
use crate::sequence::{Arrival, Sequence};
use crate::work::{Op, SequenceWork};
use policy::TimeShares;
use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

/// Requests, and the pages and slots that they use.
pub struct Scheduler {
    shape: Shape,
    sequences: HashMap<RequestId, Sequence>,
    /// Those without a place, the first to be admitted first.
    waiting: BTreeSet<(Reverse<i32>, RequestId)>,
    /// Those with a place, in the same order.
    running: BTreeSet<(Reverse<i32>, RequestId)>,
    /// Those that wait for their grammar before they wait for a place.
    compiling: Vec<RequestId>,
    /// Those that wait for the prompt of another one to be read, by that one.
    forks: HashMap<RequestId, Vec<RequestId>>,
    pools: Pools,
    prefix: Option<PrefixIndex>,
    tiers: Tiers,
    /// For the next step.
    ops: Vec<Op>,
    /// Steps that have been planned and not committed, oldest first.
    in_flight: VecDeque<InFlight>,
    swapped_bytes: usize,
    waiting_tokens: usize,
    shares: TimeShares,
    drafting: Policy,
    metrics: Arc<Metrics>,
}

/// A planned step.
struct InFlight {
    sequences: Vec<SequenceWork>,
    prefill_rows: usize,
    decode_rows: usize,
    /// Prompt rows that go on through the decoder layers.
    decoder_rows: usize,
    /// See [`TimeShares::planned`].
    charge: f64,
}

impl Scheduler {
    /// A scheduler without requests.
    pub fn new(shape: Shape, tiers: Tiers, metrics: Arc<Metrics>) -> Self {
        let prefix = shape.prefix_cache.then(|| {
            let index =
                PrefixIndex::new(shape.page_tokens, shape.device_snapshots, &shape.identity);
            let mut index = index.with_tiers(tiers.enabled());
            tiers.restore(&mut index);
            index
        });
        Self {
            pools: Pools::new(shape.pages, shape.max_seqs + shape.device_snapshots),
            prefix,
            tiers,
            sequences: HashMap::new(),
            waiting: BTreeSet::new(),
            running: BTreeSet::new(),
            compiling: Vec::new(),
            forks: HashMap::new(),
            ops: Vec::new(),
            in_flight: VecDeque::new(),
            swapped_bytes: 0,
            waiting_tokens: 0,
            shares: TimeShares::default(),
            drafting: match shape.adapt_drafts {
                true => Policy::auto(shape.drafts, shape.costs.clone()),
                false => Policy::fixed(shape.drafts),
            },
            metrics,
            shape,
        }
    }

    /// Adds a request whose parameters have been checked.
    pub fn submit(&mut self, arrival: Arrival) {
        let leader = arrival.leader.filter(|&id| self.can_lead(id));
        let sequence = Sequence::new(arrival);
        let waiting = self.sequences.len() - self.running.len();
        let limit = self.shape.max_queued_requests;
        if waiting >= limit {
            self.metrics.failed();
            return sequence.fail(RequestError::QueueFull { waiting, limit });
        }
        let forks = leader.filter(|_| !sequence.wants_prompt_logprobs());
        // What shares a prompt that is waiting or being read adds none.
        let (tokens, limit) = (self.waiting_tokens, self.shape.max_queued_tokens);
        if forks.is_none() && tokens > 0 && tokens + sequence.prompt_len > limit {
            self.metrics.failed();
            return sequence.fail(RequestError::QueueTokensFull { waiting: tokens, limit });
        }
        let id = sequence.id;
        self.sequences.insert(id, sequence);
        match forks {
            Some(leader) => self.forks.entry(leader).or_default().push(id),
            None => self.enqueue(id),
        }
    }

    /// Puts a request in line, once its grammar is there. Its prompt counts from now on.
    fn enqueue(&mut self, id: RequestId) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        if !std::mem::replace(&mut sequence.counted, true) {
            self.waiting_tokens += sequence.prompt_len;
        }
        match sequence.form.settle() {
            Ok(true) => {
                self.waiting.insert((Reverse(sequence.priority), id));
            }
            Ok(false) => self.compiling.push(id),
            Err(error) => self.fail(id, RequestError::Grammar(error)),
        }
    }

    /// Ends a request, if it is still there.
    pub fn abort(&mut self, id: RequestId) {
        self.finish(id, FinishReason::Aborted);
    }

    /// Ends requests whose callers have gone or that have waited too long, and puts those in line
    /// whose grammars are there.
    pub fn sweep(&mut self, now: Instant) {
        for id in std::mem::take(&mut self.compiling) {
            self.enqueue(id);
        }
        let gone = |s: &&Sequence| s.abandoned();
        let ids: Vec<RequestId> = self.sequences.values().filter(gone).map(|s| s.id).collect();
        ids.into_iter().for_each(|id| self.finish(id, FinishReason::Aborted));
        let Some(limit) = self.shape.max_wait else { return };
        let started = |id: &RequestId| self.sequences.get(id).is_some_and(|s| s.started);
        let led = self.forks.iter().filter(|&(leader, _)| started(leader));
        let led: HashSet<RequestId> = led.flat_map(|(_, ids)| ids).copied().collect();
        let late = |s: &&Sequence| {
            !s.started && !led.contains(&s.id) && now.duration_since(s.queued) > limit
        };
        let waited = |s: &Sequence| (s.id, now.duration_since(s.queued).as_secs_f64());
        let late: Vec<_> = self.sequences.values().filter(late).map(waited).collect();
        for (id, seconds) in late {
            let limit = limit.as_secs_f64();
            self.fail(id, RequestError::WaitedTooLong { seconds, limit });
        }
    }

    /// Sends what the last commits produced.
    pub fn emit(&mut self) {
        for (_, id) in &self.running {
            if let Some(sequence) = self.sequences.get_mut(id) {
                sequence.emit();
            }
        }
        let running = self.running.len();
        self.metrics.set_queues(running, self.sequences.len() - running);
    }

    /// Fails every request.
    pub fn fail_all(&mut self, error: &RequestError) {
        let ids: Vec<RequestId> = self.sequences.keys().copied().collect();
        ids.into_iter().for_each(|id| self.fail(id, error.clone()));
    }

    /// Whether there is nothing to do until a request arrives.
    pub fn is_idle(&self) -> bool {
        self.sequences.is_empty() && self.ops.is_empty() && self.in_flight.is_empty()
    }

    /// Ends a request: frees its place, keeps its text for later ones, tells the caller.
    fn finish(&mut self, id: RequestId, reason: FinishReason) {
        if reason != FinishReason::Aborted {
            self.remember_turn(id);
        }
        if let Some(sequence) = self.remove(id) {
            self.metrics.ended(reason);
            sequence.finish(reason);
        }
    }

    /// Ends a request with an error.
    fn fail(&mut self, id: RequestId, error: RequestError) {
        if let Some(sequence) = self.remove(id) {
            self.metrics.failed();
            sequence.fail(error);
        }
    }

    /// Takes a request out. Steps in flight may still write to its pages and slot: later steps run
    /// after them, so others may have those at once.
    fn remove(&mut self, id: RequestId) -> Option<Sequence> {
        let mut sequence = self.sequences.remove(&id)?;
        let rank = (Reverse(sequence.priority), id);
        self.waiting.remove(&rank);
        if sequence.counted {
            self.waiting_tokens -= sequence.prompt_len;
        }
        self.running.remove(&rank);
        self.vacate(&mut sequence);
        self.drop_swapped(&mut sequence);
        self.release_forks(id);
        Some(sequence)
    }

    /// Frees a sequence's pages and slot.
    fn vacate(&mut self, sequence: &mut Sequence) {
        if let Some(place) = sequence.place.take() {
            place.pages.iter().for_each(|&page| self.pools.pages.release(page));
            self.pools.slots.release(place.slot);
            self.ops.push(Op::Close { slot: place.slot });
        }
    }

    /// Takes `count` pages, from the prefix cache if need be; all or none.
    fn take_pages(&mut self, count: usize) -> Option<Vec<u32>> {
        self.make_room(count, 0)
            .then(|| (0..count).filter_map(|_| self.pools.pages.take()).collect())
    }

    /// Frees pages of the prefix cache until `count` are available, and `spare` more where that can
    /// be. Returns whether `count` are; if they cannot be, the cache keeps what it has.
    fn make_room(&mut self, count: usize, spare: usize) -> bool {
        let free = self.pools.pages.available();
        if free < count + spare
            && free + self.pools.pages.reclaimable() >= count
            && let Some(prefix) = &mut self.prefix
        {
            // Dropping some more at once keeps the search for the oldest rare.
            let more = self.shape.pages / 64;
            prefix.evict(count + spare - free + more, &mut self.pools);
        }
        self.pools.pages.available() >= count
    }

    /// Counts of everything held; all zero when no request is there and the prefix cache is off or
    /// has been cleared.
    pub fn held(&self) -> Held {
        let prefix = self.prefix.as_ref().map_or((0, 0), PrefixIndex::on_device);
        Held {
            sequences: self.sequences.len(),
            pages: self.pools.pages.used(),
            slots: self.pools.slots.used(),
            cached_pages: prefix.0,
            cached_states: prefix.1,
            swapped_bytes: self.swapped_bytes,
            queued_tokens: self.waiting_tokens,
        }
    }

    /// Everything that the prefix cache knows of; see [`PrefixIndex::known`].
    pub fn known_prefixes(&self) -> usize {
        self.prefix.as_ref().map_or(0, PrefixIndex::known)
    }

    /// Drops the prefix cache's entries on the device.
    pub fn clear_prefix_cache(&mut self) {
        if let Some(prefix) = &mut self.prefix {
            prefix.clear(&mut self.pools);
        }
    }
}

/// What a scheduler holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Requests.
    pub sequences: usize,
    /// Pages, those of the prefix cache included.
    pub pages: usize,
    /// Slots, those of snapshots included.
    pub slots: usize,
    /// Pages of the prefix cache's nodes.
    pub cached_pages: usize,
    /// Snapshots of the prefix cache.
    pub cached_states: usize,
    /// Bytes of requests that lost their place.
    pub swapped_bytes: usize,
    /// Prompt tokens in the queue.
    pub queued_tokens: usize,
}
