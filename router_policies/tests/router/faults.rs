//! Seeded faults: whatever workers and clients do, every request ends in exactly one way and nothing
//! is left over.
//!
//! `ROUTER_FAULT_SECONDS` sets how long it runs (default 5), `ROUTER_FAULT_SEED` the seed.

use crate::mock::router::until;
use crate::mock::{Fault, MockWorker};
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper::body::Bytes;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use router_policies::config::{Config, WorkerSpec};
use router_policies::gateway::Server;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name)
        .ok()
        .and_then(|value| value.parse().ok())
        .unwrap_or(default)
}

fn random_fault(random: &mut fastrand::Rng) -> Fault {
    match random.u32(0..16) {
        0 => Fault::Status(500),
        1 => Fault::Status(503),
        2 => Fault::Status(400),
        3 => Fault::CloseAtOnce,
        4 => Fault::CloseAfter(random.usize(0..4)),
        5 => Fault::TruncateAfter(random.usize(0..4)),
        6 => Fault::StallAfter(random.usize(0..4)),
        7 => Fault::Stall,
        8 => Fault::Abort([400, 500, 503][random.usize(0..3)]),
        9 => Fault::Refuse([400, 500][random.usize(0..2)]),
        _ => Fault::None,
    }
}

/// Connections to these ports that somebody holds open. Not the process's descriptors: other tests
/// run in it.
fn open_connections(ports: &[u16]) -> usize {
    let is_open = |line: &str| {
        let mut fields = line.split_whitespace().skip(1);
        let (local, _, state) = (fields.next()?, fields.next()?, fields.next()?);
        let port = u16::from_str_radix(local.rsplit(':').next()?, 16).ok()?;
        // 06 waits for late packets, which nobody holds; 0A listens.
        Some(ports.contains(&port) && state != "06" && state != "0A")
    };
    let table = std::fs::read_to_string("/proc/net/tcp").expect("the kernel's connections");
    table
        .lines()
        .filter(|line| is_open(line) == Some(true))
        .count()
}

fn port_of(url: &str) -> u16 {
    let port = url.rsplit(':').next().map(str::parse);
    port.expect("a port").expect("a number")
}

#[derive(Default)]
struct Ends {
    complete: AtomicUsize,
    error_event: AtomicUsize,
    refused: AtomicUsize,
    left: AtomicUsize,
    /// Clients that read nothing, or sent half of their request, until the router had enough.
    cut_off: AtomicUsize,
}

