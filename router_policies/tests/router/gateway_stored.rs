//! Responses that a worker keeps: what goes on from one, or asks for one, goes there.

use crate::mock::router::{Router, text, worker};
use crate::mock::{End, Fault, MockWorker};
use http_body_util::{BodyExt, Full};
use hyper::{Method, Request, StatusCode};
use serde_json::{Value, json};

const STREAM: &[&str] = &[
    "event: response.created\ndata: {\"type\":\"response.created\",\"sequence_number\":0,\"response\":{\"id\":\"resp_a\",\"object\":\"response\"}}\n\n",
    "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"sequence_number\":1,\"delta\":\"hi\"}\n\n",
    "event: response.completed\ndata: {\"type\":\"response.completed\",\"sequence_number\":2,\"response\":{\"id\":\"resp_a\"}}\n\n",
];

/// Two workers, the first response of which is `resp_a`, and the id of the worker that has it.
async fn answered() -> ([MockWorker; 2], Router, String) {
    let mocks = [MockWorker::start().await, MockWorker::start().await];
    let workers = vec![
        worker(&mocks[0], "a", "colocated"),
        worker(&mocks[1], "b", "colocated"),
    ];
    let router = Router::start("round_robin", workers).await;
    for mock in &mocks {
        mock.set_fault(Fault::Raw(STREAM, End::Properly));
    }
    let asked = json!({"model": "mock", "input": "hi", "stream": true}).to_string();
    let answer = router.send("/v1/responses", &[], asked.into_bytes()).await;
    let owner = answer.headers()["x-deltaserve-worker"]
        .to_str()
        .expect("text")
        .to_owned();
    text(answer).await;
    for mock in &mocks {
        mock.set_fault(Fault::None);
    }
    (mocks, router, owner)
}

async fn ask(router: &Router, method: Method, path: &str) -> (StatusCode, Value) {
    let request = Request::builder()
        .method(method)
        .uri(format!("{}{path}", router.url));
    let request = request.body(Full::default()).expect("a request");
    let answer = router.client.request(request).await.expect("an answer");
    let status = answer.status();
    let body = answer
        .into_body()
        .collect()
        .await
        .expect("whole")
        .to_bytes();
    (status, serde_json::from_slice(&body).unwrap_or_default())
}

#[tokio::test]
async fn what_goes_on_from_a_response_goes_to_the_worker_that_has_it() {
    let (_mocks, router, owner) = answered().await;
    for _ in 0..4 {
        let asked = json!({"input": "more", "previous_response_id": "resp_a"}).to_string();
        let answer = router.send("/v1/responses", &[], asked.into_bytes()).await;
        assert_eq!(answer.status(), StatusCode::OK);
        assert_eq!(answer.headers()["x-deltaserve-worker"], owner.as_str());
    }
    assert!(router.fleet.remove_worker(&owner));
    let asked = json!({"input": "more", "previous_response_id": "resp_a"});
    let (status, told) = router.post("/v1/responses", asked).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    let told: Value = serde_json::from_str(&told).expect("JSON");
    assert_eq!(told["error"]["code"], "previous_response_not_found");
    // One that nobody knows goes anywhere, and an engine says so.
    let asked = json!({"input": "more", "previous_response_id": "resp_z"});
    assert_eq!(router.post("/v1/responses", asked).await.0, StatusCode::OK);
}

#[tokio::test]
async fn a_router_that_knows_nothing_of_a_response_asks_for_it_before_it_goes_on() {
    let mocks = [MockWorker::start().await, MockWorker::start().await];
    *mocks[1].behaviour.responses.lock() = vec!["resp_b"];
    let workers = vec![
        worker(&mocks[0], "a", "colocated"),
        worker(&mocks[1], "b", "colocated"),
    ];
    let router = Router::start("round_robin", workers).await;
    for _ in 0..4 {
        let asked = json!({"input": "more", "previous_response_id": "resp_b"}).to_string();
        let answer = router.send("/v1/responses", &[], asked.into_bytes()).await;
        assert_eq!(answer.status(), StatusCode::OK);
        assert_eq!(answer.headers()["x-deltaserve-worker"], "b");
    }
}

#[tokio::test]
async fn questions_about_a_response_go_to_the_worker_that_has_it() {
    let (mocks, router, owner) = answered().await;
    let at = usize::from(owner == "b");
    *mocks[at].behaviour.responses.lock() = vec!["resp_a"];
    *mocks[0].behaviour.responses.lock() = vec!["resp_a", "resp_y"];
    *mocks[1].behaviour.responses.lock() = vec!["resp_a", "resp_z"];
    for (method, path, asked) in [
        (Method::GET, "/v1/responses/resp_a", "GET resp_a"),
        (
            Method::POST,
            "/v1/responses/resp_a/cancel",
            "POST resp_a/cancel",
        ),
        (Method::DELETE, "/v1/responses/resp_a", "DELETE resp_a"),
        // Of which the router knows nothing.
        (Method::GET, "/v1/responses/resp_y", "GET resp_y"),
        (Method::GET, "/v1/responses/resp_z", "GET resp_z"),
    ] {
        let (status, told) = ask(&router, method, path).await;
        assert_eq!((status, &told["asked"]), (StatusCode::OK, &json!(asked)));
    }
    let (status, told) = ask(&router, Method::GET, "/v1/responses/resp_no").await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    assert_eq!(told["error"]["type"], "invalid_request_error");
    let (status, _) = ask(&router, Method::PUT, "/v1/responses/resp_a").await;
    assert_eq!(status, StatusCode::METHOD_NOT_ALLOWED);
}
