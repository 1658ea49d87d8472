//! Engines alone: closed forms where nothing interferes, and what is kept under any load.

use proptest::prelude::*;
use simulator::Eviction;
use simulator::calibration::Calibration;
use simulator::engine::{Emission, Job, Limits, Order, Part, Sglang, Vllm, Worker};
use std::collections::HashMap;

const BLOCK: u64 = 16;

fn limits(kv_tokens: u64) -> Limits {
    Limits {
        kv_tokens,
        host_kv_tokens: 0,
        block_tokens: BLOCK,
        chunk_tokens: 512,
        max_prefill_tokens: 1024,
        max_running: 64,
        eviction: Eviction::Lru,
        order: Order::Fcfs,
        mixed: false,
        target_itl_s: None,
        prefix_cache: true,
        log_changes: false,
    }
}

fn job(id: usize, family: u64, input_tokens: u64, output_tokens: u64) -> Job {
    let blocks = (input_tokens + output_tokens) / BLOCK;
    let stream: Vec<u64> = (0..blocks)
        .map(|at| (family + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (at << 20))
        .collect();
    Job {
        id,
        stream: stream.into(),
        block_tokens: BLOCK,
        input_tokens,
        output_tokens,
        part: Part::Whole,
    }
}

/// Runs a worker until it has nothing to do, and returns what it told and when.
fn finish(worker: &mut dyn Worker) -> Vec<(f64, Emission)> {
    run_until(worker, f64::INFINITY)
}

/// As [`finish`], but no longer than to `end_s`.
fn run_until(worker: &mut dyn Worker, end_s: f64) -> Vec<(f64, Emission)> {
    let mut all = Vec::new();
    let mut told = Vec::new();
    let mut last_s = 0.0;
    while let Some(now_s) = worker.next_s().filter(|&now_s| now_s <= end_s) {
        assert!(now_s >= last_s, "time goes back");
        last_s = now_s;
        worker.advance(&mut told);
        all.extend(told.drain(..).map(|emission| (now_s, emission)));
    }
    all
}

fn engines(limits: &Limits) -> Vec<Box<dyn Worker>> {
    let calibration = Calibration::default();
    vec![
        Box::new(Sglang::new(calibration.clone(), limits.clone())),
        Box::new(Vllm::new(calibration, limits.clone())),
    ]
}

#[test]
fn a_request_alone_takes_what_the_formula_says() {
    for mut worker in engines(&limits(100_000)) {
        let calibration = Calibration::default();
        worker.submit(job(0, 0, 1200, 5), 3.0);
        let told = finish(worker.as_mut());
        let mut expected_s = 3.0;
        for (before, new) in [(0, 512), (512, 512), (1024, 176)] {
            expected_s += calibration.prefill_overhead_s
                + new as f64 / calibration.prefill_tokens_per_s
                + calibration.pairs(before, new) / calibration.prefill_pairs_per_s;
        }
        let tokens = told
            .iter()
            .filter(|(_, e)| matches!(e, Emission::Token { .. }));
        for (number, (at_s, _)) in tokens.enumerate() {
            assert!(
                (at_s - expected_s).abs() < 1e-9,
                "token {number}: {at_s} {expected_s}"
            );
            expected_s += calibration.decode_s(1, 1200 + number as u64);
        }
        assert!(matches!(
            told.last(),
            Some((
                _,
                Emission::Finished {
                    cached_tokens: 0,
                    ..
                }
            ))
        ));

        // The next turn finds the prompt and the answer that were computed.
        worker.submit(job(1, 0, 1400, 1), 100.0);
        let told = finish(worker.as_mut());
        let cached = 1204 / BLOCK * BLOCK;
        let seconds = calibration.mixed_s(
            1400 - cached,
            calibration.pairs(cached, 1400 - cached),
            0,
            0,
        );
        assert!((told[0].0 - 100.0 - seconds).abs() < 1e-9);
        let ended = Emission::Finished {
            job: 1,
            cached_tokens: cached,
        };
        assert_eq!(told.last().map(|(_, emission)| *emission), Some(ended));
    }
}

#[test]
fn what_a_vllm_request_finds_cached_makes_the_step_longer_in_which_it_is_let_in() {
    let of = |found_token_s, kv_tokens| {
        let calibration = Calibration {
            found_token_s,
            ..Calibration::default()
        };
        let tiered = Limits {
            host_kv_tokens: 100_000,
            ..limits(kv_tokens)
        };
        Vllm::new(calibration, tiered)
    };
    // Family 0 comes back while another is answered: the time of its first token, and the longest gap
    // of the other's.
    let returns = |found_token_s, kv_tokens| {
        let mut worker = of(found_token_s, kv_tokens);
        for (id, family) in [(0, 0), (1, 1)] {
            worker.submit(job(id, family, 3_000, 1), 10.0 * id as f64);
            finish(&mut worker);
        }
        worker.submit(job(2, 9, 100, 300), 100.0);
        run_until(&mut worker, 100.5);
        worker.submit(job(3, 0, 3_000, 1), 100.5);
        let told = finish(&mut worker);
        let times = |wanted| -> Vec<f64> {
            let is = |(_, e): &&(f64, Emission)| *e == Emission::Token { job: wanted };
            told.iter().filter(is).map(|(at_s, _)| *at_s).collect()
        };
        let longest_s = times(2)
            .windows(2)
            .map(|pair| pair[1] - pair[0])
            .fold(0.0, f64::max);
        (times(3)[0], longest_s, worker.counters().reloaded_tokens)
    };
    // 2,992 tokens, whole blocks, are found: all on the device, or part of them in host memory.
    for (kv_tokens, loads) in [(100_000, false), (4_096, true)] {
        let (without_s, gap_s, reloaded) = returns(0.0, kv_tokens);
        assert_eq!(reloaded > 0, loads);
        let (with_s, longest_s, _) = returns(1e-4, kv_tokens);
        let found_s = 2_992.0 * 1e-4;
        if !loads {
            assert!(
                (with_s - without_s - found_s).abs() < 1e-9,
                "{with_s} {without_s}"
            );
            assert!(
                (longest_s - gap_s - found_s).abs() < 1e-9,
                "{longest_s} {gap_s}"
            );
        }
        assert!(
            longest_s > found_s && longest_s < found_s + 0.1,
            "{longest_s}"
        );
    }
    // Where nothing is found nothing is longer.
    let alone = |found_token_s| {
        let mut worker = of(found_token_s, 100_000);
        worker.submit(job(0, 0, 3_000, 5), 0.0);
        finish(&mut worker)
    };
    assert_eq!(alone(1e-4), alone(0.0));
    let wrong = Calibration {
        found_token_s: -1.0,
        ..Calibration::default()
    };
    let words = "calibration.found_token_s: expected 0 or more, not -1";
    assert_eq!(wrong.check(), Err(words.to_owned()));
}

#[test]
fn sglang_holds_decodes_up_for_a_prefill_and_vllm_does_not() {
    let worst = |worker: &mut dyn Worker| {
        worker.submit(job(0, 0, 100, 400), 0.0);
        worker.submit(job(1, 1, 20_000, 2), 0.5);
        let told = finish(worker);
        let times: Vec<f64> = told
            .iter()
            .filter(|(_, e)| *e == Emission::Token { job: 0 })
            .map(|(at_s, _)| *at_s)
            .collect();
        times
            .windows(2)
            .map(|pair| pair[1] - pair[0])
            .fold(0.0, f64::max)
    };
    let [sglang, vllm] = engines(&limits(100_000))
        .iter_mut()
        .map(|worker| worst(worker.as_mut()))
        .collect::<Vec<_>>()[..]
    else {
        panic!("two engines");
    };
    assert!(sglang > 1.0, "{sglang}");
    assert!(vllm < 0.1, "{vllm}");
    // With mixed chunks, SGLang's decodes go on as well.
    let mut mixed = Sglang::new(
        Calibration::default(),
        Limits {
            mixed: true,
            ..limits(100_000)
        },
    );
    assert!(worst(&mut mixed) < 0.1);
}

/// Eight requests decode behind 2,000 tokens each when a prompt of 32,000 comes: the worst gap of the
/// eight from then on, and the prompt's time to its first token.
fn stall(limits: &Limits) -> (f64, f64) {
    let worker = &mut Sglang::new(Calibration::default(), limits.clone());
    for id in 0..8 {
        worker.submit(job(id, id as u64, 2_000, 400), 0.0);
    }
    worker.submit(job(8, 8, 32_000, 2), 2.0);
    let told = finish(worker);
    let times = |id: usize| {
        let tokens = told
            .iter()
            .filter(move |(_, e)| *e == Emission::Token { job: id });
        tokens.map(|(at_s, _)| *at_s).collect::<Vec<f64>>()
    };
    let gaps = (0..8).flat_map(|id| {
        let times = times(id);
        let gaps: Vec<f64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let since = times.iter().position(|&at_s| at_s > 2.0).unwrap_or(0);
        gaps[since.saturating_sub(1)..].to_vec()
    });
    (gaps.fold(0.0, f64::max), times(8)[0] - 2.0)
}

#[test]
fn a_paced_prefill_keeps_the_decodes_beside_it_at_the_target() {
    let of = |target_itl_s: Option<f64>| {
        stall(&Limits {
            chunk_tokens: 8_192,
            max_prefill_tokens: 16_384,
            target_itl_s,
            ..limits(150_000)
        })
    };
    let unpaced = of(None);
    let paced = [of(Some(0.08)), of(Some(0.04))];
    println!("simulated: gap and TTFT {unpaced:?} unpaced, {paced:?} at 80 and 40 ms");
    assert!(unpaced.0 > 0.9, "{unpaced:?}");
    for ((gap_s, ttft_s), target_s) in paced.into_iter().zip([0.08, 0.04]) {
        // Measured on an H200 (results/elastic-worker.md): 84 and 44 ms.
        assert!((0.9 * target_s..=target_s).contains(&gap_s), "{gap_s}");
        assert!(ttft_s > unpaced.1, "{ttft_s}");
    }
    assert!(paced[1].1 > paced[0].1);
}

/// While a prompt of 60,000 tokens is under way beside four decodes, one comes with `new` tokens behind `cached` ones that
/// the worker holds: their times to the first token.
fn behind_a_long_prompt(
    target_itl_s: Option<f64>,
    (cached, new): (u64, u64),
    host_kv_tokens: u64,
) -> [f64; 2] {
    let worker = &mut Sglang::new(
        Calibration::default(),
        Limits {
            chunk_tokens: 8_192,
            max_prefill_tokens: 16_384,
            mixed: true,
            target_itl_s,
            host_kv_tokens,
            ..limits(110_000)
        },
    );
    let mut jobs = vec![(job(0, 0, cached + 16, 1), 0.0)];
    if host_kv_tokens > 0 {
        // It takes the room of the first, which stays in host memory.
        jobs.push((job(1, 1, 100_000, 1), 10.0));
    }
    jobs.extend((2..6).map(|id| (job(id, id as u64, 200, 1_000), 30.0)));
    jobs.push((job(6, 6, 60_000, 2), 31.0));
    jobs.push((job(7, 0, cached + new, 2), 31.5));
    let mut told = Vec::new();
    for (job, sent_s) in jobs {
        told.extend(run_until(worker, sent_s));
        worker.submit(job, sent_s);
    }
    told.extend(finish(worker));
    [(6, 31.0), (7, 31.5)].map(|(id, sent_s)| {
        let first = told.iter().find(|(_, e)| *e == Emission::Token { job: id });
        first.map(|(at_s, _)| at_s - sent_s).expect("a token")
    })
}

#[test]
fn short_prompts_go_along_with_a_paced_one_that_is_under_way() {
    let [long_s, short_s] = behind_a_long_prompt(None, (20_000, 300), 0);
    assert!(short_s > long_s - 0.6, "{short_s}: not without pacing");
    for (cached, host_kv_tokens) in [(16, 0), (20_000, 0), (20_000, 300_000)] {
        let [long_s, short_s] = behind_a_long_prompt(Some(0.3), (cached, 300), host_kv_tokens);
        assert!(short_s < 1.0 && long_s > 3.0, "{short_s}, {long_s}");
    }
    // One that computes more than half of a chunk waits.
    let [long_s, short_s] = behind_a_long_prompt(Some(0.3), (16, 6_000), 0);
    assert!(short_s > long_s - 0.6, "{short_s}, {long_s}");
}

#[test]
fn a_worker_that_decodes_for_others_retracts_and_goes_on_where_it_was() {
    let mut worker = Sglang::new(Calibration::default(), limits(5_000));
    for id in 0..6 {
        let part = Part::Decode;
        let job = Job {
            part,
            ..job(id, id as u64, 500, 1_500)
        };
        worker.submit(job, 0.0);
    }
    let (mut told, mut tokens) = (Vec::new(), [0; 6]);
    let mut ended = 0;
    while let Some(now_s) = worker.next_s() {
        worker.advance(&mut told);
        for emission in told.drain(..) {
            match emission {
                Emission::Reserved { job, held_tokens } => {
                    assert_eq!(held_tokens, 0);
                    worker.received(job, now_s);
                }
                Emission::Token { job } => tokens[job] += 1,
                Emission::Finished { .. } => ended += 1,
                other => panic!("{other:?}"),
            }
        }
    }
    assert_eq!((ended, tokens), (6, [1_500; 6]));
    let counters = worker.counters();
    assert!(counters.retractions > 0);
    assert_eq!(
        (counters.received_tokens, counters.prefilled_tokens),
        (6 * 500, 0)
    );
    assert_eq!(worker.occupancy().used_tokens, 0);
}

#[test]
fn what_was_evicted_comes_from_host_memory_at_its_speed() {
    let tiered = Limits {
        host_kv_tokens: 100_000,
        ..limits(4_096)
    };
    for mut worker in engines(&tiered) {
        worker.submit(job(0, 0, 3_000, 2), 0.0);
        finish(worker.as_mut());
        worker.submit(job(1, 1, 3_000, 2), 10.0);
        finish(worker.as_mut());
        worker.submit(job(2, 0, 3_000, 2), 20.0);
        let told = finish(worker.as_mut());
        let Some((_, Emission::Finished { cached_tokens, .. })) = told.last() else {
            panic!("{told:?}");
        };
        assert!(*cached_tokens >= 2_976, "{cached_tokens}");
        assert!(worker.counters().reloaded_tokens > 1_500);
    }
}

/// A vLLM with a host tier that has answered a prompt of 3,000 tokens of each family, one after another:
/// more than its device holds.
fn vllm_that_has_evicted(reload_tokens_per_s: f64, kv_tokens: u64, families: u64) -> Vllm {
    let calibration = Calibration {
        reload_tokens_per_s,
        ..Calibration::default()
    };
    let tiered = Limits {
        host_kv_tokens: 100_000,
        ..limits(kv_tokens)
    };
    let mut worker = Vllm::new(calibration, tiered);
    for family in 0..families {
        worker.submit(job(family as usize, family, 3_000, 1), 10.0 * family as f64);
        finish(&mut worker);
    }
    worker
}

#[test]
fn vllm_loads_from_host_memory_beside_the_answers_of_others() {
    // Loading 3,000 tokens takes a second, some hundred times a step.
    let mut worker = vllm_that_has_evicted(3_000.0, 8_192, 4);
    // While one is answered, the first two families, which others have displaced, come back at once.
    worker.submit(job(10, 9, 100, 800), 100.0);
    run_until(&mut worker, 101.0);
    worker.submit(job(11, 0, 3_000, 1), 101.0);
    worker.submit(job(12, 1, 3_000, 1), 101.0);
    let told = finish(&mut worker);
    let reloaded = worker.counters().reloaded_tokens;
    assert!((4_000..=6_000).contains(&reloaded), "{reloaded}");
    let times = |wanted: usize| -> Vec<f64> {
        let tokens = told
            .iter()
            .filter(|(_, e)| *e == Emission::Token { job: wanted });
        tokens.map(|(at_s, _)| *at_s).collect()
    };
    let answers = times(10);
    let longest_s = answers
        .windows(2)
        .map(|pair| pair[1] - pair[0])
        .fold(0.0, f64::max);
    assert!(longest_s < 0.1, "{longest_s}");
    // One load after the other, each before its first token.
    let (first_s, second_s) = (times(11)[0] - 101.0, times(12)[0] - 101.0);
    let loads_s = reloaded as f64 / 3_000.0;
    assert!(first_s > 0.4 && second_s > loads_s, "{first_s} {second_s}");
    assert!(second_s < loads_s + 0.2, "{second_s}");
    assert!(second_s - first_s > 0.4, "{first_s} {second_s}");
}

#[test]
fn who_comes_while_vllm_only_loads_does_not_wait_for_the_load() {
    let mut worker = vllm_that_has_evicted(1_000.0, 4_096, 2);
    worker.submit(job(2, 0, 3_000, 1), 100.0);
    run_until(&mut worker, 100.2);
    worker.submit(job(3, 9, 100, 1), 100.2);
    let told = finish(&mut worker);
    let ended = |wanted: usize| {
        let is = |(_, e): &&(f64, Emission)| matches!(e, Emission::Finished { job, .. } if *job == wanted);
        told.iter()
            .find(is)
            .map_or(f64::INFINITY, |(at_s, _)| *at_s)
    };
    assert!(ended(3) < 100.3, "{}", ended(3));
    assert!(ended(2) > 101.0 && ended(2) < 104.0, "{}", ended(2));
}

#[test]
fn a_request_that_fits_nowhere_is_refused() {
    for mut worker in engines(&limits(1_000)) {
        worker.submit(job(0, 0, 2_000, 10), 0.0);
        assert_eq!(
            finish(worker.as_mut()),
            [(0.0, Emission::Rejected { job: 0 })]
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]
    #[test]
    fn every_job_ends_with_all_its_tokens_and_nothing_is_lost(
        jobs in prop::collection::vec((0u64..5, 1u64..2_500, 1u64..300, 0.0f64..0.5), 1..40),
        kv_tokens in 4_000u64..20_000,
        host_kv_tokens in prop_oneof![Just(0u64), Just(3_000), Just(40_000)],
        mixed in any::<bool>(),
        lpm in any::<bool>(),
    ) {
        let order = if lpm { Order::Lpm } else { Order::Fcfs };
        let limits = Limits { host_kv_tokens, mixed, order, ..limits(kv_tokens) };
        for mut worker in engines(&limits) {
            let (mut now_s, mut told) = (0.0, Vec::new());
            let mut tokens: HashMap<usize, u64> = HashMap::new();
            let mut cached: HashMap<usize, u64> = HashMap::new();
            let mut last_s = 0.0;
            let mut advance = |worker: &mut dyn Worker, until_s: f64| {
                while let Some(next_s) = worker.next_s().filter(|next_s| *next_s <= until_s) {
                    assert!(next_s >= last_s);
                    last_s = next_s;
                    worker.advance(&mut told);
                    let occupancy = worker.occupancy();
                    assert!(occupancy.used_tokens <= occupancy.capacity_tokens);
                    let (device, host) = worker.cached();
                    assert!(device <= kv_tokens && host <= host_kv_tokens);
                    for emission in told.drain(..) {
                        match emission {
                            Emission::Token { job } => *tokens.entry(job).or_default() += 1,
                            Emission::Finished { job, cached_tokens } => {
                                assert!(cached.insert(job, cached_tokens).is_none());
                            }
                            other => panic!("{other:?}"),
                        }
                    }
                }
            };
            for (id, &(family, input, output, pause_s)) in jobs.iter().enumerate() {
                now_s += pause_s;
                advance(worker.as_mut(), now_s);
                worker.submit(job(id, family, input, output), now_s);
            }
            advance(worker.as_mut(), f64::INFINITY);
            for (id, &(_, input, output, _)) in jobs.iter().enumerate() {
                prop_assert_eq!(tokens.get(&id), Some(&output));
                prop_assert!(cached[&id] < input);
            }
            let counters = worker.counters();
            let totals = worker.cache_totals();
            prop_assert_eq!(counters.prompt_tokens, jobs.iter().map(|job| job.1).sum::<u64>());
            prop_assert_eq!(counters.generated_tokens, jobs.iter().map(|job| job.2).sum::<u64>());
            prop_assert_eq!(counters.cached_tokens, cached.values().sum::<u64>());
            let computed = counters.prompt_tokens - counters.cached_tokens;
            prop_assert!(counters.prefilled_tokens >= computed || counters.retractions > 0);
            if counters.retractions == 0 {
                prop_assert_eq!(counters.prefilled_tokens, computed);
            }
            let block_tokens = (totals.stored - totals.evicted) * BLOCK;
            prop_assert_eq!(worker.cached().0, block_tokens);
            prop_assert_eq!(worker.occupancy().used_tokens, 0);
            prop_assert_eq!((worker.occupancy().running, worker.occupancy().waiting), (0, 0));
        }
    }
}

#[test]
fn a_long_answer_keeps_its_prompt_in_the_host_tier_of_sglang_and_not_of_vllm() {
    let limits = Limits {
        host_kv_tokens: 22_000,
        ..limits(16_000)
    };
    // By engine, what is found of the first prompt, which is answered for longer than the second, when another has
    // taken the device and most of the tier.
    let found = |family: u64| -> Vec<u64> {
        let of = |worker: &mut Box<dyn Worker>| {
            worker.submit(job(0, 0, 4_800, 1_600), 0.0);
            worker.submit(job(1, 1, 4_800, 16), 0.0);
            finish(worker.as_mut());
            worker.submit(job(2, 2, 15_900, 1), 1e3);
            finish(worker.as_mut());
            worker.submit(job(3, family, 4_816, 1), 2e3);
            let told = finish(worker.as_mut());
            told.iter().find_map(|(_, emission)| match emission {
                Emission::Finished { cached_tokens, .. } => Some(*cached_tokens),
                _ => None,
            })
        };
        engines(&limits).iter_mut().filter_map(of).collect()
    };
    let (first, second) = (found(0), found(1));
    println!("simulated: {first:?} {second:?}");
    assert_eq!((first[0], second[0]), (4_800, 0), "SGLang");
    // 25,488 tokens of prompts in full blocks, where 22,000 have room.
    assert_eq!((first[1], second[1]), (1_312, 4_800), "vLLM");
}
