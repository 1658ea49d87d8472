//! The endpoint picker: gateways that speak Envoy's external processing (ext_proc) ask here where a request goes, as
//! the Gateway API Inference Extension has it (endpoint picker protocol 1.0.0).
//!
//! One gRPC stream is one request. Its headers and body come in; the worker's address goes out, and the body as the
//! worker gets it. A wait for room is an answer that has not come yet. What the worker answers passes here too, in
//! full, and is counted. The stream holds the reservation: however it ends, that is given back, once.

pub mod grpc;
pub mod messages;
mod parts;
mod subset;

use super::admission::{NotAdmitted, Permit};
use super::apis::Api;
use super::buffers::{Budget, NotCollected};
use super::dispatch::{self, Arrived};
use super::exchange::spliced;
use super::fault::{SHUTTING_DOWN, TIME_IS_OVER, excerpt, outcome_of};
use super::splice::Pieces;
use super::stream::Counted;
use super::waiting::{self, NotPlaced, retried_after};
use super::{Gateway, HEADER_TIMEOUT, Reply, admin, error, error_of, headers, keys};
use super::{client, not_allowed, passthrough};
use crate::config::WorkerSpec;
use bytes::Bytes;
use decision::fleet::{Outcome, Reservation};
use grpc::{Code, Messages, Sender, Sent, Status, Unread};
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use hyper::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::graceful::Watcher;
use messages::{BodyMode, ProcessingRequest, Request as Part};
use parts::{Change, Head};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use subset::Subset;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::Instant;

/// What a gateway's connection may have under way of what it sends: none of its streams is to wait for another.
const WINDOW_BYTES: u32 = 16 << 20;
/// A gateway that is gone without a word is asked so often, and given up after as long again.
const PING: Duration = Duration::from_secs(20);
/// A message has no more than this beside a body.
const HEADERS_BYTES: usize = 1 << 20;
/// As much of an answer in one piece is read for what it counts.
const MAX_ANSWER_BYTES: usize = super::sse::MAX_KEPT_BYTES;
/// Messages that a gateway may send before the last is answered.
const MAX_KEPT: usize = 16;

/// Serves the streams of one gateway's connection.
pub(super) async fn serve_connection<S>(gateway: Arc<Gateway>, socket: S, watcher: Watcher)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let config = &gateway.config;
    // Beyond those that run and wait, further ones are to be told so.
    let streams = 2 * config.max_inflight.saturating_add(config.max_queued);
    let streams = u32::try_from(streams).unwrap_or(u32::MAX);
    let service = service_fn(move |request| {
        let response = answer(&gateway, request);
        async move { Ok::<_, Infallible>(response) }
    });
    let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .max_concurrent_streams(streams)
        .initial_connection_window_size(WINDOW_BYTES)
        .keep_alive_interval(PING)
        .keep_alive_timeout(PING)
        .serve_connection(TokioIo::new(socket), service);
    if let Err(error) = watcher.watch(connection).await {
        log::debug!("gateway connection: {error}");
    }
}

/// Begins to answer a call.
fn answer(gateway: &Arc<Gateway>, request: Request<Incoming>) -> Response<Sent> {
    let grpc = HeaderValue::from_static("application/grpc");
    if request.uri().path() != messages::PATH {
        let status = Status::new(Code::Unimplemented, "expected a call of ext_proc's Process");
        let mut response = Response::new(Sent::nothing());
        *response.headers_mut() = status.headers();
        response.headers_mut().insert(CONTENT_TYPE, grpc);
        return response;
    }
    let longest = Duration::from_secs_f64(gateway.config.request_timeout_s) + client::LAST_WORDS;
    let (sender, sent) = grpc::stream();
    let mut response = Response::new(sent);
    response.headers_mut().insert(CONTENT_TYPE, grpc);
    let most = gateway.config.max_body_bytes.saturating_add(HEADERS_BYTES);
    let mut stream = Stream {
        gateway: Arc::clone(gateway),
        messages: Messages::new(request.into_body(), most),
        kept: VecDeque::new(),
    };
    tokio::spawn(async move {
        // Boxed here: a task is copied several times on its way to the runtime.
        let serving = Box::pin(serve(&mut stream, &sender));
        let status = tokio::select! {
            biased;
            // What the stream holds is dropped.
            () = sender.left() => return,
            status = serving => status,
            // Of a gateway that does not take what it is sent.
            () = tokio::time::sleep(longest) => {
                Status::new(Code::DeadlineExceeded, TIME_IS_OVER)
            }
        };
        sender.end(status).await;
    });
    response
}

