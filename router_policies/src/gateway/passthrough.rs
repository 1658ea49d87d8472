//! Questions about text and models that any worker answers: counting and splitting tokens, embeddings.
//!
//! They take no part in routing: nothing is cached for them. They go to the worker with the fewest requests, these
//! and those that its load report tells of included, in turn where several have as few, and to another if that one
//! fails.

use super::client::Client;
use super::fault::{Fault, SHUTTING_DOWN, from_worker};
use super::splice::Pieces;
use super::waiting::retried_after;
use super::{Gateway, Reply, apis, error, reuse, session};
use crate::config::WorkerSpec;
use bytes::Bytes;
use decision::policy::Role;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::{Request, Response, StatusCode};
use parking_lot::Mutex;
use serde::Deserialize;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// `POST` on these is passed on as it is. All are served by SGLang (0.5.23), the first four by vLLM
/// (0.32.0) too; what an engine or its model does not serve, it answers itself.
pub(super) const PATHS: [&str; 9] = [
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
    "/v1/tokenize",
    "/v1/detokenize",
    "/v1/rerank",
    "/v1/score",
    "/v1/classify",
];

/// Embeddings of long texts take a while.
const PATIENCE: Duration = Duration::from_secs(120);
const MAX_ANSWER_BYTES: usize = 256 << 20;
/// Workers that are asked before the client is told that it failed.
const TRIES: usize = 2;

/// How many of these requests each worker has, and has had.
#[derive(Default)]
pub(crate) struct Asked(Mutex<HashMap<String, (u32, u64)>>);

/// One of them, on its worker.
pub(super) struct Asking<'a>(&'a Asked, String);

impl Asked {
    fn of(&self, worker: &str) -> (u32, u64) {
        self.0.lock().get(worker).copied().unwrap_or_default()
    }

    pub(super) fn begin(&self, worker: &str) -> Asking<'_> {
        let mut all = self.0.lock();
        let (now, ever) = all.entry(worker.to_owned()).or_default();
        *now += 1;
        *ever += 1;
        Asking(self, worker.to_owned())
    }

    pub fn forget(&self, worker: &str) {
        self.0.lock().remove(worker);
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        if let Some((now, _)) = self.0.0.lock().get_mut(&self.1) {
            *now = now.saturating_sub(1);
        }
    }
}

/// What a body says of who can answer it.
#[derive(Default, Deserialize)]
struct Named {
    model: Option<String>,
}

pub(super) fn is_passed_on(path: &str) -> bool {
    PATHS.contains(&path)
}

/// An error in the shape that the path's clients read.
pub(super) fn refusal(
    path: &str,
    status: StatusCode,
    kind: &str,
    message: &str,
) -> Response<Reply> {
    if path.starts_with(apis::Api::Messages.path()) {
        super::error_of(apis::Api::Messages, status, kind, message)
    } else {
        error(status, kind, message)
    }
}

