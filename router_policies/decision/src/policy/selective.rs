//! `selective`: `unified` chooses the worker; its prefill goes elsewhere when that pays.

use super::unified::Unified;
use super::{
    Alternative, Decision, Info, ParamInfo, Policy, Reason, Refusal, Route, View, WorkerFacts,
    parse_params,
};
use serde::Deserialize;

pub const INFO: Info = Info {
    name: "selective",
    summary: "as unified, but the prefill goes to another worker when every gate says that it pays",
    rule: "W as unified chooses; separate (P, W) when new on W ≥ threshold_tokens, W is decoding, a \
           partner P holds ≥ min_cached_share of the input, and the delay spared to W's decodes \
           exceeds the added time of the request and P's own decodes by the margin; the first gate \
           that says no is the reason",
    params: &[
        ParamInfo {
            name: "threshold_tokens",
            default: "8192",
            meaning: "fewer new tokens are always prefilled locally",
        },
        ParamInfo {
            name: "min_cached_share",
            default: "0.3",
            meaning: "share of the input that P must hold; 0 lets cold workers prefill",
        },
        ParamInfo {
            name: "margin",
            default: "0.2",
            meaning: "benefit must exceed (1 + margin) × cost",
        },
        ParamInfo {
            name: "overload_factor",
            default: "1.3",
            meaning: "as in unified",
        },
        ParamInfo {
            name: "decode_weight",
            default: "0.01",
            meaning: "as in unified",
        },
    ],
    source: "agentic-kv, elastic migration v2 (unified_v2)",
    measured: "8 × H20 over Mooncake, 1,214 requests: 0.41 % separated (76 % have few new tokens, \
               19 % meet no decode), and first tokens 10–20 × later than predicted, which is why \
               the rates here are learnt",
    build: |params| Ok(Box::new(parse_params::<Selective>(params)?)),
};

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Selective {
    threshold_tokens: u64,
    min_cached_share: f64,
    margin: f64,
    overload_factor: f64,
    decode_weight: f64,
}

impl Default for Selective {
    fn default() -> Self {
        let Unified {
            overload_factor,
            decode_weight,
            ..
        } = Unified::default();
        Self {
            threshold_tokens: 8192,
            min_cached_share: 0.3,
            margin: 0.2,
            overload_factor,
            decode_weight,
        }
    }
}

impl Policy for Selective {
    fn decide(&self, view: &View<'_>) -> Result<Decision, Refusal> {
        let unified = Unified {
            overload_factor: self.overload_factor,
            decode_weight: self.decode_weight,
            ..Unified::default()
        };
        let (worker, _) = unified.choose(view).ok_or(Refusal::NoCandidates)?;
        let local_route = Route::Local {
            worker: worker.slot,
        };
        let local_s = view.local_prefill_s(worker);
        let local = |reason, alternatives| {
            Ok(Decision {
                route: local_route,
                reason,
                predicted_s: Some(local_s),
                cost: None,
                alternatives,
            })
        };
        let new = view.new_tokens(worker);
        if new < self.threshold_tokens {
            return local(Reason::NewBelowThreshold, Vec::new());
        }
        if worker.decoding == 0 {
            return local(Reason::ChosenNotDecoding, Vec::new());
        }
        if !worker.serves_decode || view.partners(worker).next().is_none() {
            return local(Reason::NoPartner, Vec::new());
        }
        let enough = self.min_cached_share * view.request.input_tokens as f64;
        let holders = view
            .partners(worker)
            .filter(|p| p.cached_tokens as f64 >= enough);
        let Some(prefill) = view.lowest(holders, |p| view.remote_prefill_s(p)) else {
            return local(Reason::SourceCacheBelowThreshold, Vec::new());
        };
        let separate_route = Route::PrefillDecode {
            prefill: prefill.slot,
            decode: worker.slot,
        };
        let separate_s = view.separated_s(prefill, worker);
        let alternatives = vec![
            Alternative {
                route: local_route,
                predicted_s: local_s,
                cost: None,
            },
            Alternative {
                route: separate_route,
                predicted_s: separate_s,
                cost: None,
            },
        ];
        // Every stream that decodes on a worker waits while a prompt is prefilled there.
        let stall_s = |w: &WorkerFacts| f64::from(w.decoding) * view.compute_s(w);
        let benefit_s = stall_s(worker);
        let cost_s = (separate_s - local_s).max(0.0) + stall_s(prefill);
        if benefit_s <= (1.0 + self.margin) * cost_s {
            return local(Reason::NotWorthIt, alternatives);
        }
        Ok(Decision {
            route: separate_route,
            reason: Reason::WorthIt,
            predicted_s: Some(separate_s),
            cost: None,
            alternatives,
        })
    }
}
