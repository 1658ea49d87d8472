//! What changes in front of what is the same is left out or changed, and shown; nothing else of a body is.

use crate::mock::MockWorker;
use crate::mock::router::{Router, until, worker};
use hyper::StatusCode;
use router_policies::config::{Config, Engine};
use serde_json::{Value, json};
use std::sync::atomic::Ordering;

async fn router_of(mock: &MockWorker, normalise_prompts: bool) -> Router {
    Router::with(Config {
        policy: "unified".to_owned(),
        workers: vec![worker(mock, "w", "colocated")],
        normalise_prompts,
        ..Config::default()
    })
    .await
}

/// As Claude Code sends it; `hash` is another one in each session.
fn asked(hash: &str) -> Value {
    let line = format!("x-anthropic-billing-header: cc_version=2.1.197.{hash}; cc_entrypoint=cli;");
    let reminder = "x-anthropic-billing-header: what a user wrote";
    json!({
        "model": "mock", "max_tokens": 4, "stream": true,
        "system": [{"type": "text", "text": line}, {"type": "text", "text": "You are ".repeat(200)}],
        "messages": [{"role": "user", "content": reminder}],
    })
}

#[tokio::test]
async fn claude_codes_line_of_attribution_does_not_reach_the_engine() {
    let mock = MockWorker::start().await;
    let router = router_of(&mock, true).await;
    for hash in ["a1f", "b2e"] {
        let asked = asked(hash);
        let (status, _) = router.post("/v1/messages", asked.clone()).await;
        assert_eq!(status, StatusCode::OK);
        let sent = mock.behaviour.bodies.lock().pop().expect("a body");
        let whole = asked.to_string();
        let line = asked["system"][0].to_string() + ",";
        assert_eq!(String::from_utf8_lossy(&sent), whole.replacen(&line, "", 1));
    }
    // What two sessions have in common is known to be cached.
    let last = &router.fleet.sink().recent(1)[0];
    assert!(
        last.new_tokens < last.input_tokens / 2,
        "{}",
        last.new_tokens
    );
    router
        .counts("deltaserve_normalised_total{rule=\"claude_code_attribution\"} 2")
        .await;
    let workers: Value = serde_json::from_str(&router.get("/workers").await.1).expect("JSON");
    assert_eq!(workers["normalises"][0]["rule"], "claude_code_attribution");
}

#[tokio::test]
async fn nothing_is_changed_where_that_is_switched_off() {
    let mock = MockWorker::start().await;
    let router = router_of(&mock, false).await;
    let asked = asked("a1f");
    router.post("/v1/messages", asked.clone()).await;
    let sent = mock.behaviour.bodies.lock().pop().expect("a body");
    assert_eq!(String::from_utf8_lossy(&sent), asked.to_string());
    let workers: Value = serde_json::from_str(&router.get("/workers").await.1).expect("JSON");
    assert_eq!(workers["normalises"], json!([]));
}

#[tokio::test]
async fn later_system_messages_are_user_messages_before_vllm_and_stay_before_sglang() {
    for is_vllm in [true, false] {
        let mock = MockWorker::start().await;
        mock.behaviour.is_vllm.store(is_vllm, Ordering::SeqCst);
        let router = router_of(&mock, true).await;
        until("its engine is known", || {
            let workers = router.fleet.snapshot();
            let is = |engine| {
                workers
                    .iter()
                    .any(|it| it.healthy && it.spec.engine == engine)
            };
            is(if is_vllm {
                Engine::Vllm
            } else {
                Engine::Sglang
            })
        })
        .await;
        let turn = |role: &str| json!({"role": role, "content": "words"});
        let turns = ["system", "user", "assistant", "user", "system"].map(turn);
        let asked = json!({"model": "mock", "max_tokens": 4, "messages": turns});
        assert_eq!(router.post("/v1/messages", asked).await.0, StatusCode::OK);
        let sent = mock.bodies().pop().expect("a body");
        let role = |at: usize| sent["messages"][at]["role"].as_str();
        assert_eq!(role(0), Some("system"));
        assert_eq!(role(4), Some(if is_vllm { "user" } else { "system" }));
    }
}
