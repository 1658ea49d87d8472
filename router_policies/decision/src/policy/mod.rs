//! Policies: (fleet, request) → decision, as pure functions over facts.
//!
//! Owns what a policy may know ([`View`]), what it may answer ([`Decision`], [`Refusal`]) and the
//! table of policies ([`TABLE`]). Knows nothing of HTTP, locks or clocks: the fleet fills in the
//! facts, checks the answer and makes the reservation. A new policy is one file, its `mod` line
//! and one line in [`TABLE`]. (A macro could make the two lines one, but rustfmt would then pass the
//! policies' files by.)

mod decode_first;
mod elastic;
mod first_turn;
mod isl_bounding;
mod least_requests;
mod linear;
mod lmetric;
mod migrate;
mod nixl_threshold;
mod offload;
mod pd;
mod power_of_two;
mod random;
mod round_robin;
mod selective;
mod unified;

pub use crate::model::Role;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// Learnt or assumed speeds of one worker.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Rates {
    /// New prompt tokens prefilled a second, attention aside, while nothing decodes there.
    pub prefill_tokens_per_s: f64,
    /// Pairs of a new token and a token of context before it that attention gets through a second.
    pub attention_pairs_per_s: f64,
    /// How many times longer a local prefill takes while others decode: what pacing costs it.
    pub paced_slowdown: f64,
    /// Fixed time of a local prefill: scheduling, and the step that runs when it comes.
    pub prefill_overhead_s: f64,
    /// KV tokens a second that arrive on this worker from a prefill worker.
    pub transfer_tokens_per_s: f64,
    /// Fixed time of a separated request: handshake, allocation, scheduling on both sides.
    pub transfer_overhead_s: f64,
    /// Time between two tokens of one stream while nothing is prefilled here: of the step itself, for
    /// each request in it, and for each token of their contexts. See [`Rates::step_s`].
    pub decode_base_s: f64,
    pub decode_per_request_s: f64,
    pub decode_per_context_token_s: f64,
}

/// Nobody predicts further than this for how long a KV pool stays full.
const MAX_ADMISSION_S: f64 = 600.0;

/// Pairs that attention works through when `new` tokens follow `cached` ones.
pub fn attention_pairs(cached: u64, new: u64) -> f64 {
    new as f64 * (cached as f64 + new as f64 / 2.0)
}

impl Rates {
    /// Seconds of a step that decodes one token for each of so many requests, with so many tokens of
    /// context between them.
    pub fn step_s(&self, requests: f64, context_tokens: f64) -> f64 {
        self.decode_base_s
            + self.decode_per_request_s * requests
            + self.decode_per_context_token_s * context_tokens
    }

    /// Seconds of an otherwise idle worker for so many new tokens with so many pairs.
    pub fn compute_s(&self, new_tokens: u64, pairs: f64) -> f64 {
        new_tokens as f64 / self.prefill_tokens_per_s + pairs / self.attention_pairs_per_s
    }
}

/// One worker, as a policy sees it. Token counts are the router's own, corrected by the engine's
/// load reports where there are any.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WorkerFacts {
    /// The fleet's name for the worker in a [`Route`].
    pub slot: usize,
    pub role: Role,
    /// May be chosen now: healthy, not draining, circuit closed, not excluded for this request.
    pub routable: bool,
    /// Admission lets the request's session have its KV here now; says nothing about prefilling for
    /// another worker.
    pub admits: bool,
    /// May prefill and decode a request alone.
    pub serves_local: bool,
    /// May prefill for another worker.
    pub serves_prefill: bool,
    /// May decode what another worker prefilled.
    pub serves_decode: bool,
    /// Workers exchange KV only within one group (engine and connector).
    pub transfer_group: u32,
    /// Reserved requests, in any phase.
    pub requests: u32,
    /// Of those, the ones that wait for or run their prefill here.
    pub prefilling: u32,
    /// Of those, the ones that decode here.
    pub decoding: u32,
    /// Reserved prompt tokens still to be prefilled here.
    pub pending_prefill_tokens: u64,
    /// Predicted seconds until the prefills reserved here have run, less what the one that runs has
    /// behind it.
    pub prefill_wait_s: f64,
    /// Context tokens of the requests that decode here.
    pub decode_tokens: u64,
    /// Reserved requests that will decode here once they are prefilled, here or on another worker, and
    /// their context tokens.
    pub arriving: u32,
    pub arriving_tokens: u64,
    /// Context tokens of all reserved requests: the KV they need if they share nothing.
    pub ongoing_tokens: u64,
    /// KV tokens that running requests hold and those on their way will need: by the engine's load
    /// report where one comes, which counts shared prefixes once, else `ongoing_tokens`.
    pub held_tokens: u64,
    /// KV tokens a second that running requests give back as they end, by the answers' mean length.
    pub freed_tokens_per_s: f64,
    /// Tokens that the worker is believed to keep in its cache, of all prompts.
    pub kept_tokens: u64,
    pub kv_capacity_tokens: Option<u64>,
    /// Tokens of this request's prompt that the worker is believed to hold.
    pub cached_tokens: u64,
    /// Sessions moved here within the sliding window.
    pub recent_migrations: u32,
    pub rates: Rates,
}

