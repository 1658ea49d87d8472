//! How well routers place requests: cache hits and first tokens of chats that grow turn by turn, before
//! workers that have a cache and service times, beside the stock routers in one run.
//!
//! `cargo bench -p router_policies --bench routing`. The workers are mocks: an LRU cache (of [`LOADS`], which
//! has caches that hold all chats and such that do not), prefills one after the other at
//! [`PREFILL_TOKENS_PER_S`], decode steps of
//! [`STEP_S`] that grow with the batch. So figures say which router places better, not how fast anything
//! is. Every arm gets the same users with the same seeds, whose prompts are text, in a closed loop.
//!
//! ROUTER_BENCH_ROUTING_SECONDS (20) is the length of one arm's measurement after a quarter of it to warm
//! up. ROUTER_BENCH_SGLANG_ROUTER, ROUTER_BENCH_SMG and ROUTER_BENCH_ONLY are as in the benchmark `router`.

mod arms;

use arms::{Arm, Connection, Quantiles, Router, setting, start, wanted};
use bytes::Bytes;
use http_body_util::{BodyExt, Either, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

const WORKERS: usize = 4;
const PREFILL_TOKENS_PER_S: f64 = 20_000.0;
/// Of a decode step without others; each running answer makes it a tenth longer.
const STEP_S: f64 = 0.01;
const BYTES_PER_TOKEN: usize = 4;
const BLOCK_TOKENS: usize = 32;
const SYSTEM_PROMPTS: u64 = 3;
const SYSTEM_TOKENS: usize = 2_000;
/// Users, and the tokens of each worker's cache. In the small ones a chat stays only where few others come.
const LOADS: [(usize, usize); 3] = [(48, 80_000), (28, 24_000), (48, 24_000)];

/// What a worker has of prompts, in blocks named by all that precedes them; the least recently used go
/// first, of one prompt's the last ones.
#[derive(Default)]
struct Cache {
    tokens: usize,
    used: HashMap<u64, u64>,
    by_use: BTreeMap<u64, u64>,
    uses: u64,
}

impl Cache {
    /// Tokens of the prompt that are there; afterwards all of them are.
    fn take(&mut self, prompt: &[u8]) -> usize {
        let mut hasher = DefaultHasher::new();
        let blocks: Vec<u64> = prompt
            .chunks_exact(BLOCK_TOKENS * BYTES_PER_TOKEN)
            .map(|block| {
                block.hash(&mut hasher);
                hasher.finish()
            })
            .collect();
        let held = blocks
            .iter()
            .take_while(|block| self.used.contains_key(block));
        let held = held.count();
        for &block in blocks.iter().rev() {
            self.uses += 1;
            if let Some(before) = self.used.insert(block, self.uses) {
                self.by_use.remove(&before);
            }
            self.by_use.insert(self.uses, block);
        }
        while self.used.len() * BLOCK_TOKENS > self.tokens
            && let Some((_, oldest)) = self.by_use.pop_first()
        {
            self.used.remove(&oldest);
        }
        held * BLOCK_TOKENS
    }
}

#[derive(Default)]
struct Worker {
    cache: Mutex<Cache>,
    /// One prefill at a time, first come, first served.
    prefilling: tokio::sync::Mutex<()>,
    running: AtomicUsize,
    prompt_tokens: AtomicU64,
    cached_tokens: AtomicU64,
}

impl Worker {
    async fn start() -> (String, Arc<Self>) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
            .await
            .expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        let worker = Arc::new(Self::default());
        let shared = Arc::clone(&worker);
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let _ = socket.set_nodelay(true);
                let shared = Arc::clone(&shared);
                let service = service_fn(move |request| answer(Arc::clone(&shared), request));
                let server = hyper::server::conn::http1::Builder::new();
                tokio::spawn(server.serve_connection(TokioIo::new(socket), service));
            }
        });
        (url, worker)
    }

    fn reset(&self, cache_tokens: usize) {
        *self.cache.lock() = Cache {
            tokens: cache_tokens,
            ..Cache::default()
        };
        self.forget_counts();
    }

    fn forget_counts(&self) {
        self.prompt_tokens.store(0, Ordering::Relaxed);
        self.cached_tokens.store(0, Ordering::Relaxed);
    }

    fn counts(&self) -> (f64, f64) {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed) as f64;
        (of(&self.prompt_tokens), of(&self.cached_tokens))
    }
}

struct Events(mpsc::Receiver<Bytes>);

impl futures_core::Stream for Events {
    type Item = Result<Frame<Bytes>, Infallible>;

    fn poll_next(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        let received = self.0.poll_recv(cx);
        received.map(|item| item.map(|bytes| Ok(Frame::data(bytes))))
    }
}

type Body = Either<Full<Bytes>, StreamBody<Events>>;

