//! Stops sending to a worker that keeps failing, and tries it again after a while.

/// Failures in a row that open the circuit.
const FAILURES: u32 = 5;
/// First pause; doubles with every failed trial.
const PAUSE_S: f64 = 2.0;
const MAX_PAUSE_S: f64 = 60.0;

/// Closed while requests succeed; open after [`FAILURES`] in a row; then one trial at a time.
#[derive(Debug, Default)]
pub struct Circuit {
    failures: u32,
    trials: u32,
    open_until_s: Option<f64>,
    /// When it was last opened, or opened for longer.
    opened_s: f64,
}

impl Circuit {
    pub fn allows(&self, now_s: f64) -> bool {
        self.open_until_s.is_none_or(|until| now_s >= until)
    }

    pub fn is_open(&self) -> bool {
        self.open_until_s.is_some()
    }

    /// Notes that a request was placed; an open circuit lets no second one through meanwhile.
    pub fn placed(&mut self, now_s: f64) {
        if self.open_until_s.is_some() {
            self.open_until_s = Some(now_s + self.pause_s());
        }
    }

    pub fn succeeded(&mut self) {
        *self = Self::default();
    }

    /// Notes the failure of a request that was placed at `begun_s`. Of an open circuit, only requests
    /// placed since are trials; the others ran when it opened and say nothing new.
    pub fn failed(&mut self, now_s: f64, begun_s: f64) {
        if self.is_open() {
            if begun_s <= self.opened_s {
                return;
            }
            self.trials += 1;
        }
        self.failures += 1;
        if self.failures >= FAILURES {
            self.opened_s = now_s;
            self.open_until_s = Some(now_s + self.pause_s());
        }
    }

    fn pause_s(&self) -> f64 {
        (PAUSE_S * f64::from(1u32 << self.trials.min(10))).min(MAX_PAUSE_S)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Opened at 0 s.
    fn opened() -> Circuit {
        let mut circuit = Circuit::default();
        (0..FAILURES).for_each(|_| circuit.failed(0.0, -1.0));
        circuit
    }

    #[test]
    fn it_opens_after_failures_in_a_row_and_closes_after_one_success() {
        let mut circuit = Circuit::default();
        for _ in 0..FAILURES - 1 {
            circuit.failed(0.0, -1.0);
        }
        assert!(circuit.allows(0.0));
        circuit.failed(0.0, -1.0);
        assert!(!circuit.allows(PAUSE_S - 0.1));
        assert!(circuit.allows(PAUSE_S));
        circuit.placed(PAUSE_S);
        assert!(!circuit.allows(PAUSE_S + 0.1), "one trial at a time");
        circuit.succeeded();
        assert!(circuit.allows(PAUSE_S + 0.1) && !circuit.is_open());
    }

    #[test]
    fn the_pause_doubles_with_every_failed_trial_up_to_a_bound() {
        let mut circuit = opened();
        let mut now_s = 0.0;
        for pause_s in [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0] {
            assert!(!circuit.allows(now_s + pause_s - 0.1));
            now_s += pause_s;
            assert!(circuit.allows(now_s));
            circuit.placed(now_s);
            circuit.failed(now_s, now_s);
        }
    }

    #[test]
    fn requests_that_ran_when_it_opened_are_no_trials() {
        let mut circuit = opened();
        for _ in 0..10 {
            circuit.failed(0.1, -1.0);
        }
        assert!(circuit.allows(PAUSE_S), "as after the fifth failure");
    }
}
