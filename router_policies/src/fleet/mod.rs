//! The fleet: workers, what they are doing, what they hold, and the one lock under which a policy
//! picks and the pick is reserved.
//!
//! Owns every counter that policies see. Knows nothing of HTTP: the gateway reports what happened
//! to a request through its [`Reservation`].

mod batch;
mod circuit;
mod engine_run;
mod kinds;
mod learning;
mod liveness;
pub mod log;
mod placing;
mod prefills;
pub mod prefix;
mod rates;
mod reservation;
pub mod residency;
mod which;
mod whole;
mod worker;

pub use placing::{Admit, Refused, Ticket};
pub use reservation::{Outcome, PrefillWatch, Reservation, Usage};
pub use which::Which;
pub use whole::Separable;
pub(crate) use worker::SGLANG_GROUP;
pub use worker::{EngineLoad, Load, WorkerSnapshot};

use crate::config::{Engine, WorkerSpec};
use crate::policy::{Policy, Refusal, RequestFacts, Role, Route, View, WorkerFacts};
use kinds::{Beliefs, Kinds};
use log::{EventSink, PrefixSource};
use lru::LruCache;
use parking_lot::Mutex;
use prefix::estimate::{EstimateTree, strided};
use prefix::events::{ExactIndex, KvEvent};
use prefix::hash::{PromptHashes, Unit};
use reservation::Share;
use residency::settings::{self, Chosen};
use residency::{Residency, Site};
use smallvec::SmallVec;
use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;
use worker::Worker;

/// Tokens a block of the prefix estimate, where the worker's pages are not larger.
pub const ESTIMATE_BLOCK_TOKENS: usize = 16;
/// Assumed where neither the configuration nor the engine says: bounds the estimate's memory.
pub const DEFAULT_KV_CAPACITY_TOKENS: u64 = 1 << 20;
const SESSIONS: usize = 1 << 17;
const COMPLAINT_INTERVAL_S: f64 = 10.0;

/// A request, as the gateway parsed it.
#[derive(Clone, Debug, Default)]
pub struct Request {
    pub request_id: String,
    pub session_id: Option<String>,
    pub prompt: PromptHashes,
    /// The request's own limit on output tokens.
    pub max_output_tokens: Option<u64>,
    /// The answer comes in pieces, the first of which tells when the prefill ended.
    pub stream: bool,
    pub hints: Hints,
    /// When its headers came, by the fleet's clock, where that is known.
    pub received_s: Option<f64>,
    /// By the fleet's clock, where it has been tried before: it queues as one that came then.
    pub arrived_s: Option<f64>,
    /// Which workers may share it.
    pub separable: Separable,
    /// Answers that are made of it at once, of all its prompts together; 0 counts as one.
    pub answers: u64,
    /// Prompts that it carries, of about the same length; 0 counts as one.
    pub prompts: u64,
}

/// What a request's headers say of its session.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Hints {
    /// No further turn comes.
    pub ends: bool,
    /// The next turn comes so long after this one's end.
    pub idle_s: Option<f64>,
    /// The session that this one is a sub-agent of.
    pub parent_session: Option<String>,
}

/// What is known of a worker's cache where its KV events begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EventsBegin {
    /// They are followed from the engine's start on, or it holds nothing.
    Whole,
    /// It may hold what earlier events told.
    Partial,
}

#[derive(Clone, Copy, Debug)]
struct Session {
    slot: usize,
    serial: u64,
    turns: u32,
}

pub(crate) struct State {
    /// By slot; a slot is reused once its worker is gone and nothing is reserved on it.
    workers: Vec<Option<Worker>>,
    token_trees: Vec<(usize, EstimateTree)>,
    text_tree: EstimateTree,
    exact: ExactIndex,
    sessions: LruCache<u64, Session>,
    sequence: u64,
    next_serial: u64,
    separated_inflight: u32,
    /// Prefills whose end nothing will tell, by when they are predicted to end (µs) and id.
    untold: BTreeMap<(u64, u64), Share>,
    mean_output_tokens: f64,
    kinds: Kinds,
    random: fastrand::Rng,
    facts: Vec<WorkerFacts>,
    held_blocks: Vec<u32>,
    /// Those of [`State::sites`], kept so that a decision does not make them anew.
    spare_sites: Vec<Site>,
    /// Where the worker of an id is, of those that have not been removed.
    slots: HashMap<String, usize>,
    residency: Residency,
}

/// Seconds since some beginning.
type Clock = Box<dyn Fn() -> f64 + Send + Sync>;

