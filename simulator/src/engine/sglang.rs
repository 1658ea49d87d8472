//! SGLang (0.5.17), colocated: prefills go before decodes, in chunks; requests are let in while what
//! they will need fits beside a share of what those running may still generate.
//!
//! Follows `Scheduler.get_next_batch_to_run` and `PrefillAdder`. With the overlap scheduler a step is
//! composed while the one before it runs, so that a request that comes during a step is not in the
//! next one, but in the one after it.

use super::batch::{Pool, Queues, Sequence};
use super::{Counters, Emission, Job, JobId, Limits, Occupancy, Order, Worker};
use crate::cache::{Change, Totals};
use crate::calibration::{Calibration, attention_pairs};

/// `CLIP_MAX_NEW_TOKENS`: more is never reserved for one answer.
const CLIP_NEW_TOKENS: u64 = 4096;
/// `new_token_ratio`: the share of what running requests may still generate that is kept for them. It
/// starts high, falls with every decode step, and rises when requests are retracted.
const RATIO_START: f64 = 0.7;
const RATIO_LEAST: f64 = 0.098;
const RATIO_STEP: f64 = (RATIO_START - RATIO_LEAST) / 600.0;

/// With more waiting, `lpm` falls back to `fcfs`.
const LPM_MOST_WAITING: usize = 128;

enum Step {
    /// Tokens for each running sequence that prefills in this step, by its job.
    Prefill(Vec<(JobId, u64)>),
    Decode,
}

pub struct Sglang {
    calibration: Calibration,
    limits: Limits,
    pool: Pool,
    queues: Queues,
    step: Option<(Step, f64)>,
    /// What came before this is seen by the next composition.
    seen_until_s: f64,
    ratio: f64,
    rejected: Vec<JobId>,
}

impl Sglang {
    pub fn new(calibration: Calibration, limits: Limits) -> Self {
        Self {
            pool: Pool::new(&limits, false),
            calibration,
            limits,
            queues: Queues::new(),
            step: None,
            seen_until_s: 0.0,
            ratio: RATIO_START,
            rejected: Vec::new(),
        }
    }

    /// Composes the next step and starts it.
    fn start_step(&mut self) {
        let now_s = self.queues.now_s;
        let composed = self
            .compose_prefill()
            .or_else(|| self.compose_decode())
            .or_else(|| {
                // Nothing runs: what has come meanwhile is seen at once.
                self.seen_until_s = now_s;
                self.compose_prefill()
            });
        self.seen_until_s = now_s;
        match composed {
            Some((step, seconds)) => {
                self.queues.counters.steps += 1;
                self.step = Some((step, now_s + seconds));
            }
            None => {
                self.step = None;
                if self.queues.running.is_empty() {
                    self.ratio = RATIO_START;
                }
            }
        }
    }

