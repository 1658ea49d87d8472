//! Small print of requests and answers: trickling uploads, queries, ids of failures, what metrics count.

use crate::mock::router::{Router, generate, text, until, worker};
use crate::mock::{Fault, MockWorker};
use hyper::StatusCode;
use router_policies::config::Config;
use serde_json::{Value, json};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

#[tokio::test]
async fn a_body_that_trickles_is_given_up_and_a_slow_one_is_not() {
    let mock = MockWorker::start().await;
    let router = Router::with(Config {
        workers: vec![worker(&mock, "w", "colocated")],
        body_timeout_s: 0.5,
        ..Config::default()
    })
    .await;
    let address = router.url.trim_start_matches("http://");
    for (piece, expected) in [(1, "408"), (20_000, "200")] {
        let mut socket = tokio::net::TcpStream::connect(address)
            .await
            .expect("a connection");
        let begin = "{\"input_ids\": [1";
        let length = 400_000;
        let head =
            format!("POST /generate HTTP/1.1\r\nhost: r\r\ncontent-length: {length}\r\n\r\n");
        socket
            .write_all(format!("{head}{begin}").as_bytes())
            .await
            .expect("sent");
        let begun = Instant::now();
        let mut sent = begin.len();
        let mut answer = vec![0; 12];
        loop {
            let rest = length - sent;
            let mut bytes = vec![b' '; piece.min(rest)];
            if bytes.len() == rest {
                bytes.truncate(rest.saturating_sub(2));
                bytes.extend_from_slice(&b"]}"[..rest.min(2)]);
            }
            sent += bytes.len();
            // The router may have answered and closed the connection by now.
            let _ = socket.write_all(&bytes).await;
            let pause = Duration::from_millis(100);
            match tokio::time::timeout(pause, socket.read_exact(&mut answer)).await {
                Ok(read) => {
                    read.expect("an answer");
                    break;
                }
                Err(_) => assert!(begun.elapsed() < Duration::from_secs(10), "no answer"),
            }
        }
        let answer = String::from_utf8_lossy(&answer);
        assert!(answer.ends_with(expected), "{piece}: {answer}");
    }
}

#[tokio::test]
async fn queries_are_passed_on_and_slashes_at_the_end_are_not() {
    let mock = MockWorker::start().await;
    let router = Router::start("round_robin", vec![worker(&mock, "w", "colocated")]).await;
    for (path, expected) in [
        ("/v1/messages?beta=true", "/v1/messages?beta=true"),
        ("/generate/", "/generate"),
        ("/generate/?a=b&c", "/generate?a=b&c"),
    ] {
        let body = json!({"input_ids": [1], "messages": []});
        assert_eq!(router.post(path, body).await.0, StatusCode::OK, "{path}");
        let seen = mock.behaviour.targets.lock().pop();
        assert_eq!(seen.as_deref(), Some(expected));
        let headers = mock.behaviour.headers.lock().pop().expect("a request");
        let hosts: Vec<_> = headers.get_all("host").iter().collect();
        let authority = mock.url.trim_start_matches("http://");
        assert_eq!(hosts, [authority], "the worker's own, not the router's");
    }
}

#[tokio::test]
async fn questions_keep_their_query_and_their_id() {
    let mock = MockWorker::start().await;
    let router = Router::start("round_robin", vec![worker(&mock, "w", "colocated")]).await;
    for (path, expected) in [
        (
            "/v1/messages/count_tokens?beta=true",
            "/v1/messages/count_tokens?beta=true",
        ),
        ("/tokenize/", "/tokenize"),
    ] {
        let headers = [("x-request-id", "mine")];
        let answer = router.send(path, &headers, b"{}".to_vec()).await;
        assert_eq!(answer.status(), StatusCode::OK, "{path}");
        let seen = mock.behaviour.targets.lock().pop();
        assert_eq!(seen.as_deref(), Some(expected));
        let headers = mock.behaviour.headers.lock().pop().expect("a request");
        assert_eq!(headers["x-request-id"], "mine");
    }
}

#[tokio::test]
async fn a_full_queue_is_the_same_answer_whatever_is_asked() {
    let mock = MockWorker::start().await;
    mock.set_fault(Fault::Stall);
    let router = Router::with(Config {
        workers: vec![worker(&mock, "w", "colocated")],
        max_inflight: 1,
        max_queued: 0,
        ..Config::default()
    })
    .await;
    let _running = tokio::spawn({
        let (client, url) = (router.client.clone(), format!("{}/generate", router.url));
        let body = json!({"input_ids": [1]}).to_string();
        async move {
            let request = hyper::Request::post(url).body(body.into());
            client.request(request.expect("a request")).await
        }
    });
    until("it runs", || !mock.bodies().is_empty()).await;
    for path in ["/generate", "/tokenize"] {
        let body = json!({"input_ids": [1]}).to_string();
        let answer = router.send(path, &[], body.into_bytes()).await;
        assert_eq!(answer.status(), StatusCode::TOO_MANY_REQUESTS, "{path}");
        assert!(answer.headers().contains_key("retry-after"), "{path}");
    }
}

