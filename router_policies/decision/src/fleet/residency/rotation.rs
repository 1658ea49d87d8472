//! Rotation: which sessions take turns on a worker, and in which order their turns go.
//!
//! Two time scales, as in an operating system. *Sessions* are in a worker's rotation as far as its tiers keep
//! their prompts; where more come, those outside enter oldest wait first, each in place of whoever has been in
//! for longest. *Turns* of those who are in go by deadline, as the GPU's KV has room for what is in flight.

use super::book::Occupant;
use super::cached::Cached;
use super::footprint::{Blocks, Chain, Coarse};
use super::gate::{Asked, Go, cheapest, compute_s};
use super::identity::{Identity, Key, Name};
use super::queue::{FirstOfEach, Waiter};
use super::round::{Leaving, Round};
use super::sessions::Known;
use super::{GiveUp, Residence, Residency, Site, Sites, WaitReason, site_of};
use crate::fleet::log::{Event, OverloadRecord, unix_now_s};
use crate::fleet::prefix::estimate::StateMap;
use crate::fleet::prefix::hash::PromptHashes;
use serde::Deserialize;
use smallvec::{SmallVec, smallvec};
use std::sync::Arc;

/// What is known of a worker's members is worked out anew so often.
const TICK_S: f64 = 1.0;
/// A member that is so unlikely to come back has gone.
const GONE: f64 = 0.05;
/// Where so much of a worker's time would be enough to compute every prompt of every session anew at each of
/// its turns, nobody is kept out.
const AFFORDABLE: f64 = 0.6;
/// Where computing the prompts of all sessions once takes no longer, nobody waits for another's sake: a turn waits
/// for no more than that.
const CHEAP_ROUND_S: f64 = 3.0;
/// A return is worth so many times the idleness that computing the prompt again pays for.
const RETURN_WORTH: f64 = 2.0;
/// How a session's silence is judged: as it was when it had lasted for so much of it. Who is expected at any
/// moment is not gone a moment later.
const SEEN: f64 = 0.8;
/// The share of a host tier that keeps the prompts of all, while none has to leave for another. Who leaves takes
/// space in it for a while after, for which `keep` leaves room.
const ALL_KEPT: f64 = 0.95;
/// Sessions for which room is made in the rotations at one look.
const AT_ONCE: usize = 16;

/// What becomes of sessions that come while a worker is overloaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Overload {
    /// They rotate with all others, more slowly.
    #[default]
    Rotate,
    /// They wait until those that came before have gone.
    Door,
    /// They are refused.
    Refuse,
}

/// What a rule asks for that rotates sessions.
#[derive(Clone, Copy, Debug)]
pub struct Rotates {
    pub patience_s: f64,
    pub quantum_s: f64,
    pub keep: f64,
    pub busy: f64,
    pub overhead: f64,
    pub overload: Overload,
}

impl Rotates {
    /// How far apart sessions enter of which each costs so much: no further than anybody should wait.
    fn apart_s(&self, cost_s: f64) -> f64 {
        (cost_s / self.overhead).min(self.patience_s)
    }
}

/// A session that is in.
#[derive(Default)]
struct Member {
    /// Since when it has been in.
    since_s: f64,
    /// Its last prompt.
    chain: Chain,
    /// Since when its turns are to be prompt, while they are.
    prompt_since_s: Option<f64>,
    /// It leaves once its turn has ended.
    leaves: bool,
    name: Option<Name>,
}

/// A session that was in.
pub(super) struct Left {
    pub name: Option<Name>,
    pub tokens: u64,
}

/// The sessions that take turns on one worker.
#[derive(Default)]
pub(super) struct Rotation {
    members: StateMap<Member>,
    kept: Blocks,
    leaving: usize,
    /// From when on a session may enter in another's place, as patience wants and as its cost allows.
    next_s: f64,
    /// From when on its cost allows to take the place of one who is not expected soon.
    soonest_s: f64,
    tick_s: f64,
    /// Turns of all members are more than the GPU holds over time, and need quanta.
    short: bool,
    /// When a quantum was last taken for one that waits.
    change_s: f64,
    affords_all: bool,
    is_tiered: bool,
    /// Sessions that wait to enter here; with them there are more than the tiers keep.
    outside: f64,
    crowded: bool,
    /// Who has left for another comes back: so long there are more.
    crowded_until_s: f64,
    overloaded: bool,
    /// One more session would make it so.
    full: bool,
}

