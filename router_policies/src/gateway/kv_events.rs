//! Follows one worker's KV events over ZMQ until it leaves the fleet.
//!
//! Engines number their batches. A number that was skipped is asked for again on the replay socket, until all of
//! it has come. Where the engine no longer has it, gives no answer, or sends what cannot be read, the index of this
//! worker starts anew: it then knows less than the worker holds, never more, and the estimate counts beside it. A count that starts anew
//! means that the engine did so too: it then holds nothing of what it held.
//! While a replay is read, what was evicted later is believed to be there: a router that has just started does
//! not call itself ready until then.

mod replay;

use super::resolve;
use crate::config::WorkerSpec;
use decision::fleet::prefix::events::decode;
use decision::fleet::{EventsBegin, Fleet};
use replay::{Replayed, parts};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::Instant;
use zeromq::{Socket, SocketRecv, SubSocket};

/// How often a quiet subscription looks whether the worker is still the same.
const LOOK_AROUND: Duration = Duration::from_millis(500);
/// For a connection, and for the first batch of an answer of the replay socket.
const PATIENCE: Duration = Duration::from_secs(10);
/// Batches of a replay that have been read and not applied, at most.
const READ_AHEAD: usize = 1024;

/// Subscribes whenever the worker is up. `unread` is dropped when what it published before has been read, or
/// there is nothing to read it from; the router waits for that until `ready_at`.
pub(super) async fn follow(
    fleet: Weak<Fleet>,
    spec: Arc<WorkerSpec>,
    endpoint: String,
    unread: Arc<()>,
    ready_at: Instant,
) {
    let mut unread = Some(unread);
    let mut last: Option<Follower<'_>> = None;
    loop {
        let incarnation = {
            let Some(fleet) = fleet.upgrade() else { return };
            if fleet.health(&spec).is_none() {
                return;
            }
            fleet.incarnation(&spec)
        };
        if let Some(incarnation) = incarnation {
            // The same engine goes on with its count, and holds what it held.
            let same = last.filter(|last| last.incarnation == incarnation);
            let mut follower = same.unwrap_or_else(|| Follower {
                fleet: Weak::clone(&fleet),
                spec: &spec,
                incarnation,
                next: 0,
                last_published: None,
                has_begun: false,
            });
            if let Err(error) = follower.run(&endpoint, &mut unread, ready_at).await {
                log::warn!("worker {}: KV events: {error}", spec.id);
            }
            last = Some(follower);
        }
        drop(unread.take());
        tokio::time::sleep(LOOK_AROUND).await;
    }
}

struct Follower<'a> {
    fleet: Weak<Fleet>,
    spec: &'a Arc<WorkerSpec>,
    incarnation: u64,
    /// Number of the batch that comes next.
    next: u64,
    /// Number of the last batch that came by itself, not as a replay.
    last_published: Option<u64>,
    /// What the index has of this worker is of this engine.
    has_begun: bool,
}

