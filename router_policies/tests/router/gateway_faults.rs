//! Faults that were found from outside: events cut anywhere, errors inside streams, workers that hang,
//! bodies that break them, what PD cannot carry. Each test failed before its fault was mended.

use crate::mock::router::{Router, generate, text, until, worker};
use crate::mock::{End, Fault, MockWorker};
use hyper::StatusCode;
use router_policies::config::Config;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

async fn pair(policy: &str) -> (MockWorker, MockWorker, Router) {
    let (a, b) = (MockWorker::start().await, MockWorker::start().await);
    let workers = vec![worker(&a, "a", "colocated"), worker(&b, "b", "colocated")];
    let router = Router::start(policy, workers).await;
    (a, b, router)
}

/// The last event of a stream, by the standard's rules: data lines up to a blank line.
fn last_event(stream: &str) -> Value {
    let events = stream.trim_end().split("\n\n");
    let last = events.last().expect("an event");
    let data: Vec<&str> = last
        .lines()
        .filter_map(|l| l.strip_prefix("data: "))
        .collect();
    serde_json::from_str(&data.join("\n")).unwrap_or_else(|error| panic!("{error}: {stream:?}"))
}

#[tokio::test]
async fn an_error_event_stands_on_its_own_whatever_was_cut_short_before() {
    for pieces in [
        &["data: {\"text\":\"a\"}\n\n", "data: {\"uid\":\"fin_pa"][..],
        &["data: {\"text\":\"a\"}\n\ndata: {\"text\":\"b\"}\n"],
        &["data: {\"text\":\"a\"}\n\n", "event: x\n"],
        &["data: {\"text\":\"a\"}\n\ndata: [DON"],
        &["data: {\"text\":\"a\"}\r\n\r\ndata: {\"te"],
    ] {
        let mock = MockWorker::start().await;
        mock.set_fault(Fault::Raw(pieces, End::Broken));
        let router = Router::start("round_robin", vec![worker(&mock, "w", "colocated")]).await;
        let (status, body) = router.post("/generate", generate(true)).await;
        assert_eq!(status, StatusCode::OK);
        assert_eq!(
            last_event(&body)["error"]["type"],
            "worker_error",
            "{body:?}"
        );
        router.idle().await;
    }
}

#[tokio::test]
async fn an_error_before_any_output_is_tried_elsewhere_however_it_is_cut() {
    for pieces in [
        &[
            ": ping\n\n",
            "data: {\"error\":{\"message\":\"m\",\"code\":500}}\n\n",
        ][..],
        &["data: {\"err", "or\":{\"message\":\"m\",\"code\":500}}\n\n"],
        &["data:{\"error\":{\"message\":\"m\",\"code\":500}}\n\n"],
        &["event: error\r\ndata: {\"error\":{\"message\":\"m\"}}\r\n\r\n"],
    ] {
        let (a, b, router) = pair("round_robin").await;
        a.set_fault(Fault::Raw(pieces, End::Properly));
        for _ in 0..2 {
            let (status, body) = router.post("/generate", generate(true)).await;
            assert_eq!(status, StatusCode::OK);
            assert!(body.ends_with("data: [DONE]\n\n"), "{pieces:?}: {body}");
            assert!(!body.contains("error"), "{pieces:?}: {body}");
        }
        assert_eq!(b.behaviour.served.load(Ordering::SeqCst), 2);
        router.idle().await;
    }
}

