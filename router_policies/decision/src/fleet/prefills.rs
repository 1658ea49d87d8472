//! The prefills reserved on one worker, in the order in which it takes them.
//!
//! Engines prefill first come, first served, so a prefill's own time is what passes between the end
//! of the one before it and its own end. That is what waits are predicted from and rates are learnt
//! from: a request is not blamed for the queue that it stood in, nor is a queue counted in full whose
//! first prefill is nearly done.
//!
//! An engine may prefill several prompts in one step. They end together, so the first of them has had
//! the whole time and the others none. What ends at the same moment is therefore learnt from as one
//! [`Step`], once something ends later or nothing is left.

use crate::policy::Rates;
use smallvec::SmallVec;
use std::collections::VecDeque;

/// Prefills whose ends are no further apart ran in one step, or so nearly that it makes no difference:
/// of two short steps, taken for one, only one fixed overhead is learnt from.
const SAME_STEP_S: f64 = 0.01;

#[derive(Clone, Copy, Debug)]
struct Prefill {
    id: u64,
    tokens: u64,
    pairs: f64,
}

/// Where the KV of a prefill went, and what the time of its end has of that.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Transfer {
    /// The decode worker's, and its registration's number.
    pub slot: usize,
    pub serial: u64,
    pub delta_tokens: u64,
    /// From the end of the prefill to the moment that showed it.
    pub seconds: f64,
    /// That moment was the first token's, so the decode worker's own overhead is in it.
    pub until_token: bool,
}

/// What a worker computed in one piece of its time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Step {
    pub tokens: u64,
    pub pairs: f64,
    pub seconds: f64,
    pub is_local: bool,
    /// Something decoded there when it ended.
    pub is_paced: bool,
    /// Where it is of one prefill alone, and for another worker.
    pub transfer: Option<Transfer>,
}

impl Step {
    fn join(&mut self, other: &Self) {
        self.tokens += other.tokens;
        self.pairs += other.pairs;
        self.seconds += other.seconds;
        self.is_local |= other.is_local;
        self.transfer = None;
    }
}

/// How a prefill left its worker.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Left {
    /// It ended, and computed this; the seconds are the queue's to say.
    Computed(Step),
    /// It ended, but when is only assumed.
    Unseen,
    /// It never ran, or not to its end.
    Dropped,
}

/// What is taken for the beginning of the first prefill.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Since {
    /// It came to an idle worker.
    #[default]
    Came,
    /// The one before it left.
    Left,
    /// The one before it is only assumed to have ended.
    Assumed,
}

#[derive(Debug, Default)]
pub(crate) struct PrefillQueue {
    queue: VecDeque<Prefill>,
    tokens: u64,
    pairs: f64,
    /// When the first of the queue began, and how that is known.
    head_since_s: f64,
    since: Since,
    /// What ended since then though its turn had not come: it ran beside the first, or before it.
    early: Option<Step>,
    /// What has ended, while what may have run in the same step is still to end.
    ended: Option<Step>,
}

impl PrefillQueue {
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub fn push(&mut self, id: u64, tokens: u64, pairs: f64, now_s: f64) {
        if self.queue.is_empty() {
            self.head_since_s = now_s;
            self.since = Since::Came;
            self.early = None;
            self.pairs = 0.0;
        }
        self.queue.push_back(Prefill { id, tokens, pairs });
        self.tokens += tokens;
        self.pairs += pairs;
    }

    /// Takes out a prefill that left at `at_s`; none where it was taken out before. Returns the steps
    /// that are known whole by now.
    pub fn take(&mut self, id: u64, at_s: f64, how: Left) -> Option<SmallVec<[Step; 2]>> {
        let at = self.queue.iter().position(|prefill| prefill.id == id)?;
        let prefill = self.queue.remove(at)?;
        self.tokens -= prefill.tokens;
        self.pairs -= prefill.pairs;
        let mut whole = SmallVec::new();
        match how {
            Left::Computed(step) if at > 0 => match &mut self.early {
                Some(early) => early.join(&step),
                None => self.early = Some(step),
            },
            Left::Computed(mut step) => {
                step.seconds = (at_s - self.head_since_s).max(0.0);
                let is_same_step = step.seconds <= SAME_STEP_S;
                if let Some(early) = self.early.take() {
                    step.join(&early);
                }
                match (&mut self.ended, self.since) {
                    (Some(ended), _) if is_same_step => ended.join(&step),
                    // The rest of a step whose time was not seen whole.
                    (None, Since::Left) if is_same_step => {}
                    _ => {
                        whole.extend(self.ended.take());
                        self.ended = Some(step).filter(|_| self.since != Since::Assumed);
                    }
                }
            }
            Left::Unseen | Left::Dropped if at > 0 => {}
            Left::Unseen | Left::Dropped => {
                self.early = None;
                whole.extend(self.ended.take());
            }
        }
        if at == 0 {
            self.head_since_s = at_s.max(self.head_since_s);
            self.since = match how {
                Left::Unseen => Since::Assumed,
                Left::Computed(_) | Left::Dropped => Since::Left,
            };
        }
        if self.queue.is_empty() {
            whole.extend(self.ended.take());
        }
        Some(whole)
    }

