//! Admission under a virtual clock: what is booked fits, nobody waits for ever, nothing is
//! left over, and nothing happens where nothing waits.

use decision::fleet::admission::settings::DEFAULT_RULE;
use decision::fleet::admission::{AdmissionRecord, Residence, Tenant, WaitReason, settings};
use decision::fleet::log::EventSink;
use decision::fleet::prefix::hash::TokenHasher;
use decision::fleet::{
    Admit, Fleet, Hints, Outcome, Refused, Request, Reservation, Separable, Ticket, Usage,
};
use decision::policy::{self, Refusal};
use proptest::prelude::*;
use router_policies::config::WorkerSpec;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

mod aside;
mod clients;
mod come_again;
mod overlaps;
mod retries;
mod rotation;
mod tenants;
mod two_models;

const CAPACITY: u64 = 100_000;

struct World {
    fleet: Arc<Fleet>,
    clock_us: Arc<AtomicU64>,
    wakes: Arc<AtomicUsize>,
}

impl World {
    /// Under the default rule where none is named.
    fn new(workers: usize, rule: Value) -> Self {
        Self::with_sink(workers, rule, EventSink::in_memory())
    }

    fn with_sink(workers: usize, rule: Value, sink: EventSink) -> Self {
        Self::shared(workers, rule, sink, Vec::new())
    }

    /// One that these tenants share.
    fn shared(workers: usize, rule: Value, sink: EventSink, tenants: Vec<Tenant>) -> Self {
        let clock_us = Arc::new(AtomicU64::new(0));
        let shown = Arc::clone(&clock_us);
        let fleet = Fleet::with_clock(
            policy::build("unified", Value::Null).expect("a policy"),
            "unified".to_owned(),
            sink,
            1,
            Box::new(move || shown.load(Ordering::Relaxed) as f64 / 1e6),
        );
        let rule = settings::build(&rule).map_err(|error| panic!("{error}"));
        let fleet = fleet.with_admission(rule.expect("a rule"));
        let fleet = fleet.with_tenants(tenants);
        let world = Self {
            fleet: Arc::new(fleet),
            clock_us,
            wakes: Arc::default(),
        };
        for i in 0..workers {
            world.add(&format!("w{i}"));
        }
        world
    }

    fn add(&self, id: &str) {
        self.add_tiered(id, None);
    }

    /// A worker with `host_kv_tokens` in host memory.
    fn add_tiered(&self, id: &str, host_kv_tokens: Option<u64>) {
        let spec = json!({
            "id": id, "url": format!("http://{id}:1"), "kv_capacity_tokens": CAPACITY,
            "host_kv_tokens": host_kv_tokens,
        });
        let spec = serde_json::from_value::<WorkerSpec>(spec).expect("a worker");
        self.fleet.add_worker(spec).expect("a new id");
        self.fleet.report_health(id, true);
    }

    fn now_s(&self) -> f64 {
        self.clock_us.load(Ordering::Relaxed) as f64 / 1e6
    }

    fn advance(&self, seconds: f64) {
        self.clock_us
            .fetch_add((seconds * 1e6) as u64, Ordering::Relaxed);
    }

    fn request(&self, session: &str, tokens: impl IntoIterator<Item = u32>) -> Request {
        let mut hasher = TokenHasher::new(self.fleet.token_block());
        hasher.extend(&tokens.into_iter().collect::<Vec<_>>());
        Request {
            request_id: "r".to_owned(),
            session_id: (!session.is_empty()).then(|| session.to_owned()),
            prompt: hasher.finish(),
            max_output_tokens: Some(100),
            stream: true,
            ..Request::default()
        }
    }

    /// `length` tokens of which the first 2,000 are the same for all sessions.
    fn turn(&self, session: u32, length: u32) -> Request {
        let own = (2_000..length).map(move |i| (session + 1) * 1_000_000 + i);
        self.request(&format!("s{session}"), (0..2_000).chain(own))
    }

    fn ask(&self, request: &Request) -> Admit {
        let wakes = Arc::clone(&self.wakes);
        let wake = move || {
            wakes.fetch_add(1, Ordering::Relaxed);
        };
        self.fleet.admit(request, &[], wake)
    }

    fn placed(&self, request: &Request) -> Reservation {
        match self.ask(request) {
            Admit::Placed(reservation) => reservation,
            Admit::Waiting(_) => panic!("it waits"),
            Admit::Refused(refused) => panic!("{refused:?}"),
        }
    }

