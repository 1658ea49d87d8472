//! Requests that wait for room, as clients and workers see it.

use crate::mock::router::until;
use crate::mock::{Fault, MockWorker};
use decision::fleet::Fleet;
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::{Request, Response, StatusCode};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use router_policies::config::Config;
use router_policies::gateway::Server;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::Ordering;

struct Router {
    url: String,
    fleet: Arc<Fleet>,
    client: Client<HttpConnector, Full<Bytes>>,
    task: tokio::task::JoinHandle<()>,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
}

impl Drop for Router {
    fn drop(&mut self) {
        self.task.abort();
    }
}

type Answer = Response<hyper::body::Incoming>;

impl Router {
    /// Before workers of 10,000 KV tokens.
    async fn start(workers: &[&MockWorker], admission: Value) -> Self {
        Self::with(Config::default(), workers, admission).await
    }

    async fn with(config: Config, workers: &[&MockWorker], admission: Value) -> Self {
        let workers = workers.iter().enumerate().map(|(i, mock)| {
            let spec =
                json!({"url": mock.url, "id": format!("w{i}"), "kv_capacity_tokens": 10_000});
            serde_json::from_value(spec).expect("a worker")
        });
        let config = Config {
            port: 0,
            drain_timeout_s: 1.0,
            workers: workers.collect(),
            admission,
            max_inflight: 2,
            ..config
        };
        let server = Server::bind(config).await.expect("binds");
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let router = Self {
            url: format!("http://{}", server.address().expect("bound")),
            fleet: server.fleet(),
            client: Client::builder(TokioExecutor::new()).build_http(),
            task: tokio::spawn(server.serve(async {
                let _ = stopped.await;
            })),
            stop: Some(stop),
        };
        until("all workers are up", || {
            router.fleet.snapshot().iter().all(|w| w.healthy)
        })
        .await;
        router
    }

    /// Sends a prompt of `tokens` tokens; the answer's head, or nothing if the client gives up.
    fn send(
        &self,
        session: u32,
        tokens: u32,
        headers: &[(&str, &str)],
    ) -> tokio::task::JoinHandle<Answer> {
        let ids: Vec<u32> = (0..tokens).map(|i| session * 100_000 + i).collect();
        let body =
            json!({"input_ids": ids, "sampling_params": {"max_new_tokens": 4}, "stream": true});
        let mut request = Request::post(format!("{}/generate", self.url))
            .header("x-session-id", format!("s{session}"));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let body = Full::from(body.to_string());
        let request = request.body(body).expect("a request");
        let answer = self.client.request(request);
        tokio::spawn(async move { answer.await.expect("an answer") })
    }

    async fn get(&self, path: &str) -> String {
        let request = Request::get(format!("{}{path}", self.url));
        let request = request.body(Full::default()).expect("a request");
        text(self.client.request(request).await.expect("an answer")).await
    }

    async fn waiting(&self, turns: usize) {
        until("as many wait", || self.fleet.waiting_turns() == turns).await;
    }
}

async fn runs_one(mock: &MockWorker) {
    until("it runs", || {
        mock.behaviour.running.load(Ordering::SeqCst) == 1
    })
    .await;
}

async fn text(answer: Answer) -> String {
    let bytes = answer.into_body().collect().await.expect("a whole answer");
    String::from_utf8(bytes.to_bytes().to_vec()).expect("UTF-8")
}

