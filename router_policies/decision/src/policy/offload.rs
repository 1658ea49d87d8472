//! `offload`: heavy requests are prefilled elsewhere, a few at a time; the rest follows `linear`.

use super::linear::Linear;
use super::{
    Decision, Info, ParamInfo, Policy, Reason, Refusal, Route, View, WorkerFacts, parse_params,
};
use serde::Deserialize;

pub const INFO: Info = Info {
    name: "offload",
    summary: "heavy requests prefill on another worker, at most a few at a time; the rest as linear",
    rule: "D as linear chooses; by new tokens there: warm < medium_tokens ≤ medium < heavy_tokens ≤ \
           heavy; heavy is separated while fewer than max_separated are on their way and \
           cached/input on D ≥ min_cached_share; P in rotation over D's partners, skipping those \
           with more than overload_factor × their mean of pending prefill tokens",
    params: &[
        ParamInfo {
            name: "medium_tokens",
            default: "5000",
            meaning: "new tokens from which a request is medium",
        },
        ParamInfo {
            name: "heavy_tokens",
            default: "20000",
            meaning: "new tokens from which a request is heavy",
        },
        ParamInfo {
            name: "max_separated",
            default: "4",
            meaning: "separated requests that may await their first token at once",
        },
        ParamInfo {
            name: "min_cached_share",
            default: "0.0",
            meaning: "the gate that the seeds used is 0.3; 0 switches it off",
        },
        ParamInfo {
            name: "overload_factor",
            default: "2.0",
            meaning: "prefill workers above this multiple of the mean are skipped",
        },
    ],
    source: "agentic-kv, cache_aware_proxy.py --offload",
    measured: "8 × H20 over Mooncake: near neutral (TTFT mean −7.8 %, TPOT p90 −3.1 %); the gate at \
               0.3 left 14 % of heavy requests to separate, and those were 51 % slower",
    build: |params| Ok(Box::new(parse_params::<Offload>(params)?)),
};

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Offload {
    medium_tokens: u64,
    heavy_tokens: u64,
    max_separated: u32,
    min_cached_share: f64,
    overload_factor: f64,
}

impl Default for Offload {
    fn default() -> Self {
        Self {
            medium_tokens: 5_000,
            heavy_tokens: 20_000,
            max_separated: 4,
            min_cached_share: 0.0,
            overload_factor: 2.0,
        }
    }
}

impl Offload {
    fn rotate<'a>(&self, view: &View<'a>, decode: &WorkerFacts) -> Option<&'a WorkerFacts> {
        let partners: Vec<_> = view.partners(decode).collect();
        let pending: u64 = partners.iter().map(|p| p.pending_prefill_tokens).sum();
        let limit = self.overload_factor * pending as f64 / partners.len() as f64;
        let start = view.sequence.checked_rem(partners.len() as u64)? as usize;
        let rotated = || partners[start..].iter().chain(&partners[..start]).copied();
        rotated()
            .find(|worker| worker.pending_prefill_tokens as f64 <= limit)
            .or_else(|| rotated().next())
    }
}

impl Policy for Offload {
    fn decide(&self, view: &View<'_>) -> Result<Decision, Refusal> {
        let (worker, _) = Linear::default()
            .choose(view)
            .ok_or(Refusal::NoCandidates)?;
        let local = |reason| {
            let route = Route::Local {
                worker: worker.slot,
            };
            Ok(Decision::unpredicted(route, reason))
        };
        let new = view.new_tokens(worker);
        if new < self.medium_tokens {
            return local(Reason::Warm);
        }
        if new < self.heavy_tokens {
            return local(Reason::Medium);
        }
        if view.separated_inflight >= self.max_separated {
            return local(Reason::SeparatedCap);
        }
        let share = worker.cached_tokens as f64 / view.request.input_tokens.max(1) as f64;
        if share < self.min_cached_share {
            return local(Reason::SourceCacheBelowThreshold);
        }
        if !worker.serves_decode {
            return local(Reason::NoPartner);
        }
        let Some(prefill) = self.rotate(view, worker) else {
            return local(Reason::NoPartner);
        };
        let route = Route::PrefillDecode {
            prefill: prefill.slot,
            decode: worker.slot,
        };
        Ok(Decision::unpredicted(route, Reason::Heavy))
    }
}
