//! `priced`: a place is kept as long as keeping it costs less than computing what it holds again.

use super::{Demand, Info, Manner, Place, Rule, Slices, WorkerView, ordered, parse};
use crate::fleet::residency::give_up::GiveUp;
use crate::fleet::residency::identity::Key;
use crate::policy::ParamInfo;
use serde::Deserialize;

pub const INFO: Info = Info {
    name: "priced",
    summary: "a place is kept while that costs less than computing what it holds again",
    rule: "With capacity C, the n tokens that an idle session alone holds keep n/C of the worker from others, and \
           computing them again behind what others hold too (or reloading them from the host tier) takes R seconds of it (where that is no more than prefill_idle_recompute_s, as many of them as \
           there lately was something to prefill in for those that would compute it): the place pays for \
           g* = R·C/n seconds of idleness. While nobody waits nothing is given up. For a turn that waits, an idle \
           session may be given up where (a) there is no time h for which late_factor·g* × the chance that it returns within h is \
           worth the seconds of keeping it until then (one that is away for longer than sessions ever are has most likely had its last answer, \
           and of single prompts nearly every answer is the last: that share is learnt), or (b) it \
           has had its place for Q = g*/overhead seconds (at least least_share_s, at most most_share_s), or, while \
           the oldest wait goes from half of wait_bound_s to all of it (both as many times longer as those that wait \
           want what fits on all workers, and at least as long as computing all that a worker's GPU holds takes wait_bound_fills times), for a time that shrinks to \
           g*/pressed_overhead and never below, or (c) the worker has no turn in flight and computes the place again within cheap_recompute_s, or (d) it said that it ended. On a worker with a host tier sessions take turns in time slices: as many have one as hold \
           slice_fill of what may be booked and as slice_tier_fill of the tier keeps the prompts of, their turns go first (those first that have not waited for late_after_s), and each slice lasts as long as (b) with what computing all of it again costs and \
           slice_overhead as the overhead under pressure. The cheapest goes first: R × the chance that it returns within g*, for each token freed; of \
           equals the longest idle",
    params: &[
        ParamInfo {
            name: "overhead",
            default: "0.1",
            meaning: "the share of a worker's time that taking turns may cost",
        },
        ParamInfo {
            name: "pressed_overhead",
            default: "0.6",
            meaning: "the same once somebody has waited for wait_bound_s; without a bound everything is recomputed again",
        },
        ParamInfo {
            name: "late_factor",
            default: "2",
            meaning: "a return is worth so many times g* of idleness; below 2, sessions that think for a minute lose their places too soon",
        },
        ParamInfo {
            name: "least_share_s",
            default: "5",
            meaning: "a share is never less (but a place whose session returns late goes sooner)",
        },
        ParamInfo {
            name: "most_share_s",
            default: "400",
            meaning: "after so long anybody may have to",
        },
        ParamInfo {
            name: "wait_bound_s",
            default: "90",
            meaning: "the wait at which shares are as short as pressed_overhead allows; they shrink from half of it on. Where more waits than fits on all workers, as many times longer",
        },
        ParamInfo {
            name: "wait_bound_fills",
            default: "4.5",
            meaning: "the bound is at least as long as computing all that a worker's GPU holds takes so many times, for a round of turns costs as much; 0 leaves it at wait_bound_s",
        },
        ParamInfo {
            name: "reload_tokens_per_s",
            default: "1000000",
            meaning: "what a host tier gives back for a second of the worker's time (workers with host_kv_tokens): more than it copies in a second, for the worker computes beside the copy",
        },
        ParamInfo {
            name: "cheap_recompute_s",
            default: "0.5",
            meaning: "a place that is computed again in no more than this goes to one that waits while the worker has no turn in flight; 0 keeps it, and the worker idle",
        },
        ParamInfo {
            name: "prefill_idle_recompute_s",
            default: "0",
            meaning: "what is computed again in no more than this costs only the share of that time in which there lately was something to prefill for those that would compute it: where they idle it takes nothing from anybody. As long as a first token may take (3) where prompts are computed within it; 0 prices them all alike",
        },
        ParamInfo {
            name: "slice_fill",
            default: "0.55",
            meaning: "the share of what may be booked that sessions with a time slice hold, half of it by what is in flight, half by what is expected over time; more of them is more requests/s, and later turns where not all fit",
        },
        ParamInfo {
            name: "slice_tier_fill",
            default: "0.8",
            meaning: "the share of a worker's host tier that the prompts of sessions with a time slice may take, but for those that are computed again within cheap_recompute_s; more of them, and the tier drops some before they come back",
        },
        ParamInfo {
            name: "slice_from_fill",
            default: "0.85",
            meaning: "nobody needs a time slice while the turns of all that take turns on a worker, waiting ones too, hold no more than this share of what may be booked over time, and slice_tier_fill of the tier keeps their prompts: then room on the GPU alone decides; 0 has slices always",
        },
        ParamInfo {
            name: "slice_overhead",
            default: "0.2",
            meaning: "as pressed_overhead, for time slices: the share of a worker's time that changing who has one may cost; never less than overhead",
        },
        ParamInfo {
            name: "late_after_s",
            default: "3",
            meaning: "a turn of a session with a time slice that has waited so long is late, and goes behind those that can still be in time, by at most a third of wait_bound_s: the objective for a first token, or more than max_wait_s for the order of arrival",
        },
    ],
    gives_places: true,
    source: "ours; the five-minute rule (Gray and Putzolu 1987) for KV. Nearest: Adaptive KV Retention (arXiv \
             2608.30830) prices the host tier's time to live, Continuum (2511.02230) a fixed cost a second",
    build: |params| {
        let params = parse::<Priced>(params, |p| {
            vec![
                (
                    "overhead",
                    "a share above 0 and up to 1",
                    p.overhead > 0.0 && p.overhead <= 1.0,
                ),
                (
                    "pressed_overhead",
                    "a share of overhead or more and up to 1",
                    p.pressed_overhead >= p.overhead && p.pressed_overhead <= 1.0,
                ),
                ("late_factor", "a number above 0", p.late_factor > 0.0),
                (
                    "least_share_s",
                    "a number of 0 or more",
                    p.least_share_s >= 0.0,
                ),
                (
                    "most_share_s",
                    "a number of least_share_s or more",
                    p.most_share_s >= p.least_share_s,
                ),
                ("wait_bound_s", "a number above 0", p.wait_bound_s > 0.0),
                (
                    "wait_bound_fills",
                    "a number of 0 or more",
                    p.wait_bound_fills >= 0.0,
                ),
                (
                    "reload_tokens_per_s",
                    "a number above 0",
                    p.reload_tokens_per_s > 0.0,
                ),
                (
                    "cheap_recompute_s",
                    "a number of 0 or more",
                    p.cheap_recompute_s >= 0.0,
                ),
                (
                    "prefill_idle_recompute_s",
                    "a number of 0 or more",
                    p.prefill_idle_recompute_s >= 0.0,
                ),
                (
                    "slice_fill",
                    "a share above 0 and up to 1",
                    p.slice_fill > 0.0 && p.slice_fill <= 1.0,
                ),
                (
                    "slice_tier_fill",
                    "a number above 0",
                    p.slice_tier_fill > 0.0,
                ),
                (
                    "slice_from_fill",
                    "a number of 0 or more",
                    p.slice_from_fill >= 0.0,
                ),
                (
                    "slice_overhead",
                    "a share above 0 and up to 1",
                    p.slice_overhead > 0.0 && p.slice_overhead <= 1.0,
                ),
                (
                    "late_after_s",
                    "a number of 0 or more",
                    p.late_after_s >= 0.0,
                ),
            ]
        })?;
        Ok(Box::new(params))
    },
};

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Priced {
    overhead: f64,
    pressed_overhead: f64,
    late_factor: f64,
    least_share_s: f64,
    most_share_s: f64,
    wait_bound_s: f64,
    wait_bound_fills: f64,
    reload_tokens_per_s: f64,
    cheap_recompute_s: f64,
    prefill_idle_recompute_s: f64,
    slice_fill: f64,
    slice_tier_fill: f64,
    slice_from_fill: f64,
    slice_overhead: f64,
    late_after_s: f64,
}

