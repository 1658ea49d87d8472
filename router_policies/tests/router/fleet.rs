//! The fleet under its lock: reservations, races, and counters that come back to zero.

use decision::fleet::log::EventSink;
use decision::fleet::prefix::hash::{Namespace, PromptHashes, TokenHasher};
use decision::fleet::{EngineLoad, Fleet, Outcome, Request, Reservation, Usage};
use decision::policy::{self, Refusal, RequestFacts, Route, View};
use proptest::prelude::*;
use router_policies::config::WorkerSpec;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};

fn spec(id: &str, role: &str) -> WorkerSpec {
    let mut spec = json!({"id": id, "url": format!("http://{id}:1"), "role": role,
        "kv_capacity_tokens": 100_000});
    if role == "prefill" {
        spec["bootstrap_port"] = 1.into();
    }
    serde_json::from_value(spec).expect("a worker")
}

fn fleet(policy: &str, roles: &[&str]) -> Arc<Fleet> {
    let fleet = Arc::new(Fleet::new(
        policy::build(policy, Value::Null).expect("a policy"),
        policy.to_owned(),
        EventSink::in_memory(),
        1,
    ));
    for (i, role) in roles.iter().enumerate() {
        fleet
            .add_worker(spec(&format!("w{i}"), role))
            .expect("a new id");
        fleet.report_health(&format!("w{i}"), true);
    }
    fleet
}

fn prompt(fleet: &Fleet, tokens: impl IntoIterator<Item = u32>) -> PromptHashes {
    let mut hasher = TokenHasher::new(fleet.token_block());
    tokens.into_iter().for_each(|token| hasher.push(token));
    hasher.finish()
}

fn request(fleet: &Fleet, tokens: impl IntoIterator<Item = u32>) -> Request {
    Request {
        request_id: "r".to_owned(),
        session_id: None,
        prompt: prompt(fleet, tokens),
        max_output_tokens: Some(10),
        stream: true,
        ..Request::default()
    }
}

#[test]
fn simultaneous_arrivals_spread_with_atomic_reservation_and_collide_without_it() {
    const ARRIVALS: usize = 64;
    let fleet = fleet("unified", &["colocated"; 8]);
    let barrier = Arc::new(Barrier::new(ARRIVALS));
    let threads: Vec<_> = (0..ARRIVALS)
        .map(|i| {
            let (fleet, barrier) = (Arc::clone(&fleet), Arc::clone(&barrier));
            std::thread::spawn(move || {
                let base = i as u32 * 10_000;
                let request = request(&fleet, base..base + 5_000);
                barrier.wait();
                fleet.decide(&request, &[]).expect("a decision")
            })
        })
        .collect();
    let held: Vec<Reservation> = threads
        .into_iter()
        .map(|t| t.join().expect("no panic"))
        .collect();
    let busiest = fleet.snapshot().iter().map(|w| w.load.requests).max();
    assert_eq!(busiest, Some(8), "64 over 8 workers");
    drop(held);
    assert!(fleet.is_idle());

    // The same policy on a snapshot taken before any of them reserved.
    let policy = policy::build("unified", Value::Null).expect("a policy");
    let mut chosen = Vec::new();
    let probe = request(&fleet, 0..5_000);
    let taken = fleet.place(&probe, &[], |_, view| {
        for _ in 0..ARRIVALS {
            let request = RequestFacts {
                input_tokens: 5_000,
                ..RequestFacts::default()
            };
            let stale = View {
                request: &request,
                ..*view
            };
            chosen.push(policy.decide(&stale).expect("a decision").route.answering());
        }
        policy.decide(view)
    });
    drop(taken);
    chosen.dedup();
    assert_eq!(chosen.len(), 1, "all on one worker");
}

#[test]
fn one_whose_clock_was_read_before_anothers_sees_the_fleet_as_of_its_own_time() {
    let now_ms = Arc::new(AtomicU64::new(5_000));
    let read = Arc::clone(&now_ms);
    let clock = Box::new(move || read.load(Ordering::Relaxed) as f64 / 1e3);
    let policy = policy::build("unified", Value::Null).expect("a policy");
    let sink = EventSink::in_memory();
    let fleet = Arc::new(Fleet::with_clock(
        policy,
        "unified".to_owned(),
        sink,
        1,
        clock,
    ));
    fleet.add_worker(spec("w0", "colocated")).expect("a new id");
    fleet.report_health("w0", true);
    let running = fleet.decide(&request(&fleet, 0..20_000), &[]);
    let wait_s = |at_ms: u64| {
        now_ms.store(at_ms, Ordering::Relaxed);
        let mut seen = f64::NAN;
        let probe = request(&fleet, 0..10);
        let refused = fleet.place(&probe, &[], |_, view| {
            seen = view.workers[0].prefill_wait_s;
            Err(Refusal::NoCandidates)
        });
        assert!(refused.is_err());
        seen
    };
    let waits = [5_100, 5_050, 5_100].map(wait_s);
    assert!(waits[1] > waits[0] + 0.04, "{waits:?}");
    assert_eq!(waits[0], waits[2]);
    drop(running);
}

