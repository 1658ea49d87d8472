//! The queue's side of the gate: turns that wait, are let in when there is room, or leave.

use super::book::Hold;
use super::cached::Cached;
use super::footprint::Coarse;
use super::gate::{Asked, Go};
use super::identity::Identity;
use super::looks::LOOK_INTERVAL_S;
use super::queue::{
    Admitted, FirstOfEach, Progress, Ranking, WaitEnd, Waiter, WaitingTurn, WhyRefused,
};
use super::round::Round;
use super::rules::{Observed, Placement};
use super::{GiveUp, Key, Residence, Residency, Since, Site, Sites, site_of};
use crate::fleet::log::{Event, WaitEndRecord, WaitRecord, unix_now_s};
use crate::fleet::prefix::estimate::StateMap;
use crate::fleet::prefix::hash::PromptHashes;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

/// By so much of the bound on waits turns go later whose session no host tier holds. More brings more
/// turns an hour and longer waits of the others; chosen in simulation.
const NOT_HELD_WAITS: f64 = 0.75;
/// By so much of `wait_bound_s` turns that are late already go behind those that can still be in time.
const LATE_WAITS: f64 = 1.0 / 3.0;
/// Workers of which it is looked how long computing what they hold takes.
const FILLS_OF: usize = 16;
/// Looked up again where it is older.
const CACHED_AGE_S: f64 = 1.0;

/// Why a turn may not even wait.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueueFull {
    pub retry_after_s: f64,
}

impl Residency {
    fn ranking(&self) -> Ranking {
        Ranking {
            smallest_first: self.manner.smallest_first,
            new_session_penalty_s: self.settings.new_session_penalty_s,
        }
    }

    /// Seconds after which a client that is refused now should try again.
    pub fn retry_after_s(&self, now_s: f64) -> f64 {
        let expected_s = self.queue.predicted_wait_s(self.queue.len(), now_s);
        expected_s.min(self.settings.max_wait_s)
    }

    /// Whether a turn without a place has to queue behind others, or for the next round.
    pub fn must_queue(&self, has_place: bool, now_s: f64) -> bool {
        let may_pass = has_place && self.manner.rotates.is_none();
        !self.queue.is_empty()
            && !may_pass
            && self
                .manner
                .admit_every_s
                .is_none_or(|every_s| now_s < self.round_s + every_s)
    }

    /// Puts a turn into the queue. `prompt` is kept as long as it waits, so it should be no finer
    /// than is needed.
    ///
    /// # Errors
    /// As many wait as may.
    pub fn wait(&mut self, new: WaitingTurn, now_s: f64) -> Result<u64, QueueFull> {
        if self.queue.len() >= self.settings.max_waiting {
            let retry_after_s = self.retry_after_s(now_s);
            self.note_end(&new, WaitEnd::Refused(WhyRefused::QueueFull), now_s);
            return Err(QueueFull { retry_after_s });
        }
        if self.queue.is_empty() {
            self.keep_backfilled();
        }
        if let Some(slot) = new.grows_at {
            let key = new.identity.key;
            self.hold(slot).begin_wait(key);
        }
        self.outbox.events.push(Event::Wait(WaitRecord {
            ts_unix_s: unix_now_s(),
            request_id: new.request_id.clone(),
            session_id: new.identity.name.clone(),
            reason: new.reason,
            waiting: self.queue.len() + 1,
        }));
        self.sessions.of(new.identity.key).waiting += 1;
        let ranking = self.ranking();
        Ok(self.queue.push(new, ranking))
    }

    /// How far a waiting turn has come.
    pub fn progress(&self, id: u64) -> Option<&Progress> {
        self.queue.get(id).map(|waiter| &waiter.progress)
    }

    /// Notes how a turn's wait ended.
    fn note_end(&mut self, turn: &WaitingTurn, end: WaitEnd, now_s: f64) {
        self.outbox.events.push(Event::WaitEnd(WaitEndRecord {
            ts_unix_s: unix_now_s(),
            request_id: turn.request_id.clone(),
            session_id: turn.identity.name.clone(),
            end,
            waited_s: now_s - turn.since_s,
        }));
        if end == WaitEnd::Left {
            self.departed.note(turn, now_s);
        }
    }

    /// Since when a turn waits that comes now, where its client left while it waited and comes again.
    pub fn comes_again(&mut self, whose: u64, prompt: &PromptHashes, now_s: f64) -> Option<Since> {
        self.departed.again(whose, prompt, now_s)
    }

