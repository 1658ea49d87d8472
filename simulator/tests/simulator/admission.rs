//! What admission costs where it cannot help. Nothing here is a measurement.

use crate::common::{folder, plan, sessions, simulate};
use serde_json::json;
use std::path::Path;

/// Requests answered in a window of 300 s, with so many sessions in flight before so many workers, with
/// so many tokens in the host tier of each.
fn answered(folder: &Path, rule: &str, in_flight: usize, workers: usize, host: u64) -> usize {
    let ids = (0..workers).map(|at| format!("w{at}"));
    let workers: Vec<_> = ids
        .map(|id| json!({"id": id, "kv_tokens": 281_888, "host_kv_tokens": host}))
        .collect();
    let changes = json!({
        "load": {"max_inflight_sessions": in_flight},
        "phases": {"warm_up_s": 120.0, "measure_s": 300.0, "drain_s": 60.0, "recycle": true},
        "router": {"policy": "unified", "admission": {"rule": rule}, "kv_events": true},
        "workers": workers,
        "output": {},
    });
    let (_, requests) = simulate(&plan(folder, &changes), folder, rule);
    let answered = requests
        .iter()
        .filter(|line| line["phase"] == "measure" && line["error"].is_null());
    answered.count()
}

/// Asserts that the fleet answers with a rule at least `share` of what it answers with `off`; else
/// `because` is what has gone wrong.
fn rules_answer(
    share: f64,
    folder: &Path,
    (in_flight, workers, host): (usize, usize, u64),
    because: &str,
) {
    let off = answered(folder, "off", in_flight, workers, host);
    let answered = answered(folder, "rotate", in_flight, workers, host);
    println!("simulated, turns answered: off {off}, rotate {answered}");
    assert!(
        answered as f64 >= share * off as f64,
        "{answered} of {off}: {because}"
    );
}

#[test]
fn single_prompts_lose_little_by_admission() {
    let folder = folder("single-prompts");
    sessions(&folder.join("planned.jsonl"), 400, 1, 20_000, 0.0);
    // Room for 13 of 24.
    let because = "they wait for each other behind places to which nobody comes back";
    rules_answer(0.95, &folder, (24, 1, 0), because);
}

#[test]
fn short_sessions_use_all_workers_of_a_fleet() {
    let folder = folder("short-sessions");
    sessions(&folder.join("planned.jsonl"), 3_000, 2, 12_000, 5.0);
    let because = "they go behind each other's prompts to the last worker with room";
    rules_answer(0.95, &folder, (12, 6, 0), because);
}

#[test]
fn places_of_sessions_that_ended_long_ago_are_no_reason_to_leave_workers_idle() {
    let folder = folder("ended-long-ago");
    sessions(&folder.join("planned.jsonl"), 3_000, 2, 8_000, 5.0);
    rules_answer(
        0.95,
        &folder,
        (8, 8, 0),
        "new ones crowd where room is left",
    );
}

#[test]
fn sessions_stay_where_the_host_tier_holds_them() {
    let folder = folder("admission-host-tier");
    sessions(&folder.join("planned.jsonl"), 60, 60, 60_000, 5.0);
    // Six on a worker whose device holds four of them, and whose host tier holds eight.
    let because = "they compute anew elsewhere what their home holds";
    rules_answer(0.9, &folder, (24, 4, 600_000), because);
}
