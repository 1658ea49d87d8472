//! One request from the client's headers to the answer's first bytes: decide, send to one worker or
//! to two, and try elsewhere as long as nothing of the answer has been passed on.

use super::admission::Permit;
use super::body::{self, Api, Pieces, Scanned, Scanner};
use super::buffers::NotCollected;
use super::client::Client;
use super::stream::{Answer, Held, PrefillHalf, usage_in};
use super::waiting::{self, NotPlaced};
use super::{Gateway, Reply, describe, error};
use crate::config::{Connector, Engine, WorkerSpec};
use crate::fleet::{
    ESTIMATE_BLOCK_TOKENS, Fleet, Hints, Outcome, Refused, Request as Placement, Reservation,
};
use crate::policy::{Decision, Reason, Refusal, Route};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::header::{
    CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, EXPECT, HOST, HeaderMap, HeaderName, HeaderValue,
    RETRY_AFTER, TRANSFER_ENCODING,
};
use hyper::{Request, Response, StatusCode};
use smallvec::SmallVec;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::Instant;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const SESSION_ID: HeaderName = HeaderName::from_static("x-session-id");
const ROUTING_KEY: HeaderName = HeaderName::from_static("x-smg-routing-key");
const SESSION_END: HeaderName = HeaderName::from_static("x-session-end");
const SESSION_IDLE: HeaderName = HeaderName::from_static("x-session-idle-s");
const PARENT_SESSION: HeaderName = HeaderName::from_static("x-parent-session");
const SESSION_PARENT: HeaderName = HeaderName::from_static("x-session-parent");
const DECISION_ID: HeaderName = HeaderName::from_static("x-deltaserve-decision-id");
const WORKER: HeaderName = HeaderName::from_static("x-deltaserve-worker");

/// Answers larger than this are not held in memory.
const MAX_ANSWER_BYTES: usize = 256 << 20;

/// What a client is told at its request's deadline.
pub(super) const TIME_IS_OVER: &str = "the request's time is over";

/// As much as is kept of a prefill half's answer, which nobody gets unless it is an error.
const DRAINED_BYTES: usize = 4096;

/// Serves one generation request.
pub(super) async fn handle(
    gateway: &Arc<Gateway>,
    client: Arc<Client>,
    deadline: Instant,
    api: Api,
    request: Request<Incoming>,
) -> Response<Reply> {
    let (parts, incoming) = request.into_parts();
    let limit = gateway.config.max_body_bytes;
    let mut scanner = Scanner::new(api, gateway.fleet.token_block(), ESTIMATE_BLOCK_TOKENS);
    let more = |begin: &[u8], bytes| scanner.scan_ahead(begin, bytes);
    let collected = gateway.buffers.collect(incoming, limit, more);
    let bytes = match tokio::time::timeout_at(deadline, collected).await {
        Ok(Ok(bytes)) => bytes,
        Err(_) => {
            let status = StatusCode::REQUEST_TIMEOUT;
            gateway.metrics.refused(status);
            let message = "body: the request's time was over before its end";
            return error(status, "timeout", message);
        }
        Ok(Err(NotCollected::TooLarge)) => {
            return refuse(
                gateway,
                StatusCode::PAYLOAD_TOO_LARGE,
                &format!("body: expected at most {limit} bytes (max_body_bytes)"),
            );
        }
        Ok(Err(NotCollected::Broken(failure))) => {
            return refuse(
                gateway,
                StatusCode::BAD_REQUEST,
                &format!("body: {failure}"),
            );
        }
    };
    let mut scanned = match scanner.scan(&bytes) {
        Ok(scanned) => scanned,
        Err(malformed) => {
            return refuse(gateway, StatusCode::BAD_REQUEST, &malformed.to_string());
        }
    };
    let mut placement = Placement {
        request_id: header(&parts.headers, &REQUEST_ID)
            .or_else(|| scanned.rid.clone())
            .unwrap_or_else(|| format!("{:016x}", fastrand::u64(..))),
        session_id: header(&parts.headers, &SESSION_ID)
            .or_else(|| header(&parts.headers, &ROUTING_KEY))
            .or_else(|| scanned.user.clone()),
        // Taken, not copied: a state a token is more than the body itself.
        prompt: std::mem::take(&mut scanned.prompt),
        max_output_tokens: scanned.max_output_tokens,
        stream: scanned.stream,
        hints: hints(&parts.headers),
        arrived_s: None,
    };
    let patience = Duration::from_secs_f64(gateway.config.queue_timeout_s);
    let permit = match gateway.admission.enter(patience, deadline).await {
        Ok(permit) => permit,
        Err(refusal) => {
            let (status, kind, message) = refusal.told();
            gateway.metrics.refused(status);
            return error(status, kind, message);
        }
    };
    if let Some(encoder) = &gateway.encoder {
        let encoding = encoder.encode(&bytes, &scanned, gateway.fleet.token_block());
        // Past the deadline the first attempt ends the request.
        if let Ok(Some(prompt)) = tokio::time::timeout_at(deadline, encoding).await {
            placement.prompt = prompt;
        }
    }
    let mut exchange = Exchange {
        gateway,
        client,
        api,
        headers: forwarded_headers(parts.headers, &placement.request_id),
        bytes,
        scanned,
        placement,
        deadline,
    };
    let response = exchange.run(permit).await;
    gateway.buffers.give_back(exchange.bytes);
    response
}

