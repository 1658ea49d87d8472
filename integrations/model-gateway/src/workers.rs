//! The gateway's workers, as the decision knows them: which there are, whether they are up, how much KV they hold and
//! what they are doing.
//!
//! The gateway registers and checks its workers; what it knows is taken over here once a second and whenever it
//! changes. KV capacity and whether a decode worker is elastic stand in SGLang's `/server_info`, which the gateway
//! does not keep. A label `deltaserve/KEY` of a worker is a key of our worker (`deltaserve/host_kv_tokens`).

use decision::fleet::{EngineLoad, Fleet};
use decision::model::{Role, WorkerSpec};
use openai_protocol::worker::{WorkerStatus, WorkerType};
use parking_lot::RwLock;
use serde_json::{Map, Value, json};
use smg::app_context::AppContext;
use smg::worker::{ConnectionMode, RuntimeType, Worker};
use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Between two rounds, where the gateway says nothing.
const ROUND: Duration = Duration::from_secs(1);
/// How long a worker may take to describe itself, or to say what it is doing.
const PATIENCE: Duration = Duration::from_secs(2);
const LABEL: &str = "deltaserve/";

/// A worker of the gateway that the decision may choose.
#[derive(Clone)]
pub struct Known {
    pub worker: Arc<dyn Worker>,
    /// As the fleet has it; names this registration.
    pub spec: Arc<WorkerSpec>,
    /// None where it does not say.
    pub release: Option<Release>,
}

/// A release of SGLang, such as 0.5.23.
pub type Release = [u32; 3];

/// By the worker's id in the fleet.
pub type KnownWorkers = Arc<RwLock<HashMap<String, Known>>>;

/// Takes over the gateway's workers, for as long as it runs.
pub fn follow(fleet: Arc<Fleet>, context: Arc<AppContext>) -> KnownWorkers {
    let known = KnownWorkers::default();
    let mut events = context.worker_registry.subscribe_events();
    let of_gateway = Arc::downgrade(&context);
    let shared = Arc::clone(&known);
    let waiting = Arc::downgrade(&fleet);
    tokio::spawn(async move {
        while let Some(context) = of_gateway.upgrade() {
            take_over(&fleet, &context, &shared).await;
            drop(context);
            // Missed events are made up for by the round.
            let _ = tokio::time::timeout(ROUND, events.recv()).await;
        }
    });
    tokio::spawn(let_in(waiting));
    known
}

