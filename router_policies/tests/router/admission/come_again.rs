//! Clients that give up while their turn waits and ask again: they have the place in the queue that they had.

use super::*;
use decision::fleet::log::Event;
use parking_lot::Mutex;

/// A fleet of one worker that is full, and the ends of waits that it logs.
fn full() -> (World, Reservation, Arc<Mutex<Vec<Value>>>) {
    let events = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&events);
    let sink = EventSink::in_memory().observing(move |event| {
        if let Event::WaitEnd(_) = event {
            kept.lock().push(serde_json::to_value(event).expect("JSON"));
        }
    });
    let world = World::with_sink(1, json!({}), sink);
    let running = world.placed(&world.turn(0, 60_000));
    (world, running, events)
}

#[test]
fn who_comes_again_within_a_minute_goes_before_those_that_came_meanwhile_and_has_waited_all_the_while()
 {
    let (world, running, events) = full();
    let (first, later) = (world.turn(1, 60_000), world.turn(2, 60_000));
    let ticket = world.waits(&first);
    world.advance(10.0);
    let of_later = world.waits(&later);
    world.advance(290.0);
    drop(ticket);
    world.advance(59.0);
    let ticket = world.waits(&first);
    world.advance(41.0);
    drop(running);
    let of_first = world.fetch(ticket, &first).ok().expect("it is let in");
    assert_eq!(world.last().waited_s, 400.0);
    let of_later = world.fetch(of_later, &later).err().expect("it waits");
    world.serve(of_first);
    drop(of_later);
    assert!(world.fleet.is_idle());
    let seen: Vec<_> = events
        .lock()
        .iter()
        .map(|event| {
            let text = |key: &str| event[key].as_str().map(str::to_owned);
            (text("session_id"), text("end"), event["waited_s"].as_f64())
        })
        .collect();
    let end = |session: &str, end: &str, waited_s| {
        (
            Some(session.to_owned()),
            Some(end.to_owned()),
            Some(waited_s),
        )
    };
    assert_eq!(
        seen,
        [
            end("s1", "left", 300.0),
            end("s1", "let_in", 400.0),
            end("s2", "left", 390.0)
        ]
    );
}

#[test]
fn who_comes_again_and_finds_room_has_waited_too() {
    let (world, running, events) = full();
    let first = world.turn(1, 60_000);
    drop(world.waits(&first));
    drop(running);
    world.advance(20.0);
    let placed = world.placed(&first);
    assert_eq!(world.last().waited_s, 20.0);
    world.serve(placed);
    assert_eq!(events.lock()[1]["end"], "let_in");
}

#[test]
fn who_comes_later_or_with_another_turn_queues_like_others() {
    for (after_s, length) in [(61.0, 60_000), (5.0, 61_000)] {
        let (world, running, _) = full();
        let left = world.turn(1, 60_000);
        drop(world.waits(&left));
        let other = world.turn(2, 60_000);
        let of_other = world.waits(&other);
        world.advance(after_s);
        let again = world.turn(1, length);
        let of_again = world.waits(&again);
        drop(running);
        let other = world.fetch(of_other, &other);
        assert!(other.is_ok());
        assert!(world.fetch(of_again, &again).is_err());
    }
}

#[test]
fn what_is_refused_says_why() {
    let (world, running, events) = full();
    let waiting = world.turn(1, 60_000);
    let ticket = world.waits(&waiting);
    world.advance(601.0);
    world.fleet.pump();
    let answer = world.fleet.place_ticket(ticket, &waiting, &[]);
    assert!(matches!(answer, Admit::Refused(_)));
    let event = events.lock()[0].clone();
    assert_eq!(event["end"], "refused");
    assert_eq!(event["reason"], "waited_too_long");
    assert_eq!(event["waited_s"], 601.0);
    drop(running);
}