    /// One that has its first token.
    fn begun(&self, request: &Request) -> Reservation {
        let mut reservation = self.placed(request);
        reservation.streams();
        reservation.output(1);
        reservation
    }

    fn waits(&self, request: &Request) -> Ticket {
        match self.ask(request) {
            Admit::Waiting(ticket) => ticket,
            Admit::Placed(placed) => {
                panic!("placed on {}: {:?}", placed.answering().id, self.last())
            }
            Admit::Refused(refused) => panic!("{refused:?}"),
        }
    }

    fn fetch(&self, ticket: Ticket, request: &Request) -> Result<Reservation, Ticket> {
        match self.fleet.place_ticket(ticket, request, &[]) {
            Admit::Placed(reservation) => Ok(reservation),
            Admit::Waiting(ticket) => Err(ticket),
            Admit::Refused(refused) => panic!("{refused:?}"),
        }
    }

    /// What the last decision says of admission.
    fn last(&self) -> AdmissionRecord {
        self.fleet.sink().recent(1)[0].admission.clone()
    }

    fn serve(&self, mut reservation: Reservation) {
        reservation.streams();
        reservation.output(1);
        reservation.output(49);
        reservation.finish(Outcome::Ok, Some(200), None);
    }

    fn resident(&self, worker: usize) -> usize {
        self.fleet.snapshot()[worker].admission.sessions
    }
}

#[test]
fn who_fits_goes_at_once_and_who_does_not_waits_until_there_is_room() {
    let world = World::new(1, json!({}));
    let (first, second) = (world.turn(0, 40_000), world.turn(1, 40_000));
    let a = world.begun(&first);
    assert_eq!(world.last().state, Residence::Admitted);
    let b = world.begun(&second);
    let third = world.turn(2, 40_000);
    let ticket = world.waits(&third);
    // A turn of one that has a place goes at once, though another waits.
    world.serve(a);
    let c = world.placed(&world.turn(0, 41_000));
    assert_eq!(world.last().state, Residence::Resident);
    world.serve(c);
    let ticket = world.fetch(ticket, &third).err().expect("still waiting");
    // Says that it ends: its place is free, and its room is the next one's.
    let mut last = world.turn(0, 42_000);
    last.hints.ends = true;
    world.serve(world.placed(&last));
    let d = world.fetch(ticket, &third).ok().expect("let in");
    assert_eq!(world.last().state, Residence::Admitted);
    drop((b, d));
    assert!(world.fleet.is_idle());
}

#[test]
fn a_client_that_leaves_the_queue_leaves_nothing_behind() {
    let world = World::new(1, json!({}));
    let held: Vec<_> = (0..7)
        .map(|session| world.placed(&world.turn(session, 15_000)))
        .collect();
    let waiting = world.turn(7, 15_000);
    drop(world.waits(&waiting));
    let let_in = world.waits(&waiting);
    drop(held);
    // It was let in, and leaves without having been placed.
    assert_eq!(world.wakes.load(Ordering::Relaxed), 1);
    drop(let_in);
    assert!(world.fleet.is_idle());
    assert_eq!(world.fleet.waiting_turns(), 0);
    assert_eq!(world.fleet.snapshot()[0].admission.booked_tokens, 0);
}

#[test]
fn nothing_is_given_up_while_nothing_waits() {
    let world = World::new(1, json!({}));
    for session in 0..4 {
        world.serve(world.placed(&world.turn(session, 20_000)));
        world.advance(2.0);
        world.fleet.pump();
    }
    assert_eq!(world.resident(0), 4);
    assert_eq!(world.fleet.snapshot()[0].admission.given_up, 0);
    assert_eq!(world.fleet.next_pump_s(), None);
    // The fifth does not fit; who has been in for longest goes, and no more than is needed.
    world.serve(world.placed(&world.turn(4, 30_000)));
    assert_eq!(world.fleet.snapshot()[0].admission.given_up, 1);
    assert_eq!(world.resident(0), 4);
    drop(world.placed(&world.turn(1, 20_000)));
    assert_eq!(world.last().state, Residence::Resident);
}

#[test]
fn a_cold_prefill_does_not_hold_up_those_that_have_a_place() {
    let world = World::new(1, json!({}));
    world.serve(world.placed(&world.turn(0, 20_000)));
    let mut cold = world.placed(&world.turn(1, 20_000));
    let other = world.turn(2, 20_000);
    let ticket = world.waits(&other);
    let small = world.placed(&world.turn(0, 21_000));
    assert_eq!(world.last().state, Residence::Resident);
    let ticket = world.fetch(ticket, &other).err().expect("a cold one runs");
    cold.streams();
    cold.output(1);
    let next = world.fetch(ticket, &other).ok().expect("let in");
    drop((cold, small, next));
    assert!(world.fleet.is_idle());
}

