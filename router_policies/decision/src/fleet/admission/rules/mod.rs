//! Rules of admission: how many sessions may be in on a worker, and who leaves for whom.
//!
//! A rule is one file: its [`Info`] and a type with [`Rule`]. [`rotate`] is the default; the others are what
//! it is compared with, and say no more than whether one more session may come in. A new one is a file, its
//! `mod` line and a line in [`TABLE`].

mod aimd;
mod cap;
mod lease;
mod off;
mod rotate;
mod thunder;

use super::identity::Key;
use super::rotation::Rotates;
use crate::policy::ParamInfo;
use serde::de::DeserializeOwned;

/// A session that is in, as rules see it.
#[derive(Clone, Copy, Debug)]
pub struct Seated {
    pub key: Key,
    /// Of its last prompt, those that others have in common with it included.
    pub tokens: u64,
    /// Since its last turn ended; none while one runs or waits.
    pub idle_s: Option<f64>,
}

/// One worker, as rules see it.
pub struct WorkerView<'a> {
    pub slot: usize,
    pub kv_capacity_tokens: u64,
    /// Of the prompts of all that are in, shared prefixes once.
    pub tokens: u64,
    pub seated: &'a [Seated],
}

/// The prompt of a session that asks to come in.
#[derive(Clone, Copy, Debug)]
pub struct Prompt {
    pub tokens: u64,
    /// That no prompt of those who are in begins with.
    pub new_tokens: u64,
}

/// Where a session that asks to come in may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Wherever it may come in: the policy chooses.
    Anywhere,
    /// To the worker where it was before, and nowhere else while that is up.
    HomeOnly,
    /// To the worker with most room.
    MostRoom,
}

/// What a rule does in the same way for every turn.
#[derive(Clone, Copy, Debug)]
pub struct Manner {
    /// Turns may wait; else everything is only counted.
    pub gates: bool,
    /// Turns wait until the GPU's KV has room for what is in flight.
    pub by_tokens: bool,
    /// The share of a worker's KV that may be booked; none where the setting `fill` says.
    pub fill: Option<f64>,
    pub placement: Placement,
    /// The rule is told what was seen, and sessions come in, at this interval; none for whenever there is room.
    pub interval_s: Option<f64>,
    /// Sessions come in at the interval only.
    pub in_rounds: bool,
    /// Sessions that need less come in first.
    pub smallest_first: bool,
    /// Who has been idle for so long leaves for one that waits.
    pub idle_s: f64,
    /// More sessions than the tiers keep rotate, and turns go by deadline.
    pub rotates: Option<Rotates>,
}

impl Default for Manner {
    fn default() -> Self {
        Self {
            gates: true,
            by_tokens: false,
            fill: None,
            placement: Placement::Anywhere,
            interval_s: None,
            in_rounds: false,
            smallest_first: false,
            idle_s: 600.0,
            rotates: None,
        }
    }
}

/// What was seen of one worker since the rule was last told.
#[derive(Clone, Copy, Debug, Default)]
pub struct Observed {
    /// Share of the KV in use, as the engine reports it, else as it is booked.
    pub used_share: f64,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
}

/// A rule of admission.
pub trait Rule: Send {
    fn manner(&self) -> Manner;

    /// Whether one more session may come in beside those who are. Not asked of a rule that rotates.
    fn lets_in(&self, view: &WorkerView<'_>, prompt: Prompt) -> bool {
        let _ = (view, prompt);
        true
    }

    /// Sessions that have to leave whether or not somebody waits: idle ones at once, others when their turn
    /// ends. Asked every [`Manner::interval_s`].
    fn over_limit(&self, view: &WorkerView<'_>) -> Vec<Key> {
        let _ = view;
        Vec::new()
    }

    fn observe(&mut self, slot: usize, observed: Observed) {
        let _ = (slot, observed);
    }
}

/// A rule's entry in the table.
pub struct Info {
    pub name: &'static str,
    pub summary: &'static str,
    /// The rule, exactly.
    pub rule: &'static str,
    pub params: &'static [ParamInfo],
    /// Where the rule comes from.
    pub source: &'static str,
    /// Builds the rule from its parameters; the error names the parameter.
    pub build: fn(serde_json::Value) -> Result<Box<dyn Rule>, String>,
}

/// Every rule that ships; the first is the default.
pub const TABLE: &[&Info] = &[
    &rotate::INFO,
    &off::INFO,
    &cap::INFO,
    &aimd::INFO,
    &lease::INFO,
    &thunder::INFO,
];

/// Reads a rule's parameters and checks them with `expected`, which lists what must hold of which.
fn parse<P: DeserializeOwned>(
    params: serde_json::Value,
    expected: impl Fn(&P) -> Vec<(&'static str, &'static str, bool)>,
) -> Result<P, String> {
    let params: P = crate::model::checks::read(params)?;
    for (name, what, holds) in expected(&params) {
        if !holds {
            return Err(format!("{name}: expected {what}"));
        }
    }
    Ok(params)
}

/// Of rules without parameters.
fn parse_none(params: serde_json::Value) -> Result<(), String> {
    #[derive(serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct NoParams {}
    crate::model::checks::read::<NoParams>(params).map(|_| ())
}

#[cfg(test)]
pub(super) mod testing {
    use super::*;

    /// A view of a worker with 100,000 tokens.
    pub fn view(seated: &[Seated]) -> WorkerView<'_> {
        WorkerView {
            slot: 0,
            kv_capacity_tokens: 100_000,
            tokens: seated.iter().map(|seated| seated.tokens).sum(),
            seated,
        }
    }

    pub fn idle(key: Key, tokens: u64, idle_s: f64) -> Seated {
        Seated {
            key,
            tokens,
            idle_s: Some(idle_s),
        }
    }

    pub fn prompt(tokens: u64) -> Prompt {
        Prompt {
            tokens,
            new_tokens: tokens,
        }
    }
}
