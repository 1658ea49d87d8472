//! `aimd`: a window of sessions a worker that grows and halves with what the engine reports.

use super::{Info, Manner, Observed, Prompt, Rule, WorkerView, parse_none};
use crate::fleet::admission::identity::Key;

pub const INFO: Info = Info {
    name: "aimd",
    summary: "a window of sessions a worker, by additive increase and multiplicative decrease",
    rule: "every 5 s, on every worker: where the share of the KV in use is below 0.2, the window \
           of 2 sessions grows by 2; where it is above 0.5 and the share of prompt tokens from cache below \
           0.2, the window is halved; else it stays. Sessions beyond the window wait; when it \
           has shrunk, the longest idle leave between two turns. One that has been idle for 600 s \
           leaves for one that waits",
    params: &[],
    source: "CONCUR (arXiv 2601.22705): step 2, cut 0.5, 0.2, 0.5, 0.2; the law as summaries of the paper \
             give it. The first window and 600 s are ours, the paper's agents never pause for long",
    build: |params| {
        parse_none(params)?;
        Ok(Box::new(Aimd {
            windows: Vec::new(),
        }))
    },
};

const INTERVAL_S: f64 = 5.0;
/// Sessions in the window at first, and that it grows by.
const START: f64 = 2.0;
const STEP: f64 = 2.0;
/// What it is multiplied by.
const CUT: f64 = 0.5;
/// It grows below this share of the KV in use,
const USE_LOW: f64 = 0.2;
/// and shrinks above this one where a smaller share of prompt tokens comes from the cache.
const USE_HIGH: f64 = 0.5;
const HIT_LOW: f64 = 0.2;
/// Windows stop growing here: where no worker is ever busy they would without end.
const MOST_SESSIONS: f64 = 1e6;

struct Aimd {
    /// By slot.
    windows: Vec<f64>,
}

impl Aimd {
    fn window(&self, slot: usize) -> usize {
        self.windows.get(slot).copied().unwrap_or(START) as usize
    }
}

impl Rule for Aimd {
    fn manner(&self) -> Manner {
        Manner {
            interval_s: Some(INTERVAL_S),
            ..Manner::default()
        }
    }

    fn lets_in(&self, view: &WorkerView<'_>, _: Prompt) -> bool {
        view.seated.len() < self.window(view.slot)
    }

    fn over_limit(&self, view: &WorkerView<'_>) -> Vec<Key> {
        let over = view.seated.len().saturating_sub(self.window(view.slot));
        let mut seated: Vec<_> = view.seated.iter().collect();
        let idle_s = |idle_s: Option<f64>| idle_s.unwrap_or(-1.0);
        seated.sort_by(|one, other| {
            let longest = idle_s(other.idle_s).total_cmp(&idle_s(one.idle_s));
            longest.then(one.key.cmp(&other.key))
        });
        seated[..over].iter().map(|seated| seated.key).collect()
    }

    fn observe(&mut self, slot: usize, observed: Observed) {
        if self.windows.len() <= slot {
            self.windows.resize(slot + 1, START);
        }
        let window = &mut self.windows[slot];
        let hit = observed.cached_tokens as f64 / observed.prompt_tokens.max(1) as f64;
        if observed.used_share < USE_LOW {
            *window = (*window + STEP).min(MOST_SESSIONS);
        } else if observed.used_share > USE_HIGH && observed.prompt_tokens > 0 && hit < HIT_LOW {
            *window = (*window * CUT).max(1.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Seated;
    use super::super::testing::{idle, prompt, view};
    use super::*;
    use serde_json::json;

    #[test]
    fn the_window_follows_use_and_hits() {
        let mut rule = (INFO.build)(json!({})).expect("a rule");
        let window = |rule: &dyn Rule, slot| {
            let many: Vec<Seated> = (0..100).map(|key| idle(key, 1, 0.0)).collect();
            let lets_in = |count: &usize| {
                let view = WorkerView {
                    slot,
                    ..view(&many[..*count])
                };
                !rule.lets_in(&view, prompt(1))
            };
            (0..100).find(lets_in)
        };
        let mut seen = |used_share, cached_tokens| {
            let prompt_tokens = 100;
            rule.observe(
                1,
                Observed {
                    used_share,
                    prompt_tokens,
                    cached_tokens,
                },
            );
            window(&*rule, 1).expect("a window")
        };
        let windows = [
            seen(0.1, 0),
            seen(0.1, 0),
            seen(0.3, 0),
            seen(0.9, 50),
            seen(0.9, 5),
        ];
        assert_eq!(windows, [4, 6, 6, 6, 3]);
        assert_eq!([seen(0.9, 0), seen(0.9, 0)], [1, 1], "never less than one");
        assert_eq!(window(&*rule, 0), Some(2), "workers apart");
    }

    #[test]
    fn those_over_the_window_leave_idle_ones_first() {
        let rule = (INFO.build)(json!({})).expect("a rule");
        let mut seated = [0.0, 3.0, 0.0, 9.0].map(|idle_s| idle(idle_s as u64, 10, idle_s));
        seated[0].idle_s = None;
        seated[2].idle_s = None;
        assert_eq!(rule.over_limit(&view(&seated)), [9, 3]);
    }
}