#[test]
fn overlapping_turns_count_each() {
    let world = World::new(1, json!({}));
    let base = world.turn(0, 30_000);
    let a = world.placed(&base);
    let b = world.placed(&world.turn(0, 31_000));
    let booked = world.fleet.snapshot()[0].admission.booked_tokens;
    assert!(
        (31_000..32_500).contains(&booked),
        "one prefix, two answers: {booked}"
    );
    // The same session with another prompt beside: all of it counts.
    let own = (2_000..30_000).map(|i| 900_000_000 + i);
    let other = world.request("s0", (0..2_000).chain(own));
    let c = world.placed(&other);
    let booked = world.fleet.snapshot()[0].admission.booked_tokens;
    assert!((58_500..61_500).contains(&booked), "{booked}");
    drop((a, b, c));
    assert!(world.fleet.is_idle());
}

#[test]
fn families_are_counted_once_and_recognised_without_a_session() {
    let world = World::new(1, json!({}));
    let turn = |length: u32| world.request("", 0..length);
    world.serve(world.placed(&turn(20_000)));
    world.serve(world.placed(&turn(22_000)));
    assert_eq!(world.last().state, Residence::Resident);
    assert_eq!(world.resident(0), 1);
    let booked = world.fleet.snapshot()[0].admission.booked_tokens;
    assert!((22_000..22_200).contains(&booked), "{booked}");
}

#[test]
fn single_prompts_do_not_wait_behind_single_prompts_that_had_their_answer() {
    let world = World::new(1, json!({}));
    let single = |number: u32| {
        let first = (number + 1) * 1_000_000;
        world.request("", first..first + 30_000)
    };
    for number in 0..200 {
        world.advance(20.0);
        world.serve(world.placed(&single(number)));
    }
    // A session that comes back in a second; beside it two of them fit. A rate of 2 % of returns is worth
    // keeping a place for a moment yet, not for a second and a half.
    for number in 200..220 {
        world.advance(1.0);
        world.serve(world.placed(&world.turn(0, 20_000 + 10 * (number - 200))));
        world.advance(0.5);
        world.serve(world.placed(&single(number)));
    }
    world.serve(world.placed(&world.turn(0, 21_000)));
    assert_eq!(
        world.last().state,
        Residence::Resident,
        "this one comes back"
    );
    assert!(world.fleet.is_idle());
}

#[test]
fn compaction_lets_a_footprint_drop() {
    let world = World::new(1, json!({}));
    world.serve(world.placed(&world.turn(0, 60_000)));
    let summary = (0..8_000).map(|i| 70_000_000 + i);
    let compacted = world.request("s0", (0..2_000).chain(summary));
    world.serve(world.placed(&compacted));
    let booked = world.fleet.snapshot()[0].admission.booked_tokens;
    assert!((10_000..10_200).contains(&booked), "{booked}");
}

#[test]
fn one_that_fits_nowhere_is_served_alone() {
    let world = World::new(1, json!({}));
    world.serve(world.placed(&world.turn(0, 20_000)));
    let running = world.placed(&world.turn(0, 21_000));
    let huge = world.turn(1, 150_000);
    let ticket = world.waits(&huge);
    world.serve(running);
    let huge = world.fetch(ticket, &huge).ok().expect("alone");
    assert_eq!(world.last().state, Residence::Alone);
    assert_eq!(world.resident(0), 1, "the other has left for it");
    let after = world.turn(2, 5_000);
    let ticket = world.waits(&after);
    drop(huge);
    assert!(world.fetch(ticket, &after).is_ok());
}

#[test]
fn one_that_fits_nowhere_goes_in_the_end_however_often_others_come_back() {
    let world = World::new(1, json!({"max_wait_s": 1000.0}));
    world.serve(world.placed(&world.turn(1, 20_000)));
    let mut running = world.placed(&world.turn(0, 20_000));
    let huge = world.turn(2, 150_000);
    let mut ticket = Some(world.waits(&huge));
    // Something always runs, until the one that waits goes before all that come.
    for second in 1..300 {
        world.advance(1.0);
        if let Admit::Placed(next) = world.ask(&world.turn(second % 2, 20_000)) {
            world.serve(std::mem::replace(&mut running, next));
        } else {
            break;
        }
        let still = world.fetch(ticket.take().expect("a ticket"), &huge).err();
        ticket = Some(still.expect("something runs"));
    }
    assert!(world.now_s() < 150.0, "{}", world.now_s());
    world.serve(running);
    let alone = world.fetch(ticket.expect("a ticket"), &huge).ok();
    let alone = alone.expect("nothing runs");
    assert_eq!(world.last().state, Residence::Alone);
    world.serve(alone);
}

