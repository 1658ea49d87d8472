//! Rules of residency: who may have a place, and who gives one up for whom.
//!
//! A rule is one file: its [`Info`] and a type with [`Rule`]. It sees a worker as a [`WorkerView`]
//! and answers; it has no clock and does nothing itself. A new rule is one file, its `mod` line and
//! one line in [`TABLE`].

mod aimd;
mod cap;
mod lease;
mod off;
mod priced;
mod rotate;
mod thunder;

use super::gaps::{Gaps, OwnGaps};
use super::give_up::GiveUp;
use super::identity::Key;
use super::rotation::Rotates;
use crate::policy::ParamInfo;
use serde::de::DeserializeOwned;

/// One session with a place, as rules see it.
#[derive(Clone, Debug, Default)]
pub struct Place {
    pub key: Key,
    /// Tokens that it holds, shared ones included.
    pub tokens: u64,
    /// Tokens that would be free without it.
    pub unshared_tokens: u64,
    /// No turn is in flight, and none waits for room to grow.
    pub is_idle: bool,
    /// Since it got its place.
    pub tenure_s: f64,
    /// Since its last turn ended.
    pub idle_s: f64,
    /// When it said that it would be back, from now.
    pub returns_in_s: Option<f64>,
    pub ended: bool,
    /// It passed one that had waited for longer, and keeps its place only until that one can go.
    pub backfilled: bool,
    /// Sub-agents of it are running or waiting, and it waits for them.
    pub waits_for_children: bool,
    pub gaps: OwnGaps,
    /// The share of such sessions' answers, after as many, that are their last.
    pub last_share: f64,
    /// Seconds of the worker's time that computing what it alone holds takes, behind what others hold too.
    pub recompute_s: f64,
    /// The share of it that the worker's host tier is taken to hold.
    pub host_share: f64,
}

/// One worker, as rules see it.
pub struct WorkerView<'a> {
    pub slot: usize,
    pub now_s: f64,
    pub kv_capacity_tokens: u64,
    /// Shared prefixes once, growth included.
    pub booked_tokens: u64,
    /// A turn is in flight there, or its engine holds something for requests that are not the router's.
    pub is_working: bool,
    /// For what share of the last minute it had a prompt to prefill, or those did on average that prefill for it.
    pub prefill_share: f64,
    pub places: &'a [Place],
    pub gaps: &'a Gaps,
}

impl WorkerView<'_> {
    /// Whether a place whose session's return is worth `worth_s` of idleness is worth keeping.
    pub fn keeping_pays(&self, place: &Place, worth_s: f64) -> bool {
        match place.returns_in_s {
            _ if place.waits_for_children => false,
            Some(seconds) if seconds > 0.0 => seconds <= worth_s,
            _ => self
                .gaps
                .keeping_pays(&place.gaps, place.last_share, place.idle_s, worth_s),
        }
    }
}

/// Who needs the room.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Demand {
    /// A turn without a place.
    Waiting {
        /// So long the one has waited that has waited longest.
        oldest_wait_s: f64,
        /// How many times longer than `wait_bound_s` waits may be: as many times what all workers may
        /// hold as those want that wait, at least once.
        bound_scale: f64,
    },
    /// A turn of a session that has a place here, which has grown.
    Growth,
}

impl Demand {
    /// One that comes while nobody waits.
    pub const NOBODY_WAITS: Self = Self::Waiting {
        oldest_wait_s: 0.0,
        bound_scale: 1.0,
    };
}

/// Where a turn without a place may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Where most of it is cached; elsewhere once waiting has cost as much as moving.
    WaitOrMove,
    /// To the worker where it was before, and nowhere else while that is up.
    HomeOnly,
    /// To the worker with most room.
    MostRoom,
}

