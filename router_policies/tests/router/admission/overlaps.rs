//! Turns of one session that overlap, and turns that wait for room to grow while their worker changes: what
//! becomes of one of them takes nothing from the others.

use super::*;

/// A worker of 95,000 tokens before any growth, on which session 0 has an idle place of 40,000 and session 1
/// runs a turn of 50,000.
fn crowded() -> (World, Reservation) {
    let world = World::new(1, json!({"fill": 0.95}));
    world.serve(world.placed(&world.turn(0, 40_000)));
    let running = world.placed(&world.turn(1, 50_000));
    (world, running)
}

/// Another session wants the room of session 0, which would have been idle for long enough to give it up if its
/// next turn were not waiting.
fn another_wants_room(world: &World) -> (Request, Ticket) {
    let other = world.turn(2, 30_000);
    let ticket = world.waits(&other);
    world.advance(200.0);
    world.fleet.pump();
    (other, ticket)
}

/// The turn that waits to grow has kept its session's place, and goes once there is room.
fn keeps_its_place(world: &World, running: Reservation, grown: &Request, ticket: Ticket) {
    let (other, waiting) = another_wants_room(world);
    assert_eq!(world.fleet.snapshot()[0].admission.given_up, 0);
    let waiting = world
        .fetch(waiting, &other)
        .err()
        .expect("it waits for room");
    drop(running);
    let grown = world.fetch(ticket, grown).ok().expect("there is room");
    assert_eq!(world.last().state, Residence::Resident);
    drop((grown, waiting));
    assert!(world.fleet.is_idle());
}

#[test]
fn of_two_turns_that_wait_to_grow_one_may_leave() {
    let (world, running) = crowded();
    let (leaves, stays) = (world.turn(0, 60_000), world.turn(0, 61_000));
    let leaving = world.waits(&leaves);
    let staying = world.waits(&stays);
    drop(leaving);
    keeps_its_place(&world, running, &stays, staying);
}

#[test]
fn a_turn_that_waits_to_grow_is_as_any_other_once_its_worker_has_lost_its_cache() {
    let (world, running) = crowded();
    let first = world.turn(2, 60_000);
    let waiting = world.waits(&first);
    world.advance(1.0);
    let grown = world.turn(0, 60_000);
    let growing = world.waits(&grown);
    world.fleet.report_health("w0", false);
    world.fleet.report_health("w0", true);
    assert_eq!(world.resident(0), 1, "whose turn runs");
    running.finish(Outcome::WorkerError, None, None);
    // Only one of them fits, and the other came first.
    let growing = world.fetch(growing, &grown).err();
    assert!(
        growing.is_some(),
        "it passed one that has waited for longer"
    );
    let first = world.fetch(waiting, &first).ok();
    assert!(first.is_some(), "the first goes first");
    drop((first, growing));
    assert!(world.fleet.is_idle());
}

#[test]
fn one_that_waits_to_grow_where_nothing_new_may_go_leaves_its_old_place_when_it_moves() {
    let (world, running) = crowded();
    let grown = world.turn(0, 60_000);
    let ticket = world.waits(&grown);
    world.add("w1");
    world.fleet.set_draining("w0", true);
    let moved = world.fetch(ticket, &grown).ok().expect("there is room");
    assert_eq!(moved.answering().id, "w1");
    assert_eq!(world.last().state, Residence::Moved);
    assert_eq!(
        (world.resident(0), world.resident(1)),
        (1, 1),
        "a session has one place"
    );
    drop((moved, running));
    assert!(world.fleet.is_idle());
}

#[test]
fn a_turn_that_is_given_up_takes_nothing_from_a_longer_one_that_was_answered_meanwhile() {
    let world = World::new(1, json!({}));
    world.serve(world.placed(&world.turn(0, 20_000)));
    let leaves = world.placed(&world.turn(0, 21_000));
    world.serve(world.placed(&world.turn(0, 40_000)));
    drop(leaves);
    let booked = world.fleet.snapshot()[0].admission.booked_tokens;
    assert!(booked >= 40_000, "its engine holds them: {booked}");
}