#[test]
fn recomputed_tokens_are_counted_with_and_without_a_gate() {
    for rule in ["off", "rotate"] {
        let world = World::new(1, json!({"rule": rule}));
        let finish = |request: &Request, cached| {
            let mut reservation = world.placed(request);
            reservation.streams();
            reservation.output(1);
            let prompt_tokens = Some(request.prompt.tokens());
            let cached_tokens = Some(cached);
            reservation.report(Usage {
                prompt_tokens,
                cached_tokens,
                ..Usage::default()
            });
            reservation.finish(Outcome::Ok, Some(200), None);
        };
        finish(&world.turn(0, 10_000), 0);
        finish(&world.turn(0, 12_000), 10_000);
        assert_eq!(world.fleet.snapshot()[0].admission.recomputed_tokens, 0);
        finish(&world.turn(0, 13_000), 4_000);
        let recomputed = world.fleet.snapshot()[0].admission.recomputed_tokens;
        assert_eq!(recomputed, 8_000, "{rule}");
    }
}

#[test]
fn the_queue_is_bounded_in_number_and_time() {
    let world = World::new(1, json!({"max_waiting": 1, "max_wait_s": 5.0}));
    let held = world.placed(&world.turn(0, 80_000));
    let waiting = world.turn(1, 80_000);
    let ticket = world.waits(&waiting);
    let refused = world.ask(&world.turn(2, 80_000));
    let Admit::Refused(Refused::QueueFull { retry_after_s }) = refused else {
        panic!("not refused");
    };
    assert!(retry_after_s >= 1.0);
    world.advance(6.0);
    world.fleet.pump();
    assert_eq!(world.wakes.load(Ordering::Relaxed), 1);
    let refused = world.fleet.place_ticket(ticket, &waiting, &[]);
    assert!(matches!(
        refused,
        Admit::Refused(Refused::WaitedTooLong { .. })
    ));
    drop(held);
    assert!(world.fleet.is_idle());
}

#[test]
fn a_worker_of_unknown_capacity_restricts_nobody() {
    let world = World::new(0, json!({}));
    let spec = json!({"id": "w", "url": "http://w:1"});
    let spec = serde_json::from_value::<WorkerSpec>(spec).expect("a worker");
    world.fleet.add_worker(spec).expect("a new id");
    world.fleet.report_health("w", true);
    let held: Vec<_> = (0..20)
        .map(|i| world.placed(&world.turn(i, 90_000)))
        .collect();
    assert_eq!(world.last().state, Residence::Ungated);
    drop(held);
    assert!(world.fleet.is_idle());
}

/// One thing that happens to a fleet.
#[derive(Clone, Debug)]
enum Step {
    Send { session: u32, ends: bool },
    Compact(u32),
    FirstToken(usize),
    Finish(usize),
    Fail(usize),
    Leave(usize),
    LeaveQueue(usize),
    Advance(u32),
    Down(usize),
    Up(usize),
    Replace(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0u32..8, prop::bool::weighted(0.1))
            .prop_map(|(session, ends)| Step::Send { session, ends }),
        1 => (0u32..8).prop_map(Step::Compact),
        4 => any::<usize>().prop_map(Step::FirstToken),
        6 => any::<usize>().prop_map(Step::Finish),
        1 => any::<usize>().prop_map(Step::Fail),
        1 => any::<usize>().prop_map(Step::Leave),
        1 => any::<usize>().prop_map(Step::LeaveQueue),
        4 => (0u32..60_000).prop_map(Step::Advance),
        1 => (0usize..2).prop_map(Step::Down),
        1 => (0usize..2).prop_map(Step::Up),
        1 => (0usize..2).prop_map(Step::Replace),
    ]
}

/// A worker's host tier: none, one that holds less than all sessions, and one that holds more.
fn tier() -> impl Strategy<Value = Option<u64>> {
    prop_oneof![Just(None), Just(Some(120_000)), Just(Some(1_000_000))]
}

