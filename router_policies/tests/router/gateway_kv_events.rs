//! KV events as they come over ZMQ: gaps, counts that begin anew, pages that nobody configured.

use crate::mock::MockWorker;
use crate::mock::logged;
use crate::mock::router::{Router, until, worker};
use decision::fleet::admission::Residence;
use hyper::StatusCode;
use rmpv::Value;
use router_policies::config::Config;
use serde_json::json;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::mpsc;
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

const PAGE: u32 = 16;

/// A batch that stores one page of tokens from `begin` on, at the root.
fn stored(number: u64, begin: u32) -> ZmqMessage {
    numbered(number, storing(begin))
}

/// A message as engines publish it.
fn numbered(number: u64, payload: Vec<u8>) -> ZmqMessage {
    let mut message = ZmqMessage::from(Vec::<u8>::new());
    message.push_back(number.to_be_bytes().to_vec().into());
    message.push_back(payload.into());
    message
}

fn storing(begin: u32) -> Vec<u8> {
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
    payload
}

/// A mock engine's publisher, and a router that follows it and asks `replay` for what it missed. What is believed
/// comes from events alone.
async fn followed(replay: Option<String>) -> (PubSocket, Router, MockWorker) {
    followed_beside(replay, false).await
}

/// As [`followed`]; where the worker keeps finished prompts, by its `prefix_cache`, there is an estimate of them too.
async fn followed_beside(
    replay: Option<String>,
    prefix_cache: bool,
) -> (PubSocket, Router, MockWorker) {
    followed_as("w", replay, prefix_cache).await
}

async fn followed_as(
    id: &str,
    replay: Option<String>,
    prefix_cache: bool,
) -> (PubSocket, Router, MockWorker) {
    let mut publisher = PubSocket::new();
    let endpoint = publisher.bind("tcp://127.0.0.1:0").await.expect("binds");
    let mock = MockWorker::start().await;
    mock.behaviour.started.store(1, Ordering::SeqCst);
    let mut spec = worker(&mock, id, "colocated");
    spec.kv_events = Some(endpoint.to_string());
    spec.kv_events_replay = replay;
    spec.prefix_cache = prefix_cache;
    let router = Router::with(Config {
        workers: vec![spec],
        health_interval_s: 0.2,
        ..Config::default()
    })
    .await;
    (publisher, router, mock)
}

/// An engine's replay socket that gives `answers` one after another, whatever it is asked for: the numbers of the
/// batches that arrive (batch `n` has the page at token `1_000 * n`), and whether the end of the replay does.
/// Sends on what it was asked for.
async fn replay_socket(answers: Vec<(Vec<u64>, bool)>) -> (String, mpsc::UnboundedReceiver<u64>) {
    slow_replay_socket(answers, Duration::ZERO).await
}

/// As [`replay_socket`], with each answer a `pause` after its question.
async fn slow_replay_socket(
    answers: Vec<(Vec<u64>, bool)>,
    pause: Duration,
) -> (String, mpsc::UnboundedReceiver<u64>) {
    let mut socket = RouterSocket::new();
    let endpoint = socket.bind("tcp://127.0.0.1:0").await.expect("binds");
    let (asked, questions) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        for (numbers, ends) in answers {
            let question = socket.recv().await.expect("a question");
            let from = question.get(2).expect("a number").as_ref().try_into();
            let _ = asked.send(u64::from_be_bytes(from.expect("eight bytes")));
            tokio::time::sleep(pause).await;
            let mut messages: Vec<_> = numbers
                .iter()
                .map(|&number| stored(number, 1_000 * number as u32))
                .collect();
            if ends {
                messages.push(numbered(u64::MAX, Vec::new()));
            }
            for mut message in messages {
                message.push_front(question.get(0).expect("who asks").clone());
                socket.send(message).await.expect("sent");
            }
        }
        // What an engine does that no longer answers.
        std::future::pending::<()>().await;
        drop(socket);
    });
    (endpoint.to_string(), questions)
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
    let (mut publisher, router, _mock) = followed(None).await;
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

#[tokio::test]
async fn a_replay_that_is_cut_short_is_asked_for_again_from_where_it_broke_off() {
    let (replay, mut questions) = replay_socket(vec![
        // Its end was dropped; a part in the middle; nothing.
        (vec![1, 2], false),
        (vec![3, 5, 6], true),
        (vec![4, 5, 6], true),
    ])
    .await;
    let (mut publisher, router, _mock) = followed(Some(replay)).await;
    until_cached(&router, 6_000).await;
    for begin in 1..6 {
        assert_eq!(cached(&router, 1_000 * begin).await, u64::from(PAGE));
    }
    let asked: Vec<_> = std::iter::from_fn(|| questions.try_recv().ok()).collect();
    assert_eq!(asked, [0, 3, 4]);
    publisher.send(stored(7, 7_000)).await.expect("sent");
    until_cached(&router, 7_000).await;
}

