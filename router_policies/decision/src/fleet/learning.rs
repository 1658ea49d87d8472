//! What the times of a request teach of its workers' speeds, and of their kinds'.

use super::State;
use super::batch::{BatchTime, MeanBatch};
use super::outcome::Usage;
use super::prefills::Step;
use super::rates::{self, Computed, Decoded, Prior, Topic};
use super::share::Share;
use crate::policy::{Rates, Route};

/// Answers in whose time more was prefilled on their worker, as a share of it, say little of how long a
/// decode step takes.
const MOST_PREFILL_SHARE: f64 = 0.25;

impl State {
    /// Learns from what a worker computed in a piece of its time.
    pub(super) fn learn_step(&mut self, slot: usize, step: &Step, now_s: f64) {
        let computed = Computed {
            tokens: step.tokens as f64,
            pairs: step.pairs,
        };
        let (paced, seconds) = (step.is_paced, step.seconds);
        if step.is_local {
            let topic = match paced {
                true => Topic::Pacing,
                false => Topic::Compute,
            };
            self.teach(slot, topic, now_s, |rates, prior| {
                rates::observe_local(rates, prior, computed, paced, seconds);
            });
            return;
        }
        let transfer = step.transfer.filter(|transfer| {
            let decode = self.workers.get(transfer.slot).and_then(Option::as_ref);
            decode.is_some_and(|decode| decode.serial == transfer.serial)
        });
        let Some(transfer) = transfer else {
            self.teach(slot, Topic::Compute, now_s, |rates, prior| {
                rates::observe_remote(rates, prior, computed, seconds);
            });
            return;
        };
        // The same sample for both workers, and for both kinds.
        let seconds = seconds + transfer.seconds;
        let Some((prefill, decode)) = self.workers[slot]
            .as_ref()
            .zip(self.workers[transfer.slot].as_ref())
        else {
            return;
        };
        let observe = |of_prefill: Rates, of_decode: Rates, priors: (&Prior, &Prior)| {
            let (mut of_prefill, mut of_decode) = (of_prefill, of_decode);
            rates::observe_separated(
                (&mut of_prefill, priors.0),
                (&mut of_decode, priors.1),
                computed,
                transfer.delta_tokens,
                transfer.until_token,
                seconds,
            );
            (of_prefill, of_decode)
        };
        let priors = (&prefill.prior, &decode.prior);
        let of_workers = observe(prefill.beliefs.rates, decode.beliefs.rates, priors);
        let kinds = (prefill.kind, decode.kind);
        let (of_prefill, of_decode) = (self.kinds.rates(kinds.0), self.kinds.rates(kinds.1));
        let of_kinds = observe(of_prefill, of_decode, priors);
        // Of a worker that does both, only what the sample says of its part.
        let set = |rates: &mut Rates, topic, to: &Rates| rates::drift(rates, to, topic, 1.0);
        for (slot, kind, topic, of_worker, of_kind) in [
            (slot, kinds.0, Topic::Compute, of_workers.0, of_kinds.0),
            (
                transfer.slot,
                kinds.1,
                Topic::Transfer,
                of_workers.1,
                of_kinds.1,
            ),
        ] {
            if let Some(worker) = self.worker_mut(slot) {
                set(&mut worker.beliefs.rates, topic, &of_worker);
                worker.beliefs.note(topic, now_s);
            }
            let beliefs = self.kinds.beliefs_mut(kind);
            set(&mut beliefs.rates, topic, &of_kind);
            beliefs.note(topic, now_s);
        }
    }

    /// Learns from a prefill that was given up after `seconds`: it takes at least as long. Its worker alone
    /// is believed to be slower for it, not its kind, for it may have hung.
    pub(super) fn learn_dropped(&mut self, share: &Share, seconds: f64, now_s: f64) {
        let Some(worker) = self.worker_mut(share.route.prefilling()) else {
            return;
        };
        let (rates, paced) = (&mut worker.beliefs.rates, worker.load.decoding > 0);
        let slowdown = if paced { rates.paced_slowdown } else { 1.0 };
        if seconds <= slowdown * rates.compute_s(share.new_tokens, share.new_pairs) {
            return;
        }
        let computed = Computed {
            tokens: share.new_tokens as f64,
            pairs: share.new_pairs,
        };
        rates::observe_local(rates, &worker.prior, computed, paced, seconds);
        let topic = match paced {
            true => Topic::Pacing,
            false => Topic::Compute,
        };
        worker.beliefs.note(topic, now_s);
    }

