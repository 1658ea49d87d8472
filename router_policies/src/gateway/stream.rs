//! Answers on their way to the client: counted, checked for completeness, and ended properly.

use super::admission::Permit;
use super::apis::Api;
use super::client::Client;
use super::sse::SseProgress;
use super::traces::RequestTrace;
use super::usage::StreamUsage;
use bytes::Bytes;
use decision::fleet::{Outcome, Reservation, Usage};
use http_body::Frame;
use hyper::body::Incoming;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::oneshot;

/// Holds a request's prefill half, which ends when this is dropped.
pub struct PrefillHalf(oneshot::Sender<()>);

/// How long a prefill half may go on after the answer's end.
const LINGER: Duration = Duration::from_secs(1);

impl PrefillHalf {
    pub fn spawn(half: impl Future<Output = ()> + Send + 'static) -> Self {
        let (sender, receiver) = oneshot::channel();
        // Boxed here: a task is copied several times on its way to the runtime.
        let half = Box::pin(half);
        tokio::spawn(async move {
            let over = async {
                if receiver.await.is_ok() {
                    tokio::time::sleep(LINGER).await;
                }
            };
            tokio::select! {
                () = half => {}
                () = over => {}
            }
        });
        Self(sender)
    }

    /// Gives it a moment to end by itself. One that is cut off closes its connection, and opening
    /// another costs more than the rest of a small request.
    pub fn linger(self) {
        // It may have ended.
        let _ = self.0.send(());
    }
}

/// What an answer's stream tells while it passes, and the reservation that it holds: given back once, with what
/// became of the answer.
pub(super) struct Counted {
    progress: SseProgress,
    reservation: Option<Reservation>,
    status: u16,
    api: Api,
    /// That have passed.
    events: u64,
    usage: StreamUsage,
    /// Ends with the answer.
    trace: Option<Box<RequestTrace>>,
}

impl Counted {
    pub fn new(
        api: Api,
        status: u16,
        mut reservation: Reservation,
        trace: Option<Box<RequestTrace>>,
    ) -> Self {
        reservation.streams();
        let usage = StreamUsage::of(api);
        Self {
            progress: SseProgress::ending_with(api.ends())
                .echoing(api != Api::Generate)
                .looking_into(usage.events()),
            reservation: Some(reservation),
            status,
            api,
            events: 0,
            usage,
            trace,
        }
    }

    pub fn count(&mut self, data: &[u8]) {
        let usage = &mut self.usage;
        let look = |event: &[u8]| usage.see(event);
        let events = self.progress.feed_and_look(data, look);
        self.events += events;
        let told = self.usage.feed(data);
        if let Some(reservation) = &mut self.reservation {
            // Before the first output is noted: what was cached tells what its prefill computed.
            reservation.report(told);
            reservation.output(events);
        }
    }

    /// Gives the reservation back and ends the trace, with what became of the answer.
    pub fn finish(&mut self, outcome: Outcome, message: Option<String>) {
        if let Some(trace) = self.trace.take() {
            trace.streamed(outcome, message.as_deref());
        }
        if let Some(reservation) = self.reservation.take() {
            reservation.finish(outcome, Some(self.status), message);
        }
    }

    /// The worker has said all that it had to say; whether that was an answer, its events tell.
    pub fn end(&mut self) {
        if let Some(reservation) = &mut self.reservation {
            reservation.report(Usage {
                output_tokens: self.usage.output_tokens(),
                ..Usage::default()
            });
            if self.progress.has_error() {
                let message = "an event of the worker's stream was an error".to_owned();
                self.finish(Outcome::WorkerError, Some(message));
            } else {
                self.finish(Outcome::Ok, None);
            }
        }
    }

    /// Whether an event has passed.
    pub fn has_begun(&self) -> bool {
        self.events > 0
    }

    /// Whether the client has all of it, or knows that no more comes.
    pub fn is_told(&self) -> bool {
        self.progress.is_done() || self.progress.has_error()
    }

    /// What is missing of a stream that has ended.
    pub fn missing(&self) -> Option<String> {
        let is_whole = self.progress.is_done_at_end() || self.progress.has_error();
        let end = self.api.end();
        (!is_whole).then(|| format!("the worker's stream ended before {end}"))
    }
}

/// An event stream from a worker to the client. It holds the reservation: when the client leaves, or
/// does not read and its request's time is over, this is dropped, and with it the connections to the
/// workers and the reservation.
pub struct Answer {
    first: Option<Bytes>,
    incoming: Incoming,
    counted: Counted,
    client: Arc<Client>,
    held: Held,
}

/// What lives as long as the answer.
pub(crate) struct Held {
    pub prefill: Option<PrefillHalf>,
    #[expect(dead_code, reason = "held for what dropping it does")]
    pub permit: Option<Permit>,
}

impl Answer {
    /// `first` has been read from `incoming` already.
    pub(super) fn new(
        first: Bytes,
        incoming: Incoming,
        counted: Counted,
        client: Arc<Client>,
        held: Held,
    ) -> Self {
        Self {
            first: Some(first),
            incoming,
            counted,
            client,
            held,
        }
    }

    /// Ends the stream with an event that says why.
    fn break_off(&mut self, outcome: Outcome, message: &str) -> Bytes {
        let counted = &mut self.counted;
        counted.finish(outcome, Some(message.to_owned()));
        let event = counted.api.error_event(outcome, message, counted.events);
        Bytes::from(format!("{}{event}", counted.progress.separator()))
    }

    fn end(&mut self) {
        self.counted.end();
        if let Some(prefill) = self.held.prefill.take() {
            prefill.linger();
        }
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if self.counted.is_told() {
            // It left without waiting for the connection's own end.
            self.end();
        } else if let Some(cut_off) = self.client.cut_off() {
            let (outcome, message) = cut_off.told();
            self.counted.finish(outcome, Some(message.to_owned()));
        }
    }
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
            this.counted.count(&first);
            return Poll::Ready(Some(Ok(Frame::data(first))));
        }
        if this.counted.reservation.is_none() {
            return Poll::Ready(None);
        }
        if let Some(cut_off) = this.client.cut_off() {
            let (outcome, message) = cut_off.told();
            let event = this.break_off(outcome, message);
            return Poll::Ready(Some(Ok(Frame::data(event))));
        }
        let fault = match Pin::new(&mut this.incoming).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                if let Some(data) = frame.data_ref() {
                    let data = data.clone();
                    this.counted.count(&data);
                }
                return Poll::Ready(Some(Ok(frame)));
            }
            Poll::Pending => return Poll::Pending,
            Poll::Ready(Some(Err(_))) if this.counted.is_told() => None,
            Poll::Ready(Some(Err(error))) => Some(format!("the worker's stream broke: {error}")),
            Poll::Ready(None) => this.counted.missing(),
        };
        let Some(fault) = fault else {
            // Nothing more comes, or what comes behind the end is not of this answer.
            this.end();
            return Poll::Ready(None);
        };
        let event = this.break_off(Outcome::WorkerError, &fault);
        Poll::Ready(Some(Ok(Frame::data(event))))
    }
}
