//! The simulator's tests, one module a subject, linked once.

mod admission;
mod cache;
mod common;
mod engines;
mod policies;
mod simulation;
