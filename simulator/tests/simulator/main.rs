//! The simulator's tests, one module a subject, linked once.

mod cache;
mod common;
mod engines;
mod policies;
mod residency;
mod simulation;
