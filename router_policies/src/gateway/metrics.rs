//! Prometheus metrics.

use decision::fleet::admission::queue::WaitEnd;
use decision::fleet::admission::{Residence, TenantShown};
use decision::fleet::log::{Event, FinishRecord};
use decision::fleet::{Outcome, WorkerSnapshot};
use hyper::StatusCode;
use parking_lot::Mutex;
use prometheus::proto::{LabelPair, Metric, MetricFamily};
use prometheus::{
    Encoder, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge,
    IntGaugeVec, Opts, Registry, TextEncoder,
};
use serde::Serialize;
use std::collections::HashSet;
use std::sync::OnceLock;

/// Upper ends of the buckets that times are counted in.
const SECONDS: [f64; 15] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
];

/// And waits for room, which last until `max_wait_s`, and longer where clients come again.
const WAIT_SECONDS: [f64; 16] = [
    0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 90.0, 120.0, 180.0, 240.0, 300.0, 600.0,
    1200.0,
];

/// As many variants as an enum has whose last one this is.
const OUTCOMES: usize = Outcome::RouterError as usize + 1;
const RESIDENCES: usize = Residence::Ungated as usize + 1;

/// Counters by the variants of an enum, under the words that they are in JSON. Each is looked up when it
/// counts first: every request counts some.
struct Words<const COUNT: usize> {
    all: IntCounterVec,
    known: [OnceLock<IntCounter>; COUNT],
}

impl<const COUNT: usize> Words<COUNT> {
    fn new(all: IntCounterVec) -> Self {
        let known = std::array::from_fn(|_| OnceLock::new());
        Self { all, known }
    }

    /// The counter of `variant`, which is number `index` of its enum.
    fn of(&self, variant: impl Serialize, index: usize) -> &IntCounter {
        self.known[index].get_or_init(|| self.all.with_label_values(&[&word(variant)]))
    }
}

/// A variant's name as it is in JSON.
fn word(variant: impl Serialize) -> String {
    let value = serde_json::to_value(variant).unwrap_or_default();
    value.as_str().unwrap_or_default().to_owned()
}

/// Everything that `/metrics` shows.
pub(crate) struct Metrics {
    registry: Registry,
    finished: Words<OUTCOMES>,
    refused: IntCounterVec,
    retries: IntCounter,
    normalised: IntCounterVec,
    first_token_s: Histogram,
    client_first_token_s: HistogramVec,
    realised_over_expected: HistogramVec,
    duration_s: Histogram,
    queued: IntGauge,
    routers: IntGauge,
    cached_tokens: IntCounterVec,
    prompt_tokens: IntCounter,
    prediction_error_tokens: IntCounter,
    waiting: IntGauge,
    waited_s: HistogramVec,
    admissions: Words<RESIDENCES>,
    given_up: IntCounterVec,
    recomputed_tokens: IntCounterVec,
    broken_prefix_tokens: IntCounterVec,
    overloaded: IntGaugeVec,
    tenant: GaugeVec,
    unlogged: IntCounter,
    lost_spans: IntCounter,
    worker: IntGaugeVec,
    /// Held while the gauges are set and read: another who asks meanwhile would find them reset.
    rendering: Mutex<()>,
}

