//! The guard that gives back what a decision took from its workers, once, and logs how it ended.

use super::admission::Seat;
use super::admission::hold::Served;
use super::admission::identity::Name;
use super::affinity::Session;
use super::batch::BatchTime;
use super::liveness::Signs;
use super::log::{DecisionRecord, Ended, Event, FinishRecord, unix_now_s};
use super::outcome::{Outcome, Usage};
use super::share::Share;
use super::{Fleet, State};
use crate::model::{Engine, WorkerSpec};
use crate::policy::Route;
use std::sync::{Arc, OnceLock};

/// What a decision noted besides: to be taken back if the request was not run.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Noted {
    /// What is new to the estimate of the answering and of the prefill worker, by name.
    pub prompt: [Option<u64>; 2],
    /// The session, and what was known of it before.
    pub session: Option<(u64, Option<Session>)>,
    /// What the answering worker had done by then.
    pub begun: BatchTime,
}

/// Tells the fleet when a request's prefill worker is done, which is before the first token comes from
/// the other. It may outlive the reservation.
#[derive(Clone)]
pub struct PrefillWatch {
    fleet: Arc<Fleet>,
    share: Share,
    prefilled_s: Arc<OnceLock<f64>>,
}

impl PrefillWatch {
    /// The prefill worker has answered.
    pub fn ended(&self) {
        let now_s = self.fleet.now_s();
        let mut state = self.fleet.state.lock();
        // Once the reservation has ended, nothing of it is left in the books.
        state.end_remote_prefill(&self.share, now_s);
        let _ = self.prefilled_s.set(now_s);
        self.fleet.settle(state);
    }
}

/// By how much the booking for an answer grows, at least, when it is longer than was expected: so that
/// not every token of it needs the fleet's lock.
const MORE_OUTPUT_TOKENS: u64 = 128;

