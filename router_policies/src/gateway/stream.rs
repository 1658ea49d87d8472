//! Answers on their way to the client: counted, checked for completeness, and ended properly.

use super::admission::Permit;
use crate::fleet::{Outcome, Reservation, Usage};
use bytes::Bytes;
use http_body::Frame;
use hyper::body::Incoming;
use smallvec::SmallVec;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::task::AbortHandle;
use tokio::time::Sleep;

/// Follows a server-sent event stream without parsing what is in it: counts events that carry data,
/// and remembers whether the last one was `[DONE]`. However the stream is cut, the count is the same.
#[derive(Debug, Default)]
pub struct SseProgress {
    /// The beginning of the line that has not ended yet, and its length.
    line: SmallVec<[u8; LINE_BYTES]>,
    line_bytes: usize,
    /// The event that has not ended yet has a line of data.
    has_data: bool,
    last_is_done: bool,
}

/// As much of a line as is looked at.
const LINE_BYTES: usize = 16;

impl SseProgress {
    /// Takes the next bytes; returns the number of events, other than `[DONE]`, that they end.
    pub fn feed(&mut self, data: &[u8]) -> u64 {
        let mut events = 0;
        let mut begin = 0;
        for end in memchr::memchr_iter(b'\n', data) {
            self.extend_line(&data[begin..end]);
            events += u64::from(self.end_line());
            begin = end + 1;
        }
        self.extend_line(&data[begin..]);
        events
    }

    fn extend_line(&mut self, bytes: &[u8]) {
        let room = LINE_BYTES - self.line.len();
        self.line.extend_from_slice(&bytes[..bytes.len().min(room)]);
        self.line_bytes += bytes.len();
    }

    /// Whether the line ends an event other than `[DONE]`.
    fn end_line(&mut self) -> bool {
        let is_whole = self.line_bytes <= LINE_BYTES;
        let is_empty = is_whole && matches!(self.line.as_slice(), b"" | b"\r");
        if !is_empty && self.line.starts_with(b"data:") {
            self.has_data = true;
            self.last_is_done = is_whole && self.line[5..].trim_ascii() == b"[DONE]";
        }
        self.line.clear();
        self.line_bytes = 0;
        is_empty && std::mem::take(&mut self.has_data) && !self.last_is_done
    }

    /// Whether the stream's last event was `data: [DONE]`.
    pub fn is_done(&self) -> bool {
        self.last_is_done && !self.line.starts_with(b"data:")
    }
}

