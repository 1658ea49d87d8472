//! `elastic`: the cheapest of serving locally and every (P, D) pair, to this request and to those
//! that it would delay, with rates learnt from what just happened.
//!
//! cost(local W) = first(W) + decode(W) + stall(W) + displace(W)
//! cost(P, D)    = first(P, D) + decode(D) + stall(P) + displace(D)
//!
//! All are seconds. first: until the first token, as predicted. A prefill waits for those before it,
//! takes its new tokens and their attention pairs at the worker's learnt speeds (more slowly where others
//! decode), and where it is separated the missing KV is then sent. A KV pool that is full means waiting
//! until running requests end, beside the prefill's own wait.
//!
//! decode: output_weight × the answer's own steps, expected output × step(n + 1, C + context), and
//! stall_weight × what it adds to the steps of the n that decode with it. n and C (their context tokens)
//! count those on their way too: a burst would else all go to the worker that has decoded least so far.
//! Of the others' answers half is still to come, on average, so they share half of this one's steps.
//!
//! stall = stall_weight × n decoding there × compute: every stream that decodes on a worker loses the
//! time that a prompt is prefilled there (H200, stock SGLang: eight running decodes go from 12 to 402 ms
//! a token during a 64k prompt). A worker that paces its prefills spreads that over more tokens; the sum
//! is the same, so it is not called smaller.
//!
//! displace = displace_weight × computing again what the new tokens push out of the cache: nothing as
//! long as that has room.
//!
//! Unless a decode worker is full, a pair's cost is a sum of a term of P and a term of D, so the cheapest
//! pair of a transfer group is found without forming all pairs.

use super::{
    Alternative, Cost, Decision, Info, ParamInfo, Policy, Reason, Refusal, Route, View,
    WorkerFacts, parse_params,
};
use serde::Deserialize;

