"""Two arms on the same requests: how much they differ, how sure that is, and the verdict.

Owns the paired comparison, the noise floor and the closed set of verdicts. Works on logarithms, so
that effects are ratios. Knows runs and metrics' names; not files or formatting.

Two things make a difference uncertain, and both are counted. Other sessions could have been in the
trace: the session bootstrap, the same resamples in both arms. And the same arm run again gives
other numbers: the spread between repeats of one arm (A/A), pooled over all arms, less the part
that the bootstrap counts already. With one run an arm the second is unknown, and then nothing is
judged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import optimize, special

from eval.records import Run
from eval.stats import LEVEL, Array, Estimate, SessionBootstrap, quantile_points

# Above 95 %, so that with few repeats A/A pairs stay inside at least 95 % of the time.
FLOOR_LEVEL = 0.97


class Verdict(StrEnum):
    """What a comparison may say."""

    BETTER = "better"
    WORSE = "worse"
    NONE = "no difference beyond noise"
    UNJUDGED = "not judged"


@dataclass(frozen=True)
class Measure:
    """A quantity that is compared: its name, and which way is better."""

    key: str
    label: str
    lower_is_better: bool
    column: str | None = None
    quantile: float | None = None


MEASURES = (
    *(
        Measure(f"{name}_p{round(q * 100)}", f"{name.upper()} p{round(q * 100)}", True, column, q)
        for name, column in (("ttft", "ttft_s"), ("tpot", "tpot_s"), ("e2e", "e2e_s"))
        for q in (0.5, 0.9, 0.99)
    ),
    Measure("apc", "APC", False),
)


@dataclass(frozen=True)
class Series:
    """One run's measure as logarithms: its value and its value in every bootstrap draw."""

    point: float
    draws: Array


@dataclass(frozen=True)
class Noise:
    """Spread of one measure between repeats of the same arm, in logarithms, pooled over arms.

    `variance` is of one run; `run_variance` is the part that sessions do not explain;
    `freedom` the degrees of freedom behind it.
    """

    variance: float
    run_variance: float
    freedom: int

    def floor(self, base_runs: int, other_runs: int) -> float:
        """The 97 % bound of |log ratio| between two means of so many runs of the same thing."""
        if self.freedom == 0:
            return float("nan")
        spread = math.sqrt(self.variance * (1 / base_runs + 1 / other_runs))
        return _t(self.freedom, 1 - FLOOR_LEVEL) * spread


@dataclass(frozen=True)
class Comparison:
    """`ratio` is the arm over the baseline; `noise_floor` the ratio less 1 that A/A pairs reach."""

    measure: Measure
    baseline: str
    arm: str
    ratio: Estimate
    noise_floor: float
    p_value: float
    verdict: Verdict
    requests: int
    better_share: float


def noise(series: Mapping[str, Sequence[Series]]) -> Noise:
    """The noise of one measure from every arm's repeats."""
    squares = 0.0
    session_part = 0.0
    freedom = 0
    for runs in series.values():
        points = [run.point for run in runs if math.isfinite(run.point)]
        if len(points) < 2:
            continue
        weight = len(points) - 1
        squares += weight * float(np.var(points, ddof=1))
        pairs = [
            _variance(one.draws - two.draws) / 2 for i, one in enumerate(runs) for two in runs[:i]
        ]
        # Repeats without a session in common show nothing of it: all their spread is the runs'.
        known = [value for value in pairs if math.isfinite(value)]
        session_part += weight * float(np.mean(known)) if known else 0.0
        freedom += weight
    if freedom == 0:
        return Noise(float("nan"), float("nan"), 0)
    variance = squares / freedom
    return Noise(variance, max(0.0, variance - session_part / freedom), freedom)


@dataclass(frozen=True)
class Difference:
    """log(other/base) of the runs' means, and its two variances with their degrees of freedom."""

    value: float
    session_variance: float
    run_variance: float
    session_freedom: int
    run_freedom: int

    def half_width(self, p: float = 1 - LEVEL) -> float:
        """Of the interval that misses the truth with probability `p`; NaN where unknown.

        Each variance with the t of its own degrees of freedom, then added (as in Howe's and the
        MOVER intervals): a few repeats must not borrow the sessions' certainty.
        """
        if self.run_freedom == 0 or self.session_freedom < 1 or not math.isfinite(self.value):
            return float("nan")
        return math.sqrt(
            _t(self.session_freedom, p) ** 2 * self.session_variance
            + _t(self.run_freedom, p) ** 2 * self.run_variance
        )

    def p_value(self) -> float:
        """The `p` at which the interval touches zero (at least 1e-9); NaN where unknown."""
        least = 1e-9
        if math.isnan(self.half_width()):
            return float("nan")
        if self.session_variance + self.run_variance == 0:
            return 1.0 if self.value == 0 else least
        if abs(self.value) >= self.half_width(least):
            return least
        return float(optimize.brentq(lambda p: self.half_width(p) - abs(self.value), least, 1.0))


def difference(
    base: Sequence[Series], other: Sequence[Series], spread: Noise, sessions: int
) -> Difference:
    """How far the mean of `other`'s runs is from that of `base`'s, both on the same `sessions`."""
    draws = np.mean([run.draws for run in other], axis=0) - np.mean(
        [run.draws for run in base], axis=0
    )
    return Difference(
        value=float(np.mean([run.point for run in other]) - np.mean([run.point for run in base])),
        session_variance=_variance(draws) * sessions / max(1, sessions - 1),
        run_variance=spread.run_variance * (1 / len(base) + 1 / len(other)),
        session_freedom=sessions - 1,
        run_freedom=spread.freedom,
    )


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


