"""Intervals for medians and ratios, by bootstrap; numbers in, numbers out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

DRAWS = 2000

Array = np.ndarray[Any, np.dtype[np.float64]]


def quantile(values: Sequence[float], q: float) -> float:
    """The `q` quantile, NaN of nothing."""
    return float(np.quantile(np.asarray(values, dtype=float), q)) if len(values) else math.nan


def interval(
    clusters: Sequence[Any], statistic: Callable[[list[Any]], float], seed: int = 0
) -> dict[str, float | int]:
    """`statistic` of the clusters with a 95 % interval from resampling them whole.

    A cluster is what repeats independently: a repeat, a session. Of fewer than three there is no
    interval.
    """
    value = statistic(list(clusters))
    found: dict[str, float | int] = {"value": value, "n": len(clusters)}
    if len(clusters) >= 3:
        rng = np.random.default_rng(seed)
        picks = rng.integers(0, len(clusters), (DRAWS, len(clusters)))
        draws = [statistic([clusters[i] for i in pick]) for pick in picks]
        kept = [draw for draw in draws if math.isfinite(draw)]
        if kept:
            found |= {"low": quantile(kept, 0.025), "high": quantile(kept, 0.975)}
    return found


def median_interval(values: Sequence[float]) -> dict[str, float | int]:
    """The median with its interval."""
    return interval(values, lambda drawn: quantile(drawn, 0.5))


def pooled_quantile_interval(groups: Sequence[Sequence[float]], q: float) -> dict[str, float | int]:
    """The `q` quantile of all values, with an interval from resampling whole groups."""
    return interval(groups, lambda drawn: quantile([v for group in drawn for v in group], q))


def line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope of the least-squares line; NaN where `x` does not vary."""
    if len(set(x)) < 2:
        return math.nan, math.nan
    slope, intercept = np.polyfit(np.asarray(x, dtype=float), np.asarray(y, dtype=float), 1)
    return float(intercept), float(slope)