fn refuse(gateway: &Gateway, status: StatusCode, message: &str) -> Response<Reply> {
    gateway.metrics.refused(status);
    error(status, "invalid_request_error", message)
}

fn header(headers: &HeaderMap, name: &HeaderName) -> Option<String> {
    let value = headers.get(name)?.to_str().ok()?;
    (!value.is_empty()).then(|| value.to_owned())
}

/// What the client says of its session, for residency. What cannot be read says nothing.
fn hints(headers: &HeaderMap) -> Hints {
    let says = |name: &HeaderName| header(headers, name);
    let is_said = |value: String| matches!(value.as_str(), "1" | "true");
    let seconds = says(&SESSION_IDLE).and_then(|value| value.parse().ok());
    Hints {
        ends: says(&SESSION_END).is_some_and(is_said),
        idle_s: seconds.filter(|seconds: &f64| seconds.is_finite() && *seconds >= 0.0),
        parent_session: says(&PARENT_SESSION).or_else(|| says(&SESSION_PARENT)),
    }
}

/// The client's headers, less those that belong to its connection or to the router alone.
fn forwarded_headers(mut headers: HeaderMap, request_id: &str) -> HeaderMap {
    for name in [HOST, CONTENT_LENGTH, TRANSFER_ENCODING, CONNECTION, EXPECT] {
        headers.remove(name);
    }
    for name in [SESSION_END, SESSION_IDLE, PARENT_SESSION, SESSION_PARENT] {
        headers.remove(name);
    }
    for name in ["keep-alive", "te", "trailer", "upgrade", "proxy-connection"] {
        headers.remove(name);
    }
    if let Ok(value) = HeaderValue::from_str(request_id) {
        headers.insert(REQUEST_ID, value);
    }
    headers
}

struct Exchange<'a> {
    gateway: &'a Arc<Gateway>,
    client: Arc<Client>,
    api: Api,
    headers: HeaderMap,
    bytes: Bytes,
    scanned: Scanned,
    placement: Placement,
    deadline: Instant,
}

/// An attempt whose answer has begun.
struct Success {
    head: Head,
    prefill: Option<PrefillHalf>,
    reservation: Reservation,
}

/// How one attempt failed before any of the answer was passed on.
enum Failure {
    /// The worker that answers failed.
    Answering(Fault),
    Prefill(Fault),
    Timeout,
}

/// The workers that answered a request with 5xx. One such answer may be the worker's fault or the
/// request's: it is the worker's where another then serves the request, and the request's where
/// another says so too.
#[derive(Default)]
struct Suspects(SmallVec<[String; 2]>);

impl Suspects {
    fn note(&mut self, worker: &str, status: Option<StatusCode>) {
        if status.is_some_and(|status| status.is_server_error() && !is_full(status)) {
            self.0.push(worker.to_owned());
        }
    }

    /// The request had its chance elsewhere.
    fn judge(&self, fleet: &Fleet) {
        if let [only] = self.0.as_slice() {
            fleet.blame(only);
        }
    }
}

/// What a worker did instead of serving.
struct Fault {
    message: String,
    /// What it said, if it answered at all.
    answer: Option<Response<Bytes>>,
}

