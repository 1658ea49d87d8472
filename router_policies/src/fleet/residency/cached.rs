//! How much of one prompt each worker has in its cache.

use smallvec::SmallVec;

/// Tokens of a prompt that are cached on each worker.
#[derive(Clone, Debug, Default)]
pub struct Cached {
    by_slot: Vec<u64>,
    most: u64,
    /// The slots that hold a long part of it, in their order: few do, and they are asked for often.
    warm: SmallVec<[usize; 2]>,
}

impl Cached {
    /// From tokens by slot; `long_tokens` of them are a long part.
    pub fn new(by_slot: Vec<u64>, long_tokens: u64) -> Self {
        let long = by_slot.iter().enumerate();
        let warm = long.filter(|(_, tokens)| **tokens >= long_tokens);
        Self {
            warm: warm.map(|(slot, _)| slot).collect(),
            most: by_slot.iter().copied().max().unwrap_or(0),
            by_slot,
        }
    }

    /// Tokens on the worker of a slot.
    pub fn on(&self, slot: usize) -> u64 {
        self.by_slot.get(slot).copied().unwrap_or(0)
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
