//! One worker's state.

use super::admission::{AdmissionSnapshot, Site};
use super::batch::BatchTime;
use super::circuit::Circuit;
use super::engine_run::EngineRun;
use super::kinds::Beliefs;
use super::liveness::{Liveness, Pulse};
use super::load::Load;
use super::log::PrefixSource;
use super::prefills::PrefillQueue;
use super::prefix::hash::PromptHashes;
use super::rates::{self, Prior};
use super::{DEFAULT_KV_CAPACITY_TOKENS, abilities};
use crate::model::{Connector, Engine, WorkerSpec};
use crate::policy::{Rates, Role, WorkerFacts};
use serde::Serialize;
use std::collections::VecDeque;
use std::sync::Arc;

/// So many reports in a row make requests that are not ours believable enough to keep room for.
const EXTERNAL_REPORTS: u32 = 3;
/// After so many contradictions in a row KV events are not taken for all that there is.
const CONTRADICTIONS: u32 = 2;
/// Migrations older than this are forgotten.
const MIGRATION_WINDOW_S: f64 = 60.0;

/// The transfer group of SGLang's workers.
pub const SGLANG_GROUP: u32 = 0;

pub(crate) struct Worker {
    pub spec: Arc<WorkerSpec>,
    /// As admission sees it: with this router's share of the host tier.
    shared_spec: Arc<WorkerSpec>,
    /// Routers that share it, this one among them.
    routers: u64,
    /// Never reused, unlike the slot.
    pub serial: u64,
    pub estimate_block: usize,
    pub healthy: bool,
    pub draining: bool,
    /// Left the fleet; stays until its last request ends.
    pub removed: bool,
    pub load: Load,
    pub kv_capacity_tokens: Option<u64>,
    /// Which of [`super::kinds::Kinds`].
    pub kind: usize,
    pub beliefs: Beliefs,
    pub prior: Prior,
    pub prefills: PrefillQueue,
    pub batch_time: BatchTime,
    pub circuit: Circuit,
    pub liveness: Liveness,
    pub engine_run: EngineRun,
    pub prefix_source: PrefixSource,
    /// Pages of the KV events, in tokens.
    pub page_size: usize,
    /// Some of what it holds was told by KV events that were missed.
    pub lacks_events: bool,
    /// How often in a row its engine has found what was gone as its KV events said.
    contradictions: u32,
    /// Finished prompts stay in its cache, as far as is known.
    pub keeps_prefixes: bool,
    pub incarnation: u64,
    /// The last load report, and the requests in it that are not ours.
    pub engine: Option<EngineLoad>,
    pub external_requests: u32,
    /// How many reports in a row had some.
    external_reports: u32,
    /// KV tokens that requests need which came since the last report.
    pub came_tokens: u64,
    pub drift: Drift,
    pub decisions: u64,
    migrations: VecDeque<f64>,
}

/// An engine's own report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct EngineLoad {
    pub running_requests: u32,
    pub waiting_requests: u32,
    pub used_tokens: Option<u64>,
    pub capacity_tokens: Option<u64>,
    /// What it says of the scheduler's life.
    #[serde(skip)]
    pub pulse: Pulse,
}

/// How far the router's counters and the engine's reports were apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Drift {
    pub reports: u64,
    /// Reports that differed from the counters.
    pub corrections: u64,
    /// Requests that the engine had and the router did not, over all reports.
    pub requests_over: u64,
    /// Requests that the router had and the engine did not.
    pub requests_under: u64,
}

/// A worker as `/workers` and the metrics show it.
#[derive(Clone, Debug, Serialize)]
pub struct WorkerSnapshot {
    #[serde(skip)]
    pub spec: Arc<WorkerSpec>,
    pub healthy: bool,
    pub draining: bool,
    /// Its scheduler seems to stand still.
    pub suspect: bool,
    #[serde(flatten)]
    pub load: Load,
    pub kv_capacity_tokens: Option<u64>,
    pub rates: Rates,
    pub circuit_open: bool,
    pub engine: Option<EngineLoad>,
    pub drift: Drift,
    pub prefix_source: PrefixSource,
    pub decisions: u64,
    pub admission: AdmissionSnapshot,
}

