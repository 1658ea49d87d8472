//! Golden cases: for recorded fleets, each policy picks what its formula says.

use decision::policy::{
    self, Decision, Rates, Reason, Refusal, RequestFacts, Role, Route, View, WorkerFacts,
};
use serde_json::{Value, json};

fn worker(slot: usize) -> WorkerFacts {
    WorkerFacts {
        slot,
        role: Role::Colocated,
        routable: true,
        admits: true,
        serves_local: true,
        serves_prefill: false,
        serves_decode: false,
        transfer_group: 0,
        requests: 0,
        prefilling: 0,
        decoding: 0,
        pending_prefill_tokens: 0,
        prefill_wait_s: 0.0,
        decode_tokens: 0,
        arriving: 0,
        arriving_tokens: 0,
        ongoing_tokens: 0,
        held_tokens: 0,
        freed_tokens_per_s: 10_000.0,
        kept_tokens: 0,
        kv_capacity_tokens: Some(300_000),
        cached_tokens: 0,
        recent_migrations: 0,
        rates: Rates {
            prefill_tokens_per_s: 10_000.0,
            attention_pairs_per_s: f64::INFINITY,
            paced_slowdown: 1.0,
            prefill_overhead_s: 0.0,
            transfer_tokens_per_s: 100_000.0,
            transfer_overhead_s: 0.1,
            decode_base_s: 0.01,
            decode_per_request_s: 1e-3,
            decode_per_context_token_s: 1e-7,
        },
    }
}

/// A worker that may do everything, as vLLM's `kv_both` may.
fn both(slot: usize) -> WorkerFacts {
    WorkerFacts {
        serves_prefill: true,
        serves_decode: true,
        ..worker(slot)
    }
}

fn prefill(slot: usize) -> WorkerFacts {
    WorkerFacts {
        role: Role::Prefill,
        serves_local: false,
        serves_prefill: true,
        ..worker(slot)
    }
}

fn decode(slot: usize) -> WorkerFacts {
    WorkerFacts {
        role: Role::Decode,
        serves_local: false,
        serves_decode: true,
        ..worker(slot)
    }
}

fn elastic(slot: usize) -> WorkerFacts {
    WorkerFacts {
        role: Role::Elastic,
        serves_decode: true,
        ..worker(slot)
    }
}

#[derive(Clone, Default)]
struct Case {
    input: u64,
    affine: Option<usize>,
    sequence: u64,
    random: u64,
    separated: u32,
}

fn decide(
    name: &str,
    params: Value,
    workers: &[WorkerFacts],
    case: &Case,
) -> Result<Decision, Refusal> {
    let request = RequestFacts {
        input_tokens: case.input,
        prompts: 1,
        expected_output_tokens: 100,
        has_session: case.affine.is_some(),
        turn: 1,
        affine: case.affine,
    };
    // As the fleet predicts it, of prefills that wait.
    let workers: Vec<_> = workers
        .iter()
        .cloned()
        .map(|mut worker| {
            worker.prefill_wait_s = worker.pending_prefill_tokens as f64 / 10_000.0;
            worker
        })
        .collect();
    policy::build(name, params)
        .expect("a policy")
        .decide(&View {
            workers: &workers,
            request: &request,
            sequence: case.sequence,
            random: case.random,
            separated_inflight: case.separated,
        })
}

fn local(worker: usize) -> Route {
    Route::Local { worker }
}

fn pair(prefill: usize, decode: usize) -> Route {
    Route::PrefillDecode { prefill, decode }
}

fn picks(name: &str, workers: &[WorkerFacts], case: &Case) -> (Route, Reason) {
    let decision = decide(name, Value::Null, workers, case).expect("a decision");
    (decision.route, decision.reason)
}

#[test]
fn round_robin_skips_what_is_not_routable() {
    let mut fleet = [worker(0), worker(1), worker(2)];
    fleet[1].routable = false;
    let seen: Vec<_> = (0..4)
        .map(|sequence| {
            picks(
                "round_robin",
                &fleet,
                &Case {
                    sequence,
                    ..Case::default()
                },
            )
            .0
        })
        .collect();
    assert_eq!(seen, [local(0), local(2), local(0), local(2)]);
}

