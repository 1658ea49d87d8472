//! Follows one worker's KV events over ZMQ until it leaves the fleet.
//!
//! Engines number their batches. A number that was skipped is asked for again on the replay socket.
//! Where the engine no longer has it, the index of this worker starts anew: it then knows less than
//! the worker holds, never more, and the estimate counts beside it. A count that starts anew means that
//! the engine did so too: it then holds nothing of what it held.

use crate::config::WorkerSpec;
use crate::fleet::prefix::events::decode;
use crate::fleet::{EventsBegin, Fleet};
use bytes::Bytes;
use std::sync::{Arc, Weak};
use std::time::Duration;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

/// How often a quiet subscription looks whether the worker is still the same.
const LOOK_AROUND: Duration = Duration::from_millis(500);
const REPLAY_PATIENCE: Duration = Duration::from_secs(10);
/// The batch number that ends a replay: −1.
const END_OF_REPLAY: u64 = u64::MAX;

/// Subscribes whenever the worker is up.
pub(super) async fn follow(fleet: Weak<Fleet>, spec: Arc<WorkerSpec>, endpoint: String) {
    loop {
        let incarnation = {
            let Some(fleet) = fleet.upgrade() else { return };
            if fleet.health(&spec).is_none() {
                return;
            }
            fleet.incarnation(&spec)
        };
        if let Some(incarnation) = incarnation {
            let mut follower = Follower {
                fleet: Weak::clone(&fleet),
                spec: &spec,
                incarnation,
                next: 0,
                last_published: None,
            };
            if let Err(error) = follower.run(&endpoint).await {
                log::warn!("worker {}: KV events: {error}", spec.id);
            }
        }
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
}

impl Follower<'_> {
    /// Runs until the worker goes down or comes back as another.
    async fn run(&mut self, endpoint: &str) -> Result<(), String> {
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
        self.restart().await?;
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
                continue;
            };
            if self.last_published.is_some_and(|last| number <= last) {
                // The count began anew, however far it has come by now.
                self.restart().await?;
            }
            self.last_published = Some(number);
            if number < self.next {
                // Replayed already.
                continue;
            }
            if number > self.next {
                self.replay(self.next).await?;
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
    async fn restart(&mut self) -> Result<(), String> {
        self.begin(EventsBegin::Whole);
        self.next = 0;
        self.replay(0).await
    }

    /// Applies what the engine still has from batch `from` on; anew, if that is not all of it.
    async fn replay(&mut self, from: u64) -> Result<(), String> {
        let Some(endpoint) = &self.spec.kv_events_replay else {
            return Ok(());
        };
        let mut socket = DealerSocket::new();
        let exchange = async {
            let fail = |error: zeromq::ZmqError| format!("{endpoint}: {error}");
            socket.connect(endpoint).await.map_err(fail)?;
            let mut ask = ZmqMessage::from(Bytes::new());
            ask.push_back(Bytes::copy_from_slice(&from.to_be_bytes()));
            socket.send(ask).await.map_err(fail)?;
            let mut is_first = true;
            loop {
                let message = socket.recv().await.map_err(fail)?;
                let Some((number, payload)) = parts(&message) else {
                    return Err(format!("{endpoint}: a message of a wrong shape"));
                };
                if number == END_OF_REPLAY {
                    return Ok(());
                }
                if is_first && number > from {
                    self.begin(EventsBegin::Partial);
                }
                is_first = false;
                self.take(number, &payload);
            }
        };
        tokio::time::timeout(REPLAY_PATIENCE, exchange)
            .await
            .unwrap_or_else(|_| Err(format!("{endpoint}: no replay")))
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
            Err(error) => log::warn!("worker {}: {error}", self.spec.id),
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
