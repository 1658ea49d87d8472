//! Turns that are tried again after a worker failed: they queue as what came first, and have as long as any
//! other to wait.

use super::*;

/// A turn whose first attempt began when the clock did.
fn tried_before(world: &World, session: u32) -> Request {
    Request {
        arrived_s: Some(0.0),
        ..world.turn(session, 60_000)
    }
}

#[test]
fn what_ran_for_long_before_its_worker_failed_may_wait_for_another_all_the_same() {
    let world = World::new(1, json!({"max_wait_s": 600}));
    let running = world.placed(&world.turn(0, 60_000));
    world.advance(700.0);
    let again = tried_before(&world, 1);
    let ticket = world.waits(&again);
    world.advance(599.0);
    let ticket = world.fetch(ticket, &again).err().expect("it waits on");
    drop(running);
    let again = world.fetch(ticket, &again).ok();
    assert!(again.is_some(), "there is room");
    assert_eq!(world.last().waited_s, 599.0, "in the queue");
    drop(again);
    assert!(world.fleet.is_idle());
}

#[test]
fn what_is_tried_again_waits_no_longer_than_it_may() {
    let world = World::new(1, json!({"max_wait_s": 600}));
    let running = world.placed(&world.turn(0, 60_000));
    world.advance(700.0);
    let again = tried_before(&world, 1);
    let ticket = world.waits(&again);
    world.advance(601.0);
    world.fleet.pump();
    let answer = world.fleet.place_ticket(ticket, &again, &[]);
    assert!(matches!(
        answer,
        Admit::Refused(Refused::WaitedTooLong { .. })
    ));
    drop(running);
    assert!(world.fleet.is_idle());
}
