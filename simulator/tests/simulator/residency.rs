//! What residency costs where it cannot help. Nothing here is a measurement.

use crate::common::{folder, plan, sessions, simulate};
use serde_json::json;
use std::path::Path;

/// Requests answered in a window of 300 s, with so many sessions in flight before so many workers.
fn answered(folder: &Path, rule: &str, in_flight: usize, workers: usize) -> usize {
    let ids = (0..workers).map(|at| format!("w{at}"));
    let workers: Vec<_> = ids
        .map(|id| json!({"id": id, "kv_tokens": 281_888}))
        .collect();
    let changes = json!({
        "load": {"max_inflight_sessions": in_flight},
        "phases": {"warm_up_s": 120.0, "measure_s": 300.0, "drain_s": 60.0, "recycle": true},
        "router": {"policy": "unified", "residency": {"rule": rule}, "kv_events": true},
        "workers": workers,
        "output": {},
    });
    let (_, requests) = simulate(&plan(folder, &changes), folder, rule);
    let answered = requests
        .iter()
        .filter(|line| line["phase"] == "measure" && line["error"].is_null());
    answered.count()
}

#[test]
fn single_prompts_lose_little_by_residency() {
    let folder = folder("single-prompts");
    sessions(&folder.join("planned.jsonl"), 400, 1, 20_000, 0.0);
    // Room for 13 of 24.
    let [off, priced] = ["off", "priced"].map(|rule| answered(&folder, rule, 24, 1));
    println!("simulated, single prompts answered: off {off}, priced {priced}");
    assert!(
        priced as f64 >= 0.95 * off as f64,
        "{priced} of {off}: they wait for each other behind places to which nobody comes back"
    );
}

#[test]
fn short_sessions_use_all_workers_of_a_fleet() {
    let folder = folder("short-sessions");
    sessions(&folder.join("planned.jsonl"), 3_000, 2, 12_000, 5.0);
    let [off, priced] = ["off", "priced"].map(|rule| answered(&folder, rule, 12, 6));
    println!("simulated, turns of short sessions answered: off {off}, priced {priced}");
    assert!(
        priced as f64 >= 0.95 * off as f64,
        "{priced} of {off}: they go behind each other's prompts to the last worker with room"
    );
}
