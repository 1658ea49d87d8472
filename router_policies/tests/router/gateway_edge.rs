//! What clients may not do, and the APIs that agents speak.

use crate::mock::router::{Router, generate, text, until, worker};
use crate::mock::{End, Fault, MockWorker};
use base64::Engine;
use http_body_util::Full;
use hyper::{Method, Request, StatusCode};
use router_policies::config::Config;
use router_policies::gateway::paths::SERVED;
use serde_json::{Value, json};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

async fn one() -> (MockWorker, Router) {
    let mock = MockWorker::start().await;
    let router = Router::start("unified", vec![worker(&mock, "w", "colocated")]).await;
    (mock, router)
}

fn decision(router: &Router) -> Value {
    let decision = router.fleet.sink().recent(1).remove(0);
    serde_json::to_value(decision.as_ref()).expect("JSON")
}

#[tokio::test]
async fn long_ids_are_not_kept() {
    let (mock, router) = one().await;
    let long = "x".repeat(1 << 20);
    for body in [
        json!({"input_ids": [1], "rid": long}),
        json!({"input_ids": [1], "user": long}),
    ] {
        assert_eq!(router.post("/generate", body).await.0, StatusCode::OK);
        let decision = decision(&router).to_string();
        assert!(decision.len() < 2_000, "{} bytes", decision.len());
    }
    let headers = mock.behaviour.headers.lock();
    assert!(
        headers
            .iter()
            .all(|headers| headers["x-request-id"].len() <= 256)
    );
}

#[tokio::test]
async fn clients_do_not_move_kv() {
    let (mock, router) = one().await;
    let body = json!({
        "input_ids": [1], "bootstrap_host": "evil", "bootstrap_room": 7,
        "kv_transfer_params": {"do_remote_prefill": true},
    });
    let headers = [("x-override-bootstrap-host", "evil"), ("x-kept", "1")];
    let escaped = r#"{"input_ids": [1], "bootstr\u0061p_host": "evil"}"#;
    for body in [body.to_string(), escaped.to_owned()] {
        let response = router.send("/generate", &headers, body.into_bytes()).await;
        assert_eq!(response.status(), StatusCode::OK);
    }
    for body in mock.bodies() {
        assert_eq!(body["bootstrap_host"], Value::Null, "{body}");
        assert_eq!(body["bootstrap_room"], Value::Null, "{body}");
    }
    for headers in mock.behaviour.headers.lock().iter() {
        assert!(!headers.contains_key("x-override-bootstrap-host"));
        assert!(headers.contains_key("x-kept"));
    }
    // Other bodies are not touched.
    let odd = b" {\"input_ids\" : [1,2 ,3], \"unknown\":\"\\u00e9\"}\n".to_vec();
    router.send("/generate", &[], odd.clone()).await;
    assert_eq!(mock.behaviour.bodies.lock().last(), Some(&odd));
    // A switch turns it off.
    let router = Router::with(Config {
        strip_transfer_keys: false,
        workers: vec![worker(&mock, "w", "colocated")],
        ..Config::default()
    })
    .await;
    let body = json!({"input_ids": [1], "bootstrap_host": "mine"});
    router
        .send("/generate", &headers, body.to_string().into_bytes())
        .await;
    assert_eq!(mock.bodies().last().expect("one")["bootstrap_host"], "mine");
}

#[tokio::test]
async fn headers_of_the_clients_connection_stay_with_it() {
    let (mock, router) = one().await;
    let headers = [
        ("connection", "x-mine, keep-alive"),
        ("x-mine", "1"),
        ("proxy-authorization", "secret"),
        // The router reads answers, and ends streams with events of its own.
        ("accept-encoding", "gzip, br"),
    ];
    router
        .send(
            "/generate",
            &headers,
            generate(false).to_string().into_bytes(),
        )
        .await;
    let seen = mock.behaviour.headers.lock();
    for name in ["x-mine", "proxy-authorization", "accept-encoding"] {
        assert!(!seen[0].contains_key(name), "{name}");
    }
}

