//! One request from the client's headers to the answer's first bytes: decide, send to one worker or
//! to two, and try elsewhere as long as nothing of the answer has been passed on.

use super::admission::{NotAdmitted, Permit};
use super::apis::{Api, Waits};
use super::attempt::Head;
use super::body::{Scanned, Scanner};
use super::buffers::NotCollected;
use super::departure::{self, Stay};
use super::doctor::Turn;
use super::exchange::{Exchange, RequestContext};
use super::fault::{
    Failure, Fault, SHUTTING_DOWN, Suspects, TIME_IS_OVER, excerpt, from_worker, is_refusal, relay,
};
use super::headers::{REQUEST_ID, header};
use super::normalise;
use super::patience::Opening;
use super::stream::{Answer, Counted, Held, PrefillHalf};
use super::too_long;
use super::usage::usage_of_answer;
use super::waiting::{self, NotPlaced, retried_after};
use super::{Gateway, Reply, error_of, session, stored, with_body};
use crate::config::WorkerSpec;
use bytes::Bytes;
use decision::fleet::prefix::hash::{PromptHashes, Unit};
use decision::fleet::{
    ESTIMATE_BLOCK_TOKENS, Outcome, Refused, Request as Placement, Reservation, SGLANG_GROUP,
    Separable, random_id,
};
use decision::policy::{Decision, Reason, Refusal, Route};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{CONTENT_ENCODING, HeaderMap, HeaderName, HeaderValue};
use hyper::http::uri::PathAndQuery;
use hyper::{Request, Response, StatusCode, Uri};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::time::Instant;

pub(super) const DECISION_ID: HeaderName = HeaderName::from_static("x-deltaserve-decision-id");

/// A body that broke so many workers' connections is not tried on another: it may end every engine
/// that gets it.
const MAX_BROKEN: usize = 2;

/// Once a separated request was answered with an error, it is tried once more and no further: whether
/// its KV did not arrive or the body itself is at fault, the answer does not say.
const MAX_ERRORS_OF_SEPARATED: usize = 2;

/// How often a request on a silent worker looks for another one, where there is none.
const LOOK_ELSEWHERE: Duration = Duration::from_millis(500);

/// Serves one generation request.
pub(super) async fn handle(
    gateway: Arc<Gateway>,
    mut context: RequestContext,
    request: Request<Incoming>,
) -> Response<Reply> {
    if !gateway.fleet.has_kept_queues() {
        return traced(&gateway, context, request).await;
    }
    let stay = Stay::new();
    context.stay = Some(stay.clone());
    let serving = async move { traced(&gateway, context, request).await };
    departure::outlive(stay, serving).await
}

async fn traced(
    gateway: &Arc<Gateway>,
    mut context: RequestContext,
    request: Request<Incoming>,
) -> Response<Reply> {
    let tracer = gateway.tracer.as_ref();
    context.trace = tracer.and_then(|tracer| tracer.begin(context.api, request.headers()));
    let response = serve(gateway, &mut context, request).await;
    // Of a stream it goes on with the answer.
    if let Some(trace) = context.trace {
        trace.answered(response.status());
    }
    response
}

