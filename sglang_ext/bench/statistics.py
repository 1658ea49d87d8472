"""Intervals for medians and ratios, by bootstrap; numbers in, numbers out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

DRAWS = 2000

Array = np.ndarray[Any, np.dtype[np.float64]]


def quantile(values: Sequence[float] | Array, q: float) -> float:
    """The `q` quantile, NaN of nothing."""
    return float(np.quantile(np.asarray(values, dtype=float), q)) if len(values) else math.nan


def interval(
    clusters: Sequence[Any], statistic: Callable[[list[Any]], float], seed: int = 0
) -> dict[str, float | int]:
    """`statistic` of the clusters with a 95 % interval from resampling them whole.

    A cluster is what repeats independently: a repeat, a session. Of fewer than three there is no
    interval.
    """
    return _with_interval(
        statistic(list(clusters)),
        len(clusters),
        lambda picks: [statistic([clusters[i] for i in pick]) for pick in picks],
        seed,
    )


def median_interval(values: Sequence[float]) -> dict[str, float | int]:
    """The median with its interval."""
    array = np.asarray(values, dtype=float)
    # All draws at once: one by one, most of the time goes into calls.
    return _with_interval(
        quantile(array, 0.5), len(array), lambda picks: np.quantile(array[picks], 0.5, axis=1)
    )


def _with_interval(
    value: float,
    size: int,
    resampled: Callable[[np.ndarray[Any, np.dtype[np.int64]]], Sequence[float] | Array],
    seed: int = 0,
) -> dict[str, float | int]:
    """`value` of `size` clusters, with the interval of what `resampled` gives for rows of their
    indices."""
    found: dict[str, float | int] = {"value": value, "n": size}
    if size >= 3:
        picks = np.random.default_rng(seed).integers(0, size, (DRAWS, size))
        kept = [float(draw) for draw in resampled(picks) if math.isfinite(draw)]
        if kept:
            found |= {"low": quantile(kept, 0.025), "high": quantile(kept, 0.975)}
    return found


def pooled_quantile_interval(groups: Sequence[Sequence[float]], q: float) -> dict[str, float | int]:
    """The `q` quantile of all values, with an interval from resampling whole groups."""
    none = np.empty(0)
    arrays = [np.asarray(group, dtype=float) for group in groups]
    return interval(arrays, lambda drawn: quantile(np.concatenate([none, *drawn]), q))


def line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope of the least-squares line; NaN where `x` does not vary."""
    if len(set(x)) < 2:
        return math.nan, math.nan
    slope, intercept = np.polyfit(np.asarray(x, dtype=float), np.asarray(y, dtype=float), 1)
    return float(intercept), float(slope)
