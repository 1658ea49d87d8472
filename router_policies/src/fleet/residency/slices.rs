//! Time slices: which sessions are served in turn on a worker whose host tier holds more than its GPU.
//!
//! Beside a host tier a place on the GPU costs little to give up, so that places alone keep nobody out:
//! all that the tier holds would take turns, and every turn would be late. So a session gets a time
//! slice first, as a process that is swapped in does before the scheduler runs it (two-level
//! scheduling). As many have one as their turns are expected to fill a share of the KV with, by how long
//! each runs and thinks; their turns go before all others. Who has had a slice for long enough loses it
//! to one that waits.

use super::book::Key;
use super::gaps::MOST_S;
use super::gate::Round;
use super::rules::Demand;
use super::{Residency, Site, Sites, site_of};
use crate::policy::attention_pairs;
use std::rc::Rc;

/// A turn's time on its worker that is assumed until some was seen.
pub(super) const ASSUMED_RUN_S: f64 = 5.0;

/// What those with a slice are expected to hold on one worker.
pub(super) struct Load {
    /// Tokens, over time.
    tokens: f64,
    /// Those who have had theirs for long enough, and what of the tokens are theirs; the longest first.
    over: Vec<(Key, f64)>,
    /// [`super::book::Hold::changes`] of the places that it is of.
    pub changes: u64,
}

impl Residency {
    /// What turns of sessions with a slice may be expected to hold on a worker; none where there are
    /// no slices.
    fn slice_budget(&self, site: &Site) -> Option<f64> {
        let fill = self.manner.slice_fill?;
        site.spec.host_kv_tokens?;
        Some(self.budget_tokens(site)? as f64 * fill)
    }

    /// Whether sessions take turns in time slices on any worker.
    pub(super) fn has_slices(&self, sites: &Sites) -> bool {
        self.manner.slice_fill.is_some() && sites.has_host_tier
    }

    pub(super) fn has_slice(&self, key: Key, site: &Site) -> bool {
        let seen = self.seen.get(site.slot);
        seen.is_some_and(|seen| seen.slices.contains_key(&key)) && self.is_home(key, site)
    }

    /// Whether the session has a slice where it had its place last.
    pub(super) fn has_slice_at_home(&self, key: Key, sites: &[Site]) -> bool {
        let home = self.sessions.get(key).and_then(|known| known.home);
        home.and_then(|(slot, _)| site_of(sites, slot))
            .is_some_and(|site| self.has_slice(key, site))
    }

    fn is_home(&self, key: Key, site: &Site) -> bool {
        let known = self.sessions.get(key);
        known.is_some_and(|known| known.home == Some((site.slot, site.serial)))
    }

    /// Whether a session has a slice there, or may begin one now, or needs none.
    pub(super) fn may_begin_slice(&self, key: Key, site: &Site, round: &mut Round) -> bool {
        let Some(budget) = self.slice_budget(site) else {
            return true;
        };
        if self.has_slice(key, site) {
            return true;
        }
        // The next one is that for which room gathers.
        if round.closed == Some(site.slot) {
            return false;
        }
        let changes = self.changes_at(site.slot);
        if round.loads.len() <= site.slot {
            round.loads.resize(site.slot + 1, None);
        }
        let known = round.loads[site.slot].as_ref();
        let load = match known.filter(|load| load.changes == changes) {
            Some(load) => Rc::clone(load),
            None => Rc::new(self.load(site, round.now_s, round.demand())),
        };
        round.loads[site.slot] = Some(Rc::clone(&load));
        self.ends_for(key, &load, budget, round.now_s).is_some()
    }

