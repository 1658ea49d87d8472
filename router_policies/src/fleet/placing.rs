//! Placing requests: the gate says where a request may go, the policy chooses, the choice is reserved
//! and logged, in one step under the fleet's lock. A turn that has to wait for room gets a [`Ticket`].

use super::log::{self, DecisionRecord, Event, PrefixSource, Reserved};
use super::prefix::hash::Unit;
use super::reservation::{Noted, Reservation, Share};
use super::residency::footprint::Coarse;
use super::residency::queue::{Admitted, Progress, WaitingTurn};
use super::residency::sessions::Identity;
use super::residency::{
    Asked, Go, Residence, ResidencyRecord, Seat, Site, WaitReason, Wake, site_of,
};
use super::whole::{self, Separable};
use super::{
    COMPLAINT_INTERVAL_S, ESTIMATE_BLOCK_TOKENS, Fleet, Request, SGLANG_GROUP, State,
    can_serve_whole, check_candidates, session_key,
};
use crate::policy::{Decision, Policy, Refusal, Route, View};
use parking_lot::MutexGuard;
use std::borrow::Cow;
use std::sync::Arc;
use std::time::Instant;

/// Answers of one request that are booked for, at most: more than engines run of one at once.
const MAX_ANSWERS: u64 = 1024;

/// What came of asking for a place.
#[expect(
    clippy::large_enum_variant,
    reason = "nearly every request is placed, and a box would be an allocation for each"
)]
pub enum Admit {
    Placed(Reservation),
    /// The turn waits for room; `wake` is called when [`Fleet::place_ticket`] is worth a try.
    Waiting(Ticket),
    Refused(Refused),
}

/// Why a request was not placed and does not wait.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Refused {
    ByPolicy(Refusal),
    /// As many turns wait as may.
    QueueFull {
        retry_after_s: f64,
    },
    WaitedTooLong {
        retry_after_s: f64,
    },
}

/// A turn's place in the queue. Dropping it leaves the queue.
pub struct Ticket {
    fleet: Arc<Fleet>,
    /// None once what becomes of the queue's entry is somebody else's business.
    id: Option<u64>,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let Some(id) = self.id else { return };
        let mut state = self.fleet.state.lock();
        let left = state.residency.leave(id, false, self.fleet.now_s());
        if left.is_some() {
            self.fleet.settle(state);
        }
    }
}

/// How a request comes to its worker.
enum Way {
    /// Past the gate.
    Past,
    Gate(Go),
    /// It has waited, and its room is booked.
    Booked(Admitted),
}

struct Entry {
    way: Way,
    identity: Identity,
    /// The workers that may answer, where they have been looked at.
    sites: Vec<Site>,
    /// To be booked for its answer.
    output_tokens: u64,
    waited_s: f64,
}

/// A policy's choice among the facts that are filled in.
struct Choice {
    decision: Decision,
    facts: crate::policy::RequestFacts,
}

/// When a placement began: by the wall, for how long it takes, and by the fleet's clock.
#[derive(Clone, Copy)]
struct Begun {
    at: Instant,
    now_s: f64,
}

