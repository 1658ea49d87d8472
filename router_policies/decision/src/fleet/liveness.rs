//! Whether a worker that accepts requests still works on them.
//!
//! A process whose scheduler or GPU hangs goes on accepting connections, and may go on answering its health
//! check and reporting its load. So a worker is suspected on evidence that its scheduler stands still while
//! it has something to do, never because it is slower than somebody assumed. Signs of life are tokens, a
//! newer time of SGLang's scheduler in a load report, and counters of vLLM that move. Where none comes:
//!
//! - a scheduler that reports its own time stands still where that time does, once it has served something:
//!   until then it may compile, for minutes in which its health check hangs too, and only one that fails at once
//!   tells;
//! - any other where the health check hangs or fails as well;
//! - one whose health check answers is waited for: many times as long as this worker has ever stood still
//!   and gone on, and for minutes where it has not served anything yet, for it may compile. Counters of vLLM
//!   that stand still tell sooner, where they have been seen to move with each piece of a prefill, or where no
//!   prompt is longer than those that it has worked off.
//!
//! A suspected worker gets nothing new while another worker can serve, until it gives a sign again. It was
//! wrongly suspected then, and has twice the time from there on, until many answers have begun at once.

use super::{Fleet, State, Which};
use crate::policy::WorkerFacts;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A worker whose health check does not answer, or whose counters would have moved, has so many times what
/// was predicted, or what it has needed.
const TIMES_SHOWN: f64 = 2.0;
/// Another has so many times, and this many times what a scheduler's own time has.
const TIMES_WELL: f64 = 4.0;
const PATIENCE_WELL: f64 = 6.0;
/// The same, where its counters would have moved.
const PATIENCE_COUNTED: f64 = 1.5;
/// A prompt of so many tokens is short for everyone.
const SHORT_TOKENS: u64 = 1_000;
/// A health check that fails sooner is no scheduler's that is busy: SGLang's waits for the scheduler.
const LATE_S: f64 = 5.0;
/// One that has served nothing yet may compile for as long.
const FIRST_ANSWER_S: f64 = 300.0;
/// Predictions beyond this are not waited for.
const MAX_PREDICTED_S: f64 = 60.0;
/// A worker that was waited for in vain is tried again after so long.
const RETRIAL_S: f64 = 10.0;
/// False alarms double a worker's patience up to this.
const MAX_CAUTION: f64 = 8.0;
/// What a false alarm, or a long standstill, has taught goes with every answer that begins.
const FORGETTING: f64 = 0.98;

/// When a worker last showed that it runs. Shared with its requests, which note every token.
#[derive(Debug, Default)]
pub(crate) struct Signs(AtomicU64);

impl Signs {
    pub fn note(&self, now_s: f64) {
        self.0.fetch_max((now_s * 1e6) as u64, Ordering::Relaxed);
    }

    fn last_s(&self) -> f64 {
        self.0.load(Ordering::Relaxed) as f64 / 1e6
    }
}

/// What shows that a scheduler stands still.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Evidence {
    /// Its own time does.
    Clock,
    /// Its health check does not answer, nor comes anything else.
    Health,
    /// It has taken many times as long as ever.
    Patience,
}

#[derive(Clone, Copy, Debug)]
struct Suspicion {
    since_s: f64,
    by: Evidence,
}

/// What a load report says of the scheduler's life.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pulse {
    /// The scheduler's own time, as of the report.
    pub clock_s: Option<f64>,
    /// Tokens that the engine has worked off since it started, and requests that run and wait in it.
    pub progress: Option<(u64, u32, u32)>,
    /// Its KV in use, in millionths: it moves with each piece of a prefill.
    pub kv_used: Option<u64>,
}

