//! `pd`: every request separated.

use super::{
    Alternative, Decision, Info, ParamInfo, Policy, Reason, Refusal, Route, View, WorkerFacts,
    parse_params,
};
use serde::Deserialize;

pub const INFO: Info = Info {
    name: "pd",
    summary: "every request separated: least prefill wait; the decode worker with least to be sent and done",
    rule: "decode: among workers whose KV room takes the new tokens and the expected output (all, if \
           none has room), lowest new tokens (to be sent there) + load_weight × context tokens of its \
           requests, those on their way among them; then most room; prefill: least predicted time \
           until the prefill has run (queue and new tokens)",
    params: &[ParamInfo {
        name: "load_weight",
        default: "1.0",
        meaning: "what a context token of another request on the decode worker costs, in tokens sent \
                  there; with 0 the longest prefix wins whatever the load",
    }],
    source: "static prefill/decode disaggregation, as SGLang's and vLLM's own routers do it",
    measured: "2 × H200, SGLang 0.5.17 with decode radix cache over NIXL: a cold 64k prompt leaves \
               running decodes at 11.9 ms a token (402 ms colocated)",
    build: |params| Ok(Box::new(parse_params::<Pd>(params)?)),
};

/// Sending a token's KV takes an H200 some 2 µs, once. A context token makes every step of its worker
/// longer, for each stream there: 2.9 ms for 100,000, some 9 µs over 300 steps. A weight of 1 is between
/// what that says and what leaving a copy behind in the old worker's cache costs.
const LOAD_WEIGHT: f64 = 1.0;

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Pd {
    load_weight: f64,
}

impl Default for Pd {
    fn default() -> Self {
        Self {
            load_weight: LOAD_WEIGHT,
        }
    }
}

impl Policy for Pd {
    fn decide(&self, view: &View<'_>) -> Result<Decision, Refusal> {
        let has_room = |worker: &WorkerFacts| {
            worker.kv_room_tokens() >= view.new_tokens(worker) + view.request.expected_output_tokens
        };
        let decode = view
            .lowest(view.decode_with_partner(), |worker| {
                let load = self.load_weight * worker.ongoing_tokens as f64;
                (
                    !has_room(worker),
                    view.new_tokens(worker) as f64 + load,
                    u64::MAX - worker.kv_room_tokens(),
                )
            })
            .ok_or(Refusal::NoCandidates)?;
        let predicted_s = |worker: &WorkerFacts| view.separated_s(worker, decode);
        let prefill = view
            .lowest(view.partners(decode), |worker| {
                view.remote_prefill_s(worker)
            })
            .ok_or(Refusal::NoCandidates)?;
        let route = |prefill: &WorkerFacts| Route::PrefillDecode {
            prefill: prefill.slot,
            decode: decode.slot,
        };
        Ok(Decision {
            route: route(prefill),
            reason: Reason::AlwaysSeparate,
            predicted_s: Some(predicted_s(prefill)),
            cost: None,
            alternatives: view
                .partners(decode)
                .map(|worker| Alternative {
                    route: route(worker),
                    predicted_s: predicted_s(worker),
                    cost: None,
                })
                .collect(),
        })
    }
}
