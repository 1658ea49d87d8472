//! Turns of one session that overlap: what becomes of one of them takes nothing from the others.

use super::*;

#[test]
fn a_turn_that_is_given_up_takes_nothing_from_a_longer_one_that_was_answered_meanwhile() {
    let world = World::new(1, json!({"cold_slots": 10, "growth_turns": 0}));
    world.serve(world.placed(&world.turn(0, 20_000)));
    let leaves = world.placed(&world.turn(0, 21_000));
    world.serve(world.placed(&world.turn(0, 40_000)));
    drop(leaves);
    let booked = world.fleet.snapshot()[0].residency.booked_tokens;
    assert!(booked >= 40_000, "its engine holds them: {booked}");
}