impl Default for Priced {
    fn default() -> Self {
        Self {
            overhead: 0.1,
            pressed_overhead: 0.6,
            late_factor: 2.0,
            least_share_s: 5.0,
            most_share_s: 400.0,
            wait_bound_s: 90.0,
            wait_bound_fills: 4.5,
            reload_tokens_per_s: 1_000_000.0,
            cheap_recompute_s: 0.5,
            prefill_idle_recompute_s: 0.0,
            slice_fill: 0.55,
            slice_tier_fill: 0.8,
            slice_from_fill: 0.85,
            slice_overhead: 0.2,
            late_after_s: 3.0,
        }
    }
}

impl Priced {
    /// R: what bringing it back costs, in seconds of the worker's time.
    fn return_s(&self, view: &WorkerView<'_>, place: &Place) -> f64 {
        let is_soon_computed = place.recompute_s <= self.prefill_idle_recompute_s;
        let wanted = if is_soon_computed {
            view.prefill_share
        } else {
            1.0
        };
        let computed_s = place.recompute_s * wanted;
        let reload_s = place.unshared_tokens as f64 / self.reload_tokens_per_s;
        let held_s = reload_s.min(computed_s) * place.host_share;
        held_s + computed_s * (1.0 - place.host_share)
    }

    /// g*: the idle time that keeping the place pays for.
    fn worth_s(&self, view: &WorkerView<'_>, place: &Place) -> f64 {
        let share = place.unshared_tokens.max(1) as f64 / view.kv_capacity_tokens.max(1) as f64;
        self.return_s(view, place) / share
    }

