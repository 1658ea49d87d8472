//! What decisions and events say of admission.

use super::identity::Name;
use serde::Serialize;

/// How a turn came to its worker: a closed set, so that logs can be counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Residence {
    /// Its session was in there.
    Resident,
    /// Its session was let in there.
    Admitted,
    /// The same, and it was on another worker before.
    Moved,
    /// It fits beside nobody, so nothing else runs there.
    Alone,
    /// Nothing limits who goes there: the rule is off, the worker's capacity is unknown, or the
    /// request was placed past admission.
    Ungated,
}

/// What a decision says about admission.
#[derive(Clone, Debug, Serialize)]
pub struct AdmissionRecord {
    pub state: Residence,
    pub waited_s: f64,
    /// The sessions whose idle KV goes for it; null for families, which have no name.
    pub gave_up: Vec<Option<Name>>,
}

/// Why a session leaves a worker: a closed set, so that logs can be counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GiveUp {
    /// The session said that it had ended.
    Ended,
    /// It is not expected back soon enough for what is kept of it to pay.
    ReturnsLate,
    /// It has had its share, and others wait.
    HadItsShare,
    /// It has been idle for longer than the rule lets it.
    IdleTooLong,
    /// The GPU's KV has no room for it beside what is in flight.
    Growth,
    /// The rule's limit for the worker is exceeded.
    OverLimit,
    /// The cache no longer held it.
    Lost,
    /// Its worker went down, came back empty or left the fleet.
    WorkerGone,
    /// It is on another worker now.
    Moved,
}
