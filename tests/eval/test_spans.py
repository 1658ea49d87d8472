"""Spans of time that are merged, and what they cover of a time between two others."""

from __future__ import annotations

import numpy as np
import pytest

from eval.spans import covered_s, merged

SPANS = np.array([[0.0, 2.0], [1.0, 1.5], [2.5, 3.0], [10.0, 11.0]])


@pytest.mark.parametrize(
    ("pause_s", "expected"),
    [(0.0, [[0, 2], [2.5, 3], [10, 11]]), (0.5, [[0, 3], [10, 11]]), (7.0, [[0, 11]])],
)
def test_spans_become_one_where_hardly_anything_lies_between_them(
    pause_s: float, expected: list[list[float]]
) -> None:
    assert merged(SPANS, pause_s).tolist() == expected


@pytest.mark.parametrize(
    ("start_s", "end_s", "expected"),
    [
        (-1, 20, 3.5),
        (1, 2.75, 1.25),
        (0.5, 1, 0.5),
        (3, 10, 0),
        (5, 6, 0),
        (20, 30, 0),
        (-2, -1, 0),
    ],
)
def test_what_spans_cover(start_s: float, end_s: float, expected: float) -> None:
    assert covered_s(merged(SPANS), start_s, end_s) == pytest.approx(expected)
