//! `lmetric`: pending and new prefill tokens, times requests; no affinity.

use super::{Decision, Info, NoParams, Policy, Reason, Refusal, Route, View, parse_params};

pub const INFO: Info = Info {
    name: "lmetric",
    summary: "prefill tokens waiting there times requests there; no affinity",
    rule: "lowest (pending_prefill + new) × requests, where new = input − cached on that worker",
    params: &[],
    source: "LMetric, OSDI 2026; agentic-kv, cache_aware_proxy.py, policy lmetric",
    measured: "8 × H20, 200 requests: within 2 % of linear on every metric; a worker that decodes \
               much but queues nothing scores 0 and becomes a hotspot (fixed in unified)",
    build: |params| {
        parse_params::<NoParams>(params)?;
        Ok(Box::new(Lmetric))
    },
};

struct Lmetric;

impl Policy for Lmetric {
    fn decide(&self, view: &View<'_>) -> Result<Decision, Refusal> {
        let best = view
            .lowest(view.local(), |worker| {
                (worker.pending_prefill_tokens + view.new_tokens(worker))
                    .saturating_mul(u64::from(worker.requests))
            })
            .ok_or(Refusal::NoCandidates)?;
        let route = Route::Local { worker: best.slot };
        Ok(Decision::unpredicted(route, Reason::LowestScore))
    }
}
