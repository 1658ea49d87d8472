//! Spans as a collector gets them, and the header that joins them to the client's and the worker's.

use crate::mock::router::{Router, generate, text, until, worker};
use crate::mock::{Fault, MockWorker};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use router_policies::config::Config;
use serde_json::{Value, json};
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A collector of OTLP over HTTP.
struct Collector {
    url: String,
    spans: Arc<Mutex<Vec<Value>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Collector {
    async fn start() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
            .await
            .expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        let spans: Arc<Mutex<Vec<Value>>> = Arc::default();
        let shared = Arc::clone(&spans);
        let task = tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let shared = Arc::clone(&shared);
                let service = service_fn(move |request| take(Arc::clone(&shared), request));
                let server = hyper::server::conn::http1::Builder::new();
                tokio::spawn(server.serve_connection(TokioIo::new(socket), service));
            }
        });
        Self { url, spans, task }
    }

    fn config(&self, workers: &[(&MockWorker, &str)]) -> Config {
        let workers = workers
            .iter()
            .map(|(mock, id)| worker(mock, id, "colocated"));
        Config {
            workers: workers.collect(),
            policy: "round_robin".to_owned(),
            otlp_endpoint: Some(self.url.clone()),
            ..Config::default()
        }
    }

    /// The first so many spans, by their names.
    async fn spans(&self, count: usize) -> Vec<Value> {
        until("the spans come", || self.spans.lock().len() >= count).await;
        let spans = self.spans.lock().clone();
        assert_eq!(spans.len(), count, "{spans:#?}");
        spans
    }
}

async fn take(
    spans: Arc<Mutex<Vec<Value>>>,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    assert_eq!(request.uri().path(), "/v1/traces");
    assert_eq!(request.headers()["content-type"], "application/json");
    let body = request.into_body().collect().await.expect("a body");
    let body: Value = serde_json::from_slice(&body.to_bytes()).expect("JSON");
    for resource in body["resourceSpans"].as_array().expect("a list") {
        let service = attribute(&resource["resource"], "service.name");
        assert_eq!(service, json!({"stringValue": "deltaserve-router"}));
        for scope in resource["scopeSpans"].as_array().expect("a list") {
            let of_scope = scope["spans"].as_array().expect("a list");
            spans.lock().extend(of_scope.iter().cloned());
        }
    }
    Ok(Response::new(Full::from("{}")))
}

fn attribute(of: &Value, key: &str) -> Value {
    let attributes = of["attributes"].as_array().expect("a list");
    let found = attributes.iter().find(|attribute| attribute["key"] == key);
    found.map_or(Value::Null, |attribute| attribute["value"].clone())
}

fn named<'a>(spans: &'a [Value], name: &str) -> &'a Value {
    let mut found = spans.iter().filter(|span| span["name"] == name);
    let span = found
        .next()
        .unwrap_or_else(|| panic!("no {name}: {spans:#?}"));
    assert!(found.next().is_none(), "several {name}: {spans:#?}");
    span
}

fn ns(span: &Value, key: &str) -> u64 {
    span[key]
        .as_str()
        .expect("a string")
        .parse()
        .expect("a number")
}

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

fn traceparent(flags: &str) -> String {
    format!("00-{TRACE}-00f067aa0ba902b7-{flags}")
}

/// What the worker's last request had.
fn passed_on(mock: &MockWorker, name: &str) -> Option<String> {
    let headers = mock.behaviour.headers.lock();
    let value = headers.last().expect("a request").get(name)?;
    Some(value.to_str().expect("text").to_owned())
}

#[tokio::test]
async fn a_streams_spans_are_joined_to_the_clients_and_the_workers() {
    let (mock, collector) = (MockWorker::start().await, Collector::start().await);
    mock.behaviour
        .first_token_us
        .store(50_000, Ordering::Relaxed);
    mock.behaviour.token_us.store(10_000, Ordering::Relaxed);
    let router = Router::with(collector.config(&[(&mock, "w")])).await;
    let parent = traceparent("01");
    let headers = [
        ("traceparent", &*parent),
        ("tracestate", "vendor=1"),
        ("x-session-id", "s"),
    ];
    let body = generate(true).to_string().into_bytes();
    text(router.send("/generate", &headers, body).await).await;
    let spans = collector.spans(3).await;
    assert!(spans.iter().all(|span| span["traceId"] == TRACE));
    let request = named(&spans, "POST /generate");
    let placing = named(&spans, "wait for a place");
    let upstream = named(&spans, "worker w");
    assert_eq!(request["parentSpanId"], "00f067aa0ba902b7");
    assert_eq!(request["kind"], 2);
    for below in [placing, upstream] {
        assert_eq!(below["parentSpanId"], request["spanId"]);
        assert!(ns(below, "startTimeUnixNano") >= ns(request, "startTimeUnixNano"));
        assert!(ns(below, "endTimeUnixNano") <= ns(request, "endTimeUnixNano"));
    }
    let status = attribute(request, "http.response.status_code");
    assert_eq!(status, json!({"intValue": "200"}));
    let session = attribute(request, "deltaserve.session_id");
    assert_eq!(session, json!({"stringValue": "s"}));
    let decision = &router.fleet.sink().recent(1)[0].decision_id;
    assert_eq!(
        attribute(upstream, "deltaserve.decision_id"),
        json!({"stringValue": decision})
    );
    assert!(spans.iter().all(|span| span.get("status").is_none()));
    // The first event came after the worker's pause, and the end three pauses later.
    let first = &upstream["events"][0];
    assert_eq!(first["name"], "first_event");
    let first_ns = ns(first, "timeUnixNano");
    assert!(first_ns - ns(upstream, "startTimeUnixNano") >= 50_000_000);
    assert!(ns(upstream, "endTimeUnixNano") - first_ns >= 30_000_000);
    let span_id = upstream["spanId"].as_str().expect("an id");
    let expected = format!("00-{TRACE}-{span_id}-01");
    assert_eq!(passed_on(&mock, "traceparent"), Some(expected));
    assert_eq!(passed_on(&mock, "tracestate").as_deref(), Some("vendor=1"));
}

