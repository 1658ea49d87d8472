//! Time slices: which sessions are served in turn on a worker whose host tier holds more than its GPU.
//!
//! Beside a host tier a place on the GPU costs little to give up, so that places alone keep nobody out:
//! all that the tier holds would take turns, and every turn would be late. So a session gets a time
//! slice first, as a process that is swapped in does before the scheduler runs it (two-level
//! scheduling). As many have one as their turns fill a share of the KV with, by what is in flight and by how
//! long each runs and thinks, and no more than the tier keeps the prompts of; their turns go before all
//! others. Who has had a slice for long enough loses it to one that waits.

use super::book::Occupant;
use super::gaps::{MOST_S, OwnGaps};
use super::identity::Key;
use super::queue::LOOKED_AT;
use super::round::{Load, Over, Round};
use super::rules::Demand;
use super::sessions::Known;
use super::wanted::Tokens;
use super::{Residency, Site, Sites, site_of};
use std::rc::Rc;

/// A turn's time on its worker that is assumed until some was seen.
pub(super) const ASSUMED_RUN_S: f64 = 5.0;

/// How much of a worker's load is what turns hold at the moment; the rest is what they hold over time. With the
/// latter alone a worker stays half empty for as long as its sessions think or answer in few tokens, while
/// others wait; with the former alone too many begin then, and all come back. Chosen in simulation.
const NOW_SHARE: f64 = 0.5;

impl Residency {
    /// What turns of sessions with a slice may be expected to hold on a worker; none where there are
    /// no slices, or where so little is wanted that nobody needs one.
    ///
    /// The host tier holds what the GPU holds too, as HiCache and vLLM's offloading write it through. What sessions
    /// with a slice leave behind while they think must fit in it, or each comes back to nothing.
    fn slice_budget(&self, site: &Site) -> Option<Tokens> {
        let slices = self.manner.slices?;
        if slices.from_fill > 0.0 {
            let seen = self.seen.get(site.slot);
            seen.filter(|seen| seen.wanted.exceeds())?;
        }
        self.limits(site, slices.fill)
    }

    /// A share of what may be booked on a worker's GPU, and what its tiers keep of prompts; none where it has
    /// no host tier.
    fn limits(&self, site: &Site, fill: f64) -> Option<Tokens> {
        let slices = self.manner.slices?;
        let (tier, budget) = (site.host_tier_tokens()? as f64, self.budget_tokens(site)?);
        Some(Tokens {
            over_time: budget as f64 * fill,
            kept: (tier * slices.tier_fill).max(budget as f64),
        })
    }

    /// Whether sessions take turns in time slices there, once they want more than there is.
    fn slices_at(&self, site: &Site) -> bool {
        self.limits(site, 1.0).is_some()
    }

    /// Whether sessions take turns in time slices on any worker.
    pub(super) fn has_slices(&self, sites: &Sites) -> bool {
        self.manner.slices.is_some() && sites.has_host_tier
    }

    pub(super) fn has_slice(&self, key: Key, site: &Site) -> bool {
        let seen = self.seen.get(site.slot);
        seen.is_some_and(|seen| seen.slices.contains_key(&key)) && self.is_home(key, site)
    }

    /// Whether the session has a slice where it had its place last.
    pub(super) fn has_slice_at_home(&self, key: Key, sites: &[Site]) -> bool {
        let home = self.sessions.get(key).and_then(|known| known.home);
        home.and_then(|(slot, _)| site_of(sites, slot))
            .is_some_and(|site| self.has_slice(key, site))
    }

    fn is_home(&self, key: Key, site: &Site) -> bool {
        let known = self.sessions.get(key);
        known.is_some_and(|known| is_home(known, site))
    }

