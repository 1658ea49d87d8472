//! Asks one worker for its load until it leaves the fleet.
//!
//! SGLang answers on `/v1/loads`, vLLM in its metrics. An engine that has neither is not asked again
//! for a while: its absence is no fault.

use super::{Gateway, engine_info};
use crate::config::{Engine, WorkerSpec};
use decision::fleet::{EngineLoad, Pulse};
use std::sync::{Arc, Weak};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(5);
/// An engine that has never reported is asked again after so long.
const PAUSE_WITHOUT_REPORT: Duration = Duration::from_secs(30);

pub(super) async fn watch(gateway: Weak<Gateway>, spec: Arc<WorkerSpec>) {
    let mut has_reported = false;
    loop {
        let Some(gateway) = gateway.upgrade() else {
            return;
        };
        let Some(healthy) = gateway.fleet.health(&spec) else {
            return;
        };
        let interval = Duration::from_secs_f64(gateway.config.load_interval_s);
        let mut pause = interval;
        if healthy {
            match ask(&gateway, &spec).await {
                Some(load) => {
                    has_reported = true;
                    gateway.fleet.report_load(&spec, load);
                }
                None if has_reported => gateway.fleet.end_load_reports(&spec),
                None => pause = PAUSE_WITHOUT_REPORT.max(interval),
            }
        } else {
            // It may come back as another engine.
            has_reported = false;
        }
        drop(gateway);
        tokio::time::sleep(pause).await;
    }
}

async fn ask(gateway: &Gateway, spec: &Arc<WorkerSpec>) -> Option<EngineLoad> {
    let path = match spec.engine {
        Engine::Sglang => "/v1/loads?include=core",
        Engine::Vllm => "/metrics",
    };
    let (status, body) = gateway.get(spec, path, PATIENCE).await.ok()?;
    if !status.is_success() {
        return None;
    }
    match spec.engine {
        Engine::Sglang => sglang_load(&body),
        Engine::Vllm => {
            let text = std::str::from_utf8(&body).ok()?;
            // A restart shows here soonest.
            gateway
                .fleet
                .report_engine(spec, engine_info::run_in_metrics(text));
            vllm_load(text)
        }
    }
}

/// Sums over the data-parallel ranks.
fn sglang_load(body: &[u8]) -> Option<EngineLoad> {
    let report: serde_json::Value = serde_json::from_slice(body).ok()?;
    let ranks = report.get("loads")?.as_array()?;
    let sum = |field: &str| -> Option<u64> {
        ranks
            .iter()
            .map(|rank| rank.get(field)?.as_u64())
            .try_fold(0u64, |total, value| Some(total.saturating_add(value?)))
    };
    let count = |field| Some(sum(field)?.min(u64::from(u32::MAX / 2)) as u32);
    Some(EngineLoad {
        running_requests: count("num_running_reqs")?,
        waiting_requests: count("num_waiting_reqs")?,
        used_tokens: sum("num_used_tokens"),
        capacity_tokens: sum("max_total_num_tokens").filter(|&tokens| tokens > 0),
        pulse: Pulse {
            clock_s: clock_of(ranks),
            ..Pulse::default()
        },
    })
}

/// The schedulers' own time: each rank's, for the one beside them is of the process that answers. Of ranks that have
/// work that of the last behind: one that hangs is hidden by none that goes on.
fn clock_of(ranks: &[serde_json::Value]) -> Option<f64> {
    let count = |rank: &serde_json::Value, field| rank.get(field).and_then(|it| it.as_u64());
    let clocks = ranks.iter().filter_map(|rank| {
        let work = ["num_running_reqs", "num_waiting_reqs"].map(|field| count(rank, field));
        let is_busy = work.into_iter().flatten().any(|requests| requests > 0);
        Some((is_busy, rank.get("timestamp")?.as_f64()?))
    });
    let (busy, idle): (Vec<_>, Vec<_>) = clocks.partition(|(is_busy, _)| *is_busy);
    let times = |of: Vec<(bool, f64)>| of.into_iter().map(|(_, clock_s)| clock_s);
    times(busy)
        .min_by(f64::total_cmp)
        .or_else(|| times(idle).max_by(f64::total_cmp))
}