fn rules() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(json!({"rule": "rotate"})),
        Just(json!({"rule": "rotate", "patience_s": 20})),
        Just(json!({"rule": "lease", "lease_s": 5.0})),
        Just(json!({"rule": "cap", "sessions": 2})),
        Just(json!({"rule": "aimd"})),
        Just(json!({"rule": "thunder"})),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn whatever_happens_what_is_booked_fits_and_nothing_is_left_over(
        rule in rules(),
        steps in proptest::collection::vec(step(), 1..120),
        tiers in [tier(), tier()],
    ) {
        let world = World::new(0, rule.clone());
        for (i, &tier) in tiers.iter().enumerate() {
            world.add_tiered(&format!("w{i}"), tier);
        }
        let by_tokens = matches!(rule["rule"].as_str(), Some("rotate" | "lease"));
        let mut lengths = [15_000u32; 8];
        let mut running: Vec<Reservation> = Vec::new();
        let mut waiting: Vec<(Ticket, Request)> = Vec::new();
        let mut alone: Vec<String> = Vec::new();
        for step in steps {
            match step {
                Step::Send { session, ends } => {
                    let index = session as usize;
                    lengths[index] += 3_000 + session * 1_000;
                    let mut request = world.turn(session, lengths[index]);
                    request.hints.ends = ends;
                    if session % 3 == 2 {
                        request.hints.parent_session = Some(format!("s{}", session - 1));
                    }
                    match world.ask(&request) {
                        Admit::Placed(reservation) => running.push(reservation),
                        Admit::Waiting(ticket) => waiting.push((ticket, request)),
                        Admit::Refused(refused) => {
                            let down = world.fleet.snapshot().iter().all(|w| !w.healthy || w.circuit_open);
                            prop_assert!(down, "{refused:?}");
                        }
                    }
                }
                Step::Compact(session) => lengths[session as usize] = 5_000,
                Step::FirstToken(i) if !running.is_empty() => {
                    let i = i % running.len();
                    running[i].streams();
                    running[i].output(1);
                }
                Step::Finish(i) if !running.is_empty() => {
                    let i = i % running.len();
                    world.serve(running.swap_remove(i));
                }
                Step::Fail(i) if !running.is_empty() => {
                    let i = i % running.len();
                    running.swap_remove(i).finish(Outcome::WorkerError, None, None);
                }
                Step::Leave(i) if !running.is_empty() => {
                    let i = i % running.len();
                    drop(running.swap_remove(i));
                }
                Step::LeaveQueue(i) if !waiting.is_empty() => {
                    let i = i % waiting.len();
                    drop(waiting.swap_remove(i));
                }
                Step::Advance(ms) => {
                    world.advance(f64::from(ms) / 1e3);
                    world.fleet.pump();
                }
                Step::Down(i) => world.fleet.report_health(&format!("w{i}"), false),
                Step::Up(i) => world.fleet.report_health(&format!("w{i}"), true),
                Step::Replace(i) => {
                    let id = format!("w{i}");
                    world.fleet.remove_worker(&id);
                    world.add_tiered(&id, tiers[i]);
                }
                _ => {}
            }
            for (ticket, request) in std::mem::take(&mut waiting) {
                match world.fleet.place_ticket(ticket, &request, &[]) {
                    Admit::Placed(reservation) => running.push(reservation),
                    Admit::Waiting(ticket) => waiting.push((ticket, request)),
                    Admit::Refused(Refused::WaitedTooLong { .. }) => {}
                    Admit::Refused(refused) => prop_assert!(false, "{refused:?}"),
                }
            }
            for decision in world.fleet.sink().recent(10) {
                if decision.admission.state == Residence::Alone {
                    alone.push(decision.reserved[0].worker.id.clone());
                }
            }
            for worker in world.fleet.snapshot() {
                let book = worker.admission;
                let budget = book.budget_tokens.expect("a capacity");
                let exempt = alone.contains(&worker.spec.id) || !by_tokens;
                prop_assert!(exempt || book.booked_tokens <= budget, "{book:?}");
                prop_assert_eq!(book.sessions, book.running + book.idle);
            }
        }
        for id in ["w0", "w1"] {
            world.fleet.report_health(id, true);
        }
        drop(running);
        drop(waiting);
        prop_assert!(world.fleet.is_idle());
        for worker in world.fleet.snapshot() {
            prop_assert_eq!(worker.admission.running, 0);
        }
        // Without sessions nothing is booked.
        for id in ["w0", "w1"] {
            world.fleet.report_health(id, false);
            world.fleet.report_health(id, true);
        }
        for worker in world.fleet.snapshot() {
            prop_assert_eq!(worker.admission.booked_tokens, 0);
            prop_assert_eq!(worker.admission.sessions, 0);
        }
        // And nobody who was there before counts: one that wants most of a worker goes at once.
        let waits = matches!(world.ask(&world.turn(9, 70_000)), Admit::Waiting(_));
        prop_assert!(!waits, "nothing runs, and it waits");
    }
}

