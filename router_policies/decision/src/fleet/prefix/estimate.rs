//! The estimate of what workers without KV events hold: one radix tree over prompt blocks, shared
//! by all workers, with an LRU bounded by each worker's capacity.
//!
//! A node is a run of blocks; it is named by the state after its first block, which stands for the
//! whole prefix up to there, so that finding a child is one hash lookup and comparing a run is one
//! comparison at its end. Invariant: a worker that holds a node holds its parent, and used the
//! parent no earlier. Like SGLang's radix cache, eviction takes whole nodes, leaves first.

use super::hash::PromptHashes;
use smallvec::SmallVec;
use std::borrow::Cow;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Keys are already uniformly distributed.
#[derive(Default)]
pub struct Identity(u64);

impl Hasher for Identity {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("only u64 keys are hashed");
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}

pub type StateMap<V> = HashMap<u64, V, BuildHasherDefault<Identity>>;

type NodeId = u32;

struct Node {
    states: Vec<u64>,
    /// Who holds the whole node.
    holders: SmallVec<[Holder; 2]>,
}

#[derive(Clone, Copy)]
struct Holder {
    worker: u32,
    /// The node's in the worker's [`Recency`].
    place: Place,
    /// Prompts that were sent there since it holds the node, and begin with it.
    prompts: u32,
}

#[derive(Default)]
struct Worker {
    capacity_blocks: u64,
    held_blocks: u64,
    /// Of nodes used together, the deeper are the older.
    recency: Recency,
}

type Place = u32;

/// What a worker holds in the order of its last use: a linked list, so that using a node again, which
/// every decision does with all of a prompt's, touches no more than its neighbours.
#[derive(Default)]
struct Recency {
    /// Linked in a ring that begins and ends at the first, which stands for no node.
    links: Vec<Link>,
    free: Vec<Place>,
}

#[derive(Clone, Copy)]
struct Link {
    node: NodeId,
    older: Place,
    newer: Place,
}

impl Recency {
    const ENDS: Place = 0;

    fn push_newest(&mut self, node: NodeId) -> Place {
        self.insert_before(Self::ENDS, node)
    }

    /// Inserts a node as the next older than that at `newer`.
    fn insert_before(&mut self, newer: Place, node: NodeId) -> Place {
        if self.links.is_empty() {
            self.links.push(Link {
                node: NodeId::MAX,
                older: Self::ENDS,
                newer: Self::ENDS,
            });
        }
        let place = self.free.pop().unwrap_or_else(|| {
            self.links.push(self.links[0]);
            (self.links.len() - 1) as Place
        });
        self.links[place as usize].node = node;
        self.link(place, newer);
        place
    }

    fn make_newest(&mut self, place: Place) {
        self.unlink(place);
        self.link(place, Self::ENDS);
    }

    fn pop_oldest(&mut self) -> Option<NodeId> {
        let oldest = self.links.first()?.newer;
        if oldest == Self::ENDS {
            return None;
        }
        self.unlink(oldest);
        self.free.push(oldest);
        Some(self.links[oldest as usize].node)
    }

    fn remove(&mut self, place: Place) {
        self.unlink(place);
        self.free.push(place);
    }

    fn link(&mut self, place: Place, newer: Place) {
        let older = std::mem::replace(&mut self.links[newer as usize].older, place);
        self.links[older as usize].newer = place;
        let link = &mut self.links[place as usize];
        (link.older, link.newer) = (older, newer);
    }

    fn unlink(&mut self, place: Place) {
        let Link { older, newer, .. } = self.links[place as usize];
        self.links[older as usize].newer = newer;
        self.links[newer as usize].older = older;
    }
}

/// The tree for prompts of one unit and block size.
#[derive(Default)]
pub struct EstimateTree {
    nodes: Vec<Node>,
    free: Vec<NodeId>,
    /// By their first states, with how many blocks they are: the next node can be looked up while this one
    /// is still on its way from memory.
    starts: StateMap<(NodeId, u32)>,
    workers: Vec<Worker>,
}

