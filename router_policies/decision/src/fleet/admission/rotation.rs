//! Rotation: which sessions take turns on a worker, and in which order their turns go.
//!
//! Two time scales, as in an operating system. *Sessions* are in a worker's rotation as far as its tiers keep
//! their prompts; where more come, those outside enter oldest wait first, each in place of whoever has been in
//! for longest. *Turns* of those who are in go by deadline, as the GPU's KV has room for what is in flight.

use super::asking::Asked;
use super::cached::Cached;
use super::footprint::{Blocks, Chain, Coarse};
use super::hold::Occupant;
use super::identity::{Identity, Key, Name};
use super::queue::{FirstOfEach, Waiter, micros};
use super::sessions::Known;
use super::{Admission, GiveUp, Ledger, Site, Sites, site_of};
use crate::fleet::log::{Event, OverloadRecord, unix_now_s};
use crate::fleet::prefix::estimate::StateMap;
use crate::fleet::prefix::hash::PromptHashes;
use serde::Deserialize;
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

/// What is known of a worker's members is worked out anew so often, of so many workers at one look.
const TICK_S: f64 = 1.0;
const TICKS: usize = 4;
/// Where so much of a worker's time would be enough to compute every prompt of every session anew at each of
/// its turns, nobody is kept out.
const AFFORDABLE: f64 = 0.6;
/// Where computing the prompts of all sessions once takes no longer, nobody waits for another's sake: a turn waits
/// for no more than that.
const CHEAP_ROUND_S: f64 = 3.0;
/// The share of a host tier that keeps the prompts of all, while none has to leave for another. Who leaves takes
/// space in it for a while after, for which `keep` leaves room.
const ALL_KEPT: f64 = 0.95;
/// The share of a worker's KV that sessions with a quantum hold over time: more of them, and their turns wait for room.
const BUSY: f64 = 0.8;
/// The share of a worker's time that computing the prompts of sessions which enter in another's place may take.
const OVERHEAD: f64 = 0.2;
/// The share of patience_s in which all that wait to enter would, did it cost nothing: the rest is for the turns of those
/// who leave, and for room.
const ENTERS_WITHIN: f64 = 0.5;
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
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rotates {
    pub patience_s: f64,
    pub keep: f64,
    pub overload: Overload,
}

impl Default for Rotates {
    fn default() -> Self {
        Self {
            patience_s: 120.0,
            keep: 0.85,
            overload: Overload::Rotate,
        }
    }
}

/// A session that is in.
#[derive(Default)]
pub(super) struct Member {
    /// Since when it has been in.
    pub since_s: f64,
    /// Its last prompt.
    pub chain: Chain,
    /// Since when its turns are to be prompt, while they are.
    prompt_since_s: Option<f64>,
    /// It leaves once its turn has ended.
    pub leaves: bool,
    pub name: Option<Name>,
}

/// The sessions that take turns on one worker.
#[derive(Default)]
pub(super) struct Rotation {
    pub members: StateMap<Member>,
    pub kept: Blocks,
    pub leaving: usize,
    /// From when on a session may enter in another's place, as patience wants and as its cost allows.
    next_s: f64,
    tick_s: f64,
    /// When it was last looked for those that do not pay.
    shed_s: Option<f64>,
    /// Turns of all members are more than the GPU holds over time, and need quanta.
    short: bool,
    /// When a quantum was last taken for one that waits.
    change_s: f64,
    affords_all: bool,
    /// Sessions that wait to enter here; with them there are more than the tiers keep.
    outside: f64,
    crowded: bool,
    /// Who has left for another comes back: so long there are more.
    crowded_until_s: f64,
    pub overloaded: bool,
    /// One more session would make it so.
    full: bool,
}

impl Rotation {
    /// The worker's cache is gone.
    pub fn lose_all(&mut self) {
        *self = Self::default();
    }