#[test]
fn a_worker_removed_with_requests_running_stays_until_they_end_and_gets_no_more() {
    let fleet = fleet("round_robin", &["colocated", "colocated"]);
    let mut held = Vec::new();
    for _ in 0..2 {
        held.push(
            fleet
                .decide(&request(&fleet, 0..10), &[])
                .expect("a decision"),
        );
    }
    assert!(fleet.remove_worker("w0"));
    assert_eq!(fleet.snapshot().len(), 1);
    for _ in 0..4 {
        let reservation = fleet
            .decide(&request(&fleet, 0..10), &[])
            .expect("a decision");
        assert_eq!(reservation.answering().id, "w1");
    }
    fleet
        .add_worker(spec("w0", "colocated"))
        .expect("the id is free again");
    held.clear();
    assert!(fleet.is_idle());
}

#[test]
fn what_was_sent_to_a_worker_is_believed_cached_there_until_it_goes_down() {
    let fleet = fleet("unified", &["colocated", "colocated"]);
    let first = fleet
        .decide(&request(&fleet, 0..1600), &[])
        .expect("a decision");
    let home = first.answering().id.clone();
    first.finish(Outcome::Ok, Some(200), None);
    let again = fleet
        .decide(&request(&fleet, 0..2000), &[])
        .expect("a decision");
    assert_eq!(again.answering().id, home);
    let decision = fleet.sink().recent(1)[0].clone();
    assert_eq!(decision.new_tokens, 400);
    drop(again);
    fleet.report_health(&home, false);
    fleet.report_health(&home, true);
    drop(
        fleet
            .decide(&request(&fleet, 0..2000), &[])
            .expect("a decision"),
    );
    assert!(
        fleet.sink().recent(1)[0]
            .cached_tokens
            .iter()
            .all(|(w, _)| w.id != home)
    );
}

#[test]
fn what_a_host_tier_keeps_is_believed_cached_with_and_without_events() {
    use decision::fleet::prefix::events::{KvEvent, Tier};
    let fleet = fleet("unified", &[]);
    for (id, host) in [("device", None), ("tier", Some(10_000))] {
        let mut spec = spec(id, "colocated");
        (spec.kv_capacity_tokens, spec.host_kv_tokens) = (Some(1_000), host);
        fleet.add_worker(spec).expect("a new id");
    }
    let cached = |prompt: std::ops::Range<u32>| {
        let reservation = fleet.decide(&request(&fleet, prompt), &[]);
        reservation
            .expect("a decision")
            .finish(Outcome::Ok, Some(1), None);
        let decision = fleet.sink().recent(1)[0].clone();
        decision.cached_tokens.iter().map(|(_, n)| *n).sum::<u64>()
    };
    for (only, expected) in [("device", 0), ("tier", 799)] {
        for id in ["device", "tier"] {
            fleet.report_health(id, id == only);
        }
        for prompt in [0..800, 1_000..1_800] {
            assert_eq!(cached(prompt), 0);
        }
        assert_eq!(cached(0..800), expected, "{only}");
    }
    // By its events: stored, written through, evicted from the device, brought back by nobody.
    assert!(fleet.begin_kv_events("tier", 1));
    let stored = |tier| KvEvent::Stored {
        tier,
        blocks: (1..=40).collect(),
        parent: None,
        tokens: (5_000..5_040).collect(),
        block_size: 1,
        namespace: Namespace::default(),
    };
    let removed = |tier| KvEvent::Removed {
        tier,
        blocks: (31..=40).collect(),
    };
    let events = [
        (stored(Tier::Device), 40),
        (stored(Tier::Host), 40),
        (removed(Tier::Device), 40),
        (removed(Tier::Host), 30),
    ];
    for (event, expected) in events {
        assert!(fleet.apply_kv_events("tier", &[event]));
        assert_eq!(cached(5_000..5_100), expected);
    }
}

