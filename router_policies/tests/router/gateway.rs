//! The gateway against mock workers: what a client sees, what workers get, and that nothing stays
//! reserved.

use crate::mock::router::{Router, generate, text, until, worker};
use crate::mock::{self, Fault, MockWorker, narrow_connection};
use http_body_util::{BodyExt, Full};
use hyper::{Request, StatusCode};
use router_policies::config::{Config, WorkerSpec};
use router_policies::gateway::Server;
use serde_json::{Value, json};
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokenizers::Tokenizer;
use tokenizers::models::wordlevel::WordLevel;
use tokenizers::pre_tokenizers::whitespace::WhitespaceSplit;
use tokenizers::processors::template::TemplateProcessing;

#[tokio::test]
async fn bodies_reach_the_worker_byte_for_byte_and_answers_come_back() {
    let mock = MockWorker::start().await;
    let router = Router::start("round_robin", vec![worker(&mock, "w", "colocated")]).await;
    let odd = b" {\"input_ids\" : [1,2 ,3], \"unknown\":\"\\u00e9\"}\n".to_vec();
    let response = router
        .send("/generate", &[("x-request-id", "r1")], odd.clone())
        .await;
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(response.headers()["x-deltaserve-worker"], "w");
    assert_eq!(response.headers()["x-deltaserve-decision-id"].len(), 16);
    assert!(text(response).await.contains("hello"));
    assert_eq!(mock.behaviour.bodies.lock()[0], odd);
    for (path, body) in [
        ("/v1/completions", json!({"prompt": "hi", "max_tokens": 4})),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "hi"}]}),
        ),
    ] {
        assert_eq!(router.post(path, body).await.0, StatusCode::OK);
    }
    router.idle().await;
}

#[tokio::test]
async fn a_separated_request_goes_to_both_with_the_same_room_and_streams_from_decode() {
    let (p, d) = (MockWorker::start().await, MockWorker::start().await);
    let router = Router::start(
        "pd",
        vec![worker(&p, "p", "prefill"), worker(&d, "d", "decode")],
    )
    .await;
    let response = router
        .send("/generate", &[], generate(true).to_string().into_bytes())
        .await;
    assert_eq!(response.headers()["x-deltaserve-worker"], "d");
    let body = text(response).await;
    assert_eq!(body.matches("data: ").count(), 5, "{body}");
    let (at_p, at_d) = (p.bodies(), d.bodies());
    assert_eq!(at_p, at_d);
    assert_eq!(at_p[0]["bootstrap_host"], "127.0.0.1");
    assert_eq!(at_p[0]["bootstrap_port"], 8998);
    assert!(at_p[0]["bootstrap_room"].as_i64().expect("63 bits") >= 0);
    assert_eq!(at_p[0]["input_ids"], json!([1, 2, 3]));
    router.idle().await;
}

#[tokio::test]
async fn a_prefill_worker_that_is_later_with_its_answer_may_still_end_it() {
    let (p, d) = (MockWorker::start().await, MockWorker::start().await);
    p.behaviour.first_token_us.store(200_000, Ordering::SeqCst);
    let router = Router::start(
        "pd",
        vec![worker(&p, "p", "prefill"), worker(&d, "d", "decode")],
    )
    .await;
    for (stream, served) in [(false, 1), (true, 2)] {
        let (status, _) = router.post("/generate", generate(stream)).await;
        assert_eq!(status, StatusCode::OK);
        router.idle().await;
        until("the prefill half has ended", || {
            p.behaviour.served.load(Ordering::SeqCst) == served
        })
        .await;
    }
    assert_eq!(p.behaviour.aborted.load(Ordering::SeqCst), 0);
    // One that does not end is not waited for.
    p.set_fault(Fault::Stall);
    router.post("/generate", generate(false)).await;
    until("the prefill half is aborted", || {
        p.behaviour.aborted.load(Ordering::SeqCst) == 1
    })
    .await;
}

#[tokio::test]
async fn round_robin_takes_each_worker_in_turn() {
    let mocks = [
        MockWorker::start().await,
        MockWorker::start().await,
        MockWorker::start().await,
    ];
    let workers = mocks
        .iter()
        .enumerate()
        .map(|(i, m)| worker(m, &format!("w{i}"), "colocated"));
    let router = Router::start("round_robin", workers.collect()).await;
    for _ in 0..6 {
        assert_eq!(
            router.post("/generate", generate(false)).await.0,
            StatusCode::OK
        );
    }
    for mock in &mocks {
        assert_eq!(mock.behaviour.served.load(Ordering::SeqCst), 2);
    }
}

#[tokio::test]
async fn a_session_stays_on_its_worker_under_unified() {
    let mocks = [MockWorker::start().await, MockWorker::start().await];
    let workers = mocks
        .iter()
        .enumerate()
        .map(|(i, m)| worker(m, &format!("w{i}"), "colocated"));
    let router = Router::start("unified", workers.collect()).await;
    let mut seen = Vec::new();
    for _ in 0..5 {
        let headers = [("x-session-id", "s")];
        let response = router
            .send(
                "/generate",
                &headers,
                generate(false).to_string().into_bytes(),
            )
            .await;
        seen.push(response.headers()["x-deltaserve-worker"].clone());
    }
    seen.dedup();
    assert_eq!(seen.len(), 1);
    let decisions: Value = serde_json::from_str(&router.get("/decisions").await.1).expect("JSON");
    assert_eq!(decisions["decisions"][0]["reason"], "affinity");
    assert_eq!(decisions["decisions"][0]["session_id"], "s");
}

