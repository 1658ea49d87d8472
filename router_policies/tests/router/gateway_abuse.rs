//! What clients, and others who reach the router, may not bring about: they steer no engine, read no secret,
//! hold no more than their share, and make the router ask nobody who is no worker.

use crate::gateway_faults::futures;
use crate::mock::router::{Router, generate, text, until, worker};
use crate::mock::{End, Fault, MockWorker};
use hyper::StatusCode;
use router_policies::config::{Config, WorkerSpec};
use serde_json::{Value, json};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

fn spec(mock: &MockWorker, fields: Value) -> WorkerSpec {
    let mut spec = json!({"url": mock.url, "id": "w"});
    let all = spec.as_object_mut().expect("an object");
    all.extend(fields.as_object().expect("an object").clone());
    serde_json::from_value(spec).expect("a worker")
}

#[tokio::test]
async fn transfer_keys_reach_no_engine_by_any_way() {
    let hidden = [
        r#"{"prompt":[1],"vllm_xargs":{"kv_transfer_params":"x","top":1}}"#,
        r#"{"prompt":[1],"vllm\u005fxargs":{"\u006bv_transfer_params":"x","top":1}}"#,
        r#"{"prompt":[1],"vllm_xargs":{},"vllm_xargs":{"top":1,"ec_transfer_params":{}}}"#,
        r#"{"prompt":[1],"kv_transfer\u005fparams":{"do_remote_prefill":true},"vllm_xargs":{"top":1}}"#,
    ];
    let mock = MockWorker::start().await;
    let router = Router::start("round_robin", vec![spec(&mock, json!({"engine": "vllm"}))]).await;
    for body in hidden {
        let answer = router.send("/v1/completions", &[], body.into()).await;
        assert_eq!(answer.status(), StatusCode::OK);
    }
    for body in mock.bodies() {
        assert!(body["kv_transfer_params"].is_null(), "{body}");
        assert_eq!(body["vllm_xargs"], json!({"top": 1}), "{body}");
    }
    // What Python reads and this router's parser does not.
    let odd = br#"{"prompt":[1],"vllm_xargs":{"a":NaN,"kv_transfer_params":"x"}}"#;
    router.send("/v1/completions", &[], odd.to_vec()).await;
    let sent = mock.behaviour.bodies.lock().last().expect("a body").clone();
    let sent = String::from_utf8(sent).expect("text");
    assert!(sent.ends_with(r#""vllm_xargs":null}"#), "{sent}");
}

#[tokio::test]
async fn a_body_in_a_coding_that_is_not_undone_reaches_no_worker() {
    let mock = MockWorker::start().await;
    let router = Router::start("round_robin", vec![worker(&mock, "w", "colocated")]).await;
    let body = generate(false).to_string();
    for (codings, expected) in [
        ("transfer-encoding: gzip, chunked", "501"),
        (
            "transfer-encoding: gzip\r\ntransfer-encoding: chunked",
            "501",
        ),
        ("transfer-encoding: Chunked", "200"),
    ] {
        let mut client = TcpStream::connect(&router.url["http://".len()..])
            .await
            .expect("a connection");
        let request = format!(
            "POST /generate HTTP/1.1\r\nhost: r\r\nconnection: close\r\n{codings}\r\n\r\n\
             {:x}\r\n{body}\r\n0\r\n\r\n",
            body.len()
        );
        client.write_all(request.as_bytes()).await.expect("sent");
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.expect("an answer");
        let status = answer.split(' ').nth(1);
        assert_eq!(status, Some(expected), "{codings}: {answer}");
    }
    assert_eq!(mock.bodies().len(), 1);
}

#[tokio::test]
async fn transfer_keys_of_clients_reach_neither_half_of_a_pair() {
    for (engine, more) in [
        ("sglang", json!({"bootstrap_port": 8998})),
        ("vllm", json!({"kv_connector": "nixl"})),
    ] {
        let (p, d) = (MockWorker::start().await, MockWorker::start().await);
        let of = |mock: &MockWorker, role: &str| WorkerSpec {
            id: role.to_owned(),
            ..spec(mock, {
                let mut fields = json!({"engine": engine, "role": role});
                let all = fields.as_object_mut().expect("an object");
                all.extend(more.as_object().expect("an object").clone());
                fields
            })
        };
        let workers = vec![of(&p, "prefill"), of(&d, "decode")];
        let router = Router::start("pd", workers).await;
        let body = json!({
            "prompt": [1], "ec_transfer_params": "x", "bootstrap_pair_key": "x",
            "vllm_xargs": {"kv_transfer_params": "x"}, "disagg_prefill_dp_rank": 3,
        });
        let (status, said) = router.post("/v1/completions", body).await;
        assert_eq!(status, StatusCode::OK, "{said}");
        for body in [p.bodies(), d.bodies()].concat() {
            let own = match engine {
                "sglang" => ["bootstrap_pair_key", "disagg_prefill_dp_rank"],
                _ => ["ec_transfer_params", "none"],
            };
            assert!(own.iter().all(|name| body[name].is_null()), "{body}");
            if engine == "vllm" {
                assert_eq!(body["vllm_xargs"], json!({}), "{body}");
                assert!(body["kv_transfer_params"].is_object(), "{body}");
            }
        }
    }
}

#[tokio::test]
async fn several_answers_are_several_however_they_are_written() {
    let (p, d) = (MockWorker::start().await, MockWorker::start().await);
    let mut pair = vec![worker(&p, "p", "prefill"), worker(&d, "d", "decode")];
    let router = Router::start("pd", std::mem::take(&mut pair)).await;
    for n in [
        r#""n":3"#,
        r#""\u006e":3"#,
        r#""n":"3""#,
        r#""n":3.0"#,
        r#""n":3e0"#,
    ] {
        let body = format!(r#"{{"messages":[{{"role":"user","content":"a"}}],{n}}}"#);
        let answer = router.send("/v1/chat/completions", &[], body.into()).await;
        assert_eq!(answer.status(), StatusCode::BAD_REQUEST, "{n}");
    }
    for n in [r#""n":1"#, r#""n":null"#, r#""n":1.0"#] {
        let body = format!(r#"{{"messages":[{{"role":"user","content":"a"}}],{n}}}"#);
        let answer = router.send("/v1/chat/completions", &[], body.into()).await;
        assert_eq!(answer.status(), StatusCode::OK, "{n}");
    }
}

#[tokio::test]
async fn a_request_that_is_tried_again_has_another_id_on_every_way() {
    for path in ["/generate", "/v1/completions", "/v1/chat/completions"] {
        for rid in [json!("mine"), json!(["mine"])] {
            let mut mocks = Vec::new();
            let mut workers = Vec::new();
            for (id, role) in [("p0", "prefill"), ("p1", "prefill"), ("d", "decode")] {
                let mock = MockWorker::start().await;
                workers.push(worker(&mock, id, role));
                mocks.push(mock);
            }
            let router = Router::start("pd", workers).await;
            for mock in &mocks[..2] {
                mock.set_fault(Fault::Status(500));
            }
            mocks[2]
                .behaviour
                .first_token_us
                .store(300_000, Ordering::SeqCst);
            let body = json!({
                "prompt": [1], "input_ids": [1], "rid": rid, "stream": true,
                "messages": [{"role": "user", "content": "a"}],
            });
            router.post(path, body).await;
            let rids: Vec<Value> = mocks[2]
                .bodies()
                .iter()
                .map(|body| body["rid"].clone())
                .collect();
            assert!(rids.len() > 1, "{path}: it is tried again");
            for (at, rid) in rids.iter().enumerate() {
                assert!(
                    !rids[..at].contains(rid) || rid.is_null(),
                    "{path}: {rids:?}"
                );
            }
        }
    }
}

#[tokio::test]
async fn nobody_who_adds_a_worker_reads_the_routers_environment() {
    let mock = MockWorker::start().await;
    let router = Router::start("round_robin", Vec::new()).await;
    for name in ["PATH", "A_NAME_THAT_IS_NOT_SET"] {
        let added = json!({"url": mock.url, "api_key": format!("env:{name}")});
        let (status, said) = router.post_json("/workers", added).await;
        assert_eq!(status, StatusCode::BAD_REQUEST);
        assert!(said.contains("in files and flags only"), "{said}");
    }
    // What the router's own user says is taken.
    let path = std::env::var("PATH").expect("a variable");
    let config = Config {
        workers: vec![spec(&mock, json!({"api_key": "env:PATH"}))],
        ..Config::default()
    };
    let key = config.normalise().expect("valid").workers[0]
        .api_key
        .clone();
    assert_eq!(key.expect("a key").as_str(), path);
}

#[tokio::test]
async fn what_an_engine_says_of_itself_is_shown_without_its_secrets() {
    let mock = MockWorker::start().await;
    let router = Router::start("round_robin", vec![worker(&mock, "w", "colocated")]).await;
    for path in ["/server_info", "/get_server_info"] {
        let (status, said) = router.get(path).await;
        assert_eq!(status, StatusCode::OK);
        assert!(!said.contains("the-engines-secret"), "{said}");
        assert!(said.contains("max_total_num_tokens"), "{said}");
    }
}

#[tokio::test]
async fn a_router_is_no_worker_of_itself_or_of_another() {
    let mock = MockWorker::start().await;
    let other = Router::start("round_robin", vec![worker(&mock, "w", "colocated")]).await;
    let router = Router::start("round_robin", Vec::new()).await;
    for url in [&router.url, &other.url] {
        let (status, _) = router.post_json("/workers", json!({"url": url})).await;
        assert_eq!(status, StatusCode::ACCEPTED);
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(router.fleet.snapshot().iter().all(|worker| !worker.healthy));
    let begun = Instant::now();
    let (status, _) = router.post("/generate", generate(false)).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(begun.elapsed() < Duration::from_secs(2));
    assert!(mock.bodies().is_empty());
}

#[tokio::test]
async fn no_address_that_is_no_worker_is_asked() {
    let router = Router::start("round_robin", Vec::new()).await;
    let well = "http://10.255.255.1:9";
    for added in [
        json!({"url": "http://169.254.169.254:80"}),
        json!({"url": "http://0xa9fea9fe:80"}),
        json!({"url": "http://2852039166:80"}),
        json!({"url": "http://[::ffff:169.254.169.254]:80"}),
        json!({"url": "http://224.0.0.1:80"}),
        json!({"url": well, "kv_events": "tcp://169.254.169.254:80"}),
        json!({"url": well, "kv_events_replay": "tcp://0xa9fea9fe:80"}),
        json!({"url": well, "bootstrap_port": 1, "bootstrap_host": "169.254.169.254"}),
    ] {
        let (status, said) = router.post_json("/workers", added.clone()).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{added}: {said}");
    }
    let names = ["127.0.0.1", "LOCALHOST", "0.0.0.0", "[::1]", "localhost."];
    let mut accepted = 0;
    for name in names {
        let (status, _) = router
            .post_json("/workers", json!({"url": format!("http://{name}:9")}))
            .await;
        accepted += usize::from(status == StatusCode::ACCEPTED);
        assert!(matches!(
            status,
            StatusCode::ACCEPTED | StatusCode::CONFLICT
        ));
    }
    assert_eq!(accepted, 1, "one engine is one worker");
}

async fn raw(router: &Router, request: &str) -> String {
    let mut socket = connect(router).await;
    socket.write_all(request.as_bytes()).await.expect("sent");
    let mut answer = vec![0; 65_536];
    let count = socket.read(&mut answer).await.unwrap_or_default();
    String::from_utf8_lossy(&answer[..count]).into_owned()
}

async fn connect(router: &Router) -> TcpStream {
    let address = router.url.trim_start_matches("http://");
    TcpStream::connect(address).await.expect("a connection")
}

#[tokio::test]
async fn a_page_that_points_its_name_here_reads_nothing_of_the_inside() {
    let mock = MockWorker::start().await;
    let router = Router::start("round_robin", vec![worker(&mock, "w", "colocated")]).await;
    let here = router.url.trim_start_matches("http://").to_owned();
    for path in ["/workers", "/workers/w", "/decisions", "/server_info"] {
        for (hosts, status) in [
            (vec!["evil.example"], 403),
            (vec!["localhost", "evil.example"], 403),
            (vec!["evil.example", "localhost"], 403),
            (vec![&*here], 200),
            (vec!["localhost"], 200),
        ] {
            let hosts: String = hosts
                .iter()
                .map(|host| format!("host: {host}\r\n"))
                .collect();
            let answer = raw(&router, &format!("GET {path} HTTP/1.1\r\n{hosts}\r\n")).await;
            assert!(
                answer.starts_with(&format!("HTTP/1.1 {status}")),
                "{path}: {hosts}: {answer}"
            );
        }
    }
    assert_eq!(router.get("/health").await.0, StatusCode::OK);
}

/// Begins a request of so many bytes, of which so many come.
async fn begin_upload(router: &Router, key: &str, announced: usize, sent: usize) -> TcpStream {
    let mut socket = connect(router).await;
    let head = format!(
        "POST /generate HTTP/1.1\r\nhost: r\r\nx-api-key: {key}\r\ncontent-length: {announced}\r\n\r\n"
    );
    let _ = socket.write_all(head.as_bytes()).await;
    let _ = socket.write_all(&vec![b' '; sent]).await;
    socket
}

#[tokio::test]
async fn what_a_client_announces_costs_nothing() {
    let mock = MockWorker::start().await;
    let router = Router::with(Config {
        max_held_bytes: 8 << 20,
        workers: vec![worker(&mock, "w", "colocated")],
        ..Config::default()
    })
    .await;
    let mut announced = Vec::new();
    for _ in 0..80 {
        announced.push(begin_upload(&router, "-", 60 << 20, 10).await);
    }
    tokio::time::sleep(Duration::from_millis(300)).await;
    let ids: Vec<u32> = (0..200_000).collect();
    let (status, said) = router.post("/generate", json!({"input_ids": ids})).await;
    assert_eq!(status, StatusCode::OK, "{said}");
}

#[tokio::test]
async fn one_connection_leaves_room_for_others_and_trickles_for_no_longer_than_it_may() {
    let mock = MockWorker::start().await;
    let router = Router::with(Config {
        max_held_bytes: 20_000_000,
        body_timeout_s: 1.0,
        workers: vec![worker(&mock, "w", "colocated")],
        ..Config::default()
    })
    .await;
    for (announced, sent) in [(20_000_000, 19_950_000), (15_000_000, 14_900_000)] {
        let mut socket = begin_upload(&router, "-", announced, sent).await;
        let begun = Instant::now();
        let trickles = tokio::spawn(async move {
            while socket.write_all(b" ").await.is_ok() {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            let mut answer = String::new();
            let _ = socket.read_to_string(&mut answer).await;
        });
        tokio::time::sleep(Duration::from_millis(200)).await;
        let body = json!({"input_ids": [1], "user": "x".repeat(200_000)});
        assert_eq!(router.post("/generate", body).await.0, StatusCode::OK);
        trickles.await.expect("it ends");
        assert!(
            begun.elapsed() < Duration::from_secs(12),
            "{:?}",
            begun.elapsed()
        );
    }
}

#[tokio::test]
async fn one_key_holds_its_share_and_no_more() {
    let file = std::env::temp_dir().join(format!("router-shares-{:x}", fastrand::u64(..)));
    std::fs::write(&file, "first-client\nsecond-client\n").expect("written");
    let mock = MockWorker::start().await;
    let router = Router::with(Config {
        max_held_bytes: 8 << 20,
        api_keys_file: Some(file.clone()),
        workers: vec![worker(&mock, "w", "colocated")],
        ..Config::default()
    })
    .await;
    let mut held = Vec::new();
    for _ in 0..12 {
        held.push(begin_upload(&router, "first-client", 2 << 20, 1 << 20).await);
    }
    tokio::time::sleep(Duration::from_millis(300)).await;
    let body = json!({"input_ids": [1], "user": "x".repeat(400_000)}).to_string();
    let ask = async |key: &str| {
        let headers = [("x-api-key", key)];
        router
            .send("/generate", &headers, body.clone().into_bytes())
            .await
    };
    let refused = ask("first-client").await;
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(refused.headers().contains_key("retry-after"));
    assert!(text(refused).await.contains("one client may hold"));
    assert_eq!(ask("second-client").await.status(), StatusCode::OK);
    // Keys are read again when the file changes; one that is broken changes nothing.
    std::fs::write(&file, "third-client\n").expect("written");
    let until_known = async |key: &str, status: StatusCode| {
        let begun = Instant::now();
        while ask(key).await.status() != status {
            assert!(begun.elapsed() < Duration::from_secs(20), "{key}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    until_known("third-client", StatusCode::OK).await;
    until_known("second-client", StatusCode::UNAUTHORIZED).await;
    std::fs::write(&file, "short\n").expect("written");
    tokio::time::sleep(Duration::from_secs(3)).await;
    until_known("third-client", StatusCode::OK).await;
    std::fs::remove_file(&file).expect("removed");
}

#[tokio::test]
async fn what_a_client_says_of_aborts_is_none() {
    let event =
        r#"{"type":"response.created","response":{"metadata":{"type":"abort"},"error":null}}"#;
    let delta = r#"{"type":"response.output_text.delta","delta":"t"}"#;
    let done = r#"{"type":"response.completed","response":{"metadata":{"type":"abort"}}}"#;
    let stream = [
        ("response.created", event),
        ("response.output_text.delta", delta),
        ("response.completed", done),
    ]
    .map(|(name, data)| format!("event: {name}\ndata: {data}\n\n"));
    let pieces: Vec<&'static str> = stream.map(|event| &*String::leak(event)).to_vec();
    let mock = MockWorker::start().await;
    mock.set_fault(Fault::Raw(Vec::leak(pieces), End::Properly));
    let router = Router::start("round_robin", vec![worker(&mock, "w", "colocated")]).await;
    for _ in 0..6 {
        let body = json!({"input": "x", "stream": true, "metadata": {"type": "abort"}});
        assert_eq!(router.post("/v1/responses", body).await.0, StatusCode::OK);
    }
    router
        .counts("deltaserve_requests_total{outcome=\"ok\"} 6")
        .await;
    assert!(!router.fleet.snapshot()[0].circuit_open);
    until("nothing is left", || router.fleet.is_idle()).await;
}

#[tokio::test]
async fn more_headers_than_a_hundred_are_refused_with_431() {
    let mock = MockWorker::start().await;
    let router = Router::start("unified", vec![worker(&mock, "w", "colocated")]).await;
    let body = r#"{"input_ids":[1,2,3]}"#;
    let request = |headers: usize| {
        let more: String = (0..headers).map(|i| format!("x-{i}: 1\r\n")).collect();
        let length = body.len();
        format!(
            "POST /generate HTTP/1.1\r\nhost: h\r\ncontent-length: {length}\r\nconnection: close\r\n{more}\r\n{body}"
        )
    };
    for (headers, status) in [(80, "200"), (98, "431")] {
        let answer = raw(&router, &request(headers)).await;
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status}")),
            "{headers}: {answer}"
        );
    }
}

/// One of two keys fills the queue; the other still gets a place.
async fn a_flood_leaves_places(config: Config) {
    const PLACES: usize = 8;
    let path = std::env::temp_dir().join(format!("router-keys-{:x}", fastrand::u64(..)));
    std::fs::write(&path, "key-flood-1\nkey-polite-2\n").expect("written");
    let mock = MockWorker::start().await;
    mock.set_fault(Fault::Stall);
    let router = Router::with(Config {
        workers: vec![spec(&mock, json!({"id": "w", "kv_capacity_tokens": 4_000}))],
        api_keys_file: Some(path.clone()),
        ..config
    })
    .await;
    std::fs::remove_file(&path).expect("removed");
    let ask = |key: &str, at: u32| {
        let ids: Vec<u32> = (0..3_000).map(|id| id + at * 10_000).collect();
        let body = json!({"input_ids": ids, "stream": true}).to_string();
        let key = format!("Bearer {key}");
        let router = &router;
        async move {
            let headers = [("authorization", key.as_str())];
            let answer = router.send("/generate", &headers, body.into_bytes());
            // Those that wait are not answered.
            tokio::time::timeout(Duration::from_millis(300), answer)
                .await
                .ok()
        }
    };
    let flood = futures((0..3 * PLACES as u32).map(|at| ask("key-flood-1", at)));
    let (refused, polite) = tokio::join!(flood, async {
        tokio::time::sleep(Duration::from_millis(150)).await;
        ask("key-polite-2", 99).await
    });
    let refused: Vec<_> = refused.into_iter().flatten().collect();
    assert!(refused.len() >= 2 * PLACES, "{}", refused.len());
    for answer in refused {
        assert_eq!(answer.status(), StatusCode::TOO_MANY_REQUESTS);
    }
    assert!(polite.is_none(), "it waits");
}

#[tokio::test]
async fn one_key_leaves_places_in_both_queues_to_others() {
    a_flood_leaves_places(Config {
        admission: json!({"rule": "rotate", "max_waiting": 8}),
        ..Config::default()
    })
    .await;
    a_flood_leaves_places(Config {
        max_inflight: 1,
        max_queued: 8,
        ..Config::default()
    })
    .await;
}
