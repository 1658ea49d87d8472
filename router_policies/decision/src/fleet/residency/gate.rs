//! Where a turn may go now, and who gives up a place for it.

use super::book::{Hold, Occupant};
use super::cached::Cached;
use super::footprint::Coarse;
use super::identity::Key;
use super::looks::chosen;
use super::round::{Eligible, Leaving, Round};
use super::rules::{Demand, Placement};
use super::{GiveUp, Residence, Residency, Site, Sites, WaitReason, site_of};
use crate::fleet::prefix::hash::PromptHashes;
use smallvec::{SmallVec, smallvec};
use std::rc::Rc;

/// A turn that asks for a place.
#[derive(Clone, Copy)]
pub(in crate::fleet) struct Asked<'a> {
    pub key: Key,
    pub has_session: bool,
    pub prompt: Coarse<'a>,
    /// To be booked for its answer.
    pub output_tokens: u64,
    pub cached: &'a Cached,
    pub exclude: &'a [String],
    pub arrived_s: f64,
    pub parent: Option<Key>,
}

impl Asked<'_> {
    /// Whether the worker takes requests, and this one is not to go elsewhere.
    pub(super) fn may_go(&self, site: &Site) -> bool {
        site.routable && !self.exclude.contains(&site.spec.id)
    }
}

/// Where a turn may go.
#[derive(Debug)]
pub(in crate::fleet) struct Go {
    /// Any of these.
    pub slots: SmallVec<[usize; 8]>,
    /// On which of them whose places are given up first; nobody's on the others.
    pub(super) give_up: SmallVec<[(usize, Leaving); 1]>,
    pub(super) state: Residence,
    /// Where the session was before; anywhere else it moves to.
    pub(super) was_at: Option<usize>,
}

impl Go {
    /// What the turn's session is to that worker if it goes there.
    pub fn state(&self, slot: usize) -> Residence {
        match self.was_at {
            Some(old) if old != slot => Residence::Moved,
            _ => self.state,
        }
    }

    /// Those who give up their places if the turn goes to this worker.
    pub fn give_up(&self, slot: usize) -> &[(Key, GiveUp)] {
        let at = self.give_up.iter().find(|(of, _)| *of == slot);
        at.map_or(&[], |(_, keys)| keys)
    }
}

/// A turn without a place, and what of it is the same on every worker.
struct Entrant<'a> {
    asked: &'a Asked<'a>,
    /// Where its session may have a place all the same: `Known::slots`.
    slots: &'a [usize],
    /// By which it is expected to grow each turn.
    growth_tokens: f64,
}

impl Entrant<'_> {
    fn occupant<'h>(&self, slot: usize, hold: &'h Hold) -> Option<&'h Occupant> {
        if self.slots.contains(&slot) {
            hold.occupant(self.asked.key)
        } else {
            None
        }
    }
}

/// A worker, and who gives up a place there.
type Plan<'a> = (&'a Site, Leaving);

/// Whether a turn fits on one worker.
enum Fit {
    Yes,
    AfterGivingUp(Leaving),
    No(WaitReason),
}

impl Residency {
    /// Where a turn may go now.
    ///
    /// # Errors
    /// Why it has to wait.
    pub(super) fn ask(
        &self,
        asked: &Asked<'_>,
        sites: &[Site],
        round: &mut Round,
    ) -> Result<Go, WaitReason> {
        if let Some(rule) = self.manner.rotates {
            return self.ask_rotating(&rule, asked, sites, round);
        }
        let Some(home) = self.residence_of(asked, sites) else {
            return self.enter(asked, sites, round);
        };
        let mut go = self.grow(asked, home, round.now_s)?;
        if go.state == Residence::Resident && self.is_better_off_elsewhere(asked, home) {
            self.add_idle_others(&mut go, asked, sites, round);
        }
        Ok(go)
    }

    /// As [`Residency::ask`], for one that comes now.
    pub fn ask_now(&self, asked: &Asked<'_>, sites: &Sites, now_s: f64) -> Result<Go, WaitReason> {
        let mut round = Round::new(sites, now_s, 0.0, 1.0);
        // Mostly it may go, and then nobody asks what kept it from workers that it may not go to.
        let first = self.ask(asked, sites, &mut round);
        if first.is_ok() || self.manner.rotates.is_some() {
            return first;
        }
        round.says_why = true;
        self.ask(asked, sites, &mut round)
    }

