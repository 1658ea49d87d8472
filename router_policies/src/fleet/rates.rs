//! Speeds of one worker, learnt from requests that it just served.
//!
//! Every sample is clipped to within a factor of the current belief, the belief moves by a fixed
//! share of the (log) difference, and never leaves the prior by more than a fixed factor: a stalled
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

/// Of an elastic worker, which holds its prefills back for the sake of those that decode: 5,000 to
/// 9,000 tokens/s where 28,000 are possible.
const ELASTIC_SLOWDOWN: f64 = 4.0;

/// Share of the log difference that one sample moves the belief by.
const GAIN: f64 = 0.2;
/// One sample counts as at most this factor away from the belief.
const SAMPLE_FACTOR: f64 = 4.0;
/// The belief stays within this factor of the prior. Wide, because a CPU is a thousand times slower
/// than the GPU that the prior describes.
const PRIOR_FACTOR: f64 = 3_000.0;
const SLOWDOWN: std::ops::RangeInclusive<f64> = 1.0..=30.0;

/// What is assumed of a worker before it has served anything.
pub fn prior(spec: &WorkerSpec) -> Rates {
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
    rates
}

/// A part of a predicted time: its seconds, and what is believed of it as a duration or, if
/// `is_speed`, as its inverse.
struct Part<'a> {
    seconds: f64,
    belief: &'a mut f64,
    is_speed: bool,
    prior: f64,
}

impl<'a> Part<'a> {
    /// `amount` at the speed that is believed.
    fn speed(amount: f64, belief: &'a mut f64, prior: f64) -> Self {
        Self {
            seconds: amount / *belief,
            belief,
            is_speed: true,
            prior,
        }
    }

    /// `count` times as long as the belief says.
    fn duration(count: f64, belief: &'a mut f64, prior: f64) -> Self {
        Self {
            seconds: count * *belief,
            belief,
            is_speed: false,
            prior,
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
        *part.belief = moved.clamp(part.prior / PRIOR_FACTOR, part.prior * PRIOR_FACTOR);
    }
}

/// A prefill of `tokens` with `pairs` had the worker for `seconds`, to be decoded there; `paced` if
/// others decoded meanwhile.
pub fn observe_local(rates: &mut Rates, tokens: u64, pairs: f64, paced: bool, seconds: f64) {
    let tokens = tokens as f64;
    let alone_s = tokens / rates.prefill_tokens_per_s + pairs / rates.attention_pairs_per_s;
    let overhead = Part::duration(1.0, &mut rates.prefill_overhead_s, PRIOR.prefill_overhead_s);
    // A paced prefill says how it is paced; how fast the worker is alone, only one alone says.
    if paced {
        let pacing = Part::duration(alone_s, &mut rates.paced_slowdown, 1.0);
        blame(&mut [overhead, pacing], seconds);
        let (least, most) = SLOWDOWN.into_inner();
        rates.paced_slowdown = rates.paced_slowdown.clamp(least, most);
    } else {
        let (linear, attention) = (
            Part::speed(
                tokens,
                &mut rates.prefill_tokens_per_s,
                PRIOR.prefill_tokens_per_s,
            ),
            Part::speed(
                pairs,
                &mut rates.attention_pairs_per_s,
                PRIOR.attention_pairs_per_s,
            ),
        );
        blame(&mut [overhead, linear, attention], seconds);
    }
}

/// A separated request had the prefill worker, and then the way to the decode worker, for `seconds`:
/// `tokens` with `pairs` on the one, then `delta` tokens to the other.
pub fn observe_separated(
    prefill: &mut Rates,
    decode: &mut Rates,
    tokens: u64,
    pairs: f64,
    delta: u64,
    seconds: f64,
) {
    let parts = &mut [
        Part::speed(
            tokens as f64,
            &mut prefill.prefill_tokens_per_s,
            PRIOR.prefill_tokens_per_s,
        ),
        Part::speed(
            pairs,
            &mut prefill.attention_pairs_per_s,
            PRIOR.attention_pairs_per_s,
        ),
        Part::speed(
            delta as f64,
            &mut decode.transfer_tokens_per_s,
            PRIOR.transfer_tokens_per_s,
        ),
        Part::duration(
            1.0,
            &mut decode.transfer_overhead_s,
            PRIOR.transfer_overhead_s,
        ),
    ];
    blame(parts, seconds);
}

/// `tokens` were decoded in `seconds` after the first.
pub fn observe_decode(rates: &mut Rates, tokens: u64, seconds: f64) {
    if tokens > 0 {
        let parts = &mut [Part::duration(
            tokens as f64,
            &mut rates.decode_step_s,
            PRIOR.decode_step_s,
        )];
        blame(parts, seconds);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::attention_pairs;
    use proptest::prelude::*;

    /// (new, cached) tokens of requests of different shapes.
    const SHAPES: [(u64, u64); 4] = [(500, 300), (32_000, 0), (8_000, 500), (1_000, 90_000)];

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
        observe_local(&mut rates, 32_000, 0.0, false, 600.0);
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
            observe_separated(&mut p, &mut d, new, pairs, delta, seconds);
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

    proptest! {
        #[test]
        fn no_observation_breaks_the_rates(
            seen in proptest::collection::vec((any::<u32>(), any::<u32>(), any::<f64>()), 0..50),
        ) {
            let (mut p, mut d) = (PRIOR, PRIOR);
            for (a, b, seconds) in seen {
                let pairs = attention_pairs(b.into(), a.into());
                observe_separated(&mut p, &mut d, a.into(), pairs, b.into(), seconds);
                observe_local(&mut p, a.into(), pairs, b % 2 == 0, seconds);
                observe_decode(&mut d, b.into(), seconds);
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
