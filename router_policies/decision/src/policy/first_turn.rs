//! `first_turn`: a session's first turn is separated; it then stays where it decoded. The rule of
//! ConServe (arXiv 2606.01839): the conversation is the unit, its KV moves once, nothing is predicted.

use super::{
    Decision, Info, NoParams, Policy, Reason, Refusal, View, WorkerFacts, decode_first,
    parse_params,
};

pub const INFO: Info = Info {
    name: "first_turn",
    summary: "a session's first turn is separated, the later ones are served where it decoded",
    rule: "a session whose worker is there: on that worker, alone where it can; else the decode worker \
           with the fewest context tokens reserved (one that has a prefill worker before one that has \
           none), and for it the prefill worker with the least predicted wait; requests without a \
           session are first turns",
    params: &[],
    source: "ConServe, arXiv 2606.01839",
    measured: "not here; its authors: −51 % p95 time to the first effective token against predicting \
               turn by turn",
    build: |params| {
        parse_params::<NoParams>(params)?;
        Ok(Box::new(FirstTurn))
    },
};

struct FirstTurn;

impl Policy for FirstTurn {
    fn decide(&self, view: &View<'_>) -> Result<Decision, Refusal> {
        let can_pair =
            |worker: &WorkerFacts| worker.serves_decode && view.partners(worker).next().is_some();
        let candidates = view.workers.iter().filter(|worker| {
            worker.routable && worker.admits && (worker.serves_local || can_pair(worker))
        });
        if let Some(slot) = view.request.affine
            && let Some(home) = candidates.clone().find(|worker| worker.slot == slot)
        {
            let mut decision = decode_first::place(view, home, true, Reason::Affinity)?;
            decision.reason = Reason::Affinity;
            return Ok(decision);
        }
        let worker = view
            .lowest(candidates, |worker| {
                (!can_pair(worker), worker.ongoing_tokens)
            })
            .ok_or(Refusal::NoCandidates)?;
        decode_first::place(view, worker, false, Reason::FirstTurn)
    }
}
