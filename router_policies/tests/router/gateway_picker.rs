//! The endpoint picker, as gateways, their clients and the workers behind them see it.

use crate::mock::envoy::{Envoy, Said, asked};
use crate::mock::router::{Router, generate, until, worker};
use crate::mock::{Fault, MockWorker};
use decision::fleet::Outcome;
use router_policies::config::{Config, Picker};
use router_policies::gateway::picker::messages::BodyMode;
use serde_json::{Value, json};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

fn picking(patience_s: f64) -> Config {
    Config {
        policy: "round_robin".to_owned(),
        picker: Some(Picker {
            host: "127.0.0.1".to_owned(),
            port: 0,
            patience_s,
        }),
        ..Config::default()
    }
}

async fn before(workers: &[&MockWorker], config: Config) -> Router {
    let workers = workers.iter().enumerate().map(|(i, mock)| {
        let mut spec = worker(mock, &format!("w{i}"), "colocated");
        spec.kv_capacity_tokens = Some(10_000);
        spec
    });
    let workers = workers.collect();
    Router::with(Config { workers, ..config }).await
}

fn address(mock: &MockWorker) -> &str {
    mock.url.trim_start_matches("http://")
}

/// How the last requests ended, the newest first.
fn outcomes(router: &Router) -> Vec<Outcome> {
    let recent = router.fleet.sink().recent(100);
    let ended = recent.iter().filter_map(|record| record.ended.get());
    ended.map(|ended| ended.outcome).collect()
}

fn turn(session: u32, tokens: u32) -> Value {
    let ids: Vec<u32> = (0..tokens).map(|i| session * 100_000 + i).collect();
    json!({"input_ids": ids, "sampling_params": {"max_new_tokens": 4}, "stream": true})
}

#[tokio::test]
async fn requests_go_where_the_router_says_and_what_comes_back_counts_in_every_mode() {
    let mock = MockWorker::start().await;
    let router = before(&[&mock], picking(60.0)).await;
    let mut envoy = Envoy::before(&router).await;
    use BodyMode::{Buffered, FullDuplexStreamed, None, Streamed};
    for modes in [
        [FullDuplexStreamed, FullDuplexStreamed],
        [FullDuplexStreamed, Streamed],
        [Buffered, Buffered],
        [Buffered, Streamed],
    ] {
        envoy.modes = modes;
        for stream in [true, false] {
            let (status, headers, text) = envoy.serve("/generate", &[], &generate(stream)).await;
            assert_eq!(status, 200, "{modes:?}: {text}");
            assert_eq!(headers["x-deltaserve-worker"], "w0");
            assert!(headers.contains_key("x-deltaserve-decision-id"));
            assert_eq!(text.contains("data: [DONE]"), stream, "{modes:?}");
            router.idle().await;
            let recent = router.fleet.sink().recent(1);
            let ended = recent[0].ended.get().expect("an end");
            assert_eq!(ended.outcome, Outcome::Ok);
            assert_eq!(
                (ended.prompt_tokens, ended.cached_tokens),
                (Some(100), Some(10)),
                "{modes:?}"
            );
            assert_eq!(ended.first_token_s.is_some(), stream);
        }
    }
    // Of an answer whose body does not pass here, its head is all that is known.
    envoy.modes = [FullDuplexStreamed, None];
    let mut call = envoy
        .send(
            ("POST", "/generate"),
            &[],
            generate(true).to_string().as_bytes(),
            1000,
        )
        .await;
    assert!(matches!(call.said().await, Said::Go(_)));
    call.pass_head(200, "text/event-stream").await;
    assert!(!router.fleet.is_idle(), "its answer has not ended");
    call.half_close().await;
    router.idle().await;
    assert_eq!(outcomes(&router), [Outcome::Ok; 9]);
    let sent = [generate(true), generate(false)];
    for (at, body) in mock.bodies().iter().enumerate().take(8) {
        assert_eq!(*body, sent[at % 2]);
    }
}