    /// Learns from the first token of a separated request that came `seconds` after its prefill worker
    /// was done: `delta` tokens were to be sent in them, or none.
    pub(super) fn learn_arrival(
        &mut self,
        decode: usize,
        delta: Option<u64>,
        seconds: f64,
        now_s: f64,
    ) {
        self.teach(decode, Topic::Transfer, now_s, |rates, prior| {
            rates::observe_arrival(rates, prior, delta, None, seconds);
        });
    }

    /// Learns from a streamed answer whose first token was there at `first`, and that has ended now.
    pub(super) fn learn_decodes(
        &mut self,
        share: &Share,
        first: &BatchTime,
        output_tokens: u64,
        now_s: f64,
    ) {
        let slot = share.route.answering();
        let Some(mean) = self.mean_batch(slot, first, now_s) else {
            return;
        };
        let tokens = share.output_of_each(output_tokens).saturating_sub(1);
        if tokens == 0 || mean.prefill_s > MOST_PREFILL_SHARE * mean.seconds {
            return;
        }
        let decoded = decoded(tokens, &mean);
        let seconds = mean.seconds - mean.prefill_s;
        self.teach(slot, Topic::Decode, now_s, |rates, prior| {
            rates::observe_decode(rates, prior, decoded, seconds);
        });
    }

    /// Learns from an answer that came in one piece, now, `output_tokens` long by the engine's count,
    /// of a request that was placed at `begun` and found no prefill before it on its worker.
    /// `prefilled_s` is when its prefill worker was done, where it is separated.
    pub(super) fn learn_whole(
        &mut self,
        share: &Share,
        usage: Usage,
        begun: &BatchTime,
        prefilled_s: Option<f64>,
        now_s: f64,
    ) {
        let slot = share.route.answering();
        let Some(output_tokens) = usage.output_tokens else {
            return;
        };
        let Some(mean) = self.mean_batch(slot, begun, now_s) else {
            return;
        };
        let tokens = share.output_of_each(output_tokens).saturating_sub(1);
        let decoded = Some(decoded(tokens, &mean)).filter(|_| tokens > 0);
        match (share.route, prefilled_s) {
            (Route::PrefillDecode { .. }, Some(prefilled_s)) => {
                let seconds = now_s - prefilled_s;
                let delta = share.delta_after_prefill;
                self.teach(slot, Topic::Transfer, now_s, |rates, prior| {
                    rates::observe_arrival(rates, prior, delta, decoded, seconds);
                });
            }
            (Route::Local { .. }, _) if share.found_no_queue => {
                let (tokens, pairs) = share.computed(usage);
                let computed = Computed {
                    tokens: tokens as f64,
                    pairs,
                };
                let paced = share.found_decodes;
                let topic = match paced {
                    true => Topic::Pacing,
                    false => Topic::Compute,
                };
                self.teach(slot, topic, now_s, |rates, prior| {
                    let seconds = mean.seconds;
                    rates::observe_whole(rates, prior, computed, paced, decoded, seconds);
                });
            }
            _ => {}
        }
    }

    /// The mean length of an answer goes on with another.
    pub(super) fn learn_output(&mut self, share: &Share, output_tokens: u64) {
        let tokens = share.output_of_each(output_tokens) as f64;
        self.mean_output_tokens += 0.02 * (tokens - self.mean_output_tokens);
    }

    /// Lets beliefs go that nothing has taught for long; to be called now and then.
    pub(super) fn forget_rates(&mut self, now_s: f64) {
        if !self.kinds.is_time_to_forget(now_s) {
            return;
        }
        for worker in self.workers.iter_mut().flatten() {
            let kind = worker.kind;
            self.kinds.forget(&mut worker.beliefs, kind, now_s);
        }
    }

    fn mean_batch(&mut self, slot: usize, then: &BatchTime, now_s: f64) -> Option<MeanBatch> {
        let worker = self.worker_mut(slot)?;
        worker.pass(now_s);
        worker.batch_time.since(then)
    }

    /// Lets a worker and its kind learn the same.
    fn teach(
        &mut self,
        slot: usize,
        topic: Topic,
        now_s: f64,
        observe: impl Fn(&mut Rates, &Prior),
    ) {
        let Some(worker) = self.workers.get_mut(slot).and_then(Option::as_mut) else {
            return;
        };
        let of_kind = self.kinds.beliefs_mut(worker.kind);
        for beliefs in [&mut worker.beliefs, of_kind] {
            observe(&mut beliefs.rates, &worker.prior);
            beliefs.note(topic, now_s);
        }
    }
}

/// An answer is in the batch itself, though the books may have had it there for a part of the time only.
fn decoded(tokens: u64, mean: &MeanBatch) -> Decoded {
    Decoded {
        tokens: tokens as f64,
        requests: mean.requests.max(1.0),
        context_tokens: mean.context_tokens,
    }
}
