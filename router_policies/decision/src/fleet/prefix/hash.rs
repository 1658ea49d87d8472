//! Names of prompt prefixes: one 64-bit state for each block boundary of a prompt.
//!
//! The state after n units is a function of those n units alone, so two prompts have equal states
//! at a boundary exactly when they agree up to it (but for chance: 2⁻⁶⁴ a pair), whatever block
//! size they were cut into. Units are token ids, or bytes of text where the prompt is text.
//!
//! Token ids are chained in groups: the ids of a group are folded by themselves, two with one
//! multiplication, and only the fold depends on the group before. They are taken as the decimal
//! digits that stand in a request's body, so that no number has to be made of them. A prompt of
//! 100,000 tokens is scanned in half the time that way.
//!
//! Chains begin with keys that each process draws: states mean nothing outside it, and nobody can make
//! up prompts that are taken for each other, or that crowd one bucket of a table.
//!
//! Engines keep the KV of an adapter's prompts, and of prompts with a salt, apart from that of the same
//! tokens without. So the states of such a prompt are those of its tokens, disguised by what sets it
//! apart: see [`Namespace`].

use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;

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

/// What chains of token ids, their groups, and chains of text begin with; and what is mixed into the
/// words of text, so that none of them is one that a step would swallow the state with.
struct Keys {
    tokens: u64,
    group: u64,
    text: u64,
    word: u64,
    /// Draws the masks of namespaces.
    namespaces: RandomState,
}

static KEYS: LazyLock<Keys> = LazyLock::new(|| {
    let random = RandomState::new();
    Keys {
        tokens: random.hash_one(1),
        group: random.hash_one(2),
        text: random.hash_one(3),
        word: random.hash_one(4),
        namespaces: RandomState::new(),
    }
});

/// What sets a prompt's KV apart from that of the same tokens in other prompts: the LoRA adapter that it is
/// for, and what its client salts the cache with. By default nothing does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Namespace {
    /// Put over every state; equal names have equal masks, and those of others differ in half of their bits.
    mask: u64,
}

impl Namespace {
    /// The namespace of an adapter's name and of salts, in that order; none or empty where there is none.
    pub fn of(adapter: Option<&str>, salts: [Option<&str>; 2]) -> Self {
        let [first, second] = salts;
        let parts = [adapter, first, second].map(|part| part.filter(|part| !part.is_empty()));
        if parts.iter().all(Option::is_none) {
            return Self::default();
        }
        Self {
            mask: KEYS.namespaces.hash_one(parts),
        }
    }

    /// Whether prompts of it share nothing with those that name no adapter and no salt.
    pub fn is_apart(self) -> bool {
        self != Self::default()
    }

    /// A chain's state as prompts of this namespace have it.
    #[inline(always)]
    pub fn state(self, of_tokens: u64) -> u64 {
        of_tokens ^ self.mask
    }
}

const MIX_STATE: u64 = 0xa076_1d64_78bd_642f;
const MIX_UNIT: u64 = 0xe703_7ed1_a0b4_28db;

/// One step of the chain: a folded 64 × 64 multiplication, as in wyhash.
#[inline(always)]
pub fn step(state: u64, unit: u64) -> u64 {
    let product = u128::from(state ^ MIX_STATE) * u128::from(unit ^ MIX_UNIT);
    (product as u64) ^ ((product >> 64) as u64)
}

/// One step for two units.
#[inline(always)]
fn step_two(state: u64, first: u64, second: u64) -> u64 {
    step(state ^ second, first)
}

/// Ids from here on have more than eight digits.
const LONG_TOKEN: u32 = 100_000_000;

/// A token id as chains take it: its eight decimal digits, one a byte, the last in the highest byte.
/// Larger ids do not look like digits.
#[inline]
pub fn digits(token: u32) -> u64 {
    let long = token >= LONG_TOKEN;
    let token = u64::from(token);
    if long {
        return !token;
    }
    // Halved three times, all parts at once; the factors divide by 100 and by 10.
    let fours = (token / 10_000) | (token % 10_000) << 32;
    let hundreds = ((fours * 10_486) >> 20) & 0x0000_007f_0000_007f;
    let twos = hundreds | (fours - hundreds * 100) << 16;
    let tens = ((twos * 103) >> 10) & 0x000f_000f_000f_000f;
    tens | (twos - tens * 10) << 8
}

/// Tokens a group of a chain.
pub const GROUP_TOKENS: usize = 8;
type Group = [u64; GROUP_TOKENS];
/// Stands for the second token of a pair that has only one; no token's digits.
const NO_TOKEN: u64 = u64::MAX;

