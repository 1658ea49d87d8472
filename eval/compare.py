"""Two arms on the same requests: how much they differ, how sure that is, and the verdict.

Owns the paired comparison, the noise floor and the closed set of verdicts. Works on logarithms, so
that effects are ratios, and on points where a measure is a share. Knows runs and metrics' names;
not files or formatting.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
from scipy import optimize, special

from eval.experiment import Slo
from eval.identity import different_workload, draws_of
from eval.outcomes import MEASURES, Measure
from eval.records import Run
from eval.series import Series, SeriesOf, better_share, common_requests
from eval.stats import LEVEL, Estimate, SessionBootstrap, known_variance
from eval.steady import not_sustained
from eval.stretch import Alone

# Above 95 %, so that with few repeats A/A pairs stay inside at least 97 % of the time.
FLOOR_LEVEL = 0.985
_LEAST_P = 1e-9


class Verdict(StrEnum):
    """What a comparison may say."""

    BETTER = "better"
    WORSE = "worse"
    NONE = "no difference beyond noise"
    UNJUDGED = "not judged"


@dataclass(frozen=True)
class Spread:
    """How much one arm's repeats under one load differ in one measure.

    `variance` is of one run; `run_variance` the part of it that sessions do not explain; both NaN
    for a single run.
    """

    runs: int
    variance: float
    run_variance: float


@dataclass(frozen=True)
class Noise:
    """Of the difference between two arms' means: its variance between repeats, the part of it that
    sessions do not explain, and the degrees of freedom behind both (0: unknown)."""

    variance: float
    run_variance: float
    freedom: float

    def floor(self, level: float = FLOOR_LEVEL) -> float:
        """The bound that the difference between two sets of repeats of the same arm stays within
        this often; NaN where unknown."""
        if self.freedom <= 0:
            return float("nan")
        return _t(self.freedom, 1 - level) * math.sqrt(self.variance)


NO_NOISE_KNOWN = Noise(float("nan"), float("nan"), 0.0)


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


@dataclass(frozen=True)
class Difference:
    """other − base of the runs' means, and its two variances with their degrees of freedom."""

    value: float
    session_variance: float
    run_variance: float
    session_freedom: float
    run_freedom: float

    def half_width(self, p: float = 1 - LEVEL) -> float:
        """Of the interval that misses the truth with probability `p`; NaN where unknown.

        Each variance with the t of its own degrees of freedom, then added (as in Howe's and the
        MOVER intervals): a few repeats must not borrow the sessions' certainty.
        """
        if self.run_freedom <= 0 or self.session_freedom < 1 or not math.isfinite(self.value):
            return float("nan")
        return math.sqrt(
            _t(self.session_freedom, p) ** 2 * self.session_variance
            + _t(self.run_freedom, p) ** 2 * self.run_variance
        )


def spread(series: Sequence[Series]) -> Spread:
    """The spread of one arm's repeats under one load."""
    if len(series) < 2:
        return Spread(len(series), float("nan"), float("nan"))
    variance = float(np.var([run.point for run in series], ddof=1))
    pairs = [
        known_variance(one.draws - two.draws) / 2
        for i, one in enumerate(series)
        for two in series[:i]
    ]
    # Repeats without a session in common show nothing of it: all their spread is the runs'.
    known = [value for value in pairs if math.isfinite(value)]
    session_part = float(np.mean(known)) if known else 0.0
    return Spread(len(series), variance, max(0.0, variance - session_part))


def pair_noise(base: Spread, other: Spread) -> Noise:
    """The noise of a difference of two arms' means, each with its own spread; the degrees of
    freedom are Welch's and Satterthwaite's."""
    if base.runs < 2 or other.runs < 2:
        return NO_NOISE_KNOWN
    parts = [part.variance / part.runs for part in (base, other)]
    weights = [part.runs - 1 for part in (base, other)]
    total = sum(parts)
    below = sum(part**2 / weight for part, weight in zip(parts, weights, strict=True))
    return Noise(
        variance=total,
        run_variance=base.run_variance / base.runs + other.run_variance / other.runs,
        freedom=total**2 / below if below > 0 else float(sum(weights)),
    )


