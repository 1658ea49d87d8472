//! How long an engine's steps take: one set of constants a (model, GPU, engine, version).

use serde::{Deserialize, Serialize};

/// Constants of one engine on one GPU. Defaults: Qwen3-Coder-30B-A3B in bf16 on an H200, SGLang
/// 0.5.17, fitted on the steps of a run without eviction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Calibration {
    /// What it is of, for people: model, GPU, engine and version.
    pub name: String,
    /// A prefill step takes `overhead + tokens / tokens_per_s + pairs / pairs_per_s`, where a new token
    /// makes a pair with every token before it.
    pub prefill_overhead_s: f64,
    pub prefill_tokens_per_s: f64,
    pub prefill_pairs_per_s: f64,
    /// For each token that a request finds cached, in either tier, the step in which vLLM lets it in
    /// takes so much longer.
    pub found_token_s: f64,
    /// A prefill makes the pairs of the whole sequence, its cached prefix too, as SGLang's attention
    /// on a CPU does (`torch_native`).
    pub attends_all: bool,
    /// A decode step takes `base + per_request · requests + per_context_token · their contexts`.
    pub decode_base_s: f64,
    pub decode_per_request_s: f64,
    pub decode_per_context_token_s: f64,
    /// From host memory to the device. SGLang hides it behind the prefill, layer by layer, as far as
    /// that takes longer; vLLM loads beside the steps of others, before the prefill.
    pub reload_tokens_per_s: f64,
    /// From one worker's device to another's, for a transfer alone on its link.
    pub transfer_tokens_per_s: f64,
    pub transfer_overhead_s: f64,
    /// From the client's sending to the engine's queue (HTTP, parsing, the router), and back.
    pub request_s: f64,
    pub token_s: f64,
}

impl Default for Calibration {
    fn default() -> Self {
        Self {
            name: "Qwen3-Coder-30B-A3B bf16, H200, SGLang 0.5.17".to_owned(),
            prefill_overhead_s: 0.0196062,
            prefill_tokens_per_s: 214_511.0,
            prefill_pairs_per_s: 6.81115e8,
            found_token_s: 0.0,
            attends_all: false,
            decode_base_s: 3.5837e-3,
            decode_per_request_s: 0.760759e-3,
            decode_per_context_token_s: 2.31269e-8,
            reload_tokens_per_s: 254_000.0,
            transfer_tokens_per_s: 300_000.0,
            transfer_overhead_s: 0.03,
            request_s: 0.005,
            token_s: 0.001,
        }
    }
}

impl Calibration {
    /// Pairs of tokens that attention looks at when `new` tokens follow `before`; without new ones none.
    pub fn pairs(&self, before: u64, new: u64) -> f64 {
        let (before, new) = (before as f64, new as f64);
        if self.attends_all && new > 0.0 {
            (before + new) * (before + new) / 2.0
        } else {
            new * (before + new / 2.0)
        }
    }

    /// Seconds of a step that prefills `tokens` with `pairs`, and decodes for `requests` with
    /// `context_tokens` between them; the part of the decodes' base is in the overhead.
    pub fn mixed_s(&self, tokens: u64, pairs: f64, requests: usize, context_tokens: u64) -> f64 {
        self.prefill_overhead_s
            + tokens as f64 / self.prefill_tokens_per_s
            + pairs / self.prefill_pairs_per_s
            + self.decode_per_request_s * requests as f64
            + self.decode_per_context_token_s * context_tokens as f64
    }

    /// Seconds that `tokens` take from host memory to the device.
    pub fn reload_s(&self, tokens: u64) -> f64 {
        tokens as f64 / self.reload_tokens_per_s
    }

    /// Seconds of a step that decodes only.
    pub fn decode_s(&self, requests: usize, context_tokens: u64) -> f64 {
        self.decode_base_s
            + self.decode_per_request_s * requests as f64
            + self.decode_per_context_token_s * context_tokens as f64
    }

    /// # Errors
    /// The field that is no positive number.
    pub fn check(&self) -> Result<(), String> {
        let speeds = [
            ("prefill_tokens_per_s", self.prefill_tokens_per_s),
            ("prefill_pairs_per_s", self.prefill_pairs_per_s),
            ("reload_tokens_per_s", self.reload_tokens_per_s),
            ("transfer_tokens_per_s", self.transfer_tokens_per_s),
            ("decode_base_s", self.decode_base_s),
        ];
        let times = [
            ("prefill_overhead_s", self.prefill_overhead_s),
            ("found_token_s", self.found_token_s),
            ("decode_per_request_s", self.decode_per_request_s),
            (
                "decode_per_context_token_s",
                self.decode_per_context_token_s,
            ),
            ("transfer_overhead_s", self.transfer_overhead_s),
            ("request_s", self.request_s),
            ("token_s", self.token_s),
        ];
        for (name, value) in speeds {
            if !(value.is_finite() && value > 0.0) {
                return Err(format!(
                    "calibration.{name}: expected more than 0, not {value}"
                ));
            }
        }
        for (name, value) in times {
            if !(value.is_finite() && value >= 0.0) {
                return Err(format!(
                    "calibration.{name}: expected 0 or more, not {value}"
                ));
            }
        }
        Ok(())
    }
}
