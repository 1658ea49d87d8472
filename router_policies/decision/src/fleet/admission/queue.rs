//! Turns that wait for room: in which order they are looked at, since when they wait, and how fast
//! they are let in.

use super::cached::Cached;
use super::identity::{Identity, Name};
use super::record::Residence;
use super::tenants::Tenants;
use crate::fleet::prefix::estimate::StateMap;
use crate::fleet::prefix::hash::PromptHashes;
use crate::room::{Lack, Room};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

/// Called, without the fleet's lock, when a waiting turn may be placed or is refused.
pub type Wake = Arc<dyn Fn() + Send + Sync>;

/// Why a turn waits: a closed set, so that logs can be counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WaitReason {
    /// The GPU's KV has no room for it beside what is in flight.
    NoRoom,
    /// As many sessions are in, or have a quantum, as the rule allows.
    SessionsLimit,
    /// There is room, but a cold prefill has to end first.
    ColdPrefill,
    /// One that has waited for longer goes first.
    BehindOthers,
    /// No worker that could take it is up.
    NoWorker,
}

/// A turn that was let in: its room is booked.
#[derive(Clone, Debug)]
pub struct Admitted {
    pub slot: usize,
    pub serial: u64,
    pub turn: u64,
    pub state: Residence,
    pub gave_up: Vec<Option<Name>>,
    pub at_s: f64,
}

/// How a turn's wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitEnd {
    LetIn,
    /// Its client left.
    Left,
    Refused(WhyRefused),
    /// A worker that had fallen silent served it after all.
    ServedElsewhere,
}

/// Why a turn that waited, or would have, was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WhyRefused {
    /// It waited for `max_wait_s`.
    WaitedTooLong,
    /// `max_waiting` turns wait.
    QueueFull,
    /// None is up that it could wait for.
    NoWorker,
    /// The policy would send it nowhere.
    ByPolicy,
    /// It was let in, and as many requests ran as may.
    NoPermit,
    TimeIsOver,
    ShuttingDown,
}

/// How far a waiting turn has come.
#[derive(Clone, Debug)]
pub enum Progress {
    Waiting,
    Admitted(Admitted),
    /// It has waited too long.
    Expired,
    /// It has failed on a worker, and none is up any more that it could wait for.
    Deserted,
}

/// A turn that may not go yet, as it comes to the queue.
pub struct WaitingTurn {
    pub request_id: String,
    /// The session, or the tenant of one that names none: who may come again.
    pub whose: u64,
    /// Who has a share of the places.
    pub client: Option<u64>,
    pub identity: Identity,
    /// Thinned out: see [`super::Admission::wait`].
    pub prompt: Arc<PromptHashes>,
    pub output_tokens: u64,
    /// Workers, by id, that it must not go to.
    pub exclude: Vec<String>,
    /// When it came to the router, and to the queue: later, where it has failed on a worker meanwhile.
    pub arrived_s: f64,
    pub queued_s: f64,
    /// Since when it waits, also where its client has left and come again.
    pub since_s: f64,
    /// It has failed on a worker.
    pub is_repeated: bool,
    pub is_first_turn: bool,
    /// What workers have of the prompt in their caches, and when that was looked up.
    pub cached: Arc<Cached>,
    pub cached_at_s: f64,
    /// Why it waits, as it came.
    pub reason: WaitReason,
    pub wake: Wake,
}

impl WaitingTurn {
    /// That it wants, what is to be booked for its answer included.
    pub fn tokens(&self) -> u64 {
        self.prompt.tokens() + self.output_tokens
    }
}

/// A turn in the queue.
pub struct Waiter {
    pub turn: WaitingTurn,
    pub progress: Progress,
    rank: Rank,
}

/// Who goes first: class, then what orders the class, then who came first.
type Rank = (u8, u64, u64);

/// Waiting turns, and those that were let in and have not been fetched yet.
#[derive(Default)]
pub struct Queue {
    pub tenants: Tenants,
    waiters: StateMap<Waiter>,
    /// By tenant.
    orders: Vec<BTreeMap<Rank, u64>>,
    /// Those that wait, as they came to the queue.
    listed: BTreeSet<u64>,
    places: Room,
    /// Of those that wait, which have failed on a worker.
    repeated: BTreeSet<u64>,
    next: u64,
    /// When the last turns were let in, by a clock that stands while nobody waits.
    let_in_s: VecDeque<f64>,
}

/// Waiting turns that are looked at each time, of each set of workers that may serve them: those behind them
/// pass nobody.
const LOOKED_AT: usize = 64;

/// Counts waiting turns by the workers that may not serve them: many that wait for some workers hide none that
/// may go to others.
#[derive(Default)]
pub(super) struct FirstOfEach<'a>(HashMap<&'a [String], usize>);

