//! Clients that leave before the first token, on workers that survive the abort of a queued request and
//! on those that do not.

use crate::mock::router::{Router, generate, until};
use crate::mock::{End, Fault, MockWorker};
use http_body_util::Full;
use hyper::Request;
use hyper::body::Bytes;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use router_policies::config::{Config, WorkerSpec};
use router_policies::gateway::Server;
use serde_json::{Value, json};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A worker with a host tier, for 100 tokens on the GPU.
fn spec(mock: &MockWorker, engine: &str, abort_queued: Option<bool>) -> WorkerSpec {
    let mut spec = json!({
        "url": mock.url, "id": "w", "engine": engine, "kv_capacity_tokens": 100, "host_kv_tokens": 1_000,
    });
    if let Some(abort_queued) = abort_queued {
        spec["abort_queued"] = abort_queued.into();
    }
    serde_json::from_value(spec).expect("a worker")
}

async fn before(worker: WorkerSpec) -> Router {
    Router::with(Config {
        workers: vec![worker],
        ..Config::default()
    })
    .await
}

/// Sends a request whose client leaves once `has_come`.
async fn leave_once(router: &Router, body: Value, what: &str, has_come: impl Fn() -> bool) {
    tokio::select! {
        _ = router.send("/v1/completions", &[], body.to_string().into_bytes()) => panic!("answered: {what}"),
        () = until(what, has_come) => {}
    }
}

/// The same once the worker runs it.
async fn leave_once_it_runs(router: &Router, mock: &MockWorker, body: Value) {
    leave_once(router, body, "it runs", || running(mock) == 1).await;
}

fn running(mock: &MockWorker) -> usize {
    mock.behaviour.running.load(Ordering::SeqCst)
}

fn aborted(mock: &MockWorker) -> usize {
    mock.behaviour.aborted.load(Ordering::SeqCst)
}

