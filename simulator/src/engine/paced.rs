//! Paced prefill of SGLang (`sglang_ext.pacing`): how much of a prompt a step takes beside decodes, and which
//! short prompts go along with one that is under way.

use super::JobId;
use super::batch::Sequence;
use super::sglang::Sglang;

/// Of a paced prefill (`sglang_ext.pacing.pacer`): a prompt advances by at least so many tokens a step,
/// and where a step with so few misses the target already, a step may take half as long again as that.
const LEAST_CHUNK_TOKENS: u64 = 128;
const LOST_TARGET: f64 = 1.5;
/// Of those that wait, so many may go along with a prompt that is under way (`sglang_ext.pacing.sharing`).
const LOOKED_AT: usize = 16;

/// Short prompts that go along with one that is under way.
pub(super) struct Beside {
    /// What is left of the chunk for that one.
    pub share: u64,
    pub jobs: Vec<JobId>,
}

/// The most tokens that fit: `least` do, and `beyond` do not or are not asked for.
fn largest(least: u64, beyond: u64, fits: impl Fn(u64) -> bool) -> u64 {
    let (mut low, mut high) = (least, beyond);
    while high - low > 1 {
        let middle = u64::midpoint(low, high);
        if fits(middle) {
            low = middle;
        } else {
            high = middle;
        }
    }
    low
}

impl Sglang {
    /// The most tokens that the next step may prefill: where prefills are paced and others decode, so
    /// many as keep the step within the target.
    pub(super) fn chunk_tokens(&self) -> u64 {
        let most = self.core.limits.chunk_tokens;
        let (requests, context) = self.core.queues.decoding();
        let Some(target_s) = self.core.limits.target_itl_s.filter(|_| requests > 0) else {
            return most;
        };
        let line = self.in_line(most);
        let calibration = &self.core.calibration;
        let step_s = |tokens: u64| {
            let (mut left, mut pairs) = (tokens, 0.0);
            for &(before, new) in &line {
                let part = left.min(new);
                pairs += calibration.pairs(before, part);
                left -= part;
            }
            calibration.mixed_s(tokens - left, pairs, requests, context)
        };
        let least = LEAST_CHUNK_TOKENS.min(most);
        let least_s = step_s(least);
        let budget_s = target_s.max(LOST_TARGET * least_s * (least_s / target_s).min(1.0));
        if step_s(most) <= budget_s {
            return most;
        }
        largest(least, most, |tokens| step_s(tokens) <= budget_s)
    }

    /// The prompts that the next `tokens` to be prefilled are of, in their order: tokens that are there,
    /// and tokens still to be computed.
    fn in_line(&self, tokens: u64) -> Vec<(u64, u64)> {
        let core = &self.core;
        let running = core.queues.running.iter().filter(|s| s.is_prefilling());
        let begun = running.map(|s| (s.computed, s.target - s.computed));
        let waiting = core.queues.waiting.iter();
        let seen = waiting.filter(|s| s.arrived_s <= core.seen_until_s);
        let others = seen.map(|s| self.held_and_new(s));
        let mut left = tokens;
        let mut line = Vec::new();
        for (before, new) in begun.chain(others) {
            line.push((before, new));
            left = left.saturating_sub(new);
            if left == 0 {
                break;
            }
        }
        line
    }

    /// Of a request that waits: tokens that are there, on the device or in host memory, and the others.
    fn held_and_new(&self, sequence: &Sequence) -> (u64, u64) {
        let pool = &self.core.pool;
        let held = pool.cache.peek(sequence.job.cacheable()) as u64 * pool.block_tokens;
        (held, sequence.target - held)
    }

    /// Beside a paced prompt that is under way those go along that fit whole into half of its chunk of
    /// `tokens`, first come first, as long as the step then takes no longer than the chunk alone or the target:
    /// the chunk gives up what they compute, and what attention to their prefixes takes. None where nobody does.
    pub(super) fn beside(&self, tokens: u64) -> Option<Beside> {
        let core = &self.core;
        let target_s = core.limits.target_itl_s?;
        let under_way = core.queues.running.iter().find(|s| s.is_prefilling())?;
        let (least, room) = (tokens - tokens / 2, tokens / 2);
        let is_last = under_way.target - under_way.computed <= least;
        if is_last || tokens < 2 * LEAST_CHUNK_TOKENS {
            return None;
        }
        let (requests, context) = core.queues.decoding();
        let calibration = &core.calibration;
        let chunk_pairs = |share| calibration.pairs(under_way.computed, share);
        let longest_s =
            target_s.max(calibration.mixed_s(tokens, chunk_pairs(tokens), requests, context));
        let fits = |share: u64, new: u64, pairs: f64| {
            let pairs = pairs + chunk_pairs(share);
            calibration.mixed_s(share + new, pairs, requests, context) <= longest_s
        };
        let (mut jobs, mut taken, mut pairs) = (Vec::new(), 0, 0.0);
        let waiting = core.queues.waiting.iter();
        let seen = waiting.filter(|s| s.arrived_s <= core.seen_until_s);
        for sequence in seen.take(LOOKED_AT) {
            let (held, new) = self.held_and_new(sequence);
            let with = pairs + calibration.pairs(held, new);
            if taken + new <= room && fits(least, taken + new, with) {
                jobs.push(sequence.job.id);
                (taken, pairs) = (taken + new, with);
            }
        }
        if jobs.is_empty() {
            return None;
        }
        let share = largest(least, tokens - taken + 1, |share| fits(share, taken, pairs));
        Some(Beside { share, jobs })
    }
}