#[test]
fn kv_events_replace_the_estimate_and_are_exact_to_the_page() {
    use decision::fleet::prefix::events::{KvEvent, Tier};
    let fleet = fleet("unified", &["colocated", "colocated"]);
    assert!(fleet.begin_kv_events("w1", 1));
    assert_eq!(fleet.token_block(), 1);
    let blocks: Vec<u64> = (1..=37).collect();
    let stored = KvEvent::Stored {
        tier: Tier::Device,
        blocks,
        parent: None,
        tokens: (0..37).collect(),
        block_size: 1,
        namespace: Namespace::default(),
    };
    assert!(fleet.apply_kv_events("w1", &[stored]));
    let reservation = fleet
        .decide(&request(&fleet, 0..100), &[])
        .expect("a decision");
    assert_eq!(reservation.answering().id, "w1");
    let decision = fleet.sink().recent(1)[0].clone();
    assert_eq!(decision.new_tokens, 63);
    assert_eq!(
        serde_json::to_value(decision.prefix_source).expect("JSON"),
        "events"
    );
    assert!(fleet.apply_kv_events(
        "w1",
        &[KvEvent::Removed {
            tier: Tier::Device,
            blocks: (31..=37).collect()
        }]
    ));
    drop(
        fleet
            .decide(&request(&fleet, 0..100), &[])
            .expect("a decision"),
    );
    assert_eq!(fleet.sink().recent(1)[0].cached_tokens[0].1, 30);
}

#[test]
fn what_no_worker_ran_is_neither_believed_nor_a_turn() {
    let fleet = fleet("unified", &["colocated", "colocated"]);
    let mut ask = request(&fleet, 0..400);
    ask.session_id = Some("s".to_owned());
    let cached = |prompt: std::ops::Range<u32>| {
        drop(
            fleet
                .decide(&request(&fleet, prompt), &[])
                .expect("a decision"),
        );
        let cached = &fleet.sink().recent(1)[0].cached_tokens;
        cached.iter().map(|(_, tokens)| *tokens).max().unwrap_or(0)
    };
    // What is there already stays.
    let held = fleet
        .decide(&request(&fleet, 0..160), &[])
        .expect("a decision");
    let home = held.answering().id.clone();
    drop(held);
    for outcome in [
        Outcome::Rejected,
        Outcome::WorkerError,
        Outcome::RouterError,
    ] {
        let refused = fleet.decide(&ask, &[]).expect("a decision");
        assert_eq!(refused.answering().id, home);
        refused.finish(outcome, Some(400), None);
    }
    assert_eq!(cached(0..161), 160);
    let other = match home.as_str() {
        "w0" => "w1",
        _ => "w0",
    };
    // The session has no home yet: its first turn that is served makes one.
    let excluded = [home.clone()];
    let mut served = fleet.decide(&ask, &excluded).expect("a decision");
    served.output(1);
    served.finish(Outcome::Ok, Some(200), None);
    let turn = fleet.place(&ask, &[], |_, view| {
        assert_eq!(view.request.turn, 1);
        let affine = view.request.affine.expect("a home");
        Ok(policy::Decision::unpredicted(
            Route::Local { worker: affine },
            policy::Reason::Affinity,
        ))
    });
    assert_eq!(turn.expect("a decision").answering().id, other);
    assert_eq!(cached(0..400), 399);
    assert!(fleet.is_idle());
}

#[test]
fn kv_events_tell_the_size_of_their_pages() {
    use decision::fleet::prefix::events::{KvEvent, Tier};
    let fleet = fleet("unified", &["colocated", "colocated"]);
    // As where the file says nothing of it and the engine is vLLM.
    assert!(fleet.begin_kv_events("w1", 1));
    let stored = KvEvent::Stored {
        tier: Tier::Device,
        blocks: vec![1, 2, 3],
        parent: None,
        tokens: (0..48).collect(),
        block_size: 16,
        namespace: Namespace::default(),
    };
    assert!(fleet.apply_kv_events("w1", &[stored]));
    drop(
        fleet
            .decide(&request(&fleet, 0..100), &[])
            .expect("a decision"),
    );
    let decision = fleet.sink().recent(1)[0].clone();
    let cached: Vec<u64> = decision.cached_tokens.iter().map(|c| c.1).collect();
    assert_eq!(cached, [48]);
}

