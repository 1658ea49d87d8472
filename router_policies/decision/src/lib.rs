//! The decision: which turn may go now, and which workers serve it. No I/O, no clock but the one it is given, no
//! threads: whoever embeds it says what happened, and asks.
//!
//! [`policy`] picks among workers by facts, [`fleet`] counts, reserves and remembers, [`fleet::admission`] admits
//! sessions by the KV that the workers hold, and [`model`] describes workers. Arrows point one way:
//! `fleet → policy → model`.
//!
//! `examples/embed.rs` (`cargo run -p decision --example embed`):
#![doc = concat!("```\n", include_str!("../examples/embed.rs"), "```")]

pub mod fleet;
pub mod model;
pub mod policy;
pub mod room;
