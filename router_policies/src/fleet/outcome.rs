//! What became of a request: how it ended, and what its engine said of it.

use serde::Serialize;

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Ok,
    ClientDisconnect,
    WorkerError,
    Rejected,
    Timeout,
    /// The router itself could not send the request: it has no descriptor left, or finds no address.
    RouterError,
}

/// What an engine reported about a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: Option<u64>,
    pub cached_tokens: Option<u64>,
    /// Tokens of all its answers.
    pub output_tokens: Option<u64>,
}
