//! `least_requests`: the worker with the fewest requests.

use super::{Decision, Info, NoParams, Policy, Reason, Refusal, View, choose_each, parse_params};

pub const INFO: Info = Info {
    name: "least_requests",
    summary: "the worker with the fewest requests",
    rule: "lowest number of reserved requests, ties in rotation; in a fleet of prefill and decode \
           workers, on each side",
    params: &[],
    source: "the usual",
    measured: "no figure in the seeds",
    build: |params| {
        parse_params::<NoParams>(params)?;
        Ok(Box::new(LeastRequests))
    },
};

struct LeastRequests;

impl Policy for LeastRequests {
    fn decide(&self, view: &View<'_>) -> Result<Decision, Refusal> {
        choose_each(view, Reason::LeastRequests, |workers| {
            view.lowest(workers.iter().copied(), |worker| worker.requests)
        })
    }
}
