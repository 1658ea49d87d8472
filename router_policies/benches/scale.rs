//! What a large fleet costs the router: the time of a decision, memory, and what `/metrics`, `/workers` and
//! `/sessions` take, with 256 workers and 100,000 sessions whose prompts are twice what all workers hold.
//!
//! `cargo bench -p router_policies --bench scale`. Each rule of admission has a process of its own. Workers are
//! addresses at which health checks are answered; turns are decided, run and end in that process, 1,024 at once.
//! First come sessions while there is room for all, then the others while there is none, then turns of sessions
//! drawn at random. Decisions are told in processor time, which other work on the machine does not change.
//! SCALE_BENCH_WORKERS (256) and SCALE_BENCH_SESSIONS (100000) set the size; a phase ends after
//! SCALE_BENCH_SECONDS (60), and ROUTER_BENCH_ONLY names one rule.

mod arms;

use arms::{Quantiles, setting};
use cpu_time::ThreadTime;
use decision::fleet::prefix::hash::TokenHasher;
use decision::fleet::{Admit, Fleet, Outcome, Request, Reservation, Ticket};
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use parking_lot::Mutex;
use router_policies::config::Config;
use router_policies::gateway::Server;
use serde_json::json;
use std::collections::{HashMap, VecDeque};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

const KV_TOKENS: u64 = 600_000;
const PROMPT_TOKENS: u32 = 3_000;
const SYSTEM_TOKENS: u32 = 200;
const GROWTH_TOKENS: u32 = 100;
const AT_ONCE: usize = 1_024;
const LATER_TURNS: usize = 20_000;
/// The share of the sessions for which there is room.
const FIT: f64 = 0.45;
const ASKED: usize = 10;
const RULES: [&str; 2] = ["rotate", "off"];

/// Answers every worker's health check.
async fn answer_checks(listener: TcpListener) {
    while let Ok((mut socket, _)) = listener.accept().await {
        tokio::spawn(async move {
            let mut read = Vec::new();
            let mut piece = [0; 4096];
            while let Ok(bytes @ 1..) = socket.read(&mut piece).await {
                read.extend_from_slice(&piece[..bytes]);
                if !read.ends_with(b"\r\n\r\n") {
                    continue;
                }
                let status = match read.starts_with(b"GET /health ") {
                    true => "200 OK",
                    false => "404 Not Found",
                };
                read.clear();
                let answer = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n");
                if socket.write_all(answer.as_bytes()).await.is_err() {
                    return;
                }
            }
        });
    }
}

/// MB of memory that this process has.
fn resident_mb() -> f64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = text.split(' ').nth(1);
    let pages = pages.and_then(|pages| pages.parse::<f64>().ok());
    pages.unwrap_or(f64::NAN) * 4096.0 / 1e6
}

/// Sessions that send turns to a fleet.
struct Clients {
    fleet: Arc<Fleet>,
    running: VecDeque<Reservation>,
    waiting: HashMap<u32, (Request, Ticket)>,
    woken: Arc<Mutex<Vec<u32>>>,
    us: Vec<f64>,
    had_to_wait: usize,
}

impl Clients {
    fn request(&self, session: u32, turn: u32) -> Request {
        let mut hasher = TokenHasher::new(self.fleet.token_block());
        let tokens = 0..PROMPT_TOKENS + turn * GROWTH_TOKENS;
        let token = |at: u32| match at {
            0..SYSTEM_TOKENS => at,
            _ => 10_000 + (session.wrapping_mul(2_654_435_761) ^ at) % 100_000,
        };
        hasher.extend(&tokens.map(token).collect::<Vec<u32>>());
        Request {
            request_id: format!("r{session}"),
            session_id: Some(format!("s{session}")),
            prompt: hasher.finish(),
            max_output_tokens: Some(100),
            stream: true,
            ..Request::default()
        }
    }

    fn turn(&mut self, session: u32, turn: u32) {
        if self.waiting.contains_key(&session) {
            return;
        }
        let request = self.request(session, turn);
        let woken = Arc::clone(&self.woken);
        let begun = ThreadTime::now();
        let admit = self
            .fleet
            .admit(&request, &[], move || woken.lock().push(session));
        self.us.push(begun.elapsed().as_secs_f64() * 1e6);
        match admit {
            Admit::Placed(reservation) => self.run(reservation),
            Admit::Waiting(ticket) => {
                self.had_to_wait += 1;
                self.waiting.insert(session, (request, ticket));
            }
            Admit::Refused(_) => self.had_to_wait += 1,
        }
        loop {
            let Some(session) = self.woken.lock().pop() else {
                break;
            };
            let Some((request, ticket)) = self.waiting.remove(&session) else {
                continue;
            };
            match self.fleet.place_ticket(ticket, &request, &[]) {
                Admit::Placed(reservation) => self.run(reservation),
                Admit::Waiting(ticket) => {
                    self.waiting.insert(session, (request, ticket));
                }
                Admit::Refused(_) => {}
            }
        }
    }