def difference(
    base: Sequence[Series], other: Sequence[Series], sessions: int
) -> tuple[Difference, Noise]:
    """How far the mean of `other`'s runs is from that of `base`'s, all on the same trace with so
    many `sessions`."""
    found = pair_noise(spread(base), spread(other))
    draws = np.mean([run.draws for run in other], axis=0) - np.mean(
        [run.draws for run in base], axis=0
    )
    variance = known_variance(draws) * sessions / max(1, sessions - 1)
    return (
        Difference(
            value=float(
                np.mean([run.point for run in other]) - np.mean([run.point for run in base])
            ),
            # Without a draw that both have, sessions are no explanation of anything.
            session_variance=variance if math.isfinite(variance) else 0.0,
            run_variance=found.run_variance,
            session_freedom=sessions - 1,
            run_freedom=found.freedom,
        ),
        found,
    )


def difference_by_round(
    rounds: Sequence[tuple[Series, Series]],
) -> tuple[Difference, Noise]:
    """The same where each round has a trace of its own, as (base, other): the rounds' differences
    are independent, and what sessions were drawn is in their spread."""
    deltas = [other.point - base.point for base, other in rounds]
    if len(deltas) < 2:
        value = deltas[0] if deltas else float("nan")
        return Difference(value, 0.0, float("nan"), math.inf, 0), NO_NOISE_KNOWN
    variance = float(np.var(deltas, ddof=1)) / len(deltas)
    freedom = len(deltas) - 1
    return (
        Difference(float(np.mean(deltas)), 0.0, variance, math.inf, freedom),
        Noise(variance, variance, freedom),
    )


def p_value(found: Difference, noise: Noise) -> float:
    """The chance of a difference this large without a real one (at least 1e-9): under 0.05 exactly
    where the 95 % interval excludes zero and the noise floor is exceeded. NaN where unknown."""
    if math.isnan(found.half_width()) or math.isnan(noise.floor()):
        return float("nan")
    size = abs(found.value)
    of_interval = _touching(found.half_width, size)
    of_floor = _touching(lambda p: noise.floor(1 - p), size)
    return min(1.0, max(of_interval, of_floor * (1 - LEVEL) / (1 - FLOOR_LEVEL)))


def _touching(bound: Callable[[float], float], size: float) -> float:
    """The p at which a bound, smaller for larger p, is `size`."""
    if size <= bound(1.0):
        return 1.0
    if size >= bound(_LEAST_P):
        return _LEAST_P
    return float(optimize.brentq(lambda p: bound(p) - size, _LEAST_P, 1.0))


def judge(delta: float, half_width: float, floor: float, *, lower_is_better: bool) -> Verdict:
    """Better or worse only where the interval excludes zero and the noise floor is exceeded."""
    if math.isnan(half_width) or math.isnan(floor) or math.isnan(delta):
        return Verdict.UNJUDGED
    if abs(delta) <= half_width or abs(delta) <= floor:
        return Verdict.NONE
    return Verdict.BETTER if (delta < 0) == lower_is_better else Verdict.WORSE


def holm(p_values: Sequence[float], level: float = 1 - LEVEL) -> list[bool]:
    """Which of several tests stay significant when the chance of any false one is `level`."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    kept = [False] * len(p_values)
    for rank, i in enumerate(order):
        if not p_values[i] <= level / (len(p_values) - rank):
            break
        kept[i] = True
    return kept


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
    common = [common_requests([*base, *other], measure) for base, other in groups]
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


def _t(freedom: float, p: float) -> float:
    """The bound that |t| exceeds with probability `p`; with unlimited freedom the normal's."""
    if math.isinf(freedom):
        return float(special.ndtri(1 - p / 2))
    return float(special.stdtrit(freedom, 1 - p / 2))


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else float("inf")
