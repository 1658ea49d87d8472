//! What a decision sees of the fleet: facts for the policy, and sites for residency.

use super::residency::Site;
use super::worker::Worker;
use super::{Fleet, Request, State};
use crate::policy::{Refusal, RequestFacts, Route, View, WorkerFacts};

impl Fleet {
    /// Whether the policy could place a request now.
    pub fn is_ready(&self) -> bool {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        state.fill_facts(&[], self.now_s());
        self.would_place(state)
    }

    /// Whether the policy finds a place for some request among the facts that are filled in.
    pub(super) fn would_place(&self, state: &State) -> bool {
        let request = RequestFacts::default();
        let view = View {
            workers: &state.facts,
            request: &request,
            sequence: 0,
            random: 0,
            separated_inflight: 0,
        };
        self.policy.decide(&view).is_ok()
    }

    /// Whether the policy could place a request if every worker were up.
    pub fn could_place(&self) -> bool {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        state.fill_facts(&[], self.now_s());
        for facts in &mut state.facts {
            facts.routable = facts.serves_local || facts.serves_prefill || facts.serves_decode;
        }
        self.would_place(state)
    }
}

impl State {
    pub(super) fn fill_facts(&mut self, exclude: &[String], now_s: f64) {
        self.end_untold(now_s);
        self.forget_rates(now_s);
        self.facts.clear();
        for (slot, worker) in self.workers.iter().enumerate() {
            self.facts.push(match worker {
                Some(worker) => WorkerFacts {
                    kept_tokens: self.kept_tokens(slot, worker),
                    ..worker.facts(slot, exclude, self.mean_output_tokens, now_s)
                },
                None => Worker::absent(slot),
            });
        }
        self.pardon(exclude, now_s);
    }

    /// The workers that may answer requests, as residency sees them. Those that are suspected to hang
    /// get nothing, unless all are that are not in `exclude`, nor do those that rest: see [`State::pardon`].
    pub(super) fn sites(&mut self, exclude: &[String], now_s: f64) -> Vec<Site> {
        let mut sites = std::mem::take(&mut self.spare_sites);
        let mut count = 0;
        let (mut has_suspect, mut has_other) = (false, false);
        for (slot, worker) in self.workers.iter().enumerate() {
            let Some(worker) = worker.as_ref().filter(|worker| worker.is_site()) else {
                continue;
            };
            match sites.get_mut(count) {
                Some(site) => worker.renew_site(site, slot, now_s),
                None => sites.push(worker.site(slot, now_s)),
            }
            let site = &sites[count];
            let is_suspect = worker.liveness.is_suspect();
            has_suspect |= is_suspect;
            has_other |= !is_suspect && site.routable && !exclude.contains(&site.spec.id);
            count += 1;
        }
        sites.truncate(count);
        let is_open = |site: &Site| site.routable && !exclude.contains(&site.spec.id);
        if !sites.iter().any(is_open) {
            for site in &mut sites {
                let worker = self.workers[site.slot].as_ref();
                site.routable = worker.is_some_and(|worker| worker.is_up(&[]));
            }
        }
        if has_suspect && has_other {
            for site in &mut sites {
                let worker = self.workers[site.slot].as_ref();
                site.routable &= worker.is_some_and(|worker| !worker.liveness.is_suspect());
            }
        }
        sites
    }

    pub(super) fn site(&self, slot: usize, now_s: f64) -> Option<Site> {
        let worker = self.workers.get(slot)?.as_ref();
        let worker = worker.filter(|worker| worker.is_site())?;
        Some(worker.site(slot, now_s))
    }

    pub(super) fn request_facts(
        &mut self,
        request: &Request,
        session: Option<u64>,
    ) -> RequestFacts {
        let session = session.and_then(|key| self.sessions.get(&key));
        let affine = session.and_then(|session| {
            let worker = self.workers.get(session.slot)?.as_ref()?;
            (worker.serial == session.serial && !worker.removed).then_some(session.slot)
        });
        let mean = self.mean_output_tokens as u64;
        RequestFacts {
            input_tokens: request.prompt.tokens(),
            prompts: request.prompts.max(1),
            expected_output_tokens: request.max_output_tokens.map_or(mean, |max| max.min(mean)),
            has_session: request.session_id.is_some(),
            turn: session.map_or(0, |session| session.turns),
            affine,
        }
    }
}

/// A policy's answer must be one of its candidates.
pub(super) fn check_candidates(view: &View<'_>, route: &Route) -> Result<(), Refusal> {
    let allowed = match *route {
        Route::Local { worker } => view.local().any(|w| w.slot == worker),
        Route::PrefillDecode { prefill, decode } => view
            .decode()
            .find(|w| w.slot == decode)
            .is_some_and(|d| view.partners(d).any(|p| p.slot == prefill)),
    };
    if allowed {
        Ok(())
    } else {
        Err(Refusal::OutsideCandidates)
    }
}
