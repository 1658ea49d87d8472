"""The progress display's percentiles."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.progress import Counters, Sketch


@given(
    st.lists(st.floats(1e-5, 1e4), min_size=1, max_size=300),
    st.integers(0, 300),
    st.sampled_from([1, 50, 90, 99, 100]),
)
def test_percentiles_are_within_one_percent_however_the_values_were_counted(
    values: list[float], cut: int, percent: int
) -> None:
    one, other = Counters(), Counters()
    for counters, part in ((one, values[:cut]), (other, values[cut:])):
        for value in part:
            counters.ttft_s.add(value)
    one.add(other)
    exact = np.percentile(values, percent, method="inverted_cdf")
    assert one.ttft_s.percentile(percent) == pytest.approx(exact, rel=0.0101)


def test_no_value_has_no_percentile() -> None:
    assert Sketch().percentile(50) is None
    early = Sketch()
    early.add(-0.1)  # clocks of two processes may disagree by a little
    assert early.percentile(50) == pytest.approx(0, abs=1e-5)
