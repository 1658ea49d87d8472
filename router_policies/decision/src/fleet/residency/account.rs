//! A turn from its arrival to its end, as the book and the statistics see it, whatever the rule.

use super::book::{Hold, Occupant, Served};
use super::footprint::Coarse;
use super::identity::{Identity, Key, Name};
use super::sessions::{GAIN as OWN_GAIN, ServedPrompt};
use super::{Asked, GiveUp, Quota, Residence, Residency, Site, Sites, TenantShown, site_of};
use crate::fleet::prefix::hash::step;
use crate::fleet::{Hints, Request, Usage};

/// Share of the difference that one turn moves the fleet's means by.
const GAIN: f64 = 0.02;
/// Text of fewer tokens says more of the chat template than of the text.
const TELLING_TOKENS: u64 = 1_000;

/// Sets the key of calls beside a session's conversation apart from its own.
const ASIDE: u64 = 0x6173_6964_6521_2121;
/// What calls beside conversations may take in all, of what may be booked: engines keep as much for their own ends.
const ASIDE_SHARE: f64 = 0.02;

/// A turn that was placed.
#[derive(Debug)]
pub(in crate::fleet) struct Seat {
    pub slot: usize,
    pub serial: u64,
    pub key: Key,
    payer: usize,
    /// Its number in the book; 0 where nothing is booked.
    pub turn: u64,
    /// Booked for its answer so far.
    pub output_tokens: u64,
    /// That it adds to those of calls beside conversations.
    aside_tokens: u64,
    pub hints: Hints,
    /// Tokens of its prompt that the session had been served before.
    before_tokens: u64,
    served: ServedPrompt,
    prompt_tokens: u64,
    /// Tokens estimated from text, before scaling.
    text_tokens: Option<u64>,
}

/// What a finish event says.
pub(in crate::fleet) struct Ended {
    pub recomputed_tokens: Option<u64>,
    /// Of a session whose KV was gone, as KV events said: whether the engine found it there all the same.
    pub was_there: Option<bool>,
}

impl Residency {
    /// Whose turn a request is: the session's, one beside its conversation, else its family's.
    pub fn identify(&mut self, request: &Request, prompt: &Coarse<'_>) -> Identity {
        let Some(name) = request.session_id.as_deref() else {
            return Identity {
                key: self.sessions.family_of(prompt),
                payer: request.payer,
                name: None,
                is_aside: false,
            };
        };
        let key = self.session_keys.of_tenant(request.tenant, name);
        let is_aside = request.may_be_aside && !self.goes_on(key, prompt);
        Identity {
            key: match is_aside {
                true => step(key, ASIDE),
                false => key,
            },
            payer: request.payer,
            name: Some(name.into()),
            is_aside,
        }
    }

    /// Takes what a request of so many tokens wants from what its tenant may use.
    ///
    /// # Errors
    /// The limit that is reached, and after how many seconds another try may succeed.
    pub fn take_quota(
        &mut self,
        identity: &Identity,
        tokens: u64,
        now_s: f64,
    ) -> Result<(), (Quota, f64)> {
        let sessions = &self.sessions;
        let is_busy = |key: Key| {
            let known = sessions.get(key);
            known.is_some_and(|known| known.in_flight > 0 || known.waiting > 0)
        };
        // A call beside a conversation is none.
        let session = (!identity.is_aside).then_some(identity.key);
        self.queue
            .tenants
            .take(identity.payer, session, tokens, is_busy, now_s)
    }

    pub fn tenants(&self) -> Vec<TenantShown> {
        self.queue.tenants.shown()
    }

    /// Whether a prompt goes on from the last one that its session was served.
    fn goes_on(&self, key: Key, prompt: &Coarse<'_>) -> bool {
        let served = self
            .sessions
            .get(key)
            .and_then(|known| known.served.as_ref());
        served.is_some_and(|served| served.begins(prompt) > 0)
    }

    /// Whether a call beside a conversation may go at once, as its worker has room for a few without any booking.
    pub fn lets_aside(&self, tokens: u64, sites: &Sites) -> bool {
        self.aside_tokens + tokens <= (sites.budget_tokens as f64 * ASIDE_SHARE) as u64
    }