#[test]
fn load_policies_choose_on_both_sides_of_a_pd_fleet() {
    let mut fleet = [prefill(0), prefill(1), decode(2), decode(3)];
    fleet[0].requests = 3;
    fleet[3].requests = 1;
    assert_eq!(
        picks("least_requests", &fleet, &Case::default()),
        (pair(1, 2), Reason::LeastRequests)
    );
}

#[test]
fn power_of_two_takes_the_less_busy_of_two_different_workers() {
    let mut fleet = [worker(0), worker(1)];
    fleet[0].requests = 5;
    for random in 0..50u64 {
        let case = Case {
            random: random * 0x1234_5678_9abc,
            ..Case::default()
        };
        assert_eq!(picks("power_of_two", &fleet, &case).0, local(1));
    }
}

#[test]
fn linear_leaves_a_pinned_worker_only_above_twice_the_mean() {
    let mut fleet = [worker(0), worker(1)];
    let case = Case {
        input: 1000,
        affine: Some(0),
        ..Case::default()
    };
    (fleet[0].ongoing_tokens, fleet[1].ongoing_tokens) = (4000, 1);
    assert_eq!(picks("linear", &fleet, &case), (local(0), Reason::Affinity));
    let mut three = [worker(0), worker(1), worker(2)];
    (
        three[0].ongoing_tokens,
        three[1].ongoing_tokens,
        three[2].ongoing_tokens,
    ) = (4001, 1000, 1000);
    assert_eq!(
        picks("linear", &three, &case),
        (local(1), Reason::LowestScore),
        "4001 > 2 × 2000.3"
    );
    three[2].cached_tokens = 900;
    assert_eq!(
        picks("linear", &three, &case),
        (local(2), Reason::LowestScore)
    );
}

#[test]
fn lmetric_is_blind_to_decode_where_nothing_is_requested() {
    let mut fleet = [worker(0), worker(1)];
    fleet[0].decode_tokens = 200_000;
    fleet[1].requests = 1;
    assert_eq!(
        picks(
            "lmetric",
            &fleet,
            &Case {
                input: 10,
                ..Case::default()
            }
        )
        .0,
        local(0)
    );
}

#[test]
fn unified_sees_heavy_decode_at_zero_requests() {
    let mut fleet = [worker(0), worker(1)];
    fleet[0].decode_tokens = 200_000;
    fleet[1].requests = 1;
    let case = Case {
        input: 1000,
        ..Case::default()
    };
    // (0 + 1000 + 0.01·200000) × max(0, 1) = 3000 against (0 + 1000 + 0) × 1 = 1000.
    assert_eq!(picks("unified", &fleet, &case).0, local(1));
}

#[test]
fn unified_stays_at_exactly_the_factor_and_leaves_above_it() {
    let mut fleet: Vec<_> = (0..10).map(worker).collect();
    for (slot, requests) in [
        (0, 13),
        (1, 9),
        (2, 9),
        (3, 9),
        (4, 10),
        (5, 10),
        (6, 10),
        (7, 10),
        (8, 10),
        (9, 10),
    ] {
        fleet[slot].requests = requests;
    }
    let case = Case {
        input: 100,
        affine: Some(0),
        ..Case::default()
    };
    let at = picks("unified", &fleet, &case);
    assert_eq!(at, (local(0), Reason::Affinity), "13 ≤ 1.3 × 10");
    fleet[4].requests = 9;
    assert_eq!(
        picks("unified", &fleet, &case).1,
        Reason::LowestScore,
        "13 > 1.3 × 9.9"
    );
}

#[test]
fn unified_sends_the_second_of_two_big_requests_elsewhere() {
    let mut fleet = [worker(0), worker(1)];
    fleet[0].cached_tokens = 30_000;
    let case = Case {
        input: 130_000,
        ..Case::default()
    };
    assert_eq!(
        picks("unified", &fleet, &case).0,
        local(0),
        "100k to prefill against 130k"
    );
    // 0.7 s later the first is reserved and still prefilling.
    fleet[0].requests = 1;
    fleet[0].pending_prefill_tokens = 100_000;
    assert_eq!(
        picks("unified", &fleet, &case).0,
        local(1),
        "200k against 130k"
    );
}

#[test]
fn affinity_to_a_worker_that_is_gone_or_cannot_serve_alone_is_none() {
    let mut fleet = [worker(0), worker(1)];
    fleet[0].routable = false;
    let case = Case {
        input: 10,
        affine: Some(0),
        ..Case::default()
    };
    for name in [
        "linear",
        "unified",
        "migrate",
        "elastic",
        "selective",
        "offload",
    ] {
        assert_eq!(picks(name, &fleet, &case).0, local(1), "{name}");
    }
}

