//! vLLM (0.26.0), colocated: every step has one budget of tokens; decodes take theirs first, what is
//! left goes to chunks of prefills. A request is let in when its whole prompt fits; nothing is kept for
//! answers, and when blocks run out the request that came last is preempted and computed again.
//!
//! What the host tier holds of a prompt is loaded beside the steps, one request after another
//! (`WAITING_FOR_REMOTE_KVS`): the others go on, and the request computes its first chunk in the step
//! after it has been seen that the load ended.

use super::scheduler::{Core, Prefill, Scheduler, let_all_in};
use super::{Emission, JobId, Limits};
use crate::calibration::Calibration;

pub struct Vllm {
    core: Core,
    /// The requests that compute something in this step.
    step: Vec<JobId>,
    /// When the last load from host memory ends.
    loads_end_s: f64,
}

/// A step while it is put together.
struct Batch {
    jobs: Vec<JobId>,
    budget: u64,
    work: Prefill,
    decodes: usize,
    context: u64,
    preempted: bool,
    /// How much longer the step takes for what those that are let in find cached.
    found_s: f64,
}

impl Vllm {
    pub fn new(calibration: Calibration, limits: Limits) -> Self {
        Self {
            core: Core::new(calibration, limits, true),
            step: Vec::new(),
            loads_end_s: 0.0,
        }
    }

    /// Whether it still waits for its load, as far as this step knows.
    fn is_loading(&self, at: usize) -> bool {
        self.core.queues.running[at].loaded_s > self.core.seen_until_s()
    }

    /// Running requests in the order in which they came: one token each, or a chunk of the prefill.
    fn go_on(&mut self, batch: &mut Batch) {
        let mut at = 0;
        while at < self.core.queues.running.len() && batch.budget > 0 {
            if self.is_loading(at) {
                at += 1;
                continue;
            }
            let sequence = &self.core.queues.running[at];
            let (before, decodes) = (sequence.computed, !sequence.is_prefilling());
            let part = match decodes {
                true => 1,
                false => (sequence.target - before).min(batch.budget),
            };
            while self.core.queues.running.len() > at + 1 && self.core.pool.available() < part {
                self.preempt_last();
                batch.preempted = true;
            }
            let sequence = &mut self.core.queues.running[at];
            if !self.core.pool.take(sequence, part) {
                if self.core.queues.running.len() == at + 1 {
                    self.preempt_last();
                    batch.preempted = true;
                }
                break;
            }
            batch.jobs.push(sequence.job.id);
            batch.budget -= part;
            if decodes {
                batch.decodes += 1;
                batch.context += before;
            } else {
                batch.work.tokens += part;
                batch.work.pairs += self.core.calibration.pairs(before, part);
            }
            at += 1;
        }
    }

    /// Lets in the request at `at` of the queue, if all of its prompt fits.
    fn begin(&mut self, at: usize, batch: &mut Batch) -> bool {
        let waiting = &self.core.queues.waiting[at];
        let target = waiting.target;
        let found = self.core.pool.matched(&waiting.job, target);
        let held = found.device_blocks as u64 * self.core.pool.block_tokens;
        self.core.pool.cache.lock(found.node);
        // What others are still to prefill is promised to them.
        let running = &self.core.queues.running;
        let prefilling = running.iter().filter(|s| s.is_prefilling());
        let promised: u64 = prefilling.map(|s| s.target - s.computed).sum();
        if self.core.pool.available() < target - held + promised {
            self.core.pool.cache.unlock(found.node);
            return false;
        }
        let Some((mut sequence, reload)) = self.core.let_in(at, &found) else {
            return false;
        };
        batch.found_s += (held + reload) as f64 * self.core.calibration.found_token_s;
        if reload > 0 {
            let begins_s = self.core.queues.now_s.max(self.loads_end_s);
            self.loads_end_s = begins_s + self.core.calibration.reload_s(reload);
            sequence.loaded_s = self.loads_end_s;
            self.core.queues.running.push(sequence);
            return true;
        }
        let part = (target - sequence.computed).min(batch.budget);
        batch.work.tokens += part;
        batch.work.pairs += self.core.calibration.pairs(sequence.computed, part);
        let taken = self.core.pool.take(&mut sequence, part);
        debug_assert!(taken, "room was checked");
        batch.jobs.push(sequence.job.id);
        batch.budget -= part;
        self.core.queues.running.push(sequence);
        true
    }

    fn preempt_last(&mut self) {
        let Some(at) = self.core.queues.running.len().checked_sub(1) else {
            return;
        };
        let mut sequence = self.core.stop(at);
        sequence.target = sequence.job.input_tokens + sequence.generated;
        self.core.queues.waiting.push_front(sequence);
        self.core.queues.counters.retractions += 1;
    }
}

impl Scheduler for Vllm {
    fn core(&self) -> &Core {
        &self.core
    }

    fn core_mut(&mut self) -> &mut Core {
        &mut self.core
    }

    fn compose(&mut self) -> Option<f64> {
        let mut batch = Batch {
            jobs: Vec::new(),
            budget: self.core.limits.chunk_tokens,
            work: Prefill::default(),
            decodes: 0,
            context: 0,
            preempted: false,
            found_s: 0.0,
        };
        self.go_on(&mut batch);
        let has_room = |batch: &Batch| batch.budget > 0 && !batch.preempted;
        let_all_in(self, &mut batch, has_room, Self::begin);
        if batch.jobs.is_empty() {
            // While something is loaded, vLLM's loop goes round without computing.
            let waits = (0..self.core.queues.running.len()).any(|at| self.is_loading(at));
            return waits.then_some(self.core.calibration.decode_base_s + batch.found_s);
        }
        self.step = batch.jobs;
        let computes_s = if batch.work.tokens == 0 {
            self.core.decode_s(batch.decodes, batch.context)
        } else {
            self.core
                .prefill_s(&batch.work, batch.decodes, batch.context)
        };
        Some(computes_s + batch.found_s)
    }

    fn complete(&mut self, told: &mut Vec<Emission>) {
        for job in std::mem::take(&mut self.step) {
            let Some(at) = self.core.position(job) else {
                continue;
            };
            let sequence = &mut self.core.queues.running[at];
            self.core.pool.share(sequence);
            // A decode's token was added to what was computed, not to the target.
            if sequence.computed >= sequence.target {
                sequence.target = sequence.computed;
                self.core.tell_token(at, told);
            }
        }
        self.core.end_complete(told);
    }
}