async fn serve(
    gateway: &Arc<Gateway>,
    context: &mut RequestContext,
    request: Request<Incoming>,
) -> Response<Reply> {
    let (api, deadline) = (context.api, context.deadline);
    let received_s = gateway.fleet.now_s();
    let (parts, incoming) = request.into_parts();
    if let Some(refusal) = encoded(gateway, api, &parts.headers) {
        Box::pin(context.client.pass_over(&parts.headers, incoming)).await;
        return refusal;
    }
    let mut scanner = scanner_of(gateway, api);
    let more = |begin: &[u8], bytes| scanner.scan_ahead(begin, bytes);
    let (client, headers) = (&context.client, &parts.headers);
    let owner = gateway
        .keys
        .owner(gateway.keys.tenant(headers), client.address);
    let collected = gateway.collect(client, headers, owner, incoming, deadline, more);
    let (bytes, _budget) = match collected.await {
        Ok(collected) => collected,
        Err(failure) => return uncollected(gateway, api, &failure),
    };
    let read = read(gateway, api, &parts.headers, bytes, scanner, received_s);
    let Arrived {
        bytes,
        scanned,
        mut placement,
        own_fields,
    } = match read {
        Ok(arrived) => arrived,
        Err(refusal) => return *refusal,
    };
    if let Some(trace) = &mut context.trace {
        trace.event("body");
        trace.note("deltaserve.request_id", Some(placement.request_id.as_str()));
        trace.note("deltaserve.session_id", placement.session_id.as_deref());
        let model = scanned.model.clone().map(session::bounded);
        trace.note("gen_ai.request.model", model);
    }
    let headers = gateway.forwarded(parts.headers, &placement.request_id);
    if scanned.stream && api.shape().waits != Waits::InSilence {
        context.client.may_wait(Opening {
            api,
            request_id: headers.get(REQUEST_ID).cloned(),
            model: (api == Api::Responses)
                .then(|| scanned.model.clone())
                .flatten(),
            stored: (api == Api::Responses).then(|| Arc::clone(&gateway.stored)),
        });
    }
    placement.client = owner;
    let patience = Duration::from_secs_f64(gateway.config.queue_timeout_s);
    let permit = match gateway.admission.enter(owner, patience, deadline).await {
        Ok(permit) => permit,
        Err(refusal) => return not_admitted(gateway, api, refusal),
    };
    if let Some(trace) = &mut context.trace {
        trace.event("admitted");
    }
    let parsed = (&bytes, &scanned);
    let completed = complete(gateway, api, parsed, &mut placement, owner, deadline);
    let text = match completed.await {
        Ok(text) => text,
        Err(refusal) => return *refusal,
    };
    let recorder = gateway.recorder.as_ref();
    let recording = recorder.and_then(|it| it.came(&placement));
    let mut exchange = Exchange {
        gateway,
        context,
        target: target_of(api, &parts.uri),
        headers,
        bytes,
        scanned,
        placement,
        text,
        recording,
        is_repeated: AtomicBool::new(false),
        own_fields,
        decision_id: None,
    };
    let mut response = exchange.run(permit).await;
    // Failures too: what became of them stands in the log under it.
    if let Some(id) = exchange.decision_id.take() {
        response.headers_mut().insert(DECISION_ID, id);
    }
    gateway.buffers.give_back(exchange.bytes);
    response
}

/// A request as routing reads it.
pub(super) struct Arrived {
    pub bytes: Bytes,
    pub scanned: Scanned,
    pub placement: Placement,
    /// What the worker calls otherwise than the client does: see [`Exchange::own_fields`].
    pub own_fields: String,
}

/// Reads requests' bodies as this router's configuration wants.
pub(super) fn scanner_of(gateway: &Gateway, api: Api) -> Scanner {
    let scanner = Scanner::new(api, gateway.fleet.token_block(), ESTIMATE_BLOCK_TOKENS);
    scanner
        .normalising(gateway.config.normalise_prompts)
        .counting(&gateway.pictures)
}

/// A refusal of `api`, counted.
pub(super) fn refuse(
    gateway: &Gateway,
    api: Api,
    (status, kind): (StatusCode, &str),
    message: &str,
) -> Response<Reply> {
    gateway.metrics.refused(status);
    error_of(api, status, kind, message)
}

/// What a client is told whose body is compressed, if it is.
pub(super) fn encoded(gateway: &Gateway, api: Api, headers: &HeaderMap) -> Option<Response<Reply>> {
    let encoding = headers.get(CONTENT_ENCODING)?;
    let message = "content-encoding: expected none: prompts are read to be routed";
    let status = StatusCode::UNSUPPORTED_MEDIA_TYPE;
    let refused = || refuse(gateway, api, (status, "invalid_request_error"), message);
    (encoding != "identity").then(refused)
}

/// What a client is told whose body was not taken.
pub(super) fn uncollected(gateway: &Gateway, api: Api, failure: &NotCollected) -> Response<Reply> {
    let message = failure.message(gateway.config.max_body_bytes);
    refuse(gateway, api, failure.status(), &message)
}

