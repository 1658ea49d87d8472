//! What workers hold, exactly, from the KV events that they publish.
//!
//! Engines name a block by a hash of their own and tell its tokens and its parent, so every block is
//! translated once into the state of [`super::hash`]: a prompt's states can then be looked up
//! whatever the engine hashes with. A worker holds a block, on its device or in its host tier, only if it
//! holds the blocks before it (engines evict leaves first), so its match in a prompt is found without
//! looking at all of it ([`super::span`]), for all workers of one page size together.

use super::estimate::StateMap;
use super::hash::{Namespace, PromptHashes, TokenChain, digits, step};
use super::span::Span;
use rmpv::Value;
use smallvec::{SmallVec, smallvec};

/// Where a worker holds a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    Device,
    /// Host memory, from where it comes back in a small part of the time that computing it takes.
    Host,
}

impl Tier {
    /// By an engine's word for it: SGLang's `StorageMedium`, vLLM's `medium`. None for what lies further
    /// away, on disks or in pools that others share.
    fn named(medium: Option<&Value>) -> Option<Self> {
        let Some(medium) = medium.and_then(Value::as_str) else {
            return Some(Self::Device);
        };
        [
            ("gpu", Self::Device),
            ("cpu", Self::Host),
            ("cpu_pinned", Self::Host),
        ]
        .into_iter()
        .find_map(|(name, tier)| medium.eq_ignore_ascii_case(name).then_some(tier))
    }
}

/// One change of a worker's cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvEvent {
    Stored {
        tier: Tier,
        blocks: Vec<u64>,
        parent: Option<u64>,
        /// Of a host tier vLLM (0.26.0) may tell none: the blocks are then those that the device had by
        /// the same names.
        tokens: Vec<u32>,
        block_size: usize,
        /// Of what is stored at the root; what has a parent is of its parent's.
        namespace: Namespace,
    },
    Removed {
        tier: Tier,
        blocks: Vec<u64>,
    },
    Cleared,
}

/// Reads a published batch: `[timestamp, events, …]`, each event an array that starts with its
/// type (SGLang 0.5.17) or a map with a key `type` (vLLM, SGLang 0.5.23). Events of media beyond the
/// device and host memory, of adapters without a name, and of unknown types are left out.
///
/// SGLang 0.5.17 does not say whose adapter's a block is, nor that it is one's: it then looks like any other.
///
/// # Errors
/// One line that says what is wrong with the bytes.
pub fn decode(payload: &[u8]) -> Result<Vec<KvEvent>, String> {
    let mut rest = payload;
    let batch = rmpv::decode::read_value_with_max_depth(&mut rest, 16)
        .map_err(|error| format!("KV events: {error}"))?;
    let events = batch
        .as_array()
        .and_then(|fields| fields.get(1)?.as_array())
        .ok_or("KV events: expected [timestamp, [event, ...]]")?;
    Ok(events.iter().filter_map(event).collect())
}

fn event(value: &Value) -> Option<KvEvent> {
    const STORED: [&str; 6] = [
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
    ];
    let field = |names: &[&str], name: &str| -> Option<&Value> {
        match value {
            Value::Array(items) => items.get(1 + names.iter().position(|n| *n == name)?),
            Value::Map(pairs) => pairs
                .iter()
                .find_map(|(key, item)| (key.as_str() == Some(name)).then_some(item)),
            _ => None,
        }
    };
    let kind = match value {
        Value::Array(items) => items.first()?.as_str()?,
        _ => field(&[], "type")?.as_str()?,
    };
    let other_group = |value: Option<&Value>| value.and_then(Value::as_u64).is_some_and(|g| g > 0);
    match kind {
        "BlockStored" => {
            let get = |name| field(&STORED, name);
            let adapter = field(&[], "lora_name").and_then(Value::as_str);
            let is_known = adapter.is_some() || get("lora_id").is_none_or(Value::is_nil);
            let is_plain = is_known && !other_group(field(&[], "group_idx"));
            // vLLM has it among what it hashes the first block with, behind the adapter's name.
            let salt = field(&[], "cache_salt")
                .and_then(Value::as_str)
                .or_else(|| {
                    let of_first = field(&[], "extra_keys")?.as_array()?.first()?.as_array()?;
                    let mut names = of_first.iter().filter_map(Value::as_str);
                    names.nth(usize::from(adapter.is_some()))
                });
            let tokens: Option<Vec<u32>> =
                get("token_ids")?.as_array()?.iter().map(token).collect();
            let tier = Tier::named(get("medium")).filter(|_| is_plain)?;
            Some(KvEvent::Stored {
                tier,
                blocks: hashes(get("block_hashes")?)?,
                parent: get("parent_block_hash").and_then(engine_hash),
                tokens: tokens?,
                block_size: usize::try_from(get("block_size")?.as_u64()?).ok()?,
                namespace: Namespace::of(adapter, [salt, None]),
            })
        }
        "BlockRemoved" => {
            const REMOVED: [&str; 2] = ["block_hashes", "medium"];
            let is_plain = !other_group(field(&[], "group_idx"));
            let tier = Tier::named(field(&REMOVED, "medium")).filter(|_| is_plain)?;
            let blocks = hashes(field(&REMOVED, "block_hashes")?)?;
            Some(KvEvent::Removed { tier, blocks })
        }
        "AllBlocksCleared" => Some(KvEvent::Cleared),
        _ => None,
    }
}

