//! Everything at once: workers that hang, die, come back, are slow, break streams and lie; clients that leave,
//! stall, flood and send nonsense. Nothing is lost, nothing runs twice, and nothing is left in the books.
//!
//! ROUTER_CHAOS_SECONDS (60) says for how long; where it is set, memory is looked at too.

use crate::mock::router::{Router, text, until};
use crate::mock::{Clock, End, Fault, MockWorker};
use http_body_util::BodyExt;
use hyper::StatusCode;
use router_policies::config::{Config, WorkerSpec};
use serde_json::{Value, json};
use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::io::AsyncWriteExt;

const CLIENTS: usize = 12;
const SESSIONS: usize = 24;
/// Longer than any worker hangs and any request may wait.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Default)]
struct Seen {
    whole: AtomicUsize,
    refused: AtomicUsize,
    failed: AtomicUsize,
    left: AtomicUsize,
}

fn spec(url: &str, at: usize) -> WorkerSpec {
    serde_json::from_value(json!({
        "url": url, "id": format!("w{at}"), "kv_capacity_tokens": 20_000,
    }))
    .expect("a worker")
}

/// What goes wrong with a worker, one thing after the other.
async fn trouble(mut mock: MockWorker, stop: Arc<AtomicBool>) -> MockWorker {
    let millis = |range: std::ops::Range<u64>| Duration::from_millis(fastrand::u64(range));
    let faults = [
        Fault::Status(500),
        Fault::Status(503),
        Fault::CloseAtOnce,
        Fault::CloseAfter(2),
        Fault::TruncateAfter(1),
        Fault::StallAfter(1),
        Fault::Stall,
        Fault::Abort(500),
        Fault::Raw(&["data: {\"text\":\"a\"}\n\n", "data: {\"te"], End::Broken),
        Fault::Raw(
            &["data: {\"error\":{\"message\":\"m\",\"code\":500}}\n\n"],
            End::Properly,
        ),
    ];
    while !stop.load(Ordering::Relaxed) {
        tokio::time::sleep(millis(200..1_500)).await;
        let behaviour = Arc::clone(&mock.behaviour);
        match fastrand::u8(..8) {
            0 => {
                let port = mock.die();
                tokio::time::sleep(millis(50..1_500)).await;
                mock = MockWorker::start_on(port).await;
                calm(&mock);
            }
            1 => {
                behaviour.hangs.store(true, Ordering::SeqCst);
                tokio::time::sleep(millis(500..4_000)).await;
                behaviour.hangs.store(false, Ordering::SeqCst);
            }
            2 => {
                *behaviour.clock.lock() = Clock::StandsStill;
                mock.set_fault(Fault::Stall);
                tokio::time::sleep(millis(500..4_000)).await;
            }
            3 => {
                behaviour.first_token_us.store(2_000_000, Ordering::SeqCst);
                tokio::time::sleep(millis(500..3_000)).await;
            }
            4 => {
                behaviour.healthy.store(false, Ordering::SeqCst);
                tokio::time::sleep(millis(100..2_000)).await;
            }
            _ => {
                mock.set_fault(faults[fastrand::usize(..faults.len())]);
                tokio::time::sleep(millis(50..800)).await;
            }
        }
        calm(&mock);
    }
    mock
}

fn calm(mock: &MockWorker) {
    let behaviour = &mock.behaviour;
    mock.set_fault(Fault::None);
    *behaviour.clock.lock() = Clock::GoesOn;
    behaviour.keep_bodies.store(false, Ordering::SeqCst);
    behaviour.reports_load.store(true, Ordering::SeqCst);
    behaviour.healthy.store(true, Ordering::SeqCst);
    behaviour.first_token_us.store(20_000, Ordering::SeqCst);
    behaviour.token_us.store(5_000, Ordering::SeqCst);
    behaviour.tokens.store(10, Ordering::SeqCst);
}