/// The workers and all that is known of them.
pub struct Fleet {
    state: Mutex<State>,
    policy: Box<dyn Policy>,
    policy_name: String,
    sink: EventSink,
    clock: Clock,
    token_block: AtomicUsize,
    complaints: Mutex<Complaints>,
}

/// Of a policy that chooses workers which are no candidates.
#[derive(Default)]
struct Complaints {
    last_s: Option<f64>,
    unsaid: u64,
}

impl Fleet {
    /// A fleet without workers.
    pub fn new(policy: Box<dyn Policy>, policy_name: String, sink: EventSink, seed: u64) -> Self {
        let started = Instant::now();
        let clock = Box::new(move || started.elapsed().as_secs_f64());
        Self::with_clock(policy, policy_name, sink, seed, clock)
    }

    /// A fleet without workers, for which time passes as `clock` says.
    pub fn with_clock(
        policy: Box<dyn Policy>,
        policy_name: String,
        sink: EventSink,
        seed: u64,
        clock: Clock,
    ) -> Self {
        Self {
            state: Mutex::new(State {
                workers: Vec::new(),
                token_trees: Vec::new(),
                text_tree: EstimateTree::default(),
                exact: ExactIndex::default(),
                sessions: LruCache::new(NonZeroUsize::new(SESSIONS).unwrap_or(NonZeroUsize::MIN)),
                sequence: 0,
                next_serial: 0,
                separated_inflight: 0,
                untold: BTreeMap::new(),
                mean_output_tokens: 256.0,
                kinds: Kinds::default(),
                random: fastrand::Rng::with_seed(seed),
                facts: Vec::new(),
                held_blocks: Vec::new(),
                spare_sites: Vec::new(),
                slots: HashMap::new(),
                residency: Residency::new(ungated()),
            }),
            policy,
            policy_name,
            sink,
            clock,
            token_block: AtomicUsize::new(ESTIMATE_BLOCK_TOKENS),
            complaints: Mutex::default(),
        }
    }

    /// The same fleet with another rule of residency; without it, the rule is `off`.
    #[must_use]
    pub fn with_residency(self, chosen: Chosen) -> Self {
        self.state.lock().residency = Residency::new(chosen);
        self
    }

    /// Block, in tokens, that prompts must be hashed in now.
    pub fn token_block(&self) -> usize {
        self.token_block.load(Ordering::Relaxed)
    }

    pub fn policy_name(&self) -> &str {
        &self.policy_name
    }

    /// Where decision and finish events go.
    pub fn sink(&self) -> &EventSink {
        &self.sink
    }

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
        let same = |w: &&Worker| !w.removed && place_of(&w.spec) == place_of(&spec);
        if let Some(other) = state.workers.iter().flatten().find(same) {
            let (id, other) = (&spec.id, &other.spec.id);
            return Err(format!("worker {id}: url: it is that of worker {other}"));
        }
        let serial = state.next_serial;
        state.next_serial += 1;
        let block = estimate_block(&spec);
        let spec = Arc::new(spec);
        let now_s = self.now_s();
        let kind = state.kinds.of(&spec);
        let beliefs = Beliefs::new(state.kinds.rates(kind), now_s);
        let worker = Worker::new(Arc::clone(&spec), serial, block, (kind, beliefs));
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
        state.residency.clear(slot);
        if !state.token_trees.iter().any(|(size, _)| *size == block) {
            state.token_trees.push((block, EstimateTree::default()));
        }
        state.set_estimate_capacity(slot, block, capacity);
        self.set_token_block(&state);
        Ok(spec)
    }

    /// The coarsest block that fits every worker's.
    fn set_token_block(&self, state: &State) {
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

    /// From now on the worker's KV events tell what it holds, in pages of `page_size` tokens until they
    /// tell their own; what was known before is forgotten. False if there is no such worker.
    pub fn begin_kv_events<'a>(&self, which: impl Into<Which<'a>>, page_size: usize) -> bool {
        self.follow_kv_events(which, page_size, EventsBegin::Whole)
    }

    /// As [`Fleet::begin_kv_events`]; `begin` says whether what the worker held before is known.
    pub(crate) fn follow_kv_events<'a>(
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
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let Some(slot) = state.slot_of(which) else {
            return true;
        };
        self.learn_page_size(state, slot, events);
        let mut all = true;
        for event in events {
            let is_applied = state.exact.apply(slot, event);
            all &= is_applied;
            let is_clear = *event == KvEvent::Cleared;
            if is_clear {
                state.forget_prefixes(slot);
            }
            if let Some(worker) = &mut state.workers[slot] {
                // Nothing that came before it is of any use any more.
                worker.lacks_events = !is_clear && (worker.lacks_events || !is_applied);
            }
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
            KvEvent::Stored { block_size, .. } => Some((*block_size).max(1)),
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

    /// How often the worker came up; none while it is down or where there is none.
    pub fn incarnation<'a>(&self, which: impl Into<Which<'a>>) -> Option<u64> {
        self.with_worker(which, |worker| worker.healthy.then_some(worker.incarnation))
            .flatten()
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
            worker.incarnation += 1;
            worker.circuit = circuit::Circuit::default();
            worker.liveness.renew(now_s);
            if !worker.engine_run.is_confirmed() {
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
                worker.snapshot(state.residency.snapshot(site.as_ref(), slot))
            })
            .collect()
    }

    /// Whether the policy could place a request now.
    pub fn is_ready(&self) -> bool {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        state.fill_facts(&[], self.now_s());
        self.would_place(state)
    }

    /// Whether the policy finds a place for some request among the facts that are filled in.
    fn would_place(&self, state: &State) -> bool {
        let request = RequestFacts::default();
        let view = View {
            workers: &state.facts,
            request: &request,
            sequence: 0,
            random: 0,
            separated_inflight: 0,
        };
        self.policy.decide(&view).is_ok()
    }

    /// Whether the policy could place a request if every worker were up.
    pub fn could_place(&self) -> bool {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        state.fill_facts(&[], self.now_s());
        for facts in &mut state.facts {
            facts.routable = facts.serves_local || facts.serves_prefill || facts.serves_decode;
        }
        self.would_place(state)
    }

    /// Seconds by the fleet's clock.
    pub fn now_s(&self) -> f64 {
        (self.clock)()
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

    fn with_worker<'a, R>(
        &self,
        which: impl Into<Which<'a>>,
        change: impl FnOnce(&mut Worker) -> R,
    ) -> Option<R> {
        let mut state = self.state.lock();
        let slot = state.slot_of(which)?;
        state.workers[slot].as_mut().map(change)
    }

    /// True when nothing is reserved anywhere and every counter agrees.
    pub fn is_idle(&self) -> bool {
        let state = self.state.lock();
        state.separated_inflight == 0
            && state.residency.is_quiet()
            && state
                .workers
                .iter()
                .flatten()
                .all(|worker| worker.load == worker::Load::default())
    }
}

