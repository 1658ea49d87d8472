//! What a decision takes from its workers, and the guard that gives it back.

use super::liveness::Signs;
use super::log::{Event, FinishRecord, unix_now_s};
use super::residency::Seat;
use super::residency::book::Served;
use super::{Fleet, Session, State, rates};
use crate::config::{Engine, WorkerSpec};
use crate::policy::{Route, attention_pairs};
use serde::Serialize;
use std::sync::Arc;

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Ok,
    ClientDisconnect,
    WorkerError,
    Rejected,
    Timeout,
    /// The router itself could not send the request: it has no descriptor left, or finds no address.
    RouterError,
}

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
    /// Prompts in it.
    pub prompts: u64,
    /// On the worker that answers: where separated, the KV it must be sent.
    pub delta_tokens: u64,
    /// Predicted, from the decision to the first token.
    pub until_token_s: f64,
    /// Where the answer does not come in pieces: when its prefill is taken to have ended.
    pub untold_until_us: Option<u64>,
    /// Whose turn it is, and its number in the book of residency.
    pub key: u64,
    pub turn: u64,
}

/// What a decision noted besides: to be taken back if the request was not run.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Noted {
    /// New to the estimate of the answering and of the prefill worker.
    pub prompt: [Option<u64>; 2],
    /// The session, and what was known of it before.
    pub session: Option<(u64, Option<Session>)>,
}

/// What an engine reported about a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: Option<u64>,
    pub cached_tokens: Option<u64>,
}