fn vllm_load(text: &str) -> Option<EngineLoad> {
    let sum = |name: &str| -> Option<f64> {
        let mut found = None;
        for line in text.lines().filter(|line| line.starts_with(name)) {
            if line[name.len()..].starts_with(['{', ' ']) {
                let value: f64 = line.rsplit(' ').next()?.parse().ok()?;
                found = Some(found.unwrap_or(0.0) + value);
            }
        }
        found
    };
    let running_requests = sum("vllm:num_requests_running")? as u32;
    let waiting_requests = sum("vllm:num_requests_waiting")? as u32;
    let tokens = sum("vllm:generation_tokens_total").zip(sum("vllm:prompt_tokens_total"));
    let progress = tokens.map(|(generated, prompt)| {
        let tokens = (generated + prompt) as u64;
        (tokens, running_requests, waiting_requests)
    });
    // Set with every step, though no request has a token of it.
    let kv_used = sum("vllm:kv_cache_usage_perc").map(|share| (share * 1e6) as u64);
    Some(EngineLoad {
        running_requests,
        waiting_requests,
        pulse: Pulse {
            clock_s: None,
            progress,
            kv_used,
        },
        ..EngineLoad::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn sglangs_report_is_summed_over_ranks() {
        let body = br#"{"loads": [
            {"num_running_reqs": 2, "num_waiting_reqs": 1, "num_used_tokens": 10,
             "max_total_num_tokens": 100},
            {"num_running_reqs": 3, "num_waiting_reqs": 0, "num_used_tokens": 20,
             "max_total_num_tokens": 100}]}"#;
        let load = sglang_load(body).expect("a report");
        assert_eq!((load.running_requests, load.waiting_requests), (5, 1));
        assert_eq!(
            (load.used_tokens, load.capacity_tokens),
            (Some(30), Some(200))
        );
        assert_eq!(sglang_load(b"{}"), None);
    }

    #[test]
    fn the_schedulers_time_is_the_ranks_own() {
        let clock = |times: [&str; 2]| {
            let rank =
                |time: &str| format!(r#"{{"num_running_reqs": 0, "num_waiting_reqs": 0{time}}}"#);
            let ranks = times.map(rank).join(",");
            let body = format!(r#"{{"timestamp": 99.5, "loads": [{ranks}]}}"#);
            sglang_load(body.as_bytes())
                .expect("a report")
                .pulse
                .clock_s
        };
        assert_eq!(clock(["", ""]), None);
        assert_eq!(clock([r#", "timestamp": "now""#, ""]), None);
        let (early, late) = (r#", "timestamp": 4.5"#, r#", "timestamp": 7"#);
        assert_eq!(clock([early, late]), Some(7.0));
    }

    #[test]
    fn a_rank_that_hangs_with_work_is_hidden_by_none_that_goes_on() {
        let clock = |at: f64, is_busy: [u32; 2]| {
            let rank = |time: f64, running| json!({"num_running_reqs": running, "num_waiting_reqs": 0, "timestamp": time});
            let ranks = [rank(at, is_busy[0]), rank(4.5, is_busy[1])];
            let body = json!({"loads": ranks}).to_string();
            sglang_load(body.as_bytes())
                .expect("a report")
                .pulse
                .clock_s
        };
        assert_eq!(clock(7.0, [1, 1]), clock(8.0, [1, 1]));
        assert_eq!(clock(7.0, [0, 1]), clock(8.0, [0, 1]));
        assert_ne!(clock(7.0, [1, 0]), clock(8.0, [1, 0]));
        assert_ne!(clock(7.0, [0, 0]), clock(8.0, [0, 0]));
    }

    #[test]
    fn vllms_gauges_are_read_by_their_whole_name() {
        let text = "# HELP vllm:num_requests_running x\nvllm:num_requests_running{engine=\"0\"} 3.0\n\
                    vllm:num_requests_waiting_by_reason{r=\"x\"} 9.0\nvllm:num_requests_waiting 4.0\n";
        let load = vllm_load(text).expect("a report");
        assert_eq!((load.running_requests, load.waiting_requests), (3, 4));
    }
}