pub const INFO: Info = Info {
    name: "elastic",
    summary: "least predicted cost to this request and to those it delays, local or separated",
    rule: "minimise over local W and pairs (P, D): predicted first token (queue + prefill of new \
           tokens, slower where others decode, later where the KV pool is full; separated also transfer \
           overhead + delta) + output_weight × expected output × step(batch, context) where it decodes, \
           those on their way counted + stall_weight × (decoding × prefill seconds where it is prefilled + \
           what it adds to the others' steps) + displace_weight × recomputing what it pushes out of the \
           cache; the session's worker is left only for a cost lower by hysteresis_share and hysteresis_s",
    params: &[
        ParamInfo {
            name: "stall_weight",
            default: "0.2",
            meaning: "what a second of another stream's delay counts, in seconds of this request's",
        },
        ParamInfo {
            name: "displace_weight",
            default: "0.3",
            meaning: "what computing again a token that is pushed out of the cache counts: the chance \
                      that it is asked for",
        },
        ParamInfo {
            name: "output_weight",
            default: "1.0",
            meaning: "what a second of this request's decoding counts, in seconds until its first token",
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
    output_weight: f64,
    hysteresis_share: f64,
    hysteresis_s: f64,
    shown_alternatives: usize,
}

impl Default for Elastic {
    fn default() -> Self {
        Self {
            stall_weight: 0.2,
            displace_weight: 0.3,
            output_weight: 1.0,
            hysteresis_share: 0.0,
            hysteresis_s: 0.05,
            shown_alternatives: 4,
        }
    }
}

struct Priced {
    route: Route,
    first_token_s: f64,
    total_s: f64,
}

impl Priced {
    fn new(route: Route, cost: Cost) -> Self {
        Self {
            route,
            first_token_s: cost.first_token_s,
            total_s: cost.total_s(),
        }
    }
}

impl Elastic {
    fn stall_s(&self, view: &View<'_>, worker: &WorkerFacts) -> f64 {
        self.stall_weight * f64::from(worker.decoding) * view.compute_s(worker)
    }

    fn decode_s(&self, view: &View<'_>, worker: &WorkerFacts) -> f64 {
        let rates = &worker.rates;
        let output = view.request.expected_output_tokens as f64;
        let context = view.request.input_tokens as f64;
        let others = f64::from(worker.decoding + worker.arriving);
        let of_others = (worker.decode_tokens + worker.arriving_tokens) as f64;
        let own_s = output * rates.step_s(others + 1.0, of_others + context);
        let added_s = rates.decode_per_request_s + rates.decode_per_context_token_s * context;
        self.output_weight * own_s + self.stall_weight * others * output / 2.0 * added_s
    }

    fn displace_s(&self, view: &View<'_>, worker: &WorkerFacts) -> f64 {
        let new = view.new_tokens(worker);
        let displaced = view.displaced_tokens(worker);
        self.displace_weight * displaced as f64 * view.compute_s(worker) / new.max(1) as f64
    }

    /// The cost of a prefill on one worker, the first token after so long, and the rest on another one,
    /// or on the same.
    fn cost(
        &self,
        view: &View<'_>,
        first_token_s: f64,
        prefill: &WorkerFacts,
        decode: &WorkerFacts,
    ) -> Cost {
        Cost {
            first_token_s,
            stall_s: self.stall_s(view, prefill),
            decode_s: self.decode_s(view, decode),
            displace_s: self.displace_s(view, decode),
        }
    }

    /// The terms of an option's cost: computed again for the few that are shown, so that sorting all of
    /// them does not move the terms about.
    fn cost_of(&self, view: &View<'_>, option: &Priced) -> Option<Cost> {
        let prefill = view.workers.get(option.route.prefilling())?;
        let decode = view.workers.get(option.route.answering())?;
        Some(self.cost(view, option.first_token_s, prefill, decode))
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
        let price = move |prefill: &WorkerFacts, decode: &WorkerFacts| {
            let route = Route::PrefillDecode {
                prefill: prefill.slot,
                decode: decode.slot,
            };
            let first_token_s = view.separated_s(prefill, decode);
            Priced::new(route, self.cost(view, first_token_s, prefill, decode))
        };
        view.decode().filter_map(move |decode| {
            if view.admission_s(decode) > 0.0 {
                // While it is full, a prefill that takes longer may cost no more time.
                let priced = view.partners(decode).map(|p| price(p, decode));
                return priced.min_by(|a, b| a.total_s.total_cmp(&b.total_s));
            }
            let (_, entry) = cheapest
                .iter()
                .find(|(group, _)| *group == decode.transfer_group)?;
            let prefill = entry.iter().flatten().find(|p| p.slot != decode.slot)?;
            Some(price(prefill, decode))
        })
    }
}

impl Policy for Elastic {
    fn decide(&self, view: &View<'_>) -> Result<Decision, Refusal> {
        let local = view.local().map(|worker| {
            let route = Route::Local {
                worker: worker.slot,
            };
            let first_token_s = view.local_prefill_s(worker);
            Priced::new(route, self.cost(view, first_token_s, worker, worker))
        });
        let mut priced: Vec<Priced> = local.chain(self.pairs(view)).collect();
        // Equal costs go in rotation; the sort is stable.
        let turn = view.sequence.checked_rem(priced.len() as u64);
        priced.rotate_left(turn.ok_or(Refusal::NoCandidates)? as usize);
        priced.sort_by(|a, b| a.total_s.total_cmp(&b.total_s));
        let affine = view.request.affine;
        let stays = |route: &Route| Some(route.answering()) == affine;
        let mut chosen = 0;
        let mut reason = Reason::LowestCost;
        if let Some(home) = priced.iter().position(|option| stays(&option.route)) {
            let bound_s = priced[home].total_s * (1.0 - self.hysteresis_share) - self.hysteresis_s;
            if !stays(&priced[0].route) && priced[0].total_s >= bound_s {
                (chosen, reason) = (home, Reason::Hysteresis);
            }
        }
        let picked = priced.remove(chosen);
        Ok(Decision {
            route: picked.route,
            reason,
            predicted_s: Some(picked.first_token_s),
            cost: self.cost_of(view, &picked),
            alternatives: priced
                .iter()
                .take(self.shown_alternatives)
                .map(|option| Alternative {
                    route: option.route,
                    predicted_s: option.first_token_s,
                    cost: self.cost_of(view, option),
                })
                .collect(),
        })
    }
}
