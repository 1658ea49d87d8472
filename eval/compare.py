"""Two arms on the same requests: how much they differ, how sure that is, and the verdict.

Owns what is compared with what, and why not. Works on logarithms, so that effects are ratios, and
on points where a measure is a share. Knows runs and metrics' names; not files or formatting.

Two things make a difference uncertain, and both are counted. Other sessions could have been in the
trace: the session bootstrap, the same resamples in both arms. And the same arm run again gives
other numbers: the spread between repeats (A/A) of these two arms at this load, less the part that
the bootstrap counts already. Neither is taken from other arms or loads: an overloaded one would
lend its noise to a quiet one, and the other way round. Where every round had a trace of its own,
rounds are compared one by one and their differences hold both. With one run an arm the spread is
unknown, and then nothing is judged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from eval.experiment import Slo
from eval.identity import different_workload, draws_of
from eval.noise import (
    Difference,
    Noise,
    Verdict,
    difference,
    difference_by_round,
    holm,
    judge,
    p_value,
)
from eval.outcomes import MEASURES, Measure
from eval.records import Run
from eval.series import Series, SeriesOf, better_share
from eval.stats import Estimate, SessionBootstrap
from eval.steady import not_sustained
from eval.stretch import Alone

__all__ = ["Comparison", "Verdict", "compare_cells", "with_holm"]


@dataclass(frozen=True)
class Comparison:
    """One arm over the baseline in one measure.

    `effect` is the ratio of the arm to the baseline, or for a share (`measure.in_points`) the
    difference, 0.01 being one point. `noise_floor` is the effect, less 1 for a ratio, that repeats
    of one arm reach. `primary` measures are those that the experiment is about; `holds` says of
    them whether they stay significant when all of them are allowed for, None where not judged.
    `reason` says why there is no verdict. `requests` is how many requests of a run are compared.
    """

    measure: Measure
    baseline: str
    arm: str
    effect: Estimate
    noise_floor: float
    p_value: float
    verdict: Verdict
    requests: int
    better_share: float
    primary: bool = False
    holds: bool | None = None
    reason: str | None = None

    @property
    def ratio(self) -> Estimate:
        """The effect as a ratio; unknown for a measure that is compared in points."""
        if not self.measure.in_points:
            return self.effect
        return Estimate(float("nan"), float("nan"), float("nan"), self.effect.n)


def with_holm(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The same with `holds`, by Holm's correction over what is judged of primary measures."""
    judged = [item for item in comparisons if item.primary and math.isfinite(item.p_value)]
    kept = holm([item.p_value for item in judged])
    found = {id(item): keep for item, keep in zip(judged, kept, strict=True)}
    return [replace(item, holds=found.get(id(item))) for item in comparisons]


@dataclass(frozen=True)
class _Terms:
    """What every comparison of a report shares."""

    series: SeriesOf
    alone: Mapping[str, Alone | None]
    primary: Sequence[str]
    unsteady: dict[str, str | None] = field(default_factory=dict)


def compare_cells(
    cells: Mapping[str, Sequence[Run]],
    pairs: Sequence[tuple[str, str]],
    boot: SessionBootstrap,
    measures: Sequence[Measure] = MEASURES,
    *,
    slo: Slo | None = None,
    alone: Mapping[str, Alone | None] | None = None,
    primary: Sequence[str] = (),
) -> list[Comparison]:
    """Compares each (baseline, arm) of `pairs`, names of `cells`, in every measure that either has.

    Single requests are compared on those that both arms were asked in every run; in a measured
    window, where arms get as far as they get, on all of it. Requests that servers failed count as
    twice as slow as the slowest that was answered. `alone` is by arm; `primary` are measures' keys,
    over whose comparisons (of all `pairs`) Holm's correction is made.
    """
    terms = _Terms(SeriesOf(boot, measures, slo or Slo()), alone or {}, primary)
    found = [
        _compare(cells, pair, measure, terms)
        for pair in pairs
        for measure in _worth(cells, pair, measures, terms)
    ]
    return with_holm(found)


def _worth(
    cells: Mapping[str, Sequence[Run]],
    pair: tuple[str, str],
    measures: Sequence[Measure],
    terms: _Terms,
) -> list[Measure]:
    """The measures worth a row: figures a GPU only where arms have different numbers of them, and
    those that need more than result lines only where it is there."""
    base, other = cells[pair[0]], cells[pair[1]]
    runs = [*base, *other]
    found = []
    for measure in measures:
        wanted = measure.key in terms.primary
        if measure.per_gpu:
            known = all(run.gpus is not None for run in runs)
            if known and (wanted or base[0].gpus != other[0].gpus):
                found.append(measure)
        elif measure.key == "stretch_p90" and not wanted:
            if any(terms.alone.get(run.arm) is not None for run in runs):
                found.append(measure)
        elif measure.key == "recomputed_share" and not wanted:
            if any(run.requests["best_cached_tokens"].notna().any() for run in runs):
                found.append(measure)
        else:
            found.append(measure)
    return found


