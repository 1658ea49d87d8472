//! `power_of_two`: two workers drawn at random, the one with fewer requests wins.

use super::{
    Decision, Info, NoParams, Policy, Reason, Refusal, View, WorkerFacts, choose_each, parse_params,
};

pub const INFO: Info = Info {
    name: "power_of_two",
    summary: "the less busy of two workers drawn at random",
    rule: "two different candidates drawn uniformly; the one with fewer reserved requests; in a \
           fleet of prefill and decode workers, on each side",
    params: &[],
    source: "Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001",
    measured: "no figure in the seeds",
    build: |params| {
        parse_params::<NoParams>(params)?;
        Ok(Box::new(PowerOfTwo))
    },
};

struct PowerOfTwo;

impl Policy for PowerOfTwo {
    fn decide(&self, view: &View<'_>) -> Result<Decision, Refusal> {
        choose_each(view, Reason::PowerOfTwo, |workers| {
            draw(workers, view.random)
        })
    }
}

fn draw<'a>(workers: &[&'a WorkerFacts], random: u64) -> Option<&'a WorkerFacts> {
    let count = workers.len() as u64;
    let low = random & 0xffff_ffff;
    let first = *workers.get(low.checked_rem(count)? as usize)?;
    if count == 1 {
        return Some(first);
    }
    let step = 1 + (random >> 32) % (count - 1);
    let second = *workers.get(((low % count + step) % count) as usize)?;
    Some(if second.requests < first.requests {
        second
    } else {
        first
    })
}
