//! A worker's prefix cache: a radix tree over blocks of tokens, on the GPU and, where there is one,
//! in a second tier in host memory.
//!
//! A block's id stands for its whole prefix (equal ids, equal prompts up to there), so that a node,
//! a run of blocks, is found by its first block alone. Invariants: a node on the device has its
//! parent on the device, one in host memory has its parent in host memory; what is locked, and so
//! everything above it, stays on the device.

use crate::ids::IdMap;
use decision::fleet::prefix::events::Tier;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

pub type NodeId = u32;
/// Above all first blocks; holds nothing and is never evicted.
pub const ROOT: NodeId = 0;

/// What is evicted first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Eviction {
    #[default]
    Lru,
    Lfu,
    /// Least recently used among what was used once, then among the rest.
    Slru,
    Fifo,
}

/// One change of what a tier holds, in the order in which they happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    Stored {
        tier: Tier,
        parent: Option<u64>,
        blocks: Vec<u64>,
    },
    Removed {
        tier: Tier,
        blocks: Vec<u64>,
    },
}

/// The longest beginning of a prompt that a cache holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Match {
    /// The last node that the device holds, and blocks up to its end.
    pub node: NodeId,
    pub device_blocks: usize,
    /// The last node that host memory holds (beyond the device's), and blocks beyond the device's.
    pub host_node: NodeId,
    pub host_blocks: usize,
}

struct Node {
    blocks: Vec<u64>,
    parent: NodeId,
    on_device: bool,
    on_host: bool,
    device_children: u32,
    host_children: u32,
    locks: u32,
    last_used: u64,
    /// The same, as vLLM's host tier is told of it: looked up, or more of its prompt stored.
    host_used: u64,
    made: u64,
    uses: u64,
}

/// What has happened to a cache's blocks, in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Totals {
    pub stored: u64,
    pub evicted: u64,
    /// Of these, still in host memory afterwards.
    pub demoted: u64,
    pub reloaded: u64,
    pub host_evicted: u64,
}

/// See the module's text. Sizes are in blocks.
pub struct Cache {
    nodes: Vec<Node>,
    unused: Vec<NodeId>,
    by_first: IdMap<NodeId>,
    eviction: Eviction,
    /// Leaves of the device that nothing locks, and of host memory, first to be evicted first.
    evictable: BTreeSet<(u64, u64, NodeId)>,
    host_leaves: BTreeSet<(u64, u64, NodeId)>,
    /// vLLM's ways: blocks one at a time, so that a node may be cut, where SGLang evicts it as a whole, and
    /// a host tier that gets prompts alone.
    by_block: bool,
    now: u64,
    device_blocks: u64,
    locked_blocks: u64,
    host_blocks: u64,
    host_capacity: u64,
    changes: Option<Vec<Change>>,
    pub totals: Totals,
}

impl Cache {
    /// A cache without host memory unless `host_capacity` blocks are given.
    pub fn new(eviction: Eviction, by_block: bool, host_capacity: u64, log_changes: bool) -> Self {
        let root = Node {
            blocks: Vec::new(),
            parent: ROOT,
            on_device: true,
            on_host: true,
            device_children: 0,
            host_children: 0,
            locks: 1,
            last_used: 0,
            host_used: 0,
            made: 0,
            uses: 0,
        };
        Self {
            nodes: vec![root],
            unused: Vec::new(),
            by_first: IdMap::default(),
            eviction,
            evictable: BTreeSet::new(),
            host_leaves: BTreeSet::new(),
            by_block,
            now: 0,
            device_blocks: 0,
            locked_blocks: 0,
            host_blocks: 0,
            host_capacity,
            changes: log_changes.then(Vec::new),
            totals: Totals::default(),
        }
    }

    /// Blocks on the device.
    pub fn device_blocks(&self) -> u64 {
        self.device_blocks
    }

    /// Blocks on the device that could be evicted, one after another.
    pub fn evictable_blocks(&self) -> u64 {
        self.device_blocks - self.locked_blocks
    }

    pub fn host_blocks(&self) -> u64 {
        self.host_blocks
    }

    /// Takes the changes since the last call, if they are logged.
    pub fn take_changes(&mut self, into: &mut Vec<Change>) {
        if let Some(changes) = &mut self.changes {
            into.append(changes);
        }
    }

    fn order(&self, id: NodeId) -> (u64, u64, NodeId) {
        let node = &self.nodes[id as usize];
        match self.eviction {
            Eviction::Lru => (node.last_used, 0, id),
            Eviction::Lfu => (node.uses, node.last_used, id),
            Eviction::Slru => (u64::from(node.uses > 1), node.last_used, id),
            Eviction::Fifo => (node.made, 0, id),
        }
    }