impl Fault {
    fn silent(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            answer: None,
        }
    }

    fn answered(answer: Response<Bytes>) -> Self {
        Self {
            message: format!("HTTP {}: {}", status_of(&answer), excerpt(answer.body())),
            answer: Some(answer),
        }
    }

    fn status(&self) -> Option<StatusCode> {
        self.answer.as_ref().map(status_of)
    }

    fn code(&self) -> Option<u16> {
        self.status().map(|status| status.as_u16())
    }

    fn outcome(&self) -> Outcome {
        match self.status() {
            Some(status) if is_full(status) => Outcome::Rejected,
            _ => Outcome::WorkerError,
        }
    }
}

/// What a worker answered, as far as it has to be looked at before the client gets it.
enum Head {
    Whole(Response<Bytes>),
    Stream(Response<Incoming>, Bytes),
}

impl Head {
    fn status(&self) -> StatusCode {
        match self {
            Self::Whole(answer) => status_of(answer),
            Self::Stream(answer, _) => answer.status(),
        }
    }
}

impl Exchange<'_> {
    async fn run(&mut self, permit: Permit) -> Response<Reply> {
        let mut exclude: Vec<String> = Vec::new();
        let mut last: Option<(String, Fault)> = None;
        let mut local: Option<Result<Reservation, Refusal>> = None;
        let mut suspects = Suspects::default();
        let mut attempts = 0;
        let mut permit = Some(permit);
        let arrived_s = self.gateway.fleet.now_s();
        loop {
            let placed = match local.take() {
                // No retry: the decode worker has not failed.
                Some(placed) => placed.map_err(NotPlaced::by_policy),
                None if attempts > self.gateway.config.retries => {
                    // Unlike where no other worker can be asked, there may be one that serves it.
                    suspects.judge(&self.gateway.fleet);
                    break;
                }
                None => {
                    attempts += 1;
                    let gateway = self.gateway;
                    let (request, deadline) = (&self.placement, self.deadline);
                    let placed =
                        waiting::place(gateway, request, &exclude, &mut permit, deadline).await;
                    // What follows is tried again, and queues as what came now.
                    self.placement.arrived_s = Some(arrived_s);
                    placed
                }
            };
            let reservation = match placed {
                Ok(reservation) => reservation,
                Err(not_placed) => {
                    return self.unplaced(&not_placed, last);
                }
            };
            let answering = reservation.answering().clone();
            let prefill = reservation.prefill().cloned();
            match self.attempt(reservation).await {
                Ok(success) => {
                    if success.head.status().is_success() {
                        suspects.judge(&self.gateway.fleet);
                    }
                    return self.pass_on(success, &answering, permit.take());
                }
                Err((reservation, failure)) => match failure {
                    Failure::Timeout => {
                        let message = Some(TIME_IS_OVER.to_owned());
                        reservation.finish(Outcome::Timeout, Some(504), message);
                        return error(StatusCode::GATEWAY_TIMEOUT, "timeout", TIME_IS_OVER);
                    }
                    Failure::Answering(mut fault) => {
                        fault.message = format!("worker {}: {}", answering.id, fault.message);
                        let message = Some(fault.message.clone());
                        reservation.finish(fault.outcome(), fault.code(), message);
                        suspects.note(&answering.id, fault.status());
                        last = Some((answering.id.clone(), fault));
                        exclude.push(answering.id.clone());
                    }
                    Failure::Prefill(mut fault) => {
                        let prefill = prefill.map_or_else(String::new, |spec| spec.id.clone());
                        fault.message = format!("prefill worker {prefill}: {}", fault.message);
                        let message = fault.message.clone();
                        if fault.status().is_some_and(is_refusal) {
                            // The request is at fault, and no other worker would take it.
                            reservation.finish(Outcome::Rejected, fault.code(), Some(message));
                            return relay(&prefill, fault);
                        }
                        exclude.push(prefill.clone());
                        // Before the reservation goes, so that its room goes to nobody else.
                        if crate::fleet::abilities(&answering).0 {
                            local = Some(self.place_locally(&answering.id, &exclude));
                        }
                        reservation.fail_prefill(fault.outcome(), fault.code(), message);
                        suspects.note(&prefill, fault.status());
                        last = Some((prefill, fault));
                    }
                },
            }
            self.gateway.metrics.retried();
        }
        self.unplaced(&NotPlaced::by_policy(Refusal::NoCandidates), last)
    }

    /// Serves the request on the decode worker alone, after its prefill worker failed.
    fn place_locally(&self, worker: &str, exclude: &[String]) -> Result<Reservation, Refusal> {
        self.gateway
            .fleet
            .place_on(&self.placement, worker, exclude, |slot| {
                Decision::unpredicted(Route::Local { worker: slot }, Reason::PrefillFailed)
            })
    }

    fn unplaced(&self, not_placed: &NotPlaced, last: Option<(String, Fault)>) -> Response<Reply> {
        if let Some((worker, fault)) = last {
            return relay(&worker, fault);
        }
        if let Some(response) = waiting::answer(self.gateway, not_placed) {
            return response;
        }
        let message = match not_placed {
            NotPlaced::Refused(Refused::ByPolicy(Refusal::OutsideCandidates)) => {
                "the policy chose a worker that is no candidate"
            }
            NotPlaced::Refused(Refused::ByPolicy(Refusal::PolicyFailed)) => {
                "the policy failed; the router's log says how"
            }
            _ => "no worker can take the request now",
        };
        let status = StatusCode::SERVICE_UNAVAILABLE;
        self.gateway.metrics.refused(status);
        error(status, "no_candidates", message)
    }

    /// Sends the request to the reservation's workers and waits for the answer's first bytes.
    async fn attempt(&self, reservation: Reservation) -> Result<Success, (Reservation, Failure)> {
        let answering = reservation.answering().clone();
        let result = match reservation.prefill().cloned() {
            None => {
                let payload = Pieces::from(self.bytes.clone());
                self.within_deadline(self.head(&answering, payload))
                    .await
                    .map(|head| (head, None))
            }
            Some(prefill) => match (prefill.engine, prefill.kv_connector) {
                (Engine::Vllm, None | Some(Connector::Nixl)) => {
                    self.attempt_in_turn(&prefill, &answering).await
                }
                (Engine::Vllm, Some(Connector::Mooncake)) => {
                    match self.within_deadline(self.mooncake_payloads(&prefill)).await {
                        Ok((for_prefill, for_decode)) => {
                            self.attempt_at_once(&prefill, &answering, for_prefill, for_decode)
                                .await
                        }
                        Err(failure) => Err(failure),
                    }
                }
                (Engine::Sglang, _) => {
                    let host = prefill.bootstrap_host.as_deref().unwrap_or_default();
                    let room = fastrand::u64(..) >> 1;
                    let fields = body::bootstrap_fields(host, prefill.bootstrap_port, room);
                    let payload = body::splice(&self.bytes, &self.scanned, fields);
                    self.attempt_at_once(&prefill, &answering, payload.clone(), payload)
                        .await
                }
            },
        };
        match result {
            Ok((head, prefill)) => Ok(Success {
                head,
                prefill,
                reservation,
            }),
            Err(failure) => Err((reservation, failure)),
        }
    }

    async fn within_deadline<T>(
        &self,
        step: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        tokio::time::timeout_at(self.deadline, step)
            .await
            .unwrap_or(Err(Failure::Timeout))
    }

    /// Both workers get their half at once and find each other; the prefill half's answer is only
    /// waited for if it fails.
    async fn attempt_at_once(
        &self,
        prefill: &WorkerSpec,
        answering: &WorkerSpec,
        for_prefill: Pieces,
        for_decode: Pieces,
    ) -> Result<(Head, Option<PrefillHalf>), Failure> {
        let (guard, failed) = self.send_prefill(prefill, for_prefill);
        let head = self.within_deadline(async {
            tokio::select! {
                head = self.head(answering, for_decode) => head,
                fault = failure_of(failed) => Err(Failure::Prefill(fault)),
            }
        });
        Ok((head.await?, Some(guard)))
    }

    /// vLLM with NIXL: the prefill worker's answer says where its KV is.
    async fn attempt_in_turn(
        &self,
        prefill: &WorkerSpec,
        answering: &WorkerSpec,
    ) -> Result<(Head, Option<PrefillHalf>), Failure> {
        #[derive(serde::Deserialize)]
        struct Prefilled<'a> {
            #[serde(borrow)]
            kv_transfer_params: Option<&'a serde_json::value::RawValue>,
        }
        let fields = self.vllm_prefill_fields(
            r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#,
        );
        let payload = body::splice(&self.bytes, &self.scanned, fields);
        let prefilled = async {
            match self.head(prefill, payload).await {
                Ok(Head::Whole(answer)) if status_of(&answer).is_success() => {
                    Ok(answer.into_body())
                }
                Ok(Head::Whole(answer)) => Err(Fault::answered(answer)),
                Ok(Head::Stream(..)) => Err(Fault::silent("answered with a stream")),
                Err(Failure::Answering(fault) | Failure::Prefill(fault)) => Err(fault),
                Err(Failure::Timeout) => return Err(Failure::Timeout),
            }
            .map_err(Failure::Prefill)
        };
        let body = self.within_deadline(prefilled).await?;
        let params = serde_json::from_slice::<Prefilled<'_>>(&body)
            .ok()
            .and_then(|prefilled| prefilled.kv_transfer_params)
            .ok_or_else(|| {
                Failure::Prefill(Fault::silent("no kv_transfer_params in the answer"))
            })?;
        let fields = format!("\"kv_transfer_params\":{}", params.get());
        let payload = body::splice(&self.bytes, &self.scanned, fields);
        let head = self.within_deadline(self.head(answering, payload)).await?;
        Ok((head, None))
    }

    /// What makes a vLLM request prefill and stop; the last of equal keys wins.
    fn vllm_prefill_fields(&self, params: &str) -> String {
        let limit = match self.api {
            Api::Chat => r#""max_completion_tokens":1,"#,
            Api::Completions | Api::Generate => "",
        };
        format!(
            "\"stream\":false,\"stream_options\":null,\"max_tokens\":1,\"min_tokens\":0,{limit}\"kv_transfer_params\":{params}"
        )
    }

    /// vLLM with Mooncake: the decode worker must be told the prefill engine's id, which its
    /// bootstrap server knows, and changes when it restarts.
    async fn mooncake_payloads(&self, prefill: &WorkerSpec) -> Result<(Pieces, Pieces), Failure> {
        let failed = |message: String| Failure::Prefill(Fault::silent(message));
        let host = prefill.bootstrap_host.as_deref().unwrap_or_default();
        let bootstrap = format!(
            "http://{host}:{}",
            prefill.bootstrap_port.unwrap_or_default()
        );
        let patience = Duration::from_secs_f64(self.gateway.config.connect_timeout_s);
        let (_, answer) = self
            .gateway
            .get_url(&format!("{bootstrap}/query"), patience)
            .await
            .map_err(|error| failed(format!("{bootstrap}/query: {error}")))?;
        let engines: serde_json::Value = serde_json::from_slice(&answer)
            .map_err(|error| failed(format!("{bootstrap}/query: {error}")))?;
        let engine = engines
            .as_object()
            .and_then(|ranks| ranks.values().next())
            .and_then(|rank| rank.get("engine_id"))
            .and_then(serde_json::Value::as_str)
            .ok_or_else(|| failed(format!("{bootstrap}/query: no engine_id")))?;
        let transfer = format!("{:032x}", fastrand::u128(..));
        let for_prefill = serde_json::json!({
            "do_remote_decode": true, "do_remote_prefill": false, "transfer_id": transfer,
        });
        let for_decode = serde_json::json!({
            "do_remote_decode": false, "do_remote_prefill": true, "transfer_id": transfer,
            "remote_engine_id": engine, "remote_bootstrap_addr": bootstrap,
        });
        let fields = self.vllm_prefill_fields(&for_prefill.to_string());
        Ok((
            body::splice(&self.bytes, &self.scanned, fields),
            body::splice(
                &self.bytes,
                &self.scanned,
                format!("\"kv_transfer_params\":{for_decode}"),
            ),
        ))
    }

    fn request(&self, spec: &WorkerSpec, payload: Pieces) -> Result<Request<Pieces>, String> {
        let mut request = Request::post(format!("{}{}", spec.url, self.api.path()))
            .body(payload)
            .map_err(|error| error.to_string())?;
        *request.headers_mut() = self.headers.clone();
        Ok(request)
    }

    /// Starts the prefill worker's half, which ends with what is returned. The receiver
    /// gets word if that half fails, and nothing if it succeeds.
    fn send_prefill(
        &self,
        spec: &WorkerSpec,
        payload: Pieces,
    ) -> (PrefillHalf, oneshot::Receiver<Fault>) {
        let (sender, receiver) = oneshot::channel();
        let client = self.gateway.client.clone();
        let fleet = Arc::clone(&self.gateway.fleet);
        let id = spec.id.clone();
        let request = self.request(spec, payload);
        let half = PrefillHalf::spawn(async move {
            let result = async {
                let request = request.map_err(Fault::silent)?;
                let response = client.request(request).await.map_err(|error| {
                    if error.is_connect() {
                        fleet.report_health(&id, false);
                    }
                    Fault::silent(describe(error))
                })?;
                let (parts, incoming) = response.into_parts();
                if !parts.status.is_success() {
                    let whole = collect(incoming).await?;
                    return Err(Fault::answered(Response::from_parts(parts, whole)));
                }
                let begin = drain(incoming).await.map_err(Fault::silent)?;
                if is_error_event(&begin) && begin.len() < DRAINED_BYTES {
                    return Err(Fault::answered(Response::from_parts(parts, begin)));
                }
                if is_error_event(&begin) || is_abort(&begin) {
                    return Err(Fault::silent(excerpt(&begin)));
                }
                Ok(())
            };
            if let Err(fault) = result.await {
                let _ = sender.send(fault);
            }
        });
        (half, receiver)
    }

    /// The answer's head, with the first event of a stream or all of anything else.
    async fn head(&self, spec: &WorkerSpec, payload: Pieces) -> Result<Head, Failure> {
        let broke = |message: String| Failure::Answering(Fault::silent(message));
        let request = self.request(spec, payload).map_err(broke)?;
        let response = self
            .gateway
            .client
            .request(request)
            .await
            .map_err(|error| {
                if error.is_connect() {
                    self.gateway.fleet.report_health(&spec.id, false);
                }
                broke(describe(error))
            })?;
        let status = response.status();
        let is_stream = response
            .headers()
            .get(CONTENT_TYPE)
            .is_some_and(|value| value.as_bytes().starts_with(b"text/event-stream"));
        let (parts, mut incoming) = response.into_parts();
        let mut begin = Bytes::new();
        if status.is_success() && is_stream {
            begin = loop {
                match incoming.frame().await {
                    Some(Ok(frame)) => {
                        if let Ok(data) = frame.into_data()
                            && !data.is_empty()
                        {
                            break data;
                        }
                    }
                    Some(Err(error)) => return Err(broke(describe(error))),
                    None => {
                        return Err(broke("the stream ended before its first event".to_owned()));
                    }
                }
            };
            if !is_error_event(&begin) {
                return Ok(Head::Stream(Response::from_parts(parts, incoming), begin));
            }
        }
        let mut whole = collect(incoming).await.map_err(Failure::Answering)?;
        if !begin.is_empty() {
            whole = [begin, whole].concat().into();
        }
        let answer = Response::from_parts(parts, whole);
        let status = status_of(&answer);
        if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS {
            return Err(Failure::Answering(Fault::answered(answer)));
        }
        Ok(Head::Whole(answer))
    }

    fn pass_on(
        &self,
        success: Success,
        answering: &WorkerSpec,
        permit: Option<Permit>,
    ) -> Response<Reply> {
        let Success {
            head,
            prefill,
            mut reservation,
        } = success;
        let decision_id = HeaderValue::from_str(reservation.decision_id());
        let mut response = match head {
            Head::Whole(response) => {
                let status = status_of(&response);
                let (outcome, error) = if status.is_success() {
                    reservation.output(1);
                    reservation.report(usage_in(response.body()));
                    (Outcome::Ok, None)
                } else {
                    (Outcome::Rejected, Some(excerpt(response.body())))
                };
                reservation.finish(outcome, Some(status.as_u16()), error);
                if let Some(prefill) = prefill {
                    prefill.linger();
                }
                response.map(|body| Reply::Whole(Full::from(body)))
            }
            Head::Stream(response, first) => {
                let status = response.status().as_u16();
                reservation.streams();
                response.map(|incoming| {
                    Reply::Stream(Box::new(Answer::new(
                        first,
                        incoming,
                        reservation,
                        status,
                        Arc::clone(&self.client),
                        Held { prefill, permit },
                    )))
                })
            }
        };
        if let Ok(value) = decision_id {
            response.headers_mut().insert(DECISION_ID, value);
        }
        from_worker(response, &answering.id)
    }
}

