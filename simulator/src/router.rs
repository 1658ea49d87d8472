//! The real router under virtual time: the fleet and its policy, without HTTP.

use crate::cache::Change;
use crate::engine::Occupancy;
use crate::plan::{Plan, WorkerPlan};
use crate::prompts;
use decision::fleet::log::{self, EventSink};
use decision::fleet::prefix::events::KvEvent;
use decision::fleet::prefix::hash::{Namespace, PromptHashes};
use decision::fleet::{Admit, EngineLoad, Fleet, Request, Reservation, Ticket, admission};
use decision::model::{Engine, WorkerSpec};
use decision::policy;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub struct Router {
    fleet: Arc<Fleet>,
    clock: Arc<AtomicU64>,
    woken: Arc<Mutex<Vec<usize>>>,
    ids: Vec<String>,
    slots: HashMap<String, usize>,
    may_abort_queued: Vec<bool>,
    block_tokens: u64,
    hashed: prompts::Hashed,
}

impl Router {
    /// A fleet of `workers`, all up. Decisions go to `decisions`, if that is given.
    ///
    /// # Errors
    /// One line that names the policy's parameter, or the worker, that is wrong.
    pub fn new(
        plan: &Plan,
        workers: &[(String, &WorkerPlan)],
        block_tokens: u64,
        decisions: Option<&Path>,
    ) -> Result<Self, String> {
        let sink = match decisions {
            Some(path) => EventSink::to_file(path, |_| ())?,
            None => EventSink::in_memory(),
        };
        let clock = Arc::new(AtomicU64::new(0));
        let shown = Arc::clone(&clock);
        let fleet = Fleet::with_clock(
            policy::build(&plan.router.policy, plan.router.policy_params.clone())?,
            plan.router.policy.clone(),
            sink,
            plan.seed,
            Box::new(move || f64::from_bits(shown.load(Ordering::Relaxed))),
        );
        let rule = admission::settings::build(&plan.router.admission)?;
        let fleet = Arc::new(fleet.with_admission(rule));
        let mut slots = HashMap::new();
        let mut may_abort_queued = Vec::new();
        for (slot, (id, worker)) in workers.iter().enumerate() {
            let spec = spec(id, worker)?;
            may_abort_queued.push(spec.may_abort_queued());
            fleet.add_worker(spec)?;
            fleet.report_health(id, true);
            if plan.router.kv_events {
                fleet.begin_kv_events(id, block_tokens as usize);
            }
            slots.insert(id.clone(), slot);
        }
        Ok(Self {
            fleet,
            clock,
            woken: Arc::default(),
            ids: workers.iter().map(|(id, _)| id.clone()).collect(),
            slots,
            may_abort_queued,
            block_tokens,
            hashed: prompts::Hashed::default(),
        })
    }

    /// From now on it is `now_s`.
    pub fn set_time(&self, now_s: f64) {
        self.clock.store(now_s.to_bits(), Ordering::Relaxed);
        log::set_virtual_unix_s(Some(now_s));
    }

    /// A prompt of a session and play as the fleet hashes it now.
    pub fn hashes(
        &mut self,
        of: (usize, u32),
        is_last: bool,
        prompt: &prompts::Prompt,
    ) -> PromptHashes {
        let block = self.fleet.token_block();
        self.hashed
            .make(of, is_last, prompt, block, self.block_tokens)
    }

    /// Asks for a place for the request that the simulation calls `number`.
    pub fn admit(&self, number: usize, request: &Request) -> Admit {
        let woken = Arc::clone(&self.woken);
        let wake = move || woken.lock().push(number);
        self.fleet.admit(request, &[], wake)
    }

    /// Asks again for one that has waited.
    pub fn place_ticket(&self, ticket: Ticket, request: &Request) -> Admit {
        self.fleet.place_ticket(ticket, request, &[])
    }

    /// Requests that wait and are worth another try.
    pub fn take_woken(&self) -> Vec<usize> {
        std::mem::take(&mut *self.woken.lock())
    }

    /// Lets time have its effect on those who wait.
    pub fn pump(&self) {
        self.fleet.pump();
    }

    /// When that is next worth while.
    pub fn next_pump_s(&self) -> Option<f64> {
        self.fleet.next_pump_s()
    }

    /// The worker that answers a reservation.
    pub fn worker_of(&self, reservation: &Reservation) -> usize {
        self.slots[&reservation.answering().id]
    }

    /// The worker that prefills for the one that answers, where that is another.
    pub fn prefill_of(&self, reservation: &Reservation) -> Option<usize> {
        reservation.prefill().map(|worker| self.slots[&worker.id])
    }

    /// Whether the router aborts a request that is queued in a worker when its client leaves.
    pub fn may_abort_queued(&self, worker: usize) -> bool {
        self.may_abort_queued[worker]
    }

    pub fn report_load(&self, worker: usize, occupancy: Occupancy) {
        let load = EngineLoad {
            running_requests: occupancy.running,
            waiting_requests: occupancy.waiting,
            used_tokens: Some(occupancy.used_tokens),
            capacity_tokens: Some(occupancy.capacity_tokens),
            ..EngineLoad::default()
        };
        self.fleet.report_load(&self.ids[worker], load);
    }

    pub fn apply_changes(&self, worker: usize, changes: Vec<Change>) {
        let events: Vec<KvEvent> = changes
            .into_iter()
            .map(|change| match change {
                Change::Stored {
                    tier,
                    parent,
                    blocks,
                } => KvEvent::Stored {
                    tier,
                    tokens: prompts::block_tokens(&blocks, self.block_tokens),
                    blocks,
                    parent,
                    block_size: self.block_tokens as usize,
                    namespace: Namespace::default(),
                },
                Change::Removed { tier, blocks } => KvEvent::Removed { tier, blocks },
            })
            .collect();
        let applied = self.fleet.apply_kv_events(&self.ids[worker], &events);
        debug_assert!(applied, "events come in their order");
    }

    /// The simulated time is over.
    pub fn end_time(&self) {
        log::set_virtual_unix_s(None);
    }

    /// True when nothing is reserved anywhere.
    pub fn is_idle(&self) -> bool {
        self.fleet.is_idle()
    }
}

fn spec(id: &str, worker: &WorkerPlan) -> Result<WorkerSpec, String> {
    let spec = serde_json::json!({
        "id": id,
        "url": format!("http://{id}:1"),
        "role": worker.role,
        "engine": worker.engine,
        "kv_capacity_tokens": worker.kv_tokens,
        "host_kv_tokens": (worker.host_kv_tokens > 0).then_some(worker.host_kv_tokens),
        "prefix_cache": worker.prefix_cache,
        "page_size": if worker.engine == Engine::Vllm { 16 } else { 1 },
    });
    serde_json::from_value(spec).map_err(|error| format!("worker {id}: {error}"))
}