#[tokio::test]
async fn a_worker_that_fails_before_the_first_token_is_replaced_by_another() {
    for fault in [
        Fault::CloseAtOnce,
        Fault::Status(500),
        Fault::Status(503),
        Fault::CloseAfter(0),
        Fault::TruncateAfter(0),
        Fault::Abort(500),
        Fault::Abort(503),
    ] {
        for stream in [false, true] {
            if !stream && matches!(fault, Fault::Abort(_)) {
                continue;
            }
            let (bad, good) = (MockWorker::start().await, MockWorker::start().await);
            bad.set_fault(fault);
            let router = Router::start(
                "round_robin",
                vec![
                    worker(&bad, "bad", "colocated"),
                    worker(&good, "good", "colocated"),
                ],
            )
            .await;
            for _ in 0..2 {
                let (status, body) = router.post("/generate", generate(stream)).await;
                assert_eq!(status, StatusCode::OK, "{fault:?} {body}");
                assert!(!body.contains("error"), "{fault:?} {body}");
            }
            assert_eq!(good.behaviour.served.load(Ordering::SeqCst), 2, "{fault:?}");
            router.idle().await;
        }
    }
}

#[tokio::test]
async fn after_the_first_token_a_broken_stream_ends_with_an_error_event() {
    for fault in [Fault::CloseAfter(2), Fault::TruncateAfter(2)] {
        let mock = MockWorker::start().await;
        mock.set_fault(fault);
        let router = Router::start("round_robin", vec![worker(&mock, "w", "colocated")]).await;
        let (status, body) = router.post("/generate", generate(true)).await;
        assert_eq!(status, StatusCode::OK);
        let last = body.trim_end().rsplit("\n\n").next().expect("an event");
        let event: Value = serde_json::from_str(last.trim_start_matches("data: ")).expect("JSON");
        assert_eq!(event["error"]["type"], "worker_error");
        assert_eq!(event["error"]["code"], 502);
        router.idle().await;
    }
}

#[tokio::test]
async fn when_prefill_fails_an_elastic_worker_serves_alone_and_a_decode_worker_cannot() {
    for (fault, role, expected) in [
        (Fault::Status(500), "elastic", StatusCode::OK),
        (Fault::CloseAtOnce, "elastic", StatusCode::OK),
        (
            Fault::Status(500),
            "decode",
            StatusCode::INTERNAL_SERVER_ERROR,
        ),
        (Fault::CloseAtOnce, "decode", StatusCode::BAD_GATEWAY),
    ] {
        let (p, d) = (MockWorker::start().await, MockWorker::start().await);
        p.set_fault(fault);
        d.behaviour.first_token_us.store(300_000, Ordering::SeqCst);
        let router = Router::with(Config {
            policy: "pd".to_owned(),
            workers: vec![worker(&p, "p", "prefill"), worker(&d, "d", role)],
            // Serving alone is no retry.
            retries: 0,
            ..Config::default()
        })
        .await;
        let (status, body) = router.post("/generate", generate(true)).await;
        assert_eq!(status, expected, "{body}");
        if role == "elastic" && fault == Fault::CloseAtOnce {
            // Its engine notices that the other one is gone, and prefills by itself.
            let bodies = d.bodies();
            assert_eq!(bodies.len(), 1);
            assert!(bodies[0].get("bootstrap_room").is_some());
        } else if role == "elastic" {
            let last = d.bodies().pop().expect("a body");
            assert!(last.get("bootstrap_room").is_none());
            let decisions: Value =
                serde_json::from_str(&router.get("/decisions").await.1).expect("JSON");
            assert_eq!(decisions["decisions"][0]["reason"], "prefill_failed");
        } else if expected == StatusCode::BAD_GATEWAY {
            assert!(body.contains("prefill worker p"), "{body}");
        } else {
            assert!(body.contains("told to fail"), "{body}");
        }
        router.idle().await;
    }
}

/// Status, `x-deltaserve-worker` and body.
async fn refused(router: &Router, body: Value) -> (u16, String, String) {
    let response = router
        .send("/v1/completions", &[], body.to_string().into_bytes())
        .await;
    let status = response.status().as_u16();
    let worker = response.headers()["x-deltaserve-worker"].to_str();
    let worker = worker.expect("an id").to_owned();
    (status, worker, text(response).await)
}

#[tokio::test]
async fn what_a_worker_says_against_a_request_reaches_the_client_and_is_not_tried_again() {
    for stream in [false, true] {
        let mocks = [MockWorker::start().await, MockWorker::start().await];
        for mock in &mocks {
            mock.set_fault(Fault::Refuse(400));
        }
        let workers = mocks
            .iter()
            .enumerate()
            .map(|(i, m)| worker(m, &format!("w{i}"), "colocated"));
        let router = Router::start("round_robin", workers.collect()).await;
        let sent = 20;
        for _ in 0..sent {
            let body = json!({"prompt": "hello", "stream": stream});
            let (status, _, body) = refused(&router, body).await;
            let expected = if stream {
                (200, mock::refusal_stream(400))
            } else {
                (400, mock::refusal(400))
            };
            assert_eq!((status, body), expected);
        }
        router.idle().await;
        let asked = mocks
            .iter()
            .map(|m| m.behaviour.refused.load(Ordering::SeqCst));
        assert_eq!(asked.sum::<usize>(), sent);
        assert!(router.fleet.snapshot().iter().all(|w| !w.circuit_open));
        let (_, metrics) = router.get("/metrics").await;
        let line = format!("deltaserve_requests_total{{outcome=\"rejected\"}} {sent}");
        assert!(metrics.contains(&line), "{metrics}");
    }
}

#[tokio::test]
async fn an_abort_for_the_requests_own_sake_reaches_the_client_and_is_not_tried_again() {
    let mock = MockWorker::start().await;
    mock.set_fault(Fault::Abort(400));
    let router = Router::start("round_robin", vec![worker(&mock, "w", "colocated")]).await;
    for _ in 0..8 {
        let (status, body) = router.post("/generate", generate(true)).await;
        assert_eq!(status, StatusCode::OK);
        assert_eq!(body, mock::abort(400) + "data: [DONE]\n\n");
    }
    router.idle().await;
    assert!(!router.fleet.snapshot()[0].circuit_open);
    let (_, metrics) = router.get("/metrics").await;
    assert!(
        metrics.contains("deltaserve_requests_total{outcome=\"rejected\"} 8"),
        "{metrics}"
    );
}

