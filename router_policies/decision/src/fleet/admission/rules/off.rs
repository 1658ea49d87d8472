//! `off`: everything is let in at once; what is recomputed is counted all the same.

use super::{Info, Manner, Rule, parse_none};

pub const INFO: Info = Info {
    name: "off",
    summary: "no admission: every turn goes at once where the policy sends it",
    rule: "nothing waits and nobody leaves; recomputed tokens are counted",
    params: &[],
    source: "what routers do without admission: the control arm of every comparison",
    build: |params| {
        parse_none(params)?;
        Ok(Box::new(Off))
    },
};

struct Off;

impl Rule for Off {
    fn manner(&self) -> Manner {
        Manner {
            gates: false,
            ..Manner::default()
        }
    }
}
