//! Residency: which sessions have a place in which worker's KV, who waits for one, and who gives one
//! up. It stands beside every policy: it says which workers a turn may go to now, the policy
//! chooses among them.
//!
//! The book ([`book`]) counts what is held and in flight on each worker, shared prefixes once
//! ([`footprint`]); a rule ([`rules`]) says who may be given up for whom; the gate ([`gate`]) lets
//! turns in; the rest wait ([`queue`]). Everything happens under the fleet's lock and by the fleet's
//! clock; what has to happen outside of it is left in an [`Outbox`].

mod account;
mod awaited;
pub mod book;
pub mod cached;
mod departed;
mod endings;
pub mod footprint;
pub mod gaps;
mod gate;
pub mod give_up;
pub mod identity;
mod looks;
mod pump;
pub mod queue;
pub mod record;
mod rotation;
mod round;
pub mod rules;
pub mod sessions;
pub mod settings;
mod shown;
mod slices;
pub mod tenants;
#[cfg(test)]
mod testing;
mod wanted;

pub(super) use account::Seat;
pub(super) use gate::{Asked, Go};
pub use give_up::GiveUp;
pub use queue::{WaitReason, Wake};
pub use record::{Residence, ResidencyRecord};
pub use shown::SessionShown;
pub use tenants::{Priority, Quota, Tenant, TenantShown};

use super::affinity::SessionKeys;
use super::log::{Event, GiveUpRecord, unix_now_s};
use super::marked::Marked;
use super::prefills::Busy;
use super::prefix::estimate::StateMap;
use crate::model::WorkerSpec;
use crate::policy::{Rates, attention_pairs};
use book::Hold;
use cached::Cached;
use departed::Departed;
pub(super) use departed::Since;
use endings::Endings;
use gaps::Gaps;
use identity::{Key, Name};
use looks::Looks;
use queue::Queue;
use rotation::Rotation;
use rules::{Manner, Place, Rule, WorkerView};
use serde::Serialize;
use sessions::{Known, Sessions};
use settings::{Chosen, Settings};
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::ops::Deref;
use std::sync::Arc;
use tenants::Tenants;
use wanted::Wanted;

/// Growth a turn that is assumed until some was seen.
const ASSUMED_GROWTH_TOKENS: f64 = 2_000.0;
/// A sub-agent that has sent nothing for so long keeps no parent waiting.
const CHILD_LIVES_S: f64 = 60.0;
/// Given-up sessions are taken to be still in a host tier for so long, if it has room.
const PARTED_S: f64 = 600.0;

/// A worker's book, as `/workers` shows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct ResidencySnapshot {
    /// Sessions with a place.
    pub sessions: usize,
    pub running: usize,
    pub idle: usize,
    /// What they hold, each shared prefix once, with growth.
    pub booked_tokens: u64,
    /// What may be booked; none where the worker's capacity is unknown or the rule is off.
    pub budget_tokens: Option<u64>,
    /// Turns that wait and may go here.
    pub waiting: usize,
    pub given_up: u64,
    pub recomputed_tokens: u64,
    /// More sessions wait than patience and the worker's time allow.
    pub overloaded: bool,
}

/// What is to be done once the fleet's lock is released.
#[derive(Default)]
pub(super) struct Outbox {
    pub wakes: Vec<Wake>,
    pub events: Vec<Event>,
}

/// A worker that may answer requests, as the gate sees it.
#[derive(Clone)]
pub(super) struct Site {
    pub slot: usize,
    pub serial: u64,
    pub spec: Arc<WorkerSpec>,
    pub routable: bool,
    /// Prefills what it answers, unless a policy separates.
    pub prefills: bool,
    pub kv_capacity_tokens: Option<u64>,
    /// What its engine holds for requests that are not ours.
    pub external_tokens: u64,
    /// How busy it is with prompts of ours.
    pub prefilling: Busy,
    /// The engine tells what it holds.
    pub is_exact: bool,
    /// Finished prompts stay in its cache.
    pub keeps_prefixes: bool,
    pub used_share: Option<f64>,
    pub rates: Rates,
}