    /// Idle sessions that no longer fit beside what is in flight.
    pub(super) fn excess_idle(&self, site: &Site, now_s: f64) -> Leaving {
        let hold = &self.holds[site.slot];
        let excess = self
            .budget_tokens(site)
            .map_or(0, |budget| hold.firm_tokens().saturating_sub(budget));
        if excess == 0 || !self.manner.by_tokens || self.manner.residents_always_go {
            return Vec::new();
        }
        let places = self.idle_places(site, now_s, &self.busy_parents(now_s));
        let idle = self
            .rule
            .may_give_up(&self.view(site, &places, now_s), Demand::Growth);
        let nobody = PromptHashes::default();
        let nobody = Coarse::of(&nobody, 1.0);
        let enough = |keys: &[Key]| hold.freed_by(keys, &nobody) >= excess;
        cheapest(&idle, enough).unwrap_or(idle)
    }

    /// The worker on which the turn's session has a place. The overlapping turns of a family, which
    /// may be many clients' with one document, are not held together.
    pub fn residence_of<'a>(&self, asked: &Asked<'_>, sites: &'a [Site]) -> Option<&'a Site> {
        let (slot, serial) = self.sessions.get(asked.key)?.home?;
        let site = site_of(sites, slot)?;
        let occupant = self.holds.get(slot)?.occupant(asked.key)?;
        let is_bound = asked.has_session || occupant.turns.is_empty();
        (is_bound && asked.may_go(site) && site.serial == serial).then_some(site)
    }

    /// Whether a session that has been idle for a while is no longer cached where it has its place,
    /// as the engine's events say.
    pub fn has_lost_place(&self, asked: &Asked<'_>, site: &Site, now_s: f64) -> bool {
        const EVENTS_TAKE_S: f64 = 1.0;
        let occupant = self
            .holds
            .get(site.slot)
            .and_then(|hold| hold.occupant(asked.key));
        let Some(occupant) = occupant.filter(|o| o.is_idle()) else {
            return false;
        };
        let Some(held) = occupant.held.as_ref().filter(|_| site.is_exact) else {
            return false;
        };
        let believed = asked.prompt.tokens_of(held.common(&asked.prompt));
        let is_lost = |cached: u64| {
            believed.saturating_sub(cached) >= self.settings.cold_tokens.min(believed / 2 + 1)
        };
        let on_gpu = asked.cached.on(site.slot);
        if now_s - occupant.idle_since_s < EVENTS_TAKE_S || !is_lost(on_gpu) {
            return false;
        }
        // Where events tell of the GPU's cache alone, what was evicted there may be in the host tier and
        // come back from it, so that the session's home is where it was.
        let host_share = self.host_shares(site, now_s).get(&asked.key).copied();
        let in_host = (believed as f64 * host_share.unwrap_or(0.0)) as u64;
        is_lost(on_gpu.max(in_host))
    }

    /// A turn of a session with a place here: it goes at once if there is room for what it has grown by.
    fn grow(&self, asked: &Asked<'_>, site: &Site, now_s: f64) -> Result<Go, WaitReason> {
        let go = |give_up, state| Go {
            slots: smallvec![site.slot],
            give_up: smallvec![(site.slot, give_up)],
            state,
            was_at: Some(site.slot),
        };
        let Some(budget) = self.budget_tokens(site) else {
            return Ok(go(Vec::new(), Residence::Ungated));
        };
        let hold = &self.holds[site.slot];
        let own = hold.occupant(asked.key);
        let need = hold.need_tokens(own, &asked.prompt, asked.output_tokens);
        let excess = hold.firm_tokens() as i64 + need - budget as i64;
        if excess <= 0 || !self.manner.by_tokens || self.manner.residents_always_go {
            return Ok(go(Vec::new(), Residence::Resident));
        }
        let places = self.idle_places(site, now_s, &self.busy_parents(now_s));
        let mut others = self
            .rule
            .may_give_up(&self.view(site, &places, now_s), Demand::Growth);
        others.retain(|(key, _)| *key != asked.key);
        let enough = |keys: &[Key]| hold.freed_by(keys, &asked.prompt) as i64 >= excess;
        if let Some(plan) = cheapest(&others, enough) {
            return Ok(go(plan, Residence::Resident));
        }
        let is_alone = hold
            .occupants()
            .all(|(key, o)| key == asked.key || o.is_idle());
        let own_in_flight = hold
            .occupant(asked.key)
            .is_some_and(|o| !o.turns.is_empty());
        if is_alone && !own_in_flight {
            return Ok(go(others, Residence::Alone));
        }
        Err(WaitReason::Growth)
    }