    /// Takes a turn out of the queue, and gives its room back if it was let in and not placed.
    pub fn leave(&mut self, id: u64, end: WaitEnd, now_s: f64) -> Option<Waiter> {
        self.stop_growing(id);
        let waiter = self.queue.remove(id)?;
        let known = self.sessions.of(waiter.turn.identity.key);
        known.waiting = known.waiting.saturating_sub(1);
        self.note_end(&waiter.turn, end, now_s);
        if let (Progress::Admitted(admitted), true) = (&waiter.progress, end != WaitEnd::LetIn) {
            self.unbook(
                admitted.slot,
                waiter.turn.identity.key,
                admitted.turn,
                now_s,
            );
        }
        Some(waiter)
    }

    /// The turn waits for room to grow no longer.
    fn stop_growing(&mut self, id: u64) {
        let Some(Waiter { turn, .. }) = self.queue.get_mut(id) else {
            return;
        };
        let hold = turn.grows_at.take();
        if let Some(hold) = hold.and_then(|slot| self.holds.get_mut(slot)) {
            hold.end_wait(turn.identity.key);
        }
    }

    /// Turns that wait for room to grow on a worker, those of `key` or all, wait like any other from now on.
    pub(super) fn wait_like_others(&mut self, slot: usize, key: Option<Key>) {
        let ranking = self.ranking();
        let is_meant = |turn: &WaitingTurn| {
            turn.grows_at == Some(slot) && key.is_none_or(|key| turn.identity.key == key)
        };
        let waiting = self.queue.waiting();
        let meant = waiting.filter(|(_, waiter)| is_meant(&waiter.turn));
        let ids: Vec<u64> = meant.map(|(id, _)| id).collect();
        for id in ids {
            self.stop_growing(id);
            self.queue.enlist(id, ranking);
        }
    }

    /// A turn that was let in could not be placed on its worker: it waits again, for another.
    pub fn requeue(&mut self, id: u64, now_s: f64, not_on: Option<&Site>) {
        let ranking = self.ranking();
        let Some(waiter) = self.queue.get_mut(id) else {
            return;
        };
        let admitted = match &waiter.progress {
            Progress::Admitted(admitted) => Some((admitted.slot, admitted.turn)),
            _ => None,
        };
        waiter
            .turn
            .exclude
            .extend(not_on.map(|site| site.spec.id.clone()));
        let key = waiter.turn.identity.key;
        self.queue.enlist(id, ranking);
        if let Some((slot, turn)) = admitted {
            self.unbook(slot, key, turn, now_s);
        }
    }

    /// Whether a worker is up that a waiting turn has not been refused for.
    pub fn may_wait_for(&self, id: u64, sites: &[Site]) -> bool {
        self.queue.get(id).is_some_and(|waiter| {
            let mut sites = sites.iter();
            sites.any(|site| site.routable && !waiter.turn.exclude.contains(&site.spec.id))
        })
    }

    /// Ends the wait of turns that have failed on a worker where none is left that could take them, by what
    /// `is_left` says of the workers that they must not go to. Others wait for one to come back.
    pub fn desert(&mut self, is_left: impl Fn(&[String]) -> bool) {
        let repeated = self.queue.repeated();
        let deserted = repeated.filter(|(_, turn)| !is_left(&turn.exclude));
        let ids: Vec<u64> = deserted.map(|(id, _)| id).collect();
        for id in ids {
            let wake = self.queue.settle(id, Progress::Deserted);
            self.outbox.wakes.extend(wake);
        }
    }

    /// The first waiting turns whose knowledge of caches is old, and their prompts.
    pub fn stale_waiters(&self, now_s: f64) -> Vec<(u64, Arc<PromptHashes>)> {
        let first = self.queue.first_of_each();
        first
            .filter(|(_, waiter)| now_s - waiter.turn.cached_at_s > CACHED_AGE_S)
            .map(|(id, waiter)| (id, Arc::clone(&waiter.turn.prompt)))
            .collect()
    }

    pub fn set_cached(&mut self, id: u64, cached: Cached, now_s: f64) {
        let cached = Arc::new(cached);
        if let Some(waiter) = self.queue.get_mut(id) {
            waiter.turn.cached = cached;
            waiter.turn.cached_at_s = now_s;
            waiter.tried = false;
        }
    }

