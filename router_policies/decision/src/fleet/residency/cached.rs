//! How much of one prompt each worker has in its cache.

use smallvec::SmallVec;

/// Tokens of a prompt that are cached on each worker.
#[derive(Clone, Debug, Default)]
pub struct Cached {
    /// By slot, in their order, where there are some: on nearly all of many workers there are none.
    held: SmallVec<[(usize, u64); 8]>,
    most: u64,
    /// The slots that hold a long part of it, in their order: few do, and they are asked for often.
    warm: SmallVec<[usize; 2]>,
}

impl Cached {
    /// From the tokens of each slot; `long_tokens` of them are a long part.
    pub fn new(by_slot: impl Iterator<Item = u64>, long_tokens: u64) -> Self {
        let mut cached = Self::default();
        for (slot, tokens) in by_slot.enumerate() {
            if tokens > 0 {
                cached.held.push((slot, tokens));
                cached.most = cached.most.max(tokens);
            }
            if tokens >= long_tokens {
                cached.warm.push(slot);
            }
        }
        cached
    }

    /// Tokens on the worker of a slot.
    pub fn on(&self, slot: usize) -> u64 {
        let at = self.held.binary_search_by_key(&slot, |(of, _)| *of);
        at.map_or(0, |at| self.held[at].1)
    }

    /// Tokens on the worker that has most of it.
    pub fn most(&self) -> u64 {
        self.most
    }

    /// The slots that hold a long part, in their order.
    pub fn warm(&self) -> impl Iterator<Item = usize> {
        self.warm.iter().copied()
    }
}