/// One client's requests, each with an id that no other has.
async fn client(router: Arc<Router>, number: usize, stop: Arc<AtomicBool>, seen: Arc<Seen>) {
    let mut request = 0;
    while !stop.load(Ordering::Relaxed) {
        request += 1;
        let id = format!("c{number}-{request}");
        let session = fastrand::usize(..SESSIONS);
        let tokens = fastrand::u32(200..4_000);
        let ids: Vec<u32> = (0..tokens).map(|at| at + 10_000 * session as u32).collect();
        let streams = fastrand::bool();
        let (path, body) = match fastrand::u8(..8) {
            0 => (
                "/v1/chat/completions",
                json!({"messages": [{"role": "user", "content": id}], "stream": streams}),
            ),
            1 => (
                "/v1/completions",
                json!({"prompt": ids, "stream": streams, "max_tokens": 10}),
            ),
            2 => (
                "/generate",
                json!({"input_ids": ids, "stream": streams, "rid": "the same"}),
            ),
            _ => ("/generate", json!({"input_ids": ids, "stream": streams})),
        };
        let body = match fastrand::u8(..20) {
            0 => b"{\"input_ids\":[1,".to_vec(),
            _ => body.to_string().into_bytes(),
        };
        if fastrand::u8(..20) == 0 {
            stall(&router).await;
            continue;
        }
        let session = format!("s{session}");
        let mut headers = vec![
            ("x-request-id", id.as_str()),
            ("x-session-id", session.as_str()),
        ];
        if fastrand::u8(..10) == 0 {
            headers.push(("x-session-end", "1"));
        }
        let leaves = (fastrand::u8(..5) == 0).then(|| Duration::from_millis(fastrand::u64(..400)));
        let asking = ask(&router, path, &headers, body, &seen);
        match leaves {
            Some(after) => {
                if tokio::time::timeout(after, asking).await.is_err() {
                    seen.left.fetch_add(1, Ordering::Relaxed);
                }
            }
            None => tokio::time::timeout(PATIENCE, asking)
                .await
                .unwrap_or_else(|_| panic!("{id} is lost: no end after {PATIENCE:?}")),
        }
        tokio::time::sleep(Duration::from_millis(fastrand::u64(..60))).await;
    }
}

/// A request whose answer is read to its end, which it must have.
async fn ask(router: &Router, path: &str, headers: &[(&str, &str)], body: Vec<u8>, seen: &Seen) {
    let answer = router.send(path, headers, body).await;
    let status = answer.status();
    let is_stream = answer
        .headers()
        .get("content-type")
        .is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
    let said = answer
        .into_body()
        .collect()
        .await
        .expect("an end")
        .to_bytes();
    let said = String::from_utf8_lossy(&said);
    let counter = if !status.is_success() {
        &seen.refused
    } else if !is_stream || said.ends_with("data: [DONE]\n\n") && !said.contains("\"error\"") {
        &seen.whole
    } else {
        assert!(
            said.contains("error") || said.contains("abort"),
            "no end: {said:?}"
        );
        &seen.failed
    };
    counter.fetch_add(1, Ordering::Relaxed);
}

/// Announces much and sends little, and leaves.
async fn stall(router: &Router) {
    let address = router.url.trim_start_matches("http://");
    if let Ok(mut socket) = tokio::net::TcpStream::connect(address).await {
        let head = "POST /generate HTTP/1.1\r\nhost: r\r\ncontent-length: 60000000\r\n\r\n{";
        let _ = socket.write_all(head.as_bytes()).await;
        tokio::time::sleep(Duration::from_millis(fastrand::u64(..300))).await;
    }
}

/// MB of memory that this process has.
fn resident_mb() -> f64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = text
        .split(' ')
        .nth(1)
        .and_then(|pages| pages.parse::<f64>().ok());
    pages.unwrap_or_default() * 4096.0 / 1e6
}