    /// Whether a session has a slice there, or may begin one now, or needs none.
    pub(super) fn may_begin_slice(&self, key: Key, site: &Site, round: &mut Round) -> bool {
        if self.slice_budget(site).is_none() || self.has_slice(key, site) {
            return true;
        }
        // The next one is that for which room gathers.
        if round.closed == Some(site.slot) {
            return false;
        }
        let changes = self.changes_at(site.slot);
        if round.loads.len() <= site.slot {
            round.loads.resize(site.slot + 1, None);
        }
        let known = round.loads[site.slot].as_ref();
        let load = match known.filter(|load| load.changes == changes) {
            Some(load) => Rc::clone(load),
            None => Rc::new(self.load(site, round.now_s, round.demand())),
        };
        round.loads[site.slot] = Some(Rc::clone(&load));
        self.ends_for(key, site, &load).is_some()
    }

    /// A session whose turn was let in begins a slice, unless it has one, and those end that make room for it.
    /// One that goes on with a place that it still has, where no more slices fit, has none.
    pub fn begin_slice(&mut self, key: Key, site: &Site, now_s: f64, demand: Demand) {
        self.note_wanted(site, now_s);
        if !self.slices_at(site) || self.has_slice(key, site) {
            return;
        }
        let mut load = self.load(site, now_s, demand);
        // The turn runs already.
        let hold = &self.holds[site.slot];
        let in_flight = hold.occupant(key).map_or(0, Occupant::in_flight_tokens);
        let own = self.expected(key, site, now_s);
        load.tokens -= blended(in_flight, own.over_time);
        load.kept -= own.kept;
        let Some(ends) = self.ends_for(key, site, &load) else {
            return;
        };
        let mut slices = std::mem::take(&mut self.seen[site.slot].slices);
        for key in ends {
            slices.remove(&key);
        }
        slices.retain(|key, _| {
            self.is_home(*key, site) && self.expected(*key, site, now_s).over_time > 0.0
        });
        slices.insert(key, now_s);
        self.seen[site.slot].slices = slices;
    }

    /// Takes note of what those that take turns on a worker want of it. Once that is more than there is, as many
    /// keep a slice as have room: those whose turns run, then those that have had theirs for longest.
    fn note_wanted(&mut self, site: &Site, now_s: f64) {
        let Some(slices) = self.manner.slices.filter(|slices| slices.from_fill > 0.0) else {
            return;
        };
        let Some(limits) = self.limits(site, slices.from_fill) else {
            return;
        };
        let wanted = self.wanted(site, now_s);
        if !self.seen[site.slot].wanted.note(wanted, limits, now_s) {
            return;
        }
        let mut left = self.slice_budget(site).unwrap_or_default().over_time;
        let all = std::mem::take(&mut self.seen[site.slot].slices);
        let mut all: Vec<(bool, f64, Key)> = all
            .into_iter()
            .map(|(key, since_s)| (!self.runs_on(key, site), since_s, key))
            .collect();
        all.sort_by(|one, other| {
            let by_time = one.1.total_cmp(&other.1);
            one.0.cmp(&other.0).then(by_time).then(one.2.cmp(&other.2))
        });
        for (_, _, key) in all {
            let own = self.expected(key, site, now_s).over_time;
            if own <= left {
                left -= own;
                self.seen[site.slot].slices.insert(key, now_s);
            }
        }
    }

    /// What those with a slice, others whose turns run and the first that wait want of a worker.
    fn wanted(&self, site: &Site, now_s: f64) -> Tokens {
        let mut wanted = Tokens::default();
        let mut add = |one: Tokens| {
            wanted.over_time += one.over_time;
            wanted.kept += one.kept;
        };
        for (key, _) in self.served(site) {
            add(self.expected(key, site, now_s));
        }
        for (_, waiter) in self.queue.waiting().take(LOOKED_AT) {
            let key = waiter.turn.identity.key;
            let known = self.sessions.get(key);
            let home = known.and_then(|known| known.home);
            let may_go_there = home.is_none_or(|(slot, _)| slot == site.slot);
            if may_go_there && !self.has_slice(key, site) && !self.runs_on(key, site) {
                let tokens = waiter.turn.prompt.tokens() as f64;
                add(Tokens {
                    over_time: self.over_time(tokens, known),
                    kept: tokens,
                });
            }
        }
        wanted
    }

