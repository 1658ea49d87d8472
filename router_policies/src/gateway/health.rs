//! Watches one worker until it leaves the fleet.

use super::Gateway;
use crate::config::{Engine, WorkerSpec};
use std::sync::Weak;
use std::time::Duration;

/// SGLang's `/health` generates a token on an idle worker and takes at least a second; busy workers
/// answer late, so only silence for this long counts.
const PATIENCE: Duration = Duration::from_secs(20);
/// Failed checks in a row before a worker that was up counts as down.
const FAILURES: u32 = 3;

/// Checks the worker's health every `health_interval_s`, more often while it is down.
pub(super) async fn watch(gateway: Weak<Gateway>, spec: WorkerSpec) {
    let mut failures = 0;
    let mut is_up = false;
    loop {
        let Some(gateway) = gateway.upgrade() else {
            return;
        };
        let Some(healthy) = gateway.fleet.health(&spec.id) else {
            return;
        };
        is_up &= healthy;
        match gateway.get(&spec, "/health", PATIENCE).await {
            Ok((status, _)) if status.is_success() => {
                failures = 0;
                if !is_up {
                    is_up = true;
                    learn_capacity(&gateway, &spec).await;
                    gateway.fleet.report_health(&spec.id, true);
                }
            }
            Ok((status, _)) => {
                log::debug!("worker {}: /health: HTTP {status}", spec.id);
                failures += 1;
            }
            Err(error) => {
                log::debug!("worker {}: /health: {error}", spec.id);
                failures += 1;
            }
        }
        if failures >= FAILURES && is_up {
            is_up = false;
            gateway.fleet.report_health(&spec.id, false);
        }
        let interval = gateway.config.health_interval_s;
        drop(gateway);
        let pause = if is_up { interval } else { interval.min(0.5) };
        tokio::time::sleep(Duration::from_secs_f64(pause)).await;
    }
}

/// Asks an engine for its KV capacity.
async fn learn_capacity(gateway: &Gateway, spec: &WorkerSpec) {
    if spec.kv_capacity_tokens.is_some() {
        return;
    }
    let found = match spec.engine {
        Engine::Sglang => sglang_capacity(gateway, spec).await,
        Engine::Vllm => vllm_capacity(gateway, spec).await,
    };
    if let Some(tokens) = found {
        gateway.fleet.report_capacity(&spec.id, tokens);
    }
}

async fn sglang_capacity(gateway: &Gateway, spec: &WorkerSpec) -> Option<u64> {
    let (_, body) = gateway.get(spec, "/server_info", PATIENCE).await.ok()?;
    let info: serde_json::Value = serde_json::from_slice(&body).ok()?;
    info.get("max_total_num_tokens")?.as_u64()
}

async fn vllm_capacity(gateway: &Gateway, spec: &WorkerSpec) -> Option<u64> {
    let (_, body) = gateway.get(spec, "/metrics", PATIENCE).await.ok()?;
    let text = std::str::from_utf8(&body).ok()?;
    let line = text
        .lines()
        .find(|line| line.starts_with("vllm:cache_config_info{"))?;
    let label = |name: &str| -> Option<u64> {
        let (_, rest) = line.split_once(&format!("{name}=\""))?;
        rest.split_once('"')?.0.parse().ok()
    };
    Some(label("block_size")? * label("num_gpu_blocks")?)
}
