//! What an engine says of itself: its KV capacity, which run of it this is, its model's vocabulary.

use super::sglang_tools::Release;
use super::{Gateway, found};
use crate::config::{Engine, WorkerSpec};
use serde_json::Value;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::time::Duration;

/// SGLang's scheduler answers between its steps.
const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct EngineInfo {
    pub kv_capacity_tokens: Option<u64>,
    /// A number that differs from one start of the engine to the next.
    pub run: Option<u64>,
    /// Whether finished prompts stay in its cache, where it says.
    pub keeps_prefixes: Option<bool>,
    /// Which release of SGLang it is.
    pub release: Option<Release>,
    /// It cuts prompts that are too long.
    pub cuts_prompts: bool,
    /// What it calls its release.
    pub version: Option<String>,
    /// Data-parallel ranks, each with a KV cache of its own; 0 where it does not say.
    pub ranks: u64,
    /// The folder of its tokenizer, or the name of its model.
    pub folder: Option<String>,
    /// Where it publishes KV events, as it was told.
    pub kv_events: Option<String>,
}

pub(super) async fn ask(gateway: &Gateway, spec: &WorkerSpec) -> EngineInfo {
    let path = match spec.engine {
        Engine::Sglang => "/server_info",
        Engine::Vllm => "/metrics",
    };
    match gateway.get(spec, path, PATIENCE).await {
        Ok((_, body)) => match spec.engine {
            Engine::Sglang => of_sglang(&body),
            Engine::Vllm => of_vllm(&String::from_utf8_lossy(&body)),
        },
        Err(_) => EngineInfo::default(),
    }
}

/// SGLang (0.5.17) tells how long each part of its start took, and draws a random seed at the start
/// where it is given none: together they differ from start to start.
fn of_sglang(body: &[u8]) -> EngineInfo {
    let Ok(info) = serde_json::from_slice::<Value>(body) else {
        return EngineInfo::default();
    };
    let startup = info.get("startup_time").filter(|times| !times.is_null());
    let text = |name: &str| info.get(name).and_then(Value::as_str);
    let (ranks, kv_events) = found::in_server_info(&info);
    let of_a_rank = info.get("max_total_num_tokens").and_then(Value::as_u64);
    EngineInfo {
        kv_capacity_tokens: of_a_rank.map(|tokens| tokens.saturating_mul(ranks)),
        version: text("version").map(str::to_owned),
        ranks,
        folder: text("tokenizer_path")
            .or(text("model_path"))
            .map(str::to_owned),
        kv_events,
        run: startup.map(|times| {
            let seed = info.get("random_seed").unwrap_or(&Value::Null);
            number_of(&format!("{times} {seed}"))
        }),
        keeps_prefixes: prefixes_of_sglang(&info),
        cuts_prompts: info.get("allow_auto_truncate") == Some(&Value::Bool(true)),
        release: text("version").and_then(Release::of),
    }
}

/// SGLang's decode workers keep no finished prompts unless they are told to; none where it does not say.
fn prefixes_of_sglang(info: &Value) -> Option<bool> {
    let is_on = |name: &str| info.get(name).and_then(Value::as_bool).unwrap_or_default();
    let mode = info.get("disaggregation_mode")?.as_str()?;
    let has_radix = mode != "decode" || is_on("disaggregation_decode_enable_radix_cache");
    Some(has_radix && !is_on("disable_radix_cache"))
}

/// vLLM (0.26.0 and 0.32.0) tells when its process started. Of its blocks, which it adds up over its
/// data-parallel ranks with a line each, every rank keeps one for itself.
fn of_vllm(metrics: &str) -> EngineInfo {
    const CACHE: &str = "vllm:cache_config_info{";
    let lines = |name: &'static str| metrics.lines().filter(move |line| line.starts_with(name));
    let capacity = || {
        let line = lines(CACHE).next()?;
        let label = |name: &str| -> Option<u64> {
            let (_, rest) = line.split_once(&format!("{name}=\""))?;
            rest.split_once('"')?.0.parse().ok()
        };
        let ranks = lines(CACHE).count() as u64;
        Some(label("block_size")? * label("num_gpu_blocks")?.saturating_sub(ranks))
    };
    EngineInfo {
        kv_capacity_tokens: capacity(),
        run: run_in_metrics(metrics),
        keeps_prefixes: None,
        release: None,
        cuts_prompts: false,
        version: None,
        ranks: lines(CACHE).count() as u64,
        folder: None,
        kv_events: None,
    }
}

/// Which run of its process an exposition of Prometheus metrics comes from.
pub(super) fn run_in_metrics(metrics: &str) -> Option<u64> {
    let mut lines = metrics.lines();
    let line = lines.find(|line| line.starts_with("process_start_time_seconds "))?;
    Some(number_of(line))
}

fn number_of(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}

/// Who the engine says owns its first model: its own name, mostly.
pub(super) async fn owner(gateway: &Gateway, spec: &WorkerSpec) -> Option<String> {
    in_first_model(gateway, spec, "owned_by").await
}

/// The folder of its first model, or the model's name (vLLM).
pub(super) async fn root(gateway: &Gateway, spec: &WorkerSpec) -> Option<String> {
    in_first_model(gateway, spec, "root").await
}

