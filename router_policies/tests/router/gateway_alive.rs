//! Workers that hang and workers that are slow: evidence tells them apart, and nobody's work is given to all.

use crate::mock::router::{Router, generate, until, worker};
use crate::mock::{Clock, Fault, MockWorker, logged};
use hyper::StatusCode;
use router_policies::config::{Config, WorkerSpec};
use serde_json::{Value, json};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

async fn mocks<const N: usize>() -> [MockWorker; N] {
    let mut mocks = Vec::new();
    for _ in 0..N {
        mocks.push(MockWorker::start().await);
    }
    mocks.try_into().unwrap_or_else(|_| panic!("as many"))
}

async fn before(workers: Vec<WorkerSpec>) -> Router {
    Router::with(Config {
        workers,
        silence_timeout_s: 0.5,
        load_interval_s: 0.1,
        health_interval_s: 0.2,
        ..Config::default()
    })
    .await
}

fn named(mocks: &[MockWorker], engine: &str) -> Vec<WorkerSpec> {
    let spec = |(at, mock): (usize, &MockWorker)| WorkerSpec {
        engine: serde_json::from_value(engine.into()).expect("an engine"),
        ..worker(mock, &format!("w{at}"), "colocated")
    };
    mocks.iter().enumerate().map(spec).collect()
}

fn executions(mocks: &[MockWorker]) -> usize {
    let hung = |mock: &MockWorker| {
        let unanswered = mock.behaviour.unanswered.lock();
        unanswered
            .iter()
            .filter(|path| *path == "/generate")
            .count()
    };
    mocks
        .iter()
        .map(|mock| mock.bodies().len() + hung(mock))
        .sum()
}

fn prompt(tokens: usize, stream: bool) -> Value {
    let ids: Vec<u32> = (0..tokens).map(|_| fastrand::u32(..1_000_000)).collect();
    json!({"input_ids": ids, "sampling_params": {"max_new_tokens": 4}, "stream": stream})
}

/// Until each has served a request.
async fn warm(router: &Router, mocks: &[MockWorker]) {
    let served = |mock: &MockWorker| mock.behaviour.served.load(Ordering::SeqCst);
    let first_token_us = |us: u64| {
        let all = mocks.iter();
        all.for_each(|mock| mock.behaviour.first_token_us.store(us, Ordering::SeqCst));
    };
    first_token_us(20_000);
    while mocks.iter().any(|mock| served(mock) == 0) {
        let post = || router.post("/generate", prompt(3, true));
        let (one, other) = tokio::join!(post(), post());
        assert_eq!((one.0, other.0), (StatusCode::OK, StatusCode::OK));
    }
    first_token_us(0);
}

#[tokio::test]
async fn a_hung_sglang_scheduler_is_noticed_though_its_process_answers() {
    for (streamed, health_hangs) in [(true, false), (true, true), (false, false), (false, true)] {
        let mocks: [MockWorker; 2] = mocks().await;
        for mock in &mocks {
            mock.behaviour.reports_load.store(true, Ordering::SeqCst);
            *mock.behaviour.clock.lock() = Clock::GoesOn;
        }
        let router = before(named(&mocks, "sglang")).await;
        warm(&router, &mocks).await;
        let served = executions(&mocks);
        let hung = &mocks[0].behaviour;
        *mocks[0].behaviour.fault.lock() = Fault::Stall;
        *hung.clock.lock() = Clock::StandsStill;
        hung.health_hangs.store(health_hangs, Ordering::SeqCst);
        let begun = Instant::now();
        for _ in 0..6 {
            let (status, _) = router.post("/generate", generate(streamed)).await;
            assert_eq!(status, 200);
        }
        // Of the six the first that came there moved, and no other went there.
        assert!(
            begun.elapsed() < Duration::from_secs(4),
            "{:?}",
            begun.elapsed()
        );
        assert!(executions(&mocks) - served <= 7);
        assert!(router.fleet.snapshot()[0].suspect);
        // It goes on.
        *hung.clock.lock() = Clock::GoesOn;
        until("it is trusted again", || {
            !router.fleet.snapshot()[0].suspect
        })
        .await;
        router.idle().await;
    }
}

