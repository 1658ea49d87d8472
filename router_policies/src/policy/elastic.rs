//! `elastic`: the cheapest of serving locally and every (P, D) pair, to this request and to those
//! that it would delay, with rates learnt from what just happened.
//!
//! cost(local W) = wait(W) + overhead(W) + slowdown(W) × compute(W) + stall(W) + crowd(W)
//! cost(P, D)    = wait(P) + compute(P) + overhead(D) + new(D)/transfer(D) + stall(P) + crowd(D)
//!
//! compute = new tokens and their attention pairs at the worker's learnt speeds; slowdown counts only
//! where others decode. stall = stall_weight × (requests decoding there) × compute / slowdown: every
//! stream that decodes on a worker waits while a prompt is prefilled there (H200, stock SGLang: eight
//! running decodes go from 12 to 402 ms a token during a 64k prompt), the less the more the worker
//! paces its prefills. crowd = what joining the decode batch costs: reading the context already there
//! (decode_weight, in prefill tokens a context token); where the KV does not fit, prefilling again what
//! must be evicted; and storing the new tokens, which evicts what idle sessions will ask for again
//! (displace_weight). A pair's cost is a sum of a term of P and a term of D, so the cheapest pair of a
//! transfer group is found without forming all pairs.

use super::{
    Alternative, Decision, Info, ParamInfo, Policy, Reason, Refusal, Route, View, WorkerFacts,
    parse_params,
};
use serde::Deserialize;

pub const INFO: Info = Info {
    name: "elastic",
    summary: "least predicted cost to this request and to those it delays, local or separated",
    rule: "minimise over local W and pairs (P, D): predicted first token (queue + prefill of new \
           tokens, slower where others decode; separated also transfer overhead + delta) + \
           stall_weight × decoding × prefill seconds / slowdown where it is prefilled + crowding \
           and displaced cache where it decodes; the session's worker is left only for a cost \
           lower by hysteresis_share and hysteresis_s",
    params: &[
        ParamInfo {
            name: "stall_weight",
            default: "0.2",
            meaning: "what a second of another stream's delay counts, in seconds of this request's",
        },
        ParamInfo {
            name: "displace_weight",
            default: "0.3",
            meaning: "what a token stored where the request decodes costs, in tokens prefilled there: \
                      it evicts another that may be asked for again",
        },
        ParamInfo {
            name: "decode_weight",
            default: "0.01",
            meaning: "what a context token being decoded costs, in prefill tokens",
        },
        ParamInfo {
            name: "hysteresis_share",
            default: "0.0",
            meaning: "share of the affine worker's cost that a move must save",
        },
        ParamInfo {
            name: "hysteresis_s",
            default: "0.05",
            meaning: "seconds that a move must save beyond that",
        },
        ParamInfo {
            name: "shown_alternatives",
            default: "4",
            meaning: "routes besides the chosen one that the decision lists, cheapest first",
        },
    ],
    source: "this project",
    measured: "4 × H200, 1 prefill and 3 elastic workers, 90 requests of 16 sessions that start at once: \
               realised/predicted first token, median, 1.02 local and 1.12 separated; TTFT p50 2.03 s, \
               against 0.70 s of four colocated workers under unified (the prefill worker spent 19 s \
               connecting). With the present defaults simulated only",
    build: |params| Ok(Box::new(parse_params::<Elastic>(params)?)),
};

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Elastic {
    stall_weight: f64,
    displace_weight: f64,
    decode_weight: f64,
    hysteresis_share: f64,
    hysteresis_s: f64,
    shown_alternatives: usize,
}

impl Default for Elastic {
    fn default() -> Self {
        Self {
            stall_weight: 0.2,
            displace_weight: 0.3,
            decode_weight: 0.01,
            hysteresis_share: 0.0,
            hysteresis_s: 0.05,
            shown_alternatives: 4,
        }
    }
}

struct Priced {
    route: Route,
    predicted_s: f64,
    cost_s: f64,
}