#[test]
fn places_are_kept_and_lost_with_the_cache_that_they_are_in() {
    let world = World::new(1, Value::Null);
    let sessions = || world.fleet.snapshot()[0].admission.sessions;
    world.fleet.report_engine("w0", Some(7));
    world.serve(world.placed(&world.turn(1, 20_000)));
    assert_eq!(sessions(), 1);
    // It could not be reached for a while, and is the one that it was.
    world.fleet.report_health("w0", false);
    world.fleet.report_engine("w0", Some(7));
    world.fleet.report_health("w0", true);
    assert_eq!(sessions(), 1);
    drop(world.placed(&world.turn(1, 21_000)));
    assert_eq!(world.last().state, Residence::Resident);
    // It was restarted without anybody having noticed that it was down.
    world.fleet.report_engine("w0", Some(8));
    assert_eq!(sessions(), 0);
    drop(world.placed(&world.turn(1, 22_000)));
    assert_eq!(world.last().state, Residence::Admitted);
}

#[test]
fn what_the_host_tier_holds_is_not_lost_when_it_is_evicted_from_the_gpu() {
    // The engine's events say that nothing of the sessions is on the GPU any more.
    for (host_kv_tokens, states) in [
        (None, [Residence::Admitted, Residence::Admitted]),
        (Some(500_000), [Residence::Resident, Residence::Resident]),
        // A tier that holds no more than the GPU's 100,000 has copies of what is there, and no more.
        (Some(25_000), [Residence::Admitted, Residence::Admitted]),
    ] {
        let world = World::new(0, Value::Null);
        world.add_tiered("w0", host_kv_tokens);
        assert!(world.fleet.begin_kv_events("w0", 16));
        world.serve(world.placed(&world.turn(2, 20_000)));
        world.advance(1.0);
        world.serve(world.placed(&world.turn(1, 20_000)));
        world.advance(5.0);
        let again = [1, 2].map(|session| {
            drop(world.placed(&world.turn(session, 21_000)));
            world.last().state
        });
        assert_eq!(again, states, "{host_kv_tokens:?}");
    }
}

#[test]
fn what_cannot_be_separated_waits_for_a_worker_that_serves_alone() {
    let world = World::new(1, json!({}));
    let spec = json!({"id": "d", "url": "http://d:1", "role": "decode",
        "kv_capacity_tokens": CAPACITY});
    let spec = serde_json::from_value::<WorkerSpec>(spec).expect("a worker");
    world.fleet.add_worker(spec).expect("a new id");
    world.fleet.report_health("d", true);
    let last = Hints {
        ends: true,
        ..Hints::default()
    };
    let running = world.placed(&Request {
        hints: last,
        ..world.turn(1, 80_000)
    });
    assert_eq!(running.answering().id, "w0");
    let whole = Request {
        separable: Separable::ByNone,
        ..world.turn(2, 50_000)
    };
    let ticket = world.waits(&whole);
    world.serve(running);
    let placed = world.fetch(ticket, &whole).map_err(|_| "it waits");
    let placed = placed.expect("there is room now");
    assert_eq!(placed.answering().id, "w0");
    world.serve(placed);
}

#[test]
fn what_no_worker_can_take_is_refused_at_once_also_where_others_wait() {
    let world = World::new(2, json!({}));
    let large = |from| world.request(&format!("s{from}"), from..from + 80_000);
    let running = [0, 100_000].map(|from| world.placed(&large(from)));
    let ticket = world.waits(&large(200_000));
    let refused = |exclude: &[&str]| {
        let exclude: Vec<String> = exclude.iter().map(|&id| id.to_owned()).collect();
        let tried = Request {
            arrived_s: Some(world.now_s()),
            ..large(300_000)
        };
        match world.fleet.admit(&tried, &exclude, || {}) {
            Admit::Refused(refused) => Some(refused),
            _ => None,
        }
    };
    // One that has failed on both, as where the engines answer 500 to it.
    let nobody = Some(Refused::ByPolicy(Refusal::NoCandidates));
    assert_eq!(refused(&["w0"]), None, "the other may take it");
    assert_eq!(refused(&["w0", "w1"]), nobody);
    world.fleet.report_health("w1", false);
    assert_eq!(refused(&["w0"]), nobody);
    drop((running, ticket));
    assert!(world.fleet.is_idle());
}

