//! Where a turn may go now.

use super::cached::Cached;
use super::footprint::Coarse;
use super::identity::Key;
use super::rotation::first_enough;
use super::rules::{Placement, Prompt};
use super::{Admission, GiveUp, Residence, Site, Sites, WaitReason, site_of};
use smallvec::{SmallVec, smallvec};

/// A prefill that takes so long holds up the turns of those who are in: one at a time runs on a worker, until its
/// first token. On an H200 with a 30B model it is one of 16,000 tokens.
const COLD_S: f64 = 0.4;

/// A turn that asks to go.
#[derive(Clone, Copy)]
pub(in crate::fleet) struct Asked<'a> {
    pub key: Key,
    pub has_session: bool,
    pub prompt: Coarse<'a>,
    /// To be booked for its answer.
    pub output_tokens: u64,
    pub cached: &'a Cached,
    pub exclude: &'a [String],
}

impl Asked<'_> {
    /// Whether the worker takes requests, and this one is not to go elsewhere.
    pub(super) fn may_go(&self, site: &Site) -> bool {
        site.routable && !self.exclude.contains(&site.spec.id)
    }

    /// Seconds of computing what of it is not cached on `site`.
    pub(super) fn compute_s(&self, site: &Site) -> f64 {
        site.compute_s(self.prompt.tokens, self.cached.on(site.slot))
    }

    /// Of a turn of a session that comes in: whether its prefill is a cold one.
    pub(super) fn is_cold(&self, site: &Site) -> bool {
        site.prefills && self.compute_s(site) >= COLD_S
    }

    /// Tokens of it that are cached on `site`, if that spares a cold prefill.
    pub(super) fn spared_tokens(&self, site: &Site) -> u64 {
        let cached = self.cached.on(site.slot);
        match site.compute_s(cached, 0) >= COLD_S {
            true => cached,
            false => 0,
        }
    }
}

/// Where a turn may go.
#[derive(Debug)]
pub(in crate::fleet) struct Go {
    /// Any of these.
    pub slots: SmallVec<[usize; 8]>,
    state: Residence,
    /// Where the session was before; anywhere else it moves to.
    was_at: Option<usize>,
}

impl Go {
    /// What the turn's session is to that worker if it goes there.
    pub fn state(&self, slot: usize) -> Residence {
        match self.was_at {
            Some(old) if old != slot => Residence::Moved,
            _ => self.state,
        }
    }
}

/// What a look at the queue has found so far.
pub(super) struct Look {
    pub now_s: f64,
    /// Slots whose room is kept for a turn that goes before.
    blocked: SmallVec<[usize; 8]>,
    /// Slots where another session comes in before.
    shut: SmallVec<[usize; 8]>,
    /// Slots where one waits for a quantum.
    queued: SmallVec<[usize; 8]>,
}

impl Look {
    pub fn at(now_s: f64) -> Self {
        Self {
            now_s,
            blocked: SmallVec::new(),
            shut: SmallVec::new(),
            queued: SmallVec::new(),
        }
    }
}

impl Admission {
    /// The worker on which the turn's session is in. The overlapping turns of a family, which may be many
    /// clients' with one document, are not held together.
    pub fn home_of<'s>(&self, asked: &Asked<'_>, sites: &'s [Site]) -> Option<&'s Site> {
        let site = self.member_at(asked.key, sites)?;
        let is_bound = asked.has_session || !self.ledgers[site.slot].runs(asked.key);
        (is_bound && asked.may_go(site)).then_some(site)
    }