/// The chain over a prompt's token ids, at any of its tokens.
#[derive(Clone, Copy, Debug)]
pub struct TokenChain {
    /// After the last full group.
    groups: u64,
    /// Of the pairs of tokens since.
    fold: u64,
    /// The token since the last pair.
    odd: u64,
    /// What folds begin with; here because it is needed for every group.
    group_key: u64,
    folded: u8,
}

impl Default for TokenChain {
    fn default() -> Self {
        Self {
            groups: KEYS.tokens,
            fold: KEYS.group,
            odd: NO_TOKEN,
            group_key: KEYS.group,
            folded: 0,
        }
    }
}

impl TokenChain {
    /// Takes a token's [`digits`].
    #[inline(always)]
    pub fn push(&mut self, token: u64) {
        if self.folded.is_multiple_of(2) {
            self.odd = token;
        } else {
            self.fold = step_two(self.fold, self.odd, token);
        }
        self.folded += 1;
        if usize::from(self.folded) == GROUP_TOKENS {
            *self = Self {
                groups: step(self.groups, self.fold),
                fold: self.group_key,
                odd: NO_TOKEN,
                folded: 0,
                ..*self
            };
        }
    }

    /// Tokens since the last full group.
    #[inline(always)]
    fn since_group(&self) -> usize {
        usize::from(self.folded)
    }

