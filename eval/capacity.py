"""How much load an arm carries: which level to try next, and what the levels tried say.

Owns the search (doubling, then bisection, then repeats at the two ends) and the interval of its
answer. Everything here is a pure function of the levels measured so far, so a search that was
interrupted goes on where it ended. Knows nothing of engines, files or how a turn was judged.

The only thing assumed of the arm is that more load never serves its turns better. An interval is
then made of tested levels: from the highest one that surely meets the objective to the last one
below the lowest that surely misses it. A fitted curve would give a narrower interval, and a wrong
one where the true curve has another shape; a cache that overflows makes a cliff, not a logistic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from eval.experiment import Slo
from eval.judged import not_met, product_limit
from eval.stats import (
    UNKNOWN,
    Array,
    Estimate,
    quantile_points,
    row_quantiles,
    with_order_statistics,
)

CONFIDENCE = 0.99
"""Of one level's verdict, each side. The search tests several levels beside the capacity, and its
interval is wrong when any of them is: in simulated searches 0.99 each left 98 % for all."""
_DRAWS = 400


@dataclass(frozen=True)
class SessionOutcome:
    """One session at one level: turns in time, turns judged, its stretch (NaN: unknown; `at_least`
    so large where the run's end cut it off), turns that waited beyond patience, the share of its
    time in which it was late, whether it starved. Outcomes of one `session`, played again or in a
    repeat of the level, are no more independent than its turns; one without a name is a session of
    its own."""

    met: int
    turns: int
    stretch: float = float("nan")
    session: str | None = None
    at_least: bool = False
    over_patience: int = 0
    late_share: float = 0.0
    starved: bool = False


@dataclass(frozen=True)
class Level:
    """One level of load, with every repeat of it pooled.

    `sustained` is false where the level was still filling up (more came than was finished): it
    then misses the objective, whatever the turns that were finished look like.
    """

    load: float
    sessions: Sequence[SessionOutcome]
    sustained: bool = True
    repeats: int = 1


@dataclass(frozen=True)
class Judgement:
    """A level against the objective. `not_met` says why the point verdict is that it misses it, and
    is empty where it meets it; `sure` where both bounds of the intervals agree with that. Where the
    objective bounds stretch and no session's is known, the turns alone were judged: a level that
    meets by them is `unjudged`, however sure of them it is.
    """

    load: float
    attainment: Estimate
    stretch_p90: Estimate
    not_met: Sequence[str]
    sure: bool
    unjudged: bool = False
    late_share_p90: Estimate = UNKNOWN
    starved: int = 0

    @property
    def meets(self) -> bool:
        """Whether the level meets the objective, by its point estimates."""
        return not self.not_met

    @property
    def surely_meets(self) -> bool:
        """Whether the level meets the whole objective beyond doubt."""
        return self.meets and self.sure and not self.unjudged


@dataclass(frozen=True)
class Search:
    """Where to look: loads from `low` to `high`, beginning at `start`; whole numbers only where
    `whole` (sessions in flight are). The bracket is closed when it is narrower than `tolerance`
    of its lower end; then each end gets up to `repeats` runs until it is sure."""

    start: float
    low: float = 1.0
    high: float = 1024.0
    tolerance: float = 0.05
    repeats: int = 3
    whole: bool = True


@dataclass(frozen=True)
class Capacity:
    """The answer. `value` is the highest load that met the objective below every one that missed
    it (0 where even the lowest missed). `low` and `high` bound the capacity with about 95 %
    confidence; `high` is infinite where no tested load surely missed."""

    value: float
    low: float
    high: float
    judgements: Sequence[Judgement]

    @property
    def missed(self) -> Judgement | None:
        """The lowest load that missed the objective."""
        return next((judgement for judgement in self.judgements if not judgement.meets), None)

    @property
    def unjudged(self) -> list[float]:
        """The loads that met the objective by their turns alone, without a known stretch."""
        return [judgement.load for judgement in self.judgements if judgement.unjudged]


def judge(level: Level, slo: Slo, seed: int = 0) -> Judgement:
    """The level's verdict, from a bootstrap that resamples sessions (their turns share a fate, and
    so do their plays)."""
    met = np.array([s.met for s in level.sessions], dtype=float)
    turns = np.array([s.turns for s in level.sessions], dtype=float)
    stretch = np.array([s.stretch for s in level.sessions], dtype=float)
    at_least = np.array([s.at_least for s in level.sessions], dtype=np.bool_)
    late = np.array([s.late_share for s in level.sessions], dtype=float)
    names = [at if s.session is None else s.session for at, s in enumerate(level.sessions)]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    unit = np.array([numbers[name] for name in names], dtype=np.int64)
    starved = sum(s.starved for s in level.sessions)
    if len(turns) == 0 or turns.sum() == 0:
        nothing = ["no turn was judged"]
        return Judgement(level.load, UNKNOWN, UNKNOWN, nothing, sure=False, starved=starved)
    attained, stretched, lateness = _intervals(
        met.tobytes(),
        turns.tobytes(),
        stretch.tobytes(),
        at_least.tobytes(),
        late.tobytes(),
        unit.tobytes(),
        (seed, round(level.load * 1000)),
    )
    reasons = not_met(
        {
            "starved_sessions": starved,
            "in_time_share": attained.value,
            "late_share_p90": lateness.value,
            "wait_over_patience": sum(s.over_patience for s in level.sessions) / turns.sum(),
        },
        slo,
        stretched.value,
    )
    if not level.sustained:
        reasons.append("the load was not sustained")
    if reasons:
        sure = (
            not level.sustained
            or starved > 0
            or attained.high < slo.attainment
            or lateness.low > slo.late_share_p90
            or stretched.low > slo.stretch_p90
        )
    else:
        sure = (
            attained.low >= slo.attainment
            and lateness.high <= slo.late_share_p90
            and not stretched.high > slo.stretch_p90
        )
    unjudged = not reasons and not stretched.n and math.isfinite(slo.stretch_p90)
    return Judgement(level.load, attained, stretched, reasons, sure, unjudged, lateness, starved)


# A search judges every level again after each run, and only one of them has changed. Sessions come
# as bytes, in which unknown stretches are alike.
@lru_cache(maxsize=256)
def _intervals(
    met_bytes: bytes,
    turns_bytes: bytes,
    stretch_bytes: bytes,
    at_least_bytes: bytes,
    late_bytes: bytes,
    unit_bytes: bytes,
    seed: tuple[int, int],
) -> tuple[Estimate, Estimate, Estimate]:
    """Attainment and the 90 % quantiles of stretch and of the late share of a level's sessions;
    `unit_bytes` are their numbers, the same for outcomes of the same session."""
    met, turns, stretch, late = map(
        np.frombuffer, (met_bytes, turns_bytes, stretch_bytes, late_bytes)
    )
    at_least = np.frombuffer(at_least_bytes, dtype=np.bool_)
    unit = np.frombuffer(unit_bytes, dtype=np.int64)
    rng = np.random.default_rng(seed)
    met, turns = (np.bincount(unit, of).astype(np.float64) for of in (met, turns))
    met, turns = met[turns > 0], turns[turns > 0]
    size = len(met)
    picks = rng.integers(0, size, (_DRAWS, size))
    attained = _interval(
        float(met.sum() / turns.sum()),
        met[picks].sum(axis=1) / np.maximum(turns[picks].sum(axis=1), 1),
        int(turns.sum()),
    )
    attained = _widened(attained, met, turns)
    known = ~np.isnan(stretch)
    stretched = UNKNOWN
    if known.any():
        times = _times(rng, unit[known])
        draws = product_limit(stretch[known], at_least[known], 0.9, times)
        [point] = product_limit(stretch[known], at_least[known], 0.9)
        stretched = _interval(float(point), draws, int(known.sum()))
    order = np.argsort(late, kind="stable")
    counted = np.cumsum(_times(rng, unit)[:, order], axis=1)
    draws = row_quantiles(counted, late[order], [0.9])[:, 0]
    lateness = with_order_statistics(
        _interval(float(np.quantile(late, 0.9)), draws, len(late)),
        late,
        len(np.unique(unit)),
        0.9,
        level=2 * CONFIDENCE - 1,
    )
    return attained, stretched, lateness


def _times(rng: np.random.Generator, unit: npt.NDArray[np.int64]) -> Array:
    """How often each outcome counts in each resample of the sessions: draws × outcomes."""
    of, which = np.unique(unit, return_inverse=True)
    drawn = rng.integers(0, len(of), (_DRAWS, len(of))) + len(of) * np.arange(_DRAWS)[:, None]
    times = np.bincount(drawn.ravel(), minlength=_DRAWS * len(of)).reshape(_DRAWS, len(of))
    return times[:, which].astype(np.float64)


def _interval(point: float, draws: Array, n: int) -> Estimate:
    low, high = quantile_points(draws[~np.isnan(draws)], [1 - CONFIDENCE, CONFIDENCE])
    return Estimate(point, float(low), float(high), n)


def _widened(
    attained: Estimate,
    met: Array,
    turns: Array,
) -> Estimate:
    """The interval made no narrower than Wilson's for the sessions' effective number of turns.

    Where every turn met the SLO (or none did) all resamples are alike and a bootstrap's interval
    has no width, though a dozen sessions cannot show that 90 % of all turns will. Nothing then says
    how far turns of a session share its fate, so that each session counts as one turn. One session
    says nothing of others.
    """
    total, size = float(turns.sum()), len(turns)
    share = attained.value
    if size == 1:
        return Estimate(share, 0.0, 1.0, attained.n)
    # Kish: how many independent turns would vary as much as these, session by session.
    residual = met - share * turns
    variance = float((residual**2).sum()) * size / (size - 1) / total**2
    effective = total
    if not 0 < share < 1:
        effective = min(total, float(size))
    elif variance > 0:
        effective = min(total, share * (1 - share) / variance)
    z = 2.326  # the normal quantile of CONFIDENCE
    centre = (share + z * z / (2 * effective)) / (1 + z * z / effective)
    half = (
        z
        * math.sqrt(share * (1 - share) / effective + z * z / (4 * effective * effective))
        / (1 + z * z / effective)
    )
    return Estimate(
        share, min(attained.low, centre - half), max(attained.high, centre + half), attained.n
    )


def next_load(levels: Sequence[Level], search: Search, slo: Slo) -> float | None:
    """The load to run next (again, where it was run before); None when the search is over."""
    if not levels:
        return _on_grid(search.start, search)
    judged = {level.load: (level, judge(level, slo)) for level in levels}
    holds, fails = _bracket([verdict for _, verdict in judged.values()])
    if fails is None:
        if holds is None or holds >= search.high:
            return _again(judged, [holds], search)
        return min(_on_grid(holds * 2, search), search.high)
    if holds is None:
        if fails <= search.low:
            return _again(judged, [fails], search)
        return max(_on_grid(fails / 2, search), search.low)
    if fails - holds > max(search.tolerance * holds, 1.0 if search.whole else 0.0):
        middle = _on_grid((holds + fails) / 2, search)
        if holds < middle < fails and middle not in judged:
            return middle
    return _again(judged, [holds, fails], search)


def _bracket(judgements: Sequence[Judgement]) -> tuple[float | None, float | None]:
    """The highest load that meets the objective below all that miss it, and the lowest that
    misses it. A noisy level that meets it above one that missed it does not count."""
    missed = [j.load for j in judgements if not j.meets]
    fails = min(missed, default=None)
    below = [j.load for j in judgements if j.meets and (fails is None or j.load < fails)]
    return max(below, default=None), fails


def _again(
    judged: dict[float, tuple[Level, Judgement]], ends: Sequence[float | None], search: Search
) -> float | None:
    """The end of the bracket that is least settled and may still be repeated."""
    open_ends = [
        judged[end][0]
        for end in ends
        if end is not None and not judged[end][1].sure and judged[end][0].repeats < search.repeats
    ]
    return min(open_ends, key=lambda level: level.repeats).load if open_ends else None


def _on_grid(load: float, search: Search) -> float:
    load = min(max(load, search.low), search.high)
    return float(max(1, math.floor(load))) if search.whole else load


def capacity(levels: Sequence[Level], search: Search, slo: Slo) -> Capacity:
    """What the levels measured so far say."""
    judgements = sorted((judge(level, slo) for level in levels), key=lambda j: j.load)
    holds, _ = _bracket(judgements)
    surely_fails = min((j.load for j in judgements if not j.meets and j.sure), default=math.inf)
    surely_holds = max(
        (j.load for j in judgements if j.surely_meets and j.load < surely_fails), default=0.0
    )
    step = 1.0 if search.whole else 0.0
    value = holds or 0.0
    return Capacity(
        value=value,
        low=min(surely_holds, value),
        high=max(surely_fails - step, value),
        judgements=judgements,
    )