fn poison(stream: bool) -> Value {
    let mut body = generate(stream);
    body["user"] = "poison".into();
    body
}

#[tokio::test]
async fn whatever_poison_is_sent_workers_that_serve_others_stay_and_a_broken_one_is_rested() {
    for seed in 0..24 {
        let mut random = fastrand::Rng::with_seed(seed);
        let separated = random.bool();
        let count = if separated { 4 } else { random.usize(1..=4) };
        // One that answers everything with 500, where others can take over.
        let broken = (!separated && count > 1 && random.bool()).then(|| random.usize(0..count));
        let mut mocks = Vec::new();
        let mut workers = Vec::new();
        for i in 0..count {
            let mock = MockWorker::start().await;
            mock.set_fault(match broken == Some(i) {
                true => Fault::Refuse(500),
                false => Fault::Poison,
            });
            let role = match (separated, i) {
                (false, _) => "colocated",
                (true, 0 | 1) => "prefill",
                (true, 2) => "decode",
                (true, _) => "elastic",
            };
            workers.push(worker(&mock, &format!("w{i}"), role));
            mocks.push(mock);
        }
        let policy = if separated { "pd" } else { "round_robin" };
        let retries = random.usize(1..=3);
        let router = Router::with(Config {
            policy: policy.to_owned(),
            workers,
            retries,
            ..Config::default()
        })
        .await;
        let is_rested = |i: usize| router.fleet.snapshot()[i].circuit_open;
        for _ in 0..60 {
            let poisonous = random.u32(0..3) > 0;
            let stream = random.bool();
            let (body, expected) = match poisonous {
                true => (poison(stream), "skip_tokenizer_init"),
                false => (generate(stream), "completion_tokens"),
            };
            let (_, text) = router.post("/generate", body).await;
            assert!(text.contains(expected), "seed {seed}: {text}");
            for i in (0..count).filter(|i| broken != Some(*i)) {
                assert!(!is_rested(i), "seed {seed}, {broken:?} of {count}");
            }
        }
        if let Some(broken) = broken {
            for _ in 0..5 * count {
                router.post("/generate", generate(false)).await;
            }
            assert!(is_rested(broken), "seed {seed}: {broken} of {count}");
        }
        router.idle().await;
    }
}

#[tokio::test]
async fn where_nothing_is_tried_twice_every_answer_with_5xx_counts() {
    let mock = MockWorker::start().await;
    mock.set_fault(Fault::Status(500));
    let router = Router::with(Config {
        policy: "round_robin".to_owned(),
        retries: 0,
        workers: vec![worker(&mock, "w", "colocated")],
        ..Config::default()
    })
    .await;
    for _ in 0..5 {
        assert!(!router.fleet.snapshot()[0].circuit_open);
        router.post("/generate", generate(false)).await;
    }
    assert!(router.fleet.snapshot()[0].circuit_open);
}

#[tokio::test]
async fn what_the_last_worker_answered_reaches_the_client_when_all_have_failed() {
    for stream in [false, true] {
        let mocks = [MockWorker::start().await, MockWorker::start().await];
        for mock in &mocks {
            mock.set_fault(Fault::Refuse(500));
        }
        let workers = vec![
            worker(&mocks[0], "w0", "colocated"),
            worker(&mocks[1], "w1", "colocated"),
        ];
        let router = Router::start("round_robin", workers).await;
        let body = json!({"prompt": [1, 2], "stream": stream});
        let (status, _, body) = refused(&router, body).await;
        let expected = if stream {
            (200, mock::refusal_stream(500))
        } else {
            (500, mock::refusal(500))
        };
        assert_eq!((status, body), expected);
        for mock in &mocks {
            assert_eq!(mock.behaviour.refused.load(Ordering::SeqCst), 1);
        }
        router.idle().await;
    }
}

#[tokio::test]
async fn what_a_prefill_worker_says_against_a_request_reaches_the_client() {
    for (engine, role) in [
        ("sglang", "elastic"),
        ("sglang", "decode"),
        ("vllm", "decode"),
    ] {
        for stream in [false, true] {
            let (p, d) = (MockWorker::start().await, MockWorker::start().await);
            p.set_fault(Fault::Refuse(400));
            d.set_fault(Fault::Stall);
            let workers = match engine {
                "vllm" => vec![
                    vllm(&p, "p", "prefill", "nixl"),
                    vllm(&d, "d", role, "nixl"),
                ],
                _ => vec![worker(&p, "p", "prefill"), worker(&d, "d", role)],
            };
            let router = Router::start("pd", workers).await;
            let sent = 8;
            for _ in 0..sent {
                let body = json!({"prompt": "hello", "stream": stream});
                let (status, worker, body) = refused(&router, body).await;
                // vLLM's prefill is never asked for a stream.
                let expected = if stream && engine == "sglang" {
                    (200, mock::refusal_stream(400))
                } else {
                    (400, mock::refusal(400))
                };
                assert_eq!((status, body), expected, "{engine} {role}");
                assert_eq!(worker, "p");
            }
            router.idle().await;
            assert_eq!(p.behaviour.refused.load(Ordering::SeqCst), sent);
            assert!(router.fleet.snapshot().iter().all(|w| !w.circuit_open));
        }
    }
}

