//! What is worked out once for a round of decisions, and holds until places change.

use super::Sites;
use super::give_up::GiveUp;
use super::identity::Key;
use super::rules::Demand;
use smallvec::SmallVec;
use std::collections::HashSet;
use std::rc::Rc;

/// Who gives up a place, and why.
pub(super) type Leaving = Vec<(Key, GiveUp)>;

/// What a round of decisions has in common. What it has worked out holds until places change.
pub(super) struct Round {
    pub now_s: f64,
    pub oldest_wait_s: f64,
    /// How many times longer than `wait_bound_s` turns may wait.
    pub bound_scale: f64,
    /// A worker on which room gathers for another.
    pub closed: Option<usize>,
    /// What is free there may be lent until that other can go.
    pub lends: bool,
    /// Somebody wants to know why a turn has to wait. Else workers that it may not go to, or that
    /// have no turn for a cold prefill, need not be looked at.
    pub says_why: bool,
    /// Where it is looked for room, as places among the sites; none for all of them.
    pub looked: Option<Rc<[usize]>>,
    /// Slots of workers that nothing limits.
    pub ungated: SmallVec<[usize; 8]>,
    /// By slot: who may be given up for one that waits, and what that frees at most.
    pub eligible: Vec<Option<Rc<Eligible>>>,
    /// By slot: what those with a time slice are expected to hold.
    pub loads: Vec<Option<Rc<Load>>>,
    /// Slots whose room is kept for a turn that goes before, and those that another session enters before.
    pub blocked: SmallVec<[usize; 8]>,
    pub shut: SmallVec<[usize; 8]>,
    /// Slots where one waits for its turns to be prompt.
    pub queued: SmallVec<[usize; 8]>,
    /// Sessions that wait for their sub-agents.
    pub busy: Option<Rc<HashSet<Key>>>,
}

/// Who may be given up on a worker, and what that frees at most.
pub(super) struct Eligible {
    pub keys: Leaving,
    pub most_tokens: u64,
    /// [`Hold::changes`] of the places that it is of.
    pub changes: u64,
}

/// What those with a slice, and others that run, hold of one worker's KV, and what its tiers are to keep of them.
pub(super) struct Load {
    /// Tokens, half of them of this moment: `NOW_SHARE` of `slices`.
    pub tokens: f64,
    /// Tokens of their prompts: running or not, they are to be found in one of the tiers again.
    pub kept: f64,
    /// Those who have had theirs for long enough; the longest first.
    pub over: Vec<Over>,
    /// [`super::book::Hold::changes`] of the places that it is of.
    pub changes: u64,
}

/// A session that has had its slice for long enough, and what there will be less over time without it.
pub(super) struct Over {
    pub key: Key,
    pub tokens: f64,
    pub kept: f64,
}

impl Round {
    pub fn new(sites: &Sites, now_s: f64, oldest_wait_s: f64, bound_scale: f64) -> Self {
        Self {
            now_s,
            oldest_wait_s,
            bound_scale,
            closed: None,
            lends: false,
            says_why: false,
            looked: None,
            ungated: sites.ungated.clone(),
            eligible: Vec::new(),
            loads: Vec::new(),
            blocked: SmallVec::new(),
            shut: SmallVec::new(),
            queued: SmallVec::new(),
            busy: None,
        }
    }

    pub(super) fn demand(&self) -> Demand {
        Demand::Waiting {
            oldest_wait_s: self.oldest_wait_s,
            bound_scale: self.bound_scale,
        }
    }

    /// Places have changed, and with them perhaps who waits for sub-agents. What is known of a worker holds
    /// as long as its own places are the same: [`Hold::changes`].
    pub fn forget_busy(&mut self) {
        self.busy = None;
    }

    /// Another tenant's turn asks.
    pub fn forget_eligible(&mut self) {
        self.eligible.clear();
        self.loads.clear();
    }

    /// The same, and what depends on it on all workers.
    pub fn forget_all(&mut self) {
        self.eligible.clear();
        self.busy = None;
    }
}
