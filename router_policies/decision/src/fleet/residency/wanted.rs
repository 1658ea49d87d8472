//! Whether those that take turns on a worker want more than it has: only then does anybody need a time slice.
//!
//! What they want is what their turns hold of the GPU's KV over time, and what the tiers are to keep of their
//! prompts. Both are estimates, of answers of a few tokens and of some thousands, so the first is taken over a
//! minute, and a worker on which slices are needed has to be wanted less by a tenth before they are not.

/// The time over which what is wanted of the GPU is smoothed. In simulation half of it was as good with twelve
/// sessions and worse with fourteen.
const SMOOTHED_S: f64 = 60.0;
/// Slices are needed until less than this share of the limits is wanted.
const UNTIL: f64 = 0.9;

/// Tokens of a worker's GPU, as turns hold them over time, and of prompts that its tiers are to keep: what one
/// session or all are expected to want, or what there is.
#[derive(Clone, Copy, Default)]
pub(super) struct Tokens {
    pub over_time: f64,
    pub kept: f64,
}

/// What is wanted of one worker.
#[derive(Default)]
pub(super) struct Wanted {
    /// Tokens of its GPU over time, smoothed, and when they were; none before anybody came.
    smoothed: Option<(f64, f64)>,
    exceeds: bool,
}

impl Wanted {
    /// Whether more is wanted than there is.
    pub fn exceeds(&self) -> bool {
        self.exceeds
    }

    /// Takes note of what is wanted now; whether it has just become more than there is.
    pub fn note(&mut self, wanted: Tokens, limits: Tokens, now_s: f64) -> bool {
        let over_time = match self.smoothed {
            Some((before, at_s)) => {
                let gain = 1.0 - (-(now_s - at_s).max(0.0) / SMOOTHED_S).exp();
                before + gain * (wanted.over_time - before)
            }
            None => wanted.over_time,
        };
        self.smoothed = Some((over_time, now_s));
        let until = if self.exceeds { UNTIL } else { 1.0 };
        let did = self.exceeds;
        self.exceeds = over_time > until * limits.over_time || wanted.kept > until * limits.kept;
        self.exceeds && !did
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wanted_is_smoothed_and_has_to_fall_by_a_tenth() {
        let limits = Tokens {
            over_time: 100.0,
            kept: 1_000.0,
        };
        let mut of = Wanted::default();
        let mut note = |over_time: f64, kept: f64, now_s: f64| {
            let begins = of.note(Tokens { over_time, kept }, limits, now_s);
            (begins, of.exceeds())
        };
        assert_eq!(note(80.0, 0.0, 0.0), (false, false));
        // One long answer is no crowd.
        assert_eq!(note(120.0, 0.0, 5.0), (false, false));
        assert_eq!(note(120.0, 0.0, 70.0), (true, true));
        assert_eq!(note(95.0, 0.0, 1_000.0), (false, true));
        assert_eq!(note(85.0, 0.0, 2_000.0), (false, false));
        // What the tiers are to keep counts at once.
        assert_eq!(note(85.0, 1_001.0, 2_001.0), (true, true));
        assert_eq!(note(85.0, 901.0, 2_002.0), (false, true));
        assert_eq!(note(85.0, 899.0, 2_003.0), (false, false));
        // Clocks that go back change nothing.
        assert_eq!(note(200.0, 0.0, 0.0), (false, false));
    }
}