#[tokio::test]
async fn a_client_that_leaves_aborts_the_request_on_both_workers() {
    for stream in [false, true] {
        let (p, d) = (MockWorker::start().await, MockWorker::start().await);
        p.set_fault(Fault::Stall);
        d.set_fault(Fault::Stall);
        let router = Router::start(
            "pd",
            vec![worker(&p, "p", "prefill"), worker(&d, "d", "decode")],
        )
        .await;
        let body = generate(stream).to_string().into_bytes();
        let running = |mock: &MockWorker| mock.behaviour.running.load(Ordering::SeqCst);
        tokio::select! {
            _ = router.send("/generate", &[], body) => panic!("both stall"),
            () = until("both have it", || running(&p) == 1 && running(&d) == 1) => {}
        }
        until("both saw the request end", || {
            p.behaviour.aborted.load(Ordering::SeqCst) == 1
                && d.behaviour.aborted.load(Ordering::SeqCst) == 1
        })
        .await;
        router.idle().await;
    }
}

#[tokio::test]
async fn a_client_that_leaves_mid_stream_aborts_the_request() {
    let mock = MockWorker::start().await;
    mock.set_fault(Fault::StallAfter(1));
    let router = Router::start("round_robin", vec![worker(&mock, "w", "colocated")]).await;
    let mut response = router
        .send("/generate", &[], generate(true).to_string().into_bytes())
        .await;
    response
        .body_mut()
        .frame()
        .await
        .expect("a frame")
        .expect("no error");
    drop(response);
    until("the worker saw the request end", || {
        mock.behaviour.aborted.load(Ordering::SeqCst) == 1
    })
    .await;
    router.idle().await;
}

#[tokio::test]
async fn a_request_that_takes_too_long_is_ended() {
    for (fault, expected) in [
        (Fault::Stall, StatusCode::GATEWAY_TIMEOUT),
        (Fault::StallAfter(1), StatusCode::OK),
    ] {
        let mock = MockWorker::start().await;
        mock.set_fault(fault);
        let router = Router::with(Config {
            policy: "round_robin".to_owned(),
            request_timeout_s: 0.2,
            workers: vec![worker(&mock, "w", "colocated")],
            ..Config::default()
        })
        .await;
        let (status, body) = router.post("/generate", generate(true)).await;
        assert_eq!(status, expected);
        assert!(body.contains("\"timeout\""), "{body}");
        router.idle().await;
    }
}

#[tokio::test]
async fn bad_requests_are_answered_in_one_line() {
    let mock = MockWorker::start().await;
    let router = Router::with(Config {
        policy: "round_robin".to_owned(),
        max_body_bytes: 1000,
        workers: vec![worker(&mock, "w", "colocated")],
        ..Config::default()
    })
    .await;
    let (status, body) = router.post("/generate", json!({"x": 1})).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert!(body.contains("input_ids"), "{body}");
    let (status, _) = router
        .post("/generate", json!({"text": "x".repeat(2000)}))
        .await;
    assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE);
    assert_eq!(router.get("/nowhere").await.0, StatusCode::NOT_FOUND);
    assert_eq!(
        router.get("/generate").await.0,
        StatusCode::METHOD_NOT_ALLOWED
    );
}

#[tokio::test]
async fn workers_come_and_go_while_it_runs() {
    let router = Router::start("round_robin", vec![]).await;
    assert_eq!(router.get("/health").await.0, StatusCode::OK);
    assert_eq!(
        router.get("/readyz").await.0,
        StatusCode::SERVICE_UNAVAILABLE
    );
    let response = router
        .send("/generate", &[], generate(false).to_string().into_bytes())
        .await;
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(response.headers()["retry-after"], "1");
    let mock = MockWorker::start().await;
    let new = json!({"url": mock.url, "worker_type": "regular", "labels": {}});
    let (status, body) = router.post_json("/workers", new.clone()).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{body}");
    assert_eq!(
        router.post_json("/workers", new).await.0,
        StatusCode::CONFLICT
    );
    until("the worker is up", || router.fleet.is_ready()).await;
    assert_eq!(
        router.post("/generate", generate(false)).await.0,
        StatusCode::OK
    );
    let listed: Value = serde_json::from_str(&router.get("/workers").await.1).expect("JSON");
    assert_eq!(listed["total"], 1);
    assert_eq!(listed["workers"][0]["worker_type"], "regular");
    assert_eq!(listed["workers"][0]["is_healthy"], true);
    assert_eq!(
        listed["workers"][0]["state"]["kv_capacity_tokens"],
        1_000_000
    );
    let id = listed["workers"][0]["id"].as_str().expect("an id");
    let request = Request::delete(format!("{}/workers/{id}", router.url))
        .body(Full::default())
        .expect("a request");
    let response = router.client.request(request).await.expect("an answer");
    assert_eq!(response.status(), StatusCode::ACCEPTED);
    assert_eq!(
        router.get("/readyz").await.0,
        StatusCode::SERVICE_UNAVAILABLE
    );
    let (status, metrics) = router.get("/metrics").await;
    assert_eq!(status, StatusCode::OK);
    assert!(
        metrics.contains("deltaserve_requests_total{outcome=\"ok\"} 1"),
        "{metrics}"
    );
    assert!(
        metrics.contains("deltaserve_cached_tokens_total{"),
        "{metrics}"
    );
}