/// What a client is told whose request may not run.
pub(super) fn not_admitted(gateway: &Gateway, api: Api, refusal: NotAdmitted) -> Response<Reply> {
    let (status, kind, message) = refusal.told();
    let response = refuse(gateway, api, (status, kind), message);
    retried_after(response, refusal.retry_after_s())
}

/// Reads a request of which headers and body are there. `scanner` may have read of the body ahead.
pub(super) fn read(
    gateway: &Gateway,
    api: Api,
    headers: &HeaderMap,
    mut bytes: Bytes,
    scanner: Scanner,
    received_s: f64,
) -> Result<Arrived, Box<Response<Reply>>> {
    let normalises = gateway.config.normalise_prompts;
    let invalid = |message: &str| {
        let kind = (StatusCode::BAD_REQUEST, "invalid_request_error");
        Err(Box::new(refuse(gateway, api, kind, message)))
    };
    let mut scanned = match scanner.scan(&bytes) {
        Ok(scanned) => scanned,
        Err(malformed) => return invalid(&malformed.to_string()),
    };
    if normalises
        && api == Api::Messages
        && gateway.found.is_all_vllm()
        && let Some(changed) = normalise::later_systems(&bytes)
    {
        bytes = changed.into();
        scanned = match scanner_of(gateway, api).scan(&bytes) {
            Ok(scanned) => scanned,
            Err(malformed) => return invalid(&malformed.to_string()),
        };
        gateway.metrics.normalised(normalise::LATER_SYSTEMS);
    }
    if scanned.cut.is_some() {
        gateway.metrics.normalised(normalise::ATTRIBUTION);
    }
    let named = scanned.model.as_deref();
    let model = named.and_then(|name| gateway.aliases.model(name));
    let model = model.map(str::to_owned);
    let previous = scanned.previous_response.as_deref();
    let previous = previous.and_then(|told| gateway.stored.own_id(told));
    let names = [("model", &model), ("previous_response_id", &previous)];
    let names = names.into_iter().filter_map(|(key, name)| {
        let name = serde_json::Value::from(name.as_deref()?);
        Some(format!("\"{key}\":{name}"))
    });
    let own_fields = names.collect::<Vec<_>>().join(",");
    if model.is_some() {
        scanned.model = model;
    }
    let not_serving = || gateway.models.not_serving(scanned.model.as_deref());
    if let Some(message) = gateway
        .vocabulary
        .refusal(scanned.largest_token, not_serving)
    {
        return invalid(&message);
    }
    let tenant = gateway.keys.tenant(headers);
    let in_body = std::mem::take(&mut scanned.session);
    let prompt = &scanned.prompt;
    let is_shared = |key: &str| gateway.cache_keys.is_shared(tenant, key, prompt);
    let session_id = session::of(headers, in_body, is_shared);
    let placement = Placement {
        request_id: header(headers, &REQUEST_ID)
            .or_else(|| scanned.rid.clone())
            .map(session::bounded)
            .unwrap_or_else(|| random_id(fastrand::u64(..))),
        // Taken, not copied: a state a token is more than the body itself.
        prompt: std::mem::take(&mut scanned.prompt),
        max_output_tokens: scanned.max_output_tokens,
        stream: scanned.stream,
        hints: session::hints(headers, session_id.as_deref()),
        session_id,
        tenant,
        payer: gateway.keys.payer(headers),
        client: None,
        may_be_aside: false,
        received_s: Some(received_s),
        arrived_s: None,
        separable: separable(gateway, api, &scanned),
        answers: scanned.answers.saturating_mul(scanned.prompts as u64),
        prompts: scanned.prompts as u64,
    };
    Ok(Arrived {
        bytes,
        scanned,
        placement,
        own_fields,
    })
}

