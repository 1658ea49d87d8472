//! What one decision takes from its workers' books, and when it is given back: its prefill ends, it
//! decodes, it has ended.

use super::State;
use super::outcome::{Outcome, Usage};
use super::prefills::{Left, Step, Transfer};
use crate::model::WorkerSpec;
use crate::policy::{Route, attention_pairs};
use std::sync::Arc;

/// What one decision reserves.
#[derive(Clone, Copy, Debug)]
pub(super) struct Share {
    /// The decision's number.
    pub id: u64,
    pub route: Route,
    pub input_tokens: u64,
    /// On the worker that prefills.
    pub new_tokens: u64,
    pub new_pairs: f64,
    /// Prompts in it, and answers that are made of it.
    pub prompts: u64,
    pub answers: u64,
    /// On the worker that answers: where separated, the KV it must be sent.
    pub delta_tokens: u64,
    /// The part of that which is sent after the prefill worker has said that it is done: none where it
    /// says so once all is sent.
    pub delta_after_prefill: Option<u64>,
    /// It has to wait until running requests give back room: its times say nothing of speeds.
    pub lacks_room: bool,
    /// No prefill was before it on its worker, and something decoded there.
    pub found_no_queue: bool,
    pub found_decodes: bool,
    /// Predicted, from the decision to the first token.
    pub until_token_s: f64,
    /// Where the answer does not come in pieces: when its prefill is taken to have ended.
    pub untold_until_us: Option<u64>,
    /// Whose turn it is, and its number in the book of admission.
    pub key: u64,
    pub turn: u64,
}

impl Share {
    /// Tokens of one answer, if all together have so many.
    pub(super) fn output_of_each(&self, output_tokens: u64) -> u64 {
        output_tokens.div_ceil(self.answers.max(1))
    }

    /// New tokens, and their pairs, that the prefill worked through: as the engine that did it says,
    /// where its first event does, else as was believed.
    pub(super) fn computed(&self, usage: Usage) -> (u64, f64) {
        let is_local = matches!(self.route, Route::Local { .. });
        match (usage.prompt_tokens, usage.cached_tokens) {
            (Some(prompt), Some(cached)) if is_local && prompt > 0 && cached <= prompt => {
                let new = prompt - cached;
                let pairs = attention_pairs(cached, new) / self.prompts.max(1) as f64;
                (new, pairs)
            }
            _ => (self.new_tokens, self.new_pairs),
        }
    }

    /// The workers' slots, each once.
    fn slots(&self) -> impl Iterator<Item = usize> {
        let answering = self.route.answering();
        let prefilling = self.route.prefilling();
        let other = (prefilling != answering).then_some(prefilling);
        std::iter::once(answering).chain(other)
    }
}

impl State {
    pub(super) fn reserve(&mut self, share: &mut Share, now_s: f64) {
        if let Route::PrefillDecode { prefill, .. } = share.route {
            self.separated_inflight += 1;
            if let Some(worker) = self.worker_mut(prefill) {
                worker.decisions += 1;
                worker.load.enter(share.input_tokens);
            }
        }
        for slot in share.slots() {
            if let Some(worker) = self.worker_mut(slot) {
                worker.pass(now_s);
                let is_streamed = share.untold_until_us.is_none();
                worker
                    .liveness
                    .enter(now_s, share.input_tokens, share.until_token_s, is_streamed);
            }
        }
        if let Some(worker) = self.worker_mut(share.route.prefilling()) {
            share.found_no_queue = worker.prefills.is_empty();
            share.found_decodes = worker.load.decoding > 0;
            worker.load.prefilling += 1;
            worker.load.pending_prefill_tokens += share.new_tokens;
            let (tokens, pairs) = (share.new_tokens, share.new_pairs);
            worker.prefills.push(share.id, tokens, pairs, now_s);
        }
        if let Some(worker) = self.worker_mut(share.route.answering()) {
            worker.decisions += 1;
            worker.load.enter(share.input_tokens);
            worker.load.arriving += 1;
            worker.load.arriving_tokens += share.input_tokens;
            worker.came_tokens += share.input_tokens;
        }
        if let Some(until_us) = share.untold_until_us {
            // Boxed, for the tree moves what is in it.
            self.untold.insert((until_us, share.id), Box::new(*share));
        }
    }

