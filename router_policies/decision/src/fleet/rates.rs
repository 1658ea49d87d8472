//! Speeds of one worker, learnt from requests that it just served.
//!
//! Every sample is clipped to within a factor of the current belief, the belief moves by a fixed
//! share of the (log) difference, and never leaves the worker's prior by more than a fixed factor: a stalled
//! request or a wrong report moves it little, a lasting change moves it within a few requests.

use crate::model::WorkerSpec;
use crate::policy::{Rates, Role};
use smallvec::{SmallVec, smallvec};

/// What is assumed of an unknown worker; an H200 with a 30B-A3B model is near it (a prompt of 8k, 32k
/// and 64k tokens alone takes it 0.19, 1.14 and 3.51 s).
pub const PRIOR: Rates = Rates {
    prefill_tokens_per_s: 65_000.0,
    attention_pairs_per_s: 8e8,
    paced_slowdown: 1.0,
    prefill_overhead_s: 0.03,
    transfer_tokens_per_s: 500_000.0,
    transfer_overhead_s: 0.05,
    // 11 ms beside seven others with contexts of 32,000 tokens each: fitted on the steps of a run on an
    // H200 (crate simulator, `Calibration`).
    decode_base_s: 3.6e-3,
    decode_per_request_s: 0.76e-3,
    decode_per_context_token_s: 2.3e-8,
};

/// Of an elastic worker, which holds its prefills back for the sake of those that decode: 1.39 s for
/// 32,000 tokens beside eight decodes where 1.12 s are possible (results/elastic-worker.md).
const ELASTIC_SLOWDOWN: f64 = 1.25;

/// What requests of one shape teach, and others do not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Topic {
    /// Prefill speeds of a worker without other work, and the fixed time of a local prefill.
    Compute,
    /// How much longer prefills take beside decodes.
    Pacing,
    Transfer,
    Decode,
}

impl Topic {
    pub const ALL: [Self; 4] = [Self::Compute, Self::Pacing, Self::Transfer, Self::Decode];

    /// The beliefs that are of it.
    fn beliefs(self, rates: &mut Rates) -> SmallVec<[&mut f64; 3]> {
        match self {
            Self::Compute => smallvec![
                &mut rates.prefill_tokens_per_s,
                &mut rates.attention_pairs_per_s,
                &mut rates.prefill_overhead_s,
            ],
            Self::Pacing => smallvec![&mut rates.paced_slowdown],
            Self::Transfer => smallvec![
                &mut rates.transfer_tokens_per_s,
                &mut rates.transfer_overhead_s,
            ],
            Self::Decode => smallvec![
                &mut rates.decode_base_s,
                &mut rates.decode_per_request_s,
                &mut rates.decode_per_context_token_s,
            ],
        }
    }
}

/// Moves what is believed of a topic towards `to`, by a share of the log difference.
pub(crate) fn drift(rates: &mut Rates, to: &Rates, topic: Topic, share: f64) {
    let mut to = *to;
    for (belief, to) in topic.beliefs(rates).into_iter().zip(topic.beliefs(&mut to)) {
        *belief *= (*to / *belief).powf(share);
    }
}

/// Share of the log difference that one sample moves the belief by.
const GAIN: f64 = 0.2;
/// One sample counts as at most this factor away from the belief.
const SAMPLE_FACTOR: f64 = 4.0;
/// The belief stays within this factor of what nobody stated. Wide, because a worker whose
/// configuration says nothing may be a laptop's processor, a thousand times slower than the GPU that
/// [`PRIOR`] describes.
const ASSUMED_FACTOR: f64 = 3_000.0;
/// The belief stays within this factor of speeds that the worker's configuration states. Enough for
/// another model or a busier machine than the one that they were measured with.
const STATED_FACTOR: f64 = 30.0;
const SLOWDOWN: std::ops::RangeInclusive<f64> = 1.0..=30.0;

/// What a worker is believed to be before it has served anything, and how far from that it can be.
#[derive(Clone, Copy, Debug)]
pub struct Prior {
    pub rates: Rates,
    /// Of its prefill speeds; the rest is never stated.
    prefill_factor: f64,
}