impl WorkerFacts {
    /// KV tokens that are lacking for so many more until running requests give some back; none where
    /// the capacity is unknown.
    pub fn lacking_tokens(&self, more: u64) -> u64 {
        let needed = self.held_tokens + more;
        self.kv_capacity_tokens
            .map_or(0, |capacity| needed.saturating_sub(capacity))
    }

    /// Free KV tokens once running requests have theirs; `u64::MAX` where the capacity is unknown.
    pub fn kv_room_tokens(&self) -> u64 {
        self.kv_capacity_tokens.map_or(u64::MAX, |capacity| {
            capacity.saturating_sub(self.ongoing_tokens)
        })
    }
}

/// The request, as a policy sees it.
#[derive(Clone, Debug, Default, Serialize)]
pub struct RequestFacts {
    /// Prompt tokens; estimated from the length where the prompt is text.
    pub input_tokens: u64,
    /// Prompts that those are of: a batch has several.
    pub prompts: u64,
    /// The request's limit on output tokens, or the fleet's running mean.
    pub expected_output_tokens: u64,
    /// Whether the request named its session.
    pub has_session: bool,
    /// 0-based turn of the session, as counted here.
    pub turn: u32,
    /// The worker that decoded the session's previous turn.
    pub affine: Option<usize>,
}

/// Everything a policy may look at.
#[derive(Debug, Serialize)]
pub struct View<'a> {
    /// All workers, in slot order; not all are candidates.
    pub workers: &'a [WorkerFacts],
    pub request: &'a RequestFacts,
    /// Decisions made before this one: what rotations and ties turn on.
    pub sequence: u64,
    /// Fresh random bits.
    pub random: u64,
    /// Separated requests whose first token has not come yet.
    pub separated_inflight: u32,
}

impl<'a> View<'a> {
    /// Workers that may serve the request alone.
    pub fn local(&self) -> impl Iterator<Item = &'a WorkerFacts> + Clone + use<'a> {
        self.workers
            .iter()
            .filter(|w| w.routable && w.admits && w.serves_local)
    }

    /// Workers that may prefill for another.
    pub fn prefill(&self) -> impl Iterator<Item = &'a WorkerFacts> + Clone + use<'a> {
        self.workers
            .iter()
            .filter(|w| w.routable && w.serves_prefill)
    }

    /// Workers that may decode what another prefilled.
    pub fn decode(&self) -> impl Iterator<Item = &'a WorkerFacts> + Clone + use<'a> {
        self.workers
            .iter()
            .filter(|w| w.routable && w.admits && w.serves_decode)
    }

    /// Seconds of `worker`'s time, free of other work, that the request's prefill takes there.
    pub fn compute_s(&self, worker: &WorkerFacts) -> f64 {
        let new = self.new_tokens(worker);
        let pairs = self.pairs(worker.cached_tokens, new);
        worker.rates.compute_s(new, pairs)
    }

    /// Pairs that attention works through for the request: tokens of different prompts are none.
    pub fn pairs(&self, cached: u64, new: u64) -> f64 {
        attention_pairs(cached, new) / self.request.prompts.max(1) as f64
    }

    /// Seconds until a prefill that starts queueing on `worker` now has run, for another worker.
    pub fn remote_prefill_s(&self, worker: &WorkerFacts) -> f64 {
        worker.prefill_wait_s + self.compute_s(worker)
    }