    /// Ends the prefills that should be over by now, though nothing said so.
    pub(super) fn end_untold(&mut self, now_s: f64) {
        while let Some(entry) = self.untold.first_entry() {
            let until_s = entry.key().0 as f64 / 1e6;
            if until_s > now_s {
                return;
            }
            let share = entry.remove();
            if let Route::Local { .. } = share.route {
                self.end_compute(&share, until_s, Left::Unseen);
            }
            self.begin_decode(&share, now_s);
        }
    }

    /// The first token is there, or the request ends without: its prefill is over on both workers,
    /// unless it was taken to be so before. `told` is what the engine has said by a first token that
    /// shows when the prefill ended; `prefilled_s` when its prefill worker was done, if it said so.
    pub(super) fn end_prefill(
        &mut self,
        share: &Share,
        told: Option<Usage>,
        prefilled_s: Option<f64>,
        now_s: f64,
    ) {
        let was_taken_for_over = share
            .untold_until_us
            .is_some_and(|until_us| self.untold.remove(&(until_us, share.id)).is_none());
        let learns = !share.lacks_room;
        match (share.route, prefilled_s, told) {
            (Route::PrefillDecode { decode, .. }, Some(prefilled_s), Some(_)) if learns => {
                let (delta, seconds) = (share.delta_after_prefill, now_s - prefilled_s);
                self.learn_arrival(decode, delta, seconds, now_s);
            }
            (Route::PrefillDecode { .. }, None, Some(_)) => {
                // Its own end was not told: the next prefill began when this one's KV left, before the
                // first token came.
                let sent_s = self.sent_s(share, true);
                let transfer = self.transfer(share, sent_s, true);
                let how = self.computed(share, told, transfer);
                self.end_compute(share, now_s - sent_s, how);
            }
            (Route::Local { .. }, _, Some(_)) => {
                let how = self.computed(share, told, None);
                self.end_compute(share, now_s, how);
            }
            _ => self.end_compute(share, now_s, Left::Dropped),
        }
        if !was_taken_for_over {
            self.begin_decode(share, now_s);
        }
    }

    /// The prefill worker has said that it is done.
    pub(super) fn end_remote_prefill(&mut self, share: &Share, now_s: f64) {
        let (sent_s, transfer) = match share.delta_after_prefill {
            Some(_) => (0.0, None),
            None => {
                let sent_s = self.sent_s(share, false);
                (sent_s, self.transfer(share, sent_s, false))
            }
        };
        let how = self.computed(share, Some(Usage::default()), transfer);
        self.end_compute(share, now_s - sent_s, how);
    }

    /// Seconds that sending what the decode worker lacks is believed to take, with or without its own
    /// overhead.
    fn sent_s(&self, share: &Share, until_token: bool) -> f64 {
        let decode = self.workers.get(share.route.answering());
        let Some(decode) = decode.and_then(Option::as_ref) else {
            return 0.0;
        };
        let rates = &decode.beliefs.rates;
        let overhead_s = if until_token {
            rates.transfer_overhead_s
        } else {
            0.0
        };
        overhead_s + share.delta_tokens as f64 / rates.transfer_tokens_per_s
    }

    fn transfer(&self, share: &Share, seconds: f64, until_token: bool) -> Option<Transfer> {
        let slot = share.route.answering();
        let decode = self.workers.get(slot).and_then(Option::as_ref)?;
        Some(Transfer {
            slot,
            serial: decode.serial,
            delta_tokens: share.delta_tokens,
            seconds,
            until_token,
        })
    }

    /// What a prefill that ends now has computed.
    fn computed(&self, share: &Share, told: Option<Usage>, transfer: Option<Transfer>) -> Left {
        let slot = share.route.prefilling();
        let worker = self.workers.get(slot).and_then(Option::as_ref);
        match (told, worker) {
            (Some(usage), Some(worker)) if !share.lacks_room => {
                let (tokens, pairs) = share.computed(usage);
                Left::Computed(Step {
                    tokens,
                    pairs,
                    seconds: 0.0,
                    is_local: matches!(share.route, Route::Local { .. }),
                    is_paced: worker.load.decoding > 0,
                    transfer,
                })
            }
            (Some(_), _) => Left::Unseen,
            (None, _) => Left::Dropped,
        }
    }