    fn compose_prefill(&mut self) -> Option<(Step, f64)> {
        let reserved: f64 = self
            .queues
            .running
            .iter()
            .filter(|s| !s.is_prefilling())
            .map(|s| self.ratio * s.left_to_generate().min(CLIP_NEW_TOKENS) as f64)
            .sum();
        // Beyond what is locked: kept for answers of requests let in here.
        let mut promised = reserved;
        let mut chunk_left = self.limits.chunk_tokens;
        let mut input_left = self.limits.max_prefill_tokens;
        let mut parts: Vec<(JobId, u64)> = Vec::new();
        let (mut tokens, mut pairs, mut reload) = (0, 0.0, 0);

        // At most one prefill is cut by the chunks' end; it goes on before others begin.
        let going = self.queues.running.iter().position(Sequence::is_prefilling);
        if let Some(at) = going {
            let sequence = &mut self.queues.running[at];
            let part = (sequence.target - sequence.computed).min(chunk_left);
            pairs += attention_pairs(sequence.computed, part);
            if !self.pool.take(sequence, part) {
                return None;
            }
            if !sequence.is_prefilling() {
                promised += sequence.left_to_generate().min(CLIP_NEW_TOKENS) as f64;
            }
            tokens += part;
            chunk_left -= part;
            input_left = input_left.saturating_sub(part);
            parts.push((sequence.job.id, part));
        }
        if chunk_left > 0
            && self.limits.order == Order::Lpm
            && self.queues.waiting.len() <= LPM_MOST_WAITING
        {
            self.sort_by_prefix();
        }
        let mut at = 0;
        while chunk_left > 0
            && input_left > 0
            && self.queues.running.len() < self.limits.max_running
            && at < self.queues.waiting.len()
        {
            if self.queues.waiting[at].arrived_s > self.seen_until_s {
                at += 1;
                continue;
            }
            let (job, target) = {
                let sequence = &self.queues.waiting[at];
                (sequence.job.clone(), sequence.target)
            };
            let found = self.pool.matched(&job, target);
            let held = found.device_blocks as u64 * self.pool.block_tokens;
            let in_host = found.host_blocks as u64 * self.pool.block_tokens;
            let extend = target - held;
            let answer = {
                let sequence = &self.queues.waiting[at];
                sequence.left_to_generate().min(CLIP_NEW_TOKENS)
            };
            let needed = (extend + answer) as f64;
            // What the request itself is about to lock is no longer to be evicted for it.
            self.pool.cache.lock(found.node);
            let room = self.pool.available() as f64 - promised;
            if needed >= room {
                self.pool.cache.unlock(found.node);
                break;
            }
            let compute = extend - in_host;
            if compute >= input_left && !parts.is_empty() {
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
                // Its own room, which the check above has counted.
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
            let cached = sequence.computed;
            let counters = &mut self.queues.counters;
            if sequence.cached_tokens.is_none() {
                sequence.cached_tokens = Some(cached);
                counters.prompt_tokens += sequence.job.input_tokens;
                counters.cached_tokens += cached;
            }
            let part = compute.min(chunk_left);
            pairs += attention_pairs(sequence.computed, part);
            let taken = self.pool.take(&mut sequence, part);
            debug_assert!(taken, "room was checked");
            if !sequence.is_prefilling() {
                promised += answer as f64;
            }
            tokens += part;
            chunk_left -= part;
            input_left = input_left.saturating_sub(part);
            parts.push((sequence.job.id, part));
            self.queues.running.push(sequence);
        }
        if parts.is_empty() {
            return None;
        }
        let (requests, context) = if self.limits.mixed {
            self.queues.decoding_but(&parts)
        } else {
            (0, 0)
        };
        let compute_s = self.calibration.mixed_s(tokens, pairs, requests, context);
        let seconds = compute_s.max(reload as f64 / self.calibration.reload_tokens_per_s);
        self.queues.counters.prefilled_tokens += tokens;
        self.queues.counters.prefill_s += seconds;
        Some((Step::Prefill(parts), seconds))
    }

    fn sort_by_prefix(&mut self) {
        let cache = &self.pool.cache;
        let mut waiting: Vec<(usize, Sequence)> = self
            .queues
            .waiting
            .drain(..)
            .map(|s| (cache.peek(s.job.cacheable()), s))
            .collect();
        waiting.sort_by_key(|(blocks, _)| std::cmp::Reverse(*blocks));
        self.queues
            .waiting
            .extend(waiting.into_iter().map(|(_, s)| s));
    }

    fn compose_decode(&mut self) -> Option<(Step, f64)> {
        self.retract_if_full();
        let (requests, context) = self.queues.decoding();
        if requests == 0 {
            return None;
        }
        let seconds = self.calibration.decode_s(requests, context);
        self.queues.counters.decode_s += seconds;
        self.ratio = (self.ratio - RATIO_STEP).max(RATIO_LEAST);
        Some((Step::Decode, seconds))
    }

    /// Sends requests back to the queue until every other can have one more token: those with the
    /// fewest tokens generated first, of these the longest prompts; a last one rather than a prefill
    /// that is under way.
    fn retract_if_full(&mut self) {
        loop {
            let (requests, _) = self.queues.decoding();
            if requests == 0 || self.pool.make_room(requests as u64) {
                return;
            }
            let running = self.queues.running.iter().enumerate();
            let least = running
                .filter(|(_, s)| requests == 1 || !s.is_prefilling())
                .min_by_key(|(_, s)| {
                    let input = std::cmp::Reverse(s.job.input_tokens);
                    (!s.is_prefilling(), s.generated, input)
                });
            let Some((at, _)) = least else { return };
            let mut sequence = self.queues.running.remove(at);
            self.pool.release(&mut sequence);
            sequence.target = sequence.job.input_tokens + sequence.generated;
            self.queues.waiting.push_back(sequence);
            self.queues.counters.retractions += 1;
            let running = &self.queues.running;
            let left: u64 = running.iter().map(Sequence::left_to_generate).sum();
            let done: u64 = running.iter().map(|s| s.generated).sum();
            let steps = 20 * running.len() as u64;
            self.ratio = ((done + steps) as f64 / (done + left + 1) as f64).clamp(self.ratio, 1.0);
        }
    }

    fn end_prefill(&mut self, parts: &[(JobId, u64)], told: &mut Vec<Emission>) {
        for &(job, _) in parts {
            let running = &mut self.queues.running;
            let Some(sequence) = running.iter_mut().find(|s| s.job.id == job) else {
                continue;
            };
            self.pool.share(sequence);
            if !sequence.is_prefilling() {
                sequence.generated += 1;
                self.queues.counters.generated_tokens += 1;
                told.push(Emission::Token { job });
            }
        }
        if self.limits.mixed {
            let decodes = |s: &Sequence| !parts.iter().any(|(job, _)| *job == s.job.id);
            self.decode_each(decodes, told);
        }
    }

    fn decode_each(&mut self, which: impl Fn(&Sequence) -> bool, told: &mut Vec<Emission>) {
        for sequence in &mut self.queues.running {
            if sequence.is_prefilling() || !which(sequence) {
                continue;
            }
            if !self.pool.take(sequence, 1) {
                continue;
            }
            sequence.target += 1;
            sequence.generated += 1;
            self.queues.counters.generated_tokens += 1;
            told.push(Emission::Token {
                job: sequence.job.id,
            });
        }
    }

    /// Takes out what is complete, and what its client has left.
    fn end_requests(&mut self, told: &mut Vec<Emission>) {
        let mut at = 0;
        while at < self.queues.running.len() {
            let sequence = &self.queues.running[at];
            let complete = sequence.generated == sequence.job.output_tokens;
            if !complete && !sequence.cancelled {
                at += 1;
                continue;
            }
            let mut sequence = self.queues.running.remove(at);
            self.pool.share(&mut sequence);
            self.pool.release(&mut sequence);
            if complete && !sequence.cancelled {
                told.push(Emission::Finished {
                    job: sequence.job.id,
                    cached_tokens: sequence.cached_tokens.unwrap_or(0),
                });
            }
        }
    }
}

impl Worker for Sglang {
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
        if let Some((step, end_s)) = self.step.take() {
            self.queues.now_s = end_s;
            match step {
                Step::Prefill(parts) => self.end_prefill(&parts, told),
                Step::Decode => self.decode_each(|_| true, told),
            }
            self.end_requests(told);
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