/// What one worker owes and when it was last heard of.
#[derive(Debug)]
pub(crate) struct Liveness {
    signs: Arc<Signs>,
    /// As of the last judgement.
    seen_s: f64,
    busy_since_s: Option<f64>,
    /// Streamed requests here whose first token has not come.
    owed: u32,
    /// Lengths of the prompts here of which no token has come, and how many there are of each.
    prompts: BTreeMap<u64, u32>,
    /// The longest that was predicted of the first tokens since it was idle.
    predicted_s: f64,
    /// None where it reports no load.
    last_report_s: Option<f64>,
    pulse: Pulse,
    /// When the health check was asked that is not answered yet, the first of those that failed, and when
    /// the last one came that was good.
    asked_s: Option<f64>,
    failing_s: Option<f64>,
    fails_at_once: bool,
    well_s: f64,
    has_served: bool,
    /// The longest that it has stood still, busy, and gone on.
    shown_s: f64,
    /// The most tokens of a prompt that it has computed.
    shown_tokens: u64,
    /// Its KV in use has moved where nothing else has: a prefill goes in pieces, and each shows.
    shows_pieces: bool,
    caution: f64,
    suspicion: Option<Suspicion>,
}

impl Default for Liveness {
    fn default() -> Self {
        Self {
            signs: Arc::default(),
            seen_s: 0.0,
            busy_since_s: None,
            owed: 0,
            prompts: BTreeMap::new(),
            predicted_s: 0.0,
            last_report_s: None,
            pulse: Pulse::default(),
            asked_s: None,
            failing_s: None,
            fails_at_once: false,
            well_s: 0.0,
            has_served: false,
            shown_s: 0.0,
            shown_tokens: 0,
            shows_pieces: false,
            caution: 1.0,
            suspicion: None,
        }
    }
}

impl Liveness {
    pub fn signs(&self) -> Arc<Signs> {
        Arc::clone(&self.signs)
    }

    pub fn is_suspect(&self) -> bool {
        self.suspicion.is_some()
    }

    /// A request with so many tokens was placed whose first token is predicted to take `until_token_s`.
    pub fn enter(&mut self, now_s: f64, tokens: u64, until_token_s: f64, is_streamed: bool) {
        self.busy_since_s.get_or_insert(now_s);
        self.owed += u32::from(is_streamed);
        *self.prompts.entry(tokens).or_default() += 1;
        let predicted_s = until_token_s.clamp(0.0, MAX_PREDICTED_S);
        self.predicted_s = self.predicted_s.max(predicted_s);
    }

    /// The first token of a request came, or it ended without one.
    pub fn settle(&mut self, tokens: u64, is_streamed: bool) {
        self.owed -= u32::from(is_streamed);
        if let Entry::Occupied(mut count) = self.prompts.entry(tokens) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }

    /// An answer has begun, for which so many tokens were computed.
    pub fn serve(&mut self, new_tokens: u64) {
        self.has_served = true;
        self.shown_tokens = self.shown_tokens.max(new_tokens);
        self.shown_s *= FORGETTING;
        self.caution = (self.caution * FORGETTING).max(1.0);
    }

    /// The engine reported its load. That alone is no sign: a process before the scheduler may answer.
    pub fn report(&mut self, now_s: f64, pulse: Pulse) {
        self.last_report_s = Some(now_s);
        let has_moved = |before: bool, now: bool| before && now;
        let clock_moved = has_moved(pulse.clock_s.is_some(), pulse.clock_s != self.pulse.clock_s);
        let counters_moved = has_moved(
            pulse.progress.is_some(),
            pulse.progress != self.pulse.progress,
        );
        let kv_moved = has_moved(pulse.kv_used.is_some(), pulse.kv_used != self.pulse.kv_used);
        let is_told = self.pulse.progress.is_some() && self.pulse.kv_used.is_some();
        self.shows_pieces |= is_told && kv_moved && !counters_moved;
        self.pulse = pulse;
        if clock_moved || counters_moved || kv_moved {
            self.signs.note(now_s);
        }
    }

    /// Its health check is asked.
    pub fn ask(&mut self, now_s: f64) {
        self.asked_s = Some(now_s);
    }

    /// And has been answered, or given up.
    pub fn answer(&mut self, now_s: f64, is_good: bool) {
        let asked_s = self.asked_s.take().unwrap_or(now_s);
        self.fails_at_once = !is_good && now_s - asked_s < LATE_S;
        if is_good {
            self.failing_s = None;
            self.well_s = now_s;
        } else {
            self.failing_s.get_or_insert(asked_s);
        }
    }

    /// The worker came up: what was held against it, and what it has shown, is forgotten.
    pub fn renew(&mut self, now_s: f64) {
        self.signs.note(now_s);
        *self = Self {
            signs: Arc::clone(&self.signs),
            seen_s: now_s,
            busy_since_s: self.busy_since_s.map(|_| now_s),
            owed: self.owed,
            prompts: std::mem::take(&mut self.prompts),
            predicted_s: self.predicted_s,
            well_s: now_s,
            ..Self::default()
        };
    }