#[test]
fn pd_takes_the_decode_worker_that_holds_most_unless_it_has_no_room() {
    let mut fleet = [prefill(0), prefill(1), decode(2), decode(3)];
    fleet[0].pending_prefill_tokens = 50_000;
    fleet[2].cached_tokens = 8_000;
    let case = Case {
        input: 10_000,
        ..Case::default()
    };
    let decision = decide("pd", Value::Null, &fleet, &case).expect("a decision");
    assert_eq!(
        (decision.route, decision.reason),
        (pair(1, 2), Reason::AlwaysSeparate)
    );
    // 10000 new at 10000/s, 0.1 s overhead, 2000 to transfer at 100000/s.
    assert!((decision.predicted_s.expect("predicted") - 1.12).abs() < 1e-9);
    assert_eq!(decision.alternatives.len(), 2);
    fleet[2].ongoing_tokens = 299_000;
    assert_eq!(picks("pd", &fleet, &case).0, pair(1, 3));
}

#[test]
fn pd_pairs_only_within_a_group() {
    let mut fleet = [prefill(0), decode(1)];
    fleet[1].transfer_group = 1;
    assert_eq!(
        decide("pd", Value::Null, &fleet, &Case::default()),
        Err(Refusal::NoCandidates)
    );
}

#[test]
fn offload_separates_heavy_requests_only_and_four_at_most() {
    let fleet = [both(0), both(1), both(2)];
    let of = |input, separated| {
        let case = Case {
            input,
            separated,
            affine: Some(0),
            sequence: 1,
            ..Case::default()
        };
        picks("offload", &fleet, &case)
    };
    assert_eq!(of(4_999, 0), (local(0), Reason::Warm));
    assert_eq!(of(5_000, 0), (local(0), Reason::Medium));
    assert_eq!(of(19_999, 0), (local(0), Reason::Medium));
    assert_eq!(
        of(20_000, 3),
        (pair(2, 0), Reason::Heavy),
        "second partner in rotation"
    );
    assert_eq!(of(20_000, 4), (local(0), Reason::SeparatedCap));
}

#[test]
fn offload_skips_overloaded_prefill_workers_and_can_ask_for_cache() {
    let mut fleet = [both(0), both(1), both(2), both(3)];
    fleet[1].pending_prefill_tokens = 90_000;
    let case = Case {
        input: 30_000,
        affine: Some(0),
        ..Case::default()
    };
    assert_eq!(picks("offload", &fleet, &case).0, pair(2, 0));
    let gated = |fleet: &[WorkerFacts]| {
        decide("offload", json!({"min_cached_share": 0.3}), fleet, &case)
            .expect("a decision")
            .reason
    };
    assert_eq!(gated(&fleet), Reason::SourceCacheBelowThreshold);
    fleet[0].cached_tokens = 9_000;
    assert_eq!(gated(&fleet), Reason::Heavy);
}

#[test]
fn every_gate_of_selective_is_a_reason() {
    let mut fleet = [both(0), both(1)];
    let mut case = Case {
        input: 8_191,
        affine: Some(0),
        ..Case::default()
    };
    let reason = |fleet: &[WorkerFacts], case: &Case| picks("selective", fleet, case).1;
    assert_eq!(reason(&fleet, &case), Reason::NewBelowThreshold);
    case.input = 40_000;
    assert_eq!(reason(&fleet, &case), Reason::ChosenNotDecoding);
    for w in &mut fleet {
        (w.requests, w.decoding) = (4, 4);
    }
    assert_eq!(reason(&fleet, &case), Reason::SourceCacheBelowThreshold);
    // P holds half, but its own four decodes would stall 2 s each: cost 8 s, benefit 16 s.
    fleet[1].cached_tokens = 20_000;
    assert_eq!(
        picks("selective", &fleet, &case),
        (pair(1, 0), Reason::WorthIt)
    );
    fleet[1].decoding = 7;
    assert_eq!(reason(&fleet, &case), Reason::NotWorthIt, "16 ≤ 1.2 × 14");
    let lone = [WorkerFacts {
        requests: 1,
        decoding: 1,
        ..worker(0)
    }];
    assert_eq!(reason(&lone, &case), Reason::NoPartner);
}

