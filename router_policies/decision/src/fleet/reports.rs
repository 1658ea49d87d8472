//! What is reported of workers: their health, which run of the engine answers, its load and capacity, and
//! what its KV events tell of its cache.

use super::log::PrefixSource;
use super::prefix::events::{KvEvent, Tier};
use super::which::Which;
use super::worker::{EngineLoad, Worker};
use super::{Fleet, State, circuit};
use parking_lot::MutexGuard;
use std::sync::Arc;

/// Decisions that wait for the lock go between so many KV events: a batch may have one for each page of a
/// long prompt, and applying all of them takes longer than many decisions.
const EVENTS_AT_ONCE: usize = 16;

/// What is known of a worker's cache where its KV events begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventsBegin {
    /// They are followed from the engine's start on, or it holds nothing.
    Whole,
    /// It may hold what earlier events told.
    Partial,
}

impl Fleet {
    /// From now on the worker's KV events tell what it holds, in pages of `page_size` tokens until they
    /// tell their own; what was known before is forgotten. False if there is no such worker.
    pub fn begin_kv_events<'a>(&self, which: impl Into<Which<'a>>, page_size: usize) -> bool {
        self.follow_kv_events(which, page_size, EventsBegin::Whole)
    }

    /// As [`Fleet::begin_kv_events`]; `begin` says whether what the worker held before is known.
    pub fn follow_kv_events<'a>(
        &self,
        which: impl Into<Which<'a>>,
        page_size: usize,
        begin: EventsBegin,
    ) -> bool {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let Some(slot) = state.slot_of(which) else {
            return false;
        };
        match begin {
            EventsBegin::Whole => state.forget_prefixes(slot),
            EventsBegin::Partial => state.exact.clear(slot),
        }
        state.workers.marks.add(slot);
        if let Some(worker) = &mut state.workers[slot] {
            worker.prefix_source = PrefixSource::Events;
            worker.page_size = page_size.max(1);
            worker.lacks_events = begin == EventsBegin::Partial;
        }
        self.set_token_block(state);
        true
    }

    /// Applies a worker's KV events, in their order. False when events before them are missing: the
    /// estimate then counts as well, where it knows more.
    pub fn apply_kv_events<'a>(&self, which: impl Into<Which<'a>>, events: &[KvEvent]) -> bool {
        let which = which.into();
        let mut guard = self.state.lock();
        let Some(slot) = guard.slot_of(which) else {
            return true;
        };
        self.learn_page_size(&mut guard, slot, events);
        let mut all = true;
        for some in events.chunks(EVENTS_AT_ONCE) {
            // Whoever had the lock meanwhile may have removed it.
            let Some(slot) = guard.slot_of(which) else {
                break;
            };
            all &= guard.apply_kv_events(slot, some);
            MutexGuard::bump(&mut guard);
        }
        if events
            .iter()
            .any(|event| !matches!(event, KvEvent::Stored { .. }))
        {
            self.settle(guard);
        }
        all
    }

    /// The events tell how large the engine's pages are, whatever the configuration says.
    fn learn_page_size(&self, state: &mut State, slot: usize, events: &[KvEvent]) {
        let told = events.iter().find_map(|event| match event {
            KvEvent::Stored {
                tier: Tier::Device,
                block_size,
                ..
            } => Some((*block_size).max(1)),
            _ => None,
        });
        if state.exact.held_blocks(slot) > 0 {
            return;
        }
        if let (Some(told), Some(worker)) = (told, &mut state.workers[slot])
            && worker.page_size != told
        {
            worker.page_size = told;
            self.set_token_block(state);
        }
    }

    /// How often another engine may have come up there, whose cache is not that of the one before; none while
    /// it is down or where there is none.
    pub fn incarnation<'a>(&self, which: impl Into<Which<'a>>) -> Option<u64> {
        self.with_worker(which, |worker| worker.healthy.then_some(worker.incarnation))
            .flatten()
    }

    /// Reports a health check. A worker that comes back is taken to have lost its cache, unless its
    /// engine is known to be the one that it was: see [`Fleet::report_engine`].
    pub fn report_health<'a>(&self, which: impl Into<Which<'a>>, healthy: bool) {
        let now_s = self.now_s();
        let mut state = self.state.lock();
        let Some(slot) = state.slot_of(which) else {
            return;
        };
        let Some(worker) = &mut state.workers[slot] else {
            return;
        };
        let was = std::mem::replace(&mut worker.healthy, healthy);
        if was == healthy {
            return;
        }
        ::log::info!(
            "worker {} is {}",
            worker.spec.id,
            if healthy { "up" } else { "down" }
        );
        if healthy {
            worker.circuit = circuit::Circuit::default();
            worker.liveness.renew(now_s);
            if !worker.engine_run.is_confirmed() {
                worker.incarnation += 1;
                state.forget_cache(slot);
            }
        } else {
            worker.engine_run.doubt();
            worker.forget_report();
        }
        self.settle(state);
    }

    /// Says which run of the engine answers (a number that differs from start to start), if that can be
    /// told. If it is another one than before, what its cache held is forgotten.
    pub fn report_engine<'a>(&self, which: impl Into<Which<'a>>, run: Option<u64>) {
        let now_s = self.now_s();
        let mut state = self.state.lock();
        let Some(slot) = state.slot_of(which) else {
            return;
        };
        let Some(worker) = &mut state.workers[slot] else {
            return;
        };
        if worker.engine_run.report(run) {
            ::log::info!("worker {}: its engine was restarted", worker.spec.id);
            // KV events are followed anew: their count began anew too.
            worker.incarnation += 1;
            worker.liveness.renew(now_s);
            state.forget_cache(slot);
            self.settle(state);
        }
    }

    /// Whether answers since the last [`Fleet::report_engine`] had fewer cached tokens than the worker
    /// was believed to hold.
    pub fn misses_cache<'a>(&self, which: impl Into<Which<'a>>) -> bool {
        self.with_worker(which, |worker| worker.engine_run.is_doubted())
            .unwrap_or_default()
    }

    /// The engine says whether finished prompts stay in its cache. What the configuration denies stays
    /// denied.
    pub fn report_prefix_cache<'a>(&self, which: impl Into<Which<'a>>, keeps: bool) {
        self.with_worker(which, |worker| {
            worker.keeps_prefixes = worker.spec.prefix_cache && keeps;
        });
    }

    /// Takes over the capacity and page size that an engine reports, where none was configured.
    pub fn report_capacity<'a>(&self, which: impl Into<Which<'a>>, kv_capacity_tokens: u64) {
        let mut state = self.state.lock();
        let Some(slot) = state.slot_of(which) else {
            return;
        };
        let Some(worker) = &mut state.workers[slot] else {
            return;
        };
        if worker.spec.kv_capacity_tokens.is_none()
            && worker.kv_capacity_tokens != Some(kv_capacity_tokens)
        {
            worker.kv_capacity_tokens = Some(kv_capacity_tokens);
            let (block, capacity) = (worker.estimate_block, worker.estimate_capacity_tokens());
            state.set_estimate_capacity(slot, block, capacity);
            self.settle(state);
        }
    }

    /// Counts a failure against the worker, of a request that was placed on it at `begun_s`.
    pub fn blame<'a>(&self, which: impl Into<Which<'a>>, begun_s: f64) {
        let now_s = self.now_s();
        self.with_worker(which, |worker| worker.circuit.failed(now_s, begun_s));
    }

    /// Whether the worker is up; none where there is no such worker.
    pub fn health<'a>(&self, which: impl Into<Which<'a>>) -> Option<bool> {
        self.with_worker(which, |worker| worker.healthy)
    }

    /// Takes over an engine's load report.
    pub fn report_load<'a>(&self, which: impl Into<Which<'a>>, load: EngineLoad) {
        let which = which.into();
        let now_s = self.now_s();
        self.with_worker(which, |worker| worker.take_report(load, now_s));
        if let Some(capacity) = load.capacity_tokens {
            self.report_capacity(which, capacity);
        }
    }

    /// The engine has stopped to report its load: what its last report had beyond the router's own
    /// requests may be long over.
    pub fn end_load_reports<'a>(&self, which: impl Into<Which<'a>>) {
        self.with_worker(which, Worker::forget_report);
    }
}

