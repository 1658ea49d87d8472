//! Tenants under a virtual clock: one that floods costs another a turn or two;
//! background gives way; limits are told.

use super::clients::{Client, run};
use super::*;
use decision::fleet::admission::{Priority, Quota};

fn tenant(name: &str, weight: f64, priority: Priority) -> Tenant {
    Tenant {
        name: name.to_owned(),
        weight,
        priority,
        max_sessions: None,
        tokens_per_min: None,
    }
}

const INTERACTIVE: Priority = Priority::Interactive;

fn shared(rule: &str, tenants: Vec<Tenant>) -> World {
    let settings = json!({"rule": rule, "max_wait_s": 100_000.0});
    World::shared(0, settings, EventSink::in_memory(), tenants)
}

/// A client of `payer` whose prompts stay as long as they are.
fn client(payer: usize, session: u32, length: u32, (run_s, think_s): (f64, f64)) -> Client {
    let mut client = Client::new(session, length, run_s, think_s);
    client.payer = payer;
    client.growth = 0;
    client
}

/// A polite session beside so many that never pause, for five minutes: its longest wait, and the turns that it
/// and the others had.
fn beside(rule: &str, tenants: Vec<Tenant>, host: Option<u64>, flood: u32) -> (f64, usize, usize) {
    let polite = tenants.len().saturating_sub(1);
    let world = shared(rule, tenants);
    world.add_tiered("w0", host);
    let mut clients: Vec<Client> = (1..=flood)
        .map(|session| client(0, session, 6_000, (3.0, 0.0)))
        .collect();
    run(&world, &mut clients, 60.0);
    clients.push(client(polite, 0, 9_000, (2.0, 2.0)));
    run(&world, &mut clients, 300.0);
    let polite = clients.pop().expect("the last");
    let others = clients.iter().map(|client| client.served).sum();
    (polite.longest_s, polite.served, others)
}

fn two() -> Vec<Tenant> {
    vec![
        tenant("default", 1.0, INTERACTIVE),
        tenant("polite", 1.0, INTERACTIVE),
    ]
}

/// A turn of those that flood runs for 3 s. On a worker that they fill another waits until one or two end.
const BOUND_S: f64 = 10.0;
/// Half of what the rule `rotate` lets anybody wait.
const ROTATION_S: f64 = 30.0;

#[test]
fn a_flood_of_one_tenant_costs_another_a_turn_or_two_of_it() {
    let mut wrong = Vec::new();
    for rule in ["rotate", "cap", "aimd", "lease", "thunder"] {
        for host in [None, Some(400_000)] {
            let (wait_s, turns, others) = beside(rule, two(), host, 1_000);
            let (unshared_s, _, unshared) = beside(rule, Vec::new(), host, 1_000);
            // Beside a tier `rotate` has a session leave once its turn has ended, which waits for its own before.
            let bound_s = match (rule, host) {
                ("rotate", Some(_)) => ROTATION_S,
                _ => BOUND_S,
            };
            // What the polite one does not want is not left unused.
            if wait_s > bound_s || turns < 25 || 10 * others < 6 * unshared {
                wrong.push(format!(
                    "{rule} {host:?}: {wait_s} s, {turns} turns, {others} of others; \
                     without shares {unshared_s} s, {unshared}"
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn room_is_shared_by_weight_where_all_want_it() {
    let world = shared(
        "rotate",
        vec![
            tenant("default", 1.0, INTERACTIVE),
            tenant("a", 3.0, INTERACTIVE),
            tenant("b", 1.0, INTERACTIVE),
        ],
    );
    world.add_tiered("w0", None);
    let mut clients: Vec<Client> = (0..80)
        .map(|session| client(1 + session as usize % 2, session, 8_000, (3.0, 0.0)))
        .collect();
    run(&world, &mut clients, 600.0);
    let served = |payer: usize| -> usize {
        let of = clients.iter().filter(|client| client.payer == payer);
        of.map(|client| client.served).sum()
    };
    let ratio = served(1) as f64 / served(2) as f64;
    assert!((2.0..4.0).contains(&ratio), "{} : {}", served(1), served(2));
    let tenants = world.fleet.tenants();
    assert!(tenants[1].kv_token_seconds > 2.0 * tenants[2].kv_token_seconds);
    assert!(tenants[1].waiting > 10 && tenants[1].running > 0);
}

#[test]
fn background_gives_way_and_has_what_is_left() {
    let world = shared(
        "rotate",
        vec![
            tenant("default", 1.0, INTERACTIVE),
            tenant("night", 100.0, Priority::Background),
        ],
    );
    world.add_tiered("w0", None);
    let mut clients: Vec<Client> = (0..100)
        .map(|session| client(1, session, 8_000, (3.0, 0.0)))
        .collect();
    run(&world, &mut clients, 60.0);
    let before: usize = clients.iter().map(|client| client.served).sum();
    assert!(before > 100, "alone it has everything: {before}");
    clients.extend((100..108).map(|session| client(0, session, 8_000, (3.0, 1.0))));
    run(&world, &mut clients, 300.0);
    for client in &clients[100..] {
        assert!(client.longest_s <= 8.0, "{}", client.longest_s);
    }
    let after: usize = clients[..100].iter().map(|client| client.served).sum();
    assert!(after > before, "what is left is used");
}

#[test]
fn a_limit_is_told_and_costs_others_nothing() {
    let limited = Tenant {
        max_sessions: Some(2),
        tokens_per_min: Some(30_000.0),
        ..tenant("small", 1.0, INTERACTIVE)
    };
    for rule in ["off", "rotate"] {
        let tenants = vec![tenant("default", 1.0, INTERACTIVE), limited.clone()];
        let world = shared(rule, tenants);
        world.add("w0");
        let ask = |session: u32, payer: usize| {
            let mut request = world.turn(session, 10_000);
            request.payer = payer;
            match world.ask(&request) {
                Admit::Placed(turn) => {
                    world.serve(turn);
                    None
                }
                Admit::Refused(Refused::Quota {
                    reached,
                    retry_after_s,
                }) => Some((reached, retry_after_s)),
                _ => panic!("neither placed nor refused"),
            }
        };
        assert_eq!((ask(1, 1), ask(2, 1)), (None, None), "{rule}");
        let (reached, after_s) = ask(3, 1).expect("a third session");
        assert_eq!(reached, Quota::Sessions);
        assert!(after_s > 1.0 && after_s <= 300.0, "{after_s}");
        assert_eq!((ask(1, 1), ask(3, 0)), (None, None), "{rule}");
        let (reached, after_s) = ask(1, 1).expect("its tokens are used");
        assert_eq!(reached, Quota::Tokens);
        assert!((1.0..2.0).contains(&after_s), "{after_s}");
        world.advance(after_s);
        assert_eq!(ask(1, 1), None, "{rule}");
        world.advance(400.0);
        assert_eq!(ask(3, 1), None, "{rule}: the others have gone");
    }
}