impl Fleet {
    /// Asks for a place. Turns of sessions that have one, and others that there is room for, are placed
    /// at once: the gate says on which workers, the policy chooses among them. Others wait: `wake` is
    /// then called, without any lock, whenever [`Fleet::place_ticket`] is worth a try. `exclude`
    /// names workers that already failed this request.
    pub fn admit(
        self: &Arc<Self>,
        request: &Request,
        exclude: &[String],
        wake: impl Fn() + Send + Sync + 'static,
    ) -> Admit {
        let begun = self.begin();
        let now_s = begun.now_s;
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let identity = state.meet(request, exclude, now_s);
        let output_tokens = state.output_tokens(request);
        let arrived_s = request.arrived_s.unwrap_or(now_s);
        let entry = |way, sites| Entry {
            way,
            identity: identity.clone(),
            sites,
            output_tokens,
            waited_s: now_s - arrived_s,
        };
        if !state.residency.gates() {
            let placed = self.conclude(guard, begun, request, entry(Way::Past, Vec::new()));
            return placed.map_or_else(
                |refusal| Admit::Refused(Refused::ByPolicy(refusal)),
                Admit::Placed,
            );
        }
        let sites = state.sites(exclude, now_s);
        let not_for = state.not_for(request, exclude);
        let by_slot = state.facts.iter().map(|facts| facts.cached_tokens);
        let cached = state.residency.cached(by_slot.collect());
        let asked = Asked {
            key: identity.key,
            has_session: identity.name.is_some(),
            prompt: Coarse::of(&request.prompt, state.residency.text_scale()),
            output_tokens,
            cached: &cached,
            exclude: &not_for,
            arrived_s,
            parent: request.hints.parent_session.as_deref().map(session_key),
        };
        let mut home = state.residency.residence_of(&asked, &sites);
        if let Some(site) = home
            && state.residency.has_lost_place(&asked, site, now_s)
        {
            let lost = super::residency::GiveUp::Lost;
            state.residency.lose_place(site, identity.key, lost, now_s);
            home = None;
        }
        let verdict = match home {
            None if state.residency.must_queue(now_s) => Err(WaitReason::BehindOthers),
            _ => state.residency.ask_now(&asked, &sites, now_s),
        };
        let mut not_on = not_for.to_vec();
        let reason = match verdict {
            Ok(go) => {
                match self.choose(
                    state,
                    request,
                    Some(&go.slots),
                    whole::decide(request.separable),
                ) {
                    Ok(choice) => {
                        let placed =
                            self.commit(guard, begun, request, choice, entry(Way::Gate(go), sites));
                        return placed.map_or_else(
                            |refusal| Admit::Refused(Refused::ByPolicy(refusal)),
                            Admit::Placed,
                        );
                    }
                    Err(refusal) => {
                        let refused = sites.iter().filter(|site| go.slots.contains(&site.slot));
                        not_on.extend(refused.map(|site| site.spec.id.clone()));
                        if !has_other(&sites, &not_on) {
                            self.settle(guard);
                            return Admit::Refused(Refused::ByPolicy(refusal));
                        }
                        WaitReason::NoRoom
                    }
                }
            }
            Err(WaitReason::NoWorker) => {
                let placed = self.conclude(guard, begun, request, entry(Way::Past, Vec::new()));
                return placed.map_or_else(
                    |refusal| Admit::Refused(Refused::ByPolicy(refusal)),
                    Admit::Placed,
                );
            }
            Err(reason) => reason,
        };
        let grows_at = home.filter(|_| reason == WaitReason::Growth);
        let grows_at = grows_at.map(|site| site.slot);
        let new = WaitingTurn {
            is_first_turn: state.residency.is_first_turn(identity.key),
            identity: identity.clone(),
            prompt: Arc::new(request.prompt.thinned(ESTIMATE_BLOCK_TOKENS)),
            output_tokens,
            exclude: not_on,
            arrived_s,
            parent: asked.parent,
            grows_at,
            cached: Arc::new(cached),
            cached_at_s: now_s,
            wake: Arc::new(wake) as Wake,
        };
        match state
            .residency
            .wait(new, &request.request_id, reason, now_s)
        {
            Ok(id) => {
                state.pump(now_s);
                self.fetch(guard, begun, request, exclude, id)
            }
            Err(full) => {
                self.settle(guard);
                let retry_after_s = full.retry_after_s;
                Admit::Refused(Refused::QueueFull { retry_after_s })
            }
        }
    }

    /// Places a turn that has waited, if it was let in; else it goes on waiting, or has waited too long.
    pub fn place_ticket(
        self: &Arc<Self>,
        mut ticket: Ticket,
        request: &Request,
        exclude: &[String],
    ) -> Admit {
        match ticket.id.take() {
            Some(id) => self.fetch(self.state.lock(), self.begin(), request, exclude, id),
            None => Admit::Refused(Refused::ByPolicy(Refusal::NoCandidates)),
        }
    }

