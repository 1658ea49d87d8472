//! `aimd`: a window of sessions a worker that grows and halves with what the engine reports.

use super::{Info, Manner, Observed, Prompt, Rule, WorkerView, parse};
use crate::fleet::admission::identity::Key;
use crate::policy::ParamInfo;
use serde::Deserialize;

pub const INFO: Info = Info {
    name: "aimd",
    summary: "a window of sessions a worker, by additive increase and multiplicative decrease",
    rule: "every interval_s, on every worker: where the share of the KV in use is below use_low, the window \
           grows by `step`; where it is above use_high and the share of prompt tokens from cache below \
           hit_low, the window is multiplied by `cut`; else it stays. Sessions beyond the window wait; when it \
           has shrunk, the longest idle leave between two turns. One that has been idle for idle_s \
           leaves for one that waits",
    params: &[
        ParamInfo {
            name: "interval_s",
            default: "5",
            meaning: "between two looks at a worker",
        },
        ParamInfo {
            name: "start",
            default: "2",
            meaning: "sessions in the window at first",
        },
        ParamInfo {
            name: "step",
            default: "2",
            meaning: "sessions that it grows by",
        },
        ParamInfo {
            name: "cut",
            default: "0.5",
            meaning: "what it is multiplied by",
        },
        ParamInfo {
            name: "use_low",
            default: "0.2",
            meaning: "it grows below this share of the KV in use",
        },
        ParamInfo {
            name: "use_high",
            default: "0.5",
            meaning: "it may shrink above this share",
        },
        ParamInfo {
            name: "hit_low",
            default: "0.2",
            meaning: "and does where less than this share of prompt tokens comes from the cache",
        },
        ParamInfo {
            name: "idle_s",
            default: "600",
            meaning: "a session that has been idle for so long leaves for one that waits",
        },
    ],
    source: "CONCUR (arXiv 2601.22705): step 2, cut 0.5, 0.2, 0.5, 0.2; the law as summaries of the paper \
             give it. Start and idle_s are ours, the paper's agents never pause for long",
    build: |params| {
        let params = parse::<Params>(params, |p| {
            vec![
                ("interval_s", "a number above 0", p.interval_s > 0.0),
                ("start", "a number of 1 or more", p.start >= 1.0),
                ("step", "a number above 0", p.step > 0.0),
                ("cut", "a share between 0 and 1", p.cut > 0.0 && p.cut < 1.0),
                (
                    "use_low",
                    "a share from 0 to 1",
                    (0.0..=1.0).contains(&p.use_low),
                ),
                (
                    "use_high",
                    "a share from 0 to 1",
                    (0.0..=1.0).contains(&p.use_high),
                ),
                (
                    "hit_low",
                    "a share from 0 to 1",
                    (0.0..=1.0).contains(&p.hit_low),
                ),
                ("idle_s", "a number above 0", p.idle_s > 0.0),
            ]
        })?;
        Ok(Box::new(Aimd {
            params,
            windows: Vec::new(),
        }))
    },
};

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Params {
    interval_s: f64,
    start: f64,
    step: f64,
    cut: f64,
    use_low: f64,
    use_high: f64,
    hit_low: f64,
    idle_s: f64,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            interval_s: 5.0,
            start: 2.0,
            step: 2.0,
            cut: 0.5,
            use_low: 0.2,
            use_high: 0.5,
            hit_low: 0.2,
            idle_s: 600.0,
        }
    }
}

/// Windows stop growing here: where no worker is ever busy they would without end.
const MOST_SESSIONS: f64 = 1e6;

struct Aimd {
    params: Params,
    /// By slot.
    windows: Vec<f64>,
}

impl Aimd {
    fn window(&self, slot: usize) -> usize {
        self.windows.get(slot).copied().unwrap_or(self.params.start) as usize
    }
}

impl Rule for Aimd {
    fn manner(&self) -> Manner {
        Manner {
            interval_s: Some(self.params.interval_s),
            idle_s: self.params.idle_s,
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
        let params = &self.params;
        if self.windows.len() <= slot {
            self.windows.resize(slot + 1, params.start);
        }
        let window = &mut self.windows[slot];
        let hit = observed.cached_tokens as f64 / observed.prompt_tokens.max(1) as f64;
        if observed.used_share < params.use_low {
            *window = (*window + params.step).min(MOST_SESSIONS);
        } else if observed.used_share > params.use_high
            && observed.prompt_tokens > 0
            && hit < params.hit_low
        {
            *window = (*window * params.cut).max(1.0);
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
        let rule = (INFO.build)(json!({"start": 1})).expect("a rule");
        let mut seated = [idle(1, 10, 3.0), idle(2, 10, 0.0), idle(3, 10, 9.0)];
        seated[1].idle_s = None;
        assert_eq!(rule.over_limit(&view(&seated)), [3, 1]);
    }
}
