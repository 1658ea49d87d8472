//! vLLM (0.26.0), colocated: every step has one budget of tokens; decodes take theirs first, what is
//! left goes to chunks of prefills. A request is let in when its whole prompt fits; nothing is kept for
//! answers, and when blocks run out the request that came last is preempted and computed again.

use super::batch::{Pool, Queues, Sequence};
use super::{Counters, Emission, Job, JobId, Limits, Occupancy, Worker};
use crate::cache::{Change, Totals};
use crate::calibration::{Calibration, attention_pairs};

pub struct Vllm {
    calibration: Calibration,
    limits: Limits,
    pool: Pool,
    queues: Queues,
    /// What each running sequence computes in this step (0: preempted or without budget), and when the
    /// step ends.
    step: Option<(Vec<(JobId, u64)>, f64)>,
    seen_until_s: f64,
    rejected: Vec<JobId>,
}

impl Vllm {
    pub fn new(calibration: Calibration, limits: Limits) -> Self {
        Self {
            pool: Pool::new(&limits, true),
            calibration,
            limits,
            queues: Queues::new(),
            step: None,
            seen_until_s: 0.0,
            rejected: Vec::new(),
        }
    }

    fn start_step(&mut self) {
        let now_s = self.queues.now_s;
        let composed = self.compose().or_else(|| {
            self.seen_until_s = now_s;
            self.compose()
        });
        self.seen_until_s = now_s;
        self.step = composed.map(|(parts, seconds)| {
            self.queues.counters.steps += 1;
            (parts, now_s + seconds)
        });
    }

    /// Running requests in the order in which they came: one token each, or a chunk of the prefill; then
    /// waiting ones.
    fn compose(&mut self) -> Option<(Vec<(JobId, u64)>, f64)> {
        let mut budget = self.limits.chunk_tokens;
        let mut parts: Vec<(JobId, u64)> = Vec::new();
        let (mut prefilled, mut pairs, mut reload) = (0, 0.0, 0);
        let (mut decodes, mut context) = (0, 0);
        let mut at = 0;
        let mut preempted = false;
        while at < self.queues.running.len() && budget > 0 {
            let sequence = &self.queues.running[at];
            let (before, decoding) = (sequence.computed, !sequence.is_prefilling());
            let part = match decoding {
                true => 1,
                false => (sequence.target - sequence.computed).min(budget),
            };
            while self.queues.running.len() > at + 1 && self.pool.available() < part {
                self.preempt_last();
                preempted = true;
            }
            let sequence = &mut self.queues.running[at];
            if !self.pool.take(sequence, part) {
                if self.queues.running.len() == at + 1 {
                    self.preempt_last();
                    preempted = true;
                }
                break;
            }
            parts.push((sequence.job.id, part));
            budget -= part;
            if decoding {
                decodes += 1;
                context += before;
            } else {
                prefilled += part;
                pairs += attention_pairs(before, part);
            }
            at += 1;
        }
        let mut at = 0;
        while budget > 0
            && !preempted
            && self.queues.running.len() < self.limits.max_running
            && at < self.queues.waiting.len()
        {
            let sequence = &self.queues.waiting[at];
            if sequence.arrived_s > self.seen_until_s {
                at += 1;
                continue;
            }
            let (job, target) = (sequence.job.clone(), sequence.target);
            let found = self.pool.matched(&job, target);
            let held = found.device_blocks as u64 * self.pool.block_tokens;
            let in_host = found.host_blocks as u64 * self.pool.block_tokens;
            self.pool.cache.lock(found.node);
            // What others are still to prefill is promised to them.
            let promised: u64 = self
                .queues
                .running
                .iter()
                .filter(|s| s.is_prefilling())
                .map(|s| s.target - s.computed)
                .sum();
            if self.pool.available() < target - held + promised {
                self.pool.cache.unlock(found.node);
                break;
            }
            let Some(mut sequence) = self.queues.waiting.remove(at) else {
                break;
            };
            sequence.node = found.node;
            sequence.in_tree = held;
            sequence.computed = held;
            if in_host > 0 {
                self.pool.make_room(in_host);
                self.pool.cache.reload(found.host_node);
                self.pool.cache.lock(found.host_node);
                self.pool.cache.unlock(found.node);
                sequence.node = found.host_node;
                sequence.in_tree += in_host;
                sequence.computed += in_host;
                self.queues.counters.reloaded_tokens += in_host;
                reload += in_host;
            }
            if sequence.cached_tokens.is_none() {
                sequence.cached_tokens = Some(sequence.computed);
                self.queues.counters.prompt_tokens += sequence.job.input_tokens;
                self.queues.counters.cached_tokens += sequence.computed;
            }
            let part = (target - sequence.computed).min(budget);
            prefilled += part;
            pairs += attention_pairs(sequence.computed, part);
            let taken = self.pool.take(&mut sequence, part);
            debug_assert!(taken, "room was checked");
            parts.push((job.id, part));
            budget -= part;
            self.queues.running.push(sequence);
        }
        if parts.is_empty() {
            return None;
        }
        let seconds = if prefilled == 0 {
            let seconds = self.calibration.decode_s(decodes, context);
            self.queues.counters.decode_s += seconds;
            seconds
        } else {
            let compute_s = self.calibration.mixed_s(prefilled, pairs, decodes, context);
            let seconds = compute_s.max(reload as f64 / self.calibration.reload_tokens_per_s);
            self.queues.counters.prefill_s += seconds;
            seconds
        };
        self.queues.counters.prefilled_tokens += prefilled;
        Some((parts, seconds))
    }

