//! Spans on their way to a collector: OTLP over HTTP, as JSON, in batches.
//!
//! The protocol is one POST of one JSON object (`/v1/traces`, opentelemetry-proto 1.x), so no SDK stands
//! between: OpenTelemetry's would bring its own queue, clock and client for it.

use crate::gateway::reuse::{self, WorkerClient};
use crate::gateway::splice::Pieces;
use crate::gateway::{MAX_REPORT_BYTES, describe};
use bytes::Bytes;
use http_body_util::{BodyExt, Limited};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Request, StatusCode, Uri};
use serde_json::{Value, json};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::{mpsc, oneshot};

/// Traces that wait to be sent; more are lost, and counted.
const WAITING: usize = 8192;
/// A batch is sent when it has so many traces, or when the first of them has waited so long.
const BATCH: usize = 256;
const PATIENCE: Duration = Duration::from_secs(1);
/// A collector that has not answered by then has lost the batch.
const ANSWER_PATIENCE: Duration = Duration::from_secs(10);

/// What a span is to its trace, by OTLP's numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    #[default]
    Internal = 1,
    Server = 2,
    Client = 3,
}

/// Nanoseconds since 1970.
pub fn now_ns() -> u64 {
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH);
    elapsed.map_or(0, |elapsed| elapsed.as_nanos() as u64)
}