/// Aborts a task when dropped.
pub struct AbortOnDrop(pub AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// An event stream from a worker to the client. It holds the reservation: when the client leaves,
/// hyper drops this, and with it the connections to the workers and the reservation.
pub struct Answer {
    first: Option<Bytes>,
    incoming: Incoming,
    progress: SseProgress,
    reservation: Option<Reservation>,
    status: u16,
    deadline: Pin<Box<Sleep>>,
    usage_known: bool,
    _held: Held,
}

/// What lives as long as the answer.
#[expect(dead_code, reason = "held for what dropping it does")]
pub(crate) struct Held {
    pub prefill: Option<AbortOnDrop>,
    pub permit: Permit,
}

/// What an engine says of prompt and cached tokens, found without parsing: engines escape quotes in
/// text, so the keys cannot come from the model.
pub(super) fn usage_in(data: &[u8]) -> Option<Usage> {
    let number = |key: &[u8]| -> Option<u64> {
        let at = memchr::memmem::find(data, key)? + key.len();
        let rest = data[at..].trim_ascii_start();
        let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        std::str::from_utf8(&rest[..digits]).ok()?.parse().ok()
    };
    let prompt_tokens = number(b"\"prompt_tokens\":");
    prompt_tokens?;
    Some(Usage {
        prompt_tokens,
        cached_tokens: number(b"\"cached_tokens\":"),
    })
}

impl Answer {
    /// `first` has been read from `incoming` already.
    pub fn new(
        first: Bytes,
        incoming: Incoming,
        reservation: Reservation,
        status: u16,
        deadline: Sleep,
        held: Held,
    ) -> Self {
        Self {
            first: Some(first),
            incoming,
            progress: SseProgress::default(),
            reservation: Some(reservation),
            status,
            deadline: Box::pin(deadline),
            usage_known: false,
            _held: held,
        }
    }

    fn count(&mut self, data: &[u8]) {
        let events = self.progress.feed(data);
        if let Some(reservation) = &mut self.reservation {
            reservation.output(events);
            if !self.usage_known {
                if let Some(usage) = usage_in(data) {
                    reservation.report(usage);
                    self.usage_known = true;
                }
            }
        }
    }

    /// Ends the stream with an event that says why.
    fn break_off(&mut self, outcome: Outcome, message: &str) -> Bytes {
        if let Some(reservation) = self.reservation.take() {
            reservation.finish(outcome, Some(self.status), Some(message.to_owned()));
        }
        error_event(outcome, message)
    }
}

/// The event by which a stream ends that cannot go on.
fn error_event(outcome: Outcome, message: &str) -> Bytes {
    let (kind, code) = match outcome {
        Outcome::Timeout => ("timeout", 504),
        _ => ("worker_error", 502),
    };
    let error = serde_json::json!({"error": {"message": message, "type": kind, "code": code}});
    Bytes::from(format!("data: {error}\n\n"))
}

impl http_body::Body for Answer {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = &mut *self;
        if let Some(first) = this.first.take() {
            this.count(&first);
            return Poll::Ready(Some(Ok(Frame::data(first))));
        }
        if this.reservation.is_none() {
            return Poll::Ready(None);
        }
        let event = match Pin::new(&mut this.incoming).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                if let Some(data) = frame.data_ref() {
                    let data = data.clone();
                    this.count(&data);
                }
                return Poll::Ready(Some(Ok(frame)));
            }
            Poll::Ready(None) if this.progress.is_done() => {
                if let Some(reservation) = this.reservation.take() {
                    reservation.finish(Outcome::Ok, Some(this.status), None);
                }
                return Poll::Ready(None);
            }
            Poll::Ready(None) => this.break_off(
                Outcome::WorkerError,
                "the worker's stream ended before [DONE]",
            ),
            Poll::Ready(Some(Err(error))) => this.break_off(
                Outcome::WorkerError,
                &format!("the worker's stream broke: {error}"),
            ),
            Poll::Pending => {
                if this.deadline.as_mut().poll(cx).is_pending() {
                    return Poll::Pending;
                }
                this.break_off(Outcome::Timeout, "the request's time is over")
            }
        };
        Poll::Ready(Some(Ok(Frame::data(event))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn usage_is_found_in_both_dialects() {
        let usage = |prompt, cached| {
            Some(Usage {
                prompt_tokens: Some(prompt),
                cached_tokens: cached,
            })
        };
        let sglang = br#"data: {"text":"a","meta_info":{"prompt_tokens":12,"cached_tokens":8}}"#;
        assert_eq!(usage_in(sglang), usage(12, Some(8)));
        let openai = br#"{"usage": {"prompt_tokens": 12, "prompt_tokens_details": null}}"#;
        assert_eq!(usage_in(openai), usage(12, None));
        assert_eq!(usage_in(br#"{"text":"\"prompt_tokens\":5"}"#), None);
    }

    proptest! {
        #[test]
        fn events_are_counted_however_the_stream_is_cut(
            events in 1usize..20, cuts in proptest::collection::vec(1usize..40, 1..30),
        ) {
            let mut text: Vec<u8> = (0..events)
                .flat_map(|i| format!("data: {{\"text\": \"{i}\"}}\n\n").into_bytes())
                .collect();
            text.extend_from_slice(b"data: [DONE]\n\n");
            let mut progress = SseProgress::default();
            let (mut counted, mut rest) = (0, &text[..]);
            for cut in cuts.iter().cycle() {
                let (head, tail) = rest.split_at((*cut).min(rest.len()));
                counted += progress.feed(head);
                rest = tail;
                if rest.is_empty() {
                    break;
                }
                prop_assert!(!progress.is_done() || rest.trim_ascii().is_empty());
            }
            prop_assert_eq!(counted, events as u64);
            prop_assert!(progress.is_done());
        }

        #[test]
        fn no_bytes_make_it_panic(
            chunks in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..30), 0..10),
        ) {
            let mut progress = SseProgress::default();
            for chunk in chunks {
                progress.feed(&chunk);
            }
            progress.is_done();
        }
    }
}
