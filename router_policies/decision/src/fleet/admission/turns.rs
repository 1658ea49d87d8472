//! A turn from its arrival to its end, as the ledgers and the statistics see it, whatever the rule.

use super::asking::Asked;
use super::footprint::Coarse;
use super::hold::Served;
use super::identity::{Identity, Key, Name};
use super::queue::Admitted;
use super::sessions::ServedPrompt;
use super::{Admission, GiveUp, Quota, Residence, Site, Sites, TenantShown, site_of};
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

impl Admission {
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
    pub fn arrive(&mut self, key: Key, request: &Request, now_s: f64) {
        self.sessions.count_singles(&self.gaps, now_s);
        let known = self.sessions.of(key);
        known.payer = request.payer;
        if let Some(ended_s) = known.ended_s
            && known.in_flight == 0
            && now_s >= ended_s
        {
            known.note_think(now_s - ended_s);
            self.gaps.note(now_s - ended_s);
        }
    }

    /// Books a turn on its worker, if what it may hold is known.
    fn book(
        &mut self,
        site: &Site,
        sites: &[Site],
        identity: &Identity,
        prompt: &Coarse<'_>,
        output_tokens: u64,
        now_s: f64,
    ) -> u64 {
        if !self.manner.gates || self.budget_tokens(site).is_none() {
            return 0;
        }
        self.turns += 1;
        let (key, turn) = (identity.key, self.turns);
        let known = self.sessions.of(key);
        if known.in_flight == 0 {
            known.began_s = Some(now_s);
        }
        let home = known.home.replace((site.slot, site.serial));
        if let Some((old, _)) = home.filter(|(slot, _)| *slot != site.slot) {
            self.leave_old_home(key, old, sites);
        }
        let hold = &mut self.ledger_mut(site.slot).hold;
        hold.begin(key, turn, prompt, output_tokens);
        turn
    }

    /// A session is in elsewhere now. What it has on the old worker's GPU goes, unless a turn of it is still in
    /// flight there.
    fn leave_old_home(&mut self, key: Key, old: usize, sites: &[Site]) {
        if self.ledger_mut(old).runs(key) {
            self.ledgers[old].rotation.remove(key);
        } else if let Some(site) = site_of(sites, old) {
            self.give_up(old, &site.spec, key, GiveUp::Moved);
        } else {
            self.ledgers[old].rotation.remove(key);
            self.ledgers[old].hold.remove(key);
        }
    }

    /// Whether a session has not been served before.
    pub fn is_first_turn(&self, key: Key) -> bool {
        self.sessions
            .get(key)
            .is_none_or(|known| known.served.is_none())
    }

    #[expect(clippy::too_many_arguments, reason = "what a turn is, once")]
    /// Notes where a turn goes. `turn` is what [`Admission::book`] gave.
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
        known.returns_s = None;
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

    /// The turn's prefill is over, or is done elsewhere. True if a slot for a cold one is free again.
    pub fn prefill_over(&mut self, slot: usize, key: Key, turn: u64) -> bool {
        turn != 0 && self.ledger_mut(slot).hold.end_cold(key, turn)
    }

    /// An answer has become longer than was booked for it. What no longer fits beside it goes.
    pub fn lengthen(&mut self, seat: &mut Seat, more_tokens: u64, site: Option<&Site>) {
        seat.output_tokens += more_tokens;
        let Some(site) = site.filter(|site| site.serial == seat.serial) else {
            return;
        };
        let hold = &mut self.ledger_mut(seat.slot).hold;
        hold.lengthen(seat.key, seat.turn, more_tokens);
        self.drop_excess_idle(site);
    }

    /// Takes out what has to go for a turn, and books it.
    pub fn take_place(
        &mut self,
        asked: &Asked<'_>,
        identity: &Identity,
        site: &Site,
        sites: &[Site],
        state: Residence,
        now_s: f64,
    ) -> (u64, Vec<Option<Name>>) {
        let mut gave_up = Vec::new();
        for key in self.leaving_for(asked, site, state) {
            gave_up.push(self.give_up(site.slot, &site.spec, key, GiveUp::Growth));
        }
        let (prompt, output_tokens) = (&asked.prompt, asked.output_tokens);
        let turn = self.book(site, sites, identity, prompt, output_tokens, now_s);
        if turn != 0 {
            self.queue
                .tenants
                .begin(identity.payer, turn, prompt.tokens + output_tokens, now_s);
            self.note_turn(asked, identity, site, now_s);
            if state != Residence::Resident && asked.is_cold(site) {
                self.ledgers[site.slot].hold.begin_cold(asked.key, turn);
            }
            if state == Residence::Alone {
                // Nothing keeps it between its turns.
                self.ledgers[site.slot].rotation.let_leave(asked.key);
            }
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
            let ledger = self.ledger_mut(site.slot);
            ledger.recomputed_tokens += recomputed_tokens.unwrap_or(0);
            if let Some(cached) = cached {
                ledger.prompt_tokens += reported;
                ledger.cached_tokens += cached;
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
        if known.in_flight == 0 {
            known.ended_s = Some(now_s);
            known.returns_s = seat.hints.idle_s.map(|idle_s| now_s + idle_s);
            if let Some(began_s) = known.began_s.take() {
                let run_s = now_s - began_s;
                known.note_run(run_s);
                self.run_s += GAIN * (run_s - self.run_s);
            }
        }
        if served == Served::Yes {
            let mut prompt = seat.served.clone();
            if seat.text_tokens.is_some() {
                prompt.set_tokens(reported);
            }
            let is_first = known.served.replace(prompt).is_none();
            if is_first && !seat.hints.ends && seat.hints.idle_s.is_none() {
                self.sessions.note_first_answer(seat.key, now_s);
            }
        }
        match site {
            _ if seat.turn == 0 => {}
            Some(site) => self.vacate(&seat, site, served, output_tokens),
            // Its worker has left the fleet.
            None => {
                let hold = &mut self.ledger_mut(seat.slot).hold;
                hold.end(seat.key, seat.turn, Served::Failed, 0);
            }
        }
        Ended {
            recomputed_tokens,
            was_there,
        }
    }

    /// Ends a turn that was let in and not placed.
    pub fn unbook(&mut self, admitted: &Admitted, key: Key, now_s: f64) {
        self.queue.tenants.end(admitted.turn, now_s);
        if admitted.turn != 0 {
            let hold = &mut self.ledger_mut(admitted.slot).hold;
            hold.end(key, admitted.turn, Served::No, 0);
            self.forget_idle(key, admitted.slot);
        }
    }

    /// What becomes of the session at the end of its turn.
    fn vacate(&mut self, seat: &Seat, site: &Site, served: Served, output_tokens: u64) {
        let key = seat.key;
        let hold = &mut self.ledger_mut(site.slot).hold;
        if !hold.end(key, seat.turn, served, output_tokens) {
            return;
        }
        let mut ended = seat.hints.ends;
        if let Some(occupant) = hold.occupant_mut(key) {
            occupant.ended |= ended;
            ended = occupant.ended;
        }
        if hold.occupant(key).is_some_and(|of| !of.is_idle()) {
            return;
        }
        if !site.keeps_prefixes {
            hold.remove(key);
        }
        let home = self.sessions.get(key).and_then(|known| known.home);
        match home == Some((site.slot, site.serial)) {
            true => self.note_idle(key, site, ended),
            false => {
                self.give_up(site.slot, &site.spec, key, GiveUp::Moved);
            }
        }
    }
}