#[tokio::test]
async fn a_request_that_waits_is_let_in_when_another_ends_and_hints_stay_here() {
    let mock = MockWorker::start().await;
    mock.behaviour
        .first_token_us
        .store(300_000, Ordering::Relaxed);
    let router = Router::start(&[&mock], json!({})).await;
    let ends = [
        ("x-session-end", "1"),
        ("x-session-idle-s", "60"),
        ("x-parent-session", "p"),
        ("x-session-parent", "p"),
        ("x-mine", "kept"),
    ];
    let first = router.send(1, 8_000, &ends);
    runs_one(&mock).await;
    // More than may run at once: those that wait take nothing from those that could.
    let others: Vec<_> = (2..6)
        .map(|session| router.send(session, 8_000, &ends))
        .collect();
    router.waiting(4).await;
    assert_eq!(mock.behaviour.running.load(Ordering::SeqCst), 1);
    assert!(
        router
            .get("/metrics")
            .await
            .contains("deltaserve_waiting_turns 4")
    );
    let small = router.send(9, 300, &[]);
    assert_eq!(
        small.await.expect("sent").status(),
        StatusCode::OK,
        "it fits beside"
    );
    for answer in [first].into_iter().chain(others) {
        let answer = answer.await.expect("sent");
        assert_eq!(answer.status(), StatusCode::OK);
        text(answer).await;
    }
    until("nothing is left", || router.fleet.is_idle()).await;
    for headers in mock.behaviour.headers.lock().iter() {
        for hint in &ends[..4] {
            assert!(!headers.contains_key(hint.0), "{}", hint.0);
        }
    }
    assert!(mock.behaviour.headers.lock()[0].contains_key("x-mine"));
    let decisions = router.get("/decisions").await;
    let decisions: Value = serde_json::from_str(&decisions).expect("JSON");
    let waited = decisions["decisions"].as_array().expect("a list").iter();
    let waited = waited.filter(|d| d["admission"]["waited_s"].as_f64() > Some(0.0));
    // The small one too, for a moment: who comes while others wait is looked at in their order.
    assert_eq!(waited.count(), 5);
    let metrics = router.get("/metrics").await;
    for expected in [
        "deltaserve_wait_seconds_count{end=\"let_in\"} 5",
        "deltaserve_admissions_total{state=\"admitted\"} 6",
        "deltaserve_given_up_total{reason=\"ended\"} 5",
        "deltaserve_waiting_turns 0",
    ] {
        assert!(metrics.contains(expected), "{expected}\n{metrics}");
    }
    let workers: Value = serde_json::from_str(&router.get("/workers").await).expect("JSON");
    let book = &workers["workers"][0]["state"]["admission"];
    assert_eq!(book["budget_tokens"], 9_500);
    assert_eq!(
        book["sessions"], 1,
        "the small one did not say that it ended"
    );
}

#[tokio::test]
async fn a_client_that_leaves_frees_its_place_in_the_queue() {
    let mock = MockWorker::start().await;
    mock.set_fault(Fault::Stall);
    let router = Router::start(&[&mock], Value::Null).await;
    let first = router.send(1, 8_000, &[]);
    runs_one(&mock).await;
    let second = router.send(2, 8_000, &[]);
    router.waiting(1).await;
    let workers: Value = serde_json::from_str(&router.get("/workers").await).expect("JSON");
    assert_eq!(workers["waiting"], 1);
    assert_eq!(workers["workers"][0]["state"]["admission"]["waiting"], 1);
    let shown: Value = serde_json::from_str(&router.get("/sessions").await).expect("JSON");
    let shown = shown["sessions"].as_array().expect("a list");
    let words = |at: usize| {
        (
            shown[at]["session_id"].as_str(),
            shown[at]["state"].as_str(),
        )
    };
    assert_eq!(words(0), (Some("s2"), Some("waiting")));
    assert_eq!(
        (&shown[0]["position"], &shown[0]["reason"]),
        (&json!(1), &json!("sessions_limit"))
    );
    assert_eq!(words(1), (Some("s1"), Some("running")));
    assert_eq!(shown[1]["worker"], "w0");
    second.abort();
    router.waiting(0).await;
    let metrics = router.get("/metrics").await;
    assert!(metrics.contains("deltaserve_wait_seconds_count{end=\"left\"} 1"));
    let one: Value = serde_json::from_str(&router.get("/sessions/s1").await).expect("JSON");
    assert_eq!(one["now"][0]["state"], "running");
    assert_eq!(one["turns"][0]["input_tokens"], 8_000);
    assert!(one["turns"][0]["ended"].is_null());
    first.abort();
    until("nothing is left", || router.fleet.is_idle()).await;
}

#[tokio::test]
async fn the_queue_is_bounded_and_says_when_to_come_back() {
    let mock = MockWorker::start().await;
    mock.set_fault(Fault::Stall);
    let limits = json!({"max_waiting": 1, "max_wait_s": 0.5});
    let router = Router::start(&[&mock], limits).await;
    let first = router.send(1, 8_000, &[]);
    runs_one(&mock).await;
    let second = router.send(2, 8_000, &[]);
    router.waiting(1).await;
    let third = router.send(3, 8_000, &[]).await.expect("sent");
    assert_eq!(third.status(), StatusCode::TOO_MANY_REQUESTS);
    let second = second.await.expect("sent");
    assert_eq!(second.status(), StatusCode::SERVICE_UNAVAILABLE);
    for refused in [third, second] {
        let seconds = refused.headers()["retry-after"].to_str().expect("text");
        assert!(seconds.parse::<u64>().expect("a number") >= 1);
        assert!(text(refused).await.contains("admission.max_wait"));
    }
    first.abort();
    until("nothing is left", || router.fleet.is_idle()).await;
}