    /// The sessions that a worker serves now: those with a slice there, with when it began, and others
    /// whose turns run.
    fn served<'a>(&'a self, site: &'a Site) -> impl Iterator<Item = (Key, Option<f64>)> + 'a {
        let slices = self.seen.get(site.slot).map(|seen| &seen.slices);
        let with_slice = slices
            .into_iter()
            .flatten()
            .filter(|(key, _)| self.is_home(**key, site))
            .map(|(&key, &since_s)| (key, Some(since_s)));
        let hold = self.holds.get(site.slot);
        let others = hold
            .into_iter()
            .flat_map(|hold| hold.occupants())
            .filter(|(key, of)| !of.turns.is_empty() && !self.has_slice(*key, site))
            .map(|(key, _)| (key, None));
        with_slice.chain(others)
    }

    fn runs_on(&self, key: Key, site: &Site) -> bool {
        let hold = self.holds.get(site.slot);
        let occupant = hold.and_then(|hold| hold.occupant(key));
        occupant.is_some_and(|occupant| !occupant.turns.is_empty())
    }

    /// What a worker holds of those with a slice, and of others that run.
    fn load(&self, site: &Site, now_s: f64, demand: Demand) -> Load {
        let mut load = Load {
            tokens: 0.0,
            kept: 0.0,
            over: Vec::new(),
            changes: self.changes_at(site.slot),
        };
        let Some(hold) = self.holds.get(site.slot) else {
            return load;
        };
        let mut over = Vec::new();
        for (key, since_s) in self.served(site) {
            let Some(known) = self.sessions.get(key) else {
                continue;
            };
            let Tokens { over_time, kept } = self.expected_of(known, site, now_s);
            load.tokens += over_time;
            load.kept += kept;
            let since_s = since_s.filter(|since_s| {
                now_s - since_s >= self.slice_s(known, site, demand) || self.gives_way(key)
            });
            if let Some(since_s) = since_s {
                let tokens = blended(0, over_time);
                over.push((since_s, Over { key, tokens, kept }));
            }
        }
        load.tokens = blended(hold.in_flight_tokens(), load.tokens);
        over.sort_by(|(one_s, one), (other_s, other)| {
            one_s.total_cmp(other_s).then(one.key.cmp(&other.key))
        });
        load.over = over.into_iter().map(|(_, over)| over).collect();
        load
    }

    /// Who has to end so that this one may begin; none if all who may are not enough. What it holds over time
    /// counts in full, and its prompt beside that as it will be in flight: the larger the sessions, the more
    /// of a worker is left because the next one does not fit.
    fn ends_for(&self, key: Key, site: &Site, load: &Load) -> Option<Vec<Key>> {
        let Some(budget) = self.slice_budget(site) else {
            return Some(Vec::new());
        };
        // It has come back, whatever was to be expected.
        let (own, kept_own) = self.sessions.get(key).map_or((0.0, 0.0), |known| {
            let prompt = known.prompt_tokens.unwrap_or(0) as f64;
            let own = self.tokens_over_time(known) + NOW_SHARE * prompt;
            (own, self.worth_keeping(known, site))
        });
        // One alone may be larger than a budget; less than a token is what rounding leaves.
        let exceeds = |left: f64, own: f64, budget: f64| left >= 1.0 && left + own > budget;
        let (mut left, mut kept) = (load.tokens, load.kept);
        let mut ends = Vec::new();
        let mut over = load.over.iter();
        while exceeds(left, own, budget.over_time) || exceeds(kept, kept_own, budget.kept) {
            let other = over.next()?;
            left -= other.tokens;
            kept -= other.kept;
            ends.push(other.key);
        }
        Some(ends)
    }

