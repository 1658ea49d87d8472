//! What the router costs, beside the stock routers: decisions, body scans, and whole requests against
//! the same mock workers in one run.
//!
//! `cargo bench -p router_policies` measures decisions, scans and this router. With
//! ROUTER_BENCH_SGLANG_ROUTER and ROUTER_BENCH_SMG set to the Python interpreters of environments that
//! have `sglang-router` and `smg` (`deltaserve launch install` makes them), those run beside it; with
//! ROUTER_BENCH_BEFORE set to this benchmark's program as another commit's `cargo bench --no-run` makes it,
//! so does that commit's router, under the same load in the same minutes.
//!
//! ROUTER_BENCH_SECONDS (3) is the length of one measurement, ROUTER_BENCH_REPEATS (3) how often the
//! arms take turns, ROUTER_BENCH_SOAK (0) how many requests the memory test sends, ROUTER_BENCH_ROUNDS
//! (1000) how many requests of each arm the added latency is taken from, and ROUTER_BENCH_ONLY leaves
//! out every measurement whose name does not contain it. With ROUTER_BENCH_INSTRUCTIONS set to a folder
//! our routers run under valgrind's callgrind, and what is counted is instructions a request, which other work on
//! the machine does not change (times mean nothing then); the folder keeps the profiles. Every router runs
//! pinned to one core where `taskset` exists; load and mock workers run on the others. CPU time a
//! request is the router process's own, from /proc, and is what to compare on a busy machine.

mod arms;
#[path = "../tests/router/mock/mod.rs"]
mod mock;

use arms::{Answer, Arm, Connection, Quantiles, Router, setting, start, wanted};
use cpu_time::ThreadTime;
use decision::fleet::admission::settings;
use decision::fleet::log::EventSink;
use decision::fleet::prefix::hash::TokenHasher;
use decision::fleet::{Admit, Fleet, Outcome, Request as Placement};
use decision::policy;
use hyper::body::Bytes;
use mock::MockWorker;
use router_policies::config::WorkerSpec;
use router_policies::gateway::body::{Api, scan};
use router_policies::gateway::splice::{bootstrap_fields, splice};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

fn micros(elapsed: Duration) -> f64 {
    elapsed.as_secs_f64() * 1e6
}

