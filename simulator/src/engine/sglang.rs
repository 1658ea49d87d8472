//! SGLang (0.5.17): prefills go before decodes, in chunks; requests are let in while what
//! they will need fits beside a share of what those running may still generate.
//!
//! Follows `Scheduler.get_next_batch_to_run` and `PrefillAdder`. With the overlap scheduler a step is
//! composed while the one before it runs, so that a request that comes during a step is not in the
//! next one, but in the one after it.
//!
//! A worker that prefills for others keeps a prompt's KV until it has been sent. One that decodes takes
//! room for the whole prompt before it is prefilled (`DecodePreallocQueue`), all of it or what its
//! radix cache does not hold, and goes on from the first token when the KV has come. An elastic worker
//! does both beside prompts of its own.

use super::batch::Sequence;
use super::scheduler::{Core, Prefill, Scheduler, let_all_in};
use super::{Emission, JobId, Limits, Order, Part};
use crate::calibration::Calibration;

/// `CLIP_MAX_NEW_TOKENS`: more is never reserved for one answer.
const CLIP_NEW_TOKENS: u64 = 4096;
/// `new_token_ratio`: the share of what running requests may still generate that is kept for them. It
/// starts high, falls with every decode step, and rises when requests are retracted.
const RATIO_START: f64 = 0.7;
const RATIO_LEAST: f64 = 0.098;
const RATIO_STEP: f64 = (RATIO_START - RATIO_LEAST) / 600.0;

/// `num_reserved_decode_tokens`: kept for each request that decodes before room is given to another.
const KEPT_FOR_EACH: u64 = 512;

/// With more waiting, `lpm` falls back to `fcfs`.
const LPM_MOST_WAITING: usize = 128;

enum Step {
    /// The requests that prefill in this step.
    Prefill(Vec<JobId>),
    Decode,
}

pub struct Sglang {
    pub(super) core: Core,
    step: Step,
    ratio: f64,
}

/// A prefill step while it is put together.
struct Batch {
    jobs: Vec<JobId>,
    work: Prefill,
    chunk_left: u64,
    input_left: u64,
    /// Beyond what is locked: kept for answers of those that run, and of those let in here.
    promised: f64,
    /// None that begins here is cut by the chunk's end.
    whole: bool,
}

impl Batch {
    /// A request computes `part` tokens, in whose attention there are so many pairs.
    fn add(&mut self, job: JobId, part: u64, pairs: f64) {
        self.work.pairs += pairs;
        self.work.tokens += part;
        self.chunk_left -= part;
        self.input_left = self.input_left.saturating_sub(part);
        self.jobs.push(job);
    }
}

/// What is reserved for the rest of an answer.
fn answer_tokens(sequence: &Sequence) -> u64 {
    sequence.left_to_generate().min(CLIP_NEW_TOKENS)
}

impl Sglang {
    pub fn new(calibration: Calibration, limits: Limits) -> Self {
        Self {
            core: Core::new(calibration, limits, false),
            step: Step::Decode,
            ratio: RATIO_START,
        }
    }

    /// Gives room to prompts that others prefill, and lets those decode whose KV has come.
    fn hand_over(&mut self) {
        loop {
            let others = self.core.queues.running.len() + self.core.handed_over();
            let kept = KEPT_FOR_EACH * others as u64;
            if others >= self.core.limits.max_running || !self.core.reserve(kept) {
                break;
            }
        }
        let seen_until_s = self.core.seen_until_s;
        let arrived = std::mem::take(&mut self.core.handover.arrived);
        let (now, later): (Vec<Sequence>, Vec<Sequence>) = arrived
            .into_iter()
            .partition(|s| s.arrived_s <= seen_until_s);
        self.core.handover.arrived = later;
        if now.is_empty() {
            return;
        }
        let mut told = Vec::new();
        for mut sequence in now {
            self.core.pool.share(&mut sequence);
            let is_first = sequence.generated == 0;
            self.core.queues.running.push(sequence);
            if is_first {
                let at = self.core.queues.running.len() - 1;
                self.core.tell_token(at, &mut told);
            }
        }
        self.core.end_complete(&mut told);
        self.core.tells.append(&mut told);
    }

