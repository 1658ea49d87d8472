//! Follows one worker's KV events over ZMQ until it leaves the fleet.
//!
//! Engines number their batches. A number that was skipped is asked for again on the replay socket, until all of
//! it has come. Where the engine no longer has it, gives no answer, or sends what cannot be read, the index of this
//! worker starts anew: it then knows less than the worker holds, never more, and the estimate counts beside it. A count that starts anew
//! means that the engine did so too: it then holds nothing of what it held.
//! While a replay is read, what was evicted later is believed to be there: a router that has just started does
//! not call itself ready until then.

use crate::config::WorkerSpec;
use crate::fleet::prefix::events::decode;
use crate::fleet::{EventsBegin, Fleet};
use bytes::Bytes;
use std::sync::{Arc, Weak};
use std::time::Duration;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

/// How often a quiet subscription looks whether the worker is still the same.
const LOOK_AROUND: Duration = Duration::from_millis(500);
/// For a connection, and for the first batch of a replay.
const REPLAY_PATIENCE: Duration = Duration::from_secs(10);
/// For each that follows: the rest has been dropped on its way.
const REPLAY_SILENCE: Duration = Duration::from_secs(1);
/// The batch number that ends a replay: −1.
const END_OF_REPLAY: u64 = u64::MAX;

/// Subscribes whenever the worker is up. `unread` is dropped when what it published before has been read, or
/// there is nothing to read it from.
pub(super) async fn follow(
    fleet: Weak<Fleet>,
    spec: Arc<WorkerSpec>,
    endpoint: String,
    unread: Arc<()>,
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
            if let Err(error) = follower.run(&endpoint, &mut unread).await {
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
    async fn run(&mut self, endpoint: &str, unread: &mut Option<Arc<()>>) -> Result<(), String> {
        let mut socket = SubSocket::new();
        let connect = socket.connect(endpoint);
        tokio::time::timeout(REPLAY_PATIENCE, connect)
            .await
            .map_err(|_| format!("{endpoint}: no connection"))?
            .map_err(|error| format!("{endpoint}: {error}"))?;
        socket
            .subscribe("")
            .await
            .map_err(|error| format!("{endpoint}: {error}"))?;
        match self.has_begun {
            // Of what was missed meanwhile.
            true => self.replay().await,
            false => self.restart().await,
        }
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
    ///
    /// Engines send all of it at once, and their sockets drop what is more than they queue (a thousand
    /// messages), the end of the replay among it. So what lacks is asked for again, as long as something comes.
    async fn replay(&mut self) {
        let Some(endpoint) = &self.spec.kv_events_replay else {
            return;
        };
        loop {
            let asked = self.next;
            let error = match self.replay_once(endpoint).await {
                Ok(true) => return,
                _ if self.next > asked => continue,
                Ok(false) => format!("{endpoint}: batch {asked} is missing from its replay"),
                Err(error) => error,
            };
            log::warn!("worker {}: KV events: {error}", self.spec.id);
            self.begin(EventsBegin::Partial);
            return;
        }
    }

    /// Asks for all batches from the next on and applies those that come before the first that is missing.
    /// True if none is.
    async fn replay_once(&mut self, endpoint: &str) -> Result<bool, String> {
        let fail = |error: zeromq::ZmqError| format!("{endpoint}: {error}");
        let silence = || format!("{endpoint}: no replay");
        // Whatever is still to come of an earlier answer goes to the socket that asked for it.
        let mut socket = DealerSocket::new();
        let mut ask = ZmqMessage::from(Bytes::new());
        ask.push_back(Bytes::copy_from_slice(&self.next.to_be_bytes()));
        let begin = async {
            socket.connect(endpoint).await.map_err(fail)?;
            socket.send(ask).await.map_err(fail)?;
            socket.recv().await.map_err(fail)
        };
        let mut message = tokio::time::timeout(REPLAY_PATIENCE, begin)
            .await
            .map_err(|_| silence())??;
        let mut is_first = true;
        let mut is_whole = true;
        loop {
            let Some((number, payload)) = parts(&message) else {
                return Err(format!("{endpoint}: a message of a wrong shape"));
            };
            if number == END_OF_REPLAY {
                return Ok(is_whole);
            }
            if is_first && number > self.next {
                // The engine no longer has what was before.
                self.begin(EventsBegin::Partial);
                self.next = number;
            }
            is_first = false;
            is_whole &= number <= self.next;
            if is_whole && number == self.next {
                self.take(number, &payload);
            }
            message = tokio::time::timeout(REPLAY_SILENCE, socket.recv())
                .await
                .map_err(|_| silence())?
                .map_err(fail)?;
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

/// The batch number and the payload: the last two frames, whatever delimiters or topics precede.
fn parts(message: &ZmqMessage) -> Option<(u64, Bytes)> {
    let payload = message.get(message.len().checked_sub(1)?)?.clone();
    let number = message.get(message.len().checked_sub(2)?)?;
    Some((
        u64::from_be_bytes(number.as_ref().try_into().ok()?),
        payload,
    ))
}
