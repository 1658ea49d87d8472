//! The cache against a plain model of it, under any interleaving of operations.

use decision::fleet::prefix::events::Tier;
use proptest::prelude::*;
use simulator::{Cache, Change, Eviction, ROOT};
use std::collections::HashSet;

/// A prompt of a family that branches: the first blocks are shared, each branch has its own rest.
fn prompt(branch: u64, length: usize) -> Vec<u64> {
    let shared = [4, 10, 16][(branch % 3) as usize];
    (0..length as u64)
        .map(|at| {
            let of = match at {
                at if at < 4 => 1,
                at if at < shared => 2 + branch % 3,
                _ => 10 + branch,
            };
            of.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ at.wrapping_mul(0xd1b5_4a32_d192_ed03)
        })
        .collect()
}

#[derive(Clone, Debug)]
enum Operation {
    Insert { branch: u64, length: usize },
    Find { branch: u64, length: usize },
    Reload { branch: u64, length: usize },
    Lock { branch: u64, length: usize },
    Unlock { which: usize },
    Evict { blocks: u64 },
}

fn operation() -> impl Strategy<Value = Operation> {
    let place = || (0u64..6, 1usize..40);
    prop_oneof![
        4 => place().prop_map(|(branch, length)| Operation::Insert { branch, length }),
        2 => place().prop_map(|(branch, length)| Operation::Find { branch, length }),
        1 => place().prop_map(|(branch, length)| Operation::Reload { branch, length }),
        1 => place().prop_map(|(branch, length)| Operation::Lock { branch, length }),
        1 => (0usize..8).prop_map(|which| Operation::Unlock { which }),
        2 => (1u64..30).prop_map(|blocks| Operation::Evict { blocks }),
    ]
}

/// What KV events say is held: on the device, and in host memory.
#[derive(Default)]
struct Told {
    device: HashSet<u64>,
    host: HashSet<u64>,
}

impl Told {
    fn tier(&mut self, tier: Tier) -> &mut HashSet<u64> {
        match tier {
            Tier::Device => &mut self.device,
            Tier::Host => &mut self.host,
        }
    }

    fn take(&mut self, cache: &mut Cache) {
        let mut changes = Vec::new();
        cache.take_changes(&mut changes);
        for change in changes {
            match change {
                Change::Stored {
                    tier,
                    parent,
                    blocks,
                } => {
                    let held = self.tier(tier);
                    assert!(parent.is_none_or(|parent| held.contains(&parent)));
                    for block in blocks {
                        assert!(held.insert(block), "stored twice");
                    }
                }
                Change::Removed { tier, blocks } => {
                    for block in blocks {
                        let was_there = self.tier(tier).remove(&block);
                        assert!(was_there, "removed without being there");
                    }
                }
            }
        }
    }

    /// Blocks at the beginning that the device holds.
    fn beginning(&self, blocks: &[u64]) -> usize {
        let held = |block: &&u64| self.device.contains(block);
        blocks.iter().take_while(held).count()
    }