/// A decision's hold on its workers. Dropping it, by whatever path, gives everything back and logs
/// the finish event, once. A drop without [`Reservation::finish`] means that the client left.
pub struct Reservation {
    fleet: Arc<Fleet>,
    decision: Arc<DecisionRecord>,
    session: Option<Name>,
    share: Share,
    seat: Option<Seat>,
    answering: Arc<WorkerSpec>,
    prefill: Option<Arc<WorkerSpec>>,
    begun_s: f64,
    received_s: f64,
    first_token_s: Option<f64>,
    /// What the answering worker had done by then.
    first_token_at: BatchTime,
    /// When the prefill worker was done, once it says so.
    prefilled_s: Arc<OnceLock<f64>>,
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
        decision: Arc<DecisionRecord>,
        share: Share,
        seat: Seat,
        answering: Arc<WorkerSpec>,
        prefill: Option<Arc<WorkerSpec>>,
        signs: [Arc<Signs>; 2],
        begun_s: f64,
    ) -> Self {
        Self {
            fleet,
            decision,
            session: None,
            share,
            seat: Some(seat),
            answering,
            prefill,
            begun_s,
            received_s: begun_s,
            first_token_s: None,
            first_token_at: BatchTime::default(),
            prefilled_s: Arc::default(),
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
    pub(super) fn having(
        mut self,
        noted: Noted,
        session: Option<Name>,
        received_s: Option<f64>,
    ) -> Self {
        self.noted = noted;
        self.session = session;
        self.received_s = received_s.unwrap_or(self.begun_s);
        self
    }

    /// Notes what the engine reported.
    pub fn report(&mut self, mut usage: Usage) {
        if self.prefill.is_some() && self.answering.engine == Engine::Vllm {
            // vLLM (0.26.0) counts what the prefill worker sent with what it held itself.
            usage.cached_tokens = None;
        }
        // No engine has more tokens of a prompt than it may have at all.
        let most = u64::from(u32::MAX);
        let counts = [
            &mut usage.prompt_tokens,
            &mut usage.cached_tokens,
            &mut usage.output_tokens,
        ];
        for count in counts {
            *count = count.filter(|&tokens| tokens <= most);
        }
        self.usage.prompt_tokens = usage.prompt_tokens.or(self.usage.prompt_tokens);
        self.usage.cached_tokens = usage.cached_tokens.or(self.usage.cached_tokens);
        self.usage.output_tokens = usage.output_tokens.or(self.usage.output_tokens);
    }

    /// Where the request is separated: for whoever hears that its prefill worker is done.
    pub fn prefill_watch(&self) -> PrefillWatch {
        PrefillWatch {
            fleet: Arc::clone(&self.fleet),
            share: self.share,
            prefilled_s: Arc::clone(&self.prefilled_s),
        }
    }

    /// The answer is a stream, so that its pieces tell when tokens were made.
    pub fn streams(&mut self) {
        self.is_stream = true;
    }

    pub fn decision_id(&self) -> &str {
        &self.decision.decision_id
    }

    /// The worker whose answer the client gets.
    pub fn answering(&self) -> &Arc<WorkerSpec> {
        &self.answering
    }

    /// The prefill worker, where the request is separated.
    pub fn prefill(&self) -> Option<&Arc<WorkerSpec>> {
        self.prefill.as_ref()
    }

    /// Ids of its workers that are down or suspected to hang. One that does not survive the abort of a
    /// queued request must be down: see [`WorkerSpec::may_abort_queued`].
    pub fn silent_workers(&self) -> Vec<String> {
        let state = self.fleet.state.lock();
        let route = self.share.route;
        let workers = [
            Some((route.answering(), &self.answering)),
            self.prefill.as_ref().map(|spec| (route.prefilling(), spec)),
        ];
        let is_silent = |&(slot, spec): &(usize, &Arc<WorkerSpec>)| {
            let worker = state.workers.get(slot).and_then(Option::as_ref);
            // Requests on one that was removed run to their end, and its slot may be another's by now.
            worker.is_some_and(|worker| {
                let is_silent = match spec.may_abort_queued() {
                    true => worker.is_doubtful(),
                    false => !worker.healthy,
                };
                Arc::ptr_eq(&worker.spec, spec) && !worker.removed && is_silent
            })
        };
        let silent = workers.into_iter().flatten().filter(is_silent);
        silent.map(|(_, spec)| spec.id.clone()).collect()
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
            let prefilled_s = self.prefilled_s.get().copied();
            state.end_prefill(&self.share, told, prefilled_s, now_s);
            if let Some(worker) = state.worker_mut(self.share.route.answering()) {
                self.first_token_at = worker.batch_time;
                worker.liveness.serve(self.share.new_tokens);
            }
            if self.prefill.is_some()
                && let Some(worker) = state.worker_mut(self.share.route.prefilling())
            {
                worker.liveness.serve(self.share.new_tokens);
            }
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
        state.admission.lengthen(seat, more_tokens, site.as_ref());
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

    /// As the engine counts them, else as many as there were pieces; none where the answer came in one
    /// piece and the engine did not say.
    fn output_tokens(&self) -> Option<u64> {
        let chunks = self.is_stream.then_some(self.output_chunks);
        // Of several answers in one stream, the last count is that of one of them.
        let counted = self.usage.output_tokens;
        let counted = counted.filter(|_| !self.is_stream || self.share.answers <= 1);
        counted.or(chunks)
    }

    /// What a whole answer teaches.
    fn learn(&self, state: &mut State, output_tokens: Option<u64>, now_s: f64) {
        let share = &self.share;
        let Some(output_tokens) = output_tokens else {
            return;
        };
        state.learn_output(share, output_tokens);
        if self.is_stream {
            state.learn_decodes(share, &self.first_token_at, output_tokens, now_s);
        } else if !share.lacks_room {
            let prefilled_s = self.prefilled_s.get().copied();
            state.learn_whole(share, self.usage, &self.noted.begun, prefilled_s, now_s);
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
                state.end_prefill(&self.share, None, None, now_s);
                self.take_back(&mut state);
            }
            let output_tokens = self.output_tokens();
            if self.outcome == Outcome::Ok && self.first_token_s.is_some() {
                self.learn(&mut state, output_tokens, now_s);
            }
            state.end_decode(&self.share, now_s);
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
                    state.give_up_estimate(self.share.route.answering());
                }
            }
            if let Some(seat) = self.seat.take() {
                let output_tokens = output_tokens.unwrap_or(seat.output_tokens);
                let site = state.site(seat.slot, now_s);
                let (served, usage) = (self.served(), self.usage);
                let admission = &mut state.admission;
                let ended = admission.end(seat, site.as_ref(), served, output_tokens, usage, now_s);
                recomputed_tokens = ended.recomputed_tokens;
                if let (Some(was_there), Some(worker)) = (
                    ended.was_there,
                    state.worker_mut(self.share.route.answering()),
                ) {
                    worker.compare_events(was_there);
                }
            }
            self.fleet.settle(state);
        }
        let since = |then_s: f64| then_s - self.begun_s;
        // An answer in one piece does not say when its first token was there.
        let first_token_s = self.first_token_s.filter(|_| self.is_stream);
        let duration_s = since(self.fleet.now_s());
        // Set once, for this is dropped once.
        let _ = self.decision.ended.set(Ended {
            outcome: self.outcome,
            first_token_s: first_token_s.map(since),
            duration_s,
            prompt_tokens: self.usage.prompt_tokens,
            cached_tokens: self.usage.cached_tokens,
            recomputed_tokens,
        });
        self.fleet.sink.send(Event::Finish(FinishRecord {
            decision_id: self.decision.decision_id.clone(),
            session_id: self.session.take(),
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
            duration_s,
            output_chunks: self.output_chunks,
            error: self.error.take(),
            prompt_tokens: self.usage.prompt_tokens,
            cached_tokens: self.usage.cached_tokens,
            output_tokens: self.usage.output_tokens,
            believed_cached_tokens: self.share.input_tokens - self.share.delta_tokens,
            recomputed_tokens,
            worker: Arc::clone(&self.answering),
        }));
    }
}
