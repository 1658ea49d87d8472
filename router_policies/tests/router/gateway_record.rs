//! What goes by is recorded: as a trace, without a word of it, and in files that stand alone.

use crate::mock::MockWorker;
use crate::mock::router::{Router, text, worker};
use hyper::StatusCode;
use router_policies::config::Config;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const BLOCK_BYTES: usize = 2048;

struct Recording {
    mock: MockWorker,
    router: Router,
    folder: PathBuf,
}

impl Drop for Recording {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

impl Recording {
    async fn start(record_max_mb: f64) -> Self {
        let folder = std::env::temp_dir().join(format!("record-{:x}", fastrand::u64(..)));
        std::fs::create_dir_all(&folder).expect("a folder");
        let mock = MockWorker::start().await;
        let router = Router::with(Config {
            policy: "unified".to_owned(),
            workers: vec![worker(&mock, "w", "colocated")],
            record: Some(folder.join("r.jsonl")),
            record_max_mb,
            ..Config::default()
        })
        .await;
        Self {
            mock,
            router,
            folder,
        }
    }

    async fn turn(&self, headers: &[(&str, &str)], prompt: &str) {
        let asked = json!({"text": prompt, "stream": true}).to_string();
        let answer = self.router.send("/generate", headers, asked.into_bytes());
        let answer = answer.await;
        assert_eq!(answer.status(), StatusCode::OK);
        text(answer).await;
    }