#[tokio::test]
async fn the_decision_log_has_one_decision_and_one_finish_a_request() {
    let folder = std::env::temp_dir().join(format!("router-log-{:x}", fastrand::u64(..)));
    std::fs::create_dir_all(&folder).expect("a folder");
    let path = folder.join("decisions.jsonl");
    let (p, d) = (MockWorker::start().await, MockWorker::start().await);
    {
        let router = Router::with(Config {
            policy: "pd".to_owned(),
            decision_log: Some(path.clone()),
            workers: vec![worker(&p, "p", "prefill"), worker(&d, "d", "decode")],
            ..Config::default()
        })
        .await;
        let headers = [("x-request-id", "r7"), ("x-session-id", "s1")];
        let response = router
            .send(
                "/generate",
                &headers,
                generate(true).to_string().into_bytes(),
            )
            .await;
        text(response).await;
        router.idle().await;
    }
    until("both lines are written", || {
        std::fs::read_to_string(&path).is_ok_and(|log| log.lines().count() == 2)
    })
    .await;
    let log = std::fs::read_to_string(&path).expect("the log");
    let lines: Vec<Value> = log
        .lines()
        .map(|l| serde_json::from_str(l).expect("JSON"))
        .collect();
    let decision = &lines[0];
    assert_eq!(decision["event"], "decision");
    assert_eq!(
        (&decision["request_id"], &decision["session_id"]),
        (&json!("r7"), &json!("s1"))
    );
    assert_eq!(
        (&decision["kind"], &decision["prefill"], &decision["decode"]),
        (&json!("prefill_decode"), &json!("p"), &json!("d"))
    );
    assert_eq!(decision["reason"], "always_separate");
    assert_eq!(
        (&decision["input_tokens"], &decision["new_tokens"]),
        (&json!(3), &json!(3))
    );
    assert_eq!(
        decision["reserved"],
        json!({"p": {"prefill_tokens": 3, "decode_tokens": 0}, "d": {"prefill_tokens": 0, "decode_tokens": 3}})
    );
    assert_eq!(decision["prefix_source"], "estimate");
    let finish = &lines[1];
    assert_eq!(
        (&finish["event"], &finish["outcome"], &finish["status"]),
        (&json!("finish"), &json!("ok"), &json!(200))
    );
    assert_eq!(finish["output_chunks"], 4);
    assert_eq!(
        (&finish["prompt_tokens"], &finish["cached_tokens"]),
        (&json!(100), &json!(10))
    );
    assert_eq!(finish["decision_id"], decision["decision_id"]);
    std::fs::remove_dir_all(&folder).expect("removed");
}

/// A tokenizer of three words and what puts a token in front of a prompt, and the folder it is in.
fn tokenizer() -> (Tokenizer, std::path::PathBuf) {
    let words = ["<s>", "<unk>", "tell", "me", "caf\u{e9}"];
    let ids = (0..).zip(words).map(|(id, word)| (word.to_owned(), id));
    let model = WordLevel::builder()
        .vocab(ids.collect())
        .unk_token("<unk>".to_owned())
        .build()
        .expect("a model");
    let first = TemplateProcessing::builder()
        .try_single("<s> $A")
        .expect("a template")
        .special_tokens(vec![("<s>", 0)])
        .build()
        .expect("a template");
    let mut tokenizer = Tokenizer::new(model);
    tokenizer.with_pre_tokenizer(Some(WhitespaceSplit));
    tokenizer.with_post_processor(Some(first));
    let folder = std::env::temp_dir().join(format!("router-tokenizer-{:x}", fastrand::u64(..)));
    std::fs::create_dir_all(&folder).expect("a folder");
    let file = folder.join("tokenizer.json");
    tokenizer.save(file, false).expect("saved");
    (tokenizer, folder)
}

/// Sends a text prompt, then the same as token ids; returns both decisions.
async fn text_then_ids(
    tokenizer: Option<std::path::PathBuf>,
    text: &str,
    ids: &[u32],
) -> [Value; 2] {
    let requests = [json!({"text": text}), json!({"input_ids": ids})];
    decisions_of(tokenizer, requests.map(|body| ("/generate", body))).await
}

/// Sends two requests, one after the other, to a router of two workers; returns both decisions.
async fn decisions_of(
    tokenizer: Option<std::path::PathBuf>,
    requests: [(&str, Value); 2],
) -> [Value; 2] {
    let (a, b) = (MockWorker::start().await, MockWorker::start().await);
    let router = Router::with(Config {
        tokenizer,
        workers: vec![worker(&a, "a", "colocated"), worker(&b, "b", "colocated")],
        ..Config::default()
    })
    .await;
    for (path, body) in requests {
        let (status, _) = router.post(path, body).await;
        assert_eq!(status, StatusCode::OK);
        router.idle().await;
    }
    let (_, decisions) = router.get("/decisions?limit=2").await;
    let decisions: Value = serde_json::from_str(&decisions).expect("JSON");
    let found = &decisions["decisions"];
    [found[1].clone(), found[0].clone()]
}

#[tokio::test]
async fn with_a_tokenizer_text_and_its_token_ids_are_one_prompt() {
    let (tokenizer, folder) = tokenizer();
    // Escaped in the body: the quotes and line ends.
    let text = "tell me \"caf\u{e9}\"\n caf\u{e9} ".repeat(50);
    let encoding = tokenizer.encode(text.as_str(), true).expect("encoded");
    let ids = encoding.get_ids();
    assert_eq!((ids.len(), &ids[..5]), (201, &[0, 2, 3, 1, 4][..]));
    let [first, second] = text_then_ids(Some(folder.clone()), &text, ids).await;
    assert_eq!(
        (&first["input_tokens"], &first["new_tokens"]),
        (&json!(201), &json!(201))
    );
    assert_eq!(second["input_tokens"], 201);
    assert_eq!(second["worker"], first["worker"]);
    // Twelve whole blocks of 16.
    let worker = first["worker"].as_str().expect("a worker");
    assert_eq!(second["cached_tokens"], json!({worker: 192}));
    assert_eq!(second["new_tokens"], 9);

    let [first, second] = text_then_ids(None, &text, ids).await;
    let bytes = json!(text).to_string().len() - 2;
    assert_eq!(first["input_tokens"], bytes.div_ceil(4));
    assert_eq!(second["cached_tokens"], json!({}));
    std::fs::remove_dir_all(&folder).expect("removed");
}

