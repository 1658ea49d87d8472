//! Time slices beside a host tier, under a virtual clock: those with a slice go first, the others have theirs
//! in turn, and nobody's slice outlasts what it is for.

use super::*;

fn tiered() -> World {
    tiered_with(0.76, 3.0, 0.0)
}

/// A worker with a host tier that holds every session of these tests. What fits is what the GPU's KV and
/// the slices allow: neither cold starts nor growth hold anybody up. With a `slice_from_fill` of 0 slices
/// are always needed.
fn tiered_with(slice_fill: f64, late_after_s: f64, slice_from_fill: f64) -> World {
    tiered_under(
        json!({"slice_fill": slice_fill, "late_after_s": late_after_s,
        "slice_from_fill": slice_from_fill}),
    )
}

fn tiered_under(mut settings: Value) -> World {
    let all = json!({"fill": 0.95, "cold_slots": 20, "growth_turns": 0, "max_wait_s": 3000.0});
    for (key, value) in all.as_object().into_iter().flatten() {
        settings[key] = value.clone();
    }
    let world = World::new(0, settings);
    world.add_tiered("w0", Some(1_000_000));
    world
}

/// Runs turns of so many tokens that take five seconds each, at the same time.
fn serve_together(world: &World, sessions: &[u32], length: u32) {
    let placed = |&session: &u32| world.placed(&world.turn(session, length));
    let running: Vec<Reservation> = sessions.iter().map(placed).collect();
    world.advance(5.0);
    running.into_iter().for_each(|turn| world.serve(turn));
}

/// As all slices are taken, no turn of so many tokens begins one, though it would have room.
const SMALL: u32 = 26_000;

/// Three sessions that have a slice each, and their next turns, which run.
fn all_slices_taken(world: &World, sessions: [u32; 3]) -> [Reservation; 3] {
    serve_together(world, &sessions, 22_000);
    world.advance(4.0);
    sessions.map(|session| world.placed(&world.turn(session, 22_500)))
}

#[test]
fn one_that_fits_needs_no_slice_while_little_is_wanted() {
    // The defaults: three whose turns run and a fourth want 90 % of what may be booked at the moment, and over
    // time, as they think for as long as they run, less than the 85 % from which slices are needed.
    let world = tiered_under(json!({"slice_fill": 0.76}));
    let running = all_slices_taken(&world, [0, 1, 2]);
    world.serve(world.placed(&world.turn(3, SMALL)));
    drop(running);
}

#[test]
fn one_that_would_fit_waits_until_a_slice_is_free() {
    let world = tiered();
    let running = all_slices_taken(&world, [0, 1, 2]);
    let small = world.turn(3, SMALL);
    let ticket = world.waits(&small);
    world.advance(0.25);
    world.fleet.pump();
    let ticket = world.fetch(ticket, &small).err().expect("no slice yet");
    // Now all of them think, and the worker has nothing to do.
    running.into_iter().for_each(|turn| world.serve(turn));
    world.fleet.pump();
    world.serve(world.fetch(ticket, &small).ok().expect("a slice"));
    // The same without a host tier: who fits goes.
    let world = World::new(1, json!({"cold_slots": 20, "growth_turns": 0}));
    let running = all_slices_taken(&world, [0, 1, 2]);
    world.serve(world.placed(&small));
    drop(running);
}

#[test]
fn one_with_a_slice_goes_before_those_who_have_waited_longer() {
    // However many they are.
    for others in [1, 80] {
        let world = tiered();
        serve_together(&world, &[0, 1], 30_000);
        // The one grows, and takes the place of the other, which keeps its slice.
        let grown = world.placed(&world.turn(1, 80_000));
        assert_eq!(world.last().gave_up, vec![Some("s0".into())]);
        let new: Vec<Request> = (2..2 + others)
            .map(|session| world.turn(session, 80_000))
            .collect();
        let new_wait: Vec<Ticket> = new.iter().map(|new| world.waits(new)).collect();
        world.advance(15.0);
        let back = world.turn(0, 31_000);
        let back_waits = world.waits(&back);
        world.serve(grown);
        let mut last = world.turn(1, 30_000);
        last.hints.ends = true;
        world.serve(world.placed(&last));
        let went = world.fetch(back_waits, &back).ok().expect("it goes first");
        let stay = |(ticket, new)| world.fetch(ticket, new).err().expect("it waits");
        let mut new_wait = new_wait.into_iter().zip(&new).map(stay);
        let first = new_wait.next().expect("one at least");
        let rest: Vec<Ticket> = new_wait.collect();
        world.advance(5.0);
        world.serve(went);
        // Its slice is over once it is not expected back.
        world.advance(300.0);
        world.fleet.pump();
        world.serve(world.fetch(first, &new[0]).ok().expect("its turn"));
        drop(rest);
        assert!(world.fleet.is_idle());
    }
}