    /// When time alone could change something next; none where nothing waits.
    pub fn next_pump_s(&self, now_s: f64) -> Option<f64> {
        (!self.queue.is_empty()).then_some(now_s + LOOK_INTERVAL_S)
    }

    /// Lets in whom there is room for; then the rule takes away what is too much, so that nothing is let
    /// in and taken away again at once.
    pub fn pump(&mut self, sites: &Sites, now_s: f64) {
        self.let_all_in(sites, now_s);
        self.tell_rule(sites, now_s);
    }

    fn let_all_in(&mut self, sites: &Sites, now_s: f64) {
        self.expire(now_s);
        let Some((_, since_s)) = self.queue.oldest() else {
            self.gather_at(None);
            return;
        };
        self.weigh_tenants(sites, now_s);
        let mut round = Round::new(sites, now_s, now_s - since_s, self.bound_scale(sites));
        let is_round = self
            .manner
            .admit_every_s
            .is_none_or(|every_s| now_s >= self.round_s + every_s);
        if is_round {
            self.round_s = now_s;
        }
        if let Some(rule) = self.manner.rotates {
            self.rotate(&rule, sites, now_s);
        }
        loop {
            let ids = self.queue.shared_out(self.in_order(sites, &round));
            self.gather(&ids, sites, &round);
            self.let_in(&ids, sites, &mut round, is_round);
            self.taker = None;
            if !self.break_deadlock(sites, now_s) {
                return;
            }
            round = Round::new(sites, now_s, round.oldest_wait_s, self.bound_scale(sites));
        }
    }

    /// How many times longer than `wait_bound_s` turns may wait: as many times what all workers may hold as
    /// those want that wait, and longer where it takes long to compute what a worker holds. For that is what
    /// one round of turns costs: within a bound that is short for it, most of the time goes into changing
    /// who has a place. Beside a host tier as well, for its sessions wait longest once it is full; and a time slice
    /// is about as long, so that within a shorter bound every round would be in the order of arrival.
    fn bound_scale(&self, sites: &Sites) -> f64 {
        let queued_share = self.queue.tokens() as f64 / sites.budget_tokens.max(1) as f64;
        let fills_s = self.manner.bound_fills * self.fill_s(sites);
        queued_share.max(1.0) * (fills_s / self.settings.wait_bound_s).max(1.0)
    }

    /// Seconds in which a worker computes as much as its GPU holds, in prompts like those that wait; on average
    /// over the first workers.
    fn fill_s(&self, sites: &Sites) -> f64 {
        let tokens = self.queue.tokens() / self.queue.len().max(1) as u64;
        let capacities = sites.iter().filter_map(|site| {
            let prompts = site.kv_capacity_tokens? as f64 / tokens.max(1) as f64;
            Some(prompts * site.compute_s(tokens, 0))
        });
        let (count, all_s) = capacities
            .take(FILLS_OF)
            .fold((0_u32, 0.0), |(count, all_s), fill_s| {
                (count + 1, all_s + fill_s)
            });
        all_s / f64::from(count.max(1))
    }