impl Worker {
    /// A worker of a kind, of which this is believed.
    pub fn new(
        spec: Arc<WorkerSpec>,
        serial: u64,
        estimate_block: usize,
        (kind, beliefs): (usize, Beliefs),
    ) -> Self {
        let prior = rates::prior(&spec);
        Self {
            keeps_prefixes: spec.prefix_cache,
            kv_capacity_tokens: spec.kv_capacity_tokens,
            kind,
            beliefs,
            prior,
            shared_spec: Arc::clone(&spec),
            routers: 1,
            spec,
            serial,
            estimate_block,
            healthy: false,
            draining: false,
            removed: false,
            load: Load::default(),
            prefills: PrefillQueue::default(),
            batch_time: BatchTime::default(),
            circuit: Circuit::default(),
            liveness: Liveness::default(),
            engine_run: EngineRun::default(),
            prefix_source: PrefixSource::Estimate,
            page_size: 1,
            lacks_events: false,
            contradictions: 0,
            incarnation: 0,
            engine: None,
            external_requests: 0,
            external_reports: 0,
            came_tokens: 0,
            drift: Drift::default(),
            decisions: 0,
            migrations: VecDeque::new(),
        }
    }

    /// From now on so many routers share it.
    pub fn share_among(&mut self, routers: u64) {
        self.routers = routers.max(1);
        self.shared_spec = match self.spec.host_kv_tokens {
            Some(tokens) if self.routers > 1 => Arc::new(WorkerSpec {
                host_kv_tokens: Some(tokens / self.routers),
                ..WorkerSpec::clone(&self.spec)
            }),
            _ => Arc::clone(&self.spec),
        };
    }

    /// This router's share of the KV.
    fn own_kv_tokens(&self) -> Option<u64> {
        self.kv_capacity_tokens.map(|tokens| tokens / self.routers)
    }

    /// What requests of others hold of it.
    fn taken_of_own_tokens(&self) -> u64 {
        let all = self.kv_capacity_tokens.unwrap_or(0);
        let of_other_routers = all - all / self.routers;
        self.external_tokens().saturating_sub(of_other_routers)
    }

    /// Whether the estimate says what it holds, alone or beside KV events that are not all there.
    pub fn needs_estimate(&self) -> bool {
        self.prefix_source == PrefixSource::Estimate
            || self.lacks_events
            || self.contradictions >= CONTRADICTIONS
    }

    /// The engine has found what was gone as its KV events said, or not. Where the router's tokens are not the
    /// engine's, events tell nothing of what it holds of a prompt.
    pub fn compare_events(&mut self, was_there: bool) {
        if self.contradictions >= CONTRADICTIONS {
            return;
        }
        self.contradictions = if was_there {
            self.contradictions + 1
        } else {
            0
        };
        if self.contradictions == CONTRADICTIONS {
            ::log::warn!(
                "worker {}: its engine finds prompts cached that its KV events do not tell of: their tokens \
                 are not those that the router counts; what was sent there counts too",
                self.spec.id
            );
        }
    }

    /// Whether the estimate says what it holds of a prompt. KV events of SGLang 0.5.17 do not say whose
    /// adapter's a block is, so they never tell of such prompts.
    pub fn needs_estimate_of(&self, prompt: &PromptHashes) -> bool {
        let is_untold = prompt.namespace.is_apart() && self.spec.engine == Engine::Sglang;
        self.needs_estimate() || is_untold
    }

    /// Tokens of prompts that it keeps, in either tier: engines write through to host memory, so that it
    /// holds what the device does too.
    pub fn estimate_capacity_tokens(&self) -> u64 {
        let device = self.kv_capacity_tokens;
        let device = device.unwrap_or(DEFAULT_KV_CAPACITY_TOKENS);
        device.max(self.spec.host_kv_tokens.unwrap_or(0)) / self.routers
    }

    /// Takes over an engine's report. What it has beyond our reservations is someone else's, and
    /// counts as load until the next report.
    pub fn take_report(&mut self, load: EngineLoad, now_s: f64) {
        self.liveness.report(now_s, load.pulse);
        let reported = load.running_requests + load.waiting_requests;
        self.external_requests = reported.saturating_sub(self.load.requests);
        self.external_reports = match self.external_requests {
            0 => 0,
            _ => self.external_reports + 1,
        };
        let under = self.load.requests.saturating_sub(reported);
        self.drift.reports += 1;
        self.drift.corrections += u64::from(reported != self.load.requests);
        self.drift.requests_over += u64::from(self.external_requests);
        self.drift.requests_under += u64::from(under);
        self.engine = Some(load);
        self.came_tokens = 0;
    }

    /// The last report says nothing of the present any more.
    pub fn forget_report(&mut self) {
        self.engine = None;
        self.external_requests = 0;
        self.external_reports = 0;
    }

