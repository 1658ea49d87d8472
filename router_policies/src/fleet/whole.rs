//! Requests that cannot be prefilled on one worker and decoded on another.

use super::{Fleet, Request, Reservation};
use crate::policy::{Decision, Policy, Reason, Refusal, Route, View, WorkerFacts};
use std::sync::Arc;

impl Fleet {
    /// Like [`Fleet::decide`], for a request that only some workers can separate: those whose
    /// transfer group `may_separate` names. The policy chooses among what is left; one that only
    /// separates leaves the choice to the number of requests.
    ///
    /// # Errors
    /// [`Refusal::NoCandidates`] where no worker can serve it alone, else as [`Fleet::decide`].
    pub fn decide_whole(
        self: &Arc<Self>,
        request: &Request,
        exclude: &[String],
        may_separate: impl Fn(u32) -> bool,
    ) -> Result<Reservation, Refusal> {
        self.place(request, exclude, |policy, view| {
            restricted(policy, view, may_separate)
        })
    }

    /// Whether any worker, up or not, serves requests alone.
    pub fn serves_alone(&self) -> bool {
        let state = self.state.lock();
        state
            .workers
            .iter()
            .flatten()
            .any(|worker| !worker.removed && super::abilities(&worker.spec).0)
    }
}

fn restricted(
    policy: &dyn Policy,
    view: &View<'_>,
    may_separate: impl Fn(u32) -> bool,
) -> Result<Decision, Refusal> {
    let workers: Vec<WorkerFacts> = view
        .workers
        .iter()
        .map(|worker| {
            let mut worker = worker.clone();
            let may = may_separate(worker.transfer_group);
            worker.serves_prefill &= may;
            worker.serves_decode &= may;
            worker
        })
        .collect();
    let rest = View {
        workers: &workers,
        ..*view
    };
    if let Ok(decision) = policy.decide(&rest)
        && super::check_candidates(&rest, &decision.route).is_ok()
    {
        return Ok(decision);
    }
    let least = rest
        .local()
        .min_by_key(|worker| (worker.requests, worker.slot))
        .ok_or(Refusal::NoCandidates)?;
    let route = Route::Local { worker: least.slot };
    Ok(Decision::unpredicted(route, Reason::NotSeparable))
}
