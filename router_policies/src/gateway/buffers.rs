//! Request bodies on their way in: one copy into one buffer of the right size, and the buffers of large
//! bodies used again, because fresh memory costs more (a page fault each 4 KiB) than the copy itself.
//! All bodies together are bounded, by what is taken for them and not by what they announce; so is each client's
//! part, and one whose client falls silent is given up.

use super::fault::SHUTTING_DOWN;
use bytes::{Bytes, BytesMut};
use decision::room::{Lack, Room};
use http_body::Body;
use http_body_util::BodyExt;
use hyper::StatusCode;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Smaller buffers are the allocator's business.
const MIN_KEPT_BYTES: usize = 128 << 10;
/// Larger ones are too rare to hold memory for.
const MAX_KEPT_BYTES: usize = 4 << 20;
const KEPT: usize = 16;
/// Bodies that are in one piece and this small are not worth counting.
const UNCOUNTED_BYTES: usize = 4 << 10;

/// A body takes no more than this until so much of it has come.
const BEGINNING_BYTES: usize = 64 << 10;

/// A body that comes slower than this, on the whole, is given up: pieces that come just in time could
/// hold a buffer for as long as a request may take. What comes faster earns time, up to that for one piece.
const MIN_BYTES_PER_S: f64 = 10_000.0;

/// Why a body was not taken.
pub(super) enum NotCollected {
    TooLarge,
    /// All bodies together would be more than is held at once.
    NoRoom,
    /// This one, or those of its client, would leave too little for others.
    NoShare,
    /// Nothing of it came for so long, or too little.
    Silent(Duration),
    /// The request's deadline came before its end.
    TimeIsOver,
    /// The router ends, and has waited for it for long enough.
    ShuttingDown,
    Broken(String),
}

impl NotCollected {
    pub fn status(&self) -> (StatusCode, &'static str) {
        match self {
            Self::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error"),
            Self::NoRoom | Self::NoShare => (StatusCode::SERVICE_UNAVAILABLE, "overloaded"),
            Self::Silent(_) | Self::TimeIsOver => (StatusCode::REQUEST_TIMEOUT, "timeout"),
            Self::ShuttingDown => (StatusCode::SERVICE_UNAVAILABLE, "shutting_down"),
            Self::Broken(_) => (StatusCode::BAD_REQUEST, "invalid_request_error"),
        }
    }

    pub fn message(&self, limit: usize) -> String {
        match self {
            Self::TooLarge => format!("body: expected at most {limit} bytes (max_body_bytes)"),
            Self::NoRoom => {
                "body: the router holds as many bytes of requests as it may (max_held_bytes)".into()
            }
            Self::NoShare => {
                "body: one client may hold no more of what the router holds of requests (max_held_bytes)"
                    .into()
            }
            Self::Silent(patience) => {
                let patience_s = patience.as_secs_f64();
                format!(
                    "body: nothing of it, or too little, came for {patience_s} s (body_timeout_s)"
                )
            }
            Self::TimeIsOver => "body: the request's time was over before its end".into(),
            Self::ShuttingDown => SHUTTING_DOWN.into(),
            Self::Broken(failure) => format!("body: {failure}"),
        }
    }
}

/// Buffers of bodies that are done with, and how much the others hold.
pub(crate) struct Buffers {
    kept: Mutex<Vec<BytesMut>>,
    held: Arc<Mutex<Room>>,
    max_held_bytes: usize,
    patience: Duration,
}

/// A body's part of what all bodies may hold; given back when dropped.
pub(super) struct Budget {
    held: Arc<Mutex<Room>>,
    /// None where nobody can tell whose it is.
    client: Option<u64>,
    bytes: usize,
}

impl Budget {
    /// Has the body hold `bytes` in all, if there is room. One body may hold three quarters of it, and all bodies
    /// of a client its share.
    fn hold(&mut self, bytes: usize, max_held_bytes: usize) -> Result<(), NotCollected> {
        let more = bytes.saturating_sub(self.bytes);
        if more == 0 {
            return Ok(());
        }
        let mut held = self.held.lock();
        let is_most = bytes > max_held_bytes - max_held_bytes / 4;
        match held.lack(self.client, more, max_held_bytes) {
            Some(Lack::OfRoom) => return Err(NotCollected::NoRoom),
            Some(Lack::OfShare) => return Err(NotCollected::NoShare),
            None if is_most => return Err(NotCollected::NoShare),
            None => held.take(self.client, more),
        }
        self.bytes = bytes;
        Ok(())
    }
}

impl Drop for Budget {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.held.lock().give_back(self.client, self.bytes);
        }
    }
}

/// How long the next piece of a body may take.
struct Pace {
    patience_s: f64,
    left_s: f64,
    then: Instant,
}

impl Pace {
    fn new(patience: Duration) -> Self {
        let patience_s = patience.as_secs_f64();
        Self {
            patience_s,
            left_s: patience_s,
            then: Instant::now(),
        }
    }