#[tokio::test]
async fn a_large_body_passes_in_pieces_that_gateways_take() {
    let mock = MockWorker::start().await;
    let router = before(&[&mock], picking(60.0)).await;
    let mut envoy = Envoy::before(&router).await;
    let mut body = generate(false);
    body["padding"] = "a".repeat(300_000).into();
    let body = body.to_string();
    for mode in [BodyMode::FullDuplexStreamed, BodyMode::Buffered] {
        envoy.modes[0] = mode;
        let mut call = envoy
            .send(("POST", "/generate"), &[], body.as_bytes(), 16_000)
            .await;
        let Said::Go(going) = call.said().await else {
            panic!("{mode:?}: refused");
        };
        assert_eq!(going.body, body.as_bytes());
        assert!(going.largest <= 64 << 10, "{}", going.largest);
        let (status, kind, answer) = asked("/generate", &going).await;
        call.pass(status, &kind, &answer).await;
    }
    router.idle().await;
    let limited = Config {
        max_body_bytes: 100_000,
        ..picking(60.0)
    };
    let router = before(&[&mock], limited).await;
    let envoy = Envoy::before(&router).await;
    let mut call = envoy
        .send(("POST", "/generate"), &[], body.as_bytes(), 16_000)
        .await;
    let Said::Refused(status, headers, text) = call.said().await else {
        panic!("too large");
    };
    assert_eq!(
        (status, headers["content-type"].as_str()),
        (413, "application/json")
    );
    assert!(text.contains("max_body_bytes"), "{text}");
}

#[tokio::test]
async fn a_wait_for_room_is_an_answer_that_comes_later_or_429() {
    let mock = MockWorker::start().await;
    let router = before(&[&mock], Config { ..picking(1.0) }).await;
    let envoy = Envoy::before(&router).await;
    let with = |session: &'static str| [("x-session-id", session), ("x-session-end", "1")];
    let body = |session| turn(session, 8_000).to_string();
    let send = async |session, name| {
        let body: String = body(session);
        envoy
            .send(("POST", "/generate"), &with(name), body.as_bytes(), 16_000)
            .await
    };
    let mut first = send(1, "a").await;
    let Said::Go(_) = first.said().await else {
        panic!("there is room");
    };
    // One that waits until the first has ended.
    let mut second = send(2, "b").await;
    until("it waits", || router.fleet.waiting_turns() == 1).await;
    let ended = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let (status, ..) = first
            .pass(200, "text/event-stream", b"data: [DONE]\n\n")
            .await;
        assert_eq!(status, 200);
    };
    let begun = Instant::now();
    let (said, ()) = tokio::join!(second.said(), ended);
    assert!(matches!(said, Said::Go(_)), "{said:?}");
    assert!(begun.elapsed() >= Duration::from_millis(200));
    // And one that waits in vain.
    let mut third = send(3, "c").await;
    let Said::Refused(status, headers, text) = third.said().await else {
        panic!("there is no room");
    };
    assert_eq!((status, headers["retry-after"].as_str()), (429, "1"));
    assert!(text.contains("picker.patience_s"), "{text}");
    assert_eq!(router.fleet.waiting_turns(), 0);
    // Where it asks again, it has its place back: it was not refused, it left.
    router
        .counts("deltaserve_wait_seconds_count{end=\"left\"} 1")
        .await;
    // And one whose client leaves meanwhile.
    let mut fourth = send(4, "d").await;
    until("it waits", || router.fleet.waiting_turns() == 1).await;
    fourth.half_close().await;
    until("its place is free", || router.fleet.waiting_turns() == 0).await;
    drop(second);
    router.idle().await;
}

#[tokio::test]
async fn a_gateways_subset_is_all_that_there_is() {
    let mocks = [MockWorker::start().await, MockWorker::start().await];
    let router = before(&[&mocks[0], &mocks[1]], picking(60.0)).await;
    let mut envoy = Envoy::before(&router).await;
    for mock in &mocks {
        envoy.subset = Some(format!("10.0.0.1:8000, {}", address(mock)));
        for path in ["/generate", "/v1/messages/count_tokens"] {
            let body = generate(true).to_string();
            for _ in 0..3 {
                let mut call = envoy.send(("POST", path), &[], body.as_bytes(), 1000).await;
                let Said::Go(going) = call.said().await else {
                    panic!("one is left");
                };
                assert_eq!(going.destination, address(mock));
            }
        }
    }
    for subset in ["", "10.0.0.1:8000"] {
        envoy.subset = Some(subset.to_owned());
        for path in ["/generate", "/v1/messages/count_tokens"] {
            let (status, headers, text) = envoy.serve(path, &[], &generate(true)).await;
            assert_eq!((status, headers["retry-after"].as_str()), (503, "1"));
            assert!(text.contains("no worker can take the request"), "{text}");
        }
    }
    router.idle().await;
}

