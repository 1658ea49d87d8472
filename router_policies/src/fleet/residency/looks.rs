//! Which workers a round looks at for the turns that wait.
//!
//! A round is due at every first token and every answer. On a small fleet it looks at all workers.
//! On a large one nothing has changed on nearly all of them since the last round, so that what had no
//! room there has none now: a round looks where places or limits have changed, and at so many others,
//! in turn, that time has its effect on every worker within [`LOOK_INTERVAL_S`].

use super::{Residency, Site};
use std::rc::Rc;

/// A fleet of up to so many workers is looked at whole.
const SMALL: usize = 16;
/// Every worker is looked at within this time. While something waits, rounds are no further apart.
pub(super) const LOOK_INTERVAL_S: f64 = 0.1;

/// What earlier rounds have seen.
pub(super) struct Looks {
    /// By slot.
    seen: Vec<Option<Limits>>,
    /// The place among the sites from which the next ones are looked at in turn.
    next: usize,
    last_s: f64,
    /// [`SMALL`], but for tests.
    small: usize,
}

/// What limits who may go to a worker, beside the places on it.
#[derive(Clone, Copy, PartialEq)]
struct Limits {
    serial: u64,
    routable: bool,
    prefills: bool,
    budget_tokens: Option<u64>,
}

impl Default for Looks {
    fn default() -> Self {
        Self {
            seen: Vec::new(),
            next: 0,
            last_s: f64::NEG_INFINITY,
            small: SMALL,
        }
    }
}

impl Residency {
    /// The sites that a round at `now_s` looks at, as their places among `sites`, in order; none for
    /// all of them. Counts as looking at them.
    pub(super) fn next_looks(&mut self, sites: &[Site], now_s: f64) -> Option<Vec<usize>> {
        if sites.len() <= self.looks.small {
            return None;
        }
        let mut looked = Vec::new();
        let count = sites.len();
        let due = (count as f64 * (now_s - self.looks.last_s) / LOOK_INTERVAL_S).ceil() as usize;
        let due = due.min(count);
        let first = self.looks.next % count;
        self.looks.next = (first + due) % count;
        self.looks.last_s = now_s;
        let gathers_at = self.gathers.map(|(_, slot)| slot);
        for (at, site) in sites.iter().enumerate() {
            let limits = Limits {
                serial: site.serial,
                routable: site.routable,
                prefills: site.prefills,
                budget_tokens: self.budget_tokens(site),
            };
            let is_due = (at + count - first) % count < due;
            if self.looks.seen.len() <= site.slot {
                self.looks.seen.resize(site.slot + 1, None);
            }
            let is_new = self.looks.seen[site.slot].replace(limits) != Some(limits);
            let hold = self.holds.get_mut(site.slot);
            let has_changed = hold.is_some_and(|hold| std::mem::take(&mut hold.changed));
            if is_due || is_new || has_changed || gathers_at == Some(site.slot) {
                looked.push(at);
            }
        }
        Some(looked)
    }

    /// `looked`, and the sites where places have changed since [`Residency::next_looks`]. The next round
    /// looks there as well: whoever was asked about before has not been tried there.
    pub(super) fn look_where_changed(&self, sites: &[Site], looked: &[usize]) -> Rc<[usize]> {
        let changed = |site: &Site| self.holds.get(site.slot).is_some_and(|hold| hold.changed);
        let changed = sites.iter().enumerate().filter(|(_, site)| changed(site));
        let mut all: Vec<usize> = changed.map(|(at, _)| at).chain(looked.iter().copied()).collect();
        all.sort_unstable();
        all.dedup();
        all.into()
    }
}

/// The sites at these places, or all.
pub(super) fn chosen<'s>(
    sites: &'s [Site],
    looked: Option<&[usize]>,
) -> impl Iterator<Item = &'s Site> + Clone {
    let count = looked.map_or(sites.len(), <[usize]>::len);
    (0..count).map(move |at| &sites[looked.map_or(at, |looked| looked[at])])
}
