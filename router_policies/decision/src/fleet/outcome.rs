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

impl Usage {
    /// What an engine counted. Every prompt has tokens: where there are none of it, nothing was counted, and
    /// the zeros beside that say nothing.
    pub fn counted(
        prompt_tokens: Option<u64>,
        cached_tokens: Option<u64>,
        output_tokens: Option<u64>,
    ) -> Self {
        if prompt_tokens == Some(0) {
            return Self::default();
        }
        Self {
            prompt_tokens,
            cached_tokens,
            output_tokens,
        }
    }
}