#[test]
fn what_has_failed_elsewhere_waits_no_longer_than_a_worker_is_up_that_could_take_it() {
    let world = World::new(2, json!({}));
    let large = |from| world.request(&format!("s{from}"), from..from + 80_000);
    let running = [0, 100_000].map(|from| world.placed(&large(from)));
    let new = large(200_000);
    let its_ticket = world.waits(&new);
    let again = Request {
        arrived_s: Some(world.now_s()),
        ..large(300_000)
    };
    let exclude = ["w0".to_owned()];
    let woken = Arc::new(AtomicUsize::new(0));
    let wakes = Arc::clone(&woken);
    let wake = move || {
        wakes.fetch_add(1, Ordering::Relaxed);
    };
    let Admit::Waiting(ticket) = world.fleet.admit(&again, &exclude, wake) else {
        panic!("it does not wait for the other worker");
    };
    world.fleet.pump();
    assert_eq!(woken.load(Ordering::Relaxed), 0);
    world.fleet.report_health("w1", false);
    assert_eq!(woken.load(Ordering::Relaxed), 1);
    match world.fleet.place_ticket(ticket, &again, &exclude) {
        Admit::Refused(refused) => {
            assert_eq!(refused, Refused::ByPolicy(Refusal::NoCandidates));
        }
        _ => panic!("it waits for a worker that has failed it"),
    }
    // One that has failed nowhere has nothing to tell yet, and a worker may come back.
    world.fleet.report_health("w0", false);
    let its_ticket = world.fetch(its_ticket, &new);
    assert!(its_ticket.is_err(), "no worker is up");
    drop((running, its_ticket));
    assert!(world.fleet.is_idle());
}

#[test]
fn as_much_is_booked_as_all_answers_of_a_request_may_need() {
    let booked = |answers| {
        let world = World::new(1, json!({}));
        let request = Request {
            answers,
            ..world.turn(1, 10_000)
        };
        let running = world.placed(&request);
        let booked = world.fleet.snapshot()[0].admission.booked_tokens;
        world.serve(running);
        booked
    };
    assert_eq!(booked(1), booked(0));
    assert_eq!(booked(8) - booked(1), 700);
    // Whatever a client says, it is a number that can be booked.
    booked(u64::MAX);
}

#[test]
fn a_worker_that_is_suspected_to_hang_gets_no_turn_of_its_sessions_while_another_can_serve() {
    let world = World::new(2, Value::Null);
    world.serve(world.placed(&world.turn(1, 20_000)));
    let home = world.fleet.sink().recent(1)[0].reserved[0]
        .worker
        .id
        .clone();
    let stalled = world.placed(&world.turn(1, 21_000));
    assert_eq!(stalled.answering().id, home);
    world.advance(600.0);
    assert!(world.fleet.find_silent(5.0, 5.0));
    let moved = world.placed(&world.turn(1, 22_000));
    assert_ne!(moved.answering().id, home);
    drop((stalled, moved));
    assert!(world.fleet.is_idle());
}

/// A client of the closed loop below: a session with so many turns to go, and its sub-agents.
struct Client {
    session: u32,
    length: u32,
    turns_left: u32,
    children: Vec<u32>,
    parent: Option<usize>,
    state: Doing,
}

#[expect(clippy::large_enum_variant, reason = "a few dozen of them, in a test")]
enum Doing {
    Thinks {
        until_s: f64,
    },
    WaitsForChildren,
    Queues {
        ticket: Ticket,
        request: Request,
        since_s: f64,
    },
    Runs {
        reservation: Reservation,
        first_s: f64,
        until_s: f64,
    },
    Over,
}