    /// Blocks at the beginning that either tier holds.
    fn anywhere(&self, blocks: &[u64]) -> usize {
        let held = |block: &&u64| self.device.contains(block) || self.host.contains(block);
        blocks.iter().take_while(held).count()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn a_cache_holds_what_its_events_say(
        operations in prop::collection::vec(operation(), 1..120),
        by_block in any::<bool>(),
        host in prop_oneof![Just(0u64), Just(30), Just(1000)],
        eviction in prop_oneof![
            Just(Eviction::Lru), Just(Eviction::Lfu), Just(Eviction::Slru), Just(Eviction::Fifo)
        ],
    ) {
        let mut cache = Cache::new(eviction, by_block, host, true);
        let mut told = Told::default();
        let mut locked: Vec<(u32, Vec<u64>)> = Vec::new();
        for operation in operations {
            match operation {
                Operation::Insert { branch, length } => {
                    let blocks = prompt(branch, length);
                    cache.insert(&blocks);
                    told.take(&mut cache);
                    prop_assert_eq!(told.beginning(&blocks), length);
                }
                Operation::Find { branch, length } => {
                    let blocks = prompt(branch, length);
                    let peeked = cache.peek(&blocks);
                    let found = cache.find(&blocks);
                    prop_assert_eq!(found.device_blocks, told.beginning(&blocks));
                    prop_assert_eq!(found.device_blocks + found.host_blocks, peeked);
                    prop_assert_eq!(peeked, told.anywhere(&blocks));
                    prop_assert!(host > 0 || found.host_blocks == 0);
                }
                Operation::Reload { branch, length } => {
                    let blocks = prompt(branch, length);
                    let found = cache.find(&blocks);
                    cache.reload(found.host_node);
                    told.take(&mut cache);
                    let held = found.device_blocks + found.host_blocks;
                    prop_assert_eq!(told.beginning(&blocks), held);
                }
                Operation::Lock { branch, length } => {
                    let blocks = prompt(branch, length);
                    let found = cache.find(&blocks);
                    cache.lock(found.node);
                    if found.node != ROOT {
                        locked.push((found.node, blocks[..found.device_blocks].to_vec()));
                    }
                }
                Operation::Unlock { which } => {
                    if !locked.is_empty() {
                        let (node, _) = locked.swap_remove(which % locked.len());
                        cache.unlock(node);
                    }
                }
                Operation::Evict { blocks } => {
                    let (before, evictable) = (cache.device_blocks(), cache.evictable_blocks());
                    let freed = cache.evict(blocks);
                    told.take(&mut cache);
                    prop_assert!(freed >= blocks.min(evictable));
                    prop_assert!(!by_block || freed == blocks.min(evictable));
                    prop_assert_eq!(cache.device_blocks(), before - freed);
                }
            }
            told.take(&mut cache);
            prop_assert_eq!(cache.device_blocks(), told.device.len() as u64);
            prop_assert_eq!(cache.host_blocks(), told.host.len() as u64);
            prop_assert!(cache.host_blocks() <= host);
            for (_, blocks) in &locked {
                prop_assert_eq!(told.beginning(blocks), blocks.len(), "locked, and evicted");
            }
            let distinct: HashSet<u64> = locked.iter().flat_map(|(_, b)| b.clone()).collect();
            prop_assert_eq!(
                cache.evictable_blocks(), cache.device_blocks() - distinct.len() as u64
            );
            let totals = cache.totals;
            prop_assert_eq!(totals.stored - totals.evicted, cache.device_blocks());
        }
        for (node, _) in locked {
            cache.unlock(node);
        }
        let all = cache.device_blocks();
        prop_assert_eq!(cache.evictable_blocks(), all);
        prop_assert_eq!(cache.evict(all), all);
    }
}

#[test]
fn the_least_recently_used_is_evicted_first_and_comes_back_from_host_memory() {
    let mut cache = Cache::new(Eviction::Lru, false, 1000, false);
    let (one, other) = (prompt(0, 30), prompt(1, 30));
    cache.insert(&one);
    cache.insert(&other);
    cache.find(&one);
    // What `other` has alone: it shares 4 blocks with `one`.
    cache.evict(10);
    assert_eq!(cache.find(&one).device_blocks, 30);
    let found = cache.find(&other);
    assert_eq!((found.device_blocks, found.host_blocks), (4, 26));
    cache.reload(found.host_node);
    assert_eq!(cache.find(&other).device_blocks, 30);
    assert_eq!(cache.totals.reloaded, 26);
}

#[test]
fn what_host_memory_gives_up_for_a_new_copy_is_the_engines_own_way() {
    let of = |session: u64, length: u64| -> Vec<u64> {
        (0..length).map(|at| (session << 32) + at + 1).collect()
    };
    // By block as vLLM: what lacks. By node as SGLang: as much as is written, of what the device has not.
    for (by_block, left) in [(true, [0, 40, 40]), (false, [0, 0, 40])] {
        let mut cache = Cache::new(Eviction::Lru, by_block, 100, false);
        for session in [1, 2] {
            cache.insert(&of(session, 40));
            cache.evict(40);
        }
        // 20 of 100 blocks are free, and this one wants 60.
        cache.insert(&of(3, 60));
        let peeked = [of(1, 40), of(2, 40), of(3, 40)].map(|prompt| cache.peek(&prompt));
        assert_eq!(peeked, left, "by block: {by_block}");
        assert_eq!(cache.host_blocks(), if by_block { 100 } else { 60 });
    }
    let mut cache = Cache::new(Eviction::Lru, false, 100, false);
    cache.insert(&of(1, 60));
    cache.insert(&of(2, 60));
    assert_eq!(
        cache.host_blocks(),
        60,
        "the device has the first one, whose copy stays"
    );
}

#[test]
fn vllm_stores_prompts_alone_in_host_memory_and_decodes_use_nothing_there() {
    let of = |session: u64, length: u64| -> Vec<u64> {
        (0..length)
            .map(|at| (session << 32) + at + 1)
            .collect::<Vec<_>>()
    };
    // By session what the host tier still holds, where the first decodes on beside the second.
    for (by_block, held, left) in [(true, 80, [20, 40]), (false, 85, [45, 0])] {
        let mut cache = Cache::new(Eviction::Lru, by_block, 100, false);
        cache.insert(&of(1, 40));
        cache.insert(&of(2, 40));
        cache.insert_turn(&of(1, 45), 40);
        assert_eq!(cache.host_blocks(), held, "by block: {by_block}");
        cache.evict(85);
        cache.insert(&of(3, 40));
        // vLLM drops the end of the prompt that was stored first; SGLang the session that was used first.
        let peeked = [of(1, 45), of(2, 45)].map(|prompt| cache.peek(&prompt));
        assert_eq!(peeked, left, "by block: {by_block}");
    }
    // The answer is stored as part of the next prompt.
    let mut cache = Cache::new(Eviction::Lru, true, 100, false);
    cache.insert(&of(1, 40));
    cache.insert_turn(&of(1, 45), 40);
    cache.insert_turn(&of(1, 50), 50);
    assert_eq!(cache.host_blocks(), 50);
}
