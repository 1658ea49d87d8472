//! Sessions in closed loops, for tests of who waits for how long.

use super::*;
use std::sync::atomic::AtomicBool;

/// A session in a closed loop: it sends, is answered for a while, thinks, and sends again.
pub struct Client {
    pub payer: usize,
    pub session: u32,
    length: u32,
    /// Tokens by which each prompt is longer than the one before.
    pub growth: u32,
    run_s: f64,
    think_s: f64,
    state: Doing,
    pub served: usize,
    /// Turns that waited for no more than a second.
    pub at_once: usize,
    pub longest_s: f64,
}

#[expect(clippy::large_enum_variant, reason = "moved once a step")]
enum Doing {
    Thinks(f64),
    Waits(Ticket, Request, f64, Arc<AtomicBool>),
    Runs(Reservation, f64),
    Gone,
}

impl Client {
    pub fn new(session: u32, length: u32, run_s: f64, think_s: f64) -> Self {
        Self {
            payer: 0,
            session,
            length,
            growth: 50,
            run_s,
            think_s,
            state: Doing::Thinks(0.0),
            served: 0,
            at_once: 0,
            longest_s: 0.0,
        }
    }

    pub fn step(&mut self, world: &World) {
        let now_s = world.now_s();
        self.state = match std::mem::replace(&mut self.state, Doing::Gone) {
            Doing::Thinks(until_s) if until_s <= now_s => {
                self.length += self.growth;
                let mut request = world.turn(self.session, self.length);
                request.payer = self.payer;
                let woken = Arc::new(AtomicBool::new(false));
                let wake = Arc::clone(&woken);
                let asked = world
                    .fleet
                    .admit(&request, &[], move || wake.store(true, Ordering::Relaxed));
                match asked {
                    Admit::Placed(turn) => {
                        self.at_once += 1;
                        Doing::Runs(turn, now_s + self.run_s)
                    }
                    Admit::Waiting(ticket) => Doing::Waits(ticket, request, now_s, woken),
                    Admit::Refused(refused) => panic!("{refused:?}"),
                }
            }
            Doing::Waits(ticket, request, since_s, woken) => {
                self.longest_s = self.longest_s.max(now_s - since_s);
                match woken.swap(false, Ordering::Relaxed) {
                    false => Doing::Waits(ticket, request, since_s, woken),
                    true => match world.fetch(ticket, &request) {
                        Ok(turn) => {
                            self.at_once += usize::from(now_s - since_s <= 1.0);
                            Doing::Runs(turn, now_s + self.run_s)
                        }
                        Err(ticket) => Doing::Waits(ticket, request, since_s, woken),
                    },
                }
            }
            Doing::Runs(turn, until_s) if until_s <= now_s => {
                world.serve(turn);
                self.served += 1;
                Doing::Thinks(now_s + self.think_s)
            }
            other => other,
        };
    }
}

pub fn run(world: &World, clients: &mut [Client], seconds: f64) {
    let until_s = world.now_s() + seconds;
    while world.now_s() < until_s {
        world.advance(0.5);
        world.fleet.pump();
        for client in &mut *clients {
            client.step(world);
        }
    }
}
