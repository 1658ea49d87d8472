//! Turns whose clients left while they waited: one who comes again soon with the same turn takes the place in the
//! queue that it had, and has waited all the while. Clients give up after some minutes and ask again, and would
//! else wait for ever behind those that came meanwhile.

use super::queue::WaitingTurn;
use crate::fleet::ESTIMATE_BLOCK_TOKENS;
use crate::fleet::prefix::hash::{PromptHashes, step};
use lru::LruCache;
use std::num::NonZeroUsize;

/// For so long the place of one that left is kept.
const KEPT_S: f64 = 60.0;
/// And those of so many.
const KEPT: NonZeroUsize = NonZeroUsize::new(4096).expect("not 0");

/// When a turn came to the router, and to the queue, before its client left.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Since {
    pub arrived_s: f64,
    pub queued_s: f64,
}

/// Those that have left, by whose turn it was and of which prompt.
pub struct Departed(LruCache<(u64, u64), (Since, f64)>);

impl Default for Departed {
    fn default() -> Self {
        Self(LruCache::new(KEPT))
    }
}

/// A prompt's name; of one in smaller blocks than the queue keeps, that of the queue's.
fn name_of(prompt: &PromptHashes) -> u64 {
    let last = prompt.states.last().copied().unwrap_or_default();
    step(last, prompt.length as u64)
}

impl Departed {
    /// The client of a turn left at `now_s`.
    pub fn note(&mut self, turn: &WaitingTurn, now_s: f64) {
        let since = Since {
            arrived_s: turn.arrived_s,
            queued_s: turn.since_s,
        };
        let name = (turn.whose, name_of(&turn.prompt));
        self.0.put(name, (since, now_s));
    }

    /// Since when a turn waits that comes now, if its client has left and comes again; said once.
    pub fn again(&mut self, whose: u64, prompt: &PromptHashes, now_s: f64) -> Option<Since> {
        if self.0.is_empty() {
            return None;
        }
        let name = name_of(&prompt.thinned(ESTIMATE_BLOCK_TOKENS));
        let (since, left_s) = self.0.pop(&(whose, name))?;
        (now_s - left_s <= KEPT_S).then_some(since)
    }
}