    /// A turn without a place.
    fn enter<'s>(
        &self,
        asked: &Asked<'_>,
        sites: &'s [Site],
        round: &mut Round,
    ) -> Result<Go, WaitReason> {
        let may_go = |site: &&Site| asked.may_go(site);
        let candidates = || sites.iter().filter(may_go);
        if candidates().next().is_none() {
            return Err(WaitReason::NoWorker);
        }
        let at = |slot: usize| site_of(sites, slot).filter(may_go);
        let ungated = round.ungated.iter().copied();
        let ungated: SmallVec<[usize; 8]> = ungated.filter(|&slot| at(slot).is_some()).collect();
        let closed = round.closed;
        let shut = closed.filter(|_| !round.lends);
        let is_gated = |site: &&Site| site.kv_capacity_tokens.is_some() && Some(site.slot) != shut;
        let gated = || candidates().filter(is_gated);
        let places = round.looked.clone();
        let looked = || {
            chosen(sites, places.as_deref())
                .filter(may_go)
                .filter(is_gated)
        };
        let home = self.home_of(asked, at);
        let waited_s = round.now_s - asked.arrived_s;
        let home_s = home.map(|home| compute_s(asked, home));
        // Elsewhere than at home only once waiting has cost as much as moving does, and where nothing
        // runs: on a busy worker the prompt's computation takes time from other turns, and where all
        // are busy and all move, most of the fleet's time goes into prompts that were cached.
        let may_move = |site: &Site| match (home, home_s) {
            (Some(home), _) if home.slot == site.slot => true,
            (Some(_), _) if self.manner.placement == Placement::HomeOnly => false,
            (Some(_), Some(home_s)) => {
                let costs_more_s = compute_s(asked, site) - home_s;
                costs_more_s <= 0.0 || (waited_s >= costs_more_s && self.turns_on(site) == 0)
            }
            _ => true,
        };
        let mut reason = WaitReason::NoRoom;
        let (mut fits, mut plans) = (SmallVec::<[&Site; 8]>::new(), Vec::<Plan<'_>>::new());
        let mut sort = |site: &'s Site, fit: Fit| match fit {
            Fit::Yes => fits.push(site),
            // Nobody gives up a place for one that passes another.
            Fit::AfterGivingUp(_) if Some(site.slot) == closed => {
                reason = WaitReason::BehindOthers;
            }
            Fit::AfterGivingUp(plan) => plans.push((site, plan)),
            Fit::No(why) => reason = why,
        };
        let entrant = self.entrant(asked);
        // At home it is looked first: where it fits there, the others do not matter.
        let gated_home = home.filter(|home| is_gated(home));
        match gated_home.map(|home| (home, self.fit(&entrant, home, round))) {
            Some((home, Fit::Yes)) => sort(home, Fit::Yes),
            at_home => {
                let least_new = asked.prompt.tokens.saturating_sub(asked.cached.most());
                let is_cold = least_new >= self.settings.cold_tokens;
                let is_home = |site: &Site| home.is_some_and(|home| home.slot == site.slot);
                for site in looked().filter(|site| !is_home(site)) {
                    let is_open = !is_cold || self.is_open_to_cold(site);
                    if round.says_why || (is_open && may_move(site)) {
                        sort(site, self.fit(&entrant, site, round));
                    }
                }
                // Last, for where it is at home a turn has the best reason to wait.
                if let Some((home, fit)) = at_home {
                    sort(home, fit);
                }
            }
        }
        let has_fitting = !fits.is_empty() || !plans.is_empty();
        fits.retain(|site| may_move(site));
        plans.retain(|(site, _)| may_move(site));
        let was_at = self.sessions.get(asked.key).and_then(|known| known.home);
        let was_at = was_at.map(|(slot, _)| slot);
        if self.manner.placement == Placement::MostRoom {
            let room = |site: &&Site| self.room_tokens(site);
            fits = fits.iter().copied().max_by_key(room).into_iter().collect();
        }
        let has_room = !fits.is_empty() || !ungated.is_empty();
        let plans = self.offered(asked, plans, has_room.then_some(&fits), home);
        if has_room || !plans.is_empty() {
            let (state, was_at) = match has_room && fits.is_empty() {
                false => (Residence::Admitted, was_at),
                true => (Residence::Ungated, None),
            };
            let with_room = fits.iter().map(|site| site.slot).chain(ungated);
            let freed = plans.iter().map(|(site, _)| site.slot);
            let mut slots: SmallVec<[usize; 8]> = with_room.chain(freed).collect();
            slots.sort_unstable();
            let give_up = plans.into_iter();
            return Ok(Go {
                slots,
                give_up: give_up.map(|(site, plan)| (site.slot, plan)).collect(),
                state,
                was_at,
            });
        }
        if self.fits_nowhere(asked, gated())
            && let Some(go) = self.alone(asked, looked(), round)
        {
            return Ok(go);
        }
        Err(match (has_fitting, round.closed) {
            (true, _) => WaitReason::HomeFirst,
            (false, Some(_)) if gated().next().is_none() => WaitReason::BehindOthers,
            _ if self.fits_nowhere(asked, gated()) => WaitReason::Alone,
            _ => reason,
        })
    }

    /// Of workers where places would have to be given up, those that a turn may go to, beside those with
    /// room, if any have. Places to which nobody is expected back in time cost nothing, and the policy
    /// knows best which worker is least busy: where others have room, fewer turns have to run there than on
    /// any of those. Were only one worker offered, all new sessions would go there, behind each other's
    /// prompts, while sessions that ended without a word hold the places of idle workers.
    fn offered<'a>(
        &self,
        asked: &Asked<'_>,
        mut plans: Vec<Plan<'a>>,
        with_room: Option<&SmallVec<[&Site; 8]>>,
        home: Option<&Site>,
    ) -> Vec<Plan<'a>> {
        let is_free = |plan: &Plan<'_>| {
            self.manner.placement == Placement::WaitOrMove && nobody_returns(&plan.1)
        };
        if let Some(fits) = with_room {
            let fewest = fits.iter().map(|site| self.turns_on(site)).min();
            let fewest = fewest.unwrap_or(0);
            plans.retain(|plan| self.turns_on(plan.0) < fewest && is_free(plan));
            return plans;
        }
        let is_home = |plan: &Plan<'_>| home.is_some_and(|home| home.slot == plan.0.slot);
        if !plans.iter().any(is_home) && plans.iter().any(is_free) {
            plans.retain(is_free);
            return plans;
        }
        // At home first, then where the least is given up.
        let least = plans.into_iter().min_by_key(|plan| {
            let keys: Vec<Key> = plan.1.iter().map(|(key, _)| *key).collect();
            let freed = self.holds[plan.0.slot].freed_with_growth(&keys, &asked.prompt);
            (!is_home(plan), freed)
        });
        least.into_iter().collect()
    }

    /// Whether computing the whole prompt anew on an idle worker may take less time than waiting at home,
    /// where a cold prompt runs that is likely to be longer.
    fn is_better_off_elsewhere(&self, asked: &Asked<'_>, home: &Site) -> bool {
        let hold = self.holds.get(home.slot);
        let is_alone = hold
            .and_then(|hold| hold.occupant(asked.key))
            .is_some_and(|own| own.turns.is_empty());
        let is_short = asked.prompt.tokens < self.settings.cold_tokens;
        is_short
            && is_alone
            && self.manner.placement == Placement::WaitOrMove
            && !self.is_open_to_cold(home)
    }

    /// Adds idle workers with room, or where nobody is expected back in time, to where a turn may go.
    fn add_idle_others(&self, go: &mut Go, asked: &Asked<'_>, sites: &[Site], round: &mut Round) {
        let places = round.looked.clone();
        let entrant = self.entrant(asked);
        for site in chosen(sites, places.as_deref()) {
            let is_closed = Some(site.slot) == round.closed || go.slots.contains(&site.slot);
            if !asked.may_go(site) || is_closed || self.turns_on(site) > 0 {
                continue;
            }
            match self.fit(&entrant, site, round) {
                Fit::Yes => {}
                Fit::AfterGivingUp(plan) if nobody_returns(&plan) => {
                    go.give_up.push((site.slot, plan));
                }
                _ => continue,
            }
            go.slots.push(site.slot);
        }
        go.slots.sort_unstable();
    }

    pub(super) fn turns_on(&self, site: &Site) -> usize {
        self.holds.get(site.slot).map_or(0, Hold::turns_in_flight)
    }

    /// Where the turn's session is taken to be cached: by the rule where it was before, else where a
    /// long part of it is.
    fn home_of<'a>(
        &self,
        asked: &Asked<'_>,
        at: impl Fn(usize) -> Option<&'a Site>,
    ) -> Option<&'a Site> {
        match self.manner.placement {
            Placement::MostRoom => None,
            Placement::HomeOnly => {
                let (slot, serial) = self.sessions.get(asked.key)?.home?;
                at(slot).filter(|site| site.serial == serial)
            }
            Placement::WaitOrMove => {
                let warm = asked.cached.warm().filter_map(at);
                warm.max_by_key(|site| asked.cached.on(site.slot))
            }
        }
    }

    /// Whether another cold prefill may run there.
    pub(super) fn is_open_to_cold(&self, site: &Site) -> bool {
        let hold = self.holds.get(site.slot);
        let running = hold.map_or(0, |hold| hold.cold_in_flight);
        !site.prefills || running < self.settings.cold_slots
    }

    /// Free for others than those with a place.
    pub(super) fn room_tokens(&self, site: &Site) -> u64 {
        let booked = self.holds.get(site.slot).map_or(0, Hold::booked_tokens);
        self.budget_tokens(site)
            .unwrap_or(u64::MAX)
            .saturating_sub(booked)
    }

    /// By how many tokens a session is expected to grow each turn.
    pub(super) fn growth_of(&self, key: Key) -> f64 {
        let known = self.sessions.get(key).and_then(|known| known.growth_tokens);
        known.unwrap_or(self.growth_tokens)
    }

    /// What is booked of a growth of so many tokens a turn, for the turns after this one.
    pub(super) fn booked_growth(&self, tokens: f64, site: &Site) -> u64 {
        let has_host_tier = site.host_tier_tokens().is_some();
        (tokens * self.settings.growth_turns(has_host_tier)) as u64
    }

    fn entrant<'a>(&'a self, asked: &'a Asked<'_>) -> Entrant<'a> {
        Entrant {
            asked,
            slots: self
                .sessions
                .get(asked.key)
                .map_or(&[], |known| &known.slots),
            growth_tokens: self.growth_of(asked.key),
        }
    }

    fn fit(&self, entrant: &Entrant<'_>, site: &Site, round: &mut Round) -> Fit {
        let asked = entrant.asked;
        let Some(budget) = self.budget_tokens(site) else {
            return Fit::Yes;
        };
        let empty = Hold::default();
        let hold = self.holds.get(site.slot).unwrap_or(&empty);
        let waited_s = round.now_s - asked.arrived_s;
        let is_forced = self
            .manner
            .force_after_s
            .is_some_and(|after_s| waited_s >= after_s);
        let cached = asked.cached.on(site.slot);
        let is_cold = asked.prompt.tokens.saturating_sub(cached) >= self.settings.cold_tokens;
        if is_cold && !self.is_open_to_cold(site) {
            return Fit::No(WaitReason::ColdPrefill);
        }
        if !self.may_begin_slice(asked.key, site, round) {
            return Fit::No(WaitReason::SessionsLimit);
        }
        let occupant = entrant.occupant(site.slot, hold);
        let excess = self.excess_tokens(entrant, site, hold, budget, round.now_s);
        let is_there = occupant.is_some();
        let limit = self.rule.sessions_limit(site.slot).unwrap_or(usize::MAX);
        let over = (hold.len() + usize::from(!is_there)).saturating_sub(limit);
        if is_forced || (excess <= 0 && over == 0) {
            return Fit::Yes;
        }
        let no = if over > 0 {
            WaitReason::SessionsLimit
        } else {
            WaitReason::NoRoom
        };
        let own_parent = asked.parent.filter(|&parent| {
            hold.occupant(parent)
                .is_some_and(|occupant| occupant.is_idle())
        });
        let of_parent = own_parent
            .and_then(|parent| hold.occupant(parent))
            .map_or(0, |o| o.tokens() + o.growth_tokens);
        // Only idle ones are ever eligible. Which of them are takes longer to find out.
        let is_too_little = |most: u64| excess > 0 && most + of_parent < excess as u64;
        if is_too_little(hold.idle_tokens()) {
            return Fit::No(no);
        }
        let eligible = self.eligible(site, round);
        if is_too_little(eligible.most_tokens) {
            return Fit::No(no);
        }
        let mut others: Vec<_> = own_parent
            .map(|parent| (parent, GiveUp::ForItsChild))
            .into_iter()
            .collect();
        let is_other = |(key, _): &&(Key, GiveUp)| *key != asked.key && Some(*key) != own_parent;
        others.extend(eligible.keys.iter().filter(is_other).copied());
        let enough = |keys: &[Key]| {
            keys.len() >= over
                && (excess <= 0 || hold.freed_with_growth(keys, &asked.prompt) as i64 >= excess)
        };
        match cheapest(&others, enough) {
            Some(plan) => Fit::AfterGivingUp(plan),
            None => Fit::No(no),
        }
    }

    /// Whether a turn for which room gathers on `site` fits once those have gone that may be given up, and
    /// those in whose favour that room was lent, whose turns may still run.
    pub(super) fn fits_without_backfill(
        &self,
        asked: &Asked<'_>,
        site: &Site,
        round: &mut Round,
    ) -> bool {
        let (Some(budget), Some(hold)) = (self.budget_tokens(site), self.holds.get(site.slot))
        else {
            return false;
        };
        let running = hold
            .occupants()
            .filter(|(_, o)| o.backfilled && !o.is_idle());
        let entrant = self.entrant(asked);
        let eligible = self.eligible(site, round);
        let idle = eligible
            .keys
            .iter()
            .filter_map(|(key, _)| Some((*key, hold.occupant(*key)?)));
        let going = running.chain(idle).filter(|(key, _)| *key != asked.key);
        let freed: u64 = going
            .map(|(_, o)| hold.unshared_tokens(o) + o.growth_tokens)
            .sum();
        freed as i64 >= self.excess_tokens(&entrant, site, hold, budget, round.now_s)
    }

    /// By how much the worker's budget would be exceeded if the turn were let in.
    fn excess_tokens(
        &self,
        entrant: &Entrant<'_>,
        site: &Site,
        hold: &Hold,
        budget: u64,
        now_s: f64,
    ) -> i64 {
        let asked = entrant.asked;
        if !self.manner.by_tokens {
            return 0;
        }
        let places;
        let occupied = if self.rule.counts_itself() {
            places = self.places(site, now_s, &self.busy_parents(now_s));
            self.rule.occupied_tokens(&self.view(site, &places, now_s))
        } else {
            None
        };
        if let Some(occupied) = occupied {
            return (occupied + asked.prompt.tokens as f64) as i64 - budget as i64;
        }
        let whole = asked.prompt.tokens + asked.output_tokens;
        let growth = self.booked_growth(entrant.growth_tokens, site);
        let growth = growth.min(budget.saturating_sub(whole));
        let occupant = entrant.occupant(site.slot, hold);
        let own_growth = occupant.map_or(0, |o| o.growth_tokens);
        let need = hold.need_tokens(occupant, &asked.prompt, asked.output_tokens);
        (hold.booked_tokens() - own_growth + growth) as i64 + need - budget as i64
    }

    /// Who may be given up on a worker for one that waits.
    fn eligible(&self, site: &Site, round: &mut Round) -> Rc<Eligible> {
        if round.eligible.len() <= site.slot {
            round.eligible.resize(site.slot + 1, None);
        }
        let changes = self.holds.get(site.slot).map_or(0, Hold::changes);
        if let Some(eligible) = &round.eligible[site.slot]
            && eligible.changes == changes
        {
            return Rc::clone(eligible);
        }
        let busy = Rc::clone(
            round
                .busy
                .get_or_insert_with(|| Rc::new(self.busy_parents(round.now_s))),
        );
        let places = self.idle_places(site, round.now_s, &busy);
        let demand = round.demand();
        let mut keys = self
            .rule
            .may_give_up(&self.view(site, &places, round.now_s), demand);
        if self.taker.is_some() {
            let mut over: Vec<_> = places.iter().filter(|it| self.gives_way(it.key)).collect();
            over.retain(|place| keys.iter().all(|(key, _)| *key != place.key));
            over.sort_by(|one, other| {
                let longest = other.idle_s.total_cmp(&one.idle_s);
                longest.then(one.key.cmp(&other.key))
            });
            keys.extend(over.iter().map(|place| (place.key, GiveUp::OverShare)));
        }
        let hold = self.holds.get(site.slot);
        let tokens = keys.iter().filter_map(|(key, _)| {
            let occupant = hold?.occupant(*key)?;
            Some(occupant.tokens() + occupant.growth_tokens)
        });
        let most_tokens = tokens.sum();
        let eligible = Rc::new(Eligible {
            keys,
            most_tokens,
            changes,
        });
        round.eligible[site.slot] = Some(Rc::clone(&eligible));
        eligible
    }

    /// Who may be given up on `site` for one that waits, in the rule's order.
    pub(super) fn eligible_keys(&self, site: &Site, round: &mut Round) -> Leaving {
        self.eligible(site, round).keys.clone()
    }

    /// Whether the turn fits on none of these workers, not even beside nobody.
    pub(super) fn fits_nowhere<'a>(
        &self,
        asked: &Asked<'_>,
        mut sites: impl Iterator<Item = &'a Site>,
    ) -> bool {
        let whole = asked.prompt.tokens + asked.output_tokens;
        self.manner.by_tokens
            && sites.all(|site| {
                self.budget_tokens(site)
                    .is_some_and(|budget| whole > budget)
            })
    }

    /// Where one goes that fits nowhere: where nothing is in flight, once all that have a place there
    /// may be given up for it, or it has waited for as long as anybody should. Until then it takes no
    /// place: it computes all of its prompt for each turn, so that one such session that goes whenever
    /// the others think would leave them none of the worker's time.
    fn alone<'a>(
        &self,
        asked: &Asked<'_>,
        sites: impl Iterator<Item = &'a Site>,
        round: &mut Round,
    ) -> Option<Go> {
        let has_waited = round.now_s - asked.arrived_s
            >= self.settings.wait_bound_s * round.bound_scale
            || self.manner.smallest_first;
        let mut may_go = |site: &Site, others: &[Key]| {
            if Some(site.slot) == round.closed {
                return others.is_empty();
            }
            if has_waited {
                return true;
            }
            let eligible = self.eligible(site, round);
            let may_be_given_up = |key: &Key| eligible.keys.iter().any(|(k, _)| k == key);
            others.iter().all(may_be_given_up)
        };
        let others_on = |site: &Site| -> Option<Vec<Key>> {
            let Some(hold) = self.holds.get(site.slot) else {
                return Some(Vec::new());
            };
            let keys = hold.occupants().map(|(key, _)| key);
            hold.is_quiet()
                .then(|| keys.filter(|&key| key != asked.key).collect())
        };
        let quiet = sites.filter_map(|site| Some((site, others_on(site)?)));
        let (site, others) = quiet
            .filter(|(site, others)| may_go(site, others))
            .max_by_key(|(site, _)| self.budget_tokens(site))?;
        let give_up = others.into_iter().map(|key| (key, GiveUp::ForOneAlone));
        Some(Go {
            slots: smallvec![site.slot],
            give_up: smallvec![(site.slot, give_up.collect())],
            state: Residence::Alone,
            was_at: None,
        })
    }
}

