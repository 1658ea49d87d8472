//! A simulated fleet in virtual time, under the real policies, counters and learnt rates.
//!
//! Nothing here is a measurement: workers are formulas with speeds stated below, and the load is drawn
//! from a seeded generator. What it shows is whether predictions follow from the speeds, and which
//! policy suits a fleet of one prefill and three elastic workers under agentic sessions.

use router_policies::config::WorkerSpec;
use router_policies::fleet::log::EventSink;
use router_policies::fleet::prefix::hash::TokenHasher;
use router_policies::fleet::{Fleet, Outcome, Request, Reservation};
use router_policies::policy;
use serde_json::{Value, json};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Virtual seconds a step.
const STEP_S: f64 = 0.005;
const PREFILL_WORKERS: usize = 1;
const WORKERS: usize = 4;

/// The workers' true speeds: a prompt of 32,000 tokens alone takes 1.1 s.
const LINEAR_TOKENS_PER_S: f64 = 65_000.0;
const ATTENTION_PAIRS_PER_S: f64 = 8e8;
const PREFILL_OVERHEAD_S: f64 = 0.02;
/// An elastic worker's local prefill while others decode there, as measured (docs/results/elastic-worker.md).
const PACED_SLOWDOWN: f64 = 1.25;
const DECODE_STEP_S: f64 = 0.012;
const DECODE_STEP_BESIDE_PREFILL_S: f64 = 0.08;
const TRANSFER_TOKENS_PER_S: f64 = 1_000_000.0;
const TRANSFER_OVERHEAD_S: f64 = 0.04;
/// Each prefill takes up to this share more or less than the formula says.
const NOISE: f64 = 0.1;
const KV_TOKENS: u64 = 560_000;

const SESSIONS: usize = 24;
const REQUESTS: usize = 600;
const THINK_S: f64 = 1.0;
const SYSTEM_TOKENS: u64 = 8_000;

/// What a worker has cached: tokens by session, least recently used sessions evicted.
#[derive(Default)]
struct Cache {
    by_session: Vec<(u64, u64)>,
}

impl Cache {
    fn held(&self, session: u64, prompt: u64) -> u64 {
        let own = self.by_session.iter().find(|(id, _)| *id == session);
        let shared = if self.by_session.is_empty() {
            0
        } else {
            SYSTEM_TOKENS
        };
        own.map_or(shared, |(_, tokens)| *tokens).min(prompt - 1)
    }

    /// What sessions have in common is stored once.
    fn tokens(&self) -> u64 {
        let own = self
            .by_session
            .iter()
            .map(|(_, tokens)| tokens - SYSTEM_TOKENS);
        SYSTEM_TOKENS + own.sum::<u64>()
    }

    fn store(&mut self, session: u64, tokens: u64) {
        self.by_session.retain(|(id, _)| *id != session);
        self.by_session.push((session, tokens));
        while self.tokens() > KV_TOKENS {
            self.by_session.remove(0);
        }
    }
}

struct Running {
    client: usize,
    session: u64,
    prompt: u64,
    output: f64,
    decoded: f64,
    /// Of the prefill, in seconds of a worker without other work.
    left_s: Option<f64>,
    sent_s: f64,
    decode: usize,
    reservation: Reservation,
}

#[derive(Default)]
struct Worker {
    cache: Cache,
    prefills: VecDeque<Running>,
    decodes: Vec<Running>,
}

struct Client {
    session: u64,
    prompt: u64,
    turns_left: u32,
    next_s: f64,
}

struct Answered {
    ttft_s: f64,
    ratio: Option<f64>,
    separated: bool,
    worker: usize,
}

/// What one policy did under one seed.
struct Outcomes {
    answered: Vec<Answered>,
    /// Seconds from a request's arrival to its last token.
    whole_s: Vec<f64>,
}

struct Simulation {
    random: fastrand::Rng,
    sessions: u64,
}

impl Simulation {
    /// Mostly short turns, some with a large file or tool output in them.
    fn new_tokens(&mut self) -> u64 {
        match self.random.u32(..10) {
            0..7 => self.random.u64(200..3_000),
            7..9 => self.random.u64(3_000..12_000),
            _ => self.random.u64(12_000..40_000),
        }
    }

    fn client(&mut self, now_s: f64) -> Client {
        self.sessions += 1;
        Client {
            session: self.sessions,
            prompt: SYSTEM_TOKENS + self.random.u64(5_000..40_000),
            turns_left: self.random.u32(5..20),
            next_s: now_s + self.random.f64() * THINK_S,
        }
    }