/// A piece of a request's time.
#[derive(Debug, Default)]
pub struct Span {
    pub id: u64,
    pub parent: Option<u64>,
    pub name: String,
    pub kind: Kind,
    pub begun_ns: u64,
    pub ended_ns: u64,
    pub attributes: Vec<(&'static str, Value)>,
    pub events: Vec<(&'static str, u64)>,
    pub error: Option<String>,
}

impl Span {
    pub fn begin(name: String, kind: Kind, parent: Option<u64>) -> Self {
        Self {
            id: fastrand::u64(1..),
            parent,
            name,
            kind,
            begun_ns: now_ns(),
            ended_ns: 0,
            attributes: Vec::new(),
            events: Vec::new(),
            error: None,
        }
    }

    fn to_json(&self, trace_id: u128) -> Value {
        let attributes: Vec<Value> = self
            .attributes
            .iter()
            .map(|(key, value)| attribute(key, value))
            .collect();
        let events: Vec<Value> = self
            .events
            .iter()
            .map(|(name, at_ns)| json!({"name": name, "timeUnixNano": at_ns.to_string()}))
            .collect();
        let mut span = json!({
            "traceId": format!("{trace_id:032x}"),
            "spanId": format!("{:016x}", self.id),
            "name": self.name,
            "kind": self.kind as u8,
            // 64-bit numbers are strings in OTLP's JSON.
            "startTimeUnixNano": self.begun_ns.to_string(),
            "endTimeUnixNano": self.ended_ns.to_string(),
            "attributes": attributes,
            "events": events,
        });
        if let Some(parent) = self.parent {
            span["parentSpanId"] = format!("{parent:016x}").into();
        }
        if let Some(error) = &self.error {
            span["status"] = json!({"code": 2, "message": error});
        }
        span
    }
}

fn attribute(key: &str, value: &Value) -> Value {
    let value = match value {
        Value::Bool(value) => json!({"boolValue": value}),
        Value::Number(number) if number.is_f64() => json!({"doubleValue": number}),
        Value::Number(number) => json!({"intValue": number.to_string()}),
        Value::String(text) => json!({"stringValue": text}),
        other => json!({"stringValue": other.to_string()}),
    };
    json!({"key": key, "value": value})
}

/// The spans of one request.
#[derive(Debug)]
pub struct Trace {
    pub id: u128,
    pub spans: Vec<Span>,
}

enum Task {
    Send(Trace),
    /// Everything before is to be sent now; tells when it was.
    Flush(oneshot::Sender<()>),
}

/// Takes traces, and sends them from a task of its own.
#[derive(Clone)]
pub struct Exporter {
    sender: mpsc::Sender<Task>,
    lost: Lost,
}

type Lost = std::sync::Arc<dyn Fn(u64) + Send + Sync>;

impl Exporter {
    /// Sends to `endpoint`, the address of a collector. `lost` is told of spans, so many at a time, that
    /// did not get there. Needs a tokio runtime.
    pub fn start(
        client: WorkerClient,
        endpoint: Uri,
        lost: impl Fn(u64) + Send + Sync + 'static,
    ) -> Self {
        let (sender, receiver) = mpsc::channel(WAITING);
        let lost: Lost = std::sync::Arc::new(lost);
        let sending = Sending {
            client,
            endpoint,
            lost: lost.clone(),
            is_failing: false,
        };
        tokio::spawn(sending.run(receiver));
        Self { sender, lost }
    }

    /// Never waits.
    pub fn send(&self, trace: Trace) {
        let count = trace.spans.len() as u64;
        if self.sender.try_send(Task::Send(trace)).is_err() {
            (self.lost)(count);
        }
    }

    /// Waits until what was given before has been sent, or was lost.
    pub async fn flush(&self) {
        let (done, is_done) = oneshot::channel();
        if self.sender.send(Task::Flush(done)).await.is_ok() {
            // The task may be gone with its runtime: then there is nothing to wait for.
            let _ = is_done.await;
        }
    }
}

struct Sending {
    client: WorkerClient,
    endpoint: Uri,
    lost: Lost,
    /// The last batch was lost: what is in the log already.
    is_failing: bool,
}

impl Sending {
    async fn run(mut self, mut tasks: mpsc::Receiver<Task>) {
        while let Some(first) = tasks.recv().await {
            let mut batch = Vec::new();
            let mut flush = None;
            let due = tokio::time::Instant::now() + PATIENCE;
            let mut task = Some(first);
            while let Some(next) = task.take() {
                match next {
                    Task::Send(trace) => batch.push(trace),
                    Task::Flush(done) => flush = Some(done),
                }
                if batch.len() < BATCH && flush.is_none() {
                    let more = tokio::time::timeout_at(due, tasks.recv());
                    task = more.await.ok().flatten();
                }
            }
            if !batch.is_empty() {
                self.post(&batch).await;
            }
            if let Some(done) = flush {
                // Whoever asked may have left.
                let _ = done.send(());
            }
        }
    }

    async fn post(&mut self, batch: &[Trace]) {
        let failure = match tokio::time::timeout(ANSWER_PATIENCE, self.exchange(batch)).await {
            Ok(Ok(status)) if status.is_success() => None,
            Ok(Ok(status)) => Some(format!("HTTP {status}")),
            Ok(Err(error)) => Some(error),
            Err(_) => Some(format!("no answer within {} s", ANSWER_PATIENCE.as_secs())),
        };
        if let Some(failure) = &failure {
            (self.lost)(batch.iter().map(|trace| trace.spans.len() as u64).sum());
            if !self.is_failing {
                log::warn!(
                    "otlp_endpoint: {}: {failure}; spans are lost",
                    self.endpoint
                );
            }
        }
        self.is_failing = failure.is_some();
    }

    async fn exchange(&self, batch: &[Trace]) -> Result<StatusCode, String> {
        let body = serde_json::to_vec(&request_of(batch)).map_err(|error| error.to_string())?;
        let mut request = Request::post(self.endpoint.clone())
            .body(Pieces::from(Bytes::from(body)))
            .map_err(|error| error.to_string())?;
        let json = HeaderValue::from_static("application/json");
        request.headers_mut().insert(CONTENT_TYPE, json);
        let again = request.clone();
        let sent = reuse::send(&self.client, request, || Some(again)).await;
        let response = sent.map_err(describe)?;
        let status = response.status();
        let rest = Limited::new(response.into_body(), MAX_REPORT_BYTES).collect();
        // Read so that the connection can be used again; what it says is of no use.
        let _ = rest.await;
        Ok(status)
    }
}

/// An `ExportTraceServiceRequest`.
fn request_of(batch: &[Trace]) -> Value {
    let spans: Vec<Value> = batch
        .iter()
        .flat_map(|trace| trace.spans.iter().map(|span| span.to_json(trace.id)))
        .collect();
    let version = env!("CARGO_PKG_VERSION");
    let resource = [
        attribute("service.name", &"deltaserve-router".into()),
        attribute("service.version", &version.into()),
    ];
    json!({"resourceSpans": [{
        "resource": {"attributes": resource},
        "scopeSpans": [{"scope": {"name": "deltaserve", "version": version}, "spans": spans}],
    }]})
}
