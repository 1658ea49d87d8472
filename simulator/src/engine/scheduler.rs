//! What every engine's scheduler does alike: a queue, a pool, letting a request in, ending it, and the
//! order of steps. An engine adds what a step is made of.

use super::batch::{Pool, Queues, Sequence};
use super::{Counters, Emission, Job, JobId, Limits, Occupancy, Worker};
use crate::cache::{Change, Match, Totals};
use crate::calibration::Calibration;

/// The state that every engine has.
pub struct Core {
    pub calibration: Calibration,
    pub limits: Limits,
    pub pool: Pool,
    pub queues: Queues,
    /// Requests that came later are not seen by the step that is composed now.
    pub seen_until_s: f64,
    step_end_s: Option<f64>,
    rejected: Vec<JobId>,
}

impl Core {
    pub fn new(calibration: Calibration, limits: Limits, evicts_by_block: bool) -> Self {
        Self {
            pool: Pool::new(&limits, evicts_by_block),
            calibration,
            limits,
            queues: Queues::new(),
            seen_until_s: 0.0,
            step_end_s: None,
            rejected: Vec::new(),
        }
    }

    /// Whether the request at `at` of the queue had come when this step was composed.
    pub fn is_seen(&self, at: usize) -> bool {
        self.queues.waiting[at].arrived_s <= self.seen_until_s
    }

    /// Takes the request at `at` out of the queue, with the prefix that was found for it and is locked
    /// on the device, and says how many tokens of it come from host memory. None where there is no such
    /// request.
    pub fn let_in(&mut self, at: usize, found: &Match) -> Option<(Sequence, u64)> {
        let held = found.device_blocks as u64 * self.pool.block_tokens;
        let in_host = found.host_blocks as u64 * self.pool.block_tokens;
        let mut sequence = self.queues.waiting.remove(at)?;
        sequence.node = found.node;
        sequence.in_tree = held;
        sequence.computed = held;
        if in_host > 0 {
            // Its own room, which whoever lets it in has counted.
            self.pool.make_room(in_host);
            self.pool.cache.reload(found.host_node);
            self.pool.cache.lock(found.host_node);
            self.pool.cache.unlock(found.node);
            sequence.node = found.host_node;
            sequence.in_tree += in_host;
            sequence.computed += in_host;
            self.queues.counters.reloaded_tokens += in_host;
        }
        if sequence.cached_tokens.is_none() {
            sequence.cached_tokens = Some(sequence.computed);
            self.queues.counters.prompt_tokens += sequence.job.input_tokens;
            self.queues.counters.cached_tokens += sequence.computed;
        }
        Some((sequence, in_host))
    }

    /// Seconds of a step that prefills, beside decodes with `context` tokens between them. What is
    /// reloaded from host memory hides behind it, as far as that takes longer.
    pub fn prefill_s(&mut self, part: &Prefill, requests: usize, context: u64) -> f64 {
        let reload_s = part.reload as f64 / self.calibration.reload_tokens_per_s;
        let compute_s = self
            .calibration
            .mixed_s(part.tokens, part.pairs, requests, context);
        let seconds = compute_s.max(reload_s);
        self.queues.counters.prefilled_tokens += part.tokens;
        self.queues.counters.prefill_s += seconds;
        seconds
    }

    /// Seconds of a step that only decodes.
    pub fn decode_s(&mut self, requests: usize, context: u64) -> f64 {
        let seconds = self.calibration.decode_s(requests, context);
        self.queues.counters.decode_s += seconds;
        seconds
    }

    /// Counts one more token of a running sequence's answer, and tells it.
    pub fn tell_token(&mut self, at: usize, told: &mut Vec<Emission>) {
        let sequence = &mut self.queues.running[at];
        sequence.generated += 1;
        self.queues.counters.generated_tokens += 1;
        told.push(Emission::Token {
            job: sequence.job.id,
        });
    }

    /// Where a job runs, if it does.
    pub fn position(&self, job: JobId) -> Option<usize> {
        self.queues.running.iter().position(|s| s.job.id == job)
    }