def compare_cells(
    cells: Mapping[str, Sequence[Run]],
    pairs: Sequence[tuple[str, str]],
    boot: SessionBootstrap,
    measures: Sequence[Measure] = MEASURES,
) -> list[Comparison]:
    """Compares each (baseline, arm) of `pairs` on the requests that both answered in every run."""
    memo = _SeriesOf(boot, measures)
    found: list[Comparison] = []
    for measure in measures:
        spread = noise(
            {
                name: [memo.series(run, measure, _answered(run, measure)) for run in runs]
                for name, runs in cells.items()
            }
        )
        found += [_compare(cells, pair, memo, measure, spread) for pair in pairs]
    return found


def _compare(
    cells: Mapping[str, Sequence[Run]],
    pair: tuple[str, str],
    memo: _SeriesOf,
    measure: Measure,
    spread: Noise,
) -> Comparison:
    baseline, arm = pair
    base_runs, other_runs = cells[baseline], cells[arm]
    common = frozenset.intersection(*(_answered(run, measure) for run in (*base_runs, *other_runs)))
    base = [memo.series(run, measure, common) for run in base_runs]
    other = [memo.series(run, measure, common) for run in other_runs]
    table = base_runs[0].requests
    sessions = table.loc[table["request_id"].isin(common), "session_id"].nunique()
    found = difference(base, other, spread, sessions)
    delta, half_width = found.value, found.half_width()
    floor = spread.floor(len(base), len(other)) if common else float("nan")
    return Comparison(
        measure=measure,
        baseline=baseline,
        arm=arm,
        ratio=Estimate(
            _exp(delta), _exp(delta - half_width), _exp(delta + half_width), len(common)
        ),
        noise_floor=_exp(floor) - 1,
        p_value=found.p_value(),
        verdict=judge(delta, half_width, floor, lower_is_better=measure.lower_is_better),
        requests=len(common),
        better_share=_better_share(
            [_rows(run, measure, common) for run in base_runs],
            [_rows(run, measure, common) for run in other_runs],
            measure,
        ),
    )


def _answered(run: Run, measure: Measure) -> frozenset[str]:
    table = run.requests
    known = table["ok"] & table[_column(measure)].notna()
    return frozenset(table.loc[known, "request_id"])


def _rows(run: Run, measure: Measure, requests: frozenset[str]) -> pd.DataFrame:
    table = run.requests
    known = table["ok"] & table[_column(measure)].notna()
    return table[known & table["request_id"].isin(requests)]


def _column(measure: Measure) -> str:
    return measure.column or "cached_tokens"


class _SeriesOf:
    """Series by run, measure and set of requests, each resampled once: an arm's runs serve the
    noise and every pair, and all quantiles of a column come from one pass."""

    def __init__(self, boot: SessionBootstrap, measures: Sequence[Measure]) -> None:
        self._boot = boot
        self._measures = measures
        self._known: dict[tuple[Path, str, frozenset[str]], dict[str, Series]] = {}

    def series(self, run: Run, measure: Measure, requests: frozenset[str]) -> Series:
        key = (run.folder, _column(measure), requests)
        if key not in self._known:
            rows = _rows(run, measure, requests)
            alike = [m for m in self._measures if _column(m) == _column(measure)]
            self._known[key] = self._resample(rows, alike)
        return self._known[key][measure.key]

    def _resample(self, rows: pd.DataFrame, measures: Sequence[Measure]) -> dict[str, Series]:
        sessions = list(rows["session_id"])
        values = rows[_column(measures[0])].to_numpy(dtype=np.float64)
        quantiles = [m.quantile for m in measures if m.quantile is not None]
        if not quantiles:
            prompt = rows["prompt_tokens"].to_numpy(dtype=np.float64)
            total = float(prompt.sum())
            points = np.array([values.sum() / total if total > 0 else np.nan])
            draws = self._boot.ratio_draws(sessions, values, prompt)[:, None]
        elif len(values):
            points = quantile_points(values, quantiles)
            draws = self._boot.quantile_draws(sessions, values, quantiles)
        else:
            points = np.full(len(quantiles), np.nan)
            draws = np.full((self._boot.draws, len(quantiles)), np.nan)
        with np.errstate(divide="ignore", invalid="ignore"):
            points, draws = np.log(points), np.log(draws)
        return {
            m.key: Series(
                float(points[i]) if np.isfinite(points[i]) else float("nan"),
                np.where(np.isfinite(draws[:, i]), draws[:, i], np.nan),
            )
            for i, m in enumerate(measures)
        }


def _better_share(
    base: Sequence[pd.DataFrame], other: Sequence[pd.DataFrame], measure: Measure
) -> float:
    """Of the common requests the share whose mean over runs is better than the baseline's."""
    column = _column(measure)

    def mean(tables: Sequence[pd.DataFrame]) -> pd.Series[float]:
        return pd.concat(tables).groupby("request_id")[column].mean()

    one, two = mean(base), mean(other)
    if one.empty:
        return float("nan")
    two = two.reindex(one.index)
    return float(((two < one) if measure.lower_is_better else (two > one)).mean())


def _variance(draws: Array) -> float:
    """Of the draws that have a value; NaN where none has."""
    known = draws[np.isfinite(draws)]
    return float(np.var(known)) if len(known) else float("nan")


def _t(freedom: int, p: float) -> float:
    """The bound that |t| exceeds with probability `p`."""
    return float(special.stdtrit(freedom, 1 - p / 2))


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else float("inf")
