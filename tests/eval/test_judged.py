"""The measures of turns and sessions, against a recount that uses nothing of the project."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.experiment import OBJECTIVES, Slo
from eval.judged import (
    COLUMNS,
    Window,
    judged,
    measures,
    not_met,
    product_limit,
)

MEASURED = Path(__file__).parent / "judged" / "turns.jsonl"
"""Turns of three measured runs, without their tokens' arrivals: a head line a run, then its turns.
`cap-12` lets two of twelve sessions in."""
Turn = dict[str, Any]


def measured_runs() -> dict[str, tuple[list[Turn], Window]]:
    found: dict[str, tuple[list[Turn], Window]] = {}
    heads: dict[str, dict[str, Any]] = {}
    turns: dict[str, list[Turn]] = {}
    for line in map(json.loads, MEASURED.read_text().splitlines()):
        if "run" in line:
            name = line["run"]
            heads[name], turns[name] = line, []
        else:
            turns[name].append(line)
    for name, head in heads.items():
        over_s = max([head["end_s"], *(turn["finished_s"] for turn in turns[name])])
        found[name] = turns[name], Window(head["start_s"], head["end_s"], over_s)
    return found


def table(turns: list[Turn]) -> pd.DataFrame:
    found = pd.DataFrame(turns, columns=list(COLUMNS))
    numbers = [name for name in COLUMNS if name not in ("session", "error")]
    found[numbers] = found[numbers].astype(float)
    return found


def turn(
    session: str, due_s: float, first_s: float | None, end_s: float | None, **more: Any
) -> Turn:
    return {
        "session": session,
        "due_s": due_s,
        "first_token_s": first_s,
        "finished_s": end_s,
        "error": None,
        "new_tokens": 1000,
        "tpot_s": None if first_s is None else 0.02,
        "worst_gap_s": None if first_s is None else 0.1,
        "output_tokens": 0 if first_s is None else 100,
        "last_token_s": None if first_s is None else end_s,
    } | more


def recount(turns: list[Turn], start_s: float, end_s: float, over_s: float) -> dict[str, float]:
    """The measures under the default objective, a turn after the other and a session after the
    other, in steps as they are defined."""
    good = late = undecided = firsts = good_firsts = 0
    over = {10: 0, 30: 0, 60: 0, 180: 0}
    waited = longest = 0.0
    for t in turns:
        first, ended = t["first_token_s"], t["finished_s"]
        last_seen = over_s if ended is None else ended
        stopped_by_us = (ended is None and t["error"] is None) or (
            t["error"] in ("cancelled", "timeout") and last_seen >= end_s
        )
        answered_s = last_seen if first is None else first
        if t["due_s"] >= end_s or (t["due_s"] < start_s and answered_s < start_s):
            continue
        wait = answered_s - t["due_s"]
        longest = max(longest, wait)
        waited += max(0.0, min(answered_s, end_s) - max(t["due_s"], start_s))
        in_window = first is not None and start_s <= first < end_s
        firsts += in_window
        allowed = 3 + 0.0001 * t["new_tokens"]
        if first is None and stopped_by_us and wait <= allowed:
            undecided += 1
            continue
        for limit in over:
            over[limit] += wait > limit or (first is None and not stopped_by_us)
        keeps_pace = (t["tpot_s"] or 0) <= 0.05 and (t["worst_gap_s"] or 0) <= 1
        if stopped_by_us and first is not None:
            if t["output_tokens"] < 16 or t["tpot_s"] is None:
                keeps_pace = True
            keeps_pace = keeps_pace and last_seen - t["last_token_s"] <= 1
        if (
            first is not None
            and wait <= allowed
            and keeps_pace
            and (stopped_by_us or not t["error"])
        ):
            good += 1
            good_firsts += in_window
        else:
            late += 1
    shares, waiting, starved, served = [], 0.0, 0, 0
    for name in {t["session"] for t in turns}:
        own = [t for t in turns if t["session"] == name]
        begin = max(start_s, min(t["due_s"] for t in own))
        ends = [over_s if t["finished_s"] is None else t["finished_s"] for t in own]
        there = min(end_s, max(ends)) - begin
        if begin >= end_s or there <= 0:
            continue
        waits = covered(own, ends, start_s, end_s, allowed=lambda t: 0.0)
        lates = covered(own, ends, start_s, end_s, allowed=lambda t: 3 + 0.0001 * t["new_tokens"])
        got = sum(start_s <= (t["first_token_s"] or -1) < end_s for t in own)
        shares.append(lates / there)
        waiting += waits
        served += got > 0
        starved += there >= 0.9 * (end_s - start_s) and got == 0 and lates > 0
    shares.sort()
    decided = good + late
    length = end_s - start_s
    return {
        "first_tokens_per_s": firsts / length,
        "in_time_share": good / decided,
        "in_time_per_s": good_firsts / length,
        "waiting_sessions": waiting / length,
        "late_share_mean": sum(shares) / len(shares),
        "late_share_p50": between(shares, 0.5),
        "late_share_p90": between(shares, 0.9),
        "wait_mean_s": waited / firsts,
        **{f"wait_over_{limit}": count / decided for limit, count in over.items()},
        "wait_over_patience": over[60] / decided,
        "longest_wait_s": longest,
        "starved_sessions": starved,
        "served_sessions": served,
        "sessions": len(shares),
        "judged_turns": decided,
        "undecided_turns": undecided,
    }


def between(values: list[float], share: float) -> float:
    """A quantile of sorted values, on the straight line between the two nearest."""
    place = share * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low])


def covered(
    own: list[Turn], ends: list[float], start_s: float, end_s: float, allowed: Any
) -> float:
    """Seconds of the window in which any turn waits beyond what is allowed, from every moment at
    which one begins or ends to wait to the next."""
    parts = [
        (t["due_s"] + allowed(t), end if t["first_token_s"] is None else t["first_token_s"])
        for t, end in zip(own, ends, strict=True)
    ]
    moments = sorted(
        {start_s, end_s, *(min(max(x, start_s), end_s) for part in parts for x in part)}
    )
    return sum(
        after - at
        for at, after in pairwise(moments)
        if any(begin <= at and after <= end for begin, end in parts)
    )


def agrees(turns: list[Turn], window: Window) -> None:
    found = measures(table(turns), window, Slo())
    for name, value in recount(turns, window.start_s, window.end_s, window.over_s).items():
        assert found[name] == pytest.approx(value, abs=1e-9), name


EVERY_CASE = [
    turn("a", 90, 95, 99),  # answered before the window: not judged
    turn("a", 101, 102, 110),  # in time
    turn("a", 115, 125, 130),  # late
    turn("b", 20, 150, 170),  # waits from before the window into it
    turn("c", 30, None, 210, error="timeout"),  # waits right through it
    turn("d", 120, 121, 140, tpot_s=0.2),  # too slow
    turn("d", 145, 146, 160, worst_gap_s=4.0),  # stalls
    turn("e", 199, None, 201, error="cancelled"),  # cannot be decided
    turn("e", 150, None, 160, error="server_error"),  # refused: waited in vain
    turn("f", 150, 151, 155, error="disconnect"),
    turn("g", 190, 191, 210, error="timeout", last_token_s=209.9),  # cut off, on its way
    turn("h", 190, 191, 210, error="timeout", last_token_s=200),  # cut off in a stall
    turn("i", 198, 210, 210, error="timeout", output_tokens=1, tpot_s=None),  # late, then cut off
    turn("j", 195, 196, 210, error="cancelled", output_tokens=3, tpot_s=0.5, last_token_s=209.9),
    turn("k", 110, 140, 150),  # two turns of a session that wait at the same time
    turn("k", 120, 160, 170),
    turn("k", 205, 206, 209),  # due in the drain: not judged
    turn("l", 196, None, None),  # still under way when the run was over
]


def test_a_run_with_every_case_is_counted_as_a_recount_without_our_code_does() -> None:
    agrees(EVERY_CASE, Window(100, 200, 210))


@pytest.mark.parametrize("name", ["cap-12", "residency-24", "vllm-24"])
def test_measured_runs_are_counted_as_a_recount_without_our_code_does(name: str) -> None:
    agrees(*measured_runs()[name])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.builds(
            lambda session, due, wait, took, error, tpot, tokens: turn(
                session,
                due,
                None if wait is None else due + wait,
                due + (wait or 0) + took,
                error=error if wait is not None or error else "timeout",
                tpot_s=None if wait is None else tpot,
                output_tokens=0 if wait is None else tokens,
            ),
            st.sampled_from("abc"),
            st.integers(0, 230),
            st.one_of(st.none(), st.integers(0, 120)),
            st.integers(1, 60),
            st.sampled_from([None, "timeout", "cancelled", "server_error"]),
            st.sampled_from([0.01, 0.3]),
            st.integers(1, 40),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_any_run_is_counted_as_a_recount_without_our_code_does(turns: list[Turn]) -> None:
    window = Window(100, 200, 500)
    # A run in which something is decided and comes: shares and means of nothing are unknown.
    turns = [*turns, turn("z", 101, 102, 110)]
    agrees(turns, window)


def test_each_turn_of_the_made_run_is_judged_as_its_comment_says() -> None:
    of = judged(table(EVERY_CASE), Window(100, 200, 210), Slo())
    assert set(of.index) == set(range(18)) - {0, 16}
    assert of.index[of["in_time"]].tolist() == [1, 10, 13]
    assert of.index[~of["decided"]].tolist() == [7]  # the second waited for 14 s: late
    assert of.index[of["first_ok"] & ~of["pace_ok"]].tolist() == [5, 6, 9, 11]
    assert of.index[of["first_ok"] & ~of["pace_known"]].tolist() == [13]


def test_the_measured_run_that_lets_two_of_twelve_in_does_not_meet_the_objective() -> None:
    turns, window = measured_runs()["cap-12"]
    found = measures(table(turns), window, Slo())
    assert (found["starved_sessions"], found["served_sessions"]) == (10, 2)
    assert any("10 sessions get nothing" in reason for reason in not_met(found, Slo()))


def half_never_let_in() -> list[Turn]:
    """60 of 120 sessions are served at once, again and again; 60 wait from before the window on."""
    served = [
        turn(f"in-{n}", at_s, at_s + 0.2, at_s + 4) for n in range(60) for at_s in range(50, 300, 5)
    ]
    return served + [turn(f"out-{n}", 60, None, 310, error="cancelled") for n in range(60)]


def test_a_run_in_which_half_of_the_sessions_are_never_let_in_does_not_meet_the_objective() -> None:
    found = measures(table(half_never_let_in()), Window(100, 300, 310), Slo())
    assert found["starved_sessions"] == 60
    # Of turns alone it would: those served have forty times as many.
    assert found["in_time_share"] > 0.9
    assert len(not_met(found, Slo())) == 3


def test_a_run_that_serves_everyone_meets_the_objective() -> None:
    served = [turn for turn in half_never_let_in() if turn["session"].startswith("in-")]
    found = measures(table(served), Window(100, 300, 310), Slo())
    assert not_met(found, Slo()) == []
    assert not_met(found, Slo(), stretch_p90=1.9) == []
    assert not_met(found, Slo(), stretch_p90=math.inf) != []


def test_one_wait_in_fifty_beyond_patience_does_not_meet_the_objective() -> None:
    turns = [turn(f"s{n}", 101, 102, 110) for n in range(98)]
    turns += [turn(f"w{n}", 101, 162, 4000) for n in range(2)]
    window = Window(100, 4000, 4000)
    [reason] = not_met(measures(table(turns), window, Slo()), Slo())
    assert reason == "2.0% of turns wait longer than 60 s, not at most 1%"
    patient = Slo(patience_s=62)
    assert not_met(measures(table(turns), window, patient), patient) == []


def test_waits_of_the_measured_run_of_24_sessions_count_turns_due_before_the_window() -> None:
    turns, window = measured_runs()["residency-24"]
    found = measures(table(turns), window, Slo())
    assert found["judged_turns"] == 118
    assert found["wait_over_30"] == pytest.approx(14 / 118)
    assert found["wait_mean_s"] == pytest.approx(15.7, abs=0.05)


def test_an_endless_stretch_is_not_mixed_with_the_others() -> None:
    ends = np.zeros(10, dtype=np.bool_)
    assert product_limit(np.array([1.0] * 9 + [math.inf]), ends, 0.9) == 1.0
    assert product_limit(np.array([1.0] * 8 + [math.inf] * 2), ends, 0.9) == math.inf


def test_a_session_that_was_cut_off_counts_for_what_it_took_so_far() -> None:
    """By hand: 1, 2+, 3, 4: one of four ends at 1, one of the two left at 3, the last at 4."""
    values = np.array([4.0, 1.0, 2.0, 3.0])
    cut = np.array([False, False, True, False])
    found = [product_limit(values, cut, share)[0] for share in (0.25, 0.5, 0.62, 0.63)]
    assert found == [1, 3, 3, 4]
    assert product_limit(values, np.array([True, False, False, False]), 0.9)[0] == math.inf
    # Twice the session that ended at 1, and not the one at 4: two of four end at 1, one at 3.
    counts = np.array([[0.0, 2.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    drawn = product_limit(values, cut, 0.6, counts)
    assert drawn[0] == 3.0
    assert math.isnan(drawn[1])


@pytest.mark.parametrize(
    ("preset", "in_time"),
    [("sessions", ["quick"]), ("agentperf", ["quick", "slow-start"]),
     ("agentx", ["quick", "slow-start", "slow-pace", "stall"])],
)  # fmt: skip
def test_a_turn_is_judged_by_the_objective_that_is_named(preset: str, in_time: list[str]) -> None:
    """AgentPerf: a first token within 10 s and 20 tokens a second; AgentX: an answer."""
    turns = [
        turn("quick", 101, 102, 110),
        turn("slow-start", 101, 110, 120, worst_gap_s=4.0),
        turn("slow-pace", 101, 102, 120, tpot_s=0.06),
        turn("stall", 101, 122, 140, tpot_s=0.2, worst_gap_s=9.0),
        turn("refused", 101, None, 103, error="server_error"),
    ]
    slo = Slo.model_validate({"preset": preset})
    of = judged(table(turns), Window(100, 200, 210), slo)
    assert of.loc[of["in_time"], "session"].tolist() == in_time


@pytest.mark.parametrize("preset", OBJECTIVES)
def test_by_no_objective_is_a_level_met_in_which_a_session_starves(preset: str) -> None:
    slo = Slo.model_validate({"preset": preset})
    found = measures(table(half_never_let_in()), Window(100, 300, 310), slo)
    assert not_met(found, slo)[0] == "60 sessions get nothing all the window"


def test_a_named_objective_is_replaced_key_by_key_and_survives_a_manifest() -> None:
    slo = Slo.model_validate({"preset": "agentperf", "ttft_s": 5})
    assert (slo.ttft_s, slo.tpot_s, slo.worst_gap_s) == (5, 0.05, math.inf)
    # JSON has no infinity.
    assert Slo.model_validate(orjson.loads(orjson.dumps(slo.model_dump()))) == slo
    with pytest.raises(ValueError, match="preset: expected one of sessions, agentperf, agentx"):
        Slo.model_validate({"preset": "mine"})
