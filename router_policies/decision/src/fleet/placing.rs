//! Asking for a place: the gate says where a request may go, the policy chooses, the choice is reserved
//! and logged, in one step under the fleet's lock. A turn that has to wait for room gets a [`Ticket`].

use super::admission::footprint::Coarse;
use super::admission::identity::Identity;
use super::admission::queue::{Progress, WaitEnd, WaitingTurn, WhyRefused};
use super::admission::{Asked, Quota, SessionShown, Site, TenantShown, WaitReason, Wake, site_of};
use super::choosing::Choice;
use super::commit::{Begun, Entry, Way};
use super::log::{Event, WaitEndRecord, unix_now_s};
use super::reservation::Reservation;
use super::whole::{self, Separable};
use super::{ESTIMATE_BLOCK_TOKENS, Fleet, Request, State, can_serve_whole};
use crate::policy::{Decision, Policy, Refusal, View};
use crate::room::Lack;
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
    /// As many turns of its client wait as one client's may.
    NoShare {
        retry_after_s: f64,
    },
    /// Its tenant has used what it may.
    Quota {
        reached: Quota,
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
    /// What it means that it is dropped.
    dropped: WaitEnd,
}

impl Ticket {
    /// From now on that it is dropped means this, and not that the client left.
    pub fn ends_as(&mut self, end: WaitEnd) {
        self.dropped = end;
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let Some(id) = self.id else { return };
        let mut state = self.fleet.state.lock();
        let left = state.admission.leave(id, self.dropped, self.fleet.now_s());
        if left.is_some() {
            self.fleet.settle(state);
        }
    }
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
        let tokens = request.prompt.tokens();
        if request.arrived_s.is_none()
            && let Err((reached, retry_after_s)) =
                state.admission.take_quota(&identity, tokens, now_s)
        {
            return Admit::Refused(Refused::Quota {
                reached,
                retry_after_s,
            });
        }
        let output_tokens = state.output_tokens(request);
        let whose = identity.name.as_ref();
        let whose = whose.map_or(request.tenant, |_| identity.key);
        let again = state.admission.comes_again(whose, &request.prompt, now_s);
        let arrived_s = request.arrived_s.or(again.map(|since| since.arrived_s));
        let arrived_s = arrived_s.unwrap_or(now_s);
        let entry = |way, sites| Entry {
            way,
            identity: identity.clone(),
            sites,
            output_tokens,
            waits_since_s: again.map(|since| since.queued_s),
        };
        if !state.admission.gates() {
            let placed = self.conclude(guard, begun, request, entry(Way::Past, None));
            return placed.map_or_else(
                |refusal| Admit::Refused(Refused::ByPolicy(refusal)),
                Admit::Placed,
            );
        }
        let sites = state.sites(exclude, now_s);
        let tokens = request.prompt.tokens() + output_tokens;
        if identity.is_aside && state.admission.lets_aside(tokens, &sites) {
            let placed = self.conclude(guard, begun, request, entry(Way::Aside, Some(sites)));
            return placed.map_or_else(
                |refusal| Admit::Refused(Refused::ByPolicy(refusal)),
                Admit::Placed,
            );
        }
        let not_for = state.not_for(request, exclude);
        let cached = state.cached_by_facts();
        let asked = Asked {
            key: identity.key,
            has_session: identity.name.is_some(),
            prompt: Coarse::of(&request.prompt, state.admission.text_scale()),
            output_tokens,
            cached: &cached,
            exclude: &not_for,
        };
        let mut home = state.admission.home_of(&asked, &sites);
        if let Some(site) = home
            && state.admission.has_lost_place(&asked, site, now_s)
        {
            state.admission.lose_place(site, identity.key);
            home = None;
        }
        // Behind others it would wait for what does not come, and not be told what became of it.
        let verdict = if !has_other(&sites, &not_for) {
            Err(WaitReason::NoWorker)
        } else if state.admission.must_queue(home.is_some()) {
            Err(WaitReason::BehindOthers)
        } else {
            state.admission.ask_now(&asked, &sites, now_s)
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
                        let entry = entry(Way::Gate(go), Some(sites));
                        let waited = again.map(|since| {
                            Event::WaitEnd(WaitEndRecord {
                                ts_unix_s: unix_now_s(),
                                request_id: request.request_id.clone(),
                                session_id: entry.identity.name.clone(),
                                end: WaitEnd::LetIn,
                                waited_s: now_s - since.queued_s,
                            })
                        });
                        let placed = self.commit(guard, begun, request, choice, entry);
                        if placed.is_ok() {
                            waited.into_iter().for_each(|event| self.sink.send(event));
                        }
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
                let placed = self.conclude(guard, begun, request, entry(Way::Past, None));
                return placed.map_or_else(
                    |refusal| Admit::Refused(Refused::ByPolicy(refusal)),
                    Admit::Placed,
                );
            }
            Err(reason) => reason,
        };
        let may_go = |id: &str| !not_on.iter().any(|of| of == id);
        if state.admission.refuses(identity.key, may_go, &sites) {
            let retry_after_s = state.admission.retry_after_s(now_s);
            self.settle(guard);
            return Admit::Refused(Refused::QueueFull { retry_after_s });
        }
        let new = WaitingTurn {
            request_id: request.request_id.clone(),
            whose,
            client: request.client,
            is_first_turn: state.admission.is_first_turn(identity.key),
            identity: identity.clone(),
            prompt: Arc::new(request.prompt.thinned(ESTIMATE_BLOCK_TOKENS)),
            output_tokens,
            exclude: not_on,
            arrived_s,
            queued_s: now_s,
            since_s: again.map_or(now_s, |since| since.queued_s),
            is_repeated: request.arrived_s.is_some(),
            cached: Arc::new(cached),
            cached_at_s: now_s,
            reason,
            wake: Arc::new(wake) as Wake,
        };
        match state.admission.wait(new, now_s) {
            Ok(id) => {
                // Given back before others are made of them.
                drop(sites);
                state.pump(now_s);
                self.fetch(guard, begun, request, exclude, id)
            }
            Err(full) => {
                self.settle(guard);
                let retry_after_s = full.retry_after_s;
                Admit::Refused(match full.lack {
                    Lack::OfRoom => Refused::QueueFull { retry_after_s },
                    Lack::OfShare => Refused::NoShare { retry_after_s },
                })
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
        let begun = self.begin();
        match ticket.id.take() {
            Some(id) => self.fetch(self.state.lock(), begun, request, exclude, id),
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
        let admitted = match state.admission.progress(id) {
            Some(Progress::Admitted(admitted)) => admitted.clone(),
            Some(Progress::Waiting) => {
                self.settle(guard);
                return Admit::Waiting(self.ticket(id));
            }
            Some(Progress::Expired) | None => {
                let end = WaitEnd::Refused(WhyRefused::WaitedTooLong);
                state.admission.leave(id, end, now_s);
                let retry_after_s = state.admission.retry_after_s(now_s);
                self.settle(guard);
                return Admit::Refused(Refused::WaitedTooLong { retry_after_s });
            }
            Some(Progress::Deserted) => {
                let end = WaitEnd::Refused(WhyRefused::NoWorker);
                state.admission.leave(id, end, now_s);
                self.settle(guard);
                return Admit::Refused(Refused::ByPolicy(Refusal::NoCandidates));
            }
        };
        state.fill_facts(exclude, now_s);
        state.fill_cached(&request.prompt);
        let sites = state.sites(exclude, now_s);
        let site = site_of(&sites, admitted.slot)
            .filter(|site| site.serial == admitted.serial && site.routable);
        let Some(site) = site else {
            state.admission.requeue(id, None, now_s);
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
                let Some(waiter) = state.admission.leave(id, WaitEnd::LetIn, now_s) else {
                    return Admit::Refused(Refused::ByPolicy(Refusal::NoCandidates));
                };
                let entry = Entry {
                    way: Way::Booked(admitted),
                    identity: waiter.turn.identity,
                    sites: Some(sites),
                    output_tokens: waiter.turn.output_tokens,
                    waits_since_s: Some(waiter.turn.since_s),
                };
                match self.commit(guard, begun, request, choice, entry) {
                    Ok(reservation) => Admit::Placed(reservation),
                    Err(refusal) => Admit::Refused(Refused::ByPolicy(refusal)),
                }
            }
            Err(refusal) => {
                state.admission.requeue(id, Some(site), now_s);
                if !state.admission.may_wait_for(id, &sites) {
                    let end = WaitEnd::Refused(WhyRefused::ByPolicy);
                    state.admission.leave(id, end, now_s);
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
            dropped: WaitEnd::Left,
        }
    }

    /// Lets in those of the waiting turns that there is room for by now. To be called when
    /// [`Fleet::next_pump_s`] has passed; every other occasion the fleet sees itself.
    pub fn pump(&self) {
        self.settle(self.state.lock());
    }

    /// When time alone could change, next, who is let in, by the fleet's clock; none while nothing waits.
    pub fn next_pump_s(&self) -> Option<f64> {
        self.state.lock().admission.next_pump_s(self.now_s())
    }

    /// Sessions that have a place or wait for one.
    pub fn sessions(&self) -> Vec<SessionShown> {
        let now_s = self.now_s();
        let state = self.state.lock();
        let worker = |slot: usize| {
            let worker = state.workers.get(slot)?.as_ref()?;
            Some(worker.spec.id.clone())
        };
        state.admission.shown(worker, now_s)
    }

    /// Those who share the workers, if the configuration names some.
    pub fn tenants(&self) -> Vec<TenantShown> {
        self.state.lock().admission.tenants()
    }

    /// Turns that wait for room.
    pub fn waiting_turns(&self) -> usize {
        self.state.lock().admission.waiting()
    }

    /// Pumps, releases the lock, and does what has to be done without it.
    pub(super) fn settle(&self, mut state: MutexGuard<'_, State>) {
        if state.admission.needs_pump() {
            state.pump(self.now_s());
        }
        let outbox = state.admission.take_outbox();
        drop(state);
        outbox
            .events
            .into_iter()
            .for_each(|event| self.sink.send(event));
        outbox.wakes.iter().for_each(|wake| wake());
    }

    /// Picks and reserves in one step, past admission. `exclude` names workers that already
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
            sites: None,
            output_tokens,
            waits_since_s: None,
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
}

/// Whether there is a worker that may answer and is not among `not_on`.
fn has_other(sites: &[Site], not_on: &[String]) -> bool {
    sites
        .iter()
        .any(|site| site.routable && !not_on.contains(&site.spec.id))
}

impl State {
    /// Lets in those of the waiting turns that there is room for.
    fn pump(&mut self, now_s: f64) {
        self.end_untold(now_s);
        let sites = || self.workers.iter().flatten().filter(|w| w.is_site());
        self.admission
            .desert(|not_on| sites().any(|worker| worker.is_up(not_on)));
        let stale = self.admission.stale_waiters(now_s);
        if !stale.is_empty() {
            self.fill_facts(&[], now_s);
        }
        for (id, prompt) in stale {
            let cached = self.cached_of(&prompt);
            self.admission.set_cached(id, cached, now_s);
        }
        let sites = self.sites(&[], now_s);
        self.admission.pump(&sites, now_s);
    }

    /// Tokens to be booked for all the answers that are made of a request.
    fn output_tokens(&self, request: &Request) -> u64 {
        let (limit, mean) = (request.max_output_tokens, self.mean_output_tokens);
        let each = self.admission.output_tokens(limit, mean);
        each.saturating_mul(request.answers.clamp(1, MAX_ANSWERS))
    }

    /// Ids of the workers that cannot answer a request, `exclude` among them.
    fn not_for<'a>(&self, request: &Request, exclude: &'a [String]) -> Cow<'a, [String]> {
        if request.separable == Separable::ByAll {
            return Cow::Borrowed(exclude);
        }
        let unable = self.facts.iter().zip(self.workers.iter());
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
        let prompt = Coarse::of(&request.prompt, self.admission.text_scale());
        let identity = self.admission.identify(request, &prompt);
        if request.arrived_s.is_none() {
            self.admission.arrive(identity.key, request, now_s);
        }
        identity
    }
}