impl Follower<'_> {
    /// Runs until the worker goes down or comes back as another; drops `unread` once it has caught up.
    async fn run(
        &mut self,
        endpoint: &str,
        unread: &mut Option<Arc<()>>,
        ready_at: Instant,
    ) -> Result<(), String> {
        let is_waited_for = unread.is_some() && Instant::now() < ready_at;
        let address = match resolve::endpoint(endpoint).await {
            Ok(address) => address,
            Err(error) => {
                drop(unread.take());
                tokio::time::sleep(PATIENCE).await;
                return Err(error);
            }
        };
        let mut socket = SubSocket::new();
        let connect = socket.connect(&address);
        tokio::time::timeout(PATIENCE, connect)
            .await
            .map_err(|_| format!("{endpoint}: no connection"))?
            .map_err(|error| format!("{endpoint}: {error}"))?;
        socket
            .subscribe("")
            .await
            .map_err(|error| format!("{endpoint}: {error}"))?;
        self.catch_up(is_waited_for.then_some(ready_at)).await;
        drop(unread.take());
        while let Some(fleet) = self.current() {
            drop(fleet);
            let message = match tokio::time::timeout(LOOK_AROUND, socket.recv()).await {
                Err(_) => continue,
                Ok(message) => message.map_err(|error| format!("{endpoint}: {error}"))?,
            };
            let Some((number, payload)) = parts(&message) else {
                log::warn!(
                    "worker {}: KV events: a message of a wrong shape",
                    self.spec.id
                );
                self.begin(EventsBegin::Partial);
                continue;
            };
            if self.last_published.is_some_and(|last| number <= last) {
                // The count began anew, however far it has come by now.
                self.restart().await;
            }
            self.last_published = Some(number);
            if number < self.next {
                // Replayed already.
                continue;
            }
            if number > self.next {
                self.replay().await;
            }
            if number > self.next {
                self.begin(EventsBegin::Partial);
            }
            if number >= self.next {
                self.take(number, &payload);
            }
        }
        Ok(())
    }

    /// Reads what came before the subscription; says so where that takes longer than until `ready_at`.
    async fn catch_up(&mut self, ready_at: Option<Instant>) {
        let spec = self.spec;
        let mut reading = std::pin::pin!(async {
            match self.has_begun {
                // Of what was missed meanwhile.
                true => self.replay().await,
                false => self.restart().await,
            }
        });
        if let Some(ready_at) = ready_at {
            if tokio::time::timeout_at(ready_at, &mut reading)
                .await
                .is_ok()
            {
                return;
            }
            log::warn!(
                "worker {}: KV events: not all that it published before has been read yet; the router is \
                 waiting for it no longer, and until it has been read, what the worker evicted since may be \
                 believed to be cached",
                spec.id
            );
        }
        reading.await;
    }

    fn current(&self) -> Option<Arc<Fleet>> {
        let fleet = self.fleet.upgrade()?;
        (fleet.incarnation(self.spec) == Some(self.incarnation)).then_some(fleet)
    }

    fn begin(&self, begin: EventsBegin) {
        if let Some(fleet) = self.fleet.upgrade() {
            fleet.follow_kv_events(self.spec, self.spec.page_size, begin);
        }
    }

    /// Forgets everything and takes what the engine can replay.
    async fn restart(&mut self) {
        self.begin(EventsBegin::Whole);
        self.has_begun = true;
        self.next = 0;
        self.replay().await;
    }

    /// Applies what the engine still has from the next batch on; anew, if that is not all of it.
    async fn replay(&mut self) {
        let Some(endpoint) = &self.spec.kv_events_replay else {
            return;
        };
        let (sender, mut replayed) = mpsc::channel(READ_AHEAD);
        // What is not read at once is dropped by the engine, and applying takes longer than reading.
        let reading = tokio::spawn(replay::read(endpoint.clone(), self.next, sender));
        while let Some(part) = replayed.recv().await {
            match part {
                Replayed::Batch(number, payload) => self.take(number, &payload),
                Replayed::Lost { next } => {
                    self.begin(EventsBegin::Partial);
                    self.next = next;
                }
            }
            // Requests go between any two batches.
            tokio::task::yield_now().await;
        }
        if let Err(error) = reading.await.unwrap_or_else(|e| Err(e.to_string())) {
            log::warn!("worker {}: KV events: {error}", self.spec.id);
            self.begin(EventsBegin::Partial);
        }
    }

    fn take(&mut self, number: u64, payload: &[u8]) {
        self.next = number + 1;
        match decode(payload) {
            Ok(events) => {
                if let Some(fleet) = self.fleet.upgrade()
                    && !fleet.apply_kv_events(self.spec, &events)
                {
                    log::debug!("worker {}: KV events with unknown parents", self.spec.id);
                }
            }
            Err(error) => {
                log::warn!("worker {}: {error}", self.spec.id);
                // Whatever it told is missing, as in a gap.
                self.begin(EventsBegin::Partial);
            }
        }
    }
}
