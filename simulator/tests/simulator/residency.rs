//! What residency costs where it cannot help. Nothing here is a measurement.

use crate::common::{folder, plan, sessions, simulate};
use serde_json::json;
use std::path::Path;

/// Prompts of 20,000 tokens that nothing follows, 24 in flight before room for 13: requests answered
/// in a window of 300 s.
fn single_prompts(folder: &Path, rule: &str) -> usize {
    let changes = json!({
        "load": {"max_inflight_sessions": 24},
        "phases": {"warm_up_s": 120.0, "measure_s": 300.0, "drain_s": 60.0, "recycle": true},
        "router": {"policy": "unified", "residency": {"rule": rule}, "kv_events": true},
        "workers": [{"id": "w", "kv_tokens": 281_888}],
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
    let [off, priced] = ["off", "priced"].map(|rule| single_prompts(&folder, rule));
    println!("simulated, single prompts answered: off {off}, priced {priced}");
    assert!(
        priced as f64 >= 0.95 * off as f64,
        "{priced} of {off}: they wait for each other behind places to which nobody comes back"
    );
}
