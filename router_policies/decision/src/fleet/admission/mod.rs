//! Admission: which sessions take turns on which worker, and which of their turns may go now. It stands
//! beside every policy: it says which workers a turn may go to, the policy chooses among them.
//!
//! A worker's ledger has the sessions that are in, whose prompts its tiers are to keep ([`rotation`]), and
//! what its GPU holds and runs ([`hold`]); both count shared prefixes once ([`footprint`]). A turn asks
//! ([`asking`]) or waits ([`queue`], [`letting_in`]). The default rule rotates the sessions; those that it is
//! compared with limit how many are in ([`rules`]). Everything happens under the fleet's lock and by the
//! fleet's clock; what has to happen outside of it is left in an [`Outbox`].

mod asking;
pub mod cached;
mod departed;
pub mod footprint;
pub mod gaps;
pub mod hold;
pub mod identity;
mod letting_in;
pub mod queue;
pub mod record;
mod rotation;
pub mod rules;
pub mod sessions;
pub mod settings;
mod shown;
mod site;
pub mod tenants;
mod turns;

pub(super) use asking::{Asked, Go};
pub(super) use departed::Since;
pub use queue::{WaitReason, Wake};
pub use record::{AdmissionRecord, GiveUp, Residence};
pub use shown::{AdmissionSnapshot, SessionShown};
pub(super) use site::{Site, Sites, site_of};
pub use tenants::{Priority, Quota, Tenant, TenantShown};
pub(super) use turns::Seat;

use super::affinity::SessionKeys;
use super::log::{Event, GiveUpRecord, unix_now_s};
use crate::model::WorkerSpec;
use cached::Cached;
use departed::Departed;
use gaps::Gaps;
use hold::Hold;
use identity::{Key, Name};
use queue::Queue;
use rotation::Rotation;
use rules::{Manner, Rule};
use sessions::Sessions;
use settings::{Chosen, Settings};
use std::sync::Arc;
use tenants::Tenants;

/// An answer is booked at so many times the mean, at most at its own limit.
const OUTPUT_SAFETY: f64 = 2.0;
/// How long a turn is taken to run until some have.
const ASSUMED_RUN_S: f64 = 5.0;

/// What is to be done once the fleet's lock is released.
#[derive(Default)]
pub(super) struct Outbox {
    pub wakes: Vec<Wake>,
    pub events: Vec<Event>,
}

/// One worker's sessions and turns.
#[derive(Default)]
struct Ledger {
    rotation: Rotation,
    hold: Hold,
    /// A host tier gives back what the GPU evicts.
    is_tiered: bool,
    given_up: u64,
    recomputed_tokens: u64,
    /// Of prompts that were answered after the rule was last told.
    prompt_tokens: u64,
    cached_tokens: u64,
}

pub(super) struct Admission {
    settings: Settings,
    pub session_keys: SessionKeys,
    rule: Box<dyn Rule>,
    manner: Manner,
    /// By slot.
    ledgers: Vec<Ledger>,
    sessions: Sessions,
    gaps: Gaps,
    queue: Queue,
    departed: Departed,
    /// Of calls beside conversations, which are not booked.
    aside_tokens: u64,
    /// How long turns run on their workers.
    run_s: f64,
    text_scale: f64,
    turns: u64,
    /// When a rule with an interval let sessions in last, and was told last.
    round_s: f64,
    told_s: f64,
    outbox: Outbox,
}

impl Admission {
    pub fn new(chosen: Chosen) -> Self {
        Self {
            settings: chosen.settings,
            session_keys: SessionKeys::default(),
            manner: chosen.rule.manner(),
            rule: chosen.rule,
            ledgers: Vec::new(),
            sessions: Sessions::default(),
            gaps: Gaps::default(),
            queue: Queue::default(),
            departed: Departed::default(),
            aside_tokens: 0,
            run_s: ASSUMED_RUN_S,
            text_scale: 1.0,
            turns: 0,
            round_s: f64::NEG_INFINITY,
            told_s: f64::NEG_INFINITY,
            outbox: Outbox::default(),
        }
    }

    pub fn share_among(&mut self, tenants: Vec<Tenant>) {
        self.queue.tenants = Tenants::new(tenants);
    }

    /// Whether turns may have to wait at all.
    pub fn gates(&self) -> bool {
        self.manner.gates
    }

    /// Tokens that engines report for one that was estimated from text, in steps, so that what was
    /// booked by it stays what it is.
    pub fn text_scale(&self) -> f64 {
        const STEPS: f64 = 16.0;
        ((self.text_scale * STEPS).round() / STEPS).max(1.0 / STEPS)
    }

