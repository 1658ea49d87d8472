//! How long sessions think between an answer's end and their next request: their own last gaps, and
//! what all sessions do.

use std::sync::LazyLock;

/// Gaps of a session that are remembered.
const OWN_GAPS: usize = 8;
const LEAST_S: f64 = 0.05;
const BINS_AN_OCTAVE: f64 = 3.0;
const BINS: usize = 48;
/// What one more gap takes off the weight of all before it: half is gone after 700.
const DECAY: f64 = 0.999;
/// How many of a session's own gaps what all sessions do is worth.
const FLEET_WEIGHT: f64 = 2.0;
/// Gaps that are assumed before any was seen, spread evenly over the bins up to [`ASSUMED_MOST_S`].
const ASSUMED_GAPS: f64 = 4.0;
const ASSUMED_MOST_S: f64 = 10.0;
/// A session that stayed away this long is not expected back.
pub(super) const MOST_S: f64 = 600.0;
/// All but this share of gaps are shorter than [`Gaps::nearly_all_s`].
const LONGEST_SHARE: f64 = 0.01;

/// A session's own last gaps.
#[derive(Clone, Copy, Debug, Default)]
pub struct OwnGaps {
    seconds: [f32; OWN_GAPS],
    /// The bins that they are of: to find one takes a logarithm, and they are asked for far more often
    /// than a gap is noted.
    bins: [u8; OWN_GAPS],
    count: u8,
}

impl OwnGaps {
    pub fn note(&mut self, gap_s: f64) {
        if usize::from(self.count) == OWN_GAPS {
            self.seconds.rotate_left(1);
            self.bins.rotate_left(1);
            self.count -= 1;
        }
        let at = usize::from(self.count);
        self.seconds[at] = gap_s as f32;
        self.bins[at] = bin(f64::from(self.seconds[at])) as u8;
        self.count += 1;
    }

    fn seconds(&self) -> &[f32] {
        &self.seconds[..usize::from(self.count)]
    }

    fn bins(&self) -> impl Iterator<Item = usize> {
        let bins = &self.bins[..usize::from(self.count)];
        bins.iter().map(|&bin| usize::from(bin))
    }

    /// What they and all sessions' gaps weigh together.
    fn weight(&self) -> f64 {
        FLEET_WEIGHT + f64::from(self.count)
    }

    /// What no return at all weighs beside them, where `last_share` of answers are the last.
    fn gone(&self, last_share: f64) -> f64 {
        self.weight() * last_share / (1.0 - last_share)
    }
}

/// The gaps of all sessions: a histogram with bins of equal ratio, the older gaps weighing less.
#[derive(Clone, Debug)]
pub struct Gaps {
    weights: [f64; BINS],
    /// Grows instead of every weight shrinking.
    unit: f64,
    sums: Sums,
}

/// What follows from the weights, for it is asked for far more often than a gap is noted.
#[derive(Clone, Debug)]
struct Sums {
    /// The weight of all gaps from each bin on; of none at the end.
    from: [f64; BINS + 1],
    /// Each bin's part of [`FLEET_WEIGHT`].
    shares: [f64; BINS],
    /// The mean, in seconds.
    mean_s: f64,
}

impl Sums {
    fn of(weights: &[f64; BINS]) -> Self {
        let mut from = [0.0; BINS + 1];
        for (bin, weight) in weights.iter().enumerate().rev() {
            from[bin] = from[bin + 1] + weight;
        }
        let all = from[0];
        let seconds = weights.iter().zip(MIDDLES_S.iter());
        let seconds: f64 = seconds
            .map(|(weight, gap_s)| weight * gap_s.min(MOST_S))
            .sum();
        Self {
            mean_s: seconds / all,
            from,
            shares: weights.map(|weight| FLEET_WEIGHT * weight / all),
        }
    }
}

impl Default for Gaps {
    fn default() -> Self {
        let assumed = bin(ASSUMED_MOST_S) + 1;
        let mut weights = [0.0; BINS];
        weights[..assumed].fill(ASSUMED_GAPS / assumed as f64);
        Self {
            sums: Sums::of(&weights),
            weights,
            unit: 1.0,
        }
    }
}

fn bin(gap_s: f64) -> usize {
    let octaves = (gap_s / LEAST_S).max(1.0).log2();
    ((octaves * BINS_AN_OCTAVE) as usize).min(BINS - 1)
}

/// The middles of the bins, by ratio.
static MIDDLES_S: LazyLock<[f64; BINS]> =
    LazyLock::new(|| std::array::from_fn(|bin| edge_s(bin as f64 + 0.5)));

