"""Spans of time, as rows of their beginning and end in seconds."""

from __future__ import annotations

import numpy as np

from eval.stats import Array


def merged(spans: Array, pause_s: float = 0.0) -> Array:
    """Spans sorted by their beginning, as one where they overlap or no more than `pause_s` lies
    between them."""
    ends = np.maximum.accumulate(spans[:, 1])
    new = np.concatenate(([True], spans[1:, 0] > ends[:-1] + pause_s))
    last = np.concatenate((np.flatnonzero(new)[1:] - 1, [len(spans) - 1]))
    return np.column_stack((spans[new, 0], ends[last]))


def covered_s(spans: Array, start_s: float, end_s: float) -> float:
    """How much of the time between two others the merged spans cover, in seconds."""
    first = np.searchsorted(spans[:, 1], start_s)
    last = np.searchsorted(spans[:, 0], end_s)
    inside = np.clip(spans[first:last], start_s, end_s)
    return float((inside[:, 1] - inside[:, 0]).sum())
