//! Requests whose KV does not arrive: vLLM's decode worker answers 500, as it does for bodies that are at
//! fault, and the client is spared what can be spared.

use crate::mock::router::{Router, until, worker};
use crate::mock::{Fault, MockWorker};
use hyper::StatusCode;
use router_policies::config::WorkerSpec;
use serde_json::{Value, json};
use std::sync::atomic::Ordering;

fn vllm(mock: &MockWorker, id: &str, role: &str) -> WorkerSpec {
    serde_json::from_value(json!({
        "url": mock.url, "id": id, "role": role, "engine": "vllm", "kv_connector": "nixl",
    }))
    .expect("a worker")
}

/// A prefill worker and `count` decode workers called d0, d1, …
async fn fleet(count: usize) -> (MockWorker, Vec<MockWorker>, Router) {
    let p = MockWorker::start().await;
    let mut workers = vec![vllm(&p, "p", "prefill")];
    let mut decoders = Vec::new();
    for i in 0..count {
        let d = MockWorker::start().await;
        workers.push(vllm(&d, &format!("d{i}"), "decode"));
        decoders.push(d);
    }
    let router = Router::start("pd", workers).await;
    (p, decoders, router)
}

fn last_reason(router: &Router) -> Value {
    let decision = router.fleet.sink().recent(1).remove(0);
    serde_json::to_value(decision.reason).expect("a word")
}

#[tokio::test]
async fn where_the_kv_does_not_arrive_the_decode_worker_serves_alone() {
    for (path, body) in [
        ("/v1/completions", json!({"prompt": [1, 2, 3]})),
        (
            "/v1/completions",
            json!({"prompt": [1, 2, 3], "stream": true}),
        ),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "x"}], "stream": true}),
        ),
    ] {
        let (p, decoders, router) = fleet(1).await;
        decoders[0].set_fault(Fault::LostTransfer);
        // More often than failures are borne by a circuit: it is the way that fails, not the worker.
        for _ in 0..7 {
            let (status, text) = router.post(path, body.clone()).await;
            assert_eq!(status, StatusCode::OK, "{path}: {text}");
            assert!(!text.contains("error"), "{path}: {text}");
        }
        router.idle().await;
        assert_eq!(last_reason(&router), "transfer_failed");
        let bodies = decoders[0].bodies();
        assert_eq!((p.bodies().len(), bodies.len()), (7, 14));
        assert!(
            bodies[1].get("kv_transfer_params").is_none(),
            "{}",
            bodies[1]
        );
        assert!(!router.fleet.snapshot()[1].circuit_open);
    }
}

#[tokio::test]
async fn another_pair_is_asked_before_the_decode_worker_serves_alone() {
    let (_p, decoders, router) = fleet(2).await;
    decoders[0].set_fault(Fault::LostTransfer);
    for _ in 0..4 {
        let (status, text) = router.post("/v1/completions", json!({"prompt": [1]})).await;
        assert_eq!(status, StatusCode::OK, "{text}");
        router.idle().await;
        assert_eq!(last_reason(&router), "always_separate");
    }
    assert_eq!(decoders[1].behaviour.served.load(Ordering::SeqCst), 4);
    let sent = |body: &Value| body["kv_transfer_params"]["do_remote_prefill"] == true;
    assert!(decoders.iter().all(|d| d.bodies().iter().all(sent)));
}

#[tokio::test]
async fn a_body_that_makes_decode_workers_fail_is_tried_once_more_and_no_further() {
    for count in [1, 3] {
        let (_p, decoders, router) = fleet(count).await;
        for d in &decoders {
            d.set_fault(Fault::Status(500));
        }
        for round in 1..=6 {
            let (status, text) = router.post("/v1/completions", json!({"prompt": [1]})).await;
            assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
            assert!(text.contains("told to fail"), "{text}");
            let tried: usize = decoders.iter().map(|d| d.bodies().len()).sum();
            assert_eq!(tried, 2 * round, "{count} decode workers");
        }
        router.idle().await;
        let snapshot = router.fleet.snapshot();
        assert!(snapshot.iter().all(|worker| !worker.circuit_open));
    }
}

#[tokio::test]
async fn a_decode_worker_of_sglang_is_not_sent_whole_requests() {
    let (p, d) = (MockWorker::start().await, MockWorker::start().await);
    d.set_fault(Fault::Status(500));
    let workers = vec![worker(&p, "p", "prefill"), worker(&d, "d", "decode")];
    let router = Router::start("pd", workers).await;
    let (status, _) = router
        .post("/generate", json!({"input_ids": [1, 2, 3]}))
        .await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(d.bodies().len(), 1);
    until("nothing is reserved", || router.fleet.is_idle()).await;
}

fn mooncake(mock: &MockWorker, id: &str, role: &str) -> Value {
    let (_, port) = mock.url.rsplit_once(':').expect("a port");
    json!({
        "url": mock.url, "id": id, "role": role, "engine": "vllm", "kv_connector": "mooncake",
        "bootstrap_port": port.parse::<u16>().expect("a number"),
    })
}

#[tokio::test]
async fn kv_is_pulled_from_the_worker_that_took_the_id_of_a_removed_one() {
    let [old, new, d] = [(); 3].map(|()| MockWorker::start());
    let (old, new, d) = (old.await, new.await, d.await);
    new.behaviour.dp_ranks.store(3, Ordering::SeqCst);
    let workers = [mooncake(&old, "p", "prefill"), mooncake(&d, "d", "decode")];
    let workers = workers.map(|spec| serde_json::from_value(spec).expect("a worker"));
    let router = Router::start("pd", workers.to_vec()).await;
    let body = || json!({"prompt": [1, 2, 3], "max_tokens": 9});
    assert_eq!(
        router.post("/v1/completions", body()).await.0,
        StatusCode::OK
    );
    assert!(router.fleet.remove_worker("p"));
    let (status, said) = router
        .post_json("/workers", mooncake(&new, "p", "prefill"))
        .await;
    assert_eq!(status, StatusCode::ACCEPTED, "{said}");
    until("it is up", || {
        router.fleet.snapshot().iter().all(|worker| worker.healthy)
    })
    .await;
    assert_eq!(
        router.post("/v1/completions", body()).await.0,
        StatusCode::OK
    );
    assert_eq!(new.behaviour.queries.load(Ordering::SeqCst), 1);
    router.idle().await;
}