impl Site {
    /// Seconds of computing what of a prompt is not cached here.
    pub fn compute_s(&self, tokens: u64, cached_tokens: u64) -> f64 {
        let new = tokens.saturating_sub(cached_tokens);
        self.rates
            .compute_s(new, attention_pairs(cached_tokens, new))
    }

    /// What limits who may go there.
    pub fn limits(&self) -> (u64, bool, Option<u64>, u64) {
        (
            self.serial,
            self.routable,
            self.kv_capacity_tokens,
            self.external_tokens,
        )
    }

    /// What its host tier holds, where that is more than the GPU does. Engines write through, so that one
    /// which holds less has copies of what the GPU has, and gives nothing back of what was evicted there.
    pub fn host_tier_tokens(&self) -> Option<u64> {
        let device = self.kv_capacity_tokens.unwrap_or(0);
        self.spec.host_kv_tokens.filter(|&tier| tier > device)
    }
}

/// The workers that may answer requests, in the order of their slots, and what follows from all of them.
#[derive(Clone, Default)]
pub(super) struct Sites {
    pub all: Vec<Site>,
    /// Another one wherever [`Site::limits`] of any of them are others.
    pub number: u64,
    /// How many are routable, and what may be booked on these.
    pub open: usize,
    budget_tokens: u64,
    /// Slots of workers that nothing limits.
    ungated: SmallVec<[usize; 8]>,
    has_host_tier: bool,
}

impl Deref for Sites {
    type Target = [Site];

    fn deref(&self) -> &[Site] {
        &self.all
    }
}

impl Sites {
    /// To be called where limits have changed.
    pub fn sum_up(&mut self, number: u64, residency: &Residency) {
        self.number = number;
        let open = self.all.iter().filter(|site| site.routable);
        self.open = open.clone().count();
        self.budget_tokens = open.filter_map(|site| residency.budget_tokens(site)).sum();
        let ungated = self.all.iter();
        let ungated = ungated.filter(|site| site.kv_capacity_tokens.is_none());
        self.ungated = ungated.map(|site| site.slot).collect();
        self.has_host_tier = self
            .all
            .iter()
            .any(|site| site.host_tier_tokens().is_some());
    }
}

/// The site of a slot; `sites` are in the order of their slots.
pub(super) fn site_of(sites: &[Site], slot: usize) -> Option<&Site> {
    let at = sites.binary_search_by_key(&slot, |site| site.slot).ok()?;
    Some(&sites[at])
}

pub(super) struct Residency {
    settings: Settings,
    pub session_keys: SessionKeys,
    rule: Box<dyn Rule>,
    manner: Manner,
    /// By slot.
    holds: Marked<Hold>,
    /// Where the next turns of some wait for room to grow, as far as [`Residency::note_marked`] has seen.
    growing: BTreeSet<usize>,
    seen: Vec<Seen>,
    sessions: Sessions,
    gaps: Gaps,
    endings: Endings,
    queue: Queue,
    departed: Departed,
    /// Of calls beside conversations, which run without a place.
    aside_tokens: u64,
    growth_tokens: f64,
    /// How long turns run on their workers.
    run_s: f64,
    /// By slot: how busy those are that only prefill for others.
    prefillers: BTreeMap<usize, Busy>,
    text_scale: f64,
    turns: u64,
    /// The first of the queue, and the worker on which room gathers for it.
    gathers: Option<(u64, usize)>,
    looks: Looks,
    round_s: f64,
    told_s: f64,
    has_parents: bool,
    /// The tenant whose turn asks and is owed room.
    taker: Option<usize>,
    outbox: Outbox,
}

/// What happened on one worker, for rules and snapshots.
#[derive(Default)]
struct Seen {
    recomputed_tokens: u64,
    prompt_tokens: u64,
    cached_tokens: u64,
    /// Given-up sessions that a host tier may still hold: when, who, tokens.
    parted: VecDeque<(f64, Key, u64)>,
    /// Sessions with a time slice, and since when.
    slices: StateMap<f64>,
    /// What those that take turns there want of it.
    wanted: Wanted,
    rotation: Rotation,
}