#[tokio::test]
async fn vllm_with_a_host_tier_keeps_a_request_until_its_first_token() {
    let mock = MockWorker::start().await;
    mock.behaviour
        .first_token_us
        .store(1_500_000, Ordering::Relaxed);
    mock.behaviour.token_us.store(10_000, Ordering::Relaxed);
    mock.behaviour.tokens.store(500, Ordering::Relaxed);
    let router = before(spec(&mock, "vllm", None)).await;
    leave_once_it_runs(&router, &mock, completion(true)).await;
    tokio::time::sleep(Duration::from_millis(150)).await;
    assert_eq!((running(&mock), aborted(&mock)), (1, 0));
    assert!(!router.fleet.is_idle(), "its room is still taken");
    until("it ended at its first token", || aborted(&mock) == 1).await;
    router.idle().await;
    assert_eq!(mock.behaviour.served.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn who_has_left_is_tried_on_no_other_worker() {
    let mocks = [MockWorker::start().await, MockWorker::start().await];
    let workers = mocks.iter().zip(["a", "b"]).map(|(mock, id)| {
        mock.set_fault(Fault::Stall);
        WorkerSpec {
            id: id.to_owned(),
            ..spec(mock, "vllm", None)
        }
    });
    let router = Router::with(Config {
        workers: workers.collect(),
        ..Config::default()
    })
    .await;
    let all = || mocks.iter().map(running).sum::<usize>();
    leave_once(&router, completion(true), "it runs", || all() == 1).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(all(), 1, "it is kept");
    // The engine dies; the other would answer nobody.
    let (its, others): (Vec<_>, Vec<_>) = mocks.into_iter().partition(|mock| running(mock) == 1);
    drop(its);
    router.idle().await;
    assert_eq!(others[0].bodies().len(), 0);
}

#[tokio::test]
async fn an_answer_in_one_piece_is_kept_whole() {
    let mock = MockWorker::start().await;
    mock.behaviour
        .first_token_us
        .store(200_000, Ordering::Relaxed);
    let router = before(spec(&mock, "vllm", None)).await;
    leave_once_it_runs(&router, &mock, completion(false)).await;
    until("it was served", || {
        mock.behaviour.served.load(Ordering::SeqCst) == 1
    })
    .await;
    router.idle().await;
    assert_eq!(aborted(&mock), 0);
}

#[tokio::test]
async fn engines_that_survive_it_are_not_kept_busy() {
    for (engine, abort_queued) in [("sglang", None), ("vllm", Some(true))] {
        let mock = MockWorker::start().await;
        mock.set_fault(Fault::Stall);
        let router = before(spec(&mock, engine, abort_queued)).await;
        leave_once_it_runs(&router, &mock, completion(true)).await;
        until("it was aborted", || aborted(&mock) == 1).await;
        router.idle().await;
    }
}

#[tokio::test]
async fn who_waits_in_the_router_leaves_at_once() {
    let mock = MockWorker::start().await;
    mock.behaviour
        .first_token_us
        .store(1_500_000, Ordering::Relaxed);
    let router = before(spec(&mock, "vllm", None)).await;
    // Each wants most of the worker's KV.
    let prompt = |first: u32| {
        let ids: Vec<u32> = (first..first + 80).collect();
        json!({"prompt": ids, "max_tokens": 4, "stream": true})
    };
    leave_once_it_runs(&router, &mock, prompt(0)).await;
    leave_once(&router, prompt(1_000), "it waits", || {
        router.fleet.waiting_turns() == 1
    })
    .await;
    until("it left the queue", || router.fleet.waiting_turns() == 0).await;
    assert_eq!(running(&mock), 1, "while the other still runs");
    router.idle().await;
    assert_eq!(mock.bodies().len(), 1, "it reached no worker");
}

#[tokio::test]
async fn a_router_that_stops_waits_for_those_whose_clients_have_left() {
    let mock = MockWorker::start().await;
    mock.behaviour
        .first_token_us
        .store(400_000, Ordering::Relaxed);
    let server = Server::bind(Config {
        port: 0,
        drain_timeout_s: 10.0,
        workers: vec![spec(&mock, "vllm", None)],
        ..Config::default()
    })
    .await
    .expect("binds");
    let url = format!("http://{}/v1/completions", server.address().expect("bound"));
    let fleet = server.fleet();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let serving = tokio::spawn(server.serve(async move {
        let _ = stopped.await;
    }));
    until("the worker is up", || fleet.snapshot()[0].healthy).await;
    let client = Client::builder(TokioExecutor::new()).build_http();
    let body = Full::<Bytes>::from(completion(false).to_string());
    let request = client.request(Request::post(url).body(body).expect("a request"));
    tokio::select! {
        _ = request => panic!("answered"),
        () = until("it runs", || running(&mock) == 1) => {}
    }
    stop.send(()).expect("it serves");
    serving.await.expect("it stops");
    let served = mock.behaviour.served.load(Ordering::SeqCst);
    assert_eq!((served, aborted(&mock)), (1, 0));
}

/// What vLLM 0.26.0 sends of `/v1/responses`: two events before it has scheduled the request, and its answer
/// 1.4 s later, for each piece takes 20 ms.
fn response() -> &'static [&'static str] {
    let announced = [
        "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"status\":\"in_progress\"}}\n\n",
        "event: response.in_progress\ndata: {\"type\":\"response.in_progress\"}\n\n",
    ];
    let answered = [
        "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"t\"}\n\n",
        "event: response.completed\ndata: {\"type\":\"response.completed\"}\n\n",
    ];
    Vec::leak([&announced[..], &[": \n\n"; 70], &answered].concat())
}

#[tokio::test]
async fn an_announcement_is_no_first_token() {
    let response = response();
    for (abort_queued, is_kept) in [(None, true), (Some(true), false)] {
        let mock = MockWorker::start().await;
        mock.set_fault(Fault::Raw(response, End::Properly));
        let router = before(spec(&mock, "vllm", abort_queued)).await;
        let body = json!({"input": "a", "stream": true}).to_string();
        let answer = tokio::time::timeout(
            Duration::from_millis(600),
            router.send("/v1/responses", &[], body.clone().into_bytes()),
        )
        .await;
        assert!(answer.is_err(), "its head comes with its first token");
        drop(answer);
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(router.fleet.is_idle(), !is_kept);
        router.idle().await;
        // Who stays gets all of it.
        let whole = router.send("/v1/responses", &[], body.into_bytes()).await;
        let whole = crate::mock::router::text(whole).await;
        assert_eq!(whole, response.concat());
        router.idle().await;
    }
}

#[tokio::test]
async fn requests_are_served_as_elsewhere() {
    let mock = MockWorker::start().await;
    let router = before(spec(&mock, "vllm", None)).await;
    for stream in [false, true] {
        let (status, body) = router.post("/v1/completions", completion(stream)).await;
        assert_eq!(status, 200, "{body}");
        assert_eq!(body.contains("[DONE]"), stream);
    }
    let (status, _) = router.post("/generate", generate(false)).await;
    assert_eq!(status, 200);
    mock.set_fault(Fault::Status(500));
    let (status, body) = router.post("/v1/completions", completion(true)).await;
    assert_eq!(status, 500, "{body}");
    router.idle().await;
}

fn completion(stream: bool) -> Value {
    json!({"prompt": [1, 2, 3], "max_tokens": 4, "stream": stream})
}
