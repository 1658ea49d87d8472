//! The fleet: workers, what they are doing, what they hold, and the one lock under which a policy
//! picks and the pick is reserved.
//!
//! Owns every counter that policies see. Knows nothing of HTTP: the gateway reports what happened
//! to a request through its [`Reservation`].

pub mod admission;
mod affinity;
mod batch;
mod choosing;
mod circuit;
mod commit;
mod engine_run;
mod holdings;
mod kinds;
mod learning;
mod liveness;
mod load;
pub mod log;
mod marked;
mod outcome;
mod placing;
mod prefills;
pub mod prefix;
mod rates;
mod registry;
mod reports;
mod reservation;
mod share;
mod view;
mod which;
mod whole;
mod worker;

use affinity::{Session, SessionKeys};
pub use liveness::Pulse;
pub use load::Load;
pub use outcome::{Outcome, Usage};
pub use placing::{Admit, Refused, Ticket};
pub use reports::EventsBegin;
pub use reservation::{PrefillWatch, Reservation};
pub use which::Which;
pub use whole::Separable;
pub use worker::SGLANG_GROUP;
pub use worker::{EngineLoad, WorkerSnapshot};

use crate::model::{Engine, WorkerSpec};
use crate::policy::{Policy, Role, WorkerFacts};
use admission::settings::{self, Chosen};
use admission::{Admission, Tenant};
use kinds::Kinds;
use log::EventSink;
use lru::LruCache;
use marked::{Marked, Marks};
use parking_lot::Mutex;
use prefix::estimate::EstimateTree;
use prefix::events::ExactIndex;
use prefix::hash::PromptHashes;
use share::Share;
use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;
use view::{KnownFacts, KnownSites};
use worker::Worker;

/// Tokens a block of the prefix estimate, where the worker's pages are not larger.
pub const ESTIMATE_BLOCK_TOKENS: usize = 16;
/// Assumed where neither the configuration nor the engine says: bounds the estimate's memory.
pub const DEFAULT_KV_CAPACITY_TOKENS: u64 = 1 << 20;
const SESSIONS: usize = 1 << 17;

/// A request, as the gateway parsed it.
#[derive(Clone, Debug, Default)]
pub struct Request {
    pub request_id: String,
    pub session_id: Option<String>,
    /// Whose the session's id is: that of others is another session. 0 is nobody's.
    pub tenant: u64,
    /// Whose share it takes: the place in the list of [`Fleet::with_tenants`].
    pub payer: usize,
    /// Who has a share of the places in the queue; none where nobody can tell.
    pub client: Option<u64>,
    /// It may be a call beside the session's conversation, such as one for a title: small and without tools.
    pub may_be_aside: bool,
    pub prompt: PromptHashes,
    /// The request's own limit on output tokens.
    pub max_output_tokens: Option<u64>,
    /// The answer comes in pieces, the first of which tells when the prefill ended.
    pub stream: bool,
    pub hints: Hints,
    /// When its headers came, by the fleet's clock, where that is known.
    pub received_s: Option<f64>,
    /// By the fleet's clock, where it has been tried before: it queues as one that came then.
    pub arrived_s: Option<f64>,
    /// Which workers may share it.
    pub separable: Separable,
    /// Answers that are made of it at once, of all its prompts together; 0 counts as one.
    pub answers: u64,
    /// Prompts that it carries, of about the same length; 0 counts as one.
    pub prompts: u64,
}

/// What a request's headers say of its session.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Hints {
    /// No further turn comes.
    pub ends: bool,
    /// The next turn comes so long after this one's end.
    pub idle_s: Option<f64>,
    /// The session that this one is a sub-agent of.
    pub parent_session: Option<String>,
}

pub(crate) struct State {
    /// By slot; a slot is reused once its worker is gone and nothing is reserved on it.
    workers: Marked<Option<Worker>>,
    token_trees: Vec<(usize, EstimateTree)>,
    text_tree: EstimateTree,
    exact: ExactIndex,
    sessions: LruCache<u64, Session>,
    sequence: u64,
    next_serial: u64,
    /// Those that share the workers, this one among them.
    routers: u64,
    separated_inflight: u32,
    /// Prefills whose end nothing will tell, by when they are predicted to end (µs) and id.
    untold: BTreeMap<(u64, u64), Box<Share>>,
    mean_output_tokens: f64,
    kinds: Kinds,
    random: fastrand::Rng,
    facts: Vec<WorkerFacts>,
    known_facts: Vec<KnownFacts>,
    /// Slots of the workers that may have changed since these were found.
    stale_facts: Marks,
    held_blocks: Vec<u32>,
    /// By slot: tokens of the prompt that the facts are filled in for, by the estimate, whether it counts
    /// or not.
    likely_tokens: Vec<usize>,
    /// See [`State::sites`].
    known_sites: KnownSites,
    /// Where the worker of an id is, of those that have not been removed.
    slots: HashMap<String, usize>,
    admission: Admission,
}

/// Seconds since some beginning.
type Clock = Box<dyn Fn() -> f64 + Send + Sync>;

/// The workers and all that is known of them.
pub struct Fleet {
    state: Mutex<State>,
    policy: Box<dyn Policy>,
    policy_name: String,
    sink: EventSink,
    clock: Clock,
    token_block: AtomicUsize,
    /// A worker has been added whose queued requests must not be aborted.
    has_kept_queues: AtomicBool,
    complaints: Mutex<Complaints>,
}