impl Rotation {
    /// The worker's cache is gone.
    pub fn lose_all(&mut self) {
        *self = Self {
            is_tiered: self.is_tiered,
            ..Self::default()
        };
    }

    /// Tokens of a prompt that no member's prompt begins with.
    fn new_tokens(&self, prompt: &Coarse<'_>) -> u64 {
        prompt.tokens_of(self.kept.new_blocks(prompt, 0))
    }

    fn set(&mut self, key: Key, prompt: &Coarse<'_>, now_s: f64) {
        let member = self.members.entry(key).or_insert_with(|| Member {
            since_s: now_s,
            ..Member::default()
        });
        let chain = &mut member.chain;
        self.kept.keep_common(chain, prompt);
        self.kept.extend(chain, prompt);
    }

    pub fn remove(&mut self, key: Key) -> Option<Left> {
        let member = self.members.remove(&key)?;
        self.leaving -= usize::from(member.leaves);
        self.kept.release(&member.chain);
        Some(Left {
            tokens: member.chain.tokens(),
            name: member.name,
        })
    }
}

/// A session outside whose turn waits.
struct Outsider {
    prompt: Arc<PromptHashes>,
    cached: Arc<Cached>,
    exclude: Vec<String>,
    is_new: bool,
}

/// Those outside whose turns wait: how many, what their prompts come to, and the first of them.
struct Outside {
    count: usize,
    tokens: u64,
    first: Vec<Outsider>,
}

impl Residency {
    /// What the tiers keep of prompts, so much of the host tier where it is larger than the GPU.
    fn kept_tokens(&self, site: &Site, share: f64) -> u64 {
        let budget = self.budget_tokens(site).unwrap_or(u64::MAX);
        site.host_tier_tokens()
            .map_or(budget, |tier| ((tier as f64 * share) as u64).max(budget))
    }

    /// What the prompts of those who are in may take.
    fn kept_limit(&self, site: &Site, rule: &Rotates) -> u64 {
        let is_crowded = self
            .rotation(site.slot)
            .is_some_and(|rotation| rotation.crowded);
        self.kept_tokens(
            site,
            if is_crowded {
                rule.keep
            } else {
                rule.keep.max(ALL_KEPT)
            },
        )
    }

    fn rotation(&self, slot: usize) -> Option<&Rotation> {
        self.seen.get(slot).map(|seen| &seen.rotation)
    }

    fn is_member(&self, key: Key, site: &Site) -> bool {
        let known = self.sessions.get(key);
        known.is_some_and(|known| known.home == Some((site.slot, site.serial)))
            && self
                .rotation(site.slot)
                .is_some_and(|rotation| rotation.members.contains_key(&key))
    }