#[tokio::test]
async fn a_router_that_comes_late_is_ready_when_it_has_read_what_was_published_before() {
    // What the first answer tells may have been evicted by what the second does.
    let answers = vec![(vec![0, 1], false), (vec![2, 3], true)];
    let (replay, _questions) = slow_replay_socket(answers, Duration::from_millis(300)).await;
    let (_publisher, router, _mock) = followed(Some(replay)).await;
    let is_up = || router.fleet.snapshot().iter().all(|w| w.healthy);
    until("the worker is up", is_up).await;
    assert_eq!(
        router.get("/readyz").await.0,
        StatusCode::SERVICE_UNAVAILABLE
    );
    while router.get("/readyz").await.0 != StatusCode::OK {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(cached(&router, 3_000).await, u64::from(PAGE));
}

#[tokio::test]
async fn a_long_history_takes_no_longer_though_its_engine_drops_most_of_each_answer() {
    const QUEUED: u64 = 600;
    let mut answers: Vec<_> = (0..6)
        .map(|n| ((n * QUEUED..(n + 1) * QUEUED).collect(), false))
        .collect();
    // Dropped in the middle: what follows is of no use.
    answers.push((vec![6 * QUEUED, 6 * QUEUED + 2], false));
    answers.push((vec![6 * QUEUED + 1], true));
    let (replay, _questions) = replay_socket(answers).await;
    let began = std::time::Instant::now();
    let (_publisher, router, _mock) = followed(Some(replay)).await;
    while router.get("/readyz").await.0 != StatusCode::OK {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // A second of silence after each answer is what it took before.
    assert!(began.elapsed() < Duration::from_secs(4));
    assert_eq!(cached(&router, 1_000 * 3_601).await, u64::from(PAGE));
}

#[tokio::test]
async fn a_history_that_is_not_read_in_time_is_told_of_and_waited_for_no_longer() {
    logged::begin();
    let answers = (0..14).map(|number| (vec![number], false)).collect();
    let (replay, _questions) = slow_replay_socket(answers, Duration::from_millis(1500)).await;
    let began = std::time::Instant::now();
    let (_publisher, router, _mock) = followed_as("slow-to-tell", Some(replay), false).await;
    while router.get("/readyz").await.0 != StatusCode::OK {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(began.elapsed() > Duration::from_secs(14));
    until("it is told of", || {
        let told = logged::lines_of("slow-to-tell");
        matches!(&told[..], [line] if line.contains("not all that it published before"))
    })
    .await;
}

#[tokio::test]
async fn a_worker_that_is_down_has_nothing_to_be_read_before_the_router_is_ready() {
    let (up, down) = (MockWorker::start().await, MockWorker::start().await);
    down.behaviour.healthy.store(false, Ordering::SeqCst);
    let mut specs = vec![
        worker(&up, "up", "colocated"),
        worker(&down, "down", "colocated"),
    ];
    specs[1].kv_events = Some("tcp://127.0.0.1:9".to_owned());
    let router = Router::begin(Config {
        workers: specs,
        ..Config::default()
    })
    .await;
    let began = std::time::Instant::now();
    while router.get("/readyz").await.0 != StatusCode::OK {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(began.elapsed() < Duration::from_secs(3));
}

#[tokio::test]
async fn a_worker_that_never_answers_holds_the_router_up_no_longer_than_its_check() {
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("binds");
    let up = MockWorker::start().await;
    let mut specs = vec![
        worker(&up, "up", "colocated"),
        worker(&up, "silent", "colocated"),
    ];
    let address = silent.local_addr().expect("bound");
    specs[1].url = format!("http://{address}");
    specs[1].kv_events = Some("tcp://127.0.0.1:9".to_owned());
    let router = Router::begin(Config {
        workers: specs,
        ..Config::default()
    })
    .await;
    let began = std::time::Instant::now();
    while router.get("/readyz").await.0 != StatusCode::OK {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(began.elapsed() < Duration::from_secs(9));
}

#[tokio::test]
async fn events_are_followed_though_the_replay_fails() {
    // Batch 2 never comes, here and when the first batch that is published shows that others were missed.
    let (replay, mut questions) = replay_socket(vec![(vec![0, 1, 3], true); 5]).await;
    let (mut publisher, router, _mock) = followed(Some(replay)).await;
    tokio::time::sleep(Duration::from_millis(1500)).await;
    publisher.send(stored(9, 9_000)).await.expect("sent");
    until_cached(&router, 9_000).await;
    publisher.send(stored(10, 10_000)).await.expect("sent");
    until_cached(&router, 10_000).await;
    // What came before the gap may have been evicted since.
    assert_eq!(cached(&router, 1_000).await, 0);
    let asked: Vec<_> = std::iter::from_fn(|| questions.try_recv().ok()).collect();
    assert_eq!(asked, [0, 2, 2]);
}

#[tokio::test]
async fn what_came_before_a_batch_that_cannot_be_read_is_not_believed() {
    let (mut publisher, router, _mock) = followed(None).await;
    tokio::time::sleep(Duration::from_millis(1500)).await;
    publisher.send(stored(0, 1_000)).await.expect("sent");
    until_cached(&router, 1_000).await;
    // It may have told that the page was evicted.
    let unreadable = numbered(1, b"no batch".to_vec());
    publisher.send(unreadable).await.expect("sent");
    publisher.send(stored(2, 2_000)).await.expect("sent");
    until_cached(&router, 2_000).await;
    assert_eq!(cached(&router, 1_000).await, 0);
}

#[tokio::test]
async fn where_no_batch_can_be_read_the_estimate_counts() {
    let (mut publisher, router, _mock) = followed_beside(None, true).await;
    tokio::time::sleep(Duration::from_millis(1500)).await;
    for number in 0..3 {
        // As of an engine of another release.
        let unreadable = numbered(number, b"no batch".to_vec());
        publisher.send(unreadable).await.expect("sent");
    }
    let mut no_number = ZmqMessage::from(Vec::<u8>::new());
    no_number.push_back(storing(1_000).into());
    publisher.send(no_number).await.expect("sent");
    tokio::time::sleep(Duration::from_millis(200)).await;
    cached(&router, 5_000).await;
    assert_eq!(cached(&router, 5_000).await, 2 * u64::from(PAGE));
}

#[tokio::test]
async fn what_is_held_stays_known_while_the_worker_cannot_be_reached() {
    let (mut publisher, router, mock) = followed(None).await;
    tokio::time::sleep(Duration::from_millis(1500)).await;
    publisher.send(stored(0, 1_000)).await.expect("sent");
    until_cached(&router, 1_000).await;
    let is_up = || router.fleet.snapshot().iter().all(|w| w.healthy);
    for (is_healthy, what) in [(false, "it is down"), (true, "it is up again")] {
        mock.behaviour.healthy.store(is_healthy, Ordering::SeqCst);
        until(what, || is_up() == is_healthy).await;
        // So that it is noticed where its events are followed.
        tokio::time::sleep(Duration::from_millis(1500)).await;
    }
    assert_eq!(cached(&router, 1_000).await, u64::from(PAGE));
    publisher.send(stored(1, 2_000)).await.expect("sent");
    until_cached(&router, 2_000).await;
    assert_eq!(cached(&router, 1_000).await, u64::from(PAGE));
    // What came before a gap may have been evicted since.
    publisher.send(stored(5, 5_000)).await.expect("sent");
    until_cached(&router, 5_000).await;
    assert_eq!(cached(&router, 1_000).await, 0);
}

#[tokio::test]
async fn events_of_other_tokens_take_no_place_twice_where_the_engine_finds_the_prompt() {
    let (mut publisher, router, mock) = followed_beside(None, true).await;
    // Of the hundred that it counts in every prompt.
    mock.behaviour.cached_tokens.store(90, Ordering::SeqCst);
    tokio::time::sleep(Duration::from_millis(1500)).await;
    publisher.send(stored(0, 500_000)).await.expect("sent");
    until_cached(&router, 500_000).await;
    let mut states = Vec::new();
    for turn in 1..=6 {
        let ids: Vec<u32> = (0..2_000 + 100 * turn).collect();
        let body = json!({"input_ids": ids, "stream": true}).to_string();
        let headers = [("x-session-id", "s")];
        let answer = router.send("/generate", &headers, body.into_bytes()).await;
        assert_eq!(answer.status(), StatusCode::OK);
        crate::mock::router::text(answer).await;
        router.idle().await;
        states.push(router.fleet.sink().recent(1)[0].admission.state);
        // By then events would have told.
        tokio::time::sleep(Duration::from_millis(1100)).await;
    }
    let lost = router.fleet.snapshot()[0].admission.given_up;
    assert!((1..=2).contains(&lost), "{lost}: {states:?}");
    assert_eq!(states[3..], [Residence::Resident; 3], "{states:?}");
}
