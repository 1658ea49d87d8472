//! The simulation's loop: events in the order of their virtual times.

use crate::agenda::{Agenda, What};
use crate::clients::{Clients, Due};
use crate::engine::{Emission, Job, Limits, Part, Sglang, Vllm, Worker};
use crate::plan::{Plan, WorkerPlan};
use crate::prompts::{Prompt, Prompts};
use crate::requests::Requests;
use crate::results::{
    Failure, Lines, Phase, PhasesFile, Report, ResultLine, WorkerReport, rounded, thinned,
    write_json,
};
use crate::router::Router;
use decision::fleet::{Admit, Hints, Outcome, Request, Reservation, Ticket, Usage};
use decision::model::Engine;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

/// How often the router looks after those who wait, at least and at most.
const MOST_PUMP_S: f64 = 0.1;
const LEAST_PUMP_S: f64 = 0.001;
/// Tokens of an answer after which the router is told of them, as of pieces of a stream.
const TOKENS_A_PIECE: u64 = 16;
/// Ends the names of requests that only put a prompt into caches, as `replay` has it.
const PRIME_SUFFIX: &str = "~prime";
const BUSY: &str = "no worker can take the request";
/// A request takes its client so long at least. Were a refusal over at once, clients that do not think and
/// are all refused would never let time pass.
const LEAST_S: f64 = 0.001;

/// A request under way.
struct Turn {
    due: Due,
    phase: Phase,
    prompt: Prompt,
    output_tokens: u64,
    best_cached_tokens: u64,
    decision_id: Option<String>,
    reservation: Option<Reservation>,
    /// While it waits for room.
    waits: Option<(Ticket, Request)>,
    worker: Option<usize>,
    /// Has reached its worker.
    submitted: bool,
    /// Where another worker prefills.
    prefill: Option<usize>,
    /// Of a turn that is prefilled elsewhere: tokens of its prompt that were at the worker already,
    /// tokens that have been sent there or wait to be, and what the other found in its cache.
    held_tokens: u64,
    sent_tokens: u64,
    cached_tokens: Option<u64>,
    first_s: Option<f64>,
    tokens: u64,
    unsaid: u64,
    arrivals: Vec<(f64, u64)>,
}

struct Simulation<'a> {
    plan: &'a Plan,
    requests: Arc<Requests>,
    clients: Clients,
    prompts: Prompts,
    router: Router,
    names: Vec<(String, &'a WorkerPlan)>,
    workers: Vec<Box<dyn Worker>>,
    /// When each worker's next step ends, as far as an event for it is under way.
    awaited_s: Vec<Option<f64>>,
    /// When each worker has sent what it is to send to others.
    link_free_s: Vec<f64>,
    agenda: Agenda,
    now_s: f64,
    /// By number; boxed, for nearly all of them are over.
    turns: Vec<Option<Box<Turn>>>,
    /// Requests whose clients have left and that are still queued, by number: worker and reservation.
    staying: HashMap<usize, (usize, Reservation)>,
    window: Option<(f64, f64)>,
    measured_left: usize,
    /// When an event is under way for those who wait at the router.
    pump_s: Option<f64>,
    under_way: usize,
    /// When the last answer so far ended.
    last_ended_s: f64,
    results: Lines,
    done: u64,
    failed: u64,
    told: Vec<Emission>,
}