#[tokio::test]
async fn a_router_that_stops_tells_those_that_wait_and_lets_those_that_run_end() {
    let mock = MockWorker::start().await;
    mock.behaviour
        .first_token_us
        .store(600_000, Ordering::Relaxed);
    let mut router = Router::start(&[&mock], Value::Null).await;
    let first = router.send(1, 8_000, &[]);
    runs_one(&mock).await;
    let waiting = router.send(2, 8_000, &[]);
    router.waiting(1).await;
    router.stop.take().expect("once").send(()).expect("it runs");
    let refused = waiting.await.expect("sent");
    assert_eq!(
        mock.behaviour.running.load(Ordering::SeqCst),
        1,
        "it did not wait for the other"
    );
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    let again_s = refused.headers()["retry-after"].to_str().expect("text");
    assert!((1..=5).contains(&again_s.parse::<u32>().expect("seconds")));
    assert!(text(refused).await.contains("shutting_down"));
    let first = first.await.expect("sent");
    assert_eq!(first.status(), StatusCode::OK);
    assert!(text(first).await.contains("[DONE]"));
    until("it has stopped", || router.task.is_finished()).await;
    assert!(router.fleet.is_idle());
}

#[tokio::test]
async fn a_request_whose_worker_dies_is_served_by_another() {
    let (dying, other) = (MockWorker::start().await, MockWorker::start().await);
    let router = Router::start(&[&dying, &other], Value::Null).await;
    // Wherever it went first, it has its place there.
    text(router.send(1, 8_000, &[]).await.expect("sent")).await;
    let home = router.fleet.sink().recent(1)[0].reserved[0]
        .worker
        .id
        .clone();
    let (home, away) = match home.as_str() {
        "w0" => (&dying, "w1"),
        _ => (&other, "w0"),
    };
    home.set_fault(Fault::CloseAtOnce);
    let answer = router.send(1, 8_500, &[]).await.expect("sent");
    assert_eq!(answer.status(), StatusCode::OK);
    assert_eq!(answer.headers()["x-deltaserve-worker"], away);
    text(answer).await;
    until("nothing is left", || router.fleet.is_idle()).await;
    let places: Vec<_> = router
        .fleet
        .snapshot()
        .iter()
        .map(|w| w.admission.sessions)
        .collect();
    assert_eq!(
        places.iter().sum::<usize>(),
        1,
        "one place, where it is now"
    );
}

#[tokio::test]
async fn a_request_that_has_failed_is_told_so_once_no_worker_is_left_that_it_could_wait_for() {
    let (failing, other) = (MockWorker::start().await, MockWorker::start().await);
    let config = Config {
        health_interval_s: 600.0,
        load_interval_s: 0.0,
        ..Config::default()
    };
    let router = Router::with(config, &[&failing, &other], json!({})).await;
    failing.set_fault(Fault::Status(500));
    other.set_fault(Fault::Stall);
    // Wherever it goes first, it stays where nothing is answered.
    let long = router.send(1, 8_000, &[]);
    runs_one(&other).await;
    let failed = router.send(2, 8_000, &[]);
    router.waiting(1).await;
    router.fleet.report_health("w1", false);
    until("it is told", || failed.is_finished()).await;
    let failed = failed.await.expect("sent");
    let while_none_is_up = router.send(3, 8_000, &[]).await.expect("sent");
    assert_eq!(failed.status(), while_none_is_up.status());
    assert_eq!(text(failed).await, text(while_none_is_up).await);
    long.abort();
    until("nothing is left", || router.fleet.is_idle()).await;
}

/// A conversation of about 5,000 tokens.
fn long_text() -> String {
    "word ".repeat(4_000)
}

