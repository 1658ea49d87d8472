//! What a decision noted of caches and sessions is taken back where its worker did not run the request, and
//! nothing else with it: not what the same prompt's other request, or the session's other turn, left there.

use decision::fleet::log::EventSink;
use decision::fleet::prefix::hash::TokenHasher;
use decision::fleet::{Fleet, Outcome, Request, Reservation};
use decision::policy::{self, Decision, Reason, RequestFacts, Route};
use router_policies::config::WorkerSpec;
use serde_json::{Value, json};
use std::sync::Arc;

/// Workers `w0` and `w1`, which serve whole requests.
fn two_workers() -> Arc<Fleet> {
    let fleet = Arc::new(Fleet::new(
        policy::build("round_robin", Value::Null).expect("a policy"),
        "round_robin".to_owned(),
        EventSink::in_memory(),
        1,
    ));
    for id in ["w0", "w1"] {
        let spec =
            json!({"id": id, "url": format!("http://{id}:1"), "kv_capacity_tokens": 100_000});
        let spec = serde_json::from_value::<WorkerSpec>(spec).expect("a worker");
        fleet.add_worker(spec).expect("a new id");
        fleet.report_health(id, true);
    }
    fleet
}

/// A turn of one session, whose prompt has so many tokens, the same ones in all turns.
fn turn(fleet: &Fleet, tokens: u32) -> Request {
    let mut hasher = TokenHasher::new(fleet.token_block());
    hasher.extend(&(0..tokens).collect::<Vec<_>>());
    Request {
        request_id: "r".to_owned(),
        session_id: Some("s".to_owned()),
        prompt: hasher.finish(),
        stream: true,
        ..Request::default()
    }
}

fn on(fleet: &Arc<Fleet>, worker: &str, request: &Request) -> Reservation {
    let choose = |worker| Decision::unpredicted(Route::Local { worker }, Reason::PrefillFailed);
    fleet
        .place_on(request, worker, &[], choose)
        .expect("placed")
}

fn serve(mut reservation: Reservation) {
    reservation.streams();
    reservation.output(1);
    reservation.finish(Outcome::Ok, Some(200), None);
}

fn full(reservation: Reservation) {
    reservation.finish(Outcome::Rejected, Some(429), None);
}

/// What each worker is believed to hold of a request's prompt, and what is known of its session.
fn believed(fleet: &Arc<Fleet>, request: &Request) -> ([u64; 2], RequestFacts) {
    let mut seen = None;
    let placed = fleet.place(request, &[], |policy, view| {
        let held = [0, 1].map(|slot| view.workers[slot].cached_tokens);
        seen = Some((held, view.request.clone()));
        policy.decide(view)
    });
    full(placed.expect("placed"));
    seen.expect("asked")
}

#[test]
fn a_worker_that_refused_is_not_believed_to_hold_what_another_does() {
    let fleet = two_workers();
    serve(on(&fleet, "w0", &turn(&fleet, 8_000)));
    full(on(&fleet, "w1", &turn(&fleet, 9_000)));
    let (held, _) = believed(&fleet, &turn(&fleet, 10_000));
    assert_eq!(held, [8_000, 0]);
}

#[test]
fn a_refusal_does_not_take_the_prompt_of_another_request_with_it() {
    let fleet = two_workers();
    let refused = on(&fleet, "w0", &turn(&fleet, 8_000));
    // As a decode worker that serves alone once its prefill worker has failed.
    let again = on(&fleet, "w0", &turn(&fleet, 8_000));
    full(refused);
    serve(again);
    let (held, _) = believed(&fleet, &turn(&fleet, 10_000));
    assert_eq!(held, [8_000, 0]);
}

#[test]
fn a_session_is_known_where_its_request_was_served_in_the_end() {
    let fleet = two_workers();
    let hangs = on(&fleet, "w0", &turn(&fleet, 8_000));
    // It moves before the first attempt is given up.
    let moved = on(&fleet, "w1", &turn(&fleet, 8_000));
    hangs.finish(Outcome::WorkerError, None, None);
    serve(moved);
    let (_, facts) = believed(&fleet, &turn(&fleet, 9_000));
    assert_eq!((facts.affine, facts.turn), (Some(1), 1));
}

#[test]
fn a_session_none_of_whose_turns_was_served_is_not_known() {
    let fleet = two_workers();
    let turns = ["w0", "w1"].map(|worker| on(&fleet, worker, &turn(&fleet, 8_000)));
    turns.into_iter().for_each(full);
    let (_, facts) = believed(&fleet, &turn(&fleet, 9_000));
    assert_eq!((facts.affine, facts.turn), (None, 0));
}