    /// Lets in those of `ids`, in this order, that there is room for; unless `is_round` only those that
    /// have a place.
    fn let_in(&mut self, ids: &[u64], sites: &Sites, round: &mut Round, is_round: bool) {
        let mut looked = None;
        if is_round {
            looked = self.next_looks(sites, round.now_s).map(Rc::from);
        }
        // Only after it was found that the first of the queue cannot go yet.
        let mut lends = false;
        for &id in ids {
            let Some(waiter) = self.queue.get(id) else {
                continue;
            };
            if waiter.turn.grows_at.is_none() && !is_round {
                continue;
            }
            let gathers = self.gathers;
            let others = gathers.filter(|(head, _)| *head != id);
            let key = waiter.turn.identity.key;
            let payer = waiter.turn.identity.payer;
            let has_slice = |slot| {
                !self.is_held_back(payer, Some(slot))
                    && site_of(sites, slot).is_some_and(|site| self.has_slice(key, site))
            };
            round.closed = others
                .map(|(_, slot)| slot)
                .filter(|&slot| !has_slice(slot));
            round.lends = lends;
            round.looked = looked.clone().filter(|_| waiter.tried);
            let (identity, output_tokens) =
                (waiter.turn.identity.clone(), waiter.turn.output_tokens);
            let (prompt, cached) = (
                Arc::clone(&waiter.turn.prompt),
                Arc::clone(&waiter.turn.cached),
            );
            let arrived_s = waiter.turn.arrived_s;
            let exclude = waiter.turn.exclude.clone();
            let asked = Asked {
                key: identity.key,
                has_session: identity.name.is_some(),
                prompt: Coarse::of(&prompt, self.text_scale()),
                output_tokens,
                cached: &cached,
                exclude: &exclude,
                arrived_s,
                parent: waiter.turn.parent,
            };
            let home = self.residence_of(&asked, sites).map(|site| site.slot);
            if self.is_held_back(payer, home) {
                continue;
            }
            self.set_taker(payer, asked.prompt.tokens + output_tokens, round);
            let is_head = gathers.is_some_and(|(head, _)| head == id);
            let went = match self.ask(&asked, sites, round) {
                Ok(go) => Some(go),
                Err(_) if is_head => self
                    .end_backfill(&asked, sites, round, &mut lends)
                    .or_else(|| self.make_room(&asked, sites, round)),
                Err(_) => None,
            };
            if let Some(waiter) = self.queue.get_mut(id) {
                waiter.tried = true;
            }
            if let Some(go) = went {
                self.admit(id, &asked, &identity, go, sites, round);
                looked = looked.map(|looked| self.look_where_changed(sites, &looked));
            }
        }
    }

    /// The first of those that wait, in the order in which they go.
    ///
    /// What a host tier still holds comes back at a small part of what computing it takes, and is lost
    /// once others have had their turns. So those whose session it holds go first, and take turns among
    /// themselves: were all to take turns in one round that is longer than what the tier holds, it would
    /// have dropped each before its turn. One that it does not hold goes once it has waited longer than
    /// they by [`NOT_HELD_WAITS`] of the bound on waits. Before all go those that have a time slice, however
    /// many others came before them, unless another has waited longer than they by the bound. Among these those go first
    /// that can still be in time: in the order of arrival one late turn makes all behind it late as well.
    fn in_order(&self, sites: &Sites, round: &Round) -> Vec<u64> {
        if let Some(rule) = &self.manner.rotates {
            return self.by_deadline(rule, sites);
        }
        if !self.has_slices(sites) {
            return self.queue.first_of_each().map(|(id, _)| id).collect();
        }
        let mut first = FirstOfEach::default();
        let waiting = self.queue.waiting().filter(|(_, waiter)| {
            first.has(&waiter.turn) || self.has_slice_at_home(waiter.turn.identity.key, sites)
        });
        let bound_s = self.settings.wait_bound_s * round.bound_scale;
        let behind_s = NOT_HELD_WAITS * bound_s;
        let late_s = LATE_WAITS * self.settings.wait_bound_s;
        let is_late = |waited_s: f64| {
            let slices = self.manner.slices.as_ref();
            slices.is_some_and(|slices| waited_s > slices.late_after_s)
        };
        let mut shares: HashMap<usize, StateMap<f64>> = HashMap::new();
        let mut held_share = |key: Key| {
            let (slot, serial) = self.sessions.get(key)?.home?;
            let site = site_of(sites, slot).filter(|site| site.serial == serial)?;
            let of_site = shares
                .entry(slot)
                .or_insert_with(|| self.host_shares(site, round.now_s));
            of_site.get(&key).copied()
        };
        let mut ranked: Vec<(f64, u64)> = waiting
            .map(|(id, waiter)| {
                let turn = &waiter.turn;
                if turn.grows_at.is_some() {
                    return (f64::NEG_INFINITY, id);
                }
                if self.has_slice_at_home(turn.identity.key, sites) {
                    let late = f64::from(u8::from(is_late(round.now_s - turn.arrived_s)));
                    return (turn.arrived_s - bound_s + late * late_s, id);
                }
                let held = held_share(turn.identity.key).unwrap_or(0.0);
                (turn.arrived_s + behind_s * (1.0 - held), id)
            })
            .collect();
        ranked.sort_by(|one, other| one.0.total_cmp(&other.0));
        ranked.into_iter().map(|(_, id)| id).collect()
    }