/// Passes on what a worker said instead of serving; 502 if it said nothing.
fn relay(worker: &str, fault: Fault) -> Response<Reply> {
    let is_full = fault.status().is_some_and(is_full);
    let Some(answer) = fault.answer else {
        return error(StatusCode::BAD_GATEWAY, "worker_error", &fault.message);
    };
    let mut response = from_worker(answer.map(|body| Reply::Whole(Full::from(body))), worker);
    if is_full {
        let retry_after = response.headers_mut().entry(RETRY_AFTER);
        retry_after.or_insert(HeaderValue::from_static("1"));
    }
    response
}

/// The answer without the headers that belong to the worker's connection, and with the worker's id.
fn from_worker(mut response: Response<Reply>, worker: &str) -> Response<Reply> {
    let headers = response.headers_mut();
    for name in [CONNECTION, TRANSFER_ENCODING, CONTENT_LENGTH] {
        headers.remove(name);
    }
    headers.remove("keep-alive");
    if let Ok(value) = HeaderValue::from_str(worker) {
        headers.insert(WORKER, value);
    }
    response
}

/// Waits for word that the prefill half failed; for ever, if it does not.
async fn failure_of(failed: oneshot::Receiver<Fault>) -> Fault {
    match failed.await {
        Ok(fault) => fault,
        Err(_) => std::future::pending().await,
    }
}