impl Metrics {
    /// `policy` is the name that its requests are counted under.
    pub fn new(policy: &str) -> Self {
        let registry = Registry::new();
        let seconds = |name: &str, help: &str| {
            let buckets = SECONDS.to_vec();
            keep(
                &registry,
                Histogram::with_opts(HistogramOpts::new(name, help).buckets(buckets)),
            )
        };
        let by_route = |name: &str, help: &str, buckets: &[f64]| {
            let opts = HistogramOpts::new(name, help).buckets(buckets.to_vec());
            let opts = opts.const_label("policy", policy);
            keep(&registry, HistogramVec::new(opts, &["worker", "kind"]))
        };
        let counters = |name: &str, help: &str, labels: &[&str]| {
            keep(&registry, IntCounterVec::new(Opts::new(name, help), labels))
        };
        Self {
            finished: Words::new(counters(
                "deltaserve_requests_total",
                "Placed requests by how they ended.",
                &["outcome"],
            )),
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
            normalised: counters(
                "deltaserve_normalised_total",
                "Requests of which something was left out or changed so that their prefix stays, by rule.",
                &["rule"],
            ),
            first_token_s: seconds(
                "deltaserve_first_token_seconds",
                "From the decision to the first output, of answers that come in pieces.",
            ),
            client_first_token_s: by_route(
                "deltaserve_client_first_token_seconds",
                "From a request's headers to its first output, by the worker that answered and the \
                 kind of route, of answers that come in pieces.",
                &SECONDS,
            ),
            realised_over_expected: by_route(
                "deltaserve_first_token_realised_over_expected",
                "Time from the decision to the first output, over what the learnt rates said.",
                &[
                    0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0,
                ],
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
            prompt_tokens: keep(
                &registry,
                IntCounter::new(
                    "deltaserve_prompt_tokens_total",
                    "Prompt tokens of requests whose cached tokens the engine reported.",
                ),
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
            routers: keep(
                &registry,
                IntGauge::new(
                    "deltaserve_routers",
                    "Routers that share the workers: this one, and its peers that are there.",
                ),
            ),
            waited_s: keep(
                &registry,
                HistogramVec::new(
                    HistogramOpts::new(
                        "deltaserve_wait_seconds",
                        "Time that requests have waited for room, of those that had to, by how that ended.",
                    )
                    .buckets(WAIT_SECONDS.to_vec()),
                    &["end"],
                ),
            ),
            admissions: Words::new(counters(
                "deltaserve_admissions_total",
                "Placed requests by how they came to their worker.",
                &["state"],
            )),
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
            broken_prefix_tokens: keep(
                &registry,
                IntCounterVec::new(
                    Opts::new(
                        "deltaserve_prefix_broken_tokens_total",
                        "Prompt tokens that were computed though they had been cached, by why.",
                    ),
                    &["worker", "why"],
                ),
            ),
            overloaded: keep(
                &registry,
                IntGaugeVec::new(
                    Opts::new(
                        "deltaserve_overloaded",
                        "1 where more sessions wait than patience and the worker's time allow.",
                    ),
                    &["worker"],
                ),
            ),
            tenant: keep(
                &registry,
                GaugeVec::new(
                    Opts::new(
                        "deltaserve_tenant",
                        "What tenants hold, want, have used and were refused, by fact.",
                    ),
                    &["tenant", "fact"],
                ),
            ),
            lost_spans: keep(
                &registry,
                IntCounter::new(
                    "deltaserve_lost_spans_total",
                    "Spans of traces that the collector did not take.",
                ),
            ),
            unlogged: keep(
                &registry,
                IntCounter::new(
                    "deltaserve_decision_log_lost_total",
                    "Events that are missing in the decision log, whose file could not be written.",
                ),
            ),
            worker: keep(
                &registry,
                IntGaugeVec::new(
                    Opts::new("deltaserve_worker", "State of a worker."),
                    &["worker", "fact"],
                ),
            ),
            rendering: Mutex::new(()),
            registry,
        }
    }

    /// Takes note of an event of the fleet.
    pub fn saw(&self, event: &Event) {
        match event {
            Event::Finish(finish) => self.finished(finish),
            Event::Decision(decision) => {
                let admission = &decision.admission;
                let state = admission.state;
                self.admissions.of(state, state as usize).inc();
            }
            Event::GiveUp(given_up) => {
                let reason = word(given_up.reason);
                self.given_up.with_label_values(&[&reason]).inc();
            }
            Event::WaitEnd(wait) => {
                // One that could go at once has not waited.
                if wait.waited_s > 0.0 || wait.end != WaitEnd::LetIn {
                    let (end, _) = wait.end.told();
                    let histogram = self.waited_s.with_label_values(&[end]);
                    histogram.observe(wait.waited_s);
                }
            }
            Event::Wait(_) | Event::Overload(_) => {}
        }
    }

    fn finished(&self, finish: &FinishRecord) {
        let outcome = finish.outcome;
        self.finished.of(outcome, outcome as usize).inc();
        let labels = [finish.worker.id.as_str(), finish.kind];
        if let Some(seconds) = finish.first_token_s {
            self.first_token_s.observe(seconds);
            if finish.expected_first_token_s > 0.0 {
                let ratio = seconds / finish.expected_first_token_s;
                let histogram = self.realised_over_expected.with_label_values(&labels);
                histogram.observe(ratio);
            }
        }
        if let Some(seconds) = finish.client_first_token_s {
            let histogram = self.client_first_token_s.with_label_values(&labels);
            histogram.observe(seconds);
        }
        self.duration_s.observe(finish.duration_s);
        if let Some(tokens) = finish.recomputed_tokens {
            self.recomputed_tokens
                .with_label_values(&[finish.worker.id.as_str()])
                .inc_by(tokens);
        }
        if let Some(reported) = finish.cached_tokens {
            self.prompt_tokens
                .inc_by(finish.prompt_tokens.unwrap_or(reported));
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

    /// A prompt's tokens were computed again that had been cached on the worker, or on another.
    pub fn broken_prefix(&self, worker: &str, why: &str, tokens: u64) {
        let counter = self.broken_prefix_tokens.with_label_values(&[worker, why]);
        counter.inc_by(tokens);
    }

    /// Spans that did not get to their collector.
    pub fn lost_spans(&self, spans: u64) {
        self.lost_spans.inc_by(spans);
    }

    /// Events that could not be written to the decision log.
    pub fn lost(&self, events: u64) {
        self.unlogged.inc_by(events);
    }

    pub fn refused(&self, status: StatusCode) {
        self.refused.with_label_values(&[status.as_str()]).inc();
    }

    pub fn normalised(&self, rule: &str) {
        self.normalised.with_label_values(&[rule]).inc();
    }

    pub fn retried(&self) {
        self.retries.inc();
    }

    /// The exposition text, with the workers as they are now. What was counted of one that is gone is
    /// shown once more and then forgotten, as fleets whose workers come and go would add series for ever.
    pub fn render(
        &self,
        workers: &[WorkerSnapshot],
        tenants: &[TenantShown],
        queued: usize,
        waiting: usize,
        routers: u64,
    ) -> Vec<u8> {
        let rendering = self.rendering.lock();
        for of in tenants {
            for (fact, value) in [
                ("waiting", of.waiting as f64),
                ("running", f64::from(of.running)),
                ("held_tokens", of.held_tokens as f64),
                ("share_tokens", of.share_tokens as f64),
                ("kv_token_seconds", of.kv_token_seconds),
                ("refused_sessions", of.refused_sessions as f64),
                ("refused_tokens", of.refused_tokens as f64),
            ] {
                self.tenant
                    .with_label_values(&[&of.tenant, fact])
                    .set(value);
            }
        }
        self.waiting.set(waiting as i64);
        self.queued.set(queued as i64);
        self.routers.set(routers as i64);
        self.worker.reset();
        self.overloaded.reset();
        for worker in workers {
            self.overloaded
                .with_label_values(&[&worker.spec.id])
                .set(i64::from(worker.admission.overloaded));
            for (fact, value) in [
                ("healthy", i64::from(worker.healthy)),
                ("draining", i64::from(worker.draining)),
                ("suspect", i64::from(worker.suspect)),
                ("requests", i64::from(worker.load.requests)),
                ("prefilling", i64::from(worker.load.prefilling)),
                ("decoding", i64::from(worker.load.decoding)),
                (
                    "pending_prefill_tokens",
                    worker.load.pending_prefill_tokens as i64,
                ),
                ("decode_tokens", worker.load.decode_tokens as i64),
                ("ongoing_tokens", worker.load.ongoing_tokens as i64),
                ("booked_tokens", worker.admission.booked_tokens as i64),
                ("resident_sessions", worker.admission.sessions as i64),
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
        let families = self.registry.gather();
        self.forget_all_but(workers, &families);
        drop(rendering);
        let mut text = Vec::new();
        if let Err(error) = TextEncoder::new().encode(&families, &mut text) {
            log::error!("/metrics: {error}");
        }
        text
    }

    /// Drops the series of workers that are gone; `shown` are all.
    fn forget_all_but(&self, workers: &[WorkerSnapshot], shown: &[MetricFamily]) {
        let here: HashSet<&str> = workers.iter().map(|it| it.spec.id.as_str()).collect();
        let metrics = shown.iter().flat_map(MetricFamily::get_metric);
        for labels in metrics.map(Metric::get_label) {
            let named = |name| labels.iter().find(|label| label.name() == name);
            let Some(worker) = named("worker").map(LabelPair::value) else {
                continue;
            };
            if here.contains(worker) {
                continue;
            }
            // Each is an error where there is no such series.
            let _ = self.recomputed_tokens.remove_label_values(&[worker]);
            if let Some(why) = named("why").map(LabelPair::value) {
                let counters = &self.broken_prefix_tokens;
                let _ = counters.remove_label_values(&[worker, why]);
            }
            if let Some(kind) = named("kind").map(LabelPair::value) {
                for histograms in [&self.client_first_token_s, &self.realised_over_expected] {
                    let _ = histograms.remove_label_values(&[worker, kind]);
                }
            }
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::WorkerSpec;
    use decision::fleet::Fleet;
    use decision::fleet::log::EventSink;
    use std::collections::BTreeSet;

    /// The names that `/metrics` has once everything has happened, and the facts of a worker.
    fn shown() -> String {
        let metrics = Metrics::new("elastic");
        for counters in [
            &metrics.finished.all,
            &metrics.refused,
            &metrics.cached_tokens,
            &metrics.admissions.all,
            &metrics.given_up,
            &metrics.recomputed_tokens,
        ] {
            counters.with_label_values(&["x"]).inc();
        }
        for histogram in [
            &metrics.client_first_token_s,
            &metrics.realised_over_expected,
        ] {
            histogram.with_label_values(&["w", "local"]).observe(1.0);
        }
        metrics.waited_s.with_label_values(&["let_in"]).observe(1.0);
        metrics.worker.with_label_values(&["w", "healthy"]).set(1);
        metrics.overloaded.with_label_values(&["w"]).set(1);
        let mut text = Vec::new();
        let families = metrics.registry.gather();
        TextEncoder::new()
            .encode(&families, &mut text)
            .expect("encoded");
        String::from_utf8(text).expect("UTF-8")
    }

    fn words<'a>(text: &'a str, prefix: &'static str) -> impl Iterator<Item = &'a str> {
        let is_word = |c: char| c.is_ascii_lowercase() || c == '_';
        text.match_indices(prefix).map(move |(at, _)| {
            let word = &text[at..];
            &word[..word.find(|c| !is_word(c)).unwrap_or(word.len())]
        })
    }

    /// A fleet of workers with these ids.
    fn fleet_of(ids: impl IntoIterator<Item = String>) -> Fleet {
        let policy = decision::policy::build("round_robin", serde_json::Value::Null);
        let name = "round_robin".to_owned();
        let fleet = Fleet::new(policy.expect("a policy"), name, EventSink::in_memory(), 0);
        for id in ids {
            let spec = serde_json::json!({"url": format!("http://{id}:1"), "id": id});
            let spec: WorkerSpec = serde_json::from_value(spec).expect("a worker");
            fleet
                .add_worker(spec.normalise().expect("a worker"))
                .expect("another");
        }
        fleet
    }

    #[test]
    fn who_asks_at_the_same_time_as_another_is_told_of_every_worker() {
        let metrics = Metrics::new("elastic");
        let fleet = fleet_of((1..=50).map(|port| format!("w{port}")));
        let workers = fleet.snapshot();
        let asked = || {
            (0..100).all(|_| {
                let text =
                    String::from_utf8(metrics.render(&workers, &[], 0, 0, 1)).expect("UTF-8");
                text.matches("fact=\"healthy\"").count() == workers.len()
            })
        };
        std::thread::scope(|scope| {
            let all = [(); 3].map(|()| scope.spawn(asked));
            for one in all {
                assert!(one.join().expect("ends"), "workers are missing");
            }
        });
    }

    #[test]
    fn what_was_counted_of_a_worker_that_is_gone_is_shown_once_more_and_then_forgotten() {
        let metrics = Metrics::new("round_robin");
        let both = ["stays", "goes"];
        let fleet = fleet_of(both.map(str::to_owned));
        for id in both {
            metrics.recomputed_tokens.with_label_values(&[id]).inc();
            for histograms in [
                &metrics.client_first_token_s,
                &metrics.realised_over_expected,
            ] {
                histograms.with_label_values(&[id, "local"]).observe(0.5);
            }
        }
        // How it is now is not counted.
        let states = ["deltaserve_worker{", "deltaserve_overloaded{"];
        let series_of = |id: &str| {
            let text = metrics.render(&fleet.snapshot(), &[], 0, 0, 1);
            let text = String::from_utf8(text).expect("UTF-8");
            let label = format!("worker=\"{id}\"");
            text.lines()
                .filter(|line| line.contains(&label))
                .filter(|line| !states.iter().any(|state| line.starts_with(state)))
                .count()
        };
        let all = series_of("goes");
        assert!(all > 3);
        assert!(fleet.remove_worker("goes"));
        assert_eq!(series_of("goes"), all, "its last figures");
        assert_eq!(series_of("goes"), 0);
        assert_eq!(series_of("stays"), all);
    }

    #[test]
    fn the_board_and_the_alerts_ask_for_what_metrics_has() {
        let board = include_str!("../../ops/grafana.json");
        let parsed: serde_json::Value = serde_json::from_str(board).expect("JSON");
        let panels = parsed["panels"].as_array().expect("panels");
        let has_queries = |panel: &serde_json::Value| {
            let targets = panel["targets"].as_array();
            targets.is_some_and(|all| all.iter().all(|target| target["expr"].is_string()))
        };
        assert!(panels.len() > 10 && panels.iter().all(has_queries));
        let shown = shown();
        let known: BTreeSet<&str> = shown
            .lines()
            .filter(|line| !line.starts_with('#'))
            .filter_map(|line| line.split(['{', ' ']).next())
            .collect();
        let (facts, _) = include_str!("metrics.rs")
            .split_once("mod tests")
            .expect("this module");
        let alerts = include_str!("../../ops/alerts.yml");
        for text in [board, alerts] {
            let mut asked = words(text, "deltaserve_").peekable();
            assert!(asked.peek().is_some());
            for name in asked {
                assert!(known.contains(name), "{name} is not in /metrics");
            }
            let text = text.replace('\\', "");
            for fact in text.split("fact=\"").skip(1) {
                let (fact, _) = fact.split_once('"').expect("quoted");
                assert!(
                    facts.contains(&format!("\"{fact}\",")),
                    "{fact} is no fact of a worker"
                );
            }
        }
    }
}