    /// Books the room of a turn that may go, on the worker that suits it best.
    fn admit(
        &mut self,
        id: u64,
        asked: &Asked<'_>,
        identity: &Identity,
        go: Go,
        sites: &[Site],
        round: &mut Round,
    ) {
        let now_s = round.now_s;
        let mut slots = go.slots.clone();
        slots.sort_unstable();
        let chosen = slots.iter().filter_map(|&slot| site_of(sites, slot));
        let cached = |site: &Site| {
            let cached = asked.cached.on(site.slot);
            if cached >= self.settings.cold_tokens {
                cached
            } else {
                0
            }
        };
        let Some(site) = chosen.max_by_key(|site| (cached(site), self.room_tokens(site))) else {
            return;
        };
        let state = go.state(site.slot);
        let give_up = go.give_up(site.slot);
        self.stop_growing(id);
        let (turn, gave_up) = self.take_place(asked, identity, site, sites, state, give_up, now_s);
        if self.has_parents {
            round.forget_all();
        }
        let admitted = Admitted {
            slot: site.slot,
            serial: site.serial,
            turn,
            state,
            gave_up,
            at_s: now_s,
        };
        // Those with a time slice pass nobody: they go first.
        let lent = state != Residence::Resident && !self.has_slice(asked.key, site);
        match self.gathers {
            Some((head, _)) if head == id => self.gather_at(None),
            Some((_, slot)) if slot == site.slot && lent => {
                if let Some(occupant) = self.holds[slot].occupant_mut(asked.key) {
                    occupant.backfilled = true;
                }
            }
            _ => {}
        }
        self.begin_slice(asked.key, site, now_s, round.demand());
        let wake = self.queue.settle(id, Progress::Admitted(admitted));
        self.outbox.wakes.extend(wake);
    }

    /// A turn without a place that has much to prefill takes one of the worker's slots for that.
    pub fn begin_cold(&mut self, site: &Site, asked: &Asked<'_>, state: Residence, turn: u64) {
        let cached = asked.cached.on(site.slot);
        let new = asked.prompt.tokens.saturating_sub(cached);
        let is_cold = state != Residence::Resident && new >= self.settings.cold_tokens;
        if turn != 0 && is_cold && site.prefills {
            self.hold(site.slot).begin_cold(asked.key, turn);
        }
    }

    /// Refuses those that have waited too long.
    fn expire(&mut self, now_s: f64) {
        while let Some((id, since_s)) = self.queue.longest_here() {
            if now_s - since_s < self.settings.max_wait_s {
                return;
            }
            let wake = self.queue.settle(id, Progress::Expired);
            self.outbox.wakes.extend(wake);
        }
    }

    /// Once the first of the queue has waited for long, room gathers for it on one worker. Where there are
    /// time slices, those who have none are the queue, and the first is the first that has waited as long as
    /// anybody should.
    fn gather(&mut self, ids: &[u64], sites: &Sites, round: &Round) {
        if self.manner.rotates.is_some() {
            return;
        }
        let owed = ids.iter().find_map(|&id| {
            let waiter = self.queue.get(id)?;
            self.is_owed(&waiter.turn).then_some((id, waiter))
        });
        let has_slices = self.has_slices(sites);
        let after_s = match has_slices {
            true => self.settings.wait_bound_s * round.bound_scale,
            false => self.settings.no_backfill_after_s,
        };
        let has_waited = |waiter: &Waiter| round.now_s - waiter.turn.arrived_s >= after_s;
        let may_be_head = |waiter: &Waiter| {
            let has_slice = || self.has_slice_at_home(waiter.turn.identity.key, sites);
            !has_slices || (has_waited(waiter) && !has_slice())
        };
        let head = ids
            .iter()
            .filter_map(|&id| Some((id, self.queue.get(id)?)))
            .find(|(_, waiter)| waiter.turn.grows_at.is_none() && may_be_head(waiter));
        let head = head.filter(|(_, waiter)| has_waited(waiter) && !self.manner.smallest_first);
        let Some((id, waiter)) = owed.or(head) else {
            self.gather_at(None);
            return;
        };
        let may_go = |site: &&Site| {
            site.routable
                && site.kv_capacity_tokens.is_some()
                && !waiter.turn.exclude.contains(&site.spec.id)
        };
        if let Some((head, slot)) = self.gathers
            && head == id
            && site_of(sites, slot).is_some_and(|site| may_go(&site))
        {
            return;
        }
        let home = self
            .sessions
            .get(waiter.turn.identity.key)
            .and_then(|known| known.home);
        let suits = |site: &&Site| {
            let is_home = home == Some((site.slot, site.serial));
            let must_home = self.manner.placement == Placement::HomeOnly;
            let in_flight = self
                .holds
                .get(site.slot)
                .map_or(0, |hold| hold.in_flight_tokens());
            let budget = self.budget_tokens(site).unwrap_or(0);
            let cached = waiter.turn.cached.on(site.slot);
            (
                must_home && is_home,
                (budget + cached).saturating_sub(in_flight),
            )
        };
        let best = sites.iter().filter(may_go).max_by_key(suits);
        let best = best.map(|site| (id, site.slot));
        self.gather_at(best);
    }

