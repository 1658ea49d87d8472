//! How much of one prompt each worker has in its cache.

use smallvec::SmallVec;

/// Tokens of a prompt that are cached on each worker.
#[derive(Clone, Debug, Default)]
pub struct Cached {
    /// By slot, in their order, where there are some: on nearly all of many workers there are none.
    held: SmallVec<[(usize, u64); 8]>,
}

impl Cached {
    pub fn new(by_slot: impl Iterator<Item = u64>) -> Self {
        Self {
            held: by_slot
                .enumerate()
                .filter(|(_, tokens)| *tokens > 0)
                .collect(),
        }
    }

    /// Tokens on the worker of a slot.
    pub fn on(&self, slot: usize) -> u64 {
        let at = self.held.binary_search_by_key(&slot, |(of, _)| *of);
        at.map_or(0, |at| self.held[at].1)
    }
}
