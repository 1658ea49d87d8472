//! Clients of streams that hear nothing for a while: because their turn waits for room, or its prefill takes
//! long. Agents give up after some minutes of silence and come again. So their answer begins before there is
//! one, with what keeps a client of that API waiting ([`Waits`]), again and again, and goes on with the
//! worker's stream. What would have been an answer of another status is then an event.
//!
//! A request that is answered sooner passes through here and costs no timer: the one that its connection has
//! anyway ([`Client`]) says when it is silent for long.

use super::apis::{Api, Waits, responses};
use super::client::Client;
use super::fault::excerpt;
use super::headers::REQUEST_ID;
use super::stored::Stored;
use super::{Reply, sse};
use bytes::Bytes;
use http_body::{Body, Frame};
use http_body_util::Full;
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use hyper::{Response, StatusCode};
use serde_json::Value;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;
use tokio::time::{Instant, Sleep};

/// After so long without a byte a client hears that it waits, and then as often.
pub(super) const INTERVAL: Duration = Duration::from_secs(5);

/// What a request comes to.
pub(super) type Serving = Pin<Box<dyn Future<Output = Response<Reply>> + Send>>;

/// How an answer may begin before there is one.
#[derive(Clone, Debug)]
pub(crate) struct Opening {
    pub api: Api,
    pub request_id: Option<HeaderValue>,
    pub model: Option<String>,
    /// Where responses are, of a response: its client is told an id before there is one.
    pub stored: Option<Arc<Stored>>,
}

impl Opening {
    /// The id that the client of a response is told.
    pub fn response_id(&self) -> String {
        let id = self.request_id.as_ref().and_then(|id| id.to_str().ok());
        format!("resp_{}", id.unwrap_or_default())
    }
}

/// The answer that `serving` comes to, or one that begins before it and then goes on as it.
pub(super) async fn answer(client: &Client, mut serving: Serving) -> Response<Reply> {
    let answered = std::future::poll_fn(|cx| match serving.as_mut().poll(cx) {
        Poll::Ready(answer) => Poll::Ready(Ok(answer)),
        Poll::Pending => match client.begins_to_wait() {
            Some(opening) => Poll::Ready(Err(opening)),
            None => Poll::Pending,
        },
    });
    match answered.await {
        Ok(answer) => answer,
        Err(opening) => begin(opening, serving),
    }
}

fn begin(opening: Opening, serving: Serving) -> Response<Reply> {
    let request_id = opening.request_id.clone();
    let mut response = Response::new(Reply::Waiting(Box::new(Waiting::new(opening, serving))));
    let headers = response.headers_mut();
    let kind = HeaderValue::from_static("text/event-stream; charset=utf-8");
    headers.insert(CONTENT_TYPE, kind);
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    if let Some(id) = request_id {
        headers.insert(REQUEST_ID, id);
    }
    response
}

/// A stream that has begun before its answer. It holds the request: when the client leaves, this is dropped, and
/// with it the request's place in the queue or its connection to a worker.
pub(crate) struct Waiting {
    opening: Opening,
    state: State,
    /// Events that were said while it waited.
    said: u64,
}

enum State {
    Waits(Serving, Pin<Box<Sleep>>),
    Passes(Reply, Option<Renumbered>),
    Ends(Bytes),
    Over,
}

impl Waiting {
    fn new(opening: Opening, serving: Serving) -> Self {
        // The first is said at once.
        let timer = Box::pin(tokio::time::sleep(Duration::ZERO));
        Self {
            opening,
            state: State::Waits(serving, timer),
            said: 0,
        }
    }

    /// What keeps the client waiting now.
    fn event(&mut self) -> Bytes {
        let number = self.said;
        self.said += 1;
        match self.opening.api.shape().waits {
            Waits::InSilence => Bytes::new(),
            Waits::Hearing(event) => Bytes::from_static(event.as_bytes()),
            Waits::Numbered => Bytes::from(responses::waiting(&self.opening, number)),
        }
    }

    /// How it goes on with its answer.
    fn go_on(&self, answer: Response<Reply>) -> State {
        let (head, body) = answer.into_parts();
        let is_numbered = self.opening.api.shape().waits == Waits::Numbered;
        match body {
            Reply::Whole(body) => {
                let whole = whole(body);
                let event = match head.status.is_success() {
                    // A worker that was asked for a stream and sent none: its answer is one event.
                    true => [&b"data: "[..], &one_line(&whole), b"\n\n"].concat(),
                    false => {
                        let retry_after = head.headers.get(RETRY_AFTER);
                        self.failed(head.status, retry_after, &whole).into_bytes()
                    }
                };
                State::Ends(Bytes::from(event))
            }
            body => State::Passes(
                body,
                is_numbered.then(|| Renumbered::behind(&self.opening, self.said)),
            ),
        }
    }