    /// Whether the worker may get new requests, unless it is suspected to hang.
    pub fn may_get_requests(&self, exclude: &[String], now_s: f64) -> bool {
        self.is_up(exclude) && self.circuit.allows(now_s)
    }

    /// As [`Worker::may_get_requests`], though it rests after failures.
    pub fn is_up(&self, exclude: &[String]) -> bool {
        self.healthy && !self.draining && !self.removed && !exclude.contains(&self.spec.id)
    }

    /// Whether nothing should be expected of it: it is down, or suspected to hang.
    pub fn is_doubtful(&self) -> bool {
        !self.healthy || self.liveness.is_suspect()
    }

    /// How much longer the prefills reserved here take than they would alone.
    pub fn slowdown(&self) -> f64 {
        match self.load.decoding {
            0 => 1.0,
            _ => self.beliefs.rates.paced_slowdown,
        }
    }

    /// Books the time that has passed; to be called before what decodes or prefills here changes.
    pub fn pass(&mut self, now_s: f64) {
        let prefills = !self.prefills.is_empty();
        self.batch_time.pass(now_s, &self.load, prefills);
    }

    /// KV tokens that requests hold which run here or are on their way. The engine's report counts what
    /// they share once; where some wait in it, or none comes, their whole prompts count.
    fn held_tokens(&self) -> u64 {
        match self.engine {
            Some(EngineLoad {
                waiting_requests: 0,
                used_tokens: Some(used),
                ..
            }) => used + self.came_tokens,
            _ => self.load.ongoing_tokens,
        }
    }

    /// Until when the facts of `now_s` hold, if nothing here is changed.
    pub fn facts_hold_until_s(&self, now_s: f64) -> f64 {
        if !self.prefills.is_empty() || self.circuit.is_open() {
            return now_s;
        }
        let is_recent = |then: &&f64| now_s - **then <= MIGRATION_WINDOW_S;
        let oldest = self.migrations.iter().find(is_recent);
        // Rather too early than too late by a rounding.
        oldest.map_or(f64::INFINITY, |then| then + 0.999 * MIGRATION_WINDOW_S)
    }

    pub fn note_migration(&mut self, now_s: f64) {
        while self
            .migrations
            .front()
            .is_some_and(|then| now_s - then > MIGRATION_WINDOW_S)
        {
            self.migrations.pop_front();
        }
        self.migrations.push_back(now_s);
    }

    /// The session that moved here at `then_s` was not served.
    pub fn forget_migration(&mut self, then_s: f64) {
        if let Some(at) = self.migrations.iter().rposition(|&s| s == then_s) {
            self.migrations.remove(at);
        }
    }

    fn recent_migrations(&self, now_s: f64) -> u32 {
        // Few are old: the last one that came took away those that were.
        let is_old = |then: &&f64| now_s - **then > MIGRATION_WINDOW_S;
        let old = self.migrations.iter().take_while(is_old).count();
        (self.migrations.len() - old) as u32
    }

    /// KV that requests of others hold: their part of what is in use, by number. A report that comes
    /// while one of ours ends counts that as another's, so it has to be seen in several reports.
    fn external_tokens(&self) -> u64 {
        let Some(engine) = self.engine else { return 0 };
        let reported = u64::from(engine.running_requests + engine.waiting_requests);
        match engine.used_tokens {
            Some(used) if self.external_reports >= EXTERNAL_REPORTS => {
                used * u64::from(self.external_requests) / reported.max(1)
            }
            _ => 0,
        }
    }

    /// Whether admission sees the worker: not where it only prefills for others.
    pub fn is_site(&self) -> bool {
        let (serves_local, _, serves_decode) = abilities(&self.spec);
        !self.removed && (serves_local || serves_decode)
    }

    /// The worker as admission sees it, suspected to hang or not, where [`Worker::is_site`].
    pub fn site(&self, slot: usize, now_s: f64) -> Site {
        let (serves_local, ..) = abilities(&self.spec);
        let used = self.engine.and_then(|engine| engine.used_tokens);
        let capacity = self.kv_capacity_tokens;
        Site {
            slot,
            serial: self.serial,
            spec: Arc::clone(&self.shared_spec),
            routable: self.may_get_requests(&[], now_s),
            prefills: serves_local,
            kv_capacity_tokens: self.own_kv_tokens(),
            external_tokens: self.taken_of_own_tokens(),
            is_exact: !self.needs_estimate(),
            keeps_prefixes: self.keeps_prefixes,
            used_share: used_share(used, capacity),
            rates: self.beliefs.rates,
        }
    }

