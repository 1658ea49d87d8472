//! Whole runs: the same seed gives the same files, nothing is lost, and a worker alone does what its
//! formula says.

use crate::common::{BLOCK, folder, lines, plan, sessions, simulate, sum};
use serde_json::{Value, json};
use simulator::calibration::Calibration;
use simulator::engine::Counters;
use simulator::plan::Plan;
use simulator::{Report, WorkerReport};

/// What the workers counted is what the clients saw, where no request failed.
fn assert_totals(report: &Report, lines: &[Value], what: &str) {
    let of_workers = |count: fn(&Counters) -> u64| {
        let counts = report.workers.iter().map(|worker| count(&worker.counters));
        counts.sum::<u64>()
    };
    for (counted, key) in [
        (of_workers(|c| c.prompt_tokens), "input_length"),
        (of_workers(|c| c.cached_tokens), "cached_tokens"),
        (of_workers(|c| c.generated_tokens), "output_tokens"),
        (of_workers(|c| c.generated_tokens), "output_length"),
    ] {
        assert_eq!(counted, sum(lines, key), "{what}: {key}");
    }
}

/// What was stored less what was evicted is what is held, and that fits.
fn assert_cache(worker: &WorkerReport, kv_tokens: u64, what: &str) {
    let held = worker.cache_blocks.stored - worker.cache_blocks.evicted;
    assert_eq!(held * BLOCK, worker.cached_tokens_now, "{what}");
    assert!(worker.cached_tokens_now <= kv_tokens, "{what}");
}

const RULES: [&str; 6] = ["off", "rotate", "cap", "aimd", "lease", "thunder"];

#[test]
fn the_same_seed_gives_the_same_files() {
    let folder = folder("same-seed");
    sessions(&folder.join("planned.jsonl"), 12, 6, 6_000, 4.0);
    for rule in RULES {
        let phases = json!({"start": "mid", "recycle": true, "warm_up_s": 5.0, "measure_s": 60.0});
        let changes = json!({
            "phases": phases,
            "router": {"policy": "elastic", "admission": {"rule": rule}, "kv_events": true},
        });
        let plan = plan(&folder, &changes);
        let files = |name: &str| {
            simulate(&plan, &folder, name);
            let mut decisions = lines(&folder.join(name).join("decisions.jsonl"));
            for decision in &mut decisions {
                // How long the real router took to decide is measured, not simulated.
                decision["decision_us"] = Value::Null;
            }
            let requests = std::fs::read(folder.join(name).join("requests.jsonl"));
            (requests.expect("a file"), decisions)
        };
        assert!(files("one") == files("other"), "{rule}");
    }
}

#[test]
fn nothing_is_lost_whatever_the_engine_the_tier_and_the_rule() {
    let folder = folder("conserved");
    sessions(&folder.join("planned.jsonl"), 14, 7, 5_000, 4.0);
    for engine in ["sglang", "vllm"] {
        for host_kv_tokens in [0, 20_000, 500_000] {
            for rule in RULES {
                let worker = json!({"id": "w", "count": 2, "kv_tokens": 30_000, "engine": engine,
                    "host_kv_tokens": host_kv_tokens});
                // `cap` keeps the places of sessions that have ended for ten minutes.
                let admission = json!({"rule": rule, "max_wait_s": 86_400});
                let load = json!({"max_inflight_sessions": 6, "max_think_s": 5, "timeout_s": 1e6});
                let changes = json!({
                    "workers": [worker], "load": load,
                    "router": {"policy": "unified", "admission": admission, "kv_events": true},
                });
                let plan = plan(&folder, &changes);
                let (report, lines) = simulate(&plan, &folder, "run");
                let what = format!("{engine} {host_kv_tokens} {rule}");
                assert_eq!((report.requests, report.failed), (14 * 7, 0), "{what}");
                assert!(report.router_is_idle, "{what}");
                assert_totals(&report, &lines, &what);
                for line in &lines {
                    let cached = line["cached_tokens"].as_u64();
                    assert!(
                        cached <= line["best_cached_tokens"].as_u64(),
                        "{what}: {line}"
                    );
                    let times: Vec<f64> = ["scheduled_s", "sent_s", "first_token_s", "finished_s"]
                        .iter()
                        .filter_map(|key| line[key].as_f64())
                        .collect();
                    assert!(times.len() == 4 && times.is_sorted(), "{what}: {line}");
                }
                for worker in &report.workers {
                    assert_cache(worker, 30_000, &what);
                    let counters = &worker.counters;
                    let computed = counters.prompt_tokens - counters.cached_tokens;
                    assert!(counters.prefilled_tokens >= computed, "{what}");
                    assert!(counters.retractions > 0 || counters.prefilled_tokens == computed);
                    assert!(worker.host_tokens_now <= host_kv_tokens, "{what}");
                }
            }
        }
    }
}