    /// The worker that prefills is done with a request since `ended_s`, unless it was before.
    fn end_compute(&mut self, share: &Share, ended_s: f64, how: Left) {
        let slot = share.route.prefilling();
        let Some(worker) = self.worker_mut(slot) else {
            return;
        };
        worker.pass(ended_s);
        let ran_s = worker.prefills.ran_s(share.id, ended_s);
        let Some(steps) = worker.prefills.take(share.id, ended_s, how) else {
            return;
        };
        if let (Left::Dropped, Some(ran_s), false) = (how, ran_s, share.lacks_room) {
            self.learn_dropped(share, ran_s, ended_s);
        }
        let Some(worker) = self.worker_mut(slot) else {
            return;
        };
        worker.load.prefilling -= 1;
        worker.load.pending_prefill_tokens -= share.new_tokens;
        for step in steps {
            self.learn_step(slot, &step, ended_s);
        }
    }

    /// The request decodes from now on; its prefill worker, where that is another, is free of it.
    fn begin_decode(&mut self, share: &Share, now_s: f64) {
        let answering = share.route.answering();
        self.admission
            .prefill_over(answering, share.key, share.turn);
        let is_streamed = share.untold_until_us.is_none();
        for slot in share.slots() {
            // When the first token of an answer in one piece was there, nobody knows before its end.
            if (is_streamed || slot != answering)
                && let Some(worker) = self.worker_mut(slot)
            {
                worker.liveness.settle(share.input_tokens, is_streamed);
            }
        }
        if let Some(worker) = self.worker_mut(answering) {
            worker.pass(now_s);
            worker.load.arriving -= 1;
            worker.load.arriving_tokens -= share.input_tokens;
            worker.load.decoding += 1;
            worker.load.decode_tokens += share.input_tokens;
        }
        if let Route::PrefillDecode { prefill, .. } = share.route {
            self.separated_inflight -= 1;
            if let Some(worker) = self.worker_mut(prefill) {
                worker.load.leave(share.input_tokens);
            }
            self.free_if_idle(prefill);
        }
    }

    /// Opens or closes the circuits of the workers involved. Answers with 5xx are left to
    /// [`Fleet::blame`].
    pub(super) fn note_outcome(
        &mut self,
        share: &Share,
        outcome: Outcome,
        status: Option<u16>,
        prefill_failed: bool,
        prefill: Option<&Arc<WorkerSpec>>,
        (begun_s, now_s): (f64, f64),
    ) {
        // A prefill worker that was removed meanwhile may have left its slot to another.
        let is_gone = prefill.is_some_and(|prefill| {
            let worker = self.workers.get(share.route.prefilling());
            let worker = worker.and_then(Option::as_ref);
            worker.is_none_or(|worker| !Arc::ptr_eq(&worker.spec, prefill))
        });
        if is_gone && prefill_failed {
            return;
        }
        let slot = if prefill_failed {
            share.route.prefilling()
        } else {
            share.route.answering()
        };
        let Some(worker) = self.worker_mut(slot) else {
            return;
        };
        match outcome {
            Outcome::Ok => {
                worker.circuit.succeeded();
                if !is_gone && let Some(worker) = self.worker_mut(share.route.prefilling()) {
                    worker.circuit.succeeded();
                }
            }
            Outcome::WorkerError if status.is_none_or(|status| status < 500) => {
                worker.circuit.failed(now_s, begun_s);
            }
            Outcome::WorkerError
            | Outcome::ClientDisconnect
            | Outcome::Rejected
            | Outcome::RouterError
            | Outcome::Timeout => {}
        }
    }

    pub(super) fn end_decode(&mut self, share: &Share, now_s: f64) {
        let slot = share.route.answering();
        if let Some(worker) = self.worker_mut(slot) {
            worker.pass(now_s);
            if share.untold_until_us.is_some() {
                worker.liveness.settle(share.input_tokens, false);
            }
            worker.load.leave(share.input_tokens);
            worker.load.decoding -= 1;
            worker.load.decode_tokens -= share.input_tokens;
        }
        self.free_if_idle(slot);
    }
}