    /// Whether a session that has been idle for a while is no longer cached where it is in, as the engine's
    /// events say. Where a host tier may give it back, nothing is lost.
    pub fn has_lost_place(&self, asked: &Asked<'_>, site: &Site, now_s: f64) -> bool {
        const EVENTS_TAKE_S: f64 = 1.0;
        let occupant = self.ledger(site.slot);
        let occupant = occupant.and_then(|ledger| ledger.hold.occupant(asked.key));
        let held = occupant.filter(|occupant| occupant.is_idle());
        let held = held.and_then(|occupant| occupant.held.as_ref());
        let ended_s = self.sessions.get(asked.key).and_then(|known| known.ended_s);
        let (Some(held), Some(ended_s)) = (held, ended_s) else {
            return false;
        };
        if !site.is_exact || site.host_tier_tokens().is_some() || now_s - ended_s < EVENTS_TAKE_S {
            return false;
        }
        let believed = asked.prompt.tokens_of(held.common(&asked.prompt));
        let lost = believed.saturating_sub(asked.cached.on(site.slot));
        2 * lost > believed
    }

    /// Where a turn may go now, one that comes or one that waits: nobody passes another for which room is
    /// kept, as `look` has it.
    ///
    /// # Errors
    /// Why it has to wait.
    pub(super) fn ask(
        &self,
        asked: &Asked<'_>,
        sites: &Sites,
        look: &mut Look,
    ) -> Result<Go, WaitReason> {
        if !sites.iter().any(|site| asked.may_go(site)) {
            return Err(WaitReason::NoWorker);
        }
        match self.home_of(asked, sites) {
            Some(home) => self.ask_at_home(asked, home, look),
            None => self.ask_to_enter(asked, sites, look),
        }
    }

    /// As [`Admission::ask`], for one that comes while nobody waits.
    pub fn ask_now(&self, asked: &Asked<'_>, sites: &Sites, now_s: f64) -> Result<Go, WaitReason> {
        self.ask(asked, sites, &mut Look::at(now_s))
    }

    fn was_at(&self, key: Key) -> Option<usize> {
        let home = self.sessions.get(key).and_then(|known| known.home);
        home.map(|(slot, _)| slot)
    }

    /// A turn of a session that is in.
    fn ask_at_home(
        &self,
        asked: &Asked<'_>,
        site: &Site,
        look: &mut Look,
    ) -> Result<Go, WaitReason> {
        if self.manner.rotates.is_some() {
            let is_prompt = self.is_prompt(asked.key, site);
            if look.blocked.contains(&site.slot) || (!is_prompt && look.queued.contains(&site.slot))
            {
                return Err(WaitReason::BehindOthers);
            }
            if !is_prompt && !self.fits_prompt(asked.key, asked.prompt.tokens, site) {
                look.queued.push(site.slot);
                return Err(WaitReason::SessionsLimit);
            }
        }
        match self.room_for(asked, site, Residence::Resident) {
            Ok(state) => Ok(Go {
                slots: smallvec![site.slot],
                state,
                was_at: self.was_at(asked.key),
            }),
            Err(why) => {
                look.blocked.push(site.slot);
                Err(why)
            }
        }
    }