impl<'a> FirstOfEach<'a> {
    /// Whether this turn, the next of all, is one of the first.
    pub fn has(&mut self, turn: &'a WaitingTurn) -> bool {
        let count = self.0.entry(turn.exclude.as_slice()).or_default();
        *count += 1;
        *count <= LOOKED_AT
    }
}

/// Turns let in from which the rate is taken.
const RATE_OF: usize = 64;
/// What a client is told where no rate is known yet.
const UNKNOWN_WAIT_S: f64 = 30.0;

pub(super) fn micros(seconds: f64) -> u64 {
    (seconds.max(0.0) * 1e6) as u64
}

impl WaitingTurn {
    fn rank(&self, smallest_first: bool, id: u64) -> Rank {
        match smallest_first {
            false => (0, micros(self.arrived_s), id),
            true => (u8::from(self.is_first_turn), self.prompt.tokens(), id),
        }
    }
}

impl Queue {
    /// Why there is no place for another turn of a client, of so many.
    pub fn lack(&self, client: Option<u64>, places: usize) -> Option<Lack> {
        self.places.lack(client, 1, places)
    }

    pub fn push(&mut self, turn: WaitingTurn, smallest_first: bool) -> u64 {
        if self.listed.is_empty() {
            self.skip_until(turn.queued_s);
        }
        self.next += 1;
        let id = self.next;
        let waiter = Waiter {
            turn,
            progress: Progress::Waiting,
            rank: (0, 0, 0),
        };
        self.waiters.insert(id, waiter);
        self.enlist(id, smallest_first);
        id
    }

    /// Nobody has waited since the last was let in: that time says nothing of how fast others would have been.
    fn skip_until(&mut self, now_s: f64) {
        let Some(last_s) = self.let_in_s.back() else {
            return;
        };
        let quiet_s = (now_s - last_s).max(0.0);
        self.let_in_s.iter_mut().for_each(|at_s| *at_s += quiet_s);
    }

    /// Puts a waiter where it belongs, by what it is now.
    pub fn enlist(&mut self, id: u64, smallest_first: bool) {
        self.delist(id);
        if let Some(waiter) = self.waiters.get_mut(&id) {
            waiter.progress = Progress::Waiting;
            waiter.rank = waiter.turn.rank(smallest_first, id);
            let payer = waiter.turn.identity.payer;
            if self.orders.len() <= payer {
                self.orders.resize_with(payer + 1, BTreeMap::new);
            }
            self.orders[payer].insert(waiter.rank, id);
            self.tenants.enqueue(payer);
            self.listed.insert(id);
            self.places.take(waiter.turn.client, 1);
            if waiter.turn.is_repeated {
                self.repeated.insert(id);
            }
        }
    }

    fn delist(&mut self, id: u64) {
        if let Some(waiter) = self.waiters.get_mut(&id) {
            let payer = waiter.turn.identity.payer;
            let order = self.orders.get_mut(payer);
            if order.is_some_and(|order| order.remove(&waiter.rank).is_some()) {
                self.tenants.dequeue(payer);
            }
            if self.listed.remove(&id) {
                self.places.give_back(waiter.turn.client, 1);
            }
            self.repeated.remove(&id);
        }
    }

    /// Ends a waiter's wait; it stays until it is fetched.
    pub fn settle(&mut self, id: u64, progress: Progress) -> Option<Wake> {
        self.delist(id);
        let waiter = self.waiters.get_mut(&id)?;
        if let Progress::Admitted(admitted) = &progress {
            if self.let_in_s.len() == RATE_OF {
                self.let_in_s.pop_front();
            }
            self.let_in_s.push_back(admitted.at_s);
        }
        waiter.progress = progress;
        Some(Arc::clone(&waiter.turn.wake))
    }

    pub fn remove(&mut self, id: u64) -> Option<Waiter> {
        self.delist(id);
        self.waiters.remove(&id)
    }

    pub fn get(&self, id: u64) -> Option<&Waiter> {
        self.waiters.get(&id)
    }

    pub fn get_mut(&mut self, id: u64) -> Option<&mut Waiter> {
        self.waiters.get_mut(&id)
    }

    /// Those that wait, first the first.
    pub fn waiting(&self) -> impl Iterator<Item = (u64, &Waiter)> {
        let shared = self.tenants.are_some();
        let of_each = || self.orders.iter().map(|order| order.values().copied());
        let merged = shared.then(|| {
            let tokens = |&id: &u64| self.tokens_of(id);
            self.tenants.merged(of_each().collect(), tokens)
        });
        let all = (!shared).then(|| of_each().flatten());
        let ids = merged.into_iter().flatten();
        ids.chain(all.into_iter().flatten())
            .filter_map(|id| Some((id, self.waiters.get(&id)?)))
    }