    fn run(&mut self, reservation: Reservation) {
        self.running.push_back(reservation);
        if self.running.len() > AT_ONCE {
            self.end_one();
        }
    }

    fn end_one(&mut self) {
        if let Some(mut ended) = self.running.pop_front() {
            ended.streams();
            ended.output(1);
            ended.finish(Outcome::Ok, Some(200), None);
        }
    }

    /// Runs turns until all are done or the time is over, and prints how long their decisions took; how many
    /// there were.
    fn phase(&mut self, name: &str, turns: impl Iterator<Item = (u32, u32)>) -> usize {
        let end = Instant::now() + Duration::from_secs(setting("SCALE_BENCH_SECONDS", 60));
        self.had_to_wait = 0;
        for (session, turn) in turns {
            self.turn(session, turn);
            // Those that wait leave room for nobody else's end.
            if !self.waiting.is_empty() {
                self.end_one();
            }
            if Instant::now() > end {
                break;
            }
        }
        let us = Quantiles::new(std::mem::take(&mut self.us));
        let count = us.len();
        let [p50, p99] = [0.5, 0.99].map(|share| us.at(share));
        let waited = 100.0 * self.had_to_wait as f64 / count.max(1) as f64;
        println!("| {name} | {count} | {waited:.0} | {p50:.1} | {p99:.1} |");
        count
    }
}

async fn row(rule: &str) {
    let workers = setting("SCALE_BENCH_WORKERS", 256);
    let sessions = setting("SCALE_BENCH_SESSIONS", 100_000) as u32;
    let listener = TcpListener::bind("0.0.0.0:0").await.expect("a port");
    let port = listener.local_addr().expect("bound").port();
    tokio::spawn(answer_checks(listener));
    let spec = |at: u64| {
        let url = format!("http://127.0.{}.{}:{port}", 1 + at / 250, 1 + at % 250);
        let spec = json!({"id": format!("w{at}"), "url": url, "engine": "vllm",
            "kv_capacity_tokens": KV_TOKENS});
        serde_json::from_value(spec).expect("a worker")
    };
    let config = Config {
        port: 0,
        workers: (0..workers).map(spec).collect(),
        admission: json!({"rule": rule}),
        load_interval_s: 0.0,
        health_interval_s: 30.0,
        ..Config::default()
    };
    let server = Server::bind(config).await.expect("binds");
    let url = format!("http://{}", server.address().expect("bound"));
    let fleet = server.fleet();
    let serving = tokio::spawn(server.serve(std::future::pending()));
    while !fleet.snapshot().iter().all(|worker| worker.healthy) {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let empty_mb = resident_mb();
    let mut clients = Clients {
        fleet,
        running: VecDeque::new(),
        waiting: HashMap::new(),
        woken: Arc::default(),
        us: Vec::new(),
        had_to_wait: 0,
    };
    let fit = (f64::from(sessions) * FIT) as u32;
    let mut known = clients.phase(
        &format!("`{rule}` | first turns, all fit"),
        (0..fit).map(|session| (session, 0)),
    );
    known += clients.phase(
        &format!("`{rule}` | first turns, full"),
        (fit..sessions).map(|session| (session, 0)),
    );
    let full_mb = resident_mb();
    let mut random = fastrand::Rng::with_seed(7);
    clients.phase(
        &format!("`{rule}` | turns of known sessions"),
        (0..LATER_TURNS).map(|_| (random.u32(..known as u32), 1)),
    );
    println!(
        "`{rule}`: {empty_mb:.0} MB of memory before the first session, {full_mb:.0} MB with {known}"
    );
    let client: Client<_, Full<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    for path in ["/metrics", "/workers", "/sessions"] {
        let mut bytes = 0;
        let mut times_ms = Vec::new();
        for _ in 0..ASKED {
            let uri = format!("{url}{path}").parse().expect("a URL");
            let begun = Instant::now();
            let answer = client.get(uri).await.expect("an answer");
            bytes = answer.collect().await.expect("all of it").to_bytes().len();
            times_ms.push(begun.elapsed().as_secs_f64() * 1e3);
        }
        let ms = Quantiles::new(times_ms).at(0.5);
        println!(
            "`{rule}`: `{path}` takes {ms:.1} ms and has {} kB",
            bytes / 1_000
        );
    }
    serving.abort();
}

#[tokio::main(worker_threads = 2)]
async fn main() {
    if let Ok(only) = std::env::var("ROUTER_BENCH_ONLY") {
        if RULES.contains(&&*only) {
            row(&only).await;
        }
        return;
    }
    println!("| rule | turns | decisions | that wait, % | p50, µs | p99, µs |");
    println!("|---|---|--:|--:|--:|--:|");
    for rule in RULES {
        // So that memory is its own.
        let program = std::env::current_exe().expect("this program");
        let mut child = Command::new(program);
        let status = child.env("ROUTER_BENCH_ONLY", rule).status();
        assert!(status.is_ok_and(|status| status.success()), "{rule}");
    }
}