#[tokio::test]
async fn an_answer_with_nothing_in_it_is_tried_elsewhere() {
    for (status, body) in [
        (204, ""),
        (200, ""),
        (
            200,
            r#"{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"gone"}}}"#,
        ),
        (200, r#"{"choices":[{"text":"","finish_reason":"abort"}]}"#),
    ] {
        let (a, b, router) = pair("round_robin").await;
        a.set_fault(Fault::Says(status, body));
        for _ in 0..4 {
            let (status, answer) = router.post("/generate", generate(false)).await;
            assert_eq!(status, StatusCode::OK, "{body}");
            assert!(answer.contains("hello"), "{body}: {answer}");
        }
        assert!(!b.bodies().is_empty());
    }
    // What a model says of aborts is none.
    let (a, b, router) = pair("round_robin").await;
    let said =
        r#"{"text":"{\"finish_reason\":\"abort\"}","meta_info":{"finish_reason":{"type":"stop"}}}"#;
    a.set_fault(Fault::Says(200, said));
    b.set_fault(Fault::Says(200, said));
    let (_, answer) = router.post("/generate", generate(false)).await;
    assert_eq!(answer, said);
    assert_eq!(a.bodies().len() + b.bodies().len(), 1);
}

#[tokio::test]
async fn errors_inside_streams_count_against_the_worker() {
    for piece in [
        "data: {\"error\":{\"message\":\"m\",\"code\":500}}\n\ndata: [DONE]\n\n",
        "data: {\"meta_info\":{\"finish_reason\":{\"type\":\"abort\"}}}\n\ndata: [DONE]\n\n",
    ] {
        let mock = MockWorker::start().await;
        let pieces: &'static [&'static str] =
            Box::leak(Box::new(["data: {\"text\":\"a\"}\n\n", piece]));
        mock.set_fault(Fault::Raw(pieces, End::Properly));
        let router = Router::start("round_robin", vec![worker(&mock, "w", "colocated")]).await;
        for _ in 0..5 {
            let (_, body) = router.post("/generate", generate(true)).await;
            assert_eq!(
                body,
                pieces.concat(),
                "what the worker says is passed on as it is"
            );
        }
        let metrics = router.get("/metrics").await.1;
        let counted = "deltaserve_requests_total{outcome=\"worker_error\"} 5";
        assert!(metrics.contains(counted), "{metrics}");
        assert!(router.fleet.snapshot()[0].circuit_open);
    }
}

#[tokio::test]
async fn a_stream_may_end_without_the_end_of_its_last_line() {
    let answer = json!({"input_ids": [1], "messages": [], "stream": true});
    for (path, pieces) in [
        (
            "/generate",
            &["data: {\"text\":\"a\"}\n\n", "data: [DO", "NE]"][..],
        ),
        ("/generate", &["data: {\"text\":\"a\"}\n\ndata: [DONE]\n"]),
        (
            "/v1/messages",
            &[
                "event: x\ndata: {}\n\nevent: message_stop\n",
                "data: {\"type\":\"message_stop\"}\n",
            ],
        ),
    ] {
        let mock = MockWorker::start().await;
        mock.set_fault(Fault::Raw(pieces, End::Properly));
        let router = Router::start("round_robin", vec![worker(&mock, "w", "colocated")]).await;
        let (_, body) = router.post(path, answer.clone()).await;
        assert_eq!(body, pieces.concat());
        router
            .counts("deltaserve_requests_total{outcome=\"ok\"} 1")
            .await;
    }
}

#[tokio::test]
async fn what_comes_behind_the_end_of_a_stream_does_not_spoil_it() {
    for (pieces, end) in [
        (
            &["data: {\"text\":\"a\"}\n\ndata: [DONE]\n\n"][..],
            End::Broken,
        ),
        (
            &["data: {\"text\":\"a\"}\r\rdata: [DONE]\r\r"],
            End::Properly,
        ),
    ] {
        let mock = MockWorker::start().await;
        mock.set_fault(Fault::Raw(pieces, end));
        let router = Router::start("round_robin", vec![worker(&mock, "w", "colocated")]).await;
        let (_, body) = router.post("/generate", generate(true)).await;
        assert_eq!(body, pieces.concat());
        router.idle().await;
        let metrics = router.get("/metrics").await.1;
        assert!(
            metrics.contains("deltaserve_requests_total{outcome=\"ok\"} 1"),
            "{metrics}"
        );
    }
}

