//! `off`: everything is let in at once; what is recomputed is counted all the same.

use super::{Demand, Info, Manner, Rule, WorkerView, parse};
use crate::fleet::residency::give_up::GiveUp;
use crate::fleet::residency::identity::Key;
use serde::Deserialize;

pub const INFO: Info = Info {
    name: "off",
    summary: "no gate: every turn goes at once where the policy sends it",
    rule: "nothing waits and nothing is given up; recomputed tokens are counted",
    params: &[],
    gives_places: false,
    source: "what routers do without residency control: the control arm of every comparison",
    build: |params| {
        parse::<Off>(params, |_| Vec::new())?;
        Ok(Box::new(Off {}))
    },
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Off {}

impl Rule for Off {
    fn manner(&self) -> Manner {
        Manner {
            gates: false,
            by_tokens: false,
            ..Manner::default()
        }
    }

    fn may_give_up(&self, _: &WorkerView<'_>, _: Demand) -> Vec<(Key, GiveUp)> {
        Vec::new()
    }
}
