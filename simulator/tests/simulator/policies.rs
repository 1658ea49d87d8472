//! Policies on one prefill and three elastic workers under made agentic sessions: whether what
//! `elastic` predicts is what the engines' model then does, and whether its choices are worth having.
//!
//! The speeds are one H200's (the default calibration); nothing here is a measurement. The sessions in
//! flight fit into the caches: where they do not and nobody gates them, what a prediction took for
//! cached is evicted while the request waits (docs/policies.md).

use crate::common::{folder, lines, plan, simulate};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::Path;

const BLOCK: u64 = 64;
/// What all sessions have in common.
const SYSTEM_TOKENS: u64 = 8_000;
const SEEDS: std::ops::RangeInclusive<u64> = 1..=6;

/// Sessions of 5 to 20 turns that think for a second: mostly short turns, some with a large file or
/// tool output in them.
fn agentic(path: &Path, seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut requests: Vec<Value> = Vec::new();
    let shared = SYSTEM_TOKENS / BLOCK;
    let mut next_id = shared;
    for session in 0..80 {
        let mut ids: Vec<u64> = (0..shared).collect();
        let mut input = SYSTEM_TOKENS + random.u64(5_000..40_000);
        let mut previous: Option<usize> = None;
        for turn in 0..random.u64(5..20) {
            if input > 130_000 {
                break;
            }
            let output = random.u64(50..700);
            if turn > 0 {
                // The started block of the prompt before is another now that it is full.
                ids.pop();
            }
            while (ids.len() as u64) < input.div_ceil(BLOCK) {
                ids.push(next_id);
                next_id += 1;
            }
            requests.push(json!({
                "request_id": format!("s{session}:{turn}"), "session_id": format!("s{session}"),
                "turn": turn, "trace_s": turn as f64, "input_length": input, "output_length": output,
                "block_size": BLOCK, "hash_ids": ids, "think_time_s": f64::from(u8::from(turn > 0)),
                "waits_for": previous.into_iter().collect::<Vec<_>>(), "tree": session,
            }));
            previous = Some(requests.len() - 1);
            input += output
                + match random.u32(..10) {
                    0..7 => random.u64(200..3_000),
                    7..9 => random.u64(3_000..12_000),
                    _ => random.u64(12_000..40_000),
                };
        }
    }
    let text: Vec<String> = requests.iter().map(Value::to_string).collect();
    std::fs::write(path, text.join("\n") + "\n").expect("a file");
}

fn quantile(mut values: Vec<f64>, share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let at = (values.len().saturating_sub(1) as f64 * share).round() as usize;
    values.get(at).copied().unwrap_or(f64::NAN)
}

/// Means over the seeds of what one policy did, in seconds.
#[derive(Default)]
struct Summary {
    ttft_mean_s: f64,
    ttft_p90_s: f64,
    /// From arrival to the last token.
    whole_mean_s: f64,
    /// Realised over predicted time to the first token: p50 and p90.
    local: [f64; 2],
    separated: [f64; 2],
}

fn of_policy(policy: &str) -> Summary {
    let mut summary = Summary::default();
    let share = 1.0 / SEEDS.count() as f64;
    let folder = folder(&format!("policy-{policy}"));
    for seed in SEEDS {
        agentic(&folder.join("planned.jsonl"), seed);
        let changes = json!({
            "seed": seed,
            "load": {"max_inflight_sessions": 16},
            "phases": {"warm_up_s": 30.0, "measure_s": 150.0, "drain_s": 120.0, "recycle": true},
            "router": {"policy": policy, "admission": {"rule": "off"}, "kv_events": true},
            "workers": [
                {"id": "p", "role": "prefill", "kv_tokens": 560_000},
                {"id": "e", "count": 3, "role": "elastic", "kv_tokens": 560_000, "target_itl_s": 0.08},
            ],
            "output": {},
        });
        let (_, requests) = simulate(&plan(&folder, &changes), &folder, "run");
        let answered: Vec<&Value> = requests
            .iter()
            .filter(|line| line["phase"] == "measure" && line["error"].is_null())
            .collect();
        let seconds = |line: &Value, key: &str| line[key].as_f64().expect("a time");
        let since_due = |key: &str| -> Vec<f64> {
            let lines = answered.iter();
            lines
                .map(|line| seconds(line, key) - seconds(line, "scheduled_s"))
                .collect()
        };
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
        let ttft_s = since_due("first_token_s");
        summary.ttft_mean_s += share * mean(&ttft_s);
        summary.ttft_p90_s += share * quantile(ttft_s, 0.9);
        summary.whole_mean_s += share * mean(&since_due("finished_s"));
        let decisions = lines(&folder.join("run/decisions.jsonl"));
        let decisions: HashMap<&str, &Value> = decisions
            .iter()
            .filter(|line| line["event"] == "decision")
            .filter_map(|line| Some((line["decision_id"].as_str()?, line)))
            .collect();
        let ratios = |kind: &str| -> Vec<f64> {
            let ratio = |line: &Value| {
                let decision = decisions.get(line["decision_id"].as_str()?)?;
                let took_s = seconds(line, "first_token_s") - seconds(line, "sent_s");
                let predicted_s = decision["predicted_s"].as_f64()?;
                (decision["kind"] == kind).then_some(took_s / predicted_s)
            };
            answered.iter().filter_map(|line| ratio(line)).collect()
        };
        for (found, kind) in [
            (&mut summary.local, "local"),
            (&mut summary.separated, "prefill_decode"),
        ] {
            for (found, at) in found.iter_mut().zip([0.5, 0.9]) {
                *found += share * quantile(ratios(kind), at);
            }
        }
    }
    println!(
        "simulated, {policy}: TTFT mean {:.2} s, p90 {:.2} s; whole mean {:.2} s; realised/predicted p50, p90: local {:.2?}, separated {:.2?}",
        summary.ttft_mean_s,
        summary.ttft_p90_s,
        summary.whole_mean_s,
        summary.local,
        summary.separated,
    );
    summary
}

#[test]
fn elastic_predicts_what_happens_and_is_no_worse_than_the_others() {
    let elastic = of_policy("elastic");
    for [median, p90] in [elastic.local, elastic.separated] {
        assert!((0.8..=1.25).contains(&median), "{median}");
        assert!(p90 <= 1.5, "{p90}");
    }
    for name in ["unified", "offload", "pd"] {
        let other = of_policy(name);
        assert!(elastic.ttft_mean_s <= other.ttft_mean_s, "{name}");
        assert!(elastic.ttft_p90_s <= other.ttft_p90_s, "{name}");
        // What it spares running streams must not cost those that come: level with the best.
        assert!(elastic.whole_mean_s <= 1.02 * other.whole_mean_s, "{name}");
    }
}