#[tokio::test]
async fn a_body_that_breaks_connections_is_tried_on_one_other_worker_only() {
    let mut mocks = Vec::new();
    let mut workers = Vec::new();
    for i in 0..4 {
        let mock = MockWorker::start().await;
        mock.set_fault(Fault::PoisonBreaks);
        workers.push(worker(&mock, &format!("w{i}"), "colocated"));
        mocks.push(mock);
    }
    let router = Router::with(Config {
        policy: "round_robin".to_owned(),
        retries: 3,
        workers,
        ..Config::default()
    })
    .await;
    let mut poison = generate(false);
    poison["user"] = "poison".into();
    let tried = || -> usize { mocks.iter().map(|m| m.bodies().len()).sum() };
    for round in 1..=10 {
        let (status, _) = router.post("/generate", poison.clone()).await;
        assert_eq!(status, StatusCode::BAD_GATEWAY);
        assert_eq!(tried(), 2 * round);
    }
    // Two workers failed alike each time: the request is at fault.
    assert!(
        router
            .fleet
            .snapshot()
            .iter()
            .all(|worker| !worker.circuit_open)
    );
    assert_eq!(
        router.post("/generate", generate(false)).await.0,
        StatusCode::OK
    );
}

#[tokio::test]
async fn token_ids_beyond_the_vocabulary_are_refused() {
    let mock = MockWorker::start().await;
    let router = Router::with(Config {
        vocab_size: Some(1_000),
        workers: vec![worker(&mock, "w", "colocated")],
        ..Config::default()
    })
    .await;
    let mut many: Vec<u32> = vec![7; 5_000];
    many[4_321] = 1_000;
    for (path, body) in [
        ("/generate", json!({"input_ids": [1, 99_999_999, 3]})),
        (
            "/generate",
            json!({"input_ids": [[1], [2, 4_294_967_295u32]]}),
        ),
        ("/generate", json!({"input_ids": many})),
        ("/v1/completions", json!({"prompt": [1_000]})),
    ] {
        let (status, text) = router.post(path, body).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{text}");
        assert!(text.contains("below the model's 1000"), "{text}");
    }
    assert!(mock.bodies().is_empty());
    let fits = json!({"input_ids": [0, 999]});
    assert_eq!(router.post("/generate", fits).await.0, StatusCode::OK);
}