    /// What every tenant may hold now.
    fn weigh_tenants(&mut self, sites: &Sites, now_s: f64) {
        let Some(count) = self.queue.tenants.are_to_be_weighed(now_s) else {
            return;
        };
        let mut held = vec![(0.0, 0.0); count];
        for hold in self.holds.iter() {
            for (key, occupant) in hold.occupants() {
                let (tokens, sessions) = &mut held[self.payer_of(key)];
                *tokens += hold.unshared_tokens(occupant) as f64;
                *sessions += 1.0;
            }
        }
        // Where a rule counts sessions, each is worth as much of the KV.
        let limits = sites.iter().map(|site| self.rule.sessions_limit(site.slot));
        let limit: Option<usize> = limits.sum();
        let each = limit.map_or(0.0, |limit| {
            sites.budget_tokens as f64 / limit.max(1) as f64
        });
        let held = held.into_iter();
        let held: Vec<f64> = held
            .map(|(tokens, sessions): (f64, f64)| tokens.max(sessions * each))
            .collect();
        self.queue.tenants.weigh(&held, sites.budget_tokens, each);
    }

    fn payer_of(&self, key: Key) -> usize {
        self.sessions.get(key).map_or(0, |known| known.payer)
    }

    fn is_owed(&self, turn: &WaitingTurn) -> bool {
        let tokens = turn.prompt.tokens() + turn.output_tokens;
        let payer = turn.identity.payer;
        turn.grows_at.is_none() && self.queue.tenants.is_owed(payer, tokens)
    }

    /// Whether a turn of the tenant's lets that of another go first for which room gathers where its place is.
    pub fn is_held_back(&self, payer: usize, home: Option<usize>) -> bool {
        self.queue.tenants.are_some()
            && self.gathers.is_some_and(|(head, slot)| {
                let head = self.queue.get(head).map(|waiter| &waiter.turn);
                home == Some(slot)
                    && head.is_some_and(|head| {
                        let to = head.identity.payer;
                        self.queue.tenants.yields(payer, to) && self.is_owed(head)
                    })
            })
    }

    /// A turn of the tenant's asks next: what may be given up depends on whether it is owed room.
    fn set_taker(&mut self, payer: usize, tokens: u64, round: &mut Round) {
        let tenants = &self.queue.tenants;
        let taker = tenants.is_owed(payer, tokens).then_some(payer);
        if taker != self.taker {
            self.taker = taker;
            round.forget_eligible();
        }
    }

    /// Whether the tenant of a session gives way to the one that asks and is owed room.
    pub(super) fn gives_way(&self, key: Key) -> bool {
        let tenants = &self.queue.tenants;
        self.taker
            .is_some_and(|taker| tenants.yields(self.payer_of(key), taker))
    }

    /// Room gathers there from now on, for that turn; where it did before, it is for all again.
    fn gather_at(&mut self, new: Option<(u64, usize)>) {
        if let Some((_, old)) = std::mem::replace(&mut self.gathers, new)
            && new.is_none_or(|(_, slot)| slot != old)
        {
            self.hold(old).note_change();
        }
    }

    /// Takes back the room that was lent where the first of the queue can go with it: from who runs
    /// nothing at once, from the others when their turns end. Else it may be lent on.
    fn end_backfill(
        &mut self,
        asked: &Asked<'_>,
        sites: &[Site],
        round: &mut Round,
        lends: &mut bool,
    ) -> Option<Go> {
        let (_, slot) = self.gathers.filter(|_| self.manner.backfills)?;
        let site = site_of(sites, slot)?;
        if self.fits_nowhere(asked, std::iter::once(site)) {
            return None;
        }
        let backfilled = |hold: &Hold| -> Vec<(Key, bool)> {
            let lent = hold.occupants().filter(|(_, o)| o.backfilled);
            lent.map(|(key, o)| (key, o.turns.is_empty())).collect()
        };
        let lent = self.holds.get(slot).map(backfilled).unwrap_or_default();
        if lent.is_empty() || !self.fits_without_backfill(asked, site, round) {
            *lends = true;
            return None;
        }
        for (key, runs_nothing) in lent {
            if runs_nothing {
                self.lose_place(site, key, GiveUp::Backfilled, round.now_s);
            } else if let Some(occupant) = self.holds[slot].occupant_mut(key) {
                occupant.marked = Some(GiveUp::Backfilled);
            }
        }
        round.forget_busy();
        self.ask(asked, sites, round).ok()
    }