async fn connect(router: &Router) -> tokio::net::TcpStream {
    let address = router.url.trim_start_matches("http://");
    tokio::net::TcpStream::connect(address)
        .await
        .expect("a connection")
}

async fn begin_upload(router: &Router, announced: usize, sent: usize) -> tokio::net::TcpStream {
    let mut socket = connect(router).await;
    let head = format!("POST /generate HTTP/1.1\r\nhost: r\r\ncontent-length: {announced}\r\n\r\n");
    socket.write_all(head.as_bytes()).await.expect("sent");
    socket.write_all(&vec![b' '; sent]).await.expect("sent");
    socket
}

async fn answer_of(mut socket: tokio::net::TcpStream) -> String {
    let mut answer = vec![0; 4096];
    let count = socket.read(&mut answer).await.unwrap_or_default();
    String::from_utf8_lossy(&answer[..count]).into_owned()
}

#[tokio::test]
async fn bodies_together_are_bounded_and_silent_uploads_end() {
    let mock = MockWorker::start().await;
    let router = Router::with(Config {
        max_held_bytes: 1 << 20,
        body_timeout_s: 0.5,
        workers: vec![worker(&mock, "w", "colocated")],
        ..Config::default()
    })
    .await;
    let begun = Instant::now();
    let mut stalled = Vec::new();
    for _ in 0..4 {
        stalled.push(begin_upload(&router, 10 << 20, 240 << 10).await);
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    let refused = begin_upload(&router, 10 << 20, 240 << 10).await;
    let answer = answer_of(refused).await;
    assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
    assert!(answer.contains("max_held_bytes"), "{answer}");
    for socket in stalled {
        let answer = answer_of(socket).await;
        assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
    }
    assert!(begun.elapsed() < Duration::from_secs(5));
    // What they held is given back.
    let ids: Vec<u32> = (0..100_000).collect();
    let large = json!({"input_ids": ids}).to_string().into_bytes();
    assert!(large.len() > 512 << 10);
    assert_eq!(
        router.send("/generate", &[], large).await.status(),
        StatusCode::OK
    );
}

#[tokio::test]
async fn a_web_page_cannot_change_the_workers() {
    let (_mock, router) = one().await;
    let json = ("content-type", "application/json");
    let added = json!({"id": "new", "url": "http://127.0.0.1:1"})
        .to_string()
        .into_bytes();
    for headers in [
        vec![("content-type", "text/plain")],
        vec![],
        vec![json, ("origin", "http://evil.example")],
        vec![json, ("origin", "null")],
        vec![json, ("host", "evil.example")],
        vec![json, ("host", "evil.example:80")],
    ] {
        let response = router.send("/workers", &headers, added.clone()).await;
        assert!(
            [StatusCode::FORBIDDEN, StatusCode::UNSUPPORTED_MEDIA_TYPE]
                .contains(&response.status()),
            "{headers:?}: {}",
            response.status()
        );
    }
    let drain = router.send(
        "/workers/w/drain",
        &[("origin", "http://evil.example")],
        Vec::new(),
    );
    assert_eq!(drain.await.status(), StatusCode::FORBIDDEN);
    assert_eq!(router.fleet.snapshot().len(), 1);
    let response = router.send("/workers", &[json], added).await;
    assert_eq!(response.status(), StatusCode::ACCEPTED);
    assert_eq!(
        router
            .send("/workers/w/drain", &[], Vec::new())
            .await
            .status(),
        StatusCode::ACCEPTED
    );
}

#[tokio::test]
async fn ids_of_workers_can_be_addressed() {
    let (_mock, router) = one().await;
    for id in ["x\r\ny", "a/b/../drain", "with space", "50%"] {
        let (status, text) = router
            .post_json("/workers", json!({"id": id, "url": "http://127.0.0.1:1"}))
            .await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{text}");
    }
    let (status, _) = router
        .post_json("/workers", json!({"url": "http://127.0.0.1:1"}))
        .await;
    assert_eq!(status, StatusCode::ACCEPTED);
    let id = "127.0.0.1%3A1";
    assert_eq!(
        router.get(&format!("/workers/{id}")).await.0,
        StatusCode::OK
    );
}

#[tokio::test]
async fn the_decision_log_can_be_moved_away() {
    let folder = std::env::temp_dir().join(format!("router-log-{:x}", fastrand::u64(..)));
    std::fs::create_dir_all(&folder).expect("a folder");
    let (log, moved) = (folder.join("d.jsonl"), folder.join("d.jsonl.1"));
    let mock = MockWorker::start().await;
    let router = Router::with(Config {
        decision_log: Some(log.clone()),
        workers: vec![worker(&mock, "w", "colocated")],
        ..Config::default()
    })
    .await;
    let lines = |path: &std::path::Path| {
        std::fs::read_to_string(path).map_or(0, |text| text.lines().count())
    };
    router.post("/generate", generate(false)).await;
    until("the first is written", || lines(&log) == 2).await;
    std::fs::rename(&log, &moved).expect("moved");
    router.fleet.sink().reopen();
    router.post("/generate", generate(false)).await;
    until("the second is in a new file", || lines(&log) == 2).await;
    assert_eq!(lines(&moved), 2);
    std::fs::remove_dir_all(&folder).expect("removed");
}

#[tokio::test]
async fn of_a_bounded_decision_log_the_older_half_makes_room() {
    let folder = std::env::temp_dir().join(format!("router-log-{:x}", fastrand::u64(..)));
    std::fs::create_dir_all(&folder).expect("a folder");
    let (log, older) = (folder.join("d.jsonl"), folder.join("d.1.jsonl"));
    let before = "{}\n".repeat(166_666);
    std::fs::write(&log, &before).expect("written");
    let mock = MockWorker::start().await;
    let router = Router::with(Config {
        decision_log: Some(log.clone()),
        decision_log_max_mb: 1.0,
        workers: vec![worker(&mock, "w", "colocated")],
        ..Config::default()
    })
    .await;
    router.post("/generate", generate(false)).await;
    until("both events are written", || {
        std::fs::read_to_string(&log).is_ok_and(|text| text.lines().count() == 2)
    })
    .await;
    assert_eq!(std::fs::read_to_string(&older).expect("text"), before);
    std::fs::remove_dir_all(&folder).expect("removed");
}

#[tokio::test]
async fn what_the_decision_log_lacks_is_counted() {
    let mock = MockWorker::start().await;
    let router = Router::with(Config {
        decision_log: Some("/dev/full".into()),
        workers: vec![worker(&mock, "w", "colocated")],
        ..Config::default()
    })
    .await;
    let (status, _) = router.post("/generate", generate(false)).await;
    assert_eq!(status, StatusCode::OK);
    router.counts("deltaserve_decision_log_lost_total 2").await;
}

#[tokio::test]
async fn compressed_bodies_and_wrong_limits_are_refused_in_words() {
    let (mock, router) = one().await;
    let body = generate(false).to_string().into_bytes();
    let zipped = [("content-encoding", "gzip")];
    let refused = router.send("/generate", &zipped, body.clone()).await;
    assert_eq!(refused.status(), StatusCode::UNSUPPORTED_MEDIA_TYPE);
    let plain = [("content-encoding", "identity")];
    assert_eq!(
        router.send("/generate", &plain, body).await.status(),
        StatusCode::OK
    );
    let (status, said) = router
        .post("/generate", json!({"input_ids": [1.5, 2]}))
        .await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert!(
        said.contains("expected a token id that is a whole number"),
        "{said}"
    );
    assert_eq!(mock.bodies().len(), 1);
    assert_eq!(
        router.get("/decisions?limit=abc").await.0,
        StatusCode::BAD_REQUEST
    );
    assert_eq!(router.get("/decisions?limit=1").await.0, StatusCode::OK);
    for path in ["/health", "/metrics"] {
        let mut socket = connect(&router).await;
        let head = format!("HEAD {path} HTTP/1.1\r\nhost: r\r\n\r\n");
        socket.write_all(head.as_bytes()).await.expect("sent");
        let answer = answer_of(socket).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{path}: {answer}");
    }
}

fn messages(turns: usize, stream: bool) -> Value {
    let turns: Vec<Value> = (0..turns)
        .map(|i| json!({"role": "user", "content": format!("turn {i} {}", "words ".repeat(200))}))
        .collect();
    json!({
        "model": "m", "max_tokens": 50, "stream": stream, "system": "be brief ".repeat(100),
        "tools": [{"name": "read", "input_schema": {"type": "object"}}], "messages": turns,
        "metadata": {"user_id": "user_ab_account__session_57a121ec"},
    })
}

#[tokio::test]
async fn claude_code_is_served_and_its_session_and_prefix_are_known() {
    let (mock, router) = one().await;
    let (status, body) = router.post("/v1/messages", messages(1, true)).await;
    assert_eq!(status, StatusCode::OK);
    assert!(
        body.ends_with("data: {\"type\":\"message_stop\"}\n\n"),
        "{body}"
    );
    router.idle().await;
    let metrics = router.get("/metrics").await.1;
    assert!(
        metrics.contains("deltaserve_requests_total{outcome=\"ok\"} 1"),
        "{metrics}"
    );
    assert_eq!(decision(&router)["session_id"], "57a121ec");
    let first = decision(&router)["input_tokens"]
        .as_u64()
        .expect("a number");
    router.post("/v1/messages", messages(2, false)).await;
    let second = decision(&router);
    let new = second["new_tokens"].as_u64().expect("a number");
    assert!(
        second["input_tokens"].as_u64().expect("a number") - new > first - 20,
        "{second}"
    );
    assert_eq!(mock.bodies()[0], messages(1, true), "as the client sent it");
    // Other tools in front make another prompt.
    let mut other = messages(2, false);
    other["tools"][0]["name"] = "write".into();
    router.post("/v1/messages", other).await;
    let third = decision(&router);
    assert!(third["new_tokens"].as_u64() > Some(new), "{third}");
}

/// What SGLang (0.5.17) sends to Claude Code, less its text, in pieces that end where they like.
const MESSAGE: &[&str] = &[
    "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"content\":[],\"usage\":{\"input_to",
    "kens\":8,\"output_tokens\":0,\"cache_read_input_tokens\":32}}}\n\nevent: content_block_start\n",
    "data: {\"type\":\"content_block_start\",\"content_block\":{\"input\":{\"usage\":{\"input_tokens\":700}}}}\n\n",
    "event: message_delta\ndata: {\"type\":\"message_delta\",\"usage\":{\"output_tokens\":9}}\n\n",
    "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
];

/// What vLLM (0.26.0) sends to Codex: with the tools that the request had.
const RESPONSE: &[&str] = &[
    "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"tools\":[{\"usage\":{\"input_tokens\":700}}],\"usage\":null}}\n\n",
    "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"a\"}\n\n",
    "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"tools\":[{\"usage\":{\"input_tokens\":700}}],",
    "\"usage\":{\"input_tokens\":40,\"input_tokens_details\":{\"cached_tokens\":32},\"output_tokens\":9}}}\n\n",
];

#[tokio::test]
async fn what_agents_prompts_took_is_logged_and_learnt_from() {
    let mock = MockWorker::start().await;
    let log = std::env::temp_dir().join(format!("router-usage-{:x}.jsonl", fastrand::u64(..)));
    let router = Router::with(Config {
        policy: "unified".to_owned(),
        workers: vec![worker(&mock, "w", "colocated")],
        decision_log: Some(log.clone()),
        ..Config::default()
    })
    .await;
    let finishes = || -> Vec<Value> {
        let lines = std::fs::read_to_string(&log).unwrap_or_default();
        let events = lines
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok());
        events
            .filter(|it: &Value| it["event"] == "finish")
            .collect()
    };
    let asked = json!({"input": "words ".repeat(400), "stream": true});
    for (number, (path, body, pieces)) in [
        ("/v1/messages", messages(1, true), MESSAGE),
        ("/v1/messages", messages(1, true), MESSAGE),
        ("/v1/responses", asked.clone(), RESPONSE),
        ("/v1/responses", asked, RESPONSE),
    ]
    .into_iter()
    .enumerate()
    {
        mock.set_fault(Fault::Raw(pieces, End::Properly));
        let (status, text) = router.post(path, body).await;
        assert_eq!((status, text), (StatusCode::OK, pieces.concat()));
        until("it is logged", || finishes().len() > number).await;
        let finish = finishes().remove(number);
        assert_eq!(finish["outcome"], "ok", "{finish}");
        assert_eq!(finish["prompt_tokens"], 40, "{finish}");
        assert_eq!(finish["cached_tokens"], 32, "{finish}");
        let believed = finish["believed_cached_tokens"].as_u64();
        let is_repeated = number % 2 == 1;
        assert_eq!(believed > Some(100), is_repeated, "{finish}");
        // Of what the session had been served before, the engine had less than its prompt has: 39 of 40 at most.
        let recomputed = finish["recomputed_tokens"].as_u64();
        assert_eq!(
            recomputed,
            Some(if is_repeated { 7 } else { 0 }),
            "{finish}"
        );
    }
    std::fs::remove_file(&log).expect("removed");
}

