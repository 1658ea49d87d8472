//! SGLang's model gateway with deltaserve's decision: its command line.
//!
//! [`serve`] starts the gateway as its own binary does, with [`router`] in the place of its routers. [`workers`] tells
//! the decision which workers the gateway has; [`asked`] reads what it needs of a request, [`answer`] what an answer
//! teaches; [`attempt`] asks the decision; [`dispatch`] hands the request to the gateway's own routers.

mod answer;
mod asked;
mod attempt;
mod dispatch;
mod router;
mod serve;
mod workers;

use clap::Parser;
use decision::fleet::Fleet;
use decision::fleet::admission::settings;
use decision::fleet::log::EventSink;
use openai_protocol::worker::{WorkerSpec, WorkerType};
use serde_json::{Map, Value, json};
use smg::config::{PolicyConfig, RouterConfig, RoutingMode};
use smg::observability::metrics::PrometheusConfig;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// SGLang's model gateway, in which deltaserve decides which worker a request goes to, whether it is separated, and
/// whether it waits. Elastic workers are decode workers that also serve alone: the gateway finds out which are.
#[derive(Parser)]
#[command(name = "deltaserve-gateway", version)]
struct Flags {
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    #[arg(long, default_value_t = 30000)]
    port: u16,
    /// A worker that serves requests alone; may be repeated, as the next two.
    #[arg(long = "worker", value_name = "URL")]
    workers: Vec<String>,
    /// A prefill worker and its --disaggregation-bootstrap-port.
    #[arg(long = "prefill", num_args = 2, value_names = ["URL", "PORT"])]
    prefills: Vec<String>,
    /// A decode worker, elastic or not.
    #[arg(long = "decode", value_name = "URL")]
    decodes: Vec<String>,
    /// Who chooses the worker: any policy of deltaserve, such as unified, elastic or selective.
    #[arg(long, default_value = "unified")]
    policy: String,
    /// The policy's parameters, a JSON object.
    #[arg(long, value_name = "JSON", default_value = "null")]
    policy_params: String,
    /// The rule of admission (rotate, tokens, off, …) or a JSON object, as [admission] of router.toml.
    #[arg(long, value_name = "RULE", default_value = settings::DEFAULT_RULE)]
    admission: String,
    /// A longer wait for a place gets 429 with Retry-After; who asks again has its place in the queue.
    #[arg(long, default_value_t = 60.0)]
    patience_s: f64,
    /// Other workers that a request is tried on after one has failed.
    #[arg(long, default_value_t = 2)]
    retries: usize,
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Append every decision and end of a request to this file, one JSON object a line.
    #[arg(long, value_name = "FILE")]
    decision_log: Option<PathBuf>,
    /// What clients and administrators must send as their bearer token; sent to the workers too.
    #[arg(long, env = "DELTASERVE_GATEWAY_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// The workers' model: prompts are then counted in its tokens, by its chat template; else by their bytes.
    #[arg(long, value_name = "FOLDER")]
    tokenizer: Option<String>,
    /// Where the gateway's own metrics are.
    #[arg(long, value_name = "PORT")]
    prometheus_port: Option<u16>,
    /// Keys of the gateway's own configuration (its RouterConfig), a JSON object.
    #[arg(long, value_name = "FILE")]
    gateway_config: Option<PathBuf>,
    #[arg(long, default_value = "warn")]
    log_level: String,
}