    /// Whether [`Admission::pump`] may have something to do.
    pub fn needs_pump(&self) -> bool {
        !self.queue.is_empty() || self.manner.interval_s.is_some()
    }

    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// What is cached of a prompt, from its tokens by slot.
    pub fn cached(&self, by_slot: impl Iterator<Item = u64>) -> Cached {
        Cached::new(by_slot)
    }

    /// Booked for an answer of at most `limit` tokens, where answers have `mean` tokens.
    pub fn output_tokens(&self, limit: Option<u64>, mean: f64) -> u64 {
        let likely = (mean * OUTPUT_SAFETY).ceil() as u64;
        limit.map_or(likely, |limit| limit.min(likely))
    }

    pub fn take_outbox(&mut self) -> Outbox {
        std::mem::take(&mut self.outbox)
    }

    fn ledger(&self, slot: usize) -> Option<&Ledger> {
        self.ledgers.get(slot)
    }

    fn ledger_mut(&mut self, slot: usize) -> &mut Ledger {
        if self.ledgers.len() <= slot {
            self.ledgers.resize_with(slot + 1, Ledger::default);
        }
        &mut self.ledgers[slot]
    }

    /// What may be booked on a worker; none where its capacity is unknown.
    fn budget_tokens(&self, site: &Site) -> Option<u64> {
        let capacity = site.kv_capacity_tokens? as f64;
        let default = self.settings.fill(site.host_tier_tokens().is_some());
        let fill = self.manner.fill.unwrap_or(default);
        Some(((capacity * fill) as u64).saturating_sub(site.external_tokens))
    }

    /// Makes a slot ready for a worker that has just come.
    pub fn clear(&mut self, slot: usize) {
        *self.ledger_mut(slot) = Ledger::default();
    }

    /// The worker's cache is gone.
    pub fn lose_all(&mut self, slot: usize, spec: &Arc<WorkerSpec>) {
        let ledger = self.ledger_mut(slot);
        ledger.hold.lose_all();
        let idle: Vec<Key> = ledger.idle().collect();
        for key in idle {
            self.give_up(slot, spec, key, GiveUp::WorkerGone);
        }
        self.ledgers[slot].rotation.lose_all();
    }

    /// Takes a session out; returns its name.
    fn give_up(
        &mut self,
        slot: usize,
        spec: &Arc<WorkerSpec>,
        key: Key,
        reason: GiveUp,
    ) -> Option<Name> {
        let ledger = self.ledger_mut(slot);
        let freed_tokens = ledger.hold.remove(key);
        let member = ledger.rotation.remove(key);
        if member.is_none() && freed_tokens.is_none() {
            return None;
        }
        ledger.given_up += 1;
        let freed_tokens = freed_tokens.unwrap_or(0);
        let (name, tokens) = member.unwrap_or((None, freed_tokens));
        self.outbox.events.push(Event::GiveUp(GiveUpRecord {
            ts_unix_s: unix_now_s(),
            worker: Arc::clone(spec),
            session_id: name.clone(),
            tokens,
            freed_tokens,
            reason,
        }));
        name
    }

    /// The tenant of a session; the first, which is nobody's, where it is not known.
    fn payer_of(&self, key: Key) -> usize {
        self.sessions.get(key).map_or(0, |known| known.payer)
    }

    /// Takes a session out whose KV is no longer where it was.
    pub fn lose_place(&mut self, site: &Site, key: Key) {
        self.sessions.of(key).lost_on = Some(site.serial);
        self.give_up(site.slot, &site.spec, key, GiveUp::Lost);
    }

    /// Whether nothing is in flight or waits, and the ledgers agree.
    pub fn is_quiet(&self) -> bool {
        self.queue.is_quiet() && self.ledgers.iter().all(|ledger| ledger.hold.is_quiet())
    }
}

impl Ledger {
    fn runs(&self, key: Key) -> bool {
        let occupant = self.hold.occupant(key);
        occupant.is_some_and(|occupant| !occupant.is_idle())
    }

    /// The sessions that are in, or have KV on the GPU, and run no turn.
    fn idle(&self) -> impl Iterator<Item = Key> {
        let members = self.rotation.members.keys().copied();
        let others = self.hold.occupants().map(|(key, _)| key);
        let others = others.filter(|key| !self.rotation.members.contains_key(key));
        members.chain(others).filter(|&key| !self.runs(key))
    }
}
