//! Request bodies on their way in: one copy into one buffer of the right size, and the buffers of large
//! bodies used again, because fresh memory costs more (a page fault each 4 KiB) than the copy itself.
//! All bodies together are bounded, and one whose client falls silent is given up.

use super::fault::SHUTTING_DOWN;
use bytes::{Bytes, BytesMut};
use http_body::Body;
use http_body_util::BodyExt;
use hyper::StatusCode;
use hyper::body::Incoming;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::time::Instant;

/// Smaller buffers are the allocator's business.
const MIN_KEPT_BYTES: usize = 128 << 10;
/// Larger ones are too rare to hold memory for.
const MAX_KEPT_BYTES: usize = 4 << 20;
const KEPT: usize = 16;
/// Bodies that are in one piece and this small are not worth counting.
const UNCOUNTED_BYTES: usize = 4 << 10;

/// A body that comes slower than this, on the whole, is given up: pieces that come just in time could
/// hold a buffer for as long as a request may take.
const MIN_BYTES_PER_S: f64 = 10_000.0;

/// Why a body was not taken.
pub(super) enum NotCollected {
    TooLarge,
    /// All bodies together would be more than is held at once.
    NoRoom,
    /// Nothing of it came for so long, or too little.
    Silent(Duration),
    /// The request's deadline came before its end.
    TimeIsOver,
    /// The router ends, and has waited for it for long enough.
    ShuttingDown,
    Broken(hyper::Error),
}

impl NotCollected {
    pub fn status(&self) -> (StatusCode, &'static str) {
        match self {
            Self::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error"),
            Self::NoRoom => (StatusCode::SERVICE_UNAVAILABLE, "overloaded"),
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
    held_bytes: Arc<AtomicUsize>,
    max_held_bytes: usize,
    patience: Duration,
}

/// A body's part of what all bodies may hold; given back when dropped.
pub(super) struct Budget {
    held_bytes: Arc<AtomicUsize>,
    bytes: usize,
}

impl Budget {
    /// Takes `bytes` more, if there is room.
    fn take(&mut self, bytes: usize, max_held_bytes: usize) -> Result<(), NotCollected> {
        let before = self.held_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.bytes += bytes;
        if before.saturating_add(bytes) > max_held_bytes {
            return Err(NotCollected::NoRoom);
        }
        Ok(())
    }
}

impl Drop for Budget {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.held_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        }
    }
}

impl Buffers {
    /// For bodies of at most `max_held_bytes` together, whose pieces come within `patience` of each
    /// other.
    pub fn new(max_held_bytes: usize, patience: Duration) -> Self {
        Self {
            kept: Mutex::default(),
            held_bytes: Arc::default(),
            max_held_bytes,
            patience,
        }
    }

    /// The whole body, of at most `limit` bytes, and what it takes of the budget, to be held as long as
    /// it. Where it comes in pieces, `on_more` gets what is there so far and the length that is
    /// announced, while the next piece is on its way.
    pub(super) async fn collect(
        &self,
        body: &mut Incoming,
        limit: usize,
        mut on_more: impl FnMut(&[u8], usize),
    ) -> Result<(Bytes, Budget), NotCollected> {
        let announced = body.size_hint();
        if announced.lower() > limit as u64 {
            return Err(NotCollected::TooLarge);
        }
        let announced = announced.exact().unwrap_or_default() as usize;
        let mut budget = Budget {
            held_bytes: Arc::clone(&self.held_bytes),
            bytes: 0,
        };
        let mut whole: Option<BytesMut> = None;
        let begun = Instant::now();
        loop {
            let got_bytes = whole.as_ref().map_or(0, BytesMut::len);
            let earned = Duration::from_secs_f64(got_bytes as f64 / MIN_BYTES_PER_S);
            let until = (begun + self.patience + earned).min(Instant::now() + self.patience);
            let frame = tokio::time::timeout_at(until, body.frame()).await;
            let Some(frame) = frame.map_err(|_| NotCollected::Silent(self.patience))? else {
                break;
            };
            let Ok(data) = frame.map_err(NotCollected::Broken)?.into_data() else {
                continue;
            };
            if whole.is_none() && data.len() == announced {
                if announced > UNCOUNTED_BYTES {
                    budget.take(announced, self.max_held_bytes)?;
                }
                return Ok((data, budget));
            }
            budget.take(data.len(), self.max_held_bytes)?;
            let buffer = whole.get_or_insert_with(|| self.take(announced));
            if buffer.len() + data.len() > limit {
                return Err(NotCollected::TooLarge);
            }
            buffer.extend_from_slice(&data);
            on_more(buffer, announced);
        }
        Ok((whole.unwrap_or_default().freeze(), budget))
    }

    fn take(&self, bytes: usize) -> BytesMut {
        if (MIN_KEPT_BYTES..=MAX_KEPT_BYTES).contains(&bytes) {
            let mut kept = self.kept.lock();
            if let Some(at) = kept.iter().position(|buffer| buffer.capacity() >= bytes) {
                return kept.swap_remove(at);
            }
        }
        // Beyond that, memory is taken as the bytes come, not as they are announced.
        BytesMut::with_capacity(bytes.min(MAX_KEPT_BYTES))
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
