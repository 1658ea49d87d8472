//! `migrate`: a session leaves an overloaded worker, and takes its KV along.

use super::{
    Decision, Info, ParamInfo, Policy, Reason, Refusal, Route, View, WorkerFacts, parse_params,
};
use serde::Deserialize;

pub const INFO: Info = Info {
    name: "migrate",
    summary: "a session's decode moves off an overloaded worker; recent migrations count as load",
    rule: "load = requests + migration_weight × migrations to the worker in the last 60 s; stay \
           while load(affine) ≤ overload_factor × mean load; else decode on the worker with the \
           lowest load, prefilled where the prefix is: on the affine worker if it can prefill for \
           the target, else on the partner with the least wait, else locally on the target",
    params: &[
        ParamInfo {
            name: "overload_factor",
            default: "1.3",
            meaning: "the session moves above this multiple of the mean load",
        },
        ParamInfo {
            name: "migration_weight",
            default: "1.0",
            meaning: "requests that one recent migration counts for",
        },
    ],
    source: "agentic-kv, elastic migration v3 with its sliding window",
    measured: "8 × H20 over Mooncake: TTFT p90 10.8 s, 9.7 s with the target chosen by cache; plain \
               unified 7.8 s",
    build: |params| Ok(Box::new(parse_params::<Migrate>(params)?)),
};

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Migrate {
    overload_factor: f64,
    migration_weight: f64,
}

impl Default for Migrate {
    fn default() -> Self {
        Self {
            overload_factor: 1.3,
            migration_weight: 1.0,
        }
    }
}

impl Policy for Migrate {
    fn decide(&self, view: &View<'_>) -> Result<Decision, Refusal> {
        let load = |worker: &WorkerFacts| {
            f64::from(worker.requests) + self.migration_weight * f64::from(worker.recent_migrations)
        };
        let (count, total) = view.local().fold((0u32, 0.0), |(count, total), w| {
            (count + 1, total + load(w))
        });
        let affine = view.affine_local();
        if let Some(affine) = affine
            && load(affine) <= self.overload_factor * total / f64::from(count)
        {
            let route = Route::Local {
                worker: affine.slot,
            };
            return Ok(Decision::unpredicted(route, Reason::Affinity));
        }
        let target = view
            .lowest(view.local(), load)
            .ok_or(Refusal::NoCandidates)?;
        let local = Route::Local {
            worker: target.slot,
        };
        let Some(affine) = affine else {
            return Ok(Decision::unpredicted(local, Reason::LowestScore));
        };
        if target.slot == affine.slot {
            return Ok(Decision::unpredicted(local, Reason::Affinity));
        }
        let source = if target.serves_decode {
            view.partners(target)
                .find(|p| p.slot == affine.slot)
                .or_else(|| view.lowest(view.partners(target), |p| view.remote_prefill_s(p)))
        } else {
            None
        };
        let route = source.map_or(local, |source| Route::PrefillDecode {
            prefill: source.slot,
            decode: target.slot,
        });
        Ok(Decision::unpredicted(route, Reason::Migration))
    }
}
