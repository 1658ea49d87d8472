//! Responses that workers keep: a request that goes on from one (`previous_response_id`), and questions about one
//! (`GET /v1/responses/ID`, `POST …/cancel`, `DELETE`), go to the worker that has it.

use super::fault::from_worker;
use super::splice::Pieces;
use super::{Gateway, Reply, authorise, reuse, session, with_body};
use crate::config::WorkerSpec;
use bytes::Bytes;
use decision::fleet::Fleet;
use http_body_util::{BodyExt, Full, Limited};
use hyper::http::request::Parts;
use hyper::{Request, Response, StatusCode};
use lru::LruCache;
use parking_lot::Mutex;
use serde_json::json;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

/// Responses of which it is known where they are.
const KNOWN: NonZeroUsize = NonZeroUsize::new(1 << 16).expect("not 0");
/// For each worker that is asked for a response that another request goes on from.
const FIND_PATIENCE: Duration = Duration::from_secs(2);
const PATIENCE: Duration = Duration::from_secs(30);
const MAX_ANSWER_BYTES: usize = 256 << 20;
const FOLDER: &str = "/v1/responses/";

/// A response whose worker has left.
#[derive(Debug)]
pub(crate) struct Gone;

/// The worker that has each response, by the response's id.
#[derive(Debug)]
pub(crate) struct Stored(Mutex<LruCache<String, Kept>>);

#[derive(Clone, Debug)]
struct Kept {
    worker: String,
    /// What it calls the response, where its client was told another id before there was one.
    id: Option<String>,
}

impl Default for Stored {
    fn default() -> Self {
        Self(Mutex::new(LruCache::new(KNOWN)))
    }
}

impl Stored {
    /// Notes whose response an answer, or the beginning of a stream, is.
    pub fn note(&self, answer: &[u8], worker: &str) {
        if let Some(id) = id_in(answer) {
            let worker = worker.to_owned();
            self.0.lock().put(id, Kept { worker, id: None });
        }
    }

    /// The client of the response `id` knows it as `told`.
    pub fn also_called(&self, told: &str, id: &str) {
        let mut known = self.0.lock();
        if let Some(worker) = known.get(id).map(|kept| kept.worker.clone()) {
            let id = Some(id.to_owned());
            known.put(told.to_owned(), Kept { worker, id });
        }
    }

    /// What its worker calls a response that its client knows by another id.
    pub fn own_id(&self, told: &str) -> Option<String> {
        self.0.lock().get(told)?.id.clone()
    }

    /// Ids of all workers but the one that has a response; none where nobody knows which that is.
    ///
    /// # Errors
    /// That worker has left.
    pub fn others_than_has(&self, id: &str, fleet: &Fleet) -> Result<Vec<String>, Gone> {
        let Some(owner) = self.0.lock().get(id).map(|kept| kept.worker.clone()) else {
            return Ok(Vec::new());
        };
        let workers = fleet.snapshot().into_iter();
        let ids: Vec<String> = workers.map(|worker| worker.spec.id.clone()).collect();
        match ids.contains(&owner) {
            true => Ok(ids.into_iter().filter(|id| *id != owner).collect()),
            false => Err(Gone),
        }
    }
}

/// The id of the response that an answer is, or a stream begins: the first that is one's own, for before it come
/// no words of models or clients.
fn id_in(answer: &[u8]) -> Option<String> {
    const MARK: &[u8] = b"\"id\":";
    const SEARCHED: usize = 64 << 10;
    let searched = &answer[..answer.len().min(SEARCHED)];
    memchr::memmem::find_iter(searched, MARK).find_map(|at| {
        let rest = searched[at + MARK.len()..].trim_ascii_start();
        let id = rest.strip_prefix(b"\"")?;
        let id = &id[..memchr::memchr(b'"', id)?];
        let is_one = id.starts_with(b"resp_") && id.len() <= 128;
        is_one.then(|| std::str::from_utf8(id).ok().map(str::to_owned))?
    })
}

/// As OpenAI's API says that there is no such response: to who goes on from it (400), or asks for it (404).
pub(super) fn not_found(id: &str, status: StatusCode) -> Response<Reply> {
    let body = match status {
        StatusCode::BAD_REQUEST => json!({"error": {
            "message": format!("Previous response with id '{id}' not found."),
            "type": "invalid_request_error",
            "param": "previous_response_id",
            "code": "previous_response_not_found",
        }}),
        _ => json!({"error": {
            "message": format!("Response with id '{id}' not found."),
            "type": "invalid_request_error",
            "param": "id",
            "code": null,
        }}),
    };
    with_body(status, &body)
}

