//! One attempt: the request is sent to the workers that were chosen, in the way that their engine
//! needs, and the answer's beginning is waited for.

use super::apis::Api;
use super::exchange::Exchange;
use super::fault::{Failure, Fault, Kind, is_no_answer, status_of};
use super::splice::{Pieces, bootstrap_fields};
use super::stream::PrefillHalf;
use super::{describe, models, mooncake, reuse, sse, too_long};
use crate::config::{Connector, Engine, WorkerSpec};
use bytes::{Bytes, BytesMut};
use decision::fleet::prefix::hash::Unit;
use decision::fleet::{Fleet, PrefillWatch, Reservation};
use decision::policy::Role;
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HOST, HeaderName, HeaderValue};
use hyper::http::uri::Scheme;
use hyper::{Method, Request, Response, StatusCode, Uri};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::Instant;

/// Makes vLLM (0.26.0) serve a request on one of its data-parallel ranks.
const DATA_PARALLEL_RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");

/// Answers larger than this are not held in memory.
const MAX_ANSWER_BYTES: usize = 256 << 20;

/// As much as is kept of a prefill half's answer, which nobody gets unless it is an error.
const DRAINED_BYTES: usize = 4096;

/// A stream whose first event has not ended after so much is passed on as it is.
const MAX_FIRST_EVENT_BYTES: usize = 1 << 20;

/// How long the event that opens a separated chat (it names the role and has no text) or an answer of
/// `/v1/messages` is held back for the one behind it: where a chat's KV did not arrive, vLLM (0.26.0) sends an
/// error at once, and so does SGLang (0.5.17) where it refuses a message.
const OPENING_PATIENCE: Duration = Duration::from_millis(50);

/// How long an elastic worker whose prefill worker is gone has to notice, and to prefill itself: its
/// engine looks for a lost prefill worker every few seconds.
const ELASTIC_PATIENCE: Duration = Duration::from_secs(20);

/// What a worker answered, as far as it has to be looked at before the client gets it.
pub(super) enum Head {
    /// With its status, as [`status_of`] has it.
    Whole(Response<Bytes>, StatusCode),
    Stream(Response<Incoming>, Bytes),
}

impl Head {
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Whole(_, status) => *status,
            Self::Stream(answer, _) => answer.status(),
        }
    }
}

