"""How much of a series' start is still warm-up, by MSER-5.

Owns that rule alone (White 1997): values are averaged in batches of five, and the start is left
out that makes the standard error of the rest's mean smallest. It needs no threshold and no model of
what is measured; a single outlier may make it leave out too much, so it is a remark beside a run,
not a reason to exclude it.
"""

from __future__ import annotations

import math

import numpy as np

from eval.stats import Array

_BATCH = 5
_LEAST_BATCHES = 10


def warm_up_values(values: Array) -> int | None:
    """How many of the first `values`, in order of time, are warm-up; None where there are too few
    to say (fewer than 50), or where leaving out more than half would still be better: then the
    series never settled."""
    batches = len(values) // _BATCH
    if batches < _LEAST_BATCHES or not np.all(np.isfinite(values)):
        return None
    means = (
        np.asarray(values[: batches * _BATCH], dtype=float).reshape(batches, _BATCH).mean(axis=1)
    )
    best, least = 0, math.inf
    half = batches // 2
    for left_out in range(half + 1):
        rest = means[left_out:]
        error = float(((rest - rest.mean()) ** 2).sum()) / len(rest) ** 2
        if error < least:
            best, least = left_out, error
    return None if best == half else best * _BATCH