impl Residency {
    pub fn new(chosen: Chosen) -> Self {
        Self {
            settings: chosen.settings,
            session_keys: SessionKeys::default(),
            manner: chosen.rule.manner(),
            rule: chosen.rule,
            holds: Marked::default(),
            growing: BTreeSet::new(),
            seen: Vec::new(),
            sessions: Sessions::default(),
            gaps: Gaps::default(),
            endings: Endings::default(),
            queue: Queue::default(),
            departed: Departed::default(),
            aside_tokens: 0,
            growth_tokens: ASSUMED_GROWTH_TOKENS,
            prefillers: BTreeMap::new(),
            run_s: slices::ASSUMED_RUN_S,
            text_scale: 1.0,
            turns: 0,
            gathers: None,
            looks: Looks::default(),
            round_s: f64::NEG_INFINITY,
            told_s: f64::NEG_INFINITY,
            has_parents: false,
            taker: None,
            outbox: Outbox::default(),
        }
    }

    pub fn share_among(&mut self, tenants: Vec<Tenant>) {
        self.queue.tenants = Tenants::new(tenants);
    }

    /// Whether turns may have to wait at all.
    pub fn gates(&self) -> bool {
        self.manner.gates
    }

    /// Tokens that engines report for one that was estimated from text, in steps, so that what was
    /// booked by it stays what it is.
    pub fn text_scale(&self) -> f64 {
        const STEPS: f64 = 16.0;
        ((self.text_scale * STEPS).round() / STEPS).max(1.0 / STEPS)
    }

    /// Whether [`Residency::pump`] may have something to do.
    pub fn needs_pump(&self) -> bool {
        !self.queue.is_empty() || self.rule.interval_s().is_some()
    }

    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// What is cached of a prompt, from its tokens by slot.
    pub fn cached(&self, by_slot: impl Iterator<Item = u64>) -> Cached {
        Cached::new(by_slot, self.settings.cold_tokens)
    }

    /// Booked for an answer of at most `limit` tokens, where answers have `mean` tokens.
    pub fn output_tokens(&self, limit: Option<u64>, mean: f64) -> u64 {
        let likely = (mean * self.settings.output_safety).ceil() as u64;
        limit.map_or(likely, |limit| limit.min(likely))
    }

    pub fn take_outbox(&mut self) -> Outbox {
        std::mem::take(&mut self.outbox)
    }

    fn hold(&mut self, slot: usize) -> &mut Hold {
        if self.holds.len() <= slot {
            self.holds.reach(slot);
            self.seen.resize_with(slot + 1, Seen::default);
        }
        &mut self.holds[slot]
    }

    /// Takes note of the workers on which something may have changed.
    fn note_marked(&mut self) {
        for slot in self.holds.marks.iter() {
            self.looks.changed.add(slot);
            match self.holds[slot].has_growing() {
                true => self.growing.insert(slot),
                false => self.growing.remove(&slot),
            };
        }
        self.holds.marks.clear();
    }

    /// What may be booked on a worker; none where its capacity is unknown.
    fn budget_tokens(&self, site: &Site) -> Option<u64> {
        let capacity = site.kv_capacity_tokens? as f64;
        let default = self.settings.fill(site.host_tier_tokens().is_some());
        let fill = self.manner.fill.unwrap_or(default);
        Some(((capacity * fill) as u64).saturating_sub(site.external_tokens))
    }

    /// Makes a slot ready for a worker that has just come.
    pub fn clear(&mut self, slot: usize) {
        self.hold(slot);
        self.holds[slot] = Hold::default();
        self.seen[slot] = Seen::default();
    }

    /// The worker's cache is gone.
    pub fn lose_all(&mut self, slot: usize, spec: &Arc<WorkerSpec>) {
        self.wait_like_others(slot, None);
        for key in self.hold(slot).lose_all() {
            self.give_up(slot, spec, key, GiveUp::WorkerGone, 0.0);
        }
        self.seen[slot].parted.clear();
        self.seen[slot].slices.clear();
        self.seen[slot].rotation.lose_all();
    }