impl Exchange<'_> {
    /// Sends the request to the reservation's workers and waits for the answer's first event, or for
    /// all of an answer that is no stream.
    pub(super) async fn attempt(
        &self,
        reservation: &Reservation,
    ) -> Result<(Head, Option<PrefillHalf>), Failure> {
        let answering = reservation.answering();
        let Some(prefill) = reservation.prefill() else {
            let payload = self.overridden(answering.engine, String::new());
            let opening = match self.context.api {
                Api::Generate | Api::Completions | Api::Chat => Opening::Passed,
                api => Opening::of_separated(api),
            };
            let head = self.within_deadline(self.head(answering, payload, opening));
            return head.await.map(|head| (head, None));
        };
        match (prefill.engine, prefill.kv_connector) {
            (Engine::Vllm, None | Some(Connector::Nixl)) => {
                // Boxed, so that other requests do not carry the room for it.
                Box::pin(self.attempt_in_turn(reservation, prefill)).await
            }
            (Engine::Vllm, Some(Connector::Mooncake)) => {
                let payloads = Box::pin(self.mooncake_payloads(prefill));
                let payloads = self.within_deadline(payloads).await?;
                self.attempt_at_once(reservation, prefill, payloads).await
            }
            (Engine::Sglang, _) => {
                let host = prefill.bootstrap_host.as_deref().unwrap_or_default();
                let room = fastrand::u64(..) >> 1;
                let fields = bootstrap_fields(host, prefill.bootstrap_port, room);
                let payload = self.overridden(Engine::Sglang, fields);
                let payloads = (payload.clone(), payload, None);
                self.attempt_at_once(reservation, prefill, payloads).await
            }
        }
    }

    /// The body with these fields of ours, and less what would steer an engine's moving of KV or names a
    /// request that the worker may still know.
    fn overridden(&self, engine: Engine, ours: String) -> Pieces {
        let mut fields = self.gateway.overrides(&self.scanned, engine);
        if self.is_repeated() && engine == Engine::Sglang {
            // Of two requests of one name it refuses the second.
            if let Some(rid) = &self.scanned.rid {
                let rid = serde_json::Value::from(format!("{rid}-{:08x}", fastrand::u32(..)));
                fields.push(format!("\"rid\":{rid}"));
            } else if self.scanned.has_rids {
                fields.push("\"rid\":null".to_owned());
            }
        }
        if !ours.is_empty() {
            // The last of equal keys counts.
            fields.push(ours);
        }
        self.spliced(fields.join(","))
    }

    async fn within_deadline<T>(
        &self,
        step: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        tokio::time::timeout_at(self.context.deadline, step)
            .await
            .unwrap_or(Err(Failure::Timeout))
    }

    /// Both workers get their half at once and find each other; the prefill half's answer is only
    /// waited for if it fails. An elastic worker whose prefill worker is gone then prefills by itself:
    /// its half goes on, so that the request runs there once.
    async fn attempt_at_once(
        &self,
        reservation: &Reservation,
        prefill: &Arc<WorkerSpec>,
        (for_prefill, for_decode, rank): (Pieces, Pieces, Option<String>),
    ) -> Result<(Head, Option<PrefillHalf>), Failure> {
        let answering = reservation.answering();
        let watch = reservation.prefill_watch();
        let (guard, failed) = self.send_prefill(prefill, for_prefill, rank, watch);
        let head = self.within_deadline(async {
            let opening = Opening::of_separated(self.context.api);
            let mut head = self.head(answering, for_decode, opening);
            let fault = tokio::select! {
                head = &mut head => return head,
                fault = failure_of(failed) => fault,
            };
            // A prefill worker that answers lives, and the other half would wait for it.
            let is_gone = matches!(fault.kind, Kind::Broken | Kind::Refused | Kind::Unreachable);
            if answering.role != Role::Elastic || answering.engine != Engine::Sglang || !is_gone {
                return Err(Failure::Prefill(fault));
            }
            log::info!(
                "worker {} goes on without prefill worker {}: {}",
                answering.id,
                prefill.id,
                fault.message
            );
            match tokio::time::timeout(ELASTIC_PATIENCE, head).await {
                Ok(head) => {
                    self.gateway.fleet.blame(prefill, reservation.begun_s());
                    head
                }
                Err(_) => Err(Failure::Prefill(fault)),
            }
        });
        Ok((head.await?, Some(guard)))
    }

    /// vLLM with NIXL: the prefill worker's answer says where its KV is.
    async fn attempt_in_turn(
        &self,
        reservation: &Reservation,
        prefill: &Arc<WorkerSpec>,
    ) -> Result<(Head, Option<PrefillHalf>), Failure> {
        #[derive(serde::Deserialize)]
        struct Prefilled<'a> {
            #[serde(borrow)]
            kv_transfer_params: Option<&'a serde_json::value::RawValue>,
        }
        let fields = self.vllm_prefill_fields(
            r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#,
        );
        let payload = self.overridden(Engine::Vllm, fields);
        let prefilled = async {
            match self.head(prefill, payload, Opening::Passed).await {
                Ok(Head::Whole(answer, status)) if status.is_success() => Ok(answer.into_body()),
                Ok(Head::Whole(answer, _)) => Err(Fault::answered(answer)),
                Ok(Head::Stream(..)) => Err(Fault::broken("answered with a stream")),
                Err(Failure::Answering(fault) | Failure::Prefill(fault)) => Err(fault),
                Err(Failure::Timeout) => return Err(Failure::Timeout),
            }
            .map_err(Failure::Prefill)
        };
        let body = self.within_deadline(prefilled).await?;
        reservation.prefill_watch().ended();
        let params = serde_json::from_slice::<Prefilled<'_>>(&body)
            .ok()
            .and_then(|prefilled| prefilled.kv_transfer_params)
            .ok_or_else(|| {
                Failure::Prefill(Fault::broken("no kv_transfer_params in the answer"))
            })?;
        let fields = format!("\"kv_transfer_params\":{}", params.get());
        let payload = self.overridden(Engine::Vllm, fields);
        let opening = Opening::of_separated(self.context.api);
        let head = self.head(reservation.answering(), payload, opening);
        Ok((self.within_deadline(head).await?, None))
    }

    /// What makes a vLLM request prefill and stop; the last of equal keys wins.
    fn vllm_prefill_fields(&self, params: &str) -> String {
        let limit = match self.context.api {
            Api::Chat => r#""max_completion_tokens":1,"#,
            Api::Responses => r#""max_output_tokens":1,"background":false,"store":false,"#,
            Api::Completions | Api::Generate | Api::Messages => "",
        };
        format!(
            "\"stream\":false,\"stream_options\":null,\"max_tokens\":1,\"min_tokens\":0,{limit}\"kv_transfer_params\":{params}"
        )
    }

    /// vLLM with Mooncake: both halves are told of the same transfer, and the decode worker whom to pull
    /// from. Comes with the data-parallel rank that the prefill worker has to take.
    async fn mooncake_payloads(
        &self,
        prefill: &Arc<WorkerSpec>,
    ) -> Result<(Pieces, Pieces, Option<String>), Failure> {
        let rank = mooncake::choose_rank(self.gateway, prefill).await;
        let rank = rank.map_err(|error| Failure::Prefill(Fault::broken(error)))?;
        let transfer = format!("{:032x}", fastrand::u128(..));
        let for_prefill = serde_json::json!({
            "do_remote_decode": true, "do_remote_prefill": false, "transfer_id": transfer,
        });
        let for_decode = serde_json::json!({
            "do_remote_decode": false, "do_remote_prefill": true, "transfer_id": transfer,
            "remote_engine_id": rank.engine_id,
            "remote_bootstrap_addr": mooncake::bootstrap(prefill),
        });
        let fields = self.vllm_prefill_fields(&for_prefill.to_string());
        Ok((
            self.overridden(Engine::Vllm, fields),
            self.overridden(Engine::Vllm, format!("\"kv_transfer_params\":{for_decode}")),
            rank.number,
        ))
    }

    /// The client's request as the worker gets it. Put together of parts that are parsed already, and
    /// with its `Host`: to have the URL written and parsed, and the header made of it again, takes longer
    /// than all else here.
    fn request(&self, spec: &WorkerSpec, payload: Pieces) -> Result<Request<Pieces>, String> {
        let authority = spec.authority();
        let scheme = match spec.url.starts_with("https:") {
            true => Scheme::HTTPS,
            false => Scheme::HTTP,
        };
        let uri = Uri::builder()
            .scheme(scheme)
            .authority(authority)
            .path_and_query(self.target.clone())
            .build()
            .map_err(|error| error.to_string())?;
        let mut headers = self.headers.clone();
        let host = HeaderValue::from_str(authority).map_err(|error| error.to_string())?;
        headers.insert(HOST, host);
        super::authorise(&mut headers, spec);
        let mut request = Request::new(payload);
        *request.method_mut() = Method::POST;
        *request.uri_mut() = uri;
        *request.headers_mut() = headers;
        Ok(request)
    }

    /// Starts the prefill worker's half, which ends with what is returned. The receiver
    /// gets word if that half fails, and `watch` if it succeeds. `rank` is the data-parallel rank that
    /// has to take it, if it matters.
    fn send_prefill(
        &self,
        spec: &Arc<WorkerSpec>,
        payload: Pieces,
        rank: Option<String>,
        watch: PrefillWatch,
    ) -> (PrefillHalf, oneshot::Receiver<Fault>) {
        let (sender, receiver) = oneshot::channel();
        let gateway = Arc::clone(self.gateway);
        let spec = Arc::clone(spec);
        let request = self.request(&spec, payload).map(|mut request| {
            if let Some(Ok(rank)) = rank.map(HeaderValue::try_from) {
                request.headers_mut().insert(DATA_PARALLEL_RANK, rank);
            }
            request
        });
        let half = PrefillHalf::spawn(async move {
            let result = async {
                let request = request.map_err(Fault::broken)?;
                let again = request.clone();
                let again = || is_alone(&gateway.fleet, &spec).then_some(again);
                let sent = reuse::send(&gateway.client, request, again).await;
                let response =
                    sent.map_err(|failure| unanswered(failure, &gateway.fleet, &spec))?;
                let (parts, incoming) = response.into_parts();
                if gateway.is_refused_by(&spec, parts.status) {
                    return Err(Fault::of_key());
                }
                if !parts.status.is_success() {
                    let whole = collect(incoming).await?;
                    return Err(Fault::answered(Response::from_parts(parts, whole)));
                }
                let begin = drain(incoming).await.map_err(Fault::broken)?;
                let is_whole = begin.len() < DRAINED_BYTES;
                let error = sse::first_event(&begin).and_then(|event| sse::error_in(&event));
                match error {
                    Some(_) if is_whole => Err(Fault::answered(Response::from_parts(parts, begin))),
                    None if !sse::is_abort(&begin) => Ok(()),
                    _ => Err(Fault::broken(super::fault::excerpt(&begin))),
                }
            };
            match result.await {
                Ok(()) => watch.ended(),
                Err(fault) => {
                    let _ = sender.send(fault);
                }
            }
        });
        (half, receiver)
    }

    /// The answer's head, with the first event of a stream or all of anything else. Boxed, for what waits
    /// for it is copied several times on its way into the request's state.
    fn head<'a>(
        &'a self,
        spec: &'a Arc<WorkerSpec>,
        payload: Pieces,
        opening: Opening,
    ) -> Pin<Box<impl Future<Output = Result<Head, Failure>> + use<'a>>> {
        Box::pin(self.unboxed_head(spec, payload, opening))
    }

    async fn unboxed_head(
        &self,
        spec: &Arc<WorkerSpec>,
        payload: Pieces,
        opening: Opening,
    ) -> Result<Head, Failure> {
        let broke = |message: String| Failure::Answering(Fault::broken(message));
        let request = self.request(spec, payload.clone()).map_err(broke)?;
        let gateway = self.gateway;
        let again = || {
            is_alone(&gateway.fleet, spec)
                .then(|| self.request(spec, payload).ok())
                .flatten()
        };
        let sent = reuse::send(&gateway.client, request, again).await;
        let response =
            sent.map_err(|failure| Failure::Answering(unanswered(failure, &gateway.fleet, spec)))?;
        let status = response.status();
        if gateway.is_refused_by(spec, status) {
            return Err(Failure::Answering(Fault::of_key()));
        }
        if status == StatusCode::SWITCHING_PROTOCOLS {
            return Err(broke(
                "switched protocols, which nobody asked for".to_owned(),
            ));
        }
        let is_stream = response
            .headers()
            .get(CONTENT_TYPE)
            .is_some_and(|value| value.as_bytes().starts_with(b"text/event-stream"));
        let (parts, mut incoming) = response.into_parts();
        if status.is_success() && is_stream {
            let first = first_event(&mut incoming, opening).await;
            let (begin, is_error) = first.map_err(broke)?;
            if !is_error {
                return Ok(Head::Stream(Response::from_parts(parts, incoming), begin));
            }
            let rest = collect(incoming).await.map_err(Failure::Answering)?;
            let whole: Bytes = [begin, rest].concat().into();
            return self.judged(Response::from_parts(parts, whole));
        }
        let whole = collect(incoming).await.map_err(Failure::Answering)?;
        self.judged(Response::from_parts(parts, whole))
    }

    /// An answer that is passed on, or the failure that it is.
    fn judged(&self, answer: Response<Bytes>) -> Result<Head, Failure> {
        let status = status_of(&answer);
        let prompt = &self.placement.prompt;
        let counted = (prompt.unit == Unit::Tokens).then_some(prompt.length as u64);
        if let Some(told) = too_long::translated(self.context.api, status, &answer, counted) {
            return Ok(Head::Whole(told, StatusCode::BAD_REQUEST));
        }
        if let (StatusCode::NOT_FOUND, Some(model)) = (status, &self.scanned.model)
            && self.gateway.models.is_unknown(model)
        {
            let told = models::unknown(self.context.api, model).to_string();
            let mut answer = Response::new(Bytes::from(told));
            *answer.status_mut() = status;
            let json = HeaderValue::from_static("application/json");
            answer.headers_mut().insert(CONTENT_TYPE, json);
            return Ok(Head::Whole(answer, status));
        }
        let is_full = status == StatusCode::TOO_MANY_REQUESTS;
        let is_empty = status.is_success() && is_no_answer(&answer);
        if status.is_server_error() || is_full || is_empty {
            return Err(Failure::Answering(Fault::answered(answer)));
        }
        Ok(Head::Whole(answer, status))
    }
}