#[test]
fn a_session_alone_takes_what_the_formula_says() {
    let folder = folder("alone");
    sessions(&folder.join("planned.jsonl"), 1, 8, 20_000, 3.0);
    let changes = json!({
        "workers": [{"id": "w", "kv_tokens": 200_000}],
        "load": {"max_inflight_sessions": 1},
    });
    let (_, lines) = simulate(&plan(&folder, &changes), &folder, "run");
    let calibration = Calibration::default();
    let mut seen = 0;
    let mut ended_s = 0.0;
    for line in &lines {
        let input = line["input_length"].as_u64().expect("a length");
        let output = line["output_tokens"].as_u64().expect("a length");
        let scheduled_s = line["scheduled_s"].as_f64().expect("a time");
        assert!(scheduled_s >= ended_s);
        // All full blocks that were sent or answered before, answers being spliced into prompts.
        assert_eq!(line["cached_tokens"].as_u64(), Some(seen / BLOCK * BLOCK));
        let best = line["best_cached_tokens"].as_u64().expect("tokens");
        assert!((seen / BLOCK * BLOCK..=seen / BLOCK * BLOCK + BLOCK).contains(&best));
        let mut expected_s = scheduled_s + calibration.request_s + calibration.token_s;
        let mut computed = seen / BLOCK * BLOCK;
        while computed < input {
            let part = (input - computed).min(8_192);
            expected_s += calibration.mixed_s(part, calibration.pairs(computed, part), 0, 0);
            computed += part;
        }
        let first_s = line["first_token_s"].as_f64().expect("a time");
        assert!(
            (first_s - expected_s).abs() < 1e-5,
            "{first_s} {expected_s}"
        );
        for decoded in 0..output - 1 {
            expected_s += calibration.decode_s(1, input + decoded);
        }
        ended_s = line["finished_s"].as_f64().expect("a time");
        assert!(
            (ended_s - expected_s).abs() < 1e-5,
            "{ended_s} {expected_s}"
        );
        // The last token's KV is never computed.
        seen = input + output - 1;
    }
}

/// A prefill worker `p` and one `d` of another role that answers.
fn separated(role: &str, prefix_cache: bool, kv_tokens: u64) -> Value {
    json!([
        {"id": "p", "role": "prefill", "kv_tokens": kv_tokens},
        {"id": "d", "role": role, "kv_tokens": kv_tokens, "prefix_cache": prefix_cache},
    ])
}

#[test]
fn a_separated_session_alone_takes_what_the_formula_says() {
    let folder = folder("separated-alone");
    sessions(&folder.join("planned.jsonl"), 1, 8, 20_000, 3.0);
    for prefix_cache in [false, true] {
        let changes = json!({
            "workers": separated("decode", prefix_cache, 200_000),
            "router": {"policy": "pd", "admission": {"rule": "off"}},
            "load": {"max_inflight_sessions": 1},
        });
        let (report, lines) = simulate(&plan(&folder, &changes), &folder, "run");
        let calibration = Calibration::default();
        // Full blocks of what came before: on the worker that prefills, on the one that answers.
        let (mut prefilled, mut answered) = (0, 0);
        let mut moved = 0;
        for line in &lines {
            let number = |key: &str| line[key].as_u64().expect("a number");
            let (input, output) = (number("input_length"), number("output_tokens"));
            let scheduled_s = line["scheduled_s"].as_f64().expect("a time");
            assert_eq!(number("cached_tokens"), prefilled);
            let held = if prefix_cache { answered } else { 0 };
            let mut now_s = scheduled_s + calibration.request_s;
            let (mut computed, mut sent, mut link_free_s) = (prefilled, held, 0.0_f64);
            while computed < input {
                let part = (input - computed).min(8_192);
                now_s += calibration.mixed_s(part, calibration.pairs(computed, part), 0, 0);
                computed += part;
                let new = computed.saturating_sub(sent);
                sent = sent.max(computed);
                link_free_s =
                    link_free_s.max(now_s) + new as f64 / calibration.transfer_tokens_per_s;
            }
            moved += input - held;
            let mut expected_s =
                link_free_s + calibration.transfer_overhead_s + calibration.token_s;
            let first_s = line["first_token_s"].as_f64().expect("a time");
            assert!(
                (first_s - expected_s).abs() < 1e-5,
                "{first_s} {expected_s}"
            );
            for decoded in 0..output - 1 {
                expected_s += calibration.decode_s(1, input + decoded);
            }
            let ended_s = line["finished_s"].as_f64().expect("a time");
            assert!(
                (ended_s - expected_s).abs() < 1e-5,
                "{ended_s} {expected_s}"
            );
            prefilled = input / BLOCK * BLOCK;
            answered = (input + output - 1) / BLOCK * BLOCK;
        }
        assert_eq!(report.workers[1].counters.received_tokens, moved);
        assert_eq!(report.workers[1].counters.prefilled_tokens, 0);
    }
}

