//! `nixl_threshold`: separated from a number of uncached tokens on. llm-d's `prefix-based-pd-decider`
//! (llm-d-router, docs at v0.8), which it uses before vLLM workers that exchange KV over NIXL.

use super::{Decision, Info, ParamInfo, Policy, Reason, Refusal, View, decode_first, parse_params};
use serde::Deserialize;

pub const INFO: Info = Info {
    name: "nixl_threshold",
    summary: "separated from a number of uncached tokens on (llm-d's rule)",
    rule: "W: lowest pending prefill + new + decode tokens; with the prefill worker that has the least \
           predicted wait when new on W ≥ threshold_tokens and that is not 0, else alone there",
    params: &[ParamInfo {
        name: "threshold_tokens",
        default: "16",
        meaning: "from so many new tokens on a request is separated; 0 never separates. llm-d's \
                  default is 0, its samples have 8 to 16",
    }],
    source: "llm-d-router v0.8, prefix-based-pd-decider (nonCachedTokens)",
    measured: "not here",
    build: |params| Ok(Box::new(parse_params::<NixlThreshold>(params)?)),
};

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct NixlThreshold {
    threshold_tokens: u64,
}

impl Default for NixlThreshold {
    fn default() -> Self {
        Self {
            threshold_tokens: 16,
        }
    }
}

impl Policy for NixlThreshold {
    fn decide(&self, view: &View<'_>) -> Result<Decision, Refusal> {
        let worker = decode_first::choose(view)?;
        let is_below = view.new_tokens(worker) < self.threshold_tokens;
        let is_local = self.threshold_tokens == 0 || is_below;
        let reason = match is_local {
            true => Reason::NewBelowThreshold,
            false => Reason::NewAboveThreshold,
        };
        decode_first::place(view, worker, is_local, reason)
    }
}
