//! Prometheus metrics.

use crate::fleet::WorkerSnapshot;
use crate::fleet::log::{Event, FinishRecord};
use hyper::StatusCode;
use prometheus::{
    Encoder, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    Registry, TextEncoder,
};

/// Everything that `/metrics` shows.
pub(crate) struct Metrics {
    registry: Registry,
    finished: IntCounterVec,
    refused: IntCounterVec,
    retries: IntCounter,
    first_token_s: Histogram,
    duration_s: Histogram,
    queued: IntGauge,
    cached_tokens: IntCounterVec,
    prediction_error_tokens: IntCounter,
    waiting: IntGauge,
    waited_s: Histogram,
    admissions: IntCounterVec,
    given_up: IntCounterVec,
    recomputed_tokens: IntCounterVec,
    worker: IntGaugeVec,
}

impl Metrics {
    pub fn new() -> Self {
        let registry = Registry::new();
        let seconds = |name: &str, help: &str| {
            let buckets = vec![
                0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
                300.0,
            ];
            keep(
                &registry,
                Histogram::with_opts(HistogramOpts::new(name, help).buckets(buckets)),
            )
        };
        let counters = |name: &str, help: &str, labels: &[&str]| {
            keep(&registry, IntCounterVec::new(Opts::new(name, help), labels))
        };
        Self {
            finished: counters(
                "deltaserve_requests_total",
                "Placed requests by how they ended.",
                &["outcome"],
            ),
            refused: counters(
                "deltaserve_refused_total",
                "Requests that were not placed, by HTTP status.",
                &["status"],
            ),
            retries: keep(
                &registry,
                IntCounter::new(
                    "deltaserve_retries_total",
                    "Further attempts after a failure before the first token.",
                ),
            ),
            first_token_s: seconds(
                "deltaserve_first_token_seconds",
                "From the decision to the first output.",
            ),
            duration_s: seconds(
                "deltaserve_request_seconds",
                "From the decision to the end.",
            ),
            queued: keep(
                &registry,
                IntGauge::new(
                    "deltaserve_queued_requests",
                    "Requests that wait for their turn.",
                ),
            ),
            cached_tokens: counters(
                "deltaserve_cached_tokens_total",
                "Cached prompt tokens of requests whose engine reported them: believed by the \
                 router, and reported.",
                &["source"],
            ),
            prediction_error_tokens: keep(
                &registry,
                IntCounter::new(
                    "deltaserve_cached_tokens_error_total",
                    "Sum of |believed − reported| cached tokens.",
                ),
            ),
            waiting: keep(
                &registry,
                IntGauge::new(
                    "deltaserve_waiting_turns",
                    "Requests that wait for room in a worker's KV cache.",
                ),
            ),
            waited_s: seconds(
                "deltaserve_wait_seconds",
                "Time that placed requests have waited for room, of those that had to.",
            ),
            admissions: counters(
                "deltaserve_admissions_total",
                "Placed requests by how they came to their worker.",
                &["state"],
            ),
            given_up: counters(
                "deltaserve_given_up_total",
                "Places that sessions gave up, by reason.",
                &["reason"],
            ),
            recomputed_tokens: counters(
                "deltaserve_recomputed_tokens_total",
                "Prompt tokens that a session had been served before and that were computed again.",
                &["worker"],
            ),
            worker: keep(
                &registry,
                IntGaugeVec::new(
                    Opts::new("deltaserve_worker", "State of a worker."),
                    &["worker", "fact"],
                ),
            ),
            registry,
        }
    }

    /// Takes note of an event of the fleet.
    pub fn saw(&self, event: &Event) {
        let word = |value: serde_json::Result<serde_json::Value>| value.unwrap_or_default();
        match event {
            Event::Finish(finish) => self.finished(finish),
            Event::Decision(decision) => {
                let residency = &decision.residency;
                let state = word(serde_json::to_value(residency.state));
                let state = state.as_str().unwrap_or_default();
                self.admissions.with_label_values(&[state]).inc();
                if residency.waited_s > 0.0 {
                    self.waited_s.observe(residency.waited_s);
                }
            }
            Event::GiveUp(given_up) => {
                let reason = word(serde_json::to_value(given_up.reason));
                let reason = reason.as_str().unwrap_or_default();
                self.given_up.with_label_values(&[reason]).inc();
            }
            Event::Wait(_) => {}
        }
    }

    fn finished(&self, finish: &FinishRecord) {
        let outcome = serde_json::to_value(finish.outcome).unwrap_or_default();
        let outcome = outcome.as_str().unwrap_or_default();
        self.finished.with_label_values(&[outcome]).inc();
        if let Some(seconds) = finish.first_token_s {
            self.first_token_s.observe(seconds);
        }
        self.duration_s.observe(finish.duration_s);
        if let Some(tokens) = finish.recomputed_tokens {
            self.recomputed_tokens
                .with_label_values(&[finish.worker.id.as_str()])
                .inc_by(tokens);
        }
        if let Some(reported) = finish.cached_tokens {
            let believed = finish.believed_cached_tokens;
            self.cached_tokens
                .with_label_values(&["believed"])
                .inc_by(believed);
            self.cached_tokens
                .with_label_values(&["reported"])
                .inc_by(reported);
            self.prediction_error_tokens
                .inc_by(believed.abs_diff(reported));
        }
    }

    pub fn refused(&self, status: StatusCode) {
        self.refused.with_label_values(&[status.as_str()]).inc();
    }

    pub fn retried(&self) {
        self.retries.inc();
    }

    /// The exposition text, with the workers as they are now.
    pub fn render(&self, workers: &[WorkerSnapshot], queued: usize, waiting: usize) -> Vec<u8> {
        self.waiting.set(waiting as i64);
        self.queued.set(queued as i64);
        self.worker.reset();
        for worker in workers {
            for (fact, value) in [
                ("healthy", i64::from(worker.healthy)),
                ("draining", i64::from(worker.draining)),
                ("requests", i64::from(worker.load.requests)),
                ("prefilling", i64::from(worker.load.prefilling)),
                ("decoding", i64::from(worker.load.decoding)),
                (
                    "pending_prefill_tokens",
                    worker.load.pending_prefill_tokens as i64,
                ),
                ("decode_tokens", worker.load.decode_tokens as i64),
                ("ongoing_tokens", worker.load.ongoing_tokens as i64),
                ("booked_tokens", worker.residency.booked_tokens as i64),
                ("resident_sessions", worker.residency.sessions as i64),
                ("decisions", worker.decisions as i64),
                ("circuit_open", i64::from(worker.circuit_open)),
                ("load_reports", worker.drift.reports as i64),
                ("drift_corrections", worker.drift.corrections as i64),
                ("drift_requests_over", worker.drift.requests_over as i64),
                ("drift_requests_under", worker.drift.requests_under as i64),
            ] {
                let gauge = self
                    .worker
                    .with_label_values(&[worker.spec.id.as_str(), fact]);
                gauge.set(value);
            }
        }
        let mut text = Vec::new();
        if let Err(error) = TextEncoder::new().encode(&self.registry.gather(), &mut text) {
            log::error!("/metrics: {error}");
        }
        text
    }
}

/// Registers a metric whose name and labels are constants of this file.
fn keep<M: prometheus::core::Collector + Clone + 'static>(
    registry: &Registry,
    metric: prometheus::Result<M>,
) -> M {
    let metric = metric.expect("metric names are valid");
    registry
        .register(Box::new(metric.clone()))
        .expect("metric names are unique");
    metric
}