/// Lets waiting turns in when time alone makes room.
async fn let_in(fleet: Weak<Fleet>) {
    while let Some(fleet) = fleet.upgrade() {
        if fleet
            .next_pump_s()
            .is_some_and(|at_s| at_s <= fleet.now_s())
        {
            fleet.pump();
        }
        drop(fleet);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn take_over(fleet: &Arc<Fleet>, context: &AppContext, known: &KnownWorkers) {
    let registered = context.worker_registry.get_all();
    let is_there = |of: &Known| {
        registered
            .iter()
            .any(|worker| Arc::ptr_eq(worker, &of.worker))
    };
    let gone: Vec<String> = {
        let known = known.read();
        let gone = known.iter().filter(|(_, of)| !is_there(of));
        gone.map(|(id, _)| id.clone()).collect()
    };
    for id in gone {
        fleet.remove_worker(&id);
        known.write().remove(&id);
    }
    for worker in registered {
        let found = {
            let known = known.read();
            let mut known = known.values();
            known.find(|of| Arc::ptr_eq(&of.worker, &worker)).cloned()
        };
        let status = worker.status();
        let Some(of) = found else {
            if status == WorkerStatus::Ready {
                add(fleet, &worker, known).await;
            }
            continue;
        };
        fleet.set_draining(&of.spec.id, status == WorkerStatus::Draining);
        fleet.report_health(
            &of.spec,
            matches!(status, WorkerStatus::Ready | WorkerStatus::Draining),
        );
        if status == WorkerStatus::Ready {
            let (fleet, of) = (Arc::clone(fleet), of.clone());
            tokio::spawn(async move { report_load(&fleet, &of).await });
        }
    }
}

/// Adds a worker to the fleet, once it has said what it is.
async fn add(fleet: &Fleet, worker: &Arc<dyn Worker>, known: &KnownWorkers) {
    let told = ask(worker.as_ref(), "/server_info").await;
    let Some(spec) = spec_of(worker.as_ref(), told.as_ref()) else {
        return;
    };
    match spec.and_then(|spec| fleet.add_worker(spec)) {
        Ok(spec) => {
            if let Some(tokens) = told.as_ref().and_then(capacity_tokens) {
                fleet.report_capacity(&spec, tokens);
            }
            fleet.report_health(&spec, true);
            tracing::info!("{} is a worker: {:?}", spec.id, spec.role);
            let of = Known {
                worker: Arc::clone(worker),
                spec: Arc::clone(&spec),
                release: told.as_ref().and_then(release),
            };
            known.write().insert(spec.id.clone(), of);
        }
        Err(error) => tracing::warn!("not a worker for the decision: {error}"),
    }
}

/// The worker as `router.toml` would describe it; none of one that is not asked over HTTP, or answers for others.
fn spec_of(worker: &dyn Worker, told: Option<&Value>) -> Option<Result<WorkerSpec, String>> {
    let of = &worker.metadata().spec;
    let is_ours = *worker.connection_mode() == ConnectionMode::Http
        && of.runtime_type != RuntimeType::External
        && of.dp_rank.is_none();
    let role = match worker.worker_type() {
        WorkerType::Regular => Role::Colocated,
        WorkerType::Prefill => Role::Prefill,
        WorkerType::Decode if told.is_some_and(is_elastic) => Role::Elastic,
        WorkerType::Decode => Role::Decode,
        WorkerType::Encode => return None,
    };
    is_ours.then(|| {
        let mut keys = Map::new();
        keys.insert("url".to_owned(), json!(worker.url()));
        keys.insert("role".to_owned(), json!(role));
        if of.runtime_type == RuntimeType::Vllm {
            keys.insert("engine".to_owned(), json!("vllm"));
        }
        if let Some(port) = worker.bootstrap_port() {
            keys.insert("bootstrap_port".to_owned(), json!(port));
        }
        for (name, value) in &of.labels {
            if let Some(key) = name.strip_prefix(LABEL) {
                let read = serde_json::from_str(value).unwrap_or_else(|_| json!(value));
                keys.insert(key.to_owned(), read);
            }
        }
        let spec = serde_json::from_value::<WorkerSpec>(Value::Object(keys));
        let spec = spec.map_err(|error| format!("worker {}: {error}", worker.url()))?;
        spec.normalise()
    })
}

fn is_elastic(info: &Value) -> bool {
    let states = info.get("internal_states").and_then(Value::as_array);
    states.is_some_and(|states| {
        states
            .iter()
            .any(|of| of.get("deltaserve_elastic").is_some())
    })
}

fn capacity_tokens(info: &Value) -> Option<u64> {
    let of_a_rank = info.get("max_total_num_tokens")?.as_u64()?;
    let ranks = info.get("dp_size").and_then(Value::as_u64).unwrap_or(1);
    Some(of_a_rank.saturating_mul(ranks.max(1))).filter(|&tokens| tokens > 0)
}

fn release(info: &Value) -> Option<Release> {
    let mut numbers = info
        .get("version")?
        .as_str()?
        .split(|c: char| !c.is_ascii_digit());
    let mut next = || numbers.next()?.parse().ok();
    Some([next()?, next()?, next()?])
}

/// Takes over what SGLang says of its load.
async fn report_load(fleet: &Fleet, of: &Known) {
    let Some(report) = ask(of.worker.as_ref(), "/v1/loads?include=core").await else {
        return;
    };
    if let Some(load) = load_of(&report) {
        fleet.report_load(&of.spec, load);
    }
}

/// Sums over the data-parallel ranks.
fn load_of(report: &Value) -> Option<EngineLoad> {
    let ranks = report.get("loads")?.as_array()?;
    let sum = |field: &str| {
        let mut counts = ranks.iter().map(|rank| rank.get(field)?.as_u64());
        counts.try_fold(0_u64, |sum, count| Some(sum.saturating_add(count?)))
    };
    let count = |field| Some(u32::try_from(sum(field)?).unwrap_or(u32::MAX / 2));
    Some(EngineLoad {
        running_requests: count("num_running_reqs")?,
        waiting_requests: count("num_waiting_reqs")?,
        used_tokens: sum("num_used_tokens"),
        capacity_tokens: sum("max_total_num_tokens").filter(|&tokens| tokens > 0),
        pulse: decision::fleet::Pulse::default(),
    })
}

async fn ask(worker: &dyn Worker, path: &str) -> Option<Value> {
    let url = format!("{}{path}", worker.base_url());
    let mut question = worker.http_client().get(url).timeout(PATIENCE);
    if let Some(key) = worker.api_key() {
        question = question.header("authorization", format!("Bearer {key}"));
    }
    let answer = question.send().await.ok()?;
    if !answer.status().is_success() {
        return None;
    }
    serde_json::from_slice(&answer.bytes().await.ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use smg::worker::BasicWorkerBuilder;

    fn spec(kind: WorkerType, labels: &[(&str, &str)], told: &Value) -> WorkerSpec {
        let mut worker = BasicWorkerBuilder::new("http://10.0.0.1:30000").worker_type(kind);
        for (name, value) in labels {
            worker = worker.label(*name, *value);
        }
        let spec = spec_of(&worker.build(), Some(told)).expect("it is asked over HTTP");
        spec.expect("it can be read")
    }

    #[test]
    fn a_decode_worker_is_elastic_where_it_says_so() {
        let elastic = json!({"internal_states": [{"deltaserve_elastic": {}}]});
        assert_eq!(spec(WorkerType::Decode, &[], &elastic).role, Role::Elastic);
        let plain = json!({"internal_states": [{}]});
        let plain = spec(WorkerType::Decode, &[], &plain);
        assert_eq!((plain.role, &*plain.id), (Role::Decode, "10.0.0.1:30000"));
    }

    #[test]
    fn labels_are_keys_of_our_worker() {
        let labels = [
            ("deltaserve/host_kv_tokens", "5000"),
            ("deltaserve/id", "a"),
            ("zone", "b"),
        ];
        let spec = spec(WorkerType::Regular, &labels, &Value::Null);
        assert_eq!((spec.host_kv_tokens, &*spec.id), (Some(5000), "a"));
    }

    #[test]
    fn releases_are_compared_by_their_numbers() {
        let of = |version: &str| release(&json!({"version": version}));
        assert!(of("0.5.9") < of("0.5.23.post1"));
        assert_eq!(of("main"), None);
    }

    #[test]
    fn loads_are_summed_over_ranks() {
        let rank = json!({"num_running_reqs": 2, "num_waiting_reqs": 1, "num_used_tokens": 10});
        let load = load_of(&json!({"loads": [rank.clone(), rank]})).expect("all is there");
        assert_eq!((load.running_requests, load.used_tokens), (4, Some(20)));
        assert!(load_of(&json!({"loads": [{}]})).is_none());
    }
}