/// A token of a block. With EAGLE, SGLang's cache is keyed by pairs of a token and the one behind it.
fn token(value: &Value) -> Option<u32> {
    let first = match value {
        Value::Array(pair) => pair.first()?,
        one => one,
    };
    u32::try_from(first.as_u64()?).ok()
}

fn hashes(value: &Value) -> Option<Vec<u64>> {
    value.as_array()?.iter().map(engine_hash).collect()
}

/// An engine's name of a block: an integer, signed or not, or a digest.
fn engine_hash(value: &Value) -> Option<u64> {
    match value {
        Value::Integer(number) => number
            .as_u64()
            .or_else(|| number.as_i64().map(|signed| signed as u64)),
        Value::Binary(bytes) => Some(bytes.chunks(8).fold(bytes.len() as u64, |state, chunk| {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            step(state, u64::from_le_bytes(word))
        })),
        _ => None,
    }
}

#[derive(Clone, Copy)]
struct Block {
    chain: TokenChain,
    namespace: Namespace,
    /// On the device: vLLM may hold one content in several blocks.
    copies: u32,
    on_host: bool,
}

impl Block {
    fn is_held(&self) -> bool {
        self.copies > 0 || self.on_host
    }

    fn state(&self) -> u64 {
        self.namespace.state(self.chain.state())
    }
}

/// The blocks of one worker, on its device or in its host tier.
#[derive(Default)]
struct Held {
    blocks: StateMap<Block>,
    on_device: usize,
}

type Group = SmallVec<[u32; 8]>;
/// A worker, and how many pages of a prompt it is likely to hold.
pub type Likely = (u32, usize);

/// The blocks of all workers that publish events.
#[derive(Default)]
pub struct ExactIndex {
    holders: StateMap<SmallVec<[u32; 4]>>,
    workers: Vec<Held>,
}

impl ExactIndex {
    /// Applies one event. False when the parent of a block stored on the device is unknown: events were
    /// missed.
    pub fn apply(&mut self, worker: usize, event: &KvEvent) -> bool {
        if self.workers.len() <= worker {
            self.workers.resize_with(worker + 1, Held::default);
        }
        match event {
            KvEvent::Stored {
                tier,
                blocks,
                parent,
                tokens,
                block_size,
                namespace,
            } => {
                let known = &self.workers[worker].blocks;
                let mut last = match parent.map(|parent| known.get(&parent)) {
                    None => Block {
                        chain: TokenChain::default(),
                        namespace: *namespace,
                        copies: 0,
                        on_host: false,
                    },
                    Some(Some(block)) => Block {
                        copies: 0,
                        on_host: false,
                        ..*block
                    },
                    // A host tier may tell of blocks in any order (vLLM).
                    Some(None) if *tier == Tier::Host => return true,
                    Some(None) => return false,
                };
                let mut tokens = tokens.chunks((*block_size).max(1));
                for hash in blocks {
                    let told = tokens.next().map(|tokens| {
                        let digits = tokens.iter().map(|&token| digits(token));
                        digits.for_each(|digits| last.chain.push(digits));
                        last
                    });
                    self.store(worker, *tier, *hash, told);
                }
            }
            KvEvent::Removed { tier, blocks } => {
                blocks
                    .iter()
                    .for_each(|hash| self.remove(worker, *tier, *hash));
            }
            KvEvent::Cleared => self.clear(worker),
        }
        true
    }

