//! What is to be simulated: the plan's file, as `eval` writes it, and its checks.

use crate::cache::Eviction;
use crate::calibration::Calibration;
use crate::engine::Order;
use decision::model::Engine;
use decision::policy::Role;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// As `deltaserve.quantities` has it: what is longer is a typing error, and a run that never ends.
const MOST_S: f64 = 366.0 * 86_400.0;
const MOST_WORKERS: usize = 100_000;

/// One simulated run.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Planned requests, one JSON object a line; relative to the plan's file.
    pub requests: PathBuf,
    #[serde(default)]
    pub seed: u64,
    #[serde(default)]
    pub load: Load,
    #[serde(default)]
    pub phases: Option<Phases>,
    pub router: Router,
    pub workers: Vec<WorkerPlan>,
    #[serde(default)]
    pub output: Output,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// A fixed number of sessions in flight.
    Closed,
    /// The trace's own times.
    Open,
    /// Sessions arrive at random times at a fixed rate; turns follow after their think times.
    Sessions,
}

/// What clients do.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Load {
    pub mode: Mode,
    pub max_inflight_sessions: usize,
    pub sessions_per_hour: f64,
    pub time_scale: f64,
    pub think_scale: f64,
    pub max_think_s: Option<f64>,
    /// Prompts carry the answers that were really given, so that a cache can hold them.
    pub splice_outputs: bool,
    pub timeout_s: f64,
    /// Sessions say when they end, and how long they will think: what a router reaches that knows it. `replay`
    /// says none of it.
    pub end_hints: bool,
    pub idle_hints: bool,
}

impl Default for Load {
    fn default() -> Self {
        Self {
            mode: Mode::Closed,
            max_inflight_sessions: 8,
            sessions_per_hour: 0.0,
            time_scale: 1.0,
            think_scale: 1.0,
            max_think_s: None,
            splice_outputs: true,
            timeout_s: 600.0,
            end_hints: false,
            idle_hints: false,
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Start {
    /// Sessions begin at a random turn in their middle, with what came before it primed.
    Mid,
    #[default]
    Cold,
}

/// Warm-up, measured window, drain.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Phases {
    #[serde(default)]
    pub start: Start,
    /// Between which shares of its turns a session that starts in its middle does so.
    #[serde(default = "default_start_share")]
    pub start_share: (f64, f64),
    /// How the sessions start that take the place of those that have ended.
    #[serde(default)]
    pub recycle_start: Start,
    #[serde(default)]
    pub warm_up_s: f64,
    pub measure_s: f64,
    #[serde(default)]
    pub recycle: bool,
    /// Sessions that are primed at a time; unless given, it grows with the sessions in flight.
    #[serde(default)]
    pub prime_parallel: Option<usize>,
    /// How long a client waits for a prime's answer; `load.timeout_s` unless given.
    #[serde(default)]
    pub prime_timeout_s: Option<f64>,
    /// How long the load goes on for measured requests that have not ended.
    #[serde(default = "default_drain_s")]
    pub drain_s: f64,
    /// Which conversations begin, one after the other and then all over again; drawn from the plan's
    /// seed where none are given.
    #[serde(default)]
    pub draws: Vec<Draw>,
}

/// One conversation as it begins: its number, the share of its requests that came before where it
/// starts in its middle, and the share of its first think times that is then still to pass.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "(usize, f64, f64)", into = "(usize, f64, f64)")]
pub struct Draw {
    pub tree: usize,
    pub share: f64,
    pub linger: f64,
}

impl From<(usize, f64, f64)> for Draw {
    fn from((tree, share, linger): (usize, f64, f64)) -> Self {
        Self {
            tree,
            share,
            linger,
        }
    }
}

impl From<Draw> for (usize, f64, f64) {
    fn from(draw: Draw) -> Self {
        (draw.tree, draw.share, draw.linger)
    }
}

fn default_start_share() -> (f64, f64) {
    (0.25, 0.75)
}

fn default_drain_s() -> f64 {
    600.0
}

/// The router: policy, admission, and how it learns of the workers.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Router {
    pub policy: String,
    #[serde(default)]
    pub policy_params: Value,
    #[serde(default)]
    #[serde(alias = "residency")]
    pub admission: Value,
    #[serde(default = "default_load_interval_s")]
    pub load_interval_s: f64,
    #[serde(default)]
    pub kv_events: bool,
    /// How long an event takes from the engine to the router.
    #[serde(default = "default_kv_event_s")]
    pub kv_event_s: f64,
}

fn default_load_interval_s() -> f64 {
    1.0
}

fn default_kv_event_s() -> f64 {
    0.01
}

/// One worker, or several of a kind.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerPlan {
    pub id: String,
    /// More than one: ids are then `ID-0`, `ID-1`, …
    #[serde(default = "default_count")]
    pub count: usize,
    #[serde(default = "default_role")]
    pub role: Role,
    #[serde(default = "default_engine")]
    pub engine: Engine,
    pub kv_tokens: u64,
    #[serde(default)]
    pub host_kv_tokens: u64,
    #[serde(default = "default_chunk_tokens")]
    pub chunk_tokens: u64,
    #[serde(default = "default_max_prefill_tokens")]
    pub max_prefill_tokens: u64,
    #[serde(default = "default_max_running")]
    pub max_running: usize,
    #[serde(default)]
    pub radix_eviction_policy: Eviction,
    #[serde(default)]
    pub schedule_policy: Order,
    #[serde(default)]
    pub mixed_chunks: bool,
    /// Prefill chunks ride in decode steps and keep these within so many seconds, as an elastic
    /// worker's do; none: they are as large as `chunk_tokens`.
    #[serde(default)]
    pub target_itl_s: Option<f64>,
    #[serde(default = "default_true")]
    pub prefix_cache: bool,
    #[serde(default)]
    pub calibration: Calibration,
}