/// Completes what is known of a request that has been let in: the tokens of its text, and whether they are too
/// many. Comes with the text of a prompt that was encoded, as it stands in the body.
pub(super) async fn complete(
    gateway: &Gateway,
    api: Api,
    (bytes, scanned): (&Bytes, &Scanned),
    placement: &mut Placement,
    owner: Option<u64>,
    deadline: Instant,
) -> Result<Option<PromptHashes>, Box<Response<Reply>>> {
    let mut text = None;
    let encoder = gateway.encoder.read().clone();
    if let Some(encoder) = encoder {
        // Boxed, so that requests of routers that have none do not carry the room for it.
        let block = gateway.fleet.token_block();
        let encoding = encoder.encode(api, bytes, scanned, block, owner);
        let encoding = Box::pin(encoding);
        // Past the deadline the first attempt ends the request.
        if let Ok(Some(prompt)) = tokio::time::timeout_at(deadline, encoding).await {
            text = Some(std::mem::replace(&mut placement.prompt, prompt));
        }
    }
    let prompt = &placement.prompt;
    placement.may_be_aside = session::may_be_aside(scanned, prompt, bytes);
    if let Some(found) = too_long::of_request(gateway, api, bytes, scanned, prompt) {
        gateway.metrics.refused(StatusCode::BAD_REQUEST);
        let refusal = with_body(StatusCode::BAD_REQUEST, &found.told(api));
        return Err(Box::new(refusal));
    }
    let namespace = scanned
        .apart
        .namespace(scanned.model.as_deref(), &gateway.models);
    placement.prompt = std::mem::take(&mut placement.prompt).within(namespace);
    Ok(text)
}

/// Ids of the workers that cannot take a request, whatever they have to do: they serve another model, or another
/// one has the response that it goes on from.
pub(super) async fn unable(
    gateway: &Gateway,
    scanned: &Scanned,
) -> Result<Vec<String>, Box<Response<Reply>>> {
    let mut unable = gateway.models.not_serving(scanned.model.as_deref());
    if let Some(id) = &scanned.previous_response {
        Box::pin(stored::find(gateway, id)).await;
        match gateway.stored.others_than_has(id, &gateway.fleet) {
            Ok(others) => unable.extend(others),
            Err(stored::Gone) => {
                let refusal = stored::not_found(id, StatusCode::BAD_REQUEST);
                return Err(Box::new(refusal));
            }
        }
    }
    Ok(unable)
}

/// What a client is told whose request no worker got.
pub(super) fn unplaced(
    gateway: &Gateway,
    api: Api,
    (scanned, placement): (&Scanned, &Placement),
    not_placed: &NotPlaced,
) -> Response<Reply> {
    if let Some(response) = waiting::answer(gateway, api, not_placed) {
        return response;
    }
    let is_whole = placement.separable != Separable::ByAll;
    if is_whole && !gateway.fleet.serves_alone() {
        gateway.metrics.refused(StatusCode::BAD_REQUEST);
        let what = match scanned.answers {
            2.. => "n > 1".to_owned(),
            _ if scanned.previous_response.is_some() => "previous_response_id".to_owned(),
            _ if !gateway.found.can_share(api) => {
                format!("{} before {}", api.path(), api.shape().separates.words())
            }
            _ => "a request with several prompts".to_owned(),
        };
        let message = format!(
            "{what}: cannot be prefilled on one worker and decoded on another, and no worker \
         here serves requests alone"
        );
        let status = StatusCode::BAD_REQUEST;
        return error_of(api, status, "invalid_request_error", &message);
    }
    gateway.metrics.refused(StatusCode::SERVICE_UNAVAILABLE);
    let message = match not_placed {
        NotPlaced::Refused(Refused::ByPolicy(Refusal::OutsideCandidates)) => {
            "the policy chose a worker that is no candidate".to_owned()
        }
        NotPlaced::Refused(Refused::ByPolicy(Refusal::PolicyFailed)) => {
            "the policy failed; the router's log says how".to_owned()
        }
        _ => {
            let state = gateway.fleet.state_of_workers();
            format!("no worker can take the request now: {state}")
        }
    };
    let status = StatusCode::SERVICE_UNAVAILABLE;
    error_of(api, status, "no_candidates", &message)
}