#[tokio::test]
async fn failures_too_name_their_decision() {
    let mock = MockWorker::start().await;
    let router = Router::start("round_robin", vec![worker(&mock, "w", "colocated")]).await;
    for (fault, status) in [
        (Fault::Status(500), 500),
        (Fault::Status(400), 400),
        (Fault::CloseAtOnce, 502),
        (Fault::None, 200),
    ] {
        mock.set_fault(fault);
        let body = generate(false).to_string().into_bytes();
        let response = router.send("/generate", &[], body).await;
        assert_eq!(response.status().as_u16(), status);
        let id = response.headers()["x-deltaserve-decision-id"].clone();
        let decision = router.fleet.sink().recent(1).remove(0);
        assert_eq!(id.to_str().expect("text"), decision.decision_id);
        text(response).await;
    }
}

#[tokio::test]
async fn one_engine_is_one_worker() {
    let mock = MockWorker::start().await;
    let router = Router::start("round_robin", vec![worker(&mock, "w", "colocated")]).await;
    let url = mock.url.replace("127.0.0.1", "localhost");
    let new = json!({"url": url, "id": "w2"});
    let (status, body) = router.post_json("/workers", new).await;
    assert_eq!(status, StatusCode::CONFLICT, "{body}");
    assert!(body.contains("it is that of worker w"), "{body}");
}

#[tokio::test]
async fn first_tokens_are_counted_where_they_can_be_seen() {
    let mock = MockWorker::start().await;
    let router = Router::start("round_robin", vec![worker(&mock, "w", "colocated")]).await;
    let counted = |count: u32| {
        format!(
            "deltaserve_client_first_token_seconds_count{{kind=\"local\",policy=\"round_robin\",worker=\"w\"}} {count}"
        )
    };
    router.post("/generate", generate(false)).await;
    router.idle().await;
    let metrics = router.get("/metrics").await.1;
    assert!(!metrics.contains("first_token_seconds_count{"), "{metrics}");
    assert!(
        metrics.contains("deltaserve_first_token_seconds_count 0"),
        "{metrics}"
    );
    router.post("/generate", generate(true)).await;
    router.idle().await;
    let metrics = router.get("/metrics").await.1;
    assert!(metrics.contains(&counted(1)), "{metrics}");
    assert!(
        metrics.contains("deltaserve_first_token_realised_over_expected_count{kind=\"local\""),
        "{metrics}"
    );
}

#[tokio::test]
async fn several_models_and_adapters_are_served_behind_one_router() {
    let (a, b) = (MockWorker::start().await, MockWorker::start().await);
    *a.behaviour.models.lock() = vec!["small", "small-sql"];
    *b.behaviour.models.lock() = vec!["large", "small"];
    let workers = vec![worker(&a, "a", "colocated"), worker(&b, "b", "colocated")];
    let router = Router::start("round_robin", workers).await;
    let (status, list) = router.get("/v1/models").await;
    assert_eq!(status, StatusCode::OK);
    let list: Value = serde_json::from_str(&list).expect("JSON");
    let ids: Vec<&str> = list["data"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|entry| entry["id"].as_str().expect("an id"))
        .collect();
    assert_eq!(ids, ["small", "small-sql", "large"]);
    let served = |model: &'static str| {
        let (a, b, router) = (&a, &b, &router);
        async move {
            let before = (a.bodies().len(), b.bodies().len());
            for _ in 0..4 {
                let body = json!({"model": model, "messages": [{"role": "user", "content": "hi"}]});
                let (status, _) = router.post("/v1/chat/completions", body).await;
                assert_eq!(status, StatusCode::OK, "{model}");
            }
            (a.bodies().len() - before.0, b.bodies().len() - before.1)
        }
    };
    assert_eq!(served("large").await, (0, 4));
    assert_eq!(served("small-sql").await, (4, 0));
    assert_eq!(served("small:small-sql").await, (4, 0));
    assert_eq!(served("small").await, (2, 2));
    assert_eq!(
        served("of-nobody").await,
        (2, 2),
        "an engine says what it thinks of it"
    );
    // The one that serves it is down: no other is asked.
    let (status, entry) = router.get("/v1/models/large").await;
    assert_eq!((status, entry.contains("large")), (StatusCode::OK, true));
    b.behaviour
        .healthy
        .store(false, std::sync::atomic::Ordering::SeqCst);
    router.fleet.report_health("b", false);
    let body = json!({"model": "large", "messages": [{"role": "user", "content": "hi"}]});
    let (status, _) = router.post("/v1/chat/completions", body).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
}