    /// Takes away a place; returns the session's name.
    fn give_up(
        &mut self,
        slot: usize,
        spec: &Arc<WorkerSpec>,
        key: Key,
        reason: GiveUp,
        now_s: f64,
    ) -> Option<Name> {
        let hold = self.hold(slot);
        let occupant = hold.occupant(key);
        let mut name = occupant.and_then(|occupant| occupant.name.clone());
        let mut tokens = occupant.map_or(0, |occupant| occupant.tokens());
        let freed_tokens = hold.remove(key);
        if let Some(member) = self.seen[slot].rotation.remove(key) {
            tokens = tokens.max(member.tokens);
            name = name.or(member.name);
        } else {
            freed_tokens?;
        }
        let freed_tokens = freed_tokens.unwrap_or(0);
        self.holds[slot].given_up += 1;
        if !matches!(reason, GiveUp::Ended | GiveUp::WorkerGone | GiveUp::Lost) {
            self.seen[slot].parted.push_back((now_s, key, tokens));
        }
        self.outbox.events.push(Event::GiveUp(GiveUpRecord {
            ts_unix_s: unix_now_s(),
            worker: Arc::clone(spec),
            session_id: name.clone(),
            tokens,
            freed_tokens,
            reason,
        }));
        name
    }

    /// The sessions whose sub-agents run, wait, or have only just paused.
    fn busy_parents(&self, now_s: f64) -> HashSet<Key> {
        if !self.has_parents {
            return HashSet::new();
        }
        let live = self
            .holds
            .iter()
            .flat_map(Hold::occupants)
            .filter(|(_, occupant)| {
                !occupant.ended
                    && (!occupant.is_idle() || now_s - occupant.idle_since_s < CHILD_LIVES_S)
            });
        let parent_of = |key: Key| self.sessions.get(key).and_then(|known| known.parent);
        let waiting = self
            .queue
            .waiting()
            .filter_map(|(_, waiter)| waiter.turn.parent);
        live.filter_map(|(key, _)| parent_of(key))
            .chain(waiting)
            .collect()
    }

    /// The places on a worker, as rules see them; `busy` are those of [`Residency::busy_parents`].
    fn places(&self, site: &Site, now_s: f64, busy: &HashSet<Key>) -> Vec<Place> {
        self.places_of(site, now_s, busy, |_| true)
    }

    /// Those of idle sessions alone: nobody else is ever given up for one that waits or has grown.
    fn idle_places(&self, site: &Site, now_s: f64, busy: &HashSet<Key>) -> Vec<Place> {
        self.places_of(site, now_s, busy, book::Occupant::is_idle)
    }

    fn places_of(
        &self,
        site: &Site,
        now_s: f64,
        busy: &HashSet<Key>,
        is_asked_for: impl Fn(&book::Occupant) -> bool,
    ) -> Vec<Place> {
        let Some(hold) = self.holds.get(site.slot) else {
            return Vec::new();
        };
        let in_host = self.host_shares(site, now_s);
        let place = |(key, occupant): (Key, &book::Occupant)| {
            let tokens = occupant.tokens();
            let unshared_tokens = hold.unshared_tokens(occupant);
            // What others hold too stays when this one goes.
            let shared_tokens = tokens.saturating_sub(unshared_tokens);
            let pairs = attention_pairs(shared_tokens, unshared_tokens);
            let known = self.sessions.get(key);
            Place {
                key,
                tokens,
                unshared_tokens,
                is_idle: occupant.is_idle(),
                tenure_s: now_s - occupant.admitted_s,
                idle_s: if occupant.is_idle() {
                    now_s - occupant.idle_since_s
                } else {
                    0.0
                },
                returns_in_s: occupant.returns_s.map(|then_s| then_s - now_s),
                ended: occupant.ended,
                backfilled: occupant.backfilled && !self.queue.is_empty(),
                waits_for_children: busy.contains(&key),
                gaps: known.map(|known| known.gaps).unwrap_or_default(),
                // One that was forgotten is as one that was never seen.
                last_share: self
                    .endings
                    .last_share(known.map_or_else(|| Known::default().kind(), Known::kind)),
                recompute_s: site.rates.compute_s(unshared_tokens, pairs),
                host_share: in_host.get(&key).copied().unwrap_or(0.0),
            }
        };
        let asked_for = hold.occupants().filter(|(_, o)| is_asked_for(o));
        asked_for.map(place).collect()
    }