/// A client that asks for more than sockets hold and reads none of it, or that never sends the rest of
/// its request. It waits for ever: the router must end it.
async fn stubborn_request(url: &str, reads: bool) {
    let mut socket = TcpStream::connect(url.trim_start_matches("http://"))
        .await
        .expect("a connection");
    let (body, announced) = if reads {
        (r#"{"input_ids": [1, 2"#, 1000)
    } else {
        let body = r#"{"input_ids": [1, 2], "user": "flood", "stream": true}"#;
        (body, body.len())
    };
    let head = format!(
        "POST /generate HTTP/1.1\r\nhost: r\r\nconnection: close\r\ncontent-length: {announced}\r\n\r\n"
    );
    let _ = socket.write_all((head + body).as_bytes()).await;
    let mut answer = Vec::new();
    if reads {
        let _ = socket.read_to_end(&mut answer).await;
        assert!(answer.starts_with(b"HTTP/1.1 408"), "it is told why");
        return;
    }
    // Writing, not reading, shows when the router has closed its end.
    while socket.write_all(b"\r\n").await.is_ok() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// One client request; every path through it is one way to end.
async fn one_request(url: String, seed: u64, ends: Arc<Ends>) {
    let mut random = fastrand::Rng::with_seed(seed);
    if random.u32(0..30) == 0 {
        stubborn_request(&url, random.bool()).await;
        ends.cut_off.fetch_add(1, Ordering::SeqCst);
        return;
    }
    let stream = random.bool();
    let body = match random.u32(0..20) {
        0 => b"{\"input_ids\": [1, 2".to_vec(),
        1 => random_bytes(&mut random),
        2 => json!({"text": "x".repeat(300_000)})
            .to_string()
            .into_bytes(),
        _ => json!({
            "input_ids": (0..random.u32(1..400)).collect::<Vec<_>>(),
            "stream": stream, "sampling_params": {"max_new_tokens": 4},
        })
        .to_string()
        .into_bytes(),
    };
    let client: Client<_, Full<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let request = Request::post(format!("{url}/generate"))
        .header("x-session-id", format!("s{}", random.u32(0..20)))
        .body(Full::from(body))
        .expect("a request");
    let leaves_after = Duration::from_millis(match random.u32(0..5) {
        0 => random.u64(0..30),
        _ => 60_000,
    });
    let reads_slowly = random.u32(0..10) == 0;
    let exchange = async {
        let response = client
            .request(request)
            .await
            .expect("the router always answers");
        let status = response.status();
        let mut body = response.into_body();
        let mut text = Vec::new();
        while let Some(frame) = body.frame().await {
            if let Ok(data) = frame
                .expect("the router always ends its answers")
                .into_data()
            {
                text.extend_from_slice(&data);
            }
            if reads_slowly {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        (status, text)
    };
    let end = match tokio::time::timeout(leaves_after, exchange).await {
        Err(_) => &ends.left,
        Ok((status, text)) if status.is_success() => {
            let is_event = text.starts_with(b"data: ");
            if !is_event || text.ends_with(b"data: [DONE]\n\n") {
                &ends.complete
            } else {
                let last = text.trim_ascii_end().rsplit(|&byte| byte == b'\n').next();
                let event: Value = serde_json::from_slice(&last.expect("a line")[6..])
                    .expect("a broken stream ends with an error event");
                assert!(event["error"]["message"].is_string());
                &ends.error_event
            }
        }
        Ok((_, text)) => {
            let error: Value = serde_json::from_slice(&text).expect("errors are JSON");
            // SGLang's OpenAI routes have no object around it.
            let message = error["error"].get("message").or(error.get("message"));
            assert!(message.is_some_and(Value::is_string), "{error}");
            &ends.refused
        }
    };
    end.fetch_add(1, Ordering::SeqCst);
}

fn random_bytes(random: &mut fastrand::Rng) -> Vec<u8> {
    (0..random.usize(0..200)).map(|_| random.u8(..)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn seeded_faults_leave_nothing_behind() {
    let seconds = setting("ROUTER_FAULT_SECONDS", 5);
    let seed = setting("ROUTER_FAULT_SEED", 20_260_522);
    let mut random = fastrand::Rng::with_seed(seed);
    let roles = [
        "prefill",
        "prefill",
        "elastic",
        "elastic",
        "decode",
        "colocated",
    ];
    let mut mocks = Vec::new();
    for _ in roles {
        mocks.push(MockWorker::start().await);
        mocks
            .last()
            .expect("one")
            .behaviour
            .keep_bodies
            .store(false, Ordering::Relaxed);
    }
    let workers: Vec<WorkerSpec> = mocks
        .iter()
        .zip(roles)
        .enumerate()
        .map(|(i, (mock, role))| {
            serde_json::from_value(json!({
                "id": format!("w{i}"), "url": mock.url, "role": role, "bootstrap_port": 1,
            }))
            .expect("a worker")
        })
        .collect();
    let folder = std::env::temp_dir().join(format!("router-faults-{:x}", fastrand::u64(..)));
    std::fs::create_dir_all(&folder).expect("a folder");
    let log = folder.join("decisions.jsonl");
    let config = Config {
        port: 0,
        policy: "elastic".to_owned(),
        decision_log: Some(log.clone()),
        workers,
        max_body_bytes: 200_000,
        request_timeout_s: 1.0,
        health_interval_s: 0.1,
        load_interval_s: 0.1,
        max_inflight: 32,
        max_queued: 16,
        queue_timeout_s: 0.5,
        drain_timeout_s: 2.0,
        ..Config::default()
    };
    let server = Server::bind(config).await.expect("binds");
    let url = format!("http://{}", server.address().expect("bound"));
    let fleet = server.fleet();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let serving = tokio::spawn(server.serve(async move {
        let _ = stopped.await;
    }));
    until("it is ready", || fleet.is_ready()).await;
    let mut ports: Vec<u16> = mocks.iter().map(|mock| port_of(&mock.url)).collect();
    ports.push(port_of(&url));
    let open_before = open_connections(&ports);
    let ends = Arc::new(Ends::default());
    let mut clients = tokio::task::JoinSet::new();
    let mut sent = 0;
    let end = Instant::now() + Duration::from_secs(seconds);
    while Instant::now() < end {
        let victim = random.usize(0..mocks.len());
        match random.u32(0..60) {
            0 => {
                // Death, and a restart on the same address.
                let port = mocks.remove(victim).die();
                tokio::time::sleep(Duration::from_millis(random.u64(0..50))).await;
                mocks.insert(victim, MockWorker::start_on(port).await);
                mocks[victim]
                    .behaviour
                    .keep_bodies
                    .store(false, Ordering::Relaxed);
            }
            1..10 => mocks[victim].set_fault(random_fault(&mut random)),
            10 => {
                let healthy = random.bool();
                mocks[victim]
                    .behaviour
                    .healthy
                    .store(healthy, Ordering::SeqCst);
            }
            _ => {}
        }
        clients.spawn(one_request(url.clone(), random.u64(..), Arc::clone(&ends)));
        sent += 1;
        while clients.len() > 64 {
            clients
                .join_next()
                .await
                .expect("some run")
                .expect("no client panics");
        }
        tokio::time::sleep(Duration::from_millis(random.u64(0..4))).await;
    }
    while let Some(done) = clients.join_next().await {
        done.expect("no client panics");
    }
    for mock in &mocks {
        mock.set_fault(Fault::None);
    }
    until("no reservation is left", || fleet.is_idle()).await;
    // Idle connections to workers are closed after some seconds.
    until("no connection is left", || {
        open_connections(&ports) <= open_before + 8
    })
    .await;
    let counted = |end: &AtomicUsize| end.load(Ordering::SeqCst);
    let total = counted(&ends.complete)
        + counted(&ends.error_event)
        + counted(&ends.refused)
        + counted(&ends.left)
        + counted(&ends.cut_off);
    assert_eq!(
        total, sent,
        "every request ends in exactly one way, seed {seed}"
    );
    assert!(counted(&ends.complete) > 0 && counted(&ends.left) > 0 && counted(&ends.refused) > 0);
    assert!(counted(&ends.cut_off) > 0);
    stop.send(()).expect("it serves");
    serving.await.expect("no panic");
    drop(fleet);
    let count = || {
        let mut finishes: HashMap<String, usize> = HashMap::new();
        let mut decisions = 0;
        let lines = std::fs::read_to_string(&log).expect("the log");
        for line in lines.lines() {
            let event: Value = serde_json::from_str(line).expect("JSON");
            match event["event"].as_str().expect("a kind") {
                "decision" => decisions += 1,
                "finish" => {
                    let id = event["decision_id"].as_str().expect("an id").to_owned();
                    *finishes.entry(id).or_default() += 1;
                }
                // What admission did.
                kind => assert!(matches!(kind, "wait" | "wait_end" | "give_up"), "{event}"),
            }
        }
        (finishes, decisions)
    };
    // The log is written beside the requests.
    until("every decision finishes", || {
        let (finishes, decisions) = count();
        finishes.len() == decisions
    })
    .await;
    let (finishes, decisions) = count();
    assert!(finishes.values().all(|&count| count == 1), "once");
    println!(
        "{sent} requests, {decisions} decisions: {} complete, {} error events, {} refused, {} left, {} cut off",
        counted(&ends.complete),
        counted(&ends.error_event),
        counted(&ends.refused),
        counted(&ends.left),
        counted(&ends.cut_off)
    );
    std::fs::remove_dir_all(&folder).expect("removed");
}
