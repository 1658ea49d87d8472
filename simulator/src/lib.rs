//! A fleet of LLM engines in virtual time, under the real router's decisions: the same plan, the same
//! policies and the same files as a measured run, without a GPU.
//!
//! Arrows point one way: `simulation → agenda, clients, router, engine → cache`. Nothing here is a measurement;
//! what it rests on is in [`calibration`], and how far it is off is stated in `docs/simulator.md`.

mod agenda;
mod cache;
pub mod calibration;
mod clients;
pub mod engine;
mod ids;
pub mod plan;
mod prompts;
mod requests;
mod results;
mod router;
mod simulation;

pub use cache::{Cache, Change, Eviction, Match, ROOT, Totals};
pub use results::{Report, WorkerReport};
pub use simulation::run;
