//! `thunder`: ThunderAgent as published: every few seconds, pause what is too much, resume what fits.

use super::{Demand, Info, Manner, Placement, Rule, WorkerView, ordered, parse};
use crate::fleet::residency::give_up::GiveUp;
use crate::fleet::residency::identity::Key;
use crate::policy::ParamInfo;
use serde::Deserialize;

pub const INFO: Info = Info {
    name: "thunder",
    summary: "every 5 s: pause the smallest sessions where the KV is exceeded, resume the smallest that fit",
    rule: "every interval_s: waiting sessions are let in, those served before first, the smallest first, to the \
           worker with most room; then, where footprints (shared prefixes counted for each session, plus \
           100 tokens a session) exceed `watermark` × KV, sessions lose their places, idle ones first, then, at \
           the end of their turns, others, the smallest first. A session with a place always goes at once. One \
           that has waited for force_s is let in whatever there is room for",
    params: &[
        ParamInfo {
            name: "interval_s",
            default: "5",
            meaning: "between two rounds",
        },
        ParamInfo {
            name: "watermark",
            default: "1.0",
            meaning: "the share of the KV that footprints may take",
        },
        ParamInfo {
            name: "decay",
            default: "false",
            meaning: "an idle session counts half as much for every second, where it is decided who is let in",
        },
        ParamInfo {
            name: "idle_s",
            default: "600",
            meaning: "a session that has been idle for so long gives up its place to one that waits",
        },
        ParamInfo {
            name: "force_s",
            default: "1800",
            meaning: "nobody waits longer; beyond max_wait_s it has no effect",
        },
    ],
    gives_places: true,
    source: "ThunderAgent (arXiv 2602.13692), its scheduler as published: 5 s, watermark 1.0, acting weight \
             1.0, 1800 s; idle_s is that of Dynamo's port",
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
                ("force_s", "a number above 0", p.force_s > 0.0),
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
    force_s: f64,
}

impl Default for Thunder {
    fn default() -> Self {
        Self {
            interval_s: 5.0,
            watermark: 1.0,
            decay: false,
            idle_s: 600.0,
            force_s: 1800.0,
        }
    }
}

impl Thunder {
    fn limit_tokens(&self, view: &WorkerView<'_>) -> f64 {
        self.watermark * view.kv_capacity_tokens as f64
    }
}

impl Rule for Thunder {
    fn manner(&self) -> Manner {
        Manner {
            placement: Placement::MostRoom,
            admit_every_s: Some(self.interval_s),
            smallest_first: true,
            force_after_s: Some(self.force_s),
            fill: Some(self.watermark),
            residents_always_go: true,
            ..Manner::default()
        }
    }

    fn may_give_up(&self, view: &WorkerView<'_>, demand: Demand) -> Vec<(Key, GiveUp)> {
        // Room is made by `over_limit` alone, but for sessions that have left without a word.
        let is_over = |idle_s: f64| (idle_s >= self.idle_s).then_some(GiveUp::IdleTooLong);
        let tokens = |place: &super::Place| place.tokens as f64;
        ordered(view, demand, |place| is_over(place.idle_s), tokens)
    }

    fn counts_itself(&self) -> bool {
        true
    }

    fn occupied_tokens(&self, view: &WorkerView<'_>) -> Option<f64> {
        let of_place = |place: &super::Place| {
            let weight = match (self.decay, place.is_idle) {
                (true, true) => (-place.idle_s).exp2(),
                _ => 1.0,
            };
            weight * place.tokens as f64 + BUFFER_TOKENS
        };
        Some(view.places.iter().map(of_place).sum())
    }

    fn over_limit(&self, view: &WorkerView<'_>) -> Vec<Key> {
        let tokens = |place: &super::Place| place.tokens as f64 + BUFFER_TOKENS;
        let used: f64 = view.places.iter().map(tokens).sum();
        let mut excess = used - self.limit_tokens(view);
        let mut places: Vec<_> = view.places.iter().collect();
        places.sort_by_key(|place| (!place.is_idle, place.tokens, place.key));
        let mut chosen = Vec::new();
        for place in places {
            if excess <= 0.0 {
                break;
            }
            excess -= tokens(place);
            chosen.push(place.key);
        }
        chosen
    }

    fn interval_s(&self) -> Option<f64> {
        Some(self.interval_s)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{WAITING, idle, view};
    use super::*;
    use crate::fleet::residency::gaps::Gaps;
    use serde_json::json;

    #[test]
    fn the_smallest_idle_sessions_are_paused_until_the_rest_fits() {
        let rule = (INFO.build)(json!({})).expect("a rule");
        let mut places = [
            idle(1, 40_000, 1.0),
            idle(2, 30_000, 1.0),
            idle(3, 20_000, 1.0),
            idle(4, 15_000, 1.0),
        ];
        places[3].is_idle = false;
        let gaps = Gaps::default();
        let view = view(&places, &gaps);
        assert_eq!(rule.over_limit(&view), [3]);
        assert!(rule.may_give_up(&view, WAITING).is_empty());
        assert_eq!(rule.occupied_tokens(&view), Some(105_400.0));
    }

    #[test]
    fn decay_makes_idle_sessions_count_less() {
        let rule = (INFO.build)(json!({"decay": true})).expect("a rule");
        let places = [idle(1, 40_000, 2.0)];
        let gaps = Gaps::default();
        assert_eq!(rule.occupied_tokens(&view(&places, &gaps)), Some(10_100.0));
    }
}
