from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deltaserve.errors import InputError
from eval.compare import compare_cells
from eval.experiment import Slo
from eval.identity import check_repeats
from eval.judged import WAITS_S
from eval.metrics import session_bootstrap
from eval.noise import (
    Difference,
    Noise,
    Verdict,
    difference,
    difference_by_round,
    holm,
    judge,
    p_value,
)
from eval.outcomes import BY_KEY, MEASURES, Measure, Sample
from eval.records import Run, Window
from eval.series import Series, series_of
from eval.stats import SessionBootstrap, quantile_points

MakeRun = Callable[..., Run]
LOOSE = Slo(ttft_s=60.0, tpot_s=1.0, worst_gap_s=10.0)
TTFT_P50 = Measure("ttft_p50", "TTFT p50", True, "ttft_s", 0.5)


SESSIONS, TURNS = 24, 3
NAMES = [f"s{i}" for i in range(SESSIONS) for _ in range(TURNS)]


def made_series(
    rng: np.random.Generator,
    boot: SessionBootstrap,
    request: Any,
    *,
    effect: float,
    run_spread: float,
    quantile: float,
    repeats: int,
    by_round: bool,
) -> list[Series]:
    """One arm's repeats on `request` (sessions × turns, logarithms): sessions that suit the arm
    more or less, runs that differ by `run_spread`, and requests that differ in each. What is
    compared `by_round` is compared without the draws."""
    sessions = boot.codes(NAMES)
    taste = rng.normal(0, 0.1, (SESSIONS, 1))
    found = []
    for _ in range(repeats):
        run = rng.normal(0, run_spread) + rng.normal(0, 0.3, (SESSIONS, TURNS))
        values = np.exp(request + taste + run + effect).ravel()
        point = math.log(quantile_points(values, [quantile])[0])
        draws = np.empty(0)
        if not by_round:
            draws = np.log(boot.quantile_draws(sessions, values, [quantile])[:, 0])
        found.append(Series(point, draws))
    return found


def simulate(
    experiments: int,
    *,
    effect: float,
    repeats: int,
    spreads: tuple[float, float],
    quantile: float = 0.5,
    by_round: bool = False,
) -> tuple[float, float]:
    """The share of made experiments whose interval covers `effect` (a log ratio), and the share
    judged better or worse. `spreads` are of the two arms' runs. Sessions, arms × sessions, runs and
    requests all vary; `by_round`: and the sessions that were drawn, anew in every round."""
    rng = np.random.default_rng(7)
    boot = SessionBootstrap(NAMES, 100)
    covered = judged = 0

    def draw_requests() -> Any:
        return rng.normal(0, 0.5, (SESSIONS, 1)) + rng.normal(0, 0.3, (SESSIONS, TURNS))

    def arms(request: Any, repeats: int) -> list[list[Series]]:
        return [
            made_series(
                rng, boot, request, effect=shift, run_spread=run_spread, quantile=quantile,
                repeats=repeats, by_round=by_round,
            )
            for shift, run_spread in zip((0.0, effect), spreads, strict=True)
        ]  # fmt: skip

    for _ in range(experiments):
        if by_round:
            rounds = [arms(draw_requests(), 1) for _ in range(repeats)]
            found, noise = difference_by_round([(base[0], other[0]) for base, other in rounds])
        else:
            base, other = arms(draw_requests(), repeats)
            found, noise = difference(base, other, SESSIONS)
        covered += abs(found.value - effect) <= found.half_width()
        verdict = judge(found.value, found.half_width(), noise.floor(), lower_is_better=True)
        assert (verdict is not Verdict.NONE) == (p_value(found, noise) < 0.05)
        judged += verdict in (Verdict.BETTER, Verdict.WORSE)
    return covered / experiments, judged / experiments


QUIET, USUAL, NOISY = 0.02, 0.05, 0.4


@pytest.mark.parametrize(
    ("quantile", "repeats", "spreads"),
    [(0.5, 2, (0.05, 0.05)), (0.5, 3, (0.15, 0.15)), (0.9, 3, (0.05, 0.05)), (0.5, 4, (0.15, 0.4))],
)
def test_intervals_cover_a_known_effect_at_the_stated_rate(
    quantile: float, repeats: int, spreads: tuple[float, float]
) -> None:
    """95 % over 500 made experiments; 93 % allows for two of its standard errors."""
    covered, _ = simulate(
        500, effect=math.log(1.2), quantile=quantile, repeats=repeats, spreads=spreads
    )
    assert 0.93 <= covered <= 0.995