impl EstimateTree {
    /// Blocks of `states` that each worker holds, written to `held` by slot, where zeros are.
    pub fn matched(&self, states: &[u64], held: &mut [u32]) {
        let mut at = 0;
        while let Some(&(id, blocks)) = states.get(at).and_then(|state| self.starts.get(state)) {
            let node = &self.nodes[id as usize];
            let common = common_blocks(&node.states, &states[at..]);
            for holder in &node.holders {
                // What was taken back is not held, whatever is left behind it.
                if let Some(entry) = held.get_mut(holder.worker as usize)
                    && *entry as usize == at
                {
                    *entry = (at + common) as u32;
                }
            }
            if common < blocks as usize {
                break;
            }
            at += blocks as usize;
        }
    }

    /// Notes that `worker` now holds the prompt. What no longer fits there is evicted by
    /// [`EstimateTree::evict_excess`], which is left for when no request waits for a decision. Returns
    /// the name of the first node that the worker did not hold before, for [`EstimateTree::retract`].
    pub fn insert(&mut self, worker: usize, states: &[u64]) -> Option<u64> {
        self.ensure(worker);
        let mut path: SmallVec<[NodeId; 32]> = SmallVec::new();
        let mut at = 0;
        while at < states.len() {
            let id = match self.starts.get(&states[at]) {
                Some(&(id, _)) => {
                    let common = common_blocks(&self.nodes[id as usize].states, &states[at..]);
                    if common < self.nodes[id as usize].states.len() {
                        self.split(id, common);
                    }
                    id
                }
                None => self.add(states[at..].to_vec()),
            };
            path.push(id);
            at += self.nodes[id as usize].states.len();
        }
        let mut new = None;
        for id in path.into_iter().rev() {
            if self.touch(worker, id) {
                new = Some(self.nodes[id as usize].states[0]);
            }
        }
        new
    }

    /// Takes back the node that [`EstimateTree::insert`] named: its prompt was not run. What lies behind it
    /// is out of reach then, and ages. Where another prompt that begins with the node has been sent there
    /// since, all of it stays: that one may run.
    pub fn retract(&mut self, worker: usize, start: u64) {
        let Some(&(id, _)) = self.starts.get(&start) else {
            return;
        };
        let mut holders = self.nodes[id as usize].holders.iter_mut();
        let held = holders.find(|holder| holder.worker == worker as u32);
        match (held, self.workers.get_mut(worker)) {
            (Some(held), _) if held.prompts > 1 => held.prompts -= 1,
            (Some(held), Some(state)) => {
                state.recency.remove(held.place);
                self.release(worker, id);
            }
            _ => {}
        }
    }

    /// Sets the worker's capacity; less than before evicts at once.
    pub fn set_capacity(&mut self, worker: usize, blocks: u64) {
        self.ensure(worker);
        self.workers[worker].capacity_blocks = blocks;
        self.evict_excess(worker);
    }

    /// Evicts, least recently used first, until the worker holds no more than its capacity.
    pub fn evict_excess(&mut self, worker: usize) {
        let is_full = |w: &Worker| w.held_blocks > w.capacity_blocks;
        while self.workers.get(worker).is_some_and(is_full) && self.evict_one(worker) {}
    }

    /// Forgets everything the worker held: it restarted, flushed its cache or left.
    pub fn clear(&mut self, worker: usize) {
        if worker < self.workers.len() {
            while self.evict_one(worker) {}
        }
    }

    /// Blocks that the worker is believed to hold.
    pub fn held_blocks(&self, worker: usize) -> u64 {
        self.workers.get(worker).map_or(0, |w| w.held_blocks)
    }

    /// Blocks in the tree, held by anyone.
    pub fn len_blocks(&self) -> usize {
        self.starts
            .values()
            .map(|&(id, _)| self.nodes[id as usize].states.len())
            .sum()
    }

    fn ensure(&mut self, worker: usize) {
        while self.workers.len() <= worker {
            self.workers.push(Worker {
                capacity_blocks: u64::MAX,
                ..Worker::default()
            });
        }
    }

