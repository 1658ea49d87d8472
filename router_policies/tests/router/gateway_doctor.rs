//! The cache doctor: where a prompt first differs from its session's last one, or from the nearest session's, is
//! named where the engine's count says that it cost something.

use crate::mock::MockWorker;
use crate::mock::router::{Router, text, worker};
use hyper::StatusCode;
use router_policies::config::Config;
use serde_json::{Value, json};
use std::sync::atomic::Ordering;

/// What the mock says of every prompt.
const PROMPT_TOKENS: u64 = 100;
/// Enough of them, and far too few.
const ALL: u64 = PROMPT_TOKENS;
const FEW: u64 = 10;

async fn router_of(mock: &MockWorker) -> Router {
    Router::with(Config {
        policy: "unified".to_owned(),
        workers: vec![worker(mock, "w", "colocated")],
        ..Config::default()
    })
    .await
}

fn tool(name: &str, what: &str) -> Value {
    json!({"type": "function", "function": {"name": name, "description": what.repeat(30)}})
}

/// A conversation about `system`, in which user and assistant take turns.
fn talk(system: &str, turns: &[&str]) -> Value {
    let speakers = ["user", "assistant"].iter().cycle();
    let turns = speakers.zip(turns);
    let turns = turns.map(|(role, text)| json!({"role": role, "content": text.repeat(40)}));
    let first = json!({"role": "system", "content": system});
    let messages: Vec<Value> = std::iter::once(first).chain(turns).collect();
    json!({
        "model": "mock", "stream": true, "messages": messages,
        "tools": [tool("bash", "run it "), tool("read", "read it ")],
    })
}

fn system(line: &str) -> String {
    format!(
        "{} The date is {line}. {}",
        "You help. ".repeat(100),
        "Be brief. ".repeat(100)
    )
}

/// What is found of a turn of which the engine had so much cached.
async fn found(
    router: &Router,
    mock: &MockWorker,
    session: &str,
    asked: &Value,
    cached: u64,
) -> Value {
    mock.behaviour
        .cached_tokens
        .store(cached, Ordering::Relaxed);
    let path = match asked.get("messages") {
        Some(_) => "/v1/chat/completions",
        None => "/generate",
    };
    let headers = [("x-session-id", session)];
    let answer = router.send(path, &headers, asked.to_string().into_bytes());
    let answer = answer.await;
    assert_eq!(answer.status(), StatusCode::OK);
    text(answer).await;
    router.idle().await;
    let session: Value =
        serde_json::from_str(&router.get(&format!("/sessions/{session}")).await.1).expect("JSON");
    assert_eq!(session["turns"][0]["ended"]["cached_tokens"], cached);
    session["turns"][0]["difference"].clone()
}

#[tokio::test]
async fn a_turn_that_goes_on_has_no_difference_and_may_have_been_evicted() {
    let mock = MockWorker::start().await;
    let router = router_of(&mock).await;
    let day = system("Monday");
    let first = talk(&day, &["a"]);
    assert_eq!(found(&router, &mock, "s", &first, 0).await, Value::Null);
    let second = talk(&day, &["a", "b", "c"]);
    assert_eq!(found(&router, &mock, "s", &second, ALL).await, Value::Null);
    let third = talk(&day, &["a", "b", "c", "d", "e"]);
    let told = found(&router, &mock, "s", &third, FEW).await;
    assert_eq!(told["why"], "evicted");
    assert_eq!(told["part"], Value::Null);
    assert_eq!(
        (&told["token"], &told["lost_tokens"]),
        (&json!(10), &json!(90))
    );
    router
        .counts("deltaserve_prefix_broken_tokens_total{why=\"evicted\",worker=\"w\"} 90")
        .await;
}

#[tokio::test]
async fn what_changed_in_front_of_a_conversation_is_named_with_the_text_beside_it() {
    let mock = MockWorker::start().await;
    let router = router_of(&mock).await;
    let before = talk(&system("Monday"), &["a", "b", "c"]);
    // Of each change: the part's key, its place, its name, and what stands there now.
    let mut tools = before.clone();
    tools["tools"][1] = tool("read", "read all ");
    let mut fewer = before.clone();
    fewer["tools"].as_array_mut().expect("tools").pop();
    for (session, after, part, index, name, now) in [
        (
            "line",
            talk(&system("Tuesday"), &["a", "b", "c"]),
            "messages",
            0,
            "system",
            "Tuesday",
        ),
        ("tool", tools, "tools", 1, "read", "read all"),
        ("fewer", fewer, "tools", 1, "", ""),
        (
            "edit",
            talk(&system("Monday"), &["a", "B", "c"]),
            "messages",
            2,
            "assistant",
            "BBB",
        ),
    ] {
        found(&router, &mock, session, &before, ALL).await;
        // As long as the engine has it all, nobody is told.
        assert_eq!(
            found(&router, &mock, session, &after, ALL).await,
            Value::Null
        );
        found(&router, &mock, session, &before, ALL).await;
        let told = found(&router, &mock, session, &after, FEW).await;
        assert_eq!(told["why"], "changed", "{session}");
        assert_eq!(told["part"], part, "{session}");
        assert_eq!(told["index"], index, "{session}");
        assert_eq!(told["name"].as_str().unwrap_or(""), name, "{session}");
        let shown = told["text"].as_str().unwrap_or("");
        assert!(
            shown.contains(now) && shown.len() <= 80,
            "{session}: {shown}"
        );
        assert_eq!(told["beside"], Value::Null);
        assert_eq!(told["lost_tokens"], 90);
    }
    router
        .counts("deltaserve_prefix_broken_tokens_total{why=\"changed\",worker=\"w\"} 360")
        .await;
}

