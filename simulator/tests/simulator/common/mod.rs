//! What tests of whole runs share: made sessions, a plan of them, and the files of a run.

use serde_json::{Value, json};
use simulator::plan::Plan;
use simulator::{Report, run};
use std::path::{Path, PathBuf};

pub const BLOCK: u64 = 64;

/// A folder of this test's own, emptied.
pub fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).expect("a folder");
    path
}

/// Sessions whose prompts grow by the answer and some new tokens, turn by turn.
pub fn sessions(path: &Path, count: u64, turns: u64, first_tokens: u64, think_s: f64) {
    let mut random = fastrand::Rng::with_seed(7);
    let mut lines: Vec<Value> = Vec::new();
    let mut next_id = 1u64;
    for session in 0..count {
        let mut ids: Vec<u64> = Vec::new();
        let mut input = first_tokens + random.u64(0..500);
        let mut previous: Option<usize> = None;
        for turn in 0..turns {
            let output = random.u64(2..200);
            let blocks = input.div_ceil(BLOCK) as usize;
            // The started block of the prompt before is another now that it is full.
            ids.truncate(ids.len().saturating_sub(1));
            while ids.len() < blocks {
                ids.push(next_id);
                next_id += 1;
            }
            lines.push(json!({
                "request_id": format!("s{session}:{turn}"), "session_id": format!("s{session}"),
                "turn": turn, "trace_s": session as f64 * 3.0 + turn as f64,
                "input_length": input, "output_length": output, "block_size": BLOCK,
                "hash_ids": ids, "think_time_s": think_s * random.f64(),
                "waits_for": previous.into_iter().collect::<Vec<_>>(), "tree": session,
            }));
            previous = Some(lines.len() - 1);
            input += output + random.u64(10..1_000);
        }
    }
    let text: Vec<String> = lines.iter().map(Value::to_string).collect();
    std::fs::write(path, text.join("\n") + "\n").expect("a file");
}

pub fn plan(folder: &Path, changes: &Value) -> Plan {
    let mut plan = json!({
        "requests": folder.join("planned.jsonl"), "seed": 3,
        "load": {"max_inflight_sessions": 6, "max_think_s": 5.0},
        "router": {"policy": "unified", "admission": {"rule": "off"}},
        "workers": [{"id": "w", "count": 2, "kv_tokens": 30_000}],
        "output": {"all_arrivals": true},
    });
    for (key, value) in changes.as_object().expect("an object") {
        plan[key] = value.clone();
    }
    let plan: Plan = serde_json::from_value(plan).expect("a plan");
    plan.check().expect("a plan");
    plan
}

pub fn simulate(plan: &Plan, folder: &Path, name: &str) -> (Report, Vec<Value>) {
    let out = folder.join(name);
    let report = run(plan, &out).expect("a run");
    (report, lines(&out.join("requests.jsonl")))
}

pub fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).expect("a file");
    let lines = text.lines().map(serde_json::from_str);
    lines.collect::<Result<_, _>>().expect("JSON lines")
}

pub fn sum(lines: &[Value], key: &str) -> u64 {
    lines
        .iter()
        .map(|line| line[key].as_u64().expect(key))
        .sum()
}