impl State {
    /// False when events before these are missing.
    fn apply_kv_events(&mut self, slot: usize, events: &[KvEvent]) -> bool {
        let mut all = true;
        for event in events {
            self.workers.marks.add(slot);
            let is_applied = self.exact.apply(slot, event);
            all &= is_applied;
            let is_clear = *event == KvEvent::Cleared;
            if is_clear {
                self.forget_prefixes(slot);
            }
            if let Some(worker) = &mut self.workers[slot] {
                // Nothing that came before it is of any use any more.
                worker.lacks_events = !is_clear && (worker.lacks_events || !is_applied);
            }
        }
        all
    }

    /// Answers lacked what the worker was estimated to hold. What its KV events tell stays: only the engine
    /// itself ends that, by a clearing event, a new run or a gap. Later events name blocks of earlier ones as
    /// their parents, so that an index cleared by a guess would refuse them all.
    pub(super) fn give_up_estimate(&mut self, slot: usize) {
        match &self.workers[slot] {
            Some(worker) if worker.prefix_source == PrefixSource::Events => {
                self.forget_estimate(slot)
            }
            _ => self.forget_cache(slot),
        }
    }

    /// The worker's cache is gone, and with it the places on it.
    pub(super) fn forget_cache(&mut self, slot: usize) {
        self.forget_prefixes(slot);
        if let Some(worker) = &self.workers[slot] {
            let spec = Arc::clone(&worker.spec);
            self.admission.lose_all(slot, &spec);
        }
    }
}
