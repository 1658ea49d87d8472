//! What workers do instead of serving, and whose fault that is.

use super::{Reply, describe, error, headers, sse};
use crate::config::WorkerSpec;
use bytes::Bytes;
use decision::fleet::{Fleet, Outcome};
use http_body_util::Full;
use hyper::header::{HeaderName, HeaderValue, RETRY_AFTER};
use hyper::{Response, StatusCode};
use memchr::memmem::Finder;
use smallvec::SmallVec;
use std::io::ErrorKind;
use std::sync::{Arc, LazyLock};

pub(super) const WORKER: HeaderName = HeaderName::from_static("x-deltaserve-worker");

/// What a client is told at its request's deadline.
pub(super) const TIME_IS_OVER: &str = "the request's time is over";

/// And when the router has waited for its requests for as long as it may.
pub(super) const SHUTTING_DOWN: &str = "the router was shutting down";

/// How one attempt failed before any of the answer was passed on.
pub(super) enum Failure {
    /// The worker that answers failed.
    Answering(Fault),
    Prefill(Fault),
    Timeout,
}

/// In what way a worker failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// It answered, with an error.
    Answered,
    /// It broke the connection, or the answer.
    Broken,
    /// It does not listen.
    Refused,
    /// It cannot be reached, for whatever reason.
    Unreachable,
    /// The router itself cannot open connections: no descriptors or ports are left, or names are not
    /// resolved. No worker is to blame.
    Ours,
}

/// What a worker did instead of serving.
pub(super) struct Fault {
    pub kind: Kind,
    pub message: String,
    /// What it said, if it answered at all.
    pub answer: Option<Box<Response<Bytes>>>,
}

impl Fault {
    pub fn broken(message: impl Into<String>) -> Self {
        Self {
            kind: Kind::Broken,
            message: message.into(),
            answer: None,
        }
    }

    pub fn answered(answer: Response<Bytes>) -> Self {
        Self {
            kind: Kind::Answered,
            message: format!("HTTP {}: {}", status_of(&answer), excerpt(answer.body())),
            answer: Some(Box::new(answer)),
        }
    }

    /// The worker does not take the key that the router sent it. Its answer says nothing to the client, whose
    /// key is another.
    pub fn of_key() -> Self {
        Self {
            kind: Kind::Answered,
            message: "HTTP 401: it does not take the router's key (its api_key)".to_owned(),
            answer: None,
        }
    }

    /// A request that got no answer.
    pub fn unanswered(failure: hyper_util::client::legacy::Error) -> Self {
        let kind = if failure.is_connect() {
            kind_of_connect(&failure)
        } else {
            Kind::Broken
        };
        Self {
            kind,
            message: describe(failure),
            answer: None,
        }
    }

    pub fn status(&self) -> Option<StatusCode> {
        self.answer.as_deref().map(status_of)
    }

    pub fn code(&self) -> Option<u16> {
        self.status().map(|status| status.as_u16())
    }

    /// Whether the worker answered that something went wrong in it, and not that it is full.
    pub fn is_error(&self) -> bool {
        let status = self.status();
        status.is_some_and(|status| status.is_server_error() && !is_full(status))
    }

    pub fn outcome(&self) -> Outcome {
        match (self.kind, self.status()) {
            (Kind::Ours, _) => Outcome::RouterError,
            (_, Some(status)) if is_full(status) => Outcome::Rejected,
            _ => Outcome::WorkerError,
        }
    }

    /// What the client of a request is told that got no answer.
    pub fn unanswered_status(&self) -> (StatusCode, &'static str) {
        match self.kind {
            Kind::Ours => (StatusCode::SERVICE_UNAVAILABLE, "overloaded"),
            _ => (StatusCode::BAD_GATEWAY, "worker_error"),
        }
    }

    /// Tells the fleet of a worker that does not listen.
    pub fn report(&self, fleet: &Fleet, worker: &Arc<WorkerSpec>) {
        if self.kind == Kind::Refused {
            fleet.report_health(worker, false);
        }
    }
}