pub(super) async fn handle(
    gateway: &Arc<Gateway>,
    client: &Client,
    deadline: Instant,
    request: Request<Incoming>,
) -> Response<Reply> {
    let (parts, incoming) = request.into_parts();
    let path = parts.uri.path().trim_end_matches('/').to_owned();
    let target = match parts.uri.query() {
        Some(query) => format!("{path}?{query}"),
        None => path.clone(),
    };
    let refuse = |status: StatusCode, kind: &str, message: &str| {
        gateway.metrics.refused(status);
        refusal(&path, status, kind, message)
    };
    let limit = gateway.config.max_body_bytes;
    let headers = &parts.headers;
    let owner = gateway
        .keys
        .owner(gateway.keys.tenant(headers), client.address);
    let collected = gateway.collect(client, headers, owner, incoming, deadline, |_, _| {});
    let (body, _budget) = match collected.await {
        Ok(collected) => collected,
        Err(failure) => {
            let (status, kind) = failure.status();
            return refuse(status, kind, &failure.message(limit));
        }
    };
    let patience = Duration::from_secs_f64(gateway.config.queue_timeout_s);
    let _permit = match gateway.admission.enter(owner, patience, deadline).await {
        Ok(permit) => permit,
        Err(refusal) => {
            let (status, kind, message) = refusal.told();
            let response = refuse(status, kind, message);
            return retried_after(response, refusal.retry_after_s());
        }
    };
    let request_id = session::request_id(&parts.headers);
    let headers = gateway.forwarded(parts.headers, &request_id);
    let until = deadline.min(Instant::now() + PATIENCE);
    let mut last = None;
    let (workers, pieces) = candidates_of(gateway, &body);
    for worker in workers.into_iter().take(TRIES) {
        let _asking = gateway.asked.begin(&worker.id);
        let mut request =
            match Request::post(format!("{}{target}", worker.url)).body(pieces.clone()) {
                Ok(request) => request,
                Err(failure) => {
                    let status = StatusCode::BAD_REQUEST;
                    return refuse(status, "invalid_request_error", &failure.to_string());
                }
            };
        let mut headers = headers.clone();
        super::authorise(&mut headers, &worker);
        *request.headers_mut() = headers;
        let answer = async {
            let again = request.clone();
            let sent = reuse::send(&gateway.client, request, || Some(again)).await;
            let response = sent.map_err(Fault::unanswered)?;
            if gateway.is_refused_by(&worker, response.status()) {
                return Err(Fault::of_key());
            }
            let (parts, incoming) = response.into_parts();
            let whole = Limited::new(incoming, MAX_ANSWER_BYTES).collect().await;
            let whole: Bytes = whole
                .map_err(|failure| Fault::broken(failure.to_string()))?
                .to_bytes();
            Ok::<_, Fault>(Response::from_parts(parts, whole))
        };
        let answered = tokio::select! {
            answered = tokio::time::timeout_at(until, answer) => answered,
            () = gateway.cut_off() => {
                let status = StatusCode::SERVICE_UNAVAILABLE;
                return refuse(status, "shutting_down", SHUTTING_DOWN);
            }
        };
        match answered {
            Ok(Ok(answer)) if answer.status() != StatusCode::SWITCHING_PROTOCOLS => {
                let answer = answer.map(|body| Reply::Whole(Full::from(body)));
                return from_worker(answer, &worker.id);
            }
            Ok(Ok(_)) => last = Some(format!("worker {}: switched protocols", worker.id)),
            Ok(Err(fault)) => {
                fault.report(&gateway.fleet, &worker);
                last = Some(format!("worker {}: {}", worker.id, fault.message));
            }
            Err(_) => {
                let message = format!("worker {}: no answer in time", worker.id);
                return refuse(StatusCode::GATEWAY_TIMEOUT, "timeout", &message);
            }
        }
    }
    match last {
        Some(message) => refuse(StatusCode::BAD_GATEWAY, "worker_error", &message),
        None => {
            let message = "no worker can take the request now";
            refuse(StatusCode::SERVICE_UNAVAILABLE, "no_candidates", message)
        }
    }
}

/// A body that names a model, with the name of another: every engine's parser takes the last of equal keys.
fn renamed(body: &Bytes, model: &str) -> Pieces {
    let close = memchr::memrchr(b'}', body).unwrap_or(body.len());
    let name = serde_json::Value::from(model);
    Pieces::joined([
        body.slice(..close),
        Bytes::from(format!(",\"model\":{name}")),
        body.slice(close..),
    ])
}

/// The workers that can answer such a request, the best first, and its body as they get it.
pub(super) fn candidates_of(gateway: &Gateway, body: &Bytes) -> (Vec<Arc<WorkerSpec>>, Pieces) {
    let mut workers = candidates(gateway);
    let mut pieces = Pieces::from(body.clone());
    if gateway.models.differ() || !gateway.aliases.is_empty() {
        let mut named: Named = serde_json::from_slice(body).unwrap_or_default();
        let asked = named.model.as_deref();
        if let Some(model) = asked.and_then(|name| gateway.aliases.model(name)) {
            pieces = renamed(body, model);
            named.model = Some(model.to_owned());
        }
        let not_serving = gateway.models.not_serving(named.model.as_deref());
        workers.retain(|worker| !not_serving.contains(&worker.id));
    }
    (workers, pieces)
}

/// Workers that are up, those that serve whole requests first, then by what they have to do.
fn candidates(gateway: &Gateway) -> Vec<Arc<WorkerSpec>> {
    let mut workers = gateway.fleet.snapshot();
    workers.retain(|worker| worker.healthy && !worker.draining);
    workers.sort_by_cached_key(|worker| {
        let serves_part = matches!(worker.spec.role, Role::Prefill | Role::Decode);
        let (now, ever) = gateway.asked.of(&worker.spec.id);
        let reported = worker
            .engine
            .map_or(0, |load| load.running_requests + load.waiting_requests);
        let requests = (worker.load.requests + now).max(reported);
        (worker.suspect, serves_part, requests, ever)
    });
    workers.into_iter().map(|worker| worker.spec).collect()
}