    fn compose_prefill(&mut self) -> Option<f64> {
        let running = &self.core.queues.running;
        let decoding = running.iter().filter(|s| !s.is_prefilling());
        let mut batch = Batch {
            jobs: Vec::new(),
            work: Prefill::default(),
            chunk_left: self.chunk_tokens(),
            input_left: self.core.limits.max_prefill_tokens,
            promised: decoding.map(|s| self.ratio * answer_tokens(s) as f64).sum(),
            whole: false,
        };
        let beside = self.beside(batch.chunk_left);
        if !self.go_on(&mut batch, beside.as_ref().map(|beside| beside.share)) {
            return None;
        }
        if let Some(beside) = beside {
            self.begin_beside(&beside.jobs, &mut batch);
            return self.compose_step(batch);
        }
        if batch.chunk_left > 0
            && self.core.limits.order == Order::Lpm
            && self.core.queues.waiting.len() <= LPM_MOST_WAITING
        {
            self.sort_by_prefix();
        }
        let has_room = |batch: &Batch| batch.chunk_left > 0 && batch.input_left > 0;
        let_all_in(self, &mut batch, has_room, Self::begin);
        self.compose_step(batch)
    }

    fn compose_step(&mut self, batch: Batch) -> Option<f64> {
        if batch.jobs.is_empty() {
            return None;
        }
        let (requests, context) = if self.mixes() {
            self.core.queues.decoding_but(&batch.jobs)
        } else {
            (0, 0)
        };
        let seconds = self.core.prefill_s(&batch.work, requests, context);
        self.step = Step::Prefill(batch.jobs);
        Some(seconds)
    }

    /// Requests decode in steps that prefill.
    fn mixes(&self) -> bool {
        self.core.limits.mixed || self.core.limits.target_itl_s.is_some()
    }

    fn begin_beside(&mut self, jobs: &[JobId], batch: &mut Batch) {
        batch.whole = true;
        for &job in jobs {
            let queues = &self.core.queues;
            let may = queues.running.len() < self.core.limits.max_running && batch.input_left > 0;
            let at = queues.waiting.iter().position(|s| s.job.id == job);
            let Some(at) = at.filter(|_| may) else { return };
            if !self.begin(at, batch) {
                return;
            }
        }
    }

    /// At most one prefill was cut by the chunk's end; it goes on before others begin, with its `share`
    /// of the chunk where some go along, beside room for the rest of it. False where there is no room for that.
    fn go_on(&mut self, batch: &mut Batch, share: Option<u64>) -> bool {
        let running = &mut self.core.queues.running;
        let Some(sequence) = running.iter_mut().find(|s| s.is_prefilling()) else {
            return true;
        };
        let before = sequence.computed;
        let part = (sequence.target - before).min(share.unwrap_or(batch.chunk_left));
        if !self.core.pool.take(sequence, part) {
            return false;
        }
        if !sequence.is_prefilling() || share.is_some() {
            let rest = sequence.target - sequence.computed;
            batch.promised += (rest + answer_tokens(sequence)) as f64;
        }
        let pairs = self.core.calibration.pairs(before, part);
        batch.add(sequence.job.id, part, pairs);
        true
    }

    /// Lets in the request at `at` of the queue, if it fits.
    fn begin(&mut self, at: usize, batch: &mut Batch) -> bool {
        let waiting = &self.core.queues.waiting[at];
        let answer = answer_tokens(waiting);
        let target = waiting.target;
        let found = self.core.pool.matched(&waiting.job, target);
        let extend = target - found.device_blocks as u64 * self.core.pool.block_tokens;
        let compute = extend - found.host_blocks as u64 * self.core.pool.block_tokens;
        // What the request itself is about to lock is no longer to be evicted for it.
        self.core.pool.cache.lock(found.node);
        let room = self.core.pool.available() as f64 - batch.promised;
        let is_too_much = compute >= batch.input_left && !batch.jobs.is_empty()
            || batch.whole && compute > batch.chunk_left;
        if (extend + answer) as f64 >= room || is_too_much {
            self.core.pool.cache.unlock(found.node);
            return false;
        }
        let Some((mut sequence, reload)) = self.core.let_in(at, &found) else {
            return false;
        };
        let part = compute.min(batch.chunk_left);
        let before = sequence.computed;
        let taken = self.core.pool.take(&mut sequence, part);
        debug_assert!(taken, "room was checked");
        if !sequence.is_prefilling() {
            batch.promised += answer as f64;
        }
        let pairs = self.core.calibration.pairs(before, part);
        batch.add(sequence.job.id, part, pairs);
        batch.work.reload += reload;
        self.core.queues.running.push(sequence);
        true
    }