#[tokio::test]
async fn what_fails_is_said_in_the_words_of_each_api() {
    let (mock, router) = one().await;
    let (status, text) = router.post("/v1/messages", json!({"model": "m"})).await;
    let error: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert_eq!(error["type"], "error");
    assert_eq!(error["error"]["type"], "invalid_request_error");
    mock.set_fault(Fault::CloseAfter(2));
    for (path, body, end) in [
        ("/v1/messages", messages(1, true), "api_error"),
        (
            "/v1/responses",
            json!({"input": "hi", "stream": true}),
            "worker_error",
        ),
    ] {
        let (_, text) = router.post(path, body).await;
        let last = text.trim_end().rsplit("\n\n").next().expect("an event");
        let data = last.strip_prefix("event: error\ndata: ").expect(last);
        let error: Value = serde_json::from_str(data).expect("JSON");
        assert_eq!(error["error"]["type"], end, "{text}");
    }
}

#[tokio::test]
async fn codex_is_served() {
    let (_mock, router) = one().await;
    let input = |turns: usize| -> Vec<Value> {
        (0..turns)
            .map(|i| json!({"role": "user", "content": format!("{i} {}", "words ".repeat(100))}))
            .collect()
    };
    let body = |turns| {
        json!({
            "instructions": "be brief", "input": input(turns), "stream": true,
            "max_output_tokens": 9, "prompt_cache_key": "conversation-1",
        })
    };
    let (status, text) = router.post("/v1/responses", body(1)).await;
    assert_eq!(status, StatusCode::OK);
    assert!(text.contains("event: response.completed"), "{text}");
    assert_eq!(decision(&router)["session_id"], "conversation-1");
    router.post("/v1/responses", body(3)).await;
    let last = decision(&router);
    assert!(
        last["new_tokens"].as_u64() < last["input_tokens"].as_u64(),
        "{last}"
    );
    router.idle().await;
    let metrics = router.get("/metrics").await.1;
    assert!(
        metrics.contains("deltaserve_requests_total{outcome=\"ok\"} 2"),
        "{metrics}"
    );
}