    /// Notes that a turn came at `now_s`, once however long it waits.
    pub fn arrive(&mut self, key: Key, prompt: &Coarse<'_>, request: &Request, now_s: f64) {
        let hints = &request.hints;
        let most_s = || self.gaps.nearly_all_s();
        self.endings.settle(&mut self.sessions, now_s, most_s);
        let known = self.sessions.of(key);
        known.payer = request.payer;
        if let Some(parent) = &hints.parent_session {
            known.parent = Some(self.session_keys.of_tenant(request.tenant, parent));
            known.parent = known.parent.filter(|&parent| parent != key);
            self.has_parents = true;
        }
        if let Some(ended_s) = known.ended_s
            && known.in_flight == 0
            && now_s >= ended_s
        {
            known.gaps.note(now_s - ended_s);
            self.gaps.note(now_s - ended_s);
        }
        if let Some(awaited) = known.awaited.take() {
            self.endings.returned(awaited);
        }
        if let Some(growth) = known.grow(prompt.tokens) {
            self.growth_tokens += GAIN * (growth - self.growth_tokens);
        }
    }

    /// Books a turn on its worker, if what it may hold is known.
    fn book(
        &mut self,
        site: &Site,
        identity: &Identity,
        prompt: &Coarse<'_>,
        output_tokens: u64,
        now_s: f64,
    ) -> u64 {
        let Some(budget) = self.budget_tokens(site).filter(|_| self.manner.gates) else {
            return 0;
        };
        self.turns += 1;
        let turn = self.turns;
        if let Some((old, _)) = self.sessions.of(identity.key).home
            && old != site.slot
        {
            self.hold(old);
            self.seen[old].rotation.remove(identity.key);
        }
        let hold = self.hold(site.slot);
        let occupant = hold.begin(identity.key, turn, prompt, output_tokens, now_s);
        occupant.name.clone_from(&identity.name);
        hold.trim_growth(budget);
        let known = self.sessions.of(identity.key);
        if known.in_flight == 0 {
            known.began_s = Some(now_s);
        }
        known.home = Some((site.slot, site.serial));
        if let Err(at) = known.slots.binary_search(&site.slot) {
            known.slots.insert(at, site.slot);
        }
        let parted = &mut self.seen[site.slot].parted;
        parted.retain(|(then_s, key, _)| *key != identity.key && now_s - then_s < super::PARTED_S);
        turn
    }

    /// Whether a session has not been served before.
    pub fn is_first_turn(&self, key: Key) -> bool {
        self.sessions
            .get(key)
            .is_none_or(|known| known.served.is_none())
    }

    #[expect(clippy::too_many_arguments, reason = "what a turn is, once")]
    /// Notes where a turn goes. `turn` is what [`Residency::book`] gave.
    pub fn seat(
        &mut self,
        site: &Site,
        identity: &Identity,
        prompt: &Coarse<'_>,
        turn: u64,
        output_tokens: u64,
        hints: Hints,
        text_tokens: Option<u64>,
    ) -> Seat {
        let aside_tokens = match (identity.is_aside, turn) {
            (true, 0) => prompt.tokens + output_tokens,
            _ => 0,
        };
        self.aside_tokens += aside_tokens;
        let known = self.sessions.of(identity.key);
        known.in_flight += 1;
        known.ended_s = None;
        let before_tokens = known
            .served
            .as_ref()
            .map_or(0, |served| served.begins(prompt));
        if identity.name.is_none() {
            self.sessions.extend_family(identity.key, prompt);
        }
        Seat {
            slot: site.slot,
            serial: site.serial,
            key: identity.key,
            payer: identity.payer,
            turn,
            output_tokens,
            aside_tokens,
            hints,
            before_tokens,
            served: ServedPrompt::new(prompt),
            prompt_tokens: prompt.tokens,
            text_tokens,
        }
    }