#[tokio::test]
async fn an_attempt_that_failed_is_a_span_of_its_own_and_a_refusal_is_one_too() {
    let collector = Collector::start().await;
    let (a, b) = (MockWorker::start().await, MockWorker::start().await);
    let router = Router::with(collector.config(&[(&a, "a"), (&b, "b")])).await;
    for mock in [&a, &b] {
        mock.set_fault(Fault::Status(500));
    }
    let (status, _) = router.post("/generate", generate(false)).await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    // Two attempts with a wait each, a wait for a third worker that there is not, and the request.
    let spans = collector.spans(6).await;
    let request = named(&spans, "POST /generate");
    assert!(request.get("parentSpanId").is_none(), "a trace of its own");
    assert_eq!(request["status"]["code"], 2);
    for worker in ["worker a", "worker b"] {
        let attempt = named(&spans, worker);
        assert_eq!(attempt["status"]["code"], 2);
        let message = attempt["status"]["message"].as_str().expect("text");
        assert!(message.contains("told to fail"), "{message}");
    }
    let (status, _) = router.post("/generate", json!({})).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    let spans = collector.spans(7).await;
    let refused = &spans[6];
    let status = attribute(refused, "http.response.status_code");
    assert_eq!(status, json!({"intValue": "400"}));
    assert!(refused.get("status").is_none(), "the client's mistake");
}

#[tokio::test]
async fn the_wait_for_room_is_a_span_as_long_as_it_was() {
    let (mock, collector) = (MockWorker::start().await, Collector::start().await);
    mock.behaviour
        .first_token_us
        .store(300_000, Ordering::Relaxed);
    let mut config = collector.config(&[(&mock, "w")]);
    config.workers[0].kv_capacity_tokens = Some(10_000);
    let router = Router::with(config).await;
    let send = |session: u32| {
        let ids: Vec<u32> = (0..8_000).map(|i| session * 100_000 + i).collect();
        let body = json!({"input_ids": ids, "stream": true, "user": session.to_string()});
        let sent = router.send(
            "/generate",
            &[("x-session-end", "1")],
            body.to_string().into(),
        );
        async move { text(sent.await).await }
    };
    let (first, second) = tokio::join!(send(1), async {
        until("the first runs", || {
            mock.behaviour.running.load(Ordering::SeqCst) == 1
        })
        .await;
        send(2).await
    });
    assert!(first.contains("[DONE]") && second.contains("[DONE]"));
    let spans = collector.spans(6).await;
    let waits = spans
        .iter()
        .filter(|span| span["name"] == "wait for a place");
    let mut waits_ns: Vec<u64> = waits
        .map(|span| ns(span, "endTimeUnixNano") - ns(span, "startTimeUnixNano"))
        .collect();
    waits_ns.sort_unstable();
    assert!(waits_ns[0] < 100_000_000, "{waits_ns:?}");
    assert!(waits_ns[1] > 150_000_000, "{waits_ns:?}");
}

#[tokio::test]
async fn a_client_that_leaves_ends_its_trace_and_says_so() {
    let (mock, collector) = (MockWorker::start().await, Collector::start().await);
    mock.set_fault(Fault::StallAfter(1));
    let router = Router::with(collector.config(&[(&mock, "w")])).await;
    let body = generate(true).to_string().into_bytes();
    let mut answer = router.send("/generate", &[], body).await;
    answer
        .body_mut()
        .frame()
        .await
        .expect("a frame")
        .expect("no error");
    drop(answer);
    let spans = collector.spans(3).await;
    let outcome = attribute(named(&spans, "POST /generate"), "deltaserve.outcome");
    assert_eq!(outcome, json!({"stringValue": "client_disconnect"}));
}

#[tokio::test]
async fn without_a_collector_or_a_sampled_trace_the_clients_header_goes_on_as_it_is() {
    let (mock, collector) = (MockWorker::start().await, Collector::start().await);
    let mut untraced = collector.config(&[(&mock, "w")]);
    untraced.otlp_endpoint = None;
    let mut sampled_by_none = collector.config(&[(&mock, "w")]);
    sampled_by_none.otlp_sample_ratio = 0.0;
    for (config, sent, expected) in [
        (untraced.clone(), Some("01"), Some("01")),
        (untraced, None, None),
        (sampled_by_none.clone(), Some("00"), Some("00")),
        (sampled_by_none, None, None),
    ] {
        let router = Router::with(config).await;
        let value = sent.map(traceparent);
        let headers: Vec<_> = value
            .iter()
            .map(|value| ("traceparent", &**value))
            .collect();
        let body = generate(false).to_string().into_bytes();
        let answer = router.send("/generate", &headers, body).await;
        assert_eq!(answer.status(), StatusCode::OK);
        assert_eq!(passed_on(&mock, "traceparent"), expected.map(traceparent));
    }
    // Longer than spans are kept back.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(collector.spans.lock().len(), 0);
}

#[tokio::test]
async fn a_collector_that_is_gone_costs_spans_and_no_request() {
    let mock = MockWorker::start().await;
    let collector = Collector::start().await;
    let config = collector.config(&[(&mock, "w")]);
    drop(collector);
    let router = Router::with(config).await;
    let (status, _) = router.post("/generate", generate(false)).await;
    assert_eq!(status, StatusCode::OK);
    router.counts("deltaserve_lost_spans_total 3").await;
}
