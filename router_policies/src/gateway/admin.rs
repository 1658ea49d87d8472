//! Everything but generation: liveness, readiness, metrics, workers, decisions, and questions about
//! the model that one worker answers for all.

use super::client::Client;
use super::keys::Wants;
use super::{
    Gateway, Reply, error, guard, json, models, normalise, paths, redact, sessions, stored, ui,
};
use crate::config::{WORKER_FIELDS, WorkerSpec};
use bytes::Bytes;
use decision::fleet::WorkerSnapshot;
use decision::policy::Role;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::http::request::Parts;
use hyper::{Method, Request, Response, StatusCode, Uri};
use serde::Deserialize;
use serde_json::{Value, json as value};
use std::sync::Arc;
use std::time::Duration;

const WORKER_PATIENCE: Duration = Duration::from_secs(10);
const MAX_ADMIN_BODY_BYTES: usize = 1 << 20;

pub(super) async fn handle(
    gateway: &Arc<Gateway>,
    client: &Client,
    request: Request<Incoming>,
) -> Response<Reply> {
    let (head, body) = request.into_parts();
    let mut body = (!http_body::Body::is_end_stream(&body)).then_some(body);
    let answer = answer(gateway, client, &head, &mut body).await;
    if let Some(unwanted) = body {
        client.pass_over(&head.headers, unwanted).await;
    }
    answer
}

pub(super) async fn answer(
    gateway: &Arc<Gateway>,
    client: &Client,
    head: &Parts,
    body: &mut Option<Incoming>,
) -> Response<Reply> {
    let method = &head.method;
    let path = head.uri.path().trim_end_matches('/').to_owned();
    let is_changed = |path: &str| {
        path == "/workers" || path.starts_with("/workers/") || path.starts_with("/record/")
    };
    let changes = *method != Method::GET && is_changed(&path);
    if changes
        && let Some((status, message)) = guard::refusal(gateway, &head.headers, body.is_some())
    {
        return error(status, "forbidden", message);
    }
    let wants = match path.as_str() {
        "/metrics" => Some(Wants::Metrics),
        "/workers" | "/decisions" | "/sessions" | "/record" | "/server_info"
        | "/get_server_info" => Some(Wants::Inside),
        path if tells_of_models(path) => Some(Wants::Model),
        path if path.starts_with("/workers/") || path.starts_with("/sessions/") => {
            Some(Wants::Inside)
        }
        _ => None,
    };
    if let Some(wants) = wants.filter(|_| !changes)
        && let Some((status, kind, message)) = gateway.keys.refusal(&head.headers, wants)
    {
        return error(status, kind, message);
    }
    if wants == Some(Wants::Inside)
        && !changes
        && let Some((status, message)) = guard::refusal_to_show(gateway, &head.headers)
    {
        return error(status, "forbidden", message);
    }
    if let Some(refusal) = paths::refusal(method, &path) {
        return refusal;
    }
    match (method, path.as_str()) {
        // Load balancers ask with HEAD; the server leaves the body out.
        (&Method::GET | &Method::HEAD, "/health" | "/livez" | "/liveness") => {
            text(StatusCode::OK, "ok\n")
        }
        (&Method::GET | &Method::HEAD, "/readyz" | "/readiness") => {
            if gateway.is_ready() {
                text(StatusCode::OK, "ready\n")
            } else {
                let message = "no worker can take a request now";
                error(StatusCode::SERVICE_UNAVAILABLE, "no_candidates", message)
            }
        }
        (&Method::GET | &Method::HEAD, "/metrics") => {
            let body = gateway.metrics.render(
                &gateway.fleet.snapshot(),
                &gateway.fleet.tenants(),
                gateway.admission.queued(),
                gateway.fleet.waiting_turns(),
                gateway.fleet.routers(),
            );
            let mut response = Response::new(Reply::Whole(Full::from(body)));
            let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
            response.headers_mut().insert(CONTENT_TYPE, kind);
            response
        }
        (&Method::GET | &Method::HEAD, "/ui") => ui::page(gateway, head.uri.query()),
        (&Method::GET, "/workers") => list_workers(gateway),
        (&Method::GET, "/sessions") => sessions::list(gateway),
        (&Method::GET, path) if path.starts_with("/sessions/") => {
            sessions::one(gateway, &unescaped(&path["/sessions/".len()..]))
        }
        (&Method::GET, "/record") => recording(gateway, None),
        (&Method::POST, "/record/start") => recording(gateway, Some(true)),
        (&Method::POST, "/record/stop") => recording(gateway, Some(false)),
        (&Method::POST, "/workers") => add_worker(gateway, client, body.take()).await,
        (&Method::GET, "/decisions") => {
            let limit = match query(&head.uri, "limit").map(str::parse::<usize>) {
                None => 100,
                Some(Ok(limit)) => limit,
                Some(Err(_)) => {
                    let message = "limit: expected a whole number";
                    return error(StatusCode::BAD_REQUEST, "invalid_request_error", message);
                }
            };
            let recent = gateway.fleet.sink().recent(limit);
            let recent: Vec<_> = recent.iter().map(|record| record.as_ref()).collect();
            json(StatusCode::OK, &value!({"decisions": recent}))
        }
        (_, path) if stored::is_one(path) => stored::answer(gateway, head, path).await,
        (&Method::GET, path) if is_model(path) => ask_for_model(gateway, path).await,
        (&Method::GET, "/v1/models") => match models::merged(gateway).await {
            Ok(list) => json(StatusCode::OK, &list),
            Err((status, message)) => error(status, "no_candidates", &message),
        },
        (&Method::GET, "/model_info" | "/get_model_info" | "/server_info" | "/get_server_info") => {
            ask_one(gateway, &path, &[]).await
        }
        _ => match path.strip_prefix("/workers/") {
            Some(id) => one_worker(gateway, method, id),
            None => paths::not_found(&path),
        },
    }
}