    /// Where a session had a place before it got one at `site`: that one goes, unless a turn of it is
    /// still in flight there.
    fn leave_old_home(&mut self, key: Key, site: &Site, sites: &[Site], now_s: f64) {
        let mut slots = std::mem::take(&mut self.sessions.of(key).slots);
        let occupant = |holds: &[Hold], slot: usize| {
            let occupant = holds.get(slot).and_then(|hold| hold.occupant(key));
            occupant.map(Occupant::is_idle)
        };
        slots.retain(|slot| occupant(&self.holds, *slot).is_some());
        for &slot in slots.iter().filter(|slot| **slot != site.slot) {
            if let Some(old) = site_of(sites, slot)
                && occupant(&self.holds, slot) == Some(true)
            {
                self.give_up(slot, &old.spec, key, GiveUp::Moved, now_s);
            }
        }
        self.sessions.of(key).slots = slots;
    }

    /// The turn's prefill is over, or is done elsewhere. True if a slot for a cold one is free again.
    pub fn prefill_over(&mut self, slot: usize, key: Key, turn: u64) -> bool {
        turn != 0
            && self
                .holds
                .get_mut(slot)
                .is_some_and(|hold| hold.end_cold(key, turn))
    }

    /// An answer has become longer than was booked for it. What no longer fits beside it is given up,
    /// for the engine evicts it anyway.
    pub fn lengthen(&mut self, seat: &mut Seat, more_tokens: u64, site: Option<&Site>, now_s: f64) {
        seat.output_tokens += more_tokens;
        let Some(site) = site.filter(|site| site.serial == seat.serial) else {
            return;
        };
        self.hold(seat.slot)
            .lengthen(seat.key, seat.turn, more_tokens);
        let Some(budget) = self.budget_tokens(site) else {
            return;
        };
        self.holds[site.slot].trim_growth(budget);
        for (key, reason) in self.excess_idle(site, now_s) {
            self.give_up(site.slot, &site.spec, key, reason, now_s);
        }
    }