    /// Seconds until `worker` has room in its KV pool for the request's prompt, what is cached of it
    /// included, and its answer. Running requests are not evicted for it: it waits until enough of them
    /// have ended.
    pub fn admission_s(&self, worker: &WorkerFacts) -> f64 {
        let more = self.request.input_tokens + self.request.expected_output_tokens;
        // Once nothing runs there is no more to wait for.
        let lacking = worker.lacking_tokens(more).min(worker.held_tokens);
        if lacking == 0 {
            return 0.0;
        }
        (lacking as f64 / worker.freed_tokens_per_s).min(MAX_ADMISSION_S)
    }

    /// Tokens that `worker` would push out of its cache for the request; none where its capacity is
    /// unknown.
    pub fn displaced_tokens(&self, worker: &WorkerFacts) -> u64 {
        let more = self.new_tokens(worker) + self.request.expected_output_tokens;
        let kept = worker.kept_tokens.max(worker.held_tokens);
        worker.kv_capacity_tokens.map_or(0, |capacity| {
            (kept + more).saturating_sub(capacity).min(more)
        })
    }

    /// Seconds until a prefill that starts queueing on `worker` now has run, to be decoded there. It
    /// is paced if anything decodes when its turn comes, as those before it will.
    pub fn local_prefill_s(&self, worker: &WorkerFacts) -> f64 {
        let slowdown = match worker.decoding + worker.prefilling {
            0 => 1.0,
            _ => worker.rates.paced_slowdown,
        };
        let turn_s = worker.prefill_wait_s.max(self.admission_s(worker));
        turn_s + worker.rates.prefill_overhead_s + slowdown * self.compute_s(worker)
    }

    /// Seconds until the first token of a request that `prefill` prefills and `decode` decodes: while
    /// the one computes, the other may still wait for room.
    pub fn separated_s(&self, prefill: &WorkerFacts, decode: &WorkerFacts) -> f64 {
        let computed_s = self.remote_prefill_s(prefill);
        computed_s.max(self.admission_s(decode)) + self.transfer_s(decode)
    }

    /// Seconds that `decode` takes to get the KV it lacks, once that is computed.
    pub fn transfer_s(&self, decode: &WorkerFacts) -> f64 {
        decode.rates.transfer_overhead_s
            + self.new_tokens(decode) as f64 / decode.rates.transfer_tokens_per_s
    }

    /// Prompt tokens that `worker` would have to prefill.
    pub fn new_tokens(&self, worker: &WorkerFacts) -> u64 {
        self.request
            .input_tokens
            .saturating_sub(worker.cached_tokens)
    }

    /// The session's previous worker, if it may serve this request alone.
    pub fn affine_local(&self) -> Option<&'a WorkerFacts> {
        let slot = self.request.affine?;
        self.local().find(|w| w.slot == slot)
    }

    /// The candidate with the lowest key; ties go to fewer requests, then in rotation.
    pub fn lowest<K: PartialOrd>(
        &self,
        candidates: impl Iterator<Item = &'a WorkerFacts> + Clone,
        key: impl Fn(&WorkerFacts) -> K,
    ) -> Option<&'a WorkerFacts> {
        let count = candidates.clone().count();
        if count == 0 {
            return None;
        }
        let start = (self.sequence % count as u64) as usize;
        let rotated = candidates.clone().skip(start).chain(candidates.take(start));
        let mut best: Option<(K, &WorkerFacts)> = None;
        for worker in rotated {
            let this = key(worker);
            let better = match &best {
                None => true,
                Some((lowest, holder)) => {
                    this < *lowest || (this == *lowest && worker.requests < holder.requests)
                }
            };
            if better {
                best = Some((this, worker));
            }
        }
        best.map(|(_, worker)| worker)
    }

    /// The prefill and the decode worker that `choose` picks, decode first; for policies that
    /// choose one worker at a time. The prefill worker comes from the decode worker's group.
    pub fn pair(
        &self,
        decode: Option<&'a WorkerFacts>,
        choose_prefill: impl Fn(Vec<&'a WorkerFacts>) -> Option<&'a WorkerFacts>,
    ) -> Option<Route> {
        let decode = decode?;
        let partners = self.partners(decode).collect();
        let prefill = choose_prefill(partners)?;
        Some(Route::PrefillDecode {
            prefill: prefill.slot,
            decode: decode.slot,
        })
    }

    /// Workers that may prefill for `decode`.
    pub fn partners(
        &self,
        decode: &WorkerFacts,
    ) -> impl Iterator<Item = &'a WorkerFacts> + Clone + use<'a> {
        let (group, slot) = (decode.transfer_group, decode.slot);
        self.prefill()
            .filter(move |p| p.transfer_group == group && p.slot != slot)
    }

    /// Workers that may decode and have at least one partner that prefills.
    pub fn decode_with_partner(&self) -> impl Iterator<Item = &'a WorkerFacts> + Clone {
        self.decode().filter(|d| self.partners(d).next().is_some())
    }
}

