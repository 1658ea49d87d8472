//! What is reserved on a worker.

use serde::Serialize;

/// Requests and tokens of a worker. All zero when it is idle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Load {
    pub requests: u32,
    pub prefilling: u32,
    pub decoding: u32,
    pub pending_prefill_tokens: u64,
    pub decode_tokens: u64,
    /// Requests that will decode here once they are prefilled, here or elsewhere, and their contexts.
    pub arriving: u32,
    pub arriving_tokens: u64,
    pub ongoing_tokens: u64,
}

impl Load {
    /// A request with `input_tokens` comes to the worker.
    pub(super) fn enter(&mut self, input_tokens: u64) {
        self.requests += 1;
        self.ongoing_tokens += input_tokens;
    }

    /// It has left.
    pub(super) fn leave(&mut self, input_tokens: u64) {
        self.requests -= 1;
        self.ongoing_tokens -= input_tokens;
    }
}
