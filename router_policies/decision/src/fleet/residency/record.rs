//! What a decision says about residency.

use super::identity::Name;
use serde::Serialize;

/// How a turn came to its worker: a closed set, so that logs can be counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Residence {
    /// Its session had a place there.
    Resident,
    /// Its session got a place there.
    Admitted,
    /// The same, and it was on another worker before.
    Moved,
    /// It fits beside nobody, so nobody else has a place there.
    Alone,
    /// Nothing limits who goes there: the rule is off, the worker's capacity is unknown, or the
    /// request was placed past the gate.
    Ungated,
}

/// What a decision says about residency.
#[derive(Clone, Debug, Serialize)]
pub struct ResidencyRecord {
    pub state: Residence,
    pub waited_s: f64,
    /// The sessions that gave up their places for it; null for families, which have no name.
    pub gave_up: Vec<Option<Name>>,
}
