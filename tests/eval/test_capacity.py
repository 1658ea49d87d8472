"""The capacity search finds a known capacity, says how sure it is, and wastes no runs."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from eval.capacity import (
    Capacity,
    Level,
    Search,
    SessionOutcome,
    capacity,
    judge,
    next_load,
)
from eval.experiment import Slo

OBJECTIVE = Slo(stretch_p90=math.inf)


def cliff(load: float, knee: float, width: float) -> float:
    """Attainment that falls from near 1 to near 0 around `knee`."""
    return 1 / (1 + math.exp((load - knee) / width))


def measured(
    rng: np.random.Generator, load: float, share: float, sessions: int, spread: float
) -> list[SessionOutcome]:
    """`sessions` sessions of 3 to 12 turns; those of one session, and of one run, share a fate."""
    of_run = rng.normal(0, spread / 3)
    found = []
    for _ in range(sessions):
        logit = math.log(share / (1 - share)) + of_run + rng.normal(0, spread)
        turns = int(rng.integers(3, 13))
        found.append(SessionOutcome(int(rng.binomial(turns, 1 / (1 + math.exp(-logit)))), turns))
    return found


def run_search(
    rng: np.random.Generator, knee: float, width: float, search: Search
) -> tuple[Capacity, int]:
    levels: dict[float, Level] = {}
    runs = 0
    while (load := next_load(list(levels.values()), search, OBJECTIVE)) is not None:
        runs += 1
        assert runs < 40
        share = min(max(cliff(load, knee, width), 0.001), 0.999)
        before = levels.get(load, Level(load, [], repeats=0))
        more = measured(rng, load, share, sessions=24, spread=0.5)
        levels[load] = Level(load, [*before.sessions, *more], repeats=before.repeats + 1)
    return capacity(list(levels.values()), search, OBJECTIVE), runs


def marginal(knee: float, width: float, load: float) -> float:
    """The attainment a session can expect at `load`, its random spread averaged over."""
    share = min(max(cliff(load, knee, width), 0.001), 0.999)
    z = np.linspace(-3.5, 3.5, 201)
    weight = np.exp(-z * z / 2)
    total = math.sqrt(0.5**2 + (0.5 / 3) ** 2)
    values = 1 / (1 + np.exp(-(math.log(share / (1 - share)) + total * z)))
    return float((values * weight).sum() / weight.sum())


def test_the_interval_covers_a_known_capacity_in_93_of_100_searches() -> None:
    rng = np.random.default_rng(5)
    covered = 0
    experiments = 300
    total_runs = 0
    widths = []
    for _ in range(experiments):
        knee, width = rng.uniform(4, 40), rng.uniform(0.3, 3.0)
        # More load never serves better: the first that misses ends those that are carried.
        truth = next(n for n in count() if marginal(knee, width, n + 1) < OBJECTIVE.attainment)
        found, runs = run_search(rng, knee, width, Search(start=8, high=256, repeats=3))
        covered += found.low <= truth <= found.high
        total_runs += runs
        if math.isfinite(found.high):
            widths.append(found.high - found.low)
    assert covered / experiments >= 0.93
    # An interval that covers because it is endless, or a search that never ends, is no answer.
    assert len(widths) > 0.95 * experiments
    assert np.median(widths) <= 6
    assert total_runs / experiments <= 12


def test_a_search_doubles_then_halves_the_bracket_then_repeats_its_ends() -> None:
    rng = np.random.default_rng(1)
    found, runs = run_search(rng, knee=11.0, width=0.3, search=Search(start=2, repeats=2))
    loads = [j.load for j in found.judgements]
    assert loads[:3] == [2, 4, 8]
    assert found.value == 10
    assert found.low <= 10 <= found.high
    assert runs <= 10


def test_where_even_one_session_misses_the_capacity_is_none() -> None:
    rng = np.random.default_rng(2)
    found, _ = run_search(rng, knee=0.1, width=0.2, search=Search(start=8))
    assert found.value == 0
    assert found.low == 0


def test_where_nothing_misses_the_upper_end_is_open() -> None:
    rng = np.random.default_rng(3)
    found, _ = run_search(rng, knee=1000, width=1, search=Search(start=8, high=32))
    assert found.value == 32
    assert math.isinf(found.high)


def test_a_level_that_is_still_filling_up_misses_whatever_its_turns_say() -> None:
    sessions = [SessionOutcome(10, 10) for _ in range(30)]
    assert judge(Level(4, sessions), OBJECTIVE).meets
    verdict = judge(Level(4, sessions, sustained=False), OBJECTIVE)
    assert not verdict.meets
    assert verdict.sure


def test_few_turns_that_all_met_the_slo_do_not_make_a_sure_verdict() -> None:
    assert not judge(Level(4, [SessionOutcome(3, 3)] * 3), OBJECTIVE).sure
    assert not judge(Level(4, [SessionOutcome(10, 10)] * 30), OBJECTIVE).sure
    assert judge(Level(4, [SessionOutcome(10, 10)] * 60), OBJECTIVE).sure


def surely_wrong(rng: np.random.Generator, sessions: int, share: float, levels: int) -> float:
    """How often a level is surely said to be what it is not, where `share` of its sessions keep the
    SLO in all of their 60 turns and the others in none."""
    wrong = 0
    for _ in range(levels):
        kept = rng.random(sessions) < share
        verdict = judge(Level(4, [SessionOutcome(60 * int(met), 60) for met in kept]), OBJECTIVE)
        wrong += verdict.sure and verdict.meets != (share >= OBJECTIVE.attainment)
    return wrong / levels


@pytest.mark.parametrize("share", [0.89, 0.91])
@pytest.mark.parametrize("sessions", [1, 2, 12, 25, 60])
def test_turns_that_share_their_sessions_fate_count_as_one(sessions: int, share: float) -> None:
    """A verdict is to be wrong in one level of a hundred at most, each way."""
    assert surely_wrong(np.random.default_rng(7), sessions, share, levels=600) <= 0.015


@pytest.mark.parametrize("met", [[1] * 30, [0] * 30, [1] * 27 + [0] * 3, [1, 0], [1]])
def test_more_turns_of_one_fate_say_no_more(met: list[int]) -> None:
    one = judge(Level(4, [SessionOutcome(kept, 1) for kept in met]), OBJECTIVE)
    many = judge(Level(4, [SessionOutcome(40 * kept, 40) for kept in met]), OBJECTIVE)
    assert (many.attainment.low, many.attainment.high) == pytest.approx(
        (one.attainment.low, one.attainment.high)
    )


def test_a_session_that_is_played_again_is_not_another_one() -> None:
    """Nor in a repeat of the level: the same turns come back, and with them what is hard about
    them."""
    rng = np.random.default_rng(3)
    stretch = [float(value) for value in rng.uniform(1.0, 3.0, 20)]
    once = [
        SessionOutcome(18 if number % 5 else 9, 20, stretch[number], f"s{number}")
        for number in range(20)
    ]
    again = judge(Level(4, once * 3, repeats=3), Slo())
    alone = judge(Level(4, once), Slo())
    for found, before in (
        (again.attainment, alone.attainment),
        (again.stretch_p90, alone.stretch_p90),
    ):
        assert (found.low, found.high) == pytest.approx((before.low, before.high), rel=0.05)
    others = [replace(outcome, session=f"{at}") for at, outcome in enumerate(once * 3)]
    apart = judge(Level(4, others, repeats=3), Slo()).attainment
    assert apart.high - apart.low < 0.7 * (again.attainment.high - again.attainment.low)


def test_letting_few_in_while_others_wait_is_not_carrying_them() -> None:
    quick = [SessionOutcome(10, 10, stretch=1.1)] * 20
    slow = [SessionOutcome(10, 10, stretch=9.0)] * 10
    assert judge(Level(30, [*quick, *slow]), OBJECTIVE).meets
    assert not judge(Level(30, [*quick, *slow]), Slo()).meets


def test_where_no_stretch_is_known_a_level_meets_by_its_turns_and_never_surely() -> None:
    """No repeat makes the stretch known; a level whose turns miss is as sure as ever."""
    bounded = Slo()
    good = Level(4, [SessionOutcome(10, 10)] * 60)
    bad = Level(5, [SessionOutcome(0, 10)] * 60)
    assert judge(good, OBJECTIVE).sure
    assert not judge(good, OBJECTIVE).unjudged
    verdict = judge(good, bounded)
    assert verdict.meets
    assert verdict.unjudged
    missed = judge(bad, bounded)
    assert (missed.meets, missed.sure, missed.unjudged) == (False, True, False)
    search = Search(start=4, repeats=3)
    found = capacity([good, bad], search, bounded)
    assert (found.value, found.low, found.high) == (4, 0, 4)
    assert next_load([good, bad], search, bounded) is None
    known = Level(3, [SessionOutcome(10, 10, stretch=1.1)] * 60)
    assert capacity([known, good, bad], search, bounded).low == 3


def test_sessions_that_failed_are_stretched_without_end() -> None:
    done = [SessionOutcome(10, 10, stretch=1.1)] * 20
    failed = [SessionOutcome(10, 10, stretch=math.inf)] * 10
    verdict = judge(Level(30, [*done, *failed]), Slo(attainment=0.5))
    assert not verdict.meets
    assert verdict.sure


@pytest.mark.parametrize("sessions", [[], [SessionOutcome(0, 0)]])
def test_a_level_without_a_judged_turn_meets_nothing(sessions: list[SessionOutcome]) -> None:
    verdict = judge(Level(4, sessions), OBJECTIVE)
    assert not verdict.meets
    assert not verdict.sure


def test_a_level_in_which_a_session_starves_is_surely_not_carried() -> None:
    """Sixty sessions have all their turns in time; one more never gets an answer."""
    served = [SessionOutcome(met=40, turns=40, stretch=1.0) for _ in range(60)]
    assert judge(Level(60, served), Slo()).meets
    left = SessionOutcome(met=0, turns=1, late_share=1.0, starved=True)
    verdict = judge(Level(61, [*served, left]), Slo())
    assert (verdict.meets, verdict.sure, verdict.starved) == (False, True, 1)


def test_a_level_in_which_one_session_in_ten_is_late_is_not_carried() -> None:
    sessions = [
        SessionOutcome(met=40, turns=40, stretch=1.0, late_share=0.5 if n < 12 else 0.0)
        for n in range(60)
    ]
    assert not judge(Level(60, sessions), Slo()).meets
    impatient = [SessionOutcome(met=39, turns=40, stretch=1.0, over_patience=1) for _ in range(60)]
    assert not judge(Level(60, impatient), Slo()).meets