/// What a rule does in the same way for every turn.
#[derive(Clone, Copy, Debug)]
pub struct Manner {
    /// Turns wait and places are given up; else everything is only counted.
    pub gates: bool,
    /// What fits is decided by tokens.
    pub by_tokens: bool,
    /// The share of a worker's KV that may be booked; none where the setting `fill` says.
    pub fill: Option<f64>,
    pub placement: Placement,
    /// Waiting turns are let in at this interval, not when room is freed.
    pub admit_every_s: Option<f64>,
    /// Turns that need less go first.
    pub smallest_first: bool,
    /// One that has waited this long is let in whatever there is room for.
    pub force_after_s: Option<f64>,
    /// A session with a place goes at once though it has outgrown its room.
    pub residents_always_go: bool,
    /// The room that gathers for the first of the queue is lent to others until that one can go.
    pub backfills: bool,
    /// Turns may wait for as long as computing all that a worker holds takes so many times, if that is longer
    /// than the bound on waits; 0 leaves the bound.
    pub bound_fills: f64,
    /// Sessions take turns in time slices on workers with a host tier, and those that it still holds go
    /// before others.
    pub slices: Option<Slices>,
    /// More sessions than the tiers keep rotate, and turns go by deadline.
    pub rotates: Option<Rotates>,
}

/// How sessions take turns in time slices.
#[derive(Clone, Copy, Debug)]
pub struct Slices {
    /// The share of the KV that those with a slice may be expected to hold.
    pub fill: f64,
    /// The share of the host tier that their prompts may take.
    pub tier_fill: f64,
    /// Nobody needs a slice while the turns of all that take turns, waiting ones too, hold no more than this share
    /// of the KV over time; 0 has slices always.
    pub from_fill: f64,
    /// A prompt that is computed again within so long need not be kept there.
    pub cheap_s: f64,
    /// A turn that has waited so long is late, and goes behind those that are not yet.
    pub late_after_s: f64,
}