#[test]
fn where_kv_events_are_missing_the_estimate_counts_as_well() {
    use decision::fleet::prefix::events::{KvEvent, Tier};
    let fleet = fleet("unified", &["colocated", "colocated"]);
    assert!(fleet.begin_kv_events("w1", 1));
    let others = ["w0".to_owned()];
    let cached = |prompt: std::ops::Range<u32>| {
        drop(
            fleet
                .decide(&request(&fleet, prompt), &others)
                .expect("a decision"),
        );
        let cached = &fleet.sink().recent(1)[0].cached_tokens;
        cached.first().map_or(0, |(_, tokens)| *tokens)
    };
    assert_eq!(cached(0..400), 0);
    assert_eq!(cached(0..400), 0, "events have told nothing of it");
    let orphan = KvEvent::Stored {
        tier: Tier::Device,
        blocks: vec![2],
        parent: Some(1),
        tokens: vec![5],
        block_size: 1,
        namespace: Namespace::default(),
    };
    assert!(!fleet.apply_kv_events("w1", &[orphan]));
    assert_eq!(cached(0..400), 399);
    // From an empty cache on, events tell everything again.
    assert!(fleet.apply_kv_events("w1", &[KvEvent::Cleared]));
    assert_eq!(cached(0..400), 0);
    assert_eq!(cached(0..400), 0);
}

#[test]
fn of_an_adapters_prompts_sglangs_kv_events_tell_nothing_so_the_estimate_counts() {
    for (engine, expected) in [("sglang", 399), ("vllm", 0)] {
        let fleet = fleet("unified", &[]);
        let mut spec = serde_json::to_value(spec("w", "colocated")).expect("JSON");
        spec["engine"] = engine.into();
        let spec = serde_json::from_value(spec).expect("a worker");
        fleet.add_worker(spec).expect("a new id");
        fleet.report_health("w", true);
        assert!(fleet.begin_kv_events("w", 1));
        let mut cached = 0;
        for _ in 0..2 {
            let mut request = request(&fleet, 0..400);
            let namespace = Namespace::of(Some("sql"), [None, None]);
            request.prompt = request.prompt.within(namespace);
            drop(fleet.decide(&request, &[]).expect("a decision"));
            cached = fleet.sink().recent(1)[0]
                .cached_tokens
                .first()
                .map_or(0, |of| of.1);
        }
        assert_eq!(cached, expected, "{engine}");
    }
}

#[test]
fn drift_from_the_engines_report_is_counted_and_counts_as_load() {
    let fleet = fleet("least_requests", &["colocated", "colocated"]);
    let load = |running_requests| EngineLoad {
        running_requests,
        ..EngineLoad::default()
    };
    fleet.report_load("w0", load(0));
    fleet.report_load("w0", load(3));
    let reservation = fleet
        .decide(&request(&fleet, 0..10), &[])
        .expect("a decision");
    assert_eq!(reservation.answering().id, "w1");
    fleet.report_load("w1", load(0));
    let drift: Vec<_> = fleet.snapshot().iter().map(|w| w.drift).collect();
    assert_eq!(
        (
            drift[0].reports,
            drift[0].corrections,
            drift[0].requests_over
        ),
        (2, 1, 3)
    );
    assert_eq!((drift[1].corrections, drift[1].requests_under), (1, 1));
    drop(reservation);
    assert!(fleet.is_idle());
}

#[test]
fn a_worker_that_keeps_failing_is_left_alone_for_a_while_unless_all_are() {
    let fleet = fleet("round_robin", &["colocated", "colocated"]);
    let fail = |id: &str, other: &str| {
        for _ in 0..5 {
            let exclude = [other.to_owned()];
            let placed = fleet.decide(&request(&fleet, 0..10), &exclude);
            let reservation = placed.expect("a decision");
            assert_eq!(reservation.answering().id, id);
            reservation.finish(Outcome::WorkerError, None, Some("x".to_owned()));
        }
    };
    fail("w0", "w1");
    assert!(fleet.snapshot()[0].circuit_open);
    for _ in 0..4 {
        let placed = fleet.decide(&request(&fleet, 0..10), &[]);
        assert_eq!(placed.expect("a decision").answering().id, "w1");
    }
    fail("w1", "w0");
    assert!(fleet.snapshot().iter().all(|worker| worker.circuit_open));
    // A router that answers 503 to everybody without a try would be no better than workers that fail.
    let placed = fleet.decide(&request(&fleet, 0..10), &[]);
    let served = placed.expect("one of them is tried");
    let id = served.answering().id.clone();
    served.finish(Outcome::Ok, Some(200), None);
    let again = fleet.decide(&request(&fleet, 0..10), &[]);
    assert_eq!(again.expect("a decision").answering().id, id, "it serves");
}

