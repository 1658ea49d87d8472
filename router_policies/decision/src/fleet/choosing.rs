//! The policy's choice: asked for among the facts, and checked.

use super::view::check_candidates;
use super::{Fleet, Request, State};
use crate::policy::{Decision, Policy, Refusal, RequestFacts, Route, View};

/// How often, at most, the log says that a policy's choice is no candidate.
const COMPLAINT_INTERVAL_S: f64 = 10.0;

/// A policy's choice among the facts that are filled in.
pub(super) struct Choice {
    pub decision: Decision,
    pub facts: RequestFacts,
}

impl Fleet {
    /// Asks for the policy's choice, among `slots` if there are some.
    pub(super) fn choose(
        &self,
        state: &mut State,
        request: &Request,
        slots: Option<&[usize]>,
        choose: impl FnOnce(&dyn Policy, &View<'_>) -> Result<Decision, Refusal>,
    ) -> Result<Choice, Refusal> {
        for facts in &mut state.facts {
            facts.admits = slots.is_none();
        }
        for &slot in slots.unwrap_or_default() {
            state.facts[slot].admits = true;
        }
        let keys = state.admission.session_keys;
        let session_key = request.session_id.as_deref();
        let session_key = session_key.map(|id| keys.of_tenant(request.tenant, id));
        let facts = state.request_facts(request, session_key);
        let random = state.random.u64(..);
        let view = View {
            workers: &state.facts,
            request: &facts,
            sequence: state.sequence,
            random,
            separated_inflight: state.separated_inflight,
        };
        let decision = choose(self.policy.as_ref(), &view)?;
        if let Err(refusal) = check_candidates(&view, &decision.route) {
            self.complain(state, decision.route);
            return Err(refusal);
        }
        Ok(Choice { decision, facts })
    }

    /// Says in the log that the policy chose workers that are no candidates; not at every request, for it
    /// may be every request that it does so for.
    fn complain(&self, state: &State, route: Route) {
        let mut complaints = self.complaints.lock();
        complaints.unsaid += 1;
        let now_s = self.now_s();
        if complaints
            .last_s
            .is_some_and(|last_s| now_s - last_s < COMPLAINT_INTERVAL_S)
        {
            return;
        }
        let times = std::mem::take(&mut complaints.unsaid);
        complaints.last_s = Some(now_s);
        let name = |slot: usize| match state.workers.get(slot) {
            Some(Some(worker)) => format!("worker {}", worker.spec.id),
            _ => format!("slot {slot}, which has no worker"),
        };
        let chosen = match route {
            Route::Local { worker } => name(worker),
            Route::PrefillDecode { prefill, decode } => {
                format!(
                    "{} to prefill and {} to decode",
                    name(prefill),
                    name(decode)
                )
            }
        };
        ::log::error!(
            "policy {}: chose {chosen}: no candidate ({times} since the last such line)",
            self.policy_name
        );
    }
}