    fn until(&self) -> Instant {
        self.then + Duration::from_secs_f64(self.left_s)
    }

    fn came(&mut self, bytes: usize) {
        let now = Instant::now();
        let passed_s = (now - self.then).as_secs_f64();
        let left_s = self.left_s - passed_s + bytes as f64 / MIN_BYTES_PER_S;
        self.left_s = left_s.clamp(0.0, self.patience_s);
        self.then = now;
    }
}

impl Buffers {
    /// For bodies of at most `max_held_bytes` together, whose pieces come within `patience` of each
    /// other.
    pub fn new(max_held_bytes: usize, patience: Duration) -> Self {
        Self {
            kept: Mutex::default(),
            held: Arc::default(),
            max_held_bytes,
            patience,
        }
    }

    /// The whole body, of at most `limit` bytes, and what it takes of the budget and of its client's share, to be
    /// held as long as it. Where it comes in pieces, `on_more` gets what is there so far and the length that is
    /// announced, while the next piece is on its way.
    pub(super) async fn collect<B>(
        &self,
        client: Option<u64>,
        body: &mut B,
        limit: usize,
        mut on_more: impl FnMut(&[u8], usize),
    ) -> Result<(Bytes, Budget), NotCollected>
    where
        B: Body<Data = Bytes, Error: std::error::Error> + Unpin,
    {
        let announced = body.size_hint();
        if announced.lower() > limit as u64 {
            return Err(NotCollected::TooLarge);
        }
        let announced = announced.exact().unwrap_or_default() as usize;
        let mut budget = Budget {
            held: Arc::clone(&self.held),
            client,
            bytes: 0,
        };
        let broken = |failure: B::Error| NotCollected::Broken(failure.to_string());
        let mut whole: Option<BytesMut> = None;
        let mut pace = Pace::new(self.patience);
        loop {
            let frame = tokio::time::timeout_at(pace.until(), body.frame()).await;
            let Some(frame) = frame.map_err(|_| NotCollected::Silent(self.patience))? else {
                break;
            };
            let Ok(data) = frame.map_err(broken)?.into_data() else {
                continue;
            };
            pace.came(data.len());
            if whole.is_none() && data.len() == announced {
                if announced > UNCOUNTED_BYTES {
                    budget.hold(announced, self.max_held_bytes)?;
                }
                return Ok((data, budget));
            }
            let (got, room) = whole
                .as_ref()
                .map_or((0, 0), |buffer| (buffer.len(), buffer.capacity()));
            let needed = got + data.len();
            if needed > limit {
                return Err(NotCollected::TooLarge);
            }
            budget.hold(
                needed.max(BEGINNING_BYTES.min(announced)),
                self.max_held_bytes,
            )?;
            if needed > room {
                let mut larger = self.take(room_for(needed, announced));
                if let Some(before) = whole.take() {
                    larger.extend_from_slice(&before);
                }
                whole = Some(larger);
            }
            let buffer = whole.get_or_insert_default();
            buffer.extend_from_slice(&data);
            on_more(buffer, announced);
        }
        Ok((whole.unwrap_or_default().freeze(), budget))
    }

    /// Room for what is no body yet, such as a message that brings one.
    pub(super) fn hold(&self, bytes: usize) -> Result<Budget, NotCollected> {
        let mut budget = Budget {
            held: Arc::clone(&self.held),
            client: None,
            bytes: 0,
        };
        budget.hold(bytes, self.max_held_bytes)?;
        Ok(budget)
    }

    fn take(&self, bytes: usize) -> BytesMut {
        if (MIN_KEPT_BYTES..=MAX_KEPT_BYTES).contains(&bytes) {
            let mut kept = self.kept.lock();
            if let Some(at) = kept.iter().position(|buffer| buffer.capacity() >= bytes) {
                return kept.swap_remove(at);
            }
        }
        BytesMut::with_capacity(bytes)
    }

    /// Keeps the body's buffer for another, if nothing else uses it any more.
    pub(super) fn give_back(&self, body: Bytes) {
        let Ok(mut buffer) = body.try_into_mut() else {
            return;
        };
        buffer.clear();
        if (MIN_KEPT_BYTES..=MAX_KEPT_BYTES).contains(&buffer.capacity()) {
            let mut kept = self.kept.lock();
            if kept.len() == KEPT {
                kept.remove(0);
            }
            kept.push(buffer);
        }
    }
}

/// How much memory to take for a body of which `needed` bytes are there: what a client announces counts once it
/// sends, and nothing is copied often.
fn room_for(needed: usize, announced: usize) -> usize {
    let most = match needed {
        0..=BEGINNING_BYTES => BEGINNING_BYTES,
        _ => (8 * needed).min(MAX_KEPT_BYTES).max(2 * needed),
    };
    match announced {
        // Not said.
        0 => needed.next_power_of_two(),
        _ if needed > BEGINNING_BYTES && announced <= 2 * most => announced.max(needed),
        _ => announced.min(most).max(needed),
    }
}