    /// Nobody waited any more: who had passed others keeps its place as if it had not.
    fn keep_backfilled(&mut self) {
        self.holds.iter_mut().for_each(Hold::keep_backfilled);
    }

    /// Room is made for the first of the queue, piece by piece, once it has waited for as long as
    /// anybody should: who may be given up goes though that is not enough yet.
    fn make_room(&mut self, asked: &Asked<'_>, sites: &[Site], round: &mut Round) -> Option<Go> {
        let (_, slot) = self.gathers?;
        let site = site_of(sites, slot)?;
        let waited_s = round.now_s - asked.arrived_s;
        if waited_s < self.settings.wait_bound_s * round.bound_scale {
            return None;
        }
        let mut others = self.eligible_keys(site, round);
        if self.fits_nowhere(asked, std::iter::once(site)) {
            let idle = self
                .holds
                .get(slot)?
                .occupants()
                .filter(|(_, o)| o.is_idle());
            others = idle.map(|(key, _)| (key, GiveUp::ForOneAlone)).collect();
        }
        // Lent room is not taken back piece by piece: whoever is lent it then would compute all of its
        // prompt for a single turn.
        others.retain(|(key, reason)| *key != asked.key && *reason != GiveUp::Backfilled);
        if others.is_empty() {
            return None;
        }
        for (key, reason) in others {
            self.give_up(slot, &site.spec, key, reason, round.now_s);
        }
        round.forget_busy();
        self.ask(asked, sites, round).ok()
    }

    /// Where every session with a place on a worker waits to grow and none runs, the one that got its
    /// place last gives way. True if one did.
    fn break_deadlock(&mut self, sites: &[Site], now_s: f64) -> bool {
        let mut broken = false;
        self.note_marked();
        let growing: SmallVec<[usize; 4]> = self.growing.iter().copied().collect();
        for slot in growing {
            let (Some(site), Some(hold)) = (site_of(sites, slot), self.holds.get(slot)) else {
                continue;
            };
            let runs = hold.turns_in_flight() > 0;
            let waiting = hold
                .occupants()
                .filter(|(_, o)| o.waits() && o.turns.is_empty());
            let last = waiting.max_by(|(a, one), (b, other)| {
                one.admitted_s.total_cmp(&other.admitted_s).then(a.cmp(b))
            });
            let Some((key, _)) = last.filter(|_| !runs) else {
                continue;
            };
            self.lose_place(site, key, GiveUp::Deadlock, now_s);
            broken = true;
        }
        broken
    }

    /// Takes a place away whose session may be waiting to grow: it then waits like any other.
    pub fn lose_place(&mut self, site: &Site, key: Key, reason: GiveUp, now_s: f64) {
        if reason == GiveUp::Lost {
            self.sessions.of(key).lost_on = Some(site.serial);
        }
        self.give_up(site.slot, &site.spec, key, reason, now_s);
        self.wait_like_others(site.slot, Some(key));
    }