#[tokio::test]
async fn with_a_chat_template_a_conversation_and_its_token_ids_are_one_prompt() {
    let (tokenizer, folder) = tokenizer();
    let template =
        "{% for message in messages %}<s> {{ message.role }} {{ message.content }}\n{% endfor %}";
    std::fs::write(folder.join("chat_template.jinja"), template).expect("written");
    let said = "tell me ".repeat(40);
    let shown = format!("<s> user {said} <s> assistant me");
    let ids = tokenizer.encode(shown, false).expect("encoded");
    assert_eq!(ids.len(), 2 + 80 + 3);
    let messages =
        json!([{"role": "user", "content": said}, {"role": "assistant", "content": "me"}]);
    for path in ["/v1/chat/completions", "/v1/messages"] {
        let chat = (path, json!({"messages": messages, "max_tokens": 4}));
        let same = ("/generate", json!({"input_ids": ids.get_ids()}));
        let [first, second] = decisions_of(Some(folder.clone()), [chat, same]).await;
        assert_eq!(first["input_tokens"], 85, "{path}");
        assert_eq!(second["worker"], first["worker"]);
        let worker = first["worker"].as_str().expect("a worker");
        // Five whole blocks of 16.
        assert_eq!(second["cached_tokens"], json!({worker: 80}));
    }
    std::fs::remove_dir_all(&folder).expect("removed");
}

#[tokio::test]
async fn a_tokenizer_that_is_none_is_named_before_anything_listens() {
    let taken = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("a port");
    let config = Config {
        port: taken.local_addr().expect("bound").port(),
        tokenizer: Some("/nowhere".into()),
        ..Config::default()
    };
    let error = Server::bind(config).await.err().expect("no tokenizer");
    assert!(
        error.starts_with("tokenizer: /nowhere: No such file"),
        "{error}"
    );
}

fn vllm(mock: &MockWorker, id: &str, role: &str, connector: &str) -> WorkerSpec {
    let port: u16 = mock
        .url
        .rsplit(':')
        .next()
        .expect("a port")
        .parse()
        .expect("a number");
    serde_json::from_value(json!({
        "url": mock.url, "id": id, "role": role, "engine": "vllm", "kv_connector": connector,
        "bootstrap_port": port,
    }))
    .expect("a worker")
}

#[tokio::test]
async fn vllm_with_nixl_prefills_first_and_passes_the_blocks_on() {
    let (p, d) = (MockWorker::start().await, MockWorker::start().await);
    let workers = vec![
        vllm(&p, "p", "prefill", "nixl"),
        vllm(&d, "d", "decode", "nixl"),
    ];
    let router = Router::start("pd", workers).await;
    let body = json!({"prompt": [1, 2, 3], "max_tokens": 9, "stream": true,
        "stream_options": {"include_usage": true}});
    let (status, text) = router.post("/v1/completions", body).await;
    assert_eq!(status, StatusCode::OK, "{text}");
    assert!(text.ends_with("data: [DONE]\n\n"));
    let (at_p, at_d) = (p.bodies().remove(0), d.bodies().remove(0));
    assert_eq!(
        (
            &at_p["max_tokens"],
            &at_p["stream"],
            &at_p["stream_options"]
        ),
        (&json!(1), &json!(false), &Value::Null)
    );
    assert_eq!(at_p["kv_transfer_params"]["do_remote_decode"], true);
    assert_eq!(
        (&at_d["max_tokens"], &at_d["stream"]),
        (&json!(9), &json!(true))
    );
    assert_eq!(
        at_d["kv_transfer_params"],
        json!({"do_remote_prefill": true, "remote_block_ids": [4]})
    );
    router.idle().await;
    // What it was sent would count as cached.
    let (_, metrics) = router.get("/metrics").await;
    assert!(
        !metrics.contains("deltaserve_cached_tokens_total{"),
        "{metrics}"
    );
}

#[tokio::test]
async fn vllm_with_mooncake_gets_both_halves_of_one_transfer() {
    let (p, d) = (MockWorker::start().await, MockWorker::start().await);
    let workers = vec![
        vllm(&p, "p", "prefill", "mooncake"),
        vllm(&d, "d", "decode", "mooncake"),
    ];
    let router = Router::start("pd", workers).await;
    let body = json!({"prompt": [1, 2, 3], "max_tokens": 9});
    assert_eq!(router.post("/v1/completions", body).await.0, StatusCode::OK);
    let (at_p, at_d) = (p.bodies().remove(0), d.bodies().remove(0));
    let (send, receive) = (&at_p["kv_transfer_params"], &at_d["kv_transfer_params"]);
    assert_eq!(send["transfer_id"], receive["transfer_id"]);
    assert_eq!(receive["remote_engine_id"], "engine-7");
    assert_eq!(receive["remote_bootstrap_addr"], p.url);
    assert_eq!(at_d["max_tokens"], 9);
    router.idle().await;
}

#[tokio::test]
async fn with_mooncake_the_rank_that_prefills_is_the_one_that_is_pulled_from() {
    let (p, d) = (MockWorker::start().await, MockWorker::start().await);
    p.behaviour.dp_ranks.store(3, Ordering::SeqCst);
    let workers = vec![
        vllm(&p, "p", "prefill", "mooncake"),
        vllm(&d, "d", "decode", "mooncake"),
    ];
    let router = Router::start("pd", workers).await;
    let mut seen = std::collections::BTreeSet::new();
    for round in 0..60 {
        let body = json!({"prompt": [1, 2, 3], "max_tokens": 9});
        let (status, _) = router.post("/v1/completions", body).await;
        assert_eq!(status, StatusCode::OK);
        let headers = p.behaviour.headers.lock();
        let rank = headers[round]["x-data-parallel-rank"].to_str();
        let rank: usize = rank.expect("text").parse().expect("a number");
        let told = &d.bodies()[round]["kv_transfer_params"]["remote_engine_id"];
        assert_eq!(*told, format!("engine-{}", 7 + rank));
        seen.insert(rank);
    }
    assert_eq!(seen.len(), 3, "all ranks are used");
    let queries = p.behaviour.queries.load(Ordering::SeqCst);
    assert!(queries < 10, "{queries} times asked for 60 requests");
}