/// A fleet whose clock stands, in milliseconds, where it is put.
fn timed(policy: &str, roles: &[(&str, &str)]) -> (Arc<Fleet>, Arc<AtomicU64>) {
    let clock = Arc::new(AtomicU64::new(0));
    let shown = Arc::clone(&clock);
    let fleet = Arc::new(Fleet::with_clock(
        policy::build(policy, Value::Null).expect("a policy"),
        policy.to_owned(),
        EventSink::in_memory(),
        1,
        Box::new(move || shown.load(Ordering::Relaxed) as f64 / 1e3),
    ));
    for (i, (role, engine)) in roles.iter().enumerate() {
        let mut spec = serde_json::to_value(spec(&format!("w{i}"), role)).expect("JSON");
        spec["engine"] = (*engine).into();
        if *engine == "vllm" {
            spec["kv_connector"] = "nixl".into();
        }
        let spec = serde_json::from_value(spec).expect("a worker");
        fleet.add_worker(spec).expect("a new id");
        fleet.report_health(&format!("w{i}"), true);
    }
    (fleet, clock)
}

/// Seconds that the worker is believed to take for a cold prompt of so many tokens.
fn believed_s(fleet: &Fleet, worker: usize, tokens: u64) -> f64 {
    let pairs = policy::attention_pairs(0, tokens);
    fleet.snapshot()[worker].rates.compute_s(tokens, pairs)
}

#[test]
fn prefills_that_end_in_one_step_are_no_sign_of_a_fast_worker() {
    let (fleet, clock) = timed("round_robin", &[("colocated", "sglang")]);
    let before_s = believed_s(&fleet, 0, 4_000);
    for round in 0..20u64 {
        clock.store(round * 10_000, Ordering::Relaxed);
        let mut batch: Vec<Reservation> = (0..4)
            .map(|i| {
                let start = (round * 4 + i) as u32 * 10_000;
                let request = request(&fleet, start..start + 1_000);
                fleet.decide(&request, &[]).expect("a decision")
            })
            .collect();
        // As long as is believed, for all four at once.
        let took_ms = 30 + (before_s * 1e3) as u64;
        clock.store(round * 10_000 + took_ms, Ordering::Relaxed);
        for reservation in &mut batch {
            reservation.streams();
            reservation.output(1);
        }
    }
    let off = believed_s(&fleet, 0, 4_000) / before_s;
    assert!((0.8..1.25).contains(&off), "{off}");
}

#[test]
fn a_decode_workers_delays_are_not_its_prefill_workers() {
    for engine in ["sglang", "vllm"] {
        let roles = [("prefill", engine), ("decode", engine)];
        let (fleet, clock) = timed("pd", &roles);
        let before_s = believed_s(&fleet, 0, 8_000);
        for round in 0..30u64 {
            let begun_ms = round * 10_000;
            clock.store(begun_ms, Ordering::Relaxed);
            let start = round as u32 * 10_000;
            let request = request(&fleet, start..start + 8_000);
            let mut reservation = fleet.decide(&request, &[]).expect("a decision");
            reservation.streams();
            let watch = reservation.prefill_watch();
            // The prefill takes as long as is believed, and then the decode worker two seconds.
            let prefilled_ms = begun_ms + (before_s * 1e3) as u64 + 16;
            clock.store(prefilled_ms, Ordering::Relaxed);
            watch.ended();
            let load = fleet.snapshot()[0].load;
            assert_eq!((load.prefilling, load.pending_prefill_tokens), (0, 0));
            clock.store(prefilled_ms + 2_000, Ordering::Relaxed);
            reservation.output(1);
            reservation.finish(Outcome::Ok, Some(200), None);
            watch.ended();
        }
        assert!(fleet.is_idle());
        let off = believed_s(&fleet, 0, 8_000) / before_s;
        assert!((0.8..1.25).contains(&off), "{engine}: {off}");
        let overhead_s = fleet.snapshot()[1].rates.transfer_overhead_s;
        assert!((1.0..3.0).contains(&overhead_s), "{engine}: {overhead_s}");
    }
}

