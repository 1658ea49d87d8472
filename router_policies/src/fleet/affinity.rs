//! Which worker answered a session last, and how many turns it has had.

use super::{State, prefix};

/// Where a session was served last, and its turns so far.
#[derive(Clone, Copy, Debug)]
pub(super) struct Session {
    pub slot: usize,
    pub serial: u64,
    pub turns: u32,
}

/// What a session is known by here.
pub(crate) fn session_key(id: &str) -> u64 {
    let mut state = id.len() as u64;
    for chunk in id.as_bytes().chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        state = prefix::hash::step(state, u64::from_le_bytes(word));
    }
    state
}

impl State {
    /// Notes a turn of a session; returns what was known of it before.
    pub(super) fn note_session(&mut self, key: u64, slot: usize, now_s: f64) -> Option<Session> {
        let worker = self.workers[slot].as_mut()?;
        let previous = self.sessions.get(&key).copied();
        if previous.is_some_and(|session| session.serial != worker.serial) {
            worker.note_migration(now_s);
        }
        let turns = previous.map_or(0, |session| session.turns) + 1;
        let serial = worker.serial;
        self.sessions.put(
            key,
            Session {
                slot,
                serial,
                turns,
            },
        );
        previous
    }

    /// Takes back that a request was a turn of its session.
    pub(super) fn retract_session(
        &mut self,
        key: u64,
        before: Option<Session>,
        slot: usize,
        began_s: f64,
    ) {
        let is_moved = before.is_some_and(|before| {
            let worker = self.workers.get(slot).and_then(Option::as_ref);
            worker.is_some_and(|worker| worker.serial != before.serial)
        });
        if is_moved && let Some(worker) = self.worker_mut(slot) {
            worker.forget_migration(began_s);
        }
        match before {
            Some(before) => self.sessions.put(key, before),
            None => self.sessions.pop(&key),
        };
    }
}