    /// A session whose turn was let in begins a slice, unless it has one, and those end that make room for it.
    /// One that goes on with a place that it still has, where no more slices fit, has none.
    pub fn begin_slice(&mut self, key: Key, site: &Site, now_s: f64, demand: Demand) {
        let Some(budget) = self.slice_budget(site) else {
            return;
        };
        if self.has_slice(key, site) {
            return;
        }
        let mut load = self.load(site, now_s, demand);
        // The turn runs already.
        load.tokens -= self.expected_tokens(key, now_s);
        let Some(ends) = self.ends_for(key, &load, budget, now_s) else {
            return;
        };
        let mut slices = std::mem::take(&mut self.seen[site.slot].slices);
        for key in ends {
            slices.remove(&key);
        }
        slices.retain(|key, _| self.is_home(*key, site) && self.expected_tokens(*key, now_s) > 0.0);
        slices.insert(key, now_s);
        self.seen[site.slot].slices = slices;
    }

    /// What a worker is expected to hold of those with a slice, and of others that run.
    fn load(&self, site: &Site, now_s: f64, demand: Demand) -> Load {
        let mut load = Load {
            tokens: 0.0,
            over: Vec::new(),
            changes: self.changes_at(site.slot),
        };
        let (Some(seen), Some(hold)) = (self.seen.get(site.slot), self.holds.get(site.slot)) else {
            return load;
        };
        let mut over = Vec::new();
        for (&key, &since_s) in &seen.slices {
            if !self.is_home(key, site) {
                continue;
            }
            let tokens = self.expected_tokens(key, now_s);
            load.tokens += tokens;
            if now_s - since_s >= self.slice_s(key, site, demand) {
                over.push((since_s, key, tokens));
            }
        }
        let others = hold.occupants().filter(|(_, o)| !o.turns.is_empty());
        let others = others.filter(|(key, _)| !seen.slices.contains_key(key));
        load.tokens += others
            .map(|(key, _)| self.expected_tokens(key, now_s))
            .sum::<f64>();
        over.sort_by(|(one_s, one, _), (other_s, other, _)| {
            one_s.total_cmp(other_s).then(one.cmp(other))
        });
        load.over = over
            .into_iter()
            .map(|(_, key, tokens)| (key, tokens))
            .collect();
        load
    }

    /// Who has to end so that this one may begin; none if all who may are not enough.
    fn ends_for(&self, key: Key, load: &Load, budget: f64, now_s: f64) -> Option<Vec<Key>> {
        let own = self.expected_tokens(key, now_s);
        let mut left = load.tokens;
        let mut ends = Vec::new();
        let mut over = load.over.iter();
        // One alone may be larger than the budget; less than a token is what rounding leaves.
        while left >= 1.0 && left + own > budget {
            let (other, tokens) = over.next()?;
            left -= tokens;
            ends.push(*other);
        }
        Some(ends)
    }

    /// How long a session keeps its slice from one that waits.
    fn slice_s(&self, key: Key, site: &Site, demand: Demand) -> f64 {
        let known = self.sessions.get(key);
        let tokens = known
            .and_then(|known| known.prompt_tokens)
            .unwrap_or(0)
            .max(1);
        let recompute_s = site.rates.compute_s(tokens, attention_pairs(0, tokens));
        let capacity = site.kv_capacity_tokens.unwrap_or(tokens) as f64;
        self.rule
            .slice_s(recompute_s * capacity / tokens as f64, demand)
    }

    /// The KV that a session's turns are expected to hold, in tokens, over the time in which they run and
    /// it thinks. The less it is to be expected back, the fewer.
    fn expected_tokens(&self, key: Key, now_s: f64) -> f64 {
        let Some(known) = self.sessions.get(key) else {
            return 0.0;
        };
        let run_s = known.run_s.unwrap_or(self.run_s);
        let think_s = self.gaps.mean_s(&known.gaps);
        let returns = match known.ended_s {
            Some(ended_s) if known.in_flight == 0 && !known.waits => {
                let last_share = self.endings.last_share(known.kind());
                let idle_s = now_s - ended_s;
                self.gaps
                    .returns_within(&known.gaps, last_share, idle_s, MOST_S)
            }
            _ => 1.0,
        };
        let tokens = known.prompt_tokens.unwrap_or(0) as f64;
        tokens * returns * run_s / (run_s + think_s)
    }
}