    fn tokens_of(&self, id: u64) -> u64 {
        let waiter = self.waiters.get(&id);
        waiter.map_or(0, |waiter| waiter.turn.tokens())
    }

    /// The same turns, of each tenant in this order, and among tenants by what they have used.
    pub fn shared_out(&self, ids: Vec<u64>) -> Vec<u64> {
        if !self.tenants.are_some() {
            return ids;
        }
        let mut of_each = vec![Vec::new(); self.orders.len()];
        for id in ids {
            if let Some(waiter) = self.waiters.get(&id) {
                of_each[waiter.turn.identity.payer].push(id);
            }
        }
        let of_each = of_each.into_iter().map(Vec::into_iter).collect();
        self.tenants
            .merged(of_each, |&id| self.tokens_of(id))
            .collect()
    }

    /// The first of those that wait, of each set of workers that may serve them.
    pub fn first_of_each(&self) -> impl Iterator<Item = (u64, &Waiter)> {
        let mut first = FirstOfEach::default();
        self.waiting()
            .filter(move |(_, waiter)| first.has(&waiter.turn))
    }

    /// Those that wait and have failed on a worker.
    pub fn repeated(&self) -> impl Iterator<Item = (u64, &WaitingTurn)> {
        self.repeated
            .iter()
            .filter_map(|&id| Some((id, &self.waiters.get(&id)?.turn)))
    }

    /// How many wait.
    pub fn len(&self) -> usize {
        self.listed.len()
    }

    pub fn is_empty(&self) -> bool {
        self.listed.is_empty()
    }

    /// Nobody waits, and everybody who was let in was fetched.
    pub fn is_quiet(&self) -> bool {
        self.waiters.is_empty()
    }

    /// The one that has been here longest, and since when.
    pub fn longest_here(&self) -> Option<(u64, f64)> {
        let &id = self.listed.first()?;
        Some((id, self.waiters.get(&id)?.turn.queued_s))
    }

    /// Seconds after which one that comes now, behind `ahead` others, may be let in, by the rate at
    /// which others were; at least 1.
    pub fn predicted_wait_s(&self, ahead: usize, now_s: f64) -> f64 {
        let (Some(first_s), true) = (self.let_in_s.front(), self.let_in_s.len() > 1) else {
            return UNKNOWN_WAIT_S;
        };
        let rate = (self.let_in_s.len() - 1) as f64 / (now_s - first_s).max(1e-3);
        ((ahead + 1) as f64 / rate).max(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiter(arrived_s: f64, is_first_turn: bool) -> WaitingTurn {
        WaitingTurn {
            request_id: String::new(),
            whose: 1,
            client: None,
            identity: Identity {
                key: 1,
                payer: 0,
                name: None,
                is_aside: false,
            },
            prompt: Arc::default(),
            output_tokens: 0,
            exclude: Vec::new(),
            arrived_s,
            queued_s: arrived_s,
            since_s: arrived_s,
            is_repeated: false,
            is_first_turn,
            cached: Arc::default(),
            cached_at_s: 0.0,
            reason: WaitReason::NoRoom,
            wake: Arc::new(|| {}),
        }
    }

    #[test]
    fn who_came_first_goes_first_or_who_was_served_before_where_the_smallest_do() {
        let order = |smallest_first: bool| {
            let mut queue = Queue::default();
            let new = queue.push(waiter(0.0, true), smallest_first);
            let late = queue.push(waiter(6.0, false), smallest_first);
            let soon = queue.push(waiter(4.0, false), smallest_first);
            let order: Vec<_> = queue.waiting().map(|(id, _)| id).collect();
            for id in [new, soon, late] {
                queue.remove(id);
            }
            assert!(queue.is_quiet() && queue.is_empty());
            order
        };
        assert_eq!(order(false), [1, 3, 2]);
        assert_eq!(order(true), [2, 3, 1]);
    }

    #[test]
    fn waits_are_predicted_from_the_rate_at_which_others_were_let_in() {
        let mut queue = Queue::default();
        assert_eq!(queue.predicted_wait_s(3, 0.0), UNKNOWN_WAIT_S);
        for i in 0..5 {
            let id = queue.push(waiter(0.0, false), false);
            let admitted = Admitted {
                slot: 0,
                serial: 0,
                turn: 0,
                state: super::super::Residence::Admitted,
                gave_up: Vec::new(),
                at_s: f64::from(i) * 10.0,
            };
            queue.settle(id, Progress::Admitted(admitted));
        }
        assert_eq!(queue.predicted_wait_s(3, 40.0), 40.0);
        // Then nobody waits for an hour, in which nobody could be let in.
        queue.push(waiter(3_640.0, false), false);
        assert_eq!(queue.predicted_wait_s(3, 3_640.0), 40.0);
        assert_eq!(queue.predicted_wait_s(3, 3_650.0), 50.0);
    }
}