#[tokio::test]
async fn nothing_is_lost_on_a_worker_of_which_nothing_answers() {
    for (streamed, reports) in [(false, false), (false, true), (true, false)] {
        let mocks: [MockWorker; 2] = mocks().await;
        mocks[0]
            .behaviour
            .reports_load
            .store(reports, Ordering::SeqCst);
        let router = before(named(&mocks, "sglang")).await;
        mocks[0].behaviour.hangs.store(true, Ordering::SeqCst);
        let begun = Instant::now();
        for _ in 0..4 {
            assert_eq!(router.post("/generate", generate(streamed)).await.0, 200);
        }
        assert!(
            begun.elapsed() < Duration::from_secs(4),
            "{:?}",
            begun.elapsed()
        );
        assert_eq!(mocks[1].behaviour.served.load(Ordering::SeqCst), 4);
        router.idle().await;
    }
}

#[tokio::test]
async fn a_slow_first_token_is_waited_for_and_computed_once() {
    for kind in [
        "no reports",
        "reports",
        "blocked reports",
        "its clock",
        "it compiles",
        "it compiles, health hangs",
        "vllm",
    ] {
        let mocks: [MockWorker; 3] = mocks().await;
        for mock in &mocks {
            let mock = &mock.behaviour;
            // Eight times as long as the others' silence may last.
            mock.first_token_us.store(4_000_000, Ordering::SeqCst);
            mock.reports_load
                .store(kind != "no reports", Ordering::SeqCst);
            mock.loads_block
                .store(kind == "blocked reports", Ordering::SeqCst);
            mock.reports_metrics.store(kind == "vllm", Ordering::SeqCst);
            if kind.starts_with("it compiles") {
                *mock.clock.lock() = Clock::StandsStill;
            }
            if kind == "its clock" {
                *mock.clock.lock() = Clock::GoesOn;
                // As SGLang's does in a long prefill.
                mock.health_hangs.store(false, Ordering::SeqCst);
            }
        }
        let engine = if kind == "vllm" { "vllm" } else { "sglang" };
        let router = before(named(&mocks, engine)).await;
        if matches!(kind, "its clock" | "it compiles, health hangs") {
            for mock in &mocks {
                mock.behaviour.health_hangs.store(true, Ordering::SeqCst);
            }
        }
        // One that has served does not compile any more.
        let rounds = if kind.starts_with("it compiles") {
            1
        } else {
            2
        };
        for round in 1..=rounds {
            let (status, body) = router.post("/generate", generate(true)).await;
            assert_eq!(status, 200);
            assert!(body.contains("[DONE]"), "{kind}: {body}");
            assert_eq!(executions(&mocks), round, "{kind}");
        }
        assert!(router.fleet.snapshot().iter().all(|worker| !worker.suspect));
        router.idle().await;
    }
}

#[tokio::test]
async fn a_hung_vllm_is_noticed_by_its_counters_though_its_process_answers() {
    for (streamed, clock) in [(true, Clock::None), (false, Clock::StandsStill)] {
        let mocks: [MockWorker; 2] = mocks().await;
        for mock in &mocks {
            mock.behaviour.reports_metrics.store(true, Ordering::SeqCst);
            *mock.behaviour.clock.lock() = clock;
        }
        let router = before(named(&mocks, "vllm")).await;
        warm(&router, &mocks).await;
        mocks[0].set_fault(Fault::Stall);
        let begun = Instant::now();
        // In turn where both are idle.
        for _ in 0..4 {
            assert_eq!(router.post("/generate", prompt(3, streamed)).await.0, 200);
        }
        assert!(
            begun.elapsed() < Duration::from_secs(2),
            "{:?}",
            begun.elapsed()
        );
        router.idle().await;
    }
}

#[tokio::test]
async fn a_prefill_in_pieces_is_waited_for_by_vllms_kv_in_use() {
    let mocks: [MockWorker; 2] = mocks().await;
    for mock in &mocks {
        mock.behaviour.reports_metrics.store(true, Ordering::SeqCst);
        *mock.behaviour.clock.lock() = Clock::GoesOn;
    }
    let router = before(named(&mocks, "vllm")).await;
    warm(&router, &mocks).await;
    let before = executions(&mocks);
    for mock in &mocks {
        mock.behaviour
            .first_token_us
            .store(4_000_000, Ordering::SeqCst);
    }
    let (status, _) = router.post("/generate", prompt(75_000, true)).await;
    assert_eq!(status, 200);
    assert_eq!(executions(&mocks) - before, 1);
    assert!(router.fleet.snapshot().iter().all(|worker| !worker.suspect));
}