    /// Whether a worker that has nothing to do while turns wait loses more than computing the place again
    /// costs.
    fn idles_for_it(&self, view: &WorkerView<'_>, place: &Place) -> bool {
        !view.is_working && place.recompute_s <= self.cheap_recompute_s
    }

    /// Q: how long it may keep the place from one that waits. Never so short that taking turns costs
    /// more than `pressed_overhead`: where more wait than any bound on waits allows, shares that
    /// shrink to nothing make every turn a swap, and everything is recomputed again.
    fn share_s(
        &self,
        worth_s: f64,
        pressed_overhead: f64,
        oldest_wait_s: f64,
        bound_scale: f64,
    ) -> f64 {
        let at = |overhead: f64| (worth_s / overhead).clamp(self.least_share_s, self.most_share_s);
        let (share_s, pressed_s) = (at(self.overhead), at(pressed_overhead));
        let half_s = self.wait_bound_s * bound_scale / 2.0;
        let pressure = ((oldest_wait_s - half_s) / half_s).clamp(0.0, 1.0);
        share_s + (pressed_s - share_s) * pressure
    }
}

impl Rule for Priced {
    fn manner(&self) -> Manner {
        Manner {
            backfills: true,
            bound_fills: self.wait_bound_fills,
            slices: Some(Slices {
                fill: self.slice_fill,
                tier_fill: self.slice_tier_fill,
                from_fill: self.slice_from_fill,
                cheap_s: self.cheap_recompute_s,
                late_after_s: self.late_after_s,
            }),
            ..Manner::default()
        }
    }

    fn slice_s(&self, worth_s: f64, demand: Demand) -> f64 {
        match demand {
            Demand::Growth => f64::INFINITY,
            Demand::Waiting {
                oldest_wait_s,
                bound_scale,
            } => {
                let pressed_overhead = self.slice_overhead.max(self.overhead);
                self.share_s(worth_s, pressed_overhead, oldest_wait_s, bound_scale)
            }
        }
    }

