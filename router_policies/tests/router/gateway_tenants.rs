//! Tenants as clients and operators see them: whose a request is, limits in each API's words, metrics.

use crate::mock::MockWorker;
use crate::mock::router::{Router, text, worker};
use hyper::StatusCode;
use router_policies::config::Config;
use serde_json::{Value, json};

fn config(mock: &MockWorker, more: Value) -> Config {
    let mut all = json!({"tenants": {
        "big": {"keys": ["key-of-big"], "weight": 3},
        "small": {"keys": ["key-of-small", "another-small"], "max_sessions": 1, "priority": "background"},
        "tiny": {"keys": ["key-of-tiny"], "tokens_per_min": 60},
    }});
    let fields = all.as_object_mut().expect("an object");
    fields.extend(more.as_object().expect("an object").clone());
    Config {
        workers: vec![worker(mock, "w", "colocated")],
        ..serde_json::from_value(all).expect("a configuration")
    }
}

async fn ask(router: &Router, path: &str, headers: &[(&str, &str)]) -> (StatusCode, u64, Value) {
    // With tools, so that it is no call beside a conversation.
    let body = json!({"model": "mock", "max_tokens": 4, "tools": [],
        "messages": [{"role": "user", "content": "x".repeat(1_000)}]});
    let response = router
        .send(path, headers, body.to_string().into_bytes())
        .await;
    let status = response.status();
    let retry = response.headers().get("retry-after");
    let retry = retry.map_or(0, |value| {
        let text = value.to_str().expect("text");
        text.parse().expect("seconds")
    });
    let told = serde_json::from_str(&text(response).await).expect("JSON");
    (status, retry, told)
}

#[tokio::test]
async fn limits_are_told_in_each_apis_words() {
    let mock = MockWorker::start().await;
    let router = Router::with(config(&mock, json!({}))).await;
    let chat = "/v1/chat/completions";
    let (status, ..) = ask(&router, chat, &[]).await;
    assert_eq!(status, StatusCode::UNAUTHORIZED);
    let small = |session| {
        [
            ("authorization", "Bearer key-of-small"),
            ("x-session-id", session),
        ]
    };
    for (session, expected) in [("a", 200), ("a", 200), ("b", 429)] {
        let (status, retry, told) = ask(&router, chat, &small(session)).await;
        assert_eq!(status, expected, "{told}");
        if expected == 429 {
            assert!((2..=300).contains(&retry), "{retry}");
            let said = told["error"]["message"].as_str().expect("a message");
            assert!(said.contains("max_sessions"), "{told}");
        }
    }
    let tiny = [("x-api-key", "key-of-tiny")];
    assert_eq!(ask(&router, "/v1/messages", &tiny).await.0, 200);
    let (status, retry, told) = ask(&router, "/v1/messages", &tiny).await;
    assert_eq!(status, StatusCode::TOO_MANY_REQUESTS);
    assert!(retry > 60, "{retry}");
    assert_eq!(told["type"], "error");
    assert_eq!(told["error"]["type"], "rate_limit_error");
    let big = [("x-api-key", "key-of-big")];
    assert_eq!(ask(&router, "/v1/messages", &big).await.0, 200);
    router.idle().await;
    let get = |path| {
        router
            .client
            .get(format!("{}{path}", router.url).parse().expect("a URL"))
    };
    assert_eq!(get("/metrics").await.expect("an answer").status(), 401);
    let request = hyper::Request::get(format!("{}/metrics", router.url))
        .header("x-api-key", "key-of-big")
        .body(http_body_util::Full::default())
        .expect("a request");
    let metrics = text(router.client.request(request).await.expect("an answer")).await;
    for line in [
        "deltaserve_tenant{fact=\"refused_sessions\",tenant=\"small\"} 1",
        "deltaserve_tenant{fact=\"refused_tokens\",tenant=\"tiny\"} 1",
        "deltaserve_tenant{fact=\"refused_tokens\",tenant=\"big\"} 0",
    ] {
        assert!(metrics.lines().any(|it| it == line), "{line}: {metrics}");
    }
    let shown = router.fleet.tenants();
    let names: Vec<&str> = shown.iter().map(|of| of.tenant.as_str()).collect();
    assert_eq!(names, ["default", "big", "small", "tiny"]);
    assert!(shown[1].kv_token_seconds > 0.0 && shown[0].kv_token_seconds == 0.0);
    let sessions = router.fleet.sessions();
    let of_a = sessions
        .iter()
        .find(|it| it.session_id.as_deref() == Some("a"));
    assert_eq!(of_a.expect("a place").tenant.as_deref(), Some("small"));
}

#[tokio::test]
async fn a_trusted_gateway_names_the_tenant() {
    let mock = MockWorker::start().await;
    let mut config = config(&mock, json!({"tenant_header": "x-tenant"}));
    for of in config.tenants.values_mut() {
        of.keys.clear();
    }
    let router = Router::with(config).await;
    let chat = "/v1/chat/completions";
    for (tenant, session, expected) in [
        ("small", "a", 200),
        ("small", "b", 429),
        ("big", "a", 200),
        ("big", "b", 200),
        ("nobody", "c", 200),
    ] {
        let headers = [("x-tenant", tenant), ("x-session-id", session)];
        let (status, _, told) = ask(&router, chat, &headers).await;
        assert_eq!(status, expected, "{tenant} {session}: {told}");
    }
    // A session's id is that of its tenant.
    let sessions = router.fleet.sessions();
    let named_a = sessions
        .iter()
        .filter(|it| it.session_id.as_deref() == Some("a"));
    let mut tenants: Vec<_> = named_a.filter_map(|it| it.tenant.as_deref()).collect();
    tenants.sort_unstable();
    assert_eq!(tenants, ["big", "small"]);
}

#[test]
fn what_is_wrong_with_a_tenant_is_told_by_its_field() {
    for (tenants, expected) in [
        (json!({"a": {"weight": 0}}), "tenants.a.weight"),
        (json!({"a": {"max_sessions": 0}}), "tenants.a.max_sessions"),
        (
            json!({"a": {"tokens_per_min": 0}}),
            "tenants.a.tokens_per_min",
        ),
        (json!({"a": {"keys": ["short"]}}), "tenants.a.keys"),
        (
            json!({"a": {"keys": ["env:NO_SUCH_VARIABLE_HERE"]}}),
            "tenants.a.keys",
        ),
        (
            json!({"a": {"keys": ["the-same-key"]}, "b": {"keys": ["the-same-key"]}}),
            "tenants.b.keys",
        ),
    ] {
        let text = json!({"tenants": tenants}).to_string();
        let refused = Config::from_json(&text).and_then(Config::normalise);
        let error = refused.expect_err("refused");
        assert!(error.contains(expected), "{error}");
        assert!(!error.contains("the-same-key"), "{error}");
    }
}