/// What is recorded, once that is switched on or off.
fn recording(gateway: &Gateway, switch: Option<bool>) -> Response<Reply> {
    let Some(recorder) = &gateway.recorder else {
        let message = "record: the router has no file to record to";
        return error(StatusCode::CONFLICT, "conflict", message);
    };
    if let Some(on) = switch {
        recorder.switch(on);
    }
    json(StatusCode::OK, &recorder.shown())
}

fn text(status: StatusCode, body: &'static str) -> Response<Reply> {
    let mut response = Response::new(Reply::Whole(Full::from(Bytes::from_static(
        body.as_bytes(),
    ))));
    *response.status_mut() = status;
    response
}

/// Whether what is asked for at this path is a model, or what one said.
pub(super) fn tells_of_models(path: &str) -> bool {
    let is_one = |path| is_model(path) || stored::is_one(path);
    matches!(path, "/v1/models" | "/model_info" | "/get_model_info") || is_one(path)
}

/// Whether the path is that of one model. A name may have slashes of its own.
fn is_model(path: &str) -> bool {
    path.strip_prefix("/v1/models/")
        .is_some_and(|name| !name.is_empty() && !name.split('/').any(|part| part == ".."))
}

fn query<'a>(uri: &'a Uri, name: &str) -> Option<&'a str> {
    let pairs = uri.query()?.split('&');
    pairs
        .filter_map(|pair| pair.split_once('='))
        .find_map(|(key, value)| (key == name).then_some(value))
}

/// A worker in the shape that SGLang's router lists, with our fields beside.
fn shown(worker: &WorkerSnapshot) -> Value {
    let spec = &worker.spec;
    value!({
        "id": spec.id,
        "url": spec.url,
        "worker_type": match spec.role {
            Role::Prefill => "prefill",
            Role::Decode | Role::Elastic => "decode",
            Role::Colocated => "regular",
        },
        "role": spec.role,
        "engine": spec.engine,
        "runtime_type": spec.engine,
        "connection_mode": "http",
        "bootstrap_port": spec.bootstrap_port,
        "is_healthy": worker.healthy,
        "load": worker.load.requests,
        "host_kv_tokens": spec.host_kv_tokens,
        "state": worker,
    })
}

fn list_workers(gateway: &Gateway) -> Response<Reply> {
    let workers = gateway.fleet.snapshot();
    let is_on = gateway.config.normalise_prompts;
    let rules = normalise::RULES.iter().filter(|_| is_on);
    let rules = rules.map(|(rule, does)| value!({"rule": rule, "does": does}));
    let rules: Vec<Value> = rules.collect();
    let count = |role: fn(Role) -> bool| workers.iter().filter(|w| role(w.spec.role)).count();
    json(
        StatusCode::OK,
        &value!({
            "workers": workers.iter().map(shown).collect::<Vec<_>>(),
            "total": workers.len(),
            "waiting": gateway.fleet.waiting_turns(),
            "normalises": rules,
            "stats": {
                "prefill_count": count(|role| role == Role::Prefill),
                "decode_count": count(|role| matches!(role, Role::Decode | Role::Elastic)),
                "regular_count": count(|role| role == Role::Colocated),
            },
        }),
    )
}

/// What `POST /workers` takes: our fields, and `worker_type` as SGLang's router calls the role.
#[derive(Deserialize)]
struct NewWorker {
    worker_type: Option<String>,
    #[serde(flatten)]
    spec: WorkerSpecFields,
}

#[derive(Deserialize)]
struct WorkerSpecFields {
    url: String,
    #[serde(flatten)]
    rest: serde_json::Map<String, Value>,
}

