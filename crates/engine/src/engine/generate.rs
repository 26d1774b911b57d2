//! Many requests at once, without streaming.

use super::Engine;
use crate::request::{Completion, MOST_SAMPLES, Request, RequestError, RequestHandle};
use std::collections::VecDeque;
use std::time::Duration;

/// How far a batch has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Requests that have ended.
    pub done: usize,
    /// Requests in all.
    pub total: usize,
    /// Tokens produced.
    pub tokens: usize,
}

/// A request under way.
struct Running {
    index: usize,
    request: Request,
    handle: RequestHandle,
    completion: Completion,
}

impl Engine {
    /// Runs all requests and returns one result for each continuation, in order: `n` for a request
    /// that asks for `n`. `progress` is told whenever something has changed.
    pub fn generate(
        &self,
        requests: Vec<Request>,
        mut progress: impl FnMut(Progress),
    ) -> Vec<Result<Completion, RequestError>> {
        let mut told = None;
        let tell = |now| {
            if told != Some(now) {
                told = Some(now);
                progress(now);
            }
            true
        };
        self.generate_while(requests, tell).unwrap_or_default()
    }

    /// The same, as long as `more` says so, which is asked at least every few milliseconds. `None` if
    /// it has said no: the requests have been given up.
    pub fn generate_while(
        &self,
        requests: Vec<Request>,
        mut more: impl FnMut(Progress) -> bool,
    ) -> Option<Vec<Result<Completion, RequestError>>> {
        let mut total = 0;
        let mut left: VecDeque<(usize, Request)> = VecDeque::new();
        for mut request in requests {
            // Also those that are submitted one by one share it.
            request.params.seed.get_or_insert_with(super::random_seed);
            let first = total;
            total += samples(&request);
            left.push_back((first, request));
        }
        let mut results: Vec<Option<Result<Completion, RequestError>>> = vec![None; total];
        let mut running: VecDeque<Running> = VecDeque::new();
        let mut told = Progress { total, ..Progress::default() };
        if !more(told) {
            return None;
        }
        while told.done < total {
            self.fill(&mut left, &mut running, &mut results);
            let mut now = Progress { done: 0, total, tokens: told.tokens };
            let before = told;
            running.retain_mut(|request| {
                while let Some(event) = request.handle.try_recv() {
                    let had = request.completion.tokens.len();
                    let ended = request.completion.push(event);
                    now.tokens += request.completion.tokens.len() - had;
                    match ended {
                        Ok(false) => {}
                        Ok(true) => {
                            let completion = std::mem::take(&mut request.completion);
                            results[request.index] = Some(Ok(completion));
                            return false;
                        }
                        // Its turn comes when the queue has room again.
                        Err(
                            RequestError::QueueFull { .. } | RequestError::QueueTokensFull { .. },
                        ) => {
                            left.push_front((request.index, request.request.clone()));
                            return false;
                        }
                        Err(error) => {
                            results[request.index] = Some(Err(error));
                            return false;
                        }
                    }
                }
                true
            });
            now.done = results.iter().filter(|r| r.is_some()).count();
            told = now;
            if !more(now) {
                return None;
            }
            if now == before && (!running.is_empty() || !left.is_empty()) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        let missing = || Err(RequestError::Stopped { reason: "no result".into() });
        Some(results.into_iter().map(|r| r.unwrap_or_else(missing)).collect())
    }

    /// Submits requests while the queue takes them.
    fn fill(
        &self,
        left: &mut VecDeque<(usize, Request)>,
        running: &mut VecDeque<Running>,
        results: &mut [Option<Result<Completion, RequestError>>],
    ) {
        while let Some((index, request)) = left.pop_front() {
            // Room is left in the queue for others, and for what the loop has not yet taken in.
            if running.len() >= self.queue_limit.div_ceil(2) {
                return left.push_front((index, request));
            }
            match self.submit_all(request.clone()) {
                Ok(handles) => {
                    for (i, handle) in handles.into_iter().enumerate() {
                        let (request, completion) = (one(&request, i), Completion::default());
                        running.push_back(Running {
                            index: index + i,
                            request,
                            handle,
                            completion,
                        });
                    }
                }
                // As many at once may never fit: one after the other then.
                Err(RequestError::QueueFull { .. }) if request.params.n > 1 => {
                    let each = (0..samples(&request)).rev();
                    return each.for_each(|i| left.push_front((index + i, one(&request, i))));
                }
                Err(RequestError::QueueFull { .. }) => return left.push_front((index, request)),
                Err(error) => {
                    results[index..index + samples(&request)].fill(Some(Err(error)));
                }
            }
        }
    }
}

/// Results of a request: one that is refused for its `n` has one.
fn samples(request: &Request) -> usize {
    match request.params.n {
        n if n <= MOST_SAMPLES => n.max(1),
        _ => 1,
    }
}

/// The request for one of the continuations.
fn one(request: &Request, index: usize) -> Request {
    let mut request = request.clone();
    request.params.n = 1;
    request.params.sample = request.params.sample.wrapping_add(index as u32);
    request
}