#[test]
fn migrate_moves_off_an_overloaded_worker_and_counts_recent_migrations() {
    let mut fleet = [both(0), both(1), both(2)];
    fleet[0].requests = 9;
    let case = Case {
        input: 1000,
        affine: Some(0),
        ..Case::default()
    };
    fleet[1].recent_migrations = 3;
    assert_eq!(
        picks("migrate", &fleet, &case),
        (pair(0, 2), Reason::Migration),
        "prefilled where it is"
    );
    fleet[0].requests = 0;
    assert_eq!(
        picks("migrate", &fleet, &case),
        (local(0), Reason::Affinity)
    );
    let mut plain = [worker(0), worker(1)];
    plain[0].requests = 9;
    assert_eq!(
        picks("migrate", &plain, &case),
        (local(1), Reason::Migration)
    );
}

#[test]
fn elastic_serves_alone_while_nothing_decodes_and_separates_when_a_prompt_would_stall_others() {
    let mut fleet = [prefill(0), elastic(1)];
    let case = Case {
        input: 20_000,
        ..Case::default()
    };
    let decision = decide("elastic", Value::Null, &fleet, &case).expect("a decision");
    // Local 2 s; separated 2 s + 0.1 s + 0.2 s.
    assert_eq!(
        (decision.route, decision.predicted_s),
        (local(1), Some(2.0))
    );
    (fleet[1].requests, fleet[1].decoding) = (1, 1);
    let decision = decide("elastic", Value::Null, &fleet, &case).expect("a decision");
    // One stream would wait 2 s, which counts a fifth: more than what a transfer takes.
    assert_eq!(decision.route, pair(0, 1));
    assert!((decision.predicted_s.expect("predicted") - 2.3).abs() < 1e-9);
    assert_eq!(decision.alternatives[0].route, local(1));
    let (chosen, local_cost) = (decision.cost.expect("terms"), decision.alternatives[0].cost);
    let local_cost = local_cost.expect("terms");
    assert!((local_cost.first_token_s - 2.0).abs() < 1e-9);
    assert!((local_cost.stall_s - 0.4).abs() < 1e-9);
    assert_eq!(
        (Some(chosen.first_token_s), chosen.stall_s),
        (decision.predicted_s, 0.0)
    );
    assert!(chosen.total_s() < local_cost.total_s());
    // The prefill worker's queue is longer than that stall.
    fleet[0].pending_prefill_tokens = 30_000;
    assert_eq!(picks("elastic", &fleet, &case).0, local(1));
    // A short delta is not worth a transfer.
    fleet[0].pending_prefill_tokens = 0;
    (fleet[0].cached_tokens, fleet[1].cached_tokens) = (19_900, 19_900);
    assert_eq!(picks("elastic", &fleet, &case).0, local(1));
}

#[test]
fn elastic_keeps_a_session_while_a_move_saves_little() {
    let mut fleet = [worker(0), worker(1)];
    let case = Case {
        input: 10_000,
        affine: Some(0),
        ..Case::default()
    };
    fleet[0].pending_prefill_tokens = 400;
    assert_eq!(
        picks("elastic", &fleet, &case),
        (local(0), Reason::Hysteresis),
        "1.04 s against 1.0 s"
    );
    fleet[0].pending_prefill_tokens = 5_000;
    assert_eq!(
        picks("elastic", &fleet, &case),
        (local(1), Reason::LowestCost)
    );
}

