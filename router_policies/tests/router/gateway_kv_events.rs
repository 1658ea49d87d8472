//! KV events as they come over ZMQ: gaps, counts that begin anew, pages that nobody configured.

use crate::mock::MockWorker;
use crate::mock::router::{Router, worker};
use rmpv::Value;
use router_policies::config::Config;
use serde_json::json;
use std::time::Duration;
use zeromq::{PubSocket, Socket, SocketSend, ZmqMessage};

const PAGE: u32 = 16;

/// A batch that stores one page of tokens from `begin` on, at the root.
fn stored(number: u64, begin: u32) -> ZmqMessage {
    let ints = |numbers: std::ops::Range<u32>| Value::Array(numbers.map(Value::from).collect());
    let event = Value::Array(vec![
        "BlockStored".into(),
        ints(begin..begin + 1),
        Value::Nil,
        ints(begin..begin + PAGE),
        PAGE.into(),
    ]);
    let batch = Value::Array(vec![Value::from(1.5), Value::Array(vec![event])]);
    let mut payload = Vec::new();
    rmpv::encode::write_value(&mut payload, &batch).expect("a vector takes everything");
    let mut message = ZmqMessage::from(Vec::<u8>::new());
    message.push_back(number.to_be_bytes().to_vec().into());
    message.push_back(payload.into());
    message
}

/// What the router believes to be cached of a prompt of tokens from `begin` on.
async fn cached(router: &Router, begin: u32) -> u64 {
    let ids: Vec<u32> = (begin..begin + 40).collect();
    router.post("/generate", json!({"input_ids": ids})).await;
    let decision = router.fleet.sink().recent(1).remove(0);
    decision.input_tokens - decision.new_tokens
}

async fn until_cached(router: &Router, begin: u32) {
    for _ in 0..100 {
        if cached(router, begin).await == u64::from(PAGE) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("nothing is known of the page at {begin}");
}

#[tokio::test]
async fn events_are_followed_though_their_count_begins_anew_anywhere() {
    let mut publisher = PubSocket::new();
    let endpoint = publisher.bind("tcp://127.0.0.1:0").await.expect("binds");
    let mock = MockWorker::start().await;
    let mut spec = worker(&mock, "w", "colocated");
    spec.kv_events = Some(endpoint.to_string());
    // What is believed then comes from events alone.
    spec.prefix_cache = false;
    let router = Router::with(Config {
        workers: vec![spec],
        ..Config::default()
    })
    .await;
    // The subscription takes a moment, and publishers send to nobody who is not there yet.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    publisher.send(stored(0, 1_000)).await.expect("sent");
    until_cached(&router, 1_000).await;
    publisher.send(stored(9, 2_000)).await.expect("sent");
    until_cached(&router, 2_000).await;
    // The engine was restarted, which nothing else shows, and its first batch was missed.
    publisher.send(stored(1, 3_000)).await.expect("sent");
    until_cached(&router, 3_000).await;
    publisher.send(stored(2, 4_000)).await.expect("sent");
    until_cached(&router, 4_000).await;
}