    /// How long a session keeps its slice from one that waits.
    fn slice_s(&self, known: &Known, site: &Site, demand: Demand) -> f64 {
        let tokens = known.prompt_tokens.unwrap_or(0).max(1);
        let recompute_s = site.compute_s(tokens, 0);
        let capacity = site.kv_capacity_tokens.unwrap_or(tokens) as f64;
        self.rule
            .slice_s(recompute_s * capacity / tokens as f64, demand)
    }

    /// What is to be expected of a session's turns. The less it is to be expected back, the less.
    fn expected(&self, key: Key, site: &Site, now_s: f64) -> Tokens {
        let known = self.sessions.get(key);
        known.map_or(Tokens::default(), |known| {
            self.expected_of(known, site, now_s)
        })
    }

    fn expected_of(&self, known: &Known, site: &Site, now_s: f64) -> Tokens {
        let returns = self.returns(known, now_s);
        Tokens {
            over_time: returns * self.tokens_over_time(known),
            kept: returns * self.worth_keeping(known, site),
        }
    }

    /// The tokens of a session's prompt that a tier is to keep: none where it is computed again so soon that a
    /// worker which waits for sessions with a slice would lose more.
    fn worth_keeping(&self, known: &Known, site: &Site) -> f64 {
        let tokens = known.prompt_tokens.unwrap_or(0);
        let cheap_s = self.manner.slices.map_or(0.0, |slices| slices.cheap_s);
        if site.compute_s(tokens, 0) <= cheap_s {
            0.0
        } else {
            tokens as f64
        }
    }

    /// The chance that a session comes back; 1 of one that is there.
    pub(super) fn returns(&self, known: &Known, now_s: f64) -> f64 {
        match known.ended_s {
            _ if known.in_flight > 0 || known.waiting > 0 => 1.0,
            Some(ended_s) => {
                let last_share = self.endings.last_share(known.kind());
                let idle_s = now_s - ended_s;
                self.gaps
                    .returns_within(&known.gaps, last_share, idle_s, MOST_S)
            }
            // It left before its first turn.
            None => 0.0,
        }
    }

    /// The KV that a session's turns hold, in tokens, over the time in which they run and it thinks.
    fn tokens_over_time(&self, known: &Known) -> f64 {
        self.over_time(known.prompt_tokens.unwrap_or(0) as f64, Some(known))
    }

    /// The same of so many tokens, for a session of which nothing may be known.
    pub(super) fn over_time(&self, tokens: f64, known: Option<&Known>) -> f64 {
        tokens * self.turn_s(known) / self.period_s(known)
    }

    fn turn_s(&self, known: Option<&Known>) -> f64 {
        known.and_then(|known| known.run_s).unwrap_or(self.run_s)
    }

    /// From one turn of a session to its next, where nothing waits.
    pub(super) fn period_s(&self, known: Option<&Known>) -> f64 {
        let none = OwnGaps::default();
        self.turn_s(known) + self.gaps.mean_s(known.map_or(&none, |known| &known.gaps))
    }
}

fn is_home(known: &Known, site: &Site) -> bool {
    known.home == Some((site.slot, site.serial))
}