    fn add(&mut self, states: Vec<u64>) -> NodeId {
        let (start, blocks) = (states[0], states.len() as u32);
        let node = Node {
            states,
            holders: SmallVec::new(),
        };
        let id = match self.free.pop() {
            Some(id) => {
                self.nodes[id as usize] = node;
                id
            }
            None => {
                self.nodes.push(node);
                (self.nodes.len() - 1) as NodeId
            }
        };
        self.starts.insert(start, (id, blocks));
        id
    }

    /// Cuts a node after `blocks`; the node keeps the head, a new one gets the tail.
    fn split(&mut self, id: NodeId, blocks: usize) {
        let node = &mut self.nodes[id as usize];
        let tail = node.states.split_off(blocks);
        node.states.shrink_to_fit();
        self.starts.insert(node.states[0], (id, blocks as u32));
        let mut holders = node.holders.clone();
        let new = self.add(tail);
        for holder in &mut holders {
            let recency = &mut self.workers[holder.worker as usize].recency;
            holder.place = recency.insert_before(holder.place, new);
        }
        self.nodes[new as usize].holders = holders;
    }

    /// The worker holds the node; whether it did not before.
    fn touch(&mut self, worker: usize, id: NodeId) -> bool {
        let node = &mut self.nodes[id as usize];
        let state = &mut self.workers[worker];
        let mut holders = node.holders.iter_mut();
        if let Some(holder) = holders.find(|holder| holder.worker == worker as u32) {
            holder.prompts = holder.prompts.saturating_add(1);
            state.recency.make_newest(holder.place);
            return false;
        }
        node.holders.push(Holder {
            worker: worker as u32,
            place: state.recency.push_newest(id),
            prompts: 1,
        });
        state.held_blocks += node.states.len() as u64;
        true
    }

    fn evict_one(&mut self, worker: usize) -> bool {
        let Some(id) = self.workers[worker].recency.pop_oldest() else {
            return false;
        };
        self.release(worker, id);
        true
    }

    /// The worker holds the node no more.
    fn release(&mut self, worker: usize, id: NodeId) {
        let state = &mut self.workers[worker];
        let node = &mut self.nodes[id as usize];
        state.held_blocks -= node.states.len() as u64;
        node.holders.retain(|holder| holder.worker != worker as u32);
        if node.holders.is_empty() {
            self.starts.remove(&node.states[0]);
            node.states = Vec::new();
            self.free.push(id);
        }
    }
}

/// Leading blocks that a node and a prompt share. States name whole prefixes, so agreement is
/// monotone and the end can be looked at first.
fn common_blocks(node: &[u64], prompt: &[u64]) -> usize {
    let shorter = node.len().min(prompt.len());
    if node[shorter - 1] == prompt[shorter - 1] {
        return shorter;
    }
    let (mut agree, mut differ) = (0, shorter - 1);
    while agree < differ {
        let middle = (agree + differ) / 2;
        if node[middle] == prompt[middle] {
            agree = middle + 1;
        } else {
            differ = middle;
        }
    }
    agree
}