    /// Makes of an older site what [`Worker::site`] is now. What never changes of a worker stays, so
    /// that thousands of them cost no count of references.
    pub fn renew_site(&self, site: &mut Site, slot: usize, now_s: f64) {
        if site.serial != self.serial
            || site.slot != slot
            || !Arc::ptr_eq(&site.spec, &self.shared_spec)
        {
            *site = self.site(slot, now_s);
            return;
        }
        let used = self.engine.and_then(|engine| engine.used_tokens);
        let capacity = self.kv_capacity_tokens;
        site.routable = self.may_get_requests(&[], now_s);
        site.kv_capacity_tokens = self.own_kv_tokens();
        site.external_tokens = self.taken_of_own_tokens();
        site.is_exact = !self.needs_estimate();
        site.keeps_prefixes = self.keeps_prefixes;
        site.used_share = used_share(used, capacity);
        site.rates = self.beliefs.rates;
    }

    /// The worker as policies see it, but for what it has cached and how fast it frees room.
    pub fn facts(&self, slot: usize, exclude: &[String], now_s: f64) -> WorkerFacts {
        let held_tokens = self.held_tokens();
        let rates = self.beliefs.rates;
        let (serves_local, serves_prefill, serves_decode) = abilities(&self.spec);
        WorkerFacts {
            slot,
            role: self.spec.role,
            routable: self.may_get_requests(exclude, now_s) && !self.liveness.is_suspect(),
            admits: true,
            serves_local,
            serves_prefill,
            serves_decode,
            transfer_group: match (self.spec.engine, self.spec.kv_connector) {
                (Engine::Sglang, _) => SGLANG_GROUP,
                (Engine::Vllm, None | Some(Connector::Nixl)) => 1,
                (Engine::Vllm, Some(Connector::Mooncake)) => 2,
            },
            requests: self.load.requests + self.external_requests,
            prefilling: self.load.prefilling,
            decoding: self.load.decoding,
            pending_prefill_tokens: self.load.pending_prefill_tokens,
            prefill_wait_s: self.prefills.wait_s(&rates, self.slowdown(), now_s),
            decode_tokens: self.load.decode_tokens,
            arriving: self.load.arriving,
            arriving_tokens: self.load.arriving_tokens,
            ongoing_tokens: self.load.ongoing_tokens,
            held_tokens,
            freed_tokens_per_s: 0.0,
            kept_tokens: 0,
            kv_capacity_tokens: self.kv_capacity_tokens,
            cached_tokens: 0,
            recent_migrations: self.recent_migrations(now_s),
            rates,
        }
    }

    /// An empty slot: a worker that can do nothing.
    pub fn absent(slot: usize) -> WorkerFacts {
        WorkerFacts {
            slot,
            role: Role::Colocated,
            routable: false,
            admits: true,
            serves_local: false,
            serves_prefill: false,
            serves_decode: false,
            transfer_group: u32::MAX,
            requests: 0,
            prefilling: 0,
            decoding: 0,
            pending_prefill_tokens: 0,
            prefill_wait_s: 0.0,
            decode_tokens: 0,
            arriving: 0,
            arriving_tokens: 0,
            ongoing_tokens: 0,
            held_tokens: 0,
            freed_tokens_per_s: 0.0,
            kept_tokens: 0,
            kv_capacity_tokens: None,
            cached_tokens: 0,
            recent_migrations: 0,
            rates: Rates {
                prefill_tokens_per_s: 1.0,
                attention_pairs_per_s: 1.0,
                paced_slowdown: 1.0,
                prefill_overhead_s: 0.0,
                transfer_tokens_per_s: 1.0,
                transfer_overhead_s: 0.0,
                decode_base_s: 0.0,
                decode_per_request_s: 0.0,
                decode_per_context_token_s: 0.0,
            },
        }
    }

    pub fn snapshot(&self, admission: AdmissionSnapshot) -> WorkerSnapshot {
        WorkerSnapshot {
            spec: Arc::clone(&self.spec),
            healthy: self.healthy,
            draining: self.draining,
            suspect: self.liveness.is_suspect(),
            load: self.load,
            kv_capacity_tokens: self.kv_capacity_tokens,
            rates: self.beliefs.rates,
            circuit_open: self.circuit.is_open(),
            engine: self.engine,
            drift: self.drift,
            prefix_source: self.prefix_source,
            decisions: self.decisions,
            admission,
        }
    }
}

