//! Turns that wait for the workers of one model, beside those of another.

use super::*;

#[test]
fn many_that_wait_for_one_worker_keep_nobody_from_another() {
    for rule in ["rotate", "lease", "cap", "aimd", "thunder"] {
        let world = World::new(2, json!({"rule": rule}));
        let ask = |session: u32, not_on: &str| {
            let request = world.turn(session, 60_000);
            let admit = world.fleet.admit(&request, &[not_on.to_owned()], || ());
            (request, admit)
        };
        let first: Vec<Admit> = (0..100).map(|session| ask(session, "w1").1).collect();
        let wait = first
            .iter()
            .filter(|admit| matches!(admit, Admit::Waiting(_)))
            .count();
        assert!(wait > 70, "{rule}: {wait} wait");
        let (request, mut admit) = ask(200, "w0");
        if let Admit::Waiting(ticket) = admit {
            // The rule may let turns in at intervals.
            world.advance(6.0);
            world.fleet.pump();
            admit = world
                .fleet
                .place_ticket(ticket, &request, &["w0".to_owned()]);
        }
        assert!(matches!(admit, Admit::Placed(_)), "{rule}: it waits");
    }
}
