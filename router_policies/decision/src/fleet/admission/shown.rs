//! Who is in, who waits, and why: as people are shown it.

use super::hold::Occupant;
use super::identity::Name;
use super::queue::Waiter;
use super::{Admission, Ledger, Site, WaitReason};
use serde::Serialize;

/// A worker's ledger, as `/workers` shows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct AdmissionSnapshot {
    /// Sessions that are in.
    pub sessions: usize,
    pub running: usize,
    pub idle: usize,
    /// What the GPU holds and runs of them, each shared prefix once.
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

/// What a session does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// A turn of it runs.
    Running,
    /// It is in, and none runs.
    Idle,
    /// A turn of it waits for room.
    Waiting,
}

/// A session that is in on a worker, or a turn of one that waits.
#[derive(Clone, Debug, Serialize)]
pub struct SessionShown {
    /// None of a family, which no client has named.
    pub session_id: Option<Name>,
    /// None where the configuration names no tenants.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    pub state: State,
    /// Where it is in.
    pub worker: Option<String>,
    /// Of its prompt, what is booked for its answers included; of one that waits, that it wants.
    pub tokens: u64,
    /// Since its last turn ended, of idle ones.
    pub idle_s: Option<f64>,
    /// Since it came, of those that wait; their place in the queue, from 1, and why they wait.
    pub waited_s: Option<f64>,
    pub position: Option<usize>,
    pub reason: Option<WaitReason>,
}

impl Admission {
    /// All of them: those that wait first, in their order, then by worker. `worker` names those of slots.
    pub fn shown(&self, worker: impl Fn(usize) -> Option<String>, now_s: f64) -> Vec<SessionShown> {
        let tenant = |payer: usize| self.queue.tenants.name(payer).map(str::to_owned);
        let waiting = self
            .queue
            .waiting()
            .zip(1..)
            .map(|((_, waiter), position)| {
                let turn = &waiter.turn;
                SessionShown {
                    session_id: turn.identity.name.clone(),
                    tenant: tenant(turn.identity.payer),
                    state: State::Waiting,
                    worker: None,
                    tokens: turn.tokens(),
                    idle_s: None,
                    waited_s: Some(now_s - turn.since_s),
                    position: Some(position),
                    reason: Some(turn.reason),
                }
            });
        let mut all: Vec<_> = waiting.collect();
        for (slot, ledger) in self.ledgers.iter().enumerate() {
            let name = worker(slot);
            all.extend(ledger.rotation.members.iter().map(|(&key, member)| {
                let runs = ledger.runs(key);
                let known = self.sessions.get(key);
                let ended_s = known.and_then(|known| known.ended_s);
                let in_flight = ledger.hold.occupant(key).map(Occupant::tokens);
                SessionShown {
                    session_id: member.name.clone(),
                    tenant: tenant(self.payer_of(key)),
                    state: match runs {
                        true => State::Running,
                        false => State::Idle,
                    },
                    worker: name.clone(),
                    tokens: in_flight.unwrap_or_else(|| member.chain.tokens()),
                    idle_s: ended_s.filter(|_| !runs).map(|ended_s| now_s - ended_s),
                    waited_s: None,
                    position: None,
                    reason: None,
                }
            }));
        }
        all
    }

    /// The ledger of a worker.
    pub fn snapshot(&self, site: Option<&Site>, slot: usize) -> AdmissionSnapshot {
        let empty = Ledger::default();
        let ledger = self.ledger(slot).unwrap_or(&empty);
        let running = ledger
            .hold
            .occupants()
            .filter(|(_, o)| !o.is_idle())
            .count();
        let idle = ledger.idle().count();
        let may_go =
            |waiter: &Waiter| site.is_some_and(|site| !waiter.turn.exclude.contains(&site.spec.id));
        let waiting = self.queue.waiting();
        AdmissionSnapshot {
            sessions: running + idle,
            running,
            idle,
            booked_tokens: ledger.hold.tokens(),
            budget_tokens: site
                .filter(|_| self.manner.gates)
                .and_then(|site| self.budget_tokens(site)),
            waiting: waiting.filter(|(_, waiter)| may_go(waiter)).count(),
            given_up: ledger.given_up,
            recomputed_tokens: ledger.recomputed_tokens,
            overloaded: ledger.rotation.overloaded,
        }
    }
}
