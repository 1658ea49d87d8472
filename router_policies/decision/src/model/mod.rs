//! Workers as configuration describes them, and the checks of what is configured. Everything else rests on it.

pub mod address;
pub mod checks;
mod role;
pub mod worker;

pub use address::is_worker_address;
pub use role::Role;
pub use worker::{Connector, Engine, Secret, WORKER_FIELDS, WorkerSpec, bracketed};