fn whole(status: u16, text: impl Into<Bytes>) -> Response<Body> {
    let builder = Response::builder().status(status);
    let builder = builder.header("content-type", "application/json");
    let body = Either::Left(Full::from(text.into()));
    builder.body(body).expect("a response")
}

async fn answer(
    worker: Arc<Worker>,
    request: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    let info = json!({
        "model_path": "mock", "served_model_name": "mock", "is_generation": true, "page_size": 1, "tp_size": 1,
        "dp_size": 1, "max_total_num_tokens": worker.cache.lock().tokens, "version": "0.5.17",
    });
    match request.uri().path() {
        "/health" | "/health_generate" => return Ok(whole(200, "{}")),
        "/model_info" | "/get_model_info" | "/server_info" | "/get_server_info" => {
            return Ok(whole(200, info.to_string()));
        }
        "/v1/models" => {
            return Ok(whole(200, r#"{"object":"list","data":[{"id":"mock"}]}"#));
        }
        "/generate" => {}
        _ => return Ok(whole(404, "{}")),
    }
    let body = request
        .into_body()
        .collect()
        .await
        .map(|body| body.to_bytes());
    let body: Value = serde_json::from_slice(&body.unwrap_or_default()).unwrap_or_default();
    let text = body["text"].as_str().unwrap_or_default().to_owned();
    let output = body["sampling_params"]["max_new_tokens"]
        .as_u64()
        .unwrap_or(1);
    let (sender, receiver) = mpsc::channel(64);
    tokio::spawn(async move {
        let tokens = text.len() / BYTES_PER_TOKEN;
        let cached = {
            let _turn = worker.prefilling.lock().await;
            let cached = worker.cache.lock().take(text.as_bytes());
            let seconds = (tokens - cached) as f64 / PREFILL_TOKENS_PER_S;
            tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
            cached
        };
        worker
            .prompt_tokens
            .fetch_add(tokens as u64, Ordering::Relaxed);
        worker
            .cached_tokens
            .fetch_add(cached as u64, Ordering::Relaxed);
        let running = worker.running.fetch_add(1, Ordering::Relaxed);
        for made in 1..=output {
            if made > 1 {
                let step_s = STEP_S * (1.0 + running as f64 / 10.0);
                tokio::time::sleep(Duration::from_secs_f64(step_s)).await;
            }
            let event = format!(
                "data: {{\"text\":\"t\",\"meta_info\":{{\"prompt_tokens\":{tokens},\"cached_tokens\":{cached},\"completion_tokens\":{made}}}}}\n\n"
            );
            if sender.send(event.into()).await.is_err() {
                break;
            }
        }
        let _ = sender.send(Bytes::from_static(b"data: [DONE]\n\n")).await;
        worker.running.fetch_sub(1, Ordering::Relaxed);
    });
    let builder = Response::builder().header("content-type", "text/event-stream");
    let body = Either::Right(StreamBody::new(Events(receiver)));
    Ok(builder.body(body).expect("a response"))
}

/// Text of so many tokens that no other seed has.
fn text(seed: u64, tokens: usize) -> String {
    let mut random = fastrand::Rng::with_seed(seed);
    let letters = (0..tokens * BYTES_PER_TOKEN).map(|_| random.lowercase());
    letters.collect()
}

/// Heavy-tailed between two bounds: most are near the lower one.
fn pareto(random: &mut fastrand::Rng, least: f64, most: f64) -> usize {
    (least / (1.0 - random.f64()).powf(1.0 / 1.2)).min(most) as usize
}

/// (seconds to the first event, to the last) of what ended within the measurement.
type Samples = Arc<Mutex<Vec<(f64, f64)>>>;

/// One user after another at one place, until the end: their chats begin with one of three system prompts
/// and grow by what they say and the answers that they got.
async fn user(
    url: String,
    number: u64,
    names_session: bool,
    from: Instant,
    until: Instant,
    samples: Samples,
) {
    let mut random = fastrand::Rng::with_seed(number);
    let mut sessions = 0u64;
    let mut connection = Connection::open(&url).await;
    while Instant::now() < until {
        sessions += 1;
        let of = number * 1_000_000 + sessions * 1_000;
        let mut prompt = text(random.u64(..SYSTEM_PROMPTS), SYSTEM_TOKENS);
        for turn in 0..pareto(&mut random, 3.0, 40.0) as u64 {
            prompt += &text(of + turn, pareto(&mut random, 150.0, 3_000.0));
            let output = random.u64(15..50);
            let mut body = json!({
                "text": prompt, "stream": true, "sampling_params": {"max_new_tokens": output},
            });
            if names_session {
                body["user"] = format!("{number}-{sessions}").into();
            }
            let begun = Instant::now();
            let answer = match &mut connection {
                Some(open) => open.post(body.to_string().into()).await,
                None => None,
            };
            match answer {
                Some(answer) if answer.status == 200 => {
                    if begun >= from && Instant::now() <= until {
                        samples.lock().push((answer.first_s, answer.whole_s));
                    }
                }
                _ => {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    connection = Connection::open(&url).await;
                }
            }
            prompt += &text(of + turn + 500, output as usize);
            let think_s = 0.05 + 0.4 * random.f64();
            tokio::time::sleep(Duration::from_secs_f64(think_s)).await;
            if Instant::now() >= until {
                return;
            }
        }
    }
}

async fn measure(
    name: &str,
    arm: &Arm,
    workers: &[Arc<Worker>],
    (users, cache_tokens): (usize, usize),
    names_session: bool,
) -> Value {
    let seconds = setting("ROUTER_BENCH_ROUTING_SECONDS", 20) as f64;
    let from = Instant::now() + Duration::from_secs_f64(seconds / 4.0);
    let until = from + Duration::from_secs_f64(seconds);
    let samples: Samples = Arc::default();
    let mut running = tokio::task::JoinSet::new();
    for number in 1..=users as u64 {
        let samples = Arc::clone(&samples);
        running.spawn(user(
            arm.url.clone(),
            number,
            names_session,
            from,
            until,
            samples,
        ));
    }
    tokio::time::sleep_until(from.into()).await;
    workers.iter().for_each(|worker| worker.forget_counts());
    while running.join_next().await.is_some() {}
    let counts: Vec<(f64, f64)> = workers.iter().map(|worker| worker.counts()).collect();
    let sum = |of: fn(&(f64, f64)) -> f64| counts.iter().map(of).sum::<f64>();
    let hit = sum(|count| count.1) / sum(|count| count.0).max(1.0);
    let computed = |count: &(f64, f64)| count.0 - count.1;
    let most = counts.iter().map(computed).fold(0.0, f64::max);
    let uneven = most / (sum(|count| count.0 - count.1) / WORKERS as f64).max(1.0);
    let samples = samples.lock();
    let first = Quantiles::new(samples.iter().map(|sample| sample.0 * 1e3).collect());
    let whole = Quantiles::new(samples.iter().map(|sample| sample.1 * 1e3).collect());
    let count = samples.len();
    println!(
        "routing, {users} users, caches of {cache_tokens}  {name:<22} hits {hit:.3}  first token p50 {:.0} p90 {:.0} p99 {:.0} ms  whole p50 {:.0} p90 {:.0} ms  computed max/mean {uneven:.2}  {count} requests",
        first.at(0.5),
        first.at(0.9),
        first.at(0.99),
        whole.at(0.5),
        whole.at(0.9),
    );
    json!({
        "what": "routing", "users": users, "cache_tokens": cache_tokens, "arm": name, "hit_rate": hit, "requests": count,
        "computed_max_over_mean": uneven,
        "first_ms": {"p50": first.at(0.5), "p90": first.at(0.9), "p99": first.at(0.99)},
        "whole_ms": {"p50": whole.at(0.5), "p90": whole.at(0.9)},
    })
}

async fn all() -> Vec<Value> {
    arms::keep_off();
    let mut started = Vec::new();
    for _ in 0..WORKERS {
        started.push(Worker::start().await);
    }
    let urls: Vec<&str> = started.iter().map(|(url, _)| &**url).collect();
    let workers: Vec<Arc<Worker>> = started
        .iter()
        .map(|(_, worker)| Arc::clone(worker))
        .collect();
    let ours = |policy: &str| {
        let admission = json!({"rule": "off"});
        (
            Router::Ours,
            json!({"policy": policy, "admission": admission}),
        )
    };
    let stock = |router| (router, Value::Null);
    let arms = [
        ("unified", ours("unified"), false),
        ("unified, sessions named", ours("unified"), true),
        ("elastic", ours("elastic"), false),
        ("round_robin", ours("round_robin"), false),
        ("smg", stock(Router::Smg), false),
        ("sglang-router", stock(Router::Sglang), false),
    ];
    let mut results = Vec::new();
    for load in LOADS {
        for (name, (router, config), names_session) in &arms {
            if !wanted(&format!(
                "routing, {} users, caches of {}, {name}",
                load.0, load.1
            )) {
                continue;
            }
            workers.iter().for_each(|worker| worker.reset(load.1));
            // A new process for each, so that none knows what the caches held.
            let arm = start(*router, &urls, false, config.clone(), "cache_aware").await;
            if let Some(arm) = arm {
                results.push(measure(name, &arm, &workers, load, *names_session).await);
            }
        }
    }
    results
}

fn main() {
    if arms::served() {
        return;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    println!("{}", json!({"results": runtime.block_on(all())}));
}