#[test]
fn answers_in_one_piece_teach_the_rates_too() {
    let (fleet, clock) = timed("round_robin", &[("colocated", "sglang")]);
    let (tokens_per_s, step_s) = (1_000.0, 0.1);
    for round in 0..200u64 {
        let (prompt, output) = (
            [500, 4_000, 16_000][round as usize % 3],
            [1, 40, 200][round as usize % 2],
        );
        let begun_ms = round * 100_000;
        clock.store(begun_ms, Ordering::Relaxed);
        let start = round as u32 * 20_000;
        let mut request = request(&fleet, start..start + prompt);
        request.stream = false;
        let mut reservation = fleet.decide(&request, &[]).expect("a decision");
        let seconds = f64::from(prompt) / tokens_per_s + step_s * output as f64;
        clock.store(begun_ms + (seconds * 1e3) as u64, Ordering::Relaxed);
        reservation.output(1);
        reservation.report(Usage {
            prompt_tokens: Some(prompt.into()),
            cached_tokens: Some(0),
            output_tokens: Some(output),
        });
        reservation.finish(Outcome::Ok, Some(200), None);
    }
    assert!(fleet.is_idle());
    for tokens in [500, 4_000, 16_000] {
        let off = believed_s(&fleet, 0, tokens) / (tokens as f64 / tokens_per_s);
        assert!((0.6..1.6).contains(&off), "{tokens}: {off}");
    }
    let off = fleet.snapshot()[0].rates.step_s(1.0, 4_000.0) / step_s;
    assert!((0.6..1.6).contains(&off), "{off}");
}

#[test]
fn what_is_on_its_way_to_a_decode_worker_is_among_the_facts() {
    let (fleet, _) = timed("pd", &[("prefill", "sglang"), ("decode", "sglang")]);
    let request = request(&fleet, 0..3_000);
    let mut reservation = fleet.decide(&request, &[]).expect("a decision");
    reservation.streams();
    let load = |i: usize| fleet.snapshot()[i].load;
    assert_eq!((load(1).arriving, load(1).arriving_tokens), (1, 3_000));
    assert_eq!(load(0).arriving, 0, "it decodes elsewhere");
    reservation.output(1);
    assert_eq!((load(1).arriving, load(1).decoding), (0, 1));
    drop(reservation);
    assert!(fleet.is_idle());
}

#[test]
fn a_new_worker_is_believed_to_be_like_the_others_of_its_kind() {
    let (fleet, clock) = timed("round_robin", &[("colocated", "sglang")]);
    for round in 0..40u64 {
        clock.store(round * 20_000, Ordering::Relaxed);
        let start = round as u32 * 20_000;
        let request = request(&fleet, start..start + 4_000);
        let mut reservation = fleet.decide(&request, &[]).expect("a decision");
        reservation.streams();
        clock.store(round * 20_000 + 8_000, Ordering::Relaxed);
        reservation.output(1);
    }
    fleet.add_worker(spec("w1", "colocated")).expect("a new id");
    let (old_s, new_s) = (believed_s(&fleet, 0, 4_000), believed_s(&fleet, 1, 4_000));
    assert!((old_s / 8.0 - 1.0).abs() < 0.3, "{old_s}");
    assert!((new_s / old_s - 1.0).abs() < 0.05, "{new_s} {old_s}");
}

#[test]
fn an_answer_with_5xx_counts_against_a_worker_only_where_it_is_blamed() {
    let fleet = fleet("round_robin", &["colocated"]);
    for _ in 0..20 {
        let reservation = fleet
            .decide(&request(&fleet, 0..10), &[])
            .expect("a decision");
        reservation.finish(Outcome::WorkerError, Some(500), Some("x".to_owned()));
    }
    for _ in 0..5 {
        assert!(!fleet.snapshot()[0].circuit_open);
        fleet.blame("w0", 0.0);
    }
    assert!(fleet.snapshot()[0].circuit_open);
}

#[derive(Clone, Debug)]
enum Step {
    Arrive { session: u8, length: u16, tail: u8 },
    FirstToken(usize),
    Finish(usize, u8),
    Disconnect(usize),
    Health(u8, bool),
    Remove(u8),
    Add(u8, u8),
    Drain(u8, bool),
    Report(u8, u8),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (any::<u8>(), 0u16..3000, any::<u8>())
            .prop_map(|(session, length, tail)| Step::Arrive { session, length, tail }),
        4 => any::<usize>().prop_map(Step::FirstToken),
        3 => (any::<usize>(), any::<u8>()).prop_map(|(i, o)| Step::Finish(i, o)),
        1 => any::<usize>().prop_map(Step::Disconnect),
        1 => (0u8..6, any::<bool>()).prop_map(|(w, up)| Step::Health(w, up)),
        1 => (0u8..6).prop_map(Step::Remove),
        1 => (0u8..6, 0u8..4).prop_map(|(w, role)| Step::Add(w, role)),
        1 => (0u8..6, any::<bool>()).prop_map(|(w, d)| Step::Drain(w, d)),
        1 => (0u8..6, 0u8..9).prop_map(|(w, n)| Step::Report(w, n)),
    ]
}