/// Where a request goes, by the workers' slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Route {
    Local { worker: usize },
    PrefillDecode { prefill: usize, decode: usize },
}

impl Route {
    /// The worker whose answer the client gets.
    pub fn answering(&self) -> usize {
        match *self {
            Route::Local { worker } => worker,
            Route::PrefillDecode { decode, .. } => decode,
        }
    }

    /// The worker that prefills.
    pub fn prefilling(&self) -> usize {
        match *self {
            Route::Local { worker } => worker,
            Route::PrefillDecode { prefill, .. } => prefill,
        }
    }
}

/// Why a policy chose what it chose: a closed set, so that logs can be counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    Rotation,
    Random,
    LeastRequests,
    PowerOfTwo,
    Affinity,
    LowestScore,
    AlwaysSeparate,
    /// `offload`: fewer new tokens than a medium request has.
    Warm,
    /// `offload`: fewer new tokens than a heavy request has.
    Medium,
    /// `offload`: a heavy request, separated.
    Heavy,
    /// `offload`: heavy, but enough separated requests are on their way.
    SeparatedCap,
    /// Too few new tokens to be worth a transfer.
    NewBelowThreshold,
    /// Enough new tokens to be separated by a rule that looks at nothing else.
    NewAboveThreshold,
    /// The session's first turn, or its worker is gone: separated.
    FirstTurn,
    /// Nothing decodes on the chosen worker, so nothing there needs protection.
    ChosenNotDecoding,
    /// No other worker holds enough of the prefix.
    SourceCacheBelowThreshold,
    /// No other worker can prefill for the chosen one.
    NoPartner,
    /// The policy only separates, and this request cannot be.
    NotSeparable,
    /// The predicted benefit does not exceed the predicted cost by the margin.
    NotWorthIt,
    /// The predicted benefit of separation exceeds its cost by the margin.
    WorthIt,
    /// The session moves to another worker.
    Migration,
    /// The lowest predicted cost to this request and to the others.
    LowestCost,
    /// The session's worker, though another is cheaper by less than the hysteresis.
    Hysteresis,
    /// A policy outside this crate.
    Custom,
    /// The prefill side failed, so the decode worker serves the request alone.
    PrefillFailed,
    /// The decode worker answered with an error, as where the KV does not arrive, and no other pair can
    /// take the request: it serves the request alone.
    TransferFailed,
}

/// What a policy that minimises a cost adds up, in seconds, each term with its weight.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Cost {
    /// Until the first token.
    pub first_token_s: f64,
    /// Delays of those that decode where it is prefilled.
    pub stall_s: f64,
    /// Of its own decoding, and what that adds to the steps of others.
    pub decode_s: f64,
    /// Computing again what it pushes out of the cache.
    pub displace_s: f64,
}

impl Cost {
    pub fn total_s(&self) -> f64 {
        self.first_token_s + self.stall_s + (self.decode_s + self.displace_s)
    }
}

/// A choice that was weighed, and the first-token time predicted for it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Alternative {
    pub route: Route,
    pub predicted_s: f64,
    /// None where the policy minimises something else.
    pub cost: Option<Cost>,
}

/// A policy's answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    pub route: Route,
    pub reason: Reason,
    /// Predicted seconds to the first token; none where the policy predicts nothing.
    pub predicted_s: Option<f64>,
    /// What was minimised; none where that is no cost in seconds.
    pub cost: Option<Cost>,
    pub alternatives: Vec<Alternative>,
}

impl Decision {
    /// A decision of a policy that predicts nothing.
    pub fn unpredicted(route: Route, reason: Reason) -> Self {
        Self {
            route,
            reason,
            predicted_s: None,
            cost: None,
            alternatives: Vec::new(),
        }
    }
}

/// Why a request cannot be placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Refusal {
    /// No routable worker, or no routable pair, that the policy could choose.
    NoCandidates,
    /// The policy named workers that were not candidates.
    OutsideCandidates,
    /// A policy outside this crate failed.
    PolicyFailed,
}

