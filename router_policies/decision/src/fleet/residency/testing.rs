//! What tests of residency have in common: a fleet for which time passes as they say, and its turns.

use super::settings;
use crate::fleet::log::EventSink;
use crate::fleet::prefix::hash::TokenHasher;
use crate::fleet::{Fleet, Request};
use crate::model::WorkerSpec;
use crate::policy;
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A fleet without workers under `unified` and this rule, `priced` where none is named, and its clock in
/// milliseconds.
pub fn fleet_under(rule: &Value) -> (Arc<Fleet>, Arc<AtomicU64>) {
    let mut rule = rule.clone();
    if let Some(table) = rule.as_object_mut() {
        table.entry("rule").or_insert_with(|| "priced".into());
    }
    let clock_ms = Arc::new(AtomicU64::new(0));
    let shown = Arc::clone(&clock_ms);
    let fleet = Fleet::with_clock(
        policy::build("unified", Value::Null).expect("a policy"),
        "unified".to_owned(),
        EventSink::in_memory(),
        1,
        Box::new(move || shown.load(Ordering::Relaxed) as f64 / 1e3),
    );
    let rule = settings::build(&rule).map_err(|error| panic!("{error}"));
    (
        Arc::new(fleet.with_residency(rule.expect("a rule"))),
        clock_ms,
    )
}

/// Adds the worker that `spec` describes, which is up.
pub fn add(fleet: &Fleet, spec: Value) {
    let spec = serde_json::from_value::<WorkerSpec>(spec).expect("a worker");
    let id = spec.id.clone();
    fleet.add_worker(spec).expect("a new id");
    fleet.report_health(id.as_str(), true);
}

/// A turn of `session`, whose prompt shares nothing with those of others.
pub fn turn(fleet: &Fleet, session: u32, length: u32) -> Request {
    let mut hasher = TokenHasher::new(fleet.token_block());
    let first = (session + 1) * 1_000_000;
    hasher.extend(&(first..first + length).collect::<Vec<_>>());
    Request {
        session_id: Some(format!("s{session}")),
        prompt: hasher.finish(),
        max_output_tokens: Some(100),
        stream: true,
        ..Request::default()
    }
}