    /// Gives up what has to go for a turn, and books its place.
    #[expect(
        clippy::too_many_arguments,
        reason = "one call, of facts that belong to no one type"
    )]
    pub fn take_place(
        &mut self,
        asked: &Asked<'_>,
        identity: &Identity,
        site: &Site,
        sites: &[Site],
        state: Residence,
        give_up: &[(Key, GiveUp)],
        now_s: f64,
    ) -> (u64, Vec<Option<Name>>) {
        let mut gave_up = Vec::new();
        for &(key, reason) in give_up {
            gave_up.push(self.give_up(site.slot, &site.spec, key, reason, now_s));
        }
        let turn = self.book(site, identity, &asked.prompt, asked.output_tokens, now_s);
        if turn != 0 {
            let tokens = asked.prompt.tokens + asked.output_tokens;
            self.queue
                .tenants
                .begin(identity.payer, turn, tokens, now_s);
            self.note_turn(asked, identity, site, now_s);
            self.begin_cold(site, asked, state, turn);
            self.leave_old_home(identity.key, site, sites, now_s);
            self.book_growth(identity.key, site);
        }
        (turn, gave_up)
    }

    /// Ends a turn. `site` is none where its worker has left.
    pub fn end(
        &mut self,
        seat: Seat,
        site: Option<&Site>,
        served: Served,
        output_tokens: u64,
        usage: Usage,
        now_s: f64,
    ) -> Ended {
        self.aside_tokens -= seat.aside_tokens;
        self.queue.tenants.end(seat.turn, now_s);
        self.queue.tenants.spend(seat.payer, output_tokens);
        if seat.hints.ends {
            self.queue.tenants.leave(seat.payer, seat.key);
        }
        let cached = usage.cached_tokens.filter(|_| served == Served::Yes);
        let reported = usage.prompt_tokens.unwrap_or(seat.prompt_tokens);
        let recomputed_tokens = cached.map(|cached| {
            let page = site.map_or(1, |site| site.spec.page_size.max(1)) as u64;
            let most = reported.saturating_sub(1) / page * page;
            (seat.before_tokens.min(most) / page * page).saturating_sub(cached)
        });
        let site = site.filter(|site| site.serial == seat.serial);
        if let Some(site) = site {
            self.hold(site.slot);
            let seen = &mut self.seen[site.slot];
            seen.recomputed_tokens += recomputed_tokens.unwrap_or(0);
            if let Some(cached) = cached {
                seen.prompt_tokens += reported;
                seen.cached_tokens += cached;
            }
        }
        if let (Some(text), Some(reported)) = (seat.text_tokens, usage.prompt_tokens)
            && text >= TELLING_TOKENS
        {
            let ratio = (reported as f64 / text as f64).clamp(0.25, 4.0);
            self.text_scale += 0.05 * (ratio - self.text_scale);
        }
        let known = self.sessions.of(seat.key);
        let was_lost = known.lost_on.take() == Some(seat.serial);
        let was_there = cached
            .filter(|_| was_lost)
            .map(|cached| 2 * cached > reported);
        known.in_flight = known.in_flight.saturating_sub(1);
        known.recomputed_tokens += recomputed_tokens.unwrap_or(0);
        if known.in_flight == 0 {
            known.ended_s = Some(now_s);
            if let Some(began_s) = known.began_s.take() {
                let run_s = now_s - began_s;
                let mean_s = known.run_s.get_or_insert(run_s);
                *mean_s += OWN_GAIN * (run_s - *mean_s);
                self.run_s += GAIN * (run_s - self.run_s);
            }
        }
        if served == Served::Yes {
            known.answers = known.answers.saturating_add(1);
            if known.in_flight == 0 && !seat.hints.ends && seat.hints.idle_s.is_none() {
                let awaited = self.endings.answered(seat.key, known.kind(), now_s);
                known.awaited = Some(awaited);
            }
            let mut prompt = seat.served.clone();
            if seat.text_tokens.is_some() {
                prompt.set_tokens(reported);
            }
            known.served = Some(prompt);
        }
        match site {
            _ if seat.turn == 0 => {}
            Some(site) => self.vacate(&seat, site, served, output_tokens, now_s),
            // Its worker has left the fleet.
            None => {
                let hold = self.hold(seat.slot);
                hold.end(seat.key, seat.turn, Served::Failed, 0, now_s);
            }
        }
        Ended {
            recomputed_tokens,
            was_there,
        }
    }

    /// Ends a turn that was let in and not placed.
    pub fn unbook(&mut self, slot: usize, key: Key, turn: u64, now_s: f64) {
        self.queue.tenants.end(turn, now_s);
        if turn != 0 && slot < self.holds.len() {
            self.holds[slot].end(key, turn, Served::No, 0, now_s);
            self.forget_idle(key, slot);
        }
    }

    /// Books room for a session's next turns, as far as there is some.
    fn book_growth(&mut self, key: Key, site: &Site) {
        let wanted = self.booked_growth(self.growth_of(key), site);
        if let Some(budget) = self.budget_tokens(site) {
            self.holds[site.slot].reserve_growth(key, wanted, budget);
        }
    }

    /// What becomes of the session's place at the end of its turn.
    fn vacate(&mut self, seat: &Seat, site: &Site, served: Served, output_tokens: u64, now_s: f64) {
        let known = self.sessions.of(seat.key);
        let is_home = known.home == Some((site.slot, site.serial));
        let hold = &mut self.holds[site.slot];
        if !hold.end(seat.key, seat.turn, served, output_tokens, now_s) {
            return;
        }
        let Some(occupant) = hold.occupant_mut(seat.key) else {
            return;
        };
        occupant.returns_s = seat.hints.idle_s.map(|idle_s| now_s + idle_s);
        occupant.ended |= seat.hints.ends;
        if !occupant.turns.is_empty() || occupant.waits() {
            return;
        }
        let occupant_ended = occupant.ended;
        let reason = if occupant.ended {
            Some(GiveUp::Ended)
        } else if !is_home {
            occupant.marked.or(Some(GiveUp::Moved))
        } else {
            occupant.marked
        };
        match reason {
            _ if !site.keeps_prefixes => {
                hold.remove(seat.key);
            }
            _ if self.manner.rotates.is_some() && is_home => {
                let ended = occupant_ended;
                self.note_idle(seat.key, site, ended, now_s);
            }
            Some(reason) => {
                self.give_up(site.slot, &site.spec, seat.key, reason, now_s);
                if reason == GiveUp::Ended {
                    self.seen[site.slot].slices.remove(&seat.key);
                }
            }
            None => self.book_growth(seat.key, site),
        }
    }
}