async fn add_worker(
    gateway: &Arc<Gateway>,
    client: &Client,
    body: Option<Incoming>,
) -> Response<Reply> {
    let refuse = |message: &str| error(StatusCode::BAD_REQUEST, "invalid_request_error", message);
    let body = match body {
        Some(body) => Limited::new(body, MAX_ADMIN_BODY_BYTES).collect().await,
        None => return refuse("body: expected a worker, as JSON"),
    };
    let body = match body {
        Ok(collected) => collected.to_bytes(),
        Err(failure) => return refuse(&format!("body: {failure}")),
    };
    client.has_sent_body();
    let new: NewWorker = match serde_json::from_slice(&body) {
        Ok(new) => new,
        Err(failure) => return refuse(&format!("body: {failure}")),
    };
    let mut fields = new.spec.rest;
    // Keys of other routers' dialects (labels, priority, …) say nothing to us.
    fields.retain(|key, _| WORKER_FIELDS.contains(&key.as_str()));
    fields.insert("url".to_owned(), new.spec.url.into());
    if let Some(kind) = new.worker_type {
        let role = if kind == "regular" {
            "colocated"
        } else {
            &kind
        };
        fields.entry("role").or_insert_with(|| role.into());
    }
    let spec: WorkerSpec = match decision::model::checks::read(fields.into()) {
        Ok(spec) => spec,
        Err(failure) => return refuse(&format!("body: {failure}")),
    };
    let spec = match spec.normalise() {
        Ok(spec) => spec,
        Err(message) => return refuse(&message),
    };
    let (id, url) = (spec.id.clone(), spec.url.clone());
    match gateway.add_worker(spec) {
        Ok(()) => json(
            StatusCode::ACCEPTED,
            &value!({
                "status": "accepted", "worker_id": id, "url": url,
                "location": format!("/workers/{id}"),
            }),
        ),
        Err(message) => error(StatusCode::CONFLICT, "conflict", &message),
    }
}

/// A part of a path with its %XX as what they stand for.
fn unescaped(part: &str) -> String {
    let mut bytes = Vec::with_capacity(part.len());
    let mut rest = part.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        let hex = after.get(..2).and_then(|hex| std::str::from_utf8(hex).ok());
        let code = hex.and_then(|hex| u8::from_str_radix(hex, 16).ok());
        match (byte, code) {
            (b'%', Some(code)) => {
                bytes.push(code);
                rest = &after[2..];
            }
            _ => {
                bytes.push(byte);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn one_worker(gateway: &Gateway, method: &Method, path: &str) -> Response<Reply> {
    let (id, action) = match path.rsplit_once('/') {
        Some((id, action @ ("drain" | "undrain"))) => (id, Some(action)),
        _ => (path, None),
    };
    let id = &*unescaped(id);
    let missing = || {
        error(
            StatusCode::NOT_FOUND,
            "not_found",
            &format!("worker {id}: there is none"),
        )
    };
    let accepted = || {
        json(
            StatusCode::ACCEPTED,
            &value!({"status": "accepted", "worker_id": id}),
        )
    };
    match (method, action) {
        (&Method::GET, None) => {
            let workers = gateway.fleet.snapshot();
            match workers.iter().find(|worker| worker.spec.id == id) {
                Some(worker) => json(StatusCode::OK, &shown(worker)),
                None => missing(),
            }
        }
        (&Method::DELETE, None) if gateway.fleet.remove_worker(id) => accepted(),
        (&Method::POST, Some(action)) if gateway.fleet.set_draining(id, action == "drain") => {
            accepted()
        }
        _ => missing(),
    }
}

/// Answers a GET of one model: as a worker that lists it does or, where its engine has no such path (vLLM
/// 0.26.0), from the workers' lists.
async fn ask_for_model(gateway: &Arc<Gateway>, path: &str) -> Response<Reply> {
    let name = unescaped(path.trim_start_matches("/v1/models/"));
    let model = gateway.aliases.model(&name).unwrap_or(&name).to_owned();
    let path = match model == name {
        true => path.to_owned(),
        false => format!("/v1/models/{model}"),
    };
    let name = model;
    let response = ask_one(gateway, &path, &gateway.models.not_serving(Some(&name))).await;
    if response.status() != StatusCode::NOT_FOUND {
        return response;
    }
    match models::merged(gateway).await {
        Ok(list) => match models::entry(&list, &name) {
            Some(model) => json(StatusCode::OK, model),
            None => response,
        },
        Err(_) => response,
    }
}

/// Passes a GET on to a healthy worker; decode workers and colocated ones know the model too.
async fn ask_one(gateway: &Gateway, path: &str, not: &[String]) -> Response<Reply> {
    let mut last = "no worker is up".to_owned();
    let workers = gateway.fleet.snapshot();
    let asked = workers
        .iter()
        .filter(|w| w.healthy && !not.contains(&w.spec.id));
    for worker in asked {
        match gateway.get(&worker.spec, path, WORKER_PATIENCE).await {
            Ok((status, body)) => {
                let body = redact::without_secrets(&body).unwrap_or(body);
                let mut response = Response::new(Reply::Whole(Full::from(body)));
                *response.status_mut() = status;
                let kind = HeaderValue::from_static("application/json");
                response.headers_mut().insert(CONTENT_TYPE, kind);
                return response;
            }
            Err(failure) => last = format!("worker {}: {failure}", worker.spec.id),
        }
    }
    error(StatusCode::SERVICE_UNAVAILABLE, "no_candidates", &last)
}