    /// How long a prefill has run, where it is the first of the queue and it is known when it began.
    pub fn ran_s(&self, id: u64, now_s: f64) -> Option<f64> {
        let is_first = self.queue.front().is_some_and(|head| head.id == id);
        (is_first && self.since != Since::Assumed).then(|| (now_s - self.head_since_s).max(0.0))
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
        decode_base_s: 0.0,
        decode_per_request_s: 0.0,
        decode_per_context_token_s: 0.0,
    };

    fn computed(tokens: u64) -> Left {
        Left::Computed(Step {
            tokens,
            pairs: 0.0,
            seconds: 0.0,
            is_local: true,
            is_paced: false,
            transfer: None,
        })
    }

    /// (tokens, seconds) of the steps that are known when a prefill leaves.
    fn take(queue: &mut PrefillQueue, id: u64, at_s: f64, how: Left) -> Vec<(u64, f64)> {
        let steps = queue.take(id, at_s, how).expect("in the queue");
        steps
            .iter()
            .map(|step| (step.tokens, step.seconds))
            .collect()
    }

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
        assert!(take(&mut queue, 1, 13.0, computed(4_000)).is_empty());
        assert_eq!(queue.wait_s(&RATES, 1.0, 13.5), 0.5);
        assert_eq!(
            take(&mut queue, 2, 14.5, computed(1_000)),
            [(4_000, 3.0), (1_000, 1.5)]
        );
        assert_eq!(queue.wait_s(&RATES, 1.0, 20.0), 0.0);
        assert!(queue.take(2, 15.0, Left::Dropped).is_none(), "it is out");
    }

    #[test]
    fn what_ends_together_ran_together() {
        let mut queue = PrefillQueue::default();
        for id in 1..=4 {
            queue.push(id, 1_000, 0.0, 0.0);
        }
        assert!(take(&mut queue, 1, 2.0, computed(1_000)).is_empty());
        assert!(take(&mut queue, 2, 2.002, computed(1_000)).is_empty());
        // Its answer overtook that of the third.
        assert!(take(&mut queue, 4, 2.003, computed(1_000)).is_empty());
        let whole = take(&mut queue, 3, 2.004, computed(1_000));
        assert_eq!(whole.len(), 1);
        assert_eq!(whole[0].0, 4_000);
        assert!((whole[0].1 - 2.004).abs() < 1e-9, "{whole:?}");
    }

    #[test]
    fn one_that_is_taken_before_its_turn_counts_into_the_time_of_the_first() {
        let mut queue = PrefillQueue::default();
        queue.push(1, 4_000, 0.0, 0.0);
        queue.push(2, 1_000, 0.0, 0.0);
        assert!(take(&mut queue, 2, 1.0, computed(1_000)).is_empty());
        assert_eq!(take(&mut queue, 1, 5.0, computed(4_000)), [(5_000, 5.0)]);
    }

    #[test]
    fn nothing_is_learnt_from_what_was_not_seen_to_begin_or_end() {
        let mut queue = PrefillQueue::default();
        for id in 1..=5 {
            queue.push(id, 1_000, 0.0, 0.0);
        }
        assert!(take(&mut queue, 5, 0.5, Left::Dropped).is_empty());
        assert!(take(&mut queue, 1, 1.0, Left::Unseen).is_empty());
        assert!(take(&mut queue, 2, 9.0, computed(1_000)).is_empty());
        assert!(take(&mut queue, 3, 9.001, computed(1_000)).is_empty());
        assert_eq!(take(&mut queue, 4, 10.0, computed(1_000)).len(), 1);
    }
}