/// What is assumed of a worker before it has served anything.
pub fn prior(spec: &WorkerSpec) -> Prior {
    let mut rates = PRIOR;
    if let Some(speed) = spec.prefill_tokens_per_s {
        // Attention keeps its proportion to the rest.
        rates.attention_pairs_per_s *= speed / rates.prefill_tokens_per_s;
        rates.prefill_tokens_per_s = speed;
    }
    if spec.role == Role::Elastic {
        rates.paced_slowdown = ELASTIC_SLOWDOWN;
    }
    if let Some(paced) = spec.paced_prefill_tokens_per_s {
        let slowdown = rates.prefill_tokens_per_s / paced;
        rates.paced_slowdown = slowdown.clamp(*SLOWDOWN.start(), *SLOWDOWN.end());
    }
    let prefill_factor = match spec.prefill_tokens_per_s {
        Some(_) => STATED_FACTOR,
        None => ASSUMED_FACTOR,
    };
    Prior {
        rates,
        prefill_factor,
    }
}

/// A part of a predicted time: its seconds, and what is believed of it as a duration or, if
/// `is_speed`, as its inverse.
struct Part<'a> {
    seconds: f64,
    belief: &'a mut f64,
    is_speed: bool,
    prior: f64,
    /// How far from the prior the belief may go.
    factor: f64,
}

impl<'a> Part<'a> {
    /// New prompt tokens, and their attention pairs, at the speeds that are believed.
    fn prefill(
        rates: (&'a mut f64, &'a mut f64),
        prior: &Prior,
        tokens: f64,
        pairs: f64,
    ) -> [Self; 2] {
        let of = &prior.rates;
        let factor = prior.prefill_factor;
        [
            Self::speed(tokens, rates.0, of.prefill_tokens_per_s, factor),
            Self::speed(pairs, rates.1, of.attention_pairs_per_s, factor),
        ]
    }

    /// `amount` at the speed that is believed.
    fn speed(amount: f64, belief: &'a mut f64, prior: f64, factor: f64) -> Self {
        Self {
            seconds: amount / *belief,
            belief,
            is_speed: true,
            prior,
            factor,
        }
    }

    /// `count` times as long as the belief says.
    fn duration(count: f64, belief: &'a mut f64, prior: f64) -> Self {
        Self {
            seconds: count * *belief,
            belief,
            is_speed: false,
            prior,
            factor: ASSUMED_FACTOR,
        }
    }
}

/// The parts together took `seconds`. The error of their prediction is blamed on each by its share in
/// it (normalised gradient on the logs), so that requests of different shapes tell them apart.
fn blame(parts: &mut [Part<'_>], seconds: f64) {
    let predicted: f64 = parts.iter().map(|part| part.seconds).sum();
    if !(seconds.is_finite() && seconds > 0.0 && predicted > 0.0) {
        return;
    }
    let most = SAMPLE_FACTOR.ln();
    let error = (seconds / predicted).ln().clamp(-most, most);
    let share = |part: &Part<'_>| part.seconds / predicted;
    let norm: f64 = parts.iter().map(|part| share(part).powi(2)).sum();
    for part in parts {
        let blame = (error * share(part) / norm).clamp(-most, most);
        let factor = (GAIN * blame).exp();
        let moved = match part.is_speed {
            true => *part.belief / factor,
            false => *part.belief * factor,
        };
        *part.belief = moved.clamp(part.prior / part.factor, part.prior * part.factor);
    }
}

/// New tokens and their pairs, as one prefill or one step of several.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Computed {
    pub tokens: f64,
    pub pairs: f64,
}

/// Tokens that were decoded one after the other, each in a batch of so many requests with so many
/// tokens of context in all.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Decoded {
    pub tokens: f64,
    pub requests: f64,
    pub context_tokens: f64,
}