/// Why a stream ends before its request has been answered.
enum Stop {
    /// The gateway has given it up: its client left, or it is gone itself.
    Left,
    /// The client is told this.
    Refused(Box<Response<Reply>>),
    /// The gateway is.
    Failed(Status),
}

impl Stop {
    fn failed(code: Code, message: impl Into<String>) -> Self {
        Self::Failed(Status::new(code, message))
    }
}

impl From<grpc::Left> for Stop {
    fn from(_: grpc::Left) -> Self {
        Self::Left
    }
}

impl From<Box<Response<Reply>>> for Stop {
    fn from(refusal: Box<Response<Reply>>) -> Self {
        Self::Refused(refusal)
    }
}

impl From<Response<Reply>> for Stop {
    fn from(refusal: Response<Reply>) -> Self {
        Self::Refused(Box::new(refusal))
    }
}

impl From<Unread<NotCollected>> for Stop {
    fn from(unread: Unread<NotCollected>) -> Self {
        match unread {
            Unread::Gone => Self::Left,
            Unread::TooLarge => Self::failed(Code::ResourceExhausted, "a message is too large"),
            Unread::NoRoom(_) => Self::failed(Code::ResourceExhausted, "no room for a message"),
            Unread::Malformed(what) => {
                Self::failed(Code::InvalidArgument, format!("a message: {what}"))
            }
        }
    }
}

/// What comes from the gateway.
struct Stream {
    gateway: Arc<Gateway>,
    messages: Messages<Incoming, Budget>,
    /// Came while something else was waited for.
    kept: VecDeque<ProcessingRequest>,
}

