//! Streams of `/v1/messages` and `/v1/responses` begin with events that say nothing of an answer yet. Each
//! test failed before its fault was mended.

use crate::mock::router::{Router, until, worker};
use crate::mock::{End, Fault, MockWorker};
use hyper::StatusCode;
use serde_json::{Value, json};
use std::sync::atomic::Ordering;
use std::time::Duration;

const MESSAGE: &str = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"role\":\"assistant\",\"content\":[]}}\n\n";
const STOP: &str = "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n";
const CREATED: &str = "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"status\":\"in_progress\"}}\n\n";
const IN_PROGRESS: &str =
    "event: response.in_progress\ndata: {\"type\":\"response.in_progress\"}\n\n";
const DELTA: &str = "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"t\"}\n\n";
const FAILED: &str = "event: response.failed\ndata: {\"type\":\"response.failed\",\"response\":{\"status\":\"failed\"}}\n\n";

fn message() -> Value {
    json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "stream": true})
}

fn response() -> Value {
    json!({"input": "a", "stream": true})
}

/// What SGLang 0.5.17 streams where it refuses a message.
fn refused(kind: &str) -> &'static [&'static str] {
    let error = format!(
        "event: error\ndata: {{\"type\":\"error\",\"error\":{{\"type\":\"{kind}\",\"message\":\"m\"}}}}\n\n"
    );
    Vec::leak(vec![MESSAGE, String::leak(error), STOP])
}

async fn pair() -> (MockWorker, MockWorker, Router) {
    let (a, b) = (MockWorker::start().await, MockWorker::start().await);
    let workers = vec![worker(&a, "a", "colocated"), worker(&b, "b", "colocated")];
    let router = Router::start("round_robin", workers).await;
    (a, b, router)
}

#[tokio::test]
async fn a_message_that_is_too_long_is_no_fault_of_the_worker_that_says_so() {
    let (a, b, router) = pair().await;
    let pieces = refused("invalid_request_error");
    for mock in [&a, &b] {
        mock.set_fault(Fault::Raw(pieces, End::Properly));
    }
    for _ in 0..12 {
        let (status, body) = router.post("/v1/messages", message()).await;
        assert_eq!((status, body), (StatusCode::OK, pieces.concat()));
    }
    let asked = a.bodies().len() + b.bodies().len();
    assert_eq!(asked, 12, "no other worker would take it");
    let workers = router.fleet.snapshot();
    assert!(workers.iter().all(|worker| !worker.circuit_open));
    router
        .counts("deltaserve_requests_total{outcome=\"rejected\"} 12")
        .await;
}

#[tokio::test]
async fn a_message_for_which_a_worker_has_no_room_is_tried_elsewhere() {
    for kind in ["overloaded_error", "rate_limit_error", "api_error"] {
        let (a, b, router) = pair().await;
        a.set_fault(Fault::Raw(refused(kind), End::Properly));
        for _ in 0..2 {
            let (_, body) = router.post("/v1/messages", message()).await;
            assert!(body.ends_with(STOP) && !body.contains("error"), "{body}");
        }
        assert_eq!(b.behaviour.served.load(Ordering::SeqCst), 2);
        router.idle().await;
    }
}

#[tokio::test]
async fn a_response_that_was_only_announced_is_tried_elsewhere() {
    for (pieces, end) in [
        (&[CREATED, IN_PROGRESS][..], End::Broken),
        (&[CREATED, IN_PROGRESS], End::Properly),
        (&[CREATED, IN_PROGRESS, FAILED], End::Properly),
    ] {
        let (a, b, router) = pair().await;
        a.set_fault(Fault::Raw(pieces, end));
        for _ in 0..2 {
            let (status, body) = router.post("/v1/responses", response()).await;
            assert_eq!(status, StatusCode::OK);
            assert!(body.contains("response.completed"), "{pieces:?}: {body}");
            assert!(!body.contains("created"), "{pieces:?}: {body}");
        }
        assert_eq!(b.behaviour.served.load(Ordering::SeqCst), 2);
        router.idle().await;
    }
}

#[tokio::test]
async fn an_announcement_does_not_end_a_prefill() {
    let mock = MockWorker::start().await;
    let waits = [": \n\n"; 30];
    let done = "event: response.completed\ndata: {\"type\":\"response.completed\"}\n\n";
    let pieces = [&[CREATED, IN_PROGRESS][..], &waits, &[DELTA, done]].concat();
    mock.set_fault(Fault::Raw(Vec::leak(pieces), End::Properly));
    let router = Router::start("round_robin", vec![worker(&mock, "w", "colocated")]).await;
    let load = || router.fleet.snapshot()[0].load;
    let looks = async {
        until("it is placed", || load().requests == 1).await;
        tokio::time::sleep(Duration::from_millis(250)).await;
        assert_eq!((load().prefilling, load().decoding), (1, 0));
    };
    let (answer, ()) = tokio::join!(router.post("/v1/responses", response()), looks);
    assert!(answer.1.starts_with(CREATED) && answer.1.ends_with(done));
    // 600 ms of prefill, not the milliseconds until it was announced.
    let metrics = router.get("/metrics").await.1;
    let at_once = "deltaserve_first_token_seconds_bucket{le=\"0.25\"} 0";
    assert!(metrics.contains(at_once), "{metrics}");
}

#[tokio::test]
async fn a_response_that_fails_on_its_way_is_counted_as_failed() {
    let mock = MockWorker::start().await;
    let pieces = &[CREATED, DELTA, FAILED];
    mock.set_fault(Fault::Raw(pieces, End::Properly));
    let router = Router::start("round_robin", vec![worker(&mock, "w", "colocated")]).await;
    let (_, body) = router.post("/v1/responses", response()).await;
    assert_eq!(body, pieces.concat());
    router
        .counts("deltaserve_requests_total{outcome=\"worker_error\"} 1")
        .await;
}

#[tokio::test]
async fn an_error_event_of_a_response_has_a_type_and_a_number_like_all_others() {
    let mock = MockWorker::start().await;
    let pieces = &[CREATED, IN_PROGRESS, DELTA];
    mock.set_fault(Fault::Raw(pieces, End::Broken));
    let router = Router::start("round_robin", vec![worker(&mock, "w", "colocated")]).await;
    let (_, body) = router.post("/v1/responses", response()).await;
    let event = body.strip_prefix(&pieces.concat()).expect("what came");
    let data = event
        .strip_prefix("event: error\ndata: ")
        .expect("an error");
    let error: Value = serde_json::from_str(data.trim_end()).expect("JSON");
    assert_eq!(error["type"], "error");
    assert_eq!(error["code"], "worker_error");
    assert_eq!(error["sequence_number"], 3);
    assert!(
        error["message"]
            .as_str()
            .is_some_and(|text| text.contains("broke"))
    );
    // What OpenAI's clients look for to raise it.
    assert_eq!(error["error"]["message"], error["message"]);
}
