//! What clients send when: sessions in flight, think times, starts in the middle, recycling.
//!
//! Owns order and time only; what sending means is the simulation's.

use crate::plan::{Load, Mode, Phases, Start};
use crate::requests::Requests;
use std::collections::HashMap;
use std::sync::Arc;

/// One request that a client sends, in one play of its conversation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Due {
    pub at_s: f64,
    pub conversation: usize,
    pub request: usize,
    /// Puts what came before a session's start into the cache; its answer is one token long.
    pub is_prime: bool,
}

/// A conversation that is or was under way.
pub struct Conversation {
    /// How often the conversation was played before.
    pub play: u32,
    /// Requests of it that have not ended, without the prime.
    left: usize,
    /// Requests that each still waits for.
    missing: HashMap<usize, usize>,
    /// Ready once the prime has ended.
    held_back: Vec<usize>,
    is_primed: bool,
}

pub struct Clients {
    requests: Arc<Requests>,
    load: Load,
    phases: Option<Phases>,
    random: fastrand::Rng,
    /// Conversations in the order in which they are taken, over and over where they are recycled.
    order: Vec<usize>,
    taken: usize,
    pub conversations: Vec<Conversation>,
    primes_left: usize,
    primes_asked: usize,
    /// When the next session arrives, where sessions do so by themselves.
    next_arrival_s: f64,
}

impl Clients {
    pub fn new(requests: Arc<Requests>, load: Load, phases: Option<Phases>, seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut order: Vec<usize> = (0..requests.trees.len()).collect();
        if phases.as_ref().is_some_and(|phases| phases.recycle) {
            random.shuffle(&mut order);
        }
        Self {
            requests,
            load,
            phases,
            random,
            order,
            taken: 0,
            conversations: Vec::new(),
            primes_left: 0,
            primes_asked: 0,
            next_arrival_s: 0.0,
        }
    }

    /// No prime is under way or to come.
    pub fn is_primed(&self) -> bool {
        self.primes_left == 0
    }

    /// What is due from the start on; [`Clients::ended`] and [`Clients::arrive`] tell the rest.
    pub fn begin(&mut self) -> Vec<Due> {
        let mut due = Vec::new();
        match self.load.mode {
            Mode::Closed => {
                let start = self.phases.as_ref().map_or(Start::Cold, |p| p.start);
                for _ in 0..self.load.max_inflight_sessions {
                    self.start_next(0.0, start, &mut due);
                }
            }
            Mode::Open => while self.start_next(0.0, Start::Cold, &mut due) {},
            Mode::Sessions => {}
        }
        due
    }

    /// When the next session arrives by itself, if sessions do.
    pub fn next_arrival_s(&mut self) -> Option<f64> {
        let ended = self.taken >= self.order.len() && !self.recycles();
        (self.load.mode == Mode::Sessions && !ended).then(|| {
            let mean_s = 3600.0 / self.load.sessions_per_hour;
            let random: f64 = self.random.f64();
            self.next_arrival_s += -mean_s * (1.0 - random).ln();
            self.next_arrival_s
        })
    }

    /// A session arrives.
    pub fn arrive(&mut self, now_s: f64) -> Vec<Due> {
        let mut due = Vec::new();
        self.start_next(now_s, Start::Cold, &mut due);
        due
    }

    fn recycles(&self) -> bool {
        self.phases.as_ref().is_some_and(|phases| phases.recycle)
    }

    /// Starts the next conversation; false if there is none left.
    fn start_next(&mut self, now_s: f64, start: Start, due: &mut Vec<Due>) -> bool {
        if self.taken >= self.order.len() && !self.recycles() {
            return false;
        }
        let tree = self.order[self.taken % self.order.len()];
        let play = (self.taken / self.order.len()) as u32;
        self.taken += 1;
        let members = self.requests.trees[tree].clone();
        let skipped = match start {
            Start::Cold => 0,
            Start::Mid => {
                let share = 0.25 + 0.5 * self.random.f64();
                ((members.len() as f64 * share) as usize).min(members.len() - 1)
            }
        };
        let first = members[skipped];
        let mut missing = HashMap::new();
        let mut ready = Vec::new();
        for &member in &members[skipped..] {
            let awaited = &self.requests.all[member].waits_for;
            let count = awaited.iter().filter(|&&awaited| awaited >= first).count();
            missing.insert(member, count);
            if count == 0 {
                ready.push(member);
            }
        }
        let prime = match start {
            Start::Cold => None,
            Start::Mid => self.requests.all[first].previous,
        };
        let conversation = self.conversations.len();
        self.conversations.push(Conversation {
            play,
            left: members.len() - skipped,
            missing,
            held_back: Vec::new(),
            is_primed: prime.is_none(),
        });
        if let Some(prime) = prime {
            self.conversations[conversation].held_back = ready;
            let interval_s = self.phases.as_ref().map_or(0.0, |p| p.prime_interval_s);
            let at_s = if now_s > 0.0 {
                now_s
            } else {
                self.primes_asked as f64 * interval_s
            };
            self.primes_asked += 1;
            self.primes_left += 1;
            due.push(Due {
                at_s,
                conversation,
                request: prime,
                is_prime: true,
            });
        } else {
            let after_middle = skipped > 0;
            for request in ready {
                let at_s = self.ready_s(request, now_s, after_middle);
                due.push(Due {
                    at_s,
                    conversation,
                    request,
                    is_prime: false,
                });
            }
        }
        true
    }

    /// When a request is due whose last awaited answer ended at `now_s`; `thinks` is false for the first
    /// of a conversation.
    fn ready_s(&self, request: usize, now_s: f64, thinks: bool) -> f64 {
        let planned = &self.requests.all[request];
        let think_s = planned.think_s * self.load.think_scale;
        let think_s = think_s.min(self.load.max_think_s.unwrap_or(f64::INFINITY));
        let at_s = if thinks { now_s + think_s } else { now_s };
        match self.load.mode {
            Mode::Open => at_s.max(planned.trace_s / self.load.time_scale),
            _ => at_s,
        }
    }

    /// A request has ended, whether well or badly; returns what is due after it.
    pub fn ended(&mut self, now_s: f64, ended: Due) -> Vec<Due> {
        let mut due = Vec::new();
        let number = ended.conversation;
        let ready = if ended.is_prime {
            self.primes_left -= 1;
            self.conversations[number].is_primed = true;
            std::mem::take(&mut self.conversations[number].held_back)
        } else {
            let requests = Arc::clone(&self.requests);
            let conversation = &mut self.conversations[number];
            conversation.left -= 1;
            let mut ready = Vec::new();
            for &follower in &requests.followers[ended.request] {
                if let Some(missing) = conversation.missing.get_mut(&follower) {
                    *missing -= 1;
                    if *missing == 0 {
                        ready.push(follower);
                    }
                }
            }
            ready
        };
        for request in ready {
            due.push(Due {
                at_s: self.ready_s(request, now_s, true),
                conversation: number,
                request,
                is_prime: false,
            });
        }
        if self.conversations[number].left == 0 && self.load.mode == Mode::Closed {
            self.conversations[number].missing = HashMap::new();
            let start = self
                .phases
                .as_ref()
                .map_or(Start::Cold, |p| p.recycle_start);
            self.start_next(now_s, start, &mut due);
        }
        due
    }
}