    /// An answer of another status than 200, as an event of the API.
    fn failed(&self, status: StatusCode, retry_after: Option<&HeaderValue>, body: &[u8]) -> String {
        let api = self.opening.api;
        let said: Value = serde_json::from_slice(body).unwrap_or_default();
        // Engines have their errors' fields in the outer object, or in one below it.
        let error = said.get("error").filter(|error| error.is_object());
        let error = error.unwrap_or(&said);
        let message = error.get("message").and_then(Value::as_str);
        let message = message.map_or_else(|| excerpt(body), str::to_owned);
        if api.shape().waits == Waits::Numbered {
            let retry_after = retry_after.and_then(|value| value.to_str().ok());
            let code = error.get("code").and_then(Value::as_str);
            return responses::failed(
                &self.opening,
                self.said,
                (code, status, retry_after),
                &message,
            );
        }
        let is_of_api = said.get("error").is_some_and(Value::is_object)
            && (api != Api::Messages || said["type"] == "error");
        let told = match is_of_api {
            true => said,
            false => {
                let kind = error.get("type").and_then(Value::as_str);
                (api.shape().error)(kind.unwrap_or("worker_error"), status.as_u16(), &message)
            }
        };
        api.told_in_stream(&told)
    }
}

/// All of a body that is there already.
fn whole(mut body: Full<Bytes>) -> Bytes {
    let mut nobody = Context::from_waker(Waker::noop());
    match Pin::new(&mut body).poll_frame(&mut nobody) {
        Poll::Ready(Some(Ok(frame))) => frame.into_data().unwrap_or_default(),
        _ => Bytes::new(),
    }
}

/// JSON in one line: line ends stand between its parts alone, as those in strings are escaped.
fn one_line(json: &[u8]) -> Vec<u8> {
    let is_end = |byte: &u8| matches!(byte, b'\n' | b'\r');
    json.iter().copied().filter(|byte| !is_end(byte)).collect()
}

impl Body for Waiting {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = &mut *self;
        loop {
            match &mut this.state {
                State::Waits(serving, timer) => {
                    if let Poll::Ready(answer) = serving.as_mut().poll(cx) {
                        this.state = this.go_on(answer);
                        continue;
                    }
                    ready!(timer.as_mut().poll(cx));
                    timer.as_mut().reset(Instant::now() + INTERVAL);
                    return Poll::Ready(Some(Ok(Frame::data(this.event()))));
                }
                State::Passes(answer, None) => return Pin::new(answer).poll_frame(cx),
                State::Passes(answer, Some(numbers)) => {
                    let frame = match ready!(Pin::new(answer).poll_frame(cx)) {
                        Some(Ok(frame)) => frame,
                        Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                        None => {
                            let rest = numbers.rest();
                            this.state = State::Ends(rest);
                            continue;
                        }
                    };
                    let events = numbers.pass(frame.data_ref().map_or(&[], Bytes::as_ref));
                    if !events.is_empty() {
                        return Poll::Ready(Some(Ok(Frame::data(events))));
                    }
                }
                State::Ends(last) => {
                    let last = std::mem::take(last);
                    this.state = State::Over;
                    if !last.is_empty() {
                        return Poll::Ready(Some(Ok(Frame::data(last))));
                    }
                }
                State::Over => return Poll::Ready(None),
            }
        }
    }
}

/// The events of a worker's `/v1/responses` behind those that the router has said: numbered on, of a response of the
/// id that the client was told, and without a second one that says that there is a response.
#[derive(Debug)]
struct Renumbered {
    by: u64,
    told: String,
    /// Where it is noted which response that is; none once it is.
    stored: Option<Arc<Stored>>,
    /// The event that has not ended yet.
    begun: Vec<u8>,
}

impl Renumbered {
    fn behind(opening: &Opening, said: u64) -> Self {
        Self {
            by: said,
            told: opening.response_id(),
            stored: opening.stored.clone(),
            begun: Vec::new(),
        }
    }

    /// The events that end with `data`.
    fn pass(&mut self, data: &[u8]) -> Bytes {
        self.begun.extend_from_slice(data);
        let mut events = Vec::new();
        let mut at = 0;
        while let Some(bytes) = sse::event_bytes(&self.begun[at..]) {
            let event = &self.begun[at..at + bytes];
            let own = responses::renumber(event, self.by, &self.told, &mut events);
            if let Some(own) = own
                && let Some(stored) = self.stored.take()
            {
                stored.also_called(&self.told, &own);
            }
            at += bytes;
        }
        self.begun.drain(..at);
        events.into()
    }

    /// What has come of an event that does not end.
    fn rest(&mut self) -> Bytes {
        std::mem::take(&mut self.begun).into()
    }
}