/// Why no connection was made.
fn kind_of_connect(failure: &(dyn std::error::Error + 'static)) -> Kind {
    // Of this machine: no descriptors (of the process, of all), no memory, no ports, no buffers.
    const ENFILE: i32 = 23;
    const EMFILE: i32 = 24;
    const ENOMEM: i32 = 12;
    const EADDRNOTAVAIL: i32 = 99;
    const ENOBUFS: i32 = 105;
    let mut cause = Some(failure);
    while let Some(error) = cause {
        // As hyper-util calls a name that was not resolved.
        if error.to_string().starts_with("dns error") {
            return Kind::Ours;
        }
        if let Some(error) = error.downcast_ref::<std::io::Error>() {
            let of_ours = [ENFILE, EMFILE, ENOMEM, EADDRNOTAVAIL, ENOBUFS];
            if error
                .raw_os_error()
                .is_some_and(|code| of_ours.contains(&code))
            {
                return Kind::Ours;
            }
            match error.kind() {
                ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset => return Kind::Refused,
                _ => {}
            }
        }
        cause = error.source();
    }
    Kind::Unreachable
}

/// The workers that answered a request with 5xx, or broke its connection. One such failure may be the
/// worker's fault or the request's: it is the worker's where another then serves the request, and the
/// request's where another fails so too.
#[derive(Default)]
pub(super) struct Suspects(SmallVec<[(Arc<WorkerSpec>, f64, Kind); 2]>);

impl Suspects {
    /// `begun_s` is when the request was placed there.
    pub fn note(&mut self, worker: &Arc<WorkerSpec>, begun_s: f64, fault: &Fault) {
        if fault.is_error() || fault.kind == Kind::Broken {
            self.0.push((Arc::clone(worker), begun_s, fault.kind));
        }
    }

    /// How many attempts failed so.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// How many workers broke the connection.
    pub fn broken(&self) -> usize {
        let broken = |entry: &&(Arc<WorkerSpec>, f64, Kind)| entry.2 == Kind::Broken;
        self.0.iter().filter(broken).count()
    }

    /// The request had its chance elsewhere.
    pub fn judge(&self, fleet: &Fleet) {
        if let [(only, begun_s, _)] = self.0.as_slice() {
            fleet.blame(only, *begun_s);
        }
    }

    /// As [`Suspects::judge`], where `server` then served the request. If that is the worker that failed
    /// before, it is the KV's way to it that failed.
    pub fn judge_served_by(&self, fleet: &Fleet, server: &Arc<WorkerSpec>) {
        let is_server = |(worker, ..): &(Arc<WorkerSpec>, f64, Kind)| Arc::ptr_eq(worker, server);
        if !self.0.iter().any(is_server) {
            self.judge(fleet);
        }
    }

    /// No other worker could be asked. A connection that broke counts all the same: more often than
    /// not, what broke it is the worker's end.
    pub fn judge_alone(&self, fleet: &Fleet) {
        if let [(only, begun_s, Kind::Broken)] = self.0.as_slice() {
            fleet.blame(only, *begun_s);
        }
    }
}

/// Passes on what a worker said instead of serving; 502 if it said nothing.
pub(super) fn relay(worker: &str, fault: Fault) -> Response<Reply> {
    let is_full = fault.status().is_some_and(is_full);
    let Some(answer) = fault.answer else {
        let (status, kind) = fault.unanswered_status();
        return error(status, kind, &fault.message);
    };
    let mut response = from_worker((*answer).map(|body| Reply::Whole(Full::from(body))), worker);
    if is_full {
        let retry_after = response.headers_mut().entry(RETRY_AFTER);
        retry_after.or_insert(HeaderValue::from_static("1"));
    }
    response
}

/// The answer without the headers that belong to the worker's connection, and with the worker's id.
pub(super) fn from_worker(mut response: Response<Reply>, worker: &str) -> Response<Reply> {
    let headers = response.headers_mut();
    headers::remove_workers_own(headers);
    if let Ok(value) = HeaderValue::from_str(worker) {
        headers.insert(WORKER, value);
    }
    response
}

/// The status of an answer. Where a stream is asked for, SGLang answers 200 whatever comes, and says in
/// the event what it would have answered otherwise.
pub(super) fn status_of(answer: &Response<Bytes>) -> StatusCode {
    if !answer.status().is_success() {
        return answer.status();
    }
    let mut events = sse::events(answer.body());
    let said = events.find(|event| !sse::is_opening(event) && !sse::is_announcement(event));
    let said = said.and_then(|event| sse::error_in(&event));
    said.map_or(answer.status(), |error| error.status)
}

/// Made once: to make one takes longer than to look through an answer.
static FINISHES: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"finish_reason\":"));

/// Whether an answer that is no error is none either: there is nothing in it, or the engine gave the request up.
/// Engines escape quotes in text, so that the words are neither the model's nor a client's.
pub(super) fn is_no_answer(answer: &Response<Bytes>) -> bool {
    let body = answer.body();
    let is_abort = |at: usize| {
        let reason = body[at + FINISHES.needle().len()..].trim_ascii_start();
        let reason = reason
            .strip_prefix(b"{")
            .unwrap_or(reason)
            .trim_ascii_start();
        let kind = reason.strip_prefix(b"\"type\":").unwrap_or(reason);
        kind.trim_ascii_start().starts_with(b"\"abort\"")
    };
    body.is_empty() || FINISHES.find_iter(body).any(is_abort)
}

/// Whether the worker is full, which is not broken.
pub(super) fn is_full(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS
    )
}

/// What became of a request that a worker answered so, and nobody tries again.
pub(super) fn outcome_of(status: StatusCode) -> Outcome {
    match status.is_server_error() && !is_full(status) {
        true => Outcome::WorkerError,
        false => Outcome::Rejected,
    }
}

/// Whether the worker finds fault with the request; one that says 429 is only full.
pub(super) fn is_refusal(status: StatusCode) -> bool {
    status.is_client_error() && status != StatusCode::TOO_MANY_REQUESTS
}

/// The beginning of a worker's message, on one line.
pub(super) fn excerpt(body: &[u8]) -> String {
    const SHOWN: usize = 300;
    let text = String::from_utf8_lossy(&body[..body.len().min(SHOWN)]);
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As hyper-util wraps what went wrong.
    #[derive(Debug)]
    struct Connect(&'static str, Option<std::io::Error>);

    impl std::fmt::Display for Connect {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str(self.0)
        }
    }

    impl std::error::Error for Connect {
        fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
            self.1.as_ref().map(|cause| cause as _)
        }
    }

    #[test]
    fn what_this_machine_lacks_is_no_workers_fault() {
        for (code, kind) in [
            (24, Kind::Ours),
            (23, Kind::Ours),
            (99, Kind::Ours),
            (111, Kind::Refused),
            (104, Kind::Refused),
            (110, Kind::Unreachable),
            (113, Kind::Unreachable),
        ] {
            let cause = std::io::Error::from_raw_os_error(code);
            let failure = Connect("tcp connect error", Some(cause));
            assert_eq!(kind_of_connect(&failure), kind, "errno {code}");
        }
        assert_eq!(kind_of_connect(&Connect("dns error", None)), Kind::Ours);
    }
}
