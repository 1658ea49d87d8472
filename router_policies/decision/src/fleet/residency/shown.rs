//! Who has a place, who waits, and why: as people are shown it.

use super::identity::Name;
use super::{Residency, WaitReason};
use serde::Serialize;

/// What a session does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// A turn of it runs.
    Running,
    /// It has a place, and none runs.
    Idle,
    /// A turn of it waits for room.
    Waiting,
}

/// A session with a place on a worker, or a turn of one that waits.
#[derive(Clone, Debug, Serialize)]
pub struct SessionShown {
    /// None of a family, which no client has named.
    pub session_id: Option<Name>,
    /// None where the configuration names no tenants.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    pub state: State,
    /// Where its place is; of one that waits, where it waits to grow.
    pub worker: Option<String>,
    /// That it holds, what is booked for its answers included; of one that waits, that it wants.
    pub tokens: u64,
    /// Since its last turn ended, of idle ones.
    pub idle_s: Option<f64>,
    /// Since it came, of those that wait; their place in the queue, from 1, and why they wait.
    pub waited_s: Option<f64>,
    pub position: Option<usize>,
    pub reason: Option<WaitReason>,
}

impl Residency {
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
                    worker: turn.grows_at.and_then(&worker),
                    tokens: turn.prompt.tokens() + turn.output_tokens,
                    idle_s: None,
                    waited_s: Some(now_s - turn.since_s),
                    position: Some(position),
                    reason: Some(turn.reason),
                }
            });
        let mut all: Vec<_> = waiting.collect();
        for (slot, hold) in self.holds.iter().enumerate() {
            let name = worker(slot);
            all.extend(hold.occupants().map(|(key, occupant)| {
                let runs = !occupant.turns.is_empty();
                SessionShown {
                    session_id: occupant.name.clone(),
                    tenant: tenant(self.sessions.get(key).map_or(0, |known| known.payer)),
                    state: match runs {
                        true => State::Running,
                        false => State::Idle,
                    },
                    worker: name.clone(),
                    tokens: occupant.tokens(),
                    idle_s: (!runs).then_some(now_s - occupant.idle_since_s),
                    waited_s: None,
                    position: None,
                    reason: None,
                }
            }));
        }
        all
    }
}