    /// Which share of each session's prefix the worker's host tier is taken to hold: it keeps what was
    /// used last, as far as it has room, those who have given up their places included.
    fn host_shares(&self, site: &Site, now_s: f64) -> StateMap<f64> {
        let mut shares = StateMap::default();
        let (Some(host_tokens), Some(hold)) = (site.host_tier_tokens(), self.holds.get(site.slot))
        else {
            return shares;
        };
        let last_s = |occupant: &book::Occupant| match occupant.is_idle() {
            true => occupant.idle_since_s,
            false => now_s,
        };
        let held = hold.occupants();
        let held = held.map(|(key, occupant)| (last_s(occupant), key, occupant.tokens()));
        let parted = self.seen[site.slot].parted.iter().copied();
        let gone = parted
            .filter(|&(then_s, key, _)| now_s - then_s < PARTED_S && hold.occupant(key).is_none());
        let mut by_use: Vec<(f64, Key, u64)> = held.chain(gone).collect();
        by_use.sort_by(|one, other| other.0.total_cmp(&one.0).then(one.1.cmp(&other.1)));
        let mut left = host_tokens;
        for (_, key, tokens) in by_use {
            let kept = tokens.min(left);
            left -= kept;
            shares
                .entry(key)
                .or_insert(kept as f64 / tokens.max(1) as f64);
        }
        shares
    }

    /// Takes note of how busy a worker is that only prefills for others; none where it is gone or down.
    pub fn note_prefiller(&mut self, slot: usize, busy: Option<Busy>) {
        match busy {
            Some(busy) => self.prefillers.insert(slot, busy),
            None => self.prefillers.remove(&slot),
        };
    }

    /// For what share of the time those that would prefill for the worker have had something to: all of
    /// it, where its engine does what others ask that the router does not know.
    fn prefill_share(&self, site: &Site, now_s: f64) -> f64 {
        if site.external_tokens > 0 {
            return 1.0;
        }
        let own = site.prefilling.share(now_s);
        if self.prefillers.is_empty() {
            return own;
        }
        let shares = self.prefillers.values().map(|busy| busy.share(now_s));
        let others = shares.sum::<f64>() / self.prefillers.len() as f64;
        if site.prefills {
            own.min(others)
        } else {
            others
        }
    }

    fn view<'a>(&'a self, site: &Site, places: &'a [Place], now_s: f64) -> WorkerView<'a> {
        let is_working = self.turns_on(site) > 0 || site.external_tokens > 0;
        WorkerView {
            slot: site.slot,
            now_s,
            kv_capacity_tokens: site.kv_capacity_tokens.unwrap_or(u64::MAX),
            booked_tokens: self.holds.get(site.slot).map_or(0, Hold::booked_tokens),
            is_working,
            prefill_share: self.prefill_share(site, now_s),
            places,
            gaps: &self.gaps,
        }
    }

    /// The worker's book.
    pub fn snapshot(&self, site: Option<&Site>, slot: usize) -> ResidencySnapshot {
        let empty = Hold::default();
        let hold = self.holds.get(slot).unwrap_or(&empty);
        let running = hold
            .occupants()
            .filter(|(_, o)| !o.turns.is_empty())
            .count();
        let idle = match self.manner.rotates {
            Some(_) => self.idle_members(slot),
            None => hold.len() - running,
        };
        let may_go = |waiter: &queue::Waiter| match (waiter.turn.grows_at, site) {
            (Some(at), _) => at == slot,
            (None, Some(site)) => !waiter.turn.exclude.contains(&site.spec.id),
            (None, None) => false,
        };
        ResidencySnapshot {
            sessions: running + idle,
            running,
            idle,
            booked_tokens: hold.booked_tokens(),
            budget_tokens: site
                .filter(|_| self.manner.gates)
                .and_then(|site| self.budget_tokens(site)),
            waiting: self
                .queue
                .waiting()
                .filter(|(_, waiter)| may_go(waiter))
                .count(),
            given_up: hold.given_up,
            recomputed_tokens: self.seen.get(slot).map_or(0, |seen| seen.recomputed_tokens),
            overloaded: self.is_overloaded(slot),
        }
    }

    /// Whether nothing is in flight or waits, and the book agrees.
    pub fn is_quiet(&self) -> bool {
        self.queue.is_quiet() && self.holds.iter().all(Hold::is_quiet)
    }
}