#[test]
fn elastic_finds_the_cheapest_of_all_pairs() {
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..300 {
        let mut fleet: Vec<_> = (0..8)
            .map(|slot| match slot % 3 {
                0 => prefill(slot),
                1 => elastic(slot),
                _ => both(slot),
            })
            .collect();
        for w in &mut fleet {
            w.transfer_group = random.u32(0..2);
            w.decoding = random.u32(0..5);
            w.requests = w.decoding;
            w.pending_prefill_tokens = random.u64(0..60_000);
            w.decode_tokens = random.u64(0..200_000);
            w.arriving = random.u32(0..4);
            w.arriving_tokens = random.u64(0..100_000);
            w.cached_tokens = random.u64(0..20_000);
            w.held_tokens = random.u64(0..310_000);
            w.kept_tokens = random.u64(0..310_000);
        }
        let input = 20_000u64;
        let new = |w: &WorkerFacts| (input - w.cached_tokens) as f64;
        let queue_s = |w: &WorkerFacts| w.pending_prefill_tokens as f64 / 10_000.0;
        // The answer is 100 tokens; running requests give back 10,000 KV tokens a second.
        let over = |used: u64, w: &WorkerFacts| (used as f64 + new(w) + 100.0 - 3e5).max(0.0);
        let room_s = |w: &WorkerFacts| {
            let held = w.held_tokens as f64;
            (held + 20_100.0 - 3e5).clamp(0.0, held) / 10_000.0
        };
        let stall_s = |w: &WorkerFacts| 0.2 * f64::from(w.decoding) * new(w) / 10_000.0;
        let crowd_s = |w: &WorkerFacts| {
            let others = f64::from(w.decoding + w.arriving);
            let context = (w.decode_tokens + w.arriving_tokens) as f64;
            let own_s = 100.0 * (0.01 + 1e-3 * (others + 1.0) + 1e-7 * (context + 2e4));
            let added_s = others * 50.0 * (1e-3 + 1e-7 * 2e4);
            let displaced = over(w.kept_tokens.max(w.held_tokens), w).min(new(w) + 100.0);
            own_s + 0.2 * added_s + 0.3 * displaced / 10_000.0
        };
        let mut costs = Vec::new();
        for d in &fleet {
            if d.serves_local {
                let first_s = queue_s(d).max(room_s(d)) + new(d) / 10_000.0;
                costs.push((local(d.slot), first_s + stall_s(d) + crowd_s(d)));
            }
            for p in &fleet {
                if d.serves_decode
                    && p.serves_prefill
                    && p.slot != d.slot
                    && p.transfer_group == d.transfer_group
                {
                    let transfer_s = 0.1 + new(d) / 100_000.0;
                    let computed_s = queue_s(p) + new(p) / 10_000.0;
                    let first_s = computed_s.max(room_s(d)) + transfer_s;
                    costs.push((pair(p.slot, d.slot), first_s + stall_s(p) + crowd_s(d)));
                }
            }
        }
        let best = costs
            .iter()
            .min_by(|a, b| a.1.total_cmp(&b.1))
            .expect("candidates");
        let case = Case {
            input,
            sequence: random.u64(..),
            ..Case::default()
        };
        assert_eq!(picks("elastic", &fleet, &case).0, best.0);
    }
}

#[test]
fn elastic_prices_decoding_by_batch_and_context() {
    // The home decodes twelve answers with 540,000 tokens of context; the other worker is idle and cold.
    let mut fleet = [worker(0), worker(1)];
    for w in &mut fleet {
        w.rates.prefill_tokens_per_s = 65_000.0;
        w.kv_capacity_tokens = Some(1_000_000);
    }
    (fleet[0].decoding, fleet[0].requests, fleet[0].decode_tokens) = (12, 12, 540_000);
    fleet[0].cached_tokens = 38_000;
    let case = Case {
        input: 40_000,
        affine: Some(0),
        ..Case::default()
    };
    // Elsewhere the prompt takes 0.58 s more, and the answer 100 × 66 ms less.
    assert_eq!(
        picks("elastic", &fleet, &case),
        (local(1), Reason::LowestCost)
    );
    let deaf = decide(
        "elastic",
        json!({"output_weight": 0, "stall_weight": 0}),
        &fleet,
        &case,
    );
    assert_eq!(deaf.expect("a decision").route, local(0));
}

#[test]
fn elastic_counts_what_is_on_its_way_to_a_decode_worker() {
    let mut fleet = [prefill(0), decode(1), decode(2), decode(3)];
    // What would draw a whole burst: a system prompt that one of them holds.
    fleet[1].cached_tokens = 15_000;
    let case = Case {
        input: 60_000,
        ..Case::default()
    };
    let mut taken = [0; 4];
    for _ in 0..30 {
        let Route::PrefillDecode { decode, .. } = picks("elastic", &fleet, &case).0 else {
            panic!("nobody serves alone");
        };
        taken[decode] += 1;
        fleet[decode].arriving += 1;
        fleet[decode].arriving_tokens += case.input;
    }
    assert!(
        taken[1..].iter().all(|&count| (8..=13).contains(&count)),
        "{taken:?}"
    );
}

