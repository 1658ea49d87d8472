from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from eval.compare import (
    Measure,
    Noise,
    Series,
    Verdict,
    compare_cells,
    difference,
    holm,
    judge,
    noise,
)
from eval.records import Run
from eval.stats import SessionBootstrap, quantile_points

DRAWS = 1000
TTFT_P50 = Measure("ttft_p50", "TTFT p50", True, "ttft_s", 0.5)


def simulate(
    experiments: int, *, effect: float, quantile: float, repeats: int, run_spread: float
) -> tuple[float, float]:
    """The share of made experiments whose interval covers `effect` (a log ratio), and the share
    judged better or worse. Sessions, arms × sessions, runs and requests all vary."""
    rng = np.random.default_rng(7)
    sessions, turns = 24, 3
    names = [f"s{i}" for i in range(sessions) for _ in range(turns)]
    boot = SessionBootstrap(names, 100)
    covered = judged = 0
    for _ in range(experiments):
        request = rng.normal(0, 0.5, (sessions, 1)) + rng.normal(0, 0.3, (sessions, turns))
        series: dict[str, list[Series]] = {}
        for arm, shift in (("base", 0.0), ("other", effect)):
            taste = rng.normal(0, 0.1, (sessions, 1))
            series[arm] = []
            for _ in range(repeats):
                run = rng.normal(0, run_spread) + rng.normal(0, 0.3, (sessions, turns))
                values = np.exp(request + taste + run + shift).ravel()
                point = math.log(quantile_points(values, [quantile])[0])
                draws = boot.quantile_draws(names, values, [quantile])[:, 0]
                series[arm].append(Series(point, np.log(draws)))
        spread = noise(series)
        found = difference(series["base"], series["other"], spread, sessions)
        covered += abs(found.value - effect) <= found.half_width()
        floor = spread.floor(repeats, repeats)
        verdict = judge(found.value, found.half_width(), floor, lower_is_better=True)
        judged += verdict in (Verdict.BETTER, Verdict.WORSE)
    return covered / experiments, judged / experiments


@pytest.mark.parametrize(
    ("quantile", "repeats", "run_spread"),
    [(0.5, 2, 0.05), (0.5, 3, 0.15), (0.9, 3, 0.05)],
)
def test_intervals_cover_a_known_effect_at_the_stated_rate(
    quantile: float, repeats: int, run_spread: float
) -> None:
    """95 % over 1,000 made experiments; 93 % allows for three of its standard errors."""
    covered, _ = simulate(
        1000, effect=math.log(1.2), quantile=quantile, repeats=repeats, run_spread=run_spread
    )
    assert 0.93 <= covered <= 0.985


@pytest.mark.parametrize(
    ("quantile", "repeats", "run_spread"), [(0.5, 2, 0.05), (0.5, 3, 0.15), (0.9, 2, 0.0)]
)
def test_two_runs_of_the_same_thing_are_called_no_different(
    quantile: float, repeats: int, run_spread: float
) -> None:
    _, judged = simulate(
        1000, effect=0.0, quantile=quantile, repeats=repeats, run_spread=run_spread
    )
    assert judged <= 0.05


def test_a_large_effect_is_found() -> None:
    _, judged = simulate(200, effect=math.log(1.6), quantile=0.5, repeats=3, run_spread=0.05)
    assert judged >= 0.95


@pytest.mark.parametrize(
    ("delta", "half_width", "floor", "lower_is_better", "verdict"),
    [
        (-0.2, 0.1, 0.1, True, Verdict.BETTER),
        (-0.2, 0.1, 0.1, False, Verdict.WORSE),
        (0.2, 0.1, 0.1, True, Verdict.WORSE),
        (0.2, 0.3, 0.1, True, Verdict.NONE),
        (0.2, 0.1, 0.3, True, Verdict.NONE),
        (0.2, math.nan, 0.1, True, Verdict.UNJUDGED),
        (0.2, 0.1, math.nan, True, Verdict.UNJUDGED),
    ],
)
def test_a_verdict_needs_the_interval_and_the_noise_floor(
    delta: float, half_width: float, floor: float, lower_is_better: bool, verdict: Verdict
) -> None:
    assert judge(delta, half_width, floor, lower_is_better=lower_is_better) is verdict


def test_the_p_value_is_where_the_interval_touches_zero() -> None:
    rng = np.random.default_rng(0)
    base = [Series(0.0, rng.normal(0, 0.1, DRAWS)) for _ in range(2)]
    other = [Series(0.3, rng.normal(0.3, 0.1, DRAWS)) for _ in range(2)]
    spread = Noise(0.001, 0.001, 2)
    found = difference(base, other, spread, 30)
    half_width = found.half_width()
    assert (found.p_value() < 0.05) == (abs(found.value) > half_width)
    touching = [Series(half_width, run.draws - 0.3 + half_width) for run in other]
    assert difference(base, touching, spread, 30).p_value() == pytest.approx(0.05)


def test_holm_keeps_the_smallest_and_stops_at_the_first_that_fails() -> None:
    assert holm([0.001, 0.04, 0.02]) == [True, True, True]
    assert holm([0.001, 0.06, 0.02]) == [True, False, True]
    assert holm([0.02, 0.04, 0.03]) == [False, False, False]
    assert holm([]) == []


def boot_of(*runs: Run) -> SessionBootstrap:
    return SessionBootstrap([name for run in runs for name in run.requests["session_id"]], 200)


def test_one_run_an_arm_is_not_judged(make_run: Callable[..., Run]) -> None:
    one, two = make_run(arm="a"), make_run(arm="b", ttft_s=5.0)
    found = compare_cells({"a": [one], "b": [two]}, [("a", "b")], boot_of(one, two), [TTFT_P50])
    assert found[0].verdict is Verdict.UNJUDGED
    assert found[0].ratio.value > 5


def test_arms_are_compared_on_the_requests_that_both_answered(
    make_run: Callable[..., Run],
) -> None:
    """An arm that fails its slow requests does not look faster for it."""
    base = [make_run(arm="a", repeat=r, seed=1) for r in (1, 2)]
    other = [make_run(arm="b", repeat=r, seed=1) for r in (1, 2)]
    for run in other:
        slow = run.requests["ttft_s"] > run.requests["ttft_s"].median()
        run.requests.loc[slow, "ok"] = False
    boot = boot_of(*base, *other)
    found = compare_cells({"a": base, "b": other}, [("a", "b")], boot, [TTFT_P50])[0]
    answered = set.intersection(
        *(set(run.requests.loc[run.requests["ok"], "request_id"]) for run in other)
    )
    assert found.requests == len(answered)
    assert found.ratio.value == pytest.approx(1.0)
    assert found.verdict is Verdict.NONE


def test_a_real_difference_between_repeated_arms_gets_its_direction(
    make_run: Callable[..., Run],
) -> None:
    base = [make_run(arm="a", repeat=r, seed=1) for r in (1, 2, 3)]
    other = [make_run(arm="b", repeat=r, seed=2, ttft_s=0.25) for r in (1, 2, 3)]
    boot = boot_of(*base, *other)
    found = compare_cells({"a": base, "b": other}, [("a", "b")], boot, [TTFT_P50])[0]
    assert found.verdict is Verdict.BETTER
    assert found.ratio.low < 0.5 < found.ratio.high
    assert found.better_share > 0.9
    back = compare_cells({"a": base, "b": other}, [("b", "a")], boot, [TTFT_P50])[0]
    assert back.verdict is Verdict.WORSE