    fn fetch(
        self: &Arc<Self>,
        mut guard: MutexGuard<'_, State>,
        begun: Begun,
        request: &Request,
        exclude: &[String],
        id: u64,
    ) -> Admit {
        let now_s = begun.now_s;
        let state = &mut *guard;
        let admitted = match state.residency.progress(id) {
            Some(Progress::Admitted(admitted)) => admitted.clone(),
            Some(Progress::Waiting) => {
                self.settle(guard);
                return Admit::Waiting(self.ticket(id));
            }
            Some(Progress::Expired) | None => {
                state.residency.leave(id, false, now_s);
                let retry_after_s = state.residency.retry_after_s(now_s);
                self.settle(guard);
                return Admit::Refused(Refused::WaitedTooLong { retry_after_s });
            }
        };
        state.fill_facts(exclude, now_s);
        state.fill_cached(&request.prompt);
        let sites = state.sites(exclude, now_s);
        let site = site_of(&sites, admitted.slot)
            .filter(|site| site.serial == admitted.serial && site.routable);
        let Some(site) = site else {
            state.residency.requeue(id, now_s, None);
            self.settle(guard);
            return Admit::Waiting(self.ticket(id));
        };
        let only = [admitted.slot];
        let choice = self.choose(
            state,
            request,
            Some(&only),
            whole::decide(request.separable),
        );
        match choice {
            Ok(choice) => {
                let Some(waiter) = state.residency.leave(id, true, now_s) else {
                    return Admit::Refused(Refused::ByPolicy(Refusal::NoCandidates));
                };
                let entry = Entry {
                    way: Way::Booked(admitted),
                    identity: waiter.turn.identity,
                    sites,
                    output_tokens: waiter.turn.output_tokens,
                    waited_s: now_s - waiter.turn.arrived_s,
                };
                match self.commit(guard, begun, request, choice, entry) {
                    Ok(reservation) => Admit::Placed(reservation),
                    Err(refusal) => Admit::Refused(Refused::ByPolicy(refusal)),
                }
            }
            Err(refusal) => {
                state.residency.requeue(id, now_s, Some(site));
                if !state.residency.may_wait_for(id, &sites) {
                    state.residency.leave(id, false, now_s);
                    self.settle(guard);
                    return Admit::Refused(Refused::ByPolicy(refusal));
                }
                self.settle(guard);
                Admit::Waiting(self.ticket(id))
            }
        }
    }

    fn ticket(self: &Arc<Self>, id: u64) -> Ticket {
        Ticket {
            fleet: Arc::clone(self),
            id: Some(id),
        }
    }

    /// Lets in those of the waiting turns that there is room for by now. To be called when
    /// [`Fleet::next_pump_s`] has passed; every other occasion the fleet sees itself.
    pub fn pump(&self) {
        self.settle(self.state.lock());
    }

    /// When time alone could change, next, who is let in, by the fleet's clock; none while nothing waits.
    pub fn next_pump_s(&self) -> Option<f64> {
        self.state.lock().residency.next_pump_s(self.now_s())
    }

    /// Turns that wait for room.
    pub fn waiting_turns(&self) -> usize {
        self.state.lock().residency.waiting()
    }

    /// Pumps, releases the lock, and does what has to be done without it.
    pub(super) fn settle(&self, mut state: MutexGuard<'_, State>) {
        state.pump(self.now_s());
        let outbox = state.residency.take_outbox();
        drop(state);
        outbox
            .events
            .into_iter()
            .for_each(|event| self.sink.send(event));
        outbox.wakes.iter().for_each(|wake| wake());
    }

    /// Picks and reserves in one step, past the gate of residency. `exclude` names workers that already
    /// failed this request.
    ///
    /// # Errors
    /// The policy's refusal; nothing is reserved then.
    pub fn decide(
        self: &Arc<Self>,
        request: &Request,
        exclude: &[String],
    ) -> Result<Reservation, Refusal> {
        self.place(request, exclude, whole::decide(request.separable))
    }

    /// Reserves on the worker called `id`, by the decision that `choose` makes of its slot.
    ///
    /// # Errors
    /// [`Refusal::NoCandidates`] when the worker is gone, else as [`Fleet::place`].
    pub fn place_on(
        self: &Arc<Self>,
        request: &Request,
        id: &str,
        exclude: &[String],
        choose: impl FnOnce(usize) -> Decision,
    ) -> Result<Reservation, Refusal> {
        self.place_from(request, exclude, |state| {
            let slot = state.slot_of(id).ok_or(Refusal::NoCandidates)?;
            let worker = state.workers[slot].as_ref();
            // Policies do not send a decode worker whole requests, but some engines take them.
            if worker.is_some_and(|worker| can_serve_whole(&worker.spec)) {
                state.facts[slot].serves_local = true;
            }
            self.choose(state, request, None, |_, _| Ok(choose(slot)))
        })
    }