#[test]
fn of_those_with_a_slice_one_that_can_still_be_in_time_goes_before_a_late_one() {
    for (late_after_s, later_by_s, first) in [
        (3.0, 2.0, 0),
        (3.0, 4.0, 1),
        // No later than by a third of the bound on waits.
        (3.0, 35.0, 0),
        (3_000.0, 4.0, 0),
    ] {
        let world = tiered_with(0.76, late_after_s, 0.0);
        serve_together(&world, &[0, 1, 2], 24_000);
        // It takes the places of the others, which keep their slices.
        let grown = world.placed(&world.turn(2, 90_000));
        assert_eq!(world.last().gave_up.len(), 2);
        let back = [0, 1].map(|session| world.turn(session, 60_000));
        let earlier = world.waits(&back[0]);
        world.advance(later_by_s);
        let later = world.waits(&back[1]);
        world.advance(1.0);
        world.serve(grown);
        world.advance(0.25);
        world.fleet.pump();
        let went = [earlier, later]
            .into_iter()
            .zip(&back)
            .map(|(ticket, turn)| world.fetch(ticket, turn));
        let went: Vec<Result<Reservation, Ticket>> = went.collect();
        let who: Vec<usize> = (0..2).filter(|&at| went[at].is_ok()).collect();
        assert_eq!(who, [first], "late after {late_after_s} s, {later_by_s} s");
    }
}

#[test]
fn one_that_says_that_it_ends_frees_its_slice_for_the_next() {
    for ends in [false, true] {
        let world = tiered();
        let [first, second, third] = all_slices_taken(&world, [0, 1, 2]);
        world.serve(first);
        let mut last = world.turn(0, 22_700);
        last.hints.ends = ends;
        let last = world.placed(&last);
        let small = world.turn(3, SMALL);
        let ticket = world.waits(&small);
        world.advance(5.0);
        world.serve(last);
        let went = world.fetch(ticket, &small);
        assert_eq!(went.is_ok(), ends, "ends: {ends}");
        drop((second, third));
    }
}

#[test]
fn a_worker_that_comes_back_without_its_cache_has_all_its_slices_free() {
    let restart: fn(&World) = |world| world.fleet.report_engine("w0", Some(2));
    let replace: fn(&World) = |world| {
        world.fleet.remove_worker("w0");
        world.add_tiered("w0", Some(1_000_000));
    };
    let go_down: fn(&World) = |world| {
        world.fleet.report_health("w0", false);
        world.fleet.report_health("w0", true);
    };
    for (what, happens) in [
        ("restart", restart),
        ("replace", replace),
        ("down", go_down),
    ] {
        let world = tiered();
        if what == "restart" {
            world.fleet.report_engine("w0", Some(1));
        }
        for turn in all_slices_taken(&world, [0, 1, 2]) {
            world.serve(turn);
        }
        happens(&world);
        // As many others begin at once, and beside them there is again none left.
        let running = all_slices_taken(&world, [4, 5, 6]);
        drop(world.waits(&world.turn(3, SMALL)));
        drop(running);
        assert!(world.fleet.is_idle(), "{what}");
    }
}

#[test]
fn a_client_that_leaves_the_queue_does_not_hold_its_slice_as_one_that_waits() {
    for leaves in [false, true] {
        let world = tiered();
        let [first, second, third] = all_slices_taken(&world, [0, 1, 2]);
        world.serve(first);
        // It has grown out of its room, and waits with its place and its slice.
        let grown = world.waits(&world.turn(0, 60_000));
        let small = world.turn(3, SMALL);
        let small_waits = world.waits(&small);
        world.advance(5.0);
        let grown = (!leaves).then_some(grown);
        world.advance(20.0);
        world.fleet.pump();
        let went = world.fetch(small_waits, &small);
        assert_eq!(went.is_ok(), leaves, "leaves: {leaves}");
        drop((second, third, grown));
    }
}

#[test]
fn one_whose_turns_hold_more_than_all_slices_may_is_served_when_nobody_else_has_one() {
    let world = tiered();
    serve_together(&world, &[0], 3_000);
    // It has room beside the other, which has a slice.
    let large = world.turn(1, 91_000);
    let ticket = world.waits(&large);
    world.advance(1.0);
    world.fleet.pump();
    let ticket = world
        .fetch(ticket, &large)
        .err()
        .expect("not beside another");
    world.advance(20.0);
    world.fleet.pump();
    let turn = world
        .fetch(ticket, &large)
        .ok()
        .expect("nobody is expected back");
    world.advance(5.0);
    world.serve(turn);
    // The next turn goes on at once, and one that fits nowhere gets in as well.
    world.advance(1.0);
    world.serve(world.placed(&world.turn(1, 92_000)));
    world.serve(world.placed(&world.turn(2, 150_000)));
    assert_eq!(world.last().state, Residence::Alone);
}