    /// Whether it has something to do and has given no sign for so long.
    pub fn is_quiet(&self, now_s: f64, after_s: f64) -> bool {
        self.busy_since_s
            .is_some_and(|since_s| now_s - since_s.max(self.signs.last_s()) > after_s)
    }

    /// Whether it has given a sign since then, busy.
    pub fn has_moved_since(&self, then_s: f64) -> bool {
        self.busy_since_s.is_some() && self.signs.last_s() > then_s
    }

    /// Whether it has begun on its first requests and may be compiling for them: its process reports, with the
    /// scheduler's time, and nothing says that it is more than busy.
    pub fn may_compile(&self, now_s: f64, reports_after_s: f64) -> bool {
        let begun_s = self.busy_since_s.map_or(0.0, |since_s| now_s - since_s);
        let reports = self
            .last_report_s
            .is_some_and(|then_s| now_s - then_s <= reports_after_s);
        !self.has_served
            && !self.fails_at_once
            && reports
            && self.pulse.clock_s.is_some()
            && begun_s <= FIRST_ANSWER_S
    }

    /// How long its health check has not answered, or failed.
    fn unwell_s(&self, now_s: f64) -> f64 {
        let since_s = self.failing_s.or(self.asked_s);
        since_s.map_or(0.0, |since_s| now_s - since_s)
    }

    /// Takes note of the signs since the last time, of a worker with so many requests.
    fn watch(&mut self, now_s: f64, requests: u32) {
        let last_s = self.signs.last_s();
        if let Some(since_s) = self.busy_since_s
            && last_s > self.seen_s
        {
            let stood_s = last_s - self.seen_s.max(since_s);
            self.shown_s = self.shown_s.max(stood_s);
        }
        self.seen_s = last_s;
        if requests == 0 {
            self.busy_since_s = None;
            self.predicted_s = 0.0;
        } else {
            self.busy_since_s.get_or_insert(now_s);
        }
    }

    /// Judges a worker with so many requests anew; returns for how long it has been silent where it becomes
    /// suspect now.
    fn judge(
        &mut self,
        now_s: f64,
        requests: u32,
        after_s: f64,
        reports_after_s: f64,
    ) -> Option<f64> {
        self.watch(now_s, requests);
        if let Some(Suspicion { since_s, by }) = self.suspicion {
            let is_false = self.seen_s > since_s || by == Evidence::Health && self.well_s > since_s;
            let is_retrial =
                by == Evidence::Patience && requests == 0 && now_s - since_s > RETRIAL_S;
            if is_false {
                self.caution = (2.0 * self.caution).min(MAX_CAUTION);
            }
            if is_false || is_retrial {
                self.suspicion = None;
            }
            return None;
        }
        let is_busy = self.busy_since_s.is_some();
        let still_s = now_s - self.seen_s.max(self.busy_since_s.unwrap_or(now_s));
        let unreported_s = self.last_report_s.map(|then_s| now_s - then_s);
        let reports = unreported_s.is_some_and(|seconds| seconds <= reports_after_s);
        let is_unwell = self.unwell_s(now_s) > after_s;
        let least_s = self.caution * after_s;
        let known_s = self.shown_s.max(self.predicted_s);
        let is_timed = reports && self.pulse.clock_s.is_some();
        let is_counted = reports && self.pulse.progress.is_some();
        // Without either nothing tells a long answer in one piece from one that does not come.
        let owes = self.owed > 0 || (is_busy && (is_timed || is_counted));
        let may_compile = self.may_compile(now_s, reports_after_s);
        let waits = may_compile || !self.has_served && !is_unwell;
        let (by, silent_s) = if is_timed && !waits && still_s > least_s {
            (Evidence::Clock, still_s)
        } else if is_unwell
            && is_busy
            && !may_compile
            && still_s > least_s.max(TIMES_SHOWN * known_s)
        {
            (Evidence::Health, still_s)
        } else if is_unwell && !reports && self.last_report_s.is_some() && !is_busy {
            (Evidence::Health, unreported_s.unwrap_or_default())
        } else if !is_unwell && owes && still_s > self.patience_s(after_s, is_counted) {
            (Evidence::Patience, still_s)
        } else {
            return None;
        };
        self.suspicion = Some(Suspicion { since_s: now_s, by });
        Some(silent_s)
    }