const ROLES: [&str; 4] = ["colocated", "prefill", "decode", "elastic"];

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn any_interleaving_reserves_what_runs_and_picks_only_candidates(
        policy in 0usize..policy::TABLE.len(),
        steps in proptest::collection::vec(step(), 1..80),
    ) {
        let fleet = fleet(policy::TABLE[policy].name, &ROLES);
        // With whether the first token is there: the prefill worker is free from then on.
        let mut running: Vec<(Reservation, bool)> = Vec::new();
        for step in steps {
            let count = running.len().max(1);
            match step {
                Step::Arrive { session, length, tail } => {
                    let tokens = (0..u32::from(length)).chain([u32::from(tail)]);
                    let mut request = request(&fleet, tokens);
                    request.session_id = (session < 200).then(|| format!("s{}", session % 5));
                    let up: Vec<String> = fleet.snapshot().iter()
                        .filter(|w| w.healthy && !w.draining).map(|w| w.spec.id.clone()).collect();
                    if let Ok(reservation) = fleet.decide(&request, &[]) {
                        prop_assert!(up.contains(&reservation.answering().id));
                        if let Some(prefill) = reservation.prefill() {
                            prop_assert!(up.contains(&prefill.id));
                            prop_assert_ne!(&prefill.id, &reservation.answering().id);
                        }
                        running.push((reservation, false));
                    }
                }
                Step::FirstToken(i) => {
                    if let Some((reservation, has_token)) = running.get_mut(i % count) {
                        reservation.streams();
                        reservation.output(1);
                        *has_token = true;
                    }
                }
                Step::Finish(i, outcome) if !running.is_empty() => {
                    let outcome = [Outcome::Ok, Outcome::WorkerError, Outcome::Timeout,
                        Outcome::Rejected][usize::from(outcome % 4)];
                    running.swap_remove(i % count).0.finish(outcome, None, None);
                }
                Step::Disconnect(i) if !running.is_empty() => drop(running.swap_remove(i % count)),
                Step::Health(w, up) => fleet.report_health(&format!("w{w}"), up),
                Step::Remove(w) => {
                    fleet.remove_worker(&format!("w{w}"));
                }
                Step::Add(w, role) => {
                    let id = format!("w{w}");
                    if fleet.add_worker(spec(&id, ROLES[usize::from(role)])).is_ok() {
                        fleet.report_health(&id, true);
                    }
                }
                Step::Drain(w, draining) => {
                    fleet.set_draining(&format!("w{w}"), draining);
                }
                Step::Report(w, running_requests) => {
                    let running_requests = running_requests.into();
                    let load = EngineLoad { running_requests, ..EngineLoad::default() };
                    fleet.report_load(&format!("w{w}"), load);
                }
                Step::Finish(..) | Step::Disconnect(_) => {}
            }
            for worker in fleet.snapshot() {
                let its = |spec: &Arc<WorkerSpec>| Arc::ptr_eq(spec, &worker.spec);
                let on_it = running.iter().filter(|(reservation, has_token)| {
                    let prefills = !has_token && reservation.prefill().is_some_and(its);
                    prefills || its(reservation.answering())
                });
                prop_assert_eq!(worker.load.requests as usize, on_it.count());
            }
        }
        running.clear();
        prop_assert!(fleet.is_idle());
    }

    #[test]
    fn a_choice_outside_the_candidates_is_refused_and_reserves_nothing(
        a in 0usize..6, b in 0usize..6, separated in any::<bool>(),
    ) {
        let fleet = fleet("round_robin", &ROLES);
        let route = if separated {
            Route::PrefillDecode { prefill: a, decode: b }
        } else {
            Route::Local { worker: a }
        };
        let allowed = match route {
            Route::Local { worker } => [0, 3].contains(&worker),
            Route::PrefillDecode { prefill, decode } => prefill == 1 && [2, 3].contains(&decode),
        };
        let placed = fleet.place(&request(&fleet, 0..10), &[], |_, _| {
            Ok(policy::Decision::unpredicted(route, policy::Reason::Custom))
        });
        prop_assert_eq!(placed.is_ok(), allowed);
        drop(placed);
        prop_assert!(fleet.is_idle());
    }
}