@pytest.mark.parametrize("spreads", [(QUIET, QUIET), (USUAL, USUAL), (NOISY, NOISY)])
@pytest.mark.parametrize("by_round", [False, True])
def test_at_most_3_percent_of_aa_pairs_are_judged_different_at_quiet_and_at_noisy_loads(
    spreads: tuple[float, float], by_round: bool
) -> None:
    _, judged = simulate(500, effect=0.0, repeats=3, spreads=spreads, by_round=by_round)
    assert judged <= 0.03


@pytest.mark.parametrize("spreads", [(QUIET, NOISY), (USUAL, NOISY), (QUIET, USUAL)])
def test_nor_where_one_arm_of_the_pair_is_far_noisier(spreads: tuple[float, float]) -> None:
    _, judged = simulate(1000, effect=0.0, repeats=3, spreads=spreads)
    assert judged <= 0.03


FELT = (
    "in_time_share",
    "in_time_per_s",
    "first_tokens_per_s",
    "wait_mean_s",
    *(f"wait_over_{limit}" for limit in WAITS_S),
    "waiting_sessions",
    "late_share_mean",
    "late_share_p50",
    "late_share_p90",
)


def felt_series(rng: np.random.Generator, boot: SessionBootstrap, wait_s: Any) -> dict[str, Series]:
    """What sessions felt in a run of 300 s, from how long their turns waited (sessions × turns), of
    which three in ten did not come to be in it."""
    came = rng.random(wait_s.shape) < 0.7
    wait_s = np.where(came, wait_s, 0.0)
    names = [f"s{i}" for i in range(len(wait_s))]
    of_turns = [name for name in names for _ in range(wait_s.shape[1])]
    ones = came.ravel().astype(float)
    late_share = np.minimum(1, np.maximum(0, wait_s - 3).sum(axis=1) / 300)
    by_turn = {
        "in_time": ones * (wait_s.ravel() <= 3),
        "first_tokens": ones,
        "waited_s": wait_s.ravel(),
        **{f"over_{limit}": wait_s.ravel() > limit for limit in WAITS_S},
    }
    found = {}
    for measure in (BY_KEY[key] for key in FELT):
        if measure.column == "late_share":
            over = np.ones(len(names)) if measure.kind == "share" else None
            taken = Sample(names, late_share, over)
        elif measure.column == "waiting_s":
            taken = Sample(names, wait_s.sum(axis=1), 300.0)
        else:
            values = np.asarray(by_turn[measure.column], dtype=float)
            taken = Sample(of_turns, values, 300.0 if measure.kind == "rate" else ones)
        found |= series_of(boot, taken, [measure])
    return found


@pytest.mark.parametrize("level", [0.5, 2.5], ids=["few are late", "most are late"])
def test_at_most_3_percent_of_aa_pairs_are_judged_different_by_what_sessions_felt(
    level: float,
) -> None:
    """Three repeats an arm, whose runs differ by 30 %."""
    experiments = 200
    rng = np.random.default_rng(3)
    boot = SessionBootstrap([f"s{i}" for i in range(SESSIONS)], 100)
    judged = dict.fromkeys(FELT, 0)
    for _ in range(experiments):
        session = level + rng.normal(0, 1, (SESSIONS, 1))
        arms = []
        for _arm in range(2):
            own = session + rng.normal(0, 0.2, (SESSIONS, 1))
            waits_s = [
                np.exp(own + rng.normal(0, 0.3) + rng.normal(0, 0.8, (SESSIONS, 10)))
                for _repeat in range(3)
            ]
            arms.append([felt_series(rng, boot, wait_s) for wait_s in waits_s])
        for key in FELT:
            base, other = ([run[key] for run in arm] for arm in arms)
            found, noise = difference(base, other, SESSIONS)
            verdict = judge(found.value, found.half_width(), noise.floor(), lower_is_better=True)
            judged[key] += verdict in (Verdict.BETTER, Verdict.WORSE)
    assert max(judged.values()) <= 0.03 * experiments, judged


@pytest.mark.parametrize(("repeats", "by_round"), [(4, False), (5, True)])
def test_an_effect_of_25_percent_is_found_at_the_quiet_load(repeats: int, by_round: bool) -> None:
    """With four repeats on one trace, or five rounds that each have sessions of their own."""
    _, judged = simulate(
        500, effect=math.log(1.25), repeats=repeats, spreads=(QUIET, QUIET), by_round=by_round
    )
    assert judged >= 0.75