/// Simulates a plan and writes the run's folder.
///
/// # Errors
/// One line that names the file or field that is wrong.
pub fn run(plan: &Plan, folder: &Path) -> Result<Report, String> {
    std::fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let requests = Arc::new(Requests::from_file(&plan.requests)?);
    let draws = plan.phases.iter().flat_map(|phases| &phases.draws);
    if let Some(draw) = draws.into_iter().find(|d| d.tree >= requests.trees.len()) {
        let (tree, count) = (draw.tree, requests.trees.len());
        return Err(format!(
            "phases.draws: no conversation {tree}; there are {count}"
        ));
    }
    let names: Vec<(String, &WorkerPlan)> = plan
        .workers
        .iter()
        .flat_map(|worker| {
            (0..worker.count).map(move |at| match worker.count {
                1 => (worker.id.clone(), worker),
                _ => (format!("{}-{at}", worker.id), worker),
            })
        })
        .collect();
    let workers: Vec<Box<dyn Worker>> = names
        .iter()
        .map(|(_, worker)| build(worker, requests.block_tokens, plan.router.kv_events))
        .collect();
    // A run that never came to its window has none.
    let _ = std::fs::remove_file(folder.join("phases.json"));
    let decisions = folder.join("decisions.jsonl");
    if plan.output.decisions {
        // The log is appended to, and this is a new run.
        let _ = std::fs::remove_file(&decisions);
    }
    let log = plan.output.decisions.then_some(decisions.as_path());
    let router = Router::new(plan, &names, requests.block_tokens, log)?;
    let mut simulation = Simulation {
        clients: Clients::new(
            Arc::clone(&requests),
            plan.load.clone(),
            plan.phases.clone(),
            plan.seed,
        ),
        prompts: Prompts::new(Arc::clone(&requests), plan.load.splice_outputs),
        router,
        awaited_s: vec![None; workers.len()],
        link_free_s: vec![0.0; workers.len()],
        workers,
        names,
        agenda: Agenda::default(),
        now_s: 0.0,
        turns: Vec::new(),
        staying: HashMap::new(),
        window: plan.phases.is_none().then_some((0.0, f64::INFINITY)),
        measured_left: 0,
        pump_s: None,
        last_ended_s: 0.0,
        under_way: 0,
        results: Lines::create(&folder.join("requests.jsonl"))?,
        done: 0,
        failed: 0,
        told: Vec::new(),
        plan,
        requests,
    };
    let played = simulation.play();
    simulation.router.end_time();
    played?;
    simulation.close(folder)
}

fn build(worker: &WorkerPlan, block_tokens: u64, log_changes: bool) -> Box<dyn Worker> {
    let limits = Limits {
        kv_tokens: worker.kv_tokens,
        host_kv_tokens: worker.host_kv_tokens,
        block_tokens,
        chunk_tokens: worker.chunk_tokens,
        max_prefill_tokens: worker.max_prefill_tokens,
        max_running: worker.max_running,
        eviction: worker.radix_eviction_policy,
        order: worker.schedule_policy,
        mixed: worker.mixed_chunks,
        target_itl_s: worker.target_itl_s,
        prefix_cache: worker.prefix_cache,
        log_changes,
    };
    let calibration = worker.calibration.clone();
    match worker.engine {
        Engine::Sglang => Box::new(Sglang::new(calibration, limits)),
        Engine::Vllm => Box::new(Vllm::new(calibration, limits)),
    }
}