#[test]
fn elastic_does_not_call_a_stall_smaller_that_pacing_spreads() {
    let mut fleet = [prefill(0), elastic(1)];
    (fleet[1].requests, fleet[1].decoding) = (15, 15);
    fleet[0].pending_prefill_tokens = 40_000;
    fleet[1].rates.paced_slowdown = 2.0;
    let case = Case {
        input: 20_000,
        ..Case::default()
    };
    // Local 4 s and fifteen streams that lose 2 s each, at a fifth: 10 s. Separated 6.3 s.
    assert_eq!(picks("elastic", &fleet, &case).0, pair(0, 1));
}

#[test]
fn elastic_waits_for_a_full_kv_pool_as_long_as_requests_run() {
    let mut fleet = [worker(0), worker(1)];
    (fleet[0].cached_tokens, fleet[0].held_tokens) = (30_000, 280_000);
    let case = Case {
        input: 40_000,
        ..Case::default()
    };
    let alone_s = |fleet: &[WorkerFacts]| {
        let decision = decide("elastic", Value::Null, fleet, &case).expect("a decision");
        (decision.route, decision.predicted_s.expect("predicted"))
    };
    // 20,100 tokens are lacking, given back at 10,000 a second; then 1 s of prefill. Elsewhere 4 s.
    let (route, predicted_s) = alone_s(&fleet);
    assert_eq!(route, local(0));
    assert!((predicted_s - 3.01).abs() < 1e-9, "{predicted_s}");
    fleet[0].freed_tokens_per_s = 2_000.0;
    assert_eq!(alone_s(&fleet).0, local(1));
}

#[test]
fn elastic_displaces_nothing_as_long_as_the_cache_has_room() {
    let mut fleet = [worker(0), worker(1)];
    (fleet[0].kept_tokens, fleet[1].kept_tokens) = (280_000, 250_000);
    // Otherwise the first is better, by 0.1 s.
    fleet[1].pending_prefill_tokens = 1_000;
    let case = Case {
        input: 19_000,
        ..Case::default()
    };
    assert_eq!(picks("elastic", &fleet, &case).0, local(0));
    fleet[0].kept_tokens = 290_000;
    assert_eq!(picks("elastic", &fleet, &case).0, local(1), "0.3 × 0.91 s");
}

#[test]
fn unified_stays_with_who_holds_the_prompt_where_no_session_is_named() {
    let mut fleet = [worker(0), worker(1), worker(2)];
    fleet[1].cached_tokens = 5_000;
    fleet[1].requests = 1;
    fleet[1].pending_prefill_tokens = 9_000;
    fleet[2].requests = 2;
    let case = Case {
        input: 10_000,
        ..Case::default()
    };
    // By the score alone: (9,000 + 5,000) × 1 against (0 + 10,000) × 1.
    assert_eq!(
        picks("unified", &fleet, &case),
        (local(1), Reason::Affinity)
    );
    fleet[1].cached_tokens = 4_999;
    assert_eq!(
        picks("unified", &fleet, &case),
        (local(0), Reason::LowestScore)
    );
    fleet[1].cached_tokens = 9_999;
    fleet[1].requests = 2;
    let overloaded = picks("unified", &fleet, &case);
    assert_eq!(overloaded, (local(0), Reason::LowestScore), "2 > 1.3 × 4/3");
}

#[test]
fn pd_spreads_sessions_that_share_a_system_prompt() {
    let mut fleet = [prefill(0), decode(1), decode(2), decode(3)];
    for worker in &mut fleet {
        worker.kv_capacity_tokens = None;
    }
    let case = Case {
        input: 58_000,
        ..Case::default()
    };
    // Each has a prompt of 50,000 tokens behind a system prompt of 8,000 that the first worker holds.
    fleet[1].cached_tokens = 8_000;
    for _ in 0..30 {
        let Route::PrefillDecode { decode, .. } = picks("pd", &fleet, &case).0 else {
            panic!("pd separates");
        };
        fleet[decode].ongoing_tokens += case.input;
        fleet[decode].requests += 1;
        fleet[decode].cached_tokens = 8_000;
    }
    let requests: Vec<u32> = fleet[1..].iter().map(|worker| worker.requests).collect();
    assert_eq!(requests, [10, 10, 10]);
    // A session stays while the others' load differs by less than what would have to be sent.
    fleet[2].cached_tokens = 50_000;
    fleet[2].ongoing_tokens += 40_000;
    assert_eq!(picks("pd", &fleet, &case).0, pair(0, 2));
}