/// Blocks of a hashed prompt at multiples of `stride` of its own block.
pub fn strided(prompt: &PromptHashes, stride: usize) -> Cow<'_, [u64]> {
    if stride == 1 {
        return Cow::Borrowed(&prompt.states);
    }
    let states = prompt.states.iter().copied();
    Cow::Owned(states.skip(stride - 1).step_by(stride).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn states(tokens: &[u32]) -> Vec<u64> {
        PromptHashes::of_tokens(tokens, 1).states
    }

    fn held(tree: &EstimateTree, tokens: &[u32], workers: usize) -> Vec<u32> {
        let mut held = vec![0; workers];
        tree.matched(&states(tokens), &mut held);
        held
    }

    #[test]
    fn a_prompt_is_held_by_the_worker_it_was_sent_to_and_by_no_other() {
        let mut tree = EstimateTree::default();
        tree.insert(1, &states(&[1, 2, 3, 4]));
        assert_eq!(held(&tree, &[1, 2, 3, 4, 5], 3), [0, 4, 0]);
        assert_eq!(held(&tree, &[1, 2, 9], 3), [0, 2, 0]);
        assert_eq!(held(&tree, &[9], 3), [0, 0, 0]);
    }

    #[test]
    fn a_shared_prefix_is_split_and_held_by_both() {
        let mut tree = EstimateTree::default();
        tree.insert(0, &states(&[1, 2, 3, 4]));
        tree.insert(1, &states(&[1, 2, 7]));
        assert_eq!(held(&tree, &[1, 2, 3, 4], 2), [4, 2]);
        assert_eq!(held(&tree, &[1, 2, 7], 2), [2, 3]);
    }

    #[test]
    fn the_least_recently_used_leaf_goes_first() {
        let mut tree = EstimateTree::default();
        tree.set_capacity(0, 5);
        tree.insert(0, &states(&[1, 2, 3]));
        tree.insert(0, &states(&[1, 2, 4]));
        tree.insert(0, &states(&[1, 2, 3]));
        tree.insert(0, &states(&[1, 2, 5, 6]));
        tree.evict_excess(0);
        assert_eq!(held(&tree, &[1, 2, 4], 1), [2]);
        assert_eq!(held(&tree, &[1, 2, 3], 1), [3]);
        assert_eq!(held(&tree, &[1, 2, 5, 6], 1), [4]);
    }

    proptest! {
        #[test]
        fn recency_is_a_list_from_the_oldest_to_the_newest(
            steps in proptest::collection::vec((0u8..4, any::<proptest::sample::Index>()), 0..60),
        ) {
            let mut recency = Recency::default();
            let mut model: Vec<(Place, NodeId)> = Vec::new();
            for (node, (step, which)) in (0..).zip(steps) {
                let at = if model.is_empty() { 0 } else { which.index(model.len()) };
                match step {
                    1 if !model.is_empty() => {
                        let place = recency.insert_before(model[at].0, node);
                        model.insert(at, (place, node));
                    }
                    2 if !model.is_empty() => {
                        let used = model.remove(at);
                        recency.make_newest(used.0);
                        model.push(used);
                    }
                    3 => {
                        let oldest = (!model.is_empty()).then(|| model.remove(0).1);
                        prop_assert_eq!(recency.pop_oldest(), oldest);
                    }
                    _ => model.push((recency.push_newest(node), node)),
                }
            }
            for (_, node) in model {
                prop_assert_eq!(recency.pop_oldest(), Some(node));
            }
            prop_assert_eq!(recency.pop_oldest(), None);
        }

        /// Against a model that keeps every prompt of every worker: without a bound, the estimate
        /// is the longest common prefix with anything sent there.
        #[test]
        fn without_a_bound_the_match_is_the_longest_prefix_sent_there(
            sent in proptest::collection::vec(
                (0usize..3, proptest::collection::vec(0u32..3, 1..12)), 0..24),
            probe in proptest::collection::vec(0u32..3, 1..12),
        ) {
            let mut tree = EstimateTree::default();
            for (worker, tokens) in &sent {
                tree.insert(*worker, &states(tokens));
            }
            let found = held(&tree, &probe, 3);
            for (worker, &held) in found.iter().enumerate() {
                let longest = sent.iter().filter(|(w, _)| *w == worker)
                    .map(|(_, t)| t.iter().zip(&probe).take_while(|(a, b)| a == b).count())
                    .max().unwrap_or(0);
                prop_assert_eq!(held as usize, longest);
            }
        }

        #[test]
        fn no_worker_exceeds_its_capacity_and_clearing_leaves_nothing(
            sent in proptest::collection::vec(
                (0usize..3, proptest::collection::vec(0u32..3, 1..12)), 0..24),
            capacity in 0u64..16,
        ) {
            let mut tree = EstimateTree::default();
            for worker in 0..3 {
                tree.set_capacity(worker, capacity);
            }
            for (worker, tokens) in &sent {
                tree.insert(*worker, &states(tokens));
                tree.evict_excess(*worker);
                prop_assert!(tree.held_blocks(*worker) <= capacity);
            }
            for worker in 0..3 {
                tree.clear(worker);
                prop_assert_eq!(tree.held_blocks(worker), 0);
            }
            prop_assert_eq!(tree.len_blocks(), 0);
            prop_assert_eq!(tree.nodes.len(), tree.free.len());
        }
    }
}