    /// The worker in whose rotation the session is.
    fn member_at<'s>(&self, key: Key, sites: &'s [Site]) -> Option<&'s Site> {
        let (slot, _) = self.sessions.get(key)?.home?;
        site_of(sites, slot).filter(|site| self.is_member(key, site))
    }

    /// As [`Residency::ask`], under a rule that rotates sessions.
    pub(super) fn ask_rotating(
        &self,
        rule: &Rotates,
        asked: &Asked<'_>,
        sites: &[Site],
        round: &mut Round,
    ) -> Result<Go, WaitReason> {
        let candidates = || sites.iter().filter(|site| asked.may_go(site));
        if candidates().next().is_none() {
            return Err(WaitReason::NoWorker);
        }
        let go = |slots, give_up, state| Go {
            slots,
            give_up,
            state,
            was_at: self
                .sessions
                .get(asked.key)
                .and_then(|known| known.home)
                .map(|(slot, _)| slot),
        };
        if let Some(site) = self.member_at(asked.key, sites).filter(|s| asked.may_go(s)) {
            let is_prompt = self.is_prompt(asked.key, site);
            if round.blocked.contains(&site.slot)
                || (!is_prompt && round.queued.contains(&site.slot))
            {
                return Err(WaitReason::BehindOthers);
            }
            if !is_prompt && !self.fits_prompt(rule, asked.key, asked.prompt.tokens, site) {
                round.queued.push(site.slot);
                return Err(WaitReason::SessionsLimit);
            }
            return match self.room_for(asked, site, true) {
                Ok((plan, state)) => Ok(go(
                    smallvec![site.slot],
                    smallvec![(site.slot, plan)],
                    state,
                )),
                Err(why) => {
                    round.blocked.push(site.slot);
                    Err(why)
                }
            };
        }
        let ungated: SmallVec<[usize; 8]> = candidates()
            .filter(|site| site.kv_capacity_tokens.is_none())
            .map(|site| site.slot)
            .collect();
        if !ungated.is_empty() {
            return Ok(go(ungated, SmallVec::new(), Residence::Ungated));
        }
        let mut reason = WaitReason::BehindOthers;
        let (mut slots, mut plans) = (SmallVec::new(), SmallVec::new());
        let mut alone = None;
        for site in candidates() {
            if round.shut.contains(&site.slot) || round.blocked.contains(&site.slot) {
                continue;
            }
            let enters = self.may_enter(rule, asked, site);
            if let Err(why) = enters {
                round.shut.push(site.slot);
                reason = why;
                continue;
            }
            match self.room_for(asked, site, false) {
                Ok((plan, Residence::Alone)) => alone = alone.or(Some((site.slot, plan))),
                Ok((plan, _)) => {
                    slots.push(site.slot);
                    plans.push((site.slot, plan));
                }
                Err(why) => {
                    round.blocked.push(site.slot);
                    reason = why;
                }
            }
        }
        match (slots.is_empty(), alone) {
            (false, _) => Ok(go(slots, plans, Residence::Admitted)),
            (true, Some((slot, plan))) => Ok(Go {
                slots: smallvec![slot],
                give_up: smallvec![(slot, plan)],
                state: Residence::Alone,
                was_at: None,
            }),
            (true, None) => Err(reason),
        }
    }

    /// Whether a session from outside may enter now, as far as the rotation goes.
    fn may_enter(&self, rule: &Rotates, asked: &Asked<'_>, site: &Site) -> Result<(), WaitReason> {
        if !self.keeps(rule, site, &asked.prompt) {
            return Err(WaitReason::SessionsLimit);
        }
        let new = asked
            .prompt
            .tokens
            .saturating_sub(asked.cached.on(site.slot));
        if new >= self.settings.cold_tokens && !self.is_open_to_cold(site) {
            return Err(WaitReason::ColdPrefill);
        }
        Ok(())
    }

    /// Whether the tiers keep a prompt of so many new tokens beside those of all members.
    fn keeps(&self, rule: &Rotates, site: &Site, prompt: &Coarse<'_>) -> bool {
        let Some(rotation) = self.rotation(site.slot) else {
            return true;
        };
        let free = self
            .kept_limit(site, rule)
            .checked_sub(rotation.kept.tokens());
        // What others hold too is looked up only where that decides.
        let fits = |free: u64| prompt.tokens <= free || rotation.new_tokens(prompt) <= free;
        rotation.affords_all || rotation.members.is_empty() || free.is_some_and(fits)
    }

    /// Whether the GPU's KV has room for a turn beside what is in flight, and whose idle KV goes for it.
    fn room_for(
        &self,
        asked: &Asked<'_>,
        site: &Site,
        is_member: bool,
    ) -> Result<(Leaving, Residence), WaitReason> {
        let state = match is_member {
            true => Residence::Resident,
            false => Residence::Admitted,
        };
        let (Some(budget), Some(hold)) = (self.budget_tokens(site), self.holds.get(site.slot))
        else {
            return Ok((Vec::new(), state));
        };
        let own = hold.occupant(asked.key);
        let need = hold.need_tokens(own, &asked.prompt, asked.output_tokens);
        let excess = hold.firm_tokens() as i64 + need - budget as i64;
        if excess <= 0 {
            return Ok((Vec::new(), state));
        }
        let rotation = self.rotation(site.slot);
        let since_s = |key: Key| {
            let member = rotation.and_then(|rotation| rotation.members.get(&key));
            member.map_or(f64::NEG_INFINITY, |member| member.since_s)
        };
        let waits = |key: Key| {
            self.sessions
                .get(key)
                .is_some_and(|known| known.waiting > 0)
        };
        let mut idle: Vec<(bool, f64, Key)> = hold
            .occupants()
            .filter(|(key, of)| *key != asked.key && of.is_idle())
            .map(|(key, _)| (waits(key), since_s(key), key))
            .collect();
        idle.sort_by(|one, other| {
            let by_time = one.1.total_cmp(&other.1);
            one.0.cmp(&other.0).then(by_time).then(one.2.cmp(&other.2))
        });
        let idle: Leaving = idle
            .into_iter()
            .map(|(_, _, key)| (key, GiveUp::Growth))
            .collect();
        let enough = |keys: &[Key]| hold.freed_by(keys, &asked.prompt) as i64 >= excess;
        if let Some(plan) = cheapest(&idle, enough) {
            return Ok((plan, state));
        }
        if hold.turns_in_flight() == 0 {
            return Ok((idle, Residence::Alone));
        }
        Err(WaitReason::NoRoom)
    }

    /// The first of those that wait, in the order in which they go: by deadline.
    pub(super) fn by_deadline(&self, rule: &Rotates, sites: &Sites) -> Vec<u64> {
        let mut outside = FirstOfEach::default();
        let mut ranked: Vec<(f64, u64)> = Vec::new();
        for (id, waiter) in self.queue.waiting() {
            let turn = &waiter.turn;
            let within_s = match self.member_at(turn.identity.key, sites) {
                Some(site) if self.is_prompt(turn.identity.key, site) => 0.0,
                Some(_) => rule.patience_s,
                None if !outside.has(turn) => continue,
                None if rule.overload == Overload::Door && turn.is_first_turn => {
                    self.settings.max_wait_s
                }
                None => rule.patience_s,
            };
            ranked.push((turn.arrived_s + within_s, id));
        }
        ranked.sort_by(|one, other| one.0.total_cmp(&other.0).then(one.1.cmp(&other.1)));
        ranked.into_iter().map(|(_, id)| id).collect()
    }

    /// Whether a member's turns are to be prompt.
    fn is_prompt(&self, key: Key, site: &Site) -> bool {
        self.rotation(site.slot).is_none_or(|rotation| {
            !rotation.short
                || rotation
                    .members
                    .get(&key)
                    .is_some_and(|member| member.prompt_since_s.is_some())
        })
    }

    /// Whether a session's turns may be prompt beside those whose turns are.
    fn fits_prompt(&self, rule: &Rotates, key: Key, tokens: u64, site: &Site) -> bool {
        let load = self.prompt_load(site, key);
        let limit = self.budget_tokens(site).unwrap_or(u64::MAX) as f64 * rule.busy;
        load <= 0.0 || load + self.held_over_time(key, tokens) <= limit
    }

    /// A turn was let in: its session is in from now on.
    pub(super) fn note_turn(
        &mut self,
        asked: &Asked<'_>,
        identity: &Identity,
        site: &Site,
        now_s: f64,
    ) {
        let Some(rule) = self.manner.rotates else {
            return;
        };
        let key = asked.key;
        self.hold(site.slot);
        if self.queue.is_empty() {
            self.seen[site.slot].rotation.outside = 0.0;
        }
        self.tick(&rule, site, now_s);
        let rotation = &mut self.seen[site.slot].rotation;
        if !rotation.members.contains_key(&key) {
            rotation.soonest_s = now_s + rule.apart_s(compute_s(asked, site));
        }
        rotation.is_tiered = site.host_tier_tokens().is_some();
        rotation.set(key, &asked.prompt, now_s);
        if let Some(member) = rotation.members.get_mut(&key) {
            member.name.clone_from(&identity.name);
        }
        if rotation.short
            && let Some(member) = rotation.members.get_mut(&key)
        {
            member.prompt_since_s.get_or_insert(now_s);
        }
    }

    fn held_over_time(&self, key: Key, tokens: u64) -> f64 {
        self.over_time(tokens as f64, self.sessions.get(key))
    }

    /// What those hold over time, but for `key`, who have a quantum or run a turn.
    fn prompt_load(&self, site: &Site, key: Key) -> f64 {
        let Some(rotation) = self.rotation(site.slot) else {
            return 0.0;
        };
        let runs = |key: Key| {
            let occupant = self
                .holds
                .get(site.slot)
                .and_then(|hold| hold.occupant(key));
            occupant.is_some_and(|occupant| !occupant.is_idle())
        };
        let others = rotation
            .members
            .iter()
            .filter(|(of, member)| **of != key && (member.prompt_since_s.is_some() || runs(**of)));
        others
            .map(|(key, member)| self.held_over_time(*key, member.chain.tokens()))
            .sum()
    }

    /// Takes the quantum of whoever has had one for longest, for one that waits.
    fn change_prompt(&mut self, rule: &Rotates, site: &Site, waiting: usize, now_s: f64) {
        let rotation = &mut self.seen[site.slot].rotation;
        if !rotation.short || waiting == 0 {
            rotation.change_s = now_s;
            return;
        }
        let held = rotation.members.iter_mut();
        let mut held: Vec<(f64, Key, &mut Member)> = held
            .filter_map(|(&key, member)| Some((member.prompt_since_s?, key, member)))
            .collect();
        let count = held.len() as f64;
        let interval_s = (rule.quantum_s / count).min(rule.patience_s / waiting as f64);
        let longest = held
            .iter_mut()
            .min_by(|one, other| one.0.total_cmp(&other.0).then(one.1.cmp(&other.1)));
        if let Some((_, _, member)) = longest
            && now_s >= rotation.change_s + interval_s
        {
            member.prompt_since_s = None;
            rotation.change_s = now_s;
        }
    }

    /// The end of a turn, after which nothing of its session is in flight on the worker.
    pub(super) fn note_idle(&mut self, key: Key, site: &Site, ended: bool, now_s: f64) {
        if self.manner.rotates.is_none() {
            return;
        }
        let member = self.seen[site.slot].rotation.members.get(&key);
        let leaves = member.is_some_and(|member| member.leaves);
        if ended {
            self.put_out(key, site, GiveUp::Ended, now_s);
        } else if leaves {
            self.put_out(key, site, GiveUp::HadItsShare, now_s);
        } else {
            self.forget_idle(key, site.slot);
        }
    }

    /// Beside a host tier what is idle needs no room on the GPU.
    pub(super) fn forget_idle(&mut self, key: Key, slot: usize) {
        let is_tiered = self.manner.rotates.is_some() && self.seen[slot].rotation.is_tiered;
        let hold = &mut self.holds[slot];
        if is_tiered && hold.occupant(key).is_some_and(Occupant::is_idle) {
            hold.remove(key);
        }
    }

    /// Takes a session out of the rotation.
    fn put_out(&mut self, key: Key, site: &Site, reason: GiveUp, now_s: f64) {
        self.give_up(site.slot, &site.spec, key, reason, now_s);
    }

    /// Works out what is known of a worker's members, where that is old: who has gone, whether all turns fit,
    /// and what patience asks for.
    fn tick(&mut self, rule: &Rotates, site: &Site, now_s: f64) {
        let Some(rotation) = self.rotation(site.slot) else {
            return;
        };
        let outside = rotation.outside;
        if now_s < rotation.tick_s + TICK_S {
            return;
        }
        let mut gone: Vec<Key> = Vec::new();
        let (mut count, mut wanted, mut cost_s, mut work) = (0.0, 0.0, 0.0, 0.0);
        for (&key, member) in &rotation.members {
            let known = self.sessions.get(key);
            if known.is_none_or(|known| self.has_gone(known, now_s)) {
                gone.push(key);
                continue;
            }
            let all = member.chain.tokens();
            let compute_s = site.compute_s(all, 0);
            let over_time = self.held_over_time(key, all);
            count += 1.0;
            wanted += over_time;
            cost_s += compute_s;
            work += compute_s / self.period_s(known).max(1e-3);
        }
        let limit = self.budget_tokens(site).unwrap_or(u64::MAX) as f64 * rule.busy;
        // Where sessions wait to enter, those who are in go as they come: more waiting would have the tier drop them.
        let mean_s = cost_s / f64::max(count, 1.0);
        let is_cheap = mean_s * (count + outside) <= CHEAP_ROUND_S;
        let short = wanted > limit && !rotation.crowded && !is_cheap;
        let affords_all = is_cheap || work * (count + outside) / f64::max(count, 1.0) <= AFFORDABLE;
        let wait_s = |outside: f64| outside * mean_s / rule.overhead;
        let exceeds = |outside: f64| !affords_all && wait_s(outside) > rule.patience_s;
        let (overloaded, full) = (exceeds(outside), exceeds(outside + 1.0));
        let rotation = &mut self.seen[site.slot].rotation;
        if overloaded != rotation.overloaded {
            self.outbox.events.push(Event::Overload(OverloadRecord {
                ts_unix_s: unix_now_s(),
                worker: Arc::clone(&site.spec),
                overloaded,
                outside: outside.ceil() as u64,
                expected_wait_s: wait_s(outside),
            }));
        }
        rotation.full = full;
        rotation.tick_s = now_s;
        if !short {
            for member in rotation.members.values_mut() {
                member.prompt_since_s = None;
            }
        }
        rotation.short = short;
        rotation.affords_all = affords_all;
        rotation.overloaded = overloaded;
        for key in gone {
            self.put_out(key, site, GiveUp::ReturnsLate, now_s);
        }
    }

    fn has_gone(&self, known: &Known, now_s: f64) -> bool {
        let ended_s = known.ended_s.unwrap_or(now_s);
        self.returns(known, ended_s + SEEN * (now_s - ended_s)) < GONE
    }

    /// Of the first there are at most `most`.
    fn outsiders(&self, sites: &Sites, scale: f64, most: usize) -> Outside {
        let mut first = FirstOfEach::default();
        let mut all: Vec<(f64, u64, &Waiter)> = self
            .queue
            .waiting()
            .filter(|(_, waiter)| {
                let is_member = self.member_at(waiter.turn.identity.key, sites).is_some();
                !is_member && first.has(&waiter.turn)
            })
            .map(|(id, waiter)| (waiter.turn.arrived_s, id, waiter))
            .collect();
        // At the door those who were in before go first.
        let is_door = self
            .manner
            .rotates
            .is_some_and(|rule| rule.overload == Overload::Door);
        let is_behind = |waiter: &Waiter| is_door && waiter.turn.is_first_turn;
        all.sort_by(|one, other| {
            let by_wait = one.0.total_cmp(&other.0).then(one.1.cmp(&other.1));
            is_behind(one.2).cmp(&is_behind(other.2)).then(by_wait)
        });
        let tokens =
            |(_, _, waiter): &(f64, u64, &Waiter)| Coarse::of(&waiter.turn.prompt, scale).tokens;
        let outsider = |waiter: &Waiter| Outsider {
            prompt: Arc::clone(&waiter.turn.prompt),
            cached: Arc::clone(&waiter.turn.cached),
            exclude: waiter.turn.exclude.clone(),
            is_new: waiter.turn.is_first_turn,
        };
        let ids = all.iter().map(|(_, id, _)| *id).collect();
        let ids = self.queue.shared_out(ids).into_iter().take(most);
        Outside {
            count: all.len(),
            tokens: all.iter().map(tokens).sum(),
            first: ids
                .filter_map(|id| Some(outsider(self.queue.get(id)?)))
                .collect(),
        }
    }

    /// Sees to it that there is room in the rotations for those outside that wait, oldest wait first.
    pub(super) fn rotate(&mut self, rule: &Rotates, sites: &Sites, now_s: f64) {
        let gated = || {
            sites
                .iter()
                .filter(|site| site.routable && site.kv_capacity_tokens.is_some())
        };
        let open = gated().count().max(1);
        let scale = self.text_scale();
        let waiting = self.outsiders(sites, scale, open.min(AT_ONCE));
        let outside = waiting.count as f64 / open as f64;
        for site in gated() {
            self.hold(site.slot);
            let limit = self.kept_tokens(site, rule.keep.max(ALL_KEPT));
            let rotation = &mut self.seen[site.slot].rotation;
            rotation.outside = outside;
            if rotation.kept.tokens() + waiting.tokens / open as u64 > limit {
                rotation.crowded_until_s = now_s + rule.patience_s;
            }
            rotation.crowded = now_s < rotation.crowded_until_s;
            self.tick(rule, site, now_s);
            self.let_leave(site, now_s);
        }
        for site in gated() {
            let waits = |waiter: &Waiter| {
                let key = waiter.turn.identity.key;
                self.is_member(key, site) && !self.is_prompt(key, site)
            };
            let waiting = self.queue.waiting().filter(|(_, waiter)| waits(waiter));
            let waiting = waiting.count();
            self.change_prompt(rule, site, waiting, now_s);
        }
        let mut has_shed = false;
        let mut taken: SmallVec<[usize; 8]> = SmallVec::new();
        for outsider in &waiting.first {
            let prompt = Coarse::of(&outsider.prompt, scale);
            let may_go = |site: &&Site| {
                !outsider.exclude.contains(&site.spec.id) && !taken.contains(&site.slot)
            };
            let prepared = gated().filter(may_go).find(|site| {
                self.keeps(rule, site, &prompt) || self.seen[site.slot].rotation.leaving > 0
            });
            if let Some(site) = prepared {
                taken.push(site.slot);
                continue;
            }
            if !std::mem::replace(&mut has_shed, true) {
                for site in gated() {
                    self.shed(rule, site, now_s);
                }
            }
            let due = |site: &&Site| now_s >= self.seen[site.slot].rotation.next_s;
            let cached = |site: &&Site| outsider.cached.on(site.slot);
            let Some(site) = gated().filter(may_go).filter(due).max_by_key(cached) else {
                continue;
            };
            taken.push(site.slot);
            if rule.overload == Overload::Door
                && outsider.is_new
                && self.seen[site.slot].rotation.full
            {
                continue;
            }
            let rotation = &self.seen[site.slot].rotation;
            let over = rotation.kept.tokens() + rotation.new_tokens(&prompt);
            let over = over.saturating_sub(self.kept_limit(site, rule));
            let cost_s = site.compute_s(prompt.tokens, outsider.cached.on(site.slot));
            self.displace(rule, site, over, cost_s, outside, now_s);
        }
    }

    pub(super) fn is_overloaded(&self, slot: usize) -> bool {
        self.rotation(slot)
            .is_some_and(|rotation| rotation.overloaded)
    }

    /// Whether a turn's session is to come again later: it is new, and one more would be too many everywhere.
    pub(in crate::fleet) fn refuses(
        &self,
        key: Key,
        may_go: impl Fn(&str) -> bool,
        sites: &[Site],
    ) -> bool {
        let is_asked_for = self
            .manner
            .rotates
            .is_some_and(|rule| rule.overload == Overload::Refuse);
        let gated = || {
            sites
                .iter()
                .filter(|site| site.routable && may_go(&site.spec.id))
        };
        let is_full = |site: &Site| {
            self.rotation(site.slot)
                .is_some_and(|rotation| rotation.full)
        };
        is_asked_for && self.is_first_turn(key) && gated().next().is_some() && gated().all(is_full)
    }

    /// How many members run no turn on the worker.
    pub(super) fn idle_members(&self, slot: usize) -> usize {
        let runs = |key: Key| {
            let occupant = self.holds.get(slot).and_then(|hold| hold.occupant(key));
            occupant.is_some_and(|occupant| !occupant.turns.is_empty())
        };
        let members = self.rotation(slot).map(|rotation| rotation.members.keys());
        members
            .into_iter()
            .flatten()
            .filter(|key| !runs(**key))
            .count()
    }

    fn is_idle(&self, key: Key) -> bool {
        let known = self.sessions.get(key);
        known.is_none_or(|known| known.in_flight == 0 && known.waiting == 0)
    }

    /// Those who were to leave after a turn that did not come to its end here.
    fn let_leave(&mut self, site: &Site, now_s: f64) {
        let rotation = &self.seen[site.slot].rotation;
        if rotation.leaving == 0 {
            return;
        }
        let members = rotation.members.iter();
        let left = members.filter(|(key, member)| member.leaves && self.is_idle(**key));
        let left: Vec<Key> = left.map(|(key, _)| *key).collect();
        for key in left {
            self.put_out(key, site, GiveUp::HadItsShare, now_s);
        }
    }

    /// Who is not expected back soon enough for what the tiers keep of it to pay leaves at once, if another
    /// may enter.
    fn shed(&mut self, rule: &Rotates, site: &Site, now_s: f64) {
        let rotation = &self.seen[site.slot].rotation;
        let runs = self.turns_on(site) > 0;
        if runs && now_s < rotation.soonest_s {
            return;
        }
        let limit = self.kept_limit(site, rule) as f64;
        let pays = |key: Key, tokens: u64| {
            let Some(known) = self.sessions.get(key) else {
                return false;
            };
            let worth_s = RETURN_WORTH * site.compute_s(tokens, 0) * limit / tokens.max(1) as f64;
            let idle_s = SEEN * known.ended_s.map_or(0.0, |ended_s| now_s - ended_s);
            let last_share = self.endings.last_share(known.kind());
            self.gaps
                .keeping_pays(&known.gaps, last_share, idle_s, worth_s)
        };
        let members = rotation.members.iter();
        let late = members
            .filter(|(key, member)| self.is_idle(**key) && !pays(**key, member.chain.tokens()));
        let late: Vec<Key> = late.map(|(key, _)| *key).collect();
        for key in late {
            self.put_out(key, site, GiveUp::ReturnsLate, now_s);
        }
    }

    /// Those who have been in for longest leave, each after its turn, until `over_tokens` are free.
    fn displace(
        &mut self,
        rule: &Rotates,
        site: &Site,
        over_tokens: u64,
        cost_s: f64,
        outside: f64,
        now_s: f64,
    ) {
        let rotation = &self.seen[site.slot].rotation;
        let mut by_tenure: Vec<(f64, Key)> = rotation
            .members
            .iter()
            .map(|(&key, member)| (member.since_s, key))
            .collect();
        by_tenure.sort_by(|one, other| one.0.total_cmp(&other.0).then(one.1.cmp(&other.1)));
        let nothing = PromptHashes::default();
        let nothing = Coarse::of(&nothing, 1.0);
        let enough = |count: &usize| {
            let chains = by_tenure[..*count].iter();
            let chains = chains.filter_map(|(_, key)| Some(&rotation.members.get(key)?.chain));
            rotation.kept.freed_by(chains, &nothing) >= over_tokens
        };
        let count = (0..=by_tenure.len()).find(enough);
        by_tenure.truncate(count.unwrap_or(by_tenure.len()));
        for (_, key) in by_tenure {
            if self.is_idle(key) {
                self.put_out(key, site, GiveUp::HadItsShare, now_s);
            } else {
                let rotation = &mut self.seen[site.slot].rotation;
                if let Some(member) = rotation.members.get_mut(&key) {
                    member.leaves = true;
                    rotation.leaving += 1;
                }
            }
        }
        let soonest_s = rule.apart_s(cost_s);
        let wanted_s = rule.patience_s / f64::max(outside, 1.0);
        let rotation = &mut self.seen[site.slot].rotation;
        rotation.next_s = now_s + soonest_s.max(wanted_s);
    }
}