    async fn lines(&self, count: usize) -> Vec<Value> {
        let begun = Instant::now();
        loop {
            let lines = read(&self.folder.join("r.jsonl"));
            if lines.len() >= count {
                return lines;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "{}", lines.len());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

fn read(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).expect("text");
    let lines = text.lines().map(serde_json::from_str);
    lines.collect::<Result<_, _>>().expect("whole lines")
}

fn ids(line: &Value) -> Vec<u64> {
    let ids = line["hash_ids"].as_array().expect("a list").iter();
    ids.map(|id| id.as_u64().expect("a number")).collect()
}

fn common(one: &Value, other: &Value) -> usize {
    let (one, other) = (ids(one), ids(other));
    one.iter().zip(&other).take_while(|(a, b)| a == b).count()
}

#[tokio::test]
async fn a_recording_has_who_goes_on_from_whom_and_no_word_of_it() {
    let recording = Recording::start(100.0).await;
    let words = |word: &str, blocks: usize| word.repeat(blocks * BLOCK_BYTES / word.len());
    let first = words("secrets ", 3);
    let main = [("x-session-id", "my-own-session")];
    recording.turn(&main, &first).await;
    let agent = [
        ("x-session-id", "my-own-agent"),
        ("x-parent-session", "my-own-session"),
    ];
    recording
        .turn(&agent, &(words("secrets ", 1) + &words("another ", 2)))
        .await;
    tokio::time::sleep(Duration::from_millis(60)).await;
    recording
        .turn(&main, &(first.clone() + &words("more of ", 2) + "end"))
        .await;
    recording.turn(&[], "alone").await;
    let lines = recording.lines(4).await;
    let of = |key: &str| {
        lines
            .iter()
            .map(|line| line[key].clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(of("request_id"), ["r1", "r2", "r3", "r4"]);
    assert_eq!(of("session_id"), ["s0", "s1", "s0", "s2"]);
    assert_eq!(of("turn"), [0, 0, 1, 0]);
    assert_eq!(of("input_length"), [1536, 1536, 2561, 2]);
    assert_eq!(
        of("parent_request_id"),
        [json!(null), json!("r1"), json!("r2"), json!(null)]
    );
    assert!(lines[2]["think_time_s"].as_f64().expect("seconds") >= 0.06);
    assert_eq!(lines[1]["think_time_s"], Value::Null);
    let is_long = |it: &Value| it.as_u64().is_some_and(|tokens| tokens >= 1);
    assert!(of("output_length").iter().all(is_long));
    let times: Vec<f64> = of("timestamp_s").iter().filter_map(Value::as_f64).collect();
    assert!(times.is_sorted() && times[0] == 0.0, "{times:?}");
    assert_eq!(
        lines.iter().map(|line| ids(line).len()).collect::<Vec<_>>(),
        [3, 3, 6, 1]
    );
    assert_eq!(
        (common(&lines[0], &lines[1]), common(&lines[0], &lines[2])),
        (1, 3)
    );
    let objects = lines.iter().filter_map(Value::as_object);
    let keys: BTreeSet<_> = objects.flat_map(|line| line.keys()).collect();
    let known = "block_size hash_ids input_length output_length parent_request_id request_id session_id \
                 think_time_s timestamp_s turn";
    assert_eq!(
        keys.into_iter().cloned().collect::<Vec<_>>().join(" "),
        known
    );
    let written = std::fs::read_to_string(recording.folder.join("r.jsonl")).expect("text");
    let words = ["secrets", "another", "my-own", "alone"];
    assert!(!words.iter().any(|word| written.contains(word)));
}

#[tokio::test]
async fn a_turn_that_still_runs_holds_what_came_later_and_one_that_fails_does_not() {
    let recording = Recording::start(100.0).await;
    recording
        .mock
        .behaviour
        .token_us
        .store(150_000, Ordering::Relaxed);
    let slow = recording.turn(&[("x-session-id", "slow")], "slow");
    let quick = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        recording
            .mock
            .behaviour
            .token_us
            .store(0, Ordering::Relaxed);
        recording
            .turn(&[("x-session-id", "quick")], "quick and longer")
            .await;
        let shown: Value =
            serde_json::from_str(&recording.router.get("/record").await.1).expect("JSON");
        assert_eq!((&shown["requests"], &shown["held"]), (&json!(0), &json!(2)));
    };
    tokio::join!(slow, quick);
    let lines = recording.lines(2).await;
    assert_eq!(
        (&lines[0]["input_length"], &lines[1]["input_length"]),
        (&json!(1), &json!(4))
    );
    let answer = recording
        .router
        .send("/generate", &[], b"{\"text\":1}".to_vec())
        .await;
    assert_eq!(answer.status(), StatusCode::BAD_REQUEST);
    recording.turn(&[], "after").await;
    assert_eq!(recording.lines(3).await.len(), 3);
}

#[tokio::test]
async fn it_is_switched_off_and_on_and_each_file_stands_alone() {
    let recording = Recording::start(1.0).await;
    let (status, said) = recording.router.post("/record/stop", json!(null)).await;
    assert_eq!(status, StatusCode::UNSUPPORTED_MEDIA_TYPE, "{said}");
    let (_, said) = recording.router.post_json("/record/stop", json!({})).await;
    assert_eq!(
        serde_json::from_str::<Value>(&said).expect("JSON")["on"],
        false
    );
    recording.turn(&[], "unseen").await;
    let (_, said) = recording.router.post_json("/record/start", json!({})).await;
    assert_eq!(
        serde_json::from_str::<Value>(&said).expect("JSON")["on"],
        true
    );
    // Some 10 kB a line, of which half a MB is kept in a file.
    let prompt = "word ".repeat(200_000);
    for _ in 0..90 {
        recording.turn(&[("x-session-id", "s")], &prompt).await;
    }
    let begun = Instant::now();
    let older = recording.folder.join("r.1.jsonl");
    while !older.exists() || read(&older).len() + read(&recording.folder.join("r.jsonl")).len() < 90
    {
        assert!(begun.elapsed() < Duration::from_secs(60));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let (older, newer) = (read(&older), read(&recording.folder.join("r.jsonl")));
    assert_eq!(older.len() + newer.len(), 90, "nothing twice, nothing lost");
    for lines in [&older, &newer] {
        assert_eq!(
            (&lines[0]["turn"], &lines[0]["timestamp_s"]),
            (&json!(0), &json!(0.0))
        );
        assert_eq!(lines[0]["session_id"], "s0");
    }
    assert_eq!(common(&older[0], &older[1]), ids(&older[0]).len() - 1);
    assert_eq!(common(&older[0], &newer[0]), 0, "another key");
}