impl State {
    fn slot_of<'a>(&self, which: impl Into<Which<'a>>) -> Option<usize> {
        let which = which.into();
        let slot = *self.slots.get(which.id())?;
        let worker = self.workers[slot].as_ref()?;
        which.is(&worker.spec).then_some(slot)
    }

    fn fill_facts(&mut self, exclude: &[String], now_s: f64) {
        self.end_untold(now_s);
        self.forget_rates(now_s);
        self.facts.clear();
        for (slot, worker) in self.workers.iter().enumerate() {
            self.facts.push(match worker {
                Some(worker) => WorkerFacts {
                    kept_tokens: self.kept_tokens(slot, worker),
                    ..worker.facts(slot, exclude, self.mean_output_tokens, now_s)
                },
                None => Worker::absent(slot),
            });
        }
        self.pardon(exclude, now_s);
    }

    /// Tokens that a worker is believed to have in its cache, of all prompts together.
    fn kept_tokens(&self, slot: usize, worker: &Worker) -> u64 {
        let mut tokens = self.text_tree.held_blocks(slot) * ESTIMATE_BLOCK_TOKENS as u64;
        tokens += if worker.needs_estimate() {
            let trees = self.token_trees.iter();
            let its = trees.filter(|(block, _)| *block == worker.estimate_block);
            its.map(|(block, tree)| tree.held_blocks(slot) * *block as u64)
                .sum::<u64>()
        } else {
            (self.exact.held_blocks(slot) * worker.page_size) as u64
        };
        tokens
    }

    /// The workers that may answer requests, as residency sees them. Those that are suspected to hang
    /// get nothing, unless all are that are not in `exclude`, nor do those that rest: see [`State::pardon`].
    fn sites(&mut self, exclude: &[String], now_s: f64) -> Vec<Site> {
        let mut sites = std::mem::take(&mut self.spare_sites);
        let mut count = 0;
        let (mut has_suspect, mut has_other) = (false, false);
        for (slot, worker) in self.workers.iter().enumerate() {
            let Some(worker) = worker.as_ref().filter(|worker| worker.is_site()) else {
                continue;
            };
            match sites.get_mut(count) {
                Some(site) => worker.renew_site(site, slot, now_s),
                None => sites.push(worker.site(slot, now_s)),
            }
            let site = &sites[count];
            let is_suspect = worker.liveness.is_suspect();
            has_suspect |= is_suspect;
            has_other |= !is_suspect && site.routable && !exclude.contains(&site.spec.id);
            count += 1;
        }
        sites.truncate(count);
        let is_open = |site: &Site| site.routable && !exclude.contains(&site.spec.id);
        if !sites.iter().any(is_open) {
            for site in &mut sites {
                let worker = self.workers[site.slot].as_ref();
                site.routable = worker.is_some_and(|worker| worker.is_up(&[]));
            }
        }
        if has_suspect && has_other {
            for site in &mut sites {
                let worker = self.workers[site.slot].as_ref();
                site.routable &= worker.is_some_and(|worker| !worker.liveness.is_suspect());
            }
        }
        sites
    }

    fn site(&self, slot: usize, now_s: f64) -> Option<Site> {
        let worker = self.workers.get(slot)?.as_ref();
        let worker = worker.filter(|worker| worker.is_site())?;
        Some(worker.site(slot, now_s))
    }

    /// Tokens of the prompt cached on each worker, by slot. The facts must be filled in.
    fn cached_by_slot(&mut self, prompt: &PromptHashes) -> Vec<u64> {
        self.facts
            .iter_mut()
            .for_each(|facts| facts.cached_tokens = 0);
        self.fill_cached(prompt);
        self.facts.iter().map(|facts| facts.cached_tokens).collect()
    }

    /// The worker's cache is gone, and with it the places on it.
    fn forget_cache(&mut self, slot: usize) {
        self.forget_prefixes(slot);
        if let Some(worker) = &self.workers[slot] {
            let spec = Arc::clone(&worker.spec);
            self.residency.lose_all(slot, &spec);
        }
    }

    /// Lets in those of the waiting turns that there is room for.
    fn pump(&mut self, now_s: f64) {
        if !self.residency.needs_pump() {
            return;
        }
        self.end_untold(now_s);
        let stale = self.residency.stale_waiters(now_s);
        if !stale.is_empty() {
            self.fill_facts(&[], now_s);
        }
        for (id, prompt) in stale {
            let cached = self.cached_by_slot(&prompt);
            self.residency.set_cached(id, cached, now_s);
        }
        let sites = self.sites(&[], now_s);
        self.residency.pump(&sites, now_s);
        self.spare_sites = sites;
    }

    fn fill_cached(&mut self, prompt: &PromptHashes) {
        let count = self.workers.len();
        let mut apply = |tree: &EstimateTree,
                         states: &[u64],
                         block: usize,
                         tokens: Option<usize>| {
            self.held_blocks.clear();
            self.held_blocks.resize(count, 0);
            tree.matched(states, &mut self.held_blocks);
            for (facts, &held) in self.facts.iter_mut().zip(&self.held_blocks) {
                let worker = self.workers[facts.slot].as_ref();
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
        let mut by_page: SmallVec<[(usize, Vec<u32>); 2]> = SmallVec::new();
        for (slot, worker) in self.workers.iter().enumerate() {
            let Some(worker) = worker else { continue };
            // A prompt that waits is kept in larger blocks than pages may be.
            let page = worker.page_size.max(prompt.block);
            let fits = page % prompt.block == 0 && page % worker.page_size == 0;
            if worker.prefix_source != PrefixSource::Events || !fits {
                continue;
            }
            match by_page.iter_mut().find(|(other, _)| *other == page) {
                Some((_, slots)) => slots.push(slot as u32),
                None => by_page.push((page, vec![slot as u32])),
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
    fn note_prompt(&mut self, prompt: &PromptHashes, route: Route) -> [Option<u64>; 2] {
        let mut insert = |slot: usize| {
            let mut new = None;
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
    fn retract_prompt(&mut self, slot: usize, new: Option<u64>) {
        let Some(new) = new else { return };
        for (_, tree) in &mut self.token_trees {
            tree.retract(slot, new);
        }
        self.text_tree.retract(slot, new);
    }

    /// Takes back that a request was a turn of its session.
    fn retract_session(&mut self, key: u64, before: Option<Session>, slot: usize, began_s: f64) {
        let is_moved = before.is_some_and(|before| {
            let worker = self.workers.get(slot).and_then(Option::as_ref);
            worker.is_some_and(|worker| worker.serial != before.serial)
        });
        if is_moved && let Some(worker) = self.worker_mut(slot) {
            worker.forget_migration(began_s);
        }
        match before {
            Some(before) => self.sessions.put(key, before),
            None => self.sessions.pop(&key),
        };
    }

    fn request_facts(&mut self, request: &Request, session: Option<u64>) -> RequestFacts {
        let session = session.and_then(|key| self.sessions.get(&key));
        let affine = session.and_then(|session| {
            let worker = self.workers.get(session.slot)?.as_ref()?;
            (worker.serial == session.serial && !worker.removed).then_some(session.slot)
        });
        let mean = self.mean_output_tokens as u64;
        RequestFacts {
            input_tokens: request.prompt.tokens(),
            prompts: request.prompts.max(1),
            expected_output_tokens: request.max_output_tokens.map_or(mean, |max| max.min(mean)),
            has_session: request.session_id.is_some(),
            turn: session.map_or(0, |session| session.turns),
            affine,
        }
    }

    /// Notes a turn of a session; returns what was known of it before.
    fn note_session(&mut self, key: u64, slot: usize, now_s: f64) -> Option<Session> {
        let worker = self.workers[slot].as_mut()?;
        let previous = self.sessions.get(&key).copied();
        if previous.is_some_and(|session| session.serial != worker.serial) {
            worker.note_migration(now_s);
        }
        let turns = previous.map_or(0, |session| session.turns) + 1;
        let serial = worker.serial;
        self.sessions.put(
            key,
            Session {
                slot,
                serial,
                turns,
            },
        );
        previous
    }

    fn set_estimate_capacity(&mut self, slot: usize, block: usize, tokens: u64) {
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
    fn evict_excess(&mut self, slot: usize) {
        for (_, tree) in &mut self.token_trees {
            tree.evict_excess(slot);
        }
        self.text_tree.evict_excess(slot);
    }

    fn forget_prefixes(&mut self, slot: usize) {
        for (_, tree) in &mut self.token_trees {
            tree.clear(slot);
        }
        self.text_tree.clear(slot);
        self.exact.clear(slot);
    }

    fn free_if_idle(&mut self, slot: usize) {
        if self.workers[slot]
            .as_ref()
            .is_some_and(|worker| worker.removed && worker.load.requests == 0)
        {
            self.forget_prefixes(slot);
            self.workers[slot] = None;
        }
    }

    fn worker_mut(&mut self, slot: usize) -> Option<&mut Worker> {
        self.workers.get_mut(slot)?.as_mut()
    }
}

/// Where a worker listens, whatever name the loopback address is given.
fn place_of(spec: &WorkerSpec) -> String {
    let authority = spec.authority();
    let (host, port) = authority.rsplit_once(':').unwrap_or((authority, ""));
    match host {
        "localhost" | "[::1]" => format!("127.0.0.1:{port}"),
        _ => authority.to_ascii_lowercase(),
    }
}

/// The estimate's block for a worker: at least [`ESTIMATE_BLOCK_TOKENS`], in whole pages.
fn estimate_block(spec: &WorkerSpec) -> usize {
    ESTIMATE_BLOCK_TOKENS.next_multiple_of(spec.page_size)
}

/// What holds where nothing is said of residency: a fleet without a gate.
fn ungated() -> Chosen {
    let off = serde_json::json!({"rule": "off"});
    settings::build(&off).expect("the rule off has no parameters that could be wrong")
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn session_key(id: &str) -> u64 {
    let mut state = id.len() as u64;
    for chunk in id.as_bytes().chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        state = prefix::hash::step(state, u64::from_le_bytes(word));
    }
    state
}

/// A policy's answer must be one of its candidates.
fn check_candidates(view: &View<'_>, route: &Route) -> Result<(), Refusal> {
    let allowed = match *route {
        Route::Local { worker } => view.local().any(|w| w.slot == worker),
        Route::PrefillDecode { prefill, decode } => view
            .decode()
            .find(|w| w.slot == decode)
            .is_some_and(|d| view.partners(d).any(|p| p.slot == prefill)),
    };
    if allowed {
        Ok(())
    } else {
        Err(Refusal::OutsideCandidates)
    }
}

/// Whether the worker's engine serves a request that nobody prefilled for it. vLLM's decode workers do,
/// though policies spare them that: what no KV came for they compute.
pub(crate) fn can_serve_whole(spec: &WorkerSpec) -> bool {
    abilities(spec).0 || (spec.engine == Engine::Vllm && spec.role == Role::Decode)
}

/// What a worker may do: serve alone, prefill for others, decode for others. A colocated vLLM worker
/// with a connector (`kv_both`) does everything.
pub(crate) fn abilities(spec: &WorkerSpec) -> (bool, bool, bool) {
    match spec.role {
        Role::Colocated => {
            let both = spec.engine == Engine::Vllm && spec.kv_connector.is_some();
            (true, both, both)
        }
        Role::Prefill => (false, true, false),
        Role::Decode => (false, false, true),
        Role::Elastic => (true, false, true),
    }
}