#[tokio::test]
async fn it_is_ready_once_every_worker_has_been_asked_what_it_serves() {
    let (slow, quick) = (MockWorker::start().await, MockWorker::start().await);
    slow.behaviour
        .hangs
        .store(true, std::sync::atomic::Ordering::SeqCst);
    let router = Router::begin(Config {
        policy: "round_robin".to_owned(),
        workers: vec![
            worker(&slow, "slow", "colocated"),
            worker(&quick, "quick", "colocated"),
        ],
        ..Config::default()
    })
    .await;
    until("the quick one is up", || router.fleet.is_ready()).await;
    assert_eq!(
        router.get("/readyz").await.0,
        StatusCode::SERVICE_UNAVAILABLE,
        "the other may serve what this one does not"
    );
    drop(slow);
    // That it is gone is an answer too.
    while router.get("/readyz").await.0 != StatusCode::OK {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Engines keep the KV of adapters, and of salted prompts, apart: what was sent for one is cached for no
/// other, though the tokens are the same.
#[tokio::test]
async fn what_is_cached_for_a_model_is_not_believed_for_its_adapters_nor_for_other_salts() {
    let mock = MockWorker::start().await;
    *mock.behaviour.models.lock() = vec!["small"];
    *mock.behaviour.adapters.lock() = vec!["sql", "legal"];
    mock.behaviour
        .cached_tokens
        .store(96, std::sync::atomic::Ordering::SeqCst);
    let router = Router::start("unified", vec![worker(&mock, "w", "colocated")]).await;
    let believed = |path: &'static str, more: Value| {
        let router = &router;
        async move {
            let ids: Vec<u32> = (0..100).collect();
            let key = if path == "/generate" {
                "input_ids"
            } else {
                "prompt"
            };
            let mut body = json!({key: ids, "stream": true});
            for (key, value) in more.as_object().expect("an object") {
                body[key] = value.clone();
            }
            let (status, _) = router.post(path, body).await;
            assert_eq!(status, StatusCode::OK);
            let decision = router.fleet.sink().recent(1).remove(0);
            decision.input_tokens - decision.new_tokens
        }
    };
    // The first two prompts of each kind; some kinds have several names.
    let kinds = [
        vec![
            ("/v1/completions", json!({"model": "small"})),
            ("/generate", json!({})),
        ],
        vec![
            ("/v1/completions", json!({"model": "sql"})),
            ("/v1/completions", json!({"model": "small:sql"})),
            (
                "/v1/completions",
                json!({"model": "small", "lora_path": "sql"}),
            ),
            ("/generate", json!({"lora_path": "sql"})),
        ],
        vec![
            ("/v1/completions", json!({"model": "legal"})),
            ("/generate", json!({"lora_path": "legal"})),
        ],
        vec![
            (
                "/v1/completions",
                json!({"model": "small", "cache_salt": "of a tenant"}),
            ),
            ("/generate", json!({"cache_salt": "of a tenant"})),
        ],
        vec![
            ("/generate", json!({"extra_key": "k"})),
            ("/generate", json!({"extra_key": "k"})),
        ],
    ];
    for kind in &kinds {
        let (path, more) = &kind[0];
        assert_eq!(believed(path, more.clone()).await, 0, "{more}");
        for (path, more) in kind {
            assert_eq!(believed(path, more.clone()).await, 96, "{more}");
        }
    }
    // What was sent meanwhile took nothing from the first.
    assert_eq!(believed("/generate", json!({})).await, 96);
}

#[tokio::test]
async fn embeddings_scores_and_counts_are_spread_by_what_workers_have_to_do() {
    let mut mocks = Vec::new();
    let mut workers = Vec::new();
    for at in 0..3 {
        let mock = MockWorker::start().await;
        workers.push(worker(&mock, &format!("w{at}"), "colocated"));
        mocks.push(mock);
    }
    let router = Router::start("round_robin", workers).await;
    let had = |at: usize| mocks[at].bodies().len();
    for path in ["/v1/embeddings", "/tokenize", "/v1/messages/count_tokens"] {
        for _ in 0..10 {
            router
                .post(path, json!({"input": "x", "messages": []}))
                .await;
        }
    }
    assert_eq!(
        [had(0), had(1), had(2)],
        [10, 10, 10],
        "one after the other"
    );
    // One that is slow gets fewer of those that come together.
    for mock in &mocks {
        mock.behaviour.bodies.lock().clear();
    }
    mocks[0]
        .behaviour
        .first_token_us
        .store(2_000_000, Ordering::SeqCst);
    let slow = (0..2).map(|_| router.post("/v1/embeddings", json!({"input": "x"})));
    let mut slow: Vec<_> = slow.map(Box::pin).collect();
    for asking in &mut slow {
        let _ = tokio::time::timeout(Duration::from_millis(100), asking).await;
    }
    for _ in 0..10 {
        router.post("/v1/embeddings", json!({"input": "x"})).await;
    }
    assert!(had(0) <= 2, "{} went to the one that is busy", had(0));
}