#[tokio::test]
async fn sessions_are_found_where_agents_name_them() {
    let (_mock, router) = one().await;
    let plain = json!({"messages": [{"role": "user", "content": "a"}], "user": "team"});
    let mut keyed = plain.clone();
    keyed["prompt_cache_key"] = "k".into();
    for (header, body, session) in [
        (("x-session-id", "s1"), &keyed, Some("s1")),
        (("x-claude-code-session-id", "s2"), &keyed, Some("s2")),
        (("session-id", "s3"), &plain, Some("s3")),
        (("session_id", "s4"), &plain, Some("s4")),
        (("x-session-affinity", "s5"), &plain, Some("s5")),
        (("x-none", "-"), &keyed, Some("k")),
        (("x-claude-code-agent-id", "a"), &keyed, Some("k/a")),
        // A user may have many conversations.
        (("x-none", "-"), &plain, None),
    ] {
        let body = body.to_string().into_bytes();
        router.send("/v1/chat/completions", &[header], body).await;
        assert_eq!(decision(&router)["session_id"], json!(session));
    }
}

#[tokio::test]
async fn agents_apis_are_separated_where_all_that_may_share_them_are_of_a_release_that_can() {
    for (releases, shared) in [
        (["0.5.19", "0.5.19"], [false, false]),
        (["0.5.23", "0.5.19"], [false, false]),
        (["0.5.20", "0.5.21"], [false, true]),
        (["0.5.23", "0.5.22"], [true, true]),
    ] {
        let mut mocks = Vec::new();
        let mut workers = Vec::new();
        for (role, release) in ["prefill", "elastic"].into_iter().zip(releases) {
            let mock = MockWorker::start().await;
            *mock.behaviour.version.lock() = release;
            workers.push(worker(&mock, role, role));
            mocks.push(mock);
        }
        let router = Router::start("pd", workers).await;
        let asked = [
            ("/v1/messages", messages(1, false)),
            ("/v1/responses", json!({"input": "hi"})),
        ];
        for ((path, body), is_shared) in asked.into_iter().zip(shared) {
            for mock in &mocks {
                mock.behaviour.bodies.lock().clear();
            }
            let response = router.send(path, &[], body.to_string().into_bytes()).await;
            assert_eq!(response.headers()["x-deltaserve-worker"], "elastic");
            let room = |mock: &MockWorker| Some(mock.bodies().pop()?["bootstrap_room"].clone());
            let (prefill, decode) = (room(&mocks[0]), room(&mocks[1]).expect("asked"));
            match is_shared {
                true => assert_eq!(prefill.expect("asked"), decode, "{releases:?} {path}"),
                false => assert_eq!(
                    (prefill, decode),
                    (None, Value::Null),
                    "{releases:?} {path}"
                ),
            }
        }
        let more = json!({"input": "hi", "previous_response_id": "resp_1"});
        assert_eq!(router.post("/v1/responses", more).await.0, StatusCode::OK);
        let last = mocks[1].bodies().pop().expect("asked");
        assert_eq!(
            last["bootstrap_room"],
            Value::Null,
            "it stays where that is kept"
        );
    }
}

