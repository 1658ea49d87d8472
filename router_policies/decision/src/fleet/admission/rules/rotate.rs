//! `rotate`: as many sessions take turns as the tiers keep; more rotate, oldest wait first.

use super::{Info, Manner, Rule, parse};
use crate::fleet::admission::rotation::Rotates;
use crate::policy::ParamInfo;

pub const INFO: Info = Info {
    name: "rotate",
    summary: "as many sessions take turns as the tiers keep; more rotate, oldest wait first",
    rule: "Two schedulers a worker. Sessions: those are in whose last prompts, shared prefixes once, fill at most `keep` of the \
           host tier where it is larger than the GPU's KV, else what may be booked of that. While all fit nobody waits to enter. Else \
           the one that has waited longest enters next, and whoever has been in for longest leaves after its turn: \
           every 0.5 x patience_s / n seconds, n being how many wait, but never so often that computing their prompts takes more than \
           0.2 of the worker's time, unless that is more than patience_s apart. Who has ended, is silent for longer than nearly all \
           think, or for so long that keeping it costs more than to compute it again (its \
           prompt's computation x what the tiers keep / its tokens, by the share of sessions that come back while it has not) leaves at once for one that waits. Where computing \
           every prompt again at every turn would take no more than 0.6 of the worker's time, or all prompts once no more than 3 s, nobody is kept out. Turns go as \
           the GPU's KV has room for prompts and expected answers in flight (what is idle needs none where a tier gives it \
           back); nobody passes one that goes before it on the same worker. While the turns of all fit in 0.8 of the KV over \
           time, or sessions wait to enter, they go as they come. Else as many sessions as fit have a quantum, in which their turns go as they come; the others \
           wait, oldest first, and whoever has had a quantum for longest gives it up for them: every patience_s / n, n having one or waiting for one",
    params: &[
        ParamInfo {
            name: "patience_s",
            default: "120",
            meaning: "how long a session should wait at most. A worker whose sessions are expected to wait longer, however fast they rotate, is overloaded",
        },
        ParamInfo {
            name: "keep",
            default: "0.85",
            meaning: "the share of a worker's host tier that the prompts of those who are in may take; more of them, and the tier drops some between two turns",
        },
        ParamInfo {
            name: "overload",
            default: "\"rotate\"",
            meaning: "what becomes of new sessions while a worker is overloaded: they `rotate` with all others, wait at the `door` until those that came before fit, or are `refuse`d with Retry-After",
        },
    ],
    source: "ours; long-term and short-term scheduling, as operating systems do it",
    build: |params| {
        let params = parse::<Rotates>(params, |p| {
            vec![
                ("patience_s", "a number above 0", p.patience_s > 0.0),
                (
                    "keep",
                    "a share above 0 and up to 1",
                    p.keep > 0.0 && p.keep <= 1.0,
                ),
            ]
        })?;
        Ok(Box::new(params))
    },
};

impl Rule for Rotates {
    fn manner(&self) -> Manner {
        Manner {
            by_tokens: true,
            rotates: Some(*self),
            ..Manner::default()
        }
    }
}