#[tokio::test]
async fn a_reservation_is_given_back_once_however_its_stream_ends() {
    let mock = MockWorker::start().await;
    let config = Config {
        request_timeout_s: 1.5,
        ..picking(60.0)
    };
    let router = before(&[&mock], config).await;
    let body = generate(true).to_string();
    let envoy = Envoy::before(&router).await;
    let send = async |envoy: &Envoy| {
        let mut call = envoy
            .send(("POST", "/generate"), &[], body.as_bytes(), 1000)
            .await;
        assert!(matches!(call.said().await, Said::Go(_)));
        call
    };
    let ends = async |expected: Outcome| {
        router.idle().await;
        let of_last = outcomes(&router)[0];
        assert_eq!(of_last, expected);
    };
    // The client leaves before the answer, and in it.
    for begins in [false, true] {
        let mut call = send(&envoy).await;
        if begins {
            call.pass_head(200, "text/event-stream").await;
            call.pass_piece(b"data: {\"text\":\"a\"}\n\n", false).await;
        }
        assert!(!router.fleet.is_idle());
        call.half_close().await;
        ends(Outcome::ClientDisconnect).await;
        let call = send(&envoy).await;
        drop(call);
        ends(Outcome::ClientDisconnect).await;
    }
    // The worker ends its stream too early, or says that it failed.
    let mut call = send(&envoy).await;
    call.pass(200, "text/event-stream", b"data: {\"text\":\"a\"}\n\n")
        .await;
    ends(Outcome::WorkerError).await;
    for (status, outcome) in [
        (500, Outcome::WorkerError),
        (503, Outcome::Rejected),
        (400, Outcome::Rejected),
    ] {
        mock.set_fault(Fault::Status(status));
        let (told, _, text) = envoy.serve("/generate", &[], &generate(true)).await;
        assert_eq!(told, status);
        assert!(text.contains("told to fail"), "{text}");
        ends(outcome).await;
    }
    // Nothing comes for as long as a request may take.
    let mut call = send(&envoy).await;
    call.pass_head(200, "text/event-stream").await;
    ends(Outcome::Timeout).await;
    assert!(call.next().await.is_none(), "the gateway is told");
    // The gateway is killed.
    let calls = [send(&envoy).await, send(&envoy).await];
    assert!(!router.fleet.is_idle());
    drop(envoy);
    ends(Outcome::ClientDisconnect).await;
    drop(calls);
    assert_eq!(outcomes(&router).len(), 11, "each of them once");
}

#[tokio::test]
async fn bodies_and_headers_are_those_that_the_worker_wants() {
    let mock = MockWorker::start().await;
    let keys = std::env::temp_dir().join(format!("picker-keys-{:x}", fastrand::u64(..)));
    std::fs::write(&keys, "a-clients-key\n").expect("written");
    let mut spec = worker(&mock, "w0", "colocated");
    spec.api_key = serde_json::from_value(json!("workers-key")).expect("a key");
    let router = Router::with(Config {
        workers: vec![spec],
        models: [("claude-*".to_owned(), "mock".to_owned())].into(),
        api_keys_file: Some(keys.clone()),
        ..picking(60.0)
    })
    .await;
    let mut envoy = Envoy::before(&router).await;
    let body = json!({
        "model": "claude-opus-5", "max_tokens": 4, "stream": true, "bootstrap_host": "evil",
        "messages": [{"role": "user", "content": "hello"}],
    });
    let (status, headers, text) = envoy.serve("/v1/messages", &[], &body).await;
    assert_eq!(
        (status, headers["www-authenticate"].as_str()),
        (401, "Bearer")
    );
    let told: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(told["type"], "error", "as Anthropic's clients read it");
    let with = [
        ("x-api-key", "a-clients-key"),
        ("accept-encoding", "gzip"),
        ("x-session-end", "1"),
        ("x-prefiller-host-port", "evil:1"),
        ("x-gateway-destination-endpoint", "evil:1"),
        ("x-mine", "kept"),
    ];
    for mode in [BodyMode::FullDuplexStreamed, BodyMode::Buffered] {
        envoy.modes[0] = mode;
        let text = body.to_string();
        let mut call = envoy
            .send(("POST", "/v1/messages/"), &with, text.as_bytes(), 1000)
            .await;
        let Said::Go(going) = call.said().await else {
            panic!("refused");
        };
        let sent: Value = serde_json::from_slice(&going.body).expect("JSON");
        assert_eq!(sent["model"], "mock");
        assert_eq!(sent["bootstrap_host"], Value::Null);
        assert_eq!(going.set["authorization"], "Bearer workers-key");
        assert_eq!(going.set[":path"], "/v1/messages");
        assert!(going.set.contains_key("x-request-id"));
        assert!(!going.set.contains_key("x-mine"));
        let mut removed = going.removed.clone();
        removed.sort();
        assert_eq!(
            removed,
            [
                "accept-encoding",
                "x-api-key",
                "x-prefiller-host-port",
                "x-session-end"
            ]
        );
        if mode == BodyMode::FullDuplexStreamed {
            assert_eq!(going.set["content-length"], going.body.len().to_string());
        }
        let (status, kind, answer) = asked("/v1/messages", &going).await;
        assert_eq!(call.pass(status, &kind, &answer).await.0, 200);
    }
    router.idle().await;
    assert_eq!(outcomes(&router), [Outcome::Ok; 2]);
    std::fs::remove_file(&keys).expect("removed");
}

