//! What workers of one kind have shown of their speeds, together.
//!
//! A new worker begins with what its like have shown, and what is believed of one that has not shown
//! something for a while goes back towards it: five slow answers at its start must not keep requests
//! away from a worker for ever, for then nothing would ever show that it has become fast. How fast a
//! prefill is computed depends on the engine and its GPU, not on what the worker does with the result,
//! so that is shared by workers of different roles too.

use super::rates::{Prior, Topic, drift, prior};
use crate::model::{Connector, Engine, WorkerSpec};
use crate::policy::{Rates, Role};

/// A belief that nothing has taught for so long begins to go back.
const KEPT_S: f64 = 60.0;
/// Then it has lost 63 % of its (log) difference after so long.
const FORGOTTEN_S: f64 = 300.0;
/// How often that is looked after.
const INTERVAL_S: f64 = 10.0;

/// What was believed and when each topic was last taught, in the order of [`Topic::ALL`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Beliefs {
    pub rates: Rates,
    taught_s: [f64; Topic::ALL.len()],
}

impl Beliefs {
    pub fn new(rates: Rates, now_s: f64) -> Self {
        Self {
            rates,
            taught_s: [now_s; Topic::ALL.len()],
        }
    }

    pub fn note(&mut self, topic: Topic, now_s: f64) {
        self.taught_s[topic as usize] = now_s;
    }

    /// Goes towards `to` in a topic that was not taught of late.
    fn forget(&mut self, topic: Topic, to: &Rates, now_s: f64) {
        if now_s - self.taught_s[topic as usize] > KEPT_S {
            let share = 1.0 - (-INTERVAL_S / FORGOTTEN_S).exp();
            drift(&mut self.rates, to, topic, share);
        }
    }
}

struct Kind {
    engine: Engine,
    connector: Option<Connector>,
    role: Role,
    /// What configurations state of prefill speeds, alone and paced.
    stated: [Option<f64>; 2],
    prior: Prior,
    beliefs: Beliefs,
}

/// All kinds of workers that there have been, and when beliefs were last let go.
#[derive(Default)]
pub(crate) struct Kinds {
    kinds: Vec<Kind>,
    forgot_s: f64,
}

impl Kinds {
    /// Which kind a worker is of.
    pub fn of(&mut self, spec: &WorkerSpec) -> usize {
        let stated = [spec.prefill_tokens_per_s, spec.paced_prefill_tokens_per_s];
        let known = self.kinds.iter().position(|kind| {
            kind.engine == spec.engine
                && kind.connector == spec.kv_connector
                && kind.role == spec.role
                && kind.stated == stated
        });
        known.unwrap_or_else(|| {
            let prior = prior(spec);
            let mut kind = Kind {
                engine: spec.engine,
                connector: spec.kv_connector,
                role: spec.role,
                stated,
                prior,
                beliefs: Beliefs::new(prior.rates, f64::NEG_INFINITY),
            };
            if let Some(other) = self.last_taught(&kind, Topic::Compute) {
                drift(&mut kind.beliefs.rates, &other, Topic::Compute, 1.0);
            }
            self.kinds.push(kind);
            self.kinds.len() - 1
        })
    }

    /// What a worker of the kind is believed to be that has shown nothing.
    pub fn rates(&self, kind: usize) -> Rates {
        self.kinds[kind].beliefs.rates
    }

    pub fn beliefs_mut(&mut self, kind: usize) -> &mut Beliefs {
        &mut self.kinds[kind].beliefs
    }

    /// True every [`INTERVAL_S`]: the workers' beliefs are then to go back by [`Kinds::forget`].
    pub fn is_time_to_forget(&mut self, now_s: f64) -> bool {
        let is_time = now_s - self.forgot_s >= INTERVAL_S;
        if is_time {
            self.forgot_s = now_s;
            self.forget_kinds(now_s);
        }
        is_time
    }