/// A data URL of a screenshot: as much of it as says how wide and high it is, and what tells it from others.
fn screenshot(which: u8) -> String {
    let mut bytes = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR".to_vec();
    bytes.extend([1400_u32, 1120].map(u32::to_be_bytes).concat());
    bytes.extend([which; 90_000]);
    let data = base64::engine::general_purpose::STANDARD.encode(bytes);
    format!("data:image/png;base64,{data}")
}

#[tokio::test]
async fn a_picture_counts_as_the_engine_counted_it_and_a_text_as_before() {
    const OF_ONE: u64 = 2_500;
    let mock = MockWorker::start().await;
    let router = Router::start("round_robin", vec![worker(&mock, "w", "colocated")]).await;
    let ask = async |session: &str, pictures: u8| {
        let parts = (0..pictures).map(screenshot);
        let parts = parts.map(|url| json!({"type": "image_url", "image_url": {"url": url}}));
        let begin = json!({"role": "user", "content": "word ".repeat(4_000)});
        let shown = parts.map(|part| json!({"role": "user", "content": [part]}));
        let messages: Vec<Value> = [begin].into_iter().chain(shown).collect();
        let body = json!({"messages": messages, "tools": [{"type": "function", "function": {"name": "f"}}]});
        let headers = [("x-session-id", session)];
        let body = body.to_string().into_bytes();
        let answer = router.send("/v1/chat/completions", &headers, body).await;
        assert_eq!(answer.status(), StatusCode::OK);
        text(answer).await;
        router.idle().await;
        decision(&router)["input_tokens"].as_u64().expect("a count")
    };
    let is = |tokens| {
        mock.behaviour
            .prompt_tokens
            .store(tokens, Ordering::Relaxed)
    };
    let of_text = ask("guess", 0).await;
    for pictures in 0..4 {
        let counted = of_text + OF_ONE * u64::from(pictures);
        is(counted);
        let booked = ask("s", pictures).await;
        let is_near = booked.abs_diff(counted) < counted / 10;
        assert!(
            is_near || pictures == 1,
            "{pictures}: {booked} of {counted}"
        );
    }
    assert_eq!(ask("t", 0).await, of_text);
}

