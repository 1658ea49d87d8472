//! What clients send when: sessions in flight, think times, starts in the middle, recycling.
//!
//! Owns order and time only; what sending means is the simulation's.

use crate::plan::{Load, Mode, Phases, Start};
use crate::requests::{Planned, Requests};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// So many sessions in flight let one be primed at a time, as `replay` does.
const SESSIONS_A_PRIME: usize = 8;

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
    /// Prompts that are to be in the cache before the first of the requests is sent.
    to_prime: VecDeque<usize>,
    priming_from_s: f64,
    /// The share of the first think times that is still to pass.
    linger: f64,
    /// In flight from the run's start on.
    is_first: bool,
}

pub struct Clients {
    requests: Arc<Requests>,
    load: Load,
    phases: Option<Phases>,
    random: fastrand::Rng,
    /// Conversations in the order in which they are taken, over and over where they are recycled.
    order: Vec<usize>,
    taken: usize,
    /// How often each conversation was taken.
    plays: Vec<u32>,
    pub conversations: Vec<Conversation>,
    waiting_for_priming: VecDeque<usize>,
    priming: usize,
    first_left: usize,
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
        if let Some(phases) = phases.as_ref().filter(|phases| !phases.draws.is_empty()) {
            order = phases.draws.iter().map(|draw| draw.tree).collect();
        }
        let plays = vec![0; requests.trees.len()];
        Self {
            requests,
            load,
            phases,
            random,
            order,
            taken: 0,
            plays,
            conversations: Vec::new(),
            waiting_for_priming: VecDeque::new(),
            priming: 0,
            first_left: 0,
            next_arrival_s: 0.0,
        }
    }

    /// The sessions in flight at the start have all been primed.
    pub fn is_primed(&self) -> bool {
        self.first_left == 0
    }

    /// What is due from the start on; [`Clients::ended`] and [`Clients::arrive`] tell the rest.
    pub fn begin(&mut self) -> Vec<Due> {
        let mut due = Vec::new();
        let start = self.phases.as_ref().map_or(Start::Cold, |p| p.start);
        match self.load.mode {
            Mode::Open => while self.start_next(0.0, Start::Cold, true, &mut due) {},
            // Sessions that arrive by themselves find others in their middle, or nobody.
            Mode::Sessions if start == Start::Cold => {}
            Mode::Closed | Mode::Sessions => {
                for _ in 0..self.load.max_inflight_sessions {
                    self.start_next(0.0, start, true, &mut due);
                }
                self.prime_more(0.0, &mut due);
            }
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
        self.start_next(now_s, self.later_start(), false, &mut due);
        due
    }

    /// How sessions start that are not in flight from the beginning.
    fn later_start(&self) -> Start {
        let phases = self.phases.as_ref();
        phases.map_or(Start::Cold, |phases| phases.recycle_start)
    }

    fn recycles(&self) -> bool {
        self.phases.as_ref().is_some_and(|phases| phases.recycle)
    }

    /// Starts the next conversation; false if there is none left.
    fn start_next(&mut self, now_s: f64, start: Start, is_first: bool, due: &mut Vec<Due>) -> bool {
        if self.taken >= self.order.len() && !self.recycles() {
            return false;
        }
        let place = self.taken % self.order.len();
        let tree = self.order[place];
        let play = self.plays[tree];
        self.plays[tree] += 1;
        self.taken += 1;
        let members = self.requests.trees[tree].clone();
        let (skipped, linger) = match start {
            Start::Cold => (0, 1.0),
            Start::Mid => {
                let (share, linger) = self.drawn(place);
                let skipped = (members.len() as f64 * share) as usize;
                (skipped.min(members.len() - 1), linger)
            }
        };
        let (history, left) = members.split_at(skipped);
        let first = left[0];
        let mut missing = HashMap::new();
        for &member in left {
            let awaited = &self.requests.all[member].waits_for;
            let count = awaited.iter().filter(|&&awaited| awaited >= first).count();
            missing.insert(member, count);
        }
        // The last request before the start of each session that goes on after it.
        let goes_on = |&&request: &&usize| {
            let next = self.requests.all[request].next;
            next.is_some_and(|next| next >= first)
        };
        let to_prime: VecDeque<usize> = history.iter().filter(goes_on).copied().collect();
        let conversation = self.conversations.len();
        self.conversations.push(Conversation {
            play,
            left: left.len(),
            missing,
            to_prime,
            priming_from_s: now_s,
            linger,
            is_first: is_first && skipped > 0,
        });
        if skipped == 0 {
            self.activate(conversation, now_s, false, due);
        } else {
            self.first_left += usize::from(is_first);
            self.waiting_for_priming.push_back(conversation);
            if !is_first {
                self.prime_more(now_s, due);
            }
        }
        true
    }

    /// The share of a session's requests after which it begins, and of its think time that is left.
    fn drawn(&mut self, place: usize) -> (f64, f64) {
        let phases = self.phases.as_ref();
        if let Some(draw) = phases.and_then(|phases| phases.draws.get(place)) {
            return (draw.share, draw.linger);
        }
        let (low, high) = phases.map_or((0.25, 0.75), |phases| phases.start_share);
        let share = low + (high - low) * self.random.f64();
        (share, self.random.f64())
    }

    /// Makes due what waits for nothing.
    fn activate(&self, number: usize, now_s: f64, thinks: bool, due: &mut Vec<Due>) {
        let conversation = &self.conversations[number];
        let mut ready: Vec<usize> = conversation
            .missing
            .iter()
            .filter(|(_, missing)| **missing == 0)
            .map(|(request, _)| *request)
            .collect();
        ready.sort_unstable();
        for request in ready {
            let linger = if thinks { conversation.linger } else { 0.0 };
            due.push(Due {
                at_s: self.ready_s(request, now_s, linger),
                conversation: number,
                request,
                is_prime: false,
            });
        }
    }

    /// Primes sessions, a few at a time.
    fn prime_more(&mut self, now_s: f64, due: &mut Vec<Due>) {
        let slots = self.load.max_inflight_sessions;
        let chosen = self.phases.as_ref().and_then(|p| p.prime_parallel);
        let parallel = chosen.unwrap_or(slots.div_ceil(SESSIONS_A_PRIME));
        while self.priming < parallel.max(1)
            && let Some(number) = self.waiting_for_priming.pop_front()
        {
            self.priming += 1;
            self.conversations[number].priming_from_s = now_s;
            self.prime(number, now_s, due);
        }
    }

    /// Primes what a session still needs, or lets it begin; also when its time for priming is over, for
    /// a server that let one request wait so long lets the next wait as well.
    fn prime(&mut self, number: usize, now_s: f64, due: &mut Vec<Due>) {
        let timeout_s = self.phases.as_ref().and_then(|p| p.prime_timeout_s);
        let conversation = &mut self.conversations[number];
        let in_time = now_s - conversation.priming_from_s < timeout_s.unwrap_or(f64::INFINITY);
        if in_time && let Some(request) = conversation.to_prime.pop_front() {
            due.push(Due {
                at_s: now_s,
                conversation: number,
                request,
                is_prime: true,
            });
            return;
        }
        self.priming -= 1;
        self.activate(number, now_s, true, due);
        self.first_left -= usize::from(self.conversations[number].is_first);
        self.prime_more(now_s, due);
    }

    /// When a request is due whose last awaited answer ended at `now_s`, with the share `linger` of its
    /// think time to pass.
    fn ready_s(&self, request: usize, now_s: f64, linger: f64) -> f64 {
        let planned = &self.requests.all[request];
        let at_s = now_s + linger * self.think_s(planned);
        match self.load.mode {
            Mode::Open => at_s.max(planned.trace_s / self.load.time_scale),
            _ => at_s,
        }
    }

    /// Seconds between the awaited answer and a request. In every mode it is the trace's time that is
    /// scaled, as `replay` has it.
    pub fn think_s(&self, request: &Planned) -> f64 {
        let think_s = request.think_s * self.load.think_scale / self.load.time_scale;
        think_s.min(self.load.max_think_s.unwrap_or(f64::INFINITY))
    }

    /// A request has ended, whether well or badly; returns what is due after it.
    pub fn ended(&mut self, now_s: f64, ended: Due) -> Vec<Due> {
        let mut due = Vec::new();
        let number = ended.conversation;
        if ended.is_prime {
            self.prime(number, now_s, &mut due);
            return due;
        }
        let requests = Arc::clone(&self.requests);
        self.conversations[number].left -= 1;
        for &follower in &requests.followers[ended.request] {
            let Some(missing) = self.conversations[number].missing.get_mut(&follower) else {
                continue;
            };
            *missing -= 1;
            if *missing == 0 {
                due.push(Due {
                    at_s: self.ready_s(follower, now_s, 1.0),
                    conversation: number,
                    request: follower,
                    is_prime: false,
                });
            }
        }
        if self.conversations[number].left == 0 && self.load.mode == Mode::Closed {
            self.conversations[number].missing = HashMap::new();
            self.start_next(now_s, self.later_start(), false, &mut due);
        }
        due
    }
}