    fn run(&mut self, policy: &str) -> Outcomes {
        let clock_us = Arc::new(AtomicU64::new(0));
        let shown = Arc::clone(&clock_us);
        let fleet = Arc::new(Fleet::with_clock(
            policy::build(policy, Value::Null).expect("a policy"),
            policy.to_owned(),
            EventSink::in_memory(),
            1,
            Box::new(move || shown.load(Ordering::Relaxed) as f64 / 1e6),
        ));
        for slot in 0..WORKERS {
            let id = format!("w{slot}");
            let role = if slot < PREFILL_WORKERS {
                "prefill"
            } else {
                "elastic"
            };
            let spec = json!({"id": id, "url": format!("http://{id}:1"), "role": role,
                "bootstrap_port": 1, "kv_capacity_tokens": KV_TOKENS});
            let spec = serde_json::from_value::<WorkerSpec>(spec).expect("a worker");
            fleet.add_worker(spec).expect("a new id");
            fleet.report_health(&id, true);
        }
        let mut workers: Vec<Worker> = (0..WORKERS).map(|_| Worker::default()).collect();
        let mut clients: Vec<Client> = (0..SESSIONS).map(|_| self.client(0.0)).collect();
        let mut transfers: Vec<(f64, Running)> = Vec::new();
        let (mut answered, mut whole_s) = (Vec::new(), Vec::new());
        let mut predicted: HashMap<String, f64> = HashMap::new();
        let mut step = 0u64;
        while answered.len() < REQUESTS {
            step += 1;
            let now_s = step as f64 * STEP_S;
            clock_us.store((now_s * 1e6) as u64, Ordering::Relaxed);
            for (index, client) in clients.iter_mut().enumerate() {
                if client.next_s > now_s {
                    continue;
                }
                client.next_s = f64::INFINITY;
                let output = self.random.u64(50..700);
                let reservation = place(&fleet, client, output);
                if let Some(decision) = fleet.sink().recent(1).first()
                    && let Some(seconds) = decision.predicted_s
                {
                    predicted.insert(reservation.decision_id().to_owned(), seconds);
                }
                let slot = |id: &str| id[1..].parse::<usize>().expect("a slot");
                let decode = slot(&reservation.answering().id);
                let prefill = reservation.prefill().map_or(decode, |spec| slot(&spec.id));
                workers[prefill].prefills.push_back(Running {
                    client: index,
                    session: client.session,
                    prompt: client.prompt,
                    output: output as f64,
                    decoded: 0.0,
                    left_s: None,
                    sent_s: now_s,
                    decode,
                    reservation,
                });
            }
            let mut ready = Vec::new();
            for (slot, worker) in workers.iter_mut().enumerate() {
                let beside_prefill = !worker.prefills.is_empty();
                let decoding = !worker.decodes.is_empty();
                if let Some(head) = worker.prefills.front_mut() {
                    let (cache, noise) =
                        (&worker.cache, 1.0 + NOISE * (2.0 * self.random.f64() - 1.0));
                    let left_s = head.left_s.get_or_insert_with(|| {
                        let cached = cache.held(head.session, head.prompt);
                        let new = (head.prompt - cached) as f64;
                        let pairs = new * (cached as f64 + new / 2.0);
                        PREFILL_OVERHEAD_S
                            + noise * (new / LINEAR_TOKENS_PER_S + pairs / ATTENTION_PAIRS_PER_S)
                    });
                    *left_s -= STEP_S / if decoding { PACED_SLOWDOWN } else { 1.0 };
                    if *left_s <= 0.0
                        && let Some(done) = worker.prefills.pop_front()
                    {
                        worker.cache.store(done.session, done.prompt);
                        ready.push((slot, done));
                    }
                }
                let token_s = if beside_prefill {
                    DECODE_STEP_BESIDE_PREFILL_S
                } else {
                    DECODE_STEP_S
                };
                for running in &mut worker.decodes {
                    running.decoded += STEP_S / token_s;
                }
                let (ended, going): (Vec<_>, Vec<_>) = std::mem::take(&mut worker.decodes)
                    .into_iter()
                    .partition(|running| running.decoded >= running.output);
                worker.decodes = going;
                for mut running in ended {
                    whole_s.push(now_s - running.sent_s);
                    let output = running.output as u64;
                    worker.cache.store(running.session, running.prompt + output);
                    running.reservation.output(output - 1);
                    running.reservation.finish(Outcome::Ok, Some(200), None);
                    let client = &mut clients[running.client];
                    client.turns_left -= 1;
                    client.prompt += output;
                    client.prompt += self.new_tokens();
                    client.next_s = now_s + THINK_S;
                    if client.turns_left == 0 || client.prompt > 130_000 {
                        *client = self.client(now_s + THINK_S);
                    }
                }
            }
            for (slot, done) in ready {
                let lacking =
                    done.prompt - workers[done.decode].cache.held(done.session, done.prompt);
                let takes_s = if slot == done.decode {
                    0.0
                } else {
                    TRANSFER_OVERHEAD_S + lacking as f64 / TRANSFER_TOKENS_PER_S
                };
                transfers.push((now_s + takes_s, done));
            }
            let (arrived, going): (Vec<_>, Vec<_>) =
                transfers.into_iter().partition(|(at_s, _)| *at_s <= now_s);
            transfers = going;
            for (_, mut running) in arrived {
                running.reservation.streams();
                running.reservation.output(1);
                let worker = &mut workers[running.decode];
                worker.cache.store(running.session, running.prompt);
                let ttft_s = now_s - running.sent_s;
                let id = running.reservation.decision_id();
                answered.push(Answered {
                    ttft_s,
                    ratio: predicted.remove(id).map(|seconds| ttft_s / seconds),
                    separated: running.reservation.prefill().is_some(),
                    worker: running.decode,
                });
                worker.decodes.push(running);
            }
        }
        Outcomes { answered, whole_s }
    }
}

