//! Which worker holds how much of a prompt.

pub mod estimate;
pub mod events;
pub mod hash;
mod span;
