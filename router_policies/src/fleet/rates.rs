//! Speeds of one worker, learnt from requests that it just served.
//!
//! Every sample is clipped to within a factor of the current belief, the belief moves by a fixed
//! share of the (log) difference, and never leaves the prior by more than a fixed factor: a stalled
//! request or a wrong report moves it little, a lasting change moves it within a few requests.

use crate::policy::Rates;

/// What is assumed of an unknown worker; an H200 with a 30B-A3B model is near it.
pub const PRIOR: Rates = Rates {
    prefill_tokens_per_s: 10_000.0,
    transfer_tokens_per_s: 500_000.0,
    transfer_overhead_s: 0.05,
    decode_step_s: 0.015,
};

/// Share of the log difference that one sample moves the belief by.
const GAIN: f64 = 0.2;
/// One sample counts as at most this factor away from the belief.
const SAMPLE_FACTOR: f64 = 4.0;
/// The belief stays within this factor of the prior. Wide, because a CPU is a thousand times slower
/// than the GPU that the prior describes.
const PRIOR_FACTOR: f64 = 3_000.0;
/// Shorter prefills say more about fixed costs than about the rate.
const MIN_PREFILL_SAMPLE_TOKENS: u64 = 256;

/// Moves a positive belief towards a sample.
fn learn(belief: &mut f64, sample: f64, prior: f64) {
    if !(sample.is_finite() && sample > 0.0) {
        return;
    }
    let clipped = sample.clamp(*belief / SAMPLE_FACTOR, *belief * SAMPLE_FACTOR);
    let moved = *belief * (clipped / *belief).powf(GAIN);
    *belief = moved.clamp(prior / PRIOR_FACTOR, prior * PRIOR_FACTOR);
}

/// A local prefill of `tokens` (its own and those queued before it) took `seconds`.
pub fn observe_prefill(rates: &mut Rates, tokens: u64, seconds: f64) {
    if tokens >= MIN_PREFILL_SAMPLE_TOKENS {
        learn(
            &mut rates.prefill_tokens_per_s,
            tokens as f64 / seconds,
            PRIOR.prefill_tokens_per_s,
        );
    }
}

/// A separated request's first token came after `seconds`: `prefilled` tokens (its own and those
/// queued before it) on the prefill worker, then `delta` tokens to the decode worker. The error of
/// the prediction is blamed on its parts by their shares in it (normalised gradient on the logs), so
/// that requests of different shapes tell a slow prefill from a slow link. `prefill` takes no blame
/// where `prefill_is_known` from the engine itself.
pub fn observe_separated(
    prefill: &mut Rates,
    decode: &mut Rates,
    prefilled: u64,
    delta: u64,
    seconds: f64,
    prefill_is_known: bool,
) {
    let parts = [
        prefilled as f64 / prefill.prefill_tokens_per_s,
        delta as f64 / decode.transfer_tokens_per_s,
        decode.transfer_overhead_s,
    ];
    let predicted: f64 = parts.iter().sum();
    if !(seconds.is_finite() && seconds > 0.0) {
        return;
    }
    let most = SAMPLE_FACTOR.ln();
    let error = (seconds / predicted).ln().clamp(-most, most);
    let shares = parts.map(|part| part / predicted);
    let blamed = if prefill_is_known {
        &shares[1..]
    } else {
        &shares[..]
    };
    let norm: f64 = blamed.iter().map(|share| share * share).sum();
    let factor = |share: f64| {
        let blame = (error * share / norm.max(f64::MIN_POSITIVE)).clamp(-most, most);
        (GAIN * blame).exp()
    };
    let bounded = |value: f64, prior: f64| value.clamp(prior / PRIOR_FACTOR, prior * PRIOR_FACTOR);
    if !prefill_is_known {
        prefill.prefill_tokens_per_s = bounded(
            prefill.prefill_tokens_per_s / factor(shares[0]),
            PRIOR.prefill_tokens_per_s,
        );
    }
    decode.transfer_tokens_per_s = bounded(
        decode.transfer_tokens_per_s / factor(shares[1]),
        PRIOR.transfer_tokens_per_s,
    );
    decode.transfer_overhead_s = bounded(
        decode.transfer_overhead_s * factor(shares[2]),
        PRIOR.transfer_overhead_s,
    );
}

/// `tokens` were decoded in `seconds` after the first.
pub fn observe_decode(rates: &mut Rates, tokens: u64, seconds: f64) {
    if tokens > 0 {
        learn(
            &mut rates.decode_step_s,
            seconds / tokens as f64,
            PRIOR.decode_step_s,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_prefill_rate_converges_to_what_is_observed() {
        let mut rates = PRIOR;
        for _ in 0..60 {
            observe_prefill(&mut rates, 2_000, 1.0);
        }
        assert!(
            (rates.prefill_tokens_per_s / 2_000.0 - 1.0).abs() < 0.05,
            "{rates:?}"
        );
    }

    #[test]
    fn one_outlier_moves_the_belief_by_less_than_a_third() {
        let mut rates = PRIOR;
        observe_prefill(&mut rates, 2_000, 600.0);
        assert!(rates.prefill_tokens_per_s > 0.7 * PRIOR.prefill_tokens_per_s);
    }

    #[test]
    fn a_slow_link_is_told_from_a_slow_prefill() {
        let (mut p, mut d) = (PRIOR, PRIOR);
        let (rate, link, overhead) = (8_000.0, 20_000.0, 0.3);
        for i in 0..60 {
            let (prefilled, delta) = [(500, 300), (32_000, 32_000), (8_000, 500)][i % 3];
            let seconds = prefilled as f64 / rate + delta as f64 / link + overhead;
            observe_separated(&mut p, &mut d, prefilled, delta, seconds, false);
        }
        for (prefilled, delta) in [(500u64, 300u64), (32_000, 32_000), (8_000, 500)] {
            let truth = prefilled as f64 / rate + delta as f64 / link + overhead;
            let predicted = prefilled as f64 / p.prefill_tokens_per_s
                + delta as f64 / d.transfer_tokens_per_s
                + d.transfer_overhead_s;
            assert!(
                (0.8..1.25).contains(&(predicted / truth)),
                "{predicted} for {truth}: {p:?} {d:?}"
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
                observe_separated(&mut p, &mut d, a.into(), b.into(), seconds, a % 2 == 0);
                observe_prefill(&mut p, a.into(), seconds);
                observe_decode(&mut d, b.into(), seconds);
            }
            for rates in [p, d] {
                for value in [rates.prefill_tokens_per_s, rates.transfer_tokens_per_s,
                    rates.transfer_overhead_s, rates.decode_step_s] {
                    prop_assert!(value.is_finite() && value > 0.0);
                }
            }
        }
    }
}