impl Share {
    /// New tokens, and their pairs, that the prefill worked through: as the engine that did it says,
    /// where its first event does, else as was believed.
    fn computed(&self, usage: Usage) -> (u64, f64) {
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
    pub(super) fn reserve(&mut self, share: &Share, now_s: f64) {
        if let Route::PrefillDecode { prefill, .. } = share.route {
            self.separated_inflight += 1;
            if let Some(worker) = self.worker_mut(prefill) {
                worker.decisions += 1;
                worker.load.enter(share.input_tokens);
            }
        }
        match share.untold_until_us {
            Some(until_us) => {
                self.untold.insert((until_us, share.id), *share);
            }
            None => {
                for slot in share.slots() {
                    if let Some(worker) = self.worker_mut(slot) {
                        worker.liveness.owe(now_s, share.until_token_s);
                    }
                }
            }
        }
        if let Some(worker) = self.worker_mut(share.route.prefilling()) {
            worker.load.prefilling += 1;
            worker.load.pending_prefill_tokens += share.new_tokens;
            let (tokens, pairs) = (share.new_tokens, share.new_pairs);
            worker.prefills.push(share.id, tokens, pairs, now_s);
        }
        if let Some(worker) = self.worker_mut(share.route.answering()) {
            worker.decisions += 1;
            worker.load.enter(share.input_tokens);
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
            self.leave_prefill(&share, until_s, None);
        }
    }

    /// The prefill is over, unless it was taken to be so before.
    fn end_prefill(&mut self, share: &Share, now_s: f64, has_token: Option<Usage>) {
        let is_over = share
            .untold_until_us
            .is_some_and(|until_us| self.untold.remove(&(until_us, share.id)).is_none());
        if !is_over {
            self.leave_prefill(share, now_s, has_token);
        }
    }

    /// On another worker, that worker is free again; locally, it decodes now. If its first token
    /// came, the rates learn from the time that it took, and from what the engine says was cached.
    fn leave_prefill(&mut self, share: &Share, now_s: f64, has_token: Option<Usage>) {
        let slot = share.route.prefilling();
        let answering = share.route.answering();
        self.residency
            .prefill_over(answering, share.key, share.turn);
        let transfer_s = match share.route {
            Route::Local { .. } => 0.0,
            Route::PrefillDecode { decode, .. } => self.worker_mut(decode).map_or(0.0, |worker| {
                worker.rates.transfer_overhead_s
                    + share.delta_tokens as f64 / worker.rates.transfer_tokens_per_s
            }),
        };
        if share.untold_until_us.is_none() {
            for slot in share.slots() {
                if let Some(worker) = self.worker_mut(slot) {
                    worker.liveness.settle();
                }
            }
        }
        let mut had_s = None;
        if let Some(worker) = self.worker_mut(slot) {
            // The next prefill began when this one's KV left, before its first token came.
            had_s = worker.prefills.remove(share.id, now_s - transfer_s);
            worker.load.prefilling -= 1;
            worker.load.pending_prefill_tokens -= share.new_tokens;
        }
        if let (Some(seconds), Some(usage)) = (had_s, has_token) {
            self.learn_prefill(share, usage, seconds + transfer_s);
        }
        if let Some(worker) = self.worker_mut(share.route.answering()) {
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

    /// Learns from a prefill that had its worker for `seconds`.
    fn learn_prefill(&mut self, share: &Share, usage: Usage, seconds: f64) {
        let (tokens, pairs) = share.computed(usage);
        match share.route {
            Route::Local { worker } => {
                if let Some(worker) = self.worker_mut(worker) {
                    let paced = worker.load.decoding > 0;
                    let (rates, prior) = (&mut worker.rates, &worker.prior);
                    rates::observe_local(rates, prior, tokens, pairs, paced, seconds);
                }
            }
            Route::PrefillDecode { prefill, decode } => {
                let of_prefill = self.worker_mut(prefill);
                let Some((mut of_prefill, prior)) = of_prefill.map(|of| (of.rates, of.prior))
                else {
                    return;
                };
                if let Some(decode) = self.worker_mut(decode) {
                    let delta = share.delta_tokens;
                    rates::observe_separated(
                        (&mut of_prefill, &prior),
                        (&mut decode.rates, &decode.prior),
                        tokens,
                        pairs,
                        delta,
                        seconds,
                    );
                }
                if let Some(worker) = self.worker_mut(prefill) {
                    worker.rates = of_prefill;
                }
            }
        }
    }

    fn learn_decode(&mut self, slot: usize, output_chunks: u64, seconds: f64) {
        if let Some(worker) = self.worker_mut(slot) {
            let tokens = output_chunks.saturating_sub(1);
            rates::observe_decode(&mut worker.rates, &worker.prior, tokens, seconds);
        }
        self.mean_output_tokens += 0.02 * (output_chunks as f64 - self.mean_output_tokens);
    }

    /// Opens or closes the circuits of the workers involved. Answers with 5xx are left to
    /// [`Fleet::blame`].
    fn note_outcome(
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

    fn end_decode(&mut self, share: &Share) {
        let slot = share.route.answering();
        if let Some(worker) = self.worker_mut(slot) {
            worker.load.leave(share.input_tokens);
            worker.load.decoding -= 1;
            worker.load.decode_tokens -= share.input_tokens;
        }
        self.free_if_idle(slot);
    }
}

/// By how much the booking for an answer grows, at least, when it is longer than was expected: so that
/// not every token of it needs the fleet's lock.
const MORE_OUTPUT_TOKENS: u64 = 128;

/// A decision's hold on its workers. Dropping it, by whatever path, gives everything back and logs
/// the finish event, once. A drop without [`Reservation::finish`] means that the client left.
pub struct Reservation {
    fleet: Arc<Fleet>,
    decision_id: String,
    share: Share,
    seat: Option<Seat>,
    answering: Arc<WorkerSpec>,
    prefill: Option<Arc<WorkerSpec>>,
    begun_s: f64,
    received_s: f64,
    first_token_s: Option<f64>,
    output_chunks: u64,
    outcome: Outcome,
    status: Option<u16>,
    error: Option<String>,
    usage: Usage,
    is_stream: bool,
    failed_prefill: bool,
    /// Whose fault the failure is, the request's other attempts tell.
    is_undecided: bool,
    noted: Noted,
    /// Of the worker that prefills and the one that answers.
    signs: [Arc<Signs>; 2],
}

impl Reservation {
    #[expect(
        clippy::too_many_arguments,
        reason = "one call, of facts that belong to no one type"
    )]
    pub(super) fn new(
        fleet: Arc<Fleet>,
        decision_id: String,
        share: Share,
        seat: Seat,
        answering: Arc<WorkerSpec>,
        prefill: Option<Arc<WorkerSpec>>,
        signs: [Arc<Signs>; 2],
        begun_s: f64,
    ) -> Self {
        Self {
            fleet,
            decision_id,
            share,
            seat: Some(seat),
            answering,
            prefill,
            begun_s,
            received_s: begun_s,
            first_token_s: None,
            output_chunks: 0,
            outcome: Outcome::ClientDisconnect,
            status: None,
            error: None,
            usage: Usage::default(),
            is_stream: false,
            failed_prefill: false,
            is_undecided: false,
            noted: Noted::default(),
            signs,
        }
    }

    /// With what its decision noted.
    pub(super) fn having(mut self, noted: Noted, received_s: Option<f64>) -> Self {
        self.noted = noted;
        self.received_s = received_s.unwrap_or(self.begun_s);
        self
    }

    /// Notes what the engine reported.
    pub fn report(&mut self, mut usage: Usage) {
        if self.prefill.is_some() && self.answering.engine == Engine::Vllm {
            // vLLM (0.26.0) counts what the prefill worker sent with what it held itself.
            usage.cached_tokens = None;
        }
        self.usage.prompt_tokens = usage.prompt_tokens.or(self.usage.prompt_tokens);
        self.usage.cached_tokens = usage.cached_tokens.or(self.usage.cached_tokens);
    }

    /// The answer is a stream, so that its pieces tell when tokens were made.
    pub fn streams(&mut self) {
        self.is_stream = true;
    }

    pub fn decision_id(&self) -> &str {
        &self.decision_id
    }

    /// The worker whose answer the client gets.
    pub fn answering(&self) -> &Arc<WorkerSpec> {
        &self.answering
    }

    /// The prefill worker, where the request is separated.
    pub fn prefill(&self) -> Option<&Arc<WorkerSpec>> {
        self.prefill.as_ref()
    }

    /// Notes that `count` more pieces of the answer arrived; the first ends the prefill.
    pub fn output(&mut self, count: u64) {
        if count == 0 {
            return;
        }
        self.output_chunks += count;
        let now_s = self.fleet.now_s();
        let [prefill, answering] = &self.signs;
        answering.note(now_s);
        if self.first_token_s.is_none() {
            prefill.note(now_s);
            self.first_token_s = Some(now_s);
            let mut state = self.fleet.state.lock();
            let told = self.is_stream.then_some(self.usage);
            state.end_prefill(&self.share, now_s, told);
            self.fleet.settle(state);
        }
        self.lengthen();
    }

    /// Books more for an answer that has become longer than was expected.
    fn lengthen(&mut self) {
        let Some(seat) = self.seat.as_mut() else {
            return;
        };
        if seat.turn == 0 || self.output_chunks <= seat.output_tokens {
            return;
        }
        let more_tokens = MORE_OUTPUT_TOKENS.max(seat.output_tokens / 2);
        let mut state = self.fleet.state.lock();
        let site = state.site(seat.slot, self.fleet.now_s());
        state
            .residency
            .lengthen(seat, more_tokens, site.as_ref(), self.fleet.now_s());
        self.fleet.settle(state);
    }

    /// When the decision was made, by the fleet's clock.
    pub fn begun_s(&self) -> f64 {
        self.begun_s
    }

    /// Its worker broke the connection: nothing shows yet whether the worker or the request is to blame,
    /// and its end counts against neither. See [`Fleet::blame`].
    pub fn leave_undecided(&mut self) {
        self.is_undecided = true;
    }

    /// Ends the request as failed by its prefill worker.
    pub fn fail_prefill(mut self, outcome: Outcome, status: Option<u16>, error: String) {
        self.failed_prefill = true;
        self.finish(outcome, status, Some(error));
    }

    /// Ends the request as `outcome`. A worker that failed without an answer is to blame; whether one
    /// that answered 5xx is, the request's other attempts tell: see [`Fleet::blame`].
    pub fn finish(mut self, outcome: Outcome, status: Option<u16>, error: Option<String>) {
        self.outcome = outcome;
        self.status = status;
        self.error = error;
    }
}

impl Reservation {
    /// What no worker ran, none holds, and it is no turn of its session. Of a request whose client left,
    /// or whose time was over, nobody knows how far it came.
    fn take_back(&self, state: &mut State) {
        if !matches!(
            self.outcome,
            Outcome::Rejected | Outcome::WorkerError | Outcome::RouterError
        ) {
            return;
        }
        let [of_answering, of_prefill] = self.noted.prompt;
        let slot = self.share.route.answering();
        state.retract_prompt(slot, of_answering);
        if self.failed_prefill || self.outcome == Outcome::Rejected {
            state.retract_prompt(self.share.route.prefilling(), of_prefill);
        }
        if let Some((key, before)) = self.noted.session {
            state.retract_session(key, before, slot, self.begun_s);
        }
    }

    /// What the turn has left on the worker that answered.
    fn served(&self) -> Served {
        match self.outcome {
            Outcome::WorkerError if !self.failed_prefill => Served::Failed,
            _ if self.first_token_s.is_some() => Served::Yes,
            _ => Served::No,
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut recomputed_tokens = None;
        {
            let now_s = self.fleet.now_s();
            let mut state = self.fleet.state.lock();
            if self.first_token_s.is_none() {
                state.end_prefill(&self.share, now_s, None);
                self.take_back(&mut state);
            }
            let duration_s = self.first_token_s.map(|then_s| now_s - then_s);
            if let (Outcome::Ok, true, Some(seconds)) = (self.outcome, self.is_stream, duration_s) {
                let slot = self.share.route.answering();
                state.learn_decode(slot, self.output_chunks, seconds);
            }
            state.end_decode(&self.share);
            state.evict_excess(self.share.route.prefilling());
            state.evict_excess(self.share.route.answering());
            if !self.is_undecided {
                state.note_outcome(
                    &self.share,
                    self.outcome,
                    self.status,
                    self.failed_prefill,
                    self.prefill.as_ref(),
                    (self.begun_s, now_s),
                );
            }
            if let (Route::Local { worker }, Some(reported)) =
                (self.share.route, self.usage.cached_tokens)
            {
                let believed = self.share.input_tokens - self.share.delta_tokens;
                let worker = state.worker_mut(worker);
                if worker.is_some_and(|worker| worker.engine_run.compare(believed, reported)) {
                    // Before this turn ends: it has been served since, and its session keeps its place.
                    state.forget_cache(self.share.route.answering());
                }
            }
            if let Some(seat) = self.seat.take() {
                // How long an answer is that does not come in pieces, nothing says.
                let output_tokens = match self.is_stream {
                    true => self.output_chunks,
                    false => seat.output_tokens,
                };
                let site = state.site(seat.slot, now_s);
                let (served, usage) = (self.served(), self.usage);
                let residency = &mut state.residency;
                let ended = residency.end(seat, site.as_ref(), served, output_tokens, usage, now_s);
                recomputed_tokens = ended.recomputed_tokens;
            }
            self.fleet.settle(state);
        }
        let since = |then_s: f64| then_s - self.begun_s;
        // An answer in one piece does not say when its first token was there.
        let first_token_s = self.first_token_s.filter(|_| self.is_stream);
        self.fleet.sink.send(Event::Finish(FinishRecord {
            decision_id: std::mem::take(&mut self.decision_id),
            ts_unix_s: unix_now_s(),
            outcome: self.outcome,
            status: self.status,
            first_token_s: first_token_s.map(since),
            client_first_token_s: first_token_s.map(|then_s| then_s - self.received_s),
            kind: match self.share.route {
                Route::Local { .. } => "local",
                Route::PrefillDecode { .. } => "prefill_decode",
            },
            expected_first_token_s: self.share.until_token_s,
            duration_s: since(self.fleet.now_s()),
            output_chunks: self.output_chunks,
            error: self.error.take(),
            prompt_tokens: self.usage.prompt_tokens,
            cached_tokens: self.usage.cached_tokens,
            believed_cached_tokens: self.share.input_tokens - self.share.delta_tokens,
            recomputed_tokens,
            worker: Arc::clone(&self.answering),
        }));
    }
}