    /// Like [`Fleet::decide`], with the choice made by `choose` instead of the policy alone.
    ///
    /// # Errors
    /// The refusal of `choose`, or [`Refusal::OutsideCandidates`].
    pub fn place(
        self: &Arc<Self>,
        request: &Request,
        exclude: &[String],
        choose: impl FnOnce(&dyn Policy, &View<'_>) -> Result<Decision, Refusal>,
    ) -> Result<Reservation, Refusal> {
        self.place_from(request, exclude, |state| {
            self.choose(state, request, None, choose)
        })
    }

    /// Places where `choose` says, past the gate, once the facts are filled in.
    fn place_from(
        self: &Arc<Self>,
        request: &Request,
        exclude: &[String],
        choose: impl FnOnce(&mut State) -> Result<Choice, Refusal>,
    ) -> Result<Reservation, Refusal> {
        let begun = self.begin();
        let now_s = begun.now_s;
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let identity = state.meet(request, exclude, now_s);
        let output_tokens = state.output_tokens(request);
        let choice = choose(state)?;
        let entry = Entry {
            way: Way::Past,
            identity,
            sites: Vec::new(),
            output_tokens,
            waited_s: request.arrived_s.map_or(0.0, |then_s| now_s - then_s),
        };
        self.commit(guard, begun, request, choice, entry)
    }

    fn begin(&self) -> Begun {
        Begun {
            at: Instant::now(),
            now_s: self.now_s(),
        }
    }

    /// Chooses among all workers and places.
    fn conclude(
        self: &Arc<Self>,
        mut guard: MutexGuard<'_, State>,
        begun: Begun,
        request: &Request,
        entry: Entry,
    ) -> Result<Reservation, Refusal> {
        let choice = self.choose(&mut guard, request, None, whole::decide(request.separable))?;
        self.commit(guard, begun, request, choice, entry)
    }

    /// Asks for the policy's choice, among `slots` if there are some.
    fn choose(
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
        let session_key = request.session_id.as_deref().map(session_key);
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

    /// Reserves what was chosen, and logs it.
    fn commit(
        self: &Arc<Self>,
        mut guard: MutexGuard<'_, State>,
        begun: Begun,
        request: &Request,
        choice: Choice,
        entry: Entry,
    ) -> Result<Reservation, Refusal> {
        let now_s = begun.now_s;
        let state = &mut *guard;
        let Choice { decision, facts } = choice;
        let view = View {
            workers: &state.facts,
            request: &facts,
            sequence: state.sequence,
            random: 0,
            separated_inflight: state.separated_inflight,
        };
        state.sequence += 1;
        let answering = decision.route.answering();
        let prefilling = decision.route.prefilling();
        let new_tokens = view.new_tokens(&state.facts[prefilling]);
        let prefix_source = match (request.prompt.unit, &state.workers[prefilling]) {
            (Unit::Tokens, Some(worker)) => worker.prefix_source,
            _ => PrefixSource::Estimate,
        };
        let cached_tokens: Vec<(usize, u64)> = state
            .facts
            .iter()
            .filter(|worker| worker.routable && worker.cached_tokens > 0)
            .map(|worker| (worker.slot, worker.cached_tokens))
            .collect();
        let until_token_s = match decision.route {
            Route::Local { worker } => view.local_prefill_s(&state.facts[worker]),
            Route::PrefillDecode { prefill, decode } => {
                view.separated_s(&state.facts[prefill], &state.facts[decode])
            }
        };
        let delta_tokens = view.new_tokens(&state.facts[answering]);
        // SGLang's prefill workers answer once the KV is sent, vLLM's once it is there to be sent.
        let is_sent_by_end = state.facts[prefilling].transfer_group == SGLANG_GROUP;
        let mut share = Share {
            id: state.sequence,
            route: decision.route,
            input_tokens: facts.input_tokens,
            new_tokens,
            prompts: facts.prompts,
            answers: request.answers,
            new_pairs: view.pairs(state.facts[prefilling].cached_tokens, new_tokens),
            delta_tokens,
            delta_after_prefill: (!is_sent_by_end).then_some(delta_tokens),
            lacks_room: state.facts[answering].lacking_tokens(facts.input_tokens) > 0,
            found_no_queue: false,
            found_decodes: false,
            until_token_s,
            untold_until_us: (!request.stream).then_some(((now_s + until_token_s) * 1e6) as u64),
            key: entry.identity.key,
            turn: 0,
        };
        let (seat, residency) = state.sit_down(request, entry, decision.route, now_s)?;
        share.turn = seat.turn;
        state.reserve(&mut share, now_s);
        for slot in [prefilling, answering] {
            if let Some(worker) = state.worker_mut(slot) {
                worker.circuit.placed(now_s);
            }
        }
        let session = request.session_id.as_deref().map(session_key);
        let session = session.map(|key| (key, state.note_session(key, answering, now_s)));
        let prompt = state.note_prompt(&request.prompt, decision.route);

        let name = |slot: usize| {
            let spec = state.workers[slot].as_ref().map(|w| Arc::clone(&w.spec));
            spec.ok_or(Refusal::OutsideCandidates)
        };
        let answering_spec = name(answering)?;
        let prefill_spec = match decision.route {
            Route::Local { .. } => None,
            Route::PrefillDecode { prefill, .. } => Some(name(prefill)?),
        };
        let named = |route: Route| -> Result<log::NamedRoute, Refusal> {
            Ok(match route {
                Route::Local { worker } => log::NamedRoute::Local {
                    worker: name(worker)?,
                },
                Route::PrefillDecode { prefill, decode } => log::NamedRoute::PrefillDecode {
                    prefill: name(prefill)?,
                    decode: name(decode)?,
                },
            })
        };
        let alternatives = decision
            .alternatives
            .iter()
            .map(|a| Ok((named(a.route)?, a.predicted_s, a.cost)))
            .collect::<Result<_, Refusal>>()?;
        let cached_tokens = cached_tokens
            .into_iter()
            .map(|(slot, tokens)| Ok((name(slot)?, tokens)))
            .collect::<Result<_, Refusal>>()?;
        let route = named(decision.route)?;
        let reserved = match &prefill_spec {
            None => vec![Reserved {
                worker: Arc::clone(&answering_spec),
                prefill_tokens: new_tokens,
                decode_tokens: facts.input_tokens,
            }],
            Some(prefill) => vec![
                Reserved {
                    worker: Arc::clone(prefill),
                    prefill_tokens: new_tokens,
                    decode_tokens: 0,
                },
                Reserved {
                    worker: Arc::clone(&answering_spec),
                    prefill_tokens: 0,
                    decode_tokens: facts.input_tokens,
                },
            ],
        };
        let decision_id = format!("{:016x}", state.random.u64(..));
        let signs = state.signs([prefilling, answering]);
        let of_answering = state.worker_mut(answering);
        let begun_at = of_answering.map_or_else(Default::default, |worker| worker.batch_time);
        self.settle(guard);

        let record = Arc::new(DecisionRecord {
            decision_id: decision_id.clone(),
            ts_unix_s: log::unix_now_s(),
            request_id: request.request_id.clone(),
            session_id: request.session_id.clone(),
            policy: self.policy_name.clone(),
            route,
            reason: decision.reason,
            input_tokens: facts.input_tokens,
            new_tokens,
            cached_tokens,
            prefix_source,
            alternatives,
            predicted_s: decision.predicted_s,
            cost: decision.cost,
            reserved,
            decision_us: begun.at.elapsed().as_secs_f64() * 1e6,
            residency,
        });
        self.sink.send(Event::Decision(record));
        let noted = Noted {
            prompt,
            session,
            begun: begun_at,
        };
        let reservation = Reservation::new(
            Arc::clone(self),
            decision_id,
            share,
            seat,
            answering_spec,
            prefill_spec,
            signs,
            now_s,
        );
        Ok(reservation.having(noted, request.received_s))
    }
}

/// Whether there is a worker that may answer and is not among `not_on`.
fn has_other(sites: &[Site], not_on: &[String]) -> bool {
    sites
        .iter()
        .any(|site| site.routable && !not_on.contains(&site.spec.id))
}

impl State {
    /// Tokens to be booked for all the answers that are made of a request.
    fn output_tokens(&self, request: &Request) -> u64 {
        let (limit, mean) = (request.max_output_tokens, self.mean_output_tokens);
        let each = self.residency.output_tokens(limit, mean);
        each.saturating_mul(request.answers.clamp(1, MAX_ANSWERS))
    }

    /// Ids of the workers that cannot answer a request, `exclude` among them.
    fn not_for<'a>(&self, request: &Request, exclude: &'a [String]) -> Cow<'a, [String]> {
        if request.separable == Separable::ByAll {
            return Cow::Borrowed(exclude);
        }
        let unable = self.facts.iter().zip(&self.workers);
        let unable = unable.filter_map(|(facts, worker)| {
            let may = facts.serves_local || request.separable.is_in(facts.transfer_group);
            (!may).then(|| worker.as_ref().map(|worker| worker.spec.id.clone()))?
        });
        let unable: Vec<String> = unable.collect();
        if unable.is_empty() {
            return Cow::Borrowed(exclude);
        }
        Cow::Owned([exclude, &unable].concat())
    }