#[test]
fn nothing_is_lost_between_workers_that_prefill_and_workers_that_answer() {
    let folder = folder("separated");
    sessions(&folder.join("planned.jsonl"), 14, 7, 5_000, 4.0);
    for (role, prefix_cache, policy) in [
        ("decode", false, "pd"),
        ("decode", true, "pd"),
        ("elastic", true, "elastic"),
    ] {
        for kv_tokens in [24_000, 60_000] {
            for timeout_s in [1e6, 0.4] {
                let changes = json!({
                    "workers": separated(role, prefix_cache, kv_tokens),
                    "router": {"policy": policy, "admission": {"rule": "off"}, "kv_events": true},
                    "load": {"max_inflight_sessions": 6, "max_think_s": 5, "timeout_s": timeout_s},
                });
                let (report, lines) = simulate(&plan(&folder, &changes), &folder, "run");
                let what = format!("{role} {prefix_cache} {kv_tokens} {timeout_s}");
                assert_eq!(report.requests, 14 * 7, "{what}");
                assert!(report.router_is_idle, "{what}");
                for worker in &report.workers {
                    assert_cache(worker, kv_tokens, &what);
                    assert_eq!(worker.used_tokens_now, 0, "{what}");
                }
                if timeout_s < 1e6 {
                    // Whoever leaves in the middle leaves nothing behind.
                    assert!(report.failed > 0, "{what}");
                    continue;
                }
                assert_eq!(report.failed, 0, "{what}");
                assert_totals(&report, &lines, &what);
                let received = report.workers[1].counters.received_tokens;
                let separated = report.workers[0].counters.prompt_tokens;
                assert!(received > 0 && received <= separated, "{what}");
                if !prefix_cache {
                    assert_eq!(received, separated, "{what}");
                }
            }
        }
    }
}

#[test]
fn a_recycled_load_keeps_its_sessions_in_flight_and_measures_its_window() {
    let folder = folder("recycled");
    sessions(&folder.join("planned.jsonl"), 5, 6, 4_000, 2.0);
    let phases = json!({"start": "mid", "recycle": true, "warm_up_s": 10.0, "measure_s": 120.0});
    let (report, lines) = simulate(&plan(&folder, &json!({"phases": phases})), &folder, "run");
    let phases = std::fs::read_to_string(folder.join("run/phases.json")).expect("a file");
    let phases: Value = serde_json::from_str(&phases).expect("JSON");
    let (start_s, end_s) = (
        phases["window_start_s"].as_f64(),
        phases["window_end_s"].as_f64(),
    );
    let (start_s, end_s) = (start_s.expect("a time"), end_s.expect("a time"));
    assert!((end_s - start_s - 120.0).abs() < 1e-6);
    let of = |phase: &str| lines.iter().filter(|line| line["phase"] == phase).count();
    assert!(
        of("prime") > 0 && of("warm_up") > 0 && of("measure") > 50,
        "{report:?}"
    );
    let mut names = std::collections::HashSet::new();
    for line in &lines {
        let scheduled_s = line["scheduled_s"].as_f64().expect("a time");
        let inside = scheduled_s >= start_s && scheduled_s < end_s;
        assert_eq!(
            line["phase"] == "measure",
            inside && line["phase"] != "prime",
            "{line}"
        );
        assert!(
            line["phase"] != "measure" || line["error"].is_null(),
            "{line}"
        );
        let is_prime = line["phase"] == "prime";
        if is_prime {
            assert_eq!(line["output_tokens"].as_u64(), Some(1));
        }
        // Named as in a measured run: no two lines have one name.
        let name = line["request_id"].as_str().expect("a name");
        assert!(names.insert(name.to_owned()), "{name}");
        assert_eq!(name.ends_with("~prime"), is_prime, "{name}");
        assert_eq!(
            name.contains('#'),
            line["play"].as_u64() > Some(0),
            "{name}"
        );
    }
    // Six sessions of a trace of five: some are in their second play, with prompts of their own.
    assert!(lines.iter().any(|line| line["play"].as_u64() > Some(1)));
    let again = lines
        .iter()
        .filter(|line| line["turn"] == 0 && line["play"].as_u64() > Some(0));
    for line in again {
        assert_eq!(line["best_cached_tokens"], 0, "{line}");
    }
}

