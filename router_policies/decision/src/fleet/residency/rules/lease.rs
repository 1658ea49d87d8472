//! `lease`: one ledger of full footprints; an idle session keeps its place for a fixed time.

use super::{Demand, Info, Manner, Placement, Rule, WorkerView, ordered, parse};
use crate::fleet::residency::give_up::GiveUp;
use crate::fleet::residency::identity::Key;
use crate::policy::ParamInfo;
use serde::Deserialize;

pub const INFO: Info = Info {
    name: "lease",
    summary: "full footprints against the KV; an idle session keeps its place for a fixed time",
    rule: "a session is let in where all of it fits, at the worker where it was before while that is up, and \
           its room is booked at once; whoever has been idle for lease_s may be given up for one that waits, \
           and anybody idle for one with a place that has grown: longest idle first",
    params: &[ParamInfo {
        name: "lease_s",
        default: "30",
        meaning: "an idle session keeps its place for so long, though others wait",
    }],
    gives_places: true,
    source: "llm-d-router, draft 3076 (lease gate), as its measurements describe it; shared prefixes are \
             counted once here, and growth is booked",
    build: |params| {
        let lease = parse::<Lease>(params, |lease| {
            vec![("lease_s", "a number above 0", lease.lease_s > 0.0)]
        })?;
        Ok(Box::new(lease))
    },
};

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Lease {
    lease_s: f64,
}

impl Default for Lease {
    fn default() -> Self {
        Self { lease_s: 30.0 }
    }
}

impl Rule for Lease {
    fn manner(&self) -> Manner {
        Manner {
            placement: Placement::HomeOnly,
            fill: Some(1.0),
            ..Manner::default()
        }
    }

    fn may_give_up(&self, view: &WorkerView<'_>, demand: Demand) -> Vec<(Key, GiveUp)> {
        let is_over = |idle_s: f64| (idle_s >= self.lease_s).then_some(GiveUp::IdleTooLong);
        ordered(
            view,
            demand,
            |place| is_over(place.idle_s),
            |place| -place.idle_s,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{WAITING, idle, keys, view};
    use super::*;
    use crate::fleet::residency::gaps::Gaps;
    use serde_json::json;

    #[test]
    fn a_lease_holds_against_those_that_wait_but_not_against_growth() {
        let rule = (INFO.build)(json!({})).expect("a rule");
        let places = [idle(1, 10, 5.0), idle(2, 10, 31.0), idle(3, 10, 40.0)];
        let gaps = Gaps::default();
        let view = view(&places, &gaps);
        assert_eq!(keys(rule.may_give_up(&view, WAITING)), [3, 2]);
        assert_eq!(keys(rule.may_give_up(&view, Demand::Growth)), [3, 2, 1]);
    }
}
