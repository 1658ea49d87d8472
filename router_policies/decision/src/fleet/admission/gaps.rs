//! How long sessions think between an answer's end and their next request: what all of them do.

use std::sync::LazyLock;

const LEAST_S: f64 = 0.05;
const BINS_AN_OCTAVE: f64 = 3.0;
const BINS: usize = 48;
/// What one more gap takes off the weight of all before it: half is gone after 700.
const DECAY: f64 = 0.999;
/// Gaps that are assumed before any was seen, spread evenly over the bins up to [`ASSUMED_MOST_S`].
const ASSUMED_GAPS: f64 = 4.0;
const ASSUMED_MOST_S: f64 = 10.0;
/// Gaps are no longer than this.
const MOST_S: f64 = 600.0;
/// All but this share of gaps are shorter than [`Gaps::nearly_all_s`].
const LONGEST_SHARE: f64 = 0.01;

/// A histogram of gaps with bins of equal ratio, the older gaps weighing less.
#[derive(Clone, Debug)]
pub struct Gaps {
    weights: [f64; BINS],
    /// Grows instead of every weight shrinking.
    unit: f64,
    mean_s: f64,
    nearly_all_s: f64,
}

impl Default for Gaps {
    fn default() -> Self {
        let assumed = bin(ASSUMED_MOST_S) + 1;
        let mut weights = [0.0; BINS];
        weights[..assumed].fill(ASSUMED_GAPS / assumed as f64);
        let mut gaps = Self {
            weights,
            unit: 1.0,
            mean_s: 0.0,
            nearly_all_s: 0.0,
        };
        gaps.sum_up();
        gaps
    }
}

fn bin(gap_s: f64) -> usize {
    let octaves = (gap_s / LEAST_S).max(1.0).log2();
    ((octaves * BINS_AN_OCTAVE) as usize).min(BINS - 1)
}

/// The middles of the bins, by ratio.
static MIDDLES_S: LazyLock<[f64; BINS]> =
    LazyLock::new(|| std::array::from_fn(|bin| edge_s(bin as f64 + 0.5)));

fn edge_s(bins: f64) -> f64 {
    (LEAST_S * (bins / BINS_AN_OCTAVE).exp2()).min(MOST_S)
}

impl Gaps {
    pub fn note(&mut self, gap_s: f64) {
        self.unit /= DECAY;
        self.weights[bin(gap_s)] += self.unit;
        if self.unit > 1e12 {
            let unit = std::mem::replace(&mut self.unit, 1.0);
            self.weights.iter_mut().for_each(|weight| *weight /= unit);
        }
        self.sum_up();
    }

    /// What is asked for far more often than a gap is noted.
    fn sum_up(&mut self) {
        let all: f64 = self.weights.iter().sum();
        let seconds = self.weights.iter().zip(MIDDLES_S.iter());
        let seconds: f64 = seconds.map(|(weight, gap_s)| weight * gap_s).sum();
        self.mean_s = seconds / all;
        let mut beyond = LONGEST_SHARE * all;
        let last = self.weights.iter().rposition(|weight| {
            beyond -= weight;
            beyond < 0.0
        });
        self.nearly_all_s = edge_s(last.unwrap_or(0) as f64 + 1.0);
    }

    /// The mean, in seconds.
    pub fn mean_s(&self) -> f64 {
        self.mean_s
    }

    /// The time, in seconds, within which nearly all sessions that come back do.
    pub fn nearly_all_s(&self) -> f64 {
        self.nearly_all_s
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_sessions_did_of_late_outweighs_what_was_assumed() {
        let mut gaps = Gaps::default();
        assert!((8.0..=12.0).contains(&gaps.nearly_all_s()));
        (0..500).for_each(|_| gaps.note(1.0));
        assert!((0.9..=1.3).contains(&gaps.mean_s()), "{}", gaps.mean_s());
        (0..100).for_each(|_| gaps.note(60.0));
        assert!((50.0..=80.0).contains(&gaps.nearly_all_s()));
        assert!((8.0..=14.0).contains(&gaps.mean_s()), "{}", gaps.mean_s());
    }

    #[test]
    fn the_longest_in_a_hundred_says_nothing_of_the_others() {
        let mut gaps = Gaps::default();
        for at in 0..2_000 {
            gaps.note(if at % 200 == 0 { 500.0 } else { 2.0 });
        }
        assert!(gaps.nearly_all_s() < 3.0, "{}", gaps.nearly_all_s());
    }
}
