//! What a prompt takes of a worker's KV, in coarse blocks, so that what sessions have in common is
//! counted once and no work is done for every token.
//!
//! A coarse block is named by the state after it, which stands for the whole prefix up to there. A
//! session holds a block only if it holds all before it; so along any prompt the number of holders
//! never rises, and what is held, or held by one alone, is found by bisection.

use crate::fleet::prefix::estimate::StateMap;
use crate::fleet::prefix::hash::{BYTES_PER_TOKEN, PromptHashes, Unit};
use smallvec::SmallVec;
use std::collections::hash_map::Entry;

/// Tokens a coarse block (the nearest multiple of the prompt's own blocks).
pub const COARSE_TOKENS: usize = 256;
/// More different beginnings than this take longer to go through than one block to be looked up.
const STARTS: usize = 32;

/// A prompt, as the book sees it: its states at multiples of [`COARSE_TOKENS`].
#[derive(Clone, Copy)]
pub struct Coarse<'a> {
    states: &'a [u64],
    stride: usize,
    /// Tokens a coarse block.
    pub block_tokens: u32,
    /// Tokens of the whole prompt.
    pub tokens: u64,
}

impl<'a> Coarse<'a> {
    /// `text_scale` is how many tokens engines report for one that was estimated from text.
    pub fn of(prompt: &'a PromptHashes, text_scale: f64) -> Self {
        let (units, scale) = match prompt.unit {
            Unit::Tokens => (COARSE_TOKENS, 1.0),
            Unit::Bytes => (COARSE_TOKENS * BYTES_PER_TOKEN as usize, text_scale),
        };
        let scaled = |tokens: u64| (tokens as f64 * scale).ceil() as u64;
        let stride = (units / prompt.block.max(1)).max(1);
        let block_tokens = scaled(prompt.to_tokens(stride * prompt.block));
        Self {
            states: &prompt.states,
            stride,
            block_tokens: u32::try_from(block_tokens).unwrap_or(u32::MAX),
            tokens: scaled(prompt.tokens()),
        }
    }

    /// Whole coarse blocks.
    pub fn blocks(&self) -> usize {
        self.states.len() / self.stride
    }

    /// The state after block `index`, which must be below [`Coarse::blocks`].
    pub fn state(&self, index: usize) -> u64 {
        self.states[(index + 1) * self.stride - 1]
    }

    /// Tokens of so many blocks.
    pub fn tokens_of(&self, blocks: usize) -> u64 {
        blocks as u64 * u64::from(self.block_tokens)
    }

    /// Tokens after the last whole block.
    pub fn tail_tokens(&self) -> u64 {
        self.tokens.saturating_sub(self.tokens_of(self.blocks()))
    }
}

/// What one turn, or one session between its turns, holds of a worker.
#[derive(Clone, Debug, Default)]
pub struct Chain {
    pub states: Vec<u64>,
    pub block_tokens: u32,
    /// Tokens after the last whole block: the prompt's rest, and the answer.
    pub tail_tokens: u64,
}

impl Chain {
    /// Whether the prompt begins with all of this.
    pub fn begins(&self, prompt: &Coarse<'_>) -> bool {
        match self.states.last() {
            None => true,
            Some(&tip) => {
                let at = self.states.len() - 1;
                at < prompt.blocks() && prompt.state(at) == tip
            }
        }
    }

    /// Blocks that the prompt has in common with this.
    pub fn common(&self, prompt: &Coarse<'_>) -> usize {
        let most = self.states.len().min(prompt.blocks());
        partition(0, most, |at| self.states[at] == prompt.state(at))
    }

    pub fn tokens(&self) -> u64 {
        self.states.len() as u64 * u64::from(self.block_tokens) + self.tail_tokens
    }
}