#[tokio::test]
async fn vllm_separates_agents_apis_too() {
    let (p, d) = (MockWorker::start().await, MockWorker::start().await);
    let workers = vec![
        vllm(&p, "p", "prefill", "nixl"),
        vllm(&d, "d", "decode", "nixl"),
    ];
    let router = Router::start("pd", workers).await;
    let asked =
        json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "stream": true});
    let responses =
        json!({"input": "hi", "max_output_tokens": 9, "background": true, "stream": true});
    for (path, body, limit) in [
        ("/v1/messages", asked, "max_tokens"),
        ("/v1/responses", responses, "max_output_tokens"),
    ] {
        let (status, text) = router.post(path, body).await;
        assert_eq!(status, StatusCode::OK, "{text}");
        let (at_p, at_d) = (p.bodies().remove(0), d.bodies().remove(0));
        assert_eq!((&at_p[limit], &at_p["stream"]), (&json!(1), &json!(false)));
        assert_eq!(at_p["kv_transfer_params"]["do_remote_decode"], true);
        assert_eq!((&at_d[limit], &at_d["stream"]), (&json!(9), &json!(true)));
        assert_eq!(at_d["kv_transfer_params"]["do_remote_prefill"], true);
        assert_ne!(at_p["background"], true, "its answer says where the KV is");
        for mock in [&p, &d] {
            mock.behaviour.bodies.lock().clear();
        }
    }
}

#[tokio::test]
async fn when_vllms_prefill_fails_the_client_is_told() {
    let (p, d) = (MockWorker::start().await, MockWorker::start().await);
    p.set_fault(Fault::Status(500));
    let workers = vec![
        vllm(&p, "p", "prefill", "nixl"),
        vllm(&d, "d", "decode", "nixl"),
    ];
    let router = Router::start("pd", workers).await;
    let (status, text) = router.post("/v1/completions", json!({"prompt": [1]})).await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    assert!(text.contains("told to fail"), "{text}");
    router.idle().await;
}