    fn may_give_up(&self, view: &WorkerView<'_>, demand: Demand) -> Vec<(Key, GiveUp)> {
        let eligible = |place: &Place| {
            let Demand::Waiting {
                oldest_wait_s,
                bound_scale,
            } = demand
            else {
                return None;
            };
            let worth_s = self.worth_s(view, place);
            // This first: where nobody is expected back a place costs nothing, however old it is.
            if !view.keeping_pays(place, self.late_factor * worth_s) {
                Some(GiveUp::ReturnsLate)
            } else if place.tenure_s
                >= self.share_s(worth_s, self.pressed_overhead, oldest_wait_s, bound_scale)
            {
                Some(GiveUp::HadItsShare)
            } else if self.idles_for_it(view, place) {
                Some(GiveUp::WorkerIdle)
            } else {
                None
            }
        };
        let price = |place: &Place| {
            let returns = match place.returns_in_s {
                Some(seconds) if seconds > 0.0 => f64::from(seconds <= self.worth_s(view, place)),
                _ if place.waits_for_children => 0.0,
                _ => {
                    let horizon_s = self.worth_s(view, place);
                    view.gaps
                        .returns_within(&place.gaps, place.last_share, place.idle_s, horizon_s)
                }
            };
            self.return_s(view, place) * returns / place.unshared_tokens.max(1) as f64
        };
        ordered(view, demand, eligible, price)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{WAITING, idle, keys, view};
    use super::*;
    use crate::fleet::residency::gaps::{Gaps, OwnGaps};
    use serde_json::json;

    fn quick() -> OwnGaps {
        let mut gaps = OwnGaps::default();
        (0..8).for_each(|_| gaps.note(1.0));
        gaps
    }

    #[test]
    fn a_place_is_worth_the_idle_time_that_computing_it_again_costs() {
        let rule = Priced::default();
        let gaps = Gaps::default();
        // A quarter of the worker, 4.5 s to compute: 18 s of idleness cost as much.
        let mut place = idle(1, 25_000, 0.0);
        place.recompute_s = 4.5;
        let view = view(std::slice::from_ref(&place), &gaps);
        assert!((rule.worth_s(&view, &place) - 18.0).abs() < 1e-9);
        // Three quarters of it are shared: they are neither kept by this place nor computed again for it.
        let shared = Place {
            unshared_tokens: 6_250,
            recompute_s: 1.5,
            ..place.clone()
        };
        assert!((rule.worth_s(&view, &shared) - 24.0).abs() < 1e-9);
        // A host tier makes the return cheap: 25 ms.
        let held = |host_share| Place {
            host_share,
            ..place.clone()
        };
        assert!((rule.worth_s(&view, &held(1.0)) - 0.1).abs() < 1e-9);
        // A tier that holds half of it leaves the other half to be computed.
        assert!((rule.worth_s(&view, &held(0.5)) - 9.05).abs() < 1e-9);
    }

    #[test]
    fn shares_shrink_as_others_wait() {
        let rule = Priced::default();
        let shares =
            [0.0, 45.0, 67.5, 90.0, 500.0].map(|wait_s| rule.share_s(9.0, 0.6, wait_s, 1.0));
        assert_eq!(
            shares,
            [90.0, 90.0, 52.5, 15.0, 15.0],
            "never to nothing: that is the collapse that residency is to prevent"
        );
        assert_eq!(
            (
                rule.share_s(0.1, 0.6, 0.0, 1.0),
                rule.share_s(1e3, 0.6, 0.0, 1.0)
            ),
            (5.0, 400.0)
        );
        assert_eq!(
            [67.5, 135.0, 180.0].map(|wait_s| rule.share_s(9.0, 0.6, wait_s, 2.0)),
            [90.0, 52.5, 15.0],
            "waits may be twice as long where twice as much waits as fits"
        );
    }

    #[test]
    fn time_slices_shrink_as_others_wait_and_growth_ends_none() {
        let rule = Priced::default();
        let waiting = |oldest_wait_s, bound_scale| Demand::Waiting {
            oldest_wait_s,
            bound_scale,
        };
        let slices = [0.0, 45.0, 67.5, 90.0, 500.0].map(|s| rule.slice_s(9.0, waiting(s, 1.0)));
        for (slice_s, expected_s) in slices.into_iter().zip([90.0, 90.0, 67.5, 45.0, 45.0]) {
            assert!((slice_s - expected_s).abs() < 1e-9, "{slices:?}");
        }
        let nobody_waits_s = rule.slice_s(9.0, Demand::NOBODY_WAITS);
        assert!((nobody_waits_s - 90.0).abs() < 1e-9, "{nobody_waits_s}");
        assert_eq!(
            [0.1, 1e3].map(|worth_s| rule.slice_s(worth_s, waiting(90.0, 1.0))),
            [5.0, 400.0],
            "never shorter and never longer than any share"
        );
        let scaled_s = rule.slice_s(9.0, waiting(135.0, 2.0));
        assert!((scaled_s - 67.5).abs() < 1e-9, "{scaled_s}");
        assert_eq!(rule.slice_s(9.0, Demand::Growth), f64::INFINITY);
        // A larger share of the worker's time for taking turns is one for time slices too.
        let rule = Priced {
            overhead: 0.5,
            ..Priced::default()
        };
        assert!((rule.slice_s(9.0, waiting(90.0, 1.0)) - 18.0).abs() < 1e-9);
    }

    #[test]
    fn who_returns_soon_is_kept_and_who_returns_late_is_not() {
        let rule = (INFO.build)(json!({})).expect("a rule");
        let gaps = Gaps::default();
        let mut soon = idle(1, 25_000, 0.5);
        soon.gaps = quick();
        soon.recompute_s = 4.5;
        soon.tenure_s = 100.0;
        let mut far = soon.clone();
        (far.key, far.returns_in_s) = (2, Some(60.0));
        let mut parent = soon.clone();
        (parent.key, parent.waits_for_children) = (3, true);
        let mut over = soon.clone();
        (over.key, over.ended) = (4, true);
        let mut busy = far.clone();
        (busy.key, busy.is_idle) = (5, false);
        let places = [soon, far, parent, over, busy];
        let view = view(&places, &gaps);
        assert_eq!(keys(rule.may_give_up(&view, WAITING)), [4, 2, 3]);
        let long = Demand::Waiting {
            oldest_wait_s: 120.0,
            bound_scale: 1.0,
        };
        let all = rule.may_give_up(&view, long);
        assert_eq!(all.len(), 4, "at the bound it has had its share");
        assert_eq!(
            all.last(),
            Some(&(1, GiveUp::HadItsShare)),
            "the dearest last"
        );
    }

    /// Of a session that comes back at once, computed again in so long.
    fn quick_place(key: Key, recompute_s: f64) -> Place {
        Place {
            gaps: quick(),
            recompute_s,
            ..idle(key, 25_000, 0.5)
        }
    }

    #[test]
    fn an_idle_worker_gives_up_what_it_computes_again_at_once() {
        let gaps = Gaps::default();
        // The prompt of a small model, and one that takes seconds.
        let places = [quick_place(1, 0.4), quick_place(2, 4.5)];
        let busy = view(&places, &gaps);
        let idle_worker = WorkerView {
            is_working: false,
            ..view(&places, &gaps)
        };
        let rule = (INFO.build)(json!({})).expect("a rule");
        assert_eq!(rule.may_give_up(&busy, WAITING), []);
        let chosen = rule.may_give_up(&idle_worker, WAITING);
        assert_eq!(chosen, [(1, GiveUp::WorkerIdle)]);
        let rule = (INFO.build)(json!({"cheap_recompute_s": 0})).expect("a rule");
        assert_eq!(rule.may_give_up(&idle_worker, WAITING), []);
    }

    #[test]
    fn what_is_soon_computed_by_workers_that_hardly_prefill_is_cheap_if_asked_to() {
        let gaps = Gaps::default();
        let places = [quick_place(1, 2.9), quick_place(2, 3.1)];
        let hardly_prefills = WorkerView {
            prefill_share: 0.01,
            ..view(&places, &gaps)
        };
        let prefills = view(&places, &gaps);
        let asked = (INFO.build)(json!({"prefill_idle_recompute_s": 3})).expect("a rule");
        assert_eq!(
            asked.may_give_up(&hardly_prefills, WAITING),
            [(1, GiveUp::ReturnsLate)]
        );
        assert_eq!(asked.may_give_up(&prefills, WAITING), []);
        let unasked = (INFO.build)(json!({})).expect("a rule");
        assert_eq!(unasked.may_give_up(&hardly_prefills, WAITING), []);
    }

    #[test]
    fn a_place_to_which_nobody_comes_back_is_free_however_old_it_is() {
        let rule = (INFO.build)(json!({})).expect("a rule");
        let gaps = Gaps::default();
        let mut gone = idle(1, 25_000, 1_000.0);
        gone.tenure_s = 2_000.0;
        let places = [gone];
        assert_eq!(
            rule.may_give_up(&view(&places, &gaps), WAITING),
            [(1, GiveUp::ReturnsLate)]
        );
    }

    #[test]
    fn wrong_parameters_are_named() {
        for (params, field) in [
            (json!({"overhead": 1.5}), "overhead"),
            (json!({"overhead": 0}), "overhead"),
            (json!({"wait_bound_s": -1}), "wait_bound_s"),
            (json!({"wait_bound_fills": -1}), "wait_bound_fills"),
            (json!({"most_share_s": 1}), "most_share_s"),
            (json!({"pressed_overhead": 0.05}), "pressed_overhead"),
            (json!({"late_factor": 0}), "late_factor"),
            (json!({"cheap_recompute_s": -1}), "cheap_recompute_s"),
            (
                json!({"prefill_idle_recompute_s": -1}),
                "prefill_idle_recompute_s",
            ),
            (json!({"slice_fill": 0}), "slice_fill"),
            (json!({"slice_fill": 1.1}), "slice_fill"),
            (json!({"late_after_s": -1}), "late_after_s"),
            (json!({"slice_overhead": 0}), "slice_overhead"),
            (json!({"slice_overhead": 1.1}), "slice_overhead"),
            (json!({"overheads": 1}), "overheads"),
        ] {
            let error = (INFO.build)(params).err().expect("refused");
            assert!(error.contains(field), "{error}");
        }
    }
}
