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

from eval.stats import UNKNOWN, Array, Estimate, row_quantiles

CONFIDENCE = 0.99
"""Of one level's verdict, each side. The search tests several levels beside the capacity, and its
interval is wrong when any of them is: in simulated searches 0.99 each left 98 % for all."""
_DRAWS = 400
_ENDLESS = 1e9


@dataclass(frozen=True)
class Objective:
    """What "carries" means: this share of turns within the SLO, and sessions not stretched.

    A session's stretch is its completion time over what it takes alone; without a bound on it,
    serving a few sessions well while the others wait for minutes would count as carrying all.
    """

    attainment: float = 0.9
    stretch_p90: float | None = 2.0


@dataclass(frozen=True)
class SessionOutcome:
    """One session at one level: turns that met the SLO, turns judged, and its stretch (NaN where
    the session did not end inside the window, which says nothing about it). Outcomes of one
    `session`, played again or in a repeat of the level, are no more independent than its turns;
    one without a name is a session of its own."""

    met: int
    turns: int
    stretch: float = float("nan")
    session: str | None = None


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
    """A level against the objective. `meets` is the point verdict; `sure` where both bounds of
    the intervals agree with it. Where the objective bounds stretch and no session's is known, the
    turns alone were judged: a level that meets by them is `unjudged`, however sure of them it is.
    """

    load: float
    attainment: Estimate
    stretch_p90: Estimate
    meets: bool
    sure: bool
    unjudged: bool = False

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
    def unjudged(self) -> list[float]:
        """The loads that met the objective by their turns alone, without a known stretch."""
        return [judgement.load for judgement in self.judgements if judgement.unjudged]


def judge(level: Level, objective: Objective, seed: int = 0) -> Judgement:
    """The level's verdict, from a bootstrap that resamples sessions (their turns share a fate, and
    so do their plays)."""
    met = np.array([s.met for s in level.sessions], dtype=float)
    turns = np.array([s.turns for s in level.sessions], dtype=float)
    stretch = np.array([s.stretch for s in level.sessions], dtype=float)
    names = [at if s.session is None else s.session for at, s in enumerate(level.sessions)]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    unit = np.array([numbers[name] for name in names], dtype=np.int64)
    if len(turns) == 0 or turns.sum() == 0:
        return Judgement(level.load, UNKNOWN, UNKNOWN, meets=False, sure=False)
    attained, stretched = _intervals(
        met.tobytes(),
        turns.tobytes(),
        stretch.tobytes(),
        unit.tobytes(),
        (seed, round(level.load * 1000)),
    )
    bound = objective.stretch_p90 if stretched.n else None
    meets = (
        level.sustained
        and attained.value >= objective.attainment
        and (bound is None or stretched.value <= bound)
    )
    if meets:
        sure = attained.low >= objective.attainment and (bound is None or stretched.high <= bound)
    else:
        sure = (
            not level.sustained
            or attained.high < objective.attainment
            or (bound is not None and stretched.low > bound)
        )
    unjudged = meets and bound != objective.stretch_p90
    return Judgement(level.load, attained, stretched, meets, sure, unjudged)


# A search judges every level again after each run, and only one of them has changed. Sessions come
# as bytes, in which unknown stretches are alike.
@lru_cache(maxsize=256)
def _intervals(
    met_bytes: bytes,
    turns_bytes: bytes,
    stretch_bytes: bytes,
    unit_bytes: bytes,
    seed: tuple[int, int],
) -> tuple[Estimate, Estimate]:
    """Attainment and the 90 % quantile of stretch of a level's sessions; `unit_bytes` are their
    numbers, the same for outcomes of the same session."""
    met, turns, stretch = map(np.frombuffer, (met_bytes, turns_bytes, stretch_bytes))
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
        # A session with a failed turn never completes: its stretch is endless, not unknown.
        values = np.minimum(stretch[known], _ENDLESS)
        order = np.argsort(values, kind="stable")
        of, which = np.unique(unit[known][order], return_inverse=True)
        drawn = rng.integers(0, len(of), (_DRAWS, len(of))) + len(of) * np.arange(_DRAWS)[:, None]
        times = np.bincount(drawn.ravel(), minlength=_DRAWS * len(of)).reshape(_DRAWS, len(of))
        counted = np.cumsum(times[:, which], axis=1, dtype=np.float64)
        draws = row_quantiles(counted, values[order], [0.9])[:, 0]
        stretched = _interval(float(np.quantile(values, 0.9)), draws, len(values))
    return attained, stretched


def _interval(point: float, draws: Array, n: int) -> Estimate:
    low, high = np.quantile(draws, [1 - CONFIDENCE, CONFIDENCE])
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


def next_load(levels: Sequence[Level], search: Search, objective: Objective) -> float | None:
    """The load to run next (again, where it was run before); None when the search is over."""
    if not levels:
        return _on_grid(search.start, search)
    judged = {level.load: (level, judge(level, objective)) for level in levels}
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


def capacity(levels: Sequence[Level], search: Search, objective: Objective) -> Capacity:
    """What the levels measured so far say."""
    judgements = sorted((judge(level, objective) for level in levels), key=lambda j: j.load)
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