/// KV tokens a second that the requests which run on a worker give back, as one after the other ends, if
/// their answers are of the mean length.
pub(super) fn freed_tokens_per_s(facts: &WorkerFacts, mean_output_tokens: f64) -> f64 {
    if facts.held_tokens == 0 {
        return 0.0;
    }
    let requests = f64::from(facts.decoding.max(1));
    let step_s = facts.rates.step_s(requests, facts.decode_tokens as f64);
    facts.held_tokens as f64 / (mean_output_tokens.max(1.0) * step_s)
}

fn used_share(used_tokens: Option<u64>, capacity_tokens: Option<u64>) -> Option<f64> {
    let (used, capacity) = used_tokens.zip(capacity_tokens)?;
    Some(used as f64 / capacity.max(1) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_kept_for_requests_of_others_once_several_reports_have_them() {
        let spec = serde_json::json!({"id": "w", "url": "http://localhost:1"});
        let spec: WorkerSpec = serde_json::from_value(spec).expect("a worker");
        let beliefs = Beliefs::new(rates::prior(&spec).rates, 0.0);
        let mut worker = Worker::new(Arc::new(spec), 0, 16, (0, beliefs));
        worker.load.enter(60_000);
        let load = EngineLoad {
            running_requests: 3,
            used_tokens: Some(90_000),
            ..EngineLoad::default()
        };
        // One of ours that has just ended is in the report as another's: that is no reason to give
        // up places.
        worker.take_report(load, 0.0);
        assert_eq!(worker.external_tokens(), 0);
        worker.take_report(load, 1.0);
        worker.take_report(load, 2.0);
        assert_eq!(worker.external_tokens(), 60_000, "two of three requests");
        let ours = EngineLoad {
            running_requests: 1,
            ..load
        };
        worker.take_report(ours, 3.0);
        assert_eq!(worker.external_tokens(), 0);
    }

    #[test]
    fn routers_that_share_a_worker_have_equal_parts_of_it_less_what_strangers_hold() {
        let spec = serde_json::json!({"id": "w", "url": "http://localhost:1",
            "kv_capacity_tokens": 100_000, "host_kv_tokens": 300_000});
        let spec: WorkerSpec = serde_json::from_value(spec).expect("a worker");
        let beliefs = Beliefs::new(rates::prior(&spec).rates, 0.0);
        let mut worker = Worker::new(Arc::new(spec), 0, 16, (0, beliefs));
        let mut site = worker.site(0, 0.0);
        let mut seen = |worker: &Worker| {
            worker.renew_site(&mut site, 0, 0.0);
            let kv = site.kv_capacity_tokens.expect("known");
            (kv, site.external_tokens, site.host_tier_tokens())
        };
        let report = |worker: &mut Worker, used_tokens| {
            let load = EngineLoad {
                running_requests: 4,
                used_tokens: Some(used_tokens),
                ..EngineLoad::default()
            };
            (0..EXTERNAL_REPORTS).for_each(|_| worker.take_report(load, 0.0));
        };
        worker.share_among(2);
        assert_eq!(seen(&worker), (50_000, 0, Some(150_000)));
        report(&mut worker, 50_000);
        assert_eq!(
            seen(&worker),
            (50_000, 0, Some(150_000)),
            "the other's part"
        );
        report(&mut worker, 80_000);
        assert_eq!(seen(&worker), (50_000, 30_000, Some(150_000)), "and more");
        worker.share_among(1);
        assert_eq!(seen(&worker), (100_000, 80_000, Some(300_000)));
    }

    #[test]
    fn kv_events_that_contradict_the_engine_again_and_again_are_not_believed_alone() {
        let spec = serde_json::json!({"id": "w", "url": "http://localhost:1"});
        let spec: WorkerSpec = serde_json::from_value(spec).expect("a worker");
        let beliefs = Beliefs::new(rates::prior(&spec).rates, 0.0);
        let mut worker = Worker::new(Arc::new(spec), 0, 16, (0, beliefs));
        worker.prefix_source = PrefixSource::Events;
        for was_there in [true, false, true] {
            worker.compare_events(was_there);
            assert!(!worker.needs_estimate());
        }
        worker.compare_events(true);
        assert!(worker.needs_estimate());
        worker.compare_events(false);
        assert!(worker.needs_estimate(), "its tokens are others for good");
    }
}