impl Default for Manner {
    fn default() -> Self {
        Self {
            gates: true,
            by_tokens: true,
            fill: None,
            placement: Placement::WaitOrMove,
            admit_every_s: None,
            smallest_first: false,
            force_after_s: None,
            residents_always_go: false,
            backfills: false,
            bound_fills: 0.0,
            slices: None,
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

/// A rule of residency.
pub trait Rule: Send {
    fn manner(&self) -> Manner;

    /// Sessions that may have a place on the worker; none where there is no limit.
    fn sessions_limit(&self, slot: usize) -> Option<usize> {
        let _ = slot;
        None
    }

    /// The idle sessions that may be given up for `demand`, in the order in which they go. The view need
    /// not have the places of others.
    fn may_give_up(&self, view: &WorkerView<'_>, demand: Demand) -> Vec<(Key, GiveUp)>;

    /// How long, in seconds, a session keeps its time slice from one that waits. It is worth `worth_s`
    /// seconds of idleness to compute all that it holds again.
    fn slice_s(&self, worth_s: f64, demand: Demand) -> f64 {
        let _ = (worth_s, demand);
        f64::INFINITY
    }

    /// Whether [`Rule::occupied_tokens`] says what is taken, instead of the book.
    fn counts_itself(&self) -> bool {
        false
    }

    /// Tokens that count as taken where it is decided who is let in, if the rule counts for itself.
    fn occupied_tokens(&self, view: &WorkerView<'_>) -> Option<f64> {
        let _ = view;
        None
    }

    /// The sessions that have to give way whether or not somebody waits: idle ones at once, others when
    /// their turn ends. Asked every [`Rule::interval_s`].
    fn over_limit(&self, view: &WorkerView<'_>) -> Vec<Key> {
        let _ = view;
        Vec::new()
    }

    /// How often the rule is told what was seen; none where it need not be.
    fn interval_s(&self) -> Option<f64> {
        None
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
    /// It gives places, and the settings of places hold.
    pub gives_places: bool,
    /// Where the rule comes from.
    pub source: &'static str,
    /// Builds the rule from its parameters; the error names the parameter.
    pub build: fn(serde_json::Value) -> Result<Box<dyn Rule>, String>,
}

/// Every rule that ships; the first is the default.
pub const TABLE: &[&Info] = &[
    &rotate::INFO,
    &priced::INFO,
    &off::INFO,
    &cap::INFO,
    &aimd::INFO,
    &lease::INFO,
    &thunder::INFO,
];

/// Idle sessions: those that have ended, then those that were backfilled, then the others that are
/// `eligible`; of each by `key`, lowest first, of equals the longest idle first.
fn ordered(
    view: &WorkerView<'_>,
    demand: Demand,
    mut eligible: impl FnMut(&Place) -> Option<GiveUp>,
    key: impl Fn(&Place) -> f64,
) -> Vec<(Key, GiveUp)> {
    let mut chosen: Vec<(u8, f64, &Place, GiveUp)> = view
        .places
        .iter()
        .filter(|place| place.is_idle)
        .filter_map(|place| {
            let reason = match demand {
                _ if place.ended => Some(GiveUp::Ended),
                Demand::Waiting { .. } if place.backfilled => Some(GiveUp::Backfilled),
                Demand::Growth => Some(GiveUp::Growth),
                Demand::Waiting { .. } => eligible(place),
            }?;
            let class = match place {
                place if place.ended => 0,
                place if place.backfilled => 1,
                _ => 2,
            };
            Some((class, key(place), place, reason))
        })
        .collect();
    chosen.sort_by(|(class, a, one, _), (other_class, b, other, _)| {
        class
            .cmp(other_class)
            .then(a.total_cmp(b))
            .then(other.idle_s.total_cmp(&one.idle_s))
            .then(one.key.cmp(&other.key))
    });
    let chosen = chosen.into_iter();
    chosen
        .map(|(_, _, place, reason)| (place.key, reason))
        .collect()
}

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

#[cfg(test)]
pub(super) mod testing {
    use super::*;

    /// A view of a worker with 100,000 tokens.
    pub fn view<'a>(places: &'a [Place], gaps: &'a Gaps) -> WorkerView<'a> {
        WorkerView {
            slot: 0,
            now_s: 1_000.0,
            kv_capacity_tokens: 100_000,
            booked_tokens: places.iter().map(|place| place.tokens).sum(),
            is_working: true,
            prefill_share: 1.0,
            places,
            gaps,
        }
    }

    pub fn idle(key: Key, tokens: u64, idle_s: f64) -> Place {
        Place {
            key,
            tokens,
            unshared_tokens: tokens,
            is_idle: true,
            tenure_s: idle_s,
            idle_s,
            last_share: 0.05,
            recompute_s: tokens as f64 / 20_000.0,
            ..Place::default()
        }
    }

    pub const WAITING: Demand = Demand::Waiting {
        oldest_wait_s: 1.0,
        bound_scale: 1.0,
    };

    pub fn keys(chosen: Vec<(Key, GiveUp)>) -> Vec<Key> {
        chosen.into_iter().map(|(key, _)| key).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::testing::{WAITING, view};
    use super::*;
    use proptest::prelude::*;

    fn place(key: Key) -> impl Strategy<Value = Place> {
        let facts = (1u64..40_000, 0.0f64..700.0, 0.0f64..700.0, 0.0f64..1.0);
        (facts, any::<[bool; 4]>()).prop_map(
            move |((tokens, tenure_s, idle_s, last_share), flags)| Place {
                is_idle: flags[0],
                tenure_s,
                ended: flags[1] && flags[2],
                backfilled: flags[2],
                waits_for_children: flags[3],
                last_share: last_share * 0.9,
                ..testing::idle(key, tokens, idle_s)
            },
        )
    }

    proptest! {
        #[test]
        fn who_may_be_given_up_does_not_depend_on_those_who_are_busy(
            places in (0u64..8).prop_flat_map(|count| (0..count).map(place).collect::<Vec<_>>()),
        ) {
            let gaps = Gaps::default();
            let idle: Vec<Place> = places.iter().filter(|place| place.is_idle).cloned().collect();
            let all = view(&places, &gaps);
            let of_idle = WorkerView { places: &idle, ..view(&places, &gaps) };
            for info in TABLE {
                let rule = (info.build)(serde_json::json!({})).expect("a rule");
                for demand in [WAITING, Demand::Growth] {
                    let chosen = rule.may_give_up(&of_idle, demand);
                    prop_assert_eq!(rule.may_give_up(&all, demand), chosen, "{}", info.name);
                }
            }
        }
    }
}