fn default_count() -> usize {
    1
}

fn default_role() -> Role {
    Role::Colocated
}

fn default_engine() -> Engine {
    Engine::Sglang
}

fn default_chunk_tokens() -> u64 {
    8192
}

fn default_max_prefill_tokens() -> u64 {
    16_384
}

fn default_max_running() -> usize {
    256
}

fn default_true() -> bool {
    true
}

/// What is written beside the results.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Output {
    /// Every token's arrival; else as few as leave the first, the last and the worst gap as they are.
    pub all_arrivals: bool,
    pub decisions: bool,
}

impl Default for Output {
    fn default() -> Self {
        Self {
            all_arrivals: false,
            decisions: true,
        }
    }
}

impl Plan {
    /// Reads and checks a plan.
    ///
    /// # Errors
    /// One line that names the file and the field.
    pub fn from_file(path: &Path) -> Result<Self, String> {
        let failed = |error: String| format!("{}: {error}", path.display());
        let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
        let reader = &mut serde_json::Deserializer::from_str(&text);
        let mut plan: Self =
            serde_path_to_error::deserialize(reader).map_err(|error| failed(error.to_string()))?;
        if let (true, Some(folder)) = (plan.requests.is_relative(), path.parent()) {
            plan.requests = folder.join(&plan.requests);
        }
        plan.check().map_err(failed)?;
        Ok(plan)
    }

    /// # Errors
    /// The field that is wrong, and what was expected.
    pub fn check(&self) -> Result<(), String> {
        let bounded = |name: &str, value: f64| {
            if name.ends_with("_s") && value > MOST_S {
                return Err(format!(
                    "{name}: expected at most {MOST_S} (a year in seconds), not {value}"
                ));
            }
            Ok(())
        };
        let at_least = |name: &str, value: f64, least: f64| {
            if value.is_finite() && value >= least {
                bounded(name, value)
            } else {
                Err(format!("{name}: expected at least {least}, not {value}"))
            }
        };
        let more_than_0 = |name: &str, value: f64| {
            if value.is_finite() && value > 0.0 {
                bounded(name, value)
            } else {
                Err(format!("{name}: expected more than 0, not {value}"))
            }
        };
        let load = &self.load;
        at_least("load.think_scale", load.think_scale, 0.0)?;
        at_least("load.max_think_s", load.max_think_s.unwrap_or(0.0), 0.0)?;
        more_than_0("load.time_scale", load.time_scale)?;
        more_than_0("load.timeout_s", load.timeout_s)?;
        match load.mode {
            Mode::Closed if load.max_inflight_sessions == 0 => {
                return Err("load.max_inflight_sessions: expected at least 1, not 0".to_owned());
            }
            Mode::Sessions => more_than_0("load.sessions_per_hour", load.sessions_per_hour)?,
            _ => {}
        }
        more_than_0("router.load_interval_s", self.router.load_interval_s)?;
        at_least("router.kv_event_s", self.router.kv_event_s, 0.0)?;
        if let Some(phases) = &self.phases {
            at_least("phases.warm_up_s", phases.warm_up_s, 0.0)?;
            more_than_0("phases.measure_s", phases.measure_s)?;
            at_least(
                "phases.prime_parallel",
                phases.prime_parallel.unwrap_or(1) as f64,
                1.0,
            )?;
            at_least("phases.drain_s", phases.drain_s, 0.0)?;
            more_than_0(
                "phases.prime_timeout_s",
                phases.prime_timeout_s.unwrap_or(1.0),
            )?;
            let (low, high) = phases.start_share;
            if !(0.0 <= low && low <= high && high < 1.0) {
                return Err(format!(
                    "phases.start_share: expected two shares from 0 to below 1, not {low} and {high}"
                ));
            }
            for (place, draw) in phases.draws.iter().enumerate() {
                if !(0.0..1.0).contains(&draw.share) || !(0.0..=1.0).contains(&draw.linger) {
                    return Err(format!(
                        "phases.draws[{place}]: expected shares from 0 to 1"
                    ));
                }
            }
        }
        if self.workers.is_empty() {
            return Err("workers: expected at least one".to_owned());
        }
        for worker in &self.workers {
            let named = |error: String| format!("worker {}: {error}", worker.id);
            worker.calibration.check().map_err(named)?;
            for (name, value) in [
                ("count", worker.count as u64),
                ("kv_tokens", worker.kv_tokens),
                ("chunk_tokens", worker.chunk_tokens),
                ("max_prefill_tokens", worker.max_prefill_tokens),
                ("max_running", worker.max_running as u64),
            ] {
                if value == 0 {
                    return Err(named(format!("{name}: expected at least 1, not 0")));
                }
            }
            if worker.count > MOST_WORKERS {
                return Err(named(format!(
                    "count: expected at most {MOST_WORKERS} (no fleet is larger), not {}",
                    worker.count
                )));
            }
            if let Some(target_s) = worker.target_itl_s {
                more_than_0("target_itl_s", target_s).map_err(named)?;
                if worker.engine != Engine::Sglang {
                    let error = "target_itl_s: only SGLang's prefills are paced";
                    return Err(named(error.to_owned()));
                }
            }
            if worker.role != Role::Colocated && worker.engine != Engine::Sglang {
                return Err(named(format!(
                    "role {:?}: of vLLM's workers only colocated ones are simulated yet",
                    worker.role
                )));
            }
        }
        let has = |role| self.workers.iter().any(|worker| worker.role == role);
        if has(Role::Decode) && !has(Role::Prefill) {
            return Err("workers: a decode worker needs a prefill one".to_owned());
        }
        Ok(())
    }
}