/// What becomes of the events that open a stream and have no text yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Opening {
    /// It is passed on like any other.
    Passed,
    /// The one of a chat or a message waits for the next one, for [`OPENING_PATIENCE`].
    HeldBriefly,
    /// Those of `/v1/responses` wait for the first event of the answer itself: engines send them before the
    /// request is scheduled, and they are no sign of its prefill's end.
    HeldForAnswer,
}

impl Opening {
    /// Of a request that was prefilled elsewhere.
    fn of_separated(api: Api) -> Self {
        match api {
            Api::Responses => Self::HeldForAnswer,
            _ => Self::HeldBriefly,
        }
    }

    /// Whether this event waits for the next one.
    fn holds(self, event: &[u8]) -> bool {
        match self {
            Self::Passed => false,
            Self::HeldBriefly => sse::is_opening(event),
            Self::HeldForAnswer => sse::is_announcement(event),
        }
    }
}

/// Reads a stream until its first event with data has ended; true if that is an error. However the
/// stream is cut, and whatever comments precede it, nothing of it has been passed on by then.
async fn first_event(incoming: &mut Incoming, opening: Opening) -> Result<(Bytes, bool), String> {
    let mut held_until: Option<Instant> = None;
    let mut begin = BytesMut::new();
    loop {
        let frame = match held_until {
            None => incoming.frame().await,
            Some(until) => match tokio::time::timeout_at(until, incoming.frame()).await {
                Ok(frame) => frame,
                Err(_) => return Ok((begin.freeze(), false)),
            },
        };
        let data = match frame {
            Some(Ok(frame)) => frame.into_data().unwrap_or_default(),
            Some(Err(error)) => return Err(describe(error)),
            None => return Err("the stream ended before its first event".to_owned()),
        };
        if begin.is_empty() {
            // One frame holds the first event, mostly: it is not copied then.
            if let Some(event) = sse::first_event(&data)
                && !opening.holds(&event)
            {
                return Ok((data, sse::error_in(&event).is_some()));
            }
        }
        let searched = begin.len();
        begin.extend_from_slice(&data);
        // An event ends with a line: without a new one there is nothing to look for.
        let has_line = memchr::memchr2(b'\n', b'\r', &begin[searched..]).is_some();
        if has_line {
            let mut events = sse::events(&begin);
            if let Some(event) = events.find(|event| !opening.holds(event)) {
                let is_error = sse::error_in(&event).is_some();
                drop(events);
                return Ok((begin.freeze(), is_error));
            }
            drop(events);
            let is_timed = opening == Opening::HeldBriefly && held_until.is_none();
            if is_timed && sse::first_event(&begin).is_some() {
                held_until = Some(Instant::now() + OPENING_PATIENCE);
            }
        }
        if begin.len() > MAX_FIRST_EVENT_BYTES {
            return Ok((begin.freeze(), false));
        }
    }
}

/// A request that got no answer; the fleet is told where the worker does not listen.
fn unanswered(
    failure: hyper_util::client::legacy::Error,
    fleet: &Fleet,
    worker: &Arc<WorkerSpec>,
) -> Fault {
    let fault = Fault::unanswered(failure);
    fault.report(fleet, worker);
    fault
}

/// Whether no other worker could take a request in the place of this one. A body that breaks connections
/// looks like one that meets a closed connection: where there is another worker, that one is asked.
fn is_alone(fleet: &Fleet, worker: &WorkerSpec) -> bool {
    !fleet.could_place_elsewhere(std::slice::from_ref(&worker.id))
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
        Err(error) => Err(Fault::broken(error.to_string())),
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
