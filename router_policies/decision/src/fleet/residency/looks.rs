//! Which workers a round looks at for the turns that wait.
//!
//! A round is due at every first token and every answer. On a small fleet it looks at all workers.
//! On a large one nothing has changed on nearly all of them since the last round, so that what had no
//! room there has none now: a round looks where places or limits have changed, and at so many others,
//! in turn, that time has its effect on every worker within [`LOOK_INTERVAL_S`].

use super::book::Hold;
use super::{Residency, Site, Sites};
use crate::fleet::marked::Marks;
use std::rc::Rc;

/// A fleet of up to so many workers is looked at whole.
const SMALL: usize = 16;
/// Every worker is looked at within this time. While something waits, rounds are no further apart.
pub(super) const LOOK_INTERVAL_S: f64 = 0.1;

/// What earlier rounds have seen.
pub(super) struct Looks {
    /// By slot.
    seen: Vec<Option<Limits>>,
    /// [`Sites::number`] of those.
    number: Option<u64>,
    /// Slots whose places may have changed since.
    pub changed: Marks,
    /// The place among the sites from which the next ones are looked at in turn.
    next: usize,
    last_s: f64,
    /// [`SMALL`], but for tests.
    small: usize,
}

/// What limits who may go to a worker.
#[derive(Clone, Copy, PartialEq)]
struct Limits {
    serial: u64,
    routable: bool,
    prefills: bool,
    budget_tokens: Option<u64>,
    /// [`Hold::changes`] of the places on it.
    changes: u64,
}

impl Limits {
    /// Whether turns may go to the worker at all, and to which one.
    fn serves(self) -> (u64, bool, bool) {
        (self.serial, self.routable, self.prefills)
    }
}

impl Default for Looks {
    fn default() -> Self {
        Self {
            seen: Vec::new(),
            number: None,
            changed: Marks::default(),
            next: 0,
            last_s: f64::NEG_INFINITY,
            small: SMALL,
        }
    }
}

impl Residency {
    /// The sites that a round at `now_s` looks at, as their places among `sites`, in order; none for
    /// all of them, as on a small fleet, and where a worker has come or gone. Counts as looking at them.
    pub(super) fn next_looks(&mut self, sites: &Sites, now_s: f64) -> Option<Vec<usize>> {
        self.note_marked();
        if sites.len() <= self.looks.small {
            self.looks.changed.clear();
            self.looks.number = None;
            return None;
        }
        let count = sites.len();
        let due = (count as f64 * (now_s - self.looks.last_s) / LOOK_INTERVAL_S).ceil() as usize;
        let due = due.min(count);
        let first = self.looks.next % count;
        self.looks.next = (first + due) % count;
        self.looks.last_s = now_s;
        let mut homes_change = false;
        let mut looked: Vec<usize> = (first..first + due).map(|at| at % count).collect();
        let gathers_at = self.gathers.map(|(_, slot)| slot);
        looked.extend(gathers_at.and_then(|slot| place_of(sites, slot)));
        if self.looks.number == Some(sites.number) {
            // Only places may have changed.
            for slot in self.looks.changed.iter() {
                let changes = self.changes_at(slot);
                if let Some(Some(seen)) = self.looks.seen.get_mut(slot)
                    && let Some(at) = place_of(sites, slot)
                    && std::mem::replace(&mut seen.changes, changes) != changes
                {
                    looked.push(at);
                }
            }
        } else {
            for (at, site) in sites.iter().enumerate() {
                let limits = Limits {
                    serial: site.serial,
                    routable: site.routable,
                    prefills: site.prefills,
                    budget_tokens: self.budget_tokens(site),
                    changes: self.changes_at(site.slot),
                };
                if self.looks.seen.len() <= site.slot {
                    self.looks.seen.resize(site.slot + 1, None);
                }
                let before = self.looks.seen[site.slot].replace(limits);
                if before != Some(limits) {
                    looked.push(at);
                }
                homes_change |= before.is_none_or(|before| before.serves() != limits.serves());
            }
        }
        self.looks.number = Some(sites.number);
        self.looks.changed.clear();
        looked.sort_unstable();
        looked.dedup();
        // Whose home has come or gone may go elsewhere now, or no longer.
        (!homes_change).then_some(looked)
    }

