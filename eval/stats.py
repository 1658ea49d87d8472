"""Uncertainty: session bootstrap, and what two arms' difference is worth.

Owns every random draw of the analysis. Knows arrays, sessions and runs; not files, arms' names or
units.

Requests of one session are not independent (they share a context that grows), so whole sessions
are resampled, never requests. All arms replay the same trace, so one draw of sessions serves every
arm: differences between arms are paired on the same requests. Values may be infinite (a request
that failed took longer than any that was answered); a quantile among them is infinite too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy import special

Array = npt.NDArray[np.float64]
Sessions = Sequence[str] | npt.NDArray[np.int64]
"""The session of each value: its name, or its index as `SessionBootstrap.codes` gives it."""
LEVEL = 0.95
_MAX_BINS = 4096


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval; `n` observations. NaN where there is nothing to measure."""

    value: float
    low: float
    high: float
    n: int

    @property
    def known(self) -> bool:
        return bool(np.isfinite(self.value))


UNKNOWN = Estimate(float("nan"), float("nan"), float("nan"), 0)


class SessionBootstrap:
    """`draws` resamples of the sessions in `sessions`, fixed by `seed`.

    Each draw is a vector of how often each session was picked. Statistics of values that carry a
    session's name are recomputed for every draw; the same draws serve every call, so that the
    differences of two arms' draws are paired.
    """

    def __init__(self, sessions: Sequence[str], draws: int = 1000, seed: int = 0) -> None:
        self.names = sorted(set(sessions))
        self.draws = draws
        self._index = {name: i for i, name in enumerate(self.names)}
        size = len(self.names)
        rng = np.random.default_rng(seed)
        self._counts = np.zeros((draws, size), dtype=np.float32)
        for row in range(draws if size else 0):
            picked = rng.integers(0, size, size)
            self._counts[row] = np.bincount(picked, minlength=size)

    def codes(self, sessions: Sessions) -> npt.NDArray[np.int64]:
        """The index of each session; raises KeyError for one that is not resampled. An array of
        such indices is returned as it is."""
        if isinstance(sessions, np.ndarray):
            return sessions
        return np.fromiter((self._index[s] for s in sessions), dtype=np.int64, count=len(sessions))

    def quantile_draws(
        self,
        sessions: Sessions,
        values: Array,
        quantiles: Sequence[float],
        weights: Array | None = None,
    ) -> Array:
        """For each draw and quantile the quantile of the resampled values: draws × quantiles.

        NaN for a draw that picked no session with a value. Equal to numpy's linear percentile of
        the resample for up to 4,096 values; beyond that values are binned by rank, which moves a
        quantile by at most 1/4096 of the ranks.
        """
        out = np.full((self.draws, len(quantiles)), np.nan)
        if len(values) == 0:
            return out
        order = np.argsort(values, kind="stable")
        ordered = values[order]
        codes = self.codes(sessions)[order]
        mass = np.ones(len(values)) if weights is None else weights[order]
        bins = min(len(values), _MAX_BINS)
        bin_of = (np.arange(len(values)) * bins) // len(values)
        table = np.zeros((len(self.names), bins), dtype=np.float32)
        np.add.at(table, (codes, bin_of), mass)
        edges = np.searchsorted(bin_of, np.arange(bins))
        ends = np.append(edges[1:], len(values)) - 1
        centres = ordered[(edges + ends) // 2]
        rows = max(1, 4_000_000 // bins)
        for start in range(0, self.draws, rows):
            cumulative = np.cumsum(
                (self._counts[start : start + rows] @ table).astype(np.float64), axis=1
            )
            out[start : start + rows] = row_quantiles(cumulative, centres, quantiles)
        return out

    def ratio_draws(self, sessions: Sessions, numerator: Array, denominator: Array) -> Array:
        """For each draw the ratio of the resampled sums; NaN where the denominator is zero."""
        codes = self.codes(sessions)
        size = len(self.names)
        top = self._counts @ np.bincount(codes, weights=numerator, minlength=size)
        bottom = self._counts @ np.bincount(codes, weights=denominator, minlength=size)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(bottom > 0, top / bottom, np.nan).astype(np.float64)

    def sum_draws(self, sessions: Sessions, values: Array) -> Array:
        """For each draw the sum of the resampled sessions' values."""
        totals = np.bincount(self.codes(sessions), weights=values, minlength=len(self.names))
        return (self._counts @ totals).astype(np.float64)

    def total(self, sessions: Sessions, values: Array, scale: float = 1.0) -> Estimate:
        """The sum of `values` times `scale`, with its interval."""
        if not len(values) or not np.isfinite(scale):
            return UNKNOWN
        draws = self.sum_draws(sessions, values) * scale
        return interval(float(values.sum()) * scale, draws, len(values))

    def quantiles(
        self,
        sessions: Sessions,
        values: Array,
        quantiles: Sequence[float],
        weights: Array | None = None,
    ) -> list[Estimate]:
        """Point estimates (numpy's linear percentile, weighted where weights are given) with
        percentile-bootstrap intervals."""
        if len(values) == 0:
            return [UNKNOWN for _ in quantiles]
        points = quantile_points(values, quantiles, weights)
        draws = self.quantile_draws(sessions, values, quantiles, weights)
        return [interval(float(point), draws[:, i], len(values)) for i, point in enumerate(points)]

    def ratio(self, sessions: Sessions, numerator: Array, denominator: Array) -> Estimate:
        """Sum over sum, with its interval."""
        total = float(denominator.sum())
        if total <= 0:
            return UNKNOWN
        draws = self.ratio_draws(sessions, numerator, denominator)
        return interval(float(numerator.sum()) / total, draws, len(numerator))


def quantile_points(
    values: Array, quantiles: Sequence[float], weights: Array | None = None
) -> Array:
    """Quantiles of `values`, each counted `weights` times (integers), linearly interpolated."""
    if weights is None and np.isfinite(values).all():
        return np.asarray(np.quantile(values, quantiles), dtype=np.float64)
    weights = np.ones(len(values)) if weights is None else weights
    order = np.argsort(values, kind="stable")
    cumulative = np.cumsum(weights[order])[None, :].astype(np.float64)
    return np.asarray(row_quantiles(cumulative, values[order], quantiles)[0], dtype=np.float64)


def row_quantiles(cumulative: Array, values: Array, quantiles: Sequence[float]) -> Array:
    """Quantiles of sorted `values` for each row of cumulative counts: rows × quantiles."""
    total = cumulative[:, -1]
    out = np.full((len(cumulative), len(quantiles)), np.nan)
    for i, quantile in enumerate(quantiles):
        rank = (total - 1) * quantile
        lower = np.floor(rank + 1e-9)
        upper = np.minimum(lower + 1, total - 1)
        # The first value that is counted beyond the rank; of a whole row the last one is.
        below = values[(cumulative > lower[:, None]).argmax(axis=1)]
        above = values[(cumulative > upper[:, None]).argmax(axis=1)]
        share = np.clip(rank - lower, 0, 1)
        # Between an answered and a failed request there is no middle: any share of it is infinite.
        # A share that is only rounding is none.
        share[share < 1e-6] = 0.0
        with np.errstate(invalid="ignore"):
            between = below + (above - below) * share
        out[:, i] = np.where(np.isinf(above), np.where(share > 0, above, below), between)
    out[total <= 0] = np.nan
    return out


def interval(value: float, draws: Array, n: int) -> Estimate:
    """`value` with the central 95 % of its bootstrap draws; no interval under 2 known draws."""
    known = draws[~np.isnan(draws)]
    if len(known) < 2:
        return Estimate(value, float("nan"), float("nan"), n)
    low, high = quantile_points(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value, float(low), float(high), n)


def with_order_statistics(
    found: Estimate, shares: Array, sessions: int, quantile: float, level: float = LEVEL
) -> Estimate:
    """A quantile of `shares` over sessions, with its interval made no narrower than that of order
    statistics (Thompson 1936): between which shares of so many independent sessions the quantile
    lies, however they are spread. A bootstrap cannot go beyond the largest that was seen; here the
    bound is 1 where even that one may be below the quantile (of p90: under 36 sessions).
    """
    if not sessions or not found.known:
        return found
    # The chance that fewer than so many sessions are below the quantile.
    fewer = special.bdtr(np.arange(sessions), sessions, quantile)
    tail = (1 - level) / 2
    low, high = int((fewer <= tail).sum()), int((fewer < 1 - tail).sum()) + 1
    ordered = np.sort(shares)
    # A session that was played again has several shares.
    each = len(ordered) / sessions
    least = float(ordered[int((low - 1) * each)]) if low else 0.0
    most = float(ordered[math.ceil(high * each) - 1]) if high <= sessions else 1.0
    return replace(found, low=min(found.low, least), high=max(found.high, most))


def known_variance(draws: Array) -> float:
    """Of the draws that have a value; NaN where none has."""
    known = draws[np.isfinite(draws)]
    return float(np.var(known)) if len(known) else float("nan")
