//! Engines as the simulation sees them: jobs in, tokens out, at times of their own.

mod batch;
mod paced;
mod scheduler;
mod sglang;
mod vllm;

pub use sglang::Sglang;
pub use vllm::Vllm;

use crate::cache::{Change, Totals};
use serde::Serialize;
use std::sync::Arc;

/// Names a job to whoever gave it to the worker.
pub type JobId = usize;

/// Which part of a request a worker does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Part {
    #[default]
    Whole,
    /// The prompt, whose KV then goes to another worker.
    Prefill,
    /// The answer: room for the prompt is taken first, and its KV comes from another worker.
    Decode,
}

/// A request as an engine gets it.
#[derive(Clone, Debug)]
pub struct Job {
    pub id: JobId,
    /// Ids of the full blocks of the prompt and of the answer that it will get.
    pub stream: Arc<[u64]>,
    pub block_tokens: u64,
    pub input_tokens: u64,
    /// The answer ends here, and says so beforehand (`max_tokens` with `ignore_eos`).
    pub output_tokens: u64,
    pub part: Part,
}

impl Job {
    /// Blocks of the prompt that may come from a cache: the last token is always computed.
    pub fn cacheable(&self) -> &[u64] {
        &self.stream[..(self.input_tokens.saturating_sub(1) / self.block_tokens) as usize]
    }

    /// Full blocks of the first `tokens` tokens of prompt and answer.
    pub fn beginning(&self, tokens: u64) -> &[u64] {
        let blocks = (tokens / self.block_tokens) as usize;
        &self.stream[..blocks.min(self.stream.len())]
    }
}

/// What a worker tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Emission {
    /// A token of the answer, the first or a later one.
    Token { job: JobId },
    /// The answer is complete. `cached_tokens` as the engine reports them, the part of them that came
    /// from host memory included.
    Finished { job: JobId, cached_tokens: u64 },
    /// The job fits nowhere.
    Rejected { job: JobId },
    /// Room for a prompt has been taken: its first `held_tokens` are here already.
    Reserved { job: JobId, held_tokens: u64 },
    /// Of a prompt that is prefilled for another worker, the first `tokens` are there to be sent.
    Computed { job: JobId, tokens: u64 },
    /// All of it is, and the first token of the answer with it.
    Prefilled { job: JobId, cached_tokens: u64 },
}

/// A worker's counters, in tokens, since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Counters {
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub reloaded_tokens: u64,
    /// Computed by prefill steps; more than what was not cached where requests were retracted.
    pub prefilled_tokens: u64,
    pub generated_tokens: u64,
    pub retractions: u64,
    /// Of prompts that other workers prefilled.
    pub received_tokens: u64,
    pub prefill_s: f64,
    pub decode_s: f64,
    pub steps: u64,
}

/// An engine's own view of its load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Occupancy {
    pub running: u32,
    pub waiting: u32,
    pub used_tokens: u64,
    pub capacity_tokens: u64,
}

/// One engine under virtual time.
pub trait Worker {
    /// A request arrives.
    fn submit(&mut self, job: Job, now_s: f64);
    /// The client has left; what is running of the job ends with the step.
    fn cancel(&mut self, job: JobId, now_s: f64);
    /// What was prefilled for another worker has all been sent.
    fn sent(&mut self, job: JobId, now_s: f64);
    /// What was prefilled elsewhere has all come.
    fn received(&mut self, job: JobId, now_s: f64);
    /// When the worker next does something of its own; none while it has nothing to do.
    fn next_s(&self) -> Option<f64>;
    /// Lets time pass to [`Worker::next_s`], and adds to `told` what happened then.
    fn advance(&mut self, told: &mut Vec<Emission>);
    fn occupancy(&self) -> Occupancy;
    fn counters(&self) -> Counters;
    fn cache_totals(&self) -> Totals;
    /// What the cache holds now, in tokens: on the device, in host memory.
    fn cached(&self) -> (u64, u64);
    /// Takes the changes of the cache since the last call.
    fn take_changes(&mut self, into: &mut Vec<Change>);
}

/// What an engine is told at its start.
#[derive(Clone, Debug)]
pub struct Limits {
    pub kv_tokens: u64,
    pub host_kv_tokens: u64,
    pub block_tokens: u64,
    /// Of a prefill step (SGLang), of a step in all (vLLM).
    pub chunk_tokens: u64,
    pub max_prefill_tokens: u64,
    pub max_running: usize,
    pub eviction: crate::cache::Eviction,
    pub order: Order,
    /// Decodes in the steps that prefill.
    pub mixed: bool,
    /// The same, in chunks that keep a step with decodes within so many seconds (`sglang_ext.pacing`).
    pub target_itl_s: Option<f64>,
    pub prefix_cache: bool,
    pub log_changes: bool,
}

/// Whose prefill comes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    #[default]
    Fcfs,
    /// The longest cached prefix.
    Lpm,
}