#[test]
fn an_unstreamed_prefill_counts_until_its_predicted_end_and_is_given_back_once() {
    let now_ms = Arc::new(std::sync::atomic::AtomicU64::new(0));
    let shown = Arc::clone(&now_ms);
    let fleet = Arc::new(Fleet::with_clock(
        policy::build("elastic", Value::Null).expect("a policy"),
        "elastic".to_owned(),
        EventSink::in_memory(),
        1,
        Box::new(move || shown.load(std::sync::atomic::Ordering::Relaxed) as f64 / 1e3),
    ));
    fleet.add_worker(spec("w0", "colocated")).expect("a new id");
    fleet.report_health("w0", true);
    let unstreamed = |tokens| Request {
        stream: false,
        ..request(&fleet, tokens)
    };
    let long = fleet.decide(&unstreamed(0..50_000), &[]).expect("placed");
    let counts = || {
        let load = fleet.snapshot()[0].load;
        (load.prefilling, load.decoding, load.pending_prefill_tokens)
    };
    assert_eq!(counts(), (1, 0, 50_000));
    now_ms.store(60_000, std::sync::atomic::Ordering::Relaxed);
    let short = fleet
        .decide(&unstreamed(60_000..60_100), &[])
        .expect("placed");
    assert_eq!(counts(), (1, 1, 100));
    long.finish(Outcome::Ok, Some(200), None);
    assert_eq!(counts(), (1, 0, 100));
    drop(short);
    assert!(fleet.is_idle());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn kv_events_are_never_given_up_for_answers_that_lacked_what_they_told(
        turns in proptest::collection::vec((0u64..6, 1u64..6, any::<bool>()), 12..60),
    ) {
        use decision::fleet::prefix::events::{KvEvent, Tier};
        const PAGE: u32 = 100;
        let fleet = fleet("unified", &["colocated"]);
        prop_assert!(fleet.begin_kv_events("w0", PAGE as usize));
        // Pages of each session that the engine has told of.
        let mut told = [0u64; 6];
        for (session, more, lacks) in turns {
            let first = session as u32 * 1_000_000;
            for page in told[session as usize]..told[session as usize] + more {
                let begin = first + page as u32 * PAGE;
                let name = |page: u64| session * 1_000_000 + page + 1;
                let stored = KvEvent::Stored {
                    tier: Tier::Device,
                    blocks: vec![name(page)],
                    parent: page.checked_sub(1).map(name),
                    tokens: (begin..begin + PAGE).collect(),
                    block_size: PAGE as usize,
                    namespace: Namespace::default(),
                };
                prop_assert!(fleet.apply_kv_events("w0", &[stored]), "its parent was told");
            }
            told[session as usize] += more;
            let held = told[session as usize] * u64::from(PAGE);
            let asked = request(&fleet, first..first + held as u32 + 1);
            let mut reservation = fleet.decide(&asked, &[]).expect("a decision");
            let decided = fleet.sink().recent(1).remove(0);
            prop_assert_eq!(decided.cached_tokens.first().map_or(0, |(_, tokens)| *tokens), held);
            reservation.output(1);
            // Gone by the time that it is scheduled, though no event has told so yet.
            reservation.report(Usage {
                prompt_tokens: Some(held + 1),
                cached_tokens: Some(if lacks { 0 } else { held }),
                output_tokens: Some(1),
            });
            reservation.finish(Outcome::Ok, Some(200), None);
        }
    }
}

#[test]
fn an_estimate_is_given_up_once_answers_lack_it_again_and_again() {
    let fleet = fleet("unified", &["colocated"]);
    let cached = |reported: u64| {
        let mut reservation = fleet
            .decide(&request(&fleet, 0..1_000), &[])
            .expect("a decision");
        let cached = fleet.sink().recent(1).remove(0).cached_tokens.clone();
        reservation.output(1);
        reservation.report(Usage {
            prompt_tokens: Some(1_000),
            cached_tokens: Some(reported),
            output_tokens: Some(1),
        });
        reservation.finish(Outcome::Ok, Some(200), None);
        cached.first().map_or(0, |(_, tokens)| *tokens)
    };
    assert_eq!(cached(0), 0);
    for _ in 0..5 {
        assert!(cached(0) > 900);
    }
    assert_eq!(
        cached(0),
        0,
        "the engine was restarted, by all that is seen"
    );
}