/// A routing rule. `decide` must be cheap: it runs under the fleet's lock.
pub trait Policy: Send + Sync {
    /// Chooses among the candidates of `view`.
    ///
    /// # Errors
    /// [`Refusal::NoCandidates`] when none may serve the request.
    fn decide(&self, view: &View<'_>) -> Result<Decision, Refusal>;
}

/// One parameter of a policy, as `policy explain` shows it.
#[derive(Debug, Serialize)]
pub struct ParamInfo {
    pub name: &'static str,
    pub default: &'static str,
    pub meaning: &'static str,
}

/// A policy's entry in the table.
pub struct Info {
    pub name: &'static str,
    pub summary: &'static str,
    /// The rule, exactly.
    pub rule: &'static str,
    pub params: &'static [ParamInfo],
    /// Where the rule comes from.
    pub source: &'static str,
    /// What was measured with it before, and where.
    pub measured: &'static str,
    /// Builds the policy from its parameters; the error names the parameter.
    pub build: fn(serde_json::Value) -> Result<Box<dyn Policy>, String>,
}

/// Every policy that ships.
pub const TABLE: &[&Info] = &[
    &round_robin::INFO,
    &random::INFO,
    &least_requests::INFO,
    &power_of_two::INFO,
    &linear::INFO,
    &lmetric::INFO,
    &unified::INFO,
    &pd::INFO,
    &offload::INFO,
    &selective::INFO,
    &migrate::INFO,
    &first_turn::INFO,
    &isl_bounding::INFO,
    &nixl_threshold::INFO,
    &elastic::INFO,
];

/// Policies of SGLang's routers (sglang-router 0.3.2, smg 1.13.0) that are not in [`TABLE`], and what
/// comes nearest. Not taken as other names for these: they would choose other workers.
const STOCK: &[(&str, &str)] = &[
    ("cache_aware", CACHE_AWARE),
    ("prefix_hash", CACHE_AWARE),
    ("bucket", "unified, or pd with prefill and decode workers"),
    ("manual", BY_SESSION),
    ("consistent_hashing", BY_SESSION),
];
const CACHE_AWARE: &str = "unified (cached tokens and load), or pd with prefill and decode workers";
const BY_SESSION: &str = "unified (a session stays on its worker until that is overloaded)";

/// The policy called `name` with `params` (a JSON object or null).
///
/// # Errors
/// One line that names the unknown policy or parameter and what there is.
pub fn build(name: &str, params: serde_json::Value) -> Result<Box<dyn Policy>, String> {
    let info = TABLE.iter().find(|info| info.name == name).ok_or_else(|| {
        if let Some((_, nearest)) = STOCK.iter().find(|(stock, _)| *stock == name) {
            return format!(
                "policy: {name} is one of SGLang's router; the nearest here: {nearest}"
            );
        }
        let names: Vec<_> = TABLE.iter().map(|info| info.name).collect();
        format!(
            "policy: unknown policy {name:?}; known: {}",
            names.join(", ")
        )
    })?;
    (info.build)(params)
}

/// Parameters from a JSON object; null means all defaults.
fn parse_params<P: DeserializeOwned + Default>(params: serde_json::Value) -> Result<P, String> {
    if params.is_null() {
        return Ok(P::default());
    }
    let failed = |error: String| format!("policy_params: {error}");
    // No parameter of any policy means anything below 0.
    for (name, value) in params.as_object().into_iter().flatten() {
        if value.as_f64().is_some_and(|value| value < 0.0) {
            return Err(failed(format!(
                "{name}: expected a number of 0 or more, not {value}"
            )));
        }
    }
    crate::model::checks::read(params).map_err(failed)
}

/// Parameters of a policy that has none.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct NoParams {}

/// For policies that only choose a worker: locally where that is possible, else both sides of a
/// pair by the same rule.
fn choose_each<'a>(
    view: &View<'a>,
    reason: Reason,
    choose: impl Fn(&[&'a WorkerFacts]) -> Option<&'a WorkerFacts>,
) -> Result<Decision, Refusal> {
    let local: Vec<_> = view.local().collect();
    let route = if let Some(worker) = choose(&local) {
        Some(Route::Local {
            worker: worker.slot,
        })
    } else {
        let decode: Vec<_> = view.decode_with_partner().collect();
        view.pair(choose(&decode), |partners| choose(&partners))
    };
    route
        .map(|route| Decision::unpredicted(route, reason))
        .ok_or(Refusal::NoCandidates)
}
