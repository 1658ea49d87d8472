//! What a decision sees of the fleet: facts for the policy, and sites for admission.

use super::admission::{Site, Sites};
use super::marked::Marks;
use super::worker::{Worker, freed_tokens_per_s};
use super::{Fleet, Request, State};
use crate::policy::{Refusal, RequestFacts, Route, View, WorkerFacts};
use std::sync::Arc;

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

/// What was last found of a worker's facts: from when until when they hold, unless it changes, and what
/// others change of them for one request.
#[derive(Clone, Copy, Default)]
pub(super) struct KnownFacts {
    /// No worker was excluded.
    of_all: bool,
    /// When they were found. Who asks next may have read the clock before, and waited for the lock.
    from_s: f64,
    until_s: f64,
    routable: bool,
    serves_local: bool,
    /// For which it was found how fast it frees room.
    mean_output_tokens: f64,
}

/// The workers that may answer requests, kept so that a decision does not make all of them anew.
#[derive(Default)]
pub(super) struct KnownSites {
    /// Suspected or not.
    sites: Arc<Sites>,
    /// Slots of those that are suspected to hang, and of those whose circuits are open.
    suspects: Vec<usize>,
    resting: Vec<usize>,
    /// Of those that may have changed.
    stale: Marks,
}

impl State {
    /// Fills in what policies see of the workers, but for what they have of a request's prompt.
    pub(super) fn fill_facts(&mut self, exclude: &[String], now_s: f64) {
        self.end_untold(now_s);
        self.forget_rates(now_s);
        self.note_marked();
        let count = self.workers.len();
        self.facts.truncate(count);
        self.facts
            .extend((self.facts.len()..count).map(Worker::absent));
        self.known_facts.resize(count, KnownFacts::default());
        let mean_output_tokens = self.mean_output_tokens;
        for slot in 0..count {
            let known = self.known_facts[slot];
            let is_then = (known.from_s..known.until_s).contains(&now_s);
            let holds = known.of_all && exclude.is_empty() && is_then;
            if !holds || self.stale_facts.has(slot) {
                self.renew_facts(slot, exclude, now_s);
            }
            let known = &mut self.known_facts[slot];
            let facts = &mut self.facts[slot];
            (facts.routable, facts.serves_local) = (known.routable, known.serves_local);
            (facts.admits, facts.cached_tokens) = (true, 0);
            if known.mean_output_tokens != mean_output_tokens {
                known.mean_output_tokens = mean_output_tokens;
                facts.freed_tokens_per_s = freed_tokens_per_s(facts, mean_output_tokens);
            }
        }
        self.stale_facts.clear();
        if cfg!(any(test, debug_assertions)) {
            for slot in 0..count {
                let anew = self.facts_of(slot, exclude, now_s);
                assert_eq!(self.facts[slot], anew, "of slot {slot}");
            }
        }
        self.pardon(exclude, now_s);
    }

    /// Looks at a worker anew.
    fn renew_facts(&mut self, slot: usize, exclude: &[String], now_s: f64) {
        let worker = self.workers[slot].as_ref();
        let until_s = worker.map(|worker| worker.facts_hold_until_s(now_s));
        let facts = self.facts_of(slot, exclude, now_s);
        self.known_facts[slot] = KnownFacts {
            of_all: exclude.is_empty(),
            from_s: now_s,
            until_s: until_s.unwrap_or(f64::INFINITY),
            routable: facts.routable,
            serves_local: facts.serves_local,
            mean_output_tokens: self.mean_output_tokens,
        };
        self.facts[slot] = facts;
    }

    fn facts_of(&self, slot: usize, exclude: &[String], now_s: f64) -> WorkerFacts {
        let Some(worker) = &self.workers[slot] else {
            return Worker::absent(slot);
        };
        let mut facts = worker.facts(slot, exclude, now_s);
        facts.kept_tokens = self.kept_tokens(slot, worker);
        facts.freed_tokens_per_s = freed_tokens_per_s(&facts, self.mean_output_tokens);
        facts
    }

    /// Hands on which workers may have changed to all that keep something of them.
    fn note_marked(&mut self) {
        for slot in self.workers.marks.iter() {
            self.stale_facts.add(slot);
            self.known_sites.stale.add(slot);
        }
        self.workers.marks.clear();
    }

    /// The workers that may answer requests, as admission sees them. Those that are suspected to hang
    /// get nothing, unless all are that are not in `exclude`, nor do those that rest: see [`State::pardon`].
    pub(super) fn sites(&mut self, exclude: &[String], now_s: f64) -> Arc<Sites> {
        self.renew_sites(now_s);
        let known = &self.known_sites;
        if exclude.is_empty() && known.suspects.is_empty() && known.sites.open > 0 {
            return Arc::clone(&known.sites);
        }
        let mut sites = Sites::clone(&known.sites);
        let is_open = |site: &Site| site.routable && !exclude.contains(&site.spec.id);
        let is_suspect = |site: &Site| known.suspects.contains(&site.slot);
        let has_other = sites.iter().any(|site| is_open(site) && !is_suspect(site));
        if !sites.iter().any(is_open) {
            for site in &mut sites.all {
                let worker = self.workers[site.slot].as_ref();
                site.routable = worker.is_some_and(|worker| worker.is_up(&[]));
            }
        }
        if has_other {
            for site in &mut sites.all {
                site.routable &= !known.suspects.contains(&site.slot);
            }
        }
        sites.sum_up(&self.admission);
        Arc::new(sites)
    }

    /// Brings the known sites up to date: of the workers that may have changed, and of those that rest,
    /// which time alone ends.
    fn renew_sites(&mut self, now_s: f64) {
        self.note_marked();
        let known = &mut self.known_sites;
        if known.stale.is_empty() && known.resting.is_empty() {
            return;
        }
        let sites = Arc::make_mut(&mut known.sites);
        let mut limits_differ = false;
        for slot in std::mem::take(&mut known.resting) {
            known.stale.add(slot);
        }
        for slot in known.stale.iter() {
            let worker = self.workers[slot].as_ref();
            let worker = worker.filter(|worker| worker.is_site());
            let at = sites.all.binary_search_by_key(&slot, |site| site.slot);
            known.suspects.retain(|suspect| *suspect != slot);
            if let Some(worker) = worker {
                if worker.liveness.is_suspect() {
                    known.suspects.push(slot);
                }
                if worker.circuit.is_open() {
                    known.resting.push(slot);
                }
            }
            match (worker, at) {
                (Some(worker), Ok(at)) => {
                    let site = &mut sites.all[at];
                    let before = site.limits();
                    worker.renew_site(site, slot, now_s);
                    limits_differ |= before != site.limits();
                }
                (Some(worker), Err(at)) => {
                    sites.all.insert(at, worker.site(slot, now_s));
                    limits_differ = true;
                }
                (None, Ok(at)) => {
                    sites.all.remove(at);
                    limits_differ = true;
                }
                (None, Err(_)) => {}
            }
        }
        known.stale.clear();
        if limits_differ {
            sites.sum_up(&self.admission);
        }
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
