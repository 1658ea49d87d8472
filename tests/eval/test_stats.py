from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.stats import SessionBootstrap, quantile_points

QS = [0.5, 0.9, 0.99]


@given(
    st.lists(st.floats(0.001, 1e3), min_size=1, max_size=60),
    st.lists(st.integers(1, 5), min_size=60, max_size=60),
)
def test_weighted_quantiles_are_numpys_quantiles_of_the_repeated_values(
    values: list[float], counts: list[int]
) -> None:
    array, weights = np.array(values), np.array(counts[: len(values)], dtype=float)
    repeated = np.repeat(array, weights.astype(int))
    np.testing.assert_allclose(
        quantile_points(array, QS, weights), np.quantile(repeated, QS), rtol=1e-9
    )


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.floats(0.001, 1e3)), min_size=1, max_size=50),
    st.integers(0, 5),
)
def test_each_draw_is_the_statistic_of_whole_sessions_drawn_with_replacement(
    pairs: list[tuple[int, float]], seed: int
) -> None:
    sessions = [f"s{code}" for code, _ in pairs]
    values = np.array([value for _, value in pairs])
    boot = SessionBootstrap(sessions, draws=20, seed=seed)
    quantiles = boot.quantile_draws(sessions, values, QS)
    ratios = boot.ratio_draws(sessions, values, np.ones(len(values)))
    for draw in range(20):
        counts = dict(zip(boot.names, boot._counts[draw].astype(int), strict=True))
        assert sum(counts.values()) == len(boot.names)
        resample = np.concatenate(
            [np.repeat(value, counts[name]) for name, value in zip(sessions, values, strict=True)]
        )
        if len(resample) == 0:
            assert np.isnan(quantiles[draw]).all()
            continue
        np.testing.assert_allclose(quantiles[draw], np.quantile(resample, QS), rtol=1e-6)
        assert ratios[draw] == pytest.approx(resample.mean(), rel=1e-5)


def test_values_of_one_session_do_not_make_an_interval_narrower() -> None:
    """Ten copies of each session's value say nothing more than one copy does."""
    rng = np.random.default_rng(0)
    names = [f"s{i}" for i in range(40)]
    values = rng.lognormal(0, 1, 40)
    once = SessionBootstrap(names, 500).quantiles(names, values, [0.5])[0]
    tenfold = SessionBootstrap(names, 500).quantiles(names * 10, np.tile(values, 10), [0.5])[0]
    assert tenfold.high - tenfold.low == pytest.approx(once.high - once.low, rel=0.15)


def test_binning_many_values_moves_a_quantile_by_less_than_its_interval() -> None:
    rng = np.random.default_rng(1)
    values = rng.lognormal(0, 1, 50_000)
    sessions = [f"s{i % 500}" for i in range(50_000)]
    boot = SessionBootstrap(sessions, 50)
    exact = boot.quantiles(sessions, values, QS)
    draws = boot.quantile_draws(sessions, values, QS)
    for i, estimate in enumerate(exact):
        assert np.mean(draws[:, i]) == pytest.approx(estimate.value, rel=0.02)
        assert estimate.low < estimate.value < estimate.high


def test_nothing_measured_is_unknown_and_not_zero() -> None:
    boot = SessionBootstrap(["a", "b"], 10)
    assert not boot.quantiles([], np.array([]), [0.5])[0].known
    assert not boot.ratio(["a"], np.array([1.0]), np.array([0.0])).known
