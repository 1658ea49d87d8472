//! Traces: what became of a request and when, as spans of OpenTelemetry, where an `otlp_endpoint` is set.
//!
//! A request is one span from its headers to its answer's end, in the trace that its client names
//! (`traceparent`), else in one of its own. Below it stand, for each attempt, a span for the wait for a
//! place and the decision, and one for the worker, which gets that span as its parent. Of requests whose
//! client does not record them, and of those beyond `otlp_sample_ratio`, nothing is kept, and the client's
//! header goes on to the worker as it came.

mod context;
mod otlp;

use super::Gateway;
use super::apis::Api;
use super::reuse::WorkerClient;
use crate::config::Config;
use context::TraceParent;
use decision::fleet::{Outcome, Reservation};
use hyper::header::{HeaderMap, HeaderName};
use hyper::{StatusCode, Uri};
use otlp::{Exporter, Kind, Span, Trace, now_ns};
use serde_json::Value;

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// The path of traces at a collector.
const PATH: &str = "/v1/traces";

/// Where traces begin.
pub(crate) struct Tracer {
    exporter: Exporter,
    sample_ratio: f64,
}

impl Tracer {
    /// None where the configuration names no collector. Needs a tokio runtime.
    ///
    /// # Errors
    /// One line that names the field.
    pub fn start(
        config: &Config,
        client: &WorkerClient,
        lost: impl Fn(u64) + Send + Sync + 'static,
    ) -> Result<Option<Self>, String> {
        let Some(endpoint) = &config.otlp_endpoint else {
            return Ok(None);
        };
        let url = format!("{}{PATH}", endpoint.trim_end_matches('/'));
        let url: Uri = url
            .parse()
            .map_err(|error| format!("otlp_endpoint: {error}"))?;
        Ok(Some(Self {
            exporter: Exporter::start(client.clone(), url, lost),
            sample_ratio: config.otlp_sample_ratio,
        }))
    }

    /// Begins a request's trace, if it is to be recorded.
    pub fn begin(&self, api: Api, headers: &HeaderMap) -> Option<Box<RequestTrace>> {
        let parent = headers
            .get(TRACEPARENT)
            .and_then(|value| TraceParent::parse(value.as_bytes()));
        let is_recorded = match parent {
            Some(parent) => parent.is_sampled,
            None => fastrand::f64() < self.sample_ratio,
        };
        if !is_recorded {
            return None;
        }
        let trace_id = parent.map_or_else(|| fastrand::u128(1..), |parent| parent.trace_id);
        let above = parent.map(|parent| parent.span_id);
        let mut request = Span::begin(format!("POST {}", api.path()), Kind::Server, above);
        request.attributes = vec![
            ("http.request.method", "POST".into()),
            ("url.path", api.path().into()),
        ];
        Some(Box::new(RequestTrace {
            exporter: self.exporter.clone(),
            trace_id,
            is_continued: parent.is_some(),
            request,
            ended: Vec::new(),
            open: None,
            attempts: 0,
        }))
    }

    /// Waits until what has ended was sent, or was lost.
    pub async fn flush(&self) {
        self.exporter.flush().await;
    }
}

/// The spans of a request that is being served. Dropping it before it was told of an end means that the
/// client left.
pub(crate) struct RequestTrace {
    exporter: Exporter,
    trace_id: u128,
    /// The client's trace goes on.
    is_continued: bool,
    request: Span,
    ended: Vec<Span>,
    /// Of the present attempt.
    open: Option<Span>,
    attempts: u64,
}

impl RequestTrace {
    /// Something happened to the request now.
    pub fn event(&mut self, name: &'static str) {
        self.request.events.push((name, now_ns()));
    }

    /// Notes a fact of the request; nothing where there is none.
    pub fn note(&mut self, key: &'static str, value: Option<impl Into<Value>>) {
        if let Some(value) = value {
            self.request.attributes.push((key, value.into()));
        }
    }

    /// The request asks for a place.
    pub fn placing(&mut self) {
        self.close(None);
        let parent = Some(self.request.id);
        let name = "wait for a place".to_owned();
        self.open = Some(Span::begin(name, Kind::Internal, parent));
    }

    /// It has a place, and goes to its workers with these headers.
    pub fn sending(
        &mut self,
        gateway: &Gateway,
        reservation: &Reservation,
        headers: &mut HeaderMap,
    ) {
        let decision: [(&str, Value); 2] = [
            ("deltaserve.decision_id", reservation.decision_id().into()),
            ("deltaserve.policy", gateway.fleet.policy_name().into()),
        ];
        if let Some(placing) = &mut self.open {
            placing.attributes.extend(decision.clone());
        }
        self.close(None);
        self.attempts += 1;
        let worker = reservation.answering();
        let parent = Some(self.request.id);
        let mut span = Span::begin(format!("worker {}", worker.id), Kind::Client, parent);
        span.attributes.extend(decision);
        span.attributes.extend([
            ("server.address", worker.url.as_str().into()),
            ("deltaserve.worker", worker.id.as_str().into()),
            ("deltaserve.attempt", self.attempts.into()),
        ]);
        if let Some(prefill) = reservation.prefill() {
            let id = prefill.id.as_str().into();
            span.attributes.push(("deltaserve.prefill_worker", id));
        }
        let here = TraceParent {
            trace_id: self.trace_id,
            span_id: span.id,
            is_sampled: true,
        };
        if let Some(value) = here.header() {
            headers.insert(TRACEPARENT, value);
        }
        if !self.is_continued {
            // Of a trace whose parent could not be read, or of none.
            headers.remove(TRACESTATE);
        }
        self.open = Some(span);
    }

    /// The worker's stream has begun: its first event with data is there.
    pub fn first_event(&mut self) {
        if let Some(span) = &mut self.open {
            span.events.push(("first_event", now_ns()));
        }
    }

    /// The attempt failed.
    pub fn failed(&mut self, message: &str) {
        self.close(Some(message));
    }

    /// The request was answered with this status, and the answer is whole.
    pub fn answered(mut self: Box<Self>, status: StatusCode) {
        self.note_status(status.as_u16());
        let error = status.is_server_error().then(|| status.to_string());
        self.end(error);
    }

    /// The status of an answer that is not whole yet.
    pub fn note_status(&mut self, status: u16) {
        self.note("http.response.status_code", Some(status));
    }

    /// The answer's stream has ended so.
    pub fn streamed(mut self: Box<Self>, outcome: Outcome, message: Option<&str>) {
        let failed = message.unwrap_or("failed").to_owned();
        self.end((outcome != Outcome::Ok).then_some(failed));
    }

    fn close(&mut self, error: Option<&str>) {
        if let Some(mut span) = self.open.take() {
            span.ended_ns = now_ns();
            span.error = error.map(str::to_owned);
            self.ended.push(span);
        }
    }

    fn end(&mut self, error: Option<String>) {
        self.close(error.as_deref());
        self.request.ended_ns = now_ns();
        self.request.error = error;
    }
}

impl Drop for RequestTrace {
    fn drop(&mut self) {
        if self.request.ended_ns == 0 {
            self.note("deltaserve.outcome", Some("client_disconnect"));
            self.end(None);
        }
        let mut spans = std::mem::take(&mut self.ended);
        spans.push(std::mem::take(&mut self.request));
        let id = self.trace_id;
        self.exporter.send(Trace { id, spans });
    }
}