async fn collect(body: Incoming) -> Result<Bytes, Fault> {
    let collected = Limited::new(body, MAX_ANSWER_BYTES).collect().await;
    match collected {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) => Err(Fault::silent(error.to_string())),
    }
}

/// Reads a body to its end and keeps its first `DRAINED_BYTES`.
async fn drain(mut body: Incoming) -> Result<Bytes, String> {
    let mut kept = Vec::new();
    while let Some(frame) = body.frame().await {
        if let Some(data) = frame.map_err(describe)?.data_ref() {
            let room = DRAINED_BYTES - kept.len();
            kept.extend_from_slice(&data[..data.len().min(room)]);
        }
    }
    Ok(kept.into())
}

/// Whether a stream begins with an event that says why there is none.
fn is_error_event(begin: &[u8]) -> bool {
    begin.strip_prefix(b"data: ").is_some_and(|event| {
        event.starts_with(b"{\"error\"")
            || event.starts_with(b"{\"object\":\"error\"")
            || is_abort(event)
    })
}

/// Whether these bytes have SGLang's finish reason "abort" (engines escape quotes in text, so the
/// marker cannot come from the model).
fn is_abort(begin: &[u8]) -> bool {
    memchr::memmem::find(begin, b"\"type\":\"abort\"").is_some()
}

