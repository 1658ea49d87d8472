//! Whether the engine behind a worker is still the one whose cache is known.

/// Fewer missing tokens than this may have been evicted, or never computed.
const NOTABLE_TOKENS: u64 = 64;
/// Answers in a row without the cached tokens that were believed, after which the belief is given up
/// where nothing else can show a restart. A burst of requests with one new prefix misses it too.
const MISSES: u32 = 5;

/// One run of an engine, from its start to its end.
#[derive(Debug, Default)]
pub(crate) struct EngineRun {
    /// A number that differs from start to start.
    run: Option<u64>,
    /// The worker was down since the run was last told.
    is_doubted: bool,
    misses: u32,
}

impl EngineRun {
    /// Takes over which run answers now; true if it is another one than before.
    pub fn report(&mut self, run: Option<u64>) -> bool {
        let is_other = run.is_some() && self.run.is_some() && run != self.run;
        if run.is_some() {
            self.is_doubted = false;
            self.misses = 0;
        }
        self.run = run.or(self.run);
        is_other
    }

    /// The worker went down.
    pub fn doubt(&mut self) {
        self.is_doubted = true;
    }

    /// Whether the run has been told since the worker was last down.
    pub fn is_confirmed(&self) -> bool {
        self.run.is_some() && !self.is_doubted
    }

    /// Whether the run should be asked for.
    pub fn is_doubted(&self) -> bool {
        self.is_doubted || self.misses > 0
    }

    /// Compares the cached tokens of an answer with what was believed; true when so many answers in a
    /// row lacked them that the belief must be wrong.
    pub fn compare(&mut self, believed: u64, reported: u64) -> bool {
        if believed < NOTABLE_TOKENS {
            return false;
        }
        // What is evicted goes leaf by leaf; of a cache that was lost, hardly anything is there.
        self.misses = if reported < believed / 4 {
            self.misses + 1
        } else {
            0
        };
        let is_lost = self.run.is_none() && self.misses >= MISSES;
        if is_lost {
            self.misses = 0;
        }
        is_lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_run_is_told_from_the_same_one() {
        let mut run = EngineRun::default();
        assert!(!run.report(Some(1)), "the first is no restart");
        run.doubt();
        assert!(!run.is_confirmed());
        assert!(
            !run.report(Some(1)) && run.is_confirmed(),
            "it was only unreachable"
        );
        assert!(run.report(Some(2)));
        assert!(!run.report(None), "what is not told is no restart");
    }

    #[test]
    fn cached_tokens_that_are_missing_again_and_again_end_the_belief() {
        let mut run = EngineRun::default();
        assert!(!run.compare(8_000, 0) && run.is_doubted());
        assert!(!run.compare(8_000, 7_000) && !run.is_doubted());
        assert!((1..MISSES).all(|_| !run.compare(8_000, 10)));
        assert!(run.compare(8_000, 0));
        assert!((0..10).all(|_| !run.compare(NOTABLE_TOKENS - 1, 0)));
    }
}