/// Whether a path is that of one response.
pub(super) fn is_one(path: &str) -> bool {
    path.strip_prefix(FOLDER).is_some_and(|rest| {
        let id = rest.strip_suffix("/cancel").unwrap_or(rest);
        !id.is_empty() && !id.contains('/')
    })
}

/// Asks the workers for a response of which nobody knows where it is, as after a restart of the router.
pub(super) async fn find(gateway: &Gateway, id: &str) {
    if gateway.stored.0.lock().contains(id) {
        return;
    }
    let workers = gateway.fleet.snapshot().into_iter();
    let healthy: Vec<_> = workers.filter(|it| it.healthy).collect();
    // With one worker it is there or nowhere; what is no id is nowhere.
    let is_id = id
        .bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-');
    if healthy.len() < 2 || !is_id {
        return;
    }
    let path = format!("{FOLDER}{id}");
    for worker in healthy {
        let asked = gateway.get(&worker.spec, &path, FIND_PATIENCE).await;
        if asked.is_ok_and(|(status, _)| status.is_success()) {
            let kept = Kept {
                worker: worker.spec.id.clone(),
                id: None,
            };
            gateway.stored.0.lock().put(id.to_owned(), kept);
            return;
        }
    }
}

/// Passes a question about one response on to the worker that has it, or to one after the other where nobody knows
/// which that is.
pub(super) async fn answer(gateway: &Arc<Gateway>, head: &Parts, path: &str) -> Response<Reply> {
    let rest = path.strip_prefix(FOLDER).unwrap_or_default();
    let id = rest.strip_suffix("/cancel").unwrap_or(rest);
    let others = match gateway.stored.others_than_has(id, &gateway.fleet) {
        Ok(others) => others,
        Err(Gone) => return not_found(id, StatusCode::NOT_FOUND),
    };
    let path = match gateway.stored.own_id(id) {
        Some(own) => path.replacen(id, &own, 1),
        None => path.to_owned(),
    };
    let target = match head.uri.query() {
        Some(query) => format!("{path}?{query}"),
        None => path,
    };
    let workers = gateway.fleet.snapshot().into_iter();
    let asked = workers.filter(|it| it.healthy && !others.contains(&it.spec.id));
    for worker in asked {
        let Some(response) = ask(gateway, &worker.spec, head, &target).await else {
            continue;
        };
        if response.status() != StatusCode::NOT_FOUND {
            return from_worker(
                response.map(|body| Reply::Whole(Full::from(body))),
                &worker.spec.id,
            );
        }
    }
    not_found(id, StatusCode::NOT_FOUND)
}

async fn ask(
    gateway: &Gateway,
    spec: &WorkerSpec,
    head: &Parts,
    target: &str,
) -> Option<Response<Bytes>> {
    let mut request = Request::new(Pieces::default());
    *request.method_mut() = head.method.clone();
    *request.uri_mut() = format!("{}{target}", spec.url).parse().ok()?;
    let id = session::request_id(&head.headers);
    *request.headers_mut() = gateway.forwarded(head.headers.clone(), &id);
    authorise(request.headers_mut(), spec);
    let again = request.clone();
    let exchange = async {
        let sent = reuse::send(&gateway.client, request, || Some(again)).await;
        let (parts, body) = sent.ok()?.into_parts();
        let body = Limited::new(body, MAX_ANSWER_BYTES).collect().await.ok()?;
        Some(Response::from_parts(parts, body.to_bytes()))
    };
    tokio::time::timeout(PATIENCE, exchange).await.ok()?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_id_of_a_response_is_found_in_an_answer_and_in_a_streams_beginning() {
        for (answer, id) in [
            (
                r#"{"id":"resp_1","object":"response","output":[{"id":"msg_2"}]}"#,
                Some("resp_1"),
            ),
            (
                "event: response.created\ndata: {\"response\": {\"id\": \"resp_7\"}}\n\n",
                Some("resp_7"),
            ),
            (r#"{"error":{"message":"no"}}"#, None),
            (r#"{"id":"resp_"#, None),
        ] {
            assert_eq!(id_in(answer.as_bytes()).as_deref(), id, "{answer}");
        }
    }

    #[test]
    fn paths_of_one_response() {
        for (path, is) in [
            ("/v1/responses/resp_1", true),
            ("/v1/responses/resp_1/cancel", true),
            ("/v1/responses", false),
            ("/v1/responses/", false),
            ("/v1/responses/a/b", false),
        ] {
            assert_eq!(is_one(path), is, "{path}");
        }
    }
}