    /// Tokens of a prompt that no member's prompt begins with.
    pub fn new_tokens(&self, prompt: &Coarse<'_>) -> u64 {
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

    /// Its name, and the tokens of its last prompt.
    pub fn remove(&mut self, key: Key) -> Option<(Option<Name>, u64)> {
        let member = self.members.remove(&key)?;
        self.leaving -= usize::from(member.leaves);
        self.kept.release(&member.chain);
        Some((member.name, member.chain.tokens()))
    }

    /// Since when a session has been in; for ever, if it is not.
    fn since_s(&self, key: Key) -> f64 {
        let member = self.members.get(&key);
        member.map_or(f64::NEG_INFINITY, |member| member.since_s)
    }

    /// These, who have been in for longest first, and `last` after all others. Most times few are asked for.
    pub fn by_tenure(
        &self,
        keys: impl Iterator<Item = Key>,
        last: impl Fn(Key) -> bool,
    ) -> impl Iterator<Item = Key> {
        let keys = keys.map(|key| Reverse((last(key), micros(self.since_s(key)), key)));
        let mut keys: BinaryHeap<_> = keys.collect();
        std::iter::from_fn(move || keys.pop().map(|Reverse((.., key))| key))
    }

    /// Tokens of a member's prompt that no other's begins with.
    pub fn own_tokens(&self, member: &Member) -> u64 {
        let chain = &member.chain;
        let own = chain.states.len() - self.kept.shared(chain);
        own as u64 * u64::from(chain.block_tokens) + chain.tail_tokens
    }

    /// It leaves once its turn has ended.
    pub fn let_leave(&mut self, key: Key) {
        if let Some(member) = self.members.get_mut(&key)
            && !std::mem::replace(&mut member.leaves, true)
        {
            self.leaving += 1;
        }
    }
}

/// As few of the first of `keys` as are `enough`, or all.
pub(super) fn first_enough(
    mut keys: impl Iterator<Item = Key>,
    enough: impl Fn(&[Key]) -> bool,
) -> Vec<Key> {
    let mut first = Vec::new();
    while !enough(&first)
        && let Some(key) = keys.next()
    {
        first.push(key);
    }
    first
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

impl Admission {
    /// What the tiers keep of prompts, so much of the host tier where it is larger than the GPU.
    fn kept_tokens(&self, site: &Site, share: f64) -> u64 {
        let budget = self.budget_tokens(site).unwrap_or(u64::MAX);
        site.host_tier_tokens()
            .map_or(budget, |tier| ((tier as f64 * share) as u64).max(budget))
    }

    /// What the prompts of all who are in may take at most.
    pub(super) fn most_kept_tokens(&self, site: &Site) -> u64 {
        self.manner.rotates.map_or_else(
            || self.budget_tokens(site).unwrap_or(0),
            |rule| self.kept_tokens(site, rule.keep),
        )
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
        self.ledger(slot).map(|ledger| &ledger.rotation)
    }

    fn is_member(&self, key: Key, site: &Site) -> bool {
        let known = self.sessions.get(key);
        known.is_some_and(|known| known.home == Some((site.slot, site.serial)))
            && self
                .rotation(site.slot)
                .is_some_and(|rotation| rotation.members.contains_key(&key))
    }

    /// The worker in whose rotation the session is.
    pub(super) fn member_at<'s>(&self, key: Key, sites: &'s [Site]) -> Option<&'s Site> {
        let (slot, _) = self.sessions.get(key)?.home?;
        site_of(sites, slot).filter(|site| self.is_member(key, site))
    }