impl Elastic {
    fn stall_s(&self, view: &View<'_>, worker: &WorkerFacts) -> f64 {
        self.stall_weight * f64::from(worker.decoding) * view.compute_s(worker)
            / worker.rates.paced_slowdown
    }

    fn crowd_s(&self, view: &View<'_>, worker: &WorkerFacts) -> f64 {
        let needed = view.new_tokens(worker) + view.request.expected_output_tokens;
        let evicted = needed.saturating_sub(worker.kv_room_tokens());
        (self.decode_weight * worker.decode_tokens as f64 + evicted as f64)
            / worker.rates.prefill_tokens_per_s
            + self.displace_weight * worker.rates.paced_slowdown * view.compute_s(worker)
    }

    /// The cheapest partner of every decode worker, priced.
    fn pairs<'a>(&'a self, view: &'a View<'a>) -> impl Iterator<Item = Priced> + 'a {
        let cost_of_p = |p: &WorkerFacts| view.remote_prefill_s(p) + self.stall_s(view, p);
        // (group, the two cheapest): the second is for when the first is the decode worker itself.
        let mut cheapest: Vec<(u32, [Option<&WorkerFacts>; 2])> = Vec::new();
        for p in view.prefill() {
            let group = p.transfer_group;
            let entry = match cheapest.iter_mut().find(|(known, _)| *known == group) {
                Some((_, entry)) => entry,
                None => {
                    cheapest.push((group, [None, None]));
                    match cheapest.last_mut() {
                        Some((_, entry)) => entry,
                        None => continue,
                    }
                }
            };
            if entry[0].is_none_or(|best| cost_of_p(p) < cost_of_p(best)) {
                *entry = [Some(p), entry[0]];
            } else if entry[1].is_none_or(|second| cost_of_p(p) < cost_of_p(second)) {
                entry[1] = Some(p);
            }
        }
        view.decode().filter_map(move |decode| {
            let (_, entry) = cheapest
                .iter()
                .find(|(group, _)| *group == decode.transfer_group)?;
            let prefill = entry.iter().flatten().find(|p| p.slot != decode.slot)?;
            let predicted_s = view.remote_prefill_s(prefill) + view.transfer_s(decode);
            Some(Priced {
                route: Route::PrefillDecode {
                    prefill: prefill.slot,
                    decode: decode.slot,
                },
                predicted_s,
                cost_s: predicted_s + self.stall_s(view, prefill) + self.crowd_s(view, decode),
            })
        })
    }
}

impl Policy for Elastic {
    fn decide(&self, view: &View<'_>) -> Result<Decision, Refusal> {
        let local = view.local().map(|worker| {
            let predicted_s = view.local_prefill_s(worker);
            Priced {
                route: Route::Local {
                    worker: worker.slot,
                },
                predicted_s,
                cost_s: predicted_s + self.stall_s(view, worker) + self.crowd_s(view, worker),
            }
        });
        let mut priced: Vec<Priced> = local.chain(self.pairs(view)).collect();
        // Equal costs go in rotation; the sort is stable.
        let turn = view.sequence.checked_rem(priced.len() as u64);
        priced.rotate_left(turn.ok_or(Refusal::NoCandidates)? as usize);
        priced.sort_by(|a, b| a.cost_s.total_cmp(&b.cost_s));
        let affine = view.request.affine;
        let stays = |route: &Route| Some(route.answering()) == affine;
        let mut chosen = 0;
        let mut reason = Reason::LowestCost;
        if let Some(home) = priced.iter().position(|option| stays(&option.route)) {
            let bound_s = priced[home].cost_s * (1.0 - self.hysteresis_share) - self.hysteresis_s;
            if !stays(&priced[0].route) && priced[0].cost_s >= bound_s {
                (chosen, reason) = (home, Reason::Hysteresis);
            }
        }
        let picked = priced.remove(chosen);
        Ok(Decision {
            route: picked.route,
            reason,
            predicted_s: Some(picked.predicted_s),
            alternatives: priced
                .iter()
                .take(self.shown_alternatives)
                .map(|option| Alternative {
                    route: option.route,
                    predicted_s: option.predicted_s,
                })
                .collect(),
        })
    }
}
