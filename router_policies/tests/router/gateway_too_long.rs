//! Requests that are too long for their model: agents act on the words of their own API alone.

use crate::mock::router::{Router, text, worker};
use crate::mock::{End, Fault, MockWorker};
use hyper::StatusCode;
use serde_json::{Value, json};
use std::sync::atomic::Ordering;

/// A router before a worker whose models take 100 tokens.
async fn of_100() -> (MockWorker, Router) {
    let mock = MockWorker::start().await;
    mock.behaviour.max_model_len.store(100, Ordering::SeqCst);
    let router = Router::start("unified", vec![worker(&mock, "w", "colocated")]).await;
    (mock, router)
}

fn error(answer: &(StatusCode, String)) -> Value {
    assert_eq!(answer.0, StatusCode::BAD_REQUEST, "{}", answer.1);
    serde_json::from_str::<Value>(&answer.1).expect("JSON")["error"].take()
}

#[tokio::test]
async fn what_is_counted_and_too_long_is_refused_without_asking_a_worker() {
    let (mock, router) = of_100().await;
    let prompt = |tokens: u32| (1..=tokens).collect::<Vec<_>>();
    let path = "/v1/completions";
    let long = json!({"model": "mock", "prompt": prompt(101), "max_tokens": 1});
    let told = error(&router.post(path, long).await);
    assert_eq!(told["code"], "context_length_exceeded");
    assert_eq!(told["type"], "invalid_request_error");
    let message = told["message"].as_str().expect("a message");
    assert!(message.contains("100 tokens") && message.contains("101 tokens"));

    let greedy = json!({"model": "unheard-of", "prompt": prompt(60), "max_tokens": 41});
    let told = error(&router.post(path, greedy).await);
    let message = told["message"].as_str().expect("a message");
    assert!(message.contains("60 in the messages, 41 in the completion"));

    let ids = json!({"input_ids": prompt(101), "sampling_params": {"max_new_tokens": 1}});
    let told = error(&router.post("/generate", ids).await);
    let message = told["message"].as_str().expect("a message");
    assert!(message.contains("101 tokens"), "{message}");

    assert!(mock.bodies().is_empty(), "no worker was asked");
    router
        .counts("deltaserve_refused_total{status=\"400\"} 3")
        .await;
    for body in [
        json!({"model": "mock", "prompt": prompt(60), "max_tokens": 40}),
        // The engine is to cut it, and text has no exact count here.
        json!({"model": "mock", "prompt": prompt(500), "truncate_prompt_tokens": 50}),
        json!({"model": "mock", "prompt": "word ".repeat(5_000)}),
    ] {
        assert_eq!(router.post(path, body).await.0, StatusCode::OK);
    }
}

#[tokio::test]
async fn where_one_worker_does_not_say_what_it_takes_the_engines_decide() {
    let (a, b) = (MockWorker::start().await, MockWorker::start().await);
    a.behaviour.max_model_len.store(100, Ordering::SeqCst);
    let workers = vec![worker(&a, "a", "colocated"), worker(&b, "b", "colocated")];
    let router = Router::start("round_robin", workers).await;
    let long = json!({"prompt": (1..=200).collect::<Vec<u32>>(), "max_tokens": 1});
    let (status, _) = router.post("/v1/completions", long).await;
    assert_eq!(status, StatusCode::OK);
}

#[tokio::test]
async fn an_engines_failed_response_or_500_is_told_as_the_apis_400_and_is_no_workers_fault() {
    let (mock, router) = of_100().await;
    let [sglang, vllm] = [
        // SGLang: inside a stream of /v1/responses.
        &[
            "event: response.failed\ndata: {\"type\":\"response.failed\",\"sequence_number\":0,\"response\":{\"status\":\"failed\",\"error\":{\"code\":\"internal_error\",\"message\":\"The input (238616 tokens) is longer than the model's context length (200000 tokens).\"}}}\n\n",
        ][..],
        // vLLM: status 500 of /v1/messages.
        &[
            "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"internal_error\",\"code\":500,\"message\":\"This model's maximum context length is 4096 tokens. However, your request has 5000 input tokens.\"}}\n\n",
        ][..],
    ];
    *mock.behaviour.fault.lock() = Fault::Raw(sglang, End::Properly);
    let asked = json!({"model": "mock", "input": "hi", "stream": true});
    let told = error(&router.post("/v1/responses", asked).await);
    assert_eq!(told["code"], "context_length_exceeded");
    assert!(told["message"].as_str().expect("words").contains("238616"));

    *mock.behaviour.fault.lock() = Fault::Raw(vllm, End::Properly);
    let asked = json!({"model": "mock", "stream": true, "max_tokens": 4,
        "messages": [{"role": "user", "content": "hi"}]});
    let body = asked.to_string().into_bytes();
    let response = router.send("/v1/messages", &[], body).await;
    assert_eq!(response.status(), StatusCode::BAD_REQUEST);
    let told: Value = serde_json::from_str(&text(response).await).expect("JSON");
    assert_eq!(
        told,
        json!({"type": "error", "error": {"type": "invalid_request_error",
            "message": "prompt is too long: 5000 tokens > 4096 maximum"}})
    );
    router.idle().await;
    router
        .counts("deltaserve_requests_total{outcome=\"rejected\"} 2")
        .await;
    assert_eq!(mock.bodies().len(), 2, "none is tried again");
}
