//! The rule `rotate` under a virtual clock: who is in takes turns, who is outside enters in order, and
//! everybody is served again and again.

use super::clients::{Client, run};
use super::*;

/// One worker whose tiers keep so many tokens.
fn rotating(host_kv_tokens: Option<u64>, mut settings: Value) -> World {
    settings["rule"] = json!("rotate");
    settings["max_wait_s"] = json!(100_000.0);
    let world = World::new(0, settings);
    world.add_tiered("w0", host_kv_tokens);
    world
}

#[test]
fn while_the_tiers_keep_all_nobody_waits() {
    let world = rotating(Some(400_000), json!({}));
    let mut clients: Vec<Client> = (0..4).map(|s| Client::new(s, 15_000, 4.0, 4.0)).collect();
    run(&world, &mut clients, 300.0);
    for client in &clients {
        assert!(client.longest_s <= 1.0, "{}", client.longest_s);
    }
    assert_eq!(world.resident(0), 4);
    assert_eq!(world.fleet.snapshot()[0].admission.given_up, 0);
}

#[test]
fn where_turns_do_not_fit_sessions_have_them_in_bursts_and_wait_as_long_as_patience_allows() {
    let world = rotating(Some(1_000_000), json!({"patience_s": 120}));
    let mut clients: Vec<Client> = (0..12).map(|s| Client::new(s, 20_000, 8.0, 2.0)).collect();
    run(&world, &mut clients, 1_200.0);
    let served: usize = clients.iter().map(|client| client.served).sum();
    let at_once: usize = clients.iter().map(|client| client.at_once).sum();
    assert!(2 * at_once > served, "{at_once} of {served} at once");
    for client in &clients {
        assert!(client.longest_s <= 1.5 * 120.0, "{}", client.longest_s);
        assert!(
            client.served * 24 >= served,
            "{} of {served}",
            client.served
        );
    }
}

#[test]
fn more_than_the_tiers_keep_enter_in_the_order_in_which_they_wait() {
    let world = rotating(Some(120_000), json!({}));
    let turns: Vec<Request> = (0..6).map(|session| world.turn(session, 40_000)).collect();
    let mut tickets: Vec<(usize, Ticket)> = Vec::new();
    let mut order = Vec::new();
    for (session, turn) in turns.iter().enumerate() {
        match world.ask(turn) {
            Admit::Placed(turn) => {
                order.push(session);
                world.serve(turn);
            }
            Admit::Waiting(ticket) => tickets.push((session, ticket)),
            Admit::Refused(refused) => panic!("{refused:?}"),
        }
        world.advance(0.1);
    }
    assert!(!tickets.is_empty(), "the tiers keep all");
    for _ in 0..2_000 {
        world.advance(0.5);
        world.fleet.pump();
        let mut left = Vec::new();
        for (session, ticket) in tickets {
            match world.fetch(ticket, &turns[session]) {
                Ok(turn) => {
                    order.push(session);
                    world.serve(turn);
                }
                Err(ticket) => left.push((session, ticket)),
            }
        }
        tickets = left;
    }
    assert_eq!(order, [0, 1, 2, 3, 4, 5]);
}

#[test]
fn who_waits_is_told_whether_for_its_turn_to_enter_or_for_room() {
    for (tier, reason) in [
        (120_000, WaitReason::SessionsLimit),
        (400_000, WaitReason::NoRoom),
    ] {
        let world = rotating(Some(tier), json!({}));
        let _running = [0, 1].map(|session| world.begun(&world.turn(session, 40_000)));
        let _waiting = world.waits(&world.turn(2, 50_000));
        let shown = world.fleet.sessions();
        let waits = shown.iter().find(|shown| shown.reason.is_some());
        assert_eq!(waits.and_then(|shown| shown.reason), Some(reason));
    }
}

#[test]
fn one_whose_client_leaves_before_its_last_turn_makes_room_all_the_same() {
    let world = rotating(Some(120_000), json!({}));
    let running: Vec<Reservation> = (0..2)
        .map(|session| world.begun(&world.turn(session, 45_000)))
        .collect();
    // It is in, and waits for its turn; so does another outside, for which it is to leave.
    let own = world.turn(0, 60_000);
    let waits = world.waits(&own);
    let other = world.turn(2, 45_000);
    let ticket = world.waits(&other);
    world.advance(400.0);
    world.fleet.pump();
    drop(waits);
    running.into_iter().for_each(|turn| world.serve(turn));
    let mut ticket = Some(ticket);
    for _ in 0..400 {
        world.advance(1.0);
        world.fleet.pump();
        match world.fetch(ticket.take().expect("a ticket"), &other) {
            Ok(turn) => return world.serve(turn),
            Err(left) => ticket = Some(left),
        }
    }
    panic!("it waits for ever");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn everybody_is_served_again_and_again(
        lengths in proptest::collection::vec(3_000u32..60_000, 2..14),
        tier in tier(),
        workers in 1usize..3,
        run_s in 1.0f64..10.0,
        think_s in 0.5f64..20.0,
    ) {
        let world = rotating(tier, json!({}));
        for worker in 1..workers {
            world.add_tiered(&format!("w{worker}"), tier);
        }
        let clients = lengths.iter().enumerate();
        let mut clients: Vec<Client> = clients
            .map(|(session, length)| Client::new(session as u32, *length, run_s, think_s))
            .collect();
        let mut before = vec![0; clients.len()];
        for _ in 0..4 {
            run(&world, &mut clients, 600.0);
            for (client, before) in clients.iter().zip(&mut before) {
                prop_assert!(
                    client.served > *before,
                    "session {} is served no more", client.session
                );
                *before = client.served;
            }
            for worker in world.fleet.snapshot() {
                let book = worker.admission;
                let budget = book.budget_tokens.expect("a capacity");
                prop_assert!(book.booked_tokens <= budget, "{book:?}");
            }
        }
        drop(clients);
        prop_assert!(world.fleet.is_idle());
        prop_assert_eq!(world.fleet.waiting_turns(), 0);
    }
}
