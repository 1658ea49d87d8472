//! Whether a worker that accepts requests still works on them.
//!
//! A process whose scheduler or GPU hangs goes on accepting connections, and its health check may go on
//! answering. What it does not do is produce tokens, or report its load. A worker that owes first
//! tokens and has given no sign of life for a while, or whose load reports stop, is suspected: it gets
//! nothing new while another worker can serve, until it gives a sign again.

use super::{Fleet, State, Which};
use crate::policy::WorkerFacts;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// How often a first token may take its predicted time before it is overdue.
const PREDICTIONS: f64 = 2.0;
/// Predictions beyond this are not waited for.
const MAX_PREDICTED_S: f64 = 60.0;
/// An idle worker that reports no load is tried again after so long.
const RETRIAL_S: f64 = 10.0;

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

/// What one worker owes and when it was last heard of.
#[derive(Debug, Default)]
pub(crate) struct Liveness {
    signs: Arc<Signs>,
    /// Streamed requests here whose first token has not come.
    owed: u32,
    /// No worker is suspected before the first tokens that it owes are due.
    due_s: f64,
    /// None where it reports no load.
    last_report_s: Option<f64>,
    /// Counters of the engine's output, where it has them.
    progress: Option<u64>,
    suspected_since_s: Option<f64>,
}

impl Liveness {
    pub fn signs(&self) -> Arc<Signs> {
        Arc::clone(&self.signs)
    }

    pub fn is_suspect(&self) -> bool {
        self.suspected_since_s.is_some()
    }

    /// A streamed request was placed, whose first token is predicted to take `until_token_s`.
    pub fn owe(&mut self, now_s: f64, until_token_s: f64) {
        if self.owed == 0 {
            self.signs.note(now_s);
        }
        self.owed += 1;
        let predicted_s = (PREDICTIONS * until_token_s).clamp(0.0, MAX_PREDICTED_S);
        self.due_s = self.due_s.max(now_s + predicted_s);
    }

    /// The first token came, or the request ended without one.
    pub fn settle(&mut self) {
        self.owed -= 1;
    }

    /// The engine reported its load. A report that the scheduler makes is a sign by itself; where a
    /// front process makes it, counters that move are.
    pub fn report(&mut self, now_s: f64, by_scheduler: bool, progress: Option<u64>) {
        self.last_report_s = Some(now_s);
        let moved = progress.is_some() && progress != self.progress;
        self.progress = progress;
        if by_scheduler || moved {
            self.signs.note(now_s);
        }
    }

    /// The worker came up: what was held against it is forgotten.
    pub fn renew(&mut self, now_s: f64) {
        self.signs.note(now_s);
        self.last_report_s = None;
        self.progress = None;
        self.suspected_since_s = None;
    }

    /// Judges anew; returns for how long the worker has been silent where it becomes suspect now.
    fn judge(&mut self, now_s: f64, after_s: f64, reports_after_s: f64) -> Option<f64> {
        let last_s = self.signs.last_s();
        if let Some(since_s) = self.suspected_since_s {
            let heard_s = self
                .last_report_s
                .map_or(last_s, |then_s| then_s.max(last_s));
            let is_retrial =
                self.last_report_s.is_none() && self.owed == 0 && now_s - since_s > RETRIAL_S;
            if heard_s > since_s || is_retrial {
                self.suspected_since_s = None;
            }
            return None;
        }
        if now_s <= self.due_s {
            return None;
        }
        let silent_s = now_s - last_s;
        let unreported_s = self.last_report_s.map_or(0.0, |then_s| now_s - then_s);
        let is_silent = self.owed > 0 && silent_s > after_s;
        if !is_silent && unreported_s <= reports_after_s {
            return None;
        }
        self.suspected_since_s = Some(now_s);
        Some(if is_silent { silent_s } else { unreported_s })
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
    /// Looks for workers that are silent: those that owe first tokens and have given no sign for
    /// `after_s`, and those whose load reports stopped `reports_after_s` ago. True where any worker is
    /// suspected or down.
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
            if let Some(silent_s) = worker.liveness.judge(now_s, after_s, reports_after_s) {
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

    #[test]
    fn a_worker_that_owes_a_first_token_and_is_silent_is_suspected_until_it_gives_a_sign() {
        let mut liveness = Liveness::default();
        assert_eq!(liveness.judge(100.0, 5.0, 5.0), None, "it owes nothing");
        liveness.owe(100.0, 1.0);
        assert_eq!(liveness.judge(104.9, 5.0, 5.0), None);
        assert!(liveness.judge(105.1, 5.0, 5.0).is_some());
        assert!(liveness.is_suspect());
        liveness.signs().note(106.0);
        assert_eq!(liveness.judge(106.1, 5.0, 5.0), None);
        assert!(!liveness.is_suspect());
    }

    #[test]
    fn a_long_prefill_has_the_time_that_was_predicted_for_it() {
        let mut liveness = Liveness::default();
        liveness.owe(0.0, 8.0);
        assert_eq!(liveness.judge(15.9, 5.0, 5.0), None);
        assert!(liveness.judge(16.1, 5.0, 5.0).is_some());
    }

    #[test]
    fn load_reports_that_stop_are_a_reason_even_where_nothing_is_owed() {
        let mut liveness = Liveness::default();
        liveness.report(10.0, true, None);
        assert_eq!(liveness.judge(14.0, 5.0, 5.0), None);
        assert!(liveness.judge(15.5, 5.0, 5.0).is_some());
        assert_eq!(liveness.judge(60.0, 5.0, 5.0), None);
        assert!(liveness.is_suspect(), "only a report ends it");
        liveness.report(61.0, true, None);
        liveness.judge(61.0, 5.0, 5.0);
        assert!(!liveness.is_suspect());
    }

    #[test]
    fn reports_of_a_front_process_are_no_sign_of_the_engine_unless_its_counters_move() {
        let mut liveness = Liveness::default();
        liveness.owe(0.0, 0.0);
        for second in 1..=6 {
            liveness.report(f64::from(second), false, Some(7));
        }
        assert!(
            liveness
                .judge(6.1, 5.0, 5.0)
                .is_some_and(|silent| silent > 5.0)
        );
        liveness.report(7.0, false, Some(8));
        liveness.judge(7.1, 5.0, 5.0);
        assert!(!liveness.is_suspect());
    }
}
