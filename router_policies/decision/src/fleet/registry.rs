//! Which workers there are: they come, drain and go, each in a slot and under a serial number of its own.

use super::kinds::Beliefs;
use super::log::PrefixSource;
use super::prefix::estimate::EstimateTree;
use super::which::Which;
use super::worker::{Worker, WorkerSnapshot};
use super::{ESTIMATE_BLOCK_TOKENS, Fleet, State};
use crate::model::WorkerSpec;
use crate::model::address::canonical;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Fleet {
    /// Adds a worker. It is routable once its health is reported. What is returned names this
    /// registration, however often its id is taken again.
    ///
    /// # Errors
    /// The id is taken.
    pub fn add_worker(&self, spec: WorkerSpec) -> Result<Arc<WorkerSpec>, String> {
        let mut state = self.state.lock();
        if state.slots.contains_key(&spec.id) {
            return Err(format!("worker {}: id is taken", spec.id));
        }
        let place = canonical(spec.authority());
        let same = |w: &&Worker| !w.removed && canonical(w.spec.authority()) == place;
        if let Some(other) = state.workers.iter().flatten().find(same) {
            let (id, other) = (&spec.id, &other.spec.id);
            return Err(format!("worker {id}: url: it is that of worker {other}"));
        }
        if !spec.may_abort_queued() {
            self.has_kept_queues.store(true, Ordering::Relaxed);
        }
        let serial = state.next_serial;
        state.next_serial += 1;
        let block = estimate_block(&spec);
        let spec = Arc::new(spec);
        let now_s = self.now_s();
        let kind = state.kinds.of(&spec);
        let beliefs = Beliefs::new(state.kinds.rates(kind), now_s);
        let mut worker = Worker::new(Arc::clone(&spec), serial, block, (kind, beliefs));
        worker.share_among(state.routers);
        let slot = match state.workers.iter().position(Option::is_none) {
            Some(slot) => slot,
            None => {
                state.workers.push(None);
                state.workers.len() - 1
            }
        };
        let capacity = worker.estimate_capacity_tokens();
        state.workers[slot] = Some(worker);
        state.slots.insert(spec.id.clone(), slot);
        state.admission.clear(slot);
        if !state.token_trees.iter().any(|(size, _)| *size == block) {
            state.token_trees.push((block, EstimateTree::default()));
        }
        state.set_estimate_capacity(slot, block, capacity);
        self.set_token_block(&state);
        Ok(spec)
    }

    /// So many other routers before the same workers came, or went: each books an equal part of every worker.
    pub fn count_peers(&self, change: i64) {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let routers = state.routers.saturating_add_signed(change);
        state.routers = routers;
        for slot in 0..state.workers.len() {
            let Some(worker) = &mut state.workers[slot] else {
                continue;
            };
            worker.share_among(routers);
            let (block, capacity) = (worker.estimate_block, worker.estimate_capacity_tokens());
            state.set_estimate_capacity(slot, block, capacity);
        }
        self.settle(guard);
    }

    /// How many routers share the workers, this one among them.
    pub fn routers(&self) -> u64 {
        self.state.lock().routers
    }

    /// Whether there is, or was, a worker whose queued requests must not be aborted.
    pub fn has_kept_queues(&self) -> bool {
        self.has_kept_queues.load(Ordering::Relaxed)
    }

    /// The coarsest block that fits every worker's.
    pub(super) fn set_token_block(&self, state: &State) {
        let exact = state
            .workers
            .iter()
            .flatten()
            .filter(|worker| !worker.removed && worker.prefix_source == PrefixSource::Events)
            .map(|worker| worker.page_size);
        let workers = state.workers.iter().flatten();
        let estimates = workers
            .filter(|worker| !worker.removed)
            .map(|worker| worker.estimate_block);
        let block = match estimates.chain(exact).fold(0, gcd) {
            0 => ESTIMATE_BLOCK_TOKENS,
            block => block,
        };
        self.token_block.store(block, Ordering::Relaxed);
    }

    /// Takes a worker out of the fleet; requests on it run to their end. False if there is none.
    pub fn remove_worker(&self, id: &str) -> bool {
        let mut state = self.state.lock();
        let Some(slot) = state.slot_of(id) else {
            return false;
        };
        if let Some(worker) = &mut state.workers[slot] {
            worker.removed = true;
        }
        state.slots.remove(id);
        state.forget_cache(slot);
        state.free_if_idle(slot);
        self.set_token_block(&state);
        self.settle(state);
        true
    }

    /// Sets whether the worker gets new requests; running ones go on. False if there is none.
    pub fn set_draining(&self, id: &str, draining: bool) -> bool {
        let found = self.with_worker(id, |worker| worker.draining = draining);
        self.settle(self.state.lock());
        found.is_some()
    }

    /// Every worker that has not been removed.
    pub fn snapshot(&self) -> Vec<WorkerSnapshot> {
        let state = self.state.lock();
        let now_s = self.now_s();
        let workers = state.workers.iter().enumerate();
        workers
            .filter_map(|(slot, worker)| Some((slot, worker.as_ref()?)))
            .filter(|(_, worker)| !worker.removed)
            .map(|(slot, worker)| {
                let site = worker.is_site().then(|| worker.site(slot, now_s));
                worker.snapshot(state.admission.snapshot(site.as_ref(), slot))
            })
            .collect()
    }

    pub(super) fn with_worker<'a, R>(
        &self,
        which: impl Into<Which<'a>>,
        change: impl FnOnce(&mut Worker) -> R,
    ) -> Option<R> {
        let mut state = self.state.lock();
        let slot = state.slot_of(which)?;
        state.workers[slot].as_mut().map(change)
    }
}

impl State {
    pub(super) fn slot_of<'a>(&self, which: impl Into<Which<'a>>) -> Option<usize> {
        let which = which.into();
        let slot = *self.slots.get(which.id())?;
        let worker = self.workers[slot].as_ref()?;
        which.is(&worker.spec).then_some(slot)
    }

    pub(super) fn free_if_idle(&mut self, slot: usize) {
        if self.workers[slot]
            .as_ref()
            .is_some_and(|worker| worker.removed && worker.load.requests == 0)
        {
            self.forget_prefixes(slot);
            self.workers[slot] = None;
        }
    }

    pub(super) fn worker_mut(&mut self, slot: usize) -> Option<&mut Worker> {
        self.workers.get_mut(slot)?.as_mut()
    }
}

/// The estimate's block for a worker: at least [`ESTIMATE_BLOCK_TOKENS`], in whole pages.
fn estimate_block(spec: &WorkerSpec) -> usize {
    ESTIMATE_BLOCK_TOKENS.next_multiple_of(spec.page_size)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