    /// A turn of a session that is in nowhere.
    fn ask_to_enter(
        &self,
        asked: &Asked<'_>,
        sites: &Sites,
        look: &mut Look,
    ) -> Result<Go, WaitReason> {
        let may_go = |slot: usize| site_of(sites, slot).filter(|site| asked.may_go(site));
        let was_at = self.was_at(asked.key);
        let ungated = sites.ungated.iter().copied();
        let ungated: SmallVec<[usize; 8]> =
            ungated.filter(|&slot| may_go(slot).is_some()).collect();
        if !ungated.is_empty() {
            return Ok(Go {
                slots: ungated,
                state: Residence::Ungated,
                was_at,
            });
        }
        let only = match self.manner.placement {
            Placement::HomeOnly => was_at.filter(|&slot| may_go(slot).is_some()),
            _ => None,
        };
        let mut reason = WaitReason::BehindOthers;
        let mut slots = SmallVec::<[usize; 8]>::new();
        let mut alone = None;
        for site in sites.iter().filter(|site| asked.may_go(site)) {
            let is_elsewhere = only.is_some_and(|slot| slot != site.slot);
            let is_closed = look.shut.contains(&site.slot) || look.blocked.contains(&site.slot);
            if is_elsewhere || is_closed {
                continue;
            }
            if let Err(why) = self.may_enter(asked, site, look.now_s) {
                look.shut.push(site.slot);
                reason = why;
                continue;
            }
            match self.room_for(asked, site, Residence::Admitted) {
                Ok(Residence::Alone) => alone = alone.or(Some(site.slot)),
                Ok(_) => slots.push(site.slot),
                Err(why) => {
                    look.blocked.push(site.slot);
                    reason = why;
                }
            }
        }
        if self.manner.placement == Placement::MostRoom {
            let room = |slot: &usize| may_go(*slot).map(|site| self.room_tokens(site));
            slots = slots.iter().copied().max_by_key(room).into_iter().collect();
        }
        match (slots.is_empty(), alone) {
            (false, _) => Ok(Go {
                slots,
                state: Residence::Admitted,
                was_at,
            }),
            (true, Some(slot)) => Ok(Go {
                slots: smallvec![slot],
                state: Residence::Alone,
                was_at: None,
            }),
            (true, None) => Err(reason),
        }
    }

    /// Whether a session may come in now, as far as those who are in go.
    pub(super) fn may_enter(
        &self,
        asked: &Asked<'_>,
        site: &Site,
        now_s: f64,
    ) -> Result<(), WaitReason> {
        let lets_in = match &self.manner.rotates {
            Some(rule) => self.keeps(rule, site, &asked.prompt),
            None => self.lets_in(site, &asked.prompt, now_s),
        };
        if !lets_in {
            return Err(WaitReason::SessionsLimit);
        }
        let ledger = self.ledger(site.slot);
        let has_cold = ledger.is_some_and(|ledger| ledger.hold.cold_in_flight > 0);
        if has_cold && asked.is_cold(site) {
            return Err(WaitReason::ColdPrefill);
        }
        Ok(())
    }

    /// Whether a rule that counts sessions or tokens lets one more in.
    fn lets_in(&self, site: &Site, prompt: &Coarse<'_>, now_s: f64) -> bool {
        let seated = self.seated(site, now_s);
        let new_tokens = self
            .ledger(site.slot)
            .map_or(prompt.tokens, |ledger| ledger.rotation.new_tokens(prompt));
        let prompt = Prompt {
            tokens: prompt.tokens,
            new_tokens,
        };
        self.rule.lets_in(&self.view(site, &seated), prompt)
    }

    /// Whether the GPU's KV has room for a turn beside what is in flight, and what its session is there then: a
    /// turn that would be let in as `state` may have to run alone.
    ///
    /// # Errors
    /// It has none.
    pub(super) fn room_for(
        &self,
        asked: &Asked<'_>,
        site: &Site,
        state: Residence,
    ) -> Result<Residence, WaitReason> {
        // Under other rules nobody's KV goes for one that comes in.
        let is_let_go = self.manner.rotates.is_some() || state == Residence::Resident;
        if is_let_go && self.is_roomy(asked, site) {
            return Ok(state);
        }
        let Some((budget, excess)) = self.excess(asked, site) else {
            return Ok(state);
        };
        let hold = &self.ledgers[site.slot].hold;
        let runs = hold.turns_in_flight() > 0;
        if asked.prompt.tokens + asked.output_tokens > budget && !runs {
            return Ok(Residence::Alone);
        }
        if !is_let_go {
            return Err(WaitReason::NoRoom);
        }
        let idle: Vec<Key> = self.idle(site, Some(asked.key)).collect();
        match (hold.freed_by(&idle, &asked.prompt) >= excess, runs) {
            (true, _) => Ok(state),
            (false, false) => Ok(Residence::Alone),
            (false, true) => Err(WaitReason::NoRoom),
        }
    }