    /// How long a worker whose health check answers may stand still.
    fn patience_s(&self, after_s: f64, is_counted: bool) -> f64 {
        let longest = self
            .prompts
            .last_key_value()
            .map_or(0, |(&tokens, _)| tokens);
        let is_short = longest <= self.shown_tokens.max(SHORT_TOKENS);
        let (least, times) = match is_counted && (self.shows_pieces || is_short) {
            true => (PATIENCE_COUNTED, TIMES_SHOWN),
            false => (PATIENCE_WELL, TIMES_WELL),
        };
        let known_s = match self.has_served {
            true => times * self.shown_s.max(self.predicted_s),
            false => FIRST_ANSWER_S,
        };
        self.caution * known_s.max(least * after_s)
    }
}

impl State {
    /// Signs of the workers in these slots.
    pub(super) fn signs<const N: usize>(&self, slots: [usize; N]) -> [Arc<Signs>; N] {
        slots.map(|slot| {
            let worker = self.workers.get(slot).and_then(Option::as_ref);
            worker
                .map(|worker| worker.liveness.signs())
                .unwrap_or_default()
        })
    }

    /// Where all workers of an ability are suspected, none is passed over for it, and where all rest after
    /// failures, none of those does: some of them must be tried, and a wrong suspicion, or a few requests
    /// that break connections, must not close the router.
    pub(super) fn pardon(&mut self, exclude: &[String], now_s: f64) {
        let abilities: [fn(&WorkerFacts) -> bool; 3] = [
            |facts| facts.serves_local,
            |facts| facts.serves_prefill,
            |facts| facts.serves_decode,
        ];
        let mut had = [false; 3];
        for facts in &self.facts {
            had = std::array::from_fn(|at| had[at] || abilities[at](facts));
        }
        let had = abilities.into_iter().zip(had).filter(|(_, had)| *had);
        for (ability, _) in had {
            for rests_count in [true, false] {
                let facts = &mut self.facts;
                if facts.iter().any(|facts| facts.routable && ability(facts)) {
                    break;
                }
                for (facts, worker) in facts.iter_mut().zip(self.workers.iter()) {
                    if let Some(worker) = worker
                        && ability(facts)
                    {
                        facts.routable = match rests_count {
                            true => worker.may_get_requests(exclude, now_s),
                            false => worker.is_up(exclude),
                        };
                    }
                }
            }
        }
    }
}

impl Fleet {
    /// Looks for workers that stand still for `after_s`, or longer where there is reason to wait; load
    /// reports are late after `reports_after_s`. True where any worker is suspected or down.
    pub fn find_silent(&self, after_s: f64, reports_after_s: f64) -> bool {
        let now_s = self.now_s();
        let mut state = self.state.lock();
        let mut found = false;
        for worker in state.workers.iter_mut().flatten() {
            if worker.removed {
                continue;
            }
            if !worker.healthy {
                found = true;
                continue;
            }
            let requests = worker.load.requests;
            let silent_s = worker
                .liveness
                .judge(now_s, requests, after_s, reports_after_s);
            if let Some(silent_s) = silent_s {
                ::log::warn!(
                    "worker {} is suspected to hang: no sign of life for {silent_s:.1} s; it gets \
                     nothing new until it gives one",
                    worker.spec.id
                );
            }
            found |= worker.liveness.is_suspect();
        }
        found
    }

