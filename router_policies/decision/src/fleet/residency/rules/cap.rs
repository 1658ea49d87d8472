//! `cap`: a fixed number of sessions a worker, whatever their size.

use super::{Demand, Info, Manner, Place, Rule, WorkerView, ordered, parse};
use crate::fleet::residency::give_up::GiveUp;
use crate::fleet::residency::identity::Key;
use crate::policy::ParamInfo;
use serde::Deserialize;

pub const INFO: Info = Info {
    name: "cap",
    summary: "a fixed number of sessions a worker",
    rule: "a session is let in where fewer than `sessions` have a place, and keeps it until it says that \
           it has ended, has sent nothing for idle_s, or has been idle (for half a minute at least) for \
           longer than all but gone_share of the gaps seen, of its own and all sessions'; tokens are not \
           looked at",
    params: &[
        ParamInfo {
            name: "sessions",
            default: "3",
            meaning: "sessions with a place on one worker",
        },
        ParamInfo {
            name: "idle_s",
            default: "600",
            meaning: "a session that has been idle for so long gives up its place to one that waits",
        },
        ParamInfo {
            name: "gone_share",
            default: "0.01",
            meaning: "one whose idle time only so small a share of gaps exceed is taken to have ended; 0: only after idle_s",
        },
    ],
    gives_places: true,
    source: "the control that CONCUR and ThunderAgent compare with for requests, and nobody for \
             sessions; at the best value of `sessions` for the load, which has to be searched for",
    build: |params| {
        let cap = parse::<Cap>(params, |cap| {
            vec![
                ("sessions", "a whole number above 0", cap.sessions > 0),
                ("idle_s", "a number above 0", cap.idle_s > 0.0),
                (
                    "gone_share",
                    "a share of 0 or more and below 1",
                    (0.0..1.0).contains(&cap.gone_share),
                ),
            ]
        })?;
        Ok(Box::new(cap))
    },
};

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Cap {
    sessions: usize,
    idle_s: f64,
    gone_share: f64,
}

/// However short gaps are, a session that has been idle for less has not ended.
const LEAST_GONE_S: f64 = 30.0;

impl Default for Cap {
    fn default() -> Self {
        Self {
            sessions: 3,
            idle_s: 600.0,
            gone_share: 0.01,
        }
    }
}

impl Rule for Cap {
    fn manner(&self) -> Manner {
        Manner {
            by_tokens: false,
            ..Manner::default()
        }
    }

    fn sessions_limit(&self, _: usize) -> Option<usize> {
        Some(self.sessions)
    }

    fn may_give_up(&self, view: &WorkerView<'_>, demand: Demand) -> Vec<(Key, GiveUp)> {
        // Most sessions end without a word. One that has been idle for longer than nearly all gaps
        // would else keep one of a few places for ten minutes from those that wait.
        let has_gone = |place: &Place| {
            place.idle_s >= LEAST_GONE_S
                && !place.waits_for_children
                && place.returns_in_s.is_none_or(|seconds| seconds <= 0.0)
                && view.gaps.share_longer(&place.gaps, place.idle_s) < self.gone_share
        };
        let is_over = |place: &Place| {
            let too_long = place.idle_s >= self.idle_s || has_gone(place);
            too_long.then_some(GiveUp::IdleTooLong)
        };
        ordered(view, demand, is_over, |place| -place.idle_s)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{WAITING, idle, keys, view};
    use super::*;
    use crate::fleet::residency::gaps::Gaps;
    use serde_json::json;

    #[test]
    fn only_what_has_been_idle_for_long_goes_or_has_ended() {
        let rule = (INFO.build)(json!({"idle_s": 10.0})).expect("a rule");
        let mut places = [
            idle(1, 10, 9.0),
            idle(2, 10, 11.0),
            idle(3, 10, 1.0),
            idle(4, 10, 30.0),
        ];
        places[2].ended = true;
        let gaps = Gaps::default();
        let chosen = rule.may_give_up(&view(&places, &gaps), WAITING);
        assert_eq!(keys(chosen), [3, 4, 2]);
        assert_eq!(rule.sessions_limit(0), Some(3));
    }

    #[test]
    fn who_is_idle_longer_than_nearly_all_gaps_has_ended() {
        let mut gaps = Gaps::default();
        (0..2_000).for_each(|turn| gaps.note(f64::from(turn % 20)));
        let chosen = |params, place: &Place| {
            let rule = (INFO.build)(params).expect("a rule");
            let places = std::slice::from_ref(place);
            keys(rule.may_give_up(&view(places, &gaps), WAITING))
        };
        let silent = idle(1, 10, 40.0);
        assert_eq!(chosen(json!({}), &silent), [1]);
        assert!(chosen(json!({"gone_share": 0.0}), &silent).is_empty());
        assert!(chosen(json!({}), &idle(1, 10, 15.0)).is_empty());
        let told = Place {
            returns_in_s: Some(5.0),
            ..silent.clone()
        };
        assert!(chosen(json!({}), &told).is_empty(), "it said when");
        let mut slow = silent;
        (0..8).for_each(|_| slow.gaps.note(90.0));
        assert!(chosen(json!({}), &slow).is_empty(), "as it always does");
    }

    #[test]
    fn wrong_parameters_are_named() {
        for (params, field) in [
            (json!({"sessions": 0}), "sessions"),
            (json!({"idle_s": -1.0}), "idle_s"),
            (json!({"gone_share": 1.0}), "gone_share"),
            (json!({"idles": 1}), "idles"),
        ] {
            let error = (INFO.build)(params).err().expect("refused");
            assert!(error.contains(field), "{error}");
        }
    }
}
