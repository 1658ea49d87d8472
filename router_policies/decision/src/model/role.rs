//! What a worker does in a fleet.

use serde::{Deserialize, Serialize};

/// What a worker does. See the configuration's `role`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Prefills and decodes its own requests.
    Colocated,
    /// Prefills for decode workers only.
    Prefill,
    /// Decodes what a prefill worker sends.
    Decode,
    /// A decode worker that also prefills locally.
    Elastic,
}