#[tokio::test]
async fn work_is_given_to_no_third_worker() {
    let mocks: [MockWorker; 4] = mocks().await;
    let router = before(named(&mocks, "sglang")).await;
    for mock in &mocks {
        mock.behaviour.hangs.store(true, Ordering::SeqCst);
    }
    let body = generate(true).to_string().into_bytes();
    let answer = router.send("/generate", &[], body);
    assert!(
        tokio::time::timeout(Duration::from_secs(5), answer)
            .await
            .is_err()
    );
    assert_eq!(executions(&mocks), 2);
    router.idle().await;
}

#[tokio::test]
async fn a_queued_request_of_vllm_with_a_tier_is_not_aborted_before_the_worker_is_down() {
    let mocks: [MockWorker; 2] = mocks().await;
    let workers: Vec<WorkerSpec> = named(&mocks, "vllm")
        .into_iter()
        .map(|spec| WorkerSpec {
            kv_capacity_tokens: Some(100_000),
            host_kv_tokens: Some(1_000_000),
            ..spec
        })
        .collect();
    let router = before(workers).await;
    for mock in &mocks {
        mock.set_fault(Fault::Stall);
        mock.behaviour.health_hangs.store(true, Ordering::SeqCst);
    }
    let body = json!({"prompt": [1, 2, 3], "max_tokens": 4, "stream": true});
    let body = body.to_string().into_bytes();
    let answer = router.send("/v1/completions", &[], body);
    let looked = async {
        until("it is suspected", || {
            router.fleet.snapshot().iter().any(|worker| worker.suspect)
        })
        .await;
        tokio::time::sleep(Duration::from_secs(2)).await;
    };
    tokio::select! {
        _ = answer => panic!("answered"),
        () = looked => {}
    }
    let aborted = |mock: &MockWorker| mock.behaviour.aborted.load(Ordering::SeqCst);
    assert_eq!(mocks.iter().map(aborted).sum::<usize>(), 0);
    assert_eq!(executions(&mocks), 1);
}

#[tokio::test]
async fn a_prefill_that_was_given_up_has_taught_how_slow_its_worker_is() {
    let [mock] = mocks().await;
    mock.behaviour
        .first_token_us
        .store(30_000_000, Ordering::SeqCst);
    let router = before(named(std::slice::from_ref(&mock), "sglang")).await;
    let speed = || router.fleet.snapshot()[0].rates.prefill_tokens_per_s;
    let believed = speed();
    let ids: Vec<u32> = (0..20_000).collect();
    let body = json!({"input_ids": ids, "stream": true})
        .to_string()
        .into_bytes();
    let answer = router.send("/generate", &[], body);
    assert!(
        tokio::time::timeout(Duration::from_secs(3), answer)
            .await
            .is_err()
    );
    router.idle().await;
    assert!(speed() < believed, "{} of {believed}", speed());
}

#[tokio::test]
async fn a_suspicion_is_warned_of_once() {
    logged::begin();
    let mocks: [MockWorker; 2] = mocks().await;
    let id = format!("suspect-{:x}", fastrand::u64(..));
    let mut workers = named(&mocks, "vllm");
    workers[0].id.clone_from(&id);
    for mock in &mocks {
        mock.behaviour.reports_metrics.store(true, Ordering::SeqCst);
    }
    let router = before(workers).await;
    mocks[0].set_fault(Fault::Stall);
    mocks[0]
        .behaviour
        .health_hangs
        .store(true, Ordering::SeqCst);
    for _ in 0..2 {
        let body: Value = generate(true);
        assert_eq!(router.post("/generate", body).await.0, 200);
    }
    tokio::time::sleep(Duration::from_secs(4)).await;
    let warned = logged::lines_with(&format!("worker {id} is suspected"));
    assert_eq!(warned.len(), 1, "{warned:?}");
}