    /// The worker's health check is asked, or `is_good` says how it was answered.
    pub fn note_check<'a>(&self, which: impl Into<Which<'a>>, is_good: Option<bool>) {
        let now_s = self.now_s();
        self.with_worker(which, |worker| match is_good {
            None => worker.liveness.ask(now_s),
            Some(is_good) => worker.liveness.answer(now_s, is_good),
        });
    }

    /// Whether the worker has something to do and has given no sign of life for so long.
    pub fn is_quiet<'a>(&self, which: impl Into<Which<'a>>, after_s: f64) -> bool {
        let now_s = self.now_s();
        self.with_worker(which, |worker| worker.liveness.is_quiet(now_s, after_s))
            .unwrap_or_default()
    }

    /// Whether the worker has something to do that keeps its health check waiting: it has given a sign of life in
    /// the last `seconds`, or may be compiling.
    pub fn is_at_work<'a>(&self, which: impl Into<Which<'a>>, seconds: f64) -> bool {
        let now_s = self.now_s();
        self.with_worker(which, |worker| {
            let liveness = &worker.liveness;
            liveness.has_moved_since(now_s - seconds) || liveness.may_compile(now_s, seconds)
        })
        .unwrap_or_default()
    }

    /// Whether nothing should be expected of the worker: it is down, or suspected to hang.
    pub fn is_doubtful<'a>(&self, which: impl Into<Which<'a>>) -> bool {
        self.with_worker(which, |worker| worker.is_doubtful())
            .unwrap_or_default()
    }

    /// What the workers are up to, in one line: what an operator looks for where no request can be
    /// placed.
    pub fn state_of_workers(&self) -> String {
        const NAMED: usize = 8;
        let now_s = self.now_s();
        let state = self.state.lock();
        let workers = state.workers.iter().flatten().filter(|w| !w.removed);
        let mut lines: Vec<String> = workers
            .map(|worker| {
                let what = if !worker.healthy {
                    "is down"
                } else if worker.draining {
                    "is draining"
                } else if !worker.circuit.allows(now_s) {
                    "rests after failures"
                } else {
                    "is up"
                };
                format!("worker {} {what}", worker.spec.id)
            })
            .collect();
        if lines.is_empty() {
            return "there is none".to_owned();
        }
        let more = lines.len().saturating_sub(NAMED);
        lines.truncate(NAMED);
        if more > 0 {
            lines.push(format!("{more} more"));
        }
        lines.join(", ")
    }

    /// Whether the policy could place a request now on workers that are not suspected, `exclude` aside.
    pub fn could_place_elsewhere(&self, exclude: &[String]) -> bool {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let now_s = self.now_s();
        state.fill_facts(exclude, now_s);
        for (facts, worker) in state.facts.iter_mut().zip(state.workers.iter()) {
            facts.routable &= worker
                .as_ref()
                .is_some_and(|worker| !worker.liveness.is_suspect());
        }
        self.would_place(state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A worker with a streamed request since 0 s, and what is judged of it every quarter of a second until
    /// `end_s`: when it was suspected, if at all. `each` says what comes meanwhile.
    fn suspected_s(
        liveness: &mut Liveness,
        end_s: f64,
        mut each: impl FnMut(&mut Liveness, f64),
    ) -> Option<f64> {
        owing_s(liveness, 50_000, end_s, &mut each)
    }

    /// The same, of a request with so many tokens.
    fn owing_s(
        liveness: &mut Liveness,
        tokens: u64,
        end_s: f64,
        mut each: impl FnMut(&mut Liveness, f64),
    ) -> Option<f64> {
        liveness.enter(0.0, tokens, 0.1, true);
        for quarter in 1..=(4.0 * end_s) as u32 {
            let now_s = f64::from(quarter) / 4.0;
            each(liveness, now_s);
            if liveness.judge(now_s, 1, 5.0, 5.0).is_some() {
                return Some(now_s);
            }
        }
        None
    }

    fn served() -> Liveness {
        let mut liveness = Liveness::default();
        liveness.serve(1_500);
        liveness
    }

    fn report(clock_s: Option<f64>, tokens: Option<u64>) -> Pulse {
        Pulse {
            clock_s,
            progress: tokens.map(|tokens| (tokens, 1, 0)),
            kv_used: None,
        }
    }

    fn well(liveness: &mut Liveness, now_s: f64) {
        liveness.ask(now_s);
        liveness.answer(now_s, true);
    }

    #[test]
    fn a_scheduler_whose_own_time_stands_still_is_suspected_whatever_health_says() {
        for (mut liveness, is_well) in [(Liveness::default(), false), (served(), true)] {
            let stood = suspected_s(&mut liveness, 60.0, |liveness, now_s| {
                liveness.ask(now_s);
                liveness.answer(now_s, is_well);
                liveness.report(now_s, report(Some(1.0), None));
            });
            assert!(stood.is_some_and(|now_s| now_s < 6.0), "{stood:?}");
            // Reports alone do not end it; a newer time does.
            liveness.report(61.0, report(Some(1.0), None));
            well(&mut liveness, 61.0);
            liveness.judge(80.0, 0, 5.0, 5.0);
            assert!(liveness.is_suspect());
            liveness.report(81.0, report(Some(2.0), None));
            liveness.judge(81.0, 0, 5.0, 5.0);
            assert!(!liveness.is_suspect());
        }
    }

    #[test]
    fn a_scheduler_whose_time_goes_on_is_waited_for_though_its_health_check_hangs() {
        let mut liveness = served();
        liveness.ask(0.0);
        let stood = suspected_s(&mut liveness, 1_000.0, |liveness, now_s| {
            liveness.report(now_s, report(Some(now_s), None));
        });
        assert_eq!(stood, None);
    }

    #[test]
    fn nothing_owed_is_nothing_late() {
        let mut liveness = Liveness::default();
        for second in 1..1_000 {
            let now_s = f64::from(second);
            liveness.report(now_s, report(Some(1.0), Some(1)));
            assert_eq!(liveness.judge(now_s, 0, 5.0, 5.0), None);
        }
    }

    #[test]
    fn without_a_schedulers_time_a_health_check_that_hangs_or_fails_is_evidence() {
        for fails in [false, true] {
            let mut liveness = served();
            let stood = suspected_s(&mut liveness, 60.0, |liveness, now_s| {
                if liveness.asked_s.is_none() {
                    liveness.ask(now_s);
                }
                if fails {
                    liveness.answer(now_s, false);
                }
            });
            assert!(stood.is_some_and(|now_s| now_s < 6.0), "{stood:?}");
            liveness.answer(61.0, true);
            liveness.judge(61.0, 0, 5.0, 5.0);
            assert!(!liveness.is_suspect());
        }
    }

    #[test]
    fn the_first_answer_may_take_minutes_while_health_answers() {
        for (clock_s, tokens) in [(None, None), (None, Some(7)), (Some(1.0), None)] {
            for is_streamed in [true, false] {
                let mut liveness = Liveness::default();
                liveness.enter(0.0, 10, 0.1, is_streamed);
                for second in 1..200 {
                    let now_s = f64::from(second);
                    well(&mut liveness, now_s);
                    liveness.report(now_s, report(clock_s, tokens));
                    assert_eq!(liveness.judge(now_s, 1, 5.0, 5.0), None);
                }
            }
        }
    }

    #[test]
    fn a_scheduler_that_compiles_for_its_first_answer_is_waited_for_though_health_hangs() {
        // (`/health` fails at once, load reports come, it has served): suspected.
        for (fails_at_once, reports, has_served) in [
            (false, true, false),
            (true, true, false),
            (false, false, false),
            (false, true, true),
        ] {
            let mut liveness = if has_served {
                served()
            } else {
                Liveness::default()
            };
            liveness.report(0.0, report(Some(1.0), None));
            let stood = suspected_s(&mut liveness, 150.0, |liveness, now_s| {
                if reports {
                    liveness.report(now_s, report(Some(1.0), None));
                }
                match fails_at_once {
                    true => {
                        liveness.ask(now_s);
                        liveness.answer(now_s, false);
                    }
                    // Of 20 s each, as SGLang's.
                    false if now_s % 20.0 == 0.0 => liveness.answer(now_s, false),
                    false if liveness.asked_s.is_none() => liveness.ask(now_s),
                    false => {}
                }
            });
            let waits = !fails_at_once && reports && !has_served;
            assert_eq!(
                stood.is_none(),
                waits,
                "{fails_at_once} {reports} {has_served}"
            );
            assert!(stood.is_none_or(|now_s| now_s < 12.0), "{stood:?}");
        }
    }

    #[test]
    fn counters_that_stand_still_tell_within_ten_seconds_of_a_short_prompt() {
        for (tokens, is_streamed, bound_s) in
            [(10, true, 10.0), (1_400, false, 10.0), (75_000, true, 31.0)]
        {
            let mut liveness = served();
            liveness.enter(0.0, tokens, 0.1, is_streamed);
            let stood = (1..400)
                .map(|quarter| f64::from(quarter) / 4.0)
                .find(|&now_s| {
                    well(&mut liveness, now_s);
                    liveness.report(now_s, report(None, Some(7)));
                    liveness.judge(now_s, 1, 5.0, 5.0).is_some()
                });
            let stood_s = stood.expect("suspected");
            assert!(
                stood_s > bound_s - 3.0 && stood_s < bound_s,
                "{tokens}: {stood_s}"
            );
        }
        // Without counters nobody knows.
        let stood = owing_s(&mut served(), 10, 29.0, well);
        assert_eq!(stood, None);
    }

    #[test]
    fn a_prefill_in_pieces_is_waited_for_and_one_that_stops_is_noticed() {
        let in_use = |kv_used| Pulse {
            kv_used: Some(kv_used),
            ..report(None, Some(7))
        };
        let mut liveness = served();
        let stood = owing_s(&mut liveness, 75_000, 200.0, |liveness, now_s| {
            well(liveness, now_s);
            // A piece every four seconds, until it hangs after a hundred.
            liveness.report(now_s, in_use((now_s.min(100.0) / 4.0) as u64));
        });
        // It has been seen to stand still for four seconds.
        assert!(
            stood.is_some_and(|now_s| now_s > 107.0 && now_s < 110.0),
            "{stood:?}"
        );
    }

    #[test]
    fn prompts_that_are_answered_are_owed_no_more() {
        let mut liveness = served();
        for (tokens, is_streamed) in [(9, true), (75_000, true), (75_000, false)] {
            liveness.enter(0.0, tokens, 0.1, is_streamed);
        }
        liveness.settle(75_000, true);
        assert_eq!(liveness.patience_s(5.0, true), 30.0);
        liveness.settle(75_000, false);
        assert_eq!(liveness.patience_s(5.0, true), 7.5);
        liveness.settle(9, true);
        assert!(liveness.prompts.is_empty() && liveness.owed == 0);
    }

    #[test]
    fn a_worker_may_stand_still_for_as_long_as_it_has_shown_many_times_over() {
        let mut liveness = served();
        let stood = suspected_s(&mut liveness, 110.0, |liveness, now_s| {
            well(liveness, now_s);
            if now_s == 20.0 {
                liveness.signs().note(now_s);
            }
        });
        assert!(stood.is_some_and(|now_s| now_s > 99.0), "{stood:?}");
        let stood = suspected_s(&mut served(), 100.0, well);
        assert!(stood.is_some_and(|now_s| now_s < 31.0), "{stood:?}");
    }

    #[test]
    fn a_false_alarm_doubles_the_patience_and_answers_that_begin_take_it_back() {
        let mut liveness = served();
        let hangs = |liveness: &mut Liveness, now_s: f64| {
            liveness.report(now_s, report(Some(1.0), None));
        };
        assert!(suspected_s(&mut liveness, 6.0, hangs).is_some());
        liveness.signs().note(6.5);
        assert_eq!(liveness.judge(7.0, 1, 5.0, 5.0), None);
        assert!(!liveness.is_suspect());
        let mut judged = |now_s: f64| {
            liveness.report(now_s, report(Some(1.0), None));
            liveness.judge(now_s, 1, 5.0, 5.0)
        };
        assert_eq!(judged(16.0), None);
        assert!(judged(17.0).is_some());
        (0..100).for_each(|_| liveness.serve(10));
        assert_eq!(liveness.caution, 1.0);
    }

    #[test]
    fn load_reports_and_health_that_both_stop_are_a_reason_even_where_nothing_is_owed() {
        let mut liveness = Liveness::default();
        liveness.report(10.0, report(Some(1.0), None));
        liveness.ask(10.0);
        assert_eq!(liveness.judge(14.0, 0, 5.0, 5.0), None);
        assert!(liveness.judge(15.5, 0, 5.0, 5.0).is_some());
        let mut answers = Liveness::default();
        answers.report(10.0, report(Some(1.0), None));
        well(&mut answers, 15.0);
        assert_eq!(answers.judge(15.5, 0, 5.0, 5.0), None);
    }

    #[test]
    fn a_long_answer_in_one_piece_is_no_standstill_where_nothing_counts_its_tokens() {
        let mut liveness = served();
        liveness.enter(0.0, 10, 0.1, false);
        for second in 1..500 {
            let now_s = f64::from(second);
            well(&mut liveness, now_s);
            assert_eq!(liveness.judge(now_s, 1, 5.0, 5.0), None);
        }
    }
}
