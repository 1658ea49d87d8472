//! What one decision costs where prompts are long: agents' sessions of 70,000 tokens whose turns come again and
//! again, on workers with a host tier that publish KV events, under a clock of the benchmark's own.
//!
//! `cargo bench -p router_policies --bench decision`. Each row is one number of workers and of sessions a
//! worker: with few nobody waits, with many some do. A decision is timed from the call that asks for a place
//! to its return; of a turn that had to wait, the call that finds it let in. `warm` rows decide one after the
//! other; `cold` rows use other memory between two decisions, as a router that waits for seconds between
//! two requests finds its own no longer in the processor's caches; in `told` rows another thread applies KV
//! events meanwhile, all pages of a prompt at once.
//!
//! DECISION_BENCH_TURNS (2000) is how many decisions of a row are timed, DECISION_BENCH_BEFORE another
//! commit's program of this benchmark (where that commit has none, with this file and its entry in Cargo.toml
//! put there), whose rows then run in turns with these, DECISION_BENCH_REPEATS (3) how often, and
//! ROUTER_BENCH_ONLY leaves out every row whose name does not contain it.

mod arms;

use arms::{Quantiles, setting, wanted};
use decision::fleet::admission::settings;
use decision::fleet::log::EventSink;
use decision::fleet::prefix::events::{KvEvent, Tier};
use decision::fleet::prefix::hash::{Namespace, TokenHasher};
use decision::fleet::{Admit, Fleet, Outcome, Request, Reservation, Ticket};
use decision::policy;
use parking_lot::Mutex;
use router_policies::config::WorkerSpec;
use serde_json::{Value, json};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::io::Write;
use std::ops::Range;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const PAGE_TOKENS: u32 = 64;
const KV_TOKENS: u64 = 600_000;
/// Sessions' prompts grow from the first to the second by the third, and are cut back then.
const PROMPT_TOKENS: (u32, u32, u32) = (65_000, 75_000, 1_000);
const SYSTEM_TOKENS: u32 = 8_000;
/// More than processors' caches hold.
const OTHER_BYTES: usize = 64 << 20;

/// Of fewer the 99th percentile says nothing.
const LEAST_SAMPLES: usize = 50;

/// A row: workers, sessions a worker.
const ROWS: [(u32, u32); 6] = [(1, 5), (1, 12), (1, 24), (8, 5), (8, 12), (64, 24)];

fn token(session: u32, at: u32) -> u32 {
    match at {
        0..SYSTEM_TOKENS => at,
        _ => 10_000 + (session.wrapping_mul(2_654_435_761) ^ at) % 100_000,
    }
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    Ask(u32),
    FirstToken(u32),
    End(u32),
}

#[derive(Default)]
struct Session {
    tokens: u32,
    /// The worker that has its pages, and how many.
    stored: Option<(String, u32)>,
    request: Request,
    running: Option<Reservation>,
    waiting: Option<Ticket>,
}

/// One fleet and its agents.
struct World {
    fleet: Arc<Fleet>,
    clock_us: Arc<AtomicU64>,
    agenda: BinaryHeap<Reverse<(u64, Step)>>,
    sessions: HashMap<u32, Session>,
    woken: Arc<Mutex<Vec<u32>>>,
    random: fastrand::Rng,
    other: Option<Vec<u64>>,
    /// Microseconds of decisions for turns that were placed at once, and for such as had waited.
    at_once: Vec<f64>,
    after_wait: Vec<f64>,
}

impl World {
    fn new(workers: u32, sessions: u32) -> Self {
        let clock_us = Arc::new(AtomicU64::new(0));
        let shown = Arc::clone(&clock_us);
        let log = std::env::temp_dir().join(format!("decision-bench-{}", std::process::id()));
        let sink = EventSink::to_file(&log, |_| {}).expect("a temporary file");
        // Open all the same, and gone at the end.
        let _ = std::fs::remove_file(&log);
        let fleet = Fleet::with_clock(
            policy::build("unified", Value::Null).expect("a policy"),
            "unified".to_owned(),
            sink,
            1,
            Box::new(move || shown.load(Ordering::Relaxed) as f64 / 1e6),
        );
        let rule = settings::build(&Value::Null).expect("a rule");
        let fleet = Arc::new(fleet.with_admission(rule));
        for worker in 0..workers {
            let id = format!("w{worker}");
            let spec = json!({"id": id, "url": format!("http://{id}:1"), "page_size": PAGE_TOKENS,
                "kv_capacity_tokens": KV_TOKENS, "host_kv_tokens": 3 * KV_TOKENS});
            let spec = serde_json::from_value::<WorkerSpec>(spec).expect("a worker");
            fleet.add_worker(spec).expect("a new id");
            fleet.report_health(id.as_str(), true);
            fleet.begin_kv_events(id.as_str(), PAGE_TOKENS as usize);
        }
        let mut random = fastrand::Rng::with_seed(7);
        let (least, most, _) = PROMPT_TOKENS;
        let asks = |session| Reverse((u64::from(session) * 700_000, Step::Ask(session)));
        let sessions = 0..workers * sessions;
        Self {
            fleet,
            clock_us,
            agenda: sessions.clone().map(asks).collect(),
            sessions: sessions
                .map(|number| {
                    let tokens = random.u32(least..most);
                    let session = Session {
                        tokens,
                        ..Session::default()
                    };
                    (number, session)
                })
                .collect(),
            woken: Arc::default(),
            random,
            other: None,
            at_once: Vec::new(),
            after_wait: Vec::new(),
        }
    }