/// Tokens of which so many are held at the moment, and so many over time.
fn blended(now: u64, over_time: f64) -> f64 {
    NOW_SHARE * now as f64 + (1.0 - NOW_SHARE) * over_time
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::affinity::SessionKeys;
    use crate::fleet::residency::testing::{add, fleet_under, turn};
    use crate::fleet::{Admit, Fleet, Outcome, Request, Reservation, Ticket};
    use serde_json::json;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// A fleet of one worker with a host tier, under a clock of its own.
    struct World {
        fleet: Arc<Fleet>,
        clock_ms: Arc<AtomicU64>,
        host_kv_tokens: u32,
    }

    impl World {
        fn new() -> Self {
            Self::with_tier(500_000, 0.5)
        }

        fn with_tier(host_kv_tokens: u32, cheap_recompute_s: f64) -> Self {
            Self::with_slices_from(host_kv_tokens, cheap_recompute_s, 0.0)
        }

        fn with_slices_from(host_kv_tokens: u32, cheap_recompute_s: f64, fill: f64) -> Self {
            let (fleet, clock_ms) = fleet_under(&json!({"cold_slots": 10, "growth_turns": 0,
                "cheap_recompute_s": cheap_recompute_s, "slice_from_fill": fill}));
            let world = Self {
                fleet,
                clock_ms,
                host_kv_tokens,
            };
            world.add();
            world
        }

        fn add(&self) {
            add(
                &self.fleet,
                json!({"id": "w", "url": "http://w:1", "kv_capacity_tokens": 100_000,
                    "host_kv_tokens": self.host_kv_tokens}),
            );
        }

        fn advance(&self, seconds: f64) {
            let ms = (seconds * 1e3) as u64;
            self.clock_ms.fetch_add(ms, Ordering::Relaxed);
            self.fleet.pump();
        }

        fn turn(&self, session: u32, length: u32) -> Request {
            turn(&self.fleet, session, length)
        }

        fn placed(&self, request: &Request) -> Reservation {
            match self.fleet.admit(request, &[], || ()) {
                Admit::Placed(mut reservation) => {
                    reservation.streams();
                    reservation.output(1);
                    reservation
                }
                Admit::Waiting(_) => panic!("it waits"),
                Admit::Refused(refused) => panic!("{refused:?}"),
            }
        }

        fn waits(&self, request: &Request) -> Ticket {
            match self.fleet.admit(request, &[], || ()) {
                Admit::Waiting(ticket) => ticket,
                Admit::Placed(_) => panic!("placed"),
                Admit::Refused(refused) => panic!("{refused:?}"),
            }
        }

        /// A turn that runs for so long.
        fn serve(&self, session: u32, length: u32, run_s: f64) {
            let reservation = self.placed(&self.turn(session, length));
            self.advance(run_s);
            reservation.finish(Outcome::Ok, Some(200), None);
        }

        /// Whether a session may have a slice, if it comes now.
        fn may_begin(&self, session: u32) -> bool {
            let key = SessionKeys::default().of(&format!("s{session}"));
            let now_s = self.fleet.now_s();
            let mut state = self.fleet.state.lock();
            let sites = state.sites(&[], now_s);
            let mut round = Round::new(&sites, now_s, 0.0, 1.0);
            let residency = &state.residency;
            residency.may_begin_slice(key, &sites[0], &mut round)
        }

        /// What those with a slice, and others that run, are expected to hold; and who has one.
        fn load(&self) -> (f64, Vec<Key>) {
            let now_s = self.fleet.now_s();
            let mut state = self.fleet.state.lock();
            let sites = state.sites(&[], now_s);
            let residency = &state.residency;
            let load = residency.load(&sites[0], now_s, Demand::NOBODY_WAITS);
            let slices = &residency.seen[sites[0].slot].slices;
            (load.tokens, slices.keys().copied().collect())
        }

        fn expected_tokens(&self, session: u32) -> f64 {
            let key = SessionKeys::default().of(&format!("s{session}"));
            let now_s = self.fleet.now_s();
            let mut state = self.fleet.state.lock();
            let sites = state.sites(&[], now_s);
            state.residency.expected(key, &sites[0], now_s).over_time
        }
    }

    #[test]
    fn turns_hold_by_how_long_they_run_and_their_session_thinks() {
        let world = World::new();
        for (session, run_s, think_s) in [(0, 6.0, 2.0), (1, 2.0, 6.0)] {
            for _ in 0..12 {
                world.serve(session, 10_000, run_s);
                world.advance(think_s);
            }
            let running = world.placed(&world.turn(session, 10_000));
            let tokens = world.expected_tokens(session);
            let share = run_s / (run_s + think_s);
            assert!((tokens / 1e4 - share).abs() < 0.08, "{tokens}: {share}");
            drop(running);
            assert!(world.expected_tokens(session) <= tokens);
            world.advance(60.0);
            let later = world.expected_tokens(session);
            assert_eq!(later, 0.0, "no session has ever been away for so long");
        }
    }

    #[test]
    fn a_worker_whose_sessions_all_think_is_half_empty() {
        let world = World::new();
        let sessions = [0, 1, 2];
        for _ in 0..5 {
            let running = sessions.map(|session| world.placed(&world.turn(session, 15_000)));
            let (busy, _) = world.load();
            world.advance(5.0);
            for turn in running {
                turn.finish(Outcome::Ok, Some(200), None);
            }
            let (idle, with_slice) = world.load();
            assert_eq!(with_slice.len(), 3);
            let in_flight = 3.0 * 15_000.0;
            let over_time: f64 = sessions.map(|s| world.expected_tokens(s)).iter().sum();
            assert!((idle / (0.5 * over_time) - 1.0).abs() < 1e-9, "{idle}");
            assert!(busy - idle > 0.4 * in_flight, "{busy} {idle}");
            world.advance(5.0);
        }
    }

    #[test]
    fn nothing_counts_any_more_where_the_cache_is_gone() {
        let world = World::new();
        world.fleet.report_engine("w", Some(1));
        world.serve(0, 30_000, 5.0);
        let (tokens, with_slice) = world.load();
        assert!(tokens > 10_000.0 && with_slice.len() == 1, "{tokens}");
        world.fleet.report_engine("w", Some(2));
        assert_eq!(world.load(), (0.0, Vec::new()), "restarted");
        world.serve(0, 30_000, 5.0);
        let running = world.placed(&world.turn(1, 20_000));
        assert_eq!(world.load().1.len(), 2);
        world.fleet.remove_worker("w");
        running.finish(Outcome::Ok, Some(200), None);
        world.add();
        assert_eq!(world.load(), (0.0, Vec::new()), "another in its place");
        world.serve(0, 30_000, 5.0);
        assert_eq!(world.load().1.len(), 1, "it begins anew");
    }

    #[test]
    fn one_that_was_let_in_and_left_holds_nothing() {
        let world = World::new();
        let running = world.placed(&world.turn(0, 90_000));
        let ticket = world.waits(&world.turn(1, 50_000));
        assert!(world.expected_tokens(1) > 10_000.0, "it waits");
        world.advance(5.0);
        running.finish(Outcome::Ok, Some(200), None);
        world.advance(60.0);
        let (tokens, with_slice) = world.load();
        assert!(
            tokens > 10_000.0 && with_slice.len() == 1,
            "{tokens}: let in"
        );
        drop(ticket);
        assert_eq!(
            world.load().0,
            0.0,
            "its client has left, before its first turn"
        );
    }

    #[test]
    fn one_waits_until_the_last_of_its_turns_has_left_the_queue() {
        let world = World::new();
        world.serve(0, 20_000, 5.0);
        let running = world.placed(&world.turn(1, 20_000));
        let tickets = [0, 1].map(|_| world.waits(&world.turn(0, 90_000)));
        world.advance(60.0);
        let waiting = world.expected_tokens(0);
        assert!(waiting > 10_000.0, "{waiting}");
        let [first, second] = tickets;
        drop(first);
        assert_eq!(world.expected_tokens(0), waiting, "the other waits yet");
        drop(second);
        assert_eq!(world.expected_tokens(0), 0.0);
        drop(running);
    }

    #[test]
    fn one_that_comes_back_counts_in_full_however_long_it_was_away() {
        let world = World::new();
        world.serve(0, 80_000, 5.0);
        world.advance(60.0);
        // What the first held is expected to be held by nobody any more.
        world.serve(1, 60_000, 5.0);
        assert_eq!(world.load().1.len(), 1);
        assert!(!world.may_begin(0), "both would hold more than fits");
    }

    #[test]
    fn nobody_needs_a_slice_while_all_want_no_more_than_there_is() {
        let [always, world] = [0.0, 0.85].map(|fill| World::with_slices_from(500_000, 0.0, fill));
        let served = |world: &World| {
            let may_go = |session| {
                let request = world.turn(session, 60_000);
                matches!(world.fleet.admit(&request, &[], || ()), Admit::Placed(_))
            };
            let mut sessions = 0..4;
            sessions.all(|session| {
                let goes = may_go(session);
                if goes {
                    world.serve(session, 60_000, 5.0);
                }
                goes
            })
        };
        assert!(!served(&always) && served(&world));
        let before = world.load().1.len();
        assert!(before > always.load().1.len());
        assert!(world.may_begin(4));
        // Now they answer at length, and others wait.
        world.serve(0, 60_000, 300.0);
        let running = world.placed(&world.turn(0, 90_000));
        let mut waiting =
            Vec::from([4, 5].map(|session| world.waits(&world.turn(session, 90_000))));
        world.advance(300.0);
        running.finish(Outcome::Ok, Some(200), None);
        world.advance(0.1);
        assert!(!world.may_begin(6));
        let (_, slices) = world.load();
        assert!(slices.len() < before, "{slices:?} keep theirs");
        // Nobody comes back.
        waiting.clear();
        world.advance(3_600.0);
        world.serve(6, 1_000, 1.0);
        world.advance(300.0);
        world.serve(6, 1_000, 1.0);
        assert!(world.may_begin(7));
    }

    #[test]
    fn no_more_sessions_have_a_slice_than_the_tier_keeps_while_they_think() {
        let world = World::with_tier(125_000, 0.0);
        // Two that come back when nobody expects them.
        world.serve(8, 60_000, 1.0);
        world.serve(9, 30_000, 1.0);
        world.advance(100.0);
        for session in 0..8 {
            world.serve(session, 10_000, 0.1);
        }
        let now_s = world.fleet.now_s();
        let mut state = world.fleet.state.lock();
        let sites = state.sites(&[], now_s);
        let (residency, site) = (&state.residency, &sites[0]);
        let budget = residency.slice_budget(site).expect("it has a tier");
        assert_eq!(budget.kept.round(), 100_000.0, "0.8 of 125,000");
        let load = residency.load(site, now_s, Demand::NOBODY_WAITS);
        assert!(load.over.is_empty());
        assert!(
            load.tokens + 35_000.0 < budget.over_time,
            "the GPU has room"
        );
        // Not all are expected back.
        assert!(
            load.kept > 40_000.0 && load.kept < 70_000.0,
            "{}",
            load.kept
        );
        for (session, may_begin) in [(8, false), (9, true)] {
            let key = SessionKeys::default().of(&format!("s{session}"));
            let mut round = Round::new(&sites, now_s, 0.0, 1.0);
            let begins = residency.may_begin_slice(key, site, &mut round);
            assert_eq!(begins, may_begin, "s{session} beside {}", load.kept);
        }
        drop(state);
        let world = World::with_tier(125_000, 5.0);
        world.serve(8, 60_000, 1.0);
        let now_s = world.fleet.now_s();
        let mut state = world.fleet.state.lock();
        let sites = state.sites(&[], now_s);
        let load = state.residency.load(&sites[0], now_s, Demand::NOBODY_WAITS);
        assert_eq!(load.kept, 0.0, "computed again within 5 s");
        drop(state);
    }

    #[test]
    fn a_tier_that_holds_no_more_than_the_gpu_is_none() {
        for (tier, is_one) in [(100_000, false), (100_001, true)] {
            let world = World::with_tier(tier, 0.0);
            let mut state = world.fleet.state.lock();
            let sites = state.sites(&[], world.fleet.now_s());
            let (residency, site) = (&state.residency, &sites[0]);
            assert_eq!(residency.slices_at(site), is_one);
            assert_eq!(residency.has_slices(&sites), is_one);
            let booked = if is_one { 98_000 } else { 95_000 };
            assert_eq!(
                residency.budget_tokens(site),
                Some(booked),
                "a tier of {tier}"
            );
        }
    }
}