fn nobody_returns(plan: &[(Key, GiveUp)]) -> bool {
    let mut reasons = plan.iter().map(|(_, reason)| *reason);
    reasons.all(|reason| matches!(reason, GiveUp::Ended | GiveUp::ReturnsLate))
}

/// Seconds of computing what of a turn is not cached on `site`.
pub(super) fn compute_s(asked: &Asked<'_>, site: &Site) -> f64 {
    site.compute_s(asked.prompt.tokens, asked.cached.on(site.slot))
}

/// As few of `others`, from the first on, as are `enough`; none where all are not.
pub(super) fn cheapest(
    others: &[(Key, GiveUp)],
    enough: impl Fn(&[Key]) -> bool,
) -> Option<Leaving> {
    let all: Vec<Key> = others.iter().map(|(key, _)| *key).collect();
    let count = (1..=all.len()).find(|&count| enough(&all[..count]))?;
    let mut plan = others[..count].to_vec();
    // Without those that the later ones make unnecessary.
    let mut at = 0;
    while at + 1 < plan.len() {
        let rest: Vec<Key> = (0..plan.len())
            .filter(|&i| i != at)
            .map(|i| plan[i].0)
            .collect();
        if enough(&rest) {
            plan.remove(at);
        } else {
            at += 1;
        }
    }
    Some(plan)
}