    /// The same in host memory.
    fn host_order(&self, id: NodeId) -> (u64, u64, NodeId) {
        match self.by_block {
            true => (self.nodes[id as usize].host_used, 0, id),
            false => self.order(id),
        }
    }

    /// Takes a node out of the orders of eviction; to be followed by [`Cache::enlist`].
    fn delist(&mut self, id: NodeId) {
        let (order, host_order) = (self.order(id), self.host_order(id));
        self.evictable.remove(&order);
        self.host_leaves.remove(&host_order);
    }

    fn enlist(&mut self, id: NodeId) {
        if id == ROOT {
            return;
        }
        let (order, host_order) = (self.order(id), self.host_order(id));
        let node = &self.nodes[id as usize];
        if node.on_device && node.device_children == 0 && node.locks == 0 {
            self.evictable.insert(order);
        }
        if node.on_host && node.host_children == 0 {
            self.host_leaves.insert(host_order);
        }
    }

    fn touch(&mut self, id: NodeId, in_host_too: bool) {
        self.delist(id);
        self.now += 1;
        let now = self.now;
        let node = &mut self.nodes[id as usize];
        node.last_used = now;
        if in_host_too {
            node.host_used = now;
        }
        node.uses += 1;
        self.enlist(id);
    }

    /// How many of the node's blocks `blocks` begins with, and whether that is all of them. Equal ids
    /// mean equal prefixes, so the last one that is equal tells.
    fn common(&self, id: NodeId, blocks: &[u64]) -> usize {
        let own = &self.nodes[id as usize].blocks;
        let most = own.len().min(blocks.len());
        if own[most - 1] == blocks[most - 1] {
            return most;
        }
        let (mut low, mut high) = (1, most - 1);
        while low < high {
            let middle = (low + high).div_ceil(2);
            if own[middle - 1] == blocks[middle - 1] {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        low
    }

    /// Cuts a node after its first `length` blocks. What follows keeps the node's id, so that locks on
    /// it stay right; returns the new node above it.
    fn split(&mut self, id: NodeId, length: usize) -> NodeId {
        self.delist(id);
        let node = &mut self.nodes[id as usize];
        let rest = node.blocks.split_off(length);
        let first = rest[0];
        let above = Node {
            blocks: std::mem::replace(&mut node.blocks, rest),
            parent: node.parent,
            on_device: node.on_device,
            on_host: node.on_host,
            device_children: u32::from(node.on_device),
            host_children: u32::from(node.on_host),
            locks: node.locks,
            last_used: node.last_used,
            host_used: node.host_used,
            made: node.made,
            uses: node.uses,
        };
        let made = self.add(above);
        self.nodes[id as usize].parent = made;
        self.by_first.insert(first, id);
        self.enlist(made);
        self.enlist(id);
        made
    }

    /// The node of the first `length` blocks of a node: itself, or what is cut off above it.
    fn upto(&mut self, id: NodeId, length: usize) -> NodeId {
        if length < self.nodes[id as usize].blocks.len() {
            self.split(id, length)
        } else {
            id
        }
    }

    fn add(&mut self, node: Node) -> NodeId {
        let first = node.blocks[0];
        let id = match self.unused.pop() {
            Some(id) => {
                self.nodes[id as usize] = node;
                id
            }
            None => {
                self.nodes.push(node);
                (self.nodes.len() - 1) as NodeId
            }
        };
        self.by_first.insert(first, id);
        id
    }

    fn remove(&mut self, id: NodeId) {
        let blocks = std::mem::take(&mut self.nodes[id as usize].blocks);
        self.by_first.remove(&blocks[0]);
        self.unused.push(id);
    }

    /// Finds and uses the longest beginning of `blocks` that is held.
    pub fn find(&mut self, blocks: &[u64]) -> Match {
        let mut found = Match {
            node: ROOT,
            device_blocks: 0,
            host_node: ROOT,
            host_blocks: 0,
        };
        let mut at = 0;
        while let Some(&held) = blocks.get(at).and_then(|first| self.by_first.get(first)) {
            let common = self.common(held, &blocks[at..]);
            let id = self.upto(held, common);
            self.touch(id, true);
            at += common;
            if self.nodes[id as usize].on_device {
                (found.node, found.device_blocks) = (id, at);
                found.host_node = id;
            } else {
                (found.host_node, found.host_blocks) = (id, at - found.device_blocks);
            }
        }
        found
    }

    /// Blocks at the beginning of `blocks` that are held, without using them.
    pub fn peek(&self, blocks: &[u64]) -> usize {
        let mut at = 0;
        while let Some(&id) = blocks.get(at).and_then(|first| self.by_first.get(first)) {
            let common = self.common(id, &blocks[at..]);
            at += common;
            if common < self.nodes[id as usize].blocks.len() {
                break;
            }
        }
        at
    }

    /// Keeps a node and all above it on the device until it is unlocked as often.
    pub fn lock(&mut self, id: NodeId) {
        let mut at = id;
        while at != ROOT {
            self.delist(at);
            let node = &mut self.nodes[at as usize];
            node.locks += 1;
            if node.locks == 1 {
                self.locked_blocks += node.blocks.len() as u64;
            }
            let parent = node.parent;
            self.enlist(at);
            at = parent;
        }
    }

    pub fn unlock(&mut self, id: NodeId) {
        let mut at = id;
        while at != ROOT {
            self.delist(at);
            let node = &mut self.nodes[at as usize];
            node.locks -= 1;
            if node.locks == 0 {
                self.locked_blocks -= node.blocks.len() as u64;
            }
            let parent = node.parent;
            self.enlist(at);
            at = parent;
        }
    }

    /// Puts a prompt's blocks on the device; there must be room for those that are not there yet.
    /// Returns the node of the last one.
    pub fn insert(&mut self, blocks: &[u64]) -> NodeId {
        self.insert_turn(blocks, blocks.len())
    }

    /// As [`Cache::insert`], where what follows the first `prompt` blocks is the answer. vLLM stores nothing of that
    /// in host memory (`offload_prompt_only`) until it is part of another prompt, and uses nothing there
    /// meanwhile (`_build_store_jobs` touches where it stores).
    pub fn insert_turn(&mut self, blocks: &[u64], prompt: usize) -> NodeId {
        let prompt = if self.by_block { prompt } else { blocks.len() };
        let prompt = prompt.min(blocks.len());
        let only_prompt = prompt == blocks.len();
        let (mut at, mut parent, mut last_of_prompt) = (0, ROOT, ROOT);
        while at < blocks.len() {
            let end = if at < prompt { prompt } else { blocks.len() };
            if let Some(&held) = self.by_first.get(&blocks[at]) {
                let common = self.common(held, &blocks[at..end]);
                let id = self.upto(held, common);
                if !self.nodes[id as usize].on_device {
                    self.put_on_device(id);
                }
                self.touch(id, only_prompt);
                (at, parent) = (at + common, id);
            } else {
                self.now += 1;
                let id = self.add(Node {
                    blocks: blocks[at..end].to_vec(),
                    parent,
                    on_device: false,
                    on_host: false,
                    device_children: 0,
                    host_children: 0,
                    locks: 0,
                    last_used: self.now,
                    host_used: self.now,
                    made: self.now,
                    uses: 1,
                });
                self.put_on_device(id);
                (at, parent) = (end, id);
            }
            if at == prompt {
                last_of_prompt = parent;
            }
        }
        if self.host_capacity > 0 {
            self.back_up(last_of_prompt);
        }
        parent
    }

    fn put_on_device(&mut self, id: NodeId) {
        self.delist(id);
        let node = &mut self.nodes[id as usize];
        node.on_device = true;
        let (count, parent) = (node.blocks.len() as u64, node.parent);
        self.device_blocks += count;
        self.totals.stored += count;
        self.log_stored(Tier::Device, id);
        self.delist(parent);
        self.nodes[parent as usize].device_children += 1;
        self.enlist(parent);
        self.enlist(id);
    }

    fn log_stored(&mut self, tier: Tier, id: NodeId) {
        if let Some(changes) = &mut self.changes {
            let node = &self.nodes[id as usize];
            changes.push(Change::Stored {
                tier,
                parent: self.nodes[node.parent as usize].blocks.last().copied(),
                blocks: node.blocks.clone(),
            });
        }
    }

    fn log_removed(&mut self, tier: Tier, id: NodeId) {
        if let Some(changes) = &mut self.changes {
            let blocks = self.nodes[id as usize].blocks.clone();
            changes.push(Change::Removed { tier, blocks });
        }
    }

    /// Brings what host memory holds up to `id` onto the device; there must be room.
    pub fn reload(&mut self, id: NodeId) {
        let mut path = Vec::new();
        let mut at = id;
        while at != ROOT && !self.nodes[at as usize].on_device {
            path.push(at);
            at = self.nodes[at as usize].parent;
        }
        for id in path.into_iter().rev() {
            self.totals.reloaded += self.nodes[id as usize].blocks.len() as u64;
            self.put_on_device(id);
        }
    }

    /// Writes a node and all above it through to host memory, as far as there is room.
    fn back_up(&mut self, id: NodeId) {
        let mut path = Vec::new();
        let mut at = id;
        while at != ROOT && !self.nodes[at as usize].on_host {
            path.push(at);
            at = self.nodes[at as usize].parent;
        }
        for id in path.into_iter().rev() {
            let count = self.nodes[id as usize].blocks.len() as u64;
            if !self.make_host_room(count, id) {
                return;
            }
            self.delist(id);
            let node = &mut self.nodes[id as usize];
            node.on_host = true;
            let parent = node.parent;
            self.host_blocks += count;
            self.log_stored(Tier::Host, id);
            self.delist(parent);
            self.nodes[parent as usize].host_children += 1;
            self.enlist(parent);
            self.enlist(id);
        }
    }

    /// Makes room in host memory for `count` blocks of a node that hang on what is above it. False where there
    /// is none to be had.
    ///
    /// SGLang (`HiRadixCache.evict_host`) gives up whole nodes that the device no longer holds until they are as
    /// many as it is about to write, so that what was free before stays free beside them. vLLM
    /// (`CPUOffloadingManager.prepare_store`, `LRUCachePolicy.evict`) gives up as many blocks as it lacks, of each
    /// prompt the last ones first.
    fn make_host_room(&mut self, count: u64, id: NodeId) -> bool {
        let lacking = |cache: &Self| {
            let wanted = cache.host_blocks + count;
            wanted.saturating_sub(cache.host_capacity)
        };
        let mut left = match lacking(self) {
            0 => return true,
            lacks if self.by_block => lacks,
            _ => count,
        };
        while left > 0 {
            // Never what the copy hangs on.
            let may_go = |leaf: &NodeId| {
                let is_device_copy = self.nodes[*leaf as usize].on_device;
                (self.by_block || !is_device_copy) && !self.is_above(*leaf, id)
            };
            let mut oldest = self.host_leaves.iter().map(|&(_, _, leaf)| leaf);
            let Some(leaf) = oldest.find(may_go) else {
                break;
            };
            let size = self.nodes[leaf as usize].blocks.len() as u64;
            if self.by_block && size > left {
                self.split(leaf, (size - left) as usize);
                continue;
            }
            left = left.saturating_sub(size);
            self.evict_from_host(leaf);
        }
        lacking(self) == 0
    }

    fn is_above(&self, above: NodeId, id: NodeId) -> bool {
        let mut at = id;
        while at != ROOT {
            if at == above {
                return true;
            }
            at = self.nodes[at as usize].parent;
        }
        false
    }

    fn evict_from_host(&mut self, id: NodeId) {
        self.delist(id);
        let node = &mut self.nodes[id as usize];
        node.on_host = false;
        let (count, parent, gone) = (node.blocks.len() as u64, node.parent, !node.on_device);
        self.host_blocks -= count;
        self.totals.host_evicted += count;
        self.log_removed(Tier::Host, id);
        self.delist(parent);
        self.nodes[parent as usize].host_children -= 1;
        self.enlist(parent);
        if gone {
            self.remove(id);
        } else {
            self.enlist(id);
        }
    }

    /// Frees at least `blocks` of the device, if that many are unlocked. Returns how many it freed.
    pub fn evict(&mut self, blocks: u64) -> u64 {
        let mut freed = 0;
        while freed < blocks {
            let Some(&(_, _, id)) = self.evictable.first() else {
                break;
            };
            let size = self.nodes[id as usize].blocks.len() as u64;
            if self.by_block && size > blocks - freed {
                self.split(id, (size - (blocks - freed)) as usize);
                continue;
            }
            freed += size;
            self.evict_node(id);
        }
        freed
    }

    fn evict_node(&mut self, id: NodeId) {
        self.delist(id);
        let node = &mut self.nodes[id as usize];
        node.on_device = false;
        let (count, parent, kept) = (node.blocks.len() as u64, node.parent, node.on_host);
        self.device_blocks -= count;
        self.totals.evicted += count;
        self.log_removed(Tier::Device, id);
        self.delist(parent);
        self.nodes[parent as usize].device_children -= 1;
        self.enlist(parent);
        if kept {
            self.totals.demoted += count;
            self.enlist(id);
        } else {
            self.remove(id);
        }
    }
}
