//! `round_robin`: each worker in turn.

use super::{Decision, Info, NoParams, Policy, Reason, Refusal, View, choose_each, parse_params};

pub const INFO: Info = Info {
    name: "round_robin",
    summary: "each worker in turn",
    rule: "the candidates in slot order, one after the other; in a fleet of prefill and decode \
           workers, each side in turn",
    params: &[],
    source: "the usual",
    measured: "the floor that cache-aware policies are compared with",
    build: |params| {
        parse_params::<NoParams>(params)?;
        Ok(Box::new(RoundRobin))
    },
};

struct RoundRobin;

impl Policy for RoundRobin {
    fn decide(&self, view: &View<'_>) -> Result<Decision, Refusal> {
        choose_each(view, Reason::Rotation, |workers| {
            let turn = view.sequence.checked_rem(workers.len() as u64)?;
            workers.get(turn as usize).copied()
        })
    }
}