#[test]
fn a_plan_says_which_sessions_begin_and_where() {
    let folder = folder("draws");
    sessions(&folder.join("planned.jsonl"), 4, 8, 2_000, 1.0);
    let draws = json!([[2, 0.5, 0.0], [0, 0.25, 1.0], [2, 0.0, 0.0]]);
    let phases = json!({"start": "mid", "recycle": true, "measure_s": 60.0, "draws": draws});
    let changes = json!({"phases": phases, "load": {"max_inflight_sessions": 2}});
    let (_, lines) = simulate(&plan(&folder, &changes), &folder, "run");
    let mut firsts: Vec<&str> = Vec::new();
    let mut seen = std::collections::HashSet::new();
    for line in lines.iter().filter(|line| line["phase"] != "prime") {
        let name = |key: &str| line[key].as_str().expect("a name");
        if seen.insert(name("session_id")) {
            firsts.push(name("request_id"));
        }
    }
    // Half and a quarter of eight requests were primed; whoever comes later begins at the beginning, and
    // the list begins again.
    firsts.sort_unstable();
    for expected in ["s0:2", "s2:4", "s2:0#1", "s2:0#2", "s0:0#1"] {
        assert!(firsts.contains(&expected), "{expected}: {firsts:?}");
    }
    assert!(
        firsts
            .iter()
            .all(|first| !first.starts_with("s1") && !first.starts_with("s3"))
    );
    let missing = json!({"measure_s": 60.0, "draws": [[4, 0.0, 0.0]]});
    let plan = plan(&folder, &json!({"phases": missing}));
    let error = simulator::run(&plan, &folder.join("run")).expect_err("refused");
    assert!(error.contains("no conversation 4"), "{error}");
}

#[test]
fn sessions_that_arrive_find_others_in_their_middle() {
    let folder = folder("arriving");
    sessions(&folder.join("planned.jsonl"), 20, 6, 2_000, 1.0);
    let phases = json!({"start": "mid", "recycle": true, "measure_s": 60.0});
    let load = json!({"mode": "sessions", "sessions_per_hour": 600, "max_inflight_sessions": 3});
    let changes = json!({"phases": phases, "load": load});
    let (_, lines) = simulate(&plan(&folder, &changes), &folder, "run");
    let primed = lines.iter().filter(|line| line["phase"] == "prime");
    assert_eq!(primed.count(), 3);
    // Some ten arrive in a minute, each from its first turn.
    let arrived = lines
        .iter()
        .filter(|line| line["turn"] == 0 && line["phase"] == "measure");
    assert!((4..20).contains(&arrived.count()));
}

