//! `thunder`: ThunderAgent as published: every few seconds, pause what is too much, resume what fits.

use super::{Info, Manner, Placement, Prompt, Rule, Seated, WorkerView, parse};
use crate::fleet::admission::identity::Key;
use crate::policy::ParamInfo;
use serde::Deserialize;

pub const INFO: Info = Info {
    name: "thunder",
    summary: "every 5 s: pause the smallest sessions where the KV is exceeded, resume the smallest that fit",
    rule: "every interval_s: waiting sessions come in, those served before first, the smallest first, to the \
           worker with most room; then, where prompts (shared prefixes counted for each session, plus \
           100 tokens a session) exceed `watermark` × KV, sessions leave, idle ones first, then, at \
           the end of their turns, others, the smallest first. A turn of a session that is in always goes at once",
    params: &[
        ParamInfo {
            name: "interval_s",
            default: "5",
            meaning: "between two rounds",
        },
        ParamInfo {
            name: "watermark",
            default: "1.0",
            meaning: "the share of the KV that prompts may take",
        },
        ParamInfo {
            name: "decay",
            default: "false",
            meaning: "an idle session counts half as much for every second, where it is decided who comes in",
        },
        ParamInfo {
            name: "idle_s",
            default: "600",
            meaning: "a session that has been idle for so long leaves for one that waits",
        },
    ],
    source: "ThunderAgent (arXiv 2602.13692), its scheduler as published: 5 s, watermark 1.0, acting weight \
             1.0; idle_s is that of Dynamo's port",
    build: |params| {
        let params = parse::<Thunder>(params, |p| {
            vec![
                ("interval_s", "a number above 0", p.interval_s > 0.0),
                (
                    "watermark",
                    "a share above 0 and up to 1",
                    p.watermark > 0.0 && p.watermark <= 1.0,
                ),
                ("idle_s", "a number above 0", p.idle_s > 0.0),
            ]
        })?;
        Ok(Box::new(params))
    },
};

/// Counted for each session beside its tokens.
const BUFFER_TOKENS: f64 = 100.0;

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Thunder {
    interval_s: f64,
    watermark: f64,
    decay: bool,
    idle_s: f64,
}

impl Default for Thunder {
    fn default() -> Self {
        Self {
            interval_s: 5.0,
            watermark: 1.0,
            decay: false,
            idle_s: 600.0,
        }
    }
}

impl Rule for Thunder {
    fn manner(&self) -> Manner {
        Manner {
            placement: Placement::MostRoom,
            interval_s: Some(self.interval_s),
            in_rounds: true,
            smallest_first: true,
            idle_s: self.idle_s,
            ..Manner::default()
        }
    }

    fn lets_in(&self, view: &WorkerView<'_>, prompt: Prompt) -> bool {
        let taken = |seated: &Seated| {
            let weight = match (self.decay, seated.idle_s) {
                (true, Some(idle_s)) => (-idle_s).exp2(),
                _ => 1.0,
            };
            weight * seated.tokens as f64 + BUFFER_TOKENS
        };
        let all: f64 = view.seated.iter().map(taken).sum();
        let limit = self.watermark * view.kv_capacity_tokens as f64;
        all + prompt.tokens as f64 <= limit || view.seated.is_empty()
    }

    fn over_limit(&self, view: &WorkerView<'_>) -> Vec<Key> {
        let tokens = |seated: &Seated| seated.tokens as f64 + BUFFER_TOKENS;
        let used: f64 = view.seated.iter().map(tokens).sum();
        let mut excess = used - self.watermark * view.kv_capacity_tokens as f64;
        let mut seated: Vec<_> = view.seated.iter().collect();
        seated.sort_by_key(|seated| (seated.idle_s.is_none(), seated.tokens, seated.key));
        // Who is the last one has nobody to leave for.
        seated.truncate(view.seated.len().saturating_sub(1));
        let mut chosen = Vec::new();
        for seated in seated {
            if excess <= 0.0 {
                break;
            }
            excess -= tokens(seated);
            chosen.push(seated.key);
        }
        chosen
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{idle, prompt, view};
    use super::*;
    use serde_json::json;

    #[test]
    fn the_smallest_idle_sessions_are_paused_until_the_rest_fits() {
        let rule = (INFO.build)(json!({})).expect("a rule");
        let mut seated = [
            idle(1, 40_000, 1.0),
            idle(2, 30_000, 1.0),
            idle(3, 20_000, 1.0),
            idle(4, 15_000, 1.0),
        ];
        seated[3].idle_s = None;
        assert_eq!(rule.over_limit(&view(&seated)), [3]);
        assert!(!rule.lets_in(&view(&seated[..3]), prompt(9_800)));
        assert!(rule.lets_in(&view(&seated[..3]), prompt(9_700)));
    }

    #[test]
    fn decay_makes_idle_sessions_count_less() {
        let lets_in = |decay: bool| {
            let rule = (INFO.build)(json!({"decay": decay})).expect("a rule");
            rule.lets_in(&view(&[idle(1, 40_000, 2.0)]), prompt(80_000))
        };
        assert_eq!([lets_in(false), lets_in(true)], [false, true]);
    }
}