/// Gives a reservation back whose answer came in one piece.
pub(super) fn answered(
    gateway: &Gateway,
    api: Api,
    mut reservation: Reservation,
    status: StatusCode,
    body: &[u8],
) {
    let (outcome, error) = if status.is_success() {
        if api == Api::Responses {
            gateway.stored.note(body, &reservation.answering().id);
        }
        reservation.output(1);
        reservation.report(usage_of_answer(api, body));
        (Outcome::Ok, None)
    } else {
        (Outcome::Rejected, Some(excerpt(body)))
    };
    reservation.finish(outcome, Some(status.as_u16()), error);
}

/// Where the worker gets a request that came to `uri`: at the API's own path, with the client's query.
pub(super) fn target_of(api: Api, uri: &Uri) -> PathAndQuery {
    let own = || PathAndQuery::from_static(api.path());
    match uri.path_and_query() {
        // It is parsed already.
        Some(asked) if asked.path() == api.path() => asked.clone(),
        asked => match asked.and_then(PathAndQuery::query) {
            Some(query) => format!("{}?{query}", api.path())
                .parse()
                .unwrap_or_else(|_| own()),
            None => own(),
        },
    }
}

/// What cannot be prefilled on one worker and decoded on another stays whole: a transfer carries one
/// prompt's KV for one answer. SGLang's carries a batch's too. A response that goes on from another stands where
/// that one is kept.
fn separable(gateway: &Gateway, api: Api, scanned: &Scanned) -> Separable {
    let is_whole = scanned.answers > 1 || scanned.previous_response.is_some();
    if is_whole || !gateway.found.can_share(api) {
        Separable::ByNone
    } else if scanned.prompts > 1 {
        Separable::InGroup(SGLANG_GROUP)
    } else {
        Separable::ByAll
    }
}

/// An attempt whose answer has begun.
struct Success {
    head: Head,
    prefill: Option<PrefillHalf>,
    reservation: Reservation,
}

