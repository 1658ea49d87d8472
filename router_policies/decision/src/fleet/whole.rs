//! Requests that cannot be prefilled on one worker and decoded on another.

use super::Fleet;
use crate::policy::{Decision, Policy, Reason, Refusal, Route, View, WorkerFacts};

/// Which workers may share a request: one prefills it, another decodes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Separable {
    #[default]
    ByAll,
    /// Those of one transfer group.
    InGroup(u32),
    ByNone,
}

impl Separable {
    /// Whether workers of a transfer group may share it.
    pub(super) fn is_in(self, group: u32) -> bool {
        match self {
            Self::ByAll => true,
            Self::InGroup(only) => group == only,
            Self::ByNone => false,
        }
    }
}

impl Fleet {
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

/// The policy's choice for a request that some workers may share. Where not all may, the policy chooses
/// among what is left; one that only separates leaves the choice to the number of requests.
pub(super) fn decide(
    separable: Separable,
) -> impl FnOnce(&dyn Policy, &View<'_>) -> Result<Decision, Refusal> {
    move |policy, view| match separable {
        Separable::ByAll => policy.decide(view),
        _ => restricted(policy, view, separable),
    }
}

fn restricted(
    policy: &dyn Policy,
    view: &View<'_>,
    separable: Separable,
) -> Result<Decision, Refusal> {
    let workers: Vec<WorkerFacts> = view
        .workers
        .iter()
        .map(|worker| {
            let mut worker = worker.clone();
            let may = separable.is_in(worker.transfer_group);
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
        && super::view::check_candidates(&rest, &decision.route).is_ok()
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
