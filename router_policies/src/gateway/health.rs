//! Watches one registration of a worker until it leaves the fleet.

use super::{Gateway, engine_info, found, kv_events};
use crate::config::WorkerSpec;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// SGLang's `/health` generates a token on an idle worker and takes at least a second; busy workers
/// answer late, so only silence for this long counts.
const PATIENCE: Duration = Duration::from_secs(20);
/// Failed checks in a row before a worker that was up counts as down.
const FAILURES: u32 = 3;
/// A check that fails after so long says that the engine is busy, or hangs.
const LATE: Duration = Duration::from_secs(10);
/// How often an idle wait looks whether its worker has become quiet.
const LOOK: Duration = Duration::from_millis(500);
/// How often an engine that shows no trouble is asked whether it is still the one that it was.
const ENGINE_INTERVAL: Duration = Duration::from_secs(10);

/// Checks the worker's health every `health_interval_s`, more often while it is down; `unasked` is dropped
/// after the first check, from which on its KV events are followed, if it has any.
pub(super) async fn watch(gateway: Weak<Gateway>, spec: Arc<WorkerSpec>, unasked: Arc<()>) {
    let mut unasked = Some(unasked);
    let mut failures = 0;
    let mut why = String::new();
    let mut is_up = false;
    let mut asked = Instant::now();
    loop {
        let Some(gateway) = gateway.upgrade() else {
            return;
        };
        let Some(healthy) = gateway.fleet.health(&spec) else {
            gateway.models.forget(&spec);
            gateway.vocabulary.forget(&spec);
            gateway.ranks.forget(&spec);
            gateway.found.forget(&spec.id);
            gateway.asked.forget(&spec.id);
            return;
        };
        is_up &= healthy;
        let began = Instant::now();
        gateway.fleet.note_check(&spec, None);
        let answer = gateway.get(&spec, "/health", PATIENCE).await;
        let is_good = matches!(&answer, Ok((status, _)) if status.is_success());
        gateway.fleet.note_check(&spec, Some(is_good));
        // SGLang's check waits for the scheduler's next output, which a long prefill and a compile have not.
        let is_busy = began.elapsed() >= LATE
            && gateway
                .fleet
                .is_at_work(&spec, gateway.config.silence_timeout_s);
        match answer {
            Ok((status, _)) if status.is_success() => {
                failures = 0;
                let is_due =
                    asked.elapsed() >= ENGINE_INTERVAL || gateway.fleet.misses_cache(&spec);
                if !is_up
                    && let Some(engine) = found::other_engine(&gateway, &spec).await
                    && found::enter_again(&gateway, &spec, engine)
                {
                    return;
                }
                if !is_up || is_due {
                    asked = Instant::now();
                    learn(&gateway, &spec, is_up).await;
                }
                if !is_up {
                    is_up = true;
                    gateway.fleet.report_health(&spec, true);
                }
            }
            Ok((status, _)) => {
                why = super::unhealthy(status);
                log::debug!("worker {}: /health: {why}", spec.id);
                failures += u32::from(!is_busy);
            }
            Err(error) => {
                log::debug!("worker {}: /health: {error}", spec.id);
                why = error;
                failures += u32::from(!is_busy);
            }
        }
        if unasked.is_some()
            && let Some(endpoint) = spec.kv_events.clone()
        {
            let fleet = Arc::downgrade(&gateway.fleet);
            let (spec, unread) = (Arc::clone(&spec), Arc::clone(&gateway.unread));
            let ready_at = gateway.began + super::FIRST_REPLAYS;
            tokio::spawn(kv_events::follow(fleet, spec, endpoint, unread, ready_at));
        }
        drop(unasked.take());
        if failures == FAILURES && !is_up {
            log::warn!(
                "worker {}: {} does not answer /health: {why}",
                spec.id,
                spec.url
            );
        }
        if failures >= FAILURES && is_up {
            is_up = false;
            log::warn!("worker {}: /health: {why}", spec.id);
            gateway.fleet.report_health(&spec, false);
        }
        let interval = gateway.config.health_interval_s;
        let quiet_s = gateway.config.silence_timeout_s / 2.0;
        let fleet = Arc::clone(&gateway.fleet);
        drop(gateway);
        let pause = if is_up { interval } else { interval.min(0.5) };
        let mut left = Duration::from_secs_f64(pause);
        // A worker that may hang is asked before its time.
        while !left.is_zero() {
            let step = left.min(LOOK);
            tokio::time::sleep(step).await;
            left -= step;
            if is_up && failures == 0 && fleet.is_quiet(&spec, quiet_s) {
                break;
            }
        }
    }
}

/// What is to be said of a host tier that gives nothing back: engines write through to it, so that it
/// holds copies of what the GPU holds before it holds anything else.
fn tier_too_small(spec: &WorkerSpec, kv_capacity_tokens: Option<u64>) -> Option<String> {
    let (host, device) = (spec.host_kv_tokens?, kv_capacity_tokens?);
    (host <= device).then(|| {
        format!(
            "worker {}: its host tier of {host} tokens holds no more than its KV cache of {device}, so \
             that nothing comes back from it; only a larger one does",
            spec.id
        )
    })
}

/// Asks the engine which run of it this is and which models it serves, and, when it comes up, how much it
/// holds and what its model takes.
async fn learn(gateway: &Arc<Gateway>, spec: &Arc<WorkerSpec>, is_up: bool) {
    let info = engine_info::ask(gateway, spec).await;
    gateway.fleet.report_engine(spec, info.run);
    // Conversations are read as the first worker's engine reads them.
    let is_first = || {
        let workers = gateway.fleet.snapshot();
        workers
            .first()
            .is_some_and(|first| first.spec.id == spec.id)
    };
    // Adapters come and go while an engine runs.
    gateway.models.learn(gateway, spec, info.cuts_prompts).await;
    if let Some(keeps) = info.keeps_prefixes {
        gateway.fleet.report_prefix_cache(spec, keeps);
    }
    if let (Some(tokens), None, false) = (info.kv_capacity_tokens, spec.kv_capacity_tokens, is_up) {
        gateway.fleet.report_capacity(spec, tokens);
    }
    if !is_up {
        found::learn(gateway, spec, &info).await;
    }
    let encoder = gateway.encoder.read().clone();
    if let Some(encoder) = encoder.filter(|_| is_first()) {
        encoder.learn_engine(spec.engine, info.release);
    }
    let capacity = spec.kv_capacity_tokens.or(info.kv_capacity_tokens);
    if let (false, Some(warning)) = (is_up, tier_too_small(spec, capacity)) {
        log::warn!("{warning}");
    }
    if !is_up && gateway.vocabulary.is_wanted() {
        let size = engine_info::vocabulary(gateway, spec).await;
        gateway.vocabulary.learn(spec, size);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_tier_is_warned_of_that_holds_no_more_than_the_gpu() {
        let worker = |host: Option<u64>| {
            let spec = serde_json::json!({"url": "http://a:1", "id": "w", "host_kv_tokens": host});
            serde_json::from_value::<WorkerSpec>(spec).expect("a worker")
        };
        let warning = tier_too_small(&worker(Some(1_000)), Some(1_000)).expect("a warning");
        assert!(warning.contains("worker w") && warning.contains("1000"));
        for (host, device) in [
            (Some(1_001), Some(1_000)),
            (None, Some(1_000)),
            (Some(1), None),
        ] {
            assert_eq!(tier_too_small(&worker(host), device), None);
        }
    }
}
