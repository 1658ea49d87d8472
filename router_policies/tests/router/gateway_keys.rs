//! API keys of clients, and the keys that workers ask for.

use crate::mock::router::{Router, generate, text, worker};
use crate::mock::{Fault, MockWorker};
use hyper::StatusCode;
use router_policies::config::Config;
use serde_json::{Value, json};
use std::sync::atomic::Ordering;

const KEY: &str = "a-clients-key";

/// A router that asks for [`KEY`], before a worker that asks for a key of its own.
async fn with_keys(admin_token: Option<&str>) -> (MockWorker, Router) {
    let path = std::env::temp_dir().join(format!("router-keys-{:x}", fastrand::u64(..)));
    std::fs::write(&path, format!("# the team's\n{KEY}\n")).expect("written");
    let mock = MockWorker::start().await;
    let mut spec = worker(&mock, "w", "colocated");
    spec.api_key = serde_json::from_value(json!("the-workers-key")).expect("a key");
    let router = Router::with(Config {
        workers: vec![spec],
        api_keys_file: Some(path.clone()),
        admin_token: admin_token.map(str::to_owned),
        ..Config::default()
    })
    .await;
    std::fs::remove_file(&path).expect("removed");
    (mock, router)
}

#[tokio::test]
async fn without_a_key_a_request_is_refused_in_its_apis_own_shape() {
    let (mock, router) = with_keys(None).await;
    for (path, place, kind) in [
        ("/generate", "/error/type", "authentication_error"),
        (
            "/v1/chat/completions",
            "/error/type",
            "authentication_error",
        ),
        ("/v1/messages", "/type", "error"),
        ("/v1/messages", "/error/type", "authentication_error"),
        ("/v1/messages/count_tokens", "/type", "error"),
        ("/v1/embeddings", "/error/type", "authentication_error"),
    ] {
        for headers in [&[][..], &[("authorization", "Bearer a-clients-kez")]] {
            let body = b"{\"messages\": []}".to_vec();
            let response = router.send(path, headers, body).await;
            assert_eq!(response.status(), StatusCode::UNAUTHORIZED, "{path}");
            assert_eq!(response.headers()["www-authenticate"], "Bearer");
            let error: Value = serde_json::from_str(&text(response).await).expect("JSON");
            let found = error.pointer(place).and_then(Value::as_str);
            assert_eq!(found, Some(kind), "{path}: {error}");
        }
    }
    assert!(mock.bodies().is_empty());
    for (path, status) in [
        ("/health", StatusCode::OK),
        ("/readyz", StatusCode::OK),
        ("/v1/models", StatusCode::UNAUTHORIZED),
        ("/metrics", StatusCode::UNAUTHORIZED),
        ("/workers", StatusCode::UNAUTHORIZED),
        ("/workers/w", StatusCode::UNAUTHORIZED),
        ("/decisions", StatusCode::UNAUTHORIZED),
    ] {
        assert_eq!(router.get(path).await.0, status, "{path}");
    }
}

#[tokio::test]
async fn workers_get_their_own_key_and_not_the_clients() {
    let (mock, router) = with_keys(Some("the-admins-token")).await;
    let bearer = format!("Bearer {KEY}");
    for header in [("authorization", bearer.as_str()), ("x-api-key", KEY)] {
        let body = generate(false).to_string().into_bytes();
        let response = router.send("/generate", &[header], body).await;
        assert_eq!(response.status(), StatusCode::OK);
    }
    for headers in mock.behaviour.headers.lock().iter() {
        assert_eq!(headers["authorization"], "Bearer the-workers-key");
        assert!(!headers.contains_key("x-api-key"));
    }
    assert_eq!(mock.bodies().len(), 2);
    let shown = format!("{:?}", router.fleet.snapshot());
    assert!(!shown.contains("the-workers-key"), "{shown}");
}

#[tokio::test]
async fn without_keys_what_a_client_sends_reaches_the_worker() {
    let mock = MockWorker::start().await;
    let router = Router::start("round_robin", vec![worker(&mock, "w", "colocated")]).await;
    let body = generate(false).to_string().into_bytes();
    let headers = [("authorization", "Bearer for-the-worker")];
    let response = router.send("/generate", &headers, body).await;
    assert_eq!(response.status(), StatusCode::OK);
    let headers = mock.behaviour.headers.lock();
    assert_eq!(headers[0]["authorization"], "Bearer for-the-worker");
}

#[tokio::test]
async fn a_worker_that_refuses_the_routers_key_is_at_fault_and_not_the_client() {
    for role in ["colocated", "prefill"] {
        let (wrong, right) = (MockWorker::start().await, MockWorker::start().await);
        wrong.set_fault(Fault::Status(401));
        let keyed = |mock: &MockWorker, id: &str, role: &str| {
            let mut spec = worker(mock, id, role);
            spec.api_key = serde_json::from_value(json!("a-worker-key")).expect("a key");
            spec
        };
        let mut workers = vec![keyed(&wrong, "wrong", role), keyed(&right, "right", role)];
        let decode = MockWorker::start().await;
        let policy = match role {
            "prefill" => {
                workers.push(keyed(&decode, "decode", "decode"));
                decode
                    .behaviour
                    .first_token_us
                    .store(100_000, Ordering::Relaxed);
                "pd"
            }
            _ => "round_robin",
        };
        let router = Router::start(policy, workers).await;
        for _ in 0..12 {
            let (status, body) = router.post("/generate", generate(true)).await;
            assert_eq!(status, StatusCode::OK, "{role}: {body}");
        }
        let workers = router.fleet.snapshot();
        let wrong = workers.iter().find(|worker| worker.spec.id == "wrong");
        assert!(wrong.expect("a worker").circuit_open, "{role}");
    }
}

#[tokio::test]
async fn where_all_workers_refuse_the_routers_key_the_client_does_not_take_it_for_its_own() {
    let (mock, router) = with_keys(None).await;
    mock.set_fault(Fault::Status(401));
    for path in ["/v1/messages", "/v1/messages/count_tokens"] {
        let body = json!({"messages": []}).to_string().into_bytes();
        let response = router.send(path, &[("x-api-key", KEY)], body).await;
        assert_eq!(response.status(), StatusCode::BAD_GATEWAY, "{path}");
        let body = text(response).await;
        assert!(
            body.contains("worker w: HTTP 401") && body.contains("api_key"),
            "{body}"
        );
    }
}

#[tokio::test]
async fn without_keys_of_the_router_a_workers_401_is_for_the_client() {
    let mock = MockWorker::start().await;
    mock.set_fault(Fault::Status(401));
    let router = Router::start("round_robin", vec![worker(&mock, "w", "colocated")]).await;
    let (status, body) = router.post("/generate", generate(true)).await;
    assert_eq!(
        (status, body.contains("told to fail")),
        (StatusCode::UNAUTHORIZED, true)
    );
}