def test_a_large_effect_is_found() -> None:
    _, judged = simulate(200, effect=math.log(1.6), repeats=3, spreads=(USUAL, USUAL))
    assert judged >= 0.85


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


@pytest.mark.parametrize("noise", [Noise(0.0001, 0.0001, 2.0), Noise(0.01, 0.01, 2.0)])
def test_the_p_value_is_5_percent_where_a_verdict_begins(noise: Noise) -> None:
    """Once the interval decides that, once the noise floor."""
    wide = Difference(0.0, 0.01, 0.0001, 29, 2.0)
    least = max(wide.half_width(), noise.floor())
    for value, p in ((least * 1.01, "<"), (least * 0.99, ">")):
        found = replace(wide, value=value)
        verdict = judge(value, found.half_width(), noise.floor(), lower_is_better=True)
        assert (verdict is Verdict.WORSE) == (p == "<")
        assert (p_value(found, noise) < 0.05) == (p == "<")


def test_holm_keeps_the_smallest_and_stops_at_the_first_that_fails() -> None:
    assert holm([0.001, 0.04, 0.02]) == [True, True, True]
    assert holm([0.001, 0.06, 0.02]) == [True, False, True]
    assert holm([0.02, 0.04, 0.03]) == [False, False, False]
    assert holm([]) == []


def boot_of(*runs: Run) -> SessionBootstrap:
    return session_bootstrap(runs, 200)


def test_one_run_an_arm_is_not_judged(make_run: MakeRun) -> None:
    one, two = make_run(arm="a"), make_run(arm="b", ttft_s=5.0)
    found = compare_cells({"a": [one], "b": [two]}, [("a", "b")], boot_of(one, two), [TTFT_P50])
    assert found[0].verdict is Verdict.UNJUDGED
    assert found[0].effect.value > 5
    assert found[0].reason == "an arm ran once, so nothing shows how much a rerun would differ"


def test_a_noisy_cell_lends_its_noise_to_no_other(make_run: MakeRun) -> None:
    """Runs of another arm, and of another load, that differ 50-fold between repeats."""
    quiet = {arm: [make_run(arm=arm, repeat=r, seed=1) for r in (1, 2, 3)] for arm in "ab"}
    noisy = {
        cell: [make_run(arm=cell[0], load="high", repeat=r, ttft_s=50.0**r) for r in (1, 2, 3)]
        for cell in ("a@high", "c@high")
    }
    boot = boot_of(*(run for runs in (quiet | noisy).values() for run in runs))
    alone = compare_cells(quiet, [("a", "b")], boot, [TTFT_P50])[0]
    beside = compare_cells(quiet | noisy, [("a", "b"), ("a@high", "c@high")], boot, [TTFT_P50])[0]
    assert (beside.effect, beside.noise_floor) == (alone.effect, alone.noise_floor)
    assert alone.noise_floor < 0.5


def test_arms_are_compared_on_the_requests_that_both_were_asked(make_run: MakeRun) -> None:
    base = [make_run(arm="a", repeat=r, seed=1) for r in (1, 2)]
    other = [make_run(arm="b", repeat=r, seed=1) for r in (1, 2)]
    for run in other:
        slow = run.requests["ttft_s"] > run.requests["ttft_s"].median()
        run.requests.loc[slow, "request_id"] += "-of-this-arm"
    boot = boot_of(*base, *other)
    found = compare_cells({"a": base, "b": other}, [("a", "b")], boot, [TTFT_P50])[0]
    asked = set.intersection(*(set(run.requests["request_id"]) for run in [*base, *other]))
    assert 0 < found.requests == len(asked) < 120
    assert found.effect.value == pytest.approx(1.0)
    assert found.verdict is Verdict.NONE


def test_an_arm_that_fails_its_slow_requests_loses_for_it(make_run: MakeRun) -> None:
    """A fifth of its requests fail: what is left is faster, and its p90 is beyond every answer."""
    base = [make_run(arm="a", repeat=r, seed=1) for r in (1, 2, 3)]
    other = [make_run(arm="b", repeat=r, seed=1, errors=24) for r in (1, 2, 3)]
    boot = boot_of(*base, *other)
    found = {
        item.measure.key: item
        for item in compare_cells({"a": base, "b": other}, [("a", "b")], boot, slo=LOOSE)
    }
    assert found["ttft_p90"].verdict is Verdict.WORSE
    assert found["ttft_p90"].effect.value == math.inf
    assert found["in_time_share"].verdict is Verdict.WORSE
    assert found["in_time_share"].effect.value == pytest.approx(-0.2, abs=0.02)
    assert found["in_time_per_s"].verdict is Verdict.WORSE
    assert found["ttft_p90"].requests == 120


