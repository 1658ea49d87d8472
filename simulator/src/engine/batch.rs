//! What both engines' schedulers have in common: sequences, the pool of KV tokens, eviction.

use super::{Counters, Job, JobId, Limits, Occupancy};
use crate::cache::{Cache, Match, NodeId, ROOT};
use std::collections::VecDeque;

/// A request inside an engine.
pub struct Sequence {
    pub job: Job,
    pub arrived_s: f64,
    /// Tokens of prompt and answer whose KV is there.
    pub computed: u64,
    /// Tokens of the answer.
    pub generated: u64,
    /// Tokens that must be computed before the next token of the answer: the prompt, and what had been
    /// generated when it was retracted.
    pub target: u64,
    /// The part of the KV that is in the cache's tree, and its node, which is locked.
    pub in_tree: u64,
    pub node: NodeId,
    /// Of the prompt, when it was first let in.
    pub cached_tokens: Option<u64>,
    /// When what it waits for has come from host memory.
    pub loaded_s: f64,
    pub cancelled: bool,
}

impl Sequence {
    pub fn new(job: Job, arrived_s: f64) -> Self {
        Self {
            target: job.input_tokens,
            job,
            arrived_s,
            computed: 0,
            generated: 0,
            in_tree: 0,
            node: ROOT,
            cached_tokens: None,
            loaded_s: 0.0,
            cancelled: false,
        }
    }

    /// KV tokens that are the sequence's own.
    pub fn private(&self) -> u64 {
        self.computed - self.in_tree
    }

    pub fn is_prefilling(&self) -> bool {
        self.computed < self.target
    }

    pub fn left_to_generate(&self) -> u64 {
        self.job.output_tokens - self.generated
    }
}

/// The KV pool: a cache's tree and the sequences' own tokens.
pub struct Pool {
    pub cache: Cache,
    pub capacity: u64,
    pub block_tokens: u64,
    private: u64,
    prefix_cache: bool,
}

impl Pool {
    pub fn new(limits: &Limits, by_block: bool) -> Self {
        Self {
            cache: Cache::new(
                limits.eviction,
                by_block,
                limits.host_kv_tokens / limits.block_tokens,
                limits.log_changes,
            ),
            capacity: limits.kv_tokens,
            block_tokens: limits.block_tokens,
            private: 0,
            prefix_cache: limits.prefix_cache,
        }
    }

    pub fn free(&self) -> u64 {
        self.capacity - self.cache.device_blocks() * self.block_tokens - self.private
    }

    /// Whether a job fits beside nothing else. Engines keep a little room for themselves.
    pub fn could_hold(&self, job: &Job) -> bool {
        job.input_tokens + job.output_tokens + self.block_tokens < self.capacity
    }

    pub fn evictable(&self) -> u64 {
        self.cache.evictable_blocks() * self.block_tokens
    }

    pub fn available(&self) -> u64 {
        self.free() + self.evictable()
    }

    /// Tokens that running sequences hold.
    pub fn held(&self) -> u64 {
        self.capacity - self.available()
    }

    pub fn matched(&mut self, job: &Job, tokens: u64) -> Match {
        if !self.prefix_cache {
            return Match {
                node: ROOT,
                device_blocks: 0,
                host_node: ROOT,
                host_blocks: 0,
            };
        }
        let most = (tokens.saturating_sub(1) / self.block_tokens) as usize;
        let stream = &job.stream[..most.min(job.stream.len())];
        self.cache.find(stream)
    }

    /// Takes `tokens` for a sequence, evicting if it must. False, and nothing taken, if they are not
    /// to be had.
    pub fn take(&mut self, sequence: &mut Sequence, tokens: u64) -> bool {
        if !self.make_room(tokens) {
            return false;
        }
        sequence.computed += tokens;
        self.private += tokens;
        true
    }

    /// Evicts until `tokens` are free. False if there are not so many.
    pub fn make_room(&mut self, tokens: u64) -> bool {
        if self.available() < tokens {
            return false;
        }
        let free = self.free();
        if free < tokens {
            self.cache
                .evict((tokens - free).div_ceil(self.block_tokens));
        }
        true
    }

    /// Gives the full blocks of what a sequence has computed to the tree, and locks them there. What
    /// others have stored meanwhile is not kept twice.
    pub fn share(&mut self, sequence: &mut Sequence) {
        if !self.prefix_cache {
            return;
        }
        let blocks = sequence.job.beginning(sequence.computed);
        let in_tree = blocks.len() as u64 * self.block_tokens;
        if in_tree <= sequence.in_tree {
            return;
        }
        // Given back first, for the tree takes room for what it does not hold yet.
        self.private -= in_tree - sequence.in_tree;
        let prompt = sequence.job.input_tokens / self.block_tokens;
        let node = self.cache.insert_turn(blocks, prompt as usize);
        self.cache.lock(node);
        self.cache.unlock(sequence.node);
        (sequence.node, sequence.in_tree) = (node, in_tree);
    }

    /// Lets go of all that a sequence holds; what it shared stays in the tree until it is evicted.
    pub fn release(&mut self, sequence: &mut Sequence) {
        self.private -= sequence.private();
        self.cache.unlock(sequence.node);
        sequence.node = ROOT;
        sequence.in_tree = 0;
        sequence.computed = 0;
    }
}

/// Queues and counters of an engine.
pub struct Queues {
    pub waiting: VecDeque<Sequence>,
    pub running: Vec<Sequence>,
    pub counters: Counters,
    pub now_s: f64,
}

impl Queues {
    pub fn new() -> Self {
        Self {
            waiting: VecDeque::new(),
            running: Vec::new(),
            counters: Counters::default(),
            now_s: 0.0,
        }
    }

    /// Takes a job out of the queue, or marks it where it runs.
    pub fn cancel(&mut self, job: JobId) {
        self.waiting.retain(|s| s.job.id != job);
        for sequence in &mut self.running {
            if sequence.job.id == job {
                sequence.cancelled = true;
            }
        }
    }

    pub fn occupancy(&self, pool: &Pool) -> Occupancy {
        Occupancy {
            running: self.running.len() as u32,
            waiting: self.waiting.len() as u32,
            used_tokens: pool.held(),
            capacity_tokens: pool.capacity,
        }
    }

    /// Those that decode, and their contexts in tokens, in all.
    pub fn decoding(&self) -> (usize, u64) {
        self.decoding_but(&[])
    }

    /// As [`Queues::decoding`], without `jobs`.
    pub fn decoding_but(&self, jobs: &[JobId]) -> (usize, u64) {
        let running = self.running.iter();
        let decoding = running.filter(|s| !s.is_prefilling() && !jobs.contains(&s.job.id));
        decoding.fold((0, 0), |(count, context), s| {
            (count + 1, context + s.computed)
        })
    }
}
