"""One run's measure as a number and its bootstrap draws, on the scale on which arms are compared.

Owns which requests two arms have in common, and what stands for those that failed. Knows runs and
measures; not noise or verdicts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from eval.experiment import Slo
from eval.outcomes import Measure, Outcome, Sample, alike, sample
from eval.records import Run
from eval.stats import Array, SessionBootstrap, quantile_points
from eval.stretch import Alone

# A request that failed is taken for so many times as slow as the slowest that was answered.
_BEYOND = 2.0
_HALF_AN_EVENT = 0.5


@dataclass(frozen=True)
class Series:
    """One run's measure, as a logarithm or (a share) as it is: its value and its value in every
    bootstrap draw. `beyond`: the value lies among requests that failed; `none`: a rate of zero, for
    which half an event stands."""

    point: float
    draws: Array
    sessions: frozenset[str] = frozenset()
    beyond: bool = False
    none: bool = False


@dataclass(frozen=True)
class Common:
    """The requests that are compared: by name, or None for all that each run measured."""

    requests: frozenset[str] | None
    count: int


class SeriesOf:
    """Series by run, measure and requests, each resampled once: an arm's runs serve every pair, and
    all quantiles of a column come from one pass."""

    def __init__(self, boot: SessionBootstrap, measures: Sequence[Measure], slo: Slo) -> None:
        self._boot = boot
        self._measures = measures
        self._slo = slo
        self._known: dict[tuple[object, ...], dict[str, Series]] = {}
        self._largest: dict[tuple[Path, str], float] = {}
        self._outcomes: dict[Path, Outcome] = {}
        self._asked: dict[tuple[Path, str], frozenset[str]] = {}

    def common(self, runs: Sequence[Run], measure: Measure) -> Common:
        """What these runs have in common. Inside a measured window each arm gets as far as it gets,
        and all of it counts; else the requests that every run asked and that have the measure in
        each (infinite where they failed). Rates and sessions need only that some request was asked
        in all."""
        if any(run.window is not None for run in runs):
            return Common(None, min(len(run.requests) for run in runs))
        names = frozenset.intersection(*(self._having(run, measure) for run in runs))
        single = measure.kind in ("quantile", "share", "mean")
        return Common(names if single else None, len(names))

    def _having(self, run: Run, measure: Measure) -> frozenset[str]:
        """The requests of a run that have a measure."""
        table = run.requests
        of = "any"
        if measure.kind == "quantile":
            of = measure.column
        elif measure.key in ("apc", "recomputed_share"):
            of = "cached_tokens"
        if (run.folder, of) not in self._asked:
            known = table["ok"] | table["failed"]
            if of != "any":
                known &= table[of].notna()
            if of == "cached_tokens":
                known &= table["ok"]
            self._asked[run.folder, of] = frozenset(table.loc[known, "request_id"])
        return self._asked[run.folder, of]

    def ceiling(
        self, runs: Sequence[Run], measure: Measure, alone: Mapping[str, Alone | None]
    ) -> float:
        """What stands for failed requests or sessions in a comparison of these runs."""
        if measure.quantile is None:
            return float("inf")
        largest = 0.0
        for run in runs:
            key = (run.folder, measure.column)
            if key not in self._largest:
                values = sample(self._outcome(run, alone), measure).values
                answered = values[np.isfinite(values)]
                self._largest[key] = float(answered.max()) if len(answered) else 0.0
            largest = max(largest, self._largest[key])
        return _BEYOND * largest if largest > 0 else 1.0

    def of(
        self,
        run: Run,
        measure: Measure,
        requests: frozenset[str] | None,
        alone: Mapping[str, Alone | None],
        ceiling: float,
    ) -> Series:
        """The series of one run in one measure."""
        of = measure.column if measure.quantile is not None else measure.key
        key = (run.folder, of, measure.kind, requests, ceiling)
        if key not in self._known:
            taken = sample(self._outcome(run, alone), measure, requests)
            group = next(group for group in alike(self._measures) if measure in group)
            self._known[key] = series_of(self._boot, taken, group, ceiling)
        return self._known[key][measure.key]

    def _outcome(self, run: Run, alone: Mapping[str, Alone | None]) -> Outcome:
        if run.folder not in self._outcomes:
            self._outcomes[run.folder] = Outcome(run, self._slo, alone.get(run.arm))
        return self._outcomes[run.folder]


def series_of(
    boot: SessionBootstrap, taken: Sample, measures: Sequence[Measure], ceiling: float = math.inf
) -> dict[str, Series]:
    """What a run contributes to measures of the same values, with its draws, by the measure's key;
    values beyond `ceiling` count as that."""
    first = measures[0]
    values = np.minimum(taken.values, ceiling)
    sessions = frozenset(taken.sessions)
    codes = boot.codes(taken.sessions)
    none = False
    if first.quantile is not None:
        quantiles = [m.quantile for m in measures if m.quantile is not None]
        if len(values):
            points = quantile_points(values, quantiles)
            beyond = np.isinf(quantile_points(taken.values, quantiles))
            draws = boot.quantile_draws(codes, values, quantiles)
        else:
            points = np.full(len(quantiles), np.nan)
            beyond = np.zeros(len(quantiles), dtype=np.bool_)
            draws = np.full((boot.draws, len(quantiles)), np.nan)
    else:
        beyond = np.zeros(1, dtype=np.bool_)
        none = float(values.sum()) == 0
        if isinstance(taken.over, np.ndarray):
            total = float(taken.over.sum())
            draws = boot.ratio_draws(codes, values, taken.over)[:, None]
        else:
            total = float(taken.over or 0.0)
            sums = np.maximum(boot.sum_draws(codes, values), _HALF_AN_EVENT)
            draws = sums[:, None] / (total if total > 0 else np.nan)
        least = 0.0 if first.in_points else _HALF_AN_EVENT
        points = np.array([max(values.sum(), least) / total if total > 0 else np.nan])
    if not first.in_points:
        with np.errstate(divide="ignore", invalid="ignore"):
            points, draws = np.log(points), np.log(draws)
    return {
        m.key: Series(
            float(points[i]) if np.isfinite(points[i]) else float("nan"),
            np.where(np.isfinite(draws[:, i]), draws[:, i], np.nan),
            sessions,
            bool(beyond[i]),
            none,
        )
        for i, m in enumerate(measures)
    }


def better_share(
    groups: Sequence[tuple[list[Run], list[Run]]],
    requests: Sequence[frozenset[str] | None],
    measure: Measure,
) -> float:
    """Of the requests that both arms were asked the share whose mean over runs is better than the
    baseline's; unknown for what is no measure of single requests."""
    if measure.kind != "quantile" and measure.key != "apc":
        return float("nan")
    better: list[pd.Series[bool]] = []
    for (base, other), names in zip(groups, requests, strict=True):
        one, two = (_mean(runs, measure, names) for runs in (base, other))
        shared = one.index.intersection(two.index)
        one, two = one.loc[shared], two.loc[shared]
        better.append((two < one) if measure.lower_is_better else (two > one))
    every = pd.concat(better)
    return float(every.mean()) if len(every) else float("nan")


def _mean(runs: Sequence[Run], measure: Measure, names: frozenset[str] | None) -> pd.Series[float]:
    table = pd.concat([run.requests[["request_id", measure.column]] for run in runs])
    table = table[table[measure.column].notna()]
    if names is not None:
        table = table[table["request_id"].isin(names)]
    means: pd.Series[float] = table.groupby("request_id")[measure.column].mean()
    return means
