//! Streams that are not answered for a while: their clients hear so, in their API's own way, and then get their
//! answer, once. What would have been another status is an event.

use crate::mock::router::{Router, text, until, worker};
use crate::mock::{End, Fault, MockWorker};
use http_body_util::BodyExt;
use hyper::StatusCode;
use router_policies::config::Config;
use serde_json::{Value, json};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Longer than a client hears nothing, in microseconds.
const SLOW_US: u64 = 6_000_000;

/// A worker whose first event comes after six seconds, and a router before it.
async fn slow() -> (MockWorker, Router) {
    let mock = MockWorker::start().await;
    mock.behaviour
        .first_token_us
        .store(SLOW_US, Ordering::SeqCst);
    let router = Router::start("unified", vec![worker(&mock, "w", "colocated")]).await;
    (mock, router)
}

fn body(path: &str, stream: bool) -> Value {
    let turns = json!([{"role": "user", "content": "hi"}]);
    match path {
        "/v1/completions" => json!({"model": "mock", "prompt": "hi", "stream": stream}),
        "/v1/responses" => json!({"model": "mock", "input": "hi", "stream": stream}),
        "/v1/messages" => {
            json!({"model": "mock", "max_tokens": 4, "messages": turns, "stream": stream})
        }
        _ => json!({"model": "mock", "messages": turns, "stream": stream}),
    }
}

/// The data of a stream's events, as JSON where it is.
fn events(stream: &str) -> Vec<Value> {
    let data = stream
        .lines()
        .filter_map(|line| line.strip_prefix("data: "));
    data.map(|data| serde_json::from_str(data).unwrap_or_else(|_| data.into()))
        .collect()
}

#[tokio::test]
async fn a_slow_stream_hears_that_it_waits_and_then_has_its_answer_once() {
    let (_mock, router) = slow().await;
    let ask = async |path: &str, heard: &str| {
        let headers = [("x-request-id", "mine")];
        let body = body(path, true).to_string().into_bytes();
        let answer = router.send(path, &headers, body).await;
        assert_eq!(answer.status(), StatusCode::OK);
        assert_eq!(answer.headers()["x-request-id"], "mine");
        let kind = answer.headers()["content-type"].to_str().expect("text");
        assert!(kind.starts_with("text/event-stream"), "{kind}");
        let stream = text(answer).await;
        assert!(stream.starts_with(heard), "{path}: {stream}");
        for token in ["t1", "t4"] {
            assert_eq!(stream.matches(token).count(), 1, "{path}: {stream}");
        }
    };
    tokio::join!(
        ask("/v1/messages", "event: ping\ndata: {\"type\":\"ping\"}\n\n"),
        ask("/v1/chat/completions", ": waiting\n\n"),
        ask("/v1/completions", ": waiting\n\n"),
        ask("/v1/responses", "event: response.created\n"),
    );
    router.idle().await;
    router
        .counts("deltaserve_requests_total{outcome=\"ok\"} 4")
        .await;
}

#[tokio::test]
async fn events_of_a_response_go_on_in_number_behind_those_that_said_that_it_waits() {
    let (mock, router) = slow().await;
    mock.set_fault(Fault::Raw(
        &[
            "event: response.created\ndata: {\"type\":\"response.created\",\"sequence_number\":0,\"response\":{\"id\":\"resp_w\",\"tools\":[{\"sequence_number\":0}]}}\n\nevent: response.in_prog",
            "ress\ndata: {\"sequence_number\":1,\"type\":\"response.in_progress\",\"response\":{}}\n\n",
            "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"sequence_number\":2,\"delta\":\"\\\"sequence_number\\\":7\"}\n\n",
            "event: response.completed\ndata: {\"type\":\"response.completed\",\"sequence_number\":3,\"response\":{\"id\":\"resp_w\"}}\n\n",
        ],
        End::Properly,
    ));
    let body = body("/v1/responses", true).to_string().into_bytes();
    let answer = router.send("/v1/responses", &[], body).await;
    let stream = text(answer).await;
    let events = events(&stream);
    let kinds: Vec<_> = events
        .iter()
        .filter_map(|event| event["type"].as_str())
        .collect();
    assert_eq!(
        kinds,
        [
            "response.created",
            "response.in_progress",
            "response.in_progress",
            "response.output_text.delta",
            "response.completed"
        ]
    );
    let numbers = events.iter().map(|event| event["sequence_number"].as_u64());
    assert!(numbers.eq((0..5).map(Some)), "{stream}");
    assert_eq!(events[0]["response"]["status"], "in_progress");
    // Its client knows it by one id alone, by which it may go on from it.
    let told = events[0]["response"]["id"].as_str().expect("an id");
    assert_eq!(events[1]["response"]["id"], told);
    assert_eq!(events[4]["response"]["id"], told);
    mock.set_fault(Fault::None);
    mock.behaviour.first_token_us.store(0, Ordering::SeqCst);
    let next = json!({"model": "mock", "input": "more", "previous_response_id": told});
    let (status, _) = router.post("/v1/responses", next).await;
    assert_eq!(status, StatusCode::OK);
    let sent = mock.behaviour.bodies.lock().pop().expect("a body");
    let sent: Value = serde_json::from_slice(&sent).expect("JSON");
    assert_eq!(sent["previous_response_id"], "resp_w");
    *mock.behaviour.responses.lock() = vec!["resp_w"];
    let (status, found) = router.get(&format!("/v1/responses/{told}")).await;
    assert_eq!(status, StatusCode::OK, "{found}");
    assert_eq!(events[1]["response"]["tools"][0]["sequence_number"], 0);
    assert_eq!(events[3]["delta"], "\"sequence_number\":7");
    assert_eq!(stream.matches("event: response.created").count(), 1);
}