#[tokio::test]
async fn of_two_models_the_vocabulary_of_the_one_that_is_named_counts_and_of_workers_that_are_there()
 {
    let folder = std::env::temp_dir().join(format!("router-models-{:x}", fastrand::u64(..)));
    let (small, large) = (MockWorker::start().await, MockWorker::start().await);
    for (mock, name, size) in [(&small, "small", 1_000), (&large, "large", 5_000)] {
        let model = folder.join(name);
        std::fs::create_dir_all(&model).expect("a folder");
        let config = json!({"vocab_size": size}).to_string();
        std::fs::write(model.join("config.json"), config).expect("a file");
        *mock.behaviour.models.lock() = vec![name];
        *mock.behaviour.model_path.lock() = model.to_string_lossy().into_owned();
    }
    let workers = vec![
        worker(&small, "small", "colocated"),
        worker(&large, "large", "colocated"),
    ];
    let router = Router::start("round_robin", workers).await;
    let asked = async |model: &str, id: u32| {
        let body = json!({"model": model, "prompt": [1, id]});
        router.post("/v1/completions", body).await.0
    };
    assert_eq!(asked("large", 4_999).await, StatusCode::OK);
    assert_eq!(asked("large", 5_000).await, StatusCode::BAD_REQUEST);
    assert_eq!(asked("small", 1_000).await, StatusCode::BAD_REQUEST);
    // Without a name either may get it.
    let unnamed = async || {
        router
            .post("/generate", json!({"input_ids": [4_999]}))
            .await
            .0
    };
    assert_eq!(unnamed().await, StatusCode::BAD_REQUEST);
    assert!(router.fleet.remove_worker("small"));
    let until = Instant::now() + Duration::from_secs(20);
    while unnamed().await != StatusCode::OK {
        assert!(
            Instant::now() < until,
            "its vocabulary counts although it is gone"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    std::fs::remove_dir_all(&folder).expect("removed");
}

/// Two workers that report their load, the first of which hangs from now on.
async fn with_a_hung_worker(reports: bool) -> (MockWorker, MockWorker, Router) {
    let (a, b) = (MockWorker::start().await, MockWorker::start().await);
    for mock in [&a, &b] {
        mock.behaviour.reports_load.store(reports, Ordering::SeqCst);
    }
    let router = Router::with(Config {
        policy: "unified".to_owned(),
        workers: vec![worker(&a, "a", "colocated"), worker(&b, "b", "colocated")],
        silence_timeout_s: 0.5,
        load_interval_s: 0.1,
        ..Config::default()
    })
    .await;
    (a, b, router)
}

fn shared_prefix(i: u32) -> Value {
    let ids: Vec<u32> = (0..2_000).chain([i]).collect();
    json!({"input_ids": ids, "stream": true})
}

#[tokio::test]
async fn requests_on_a_worker_that_hangs_move_and_no_more_come_to_it() {
    for reports in [true, false] {
        let (a, b, router) = with_a_hung_worker(reports).await;
        // Its prefix is on the one that hangs.
        let (_, body) = router.post("/generate", shared_prefix(0)).await;
        assert!(body.contains("[DONE]"));
        let (hung, other) = if a.bodies().is_empty() {
            (&b, &a)
        } else {
            (&a, &b)
        };
        hung.behaviour.hangs.store(true, Ordering::SeqCst);
        let begun = Instant::now();
        let requests = (0..8).map(|i| router.post("/generate", shared_prefix(i)));
        for answer in futures(requests).await {
            assert!(answer.1.contains("[DONE]"), "{}", answer.1);
        }
        let taken = begun.elapsed();
        assert!(
            taken < Duration::from_secs(4),
            "reports: {reports}: {taken:?}"
        );
        let served = other.behaviour.served.load(Ordering::SeqCst);
        let decided = || router.fleet.sink().recent(1_000).len();
        let before = decided();
        for i in 0..40 {
            let (_, body) = router.post("/generate", shared_prefix(i)).await;
            assert!(body.contains("[DONE]"));
        }
        // One that had gone to the hung one first would have been placed again.
        assert_eq!(decided(), before + 40);
        assert_eq!(other.behaviour.served.load(Ordering::SeqCst), served + 40);
        let snapshot = router.fleet.snapshot();
        assert_eq!(snapshot.iter().filter(|worker| worker.suspect).count(), 1);
        if reports {
            hung.behaviour.hangs.store(false, Ordering::SeqCst);
            // The report that was asked for while it hung is given up after 5 s.
            tokio::time::sleep(Duration::from_secs(4)).await;
            until("it is trusted again", || {
                router.fleet.snapshot().iter().all(|worker| !worker.suspect)
            })
            .await;
        }
        router.idle().await;
    }
}

/// Runs them all at once.
pub async fn futures<T>(all: impl Iterator<Item = impl Future<Output = T>>) -> Vec<T> {
    let mut pending: Vec<_> = all.map(|future| (Box::pin(future), None)).collect();
    std::future::poll_fn(|cx| {
        for (future, done) in &mut pending {
            if done.is_none()
                && let std::task::Poll::Ready(value) = future.as_mut().poll(cx)
            {
                *done = Some(value);
            }
        }
        if pending.iter().all(|(_, done)| done.is_some()) {
            std::task::Poll::Ready(())
        } else {
            std::task::Poll::Pending
        }
    })
    .await;
    pending.into_iter().filter_map(|(_, done)| done).collect()
}

#[tokio::test]
async fn a_slow_worker_without_an_alternative_is_waited_for() {
    let mock = MockWorker::start().await;
    let router = Router::with(Config {
        workers: vec![worker(&mock, "w", "colocated")],
        silence_timeout_s: 0.1,
        load_interval_s: 0.0,
        ..Config::default()
    })
    .await;
    mock.behaviour
        .first_token_us
        .store(1_500_000, Ordering::SeqCst);
    let both = futures((0..2).map(|_| router.post("/generate", generate(true)))).await;
    assert!(both.iter().all(|(_, body)| body.contains("[DONE]")));
    assert_eq!(mock.bodies().len(), 2);
    let (_, body) = router.post("/generate", generate(true)).await;
    assert!(
        body.contains("[DONE]"),
        "a suspicion does not close the router"
    );
}

#[tokio::test]
async fn a_restarted_engine_is_noticed_and_an_unreachable_one_is_not_taken_for_restarted() {
    let mock = MockWorker::start().await;
    mock.behaviour.started.store(1, Ordering::SeqCst);
    mock.behaviour.cached_tokens.store(0, Ordering::SeqCst);
    let router = Router::with(Config {
        policy: "unified".to_owned(),
        workers: vec![worker(&mock, "w", "colocated")],
        health_interval_s: 0.05,
        ..Config::default()
    })
    .await;
    let believed = || {
        let decision = router.fleet.sink().recent(1).remove(0);
        decision.input_tokens - decision.new_tokens
    };
    router.post("/generate", shared_prefix(0)).await;
    // It was only out of reach: its cache is as it was.
    router.fleet.report_health("w", false);
    until("it is up again", || router.fleet.snapshot()[0].healthy).await;
    router.post("/generate", shared_prefix(1)).await;
    assert!(believed() > 1_900, "{}", believed());
    // Restarted between two checks: nothing failed, but nothing is cached any more.
    router.idle().await;
    mock.behaviour.started.store(2, Ordering::SeqCst);
    router.post("/generate", shared_prefix(2)).await;
    tokio::time::sleep(Duration::from_millis(400)).await;
    let other: Vec<u32> = (5_000..7_000).collect();
    router.post("/generate", json!({"input_ids": other})).await;
    router.post("/generate", shared_prefix(3)).await;
    assert_eq!(believed(), 0);
}

#[tokio::test]
async fn a_worker_added_under_the_id_of_a_removed_one_is_judged_by_its_own_address() {
    let old = MockWorker::start().await;
    let router = Router::with(Config {
        workers: vec![worker(&old, "w", "colocated")],
        health_interval_s: 0.05,
        ..Config::default()
    })
    .await;
    let new = MockWorker::start().await;
    new.behaviour.healthy.store(false, Ordering::SeqCst);
    let stop_listening = |mock: MockWorker| drop(mock);
    assert!(router.fleet.remove_worker("w"));
    let added = json!({"id": "w", "url": new.url});
    let (status, _) = router.post_json("/workers", added).await;
    assert_eq!(status, StatusCode::ACCEPTED);
    // The old one still answers its checks; the new one is not up.
    tokio::time::sleep(Duration::from_millis(400)).await;
    assert!(
        !router.fleet.snapshot()[0].healthy,
        "the old one spoke for the new one"
    );
    new.behaviour.healthy.store(true, Ordering::SeqCst);
    until("the new one is up", || router.fleet.snapshot()[0].healthy).await;
    stop_listening(old);
    for _ in 0..30 {
        tokio::time::sleep(Duration::from_millis(10)).await;
        assert!(router.fleet.snapshot()[0].healthy);
    }
}

#[tokio::test]
async fn several_answers_are_never_separated() {
    let roles = ["prefill", "decode", "elastic"];
    let mut mocks = Vec::new();
    let mut workers = Vec::new();
    for role in roles {
        let mock = MockWorker::start().await;
        workers.push(worker(&mock, role, role));
        mocks.push(mock);
    }
    let router = Router::start("pd", workers.clone()).await;
    let several = json!({"input_ids": [1, 2], "sampling_params": {"n": 2}});
    let chat = json!({"messages": [{"role": "user", "content": "a"}], "n": 3});
    for (path, body) in [("/generate", &several), ("/v1/chat/completions", &chat)] {
        let response = router.send(path, &[], body.to_string().into_bytes()).await;
        assert_eq!(response.headers()["x-deltaserve-worker"], "elastic");
        assert_eq!(response.status(), StatusCode::OK);
    }
    assert!(mocks[0].bodies().is_empty() && mocks[1].bodies().is_empty());
    assert!(
        mocks[2]
            .bodies()
            .iter()
            .all(|body| body.get("bootstrap_room").is_none())
    );
    // SGLang takes a batch apart by itself: room, room + 1, ...
    let batch = json!({"input_ids": [[1], [2]]});
    assert_eq!(router.post("/generate", batch).await.0, StatusCode::OK);
    assert_eq!(mocks[0].bodies().len(), 1);
    // Where nobody serves alone, it is said.
    workers.truncate(2);
    let router = Router::start("pd", workers).await;
    let (status, text) = router.post("/generate", several).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert!(
        text.contains("n > 1: cannot be prefilled on one worker"),
        "{text}"
    );
}

#[tokio::test]
async fn vllm_gets_no_batch_in_two_halves() {
    let (p, d) = (MockWorker::start().await, MockWorker::start().await);
    let spec = |mock: &MockWorker, id: &str, role: &str| {
        let spec = json!({
            "url": mock.url, "id": id, "role": role, "engine": "vllm", "kv_connector": "nixl",
        });
        serde_json::from_value(spec).expect("a worker")
    };
    let workers = vec![spec(&p, "p", "prefill"), spec(&d, "d", "decode")];
    let router = Router::start("pd", workers).await;
    let batch = json!({"prompt": [[1, 2], [3, 4]]});
    let (status, text) = router.post("/v1/completions", batch).await;
    assert_eq!(status, StatusCode::BAD_REQUEST, "{text}");
    assert!(text.contains("several prompts"), "{text}");
    assert!(p.bodies().is_empty() && d.bodies().is_empty());
    let one = json!({"prompt": [[1, 2]]});
    assert_eq!(router.post("/v1/completions", one).await.0, StatusCode::OK);
}

#[tokio::test]
async fn an_elastic_worker_goes_on_with_what_it_has_when_its_prefill_worker_dies() {
    let (p, d) = (MockWorker::start().await, MockWorker::start().await);
    p.set_fault(Fault::CloseAtOnce);
    d.behaviour.first_token_us.store(300_000, Ordering::SeqCst);
    let router = Router::with(Config {
        policy: "pd".to_owned(),
        workers: vec![worker(&p, "p", "prefill"), worker(&d, "d", "elastic")],
        ..Config::default()
    })
    .await;
    let (status, body) = router.post("/generate", generate(true)).await;
    assert_eq!(status, StatusCode::OK);
    assert!(body.contains("[DONE]"), "{body}");
    assert_eq!(d.bodies().len(), 1, "one execution");
    assert_eq!(d.behaviour.aborted.load(Ordering::SeqCst), 0);
    router.idle().await;
}

#[tokio::test]
async fn a_request_that_comes_again_to_the_same_worker_has_another_id() {
    let (p, d) = (MockWorker::start().await, MockWorker::start().await);
    p.set_fault(Fault::Status(500));
    d.behaviour.first_token_us.store(300_000, Ordering::SeqCst);
    let router = Router::start(
        "pd",
        vec![worker(&p, "p", "prefill"), worker(&d, "d", "elastic")],
    )
    .await;
    let mut body = generate(true);
    body["rid"] = "mine".into();
    let (status, _) = router.post("/generate", body).await;
    assert_eq!(status, StatusCode::OK);
    let rids: Vec<Value> = d.bodies().iter().map(|body| body["rid"].clone()).collect();
    assert_eq!(rids[0], "mine");
    assert_ne!(rids[1], "mine");
    assert!(rids[1].as_str().is_some_and(|rid| rid.starts_with("mine-")));
}

#[tokio::test]
async fn where_the_local_fallback_is_refused_other_workers_are_asked() {
    let mut mocks = Vec::new();
    let mut workers = Vec::new();
    for (id, role) in [
        ("p0", "prefill"),
        ("p1", "prefill"),
        ("d0", "elastic"),
        ("d1", "elastic"),
    ] {
        let mock = MockWorker::start().await;
        workers.push(worker(&mock, id, role));
        mocks.push(mock);
    }
    let router = Router::start("pd", workers).await;
    for mock in &mocks[..2] {
        mock.set_fault(Fault::Status(500));
        mock.behaviour.first_token_us.store(0, Ordering::SeqCst);
    }
    for mock in &mocks[2..] {
        mock.behaviour
            .first_token_us
            .store(300_000, Ordering::SeqCst);
    }
    let request = router.post("/generate", generate(true));
    let drain = async {
        until("an elastic worker has it", || {
            mocks[2..].iter().any(|mock| !mock.bodies().is_empty())
        })
        .await;
        for id in ["d0", "d1"] {
            let i = if id == "d0" { 2 } else { 3 };
            if !mocks[i].bodies().is_empty() {
                router.fleet.set_draining(id, true);
            }
        }
    };
    let ((status, body), ()) = tokio::join!(request, drain);
    assert_eq!(status, StatusCode::OK, "{body}");
    assert!(body.contains("[DONE]"));
}

/// Sends a streamed request whose client closes its connection as soon as the answer has `last`.
async fn leave_after(router: &Router, last: &str) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut socket = tokio::net::TcpStream::connect(router.url.trim_start_matches("http://"))
        .await
        .expect("a connection");
    let body = generate(true).to_string();
    let head = format!(
        "POST /generate HTTP/1.1\r\nhost: r\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    socket
        .write_all((head + &body).as_bytes())
        .await
        .expect("sent");
    let mut read = Vec::new();
    while !String::from_utf8_lossy(&read).contains(last) {
        let mut some = [0; 1024];
        let count = socket.read(&mut some).await.expect("an answer");
        read.extend_from_slice(&some[..count]);
    }
}

#[tokio::test]
async fn a_client_that_leaves_after_the_end_has_had_an_answer() {
    let mock = MockWorker::start().await;
    mock.set_fault(Fault::Raw(
        &[
            "data: {\"text\":\"a\"}\n\ndata: [DONE]\n\n",
            ": ping\n\n",
            ": ping\n\n",
            ": ping\n\n",
        ],
        End::Properly,
    ));
    let router = Router::start("round_robin", vec![worker(&mock, "w", "colocated")]).await;
    leave_after(&router, "[DONE]").await;
    router.idle().await;
    let metrics = router.get("/metrics").await.1;
    assert!(
        metrics.contains("deltaserve_requests_total{outcome=\"ok\"} 1"),
        "{metrics}"
    );
}

#[tokio::test]
async fn a_client_that_leaves_after_an_error_has_met_a_worker_that_failed() {
    let mock = MockWorker::start().await;
    mock.set_fault(Fault::Raw(
        &[
            "data: {\"text\":\"a\"}\n\n",
            "data: {\"error\":{\"message\":\"m\",\"code\":500}}\n\n",
            ": ping\n\n",
            ": ping\n\n",
            ": ping\n\n",
        ],
        End::Properly,
    ));
    let router = Router::start("round_robin", vec![worker(&mock, "w", "colocated")]).await;
    for _ in 0..5 {
        leave_after(&router, "\"error\"").await;
    }
    router.idle().await;
    let metrics = router.get("/metrics").await.1;
    assert!(
        metrics.contains("deltaserve_requests_total{outcome=\"worker_error\"} 5"),
        "{metrics}"
    );
    assert!(router.fleet.snapshot()[0].circuit_open);
}

#[tokio::test]
async fn a_worker_that_switches_protocols_has_failed() {
    let mock = MockWorker::start().await;
    mock.set_fault(Fault::Switch);
    let router = Router::start("round_robin", vec![worker(&mock, "w", "colocated")]).await;
    let response = router
        .send("/generate", &[], generate(false).to_string().into_bytes())
        .await;
    assert_eq!(response.status(), StatusCode::BAD_GATEWAY);
    assert!(text(response).await.contains("worker w"));
}

/// A worker that serves one request on each connection, says that it keeps it, and closes it when the
/// next one comes: as a server does whose patience with idle connections ends just then.
async fn closes_kept_connections() -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    let generated = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&generated);
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            let counted = Arc::clone(&counted);
            tokio::spawn(async move {
                let mut has_generated = false;
                let mut buffer = vec![0; 65_536];
                loop {
                    let read = socket.read(&mut buffer).await.unwrap_or(0);
                    let is_generate = buffer[..read].starts_with(b"POST");
                    if read == 0 || (is_generate && has_generated) {
                        return;
                    }
                    has_generated |= is_generate;
                    if is_generate {
                        counted.fetch_add(1, Ordering::SeqCst);
                    }
                    let answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}";
                    if socket.write_all(answer).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    (url, generated)
}

#[tokio::test]
async fn a_kept_connection_that_the_worker_closes_costs_nobody_an_answer() {
    let (url, generated) = closes_kept_connections().await;
    let spec = serde_json::from_value(json!({"id": "w", "url": url})).expect("a worker");
    let router = Router::start("round_robin", vec![spec]).await;
    for _ in 0..10 {
        let (status, body) = router.post("/generate", generate(false)).await;
        assert_eq!(status, StatusCode::OK, "{body}");
    }
    assert_eq!(generated.load(Ordering::SeqCst), 10, "each ran once");
}