#[test]
fn first_turn_separates_once_and_stays() {
    let mut fleet = [prefill(0), prefill(1), elastic(2), elastic(3)];
    fleet[0].pending_prefill_tokens = 10;
    fleet[2].ongoing_tokens = 5_000;
    let first = Case {
        input: 50_000,
        ..Case::default()
    };
    let chosen = picks("first_turn", &fleet, &first);
    assert_eq!(chosen, (pair(1, 3), Reason::FirstTurn));
    let later = Case {
        affine: Some(2),
        ..first
    };
    let chosen = picks("first_turn", &fleet, &later);
    assert_eq!(chosen, (local(2), Reason::Affinity), "whatever it holds");
    fleet[2].routable = false;
    let chosen = picks("first_turn", &fleet, &later);
    assert_eq!(
        chosen,
        (pair(1, 3), Reason::FirstTurn),
        "its worker is gone"
    );
    // A decode worker cannot serve alone: the session stays on it all the same.
    let pd = [prefill(0), decode(1), decode(2)];
    let later = Case {
        affine: Some(2),
        sequence: 1,
        ..Case::default()
    };
    let chosen = picks("first_turn", &pd, &later);
    assert_eq!(chosen, (pair(0, 2), Reason::Affinity));
    let chosen = picks("first_turn", &[worker(0)], &Case::default());
    assert_eq!(chosen, (local(0), Reason::NoPartner));
}

#[test]
fn isl_bounding_keeps_what_is_short_and_mostly_cached() {
    let mut fleet = [prefill(0), elastic(1)];
    for (input, cached, expected) in [
        (10_000, 7_953, local(1)),
        (10_000, 7_952, pair(0, 1)),
        (1_000, 301, local(1)),
        (1_000, 300, pair(0, 1)),
    ] {
        fleet[1].cached_tokens = cached;
        let case = Case {
            input,
            ..Case::default()
        };
        let (route, reason) = picks("isl_bounding", &fleet, &case);
        assert_eq!(route, expected, "{cached} of {input} cached");
        let expected = match route {
            Route::Local { .. } => Reason::NewBelowThreshold,
            Route::PrefillDecode { .. } => Reason::NewAboveThreshold,
        };
        assert_eq!(reason, expected);
    }
    // Where it decodes is chosen by what waits, what is new and what decodes there.
    let mut fleet = [prefill(0), elastic(1), elastic(2)];
    fleet[1].cached_tokens = 9_000;
    let case = Case {
        input: 10_000,
        ..Case::default()
    };
    assert_eq!(picks("isl_bounding", &fleet, &case).0, local(1));
    fleet[1].decode_tokens = 9_001;
    assert_eq!(picks("isl_bounding", &fleet, &case).0, pair(0, 2));
}

#[test]
fn nixl_threshold_separates_from_a_number_of_uncached_tokens_on() {
    let mut fleet = [prefill(0), elastic(1)];
    let case = Case {
        input: 1_000,
        ..Case::default()
    };
    for (cached, expected) in [(984, pair(0, 1)), (985, local(1))] {
        fleet[1].cached_tokens = cached;
        assert_eq!(picks("nixl_threshold", &fleet, &case).0, expected);
    }
    fleet[1].cached_tokens = 0;
    let never = decide(
        "nixl_threshold",
        json!({"threshold_tokens": 0}),
        &fleet,
        &case,
    );
    assert_eq!(never.expect("a decision").route, local(1));
    // Nobody to prefill for it.
    let alone = picks("nixl_threshold", &[elastic(1)][..], &case);
    assert_eq!(alone, (local(1), Reason::NoPartner));
}

#[test]
fn with_no_candidate_every_policy_refuses() {
    let mut down = [worker(0), prefill(1), decode(2)];
    for w in &mut down {
        w.routable = false;
    }
    for info in policy::TABLE {
        for fleet in [&down[..], &[]] {
            let refused = decide(info.name, Value::Null, fleet, &Case::default());
            assert_eq!(refused, Err(Refusal::NoCandidates), "{}", info.name);
        }
    }
}

#[test]
fn documented_defaults_are_the_defaults() {
    for info in policy::TABLE {
        let documented: serde_json::Map<String, Value> = info
            .params
            .iter()
            .map(|p| (p.name.to_owned(), p.default.parse().expect("JSON")))
            .collect();
        policy::build(info.name, documented.into())
            .unwrap_or_else(|e| panic!("{}: {e}", info.name));
    }
}
