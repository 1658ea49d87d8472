//! Models under other names, those that nobody serves, and engines that are not what they were entered as.

use crate::mock::MockWorker;
use crate::mock::router::{Router, until, worker};
use hyper::StatusCode;
use router_policies::config::{Config, Engine};
use serde_json::{Value, json};
use std::sync::atomic::Ordering;

async fn aliased() -> (MockWorker, Router) {
    let mock = MockWorker::start().await;
    let models = [
        ("claude-haiku-*", "mock"),
        ("small", "mock"),
        ("*", "listed/only"),
    ];
    let config = Config {
        policy: "unified".to_owned(),
        workers: vec![worker(&mock, "w", "colocated")],
        models: models
            .map(|(name, model)| (name.to_owned(), model.to_owned()))
            .into(),
        ..Config::default()
    };
    (mock, Router::with(config).await)
}

#[tokio::test]
async fn a_model_asked_for_by_an_alias_is_served_under_its_own_name() {
    let (mock, router) = aliased().await;
    let turns = json!([{"role": "user", "content": "hi"}]);
    for (path, asked, model) in [
        ("/v1/messages", "claude-haiku-4-5", "mock"),
        ("/v1/chat/completions", "small", "mock"),
        ("/v1/chat/completions", "mock", "listed/only"),
        ("/v1/messages/count_tokens", "claude-haiku-4-5", "mock"),
    ] {
        let body = json!({"model": asked, "max_tokens": 4, "messages": turns, "kept": 1});
        assert_eq!(router.post(path, body).await.0, StatusCode::OK, "{path}");
        let sent = mock.bodies().pop().expect("a body");
        assert_eq!(sent["model"], model, "{path}");
        assert_eq!(sent["kept"], 1);
    }
    let (_, list) = router.get("/v1/models").await;
    let list: Value = serde_json::from_str(&list).expect("JSON");
    let small = list["data"]
        .as_array()
        .expect("a list")
        .iter()
        .find(|it| it["id"] == "small");
    assert_eq!(small.expect("listed")["root"], "mock");
    let (status, one) = router.get("/v1/models/claude-haiku-4-5").await;
    assert_eq!(status, StatusCode::OK, "{one}");
    assert_eq!(
        serde_json::from_str::<Value>(&one).expect("JSON")["id"],
        "mock"
    );
}

#[tokio::test]
async fn a_model_that_nobody_lists_is_refused_in_the_apis_own_words() {
    let mock = MockWorker::start().await;
    let router = Router::start("unified", vec![worker(&mock, "w", "colocated")]).await;
    mock.set_fault(crate::mock::Fault::Status(404));
    let turns = json!([{"role": "user", "content": "hi"}]);
    let ask = async |path: &str, model: &str| {
        let body = json!({"model": model, "max_tokens": 4, "messages": turns, "stream": true});
        let (status, told) = router.post(path, body).await;
        assert_eq!(status, StatusCode::NOT_FOUND);
        serde_json::from_str::<Value>(&told).expect("JSON")
    };
    let told = ask("/v1/messages", "gpt-x").await;
    assert_eq!(
        told,
        json!({"type": "error", "error": {"type": "not_found_error", "message": "model: gpt-x"}})
    );
    let told = ask("/v1/chat/completions", "gpt-x").await;
    assert_eq!(told["error"]["code"], "model_not_found");
    // The engine's own words where it is another thing that was not found.
    let told = ask("/v1/chat/completions", "mock").await;
    assert_eq!(told["error"]["message"], "told to fail");
}

#[tokio::test]
async fn a_vllm_that_nobody_called_so_is_known_as_one_and_its_capacity_with_it() {
    let mock = MockWorker::start().await;
    mock.behaviour.is_vllm.store(true, Ordering::SeqCst);
    let router = Router::start("unified", vec![worker(&mock, "w", "colocated")]).await;
    until("its capacity is known", || {
        let workers = router.fleet.snapshot();
        workers
            .iter()
            .any(|it| it.kv_capacity_tokens == Some(144) && it.healthy)
    })
    .await;
    let workers = router.fleet.snapshot();
    assert_eq!(workers.len(), 1);
    assert_eq!(
        (&*workers[0].spec.id, workers[0].spec.engine),
        ("w", Engine::Vllm)
    );
    let asked = json!({"model": "mock", "prompt": "hi"});
    assert_eq!(
        router.post("/v1/completions", asked).await.0,
        StatusCode::OK
    );
}

#[tokio::test]
async fn the_tokenizer_of_the_folder_that_all_workers_name_counts() {
    let folder = std::env::temp_dir().join(format!("router-model-{:x}", fastrand::u64(..)));
    std::fs::create_dir_all(&folder).expect("a folder");
    let vocab = json!({"a": 0, "b": 1, "ab": 2});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null,
        "model": {"type": "BPE", "vocab": vocab, "merges": ["a b"]},
    });
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).expect("written");
    let mocks = [MockWorker::start().await, MockWorker::start().await];
    for mock in &mocks {
        *mock.behaviour.model_path.lock() = folder.display().to_string();
    }
    let workers = vec![
        worker(&mocks[0], "a", "colocated"),
        worker(&mocks[1], "b", "colocated"),
    ];
    let router = Router::start("unified", workers).await;
    let counted = async || {
        let asked = json!({"model": "mock", "prompt": "ab".repeat(300)});
        router.post("/v1/completions", asked).await;
        router.fleet.sink().recent(1)[0].input_tokens
    };
    assert_eq!(counted().await, 300);
    std::fs::remove_dir_all(&folder).expect("removed");
}
