//! Request bodies on their way in: one copy into one buffer of the right size, and the buffers of large
//! bodies used again, because fresh memory costs more (a page fault each 4 KiB) than the copy itself.

use bytes::{Bytes, BytesMut};
use http_body::Body;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use parking_lot::Mutex;

/// Smaller buffers are the allocator's business.
const MIN_KEPT_BYTES: usize = 128 << 10;
/// Larger ones are too rare to hold memory for.
const MAX_KEPT_BYTES: usize = 4 << 20;
const KEPT: usize = 16;

/// Why a body was not taken.
pub(super) enum NotCollected {
    TooLarge,
    Broken(hyper::Error),
}

/// Buffers of bodies that are done with.
#[derive(Default)]
pub(crate) struct Buffers(Mutex<Vec<BytesMut>>);

impl Buffers {
    /// The whole body, of at most `limit` bytes. Where it comes in pieces, `on_more` gets what is there
    /// so far and the length that is announced, while the next piece is on its way.
    pub(super) async fn collect(
        &self,
        mut body: Incoming,
        limit: usize,
        mut on_more: impl FnMut(&[u8], usize),
    ) -> Result<Bytes, NotCollected> {
        let announced = body.size_hint();
        if announced.lower() > limit as u64 {
            return Err(NotCollected::TooLarge);
        }
        let announced = announced.exact().unwrap_or_default() as usize;
        let mut whole: Option<BytesMut> = None;
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.map_err(NotCollected::Broken)?.into_data() else {
                continue;
            };
            if whole.is_none() && data.len() == announced {
                return Ok(data);
            }
            let buffer = whole.get_or_insert_with(|| self.take(announced));
            if buffer.len() + data.len() > limit {
                return Err(NotCollected::TooLarge);
            }
            buffer.extend_from_slice(&data);
            on_more(buffer, announced);
        }
        Ok(whole.unwrap_or_default().freeze())
    }

    fn take(&self, bytes: usize) -> BytesMut {
        if (MIN_KEPT_BYTES..=MAX_KEPT_BYTES).contains(&bytes) {
            let mut kept = self.0.lock();
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
            let mut kept = self.0.lock();
            if kept.len() == KEPT {
                kept.remove(0);
            }
            kept.push(buffer);
        }
    }
}