#[tokio::test]
async fn separated_requests_name_the_worker_that_prefills() {
    let mocks = [MockWorker::start().await, MockWorker::start().await];
    let router = Router::with(Config {
        policy: "pd".to_owned(),
        workers: vec![
            worker(&mocks[0], "p", "prefill"),
            worker(&mocks[1], "d", "decode"),
        ],
        ..picking(60.0)
    })
    .await;
    let mut envoy = Envoy::before(&router).await;
    let body = generate(true).to_string();
    let mut call = envoy
        .send(("POST", "/generate"), &[], body.as_bytes(), 1000)
        .await;
    let Said::Go(going) = call.said().await else {
        panic!("refused");
    };
    assert_eq!(going.destination, address(&mocks[1]));
    assert_eq!(going.set["x-prefiller-host-port"], address(&mocks[0]));
    let (status, kind, answer) = asked("/generate", &going).await;
    call.pass(status, &kind, &answer).await;
    router.idle().await;
    // A subset without one of the two is of no use.
    envoy.subset = Some(address(&mocks[1]).to_owned());
    let (status, ..) = envoy.serve("/generate", &[], &generate(true)).await;
    assert_eq!(status, 503);
    router.idle().await;
}

#[tokio::test]
async fn what_is_no_prompt_is_answered_or_passed_on() {
    let mock = MockWorker::start().await;
    let router = before(&[&mock], picking(60.0)).await;
    let mut envoy = Envoy::before(&router).await;
    let (status, _, text) = envoy
        .serve(
            "/v1/embeddings",
            &[],
            &json!({"model": "mock", "input": "a"}),
        )
        .await;
    assert_eq!(status, 200, "{text}");
    let said = async |envoy: &Envoy, method, path| {
        let mut call = envoy.send((method, path), &[], b"", 1).await;
        match call.said().await {
            Said::Refused(status, _, text) => (status, text),
            Said::Go(going) => panic!("{going:?}"),
        }
    };
    let (status, text) = said(&envoy, "GET", "/v1/models").await;
    assert_eq!(status, 200);
    assert!(text.contains("\"mock\""), "{text}");
    for path in ["/flush_cache", "/workers", "/health", "/"] {
        let (status, text) = said(&envoy, "GET", path).await;
        assert_eq!(status, 404, "{path}");
        assert!(text.contains("no path of the APIs"), "{text}");
    }
    assert_eq!(said(&envoy, "GET", "/generate").await.0, 405);
    assert_eq!(said(&envoy, "POST", "/generate").await.0, 400);
    // What cannot be answered at all.
    envoy.modes[0] = BodyMode::Streamed;
    let mut call = envoy.send(("POST", "/generate"), &[], b"{}", 1).await;
    assert!(
        call.next().await.is_none(),
        "the gateway is told how to send"
    );
    let unknown = envoy.call("/grpc.health.v1.Health/Check").await;
    assert_eq!(unknown.err().expect("no call")["grpc-status"], "12");
    router.idle().await;
    assert_eq!(mock.behaviour.served.load(Ordering::SeqCst), 1);
}