#[tokio::test]
async fn beyond_the_limit_requests_wait_then_are_refused() {
    let mock = MockWorker::start().await;
    mock.set_fault(Fault::Stall);
    let router = Router::with(Config {
        policy: "round_robin".to_owned(),
        max_inflight: 1,
        max_queued: 1,
        queue_timeout_s: 3.0,
        workers: vec![worker(&mock, "w", "colocated")],
        ..Config::default()
    })
    .await;
    let body = || generate(false).to_string().into_bytes();
    let first = router.send("/generate", &[], body());
    let second = async {
        until("the first runs", || {
            mock.behaviour.running.load(Ordering::SeqCst) == 1
        })
        .await;
        router.send("/generate", &[], body()).await
    };
    let third = async {
        router.counts("deltaserve_queued_requests 1").await;
        router.send("/generate", &[], body()).await
    };
    let (waited, refused) = tokio::select! {
        _ = first => panic!("the worker stalls"),
        both = async { tokio::join!(second, third) } => both,
    };
    assert_eq!(waited.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(refused.headers()["retry-after"], "1");
    router.idle().await;
}

#[tokio::test]
async fn a_draining_worker_gets_no_new_requests() {
    let mocks = [MockWorker::start().await, MockWorker::start().await];
    let workers = mocks
        .iter()
        .enumerate()
        .map(|(i, m)| worker(m, &format!("w{i}"), "colocated"));
    let router = Router::start("round_robin", workers.collect()).await;
    assert_eq!(
        router.post_json("/workers/w0/drain", Value::Null).await.0,
        StatusCode::ACCEPTED
    );
    for _ in 0..4 {
        assert_eq!(
            router.post("/generate", generate(false)).await.0,
            StatusCode::OK
        );
    }
    assert_eq!(mocks[0].behaviour.served.load(Ordering::SeqCst), 0);
    assert_eq!(
        router.post_json("/workers/w0/undrain", Value::Null).await.0,
        StatusCode::ACCEPTED
    );
    assert_eq!(
        router
            .post_json("/workers/nowhere/drain", Value::Null)
            .await
            .0,
        StatusCode::NOT_FOUND
    );
}

#[tokio::test]
async fn with_a_token_only_its_bearer_changes_the_workers() {
    let router = Router::with(Config {
        policy: "round_robin".to_owned(),
        admin_token: Some("secret".to_owned()),
        ..Config::default()
    })
    .await;
    let body = || {
        json!({"url": "http://127.0.0.1:1"})
            .to_string()
            .into_bytes()
    };
    for (headers, expected) in [
        (&[][..], StatusCode::FORBIDDEN),
        (
            &[("authorization", "Bearer wrong!")][..],
            StatusCode::FORBIDDEN,
        ),
        (
            &[("authorization", "Bearer secret")][..],
            StatusCode::ACCEPTED,
        ),
    ] {
        assert_eq!(
            router.send("/workers", headers, body()).await.status(),
            expected
        );
    }
    assert_eq!(router.get("/workers").await.0, StatusCode::UNAUTHORIZED);
}

/// A connection on which a request has been sent, and nothing is read unless the test does it.
async fn raw(router: &Router, request: &str) -> tokio::net::TcpStream {
    use tokio::io::AsyncWriteExt;
    let address = router.url.trim_start_matches("http://");
    let mut socket = narrow_connection(address).await;
    socket
        .write_all(request.as_bytes())
        .await
        .expect("it is sent");
    socket
}

/// What is on its way to the client, until the router closes the connection.
async fn rest(mut socket: tokio::net::TcpStream) -> String {
    use tokio::io::AsyncReadExt;
    let mut bytes = Vec::new();
    // A connection that was cut off may end with an error.
    let _ = socket.read_to_end(&mut bytes).await;
    String::from_utf8_lossy(&bytes).into_owned()
}

fn post_text(body: &str) -> String {
    format!(
        "POST /generate HTTP/1.1\r\nhost: r\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}

async fn hurried_router(mock: &MockWorker, config: Config) -> Router {
    hurried_by(0.7, mock, config).await
}

async fn hurried_by(request_timeout_s: f64, mock: &MockWorker, config: Config) -> Router {
    Router::with(Config {
        policy: "round_robin".to_owned(),
        workers: vec![worker(mock, "w", "colocated")],
        request_timeout_s,
        ..config
    })
    .await
}

#[tokio::test]
async fn at_the_deadline_a_client_that_does_not_read_loses_its_stream_and_its_worker() {
    let mock = MockWorker::start().await;
    let log = std::env::temp_dir().join(format!("router-unread-{:x}.jsonl", fastrand::u64(..)));
    let config = Config {
        decision_log: Some(log.clone()),
        ..Config::default()
    };
    // On a slow machine too the stream stands still by then.
    let router = hurried_by(4.0, &mock, config).await;
    let body = json!({"input_ids": [1], "user": "flood", "stream": true});
    let socket = raw(&router, &post_text(&body.to_string())).await;
    until("it is reserved", || !router.fleet.is_idle()).await;
    router.idle().await;
    until("the worker is told", || {
        mock.behaviour.aborted.load(Ordering::SeqCst) == 1
    })
    .await;
    let text = rest(socket).await;
    assert!(
        !text.ends_with("0\r\n\r\n"),
        "the client can tell that it is not whole"
    );
    let finish = || {
        let lines = std::fs::read_to_string(&log).unwrap_or_default();
        let last = lines.lines().last().unwrap_or_default();
        serde_json::from_str(last).unwrap_or(Value::Null)
    };
    until("it is logged", || finish()["event"] == "finish").await;
    assert_eq!(finish()["outcome"], "timeout");
    std::fs::remove_file(&log).expect("removed");
}

#[tokio::test]
async fn a_client_that_reads_on_is_told_by_an_event_that_its_time_is_over() {
    let mock = MockWorker::start().await;
    mock.behaviour.tokens.store(1_000_000, Ordering::SeqCst);
    mock.behaviour.token_us.store(10_000, Ordering::SeqCst);
    let router = hurried_router(&mock, Config::default()).await;
    let (status, text) = router.post("/generate", generate(true)).await;
    assert_eq!(status, StatusCode::OK);
    let last = text.trim_end().rsplit("\n\n").next().expect("an event");
    let event: Value = serde_json::from_str(last.trim_start_matches("data: ")).expect("JSON");
    assert_eq!(event["error"]["type"], "timeout");
    router.idle().await;
    // The connection lives on, and so does the next request on it.
    mock.behaviour.tokens.store(2, Ordering::SeqCst);
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let (_, text) = router.post("/generate", generate(true)).await;
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
}

#[tokio::test]
async fn an_unread_answer_that_is_no_stream_is_cut_off_too() {
    let mock = MockWorker::start().await;
    mock.behaviour
        .padding_bytes
        .store(64 << 20, Ordering::SeqCst);
    let router = hurried_router(&mock, Config::default()).await;
    let socket = raw(&router, &post_text(&generate(false).to_string())).await;
    until("it is served", || {
        mock.behaviour.served.load(Ordering::SeqCst) == 1
    })
    .await;
    tokio::time::sleep(Duration::from_millis(2500)).await;
    let text = rest(socket).await;
    assert!(text.len() < 64 << 20, "all {} bytes came", text.len());
}

#[tokio::test]
async fn an_upload_that_stalls_is_answered_at_the_deadline() {
    let mock = MockWorker::start().await;
    let router = hurried_router(&mock, Config::default()).await;
    for path in ["/generate", "/workers"] {
        let request = format!(
            "POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n\
             content-length: 1000\r\n\r\n{{\"input_ids\": [1,"
        );
        let text = rest(raw(&router, &request).await).await;
        let (head, body) = text.split_once("\r\n\r\n").expect("an answer");
        assert!(head.starts_with("HTTP/1.1 408"), "{head}");
        let error: Value = serde_json::from_str(body).expect("JSON");
        assert_eq!(error["error"]["type"], "timeout");
    }
}

#[tokio::test]
async fn the_workers_and_the_decisions_need_the_admin_token() {
    let mock = MockWorker::start().await;
    let router = Router::with(Config {
        policy: "round_robin".to_owned(),
        workers: vec![worker(&mock, "w", "colocated")],
        admin_token: Some("secret".to_owned()),
        ..Config::default()
    })
    .await;
    let (not_found, not_allowed) = (StatusCode::NOT_FOUND, StatusCode::METHOD_NOT_ALLOWED);
    for (method, path, expected) in [
        ("POST", "/v1/nowhere", not_found),
        ("GET", "/v1/embeddings", not_allowed),
        ("GET", "/nowhere", not_found),
        ("POST", "/health", not_allowed),
        ("PUT", "/v1/models", not_allowed),
        ("GET", "/generate", not_allowed),
        ("DELETE", "/v1/models/mock", not_allowed),
        ("GET", "/v1/responses/a/b", not_found),
        ("GET", "/workers/w/drain", StatusCode::UNAUTHORIZED),
        ("GET", "/decisions", StatusCode::UNAUTHORIZED),
        ("GET", "/server_info", StatusCode::UNAUTHORIZED),
        ("POST", "/workers/w/drain", StatusCode::FORBIDDEN),
        ("DELETE", "/workers/w", StatusCode::FORBIDDEN),
        ("POST", "/workers", StatusCode::FORBIDDEN),
    ] {
        let request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", router.url))
            .body(Full::default())
            .expect("a request");
        let response = router.client.request(request).await.expect("an answer");
        assert_eq!(response.status(), expected, "{method} {path}");
        let has_methods = response.headers().contains_key("allow");
        assert_eq!(has_methods, expected == not_allowed, "{method} {path}");
        let body: Value = serde_json::from_str(&text(response).await).expect("JSON");
        assert!(body["error"]["message"].is_string());
    }
}
