//! `isl_bounding`: what is short, or mostly cached, is prefilled where it decodes. The default rule of
//! Dynamo's conditional disaggregation (dynamo-kv-router 1.6.1, `conditional_disagg.rs`; there
//! experimental and off by default).

use super::{Decision, Info, ParamInfo, Policy, Reason, Refusal, View, decode_first, parse_params};
use serde::Deserialize;

pub const INFO: Info = Info {
    name: "isl_bounding",
    summary: "local where few tokens are new and most are cached, else separated (Dynamo's rule)",
    rule: "W: lowest pending prefill + new + decode tokens; alone there when new < max_new_tokens and \
           new/input < max_new_share, else with the prefill worker that has the least predicted wait",
    params: &[
        ParamInfo {
            name: "max_new_tokens",
            default: "2048",
            meaning: "from so many new tokens on a request is separated",
        },
        ParamInfo {
            name: "max_new_share",
            default: "0.7",
            meaning: "from this share of new tokens in the prompt on a request is separated",
        },
    ],
    source: "NVIDIA Dynamo 1.6.1, conditional disaggregation, isl_bounding",
    measured: "not here, and no published numbers were found",
    build: |params| Ok(Box::new(parse_params::<IslBounding>(params)?)),
};

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct IslBounding {
    max_new_tokens: u64,
    max_new_share: f64,
}

impl Default for IslBounding {
    fn default() -> Self {
        Self {
            max_new_tokens: 2048,
            max_new_share: 0.7,
        }
    }
}

impl Policy for IslBounding {
    fn decide(&self, view: &View<'_>) -> Result<Decision, Refusal> {
        let worker = decode_first::choose(view)?;
        let new = view.new_tokens(worker);
        let share = new as f64 / view.request.input_tokens.max(1) as f64;
        let is_local = new < self.max_new_tokens && share < self.max_new_share;
        let reason = match is_local {
            true => Reason::NewBelowThreshold,
            false => Reason::NewAboveThreshold,
        };
        decode_first::place(view, worker, is_local, reason)
    }
}