    /// Tells the rule what was seen, as often as it wants, and takes the places that it takes away.
    fn tell_rule(&mut self, sites: &[Site], now_s: f64) {
        let Some(interval_s) = self.rule.interval_s() else {
            return;
        };
        if now_s < self.told_s + interval_s {
            return;
        }
        self.told_s = now_s;
        for site in sites
            .iter()
            .filter(|site| site.kv_capacity_tokens.is_some())
        {
            self.hold(site.slot);
            let seen = &mut self.seen[site.slot];
            let booked = self.holds[site.slot].firm_tokens() as f64;
            let capacity = site.kv_capacity_tokens.unwrap_or(1).max(1) as f64;
            let observed = Observed {
                used_share: site.used_share.unwrap_or(booked / capacity),
                prompt_tokens: std::mem::take(&mut seen.prompt_tokens),
                cached_tokens: std::mem::take(&mut seen.cached_tokens),
            };
            self.rule.observe(site.slot, observed);
            let places = self.places(site, now_s, &self.busy_parents(now_s));
            for key in self.rule.over_limit(&self.view(site, &places, now_s)) {
                let occupant = self.holds[site.slot].occupant_mut(key);
                match occupant {
                    Some(occupant) if occupant.turns.is_empty() => {
                        self.lose_place(site, key, GiveUp::OverLimit, now_s);
                    }
                    Some(occupant) => occupant.marked = Some(GiveUp::OverLimit),
                    None => {}
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::fleet::residency::testing::{add, fleet_under, turn};
    use crate::fleet::{Admit, Outcome};
    use serde_json::{Value, json};
    use std::sync::atomic::Ordering;

    /// How many times longer turns may wait while one waits that wants half of what the worker holds.
    fn bound_scale(rule: &Value, kv_tokens: u32, host_kv_tokens: Option<u32>) -> f64 {
        let (fleet, _) = fleet_under(rule);
        add(
            &fleet,
            json!({"id": "w", "url": "http://w:1", "kv_capacity_tokens": kv_tokens,
                "host_kv_tokens": host_kv_tokens}),
        );
        let length = kv_tokens / 2;
        let admit = |session| fleet.admit(&turn(&fleet, session, length), &[], || ());
        let placed = admit(0);
        let waits = admit(1);
        assert!(matches!(waits, Admit::Waiting(_)));
        let now_s = fleet.now_s();
        let mut state = fleet.state.lock();
        let sites = state.sites(&[], now_s);
        let scale = state.residency.bound_scale(&sites);
        drop((state, placed, waits));
        scale
    }

    /// Whether a third session is let in at once where an idle one has to go for it and the second answers,
    /// after ten minutes in which the worker decoded alone, or, as far as is known, has hardly ever.
    fn goes_at_once(rule: &Value, decodes_alone: bool) -> bool {
        let (fleet, clock_ms) = fleet_under(rule);
        add(
            &fleet,
            json!({"id": "w", "url": "http://w:1", "kv_capacity_tokens": 100_000}),
        );
        let placed = |session, length| match fleet.admit(&turn(&fleet, session, length), &[], || ())
        {
            Admit::Placed(mut reservation) => {
                reservation.streams();
                reservation
            }
            _ => panic!("not placed"),
        };
        if decodes_alone {
            let mut long = placed(9, 1_000);
            long.output(1);
            clock_ms.fetch_add(600_000, Ordering::Relaxed);
            long.finish(Outcome::Ok, Some(200), None);
        }
        let mut first = placed(0, 25_000);
        first.output(1);
        clock_ms.fetch_add(500, Ordering::Relaxed);
        first.finish(Outcome::Ok, Some(200), None);
        let second = placed(1, 40_000);
        clock_ms.fetch_add(500, Ordering::Relaxed);
        let third = fleet.admit(&turn(&fleet, 2, 40_000), &[], || ());
        let goes = matches!(third, Admit::Placed(_));
        drop((third, second));
        goes
    }

    #[test]
    fn an_idle_prefill_is_used_for_who_waits_where_that_is_asked_for() {
        let asked = json!({"prefill_idle_recompute_s": 3, "cold_tokens": 50_000});
        assert!(goes_at_once(&asked, true));
        assert!(!goes_at_once(&asked, false), "its prefill may be wanted");
        assert!(!goes_at_once(&json!({"cold_tokens": 50_000}), true));
    }

    #[test]
    fn turns_may_wait_longer_where_computing_what_a_worker_holds_takes_long() {
        let scale = |kv_tokens, host_kv_tokens| bound_scale(&json!({}), kv_tokens, host_kv_tokens);
        assert_eq!(scale(100_000, None), 1.0);
        let (large, larger) = (scale(1_000_000, None), scale(2_000_000, None));
        assert!(large > 1.0 && larger > 2.0 * large, "{large}, {larger}");
        assert_eq!(
            scale(1_000_000, Some(4_000_000)),
            large,
            "once a tier is full it gives nobody's prompt back"
        );
        for rule in [json!({"wait_bound_fills": 0}), json!({"rule": "lease"})] {
            assert_eq!(bound_scale(&rule, 1_000_000, None), 1.0);
        }
    }
}