impl Stream {
    fn poll_next(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<ProcessingRequest>, Unread<NotCollected>>> {
        if let Some(kept) = self.kept.pop_front() {
            return Poll::Ready(Ok(Some(kept)));
        }
        let buffers = &self.gateway.buffers;
        self.messages.poll_next(cx, |bytes| buffers.hold(bytes))
    }

    async fn next(&mut self) -> Result<Option<ProcessingRequest>, Unread<NotCollected>> {
        std::future::poll_fn(|cx| self.poll_next(cx)).await
    }

    /// What `work` comes to, unless the gateway gives the stream up before.
    async fn unless_left<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Stop> {
        let (buffers, messages) = (&self.gateway.buffers, &mut self.messages);
        let kept = &mut self.kept;
        let left = async {
            let hold = |bytes| buffers.hold(bytes);
            while kept.len() < MAX_KEPT {
                match std::future::poll_fn(|cx| messages.poll_next(cx, hold)).await {
                    Ok(Some(message)) => kept.push_back(message),
                    Ok(None) | Err(_) => break,
                }
            }
        };
        tokio::select! {
            biased;
            done = work => Ok(done),
            () = left => Err(Stop::Left),
        }
    }
}

/// One request, from its headers to its answer's end.
async fn serve(stream: &mut Stream, out: &Sender) -> Status {
    match begin(stream, out).await {
        Ok(()) | Err(Stop::Left) => Status::OK,
        Err(Stop::Failed(status)) => status,
        Err(Stop::Refused(response)) => {
            // Where nobody is left, nobody hears it.
            let _ = out.send(&parts::immediate(*response).await).await;
            Status::OK
        }
    }
}

/// What all requests have.
struct Asking {
    head: Head,
    request_mode: BodyMode,
    response_mode: BodyMode,
    subset: Subset,
    arrived: Instant,
    deadline: Instant,
    /// The body ended with trailers.
    has_trailers: bool,
}

async fn begin(stream: &mut Stream, out: &Sender) -> Result<(), Stop> {
    let gateway = Arc::clone(&stream.gateway);
    let received_s = gateway.fleet.now_s();
    let first = tokio::time::timeout(HEADER_TIMEOUT, stream.next()).await;
    let Some(first) = first.map_err(|_| Stop::Left)?? else {
        return Err(Stop::Left);
    };
    let Some(Part::RequestHeaders(head)) = first.request else {
        let message = "expected the request's headers first (request_header_mode: SEND)";
        return Err(Stop::failed(Code::InvalidArgument, message));
    };
    let arrived = Instant::now();
    // As the protocol's gateways are configured.
    let full_duplex = messages::ProtocolConfiguration {
        request_body_mode: BodyMode::FullDuplexStreamed as i32,
        response_body_mode: BodyMode::FullDuplexStreamed as i32,
    };
    let modes = first.protocol_config.unwrap_or(full_duplex);
    let head = Head::of(head).map_err(|what| Stop::failed(Code::InvalidArgument, what))?;
    let mut asking = Asking {
        head,
        request_mode: modes.request_body_mode(),
        response_mode: modes.response_body_mode(),
        subset: Subset::of(first.metadata_context.as_ref()),
        arrived,
        deadline: arrived + Duration::from_secs_f64(gateway.config.request_timeout_s),
        has_trailers: false,
    };
    let head = &asking.head;
    let path = head.path().to_owned();
    if head.headers.contains_key(&headers::FROM_ROUTER) {
        let message = "a router is no worker: this request came from one";
        return Err(error(StatusCode::LOOP_DETECTED, "loop_detected", message).into());
    }
    let api = Api::at(&path);
    let reaches_model = api.is_some() || passthrough::is_passed_on(&path);
    if reaches_model
        && let Some((status, kind, message)) =
            gateway.keys.refusal(&head.headers, keys::Wants::Model)
    {
        gateway.metrics.refused(status);
        return Err(match api {
            Some(api) => error_of(api, status, kind, message).into(),
            None => passthrough::refusal(&path, status, kind, message).into(),
        });
    }
    match (&head.method, api) {
        (&Method::POST, Some(api)) => generate(stream, out, &mut asking, api, received_s).await,
        (&Method::POST, None) if reaches_model => pass_on(stream, out, &mut asking, &path).await,
        _ if reaches_model => Err(not_allowed("POST").into()),
        _ if admin::tells_of_models(&path) => {
            let parts = head.as_parts();
            let client = client::Client::default();
            let mut no_body = None;
            let answer = admin::answer(&gateway, &client, &parts, &mut no_body);
            Err(stream.unless_left(answer).await?.into())
        }
        _ => {
            let message = format!("{path}: no path of the APIs that reach a model");
            Err(error(StatusCode::NOT_FOUND, "not_found", &message).into())
        }
    }
}

/// A generation request: decides where it goes, and counts its answer.
async fn generate(
    stream: &mut Stream,
    out: &Sender,
    asking: &mut Asking,
    api: Api,
    received_s: f64,
) -> Result<(), Stop> {
    let gateway = Arc::clone(&stream.gateway);
    let config = &gateway.config;
    if let Some(refusal) = dispatch::encoded(&gateway, api, &asking.head.headers) {
        return Err(refusal.into());
    }
    let owner = gateway
        .keys
        .owner(gateway.keys.tenant(&asking.head.headers), None);
    let mut scanner = dispatch::scanner_of(&gateway, api);
    let more = |begin: &[u8], bytes| scanner.scan_ahead(begin, bytes);
    let (bytes, budget) = match body(stream, out, asking, owner, more).await? {
        Ok(collected) => collected,
        Err(failure) => return Err(dispatch::uncollected(&gateway, api, &failure).into()),
    };
    let headers = &asking.head.headers;
    let Arrived {
        bytes,
        scanned,
        mut placement,
        own_fields,
    } = dispatch::read(&gateway, api, headers, bytes, scanner, received_s)?;
    let patience_s = config
        .picker
        .as_ref()
        .map_or(0.0, |picker| picker.patience_s);
    let until = asking.arrived + Duration::from_secs_f64(patience_s);
    let until = until.min(asking.deadline);
    let is_impatient = || until < asking.deadline && Instant::now() >= until;
    let impatient = || {
        let status = StatusCode::TOO_MANY_REQUESTS;
        let message =
            "the request waited for room as long as a gateway lets it (picker.patience_s)";
        Stop::from(dispatch::refuse(
            &gateway,
            api,
            (status, "overloaded"),
            message,
        ))
    };
    let queue_patience = Duration::from_secs_f64(config.queue_timeout_s);
    let turn = gateway.admission.enter(owner, queue_patience, until);
    let permit = match stream.unless_left(turn).await? {
        Ok(permit) => permit,
        Err(NotAdmitted::TimeIsOver) if is_impatient() => return Err(impatient()),
        Err(refusal) => return Err(dispatch::not_admitted(&gateway, api, refusal).into()),
    };
    let completed = dispatch::complete(
        &gateway,
        api,
        (&bytes, &scanned),
        &mut placement,
        owner,
        until,
    );
    stream.unless_left(completed).await??;
    let mut exclude = dispatch::unable(&gateway, &scanned).await?;
    exclude.extend(asking.subset.others(&gateway).await);
    let mut permit = Some(permit);
    let (reservation, to) = loop {
        let (held, deadline) = (Some(&mut permit), asking.deadline);
        let placed = waiting::place(&gateway, &placement, &exclude, held, deadline);
        // As if its client had left: where it asks again, it has its place in the queue.
        let placed = tokio::time::timeout_at(until, placed);
        let placed = stream.unless_left(placed).await?;
        let reservation = match placed.unwrap_or(Err(NotPlaced::TimeIsOver)) {
            Ok(reservation) => reservation,
            Err(NotPlaced::TimeIsOver) if is_impatient() => return Err(impatient()),
            Err(not_placed) => {
                let request = (&scanned, &placement);
                return Err(dispatch::unplaced(&gateway, api, request, &not_placed).into());
            }
        };
        match asking.subset.addresses(&reservation).await {
            Ok(to) => break (reservation, to),
            Err((worker, message)) => {
                log::warn!("worker {worker}: {message}");
                reservation.finish(Outcome::RouterError, None, Some(message));
                exclude.push(worker);
            }
        }
    };
    let answering = Arc::clone(reservation.answering());
    let fields = gateway.overrides(&scanned, answering.engine);
    let pieces = spliced(&bytes, &scanned, &own_fields, fields.join(","));
    let target = dispatch::target_of(api, &asking.head.uri);
    let change = Change {
        target: Some(target),
        to,
        headers: to_worker(&gateway, &asking.head, &placement.request_id, &answering),
        is_changed: pieces.bytes() != bytes.len(),
    };
    send(out, asking, &change, pieces).await?;
    gateway.buffers.give_back(bytes);
    drop(budget);
    let answer = Answer::Expected(api, reservation);
    follow(stream, out, asking, answer, &answering, permit).await
}

/// A question that any worker answers: see [`passthrough`].
async fn pass_on(
    stream: &mut Stream,
    out: &Sender,
    asking: &mut Asking,
    path: &str,
) -> Result<(), Stop> {
    let gateway = Arc::clone(&stream.gateway);
    let refuse = |status: StatusCode, kind: &str, message: &str| {
        gateway.metrics.refused(status);
        passthrough::refusal(path, status, kind, message)
    };
    let owner = gateway
        .keys
        .owner(gateway.keys.tenant(&asking.head.headers), None);
    let (bytes, budget) = match body(stream, out, asking, owner, |_, _| {}).await? {
        Ok(collected) => collected,
        Err(failure) => {
            let (status, kind) = failure.status();
            let message = failure.message(gateway.config.max_body_bytes);
            return Err(refuse(status, kind, &message).into());
        }
    };
    let patience = Duration::from_secs_f64(gateway.config.queue_timeout_s);
    let turn = gateway.admission.enter(owner, patience, asking.deadline);
    let permit = match stream.unless_left(turn).await? {
        Ok(permit) => permit,
        Err(refusal) => {
            let (status, kind, message) = refusal.told();
            let response = refuse(status, kind, message);
            return Err(retried_after(response, refusal.retry_after_s()).into());
        }
    };
    let (workers, pieces) = passthrough::candidates_of(&gateway, &bytes);
    let Some((worker, address)) = asking.subset.first(workers).await else {
        let message = "no worker can take the request now";
        let status = StatusCode::SERVICE_UNAVAILABLE;
        return Err(refuse(status, "no_candidates", message).into());
    };
    let _asked = gateway.asked.begin(&worker.id);
    let request_id = super::session::request_id(&asking.head.headers);
    let change = Change {
        target: None,
        to: (address, None),
        headers: to_worker(&gateway, &asking.head, &request_id, &worker),
        is_changed: pieces.bytes() != bytes.len(),
    };
    send(out, asking, &change, pieces).await?;
    drop((bytes, budget));
    follow(
        stream,
        out,
        asking,
        Answer::Uncounted,
        &worker,
        Some(permit),
    )
    .await
}

/// A request's headers as the worker gets them.
fn to_worker(
    gateway: &Gateway,
    head: &Head,
    request_id: &str,
    worker: &WorkerSpec,
) -> hyper::HeaderMap {
    let mut headers = gateway.forwarded(head.headers.clone(), request_id);
    super::authorise(&mut headers, worker);
    headers
}

/// A request's body on its way in.
struct RequestBody<'a> {
    stream: &'a mut Stream,
    announced: Option<u64>,
    has_ended: bool,
    has_trailers: bool,
    /// Why it broke.
    failure: Option<NotCollected>,
}

