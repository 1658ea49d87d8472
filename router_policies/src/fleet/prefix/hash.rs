//! Names of prompt prefixes: one 64-bit state for each block boundary of a prompt.
//!
//! The state after n units is a function of those n units alone, so two prompts have equal states
//! at a boundary exactly when they agree up to it (but for chance: 2⁻⁶⁴ a pair), whatever block
//! size they were cut into. Units are token ids, or bytes of text where the prompt is text.
//!
//! Token ids are chained in groups: the ids of a group are folded by themselves, and only the fold
//! depends on the group before. A multiplication's result is waited for once a group instead of
//! once a token, which the scan of a 100,000-token prompt would otherwise spend half its time on.

/// What a prompt is counted in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Unit {
    #[default]
    Tokens,
    /// Raw bytes of the prompt as they stand in the request's JSON.
    Bytes,
}

/// Bytes of text that stand for one token until the engine says otherwise.
pub const BYTES_PER_TOKEN: u64 = 4;

/// Bytes hashed at once; a text block is a multiple of it.
const WORD_BYTES: usize = 8;

const SEED_TOKENS: u64 = 0x9e37_79b9_7f4a_7c15;
const SEED_GROUP: u64 = 0x8ebc_6af0_9c88_c6e3;
const SEED_BYTES: u64 = 0xd1b5_4a32_d192_ed03;
const MIX_STATE: u64 = 0xa076_1d64_78bd_642f;
const MIX_UNIT: u64 = 0xe703_7ed1_a0b4_28db;

/// One step of the chain: a folded 64 × 64 multiplication, as in wyhash.
#[inline]
pub fn step(state: u64, unit: u64) -> u64 {
    let product = u128::from(state ^ MIX_STATE) * u128::from(unit ^ MIX_UNIT);
    (product as u64) ^ ((product >> 64) as u64)
}

/// Tokens a group of a chain.
const GROUP_TOKENS: u8 = 8;

/// The chain over a prompt's token ids, at any of its tokens.
#[derive(Clone, Copy, Debug)]
pub struct TokenChain {
    /// After the last full group.
    groups: u64,
    /// Of the tokens since.
    fold: u64,
    folded: u8,
}

impl Default for TokenChain {
    fn default() -> Self {
        Self {
            groups: SEED_TOKENS,
            fold: SEED_GROUP,
            folded: 0,
        }
    }
}

impl TokenChain {
    #[inline]
    pub fn push(&mut self, token: u32) {
        self.fold = step(self.fold, u64::from(token));
        self.folded += 1;
        if self.folded == GROUP_TOKENS {
            *self = Self {
                groups: step(self.groups, self.fold),
                ..Self::default()
            };
        }
    }

    /// The name of the tokens so far.
    #[inline]
    pub fn state(&self) -> u64 {
        match self.folded {
            0 => self.groups,
            _ => step(self.groups, self.fold),
        }
    }
}

/// A prompt as the prefix index sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptHashes {
    pub unit: Unit,
    /// Units a block.
    pub block: usize,
    /// State after each full block.
    pub states: Vec<u64>,
    /// Units in all, with the last, partial block.
    pub length: usize,
}

impl PromptHashes {
    /// Tokens in the prompt: exact for token ids, estimated for text.
    pub fn tokens(&self) -> u64 {
        self.to_tokens(self.length)
    }

    /// `units` of this prompt, in tokens.
    pub fn to_tokens(&self, units: usize) -> u64 {
        match self.unit {
            Unit::Tokens => units as u64,
            Unit::Bytes => (units as u64).div_ceil(BYTES_PER_TOKEN),
        }
    }

    /// Hashes text, by blocks of `block_tokens` tokens' worth of bytes.
    pub fn of_text(text: &[u8], block_tokens: usize) -> Self {
        let block = (block_tokens.max(1) * BYTES_PER_TOKEN as usize).next_multiple_of(WORD_BYTES);
        let mut state = SEED_BYTES;
        let states = text
            .chunks_exact(block)
            .map(|chunk| {
                for word in chunk.chunks_exact(WORD_BYTES) {
                    let mut bytes = [0; WORD_BYTES];
                    bytes.copy_from_slice(word);
                    state = step(state, u64::from_le_bytes(bytes));
                }
                state
            })
            .collect();
        Self {
            unit: Unit::Bytes,
            block,
            states,
            length: text.len(),
        }
    }

    /// Hashes token ids.
    #[cfg(test)]
    pub fn of_tokens(tokens: &[u32], block: usize) -> Self {
        let mut hasher = TokenHasher::new(block);
        for &token in tokens {
            hasher.push(token);
        }
        hasher.finish()
    }
}

/// Hashes token ids as they are parsed, so that no list of them is kept.
pub struct TokenHasher {
    chain: TokenChain,
    hashes: PromptHashes,
    until_boundary: usize,
}

impl TokenHasher {
    pub fn new(block: usize) -> Self {
        Self::with_capacity(block, 0)
    }

    /// For a prompt of about `tokens` tokens.
    pub fn with_capacity(block: usize, tokens: usize) -> Self {
        let block = block.max(1);
        Self {
            chain: TokenChain::default(),
            hashes: PromptHashes {
                unit: Unit::Tokens,
                block,
                states: Vec::with_capacity(tokens / block),
                length: 0,
            },
            until_boundary: block,
        }
    }

    pub fn push(&mut self, token: u32) {
        self.extend(&[token]);
    }

    #[inline]
    pub fn extend(&mut self, mut tokens: &[u32]) {
        self.hashes.length += tokens.len();
        // Local, so that it stays in registers.
        let mut chain = self.chain;
        while tokens.len() >= self.until_boundary {
            let (block, rest) = tokens.split_at(self.until_boundary);
            block.iter().for_each(|&token| chain.push(token));
            self.hashes.states.push(chain.state());
            self.until_boundary = self.hashes.block;
            tokens = rest;
        }
        tokens.iter().for_each(|&token| chain.push(token));
        self.until_boundary -= tokens.len();
        self.chain = chain;
    }

    pub fn finish(self) -> PromptHashes {
        self.hashes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn states_agree_exactly_up_to_the_first_difference(
            a in proptest::collection::vec(0u32..4, 0..64),
            b in proptest::collection::vec(0u32..4, 0..64),
            block in 1usize..9,
        ) {
            let common = a.iter().zip(&b).take_while(|(x, y)| x == y).count();
            let (ha, hb) = (PromptHashes::of_tokens(&a, block), PromptHashes::of_tokens(&b, block));
            let equal = ha.states.iter().zip(&hb.states).take_while(|(x, y)| x == y).count();
            prop_assert_eq!(equal, common / block);
        }

        #[test]
        fn a_coarser_cut_has_the_same_states_at_its_boundaries(
            tokens in proptest::collection::vec(any::<u32>(), 0..64), factor in 1usize..5,
        ) {
            let (fine, coarse) =
                (PromptHashes::of_tokens(&tokens, 2), PromptHashes::of_tokens(&tokens, 2 * factor));
            for (i, state) in coarse.states.iter().enumerate() {
                prop_assert_eq!(*state, fine.states[(i + 1) * factor - 1]);
            }
        }
    }
}