fn main() -> ExitCode {
    let said = setup(Flags::parse()).and_then(run);
    match said {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("deltaserve-gateway: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(setup: serve::Setup) -> Result<(), String> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build();
    let runtime = runtime.map_err(|error| format!("cannot start: {error}"))?;
    runtime.block_on(serve::serve(setup))
}

fn setup(flags: Flags) -> Result<serve::Setup, String> {
    if !flags.patience_s.is_finite() || !(0.0..=86_400.0).contains(&flags.patience_s) {
        return Err("--patience-s: expected seconds, up to 86400".to_owned());
    }
    let params = json_of("--policy-params", &flags.policy_params)?;
    let policy = decision::policy::build(&flags.policy, params)?;
    let rule = match flags.admission.trim_start().starts_with('{') {
        true => json_of("--admission", &flags.admission)?,
        false => json!({"rule": flags.admission}),
    };
    let sink = match &flags.decision_log {
        Some(path) => EventSink::to_file(path, |events| {
            tracing::error!("{events} events of the decision log could not be written");
        })?,
        None => EventSink::in_memory(),
    };
    let fleet = Fleet::new(policy, flags.policy.clone(), sink, flags.seed);
    let fleet = fleet.with_admission(settings::build(&rule)?);
    let prometheus = flags.prometheus_port.map(|port| PrometheusConfig {
        port,
        host: flags.host.clone(),
        duration_buckets: None,
    });
    Ok(serve::Setup {
        workers: workers_of(&flags)?,
        config: config_of(&flags)?,
        fleet: Arc::new(fleet),
        patience: Duration::from_secs_f64(flags.patience_s),
        retries: flags.retries,
        prometheus,
        log_level: flags.log_level,
    })
}

fn json_of(flag: &str, text: &str) -> Result<Value, String> {
    serde_json::from_str(text).map_err(|error| format!("{flag}: expected JSON: {error}"))
}

fn workers_of(flags: &Flags) -> Result<Vec<WorkerSpec>, String> {
    let of_type = |url: &String, kind| {
        let mut spec = WorkerSpec::new(url.trim_end_matches('/'));
        spec.worker_type = kind;
        spec.api_key.clone_from(&flags.api_key);
        spec
    };
    let alone = flags.workers.iter();
    let mut workers: Vec<_> = alone.map(|url| of_type(url, WorkerType::Regular)).collect();
    for pair in flags.prefills.chunks(2) {
        let [url, port] = pair else { continue };
        let mut spec = of_type(url, WorkerType::Prefill);
        let port = port.parse().ok().filter(|&port: &u16| port > 0);
        spec.bootstrap_port =
            Some(port.ok_or_else(|| format!("--prefill {url}: expected a port after it"))?);
        workers.push(spec);
    }
    let decodes = flags.decodes.iter();
    workers.extend(decodes.map(|url| of_type(url, WorkerType::Decode)));
    Ok(workers)
}

/// The gateway's own defaults, what the file says, and on top what the flags say.
fn config_of(flags: &Flags) -> Result<RouterConfig, String> {
    let default = serde_json::to_value(RouterConfig::default());
    let default = default.map_err(|error| format!("the gateway's defaults: {error}"))?;
    let mut keys: Map<String, Value> = default.as_object().cloned().unwrap_or_default();
    let mut name = "the gateway's configuration".to_owned();
    if let Some(path) = &flags.gateway_config {
        name = path.display().to_string();
        let text = std::fs::read_to_string(path)
            .map_err(|error| format!("{name}: cannot read: {error}"))?;
        let Value::Object(given) = json_of(&name, &text)? else {
            return Err(format!("{name}: expected an object"));
        };
        if let Some(unknown) = given.keys().find(|key| !keys.contains_key(*key)) {
            return Err(format!(
                "{name}: {unknown}: the gateway has no such key, or it has no default"
            ));
        }
        keys.extend(given);
    }
    let config = serde_json::from_value(Value::Object(keys));
    let mut config: RouterConfig = config.map_err(|error| format!("{name}: {error}"))?;
    // Workers of every kind may come and go, and none of its policies is asked.
    config.mode = RoutingMode::Regular {
        worker_urls: Vec::new(),
    };
    config.policy = PolicyConfig::RoundRobin;
    config.host.clone_from(&flags.host);
    config.port = flags.port;
    if flags.api_key.is_some() {
        config.api_key.clone_from(&flags.api_key);
    }
    if flags.tokenizer.is_some() {
        config.tokenizer_path.clone_from(&flags.tokenizer);
    }
    config.log_level = Some(flags.log_level.clone());
    Ok(config)
}