    /// Whether a turn fits beside all that runs, if all that is idle went: so much is found out soon.
    fn is_roomy(&self, asked: &Asked<'_>, site: &Site) -> bool {
        let running = self.ledger(site.slot);
        let running = running.map_or(0, |ledger| ledger.hold.running_tokens());
        let whole = asked.prompt.tokens + asked.output_tokens;
        let budget = self.budget_tokens(site).filter(|_| self.manner.by_tokens);
        budget.is_some_and(|budget| running + whole <= budget)
    }

    /// What may be booked on a worker, and by how many tokens that would be exceeded with a turn; none where it
    /// is not.
    fn excess(&self, asked: &Asked<'_>, site: &Site) -> Option<(u64, u64)> {
        let budget = self.budget_tokens(site).filter(|_| self.manner.by_tokens)?;
        let hold = &self.ledger(site.slot)?.hold;
        let own = hold.occupant(asked.key);
        let need = hold.need_tokens(own, &asked.prompt, asked.output_tokens);
        let excess = hold.tokens() as i64 + need - budget as i64;
        Some((
            budget,
            u64::try_from(excess).ok().filter(|&excess| excess > 0)?,
        ))
    }

    /// Whose idle KV goes for a turn that is let in as `state`.
    pub(super) fn leaving_for(&self, asked: &Asked<'_>, site: &Site, state: Residence) -> Vec<Key> {
        let excess = self.excess(asked, site);
        let Some((_, excess)) = excess.filter(|_| state != Residence::Ungated) else {
            return Vec::new();
        };
        let hold = &self.ledgers[site.slot].hold;
        let enough = |keys: &[Key]| hold.freed_by(keys, &asked.prompt) >= excess;
        self.cheapest(site, Some(asked.key), enough)
    }

    /// Sessions but `key` whose KV is on the GPU while they run nothing.
    fn idle(&self, site: &Site, key: Option<Key>) -> impl Iterator<Item = Key> {
        let occupants = self.ledger(site.slot).map(|ledger| ledger.hold.occupants());
        let idle = occupants.into_iter().flatten();
        let idle = idle.filter(move |(of, occupant)| occupant.is_idle() && Some(*of) != key);
        idle.map(|(of, _)| of)
    }

    /// As few of the idle sessions as are `enough`, or all: those first of which no turn waits, then those who have
    /// been in for longest.
    fn cheapest(&self, site: &Site, key: Option<Key>, enough: impl Fn(&[Key]) -> bool) -> Vec<Key> {
        let nobody_waits = self.queue.is_empty();
        let waits = |key: Key| {
            let known = || self.sessions.get(key);
            !nobody_waits && known().is_some_and(|known| known.waiting > 0)
        };
        let rotation = &self.ledgers[site.slot].rotation;
        first_enough(rotation.by_tenure(self.idle(site, key), waits), enough)
    }

    /// Takes out idle sessions that no longer fit beside what is in flight: the engine evicts them anyway.
    pub(super) fn drop_excess_idle(&mut self, site: &Site) {
        let hold = &self.ledgers[site.slot].hold;
        let budget = self.budget_tokens(site).filter(|_| self.manner.by_tokens);
        let excess = budget.map_or(0, |budget| hold.tokens().saturating_sub(budget));
        if excess == 0 {
            return;
        }
        let nobody = Default::default();
        let nobody = Coarse::of(&nobody, 1.0);
        let enough = |keys: &[Key]| hold.freed_by(keys, &nobody) >= excess;
        for key in self.cheapest(site, None, enough) {
            self.give_up(site.slot, &site.spec, key, GiveUp::Growth);
        }
    }

    /// Free beside what is booked.
    pub(super) fn room_tokens(&self, site: &Site) -> u64 {
        let booked = self.ledger(site.slot);
        let booked = booked.map_or(0, |ledger| ledger.hold.tokens());
        self.budget_tokens(site)
            .unwrap_or(u64::MAX)
            .saturating_sub(booked)
    }
}
