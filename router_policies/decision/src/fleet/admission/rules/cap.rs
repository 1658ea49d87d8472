//! `cap`: a fixed number of sessions a worker, whatever their size.

use super::{Info, Manner, Prompt, Rule, WorkerView, parse};
use crate::policy::ParamInfo;
use serde::Deserialize;

pub const INFO: Info = Info {
    name: "cap",
    summary: "a fixed number of sessions a worker",
    rule: "a session comes in where fewer than `sessions` are, and stays until it says that it has ended, is \
           not expected back (as under rotate), or has sent nothing for 600 s; tokens are not looked at",
    params: &[ParamInfo {
        name: "sessions",
        default: "3",
        meaning: "sessions that are in on one worker",
    }],
    source: "the control that CONCUR and ThunderAgent compare with for requests, and nobody for \
             sessions; at the best value of `sessions` for the load, which has to be searched for",
    build: |params| {
        let cap = parse::<Cap>(params, |cap| {
            vec![("sessions", "a whole number above 0", cap.sessions > 0)]
        })?;
        Ok(Box::new(cap))
    },
};

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Cap {
    sessions: usize,
}

impl Default for Cap {
    fn default() -> Self {
        Self { sessions: 3 }
    }
}

impl Rule for Cap {
    fn manner(&self) -> Manner {
        Manner::default()
    }

    fn lets_in(&self, view: &WorkerView<'_>, _: Prompt) -> bool {
        view.seated.len() < self.sessions
    }
}
