//! Why a session loses its place.

use serde::Serialize;

/// Why a place was given up: a closed set, so that logs can be counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GiveUp {
    /// The session said that it had ended.
    Ended,
    /// Its return is further away than its place is worth.
    ReturnsLate,
    /// It has had its share, and others wait.
    HadItsShare,
    /// Its worker has nothing to do while others wait, and it is computed again soon enough.
    WorkerIdle,
    /// Its tenant holds more than its share, and another is owed room.
    OverShare,
    /// It has been idle for longer than the rule lets it.
    IdleTooLong,
    /// Another with a place has grown, or answers were longer than was expected.
    Growth,
    /// The rule's limit for the worker has shrunk, or what is there has outgrown it.
    OverLimit,
    /// It had passed one that has waited for longer, and that one can go now.
    Backfilled,
    /// Its own sub-agent waits for room.
    ForItsChild,
    /// For a turn that fits beside nobody.
    ForOneAlone,
    /// Nobody with a place here could go on otherwise.
    Deadlock,
    /// The cache no longer held it.
    Lost,
    /// Its worker went down, came back empty or left the fleet.
    WorkerGone,
    /// It has its place on another worker now.
    Moved,
}