#[test]
fn a_wrong_plan_is_named() {
    let folder = folder("wrong");
    sessions(&folder.join("planned.jsonl"), 1, 1, 1_000, 1.0);
    let path = folder.join("plan.json");
    for (changes, field) in [
        (json!({"workers": []}), "workers"),
        (
            json!({"workers": [{"id": "w", "kv_tokens": 0}]}),
            "kv_tokens",
        ),
        (
            json!({"workers": [{"id": "w", "kv_tokens": 9, "role": "decode"}]}),
            "workers",
        ),
        (
            json!({"workers": [{"id": "w", "kv_tokens": 9, "role": "prefill", "engine": "vllm"}]}),
            "role",
        ),
        (
            json!({"workers": [{"id": "w", "kv_tokens": 9, "kv": 1}]}),
            "workers[0]",
        ),
        (
            json!({"load": {"max_inflight_sessions": 0}}),
            "max_inflight_sessions",
        ),
        (json!({"phases": {"measure_s": 0}}), "phases.measure_s"),
        (
            json!({"phases": {"measure_s": 1e300}}),
            "phases.measure_s: expected at most 31622400 (a year in seconds)",
        ),
        (
            json!({"load": {"timeout_s": 1e12}}),
            "load.timeout_s: expected at most 31622400",
        ),
        (
            json!({"workers": [{"id": "w", "kv_tokens": 9, "count": 1_000_000}]}),
            "count: expected at most 100000",
        ),
        (
            json!({"phases": {"measure_s": 1, "draws": [[0, 1.5, 0]]}}),
            "phases.draws[0]",
        ),
        (json!({"seed": -1}), "seed"),
    ] {
        let mut plan = json!({
            "requests": "planned.jsonl", "router": {"policy": "unified"},
            "workers": [{"id": "w", "kv_tokens": 10_000}],
        });
        for (key, value) in changes.as_object().expect("an object") {
            plan[key] = value.clone();
        }
        std::fs::write(&path, plan.to_string()).expect("a file");
        let error = Plan::from_file(&path).expect_err("refused");
        assert!(
            error.contains("plan.json") && error.contains(field),
            "{error}"
        );
    }
}

#[test]
fn a_host_tier_that_others_will_fill_is_not_counted_on() {
    let folder = folder("host-tier");
    sessions(&folder.join("planned.jsonl"), 10, 12, 12_000, 4.0);
    let served = |rule: &str, host_kv_tokens: u64| {
        let changes = json!({
            "workers": [{"id": "w", "kv_tokens": 50_000, "host_kv_tokens": host_kv_tokens}],
            "router": {"policy": "unified", "admission": {"rule": rule}, "kv_events": true},
            "load": {"max_inflight_sessions": 10, "max_think_s": 5, "timeout_s": 1e6},
        });
        let (report, lines) = simulate(&plan(&folder, &changes), &folder, "run");
        assert_eq!(report.failed, 0);
        let cached = sum(&lines, "cached_tokens") as f64 / sum(&lines, "input_length") as f64;
        let ends = lines.iter().filter_map(|line| line["finished_s"].as_f64());
        (cached, ends.fold(0.0, f64::max))
    };
    // Ten sessions of 12,000 tokens and more want nearly twice what this tier holds, of which SGLang leaves
    // some free: what leaves the GPU is gone when it comes back, unless few take turns among themselves.
    let (off, without, with) = (
        served("off", 72_000),
        served("rotate", 0),
        served("rotate", 72_000),
    );
    println!(
        "simulated, from the cache and seconds until all are served: off {off:.3?}, rotate {with:.3?}, \
         without a tier {without:.3?}"
    );
    assert!(
        with.0 >= off.0 + 0.1,
        "it collapses: {with:?} against {off:?}"
    );
    assert!(
        with.1 <= without.1,
        "the tier costs time: {with:?} against {without:?}"
    );
}

#[test]
fn what_clients_leave_in_the_queue_of_vllm_with_a_host_tier_is_computed() {
    let folder = folder("stays");
    sessions(&folder.join("planned.jsonl"), 10, 6, 12_000, 1.0);
    let let_in = |engine: &str, host_kv_tokens: u64| {
        let worker = json!({"id": "w", "kv_tokens": 2_000_000, "engine": engine,
            "host_kv_tokens": host_kv_tokens});
        let changes = json!({
            "workers": [worker],
            "load": {"max_inflight_sessions": 10, "max_think_s": 1, "timeout_s": 0.8},
        });
        let (report, lines) = simulate(&plan(&folder, &changes), &folder, "run");
        assert!(report.failed > 0 && lines.len() as u64 == report.requests);
        assert!(report.router_is_idle);
        assert_eq!(report.workers[0].used_tokens_now, 0);
        report.workers[0].counters.prompt_tokens
    };
    // Everything fits on the device, so that the tier changes nothing else.
    assert_eq!(let_in("sglang", 4_000_000), let_in("sglang", 0));
    let (with, without) = (let_in("vllm", 4_000_000), let_in("vllm", 0));
    assert!(with > without, "{with} {without}");
}