def test_an_arm_that_serves_nothing_has_no_turns_in_time(make_run: MakeRun) -> None:
    base = [make_run(arm="a", repeat=r, seed=1) for r in (1, 2, 3)]
    other = [make_run(arm="b", repeat=r, seed=1, errors=120) for r in (1, 2, 3)]
    in_time = [m for m in MEASURES if m.key == "in_time_per_s"]
    boot = boot_of(*base, *other)
    found = compare_cells({"a": base, "b": other}, [("a", "b")], boot, in_time, slo=LOOSE)[0]
    assert found.verdict is Verdict.WORSE
    assert found.effect.value == 0


def test_a_real_difference_between_repeated_arms_gets_its_direction(make_run: MakeRun) -> None:
    base = [make_run(arm="a", repeat=r, seed=1) for r in (1, 2, 3)]
    other = [make_run(arm="b", repeat=r, seed=2, ttft_s=0.25) for r in (1, 2, 3)]
    boot = boot_of(*base, *other)
    found = compare_cells({"a": base, "b": other}, [("a", "b")], boot, [TTFT_P50])[0]
    assert found.verdict is Verdict.BETTER
    assert found.effect.low < 0.5 < found.effect.high
    assert found.better_share > 0.9
    back = compare_cells({"a": base, "b": other}, [("b", "a")], boot, [TTFT_P50])[0]
    assert back.verdict is Verdict.WORSE


def test_the_correction_is_over_primary_measures_only(make_run: MakeRun) -> None:
    base = [make_run(arm="a", repeat=r, seed=1) for r in (1, 2, 3)]
    other = [make_run(arm="b", repeat=r, seed=2, ttft_s=0.25) for r in (1, 2, 3)]
    found = compare_cells(
        {"a": base, "b": other}, [("a", "b")], boot_of(*base, *other), primary=["ttft_p50", "apc"]
    )
    assert {item.measure.key for item in found if item.holds is not None} == {"ttft_p50", "apc"}
    assert next(item for item in found if item.measure.key == "ttft_p50").holds
    by_all = holm([item.p_value for item in found if math.isfinite(item.p_value)])
    assert sum(by_all) <= len(by_all)


def test_cached_shares_are_compared_in_points(make_run: MakeRun) -> None:
    base = [make_run(arm="a", repeat=r, cached_share=0.6) for r in (1, 2, 3)]
    other = [make_run(arm="b", repeat=r, cached_share=0.5) for r in (1, 2, 3)]
    apc = [m for m in MEASURES if m.key == "apc"]
    found = compare_cells({"a": base, "b": other}, [("a", "b")], boot_of(*base, *other), apc)[0]
    shares = [
        sum(run.requests["cached_tokens"].sum() for run in runs)
        / sum(run.requests["prompt_tokens"].sum() for run in runs)
        for runs in (base, other)
    ]
    assert found.effect.value == pytest.approx(shares[1] - shares[0], abs=1e-3)
    assert found.verdict is Verdict.WORSE
    assert math.isnan(found.ratio.value)


def test_arms_on_different_traces_are_not_compared_and_both_are_named(make_run: MakeRun) -> None:
    base = [make_run(arm="a", repeat=r, seed=1) for r in (1, 2)]
    other = [make_run(arm="b", repeat=r, seed=1, sha256="1" * 64) for r in (1, 2)]
    boot = boot_of(*base, *other)
    found = compare_cells({"a": base, "b": other}, [("a", "b")], boot, [TTFT_P50])[0]
    assert found.verdict is Verdict.UNJUDGED
    assert found.requests == 0
    assert found.reason is not None
    assert re.search(r"a/r1 and .*b/r1 were asked different things: trace sha256 0+… and 1+…",
                     found.reason)  # fmt: skip