    fn preempt_last(&mut self) {
        let Some(mut sequence) = self.queues.running.pop() else {
            return;
        };
        self.pool.share(&mut sequence);
        self.pool.release(&mut sequence);
        sequence.target = sequence.job.input_tokens + sequence.generated;
        self.queues.waiting.push_front(sequence);
        self.queues.counters.retractions += 1;
    }

    fn end_step(&mut self, parts: &[(JobId, u64)], told: &mut Vec<Emission>) {
        for &(job, _) in parts {
            let running = &mut self.queues.running;
            let Some(sequence) = running.iter_mut().find(|s| s.job.id == job) else {
                continue;
            };
            self.pool.share(sequence);
            // A decode's token was added to what was computed, not to the target.
            if sequence.computed >= sequence.target {
                sequence.target = sequence.computed;
                sequence.generated += 1;
                self.queues.counters.generated_tokens += 1;
                told.push(Emission::Token { job });
            }
            if sequence.cancelled || sequence.generated == sequence.job.output_tokens {
                let complete = !sequence.cancelled;
                self.pool.release(sequence);
                if complete {
                    told.push(Emission::Finished {
                        job,
                        cached_tokens: sequence.cached_tokens.unwrap_or(0),
                    });
                }
                running.retain(|s| s.job.id != job);
            }
        }
    }
}

impl Worker for Vllm {
    fn submit(&mut self, job: Job, now_s: f64) {
        if !self.pool.could_hold(&job) {
            self.rejected.push(job.id);
            self.queues.now_s = self.queues.now_s.max(now_s);
            return;
        }
        self.queues.waiting.push_back(Sequence::new(job, now_s));
        if self.step.is_none() {
            self.queues.now_s = now_s;
            self.start_step();
        }
    }

    fn cancel(&mut self, job: JobId) {
        self.queues.cancel(job);
    }

    fn next_s(&self) -> Option<f64> {
        self.step.as_ref().map(|(_, end_s)| *end_s).or({
            if self.rejected.is_empty() {
                None
            } else {
                Some(self.queues.now_s)
            }
        })
    }

    fn advance(&mut self, told: &mut Vec<Emission>) {
        if let Some((parts, end_s)) = self.step.take() {
            self.queues.now_s = end_s;
            self.end_step(&parts, told);
            self.start_step();
        }
        told.extend(
            self.rejected
                .drain(..)
                .map(|job| Emission::Rejected { job }),
        );
    }

    fn occupancy(&self) -> Occupancy {
        self.queues.occupancy(&self.pool)
    }

    fn counters(&self) -> Counters {
        self.queues.counters
    }

    fn cache_totals(&self) -> Totals {
        self.pool.cache.totals
    }

    fn cached(&self) -> (u64, u64) {
        let block = self.pool.block_tokens;
        let cache = &self.pool.cache;
        (cache.device_blocks() * block, cache.host_blocks() * block)
    }

    fn take_changes(&mut self, into: &mut Vec<Change>) {
        self.pool.cache.take_changes(into);
    }
}
