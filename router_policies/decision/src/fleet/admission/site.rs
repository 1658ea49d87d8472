//! The workers that may answer requests, as admission sees them.

use super::Admission;
use crate::model::WorkerSpec;
use crate::policy::{Rates, attention_pairs};
use smallvec::SmallVec;
use std::ops::Deref;
use std::sync::Arc;

#[derive(Clone)]
pub(in crate::fleet) struct Site {
    pub slot: usize,
    pub serial: u64,
    pub spec: Arc<WorkerSpec>,
    pub routable: bool,
    /// Prefills what it answers, unless a policy separates.
    pub prefills: bool,
    pub kv_capacity_tokens: Option<u64>,
    /// What its engine holds for requests that are not ours.
    pub external_tokens: u64,
    /// The engine tells what it holds.
    pub is_exact: bool,
    /// Finished prompts stay in its cache.
    pub keeps_prefixes: bool,
    pub used_share: Option<f64>,
    pub rates: Rates,
}

impl Site {
    /// Seconds of computing what of a prompt is not cached here.
    pub fn compute_s(&self, tokens: u64, cached_tokens: u64) -> f64 {
        let new = tokens.saturating_sub(cached_tokens);
        self.rates
            .compute_s(new, attention_pairs(cached_tokens, new))
    }

    /// What limits who may go there.
    pub fn limits(&self) -> (u64, bool, Option<u64>, u64) {
        (
            self.serial,
            self.routable,
            self.kv_capacity_tokens,
            self.external_tokens,
        )
    }

    /// What its host tier holds, where that is more than the GPU does. Engines write through, so that one
    /// which holds less has copies of what the GPU has, and gives nothing back of what was evicted there.
    pub fn host_tier_tokens(&self) -> Option<u64> {
        let device = self.kv_capacity_tokens.unwrap_or(0);
        self.spec.host_kv_tokens.filter(|&tier| tier > device)
    }

    /// Turns may have to wait for it.
    pub fn is_gated(&self) -> bool {
        self.routable && self.kv_capacity_tokens.is_some()
    }
}

/// All of them, in the order of their slots, and what follows from that.
#[derive(Clone, Default)]
pub(in crate::fleet) struct Sites {
    pub all: Vec<Site>,
    /// How many are routable, and what may be booked on these.
    pub open: usize,
    pub(super) budget_tokens: u64,
    /// Slots of workers that nothing limits.
    pub(super) ungated: SmallVec<[usize; 8]>,
}

impl Deref for Sites {
    type Target = [Site];

    fn deref(&self) -> &[Site] {
        &self.all
    }
}

impl Sites {
    /// To be called where limits have changed.
    pub fn sum_up(&mut self, admission: &Admission) {
        let open = self.all.iter().filter(|site| site.routable);
        self.open = open.clone().count();
        self.budget_tokens = open.filter_map(|site| admission.budget_tokens(site)).sum();
        let ungated = self.all.iter();
        let ungated = ungated.filter(|site| site.kv_capacity_tokens.is_none());
        self.ungated = ungated.map(|site| site.slot).collect();
    }

    pub fn gated(&self) -> impl Iterator<Item = &Site> + Clone {
        self.iter().filter(|site| site.is_gated())
    }
}

/// The site of a slot; `sites` are in the order of their slots.
pub(in crate::fleet) fn site_of(sites: &[Site], slot: usize) -> Option<&Site> {
    let at = sites.binary_search_by_key(&slot, |site| site.slot).ok()?;
    Some(&sites[at])
}
