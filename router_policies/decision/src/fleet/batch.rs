//! What decodes on one worker, summed up over time, so that each answer knows in which batches its
//! tokens were made.

use super::load::Load;

/// Sums since the worker came, of seconds by what there was.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BatchTime {
    at_s: f64,
    request_s: f64,
    context_token_s: f64,
    prefill_s: f64,
}

/// The mean of what a worker did over some time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct MeanBatch {
    pub seconds: f64,
    pub requests: f64,
    pub context_tokens: f64,
    /// In which something was prefilled there.
    pub prefill_s: f64,
}

impl BatchTime {
    /// Until now there was `load`, and `prefills` or none.
    pub fn pass(&mut self, now_s: f64, load: &Load, prefills: bool) {
        let passed_s = (now_s - self.at_s).max(0.0);
        self.request_s += passed_s * f64::from(load.decoding);
        self.context_token_s += passed_s * load.decode_tokens as f64;
        self.prefill_s += if prefills { passed_s } else { 0.0 };
        self.at_s = self.at_s.max(now_s);
    }

    /// The mean between an earlier moment and this; none where no time has passed.
    pub fn since(&self, then: &Self) -> Option<MeanBatch> {
        let seconds = self.at_s - then.at_s;
        (seconds > 0.0).then(|| MeanBatch {
            seconds,
            requests: (self.request_s - then.request_s) / seconds,
            context_tokens: (self.context_token_s - then.context_token_s) / seconds,
            prefill_s: self.prefill_s - then.prefill_s,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mean_batch_is_that_of_the_time_between() {
        let load = |decoding, decode_tokens| Load {
            decoding,
            decode_tokens,
            ..Load::default()
        };
        let mut time = BatchTime::default();
        time.pass(10.0, &load(9, 9_000), true);
        let then = time;
        assert_eq!(time.since(&then), None);
        time.pass(11.0, &load(1, 1_000), true);
        time.pass(14.0, &load(5, 21_000), false);
        let mean = time.since(&then).expect("time has passed");
        let expected = MeanBatch {
            seconds: 4.0,
            requests: 4.0,
            context_tokens: 16_000.0,
            prefill_s: 1.0,
        };
        assert_eq!(mean, expected);
    }
}
