//! Speeds of one worker, learnt from requests that it just served.
//!
//! Every sample is clipped to within a factor of the current belief, the belief moves by a fixed
//! share of the (log) difference, and never leaves the worker's prior by more than a fixed factor: a stalled
//! request or a wrong report moves it little, a lasting change moves it within a few requests.

use crate::config::WorkerSpec;
use crate::policy::{Rates, Role};

/// What is assumed of an unknown worker; an H200 with a 30B-A3B model is near it (a prompt of 8k, 32k
/// and 64k tokens alone takes it 0.19, 1.14 and 3.51 s).
pub const PRIOR: Rates = Rates {
    prefill_tokens_per_s: 65_000.0,
    attention_pairs_per_s: 8e8,
    paced_slowdown: 1.0,
    prefill_overhead_s: 0.03,
    transfer_tokens_per_s: 500_000.0,
    transfer_overhead_s: 0.05,
    decode_step_s: 0.015,
};

/// Of an elastic worker, which holds its prefills back for the sake of those that decode: 1.39 s for
/// 32,000 tokens beside eight decodes where 1.12 s are possible (docs/results/elastic-worker.md).
const ELASTIC_SLOWDOWN: f64 = 1.25;

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

/// A prefill of `tokens` with `pairs` had the worker for `seconds`, to be decoded there; `paced` if
/// others decoded meanwhile.
pub fn observe_local(
    rates: &mut Rates,
    prior: &Prior,
    tokens: u64,
    pairs: f64,
    paced: bool,
    seconds: f64,
) {
    let tokens = tokens as f64;
    let alone_s = tokens / rates.prefill_tokens_per_s + pairs / rates.attention_pairs_per_s;
    let of = &prior.rates;
    let overhead = Part::duration(1.0, &mut rates.prefill_overhead_s, of.prefill_overhead_s);
    // A paced prefill says how it is paced; how fast the worker is alone, only one alone says.
    if paced {
        let pacing = Part::duration(alone_s, &mut rates.paced_slowdown, of.paced_slowdown);
        blame(&mut [overhead, pacing], seconds);
        let (least, most) = SLOWDOWN.into_inner();
        rates.paced_slowdown = rates.paced_slowdown.clamp(least, most);
    } else {
        let speeds = (
            &mut rates.prefill_tokens_per_s,
            &mut rates.attention_pairs_per_s,
        );
        let [linear, attention] = Part::prefill(speeds, prior, tokens, pairs);
        blame(&mut [overhead, linear, attention], seconds);
    }
}

/// A worker's rates, with what was assumed of it.
pub type Believed<'a> = (&'a mut Rates, &'a Prior);

/// A separated request had the prefill worker, and then the way to the decode worker, for `seconds`:
/// `tokens` with `pairs` on the one, then `delta` tokens to the other.
pub fn observe_separated(
    (prefill, prior_of_prefill): Believed<'_>,
    (decode, prior_of_decode): Believed<'_>,
    tokens: u64,
    pairs: f64,
    delta: u64,
    seconds: f64,
) {
    let speeds = (
        &mut prefill.prefill_tokens_per_s,
        &mut prefill.attention_pairs_per_s,
    );
    let [linear, attention] = Part::prefill(speeds, prior_of_prefill, tokens as f64, pairs);
    let of = &prior_of_decode.rates;
    let transfer = Part::speed(
        delta as f64,
        &mut decode.transfer_tokens_per_s,
        of.transfer_tokens_per_s,
        ASSUMED_FACTOR,
    );
    let overhead = Part::duration(1.0, &mut decode.transfer_overhead_s, of.transfer_overhead_s);
    blame(&mut [linear, attention, transfer, overhead], seconds);
}

/// `tokens` were decoded in `seconds` after the first.
pub fn observe_decode(rates: &mut Rates, prior: &Prior, tokens: u64, seconds: f64) {
    if tokens > 0 {
        let step_s = prior.rates.decode_step_s;
        let part = Part::duration(tokens as f64, &mut rates.decode_step_s, step_s);
        blame(&mut [part], seconds);
    }
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
            observe_local(
                &mut rates,
                &UNSTATED,
                new,
                attention_pairs(cached, new),
                paced,
                seconds,
            );
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
        observe_local(&mut rates, &UNSTATED, 32_000, 0.0, false, 600.0);
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
            let pairs = attention_pairs(0, new);
            observe_separated(
                (&mut p, &UNSTATED),
                (&mut d, &UNSTATED),
                new,
                pairs,
                delta,
                seconds,
            );
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
            observe_local(&mut rates, &stated, 1000, 5e5, false, 1e6);
        }
        assert!(
            (16.0..17.0).contains(&rates.prefill_tokens_per_s),
            "{rates:?}"
        );
        for _ in 0..1000 {
            observe_local(&mut rates, &stated, 1_000_000, 5e11, false, 1e-6);
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
            let (pairs, seconds) = (attention_pairs(cached, new), prefill_s(&truth, new, cached));
            observe_local(&mut rates, &unstated, new, pairs, false, seconds);
        }
        for (new, cached) in SHAPES {
            let off = prefill_s(&rates, new, cached) / prefill_s(&truth, new, cached);
            assert!((0.8..1.25).contains(&off), "{new} after {cached}: {off}");
        }
    }

    proptest! {
        #[test]
        fn no_observation_breaks_the_rates(
            seen in proptest::collection::vec((any::<u32>(), any::<u32>(), any::<f64>()), 0..50),
        ) {
            let (mut p, mut d) = (PRIOR, PRIOR);
            for (a, b, seconds) in seen {
                let pairs = attention_pairs(b.into(), a.into());
                observe_separated((&mut p, &UNSTATED), (&mut d, &UNSTATED), a.into(), pairs, b.into(), seconds);
                observe_local(&mut p, &UNSTATED, a.into(), pairs, b % 2 == 0, seconds);
                observe_decode(&mut d, &UNSTATED, b.into(), seconds);
            }
            for rates in [p, d] {
                for value in [rates.prefill_tokens_per_s, rates.attention_pairs_per_s,
                    rates.paced_slowdown, rates.prefill_overhead_s, rates.transfer_tokens_per_s,
                    rates.transfer_overhead_s, rates.decode_step_s] {
                    prop_assert!(value.is_finite() && value > 0.0);
                }
            }
        }
    }
}