    fn after(&mut self, least_s: f64, most_s: f64, step: Step) {
        let now_us = self.clock_us.load(Ordering::Relaxed);
        let seconds = least_s + (most_s - least_s) * self.random.f64();
        self.agenda
            .push(Reverse((now_us + (seconds * 1e6) as u64, step)));
    }

    fn go_on(&mut self) {
        let Some(Reverse((at_us, step))) = self.agenda.pop() else {
            return;
        };
        self.clock_us.store(at_us, Ordering::Relaxed);
        match step {
            Step::Ask(number) => self.ask(number),
            Step::FirstToken(number) => {
                let session = self.sessions.get_mut(&number).expect("a session");
                if let Some(running) = &mut session.running {
                    running.streams();
                    running.output(1);
                }
                self.after(1.0, 6.0, Step::End(number));
            }
            Step::End(number) => {
                let session = self.sessions.get_mut(&number).expect("a session");
                if let Some(running) = session.running.take() {
                    let worker = running.answering().id.clone();
                    running.finish(Outcome::Ok, Some(200), None);
                    store(&self.fleet, number, session, worker);
                }
                let (least, most, growth) = PROMPT_TOKENS;
                session.tokens += growth;
                if session.tokens > most {
                    session.tokens = least;
                }
                self.after(1.0, 15.0, Step::Ask(number));
            }
        }
        while let Some(number) = self.next_woken() {
            self.ask_again(number);
        }
    }

    fn next_woken(&self) -> Option<u32> {
        self.woken.lock().pop()
    }

    /// As if the processor had done something else meanwhile.
    fn do_other_things(&mut self) {
        if let Some(other) = &mut self.other {
            other
                .iter_mut()
                .for_each(|word| *word = word.wrapping_add(1));
            std::hint::black_box(&other);
        }
    }

    fn ask(&mut self, number: u32) {
        let session = self.sessions.get_mut(&number).expect("a session");
        let mut hasher = TokenHasher::new(self.fleet.token_block());
        let tokens: Vec<u32> = (0..session.tokens).map(|at| token(number, at)).collect();
        hasher.extend(&tokens);
        session.request = Request {
            request_id: format!("r{number}"),
            session_id: Some(format!("s{number}")),
            prompt: hasher.finish(),
            max_output_tokens: Some(400),
            stream: true,
            ..Request::default()
        };
        self.do_other_things();
        let request = &self.sessions[&number].request;
        let woken = Arc::clone(&self.woken);
        let begun = Instant::now();
        let admit = self
            .fleet
            .admit(request, &[], move || woken.lock().push(number));
        let us = begun.elapsed().as_secs_f64() * 1e6;
        if self.take(number, admit) {
            self.at_once.push(us);
        }
    }

    fn ask_again(&mut self, number: u32) {
        let session = self.sessions.get_mut(&number).expect("a session");
        let Some(ticket) = session.waiting.take() else {
            return;
        };
        self.do_other_things();
        let request = &self.sessions[&number].request;
        let begun = Instant::now();
        let admit = self.fleet.place_ticket(ticket, request, &[]);
        let us = begun.elapsed().as_secs_f64() * 1e6;
        if self.take(number, admit) {
            self.after_wait.push(us);
        }
    }

    /// True if it was placed.
    fn take(&mut self, number: u32, admit: Admit) -> bool {
        let session = self.sessions.get_mut(&number).expect("a session");
        match admit {
            Admit::Placed(reservation) => {
                session.running = Some(reservation);
                self.after(0.2, 1.5, Step::FirstToken(number));
                true
            }
            Admit::Waiting(ticket) => {
                session.waiting = Some(ticket);
                false
            }
            Admit::Refused(_) => {
                self.after(1.0, 2.0, Step::Ask(number));
                false
            }
        }
    }

    fn decisions(&self) -> usize {
        self.at_once.len() + self.after_wait.len()
    }

    fn forget(&mut self) {
        self.at_once.clear();
        self.after_wait.clear();
    }
}