#[tokio::test]
async fn a_compaction_is_called_one() {
    let mock = MockWorker::start().await;
    let router = router_of(&mock).await;
    let day = system("Monday");
    found(
        &router,
        &mock,
        "s",
        &talk(&day, &["a", "b", "c", "d", "e"]),
        ALL,
    )
    .await;
    let told = found(&router, &mock, "s", &talk(&day, &["in short"]), FEW).await;
    assert_eq!(told["why"], "compaction");
    assert_eq!(
        (&told["part"], &told["index"]),
        (&json!("messages"), &json!(1))
    );
    // What follows goes on from it.
    let next = talk(&day, &["in short", "b", "c"]);
    assert_eq!(found(&router, &mock, "s", &next, ALL).await, Value::Null);
}

#[tokio::test]
async fn a_new_session_is_seen_beside_its_nearest_as_far_as_agents_begin_alike() {
    let mock = MockWorker::start().await;
    let router = router_of(&mock).await;
    found(
        &router,
        &mock,
        "far",
        &json!({"text": "x".repeat(4000), "stream": true}),
        ALL,
    )
    .await;
    found(
        &router,
        &mock,
        "near",
        &talk(&system("Monday"), &["a"]),
        ALL,
    )
    .await;
    let told = found(
        &router,
        &mock,
        "new",
        &talk(&system("Tuesday"), &["z"]),
        FEW,
    )
    .await;
    assert_eq!(
        (&told["beside"], &told["why"]),
        (&json!("near"), &json!("changed"))
    );
    assert_eq!(
        (&told["part"], &told["index"]),
        (&json!("messages"), &json!(0))
    );
    assert!(told["text"].as_str().expect("text").contains("Tuesday"));
    let lost = told["lost_tokens"].as_u64().expect("a number");
    assert!(
        (70..90).contains(&lost),
        "of tools and system alone: {lost}"
    );
    // Each has its own first message.
    let other = talk(&system("Monday"), &["q"]);
    assert_eq!(
        found(&router, &mock, "other", &other, FEW).await,
        Value::Null
    );
}

#[tokio::test]
async fn marks_that_move_on_are_no_change() {
    let mock = MockWorker::start().await;
    let router = router_of(&mock).await;
    let day = system("Monday");
    let mark = |mut asked: Value, at: usize| {
        let text = asked["messages"][at]["content"].take();
        let mark = json!({"type": "ephemeral"});
        asked["messages"][at]["content"] =
            json!([{"type": "text", "text": text, "cache_control": mark}]);
        asked
    };
    found(&router, &mock, "s", &mark(talk(&day, &["a"]), 1), ALL).await;
    let next = mark(talk(&day, &["a", "b", "c"]), 3);
    let told = found(&router, &mock, "s", &next, FEW).await;
    assert_eq!(told["why"], "evicted");
}

#[tokio::test]
async fn a_text_prompt_has_its_place_in_bytes() {
    let mock = MockWorker::start().await;
    let router = router_of(&mock).await;
    let asked = |end: &str| json!({"text": "word ".repeat(100) + end, "stream": true});
    found(&router, &mock, "s", &asked(&"one ".repeat(100)), ALL).await;
    let told = found(&router, &mock, "s", &asked(&"two ".repeat(100)), FEW).await;
    assert_eq!(
        (&told["part"], &told["offset"]),
        (&json!("prompt"), &json!(448))
    );
    assert!(told["text"].as_str().expect("text").contains("two"));
}

#[tokio::test]
async fn text_of_prompts_is_for_the_admin_alone_and_in_no_log() {
    let folder = std::env::temp_dir().join(format!("doctor-{:x}", fastrand::u64(..)));
    std::fs::create_dir_all(&folder).expect("a folder");
    let (keys, log) = (folder.join("keys"), folder.join("d.jsonl"));
    std::fs::write(&keys, "a-clients-key\n").expect("written");
    for (admin_token, asks, shows) in [
        (None, "a-clients-key", false),
        (Some("the-admin"), "the-admin", true),
    ] {
        let mock = MockWorker::start().await;
        let router = Router::with(Config {
            policy: "unified".to_owned(),
            workers: vec![worker(&mock, "w", "colocated")],
            api_keys_file: Some(keys.clone()),
            admin_token: admin_token.map(str::to_owned),
            decision_log: Some(log.clone()),
            ..Config::default()
        })
        .await;
        mock.behaviour.cached_tokens.store(FEW, Ordering::Relaxed);
        for day in ["Monday", "Tuesday"] {
            let asked = talk(&system(day), &["a"]).to_string().into_bytes();
            let headers = [("x-session-id", "s"), ("x-api-key", "a-clients-key")];
            text(router.send("/v1/chat/completions", &headers, asked).await).await;
        }
        router.idle().await;
        let request = hyper::Request::get(format!("{}/sessions/s", router.url))
            .header("authorization", format!("Bearer {asks}"))
            .body(http_body_util::Full::default())
            .expect("a request");
        let answer = router.client.request(request).await.expect("an answer");
        let told: Value = serde_json::from_str(&text(answer).await).expect("JSON");
        let difference = &told["turns"][0]["difference"];
        assert_eq!(difference["why"], "changed");
        assert_eq!(difference["text"].is_string(), shows);
        drop(router);
    }
    let logged = std::fs::read_to_string(&log).expect("a log");
    assert!(logged.contains("decision_id") && !logged.contains("Tuesday"));
    std::fs::remove_dir_all(&folder).expect("removed");
}
