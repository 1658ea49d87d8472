//! `cap`: a fixed number of sessions a worker, whatever their size.

use super::{Demand, GiveUp, Info, Manner, Rule, WorkerView, idle_for, parse};
use crate::fleet::residency::book::Key;
use crate::policy::ParamInfo;
use serde::Deserialize;

pub const INFO: Info = Info {
    name: "cap",
    summary: "a fixed number of sessions a worker",
    rule: "a session is let in where fewer than `sessions` have a place, and keeps it until it says that \
           it has ended or has sent nothing for idle_s; tokens are not looked at",
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
    ],
    source: "the control that CONCUR and ThunderAgent compare with for requests, and nobody for \
             sessions; at the best value of `sessions` for the load, which has to be searched for",
    build: |params| {
        let cap = parse::<Cap>(params, |cap| {
            vec![
                ("sessions", "a whole number above 0", cap.sessions > 0),
                ("idle_s", "a number above 0", cap.idle_s > 0.0),
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
}

impl Default for Cap {
    fn default() -> Self {
        Self {
            sessions: 3,
            idle_s: 600.0,
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
        idle_for(view, demand, self.idle_s)
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
    fn wrong_parameters_are_named() {
        for (params, field) in [
            (json!({"sessions": 0}), "sessions"),
            (json!({"idle_s": -1.0}), "idle_s"),
            (json!({"idles": 1}), "idles"),
        ] {
            let error = (INFO.build)(params).err().expect("refused");
            assert!(error.contains(field), "{error}");
        }
    }
}