/// The status of an answer. Where a stream is asked for, SGLang answers 200 whatever comes, and says in
/// the event what it would have answered otherwise: as `code`, or as its finish reason's `status_code`.
fn status_of(answer: &Response<Bytes>) -> StatusCode {
    let body = answer.body();
    if !answer.status().is_success() || !is_error_event(body) {
        return answer.status();
    }
    let end = memchr::memchr(b'\n', body).unwrap_or(body.len());
    let event: Option<serde_json::Value> = serde_json::from_slice(&body[5..end]).ok();
    let code = event.as_ref().and_then(|event| {
        [
            "/error/code",
            "/code",
            "/meta_info/finish_reason/status_code",
        ]
        .iter()
        .find_map(|place| event.pointer(place)?.as_u64())
    });
    code.and_then(|code| StatusCode::from_u16(u16::try_from(code).ok()?).ok())
        .filter(|status| status.is_client_error() || status.is_server_error())
        .unwrap_or(StatusCode::BAD_GATEWAY)
}

/// Whether the worker is full, which is not broken.
fn is_full(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS
    )
}

/// Whether the worker finds fault with the request; one that says 429 is only full.
fn is_refusal(status: StatusCode) -> bool {
    status.is_client_error() && status != StatusCode::TOO_MANY_REQUESTS
}

/// The beginning of a worker's message, on one line.
fn excerpt(body: &[u8]) -> String {
    const SHOWN: usize = 300;
    let text = String::from_utf8_lossy(&body[..body.len().min(SHOWN)]);
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
