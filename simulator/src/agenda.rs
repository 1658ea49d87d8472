//! What happens when: events and timeouts in the order of their times, of equals what was planned first.

use crate::cache::Change;
use crate::clients::Due;
use std::cmp::Ordering;
use std::collections::{BinaryHeap, VecDeque};

/// Something that happens.
pub enum What {
    Due(Due),
    Arrival,
    AtWorker(usize),
    /// The KV of a turn that was prefilled elsewhere has come.
    Received(usize),
    Step(usize),
    Changes(usize, Vec<Change>),
    Loads,
    Pump,
    /// A client's patience with a turn ends.
    Timeout(usize),
}

impl What {
    /// A request comes with it, or a session.
    pub fn brings_a_request(&self) -> bool {
        matches!(self, Self::Due(_) | Self::Arrival)
    }
}

/// When something happens. What it is stands apart, for a heap moves its items often.
struct Event {
    at_s: f64,
    number: u64,
    place: u32,
}

impl PartialEq for Event {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Event {}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Event {
    /// The earliest is the greatest, for a heap gives the greatest first.
    fn cmp(&self, other: &Self) -> Ordering {
        let later = other.at_s.total_cmp(&self.at_s);
        later.then(other.number.cmp(&self.number))
    }
}

struct Timeout {
    at_s: f64,
    number: u64,
    turn: usize,
}

#[derive(Default)]
pub struct Agenda {
    events: BinaryHeap<Event>,
    /// What the events are, at their places, and places without one.
    whats: Vec<Option<What>>,
    free: Vec<u32>,
    /// Of requests and of primes, each in their order: nearly all are over long before, and would only
    /// make the heap large.
    timeouts: [VecDeque<Timeout>; 2],
    number: u64,
    /// Requests and sessions that an event is under way for.
    to_come: usize,
}

impl Agenda {
    pub fn add(&mut self, at_s: f64, what: What) {
        self.number += 1;
        self.to_come += usize::from(what.brings_a_request());
        let place = self.free.pop().unwrap_or_else(|| {
            self.whats.push(None);
            (self.whats.len() - 1) as u32
        });
        self.whats[place as usize] = Some(what);
        self.events.push(Event {
            at_s,
            number: self.number,
            place,
        });
    }

    /// A turn's timeout. Those of requests are added in the order of their times, and so are those of
    /// primes.
    pub fn add_timeout(&mut self, at_s: f64, turn: usize, is_prime: bool) {
        self.number += 1;
        let number = self.number;
        self.timeouts[usize::from(is_prime)].push_back(Timeout { at_s, number, turn });
    }

    /// No request and no session is still to come, but for what was taken last.
    pub fn nobody_comes(&self) -> bool {
        self.to_come == 0
    }

    /// Takes what happens next, and when. Timeouts of turns that are over are forgotten.
    pub fn next(&mut self, is_over: impl Fn(usize) -> bool) -> Option<(f64, What)> {
        for timeouts in &mut self.timeouts {
            while timeouts.front().is_some_and(|first| is_over(first.turn)) {
                timeouts.pop_front();
            }
        }
        let fronts = self.timeouts.iter().enumerate();
        let fronts = fronts.filter_map(|(at, of)| Some((at, of.front()?)));
        let first = fronts.min_by(|(_, one), (_, other)| {
            let earlier = one.at_s.total_cmp(&other.at_s);
            earlier.then(one.number.cmp(&other.number))
        });
        let is_next = |timeout: &Timeout| {
            self.events.peek().is_none_or(|event| {
                let earlier = timeout.at_s.total_cmp(&event.at_s);
                earlier.then(timeout.number.cmp(&event.number)) == Ordering::Less
            })
        };
        if let Some((at, timeout)) = first
            && is_next(timeout)
        {
            let timeout = self.timeouts[at].pop_front()?;
            return Some((timeout.at_s, What::Timeout(timeout.turn)));
        }
        let Event { at_s, place, .. } = self.events.pop()?;
        self.free.push(place);
        let what = self.whats[place as usize].take()?;
        self.to_come -= usize::from(what.brings_a_request());
        Some((at_s, what))
    }
}