async fn in_first_model(gateway: &Gateway, spec: &WorkerSpec, field: &str) -> Option<String> {
    let list = json_at(gateway, spec, "/v1/models").await?;
    list.get("data")?
        .get(0)?
        .get(field)?
        .as_str()
        .map(str::to_owned)
}

/// vLLM's release.
pub(super) async fn version(gateway: &Gateway, spec: &WorkerSpec) -> Option<String> {
    let said = json_at(gateway, spec, "/version").await?;
    said.get("version")?.as_str().map(str::to_owned)
}

async fn json_at(gateway: &Gateway, spec: &WorkerSpec, path: &str) -> Option<Value> {
    let (status, body) = gateway.get(spec, path, PATIENCE).await.ok()?;
    let body = status.is_success().then_some(body)?;
    serde_json::from_slice(&body).ok()
}

/// The size of the model's vocabulary, where its folder is on this machine: SGLang does not tell it.
pub(super) async fn vocabulary(gateway: &Gateway, spec: &WorkerSpec) -> Option<u64> {
    // vLLM checks token ids itself.
    if spec.engine != Engine::Sglang {
        return None;
    }
    let (_, body) = gateway.get(spec, "/model_info", PATIENCE).await.ok()?;
    let info: Value = serde_json::from_slice(&body).ok()?;
    let config = Path::new(info.get("model_path")?.as_str()?).join("config.json");
    let config: Value = serde_json::from_slice(&tokio::fs::read(config).await.ok()?).ok()?;
    // Models with other inputs than text have their language model's settings one level down.
    let places = [
        "/text_config/vocab_size",
        "/llm_config/vocab_size",
        "/vocab_size",
    ];
    places
        .iter()
        .find_map(|place| config.pointer(place)?.as_u64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sglangs_runs_are_told_apart() {
        let run = |text: &str| of_sglang(text.as_bytes()).run;
        let first = run(r#"{"startup_time":{"load_weight":1.25},"random_seed":7}"#);
        assert!(first.is_some());
        assert_eq!(
            first,
            run(r#"{"x":1,"startup_time":{"load_weight":1.25},"random_seed":7}"#)
        );
        assert_ne!(
            first,
            run(r#"{"startup_time":{"load_weight":1.26},"random_seed":7}"#)
        );
        assert_ne!(
            first,
            run(r#"{"startup_time":{"load_weight":1.25},"random_seed":8}"#)
        );
        assert_eq!(run(r#"{"max_total_num_tokens":5}"#), None);
    }

    #[test]
    fn sglangs_capacity_is_that_of_all_its_ranks() {
        let of = |text: &str| of_sglang(text.as_bytes());
        let four = of(
            r#"{"max_total_num_tokens":25000,"dp_size":4,"tokenizer_path":"/m","kv_events_config":"{\"publisher\": \"zmq\", \"endpoint\": \"tcp://*:5557\"}"}"#,
        );
        assert_eq!((four.kv_capacity_tokens, four.ranks), (Some(100_000), 4));
        assert_eq!(four.folder.as_deref(), Some("/m"));
        assert_eq!(four.kv_events.as_deref(), Some("tcp://*:5557"));
        let one =
            of(r#"{"max_total_num_tokens":25000,"model_path":"org/m","kv_events_config":null}"#);
        assert_eq!((one.kv_capacity_tokens, one.ranks), (Some(25_000), 1));
        assert_eq!(
            (one.folder.as_deref(), one.kv_events),
            (Some("org/m"), None)
        );
    }

    #[test]
    fn sglangs_decode_workers_keep_nothing_unless_they_are_told_to() {
        let keeps = |text: &str| of_sglang(text.as_bytes()).keeps_prefixes;
        for (text, expected) in [
            (
                r#"{"disaggregation_mode":"decode","disaggregation_decode_enable_radix_cache":false}"#,
                Some(false),
            ),
            (
                r#"{"disaggregation_mode":"decode","disaggregation_decode_enable_radix_cache":true}"#,
                Some(true),
            ),
            (
                r#"{"disaggregation_mode":"null","disable_radix_cache":false}"#,
                Some(true),
            ),
            (
                r#"{"disaggregation_mode":"prefill","disable_radix_cache":true}"#,
                Some(false),
            ),
            (r#"{"max_total_num_tokens":5}"#, None),
        ] {
            assert_eq!(keeps(text), expected, "{text}");
        }
    }

    #[test]
    fn vllms_capacity_and_run_are_in_its_metrics() {
        let text = "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"10\"} 1.0\n\
                    process_start_time_seconds 1.79527365e+09\n";
        let info = of_vllm(text);
        assert_eq!(info.kv_capacity_tokens, Some(144));
        assert!(info.run.is_some());
        let ranks = "vllm:cache_config_info{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"20\"} 1.0\n\
                     vllm:cache_config_info{block_size=\"16\",engine=\"1\",num_gpu_blocks=\"20\"} 1.0\n";
        assert_eq!(of_vllm(ranks).kv_capacity_tokens, Some(288));
        assert_ne!(
            info.run,
            run_in_metrics("process_start_time_seconds 1.79527366e+09\n")
        );
    }
}
