//! The router's policies against each other: one prefill and three elastic workers under coding
//! sessions, with the simulated engines and the constants of an H200.
//!
//! Nothing here is a measurement. It shows whether what `elastic` predicts follows from what the
//! engines do, and that its defaults suit the fleet that they are meant for.

use crate::common::{Shape, folder, lines, plan, sessions_of, simulate};
use serde_json::{Value, json};
use std::collections::HashMap;

const SEEDS: std::ops::RangeInclusive<u64> = 1..=4;
/// Of a run's requests; before, the router's rates are still being learnt.
const LEARNING_SHARE: f64 = 1.0 / 6.0;

/// Mostly short turns, some with a large file or a tool's output in them.
fn new_tokens(random: &mut fastrand::Rng) -> u64 {
    match random.u32(..10) {
        0..7 => random.u64(200..3_000),
        7..9 => random.u64(3_000..12_000),
        _ => random.u64(12_000..40_000),
    }
}

/// Means over the seeds of what one policy did; times in seconds.
#[derive(Debug, Default)]
struct Summary {
    ttft_mean_s: f64,
    ttft_p90_s: f64,
    whole_mean_s: f64,
    worst_gap_p90_s: f64,
    /// TTFT p90 of the worker with the longest over that of the one in the middle.
    hotspot: f64,
    /// Realised over predicted time to the first token, p90.
    local_ratio: f64,
    separated_ratio: f64,
    separated_share: f64,
}

fn quantile(values: impl IntoIterator<Item = f64>, share: f64) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let last = values.len().saturating_sub(1);
    let at = (last as f64 * share).round() as usize;
    values.get(at).copied().unwrap_or(f64::NAN)
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn seconds(line: &Value, from: &str, to: &str) -> f64 {
    let time = |key: &str| line[key].as_f64().expect(key);
    time(to) - time(from)
}

fn compare(policy: &str) -> Summary {
    let folder = folder(&format!("policy-{policy}"));
    let mut total = Summary::default();
    for seed in SEEDS {
        let shape = Shape {
            count: 60,
            turns: 12,
            first_tokens: (13_000, 48_000),
            output_tokens: (50, 700),
            think_s: 2.0,
        };
        let mut random = fastrand::Rng::with_seed(seed);
        sessions_of(
            &folder.join("planned.jsonl"),
            &shape,
            &mut random,
            new_tokens,
        );
        let changes = json!({
            "seed": seed,
            "workers": [
                {"id": "p", "role": "prefill", "kv_tokens": 560_000},
                {"id": "e", "role": "elastic", "count": 3, "kv_tokens": 560_000},
            ],
            "router": {"policy": policy, "residency": {"rule": "off"}, "kv_events": true},
            "load": {"max_inflight_sessions": 24, "max_think_s": 2.0, "timeout_s": 1e6},
        });
        let (report, mut answered) = simulate(&plan(&folder, &changes), &folder, "run");
        assert_eq!(report.failed, 0, "{policy}");
        let sent_s = |line: &Value| line["sent_s"].as_f64().expect("a time");
        answered.sort_by(|one, other| sent_s(one).total_cmp(&sent_s(other)));
        let learnt = (answered.len() as f64 * LEARNING_SHARE) as usize;
        add(
            &mut total,
            &answered[learnt..],
            &lines(&folder.join("run/decisions.jsonl")),
        );
    }
    println!("simulated, {policy}: {total:.3?}");
    total
}

/// Adds one seed's part of the means.
fn add(total: &mut Summary, answered: &[Value], events: &[Value]) {
    let share = 1.0 / SEEDS.count() as f64;
    let decisions: HashMap<&str, &Value> = events
        .iter()
        .filter(|event| event["event"] == "decision")
        .filter_map(|event| Some((event["decision_id"].as_str()?, event)))
        .collect();
    let of = |line: &Value| decisions[line["decision_id"].as_str().expect("a decision")];
    let ttft = |line: &Value| seconds(line, "sent_s", "first_token_s");
    let ttfts: Vec<f64> = answered.iter().map(ttft).collect();
    let whole: Vec<f64> = answered
        .iter()
        .map(|line| seconds(line, "sent_s", "finished_s"))
        .collect();
    total.ttft_mean_s += share * mean(&ttfts);
    total.ttft_p90_s += share * quantile(ttfts, 0.9);
    total.whole_mean_s += share * mean(&whole);
    total.worst_gap_p90_s += share * quantile(answered.iter().map(worst_gap_s), 0.9);
    let mut by_worker: HashMap<&str, Vec<f64>> = HashMap::new();
    let mut ratios: [Vec<f64>; 2] = Default::default();
    for line in answered {
        let decision = of(line);
        let is_separated = decision["kind"] == "prefill_decode";
        let worker = if is_separated { "decode" } else { "worker" };
        let worker = decision[worker].as_str().expect("a worker");
        by_worker.entry(worker).or_default().push(ttft(line));
        if let Some(predicted_s) = decision["predicted_s"].as_f64() {
            ratios[usize::from(is_separated)].push(ttft(line) / predicted_s);
        }
        total.separated_share += share * f64::from(is_separated) / answered.len() as f64;
    }
    let p90s: Vec<f64> = by_worker
        .into_values()
        .map(|of| quantile(of, 0.9))
        .collect();
    total.hotspot += share * quantile(p90s.clone(), 1.0) / quantile(p90s, 0.5);
    let [local, separated] = ratios;
    total.local_ratio += share * quantile(local, 0.9);
    total.separated_ratio += share * quantile(separated, 0.9);
}

fn worst_gap_s(line: &Value) -> f64 {
    let arrivals = line["arrivals"].as_array().expect("arrivals");
    let times = arrivals
        .iter()
        .map(|arrival| arrival[0].as_f64().expect("a time"));
    let times: Vec<f64> = times.collect();
    times
        .windows(2)
        .map(|pair| pair[1] - pair[0])
        .fold(0.0, f64::max)
}

#[test]
fn elastic_predicts_what_happens_and_is_no_worse_than_the_others() {
    let elastic = compare("elastic");
    assert!(elastic.local_ratio <= 1.5, "{elastic:?}");
    assert!(elastic.separated_ratio <= 1.5, "{elastic:?}");
    assert!(elastic.hotspot <= 1.5, "{elastic:?}");
    for name in ["unified", "offload", "pd"] {
        let other = compare(name);
        assert!(
            elastic.ttft_mean_s <= other.ttft_mean_s,
            "{name}: {other:?}"
        );
        assert!(elastic.ttft_p90_s <= other.ttft_p90_s, "{name}: {other:?}");
        // What it spares running streams must not cost those that come: level with the best.
        let most_s = 1.02 * other.whole_mean_s;
        assert!(elastic.whole_mean_s <= most_s, "{name}: {other:?}");
    }
}