    /// `looked`, and the sites where places have changed since [`Residency::next_looks`]. The next round
    /// looks there as well: whoever was asked about before has not been tried there.
    pub(super) fn look_where_changed(&mut self, sites: &[Site], looked: &[usize]) -> Rc<[usize]> {
        self.note_marked();
        let is_changed = |slot: &usize| {
            let seen = self.looks.seen.get(*slot).copied().flatten();
            seen.is_none_or(|seen| seen.changes != self.changes_at(*slot))
        };
        let changed = self.looks.changed.iter().filter(is_changed);
        let changed = changed.filter_map(|slot| place_of(sites, slot));
        let mut all: Vec<usize> = changed.chain(looked.iter().copied()).collect();
        all.sort_unstable();
        all.dedup();
        all.into()
    }

    pub(super) fn changes_at(&self, slot: usize) -> u64 {
        self.holds.get(slot).map_or(0, Hold::changes)
    }
}

/// The place of a slot's site among all.
fn place_of(sites: &[Site], slot: usize) -> Option<usize> {
    sites.binary_search_by_key(&slot, |site| site.slot).ok()
}

/// The sites at these places, or all.
pub(super) fn chosen<'s>(
    sites: &'s [Site],
    looked: Option<&[usize]>,
) -> impl Iterator<Item = &'s Site> + Clone {
    let count = looked.map_or(sites.len(), <[usize]>::len);
    (0..count).map(move |at| &sites[looked.map_or(at, |looked| looked[at])])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::residency::queue::LOOKED_AT;
    use crate::fleet::residency::testing::{add, fleet_under, turn};
    use crate::fleet::{Admit, Fleet, Outcome, Request, Reservation, Ticket};
    use proptest::prelude::*;
    use serde_json::{Value, json};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    const WORKERS: usize = 20;

    /// A fleet under a clock of its own, and what runs on it and waits for it.
    struct World {
        fleet: Arc<Fleet>,
        clock_ms: Arc<AtomicU64>,
        running: Vec<(u32, Reservation)>,
        waiting: Vec<(u32, Ticket, Request)>,
        /// Which session got its turn placed where.
        placed: Vec<(u32, String)>,
    }

    impl World {
        /// Fleets of more than `small` workers are looked at in part.
        fn new(rule: &Value, small: usize) -> Self {
            let (fleet, clock_ms) = fleet_under(rule);
            for worker in 0..WORKERS {
                add(
                    &fleet,
                    json!({
                        "id": format!("w{worker}"), "url": format!("http://w{worker}:1"),
                        "kv_capacity_tokens": 100_000,
                    }),
                );
            }
            fleet.state.lock().residency.looks.small = small;
            Self {
                fleet,
                clock_ms,
                running: Vec::new(),
                waiting: Vec::new(),
                placed: Vec::new(),
            }
        }

        fn send(&mut self, session: u32, length: u32) {
            let request = turn(&self.fleet, session, length);
            let answer = self.fleet.admit(&request, &[], || ());
            self.take(session, answer, request);
        }

        fn take(&mut self, session: u32, answer: Admit, request: Request) {
            match answer {
                Admit::Placed(mut reservation) => {
                    reservation.streams();
                    self.placed
                        .push((session, reservation.answering().id.clone()));
                    self.running.push((session, reservation));
                }
                Admit::Waiting(ticket) => self.waiting.push((session, ticket, request)),
                Admit::Refused(refused) => panic!("{refused:?}"),
            }
        }

        fn step(&mut self, step: &Step) {
            match *step {
                // One that is pushed out of those that are looked at misses what changes meanwhile.
                Step::Send { session, length } if self.waiting.len() < LOOKED_AT => {
                    self.send(session, length);
                }
                Step::FirstToken(at) if !self.running.is_empty() => {
                    let at = at % self.running.len();
                    self.running[at].1.output(1);
                }
                Step::Finish(at) if !self.running.is_empty() => {
                    let (_, reservation) = self.running.remove(at % self.running.len());
                    reservation.finish(Outcome::Ok, Some(200), None);
                }
                Step::Leave(at) if !self.waiting.is_empty() => {
                    self.waiting.remove(at % self.waiting.len());
                }
                Step::Drain(worker, draining) => {
                    self.fleet.set_draining(&format!("w{worker}"), draining);
                }
                Step::Advance(tenths) => {
                    self.clock_ms.fetch_add(100 * tenths, Ordering::Relaxed);
                    self.fleet.pump();
                }
                _ => {}
            }
            for (session, ticket, request) in std::mem::take(&mut self.waiting) {
                let answer = self.fleet.place_ticket(ticket, &request, &[]);
                self.take(session, answer, request);
            }
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Send { session: u32, length: u32 },
        FirstToken(usize),
        Finish(usize),
        Leave(usize),
        Drain(usize, bool),
        Advance(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            9 => (0u32..60, 5_000u32..60_000)
                .prop_map(|(session, length)| Step::Send { session, length }),
            5 => any::<usize>().prop_map(Step::FirstToken),
            5 => any::<usize>().prop_map(Step::Finish),
            1 => any::<usize>().prop_map(Step::Leave),
            1 => (0..WORKERS, any::<bool>()).prop_map(|(at, draining)| Step::Drain(at, draining)),
            2 => (1u64..80).prop_map(Step::Advance),
        ]
    }

    /// Rules under which nothing but places, limits and time decides who fits: others learn from every
    /// answer, which a large fleet takes into account within [`LOOK_INTERVAL_S`].
    fn rules() -> impl Strategy<Value = Value> {
        prop_oneof![
            Just(json!({"rule": "lease", "lease_s": 3.0, "growth_turns": 0})),
            Just(json!({
                "rule": "cap", "sessions": 2, "idle_s": 4.0, "gone_share": 0,
                "cold_tokens": 1_000_000,
            })),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]

        #[test]
        fn what_is_looked_at_in_part_is_placed_as_if_all_were_looked_at(
            rule in rules(),
            steps in proptest::collection::vec(step(), 40..250),
        ) {
            let mut whole = World::new(&rule, WORKERS);
            let mut part = World::new(&rule, 0);
            for (at, step) in steps.iter().enumerate() {
                whole.step(step);
                part.step(step);
                prop_assert_eq!(&whole.placed, &part.placed, "step {}: {:?}", at, step);
            }
        }
    }

    #[test]
    fn a_large_fleet_is_looked_at_where_something_changed_and_in_turn() {
        let world = World::new(&json!({"rule": "priced"}), 0);
        let mut guard = world.fleet.state.lock();
        let state = &mut *guard;
        let sites = state.sites(&[], 0.0);
        let residency = &mut state.residency;
        let all: Vec<usize> = (0..WORKERS).collect();
        assert_eq!(residency.next_looks(&sites, 0.0), None, "all are new");
        assert_eq!(residency.next_looks(&sites, 0.0), Some(Vec::new()));
        residency.hold(7).note_change();
        assert_eq!(*residency.look_where_changed(&sites, &[2]), [2, 7]);
        assert_eq!(residency.next_looks(&sites, 0.0), Some(vec![7]));
        let half = LOOK_INTERVAL_S / 2.0;
        let first = residency.next_looks(&sites, half).expect("in part");
        let second = residency.next_looks(&sites, 2.0 * half).expect("in part");
        assert_eq!(first.len(), WORKERS / 2);
        let mut both = [first, second].concat();
        both.sort_unstable();
        assert_eq!(both, all, "all of them within the interval");
        let mut other = Sites::clone(&sites);
        (other.all[3].routable, other.number) = (false, sites.number + 1);
        assert_eq!(
            residency.next_looks(&other, 2.0 * half),
            None,
            "for those whose home it was"
        );
        (other.all[3].kv_capacity_tokens, other.number) = (Some(50_000), sites.number + 2);
        assert_eq!(residency.next_looks(&other, 2.0 * half), Some(vec![3]));
        residency.looks.small = WORKERS;
        assert_eq!(residency.next_looks(&sites, 1.0), None);
    }
}