/// Of a policy that chooses workers which are no candidates.
#[derive(Default)]
struct Complaints {
    last_s: Option<f64>,
    unsaid: u64,
}

impl Fleet {
    /// A fleet without workers.
    pub fn new(policy: Box<dyn Policy>, policy_name: String, sink: EventSink, seed: u64) -> Self {
        let started = Instant::now();
        let clock = Box::new(move || started.elapsed().as_secs_f64());
        Self::with_clock(policy, policy_name, sink, seed, clock)
    }

    /// A fleet without workers, for which time passes as `clock` says.
    pub fn with_clock(
        policy: Box<dyn Policy>,
        policy_name: String,
        sink: EventSink,
        seed: u64,
        clock: Clock,
    ) -> Self {
        Self {
            state: Mutex::new(State {
                workers: Marked::default(),
                token_trees: Vec::new(),
                text_tree: EstimateTree::default(),
                exact: ExactIndex::default(),
                sessions: LruCache::new(NonZeroUsize::new(SESSIONS).unwrap_or(NonZeroUsize::MIN)),
                sequence: 0,
                next_serial: 0,
                routers: 1,
                separated_inflight: 0,
                untold: BTreeMap::new(),
                mean_output_tokens: 256.0,
                kinds: Kinds::default(),
                random: fastrand::Rng::with_seed(seed),
                facts: Vec::new(),
                known_facts: Vec::new(),
                stale_facts: Marks::default(),
                held_blocks: Vec::new(),
                likely_tokens: Vec::new(),
                known_sites: KnownSites::default(),
                slots: HashMap::new(),
                admission: Admission::new(ungated()),
            }),
            policy,
            policy_name,
            sink,
            clock,
            token_block: AtomicUsize::new(ESTIMATE_BLOCK_TOKENS),
            has_kept_queues: AtomicBool::new(false),
            complaints: Mutex::default(),
        }
    }

    /// The same fleet with another rule of admission; without it, the rule is `off`.
    #[must_use]
    pub fn with_admission(self, chosen: Chosen) -> Self {
        {
            let admission = &mut self.state.lock().admission;
            let session_keys = admission.session_keys;
            *admission = Admission::new(chosen);
            admission.session_keys = session_keys;
        }
        self
    }

    /// The same fleet, shared by these tenants; the first is of requests that belong to no other.
    #[must_use]
    pub fn with_tenants(self, tenants: Vec<Tenant>) -> Self {
        self.state.lock().admission.share_among(tenants);
        self
    }

    /// The same fleet, with a secret in the numbers that it knows sessions by.
    #[must_use]
    pub fn with_secret(self, secret: u64) -> Self {
        self.state.lock().admission.session_keys = SessionKeys::with_secret(secret);
        self
    }

    /// What the session `id` of nobody in particular is known by here.
    pub fn session_key(&self, id: &str) -> u64 {
        self.state.lock().admission.session_keys.of_tenant(0, id)
    }

    /// Block, in tokens, that prompts must be hashed in now.
    pub fn token_block(&self) -> usize {
        self.token_block.load(Ordering::Relaxed)
    }

    pub fn policy_name(&self) -> &str {
        &self.policy_name
    }

    /// Where decision and finish events go.
    pub fn sink(&self) -> &EventSink {
        &self.sink
    }

    /// Seconds by the fleet's clock.
    pub fn now_s(&self) -> f64 {
        (self.clock)()
    }

    /// True when nothing is reserved anywhere and every counter agrees.
    pub fn is_idle(&self) -> bool {
        let state = self.state.lock();
        state.separated_inflight == 0
            && state.admission.is_quiet()
            && state
                .workers
                .iter()
                .flatten()
                .all(|worker| worker.load == Load::default())
    }
}

/// A random number as the id of a decision or a request: 16 hexadecimal digits.
pub fn random_id(random: u64) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digit = |at: usize| DIGITS[(random >> (60 - 4 * at) & 15) as usize];
    // Formatting takes some five times as long.
    let digits: [u8; 16] = std::array::from_fn(digit);
    std::str::from_utf8(&digits).unwrap_or_default().to_owned()
}

/// What holds where nothing is said of admission: a fleet without a gate.
fn ungated() -> Chosen {
    let off = serde_json::json!({"rule": "off"});
    settings::build(&off).expect("the rule off has no parameters that could be wrong")
}

/// Whether the worker's engine serves a request that nobody prefilled for it. vLLM's decode workers do,
/// though policies spare them that: what no KV came for they compute.
pub fn can_serve_whole(spec: &WorkerSpec) -> bool {
    abilities(spec).0 || (spec.engine == Engine::Vllm && spec.role == Role::Decode)
}

/// What a worker may do: serve alone, prefill for others, decode for others. A colocated vLLM worker
/// with a connector (`kv_both`) does everything.
pub fn abilities(spec: &WorkerSpec) -> (bool, bool, bool) {
    match spec.role {
        Role::Colocated => {
            let both = spec.engine == Engine::Vllm && spec.kv_connector.is_some();
            (true, both, both)
        }
        Role::Prefill => (false, true, false),
        Role::Decode => (false, false, true),
        Role::Elastic => (true, false, true),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn random_ids_are_as_long_whatever_the_number() {
        assert_eq!(super::random_id(0x01f), "000000000000001f");
        assert_eq!(super::random_id(0xfedc_ba98_7654_3210), "fedcba9876543210");
    }
}