    /// Takes out every running sequence that is complete, or whose client has left.
    pub fn end_complete(&mut self, told: &mut Vec<Emission>) {
        let mut at = 0;
        while at < self.queues.running.len() {
            let sequence = &self.queues.running[at];
            let complete = sequence.generated == sequence.job.output_tokens;
            if !complete && !sequence.cancelled {
                at += 1;
                continue;
            }
            let sequence = self.stop(at);
            if complete && !sequence.cancelled {
                told.push(Emission::Finished {
                    job: sequence.job.id,
                    cached_tokens: sequence.cached_tokens.unwrap_or(0),
                });
            }
        }
    }

    /// Takes a running sequence out; what it has computed stays in the cache.
    pub fn stop(&mut self, at: usize) -> Sequence {
        let mut sequence = self.queues.running.remove(at);
        self.pool.share(&mut sequence);
        self.pool.release(&mut sequence);
        sequence
    }
}

/// What a step prefills, added up over its requests.
#[derive(Default)]
pub struct Prefill {
    pub tokens: u64,
    /// Pairs of tokens that attention looks at.
    pub pairs: f64,
    /// Tokens that come from host memory.
    pub reload: u64,
}

/// What engines differ in.
pub trait Scheduler {
    fn core(&self) -> &Core;
    fn core_mut(&mut self) -> &mut Core;
    /// Composes the next step from what has been seen, keeps it, and returns how long it takes; none
    /// where there is nothing to do.
    fn compose(&mut self) -> Option<f64>;
    /// The composed step has ended.
    fn complete(&mut self, told: &mut Vec<Emission>);
    /// No step was to be composed.
    fn rest(&mut self) {}
}

fn start_step(scheduler: &mut impl Scheduler) {
    let now_s = scheduler.core().queues.now_s;
    let composed = scheduler.compose().or_else(|| {
        // Nothing runs: what has come meanwhile is seen at once.
        scheduler.core_mut().seen_until_s = now_s;
        scheduler.compose()
    });
    let core = scheduler.core_mut();
    core.seen_until_s = now_s;
    core.step_end_s = composed.map(|seconds| now_s + seconds);
    match composed {
        Some(_) => core.queues.counters.steps += 1,
        None => scheduler.rest(),
    }
}

impl<T: Scheduler> Worker for T {
    fn submit(&mut self, job: Job, now_s: f64) {
        let core = self.core_mut();
        if !core.pool.could_hold(&job) {
            core.rejected.push(job.id);
            core.queues.now_s = core.queues.now_s.max(now_s);
            return;
        }
        core.queues.waiting.push_back(Sequence::new(job, now_s));
        if core.step_end_s.is_none() {
            core.queues.now_s = now_s;
            start_step(self);
        }
    }

    fn cancel(&mut self, job: JobId) {
        self.core_mut().queues.cancel(job);
    }

    fn next_s(&self) -> Option<f64> {
        let core = self.core();
        let tells = (!core.rejected.is_empty()).then_some(core.queues.now_s);
        core.step_end_s.or(tells)
    }

    fn advance(&mut self, told: &mut Vec<Emission>) {
        if let Some(end_s) = self.core_mut().step_end_s.take() {
            self.core_mut().queues.now_s = end_s;
            self.complete(told);
            start_step(self);
        }
        let rejected = self.core_mut().rejected.drain(..);
        told.extend(rejected.map(|job| Emission::Rejected { job }));
    }

    fn occupancy(&self) -> Occupancy {
        self.core().queues.occupancy(&self.core().pool)
    }

    fn counters(&self) -> Counters {
        self.core().queues.counters
    }

    fn cache_totals(&self) -> Totals {
        self.core().pool.cache.totals
    }

    fn cached(&self) -> (u64, u64) {
        let pool = &self.core().pool;
        let block = pool.block_tokens;
        let cache = &pool.cache;
        (cache.device_blocks() * block, cache.host_blocks() * block)
    }

    fn take_changes(&mut self, into: &mut Vec<Change>) {
        self.core_mut().pool.cache.take_changes(into);
    }
}
