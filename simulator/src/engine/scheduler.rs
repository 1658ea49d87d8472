//! What every engine's scheduler does alike: a queue, a pool, letting a request in, ending it, and the
//! order of steps. An engine adds what a step is made of.

use super::batch::{Pool, Queues, Sequence};
use super::{Counters, Emission, Job, JobId, Limits, Occupancy, Part, Worker};
use crate::cache::{Change, Match, Totals};
use crate::calibration::Calibration;
use std::collections::VecDeque;

/// The state that every engine has.
pub struct Core {
    pub calibration: Calibration,
    pub limits: Limits,
    pub pool: Pool,
    pub queues: Queues,
    /// Requests that came later are not seen by the step that is composed now.
    pub seen_until_s: f64,
    step_end_s: Option<f64>,
    /// What is to be told besides what steps do.
    pub tells: Vec<Emission>,
    pub handover: Handover,
}

/// Requests of which another worker does the other part.
#[derive(Default)]
pub struct Handover {
    /// Prefilled here; their KV is locked until it has been sent.
    sending: Vec<Sequence>,
    /// Wait for room, in the order in which they came.
    pub wanting: VecDeque<Sequence>,
    /// Have their room; their KV is on its way.
    incoming: Vec<Sequence>,
    /// Their KV has come; they decode from the next step on.
    pub arrived: Vec<Sequence>,
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
            tells: Vec::new(),
            handover: Handover::default(),
        }
    }

    /// Until when this step knows what happened.
    pub fn seen_until_s(&self) -> f64 {
        self.seen_until_s
    }

    /// Whether the request at `at` of the queue had come when this step was composed.
    fn is_seen(&self, at: usize) -> bool {
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
        let reload_s = self.calibration.reload_s(part.reload);
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

    /// Takes room for the prompt of the first that waits for it, beside its prefix that is here. False
    /// where there is none, or `kept_tokens` would not be left.
    pub fn reserve(&mut self, kept_tokens: u64) -> bool {
        let Some(first) = self.handover.wanting.front() else {
            return false;
        };
        let target = first.target;
        let found = self.pool.matched(&first.job, target);
        let held = found.device_blocks as u64 * self.pool.block_tokens;
        self.pool.cache.lock(found.node);
        if self.pool.available() < target - held + kept_tokens {
            self.pool.cache.unlock(found.node);
            return false;
        }
        let Some(mut sequence) = self.handover.wanting.pop_front() else {
            return false;
        };
        sequence.node = found.node;
        sequence.in_tree = held;
        sequence.computed = held;
        let taken = self.pool.take(&mut sequence, target - held);
        debug_assert!(taken, "room was checked");
        if sequence.generated > 0 {
            // Retracted: its KV was kept in host memory.
            self.handover.arrived.push(sequence);
        } else {
            self.queues.counters.received_tokens += target - held;
            self.tells.push(Emission::Reserved {
                job: sequence.job.id,
                held_tokens: held,
            });
            self.handover.incoming.push(sequence);
        }
        true
    }

    /// Requests that have room, or use some, for what another worker prefills.
    pub fn handed_over(&self) -> usize {
        self.handover.incoming.len() + self.handover.arrived.len()
    }

    /// Keeps the KV of a prompt that was prefilled for another worker until it has been sent.
    pub fn keep_for_sending(&mut self, at: usize) {
        let sequence = self.queues.running.remove(at);
        self.tells.push(Emission::Prefilled {
            job: sequence.job.id,
            cached_tokens: sequence.cached_tokens.unwrap_or(0),
        });
        self.handover.sending.push(sequence);
    }

    fn let_go(&mut self, mut sequence: Sequence) {
        self.pool.release(&mut sequence);
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

/// Lets in waiting requests that had come when this step was composed, first the first, while the step
/// that is put together in `batch` `has_room` and `begin` lets the one at that place of the queue in.
pub fn let_all_in<S: Scheduler, B>(
    scheduler: &mut S,
    batch: &mut B,
    has_room: impl Fn(&B) -> bool,
    begin: impl Fn(&mut S, usize, &mut B) -> bool,
) {
    let mut at = 0;
    while has_room(batch)
        && scheduler.core().queues.running.len() < scheduler.core().limits.max_running
        && at < scheduler.core().queues.waiting.len()
    {
        if !scheduler.core().is_seen(at) {
            at += 1;
        } else if !begin(scheduler, at, batch) {
            break;
        }
    }
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

/// Something has come or gone: a worker that rests looks whether there is something to do now.
fn wake(scheduler: &mut impl Scheduler, now_s: f64) {
    let core = scheduler.core_mut();
    if core.step_end_s.is_none() {
        core.queues.now_s = now_s;
        start_step(scheduler);
    }
}

impl<T: Scheduler> Worker for T {
    fn submit(&mut self, job: Job, now_s: f64) {
        let core = self.core_mut();
        if !core.pool.could_hold(&job) {
            core.tells.push(Emission::Rejected { job: job.id });
            core.queues.now_s = core.queues.now_s.max(now_s);
            return;
        }
        let decodes = job.part == Part::Decode;
        let sequence = Sequence::new(job, now_s);
        if decodes {
            core.handover.wanting.push_back(sequence);
        } else {
            core.queues.waiting.push_back(sequence);
        }
        wake(self, now_s);
    }

    fn cancel(&mut self, job: JobId, now_s: f64) {
        let core = self.core_mut();
        core.queues.cancel(job);
        core.handover.wanting.retain(|s| s.job.id != job);
        let handover = &mut core.handover;
        let lists = [
            &mut handover.sending,
            &mut handover.incoming,
            &mut handover.arrived,
        ];
        let gone: Vec<Sequence> = lists
            .into_iter()
            .flat_map(|list| list.extract_if(.., move |s| s.job.id == job))
            .collect();
        if !gone.is_empty() {
            gone.into_iter().for_each(|sequence| core.let_go(sequence));
            wake(self, now_s);
        }
    }

    fn sent(&mut self, job: JobId, now_s: f64) {
        let core = self.core_mut();
        let sending = &mut core.handover.sending;
        if let Some(at) = sending.iter().position(|s| s.job.id == job) {
            let sequence = sending.swap_remove(at);
            core.let_go(sequence);
            wake(self, now_s);
        }
    }

    fn received(&mut self, job: JobId, now_s: f64) {
        let handover = &mut self.core_mut().handover;
        if let Some(at) = handover.incoming.iter().position(|s| s.job.id == job) {
            let mut sequence = handover.incoming.swap_remove(at);
            sequence.arrived_s = now_s;
            handover.arrived.push(sequence);
            wake(self, now_s);
        }
    }

    fn next_s(&self) -> Option<f64> {
        let core = self.core();
        if core.tells.is_empty() {
            core.step_end_s
        } else {
            Some(core.queues.now_s)
        }
    }

    fn advance(&mut self, told: &mut Vec<Emission>) {
        // What came up between two steps is told by itself, and the step goes on.
        if self.core().tells.is_empty()
            && let Some(end_s) = self.core_mut().step_end_s.take()
        {
            self.core_mut().queues.now_s = end_s;
            self.complete(told);
            start_step(self);
        }
        told.append(&mut self.core_mut().tells);
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