/// Runs sessions, with sub-agents, on two workers with these host tiers until all are over; returns the longest
/// wait and all that it took.
fn closed_loop(rule: Value, tiers: [Option<u64>; 2], sessions: u32, seed: u64) -> (f64, f64) {
    let world = World::new(0, rule.clone());
    for (i, tier) in tiers.into_iter().enumerate() {
        world.add_tiered(&format!("w{i}"), tier);
    }
    let mut random = fastrand::Rng::with_seed(seed);
    let mut clients: Vec<Client> = (0..sessions)
        .map(|session| Client {
            session,
            length: random.u32(8_000..45_000),
            turns_left: random.u32(3..8),
            children: Vec::new(),
            parent: None,
            state: Doing::Thinks {
                until_s: random.f64() * 5.0,
            },
        })
        .collect();
    let mut next_session = sessions;
    let mut longest_s: f64 = 0.0;
    while clients
        .iter()
        .any(|client| !matches!(client.state, Doing::Over))
    {
        world.advance(0.25);
        let now_s = world.now_s();
        assert!(now_s < 20_000.0, "{rule}: it does not end");
        if world.fleet.next_pump_s().is_some() {
            world.fleet.pump();
        }
        for at in 0..clients.len() {
            let mut spawned = None;
            let over = |clients: &[Client], children: &[u32]| {
                let is_over = |child: &&Client| matches!(child.state, Doing::Over);
                let of = clients
                    .iter()
                    .filter(|client| children.contains(&client.session));
                of.clone().filter(is_over).count() == of.count()
            };
            let children_over = over(&clients, &clients[at].children);
            let parent = clients[at].parent.map(|parent| clients[parent].session);
            let client = &mut clients[at];
            let state = std::mem::replace(&mut client.state, Doing::Over);
            client.state = match state {
                Doing::Thinks { until_s } if until_s <= now_s => {
                    let mut request = world.turn(client.session, client.length);
                    request.hints = Hints {
                        ends: client.turns_left == 1,
                        idle_s: None,
                        parent_session: parent.map(|parent| format!("s{parent}")),
                    };
                    match world.ask(&request) {
                        Admit::Placed(reservation) => runs(reservation, now_s),
                        Admit::Waiting(ticket) => Doing::Queues {
                            ticket,
                            request,
                            since_s: now_s,
                        },
                        Admit::Refused(refused) => panic!("{refused:?}"),
                    }
                }
                Doing::Queues {
                    ticket,
                    request,
                    since_s,
                } => {
                    longest_s = longest_s.max(now_s - since_s);
                    match world.fetch(ticket, &request) {
                        Ok(reservation) => runs(reservation, now_s),
                        Err(ticket) => Doing::Queues {
                            ticket,
                            request,
                            since_s,
                        },
                    }
                }
                Doing::Runs {
                    mut reservation,
                    first_s,
                    until_s,
                } if first_s <= now_s => {
                    if until_s > now_s {
                        reservation.streams();
                        reservation.output(1);
                        Doing::Runs {
                            reservation,
                            first_s: f64::INFINITY,
                            until_s,
                        }
                    } else {
                        unreachable!("the first token comes first")
                    }
                }
                Doing::Runs {
                    reservation,
                    until_s,
                    ..
                } if until_s <= now_s => {
                    world.serve(reservation);
                    client.turns_left -= 1;
                    client.length += 500 + (client.session % 5) * 400;
                    if client.turns_left == 0 {
                        Doing::Over
                    } else if client.parent.is_none()
                        && client.session.is_multiple_of(4)
                        && client.children.is_empty()
                    {
                        spawned = Some(client.session);
                        Doing::WaitsForChildren
                    } else {
                        Doing::Thinks {
                            until_s: now_s + f64::from(client.session % 9),
                        }
                    }
                }
                Doing::WaitsForChildren if children_over => Doing::Thinks { until_s: now_s },
                other => other,
            };
            if spawned.is_some() {
                for _ in 0..2 {
                    clients[at].children.push(next_session);
                    clients.push(Client {
                        session: next_session,
                        length: 20_000,
                        turns_left: 2,
                        children: Vec::new(),
                        parent: Some(at),
                        state: Doing::Thinks { until_s: now_s },
                    });
                    next_session += 1;
                }
            }
        }
    }
    assert!(world.fleet.is_idle());
    (longest_s, world.now_s())
}

fn runs(reservation: Reservation, now_s: f64) -> Doing {
    Doing::Runs {
        reservation,
        first_s: now_s + 0.5,
        until_s: now_s + 2.0,
    }
}

#[test]
fn nobody_waits_for_ever_under_any_rule_sub_agents_included() {
    for rule in ["rotate", "lease", "cap", "aimd", "thunder"] {
        let tiers = [Some(150_000), None];
        let (longest_s, all_s) = closed_loop(json!({"rule": rule}), tiers, 24, 7);
        println!("{rule:<8} longest wait {longest_s:.1} s, all over after {all_s:.0} s");
        assert!(longest_s < 600.0, "{rule}: {longest_s}");
    }
}

#[test]
fn the_default_rule_bounds_the_wait_at_three_times_what_fits() {
    let tiers = [None, Some(150_000), Some(1_000_000)];
    for tiers in tiers.map(|tier| [tier; 2]) {
        for seed in 0..3 {
            let (longest_s, _) = closed_loop(json!({"rule": DEFAULT_RULE}), tiers, 24, seed);
            assert!(longest_s < 240.0, "{tiers:?}: {longest_s}");
        }
    }
}