    /// Whether the tiers keep a prompt of so many new tokens beside those of all members.
    pub(super) fn keeps(&self, rule: &Rotates, site: &Site, prompt: &Coarse<'_>) -> bool {
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
    pub(super) fn is_prompt(&self, key: Key, site: &Site) -> bool {
        self.rotation(site.slot).is_none_or(|rotation| {
            !rotation.short
                || rotation
                    .members
                    .get(&key)
                    .is_some_and(|member| member.prompt_since_s.is_some())
        })
    }

    /// Whether a session's turns may be prompt beside those whose turns are.
    pub(super) fn fits_prompt(&self, key: Key, tokens: u64, site: &Site) -> bool {
        let load = self.prompt_load(site, key);
        let limit = self.budget_tokens(site).unwrap_or(u64::MAX) as f64 * BUSY;
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
        let key = asked.key;
        self.ledger_mut(site.slot).is_tiered = site.host_tier_tokens().is_some();
        if let Some(rule) = self.manner.rotates {
            if self.queue.is_empty() {
                self.ledgers[site.slot].rotation.outside = 0.0;
            }
            self.tick(&rule, site, now_s);
        }
        let rotation = &mut self.ledgers[site.slot].rotation;
        rotation.set(key, &asked.prompt, now_s);
        let is_short = rotation.short;
        if let Some(member) = rotation.members.get_mut(&key) {
            member.name.clone_from(&identity.name);
            if is_short {
                member.prompt_since_s.get_or_insert(now_s);
            }
        }
    }

    /// Tokens of the KV that a session's turns hold over the time in which they run and it thinks, of so many
    /// that they hold while they run.
    fn held_over_time(&self, key: Key, tokens: u64) -> f64 {
        let known = self.sessions.get(key);
        tokens as f64 * self.turn_s(known) / self.period_s(known)
    }

    fn turn_s(&self, known: Option<&Known>) -> f64 {
        known.and_then(|known| known.run_s).unwrap_or(self.run_s)
    }

    /// From one turn of a session to its next, where nothing waits.
    fn period_s(&self, known: Option<&Known>) -> f64 {
        let think_s = known.and_then(|known| known.think_s);
        self.turn_s(known) + think_s.unwrap_or_else(|| self.gaps.mean_s())
    }

    /// What those hold over time, but for `key`, who have a quantum or run a turn.
    fn prompt_load(&self, site: &Site, key: Key) -> f64 {
        let Some(ledger) = self.ledger(site.slot) else {
            return 0.0;
        };
        let rotation = &ledger.rotation;
        let others = rotation.members.iter().filter(|(of, member)| {
            **of != key && (member.prompt_since_s.is_some() || ledger.runs(**of))
        });
        others
            .map(|(key, member)| self.held_over_time(*key, member.chain.tokens()))
            .sum()
    }

    /// Takes the quantum of whoever has had one for longest, for one that waits.
    fn change_prompt(&mut self, rule: &Rotates, site: &Site, waiting: usize, now_s: f64) {
        let rotation = &mut self.ledgers[site.slot].rotation;
        if !rotation.short || waiting == 0 {
            rotation.change_s = now_s;
            return;
        }
        let held = rotation.members.iter_mut();
        let mut held: Vec<(f64, Key, &mut Member)> = held
            .filter_map(|(&key, member)| Some((member.prompt_since_s?, key, member)))
            .collect();
        let interval_s = rule.patience_s / (held.len() + waiting) as f64;
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
    pub(super) fn note_idle(&mut self, key: Key, site: &Site, ended: bool) {
        let member = self.ledgers[site.slot].rotation.members.get(&key);
        let leaves = member.is_some_and(|member| member.leaves);
        match (ended, leaves, &self.manner.rotates) {
            (true, ..) => self.put_out(key, site, GiveUp::Ended),
            (_, true, Some(_)) => self.put_out(key, site, GiveUp::HadItsShare),
            (_, true, None) => self.put_out(key, site, GiveUp::OverLimit),
            _ => self.forget_idle(key, site.slot),
        }
    }

    /// Beside a host tier, from which it comes back, what is idle needs no room on the GPU.
    pub(super) fn forget_idle(&mut self, key: Key, slot: usize) {
        let Ledger {
            hold, is_tiered, ..
        } = &mut self.ledgers[slot];
        if self.manner.rotates.is_some()
            && *is_tiered
            && hold.occupant(key).is_some_and(Occupant::is_idle)
        {
            hold.remove(key);
        }
    }

    fn put_out(&mut self, key: Key, site: &Site, reason: GiveUp) {
        self.give_up(site.slot, &site.spec, key, reason);
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
            if known.is_none_or(|known| known.has_gone(&self.gaps, now_s)) {
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
        let limit = self.budget_tokens(site).unwrap_or(u64::MAX) as f64 * BUSY;
        // Where sessions wait to enter, those who are in go as they come: more waiting would have the tier drop them.
        let mean_s = cost_s / f64::max(count, 1.0);
        // Beside decodes.
        let slowdown = site.rates.paced_slowdown;
        let is_cheap = slowdown * mean_s * (count + outside) <= CHEAP_ROUND_S;
        let short = wanted > limit && !rotation.crowded && !is_cheap;
        let share = slowdown * work * (count + outside) / f64::max(count, 1.0);
        let affords_all = is_cheap || share <= AFFORDABLE;
        let wait_s = |outside: f64| outside * mean_s / OVERHEAD;
        let exceeds = |outside: f64| !affords_all && wait_s(outside) > rule.patience_s;
        let (overloaded, full) = (exceeds(outside), exceeds(outside + 1.0));
        let rotation = &mut self.ledgers[site.slot].rotation;
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
            self.put_out(key, site, GiveUp::ReturnsLate);
        }
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
        let gated = || sites.gated();
        let open = gated().count().max(1);
        let scale = self.text_scale();
        let waiting = self.outsiders(sites, scale, open.min(AT_ONCE));
        let outside = waiting.count as f64 / open as f64;
        let mut ticks = 0;
        for site in gated() {
            self.ledger_mut(site.slot);
            let limit = self.kept_tokens(site, rule.keep.max(ALL_KEPT));
            let rotation = &mut self.ledgers[site.slot].rotation;
            rotation.outside = outside;
            if rotation.kept.tokens() + waiting.tokens / open as u64 > limit {
                rotation.crowded_until_s = now_s + rule.patience_s;
            }
            rotation.crowded = now_s < rotation.crowded_until_s;
            if ticks < TICKS && now_s >= rotation.tick_s + TICK_S {
                ticks += 1;
                self.tick(rule, site, now_s);
            }
            self.see_off(site);
        }
        for site in gated() {
            let waits = |waiter: &Waiter| {
                let key = waiter.turn.identity.key;
                self.is_member(key, site) && !self.is_prompt(key, site)
            };
            let waiting = match self.ledgers[site.slot].rotation.short {
                true => self.queue.waiting().filter(|(_, of)| waits(of)).count(),
                false => 0,
            };
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
                self.keeps(rule, site, &prompt) || self.ledgers[site.slot].rotation.leaving > 0
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
            let due = |site: &&Site| now_s >= self.ledgers[site.slot].rotation.next_s;
            let cached = |site: &&Site| outsider.cached.on(site.slot);
            let Some(site) = gated().filter(may_go).filter(due).max_by_key(cached) else {
                continue;
            };
            taken.push(site.slot);
            if rule.overload == Overload::Door
                && outsider.is_new
                && self.ledgers[site.slot].rotation.full
            {
                continue;
            }
            let rotation = &self.ledgers[site.slot].rotation;
            let over = rotation.kept.tokens() + rotation.new_tokens(&prompt);
            let over = over.saturating_sub(self.kept_limit(site, rule));
            let cost_s = site.compute_s(prompt.tokens, outsider.cached.on(site.slot));
            self.displace(rule, site, over, cost_s, outside, now_s);
        }
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

    pub(super) fn is_idle(&self, key: Key) -> bool {
        let known = self.sessions.get(key);
        known.is_none_or(|known| known.in_flight == 0 && known.waiting == 0)
    }

    /// Those who were to leave after a turn that did not come to its end here.
    pub(super) fn see_off(&mut self, site: &Site) {
        let rotation = &self.ledgers[site.slot].rotation;
        if rotation.leaving == 0 {
            return;
        }
        let members = rotation.members.iter();
        let left = members.filter(|(key, member)| member.leaves && self.is_idle(**key));
        let left: Vec<Key> = left.map(|(key, _)| *key).collect();
        for key in left {
            self.put_out(key, site, GiveUp::HadItsShare);
        }
    }

    /// Who is not expected back soon enough for what the tiers keep of it to pay leaves at once, if another
    /// may enter.
    fn shed(&mut self, rule: &Rotates, site: &Site, now_s: f64) {
        let rotation = &self.ledgers[site.slot].rotation;
        let is_known = rotation
            .shed_s
            .is_some_and(|then_s| now_s < then_s + TICK_S);
        if is_known {
            return;
        }
        let limit = self.kept_limit(site, rule) as f64;
        let pays = |key: Key, tokens: u64| {
            let Some(known) = self.sessions.get(key) else {
                return false;
            };
            let worth_s = site.compute_s(tokens, 0) * limit / tokens.max(1) as f64;
            if let Some(returns_s) = known.returns_s.filter(|&at_s| at_s > now_s) {
                return returns_s - now_s <= worth_s;
            }
            let idle_s = known.ended_s.map_or(0.0, |ended_s| now_s - ended_s);
            idle_s <= worth_s * self.sessions.return_share(known)
        };
        let members = rotation.members.iter();
        let late = members
            .filter(|(key, member)| self.is_idle(**key) && !pays(**key, member.chain.tokens()));
        let late: Vec<Key> = late.map(|(key, _)| *key).collect();
        self.ledgers[site.slot].rotation.shed_s = Some(now_s);
        for key in late {
            self.put_out(key, site, GiveUp::ReturnsLate);
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
        let rotation = &self.ledgers[site.slot].rotation;
        // Those first whose tenants hold more than their shares.
        let is_within = |key: Key| !self.queue.tenants.holds_more(self.payer_of(key));
        let by_tenure = rotation.by_tenure(rotation.members.keys().copied(), is_within);
        let nothing = PromptHashes::default();
        let nothing = Coarse::of(&nothing, 1.0);
        let enough = |keys: &[Key]| {
            let chains = keys.iter();
            let chains = chains.filter_map(|key| Some(&rotation.members.get(key)?.chain));
            rotation.kept.freed_by(chains, &nothing) >= over_tokens
        };
        for key in first_enough(by_tenure, enough) {
            if self.is_idle(key) {
                self.put_out(key, site, GiveUp::HadItsShare);
            } else {
                self.ledgers[site.slot].rotation.let_leave(key);
            }
        }
        let soonest_s = (cost_s / OVERHEAD).min(rule.patience_s);
        let rotation = &mut self.ledgers[site.slot].rotation;
        let wanted_s = ENTERS_WITHIN * rule.patience_s / outside.max(1.0);
        rotation.next_s = now_s + soonest_s.max(wanted_s);
    }
}