/// Every decision of the log has one end, and no request was answered twice.
fn check_log(path: &Path) -> usize {
    let text = std::fs::read_to_string(path).expect("a log");
    let mut request_of: HashMap<String, String> = HashMap::new();
    let mut ended = HashSet::new();
    let mut served = HashSet::new();
    let part = |line: &Value, name: &str| line[name].as_str().unwrap_or_default().to_owned();
    for line in text.lines() {
        let line: Value = serde_json::from_str(line).expect("JSON");
        let decision = part(&line, "decision_id");
        match line["event"].as_str() {
            Some("decision") => {
                let before = request_of.insert(decision, part(&line, "request_id"));
                assert!(before.is_none(), "decided twice: {line}");
            }
            Some("finish") => {
                assert!(ended.insert(decision.clone()), "ended twice: {line}");
                let request = &request_of[&decision];
                if line["outcome"] == "ok" {
                    assert!(served.insert(request.clone()), "ran twice: {request}");
                }
            }
            _ => {}
        }
    }
    assert_eq!(ended.len(), request_of.len(), "decisions without an end");
    request_of.len()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_doubled_or_kept_whatever_goes_wrong_at_once() {
    let asked = std::env::var("ROUTER_CHAOS_SECONDS").ok();
    let asked: Option<u64> = asked.and_then(|text| text.parse().ok());
    let seconds = asked.unwrap_or(60);
    let log = std::env::temp_dir().join(format!("router-chaos-{:x}.jsonl", fastrand::u64(..)));
    let mut mocks = Vec::new();
    for _ in 0..4 {
        let mock = MockWorker::start().await;
        calm(&mock);
        mocks.push(mock);
    }
    let workers = mocks
        .iter()
        .enumerate()
        .map(|(at, mock)| spec(&mock.url, at));
    let router = Router::with(Config {
        workers: workers.collect(),
        decision_log: Some(log.clone()),
        silence_timeout_s: 1.0,
        load_interval_s: 0.2,
        health_interval_s: 0.3,
        body_timeout_s: 2.0,
        request_timeout_s: 30.0,
        max_held_bytes: 16 << 20,
        ..Config::default()
    })
    .await;
    let (router, stop, seen) = (
        Arc::new(router),
        Arc::new(AtomicBool::new(false)),
        Arc::new(Seen::default()),
    );
    let troubles: Vec<_> = mocks
        .into_iter()
        .map(|mock| tokio::spawn(trouble(mock, Arc::clone(&stop))))
        .collect();
    let clients: Vec<_> = (0..CLIENTS)
        .map(|number| {
            let (router, stop, seen) = (Arc::clone(&router), Arc::clone(&stop), Arc::clone(&seen));
            tokio::spawn(client(router, number, stop, seen))
        })
        .collect();
    let begun = Instant::now();
    let third = Duration::from_secs(seconds) / 3;
    tokio::time::sleep(third).await;
    let before_mb = resident_mb();
    tokio::time::sleep(Duration::from_secs(seconds).saturating_sub(begun.elapsed())).await;
    let after_mb = resident_mb();
    stop.store(true, Ordering::Relaxed);
    let mut calmed = Vec::new();
    for trouble in troubles {
        calmed.push(trouble.await.expect("no panic"));
    }
    for client in clients {
        client.await.expect("no request is lost");
    }
    router.idle().await;
    assert_eq!(router.fleet.waiting_turns(), 0);
    for worker in router.fleet.snapshot() {
        let load = worker.load;
        assert_eq!(
            (
                load.requests,
                load.prefilling,
                load.decoding,
                load.ongoing_tokens,
                load.pending_prefill_tokens
            ),
            (0, 0, 0, 0, 0),
            "{}",
            worker.spec.id
        );
    }
    until("all are up and trusted", || {
        let workers = router.fleet.snapshot();
        workers
            .iter()
            .all(|worker| worker.healthy && !worker.suspect)
    })
    .await;
    let body = json!({"input_ids": [1, 2], "stream": true})
        .to_string()
        .into_bytes();
    let answer = router.send("/generate", &[], body).await;
    assert_eq!(answer.status(), StatusCode::OK);
    assert!(text(answer).await.ends_with("[DONE]\n\n"));
    router.idle().await;
    // The log is written behind the requests' backs.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let decisions = check_log(&log);
    let whole = seen.whole.load(Ordering::Relaxed);
    assert!(
        whole > 20 * seconds as usize / 4,
        "{whole} whole answers of {decisions} decisions"
    );
    assert!(seen.failed.load(Ordering::Relaxed) > 0 && seen.left.load(Ordering::Relaxed) > 0);
    // Where it is not asked for by itself, other tests run in this process too.
    let is_flat = asked.is_none() || after_mb < before_mb + 30.0;
    assert!(is_flat, "{before_mb:.0} MB, then {after_mb:.0} MB");
    drop(calmed);
    std::fs::remove_file(&log).expect("removed");
}