def _compare(
    cells: Mapping[str, Sequence[Run]], pair: tuple[str, str], measure: Measure, terms: _Terms
) -> Comparison:
    base_runs, other_runs = cells[pair[0]], cells[pair[1]]
    reason = different_workload(base_runs, other_runs)
    if reason is not None:
        return _unjudged(measure, pair, terms, reason)
    for name in pair:
        if name not in terms.unsteady:
            terms.unsteady[name] = not_sustained(cells[name])
        if (words := terms.unsteady[name]) is not None:
            return _unjudged(measure, pair, terms, words)
    if draws_of([*base_runs, *other_runs]):
        groups = _rounds(base_runs, other_runs)
    else:
        groups = [(list(base_runs), list(other_runs))]
    common = [terms.series.common([*base, *other], measure) for base, other in groups]
    groups = [group for group, shared in zip(groups, common, strict=True) if shared.count]
    common = [shared for shared in common if shared.count]
    if not groups:
        return _unjudged(measure, pair, terms, "no request in common, so nothing compares them")
    # One bound for the pair: what failed is as slow in one arm as in the other.
    ceiling = terms.series.ceiling([*base_runs, *other_runs], measure, terms.alone)
    made = [
        tuple(
            [terms.series.of(run, measure, shared.requests, terms.alone, ceiling) for run in runs]
            for runs in group
        )
        for group, shared in zip(groups, common, strict=True)
    ]
    if draws_of([*base_runs, *other_runs]):
        delta, noise = difference_by_round([(base[0], other[0]) for base, other in made])
    else:
        sessions = len({name for run in made[0][0] + made[0][1] for name in run.sessions})
        delta, noise = difference(made[0][0], made[0][1], sessions)
    half_width, floor = delta.half_width(), noise.floor()
    verdict = judge(delta.value, half_width, floor, lower_is_better=measure.lower_is_better)
    requests = min(shared.count for shared in common)
    return Comparison(
        measure=measure,
        baseline=pair[0],
        arm=pair[1],
        effect=_effect(measure, delta.value, half_width, requests, made),
        noise_floor=floor if measure.in_points else _exp(floor) - 1,
        p_value=p_value(delta, noise),
        verdict=verdict,
        requests=requests,
        better_share=better_share(groups, [shared.requests for shared in common], measure),
        primary=measure.key in terms.primary,
        reason=_why(delta, noise) if verdict is Verdict.UNJUDGED else None,
    )


def _rounds(base: Sequence[Run], other: Sequence[Run]) -> list[tuple[list[Run], list[Run]]]:
    """Runs of the same round, one of each arm."""
    by_round = {run.repeat: run for run in base}
    return [([by_round[run.repeat]], [run]) for run in other if run.repeat in by_round]


def _effect(
    measure: Measure,
    delta: float,
    half_width: float,
    requests: int,
    made: Sequence[tuple[list[Series], ...]],
) -> Estimate:
    """The difference as the measure is told: infinite or zero where one arm's runs are beyond any
    answer, or served nothing, and the other's are not."""
    if measure.in_points:
        return Estimate(delta, delta - half_width, delta + half_width, requests)
    sides = [[run for group in made for run in group[side]] for side in (0, 1)]
    beyond = [any(run.beyond for run in side) for side in sides]
    none = [all(run.none for run in side) for side in sides]
    value, low, high = (_exp(each) for each in (delta, delta - half_width, delta + half_width))
    if beyond == [False, True] or none == [True, False]:
        value = high = float("inf")
    elif beyond == [True, False] or none == [False, True]:
        value = low = 0.0
    return Estimate(value, low, high, requests)


def _why(delta: Difference, noise: Noise) -> str:
    if not math.isfinite(delta.value):
        return "not measured in both arms"
    if noise.freedom <= 0:
        return "an arm ran once, so nothing shows how much a rerun would differ"
    return "the requests compared are of too few sessions"


def _unjudged(measure: Measure, pair: tuple[str, str], terms: _Terms, reason: str) -> Comparison:
    nan = float("nan")
    return Comparison(
        measure=measure,
        baseline=pair[0],
        arm=pair[1],
        effect=Estimate(nan, nan, nan, 0),
        noise_floor=nan,
        p_value=nan,
        verdict=Verdict.UNJUDGED,
        requests=0,
        better_share=nan,
        primary=measure.key in terms.primary,
        reason=reason,
    )


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else float("inf")
