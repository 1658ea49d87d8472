//! Block ids of what is sent, and what an endless cache would hold of it.

use crate::ids::{IdMap, mix};
use crate::requests::Requests;
use decision::fleet::admission::footprint::partition;
use decision::fleet::prefix::hash::{GROUP_TOKENS, PromptHashes, TokenHasher};
use std::collections::HashMap;
use std::sync::Arc;

/// Ids of one request in one play.
pub struct Prompt {
    /// Full blocks of the prompt, then of the answer to come.
    pub stream: Arc<[u64]>,
    pub full_blocks: usize,
    /// The started block at the prompt's end.
    pub tail: Option<u64>,
    pub input_tokens: u64,
}

/// Makes prompts, and knows every block that was ever sent or answered.
pub struct Prompts {
    requests: Arc<Requests>,
    splice_outputs: bool,
    seen: IdMap<()>,
    answers: u64,
}

impl Prompts {
    pub fn new(requests: Arc<Requests>, splice_outputs: bool) -> Self {
        Self {
            requests,
            splice_outputs,
            seen: IdMap::default(),
            answers: 0,
        }
    }

    /// The prompt of a request in the `play`-th play of its conversation, whose ids no other play has,
    /// and of the `output_tokens` that will answer it.
    pub fn make(&mut self, request: usize, play: u32, output_tokens: u64) -> Prompt {
        let planned = &self.requests.all[request];
        let full_blocks = self.requests.full_blocks(request);
        let of_play = |&block: &u64| match play {
            0 => block,
            play => mix(block, u64::from(play)),
        };
        let size = self.requests.block_tokens;
        let end = ((planned.input_tokens + output_tokens) / size) as usize;
        let is_whole = output_tokens == planned.output_tokens;
        let next = (self.splice_outputs && is_whole)
            .then(|| self.requests.continued_by(request))
            .flatten();
        let mut stream: Vec<u64> = planned.blocks[..full_blocks].iter().map(of_play).collect();
        match next {
            Some(next) => stream.extend(next.blocks[full_blocks..end].iter().map(of_play)),
            None => {
                self.answers += 1;
                let answer = mix(self.answers, u64::MAX);
                stream.extend((full_blocks..end).map(|at| mix(answer, at as u64)));
            }
        }
        Prompt {
            stream: stream.into(),
            full_blocks,
            tail: planned.blocks.get(full_blocks).map(of_play),
            input_tokens: planned.input_tokens,
        }
    }

    /// Tokens of the prompt that were sent or answered before; from now on all of it was.
    pub fn best_cached_tokens(&mut self, prompt: &Prompt) -> u64 {
        let blocks = &prompt.stream[..prompt.full_blocks];
        // Equal ids mean equal prefixes: what was seen is a beginning.
        let seen = blocks.partition_point(|block| self.seen.contains_key(block));
        self.seen
            .extend(blocks[seen..].iter().map(|&block| (block, ())));
        let tokens = seen as u64 * self.requests.block_tokens;
        tokens.min(prompt.input_tokens.saturating_sub(1))
    }

    /// The prompt was answered to its end.
    pub fn answered(&mut self, prompt: &Prompt) {
        let blocks = &prompt.stream[prompt.full_blocks..];
        self.seen.extend(blocks.iter().map(|&block| (block, ())));
    }
}

/// Tokens that stand for a block, by their place in it. All are above what [`digits`] spells out, so
/// that they are hashed at once.
///
/// [`digits`]: decision::fleet::prefix::hash::digits
fn tokens_of(block: u64, count: u64) -> impl Iterator<Item = u32> {
    (0..count as u32)
        .map(move |at| 0x8000_0000 | (block as u32).wrapping_add(at.wrapping_mul(0x9e37_79b1)))
}

/// A block's tokens.
pub fn block_tokens(blocks: &[u64], size: u64) -> Vec<u32> {
    let each = blocks.iter().flat_map(|&block| tokens_of(block, size));
    each.collect()
}

/// The last prompt of a session and play: its blocks, and the states after them.
type Last = (Arc<[u64]>, PromptHashes);

/// Prompts as the router hashes them. A session's next prompt mostly begins with all of its last, so
/// that only the rest is hashed.
#[derive(Default)]
pub struct Hashed {
    last: HashMap<(usize, u32), Last>,
}

impl Hashed {
    /// Hashes a prompt of the `of.1`-th play of session `of.0` in blocks of `block` tokens; a block of the
    /// prompt has `size`. No other prompt of that session comes after the one that `is_last`.
    pub fn make(
        &mut self,
        of: (usize, u32),
        is_last: bool,
        prompt: &Prompt,
        block: usize,
        size: u64,
    ) -> PromptHashes {
        let blocks = &prompt.stream[..prompt.full_blocks];
        let can_go_on = block.is_multiple_of(GROUP_TOKENS) && (size as usize).is_multiple_of(block);
        let known = self.last.remove(&of).filter(|_| can_go_on);
        let known = known.filter(|(_, hashes)| hashes.block == block);
        let hashes = match known {
            Some((last, hashes)) => {
                // Equal ids mean equal prefixes.
                let most = (hashes.length as u64 / size) as usize;
                let most = most.min(last.len()).min(blocks.len());
                let shared = partition(0, most, |at| last[at] == blocks[at]);
                let mut states = Vec::with_capacity(prompt.input_tokens as usize / block);
                states.extend_from_slice(&hashes.states[..shared * (size as usize / block)]);
                rest(TokenHasher::after(block, states), prompt, shared, size)
            }
            None => hashes(prompt, block, size),
        };
        if !is_last && can_go_on {
            self.last
                .insert(of, (Arc::clone(&prompt.stream), hashes.clone()));
        }
        hashes
    }
}

/// A prompt as the router hashes it.
fn hashes(prompt: &Prompt, block: usize, size: u64) -> PromptHashes {
    let hasher = TokenHasher::with_capacity(block, prompt.input_tokens as usize);
    rest(hasher, prompt, 0, size)
}

/// Hashes what comes after a prompt's first `known` blocks.
fn rest(mut hasher: TokenHasher, prompt: &Prompt, known: usize, size: u64) -> PromptHashes {
    let mut tokens = Vec::with_capacity(size as usize);
    let full = prompt.stream[known..prompt.full_blocks]
        .iter()
        .map(|&b| (b, size));
    let rest = prompt.input_tokens - prompt.full_blocks as u64 * size;
    for (block, count) in full.chain(prompt.tail.map(|tail| (tail, rest))) {
        tokens.clear();
        tokens.extend(tokens_of(block, count).map(|token| !u64::from(token)));
        hasher.extend_digits(&tokens);
    }
    hasher.finish()
}