/// The bins' upper ends.
static ENDS_S: LazyLock<[f64; BINS]> =
    LazyLock::new(|| std::array::from_fn(|bin| edge_s(bin as f64 + 1.0)));

fn edge_s(bins: f64) -> f64 {
    LEAST_S * (bins / BINS_AN_OCTAVE).exp2()
}

impl Gaps {
    pub fn note(&mut self, gap_s: f64) {
        self.unit /= DECAY;
        self.weights[bin(gap_s)] += self.unit;
        if self.unit > 1e12 {
            self.weights
                .iter_mut()
                .for_each(|weight| *weight /= self.unit);
            self.unit = 1.0;
        }
        self.sums = Sums::of(&self.weights);
    }

    /// What gaps longer than `idle_s` weigh; the fleet's whole histogram weighs [`FLEET_WEIGHT`].
    fn longer(&self, own: &OwnGaps, idle_s: f64) -> f64 {
        let first = MIDDLES_S.partition_point(|gap_s| *gap_s <= idle_s);
        let (of_fleet, all) = (self.sums.from[first], self.sums.from[0]);
        let own = own.seconds().iter();
        let own = own.filter(|&&gap_s| f64::from(gap_s) > idle_s);
        FLEET_WEIGHT * of_fleet / all + own.count() as f64
    }

    /// The mean of gaps, its own and all sessions', in seconds.
    pub fn mean_s(&self, own: &OwnGaps) -> f64 {
        let seconds = own.seconds().iter();
        let own_s: f64 = seconds.map(|&gap_s| f64::from(gap_s).min(MOST_S)).sum();
        (FLEET_WEIGHT * self.sums.mean_s + own_s) / own.weight()
    }

    /// The time, in seconds, within which nearly all sessions that come back do.
    pub fn nearly_all_s(&self) -> f64 {
        let mut beyond = LONGEST_SHARE * self.sums.from[0];
        let last = self.weights.iter().rposition(|weight| {
            beyond -= weight;
            beyond < 0.0
        });
        last.map_or(LEAST_S, |bin| ENDS_S[bin]).min(MOST_S)
    }

    /// Whether it pays to keep what the session holds for some time yet, where its return is worth
    /// `worth_s` seconds of idleness: there is a time h such that worth_s × the chance that it returns
    /// within h is no less than the seconds for which it would be kept, until it returns or h is over.
    /// One that has been away for longer than nearly every gap seen has most likely had its last
    /// answer, and is not waited for; `last_share` of such answers are.
    pub fn keeping_pays(&self, own: &OwnGaps, last_share: f64, idle_s: f64, worth_s: f64) -> bool {
        let first = ENDS_S.partition_point(|end_s| *end_s <= idle_s);
        if first == BINS || idle_s >= MOST_S {
            return false;
        }
        let mut weights = self.sums.shares;
        own.bins().for_each(|bin| weights[bin] += 1.0);
        let gone = own.gone(last_share);
        let mut left = weights[first..].iter().sum::<f64>() + gone;
        let (mut returned, mut kept_s) = (0.0, 0.0);
        for bin in first..BINS {
            let until_s = ENDS_S[bin] - idle_s;
            let away_s = (MIDDLES_S[bin] - idle_s).max(0.0);
            returned += weights[bin];
            left -= weights[bin];
            kept_s += weights[bin] * away_s;
            if worth_s * returned >= kept_s + left * until_s {
                return true;
            }
        }
        false
    }

