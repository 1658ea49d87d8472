//! What workers are believed to hold of prompts: from KV events where they come, else from the estimate.

use super::admission::cached::Cached;
use super::log::PrefixSource;
use super::prefix::estimate::{EstimateTree, strided};
use super::prefix::events::Likely;
use super::prefix::hash::{PromptHashes, Unit};
use super::worker::Worker;
use super::{ESTIMATE_BLOCK_TOKENS, State};
use crate::policy::Route;
use smallvec::{SmallVec, smallvec};

impl State {
    /// Tokens that a worker is believed to have in its cache, of all prompts together. Whatever changes
    /// that marks the worker.
    pub(super) fn kept_tokens(&self, slot: usize, worker: &Worker) -> u64 {
        let mut tokens = self.text_tree.held_blocks(slot) * ESTIMATE_BLOCK_TOKENS as u64;
        tokens += if worker.needs_estimate() {
            let trees = self.token_trees.iter();
            let its = trees.filter(|(block, _)| *block == worker.estimate_block);
            its.map(|(block, tree)| tree.held_blocks(slot) * *block as u64)
                .sum::<u64>()
        } else {
            (self.exact.device_blocks(slot) * worker.page_size) as u64
        };
        tokens
    }

    /// How much of the prompt is cached on each worker. The facts must be filled in.
    pub(super) fn cached_of(&mut self, prompt: &PromptHashes) -> Cached {
        self.facts
            .iter_mut()
            .for_each(|facts| facts.cached_tokens = 0);
        self.fill_cached(prompt);
        self.cached_by_facts()
    }

    /// The same, of the prompt that the facts are filled in for.
    pub(super) fn cached_by_facts(&self) -> Cached {
        let by_slot = self.facts.iter().map(|facts| facts.cached_tokens);
        self.admission.cached(by_slot)
    }

    pub(super) fn fill_cached(&mut self, prompt: &PromptHashes) {
        let count = self.workers.len();
        self.likely_tokens.clear();
        self.likely_tokens.resize(count, 0);
        let mut apply = |tree: &EstimateTree,
                         states: &[u64],
                         block: usize,
                         tokens: Option<usize>| {
            self.held_blocks.clear();
            self.held_blocks.resize(count, 0);
            tree.matched(states, &mut self.held_blocks);
            for (facts, &held) in self.facts.iter_mut().zip(&self.held_blocks) {
                let worker = self.workers[facts.slot].as_ref();
                let likely = &mut self.likely_tokens[facts.slot];
                *likely = (*likely).max(held as usize * block);
                if held > 0
                    && worker.is_some_and(|w| {
                        tokens.is_none_or(|b| w.estimate_block == b && w.needs_estimate_of(prompt))
                    })
                {
                    // The last token is always computed, so that there is something to sample from.
                    let whole = prompt.to_tokens(held as usize * block);
                    facts.cached_tokens = whole.min(prompt.tokens().saturating_sub(1));
                }
            }
        };
        match prompt.unit {
            Unit::Bytes => apply(&self.text_tree, &prompt.states, prompt.block, None),
            Unit::Tokens => {
                for (block, tree) in &self.token_trees {
                    if block % prompt.block == 0 {
                        let states = strided(prompt, block / prompt.block);
                        apply(tree, &states, *block, Some(*block));
                    }
                }
                self.fill_exact(prompt);
            }
        }
    }

    fn fill_exact(&mut self, prompt: &PromptHashes) {
        let mut by_page: SmallVec<[(usize, SmallVec<[Likely; 8]>); 1]> = SmallVec::new();
        for (slot, worker) in self.workers.iter().enumerate() {
            let Some(worker) = worker else { continue };
            // A prompt that waits is kept in larger blocks than pages may be.
            let page = worker.page_size.max(prompt.block);
            let fits = page % prompt.block == 0 && page % worker.page_size == 0;
            if worker.prefix_source != PrefixSource::Events || !fits {
                continue;
            }
            // What the estimate says is mostly what events tell.
            let likely = (slot as u32, self.likely_tokens[slot] / page);
            match by_page.iter_mut().find(|(other, _)| *other == page) {
                Some((_, slots)) => slots.push(likely),
                None => by_page.push((page, smallvec![likely])),
            }
        }
        let most = prompt.tokens().saturating_sub(1);
        for (page, slots) in by_page {
            let facts = &mut self.facts;
            self.exact
                .matched(prompt, page / prompt.block, &slots, |slot, pages| {
                    // As engines do: the last token is computed, in a whole page.
                    let whole = (pages * page) as u64;
                    let exact = whole.min(most / page as u64 * page as u64);
                    // More is there already only where the estimate counts as well.
                    let cached = &mut facts[slot as usize].cached_tokens;
                    *cached = exact.max(*cached);
                });
        }
    }

    /// Notes in the estimate that the route's workers hold the prompt; returns what is new to it of the
    /// answering and of the prefill worker.
    pub(super) fn note_prompt(&mut self, prompt: &PromptHashes, route: Route) -> [Option<u64>; 2] {
        let mut insert = |slot: usize| {
            let mut new = None;
            self.workers.marks.add(slot);
            let Some(worker) = &self.workers[slot] else {
                return new;
            };
            if !worker.keeps_prefixes {
                return new;
            }
            match prompt.unit {
                Unit::Bytes => new = self.text_tree.insert(slot, &prompt.states),
                Unit::Tokens => {
                    for (block, tree) in &mut self.token_trees {
                        // Beside KV events too: of these some may be missing.
                        let is_its = *block == worker.estimate_block;
                        if is_its && *block % prompt.block == 0 {
                            new = tree.insert(slot, &strided(prompt, *block / prompt.block));
                        }
                    }
                }
            }
            new
        };
        let answering = insert(route.answering());
        let prefilling = match route.prefilling() {
            slot if slot == route.answering() => None,
            slot => insert(slot),
        };
        [answering, prefilling]
    }

    /// Takes back from the estimate what a request added that its worker did not run.
    pub(super) fn retract_prompt(&mut self, slot: usize, new: Option<u64>) {
        let Some(new) = new else { return };
        self.workers.marks.add(slot);
        for (_, tree) in &mut self.token_trees {
            tree.retract(slot, new);
        }
        self.text_tree.retract(slot, new);
    }

    pub(super) fn set_estimate_capacity(&mut self, slot: usize, block: usize, tokens: u64) {
        self.workers.marks.add(slot);
        let blocks = tokens / block as u64;
        for (size, tree) in &mut self.token_trees {
            if *size == block {
                tree.set_capacity(slot, blocks);
            }
        }
        let text_blocks = tokens / ESTIMATE_BLOCK_TOKENS as u64;
        self.text_tree.set_capacity(slot, text_blocks);
    }

    /// Brings the estimates back within the worker's capacity.
    pub(super) fn evict_excess(&mut self, slot: usize) {
        self.workers.marks.add(slot);
        for (_, tree) in &mut self.token_trees {
            tree.evict_excess(slot);
        }
        self.text_tree.evict_excess(slot);
    }

    pub(super) fn forget_prefixes(&mut self, slot: usize) {
        self.forget_estimate(slot);
        self.exact.clear(slot);
    }

    pub(super) fn forget_estimate(&mut self, slot: usize) {
        self.workers.marks.add(slot);
        for (_, tree) in &mut self.token_trees {
            tree.clear(slot);
        }
        self.text_tree.clear(slot);
    }
}