    fn sort_by_prefix(&mut self) {
        let cache = &self.core.pool.cache;
        let waiting = &mut self.core.queues.waiting;
        let mut sorted: Vec<(usize, Sequence)> = waiting
            .drain(..)
            .map(|s| (cache.peek(s.job.cacheable()), s))
            .collect();
        sorted.sort_by_key(|(blocks, _)| std::cmp::Reverse(*blocks));
        waiting.extend(sorted.into_iter().map(|(_, s)| s));
    }

    fn compose_decode(&mut self) -> Option<f64> {
        self.retract_if_full();
        let (requests, context) = self.core.queues.decoding();
        if requests == 0 {
            return None;
        }
        self.ratio = (self.ratio - RATIO_STEP).max(RATIO_LEAST);
        self.step = Step::Decode;
        Some(self.core.decode_s(requests, context))
    }

    /// Sends requests back to the queue until every other can have one more token: those with the
    /// fewest tokens generated first, of these the longest prompts; a last one rather than a prefill
    /// that is under way.
    fn retract_if_full(&mut self) {
        loop {
            let queues = &mut self.core.queues;
            let (requests, _) = queues.decoding();
            if requests == 0 || self.core.pool.make_room(requests as u64) {
                return;
            }
            let running = queues.running.iter().enumerate();
            let least = running
                .filter(|(_, s)| requests == 1 || !s.is_prefilling())
                .min_by_key(|(_, s)| {
                    let input = std::cmp::Reverse(s.job.input_tokens);
                    (!s.is_prefilling(), s.generated, input)
                });
            let Some((at, _)) = least else { return };
            let mut sequence = queues.running.remove(at);
            self.core.pool.release(&mut sequence);
            queues.counters.retractions += 1;
            if sequence.job.part == Part::Decode {
                // The last token's KV is never there before the next step.
                sequence.target = sequence.job.input_tokens + sequence.generated - 1;
                self.core.handover.wanting.push_front(sequence);
            } else {
                sequence.target = sequence.job.input_tokens + sequence.generated;
                queues.waiting.push_back(sequence);
            }
            let running = &queues.running;
            let left: u64 = running.iter().map(Sequence::left_to_generate).sum();
            let done: u64 = running.iter().map(|s| s.generated).sum();
            let steps = 20 * running.len() as u64;
            self.ratio = ((done + steps) as f64 / (done + left + 1) as f64).clamp(self.ratio, 1.0);
        }
    }

    fn end_prefill(&mut self, jobs: &[JobId], told: &mut Vec<Emission>) {
        for &job in jobs {
            let Some(at) = self.core.position(job) else {
                continue;
            };
            let sequence = &mut self.core.queues.running[at];
            self.core.pool.share(sequence);
            let is_done = !sequence.is_prefilling();
            if sequence.job.part == Part::Prefill {
                told.push(Emission::Computed {
                    job,
                    tokens: sequence.computed,
                });
                if is_done && !sequence.cancelled {
                    self.core.keep_for_sending(at);
                }
            } else if is_done {
                self.core.tell_token(at, told);
            }
        }
        if self.mixes() {
            self.decode_each(|s| !jobs.contains(&s.job.id), told);
        }
    }

    fn decode_each(&mut self, which: impl Fn(&Sequence) -> bool, told: &mut Vec<Emission>) {
        for at in 0..self.core.queues.running.len() {
            let sequence = &mut self.core.queues.running[at];
            if sequence.is_prefilling() || !which(sequence) || !self.core.pool.take(sequence, 1) {
                continue;
            }
            sequence.target += 1;
            self.core.tell_token(at, told);
        }
    }
}

impl Scheduler for Sglang {
    fn core(&self) -> &Core {
        &self.core
    }

    fn core_mut(&mut self) -> &mut Core {
        &mut self.core
    }

    fn compose(&mut self) -> Option<f64> {
        self.hand_over();
        self.compose_prefill().or_else(|| self.compose_decode())
    }

    fn complete(&mut self, told: &mut Vec<Emission>) {
        match std::mem::replace(&mut self.step, Step::Decode) {
            Step::Prefill(jobs) => self.end_prefill(&jobs, told),
            Step::Decode => self.decode_each(|_| true, told),
        }
        self.core.end_complete(told);
    }

    fn rest(&mut self) {
        if self.core.queues.running.is_empty() {
            self.ratio = RATIO_START;
        }
    }
}