#[tokio::test]
async fn questions_go_to_a_worker_that_is_up() {
    let (a, b) = (MockWorker::start().await, MockWorker::start().await);
    let workers = vec![worker(&a, "a", "colocated"), worker(&b, "b", "colocated")];
    let router = Router::start("round_robin", workers).await;
    a.set_fault(Fault::CloseAtOnce);
    for path in [
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/tokenize",
        "/detokenize",
    ] {
        let response = router.send(path, &[], b"{}".to_vec()).await;
        assert_eq!(response.status(), StatusCode::OK, "{path}");
        assert_eq!(response.headers()["x-deltaserve-worker"], "b");
    }
    assert!(
        router.fleet.sink().recent(1).is_empty(),
        "they are no decisions"
    );
    assert_eq!(router.get("/v1/models/mock").await.0, StatusCode::OK);
    let (status, body) = router.get("/v1/models/listed/only").await;
    assert_eq!(
        (status, &*body),
        (StatusCode::OK, r#"{"id":"listed/only"}"#)
    );
    let (status, _) = router.get("/v1/models/of-nobody").await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    assert_eq!(
        router.get("/tokenize").await.0,
        StatusCode::METHOD_NOT_ALLOWED
    );
    b.set_fault(Fault::CloseAtOnce);
    let response = router
        .send("/v1/messages/count_tokens", &[], b"{}".to_vec())
        .await;
    let body = text(response).await;
    assert!(
        body.starts_with("{\"error\":{\"message\":\"worker") || body.contains("api_error"),
        "{body}"
    );
    let _ = (Ordering::SeqCst, End::Properly);
}

/// Sends a large body, `later` than the headers, whatever the router says meanwhile, and reads the answer then,
/// as many clients do.
async fn answer_after_sending(
    router: &Router,
    asked: &str,
    headers: &str,
    later: Duration,
) -> String {
    let mut socket = connect(router).await;
    let body = vec![b' '; 4 << 20];
    let bytes = body.len();
    let head =
        format!("{asked} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {bytes}\r\n{headers}\r\n");
    socket.write_all(head.as_bytes()).await.expect("sent");
    tokio::time::sleep(later).await;
    for piece in body.chunks(64 << 10) {
        socket.write_all(piece).await.expect("the router takes it");
    }
    let mut answer = String::new();
    socket.read_to_string(&mut answer).await.expect("an answer");
    answer
}

#[tokio::test]
async fn who_is_refused_early_learns_why_though_its_body_was_not_read() {
    let mock = MockWorker::start().await;
    let router = Router::with(Config {
        max_body_bytes: 1 << 20,
        workers: vec![worker(&mock, "w", "colocated")],
        ..Config::default()
    })
    .await;
    for (headers, status) in [
        ("", "HTTP/1.1 413 "),
        ("content-encoding: gzip\r\n", "HTTP/1.1 415 "),
    ] {
        for later in [0, 300].map(Duration::from_millis) {
            let answer = answer_after_sending(&router, "POST /v1/messages", headers, later).await;
            assert!(answer.starts_with(status), "{answer}");
            assert!(answer.contains("\"type\":\"error\""), "{answer}");
        }
    }
}

#[tokio::test]
async fn who_sends_a_body_that_nobody_wants_is_answered_all_the_same() {
    let (_mock, router) = one().await;
    for (asked, headers, status) in [
        ("POST /v1/chat/completion", "", "HTTP/1.1 404 "),
        ("POST /health", "", "HTTP/1.1 405 "),
        ("GET /workers", "", "HTTP/1.1 200 "),
        ("POST /workers", "", "HTTP/1.1 415 "),
        (
            "POST /workers/w/drain",
            "content-type: application/json\r\n",
            "HTTP/1.1 202 ",
        ),
    ] {
        for later in [0, 300].map(Duration::from_millis) {
            let answer = answer_after_sending(&router, asked, headers, later).await;
            assert!(answer.starts_with(status), "{asked}: {answer}");
        }
    }
}

#[tokio::test]
async fn who_goes_on_sending_for_ever_is_not_listened_to_for_ever() {
    let (_mock, router) = one().await;
    let mut socket = connect(&router).await;
    let head = "POST /generate HTTP/1.1\r\nhost: r\r\ntransfer-encoding: chunked\r\ncontent-encoding: gzip\r\n\r\n";
    socket.write_all(head.as_bytes()).await.expect("sent");
    let begun = Instant::now();
    let chunk = [&b"1000\r\n"[..], &[b' '; 0x1000], b"\r\n"].concat();
    while socket.write_all(&chunk).await.is_ok() {
        let patience = Duration::from_secs(30);
        assert!(begun.elapsed() < patience, "it still listens");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(
        begun.elapsed() > Duration::from_secs(1),
        "it did for a while"
    );
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_quiet_client_is_asked_whether_it_is_still_there() {
    let (_mock, router) = one().await;
    let address = router.url.trim_start_matches("http://");
    let socket = tokio::net::TcpStream::connect(address)
        .await
        .expect("a connection");
    let port = |address: std::io::Result<std::net::SocketAddr>| {
        format!(":{:04X}", address.expect("connected").port())
    };
    let (client, router) = (port(socket.local_addr()), port(socket.peer_addr()));
    // The kernel's table: number, local and remote address, state, queues, the timer that runs and when it fires.
    let timer = || {
        let table = std::fs::read_to_string("/proc/net/tcp").expect("the kernel's table");
        let rows = table.lines().map(|row| row.split_whitespace());
        let mut rows = rows.map(Iterator::collect::<Vec<_>>);
        let row = rows.find(|row| row[1].ends_with(&router) && row[2].ends_with(&client));
        row.map(|row| row[5].to_owned())
    };
    until("it is accepted", || timer().is_some()).await;
    let timer = timer().expect("a row");
    let (kind, ticks) = timer.split_once(':').expect("a kind and a time");
    assert_eq!(kind, "02", "keepalive");
    let ticks = u64::from_str_radix(ticks, 16).expect("a number");
    assert!((1..=6_000).contains(&ticks), "{ticks} of 10 ms");
}

#[tokio::test]
async fn a_path_of_the_table_is_served_by_its_methods_and_refuses_others() {
    const ALL: [Method; 7] = [
        Method::GET,
        Method::HEAD,
        Method::POST,
        Method::PUT,
        Method::DELETE,
        Method::OPTIONS,
        Method::PATCH,
    ];
    let (_mock, router) = one().await;
    for served in SERVED {
        for path in served.paths {
            // Of a name that nobody has, so that a worker is not removed.
            let path = path.replace("ID", "nobody");
            for method in ALL {
                let request = Request::builder()
                    .method(&method)
                    .uri(format!("{}{path}", router.url))
                    .header("content-type", "application/json")
                    .body(Full::default())
                    .expect("a request");
                let response = router.client.request(request).await.expect("an answer");
                let is_served = served.methods.split(", ").any(|it| it == method.as_str());
                let is_refused = response.status() == StatusCode::METHOD_NOT_ALLOWED;
                assert_eq!(is_refused, !is_served, "{method} {path}");
                let allowed = response.headers().get("allow").cloned();
                assert_eq!(allowed.is_some(), is_refused, "{method} {path}");
                assert!(
                    allowed.is_none_or(|it| it == served.methods),
                    "{method} {path}"
                );
                let told = text(response).await;
                assert!(!told.contains("no such path"), "{method} {path}: {told}");
            }
        }
    }
}