/// The first index from `low` to `high` for which `holds` is false; it must be true before and false after.
pub fn partition(mut low: usize, mut high: usize, holds: impl Fn(usize) -> bool) -> usize {
    while low < high {
        let middle = low + (high - low) / 2;
        if holds(middle) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low
}

struct Count {
    holders: u32,
    tokens: u32,
}

/// A first block, with its tokens, and how many chains begin with it.
struct Start {
    state: u64,
    block_tokens: u32,
    chains: u32,
}

/// The coarse blocks that are held on one worker, and by how many.
#[derive(Default)]
pub struct Blocks {
    counts: StateMap<Count>,
    tokens: u64,
    /// The least and the most tokens that a block has had so far.
    sizes: Option<(u32, u32)>,
    /// With what chains begin: most workers hold nothing of a prompt, and the gate asks all of them.
    starts: SmallVec<[Start; 4]>,
}

impl Blocks {
    /// Tokens of all blocks, each once.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Adds one holder of each of these blocks, which have so many tokens each.
    pub fn add(&mut self, states: impl ExactSizeIterator<Item = u64>, tokens: u32) {
        if states.len() == 0 {
            return;
        }
        let (least, most) = self.sizes.unwrap_or((tokens, tokens));
        self.sizes = Some((least.min(tokens), most.max(tokens)));
        self.counts.reserve(states.len());
        for state in states {
            let fresh = Count { holders: 0, tokens };
            let count = self.counts.entry(state).or_insert(fresh);
            count.holders += 1;
            if count.holders == 1 {
                self.tokens += u64::from(count.tokens);
            }
        }
    }

    pub fn remove(&mut self, state: u64) {
        if let Entry::Occupied(mut count) = self.counts.entry(state) {
            count.get_mut().holders -= 1;
            if count.get().holders == 0 {
                self.tokens -= u64::from(count.remove().tokens);
            }
        }
    }

    /// Has a chain, which the prompt begins with, go on to the prompt's last block.
    pub fn extend(&mut self, chain: &mut Chain, prompt: &Coarse<'_>) {
        chain.block_tokens = prompt.block_tokens;
        let known = chain.states.len();
        let new = (known..prompt.blocks()).map(|at| prompt.state(at));
        self.add(new.clone(), prompt.block_tokens);
        chain.states.extend(new);
        if known == 0
            && let Some(&first) = chain.states.first()
        {
            self.start(first, prompt.block_tokens);
        }
    }

    /// Another chain begins with this block.
    fn start(&mut self, state: u64, block_tokens: u32) {
        match self.starts.iter_mut().find(|start| start.state == state) {
            Some(start) => start.chains += 1,
            None => self.starts.push(Start {
                state,
                block_tokens,
                chains: 1,
            }),
        }
    }

    /// Releases what of a chain the prompt does not begin with, and cuts the chain there: as if all of it
    /// were released and the prompt's blocks were added, which takes longer. Where blocks differ in size
    /// nothing is kept.
    pub fn keep_common(&mut self, chain: &mut Chain, prompt: &Coarse<'_>) {
        let size = prompt.block_tokens;
        let kept = match self.sizes == Some((size, size)) {
            true => chain.common(prompt),
            false => 0,
        };
        if kept == 0 {
            self.release(chain);
        }
        let gone = chain.states.drain(kept..);
        if kept > 0 {
            gone.for_each(|state| self.remove(state));
        }
    }

    pub fn release(&mut self, chain: &Chain) {
        chain.states.iter().for_each(|&state| self.remove(state));
        let first = chain.states.first();
        let at = |starts: &[Start]| starts.iter().position(|start| Some(&start.state) == first);
        if let Some(at) = at(&self.starts) {
            self.starts[at].chains -= 1;
            if self.starts[at].chains == 0 {
                self.starts.swap_remove(at);
            }
        }
    }

    /// False where nobody holds anything of the prompt. Of prompts in blocks of other sizes that cannot be
    /// told by their first.
    fn may_hold(&self, prompt: &Coarse<'_>) -> bool {
        self.starts.len() > STARTS
            || self.starts.iter().any(|start| {
                start.state == prompt.state(0) || start.block_tokens != prompt.block_tokens
            })
    }

    /// Blocks of the prompt that would be new here, if at least `known` are held.
    pub fn new_blocks(&self, prompt: &Coarse<'_>, known: usize) -> usize {
        let blocks = prompt.blocks();
        if known == 0 && (blocks == 0 || !self.may_hold(prompt)) {
            return blocks;
        }
        blocks - self.held(prompt, known)
    }

    /// Blocks of the prompt's beginning that somebody holds, of which at least `known` are.
    pub fn held(&self, prompt: &Coarse<'_>, known: usize) -> usize {
        let known = known.min(prompt.blocks());
        let holds = |at: usize| self.counts.contains_key(&prompt.state(at));
        if known < prompt.blocks() && !holds(known) {
            return known;
        }
        partition(known, prompt.blocks(), holds)
    }

    /// Blocks at the chain's beginning that another holds too.
    pub fn shared(&self, chain: &Chain) -> usize {
        partition(0, chain.states.len(), |at| {
            let count = self.counts.get(&chain.states[at]);
            count.is_some_and(|count| count.holders > 1)
        })
    }

    /// Tokens that releasing all of `chains` would free for `prompt`, tails included: what the prompt
    /// begins with is kept for it.
    pub fn freed_by<'a>(
        &self,
        chains: impl Iterator<Item = &'a Chain>,
        prompt: &Coarse<'_>,
    ) -> u64 {
        let mut released: StateMap<u32> = StateMap::default();
        let mut freed = 0;
        for chain in chains {
            freed += chain.tail_tokens;
            let kept = chain.common(prompt);
            let shared = self.shared(chain).max(kept);
            freed += (chain.states.len() - shared) as u64 * u64::from(chain.block_tokens);
            for &state in &chain.states[kept..shared] {
                let gone = released.entry(state).or_default();
                *gone += 1;
                if self.counts.get(&state).is_some_and(|c| c.holders == *gone) {
                    freed += u64::from(chain.block_tokens);
                }
            }
        }
        freed
    }

    pub fn is_empty(&self) -> bool {
        self.counts.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(tokens: impl IntoIterator<Item = u32>) -> PromptHashes {
        PromptHashes::of_tokens(&tokens.into_iter().collect::<Vec<_>>(), 16)
    }

    fn chain(prompt: &Coarse<'_>) -> Chain {
        Chain {
            states: (0..prompt.blocks()).map(|at| prompt.state(at)).collect(),
            block_tokens: prompt.block_tokens,
            tail_tokens: prompt.tail_tokens(),
        }
    }

    #[test]
    fn what_two_prompts_have_in_common_is_counted_once() {
        let (a, b) = (prompt(0..2_600), prompt((0..1_030).chain(9_000..10_000)));
        let (a, b) = (Coarse::of(&a, 1.0), Coarse::of(&b, 1.0));
        assert_eq!((a.blocks(), a.tail_tokens(), b.blocks()), (10, 40, 7));
        let (of_a, of_b) = (chain(&a), chain(&b));
        let mut blocks = Blocks::default();
        blocks.add(of_a.states.iter().copied(), 256);
        assert_eq!(blocks.held(&b, 0), 4);
        blocks.add(of_b.states.iter().copied(), 256);
        assert_eq!(blocks.tokens(), 13 * 256);
        assert_eq!((blocks.shared(&of_a), of_a.common(&b)), (4, 4));
        let nothing = prompt(0..0);
        let nothing = Coarse::of(&nothing, 1.0);
        assert_eq!(blocks.freed_by([&of_a].into_iter(), &nothing), 6 * 256 + 40);
        let both = blocks.freed_by([&of_a, &of_b].into_iter(), &nothing);
        assert_eq!(both, 13 * 256 + 40 + b.tail_tokens());
        // What the one that it is freed for begins with is no gain.
        let for_a = blocks.freed_by([&of_b].into_iter(), &a);
        assert_eq!(for_a, 3 * 256 + b.tail_tokens());
        blocks.release(&of_a);
        blocks.release(&of_b);
        assert!(blocks.is_empty() && blocks.tokens() == 0);
    }

    #[test]
    fn text_counts_as_many_tokens_as_engines_report_for_it() {
        let text = PromptHashes::of_text(&[b'x'; 8_192], 16);
        let coarse = Coarse::of(&text, 1.25);
        assert_eq!((coarse.blocks(), coarse.block_tokens), (8, 320));
        assert_eq!(coarse.tokens, 2_560);
    }
}