    /// Adds a block to a tier; `told` is what the event says of it, without which it has to be known.
    fn store(&mut self, worker: usize, tier: Tier, hash: u64, told: Option<Block>) {
        let held = &mut self.workers[worker];
        let block = match told {
            Some(told) => held.blocks.entry(hash).or_insert(told),
            None => match held.blocks.get_mut(&hash) {
                Some(block) if tier == Tier::Host => block,
                _ => return,
            },
        };
        let was_held = block.is_held();
        match tier {
            Tier::Device => {
                held.on_device += usize::from(block.copies == 0);
                block.copies += 1;
            }
            Tier::Host => block.on_host = true,
        }
        if !was_held {
            let holders = self.holders.entry(block.state()).or_default();
            holders.push(worker as u32);
        }
    }

    fn remove(&mut self, worker: usize, tier: Tier, hash: u64) {
        let held = &mut self.workers[worker];
        let Some(block) = held.blocks.get_mut(&hash) else {
            return;
        };
        match tier {
            Tier::Device => {
                held.on_device -= usize::from(block.copies == 1);
                block.copies = block.copies.saturating_sub(1);
            }
            Tier::Host => block.on_host = false,
        }
        if !block.is_held() {
            let state = block.state();
            held.blocks.remove(&hash);
            self.release(state, worker);
        }
    }

    /// Forgets all that the worker holds.
    pub fn clear(&mut self, worker: usize) {
        if let Some(held) = self.workers.get_mut(worker) {
            for block in std::mem::take(held).blocks.into_values() {
                self.release(block.state(), worker);
            }
        }
    }

    /// Blocks that the worker holds, in either tier.
    pub fn held_blocks(&self, worker: usize) -> usize {
        self.workers.get(worker).map_or(0, |held| held.blocks.len())
    }

    /// Blocks that the worker holds on its device.
    pub fn device_blocks(&self, worker: usize) -> usize {
        self.workers.get(worker).map_or(0, |held| held.on_device)
    }

    fn release(&mut self, state: u64, worker: usize) {
        if let Some(holders) = self.holders.get_mut(&state) {
            // One entry: two hashes of one content are two copies to the engine.
            if let Some(at) = holders.iter().position(|&holder| holder == worker as u32) {
                holders.swap_remove(at);
            }
            if holders.is_empty() {
                self.holders.remove(&state);
            }
        }
    }