/// A router whose only worker is full for as long as the first stream is held.
async fn full(admission: Value) -> (MockWorker, Router) {
    let mock = MockWorker::start().await;
    mock.set_fault(Fault::StallAfter(1));
    let mut spec = worker(&mock, "w", "colocated");
    spec.kv_capacity_tokens = Some(10_000);
    let config = Config {
        policy: "unified".to_owned(),
        workers: vec![spec],
        admission,
        ..Config::default()
    };
    (mock, Router::with(config).await)
}

/// A prompt that shares nothing with another session's.
fn long(path: &str, session: &str, stream: bool) -> Vec<u8> {
    let mut body = body(path, stream);
    let words = format!("{session} ").repeat(30_000 / (session.len() + 1));
    for key in ["prompt", "input"] {
        if body[key].is_string() {
            body[key] = words.as_str().into();
        }
    }
    if body["messages"].is_array() {
        body["messages"][0]["content"] = words.into();
    }
    body.to_string().into_bytes()
}

#[tokio::test]
async fn a_turn_that_is_refused_after_its_client_heard_that_it_waits_is_told_so_by_an_event() {
    let limits = json!({"max_wait_s": 5.5});
    let (_mock, router) = full(limits).await;
    let chats = "/v1/chat/completions";
    let holder = router
        .send(
            chats,
            &[("x-session-id", "first")],
            long(chats, "first", true),
        )
        .await;
    let ask = async |path: &'static str, session: &'static str, stream: bool| {
        let headers = [("x-session-id", session)];
        router
            .send(path, &headers, long(path, session, stream))
            .await
    };
    let (message, chat, response, whole) = tokio::join!(
        ask("/v1/messages", "a", true),
        ask(chats, "b", true),
        ask("/v1/responses", "c", true),
        ask("/v1/messages", "d", false),
    );
    assert_eq!(whole.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(whole.headers().contains_key("retry-after"));

    let message = text(message).await;
    assert!(message.contains("event: error\n"), "{message}");
    let last = events(&message).pop().expect("an event");
    assert_eq!(last["error"]["type"], "overloaded_error");

    let chat = events(&text(chat).await);
    assert_eq!(chat.last().expect("an event"), "[DONE]");
    let told = chat[0]["error"]["message"].as_str().expect("a message");
    assert!(told.contains("admission.max_wait_s"), "{told}");

    let response = events(&text(response).await);
    let last = response.last().expect("an event");
    assert_eq!(last["type"], "response.failed");
    assert_eq!(last["response"]["status"], "failed");
    let error = &last["response"]["error"];
    assert_eq!(error["code"], "rate_limit_exceeded");
    assert!(
        error["message"]
            .as_str()
            .expect("words")
            .contains("try again in ")
    );
    drop(holder);
    router.idle().await;
    router
        .counts("deltaserve_wait_seconds_count{end=\"refused\"} 4")
        .await;
}

#[tokio::test]
async fn a_client_that_leaves_after_it_heard_that_it_waits_leaves_the_queue() {
    let (_mock, router) = full(json!({})).await;
    let path = "/v1/messages";
    let holder = router
        .send(
            path,
            &[("x-session-id", "first")],
            long(path, "first", true),
        )
        .await;
    let headers = [("x-session-id", "second")];
    let mut waiting = router
        .send(path, &headers, long(path, "second", true))
        .await;
    assert_eq!(waiting.status(), StatusCode::OK);
    let first = waiting.frame().await.expect("a frame").expect("it lives");
    let first = first.into_data().expect("data");
    assert!(first.starts_with(b"event: ping"));
    assert_eq!(router.fleet.waiting_turns(), 1);
    // And again and again.
    let next = tokio::time::timeout(Duration::from_secs(8), waiting.frame()).await;
    assert!(matches!(next, Ok(Some(Ok(_)))));
    drop(waiting);
    until("nobody waits", || router.fleet.waiting_turns() == 0).await;
    drop(holder);
    router.idle().await;
}