fn pages(number: u32, pages: Range<u32>) -> Vec<KvEvent> {
    let shared = SYSTEM_TOKENS / PAGE_TOKENS;
    let name = |page: u32| match page < shared {
        true => u64::from(page) + 1,
        false => (u64::from(number + 1) << 32) | u64::from(page),
    };
    let stored = pages.map(|page| KvEvent::Stored {
        tier: Tier::Device,
        blocks: vec![name(page)],
        parent: page.checked_sub(1).map(name),
        tokens: (page * PAGE_TOKENS..(page + 1) * PAGE_TOKENS)
            .map(|at| token(number, at))
            .collect(),
        block_size: PAGE_TOKENS as usize,
        namespace: Namespace::default(),
    });
    stored.collect()
}

/// The engine's events: the pages of the session's prompt that it has computed.
fn store(fleet: &Fleet, number: u32, session: &mut Session, worker: String) {
    let mut held = 0;
    match session.stored.take() {
        Some((at, pages)) if at == worker => held = pages,
        // What it had elsewhere is evicted there, but for what it shares with others.
        Some((at, had)) => {
            let own = pages(number, SYSTEM_TOKENS / PAGE_TOKENS..had);
            fleet.apply_kv_events(at.as_str(), &removal(&own));
        }
        None => {}
    }
    let whole = session.tokens / PAGE_TOKENS;
    fleet.apply_kv_events(worker.as_str(), &pages(number, held..whole));
    session.stored = Some((worker, whole.max(held)));
}

/// The last pages first.
fn removal(stored: &[KvEvent]) -> Vec<KvEvent> {
    let removed = stored.iter().rev().filter_map(|event| match event {
        KvEvent::Stored { tier, blocks, .. } => Some(KvEvent::Removed {
            tier: *tier,
            blocks: blocks.clone(),
        }),
        _ => None,
    });
    removed.collect()
}

/// Until the end another worker's cache changes: a prompt comes, and goes.
fn tell(fleet: &Fleet, is_over: &AtomicBool) {
    let stored = pages(1 << 20, 0..PROMPT_TOKENS.1 / PAGE_TOKENS);
    let removed = removal(&stored);
    while !is_over.load(Ordering::Relaxed) {
        for events in [&stored, &removed] {
            fleet.apply_kv_events("w0", events);
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Warm,
    Cold,
    Told,
}

fn label(workers: u32, sessions: u32, state: State) -> String {
    let state = format!("{state:?}").to_lowercase();
    format!("decision, {workers} workers, {sessions} sessions each, {state}")
}

fn row(workers: u32, sessions: u32, state: State) -> Value {
    let label = label(workers, sessions, state);
    let turns = setting("DECISION_BENCH_TURNS", 2_000) as usize;
    let mut world = World::new(workers, sessions);
    // All sessions are known, and have what they hold by then.
    while world.decisions() < (workers * sessions * 8) as usize {
        world.go_on();
    }
    world.forget();
    world.other = (state == State::Cold).then(|| vec![1; OTHER_BYTES / 8]);
    let is_over = AtomicBool::new(false);
    let fleet = Arc::clone(&world.fleet);
    std::thread::scope(|scope| {
        if state == State::Told {
            scope.spawn(|| tell(&fleet, &is_over));
        }
        while world.decisions() < turns {
            world.go_on();
        }
        is_over.store(true, Ordering::Relaxed);
    });
    let waited = world.after_wait.len() as f64 / world.decisions() as f64;
    let mut of = json!({"what": label, "waited_share": waited});
    let mut line = format!("{label:<50}");
    let samples = [
        ("at once", world.at_once),
        ("after a wait", world.after_wait),
    ];
    for (what, samples) in samples {
        if samples.len() < LEAST_SAMPLES {
            continue;
        }
        let samples = Quantiles::new(samples);
        let [p50, p90, p99] = [0.5, 0.9, 0.99].map(|share| samples.at(share));
        line += &format!("  {what}: p50 {p50:.1}, p90 {p90:.1}, p99 {p99:.1} µs");
        of[what] = json!({"p50_us": p50, "p90_us": p90, "p99_us": p99});
    }
    println!("{line}  ({:.0} % had waited)", 100.0 * waited);
    of
}

fn main() {
    let before = std::env::var_os("DECISION_BENCH_BEFORE");
    let repeats = match before.is_some() {
        true => setting("DECISION_BENCH_REPEATS", 3),
        false => 1,
    };
    let mut results = Vec::new();
    for ((workers, sessions), state) in ROWS
        .into_iter()
        .flat_map(|row| [State::Warm, State::Cold, State::Told].map(|state| (row, state)))
    {
        let label = label(workers, sessions, state);
        for _ in (0..repeats).filter(|_| wanted(&label)) {
            if let Some(before) = &before {
                print!("before  ");
                let _ = std::io::stdout().flush();
                let _ = Command::new(before)
                    .env_remove("DECISION_BENCH_BEFORE")
                    .env("ROUTER_BENCH_ONLY", &label)
                    .status();
                print!("now     ");
            }
            results.push(row(workers, sessions, state));
        }
    }
    // Not among the rows of a run that has started this one for its own.
    if std::env::var_os("ROUTER_BENCH_ONLY").is_none() {
        println!("{}", json!({ "results": results }));
    }
}