    /// Calls `found` with every worker of `workers` that holds a beginning of the prompt, and its
    /// length in pages of `stride` of the prompt's blocks. It is looked first where each is likely to hold
    /// it up to, and then ever further off, for each look may take as long as memory does. Mostly it is
    /// known, as that of a session's next turn is, and two looks are enough.
    pub fn matched(
        &self,
        prompt: &PromptHashes,
        stride: usize,
        workers: &[Likely],
        mut found: impl FnMut(u32, usize),
    ) {
        let pages = prompt.states.len() / stride;
        let mut spans: SmallVec<[(Span, Group); 4]> = SmallVec::new();
        for &(worker, likely) in workers {
            let whole = Span::new(pages, likely);
            match spans.iter_mut().find(|(span, _)| *span == whole) {
                Some((_, group)) => group.push(worker),
                None => spans.push((whole, smallvec![worker])),
            }
        }
        while let Some((span, group)) = spans.pop() {
            let Some(page) = span.next() else {
                let held = span.held();
                let group = group.into_iter().filter(|_| held > 0);
                group.for_each(|worker| found(worker, held));
                continue;
            };
            let holders = self.holders.get(&prompt.states[page * stride - 1]);
            let holds = |worker: &u32| holders.is_some_and(|holders| holders.contains(worker));
            let (has, lacks): (Group, Group) = group.into_iter().partition(holds);
            for (group, holds) in [(has, true), (lacks, false)] {
                if !group.is_empty() {
                    spans.push((span.after(page, holds), group));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn pack(value: &Value) -> Vec<u8> {
        let mut bytes = Vec::new();
        rmpv::encode::write_value(&mut bytes, value).expect("a vector takes everything");
        bytes
    }

    fn ints(numbers: &[i64]) -> Value {
        Value::Array(numbers.iter().map(|&n| Value::from(n)).collect())
    }

    fn held(index: &ExactIndex, tokens: &[u32], page: usize, worker: u32) -> usize {
        held_near(index, tokens, page, worker, 0)
    }

    fn held_near(
        index: &ExactIndex,
        tokens: &[u32],
        page: usize,
        worker: u32,
        likely: usize,
    ) -> usize {
        let mut length = 0;
        index.matched(
            &PromptHashes::of_tokens(tokens, 1),
            page,
            &[(worker, likely)],
            |_, pages| {
                length = pages * page;
            },
        );
        length
    }

    #[test]
    fn sglangs_arrays_and_vllms_maps_are_the_same_events() {
        let sglang = Value::Array(vec![
            Value::from(1.5),
            Value::Array(vec![
                Value::Array(vec![
                    "BlockStored".into(),
                    ints(&[-7, 8]),
                    Value::Nil,
                    ints(&[1, 2, 3, 4]),
                    2.into(),
                    Value::Nil,
                    "GPU".into(),
                ]),
                Value::Array(vec!["BlockRemoved".into(), ints(&[8]), "GPU".into()]),
                Value::Array(vec!["AllBlocksCleared".into()]),
                Value::Array(vec!["BlockRemoved".into(), ints(&[8]), "CPU_PINNED".into()]),
                Value::Array(vec!["BlockRemoved".into(), ints(&[8]), "DISK".into()]),
            ]),
            Value::from(0),
        ]);
        let pair = |key: &str, value: Value| (Value::from(key), value);
        let vllm = Value::Array(vec![
            Value::from(1.5),
            Value::Array(vec![
                Value::Map(vec![
                    pair("type", "BlockStored".into()),
                    pair("block_hashes", ints(&[-7, 8])),
                    pair("parent_block_hash", Value::Nil),
                    pair("token_ids", ints(&[1, 2, 3, 4])),
                    pair("block_size", 2.into()),
                    pair("lora_id", Value::Nil),
                    pair("medium", "GPU".into()),
                ]),
                Value::Map(vec![
                    pair("type", "BlockRemoved".into()),
                    pair("block_hashes", ints(&[8])),
                    pair("medium", "GPU".into()),
                ]),
                Value::Map(vec![pair("type", "AllBlocksCleared".into())]),
                Value::Map(vec![
                    pair("type", "BlockRemoved".into()),
                    pair("block_hashes", ints(&[8])),
                    pair("medium", "CPU".into()),
                ]),
            ]),
        ]);
        let expected = vec![
            KvEvent::Stored {
                tier: Tier::Device,
                blocks: vec![-7i64 as u64, 8],
                parent: None,
                tokens: vec![1, 2, 3, 4],
                block_size: 2,
                namespace: Namespace::default(),
            },
            KvEvent::Removed {
                tier: Tier::Device,
                blocks: vec![8],
            },
            KvEvent::Cleared,
            KvEvent::Removed {
                tier: Tier::Host,
                blocks: vec![8],
            },
        ];
        assert_eq!(decode(&pack(&sglang)).expect("valid"), expected);
        assert_eq!(decode(&pack(&vllm)).expect("valid"), expected);
    }

    /// Blocks as vLLM 0.26.0 and SGLang 0.5.23 tell of them.
    fn stored(hash: i64, parent: Option<i64>, more: Vec<(&str, Value)>) -> Value {
        let parent = parent.map_or(Value::Nil, Value::from);
        let mut pairs = vec![
            ("type", "BlockStored".into()),
            ("block_hashes", ints(&[hash])),
            ("parent_block_hash", parent),
            ("token_ids", ints(&[2 * hash, 2 * hash + 1])),
            ("block_size", 2.into()),
        ];
        pairs.extend(more);
        let pairs = pairs.into_iter().map(|(key, value)| (key.into(), value));
        Value::Map(pairs.collect())
    }

    #[test]
    fn blocks_of_an_adapter_or_a_salt_are_held_for_prompts_of_the_same_alone() {
        let list = |items: &[&str]| Value::Array(items.iter().map(|&item| item.into()).collect());
        let of_vllm = |adapter: Option<&str>, keys: &[&str]| {
            let named = adapter.map_or(Value::Nil, Value::from);
            let id = adapter.map_or(Value::Nil, |_| 1.into());
            let keys = Value::Array(vec![list(keys)]);
            vec![("lora_id", id), ("lora_name", named), ("extra_keys", keys)]
        };
        let cases = [
            (of_vllm(None, &[]), (None, None)),
            (of_vllm(Some("sql"), &["sql"]), (Some("sql"), None)),
            (of_vllm(None, &["salt"]), (None, Some("salt"))),
            (
                of_vllm(Some("sql"), &["sql", "salt"]),
                (Some("sql"), Some("salt")),
            ),
            (
                vec![
                    ("lora_id", Value::Nil),
                    ("lora_name", "sql".into()),
                    ("cache_salt", "salt".into()),
                ],
                (Some("sql"), Some("salt")),
            ),
        ];
        let plain = || PromptHashes::of_tokens(&[2, 3, 4, 5, 6, 7], 1);
        let apart = |(adapter, salt)| plain().within(Namespace::of(adapter, [salt, None]));
        for (more, own) in cases {
            // Of later blocks neither engine tells the salt again.
            let later = stored(2, Some(1), vec![("lora_id", Value::Nil)]);
            let events = Value::Array(vec![stored(1, None, more), later]);
            let batch = Value::Array(vec![Value::from(1.5), events]);
            let mut index = ExactIndex::default();
            for event in decode(&pack(&batch)).expect("valid") {
                assert!(index.apply(0, &event));
            }
            for other in [
                (None, None),
                (Some("sql"), None),
                (None, Some("salt")),
                (Some("sql"), Some("salt")),
            ] {
                let mut pages = 0;
                index.matched(&apart(other), 2, &[(0, 0)], |_, found| pages = found);
                assert_eq!(
                    pages,
                    if other == own { 2 } else { 0 },
                    "{other:?} of {own:?}"
                );
            }
            index.clear(0);
            assert!(index.holders.is_empty());
        }
        let unnamed = Value::Array(vec![stored(1, None, vec![("lora_id", 1.into())])]);
        let batch = Value::Array(vec![Value::from(1.5), unnamed]);
        assert_eq!(
            decode(&pack(&batch)),
            Ok(Vec::new()),
            "an adapter without a name"
        );
    }

    #[test]
    fn eagles_pairs_of_tokens_are_read_as_their_first() {
        let pairs = [[1, 2], [2, 3]].map(|[a, b]| ints(&[a, b]));
        let batch = Value::Array(vec![
            Value::from(1.5),
            Value::Array(vec![Value::Array(vec![
                "BlockStored".into(),
                ints(&[7]),
                Value::Nil,
                Value::Array(pairs.to_vec()),
                2.into(),
            ])]),
        ]);
        let events = decode(&pack(&batch)).expect("valid");
        let [KvEvent::Stored { tokens, .. }] = &events[..] else {
            panic!("one block: {events:?}");
        };
        assert_eq!(tokens, &[1, 2]);
    }

    /// A block whose parent nothing was told of.
    fn orphan(tier: Tier) -> KvEvent {
        KvEvent::Stored {
            tier,
            blocks: vec![2],
            parent: Some(1),
            tokens: vec![5],
            block_size: 1,
            namespace: Namespace::default(),
        }
    }

    #[test]
    fn a_block_with_an_unknown_parent_is_reported_and_not_believed() {
        let mut index = ExactIndex::default();
        assert!(!index.apply(0, &orphan(Tier::Device)));
        assert_eq!(index.held_blocks(0), 0);
    }

    #[test]
    fn no_truncated_or_foreign_batch_panics() {
        for bytes in [
            &b""[..],
            b"\x93",
            b"\xc0",
            b"\xdd\xff\xff\xff\xff",
            b"\x92\x01\x91\x91\xa1x",
        ] {
            let _ = decode(bytes);
        }
    }

    #[test]
    fn a_host_tier_may_name_blocks_without_their_tokens() {
        let named = |tier, tokens: &[u32]| KvEvent::Stored {
            tier,
            blocks: vec![7],
            parent: None,
            tokens: tokens.to_vec(),
            block_size: tokens.len(),
            namespace: Namespace::default(),
        };
        let removed = |tier| KvEvent::Removed {
            tier,
            blocks: vec![7],
        };
        let mut index = ExactIndex::default();
        let mut after = |event| {
            assert!(index.apply(0, &event));
            (held(&index, &[1, 2], 2, 0), index.device_blocks(0))
        };
        assert_eq!(after(named(Tier::Host, &[])), (0, 0), "of nothing known");
        assert_eq!(after(named(Tier::Device, &[1, 2])), (2, 1));
        assert_eq!(after(named(Tier::Host, &[])), (2, 1));
        assert_eq!(after(removed(Tier::Device)), (2, 0));
        assert_eq!(after(removed(Tier::Device)), (2, 0), "told twice");
        assert_eq!(after(removed(Tier::Host)), (0, 0));
        assert_eq!(
            after(orphan(Tier::Host)),
            (0, 0),
            "no sign of missed events"
        );
    }

    /// A radix cache of two tiers with pages of `page` tokens that publishes as engines do: what is stored
    /// is written through to the host tier, and leaves that tier only once it has left the device.
    #[derive(Default)]
    struct Engine {
        /// Prefixes held, by whole pages.
        device: BTreeSet<Vec<u32>>,
        host: BTreeSet<Vec<u32>>,
    }

    impl Engine {
        fn name(prefix: &[u32]) -> u64 {
            prefix
                .iter()
                .fold(99, |state, &token| step(state, u64::from(token) + 1))
        }

        fn store(&mut self, tokens: &[u32], page: usize, with_host: bool) -> Vec<KvEvent> {
            let mut events = Vec::new();
            for end in (page..=tokens.len()).step_by(page) {
                let start = end - page;
                let stored = |tier| KvEvent::Stored {
                    tier,
                    blocks: vec![Self::name(&tokens[..end])],
                    parent: (start > 0).then(|| Self::name(&tokens[..start])),
                    tokens: tokens[start..end].to_vec(),
                    block_size: page,
                    namespace: Namespace::default(),
                };
                if self.device.insert(tokens[..end].to_vec()) {
                    events.push(stored(Tier::Device));
                }
                if with_host && self.host.insert(tokens[..end].to_vec()) {
                    events.push(stored(Tier::Host));
                }
            }
            events
        }

        fn evict(&mut self, pick: usize) -> Vec<KvEvent> {
            let leaf = |held: &BTreeSet<Vec<u32>>, may_go: &dyn Fn(&Vec<u32>) -> bool| {
                let has_none_behind = |a: &&Vec<u32>| {
                    let mut all = held.iter();
                    !all.any(|b| b.len() > a.len() && b.starts_with(a))
                };
                let leaves: Vec<_> = held.iter().filter(has_none_behind).collect();
                let leaves: Vec<_> = leaves.into_iter().filter(|leaf| may_go(leaf)).collect();
                let leaf = leaves.get(pick % leaves.len().max(1));
                leaf.map(|leaf| (*leaf).clone())
            };
            let of_host = leaf(&self.host, &|leaf| !self.device.contains(leaf));
            let (tier, gone) = match of_host.filter(|_| pick.is_multiple_of(2)) {
                Some(gone) => (Tier::Host, Some(gone)),
                None => (Tier::Device, leaf(&self.device, &|_| true)),
            };
            let Some(gone) = gone else {
                return Vec::new();
            };
            self.device.remove(&gone);
            if tier == Tier::Host {
                self.host.remove(&gone);
            }
            vec![KvEvent::Removed {
                tier,
                blocks: vec![Self::name(&gone)],
            }]
        }
    }

    proptest! {
        #[test]
        fn the_index_equals_the_engine_to_the_page(
            page in 1usize..4,
            with_host in any::<bool>(),
            steps in proptest::collection::vec(
                (0u32..3, any::<bool>(), proptest::collection::vec(0u32..3, 1..14)), 1..40),
            probe in proptest::collection::vec(0u32..3, 1..14),
            likely in 0usize..16,
        ) {
            let mut engines: [Engine; 3] = Default::default();
            let mut index = ExactIndex::default();
            for (worker, evict, tokens) in &steps {
                let engine = &mut engines[*worker as usize];
                let events = if *evict {
                    engine.evict(tokens.len())
                } else {
                    engine.store(tokens, page, with_host)
                };
                for event in &events {
                    prop_assert!(index.apply(*worker as usize, event));
                }
            }
            for (worker, engine) in engines.iter().enumerate() {
                let longest = (page..=probe.len()).step_by(page)
                    .filter(|&end| {
                        engine.device.contains(&probe[..end]) || engine.host.contains(&probe[..end])
                    })
                    .max().unwrap_or(0);
                let found = held_near(&index, &probe, page, worker as u32, likely);
                prop_assert_eq!(found, longest);
                prop_assert_eq!(index.device_blocks(worker), engine.device.len());
            }
            for worker in 0..3 {
                index.clear(worker);
            }
            prop_assert!(index.holders.is_empty());
        }

        #[test]
        fn no_bytes_make_decoding_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode(&bytes);
        }
    }
}