/// What a session does in [`take_turns`].
#[expect(clippy::large_enum_variant, reason = "a dozen of them, in a test")]
enum Now {
    Thinks(f64),
    Waits(Ticket, f64),
    Runs(Reservation, f64),
}

/// Sessions of so many tokens that think and run for as long, for some seconds. The waits of each, with the one
/// in which it is in the end.
fn take_turns(
    world: &World,
    sessions: u32,
    length: u32,
    times_s: (f64, f64),
    all_s: f64,
    seed: u64,
) -> Vec<Vec<f64>> {
    let (think_s, run_s) = times_s;
    let mut random = fastrand::Rng::with_seed(seed);
    let requests: Vec<Request> = (0..sessions)
        .map(|session| world.turn(session, length))
        .collect();
    let begins = |_: &Request| Now::Thinks(random.f64() * think_s);
    let mut of: Vec<Now> = requests.iter().map(begins).collect();
    let mut waits = vec![Vec::new(); of.len()];
    while world.now_s() < all_s {
        world.advance(0.25);
        let now_s = world.now_s();
        if world.fleet.next_pump_s().is_some() {
            world.fleet.pump();
        }
        for (session, state) in of.iter_mut().enumerate() {
            let request = &requests[session];
            let mut run = |mut turn: Reservation| {
                turn.streams();
                turn.output(1);
                let run_s = run_s * random.f64() * 2.0;
                Now::Runs(turn, now_s + run_s)
            };
            *state = match std::mem::replace(state, Now::Thinks(f64::INFINITY)) {
                Now::Thinks(until_s) if until_s <= now_s => match world.ask(request) {
                    Admit::Placed(turn) => {
                        waits[session].push(0.0);
                        run(turn)
                    }
                    Admit::Waiting(ticket) => Now::Waits(ticket, now_s),
                    Admit::Refused(refused) => panic!("{refused:?}"),
                },
                Now::Waits(ticket, since_s) => match world.fetch(ticket, request) {
                    Ok(turn) => {
                        waits[session].push(now_s - since_s);
                        run(turn)
                    }
                    Err(ticket) => Now::Waits(ticket, since_s),
                },
                Now::Runs(turn, until_s) if until_s <= now_s => {
                    turn.finish(Outcome::Ok, Some(200), None);
                    Now::Thinks(now_s + think_s * random.f64() * 2.0)
                }
                other => other,
            };
        }
    }
    let now_s = world.now_s();
    for (waits, state) in waits.iter_mut().zip(&of) {
        if let Now::Waits(_, since_s) = state {
            waits.push(now_s - since_s);
        }
    }
    drop(of);
    assert!(world.fleet.is_idle());
    waits
}

/// Sessions of 29,000 tokens take turns, and two turns in three at least do not wait: how many turns there were,
/// and the longest wait as a share of the bound on waits, as many times as all together want what fits.
fn crowded(slice_from_fill: f64, sessions: u32, think_s: f64, seed: u64) -> (usize, f64) {
    const LENGTH: u32 = 29_000;
    let world = tiered_with(0.55, 3.0, slice_from_fill);
    let waits = take_turns(&world, sessions, LENGTH, (think_s, 4.0), 1_200.0, seed);
    let all: Vec<f64> = waits.iter().flatten().copied().collect();
    let late = all.iter().filter(|&&wait_s| wait_s > 2.0).count();
    assert!(3 * late < all.len(), "{late} of {} turns waited", all.len());
    let fewest = waits.iter().map(Vec::len).min().unwrap_or(0);
    let mean = all.len() / waits.len();
    assert!(
        2 * fewest > mean,
        "{fewest} turns of one, {mean} on average"
    );
    let wanted = f64::from(sessions * LENGTH) / (0.95 * CAPACITY as f64);
    let longest_s = all.iter().copied().fold(0.0, f64::max);
    (all.len(), longest_s / (90.0 * wanted))
}

const CROWDS: [(u32, f64); 3] = [(9, 2.0), (12, 2.0), (12, 4.0)];

#[test]
fn of_three_times_the_sessions_that_fit_few_turns_wait_and_nobody_waits_for_long() {
    for (sessions, think_s) in CROWDS {
        let (_, longest) = crowded(0.0, sessions, think_s, 3);
        assert!(longest < 1.0, "{longest}");
    }
}

#[test]
fn with_slices_only_where_more_is_wanted_the_same_holds_over_four_draws_of_times() {
    for (sessions, think_s) in CROWDS {
        let of = |from| (1..=4).map(move |seed| crowded(from, sessions, think_s, seed));
        let longest = of(0.85).map(|(_, longest)| longest).sum::<f64>() / 4.0;
        assert!(longest < 1.0, "{longest}");
        // More is wanted nearly all the time, so as many turns are served.
        let served = |from| of(from).map(|(turns, _)| turns).sum::<usize>() as f64;
        assert!(served(0.85) > 0.97 * served(0.0));
    }
}
