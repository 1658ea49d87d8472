//! Calls beside a session's conversation (a title, a probe) take no place and open no door; a session's id belongs to
//! who uses it.

use super::*;

/// A small prompt of a session, without anything of its conversation.
fn title(world: &World, session: u32) -> Request {
    Request {
        may_be_aside: true,
        ..world.request(&format!("s{session}"), 90_000_000..90_000_500)
    }
}

#[test]
fn a_title_call_takes_no_place_and_opens_no_door() {
    let world = World::new(1, json!({}));
    let running = world.placed(&world.turn(0, 60_000));
    let booked = world.fleet.snapshot()[0].admission.booked_tokens;
    // Of a session that is not there yet, while another fills the worker: at once.
    let call = world.placed(&title(&world, 1));
    assert_eq!(world.last().state, Residence::Ungated);
    assert_eq!(world.resident(0), 1);
    assert_eq!(world.fleet.snapshot()[0].admission.booked_tokens, booked);
    let main = world.turn(1, 60_000);
    let ticket = world.waits(&main);
    // Nor behind those that wait.
    world.serve(world.placed(&title(&world, 2)));
    world.serve(call);
    drop(ticket);
    drop(running);
    assert!(world.fleet.is_idle());
}

#[test]
fn a_call_beside_a_conversation_leaves_its_place_as_it_is() {
    let world = World::new(1, json!({}));
    world.serve(world.placed(&world.turn(0, 60_000)));
    let booked = world.fleet.snapshot()[0].admission.booked_tokens;
    world.serve(world.placed(&title(&world, 0)));
    assert_eq!(world.fleet.snapshot()[0].admission.booked_tokens, booked);
    // A short turn that goes on from the last one is the conversation's, whatever it may be.
    world.serve(world.placed(&world.turn(5, 2_500)));
    let next = Request {
        may_be_aside: true,
        ..world.turn(5, 2_600)
    };
    world.serve(world.placed(&next));
    assert_eq!(world.last().state, Residence::Resident);
}

#[test]
fn calls_beside_conversations_have_a_bound_of_their_own() {
    let world = World::new(1, json!({}));
    let running = world.placed(&world.turn(0, 90_000));
    let mut calls = Vec::new();
    let waiting = (1..100).find_map(|session| match world.ask(&title(&world, session)) {
        Admit::Placed(call) => {
            calls.push(call);
            None
        }
        Admit::Waiting(ticket) => Some(ticket),
        Admit::Refused(refused) => panic!("{refused:?}"),
    });
    assert!(
        waiting.is_some() && (2..20).contains(&calls.len()),
        "{}",
        calls.len()
    );
    drop((waiting, calls, running));
    assert!(world.fleet.is_idle());
}

#[test]
fn who_uses_anothers_session_id_has_a_session_of_its_own() {
    let world = World::new(1, json!({}));
    let of = |tenant: u64, length: u32| Request {
        tenant,
        ..world.turn(0, length)
    };
    world.serve(world.placed(&of(1, 30_000)));
    let mut other = of(2, 2_500);
    other.hints.ends = true;
    world.serve(world.placed(&other));
    assert_eq!(world.resident(0), 1, "the first one's place is its own");
    world.serve(world.placed(&of(1, 31_000)));
    assert_eq!(world.last().state, Residence::Resident);
}