    /// Lets one worker's old beliefs go back towards its kind's.
    pub fn forget(&self, beliefs: &mut Beliefs, kind: usize, now_s: f64) {
        for topic in Topic::ALL {
            beliefs.forget(topic, &self.kinds[kind].beliefs.rates, now_s);
        }
    }

    /// A kind goes back to what its like of other roles show of prefills, and in what any machine is
    /// alike, to what is assumed of it. Not in prefill speeds: a laptop's are a thousand times off.
    fn forget_kinds(&mut self, now_s: f64) {
        for at in 0..self.kinds.len() {
            let computes = self.last_taught(&self.kinds[at], Topic::Compute);
            let kind = &mut self.kinds[at];
            let assumed = kind.prior.rates;
            kind.beliefs.forget(Topic::Pacing, &assumed, now_s);
            kind.beliefs.forget(Topic::Transfer, &assumed, now_s);
            if let Some(rates) = computes {
                kind.beliefs.forget(Topic::Compute, &rates, now_s);
            }
        }
    }

    /// What the kind that was taught last shows, of those of the same engine and stated speeds; none
    /// where none was taught.
    fn last_taught(&self, like: &Kind, topic: Topic) -> Option<Rates> {
        let taught_s = |kind: &&Kind| kind.beliefs.taught_s[topic as usize];
        let alike = self.kinds.iter().filter(|kind| {
            kind.engine == like.engine && kind.stated == like.stated && taught_s(kind).is_finite()
        });
        let last = alike.max_by(|one, other| taught_s(one).total_cmp(&taught_s(other)));
        last.map(|kind| kind.beliefs.rates)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn spec(role: &str) -> WorkerSpec {
        let spec = json!({"id": "w", "url": "http://127.0.0.1:1", "role": role});
        serde_json::from_value(spec).expect("a worker")
    }

    #[test]
    fn a_new_worker_begins_with_what_its_like_have_shown() {
        let mut kinds = Kinds::default();
        let elastic = kinds.of(&spec("elastic"));
        assert_eq!(kinds.of(&spec("elastic")), elastic);
        let beliefs = kinds.beliefs_mut(elastic);
        beliefs.rates.prefill_tokens_per_s = 5_000.0;
        beliefs.rates.paced_slowdown = 4.0;
        beliefs.note(Topic::Compute, 1.0);
        let prefill = kinds.of(&spec("prefill"));
        assert_ne!(prefill, elastic);
        let rates = kinds.rates(prefill);
        assert!((rates.prefill_tokens_per_s / 5_000.0 - 1.0).abs() < 1e-9);
        assert_eq!(rates.paced_slowdown, 1.0, "that depends on the role");
    }

    #[test]
    fn a_belief_that_nothing_has_taught_for_long_goes_back_to_what_its_like_show() {
        let mut kinds = Kinds::default();
        let (elastic, prefill) = (kinds.of(&spec("elastic")), kinds.of(&spec("prefill")));
        let mut slow = Beliefs::new(kinds.rates(prefill), 0.0);
        // Its first answers waited for connections, and it alone is of its kind.
        slow.rates.prefill_tokens_per_s = 500.0;
        slow.rates.transfer_overhead_s = 10.0;
        *kinds.beliefs_mut(prefill) = slow;
        let truth = kinds.rates(elastic).prefill_tokens_per_s;
        for second in (10..1_200).step_by(10) {
            let now_s = f64::from(second);
            kinds.beliefs_mut(elastic).note(Topic::Compute, now_s);
            assert!(kinds.is_time_to_forget(now_s) && !kinds.is_time_to_forget(now_s + 5.0));
            kinds.forget(&mut slow, prefill, now_s);
            if second <= 60 {
                assert_eq!(slow.rates.prefill_tokens_per_s, 500.0, "kept for a minute");
            }
        }
        assert!(slow.rates.prefill_tokens_per_s > 0.5 * truth, "{slow:?}");
        assert!(slow.rates.transfer_overhead_s < 0.5, "{slow:?}");
    }
}