    /// How likely it sends its next request within the next `horizon_s`, where `last_share` of such
    /// answers are followed by none.
    pub fn returns_within(
        &self,
        own: &OwnGaps,
        last_share: f64,
        idle_s: f64,
        horizon_s: f64,
    ) -> f64 {
        let now = self.longer(own, idle_s);
        if idle_s >= MOST_S || now <= 1e-3 * FLEET_WEIGHT {
            return 0.0;
        }
        let later = self.longer(own, idle_s + horizon_s);
        ((now - later) / (now + own.gone(last_share))).clamp(0.0, 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fleet(gaps_s: &[f64]) -> Gaps {
        let mut gaps = Gaps::default();
        for _ in 0..500 {
            gaps_s.iter().for_each(|&gap_s| gaps.note(gap_s));
        }
        gaps
    }

    #[test]
    fn own_gaps_outweigh_the_fleets() {
        let gaps = fleet(&[100.0]);
        let mut own = OwnGaps::default();
        (0..OWN_GAPS).for_each(|_| own.note(1.0));
        assert!(gaps.returns_within(&own, 0.0, 0.0, 2.0) > 0.7);
        assert!(gaps.returns_within(&own, 0.9, 0.0, 2.0) < 0.1);
        let stranger = OwnGaps::default();
        assert!(gaps.returns_within(&stranger, 0.0, 0.0, 2.0) < 0.05);
    }

    #[test]
    fn one_that_is_away_for_longer_than_others_ever_were_is_not_waited_for() {
        let gaps = fleet(&[2.0, 5.0, 10.0, 10.0]);
        let own = OwnGaps::default();
        let pays = |idle_s, worth_s| gaps.keeping_pays(&own, 0.05, idle_s, worth_s);
        assert!(pays(0.0, 20.0) && pays(9.9, 20.0));
        assert!(
            !gaps.keeping_pays(&own, 0.9, 0.0, 20.0),
            "nearly all such answers are the last"
        );
        assert!(
            !pays(0.0, 3.0),
            "its return is worth less than the wait for it"
        );
        assert!(!pays(12.0, 60.0), "most likely it has had its last answer");
        assert!(!pays(MOST_S, 1e9));
        let mut slow = OwnGaps::default();
        (0..OWN_GAPS).for_each(|_| slow.note(30.0));
        assert!(
            gaps.keeping_pays(&slow, 0.05, 12.0, 60.0),
            "but this one always takes its time"
        );
        // Two kinds of gap: who is not back after the short one may be worth waiting for.
        let both = fleet(&[1.0, 100.0]);
        let pays = |idle_s, worth_s| both.keeping_pays(&own, 0.05, idle_s, worth_s);
        assert!(pays(0.0, 3.0));
        assert!(!pays(2.0, 3.0) && pays(2.0, 300.0));
    }

    #[test]
    fn the_mean_is_of_own_gaps_and_all_sessions_and_no_gap_counts_for_more_than_the_longest() {
        let stranger = OwnGaps::default();
        let mean_s = fleet(&[2.0, 5.0, 10.0, 10.0]).mean_s(&stranger);
        assert!(
            (6.0..7.6).contains(&mean_s),
            "{mean_s}: 6.75, within half of a bin"
        );
        let slow = fleet(&[100.0]);
        let mean_s = slow.mean_s(&stranger);
        assert!((90.0..110.0).contains(&mean_s), "{mean_s}");
        let mut own = OwnGaps::default();
        (0..OWN_GAPS).for_each(|_| own.note(1.0));
        let mean_s = slow.mean_s(&own);
        assert!((18.0..23.0).contains(&mean_s), "{mean_s}: 2 of 100, 8 of 1");
        // A session that was away for a day thinks no longer than one that is not expected back.
        let mean_s = fleet(&[86_400.0]).mean_s(&stranger);
        assert!((590.0..=MOST_S).contains(&mean_s), "{mean_s}");
        let mut away = OwnGaps::default();
        (0..OWN_GAPS).for_each(|_| away.note(86_400.0));
        assert!(fleet(&[86_400.0]).mean_s(&away) <= MOST_S);
    }

    #[test]
    fn nearly_all_gaps_are_over_by_then() {
        let gaps = Gaps::default();
        let assumed_s = gaps.nearly_all_s();
        assert!((10.0..15.0).contains(&assumed_s), "{assumed_s}");
        let seen_s = fleet(&[1.0, 100.0]).nearly_all_s();
        assert!((100.0..130.0).contains(&seen_s), "{seen_s}");
        assert_eq!(fleet(&[5_000.0]).nearly_all_s(), MOST_S);
    }

    #[test]
    fn what_is_asked_for_often_is_as_if_it_were_worked_out_anew() {
        let mut gaps = Gaps::default();
        for turn in 0..30_000u32 {
            if turn % 1_000 < 2 {
                // From the last on, as they are added there.
                let all: f64 = gaps.weights.iter().rev().sum();
                for bin in 0..BINS {
                    let from: f64 = gaps.weights[bin..].iter().rev().sum();
                    assert_eq!(gaps.sums.from[bin], from);
                    assert_eq!(
                        gaps.sums.shares[bin],
                        FLEET_WEIGHT * gaps.weights[bin] / all
                    );
                }
            }
            gaps.note(f64::from(turn % 97));
        }
        assert!(gaps.unit < 1e12, "weights were made smaller in between");
    }

    #[test]
    fn weights_stay_finite() {
        let mut gaps = Gaps::default();
        (0..200_000).for_each(|i| gaps.note(f64::from(i % 7)));
        let half = gaps.longer(&OwnGaps::default(), 3.5) / FLEET_WEIGHT;
        assert!((0.3..0.5).contains(&half), "{half}: 4, 5 and 6 s of seven");
    }
}
