"""What the same thing, run again, would give: the noise of a difference, and what it leaves to say.

Owns the spread between repeats, the noise floor, p-values, Holm's correction and the closed set of
verdicts. Knows numbers and their bootstrap draws; not runs, measures or files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from scipy import optimize, special

from eval.series import Series
from eval.stats import LEVEL, known_variance

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


def _t(freedom: float, p: float) -> float:
    """The bound that |t| exceeds with probability `p`; with unlimited freedom the normal's."""
    if math.isinf(freedom):
        return float(special.ndtri(1 - p / 2))
    return float(special.stdtrit(freedom, 1 - p / 2))