impl Exchange<'_> {
    async fn run(&mut self, permit: Permit) -> Response<Reply> {
        let gateway = self.gateway;
        let fleet = &gateway.fleet;
        let retries = self.gateway.config.retries;
        let mut exclude = match unable(gateway, &self.scanned).await {
            Ok(unable) => unable,
            Err(refusal) => return *refusal,
        };
        let mut last: Option<(String, Fault)> = None;
        let mut local: Option<Reservation> = None;
        let mut moved: Option<Reservation> = None;
        let mut suspects = Suspects::default();
        let mut has_lost_transfer = false;
        // Work that was taken from one worker for its silence is not taken from a second: whoever is slow for
        // its sake would have it done by all.
        let mut has_moved = false;
        let mut attempts = 0;
        let mut permit = Some(permit);
        let arrived_s = fleet.now_s();
        loop {
            if self.context.stay.as_ref().is_some_and(Stay::has_left) {
                // It was kept for the worker's sake alone: whoever runs it ends it now.
                return std::future::pending().await;
            }
            let is_over = attempts > retries
                || suspects.broken() >= MAX_BROKEN
                || (has_lost_transfer && suspects.count() >= MAX_ERRORS_OF_SEPARATED);
            // Serving alone is no retry: the decode worker has not failed.
            let alone = local.take();
            let is_alone = alone.is_some();
            self.is_repeated.store(last.is_some(), Ordering::Relaxed);
            let placed = match moved.take().or(alone) {
                Some(reservation) => Ok(reservation),
                None if is_over => {
                    // Unlike where no other worker can be asked, there may be one that serves it.
                    suspects.judge(fleet);
                    break;
                }
                None => {
                    attempts += 1;
                    if let Some(trace) = &mut self.context.trace {
                        trace.placing();
                    }
                    let (request, deadline) = (&self.placement, self.context.deadline);
                    let held = Some(&mut permit);
                    let placed = waiting::place(gateway, request, &exclude, held, deadline).await;
                    // What follows is tried again, and queues as what came now.
                    self.placement.arrived_s = Some(arrived_s);
                    placed
                }
            };
            let mut reservation = match placed {
                Ok(reservation) => reservation,
                Err(not_placed) => {
                    if not_placed.is_by_policy() {
                        suspects.judge_alone(fleet);
                    }
                    return self.unplaced(&not_placed, last);
                }
            };
            self.decision_id = HeaderValue::from_str(reservation.decision_id()).ok();
            if let Some(trace) = &mut self.context.trace {
                trace.sending(gateway, &reservation, &mut self.headers);
            }
            // Serving alone is none, nor is what cannot be placed any more.
            if last.is_some() && !is_alone {
                self.gateway.metrics.retried();
            }
            let attempted = tokio::select! {
                attempted = self.attempt_to_its_end(&reservation) => attempted,
                (silent, next) = self.elsewhere(&reservation, &exclude), if !has_moved && attempts <= retries => {
                    has_moved = true;
                    attempts += 1;
                    let message = format!("worker {}: no sign of life", silent.join(", "));
                    let said = message.clone();
                    self.note_failure(&message);
                    if silent.contains(&reservation.answering().id) {
                        reservation.finish(Outcome::WorkerError, None, Some(said));
                    } else {
                        reservation.fail_prefill(Outcome::WorkerError, None, said);
                    }
                    last = Some((String::new(), Fault::broken(message)));
                    exclude.extend(silent);
                    self.decision_id = HeaderValue::from_str(next.decision_id()).ok();
                    moved = Some(next);
                    continue;
                }
                () = gateway.cut_off() => {
                    self.note_failure(SHUTTING_DOWN);
                    let message = Some(SHUTTING_DOWN.to_owned());
                    reservation.finish(Outcome::RouterError, Some(503), message);
                    let status = StatusCode::SERVICE_UNAVAILABLE;
                    return self.error(status, "shutting_down", SHUTTING_DOWN);
                }
            };
            let answering = Arc::clone(reservation.answering());
            let failure = match attempted {
                Ok((head, prefill)) => {
                    if head.status().is_success() {
                        suspects.judge_served_by(fleet, &answering);
                    }
                    let success = Success {
                        head,
                        prefill,
                        reservation,
                    };
                    return self.pass_on(success, &answering, permit.take());
                }
                Err(failure) => failure,
            };
            match failure {
                Failure::Timeout => {
                    self.note_failure(TIME_IS_OVER);
                    let message = Some(TIME_IS_OVER.to_owned());
                    reservation.finish(Outcome::Timeout, Some(504), message);
                    return self.error(StatusCode::GATEWAY_TIMEOUT, "timeout", TIME_IS_OVER);
                }
                Failure::Answering(mut fault) => {
                    fault.message = format!("worker {}: {}", answering.id, fault.message);
                    self.note_failure(&fault.message);
                    let message = Some(fault.message.clone());
                    suspects.note(&answering, reservation.begun_s(), &fault);
                    if fault.kind == super::fault::Kind::Broken {
                        reservation.leave_undecided();
                    }
                    match reservation.prefill() {
                        Some(prefill) if fault.is_error() && !has_lost_transfer => {
                            has_lost_transfer = true;
                            let pair = (&*answering, &**prefill);
                            let may_retry = attempts <= retries;
                            local = self.without_transfer(pair, may_retry, &mut exclude);
                        }
                        _ => exclude.push(answering.id.clone()),
                    }
                    reservation.finish(fault.outcome(), fault.code(), message);
                    last = Some((answering.id.clone(), fault));
                }
                Failure::Prefill(mut fault) => {
                    let Some(prefill) = reservation.prefill().cloned() else {
                        return self.unplaced(&NotPlaced::by_policy(Refusal::NoCandidates), last);
                    };
                    fault.message = format!("prefill worker {}: {}", prefill.id, fault.message);
                    self.note_failure(&fault.message);
                    let message = fault.message.clone();
                    if fault.status().is_some_and(is_refusal) {
                        // The request is at fault, and no other worker would take it.
                        reservation.finish(Outcome::Rejected, fault.code(), Some(message));
                        return relay(&prefill.id, fault);
                    }
                    suspects.note(&prefill, reservation.begun_s(), &fault);
                    if fault.kind == super::fault::Kind::Broken {
                        reservation.leave_undecided();
                    }
                    exclude.push(prefill.id.clone());
                    // Before the reservation goes, so that its room goes to nobody else.
                    if decision::fleet::abilities(&answering).0 {
                        let reason = Reason::PrefillFailed;
                        local = self.place_locally(&answering.id, &exclude, reason).ok();
                    }
                    reservation.fail_prefill(fault.outcome(), fault.code(), message);
                    last = Some((prefill.id.clone(), fault));
                }
            }
        }
        self.unplaced(&NotPlaced::by_policy(Refusal::NoCandidates), last)
    }

    /// One attempt. Where one of its workers must not lose a queued request, it does not end with the client.
    async fn attempt_to_its_end(
        &self,
        reservation: &Reservation,
    ) -> Result<(Head, Option<PrefillHalf>), Failure> {
        let workers = [Some(reservation.answering()), reservation.prefill()];
        let may_abort = |worker: &Arc<WorkerSpec>| worker.may_abort_queued();
        let is_free = workers.into_iter().flatten().all(may_abort);
        let stay = self.context.stay.as_ref();
        let _staying = stay.filter(|_| !is_free).map(Stay::hold);
        self.attempt(reservation).await
    }

    fn note_failure(&mut self, message: &str) {
        if let Some(trace) = &mut self.context.trace {
            trace.failed(message);
        }
    }

    /// Serves the request on the decode worker alone, after its prefill worker or its transfer failed.
    fn place_locally(
        &self,
        worker: &str,
        exclude: &[String],
        reason: Reason,
    ) -> Result<Reservation, Refusal> {
        self.gateway
            .fleet
            .place_on(&self.placement, worker, exclude, |slot| {
                Decision::unpredicted(Route::Local { worker: slot }, reason)
            })
    }

    /// After a decode worker answered a separated request with an error, which is how vLLM says that the
    /// KV did not arrive: names in `exclude` whom the next attempt has to leave out, both workers of the
    /// pair if others can take the request, else the decode worker. Where there are no others, the
    /// decode worker itself serves the request alone, if its engine can.
    fn without_transfer(
        &self,
        (decode, prefill): (&WorkerSpec, &WorkerSpec),
        may_retry: bool,
        exclude: &mut Vec<String>,
    ) -> Option<Reservation> {
        let fleet = &self.gateway.fleet;
        let pair = [decode.id.clone(), prefill.id.clone()];
        for left_out in [&pair[..], &pair[..1]] {
            let without = [exclude, left_out].concat();
            if may_retry && fleet.could_place_elsewhere(&without) {
                *exclude = without;
                return None;
            }
        }
        if decision::fleet::can_serve_whole(decode)
            && let Ok(alone) = self.place_locally(&decode.id, exclude, Reason::TransferFailed)
        {
            return Some(alone);
        }
        exclude.push(decode.id.clone());
        None
    }

    /// Waits until a worker of the reservation is down or suspected to hang while another could serve
    /// the request, and places it there. Comes back with the silent workers' ids.
    async fn elsewhere(
        &self,
        reservation: &Reservation,
        exclude: &[String],
    ) -> (Vec<String>, Reservation) {
        let mut alarms = self.gateway.alarms.subscribe();
        loop {
            let silent = reservation.silent_workers();
            if !silent.is_empty() {
                // Apart from the request's own state, which every request would be larger by.
                if let Some(next) = Box::pin(self.leave(&silent, exclude)).await {
                    return (silent, next);
                }
            } else if alarms.changed().await.is_err() {
                // The router ends.
                return std::future::pending().await;
            }
        }
    }

    /// Places the request on others than the `silent` workers, if that comes about before they give a sign
    /// of life.
    async fn leave(&self, silent: &[String], exclude: &[String]) -> Option<Reservation> {
        let fleet = &self.gateway.fleet;
        let exclude = [exclude, silent].concat();
        if fleet.could_place_elsewhere(&exclude) {
            // It keeps its permit: it may still be answered where it is.
            let (request, deadline) = (&self.placement, self.context.deadline);
            let room = waiting::place(self.gateway, request, &exclude, None, deadline);
            let recovery = async {
                while silent.iter().any(|id| fleet.is_doubtful(id)) {
                    tokio::time::sleep(LOOK_ELSEWHERE).await;
                }
            };
            tokio::select! {
                biased;
                placed = room => if let Ok(next) = placed {
                    return Some(next);
                },
                () = recovery => return None,
            }
        }
        tokio::time::sleep(LOOK_ELSEWHERE).await;
        None
    }

    fn error(&self, status: StatusCode, kind: &str, message: &str) -> Response<Reply> {
        error_of(self.context.api, status, kind, message)
    }

    fn unplaced(&self, not_placed: &NotPlaced, last: Option<(String, Fault)>) -> Response<Reply> {
        if let Some((worker, fault)) = last {
            return match fault.answer {
                Some(_) => relay(&worker, fault),
                None => {
                    let (status, kind) = fault.unanswered_status();
                    self.error(status, kind, &fault.message)
                }
            };
        }
        let request = (&self.scanned, &self.placement);
        unplaced(self.gateway, self.context.api, request, not_placed)
    }

    /// Has the cache doctor see the prompt, whose KV a worker now has. A call beside a conversation says nothing of it.
    fn examine(&mut self, decision_id: &str, worker: &str) {
        if !self.scanned.pictures.is_empty() {
            self.count_pictures(decision_id);
        }
        let placement = &mut self.placement;
        let Some(session) = placement.session_id.as_deref() else {
            return;
        };
        if placement.may_be_aside || self.scanned.prompts > 1 {
            return;
        }
        let (is_exact, tokens) = (
            placement.prompt.unit == Unit::Tokens,
            placement.prompt.tokens(),
        );
        self.gateway.doctor.began(Turn {
            tenant: placement.tenant,
            session,
            decision_id,
            worker,
            api: self.context.api,
            body: &self.bytes,
            scanned: &self.scanned,
            prompt: self
                .text
                .take()
                .unwrap_or_else(|| std::mem::take(&mut placement.prompt)),
            tokens: is_exact.then_some(tokens),
        });
    }

    /// Has what the engine counts say what the prompt's pictures came to.
    fn count_pictures(&self, decision_id: &str) {
        let (scanned, placement) = (&self.scanned, &self.placement);
        let session = placement.session_id.clone();
        let whose = session.map(|session| (placement.tenant, session));
        let before = whose.as_ref();
        let before = before.and_then(|whose| self.gateway.doctor.counted(whose));
        let bytes = self.text.as_ref().unwrap_or(&placement.prompt).length;
        let (model, pictures) = (scanned.model.as_deref(), &scanned.pictures);
        let counter = &self.gateway.pictures;
        counter.began(decision_id, model, whose, bytes, pictures, before);
    }

    fn pass_on(
        &mut self,
        success: Success,
        answering: &WorkerSpec,
        permit: Option<Permit>,
    ) -> Response<Reply> {
        let Success {
            head,
            prefill,
            reservation,
        } = success;
        if head.status().is_success() {
            if let Some(recording) = self.recording.take() {
                recording.began(reservation.decision_id());
            }
            self.examine(reservation.decision_id(), &answering.id);
        }
        let response = match head {
            Head::Whole(response, status) => {
                let api = self.context.api;
                answered(self.gateway, api, reservation, status, response.body());
                if let Some(prefill) = prefill {
                    prefill.linger();
                }
                response.map(|body| Reply::Whole(Full::from(body)))
            }
            Head::Stream(response, first) => {
                let status = response.status().as_u16();
                if self.context.api == Api::Responses {
                    self.gateway.stored.note(&first, &answering.id);
                }
                let mut trace = self.context.trace.take();
                if let Some(trace) = &mut trace {
                    trace.note_status(status);
                    trace.first_event();
                }
                let api = self.context.api;
                let counted = Counted::new(api, status, reservation, trace);
                response.map(|incoming| {
                    let client = Arc::clone(&self.context.client);
                    let held = Held { prefill, permit };
                    let answer = Answer::new(first, incoming, counted, client, held);
                    Reply::Stream(Box::new(answer))
                })
            }
        };
        from_worker(response, &answering.id)
    }
}