/// It broke; see [`RequestBody::failure`].
#[derive(Debug)]
struct Broken;

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("it ended before its end")
    }
}

impl std::error::Error for Broken {}

impl RequestBody<'_> {
    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, NotCollected>>> {
        if self.has_ended {
            return Poll::Ready(None);
        }
        let broken = |what: String| NotCollected::Broken(what);
        let piece = match std::task::ready!(self.stream.poll_next(cx)) {
            Ok(Some(message)) => match message.request {
                Some(Part::RequestBody(body)) => {
                    self.has_ended = body.end_of_stream;
                    Ok(body.body)
                }
                Some(Part::RequestTrailers(_)) => {
                    (self.has_ended, self.has_trailers) = (true, true);
                    return Poll::Ready(None);
                }
                _ => Err(broken("expected a piece of it".to_owned())),
            },
            Ok(None) | Err(Unread::Gone) => Err(broken(Broken.to_string())),
            Err(Unread::TooLarge) => Err(NotCollected::TooLarge),
            Err(Unread::NoRoom(failure)) => Err(failure),
            Err(Unread::Malformed(what)) => Err(broken(what)),
        };
        Poll::Ready(Some(piece))
    }
}

impl http_body::Body for RequestBody<'_> {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let piece = std::task::ready!(self.poll_piece(cx));
        Poll::Ready(piece.map(|piece| match piece {
            Ok(data) => Ok(Frame::data(data)),
            Err(failure) => {
                self.failure = Some(failure);
                Err(Broken)
            }
        }))
    }

    fn size_hint(&self) -> SizeHint {
        self.announced
            .map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

/// The request's whole body.
async fn body(
    stream: &mut Stream,
    out: &Sender,
    asking: &mut Asking,
    owner: Option<u64>,
    on_more: impl FnMut(&[u8], usize),
) -> Result<Result<(Bytes, Budget), NotCollected>, Stop> {
    match asking.request_mode {
        _ if asking.head.end_of_stream => {}
        BodyMode::FullDuplexStreamed => {}
        // It comes once the headers are answered.
        BodyMode::Buffered => out.send(&parts::go_on_with_body()).await?,
        _ => {
            let message = "request_body_mode: expected FULL_DUPLEX_STREAMED or BUFFERED";
            return Err(Stop::failed(Code::InvalidArgument, message));
        }
    }
    let gateway = Arc::clone(&stream.gateway);
    let length = asking.head.headers.get(CONTENT_LENGTH);
    let length = length.and_then(|length| length.to_str().ok()?.parse().ok());
    let mut body = RequestBody {
        stream,
        announced: length,
        has_ended: asking.head.end_of_stream,
        has_trailers: false,
        failure: None,
    };
    let collected = gateway
        .collect_of(owner, &mut body, asking.deadline, on_more)
        .await;
    let collected = match collected {
        Ok(collected) => collected,
        Err(failure) => return Ok(Err(body.failure.take().unwrap_or(failure))),
    };
    // What was announced is there, and its end may follow in a message of its own.
    let end = std::future::poll_fn(|cx| body.poll_piece(cx));
    let end = tokio::time::timeout_at(asking.deadline, end).await;
    match end {
        Ok(None) => {}
        Ok(Some(Ok(more))) if more.is_empty() && body.has_ended => {}
        Ok(Some(Err(failure))) => return Ok(Err(failure)),
        Ok(Some(Ok(_))) => {
            let what = "more of it came than its content-length says".to_owned();
            return Ok(Err(NotCollected::Broken(what)));
        }
        Err(_) => return Ok(Err(NotCollected::TimeIsOver)),
    }
    asking.has_trailers = body.has_trailers;
    Ok(Ok(collected))
}

/// Sends the request on: where it goes, and its body.
async fn send(out: &Sender, asking: &Asking, change: &Change, body: Pieces) -> Result<(), Stop> {
    let is_whole = asking.request_mode == BodyMode::Buffered;
    if is_whole && !asking.head.end_of_stream {
        let answer = parts::whole(&asking.head, change, &body);
        return Ok(out.send(&answer).await?);
    }
    out.send(&parts::headers(&asking.head, change, body.bytes()))
        .await?;
    if asking.head.end_of_stream {
        return Ok(());
    }
    let has_trailers = asking.has_trailers;
    for message in parts::pieces(
        body.into_parts(),
        !has_trailers,
        messages::Response::RequestBody,
    ) {
        out.send(&message).await?;
    }
    if has_trailers {
        out.send(&parts::trailers(messages::Response::RequestTrailers))
            .await?;
    }
    Ok(())
}

/// An answer on its way from the worker to the client, and what it tells.
enum Answer {
    /// Its head has not come.
    Expected(Api, Reservation),
    Stream(Api, Box<Counted>),
    Whole(Api, Reservation, StatusCode, Vec<u8>),
    /// Nobody counts it.
    Uncounted,
    Over,
}

impl Answer {
    fn decision_id(&self) -> Option<&str> {
        match self {
            Self::Expected(_, reservation) => Some(reservation.decision_id()),
            _ => None,
        }
    }

    fn begin(&mut self, status: StatusCode, is_stream: bool) {
        *self = match std::mem::replace(self, Self::Over) {
            Self::Expected(api, reservation) if status.is_success() && is_stream => {
                let counted = Counted::new(api, status.as_u16(), reservation, None);
                Self::Stream(api, Box::new(counted))
            }
            Self::Expected(api, reservation) => Self::Whole(api, reservation, status, Vec::new()),
            begun => begun,
        };
    }

    fn count(&mut self, gateway: &Gateway, worker: &WorkerSpec, data: &[u8]) {
        match self {
            Self::Stream(api, counted) => {
                if *api == Api::Responses && !counted.has_begun() {
                    gateway.stored.note(data, &worker.id);
                }
                counted.count(data);
            }
            Self::Whole(.., body) => {
                let room = MAX_ANSWER_BYTES.saturating_sub(body.len());
                body.extend_from_slice(&data[..data.len().min(room)]);
            }
            Self::Expected(..) | Self::Uncounted | Self::Over => {}
        }
    }

    /// All of it has come.
    fn end(&mut self, gateway: &Gateway) {
        match std::mem::replace(self, Self::Over) {
            Self::Stream(_, mut counted) => match counted.missing() {
                Some(missing) => counted.finish(Outcome::WorkerError, Some(missing)),
                None => counted.end(),
            },
            Self::Whole(api, reservation, status, body) if status.is_success() => {
                dispatch::answered(gateway, api, reservation, status, &body);
            }
            Self::Whole(_, reservation, status, body) => {
                let message = format!("HTTP {status}: {}", excerpt(&body));
                let outcome = outcome_of(status);
                reservation.finish(outcome, Some(status.as_u16()), Some(message));
            }
            Self::Expected(..) | Self::Uncounted | Self::Over => {}
        }
    }

    /// Its head was all that came, and no more was to come.
    fn pass_unseen(&mut self) {
        match std::mem::replace(self, Self::Over) {
            Self::Stream(_, mut counted) => counted.finish(Outcome::Ok, None),
            Self::Whole(_, reservation, status, _) => {
                let outcome = match status.is_success() {
                    true => Outcome::Ok,
                    false => outcome_of(status),
                };
                reservation.finish(outcome, Some(status.as_u16()), None);
            }
            Self::Expected(..) | Self::Uncounted | Self::Over => {}
        }
    }

    /// Nothing more of it is waited for.
    fn break_off(&mut self, outcome: Outcome, message: &str) {
        let message = Some(message.to_owned());
        match std::mem::replace(self, Self::Over) {
            Self::Stream(_, mut counted) => counted.finish(outcome, message),
            Self::Expected(_, reservation) | Self::Whole(_, reservation, ..) => {
                reservation.finish(outcome, None, message);
            }
            Self::Uncounted | Self::Over => {}
        }
    }
}

/// Passes the worker's answer on, and reads it.
async fn follow(
    stream: &mut Stream,
    out: &Sender,
    asking: &Asking,
    mut answer: Answer,
    worker: &WorkerSpec,
    _permit: Option<Permit>,
) -> Result<(), Stop> {
    let gateway = Arc::clone(&stream.gateway);
    let decision_id = answer.decision_id().map(str::to_owned);
    let mut is_unseen = asking.response_mode == BodyMode::None;
    loop {
        let message = tokio::select! {
            biased;
            message = stream.next() => message?,
            () = tokio::time::sleep_until(asking.deadline) => {
                answer.break_off(Outcome::Timeout, TIME_IS_OVER);
                return Err(Stop::failed(Code::DeadlineExceeded, TIME_IS_OVER));
            }
            () = gateway.cut_off() => {
                answer.break_off(Outcome::RouterError, SHUTTING_DOWN);
                return Err(Stop::failed(Code::Unavailable, SHUTTING_DOWN));
            }
        };
        let Some(message) = message else {
            if is_unseen {
                answer.pass_unseen();
            }
            // Else its client has left: the reservation's end says so.
            return Ok(());
        };
        let has_ended = match message.request {
            Some(Part::ResponseHeaders(head)) => {
                let (status, is_stream) = parts::status_of(&head);
                answer.begin(status, is_stream);
                let told = parts::answer_headers(&worker.id, decision_id.as_deref());
                out.send(&told).await?;
                head.end_of_stream
            }
            Some(Part::ResponseBody(piece)) => {
                is_unseen = false;
                answer.count(&gateway, worker, &piece.body);
                let is_last = piece.end_of_stream;
                if asking.response_mode == BodyMode::FullDuplexStreamed {
                    let back = messages::Response::ResponseBody;
                    for message in parts::pieces([piece.body], is_last, back) {
                        out.send(&message).await?;
                    }
                } else {
                    out.send(&parts::unchanged()).await?;
                }
                is_last
            }
            Some(Part::ResponseTrailers(_)) => {
                out.send(&parts::trailers(messages::Response::ResponseTrailers))
                    .await?;
                true
            }
            Some(Part::RequestTrailers(_)) => {
                out.send(&parts::trailers(messages::Response::RequestTrailers))
                    .await?;
                false
            }
            Some(Part::RequestHeaders(_) | Part::RequestBody(_)) | None => false,
        };
        if has_ended {
            answer.end(&gateway);
            return Ok(());
        }
    }
}