/// The rates of decoding: a macro, for parts of other rates are borrowed beside them.
macro_rules! of_decoding {
    ($rates:expr) => {
        (
            &mut $rates.decode_base_s,
            &mut $rates.decode_per_request_s,
            &mut $rates.decode_per_context_token_s,
        )
    };
}

impl Decoded {
    fn parts<'a>(
        &self,
        rates: (&'a mut f64, &'a mut f64, &'a mut f64),
        prior: &Prior,
    ) -> [Part<'a>; 3] {
        let (base, request, token) = rates;
        let of = &prior.rates;
        let count = self.tokens;
        [
            Part::duration(count, base, of.decode_base_s),
            Part::duration(count * self.requests, request, of.decode_per_request_s),
            Part::duration(
                count * self.context_tokens,
                token,
                of.decode_per_context_token_s,
            ),
        ]
    }
}

/// What had the worker for `seconds`, to be decoded there; `paced` if others decoded meanwhile.
pub(crate) fn observe_local(
    rates: &mut Rates,
    prior: &Prior,
    computed: Computed,
    paced: bool,
    seconds: f64,
) {
    observe_whole(rates, prior, computed, paced, None, seconds);
}

/// As [`observe_local`], where the seconds go on until `decoded` was there too.
pub(crate) fn observe_whole(
    rates: &mut Rates,
    prior: &Prior,
    Computed { tokens, pairs }: Computed,
    paced: bool,
    decoded: Option<Decoded>,
    seconds: f64,
) {
    let alone_s = tokens / rates.prefill_tokens_per_s + pairs / rates.attention_pairs_per_s;
    let of = &prior.rates;
    let overhead = Part::duration(1.0, &mut rates.prefill_overhead_s, of.prefill_overhead_s);
    let mut parts: SmallVec<[Part<'_>; 6]> = smallvec![overhead];
    // A paced prefill says how it is paced; how fast the worker is alone, only one alone says.
    if paced {
        let slowdown = &mut rates.paced_slowdown;
        parts.push(Part::duration(alone_s, slowdown, of.paced_slowdown));
    } else {
        let speeds = (
            &mut rates.prefill_tokens_per_s,
            &mut rates.attention_pairs_per_s,
        );
        parts.extend(Part::prefill(speeds, prior, tokens, pairs));
    }
    if let Some(decoded) = decoded {
        parts.extend(decoded.parts(of_decoding!(rates), prior));
    }
    blame(&mut parts, seconds);
    drop(parts);
    let (least, most) = SLOWDOWN.into_inner();
    rates.paced_slowdown = rates.paced_slowdown.clamp(least, most);
}

/// What had a worker that prefills for others for `seconds`.
pub(crate) fn observe_remote(rates: &mut Rates, prior: &Prior, computed: Computed, seconds: f64) {
    let speeds = (
        &mut rates.prefill_tokens_per_s,
        &mut rates.attention_pairs_per_s,
    );
    let Computed { tokens, pairs } = computed;
    blame(&mut Part::prefill(speeds, prior, tokens, pairs), seconds);
}

/// A worker's rates, with what was assumed of it.
pub(crate) type Believed<'a> = (&'a mut Rates, &'a Prior);

/// A separated request had the prefill worker, and then the way to the decode worker, for `seconds`:
/// computed on the one, then `delta` tokens went to the other, whose own overhead is in the seconds if
/// they are `until_token`.
pub(crate) fn observe_separated(
    (prefill, prior_of_prefill): Believed<'_>,
    (decode, prior_of_decode): Believed<'_>,
    Computed { tokens, pairs }: Computed,
    delta: u64,
    until_token: bool,
    seconds: f64,
) {
    let speeds = (
        &mut prefill.prefill_tokens_per_s,
        &mut prefill.attention_pairs_per_s,
    );
    let mut parts: SmallVec<[Part<'_>; 4]> = SmallVec::new();
    parts.extend(Part::prefill(speeds, prior_of_prefill, tokens, pairs));
    parts.push(Part::speed(
        delta as f64,
        &mut decode.transfer_tokens_per_s,
        prior_of_decode.rates.transfer_tokens_per_s,
        ASSUMED_FACTOR,
    ));
    if until_token {
        let prior_s = prior_of_decode.rates.transfer_overhead_s;
        parts.push(Part::duration(
            1.0,
            &mut decode.transfer_overhead_s,
            prior_s,
        ));
    }
    blame(&mut parts, seconds);
}

/// From the end of its prefill on another worker, `delta` tokens came to the decode worker, and what
/// `decoded` says was decoded, in `seconds`; `delta` is none where they were there by then.
pub(crate) fn observe_arrival(
    rates: &mut Rates,
    prior: &Prior,
    delta: Option<u64>,
    decoded: Option<Decoded>,
    seconds: f64,
) {
    let of = &prior.rates;
    let overhead = Part::duration(1.0, &mut rates.transfer_overhead_s, of.transfer_overhead_s);
    let mut parts: SmallVec<[Part<'_>; 5]> = smallvec![overhead];
    if let Some(delta) = delta {
        parts.push(Part::speed(
            delta as f64,
            &mut rates.transfer_tokens_per_s,
            of.transfer_tokens_per_s,
            ASSUMED_FACTOR,
        ));
    }
    if let Some(decoded) = decoded {
        parts.extend(decoded.parts(of_decoding!(rates), prior));
    }
    blame(&mut parts, seconds);
}

/// So much was decoded in `seconds` in which nothing else ran.
pub(crate) fn observe_decode(rates: &mut Rates, prior: &Prior, decoded: Decoded, seconds: f64) {
    blame(&mut decoded.parts(of_decoding!(rates), prior), seconds);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::attention_pairs;
    use proptest::prelude::*;
    use serde_json::json;

    /// (new, cached) tokens of requests of different shapes.
    const SHAPES: [(u64, u64); 4] = [(500, 300), (32_000, 0), (8_000, 500), (1_000, 90_000)];

    const UNSTATED: Prior = Prior {
        rates: PRIOR,
        prefill_factor: ASSUMED_FACTOR,
    };

    fn spec(fields: serde_json::Value) -> WorkerSpec {
        serde_json::from_value(fields).expect("a worker")
    }

    fn shape(new: u64, cached: u64) -> Computed {
        Computed {
            tokens: new as f64,
            pairs: attention_pairs(cached, new),
        }
    }

    fn prefill_s(rates: &Rates, new: u64, cached: u64) -> f64 {
        rates.compute_s(new, attention_pairs(cached, new))
    }

    #[test]
    fn prefill_alone_and_paced_are_learnt_apart() {
        let truth = Rates {
            prefill_tokens_per_s: 20_000.0,
            attention_pairs_per_s: 3e8,
            paced_slowdown: 5.0,
            prefill_overhead_s: 0.1,
            ..PRIOR
        };
        let mut rates = PRIOR;
        for i in 0..400 {
            let (new, cached) = SHAPES[i % SHAPES.len()];
            let paced = (i / SHAPES.len()).is_multiple_of(2);
            let slowdown = if paced { truth.paced_slowdown } else { 1.0 };
            let seconds = truth.prefill_overhead_s + slowdown * prefill_s(&truth, new, cached);
            observe_local(&mut rates, &UNSTATED, shape(new, cached), paced, seconds);
        }
        for (new, cached) in SHAPES {
            for (believed, true_slowdown) in [(1.0, 1.0), (rates.paced_slowdown, 5.0)] {
                let predicted =
                    rates.prefill_overhead_s + believed * prefill_s(&rates, new, cached);
                let seconds = 0.1 + true_slowdown * prefill_s(&truth, new, cached);
                assert!(
                    (0.8..1.25).contains(&(predicted / seconds)),
                    "{new} after {cached}: {predicted} for {seconds}: {rates:?}"
                );
            }
        }
    }

    #[test]
    fn one_outlier_moves_the_belief_by_less_than_a_third() {
        let mut rates = PRIOR;
        let computed = Computed {
            tokens: 32_000.0,
            pairs: 0.0,
        };
        observe_local(&mut rates, &UNSTATED, computed, false, 600.0);
        assert!(rates.prefill_tokens_per_s > 0.7 * PRIOR.prefill_tokens_per_s);
    }

    #[test]
    fn a_slow_link_is_told_from_a_slow_prefill() {
        let (mut p, mut d) = (PRIOR, PRIOR);
        let truth = Rates {
            prefill_tokens_per_s: 8_000.0,
            transfer_tokens_per_s: 20_000.0,
            transfer_overhead_s: 0.3,
            ..PRIOR
        };
        let whole_s = |p: &Rates, d: &Rates, (new, cached): (u64, u64), delta: u64| {
            prefill_s(p, new, cached)
                + delta as f64 / d.transfer_tokens_per_s
                + d.transfer_overhead_s
        };
        let shapes = [(500, 300), (32_000, 32_000), (8_000, 500)];
        for i in 0..120 {
            let (new, delta) = shapes[i % shapes.len()];
            let seconds = whole_s(&truth, &truth, (new, 0), delta);
            let believed = ((&mut p, &UNSTATED), (&mut d, &UNSTATED));
            observe_separated(believed.0, believed.1, shape(new, 0), delta, true, seconds);
        }
        for (new, delta) in shapes {
            let seconds = whole_s(&truth, &truth, (new, 0), delta);
            let predicted = whole_s(&p, &d, (new, 0), delta);
            assert!(
                (0.8..1.25).contains(&(predicted / seconds)),
                "{predicted} for {seconds}: {p:?} {d:?}"
            );
        }
    }

    #[test]
    fn a_belief_stays_near_what_the_configuration_states_of_the_worker() {
        let url = "http://127.0.0.1:1";
        let stated = prior(&spec(json!({"url": url, "prefill_tokens_per_s": 500.0})));
        let mut rates = stated.rates;
        assert_eq!(rates.prefill_tokens_per_s, 500.0);
        // A processor that stalls for minutes at every request, then answers at once for ever.
        for _ in 0..1000 {
            observe_local(&mut rates, &stated, shape(1000, 0), false, 1e6);
        }
        assert!(
            (16.0..17.0).contains(&rates.prefill_tokens_per_s),
            "{rates:?}"
        );
        for _ in 0..1000 {
            observe_local(&mut rates, &stated, shape(1_000_000, 0), false, 1e-6);
        }
        assert!(
            (14e3..16e3).contains(&rates.prefill_tokens_per_s),
            "{rates:?}"
        );
    }

    #[test]
    fn a_laptops_speed_is_learnt_though_nothing_is_stated_of_it() {
        let unstated = prior(&spec(json!({"url": "http://127.0.0.1:1"})));
        let truth = Rates {
            prefill_tokens_per_s: 60.0,
            attention_pairs_per_s: 6e5,
            ..PRIOR
        };
        let mut rates = unstated.rates;
        for i in 0..400 {
            let (new, cached) = SHAPES[i % SHAPES.len()];
            let seconds = prefill_s(&truth, new, cached);
            observe_local(&mut rates, &unstated, shape(new, cached), false, seconds);
        }
        for (new, cached) in SHAPES {
            let off = prefill_s(&rates, new, cached) / prefill_s(&truth, new, cached);
            assert!((0.8..1.25).contains(&off), "{new} after {cached}: {off}");
        }
    }

    #[test]
    fn a_decode_step_is_learnt_by_batch_and_by_context() {
        let truth = Rates {
            decode_base_s: 8e-3,
            decode_per_request_s: 0.3e-3,
            decode_per_context_token_s: 9e-8,
            ..PRIOR
        };
        let batches = [
            (1.0, 2e3),
            (1.0, 1e5),
            (12.0, 3e4),
            (12.0, 5e5),
            (30.0, 6e4),
        ];
        let mut rates = PRIOR;
        for i in 0..600 {
            let (requests, context_tokens) = batches[i % batches.len()];
            let decoded = Decoded {
                tokens: 200.0,
                requests,
                context_tokens,
            };
            let seconds = 200.0 * truth.step_s(requests, context_tokens);
            observe_decode(&mut rates, &UNSTATED, decoded, seconds);
        }
        for (requests, context) in batches {
            let off = rates.step_s(requests, context) / truth.step_s(requests, context);
            assert!((0.85..1.18).contains(&off), "{requests} {context}: {off}");
        }
    }

    #[test]
    fn answers_in_one_piece_tell_a_slow_prefill_from_slow_decodes() {
        let truth = Rates {
            prefill_tokens_per_s: 3_000.0,
            attention_pairs_per_s: 4e7,
            decode_base_s: 30e-3,
            ..PRIOR
        };
        let mut rates = PRIOR;
        let answers = [1.0, 300.0, 20.0, 800.0, 3.0];
        for i in 0..600 {
            let (new, cached) = SHAPES[i % SHAPES.len()];
            let decoded = Decoded {
                tokens: answers[i % answers.len()],
                requests: 1.0,
                context_tokens: (new + cached) as f64,
            };
            let step_s = truth.step_s(1.0, decoded.context_tokens);
            let seconds =
                truth.prefill_overhead_s + prefill_s(&truth, new, cached) + decoded.tokens * step_s;
            let computed = shape(new, cached);
            observe_whole(
                &mut rates,
                &UNSTATED,
                computed,
                false,
                Some(decoded),
                seconds,
            );
        }
        for (new, cached) in SHAPES {
            let off = prefill_s(&rates, new, cached) / prefill_s(&truth, new, cached);
            assert!((0.7..1.4).contains(&off), "{new} after {cached}: {off}");
        }
        let off = rates.step_s(1.0, 3e4) / truth.step_s(1.0, 3e4);
        assert!((0.8..1.25).contains(&off), "{off}: {rates:?}");
    }

    #[test]
    fn a_belief_drifts_by_topics() {
        let own = Rates {
            prefill_tokens_per_s: 1_000.0,
            transfer_overhead_s: 5.0,
            ..PRIOR
        };
        let mut rates = own;
        drift(&mut rates, &PRIOR, Topic::Compute, 0.5);
        let expected = (1_000.0 * PRIOR.prefill_tokens_per_s).sqrt();
        assert!((rates.prefill_tokens_per_s / expected - 1.0).abs() < 1e-9);
        assert_eq!(rates.transfer_overhead_s, 5.0, "another topic");
        for topic in Topic::ALL {
            drift(&mut rates, &PRIOR, topic, 1.0);
        }
        assert!((rates.transfer_overhead_s / PRIOR.transfer_overhead_s - 1.0).abs() < 1e-9);
    }

    proptest! {
        #[test]
        fn no_observation_breaks_the_rates(
            seen in proptest::collection::vec((any::<u32>(), any::<u32>(), any::<f64>()), 0..50),
        ) {
            let (mut p, mut d) = (PRIOR, PRIOR);
            for (a, b, seconds) in seen {
                let (new, cached) = (a.into(), b.into());
                let decoded = Decoded { tokens: a.into(), requests: 1.0, context_tokens: b.into() };
                let computed = shape(new, cached);
                let believed = ((&mut p, &UNSTATED), (&mut d, &UNSTATED));
                observe_separated(believed.0, believed.1, computed, cached, b % 3 == 0, seconds);
                observe_whole(&mut p, &UNSTATED, computed, b % 2 == 0, Some(decoded), seconds);
                observe_remote(&mut p, &UNSTATED, computed, seconds);
                observe_arrival(&mut d, &UNSTATED, Some(cached), Some(decoded), seconds);
                observe_decode(&mut d, &UNSTATED, decoded, seconds);
            }
            for rates in [p, d] {
                for value in [rates.prefill_tokens_per_s, rates.attention_pairs_per_s,
                    rates.paced_slowdown, rates.prefill_overhead_s, rates.transfer_tokens_per_s,
                    rates.transfer_overhead_s, rates.decode_base_s, rates.decode_per_request_s,
                    rates.decode_per_context_token_s] {
                    prop_assert!(value.is_finite() && value > 0.0);
                }
            }
        }
    }
}
