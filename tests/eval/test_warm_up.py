"""MSER-5 on made series: it finds a transient's end, and leaves a steady series alone."""

from __future__ import annotations

import numpy as np
import pytest

from eval.warm_up import warm_up_values


def made(
    transient: int, count: int = 400, seed: int = 0
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Noise of spread 1 around 10, after `transient` values that fall to it from 20 above."""
    at = np.arange(count)
    start = 20 * np.clip(1 - at / transient, 0, 1) if transient else 0.0
    return 10 + start + np.random.default_rng(seed).normal(size=count)


@pytest.mark.parametrize("transient", [40, 80, 150])
def test_a_transient_is_left_out_and_not_much_more(transient: int) -> None:
    found = [warm_up_values(made(transient, seed=seed)) for seed in range(20)]
    known = [cut for cut in found if cut is not None]
    assert len(known) >= 18
    assert min(known) >= 0.6 * transient
    assert np.median(known) <= transient + 20


def test_of_a_steady_series_little_is_left_out() -> None:
    found = [warm_up_values(made(0, seed=seed)) for seed in range(50)]
    assert np.median([400 if cut is None else cut for cut in found]) <= 40


def test_a_series_that_grows_to_its_end_never_settled() -> None:
    assert warm_up_values(np.linspace(1.0, 100.0, 200)) is None


def test_too_few_or_failed_values_say_nothing() -> None:
    assert warm_up_values(np.ones(49)) is None
    assert warm_up_values(np.array([1.0] * 99 + [np.inf])) is None