impl Simulation<'_> {
    fn play(&mut self) -> Result<(), String> {
        for due in self.clients.begin() {
            self.agenda.add(due.at_s, What::Due(due));
        }
        if let Some(at_s) = self.clients.next_arrival_s() {
            self.agenda.add(at_s, What::Arrival);
        }
        self.agenda
            .add(self.plan.router.load_interval_s, What::Loads);
        self.open_window();
        while let Some((at_s, what)) = self.agenda.next(|turn| self.turns[turn].is_none()) {
            if self.has_run_out(&what) {
                self.cut_window();
                break;
            }
            if self.is_over(at_s) {
                break;
            }
            assert!(at_s >= self.now_s, "time never goes back");
            self.now_s = at_s;
            self.router.set_time(self.now_s);
            self.happen(what)?;
            self.wake()?;
        }
        self.cancel_rest()
    }

    fn time_out(&mut self, number: usize) -> Result<(), String> {
        if let Some(late) = &self.turns[number] {
            let timeout_s = self.timeout_s(late.due.is_prime);
            let message = format!("no complete answer in {timeout_s} s");
            self.leave(number);
            self.fail(number, Outcome::Timeout, "timeout", message)?;
        }
        Ok(())
    }

    /// A client leaves. Where its request is queued in an engine that would not survive its abort (vLLM
    /// with a host tier) the router keeps it there, and what is reserved for it, until its first token.
    fn leave(&mut self, number: usize) {
        let Some(turn) = &mut self.turns[number] else {
            return;
        };
        let worker = turn.worker.filter(|_| turn.submitted);
        let Some(worker) = worker.filter(|_| turn.first_s.is_none()) else {
            return;
        };
        if self.router.may_abort_queued(worker) {
            return;
        }
        if let Some(reservation) = turn.reservation.take() {
            turn.worker = None;
            self.staying.insert(number, (worker, reservation));
        }
    }

    /// Aborts a request whose client has left, if it stayed.
    fn let_go(&mut self, number: usize) {
        if let Some((worker, reservation)) = self.staying.remove(&number) {
            self.workers[worker].cancel(number, self.now_s);
            reservation.finish(Outcome::ClientDisconnect, Some(200), None);
        }
    }

    /// Once the primes have ended, the window is known.
    fn open_window(&mut self) {
        let Some(phases) = &self.plan.phases else {
            return;
        };
        if self.window.is_none() && self.clients.is_primed() {
            let start_s = self.now_s + phases.warm_up_s;
            self.window = Some((start_s, start_s + phases.measure_s));
        }
    }

    fn is_over(&self, at_s: f64) -> bool {
        match (&self.plan.phases, self.window) {
            (Some(phases), Some((_, end_s))) => {
                at_s > end_s + phases.drain_s || (at_s > end_s && self.measured_left == 0)
            }
            _ => false,
        }
    }

    /// There is nothing left to send: `what` is a report of an idle fleet, and only such are to come.
    fn has_run_out(&self, what: &What) -> bool {
        self.under_way == 0 && self.agenda.nobody_comes() && !what.brings_a_request()
    }

    /// Ends the window with the last answer, as `replay` does where it has no more sessions to send; there
    /// is none where that came before it.
    fn cut_window(&mut self) {
        let ended_s = self.last_ended_s;
        self.window = self.window.and_then(|(start_s, end_s)| {
            let is_begun = ended_s > start_s;
            is_begun.then_some((start_s, end_s.min(ended_s)))
        });
    }

    fn happen(&mut self, what: What) -> Result<(), String> {
        match what {
            What::Due(due) => self.send(due)?,
            What::Arrival => {
                for due in self.clients.arrive(self.now_s) {
                    self.agenda.add(due.at_s, What::Due(due));
                }
                if let Some(at_s) = self.clients.next_arrival_s() {
                    self.agenda.add(at_s, What::Arrival);
                }
            }
            What::AtWorker(turn) => self.submit(turn),
            What::Received(turn) => self.receive(turn),
            What::Step(worker) => {
                if self.awaited_s[worker] == Some(self.now_s) {
                    self.awaited_s[worker] = None;
                    self.step(worker)?;
                }
            }
            What::Changes(worker, changes) => self.router.apply_changes(worker, changes),
            What::Loads => {
                for (number, worker) in self.workers.iter().enumerate() {
                    self.router.report_load(number, worker.occupancy());
                }
                self.agenda
                    .add(self.now_s + self.plan.router.load_interval_s, What::Loads);
            }
            What::Pump => {
                if self.pump_s == Some(self.now_s) {
                    self.pump_s = None;
                    self.router.pump();
                }
            }
            What::Timeout(turn) => self.time_out(turn)?,
        }
        Ok(())
    }

    fn send(&mut self, due: Due) -> Result<(), String> {
        let phase = match self.window {
            _ if due.is_prime => Phase::Prime,
            None => Phase::WarmUp,
            Some((start_s, _)) if self.now_s < start_s => Phase::WarmUp,
            Some((_, end_s)) if self.now_s >= end_s => Phase::Drain,
            Some(_) => Phase::Measure,
        };
        let requests = Arc::clone(&self.requests);
        let planned = &requests.all[due.request];
        let play = self.clients.conversations[due.conversation].play;
        let output_tokens = if due.is_prime {
            1
        } else {
            planned.output_tokens
        };
        let prompt = self.prompts.make(due.request, play, output_tokens);
        let best_cached_tokens = self.prompts.best_cached_tokens(&prompt);
        let is_last = planned.next.is_none();
        let request = Request {
            request_id: request_name(&planned.request_id, play, due.is_prime),
            session_id: Some(session_name(&requests.sessions[planned.session], play)),
            prompt: self
                .router
                .hashes((planned.session, play), is_last, &prompt),
            max_output_tokens: Some(output_tokens),
            stream: true,
            hints: self.hints(due),
            arrived_s: None,
            ..Request::default()
        };
        let number = self.turns.len();
        self.turns.push(Some(Box::new(Turn {
            due,
            phase,
            prompt,
            output_tokens,
            best_cached_tokens,
            decision_id: None,
            reservation: None,
            waits: None,
            worker: None,
            submitted: false,
            prefill: None,
            held_tokens: 0,
            sent_tokens: 0,
            cached_tokens: None,
            first_s: None,
            tokens: 0,
            unsaid: 0,
            arrivals: Vec::new(),
        })));
        self.under_way += 1;
        self.measured_left += usize::from(phase == Phase::Measure);
        let patient_until_s = self.now_s + self.timeout_s(due.is_prime);
        self.agenda
            .add_timeout(patient_until_s, number, due.is_prime);
        let answer = self.router.admit(number, &request);
        self.take(number, answer, request)
    }

    /// How long a client waits for a complete answer.
    fn timeout_s(&self, is_prime: bool) -> f64 {
        let phases = self.plan.phases.as_ref().filter(|_| is_prime);
        let of_primes_s = phases.and_then(|phases| phases.prime_timeout_s);
        let timeout_s = self.plan.load.timeout_s;
        timeout_s.min(of_primes_s.unwrap_or(f64::INFINITY))
    }

    /// What a client says of its session in headers, where clients do so.
    fn hints(&self, due: Due) -> Hints {
        let planned = &self.requests.all[due.request];
        let next = planned.next.map(|next| &self.requests.all[next]);
        let load = &self.plan.load;
        let think_s = next.map(|next| self.clients.think_s(next));
        Hints {
            ends: load.end_hints && next.is_none(),
            idle_s: think_s.filter(|_| load.idle_hints),
            parent_session: None,
        }
    }

    /// Takes the router's answer for a request.
    fn take(&mut self, number: usize, answer: Admit, request: Request) -> Result<(), String> {
        match answer {
            Admit::Placed(reservation) => self.placed(number, reservation),
            Admit::Waiting(ticket) => {
                if let Some(turn) = &mut self.turns[number] {
                    turn.waits = Some((ticket, request));
                }
            }
            Admit::Refused(refused) => {
                let message = format!("{BUSY}: {refused:?}");
                self.fail(number, Outcome::Rejected, "server_error", message)?;
            }
        }
        Ok(())
    }

    /// Places those that were let in, and sees to it that the others' time is watched.
    fn wake(&mut self) -> Result<(), String> {
        loop {
            let woken = self.router.take_woken();
            if woken.is_empty() {
                break;
            }
            for number in woken {
                let waits = self.turns[number]
                    .as_mut()
                    .and_then(|turn| turn.waits.take());
                if let Some((ticket, request)) = waits {
                    let answer = self.router.place_ticket(ticket, &request);
                    self.take(number, answer, request)?;
                }
            }
        }
        if let Some(at_s) = self.router.next_pump_s() {
            let at_s = at_s
                .max(self.now_s + LEAST_PUMP_S)
                .min(self.now_s + MOST_PUMP_S);
            if self.pump_s.is_none_or(|pump_s| at_s < pump_s) {
                self.pump_s = Some(at_s);
                self.agenda.add(at_s, What::Pump);
            }
        }
        Ok(())
    }

    fn placed(&mut self, number: usize, mut reservation: Reservation) {
        let worker = self.router.worker_of(&reservation);
        let prefill = self.router.prefill_of(&reservation);
        reservation.streams();
        if let Some(turn) = &mut self.turns[number] {
            turn.decision_id = Some(reservation.decision_id().to_owned());
            turn.reservation = Some(reservation);
            turn.worker = Some(worker);
            turn.prefill = prefill;
        }
        let request_s = self.names[worker].1.calibration.request_s;
        self.agenda
            .add(self.now_s + request_s, What::AtWorker(number));
    }

    fn submit(&mut self, number: usize) {
        let Some(turn) = &mut self.turns[number] else {
            return;
        };
        let Some(worker) = turn.worker else { return };
        turn.submitted = true;
        let part = match turn.prefill {
            Some(_) => Part::Decode,
            None => Part::Whole,
        };
        let output_tokens = turn.output_tokens;
        self.submit_part(number, worker, part, output_tokens);
    }

    fn submit_part(&mut self, number: usize, worker: usize, part: Part, output_tokens: u64) {
        let Some(turn) = &self.turns[number] else {
            return;
        };
        let job = Job {
            id: number,
            stream: Arc::clone(&turn.prompt.stream),
            block_tokens: self.requests.block_tokens,
            input_tokens: turn.prompt.input_tokens,
            output_tokens,
            part,
        };
        self.workers[worker].submit(job, self.now_s);
        self.await_step(worker);
    }

    /// There is room for a turn's prompt where it will be answered: now it is prefilled.
    fn reserved(&mut self, number: usize, held_tokens: u64) {
        let Some(turn) = &mut self.turns[number] else {
            return;
        };
        turn.held_tokens = held_tokens;
        if let Some(prefill) = turn.prefill {
            self.submit_part(number, prefill, Part::Prefill, 1);
        }
    }

    /// The first `tokens` of a turn's prompt are there: what the other worker lacks of them is sent
    /// behind what the same worker is sending already.
    fn computed(&mut self, number: usize, worker: usize, tokens: u64) {
        let Some(turn) = &mut self.turns[number] else {
            return;
        };
        let from = turn.sent_tokens.max(turn.held_tokens);
        turn.sent_tokens = from.max(tokens);
        let calibration = &self.names[worker].1.calibration;
        let takes_s = (turn.sent_tokens - from) as f64 / calibration.transfer_tokens_per_s;
        let link_free_s = &mut self.link_free_s[worker];
        *link_free_s = link_free_s.max(self.now_s) + takes_s;
    }

    fn prefilled(&mut self, number: usize, worker: usize, cached_tokens: u64) {
        let Some(turn) = &mut self.turns[number] else {
            return;
        };
        turn.cached_tokens = Some(cached_tokens);
        let overhead_s = self.names[worker].1.calibration.transfer_overhead_s;
        let at_s = self.link_free_s[worker].max(self.now_s) + overhead_s;
        self.agenda.add(at_s, What::Received(number));
    }

    fn receive(&mut self, number: usize) {
        let Some(turn) = &self.turns[number] else {
            return;
        };
        let (worker, prefill) = (turn.worker, turn.prefill);
        if let Some(prefill) = prefill {
            self.workers[prefill].sent(number, self.now_s);
            self.await_step(prefill);
        }
        if let Some(worker) = worker {
            self.workers[worker].received(number, self.now_s);
            self.await_step(worker);
        }
    }

    /// Makes an event of a worker's next step, unless there is one.
    fn await_step(&mut self, worker: usize) {
        let next_s = self.workers[worker].next_s();
        if self.awaited_s[worker].is_none()
            && let Some(at_s) = next_s
        {
            self.awaited_s[worker] = Some(at_s);
            self.agenda.add(at_s, What::Step(worker));
        }
        let mut changes = Vec::new();
        self.workers[worker].take_changes(&mut changes);
        if !changes.is_empty() {
            let at_s = self.now_s + self.plan.router.kv_event_s;
            self.agenda.add(at_s, What::Changes(worker, changes));
        }
    }

    fn step(&mut self, worker: usize) -> Result<(), String> {
        let mut told = std::mem::take(&mut self.told);
        self.workers[worker].advance(&mut told);
        let seen_s = self.now_s + self.names[worker].1.calibration.token_s;
        for emission in told.drain(..) {
            match emission {
                Emission::Token { job } => self.token(job, seen_s),
                Emission::Finished { job, cached_tokens } => {
                    self.finish(job, cached_tokens, seen_s)?;
                }
                Emission::Reserved { job, held_tokens } => self.reserved(job, held_tokens),
                Emission::Computed { job, tokens } => self.computed(job, worker, tokens),
                Emission::Prefilled { job, cached_tokens } => {
                    self.prefilled(job, worker, cached_tokens);
                }
                Emission::Rejected { job } => {
                    let message = "the request is longer than the worker's KV".to_owned();
                    self.fail(job, Outcome::WorkerError, "client_error", message)?;
                }
            }
        }
        self.told = told;
        self.await_step(worker);
        Ok(())
    }

    fn token(&mut self, number: usize, seen_s: f64) {
        let Some(turn) = &mut self.turns[number] else {
            self.let_go(number);
            return;
        };
        turn.tokens += 1;
        turn.unsaid += 1;
        if turn.first_s.is_none() {
            turn.first_s = Some(seen_s);
        }
        turn.arrivals.push((rounded(seen_s), turn.tokens));
        if turn.tokens == 1 || turn.unsaid == TOKENS_A_PIECE {
            let unsaid = std::mem::take(&mut turn.unsaid);
            if let Some(reservation) = &mut turn.reservation {
                reservation.output(unsaid);
            }
        }
    }

    fn finish(&mut self, number: usize, cached_tokens: u64, seen_s: f64) -> Result<(), String> {
        let Some(mut turn) = self.turns[number].take() else {
            return Ok(());
        };
        let cached_tokens = turn.cached_tokens.unwrap_or(cached_tokens);
        if let Some(mut reservation) = turn.reservation.take() {
            reservation.report(Usage {
                prompt_tokens: Some(turn.prompt.input_tokens),
                cached_tokens: Some(cached_tokens),
                output_tokens: None,
            });
            reservation.output(turn.unsaid);
            reservation.finish(Outcome::Ok, Some(200), None);
        }
        self.prompts.answered(&turn.prompt);
        self.end(turn, seen_s, Some(cached_tokens), Some(200), None)
    }

    fn fail(
        &mut self,
        number: usize,
        outcome: Outcome,
        kind: &'static str,
        message: String,
    ) -> Result<(), String> {
        let Some(mut turn) = self.turns[number].take() else {
            return Ok(());
        };
        for worker in [turn.worker, turn.prefill].into_iter().flatten() {
            self.workers[worker].cancel(number, self.now_s);
            self.await_step(worker);
        }
        let status = match outcome {
            Outcome::Rejected => Some(503),
            Outcome::WorkerError => Some(400),
            _ => turn.first_s.map(|_| 200),
        };
        if let Some(reservation) = turn.reservation.take() {
            reservation.finish(outcome, status, Some(message.clone()));
        }
        self.end(
            turn,
            self.now_s,
            None,
            status,
            Some(Failure { kind, message }),
        )
    }

    /// Writes a request's line and makes what waited for it due.
    fn end(
        &mut self,
        mut turn: Box<Turn>,
        ended_s: f64,
        cached_tokens: Option<u64>,
        status: Option<u16>,
        error: Option<Failure>,
    ) -> Result<(), String> {
        let ended_s = ended_s.max(turn.due.at_s + LEAST_S);
        self.done += 1;
        self.failed += u64::from(error.is_some());
        self.last_ended_s = self.last_ended_s.max(ended_s);
        self.under_way -= 1;
        self.measured_left -= usize::from(turn.phase == Phase::Measure);
        if !self.plan.output.all_arrivals {
            turn.arrivals = thinned(&turn.arrivals);
        }
        let requests = Arc::clone(&self.requests);
        let planned = &requests.all[turn.due.request];
        let play = self.clients.conversations[turn.due.conversation].play;
        let line = ResultLine {
            request_id: &request_name(&planned.request_id, play, turn.due.is_prime),
            session_id: &session_name(&requests.sessions[planned.session], play),
            turn: planned.turn,
            input_length: planned.input_tokens,
            output_length: turn.output_tokens,
            trace_s: planned.trace_s,
            phase: turn.phase,
            play,
            scheduled_s: rounded(turn.due.at_s),
            sent_s: rounded(turn.due.at_s),
            first_token_s: turn.first_s.map(rounded),
            finished_s: rounded(ended_s),
            arrivals: &turn.arrivals,
            output_tokens: turn.tokens,
            prompt_tokens: error.is_none().then_some(planned.input_tokens),
            cached_tokens,
            best_cached_tokens: turn.best_cached_tokens,
            decision_id: turn.decision_id.as_deref(),
            status,
            error,
        };
        self.results.write(&line)?;
        for due in self.clients.ended(ended_s, turn.due) {
            self.agenda.add(due.at_s.max(self.now_s), What::Due(due));
        }
        self.open_window();
        Ok(())
    }

    /// What is left when the run ends was in flight.
    fn cancel_rest(&mut self) -> Result<(), String> {
        for number in 0..self.turns.len() {
            let message = "the run ended".to_owned();
            self.fail(number, Outcome::ClientDisconnect, "cancelled", message)?;
            self.let_go(number);
        }
        // What clients have left ends with the step that it runs in.
        let mut told = Vec::new();
        for worker in &mut self.workers {
            while worker.next_s().is_some() {
                worker.advance(&mut told);
            }
        }
        Ok(())
    }

    fn close(self, folder: &Path) -> Result<Report, String> {
        self.results.close()?;
        if let (Some(phases), Some((start_s, end_s))) = (&self.plan.phases, self.window) {
            let file = PhasesFile {
                start: phases.start,
                window_start_s: rounded(start_s),
                window_end_s: rounded(end_s),
                warm_up_s: phases.warm_up_s,
                measure_s: phases.measure_s,
                recycle: phases.recycle,
                max_think_s: self.plan.load.max_think_s,
            };
            write_json(&folder.join("phases.json"), &file)?;
        }
        let mut calibrations: Vec<String> = self
            .plan
            .workers
            .iter()
            .map(|worker| worker.calibration.name.clone())
            .collect();
        calibrations.dedup();
        let workers = self
            .workers
            .iter()
            .zip(&self.names)
            .map(|(worker, (id, _))| {
                let (device, host) = worker.cached();
                WorkerReport {
                    id: id.clone(),
                    counters: worker.counters(),
                    cache_blocks: worker.cache_totals(),
                    used_tokens_now: worker.occupancy().used_tokens,
                    cached_tokens_now: device,
                    host_tokens_now: host,
                }
            });
        let report = Report {
            simulated: true,
            calibrations,
            seed: self.plan.seed,
            end_s: rounded(self.now_s),
            requests: self.done,
            failed: self.failed,
            block_tokens: self.requests.block_tokens,
            workers: workers.collect(),
            router_is_idle: self.router.is_idle(),
        };
        write_json(&folder.join("simulation.json"), &report)?;
        Ok(report)
    }
}

/// The name of a session in its `play`-th play.
fn session_name(session: &str, play: u32) -> String {
    match play {
        0 => session.to_owned(),
        play => format!("{session}#{play}"),
    }
}

/// The name of a request of a session's `play`-th play, as `replay` gives it.
fn request_name(request: &str, play: u32, is_prime: bool) -> String {
    let name = session_name(request, play);
    if is_prime { name + PRIME_SUFFIX } else { name }
}
