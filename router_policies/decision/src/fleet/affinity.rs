//! Which worker answered a session last, and how many turns it has had.

use super::{State, prefix};

/// Where a session was served last, and its turns so far.
#[derive(Clone, Copy, Debug)]
pub(super) struct Session {
    pub slot: usize,
    pub serial: u64,
    pub turns: u32,
}

/// What sessions are known by here: a number made of the id that the client chose.
///
/// Two ids of one number would be one session, whose turns go to one worker and hold one place. That is
/// no more than whoever knows a session's id gets by sending it, and answers never go by it. But tables
/// of admission take the number as it is for the place of an entry, so that ids which are chosen for
/// their numbers could crowd one place there and have every decision search through them. So a router
/// mixes a secret of its own into them. A simulation has none: there the same ids are the same numbers in
/// every run.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SessionKeys {
    secret: u64,
}

impl SessionKeys {
    pub fn with_secret(secret: u64) -> Self {
        Self { secret }
    }

    #[cfg(test)]
    pub fn of(self, id: &str) -> u64 {
        self.of_tenant(0, id)
    }

    /// The session that `tenant` calls `id`: others' sessions of that id are others. 0 is nobody's.
    pub fn of_tenant(self, tenant: u64, id: &str) -> u64 {
        let mut state = id.len() as u64 ^ self.secret;
        if tenant != 0 {
            state = prefix::hash::step(state, tenant);
        }
        for chunk in id.as_bytes().chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            state = prefix::hash::step(state, u64::from_le_bytes(word));
        }
        state
    }
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

    /// Takes back that a request was a turn of its session. Another may have come meanwhile, or the same
    /// request again to another worker: where the session is then, it stays.
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
        let Some(now) = self.sessions.peek_mut(&key) else {
            return;
        };
        let turns_before = before.map_or(0, |before| before.turns);
        now.turns = now.turns.saturating_sub(1);
        match before {
            Some(before) if now.turns == turns_before => *now = before,
            _ if now.turns == 0 => {
                self.sessions.pop(&key);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_whose_numbers_crowd_a_place_do_not_where_there_is_a_secret() {
        let place = |keys: SessionKeys, id: &str| keys.of(id) & 0x3ff;
        let without = SessionKeys::default();
        let all = (0..200_000).map(|number| format!("s{number}"));
        let crowd: Vec<_> = all.filter(|id| place(without, id) == 7).collect();
        assert!(crowd.len() > 100);
        for secret in [1, 0x1234_5678_9abc_def0] {
            let keys = SessionKeys::with_secret(secret);
            let same = crowd
                .iter()
                .filter(|id| place(keys, id) == place(keys, &crowd[0]));
            assert!(same.count() < crowd.len() / 10);
            let again = SessionKeys::with_secret(secret);
            assert!(crowd.iter().all(|id| keys.of(id) == again.of(id)));
        }
    }
}
