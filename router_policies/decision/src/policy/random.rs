//! `random`: any worker, each as likely as the others.

use super::{Decision, Info, NoParams, Policy, Reason, Refusal, View, choose_each, parse_params};

pub const INFO: Info = Info {
    name: "random",
    summary: "any worker, each as likely as the others",
    rule: "a candidate drawn uniformly; in a fleet of prefill and decode workers, one of each",
    params: &[],
    source: "the usual",
    measured: "no figure in the seeds",
    build: |params| {
        parse_params::<NoParams>(params)?;
        Ok(Box::new(Random))
    },
};

struct Random;

impl Policy for Random {
    fn decide(&self, view: &View<'_>) -> Result<Decision, Refusal> {
        choose_each(view, Reason::Random, |workers| {
            let drawn = view.random.checked_rem(workers.len() as u64)?;
            workers.get(drawn as usize).copied()
        })
    }
}