def test_rounds_with_traces_of_their_own_are_compared_one_by_one(make_run: MakeRun) -> None:
    """Every round has other sessions, far slower ones in the last: the arms' difference is the same
    in each, and that is what is judged."""
    vary = {"analysis": {"vary": ["trace.seed"]}}
    cells = {
        arm: [
            make_run(arm=arm, repeat=r, seed=1, trace_seed=r, sha256=str(r) * 64, manifest=vary,
                     ttft_s=base_s * 4.0**r, spread=0.05)
            for r in (1, 2, 3, 4)
        ]
        for arm, base_s in (("a", 0.5), ("b", 0.6))
    }  # fmt: skip
    boot = boot_of(*(run for runs in cells.values() for run in runs))
    found = compare_cells(cells, [("a", "b")], boot, [TTFT_P50])[0]
    assert found.verdict is Verdict.WORSE
    assert found.effect.value == pytest.approx(1.2, rel=0.05)
    check_repeats(cells)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"max_inflight_sessions": 16},
            "load mode closed, max_inflight_sessions 8 and mode closed, max_inflight_sessions 16",
        ),
        ({"mode": "open", "time_scale": 1.0}, "and mode open, time_scale 1.0"),
        ({"max_think_s": 60.0}, "think think_scale 1.0, max_think_s 10.0 and think_scale 1.0, max"),
        ({"session_limit": 20}, "limits none and session_limit 20"),
        ({"time_scale": 4.0}, "max_think_s 10.0, time_scale 4.0"),
        ({"recycle_start": "mid"}, "recycled and start mid, 60 s, recycled from their middle"),
        ({"start_share": [0.0, 0.9]}, "start mid, 60 s, recycled and start mid after 0 to 0.9, 60"),
    ],
)
def test_arms_under_another_load_are_not_compared(
    make_run: MakeRun, changed: dict[str, Any], words: str
) -> None:
    asked = {
        "mode": "closed", "max_inflight_sessions": 8, "think_scale": 1.0, "max_think_s": 10.0,
        "request_limit": None, "session_limit": None, "time_scale": 1.0,
        "recycle_start": "cold", "start_share": [0.25, 0.75],
    }  # fmt: skip
    window = Window(20.0, 80.0, start="mid", recycle=True, asked_s=60.0)

    def runs(arm: str, arguments: dict[str, Any]) -> list[Run]:
        manifest = {"replay": {"arguments": arguments}}
        made = (make_run(arm=arm, repeat=r, seed=1, manifest=manifest) for r in (1, 2))
        return [replace(run, window=window) for run in made]

    base, same, other = runs("a", asked), runs("b", asked), runs("c", asked | changed)
    boot = boot_of(*base, *same, *other)
    cells = {"a": base, "b": same, "c": other}
    [alike, found] = compare_cells(cells, [("a", "b"), ("a", "c")], boot, [TTFT_P50])
    assert alike.reason is None
    assert found.verdict is Verdict.UNJUDGED
    assert words in (found.reason or "")


def test_arms_that_were_asked_other_lengths_of_one_trace_are_not_compared(
    make_run: MakeRun,
) -> None:
    base = [make_run(arm="a", repeat=r, seed=1) for r in (1, 2)]
    whole = [make_run(arm="b", repeat=r, seed=1) for r in (1, 2)]
    halved = [
        replace(run, trace=replace(run.trace, length_scale=0.5)) for run in whole if run.trace
    ]
    boot = boot_of(*base, *halved)
    found = compare_cells({"a": base, "b": halved}, [("a", "b")], boot, [TTFT_P50])[0]
    assert found.verdict is Verdict.UNJUDGED
    assert "were asked different things: length scale 1.0 and 0.5" in (found.reason or "")
    with pytest.raises(InputError, match=r"with length scale 1\.0 and 0\.5"):
        check_repeats({"b": [whole[0], halved[1]]})


def test_repeats_on_different_traces_are_never_pooled(make_run: MakeRun) -> None:
    runs = [make_run(repeat=1), make_run(repeat=2, sha256="1" * 64)]
    with pytest.raises(InputError, match=r"a/r2 and .*a/r1: both are runs of 'a', but with trace"):
        check_repeats({"a": runs})
    engines = {"versions": {"engines": {"sglang": "0.5.18"}}}
    runs = [
        make_run(arm="b", repeat=1, manifest={"versions": {"engines": {"sglang": "0.5.17"}}}),
        make_run(arm="b", repeat=2, manifest=engines),
    ]
    with pytest.raises(InputError, match=r"engine sglang 0\.5\.17 and sglang 0\.5\.18"):
        check_repeats({"b": runs})
