//! Names of prompt prefixes: one 64-bit state for each block boundary of a prompt.
//!
//! The state after n units is a function of those n units alone, so two prompts have equal states
//! at a boundary exactly when they agree up to it (but for chance: 2⁻⁶⁴ a pair), whatever block
//! size they were cut into. Units are token ids, or bytes of text where the prompt is text.

/// What a prompt is counted in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unit {
    Tokens,
    /// Raw bytes of the prompt as they stand in the request's JSON.
    Bytes,
}

/// Bytes of text that stand for one token until the engine says otherwise.
pub const BYTES_PER_TOKEN: u64 = 4;

/// Bytes hashed at once; a text block is a multiple of it.
const WORD_BYTES: usize = 8;

const SEED_TOKENS: u64 = 0x9e37_79b9_7f4a_7c15;
const SEED_BYTES: u64 = 0xd1b5_4a32_d192_ed03;
const MIX_STATE: u64 = 0xa076_1d64_78bd_642f;
const MIX_UNIT: u64 = 0xe703_7ed1_a0b4_28db;

/// One step of the chain: a folded 64 × 64 multiplication, as in wyhash.
#[inline]
pub fn step(state: u64, unit: u64) -> u64 {
    let product = u128::from(state ^ MIX_STATE) * u128::from(unit ^ MIX_UNIT);
    (product as u64) ^ ((product >> 64) as u64)
}

/// The state before any token.
pub fn root_state() -> u64 {
    SEED_TOKENS
}

/// A prompt as the prefix index sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
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
    state: u64,
    hashes: PromptHashes,
    until_boundary: usize,
}

impl TokenHasher {
    pub fn new(block: usize) -> Self {
        let block = block.max(1);
        Self {
            state: SEED_TOKENS,
            hashes: PromptHashes {
                unit: Unit::Tokens,
                block,
                states: Vec::new(),
                length: 0,
            },
            until_boundary: block,
        }
    }

    #[inline]
    pub fn push(&mut self, token: u32) {
        self.state = step(self.state, u64::from(token));
        self.until_boundary -= 1;
        if self.until_boundary == 0 {
            self.hashes.states.push(self.state);
            self.until_boundary = self.hashes.block;
        }
        self.hashes.length += 1;
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