    /// The tokens that end the group that has begun, whole groups, and what is left.
    #[inline(always)]
    fn by_groups<'a>(&self, tokens: &'a [u64]) -> (&'a [u64], &'a [Group], &'a [u64]) {
        let to_group = (GROUP_TOKENS - self.since_group()) % GROUP_TOKENS;
        let (head, rest) = tokens.split_at(to_group.min(tokens.len()));
        let (groups, tail) = rest.as_chunks();
        (head, groups, tail)
    }

    #[inline(always)]
    fn extend(&mut self, tokens: &[u64]) {
        let (head, groups, tail) = self.by_groups(tokens);
        head.iter().for_each(|&token| self.push(token));
        for group in groups {
            let (pairs, _) = group.as_chunks();
            let fold = pairs.iter().fold(self.group_key, |fold, &[first, second]| {
                step_two(fold, first, second)
            });
            self.groups = step(self.groups, fold);
        }
        tail.iter().for_each(|&token| self.push(token));
    }

    /// Appends the state after each token.
    #[inline(always)]
    fn extend_each(&mut self, tokens: &[u64], states: &mut Vec<u64>) {
        let (head, groups, tail) = self.by_groups(tokens);
        states.extend(head.iter().map(|&token| self.pushed(token)));
        for group in groups {
            let mut fold = self.group_key;
            let mut of_group = Group::default();
            let (pairs, _) = group.as_chunks();
            for (states, &[first, second]) in of_group.as_chunks_mut().0.iter_mut().zip(pairs) {
                let odd = step_two(fold, first, NO_TOKEN);
                fold = step_two(fold, first, second);
                *states = [step(self.groups, odd), step(self.groups, fold)];
            }
            self.groups = of_group[GROUP_TOKENS - 1];
            states.extend_from_slice(&of_group);
        }
        states.extend(tail.iter().map(|&token| self.pushed(token)));
    }

    fn pushed(&mut self, token: u64) -> u64 {
        self.push(token);
        self.state()
    }

    /// The name of the tokens so far.
    #[inline(always)]
    pub fn state(&self) -> u64 {
        match self.folded {
            0 => self.groups,
            n if n % 2 == 0 => step(self.groups, self.fold),
            _ => step(self.groups, step_two(self.fold, self.odd, NO_TOKEN)),
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
    /// Of text: how many pictures are in it, whose tokens are only assumed.
    pub pictures: u64,
    /// That the states are of.
    pub namespace: Namespace,
}

impl PromptHashes {
    /// A prompt whose states are those of its units alone, as a prompt of `namespace`.
    #[must_use]
    pub fn within(mut self, namespace: Namespace) -> Self {
        debug_assert!(!self.namespace.is_apart());
        if namespace.is_apart() {
            for state in &mut self.states {
                *state = namespace.state(*state);
            }
            self.namespace = namespace;
        }
        self
    }

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

    /// The same prompt, cut into blocks of about `tokens` tokens where its own are smaller.
    pub fn thinned(&self, tokens: usize) -> Self {
        let units = match self.unit {
            Unit::Tokens => tokens,
            Unit::Bytes => tokens * BYTES_PER_TOKEN as usize,
        };
        let stride = (units / self.block.max(1)).max(1);
        Self {
            unit: self.unit,
            block: self.block * stride,
            states: self
                .states
                .iter()
                .copied()
                .skip(stride - 1)
                .step_by(stride)
                .collect(),
            length: self.length,
            pictures: self.pictures,
            namespace: self.namespace,
        }
    }

    /// Hashes text, by blocks of `block_tokens` tokens' worth of bytes.
    pub fn of_text(text: &[u8], block_tokens: usize) -> Self {
        let block = (block_tokens.max(1) * BYTES_PER_TOKEN as usize).next_multiple_of(WORD_BYTES);
        let (mut state, word_key) = (KEYS.text, KEYS.word);
        let mut words = |words: &[[u8; WORD_BYTES]]| {
            for word in words {
                state = step(state, u64::from_le_bytes(*word) ^ word_key);
            }
            state
        };
        let states = text
            .chunks_exact(block)
            .map(|chunk| {
                // Eight words are a loop that the compiler unrolls.
                let (eights, rest) = chunk.as_chunks::<{ 8 * WORD_BYTES }>();
                for eight in eights {
                    words(eight.as_chunks().0);
                }
                words(rest.as_chunks().0)
            })
            .collect();
        Self {
            unit: Unit::Bytes,
            block,
            states,
            length: text.len(),
            pictures: 0,
            namespace: Namespace::default(),
        }
    }

    /// The prompt of `tokens`, token ids, hashed in blocks of `block` tokens ([`Fleet::token_block`]).
    ///
    /// [`Fleet::token_block`]: crate::fleet::Fleet::token_block
    pub fn of_tokens(tokens: &[u32], block: usize) -> Self {
        let mut hasher = TokenHasher::new(block);
        hasher.extend(tokens);
        hasher.finish()
    }
}

/// Hashes token ids as they are parsed, so that no list of them is kept.
pub struct TokenHasher {
    chain: TokenChain,
    hashes: PromptHashes,
    until_boundary: usize,
    /// The largest id's [`digits`], the first one in the highest byte; −1 before the first id.
    largest_digits: i64,
    /// The largest of the ids that have more digits than fit there.
    largest_long: Option<u32>,
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
                pictures: 0,
                namespace: Namespace::default(),
            },
            until_boundary: block,
            largest_digits: -1,
            largest_long: None,
        }
    }

    /// Goes on behind a prompt of which these are the states after each block; a block must be of
    /// whole groups ([`GROUP_TOKENS`]). What the largest id was is not known then.
    pub fn after(block: usize, states: Vec<u64>) -> Self {
        let mut hasher = Self::new(block);
        debug_assert!(hasher.hashes.block.is_multiple_of(GROUP_TOKENS));
        hasher.chain.groups = states.last().copied().unwrap_or(hasher.chain.groups);
        hasher.hashes.length = states.len() * hasher.hashes.block;
        hasher.hashes.states = states;
        hasher
    }

    pub fn push(&mut self, token: u32) {
        self.extend_digits(&[digits(token)]);
        if token >= LONG_TOKEN {
            self.largest_long = self.largest_long.max(Some(token));
        }
    }

    /// The largest token id so far.
    pub fn largest(&self) -> Option<u32> {
        let digits = u64::try_from(self.largest_digits).ok()?;
        let short = digits
            .to_be_bytes()
            .iter()
            .fold(0, |value, &digit| value * 10 + u32::from(digit));
        Some(self.largest_long.unwrap_or(short))
    }

    pub fn extend(&mut self, tokens: &[u32]) {
        let mut several = [0; 64];
        for tokens in tokens.chunks(several.len()) {
            let several = &mut several[..tokens.len()];
            for (digits_of, &token) in several.iter_mut().zip(tokens) {
                *digits_of = digits(token);
            }
            self.extend_digits(several);
            let long = tokens.iter().filter(|token| **token >= LONG_TOKEN).max();
            self.largest_long = self.largest_long.max(long.copied());
        }
    }

    /// Tokens since the last full group of the chain: what is best fed so that whole groups follow.
    pub fn since_group(&self) -> usize {
        self.chain.since_group()
    }

    /// Takes tokens by their [`digits`]. Inlined, to be compiled for the instructions of its caller.
    #[inline(always)]
    pub fn extend_digits(&mut self, mut tokens: &[u64]) {
        self.hashes.length += tokens.len();
        // Digits in reading order compare as the numbers do. What stands for a long id is none.
        self.largest_digits = tokens.iter().fold(self.largest_digits, |largest, token| {
            let value = token.swap_bytes() as i64;
            let is_short = value & 0x8080_8080_8080_8080_u64 as i64 == 0;
            largest.max(if is_short { value } else { 0 })
        });
        // Local, so that it stays in registers.
        let mut chain = self.chain;
        if self.hashes.block == 1 {
            chain.extend_each(tokens, &mut self.hashes.states);
            self.chain = chain;
            return;
        }
        while tokens.len() >= self.until_boundary {
            let (block, rest) = tokens.split_at(self.until_boundary);
            chain.extend(block);
            self.hashes.states.push(chain.state());
            self.until_boundary = self.hashes.block;
            tokens = rest;
        }
        chain.extend(tokens);
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

    #[test]
    fn two_chains_of_tokens_differ_wherever_one_token_does() {
        let tokens: Vec<u32> = (0..40).collect();
        let states = PromptHashes::of_tokens(&tokens, 1).states;
        for at in 0..tokens.len() {
            let mut other = tokens.clone();
            other[at] += 1_000;
            let others = PromptHashes::of_tokens(&other, 1).states;
            assert_eq!(states[..at], others[..at]);
            for (i, state) in others.iter().enumerate().skip(at) {
                assert!(!states.contains(state), "token {at}, state {i}");
            }
        }
    }

    /// One word would take the whole state with it, if it were known.
    #[test]
    fn no_word_that_is_known_makes_different_texts_the_same() {
        let text = |begin: &[u8; 8]| [*begin, MIX_UNIT.to_le_bytes(), *b"and more"].concat();
        let (a, b) = (text(b"a prefix"), text(b"and text"));
        let (a, b) = (PromptHashes::of_text(&a, 2), PromptHashes::of_text(&b, 2));
        assert_eq!(a.states.len(), 3);
        assert!(a.states.iter().all(|state| !b.states.contains(state)));
    }

    #[test]
    fn prompts_of_another_adapter_or_salt_share_no_state_and_those_of_the_same_share_all() {
        let tokens: Vec<u32> = (0..40).collect();
        let plain = || PromptHashes::of_tokens(&tokens, 4);
        let of = |adapter, salt| plain().within(Namespace::of(adapter, [salt, None]));
        assert_eq!(of(None, None), plain());
        assert_eq!(of(Some(""), Some("")), plain(), "empty names are none");
        let others = [
            of(None, None),
            of(Some("sql"), None),
            of(None, Some("sql")),
            of(Some("sql"), Some("a")),
        ];
        for (i, one) in others.iter().enumerate() {
            for other in &others[..i] {
                assert!(one.states.iter().all(|state| !other.states.contains(state)));
            }
        }
        assert_eq!(of(Some("sql"), None), of(Some("sql"), None));
        assert_eq!(
            of(Some("sql"), None).thinned(8),
            plain()
                .thinned(8)
                .within(Namespace::of(Some("sql"), [None; 2]))
        );
    }

    proptest! {
        #[test]
        fn digits_are_those_that_are_written(token in prop_oneof![0u32..1_000, any::<u32>()]) {
            let text = format!("{token:08}");
            let mut word = [0; 8];
            if let Ok(written) = <[u8; 8]>::try_from(text.as_bytes()) {
                word = written.map(|digit| digit - b'0');
            }
            match token {
                0..100_000_000 => prop_assert_eq!(digits(token), u64::from_le_bytes(word)),
                _ => prop_assert!(digits(token).to_le_bytes().iter().any(|&digit| digit > 9)),
            }
        }

        #[test]
        fn the_largest_id_is_known(
            tokens in proptest::collection::vec(prop_oneof![0u32..200_000, any::<u32>()], 0..80),
        ) {
            let mut hasher = TokenHasher::new(4);
            hasher.extend(&tokens);
            prop_assert_eq!(hasher.largest(), tokens.iter().copied().max());
            let mut one_by_one = TokenHasher::new(4);
            tokens.iter().for_each(|&token| one_by_one.push(token));
            prop_assert_eq!(one_by_one.largest(), tokens.iter().copied().max());
        }

        #[test]
        fn a_chain_does_not_depend_on_how_it_is_fed(
            tokens in proptest::collection::vec(any::<u32>(), 0..80),
            block in 1usize..20,
            piece in 1usize..20,
        ) {
            let mut hasher = TokenHasher::new(block);
            let units: Vec<u64> = tokens.iter().map(|&token| digits(token)).collect();
            units.chunks(piece).for_each(|piece| hasher.extend_digits(piece));
            prop_assert_eq!(hasher.finish(), PromptHashes::of_tokens(&tokens, block));
        }

        #[test]
        fn a_prompt_that_goes_on_behind_anothers_states_is_hashed_as_a_whole(
            tokens in proptest::collection::vec(any::<u32>(), 0..120),
            groups in 1usize..4,
            share in 0.0f64..=1.0,
        ) {
            let block = groups * GROUP_TOKENS;
            let whole = PromptHashes::of_tokens(&tokens, block);
            let known = (whole.states.len() as f64 * share) as usize;
            let mut hasher = TokenHasher::after(block, whole.states[..known].to_vec());
            hasher.extend(&tokens[known * block..]);
            prop_assert_eq!(hasher.finish(), whole);
        }

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