fn main() {
    if arms::served() {
        return;
    }
    let mut results = Vec::new();
    if wanted("decision") {
        results.extend([decisions(8, 1_000_000), decisions(256, 1_000_000)]);
    }
    if wanted("scan") {
        results.push(scans());
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    results.extend(runtime.block_on(gateways()));
    println!("{}", json!({ "results": results }));
}

/// Pick and reserve, with sessions that grow turn by turn until `blocks` blocks are cached.
fn decisions(workers: usize, blocks: usize) -> Value {
    const TURN_TOKENS: u32 = 2_000;
    const TURNS: u32 = 10;
    let mut rows = Vec::new();
    for (name, rule) in [
        ("unified", "off"),
        ("elastic", "off"),
        ("unified", "rotate"),
    ] {
        // Where nothing waits: there is room for all, and for any number of cold starts.
        let (is_gated, roomy) = (rule != "off", json!({"rule": rule}));
        let admission = settings::build(&roomy).expect("a rule");
        let fleet = Fleet::new(
            policy::build(name, Value::Null).expect("a policy"),
            name.to_owned(),
            EventSink::in_memory(),
            1,
        );
        let fleet = Arc::new(fleet.with_admission(admission));
        for i in 0..workers {
            let id = format!("w{i}");
            let capacity = (blocks * 16 / workers) as u64 * if is_gated { 8 } else { 1 };
            let spec =
                json!({"id": id, "url": format!("http://{id}:1"), "kv_capacity_tokens": capacity});
            fleet
                .add_worker(serde_json::from_value::<WorkerSpec>(spec).expect("a worker"))
                .expect("a new id");
            fleet.report_health(&id, true);
        }
        let place = |session: u32, turn: u32| {
            let mut hasher = TokenHasher::new(fleet.token_block());
            // All sessions share a system prompt.
            let system = 0..1_000;
            let own = 0..(turn + 1) * TURN_TOKENS;
            let own = own.map(|i| session.wrapping_mul(2_654_435_761) ^ i);
            hasher.extend(&system.chain(own).collect::<Vec<_>>());
            let request = Placement {
                request_id: "r".to_owned(),
                session_id: Some(format!("s{session}")),
                prompt: hasher.finish(),
                max_output_tokens: Some(100),
                stream: true,
                ..Placement::default()
            };
            let (begun, begun_cpu) = (Instant::now(), ThreadTime::now());
            let placed = match fleet.admit(&request, &[], || {}) {
                Admit::Placed(placed) => placed,
                Admit::Waiting(_) => panic!("it waits"),
                Admit::Refused(refused) => panic!("{refused:?}"),
            };
            (placed, micros(begun.elapsed()), micros(begun_cpu.elapsed()))
        };
        let sessions = (blocks * 16) as u32 / (TURNS * TURN_TOKENS);
        for session in 0..sessions {
            for turn in 0..TURNS {
                place(session, turn).0.finish(Outcome::Ok, Some(200), None);
            }
        }
        let mut random = fastrand::Rng::with_seed(3);
        let mut running = std::collections::VecDeque::new();
        let (mut wall, mut cpu) = (Vec::new(), Vec::new());
        for _ in 0..20_000 {
            let (placed, wall_us, cpu_us) =
                place(random.u32(..sessions * 5 / 4), random.u32(..TURNS));
            wall.push(wall_us);
            cpu.push(cpu_us);
            running.push_back(placed);
            if running.len() > workers * 8
                && let Some(oldest) = running.pop_front()
            {
                oldest.finish(Outcome::Ok, Some(200), None);
            }
        }
        let (wall, cpu) = (Quantiles::new(wall), Quantiles::new(cpu));
        let [p50, p99, p50_cpu, p99_cpu] = [wall.at(0.5), wall.at(0.99), cpu.at(0.5), cpu.at(0.99)];
        let label = if is_gated {
            format!("{name}, gated")
        } else {
            name.to_owned()
        };
        println!(
            "decision  {label:<15} {workers:>4} workers, {blocks} cached blocks: p50 {p50:.1} µs, p99 {p99:.1} µs (processor time {p50_cpu:.1}, {p99_cpu:.1})"
        );
        rows.push(json!({
            "policy": label, "p50_us": p50, "p99_us": p99, "p50_cpu_us": p50_cpu, "p99_cpu_us": p99_cpu,
        }));
    }
    json!({"what": "decision", "workers": workers, "cached_blocks": blocks, "rows": rows})
}

/// About 600 kB of token ids.
fn large_body(stream: bool) -> Bytes {
    let mut random = fastrand::Rng::with_seed(1);
    let ids: Vec<u32> = (0..92_000).map(|_| random.u32(100_000..151_000)).collect();
    let body =
        json!({"input_ids": ids, "stream": stream, "sampling_params": {"max_new_tokens": 4}});
    Bytes::from(body.to_string())
}

fn scans() -> Value {
    let body = large_body(false);
    let mut rows = Vec::new();
    for block in [16, 1] {
        let (mut wall, mut cpu) = (Vec::new(), Vec::new());
        for _ in 0..500 {
            let (begun, begun_cpu) = (Instant::now(), ThreadTime::now());
            let scanned = scan(Api::Generate, &body, block, 16).expect("valid");
            let pieces = splice(&body, &scanned, bootstrap_fields("host", Some(1), 1));
            std::hint::black_box(pieces);
            wall.push(micros(begun.elapsed()));
            cpu.push(micros(begun_cpu.elapsed()));
        }
        let (wall, cpu) = (Quantiles::new(wall), Quantiles::new(cpu));
        let [p50, p99, p50_cpu, p99_cpu] = [wall.at(0.5), wall.at(0.99), cpu.at(0.5), cpu.at(0.99)];
        println!(
            "scan      {} bytes, blocks of {block}: p50 {p50:.0} µs, p99 {p99:.0} µs (processor time {p50_cpu:.0}, {p99_cpu:.0})",
            body.len()
        );
        rows.push(json!({
            "block": block, "p50_us": p50, "p99_us": p99, "p50_cpu_us": p50_cpu, "p99_cpu_us": p99_cpu,
        }));
    }
    json!({"what": "scan_and_splice", "bytes": body.len(), "rows": rows})
}

/// What one arm did in one measurement.
struct Measured {
    rps: f64,
    cpu_us: f64,
    /// In user space, a request, where they are counted.
    instructions: f64,
    first_s: Vec<f64>,
    whole_s: Vec<f64>,
    failed: usize,
}

/// What each client of a measurement sends again and again.
#[derive(Clone)]
enum Load {
    Generate(Bytes),
    /// The turns of a coding agent's session, then those of the next.
    Sessions(Arc<Vec<String>>),
}

/// The turns of a session of `/v1/messages`, each with an answer and a tool's result more than the one before.
fn turns() -> Load {
    const TURNS: usize = 20;
    let words = |kind: &str, at: usize, count: usize| {
        let words = (0..count).map(|word| format!("{kind}{}", at * 31 + word * word % 997));
        words.collect::<Vec<_>>().join(" ")
    };
    let tools = (0..15).map(|at| {
        let properties: serde_json::Map<_, _> = (0..6)
            .map(|part| {
                let about = words("about", at + part, 20);
                (format!("p{part}"), json!({"type": "string", "description": about}))
            })
            .collect();
        let schema = json!({"type": "object", "properties": properties, "required": ["p0"]});
        json!({"name": format!("tool{at}"), "description": words("use", at, 150), "input_schema": schema})
    });
    let tools: Vec<_> = tools.collect();
    let system = json!([{"type": "text", "text": words("rule", 0, 2_000)}]);
    let mut messages =
        vec![json!({"role": "user", "content": format!("SESSION {}", words("ask", 0, 100))})];
    let mut bodies = Vec::new();
    for turn in 0..TURNS {
        let mut body = json!({
            "model": "mock", "max_tokens": 1_000, "system": system, "tools": tools, "messages": messages,
        })
        .to_string();
        body.truncate(body.len() - 1);
        // At the end, where the mock worker looks for it.
        bodies.push(format!("{body},\"stream\":true}}"));
        let id = format!("call{turn}");
        let call = json!({"type": "tool_use", "id": id, "name": "tool1", "input": {"p0": words("look", turn, 5)}});
        let said = json!({"type": "text", "text": words("said", turn, 30)});
        messages.push(json!({"role": "assistant", "content": [said, call]}));
        let found = words("found", turn, 300);
        let result = json!({"type": "tool_result", "tool_use_id": id, "content": found});
        messages.push(json!({"role": "user", "content": [result]}));
    }
    Load::Sessions(Arc::new(bodies))
}

impl Load {
    /// Whether a client that has sent so many requests is in the midst of a session, whose turns differ in length.
    fn is_midway(&self, count: usize) -> bool {
        matches!(self, Self::Sessions(turns) if !count.is_multiple_of(turns.len()))
    }

    /// Sends the `count`th request of a client.
    async fn send(&self, connection: &mut Connection, client: u64, count: usize) -> Option<Answer> {
        match self {
            Self::Generate(body) => connection.post(body.clone()).await,
            Self::Sessions(turns) => {
                let (session, turn) = (count / turns.len(), count % turns.len());
                let session = format!("session-{client}-{session}");
                let body = turns[turn].replacen("SESSION", &session, 1);
                let body = Bytes::from(body);
                connection
                    .post_to("/v1/messages", Some(&session), body)
                    .await
            }
        }
    }
}

/// A closed loop of `connections` clients.
async fn measure(arm: &Arm, case: &str, load: &Load, connections: usize, seconds: f64) -> Measured {
    arm.instructions(case);
    let until = Instant::now() + Duration::from_secs_f64(seconds);
    let cpu_before_s = arm.cpu_s();
    let begun = Instant::now();
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..connections {
        let client = fastrand::u64(..);
        let (url, load) = (arm.url.clone(), load.clone());
        clients.spawn(async move {
            let mut answers = Vec::new();
            let mut failed = 0;
            let mut connection = Connection::open(&url).await;
            while Instant::now() < until || (failed == 0 && load.is_midway(answers.len())) {
                let answer = match &mut connection {
                    Some(open) => load.send(open, client, answers.len()).await,
                    None => None,
                };
                match answer {
                    Some(answer) if answer.status == 200 => answers.push(answer),
                    _ => {
                        failed += 1;
                        tokio::time::sleep(Duration::from_millis(5)).await;
                        connection = Connection::open(&url).await;
                    }
                }
            }
            (answers, failed)
        });
    }
    let (mut answers, mut failed) = (Vec::new(), 0);
    while let Some(Ok((more, more_failed))) = clients.join_next().await {
        answers.extend(more);
        failed += more_failed;
    }
    let elapsed_s = begun.elapsed().as_secs_f64();
    let count = answers.len() as f64;
    Measured {
        rps: count / elapsed_s,
        cpu_us: (arm.cpu_s() - cpu_before_s) / count * 1e6,
        instructions: arm.instructions(case).unwrap_or(f64::NAN) / count,
        first_s: answers.iter().map(|answer| answer.first_s).collect(),
        whole_s: answers.iter().map(|answer| answer.whole_s).collect(),
        failed,
    }
}

async fn gateways() -> Vec<Value> {
    arms::keep_off();
    let mut mocks = Vec::new();
    for _ in 0..2 {
        let mock = MockWorker::start().await;
        mock.behaviour.keep_bodies.store(false, Ordering::Relaxed);
        mock.behaviour.tokens.store(16, Ordering::Relaxed);
        mocks.push(mock);
    }
    let urls: Vec<&str> = mocks.iter().map(|mock| &*mock.url).collect();
    let small = |stream: bool| {
        let ids: Vec<u32> = (0..200).collect();
        let body = json!({"input_ids": ids, "stream": stream});
        Load::Generate(Bytes::from(body.to_string()))
    };
    let large = |stream: bool| Load::Generate(large_body(stream));
    let cases: [(&str, bool, Load, usize); 7] = [
        ("unary, 1 kB", false, small(false), 32),
        ("streamed 16 tokens, 1 kB", false, small(true), 32),
        ("unary, 600 kB, one at a time", false, large(false), 1),
        ("turns of sessions, 60 to 140 kB", false, turns(), 8),
        ("PD unary, 1 kB", true, small(false), 32),
        ("PD streamed 16 tokens, 1 kB", true, small(true), 32),
        ("PD streamed, 600 kB, one at a time", true, large(true), 1),
    ];
    let seconds = setting("ROUTER_BENCH_SECONDS", 3) as f64;
    let repeats = setting("ROUTER_BENCH_REPEATS", 3);
    let mut results = Vec::new();
    for separated in [false, true] {
        let mut arms = Vec::new();
        // Ours and the stock routers', which have different names for it where they look at prompts.
        let policies: &[(&str, &str)] = match separated {
            true => &[("pd", "round_robin")],
            false => &[("round_robin", "round_robin"), ("unified", "cache_aware")],
        };
        for (i, &(ours, stock)) in policies.iter().enumerate() {
            for router in [
                Router::Direct,
                Router::Ours,
                Router::Before,
                Router::Sglang,
                Router::Smg,
            ] {
                if i > 0 && router == Router::Direct {
                    continue;
                }
                let config = json!({"policy": ours});
                let started = start(router, &urls, separated, config, stock).await;
                arms.extend(started.map(|mut arm| {
                    if i > 0 {
                        let is_stock = matches!(router, Router::Sglang | Router::Smg);
                        let policy = if is_stock { stock } else { ours };
                        arm.name = format!("{}, {policy}", arm.name);
                    }
                    arm
                }));
            }
        }
        let added = if separated { ADDED_PD } else { ADDED };
        for rate_rps in [0, ADDED_RATE_RPS] {
            if wanted(&format!("{added}, {}", pace(rate_rps))) {
                for arm in &arms[1..] {
                    let pair = [&arms[0], arm];
                    results.push(added_latency(pair, &large_body(true), added, rate_rps).await);
                }
            }
        }
        for (case, _, load, connections) in cases.iter().filter(|case| case.1 == separated) {
            if !wanted(case) {
                continue;
            }
            let mut measured: Vec<Vec<Measured>> = arms.iter().map(|_| Vec::new()).collect();
            for _ in 0..repeats {
                for (arm, runs) in arms.iter().zip(&mut measured) {
                    runs.push(measure(arm, case, load, *connections, seconds).await);
                }
            }
            for (arm, runs) in arms.iter().zip(&measured) {
                let median = |of: fn(&Measured) -> f64| {
                    Quantiles::new(runs.iter().map(of).collect()).at(0.5)
                };
                let all = |of: fn(&Measured) -> &Vec<f64>| {
                    Quantiles::new(
                        runs.iter()
                            .flat_map(|run| of(run).iter().copied())
                            .collect(),
                    )
                };
                let (rps, cpu_us) = (median(|run| run.rps), median(|run| run.cpu_us));
                let instructions = median(|run| run.instructions);
                let (first, whole) = (all(|run| &run.first_s), all(|run| &run.whole_s));
                let failed: usize = runs.iter().map(|run| run.failed).sum();
                println!(
                    "{case:<36} {:<26} {rps:>8.0} req/s  {cpu_us:>7.0} µs CPU  first p50 {:.2} p99 {:.2} ms  whole p50 {:.2} p99 {:.2} ms  {failed} failed  {:.0} MiB  {instructions:.0} instructions",
                    arm.name,
                    first.at(0.5) * 1e3,
                    first.at(0.99) * 1e3,
                    whole.at(0.5) * 1e3,
                    whole.at(0.99) * 1e3,
                    arm.rss_mib(),
                );
                results.push(json!({
                    "what": case, "arm": arm.name, "rps": rps, "cpu_us": cpu_us, "failed": failed,
                    "instructions": instructions,
                    "first_ms": {"p50": first.at(0.5) * 1e3, "p99": first.at(0.99) * 1e3},
                    "whole_ms": {"p50": whole.at(0.5) * 1e3, "p99": whole.at(0.99) * 1e3},
                    "rss_mib": arm.rss_mib(),
                }));
            }
        }
        let soak = setting("ROUTER_BENCH_SOAK", 0);
        if let Some(arm) = arms
            .iter()
            .find(|arm| arm.name == "deltaserve" && soak > 0 && !separated)
        {
            results.push(memory(arm, &small(true), soak).await);
        }
    }
    results
}

const ADDED: &str = "added latency, 600 kB";
const ADDED_PD: &str = "PD added latency, 600 kB";
/// Requests a second.
const ADDED_RATE_RPS: u64 = 20;

fn pace(rate_rps: u64) -> String {
    match rate_rps {
        0 => "one at a time".to_owned(),
        rate => format!("{rate} req/s"),
    }
}

/// What a router adds to the time to the first event: each request's own less that of the same request
/// sent to the worker itself just before. One at a time, or (`rate_rps` > 0) begun on a fixed schedule,
/// however long those before take.
async fn added_latency(arms: [&Arm; 2], body: &Bytes, what: &str, rate_rps: u64) -> Value {
    const POOL: usize = 8;
    let rounds = setting("ROUTER_BENCH_ROUNDS", 1_000);
    let mut pools = Vec::new();
    for arm in arms {
        let mut pool = Vec::new();
        for _ in 0..POOL {
            let open = Connection::open(&arm.url).await.expect("an open port");
            pool.push(Arc::new(tokio::sync::Mutex::new(open)));
        }
        pools.push(pool);
    }
    let cpu_before_s = arms[1].cpu_s();
    let period = Duration::from_secs_f64(0.5 / rate_rps.max(1) as f64);
    let begun = Instant::now();
    let mut running = Vec::new();
    let mut first_s = [Vec::new(), Vec::new()];
    let mut failed = 0;
    for i in 0..rounds * 2 {
        let (arm, round) = (i as usize % 2, i as usize / 2);
        let connection = Arc::clone(&pools[arm][round % POOL]);
        let body = body.clone();
        if rate_rps > 0 {
            tokio::time::sleep_until((begun + period * i as u32).into()).await;
        }
        // The timer's own millisecond is nobody's latency.
        let due = Instant::now();
        let request = tokio::spawn(async move {
            let mut connection = connection.lock().await;
            let queued_s = due.elapsed().as_secs_f64();
            let answer = connection.post(body).await?;
            (answer.status == 200).then_some(queued_s + answer.first_s)
        });
        running.push((arm, request));
        if rate_rps == 0 || i + 1 == rounds * 2 {
            for (arm, request) in running.drain(..) {
                // A failed one is infinitely late, so that the rounds stay aligned.
                let seconds = request.await.ok().flatten();
                failed += u64::from(seconds.is_none());
                first_s[arm].push(seconds.unwrap_or(f64::INFINITY) * 1e3);
            }
        }
    }
    let cpu_us = (arms[1].cpu_s() - cpu_before_s) / rounds as f64 * 1e6;
    let how = pace(rate_rps);
    let [direct, own] = first_s;
    let added = own.iter().zip(&direct).map(|(own, direct)| own - direct);
    let added = Quantiles::new(added.collect());
    let (direct, own) = (Quantiles::new(direct), Quantiles::new(own));
    println!(
        "{what:<26} {how:<14} {:<26} added p50 {:.2} p99 {:.2} ms  {cpu_us:.0} µs CPU  first p50 {:.2} p99 {:.2} ms, direct p50 {:.2} p99 {:.2} ms  {failed} failed",
        arms[1].name,
        added.at(0.5),
        added.at(0.99),
        own.at(0.5),
        own.at(0.99),
        direct.at(0.5),
        direct.at(0.99),
    );
    let both = |of: &Quantiles| json!({"p50": of.at(0.5), "p99": of.at(0.99)});
    json!({
        "what": what, "how": how, "arm": arms[1].name, "rounds": rounds, "failed": failed,
        "cpu_us": cpu_us, "added_ms": both(&added), "first_ms": both(&own), "direct_ms": both(&direct),
    })
}

/// Resident memory after each tenth of `requests` requests.
async fn memory(arm: &Arm, load: &Load, requests: u64) -> Value {
    let mut mib = vec![arm.rss_mib()];
    let mut sent = 0.0;
    while sent < requests as f64 {
        let seconds = 5.0;
        sent += measure(arm, "memory", load, 32, seconds).await.rps * seconds;
        mib.push(arm.rss_mib());
    }
    println!(
        "memory over {sent:.0} requests: {:.1} → {:.1} MiB",
        mib[0],
        mib[mib.len() - 1]
    );
    json!({"what": "memory", "requests": sent, "rss_mib": mib})
}