    /// Looks at a request: what every worker has of it, and whose it is.
    fn meet(&mut self, request: &Request, exclude: &[String], now_s: f64) -> Identity {
        self.fill_facts(exclude, now_s);
        self.fill_cached(&request.prompt);
        let prompt = Coarse::of(&request.prompt, self.residency.text_scale());
        let identity = self
            .residency
            .identify(request.session_id.as_deref(), &prompt);
        if request.arrived_s.is_none() {
            self.residency
                .arrive(identity.key, &prompt, &request.hints, now_s);
        }
        identity
    }

    /// Books a request's place on the worker that answers.
    fn sit_down(
        &mut self,
        request: &Request,
        entry: Entry,
        route: Route,
        now_s: f64,
    ) -> Result<(Seat, ResidencyRecord), Refusal> {
        let slot = route.answering();
        let by_slot = self.facts.iter().map(|facts| facts.cached_tokens);
        let cached = self.residency.cached(by_slot.collect());
        let Entry {
            way,
            identity,
            mut sites,
            output_tokens,
            waited_s,
        } = entry;
        if sites.is_empty() {
            sites = match self.residency.gates() {
                true => self.sites(&[], now_s),
                false => self.site(slot, now_s).into_iter().collect(),
            };
        }
        let site = site_of(&sites, slot).ok_or(Refusal::OutsideCandidates)?;
        let prompt = Coarse::of(&request.prompt, self.residency.text_scale());
        let asked = Asked {
            key: identity.key,
            has_session: identity.name.is_some(),
            prompt,
            output_tokens,
            cached: &cached,
            exclude: &[],
            arrived_s: now_s - waited_s,
            parent: None,
        };
        let is_booked = matches!(way, Way::Booked(_));
        let (turn, state, gave_up) = match way {
            Way::Past => {
                let taken = self.residency.take_place(
                    &asked,
                    &identity,
                    site,
                    &sites,
                    Residence::Ungated,
                    &[],
                    now_s,
                );
                (taken.0, Residence::Ungated, taken.1)
            }
            Way::Gate(go) => {
                let taken = self.residency.take_place(
                    &asked,
                    &identity,
                    site,
                    &sites,
                    go.state,
                    &go.give_up,
                    now_s,
                );
                (taken.0, go.state, taken.1)
            }
            Way::Booked(admitted) => (admitted.turn, admitted.state, admitted.gave_up),
        };
        if matches!(route, Route::PrefillDecode { .. }) {
            // The worker has no prefill to do.
            self.residency.prefill_over(slot, identity.key, turn);
        }
        let text_tokens = (request.prompt.unit == Unit::Bytes).then(|| request.prompt.tokens());
        let seat = self.residency.seat(
            site,
            &identity,
            &prompt,
            turn,
            output_tokens,
            request.hints.clone(),
            text_tokens,
        );
        self.spare_sites = sites;
        let state = if turn == 0 { Residence::Ungated } else { state };
        let record = ResidencyRecord {
            state,
            waited_s: if is_booked { waited_s } else { 0.0 },
            gave_up,
        };
        Ok((seat, record))
    }
}