#[tokio::test]
async fn every_way_to_ask_for_tokens_passes_the_gate_and_others_do_not() {
    let mock = MockWorker::start().await;
    mock.set_fault(Fault::Stall);
    let router = Router::start(&[&mock], json!({})).await;
    let first = router.send(1, 8_000, &[]);
    runs_one(&mock).await;
    mock.set_fault(Fault::None);
    let turns = json!([{"role": "user", "content": long_text()}]);
    let ids: Vec<u32> = (0..2_500).collect();
    let asked = [
        (
            "/v1/messages",
            json!({"model": "m", "max_tokens": 4, "messages": turns}),
        ),
        (
            "/v1/responses",
            json!({"model": "m", "input": turns, "max_output_tokens": 4}),
        ),
        (
            "/v1/chat/completions",
            json!({"model": "m", "messages": turns, "max_tokens": 4}),
        ),
        // Its prompts fit one by one, and not together.
        (
            "/v1/completions",
            json!({"model": "m", "prompt": [ids, ids], "max_tokens": 4}),
        ),
        // Its answers do not.
        (
            "/v1/completions",
            json!({"model": "m", "prompt": ids[..100], "max_tokens": 200, "n": 16}),
        ),
    ];
    let mut pending = Vec::new();
    for (path, body) in asked {
        let request = Request::post(format!("{}{path}", router.url))
            .header("x-session-id", format!("s-{path}-{}", pending.len()))
            .header("x-session-end", "1");
        let request = request.body(Full::from(body.to_string()));
        let answer = router.client.request(request.expect("a request"));
        pending.push(tokio::spawn(
            async move { answer.await.expect("an answer") },
        ));
        router.waiting(pending.len()).await;
    }
    assert_eq!(mock.behaviour.running.load(Ordering::SeqCst), 1);
    let body = json!({"model": "m", "messages": turns}).to_string();
    let request = Request::post(format!("{}/v1/messages/count_tokens", router.url))
        .header("x-session-end", "1")
        .body(Full::from(body));
    let counted = router.client.request(request.expect("a request")).await;
    assert_eq!(counted.expect("an answer").status(), StatusCode::OK);
    router.waiting(pending.len()).await;
    first.abort();
    for answer in pending {
        let answer = answer.await.expect("sent");
        assert_eq!(answer.status(), StatusCode::OK);
        text(answer).await;
    }
    until("nothing is left", || router.fleet.is_idle()).await;
    for headers in mock.behaviour.headers.lock().iter() {
        assert!(!headers.contains_key("x-session-end"));
    }
}

#[tokio::test]
async fn what_waits_too_long_is_told_so_in_its_apis_shape() {
    let mock = MockWorker::start().await;
    mock.set_fault(Fault::Stall);
    let router = Router::start(&[&mock], json!({"max_wait_s": 0.3})).await;
    let first = router.send(1, 8_000, &[]);
    runs_one(&mock).await;
    let turns = json!([{"role": "user", "content": long_text()}]);
    let body = json!({"model": "m", "max_tokens": 4, "messages": turns}).to_string();
    let request = Request::post(format!("{}/v1/messages", router.url)).body(Full::from(body));
    let answer = router.client.request(request.expect("a request")).await;
    let answer = answer.expect("an answer");
    assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(answer.headers().contains_key("retry-after"));
    let told: Value = serde_json::from_str(&text(answer).await).expect("JSON");
    assert_eq!(told["error"]["type"], "overloaded_error");
    first.abort();
}

#[tokio::test]
async fn what_moves_off_a_silent_worker_waits_for_room_elsewhere() {
    let (a, b) = (MockWorker::start().await, MockWorker::start().await);
    let config = Config {
        silence_timeout_s: 0.3,
        load_interval_s: 0.0,
        ..Config::default()
    };
    let router = Router::with(config, &[&a, &b], json!({})).await;
    for mock in [&a, &b] {
        mock.behaviour.hangs.store(true, Ordering::SeqCst);
    }
    let moving = router.send(1, 8_000, &[]);
    until("it is sent", || {
        router.fleet.snapshot().iter().any(|w| w.load.requests > 0)
    })
    .await;
    let is_first = router.fleet.snapshot()[0].load.requests > 0;
    let (here, there) = if is_first { (0, &b) } else { (1, &a) };
    there.behaviour.hangs.store(false, Ordering::SeqCst);
    // It gives signs all the time.
    there.behaviour.tokens.store(30, Ordering::Relaxed);
    there.behaviour.token_us.store(100_000, Ordering::Relaxed);
    let other = router.send(2, 8_000, &[("x-session-end", "1")]);
    until("the other worker is full", || {
        router.fleet.snapshot()[1 - here].load.requests > 0
    })
    .await;
    router.waiting(1).await;
    assert!(router.fleet.snapshot()[here].suspect);
    assert_eq!(router.fleet.snapshot()[here].load.requests, 1);
    for answer in [other, moving] {
        let answer = answer.await.expect("sent");
        assert_eq!(answer.status(), StatusCode::OK);
        let worker = format!("w{}", 1 - here);
        assert_eq!(answer.headers()["x-deltaserve-worker"], worker.as_str());
        text(answer).await;
    }
    until("nothing is left", || router.fleet.is_idle()).await;
}
