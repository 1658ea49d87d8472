//! What Dynamo's and llm-d's rules share: the worker that decodes is chosen first, and only then whether
//! another one prefills for it.

use super::{Decision, Reason, Refusal, Route, View, WorkerFacts};

/// The worker with the least to do for this request and for those that it has, in tokens: prompt tokens
/// that wait, new ones, and the context that it decodes. Dynamo's cost with a prefill weight of 1 (its
/// blocks are tokens here); llm-d adds up weighted scores of the same facts.
pub(super) fn choose<'a>(view: &View<'a>) -> Result<&'a WorkerFacts, Refusal> {
    let answers = |worker: &&WorkerFacts| {
        worker.routable
            && worker.admits
            && (worker.serves_local
                || (worker.serves_decode && view.partners(worker).next().is_some()))
    };
    let workers = view.workers.iter().filter(answers);
    let cost = |worker: &WorkerFacts| {
        worker.pending_prefill_tokens + view.new_tokens(worker) + worker.decode_tokens
    };
    view.lowest(workers, cost).ok_or(Refusal::NoCandidates)
}

/// Serves the request on `worker` alone if `is_local`, else with another worker's prefill; the other way
/// where the first is not possible. `reason` stands for what was wanted.
pub(super) fn place(
    view: &View<'_>,
    worker: &WorkerFacts,
    is_local: bool,
    reason: Reason,
) -> Result<Decision, Refusal> {
    let local = Route::Local {
        worker: worker.slot,
    };
    if is_local && worker.serves_local {
        return Ok(Decision::unpredicted(local, reason));
    }
    let partner = match worker.serves_decode {
        true => view.lowest(view.partners(worker), |p| view.remote_prefill_s(p)),
        false => None,
    };
    match partner {
        Some(prefill) => {
            let route = Route::PrefillDecode {
                prefill: prefill.slot,
                decode: worker.slot,
            };
            let reason = match is_local {
                true => Reason::AlwaysSeparate,
                false => reason,
            };
            Ok(Decision::unpredicted(route, reason))
        }
        None if worker.serves_local => Ok(Decision::unpredicted(local, Reason::NoPartner)),
        None => Err(Refusal::NoCandidates),
    }
}
