//! The prefills reserved on one worker, in the order in which it takes them.
//!
//! Engines prefill first come, first served, so a prefill's own time is what passes between the end
//! of the one before it and its own end. That is what waits are predicted from and rates are learnt
//! from: a request is not blamed for the queue that it stood in, nor is a queue counted in full whose
//! first prefill is nearly done.

use crate::policy::Rates;
use std::collections::VecDeque;

#[derive(Clone, Copy, Debug)]
struct Prefill {
    id: u64,
    tokens: u64,
    pairs: f64,
}

#[derive(Debug, Default)]
pub(crate) struct PrefillQueue {
    queue: VecDeque<Prefill>,
    tokens: u64,
    pairs: f64,
    /// When the first of the queue began.
    head_since_s: f64,
}

impl PrefillQueue {
    pub fn push(&mut self, id: u64, tokens: u64, pairs: f64, now_s: f64) {
        if self.queue.is_empty() {
            self.head_since_s = now_s;
            self.pairs = 0.0;
        }
        self.queue.push_back(Prefill { id, tokens, pairs });
        self.tokens += tokens;
        self.pairs += pairs;
    }

    /// Takes out a prefill that ended at `ended_s`, or never will; returns the time that it had the
    /// worker, if it was its turn.
    pub fn remove(&mut self, id: u64, ended_s: f64) -> Option<f64> {
        let at = self.queue.iter().position(|prefill| prefill.id == id)?;
        let prefill = self.queue.remove(at)?;
        self.tokens -= prefill.tokens;
        self.pairs -= prefill.pairs;
        (at == 0).then(|| {
            let since_s = self.head_since_s;
            self.head_since_s = ended_s.max(since_s);
            ended_s - since_s
        })
    }

    /// Seconds until all of them have run, each `slowdown` times longer than alone.
    pub fn wait_s(&self, rates: &Rates, slowdown: f64, now_s: f64) -> f64 {
        let Some(head) = self.queue.front() else {
            return 0.0;
        };
        let all_s = slowdown * rates.compute_s(self.tokens, self.pairs.max(0.0));
        let head_s = slowdown * rates.compute_s(head.tokens, head.pairs);
        let behind_s = (now_s - self.head_since_s).clamp(0.0, head_s);
        (all_s - behind_s).max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATES: Rates = Rates {
        prefill_tokens_per_s: 1_000.0,
        attention_pairs_per_s: f64::INFINITY,
        paced_slowdown: 2.0,
        prefill_overhead_s: 0.0,
        transfer_tokens_per_s: 1.0,
        transfer_overhead_s: 0.0,
        decode_step_s: 0.0,
    };

    #[test]
    fn the_running_prefill_counts_only_for_what_is_left_of_it() {
        let mut queue = PrefillQueue::default();
        queue.push(1, 4_000, 0.0, 10.0);
        queue.push(2, 1_000, 0.0, 11.0);
        assert_eq!(queue.wait_s(&RATES, 1.0, 11.0), 4.0);
        assert_eq!(queue.wait_s(&RATES, 2.0, 12.0), 8.0);
        assert_eq!(
            queue.wait_s(&RATES, 1.0, 99.0),
            1.0,
            "late, but the other is whole"
        );
        assert_eq!(queue.remove(1, 13.0), Some(3.0));
        assert_eq!(queue.wait_s(&RATES, 1.0, 13.5), 0.5);
        assert_eq!(queue.remove(2, 14.5), Some(1.5));
        assert_eq!(queue.wait_s(&RATES, 1.0, 20.0), 0.0);
    }

    #[test]
    fn one_that_leaves_before_its_turn_had_no_time() {
        let mut queue = PrefillQueue::default();
        queue.push(1, 4_000, 0.0, 0.0);
        queue.push(2, 1_000, 0.0, 0.0);
        assert_eq!(queue.remove(2, 1.0), None);
        assert_eq!(queue.remove(1, 4.0), Some(4.0));
    }
}