fn place(fleet: &Arc<Fleet>, client: &Client, output: u64) -> Reservation {
    let mut hasher = TokenHasher::new(fleet.token_block());
    let tokens: Vec<u32> = (0..client.prompt)
        .map(|i| {
            let of = if i < SYSTEM_TOKENS { 0 } else { client.session };
            (of as u32).wrapping_mul(2_654_435_761) ^ i as u32
        })
        .collect();
    hasher.extend(&tokens);
    let request = Request {
        request_id: String::new(),
        session_id: Some(client.session.to_string()),
        prompt: hasher.finish(),
        max_output_tokens: Some(output),
        stream: true,
        ..Request::default()
    };
    fleet.decide(&request, &[]).expect("a decision")
}

fn quantile(values: impl Iterator<Item = f64>, share: f64) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let last = values.len().saturating_sub(1);
    values
        .get((last as f64 * share).round() as usize)
        .copied()
        .unwrap_or(f64::NAN)
}

/// Means over the seeds of what one policy did.
#[derive(Default)]
struct Summary {
    mean_s: f64,
    p90_s: f64,
    /// From arrival to the last token.
    whole_mean_s: f64,
    hotspot: f64,
    /// Realised over predicted time to the first token, p90.
    local_ratio: f64,
    separated_ratio: f64,
}

fn simulate(policy: &str) -> Summary {
    const SEEDS: std::ops::RangeInclusive<u64> = 1..=8;
    let mut summary = Summary::default();
    for seed in SEEDS {
        let mut simulation = Simulation {
            random: fastrand::Rng::with_seed(seed),
            sessions: 0,
        };
        let Outcomes { answered, whole_s } = simulation.run(policy);
        // Before, the rates are still being learnt.
        let settled = &answered[REQUESTS / 6..];
        let whole_s = &whole_s[REQUESTS / 6..];
        let ratio = |separated: bool| {
            let of_kind = settled.iter().filter(|a| a.separated == separated);
            quantile(of_kind.filter_map(|a| a.ratio), 0.9)
        };
        let p90_of = |slot| {
            let there = settled.iter().filter(|a| a.worker == slot);
            quantile(there.map(|a| a.ttft_s), 0.9)
        };
        let p90s: Vec<f64> = (PREFILL_WORKERS..WORKERS).map(p90_of).collect();
        let of_workers = |share| quantile(p90s.iter().copied(), share);
        let share = 1.0 / SEEDS.count() as f64;
        let mean_s = settled.iter().map(|a| a.ttft_s).sum::<f64>() / settled.len() as f64;
        summary.mean_s += share * mean_s;
        summary.whole_mean_s += share * whole_s.iter().sum::<f64>() / whole_s.len() as f64;
        summary.p90_s += share * quantile(settled.iter().map(|a| a.ttft_s), 0.9);
        summary.hotspot += share * of_workers(1.0) / of_workers(0.5);
        summary.local_ratio += share * ratio(false);
        summary.separated_ratio += share * ratio(true);
    }
    println!(
        "simulated, {policy}: TTFT mean {:.2} s, p90 {:.2} s; whole mean {:.2} s; hotspot {:.2}; realised/predicted p90 {:.2} local, {:.2} separated",
        summary.mean_s,
        summary.p90_s,
        summary.whole_mean_s,
        summary.hotspot,
        summary.local_ratio,
        summary.separated_ratio,
    );
    summary
}

#[test]
fn elastic_predicts_what_happens_and_is_no_worse_than_the_others() {
    let elastic = simulate("elastic");
    assert!(elastic.local_ratio <= 1.5, "{}", elastic.local_ratio);
    assert!(
        elastic.separated_ratio <= 1.5,
        "{}",
        elastic.separated_ratio
    );
    assert!(elastic.hotspot <= 1.5, "{}", elastic.hotspot);
    for name in ["unified", "offload", "pd"] {
        let other = simulate(name);
        assert!(elastic.mean_s <= other.mean_s, "{name}: {}", other.mean_s);
        assert!(elastic.p90_s <= other.p90_s, "{name}: {}", other.p90_s);
        // What it spares running streams must not cost those that come: level with the best.
        let whole_s = other.whole_mean_s;
        assert!(elastic.whole_mean_s <= 1.02 * whole_s, "{name}: {whole_s}");
    }
}
