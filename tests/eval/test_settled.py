"""Whether a window shows the start of the load: on made queues and made runs."""

from __future__ import annotations

import heapq
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from eval import provenance
from eval.experiment import Slo
from eval.judged import judged
from eval.outcomes import Outcome
from eval.records import PHASES_FILE, Run, read_run
from eval.report import gather
from eval.report.opening import opening
from eval.settled import BLOCKS, first_third_differs, unsettled, waiting_by_block
from eval.stats import Array
from replay.results import ErrorInfo, Phase, Result, ResultWriter
from tests.eval.test_judged import measured_runs, table

WARM_UP_S, WINDOW_S = 300.0, 180.0


def closed_queue(
    rng: np.random.Generator, sessions: int, servers: int, service_s: float, spread: float
) -> Array:
    """How many turns wait in each block of a window, well after the start of so many sessions that
    think for 8 s on average and are served by the first server that is free."""
    free, due = [0.0] * servers, [(rng.uniform(0, 8), n) for n in range(sessions)]
    heapq.heapify(due)
    turns = []
    while due[0][0] < WARM_UP_S + WINDOW_S:
        at_s, session = heapq.heappop(due)
        begin_s = max(at_s, heapq.heappop(free))
        end_s = begin_s + service_s * rng.lognormal(-(spread**2) / 2, spread)
        heapq.heappush(free, end_s)
        turns.append((at_s, begin_s))
        heapq.heappush(due, (end_s + rng.exponential(8), session))
    due_s, until_s = np.array(turns).T
    return waiting_by_block(due_s, until_s, WARM_UP_S, WARM_UP_S + WINDOW_S)


@pytest.mark.parametrize(
    "queue",
    [(8, 4, 4.0, 0.8), (12, 1, 1.5, 0.8), (16, 6, 15.0, 1.2), (24, 4, 4.0, 0.8)],
    ids=["hardly any waits", "one server", "long services", "most wait"],
)
def test_at_most_one_stationary_window_in_twenty_is_flagged(queue: Any) -> None:
    rng = np.random.default_rng(7)
    windows = np.array([closed_queue(rng, *queue) for _ in range(200)])
    assert first_third_differs(windows).mean() <= 0.05


def test_the_measured_window_that_begins_with_a_queue_is_caught() -> None:
    """It had 19 turns waiting in its first 24 of 180 s and 6 after; by a straight line through ten
    bins it was steady. The others do not begin otherwise than they go on."""
    found = {}
    for name, (turns, window) in measured_runs().items():
        of = judged(table(turns), window, Slo())
        due_s, until_s = (of[column].to_numpy(dtype=float) for column in ("due_s", "until_s"))
        waiting = waiting_by_block(due_s, until_s, window.start_s, window.end_s)
        found[name] = bool(first_third_differs(waiting[None, :])[0])
    assert found == {"cap-12": False, "residency-24": False, "vllm-24": True}


@pytest.mark.parametrize(
    ("start", "after", "until_s", "power"),
    [(17.1, 5.9, 30, 0.9), (12, 4, 30, 0.8), (0.5, 6, 60, 0.95)],
    ids=["a queue", "a smaller queue", "still empty"],
)
def test_a_start_inside_the_window_is_caught(
    start: float, after: float, until_s: float, power: float
) -> None:
    rng = np.random.default_rng(8)
    middles_s = (np.arange(BLOCKS) + 0.5) * WINDOW_S / BLOCKS
    mean = np.where(middles_s < until_s, start, after)
    windows = np.maximum(0, rng.normal(mean, 0.6 * np.sqrt(after), (300, BLOCKS)))
    assert first_third_differs(windows).mean() >= power


def test_a_window_without_any_spread_is_judged_by_the_difference_alone() -> None:
    even = np.full((1, BLOCKS), 3.0)
    higher = even.copy()
    higher[0, : BLOCKS // 3] = 6.0
    assert first_third_differs(np.vstack([even, higher])).tolist() == [False, True]


class Turn(NamedTuple):
    """When a turn was due, had its first token (None: it failed) and ended, in seconds."""

    session: str
    phase: Phase
    due_s: float
    first_s: float | None
    end_s: float


def write(folder: Path, turns: list[Turn]) -> Run:
    """A run of these turns with a window from 60 to 180 s."""
    place = folder / "a" / "r1"
    place.mkdir(parents=True)
    writer = ResultWriter(place / "requests.jsonl")
    for number, turn in enumerate(turns):
        failed = turn.first_s is None
        writer.write(
            Result(
                request_id=f"{number}",
                session_id=turn.session,
                turn=number,
                input_length=100,
                output_length=5,
                phase=turn.phase,
                scheduled_s=turn.due_s,
                sent_s=turn.due_s,
                first_token_s=turn.first_s,
                finished_s=turn.end_s,
                arrivals=[] if turn.first_s is None else [(turn.first_s, 1), (turn.end_s, 5)],
                output_tokens=0 if failed else 5,
                prompt_tokens=None if failed else 100,
                cached_tokens=None if failed else 0,
                error=ErrorInfo(kind="timeout", message="made") if failed else None,
                status=None if failed else 200,
            )
        )
    writer.close()
    window = {"start": "mid", "window_start_s": 60.0, "window_end_s": 180.0, "warm_up_s": 30.0}
    (place / PHASES_FILE).write_text(json.dumps(window))
    provenance.write_manifest(
        place, {"state": "complete", "arm": {"name": "a"}, "repeat": 1, "topology": {}}
    )
    return read_run(place)


def turns_of(first_wait_s: float = 0.2, failed_primings: int = 0) -> list[Turn]:
    """Twenty sessions that are primed at 0 and have a turn every 10 s from 30 s on; the window is
    from 60 to 180 s. The first turn of `s0` in the window waits so long."""
    primes = [
        Turn(f"s{n}", "prime", 0.0, None if n < failed_primings else 5.0, 6.0) for n in range(20)
    ]
    turns = [
        Turn(f"s{n}", "measure" if at_s >= 60 else "warm_up", at_s, at_s + 0.2, at_s + 4)
        for n in range(20)
        for at_s in range(30, 180, 10)
        if not (n == 0 and 60 <= at_s < 60 + first_wait_s + 10)
    ]
    if first_wait_s > 1:
        turns.append(Turn("s0", "measure", 60.0, 60 + first_wait_s, 64 + first_wait_s))
    return [*primes, *turns]


@pytest.mark.parametrize(
    ("turns", "said"),
    [
        (turns_of(), []),
        (turns_of(failed_primings=1), []),
        (turns_of(failed_primings=2), ["2 of 20 primings failed"]),
        (turns_of(first_wait_s=29), []),
        (turns_of(first_wait_s=31), ["a turn waited 31 s, the warm-up lasted 30 s"]),
    ],
    ids=["settled", "one priming failed", "two primings failed", "short wait", "long wait"],
)
def test_a_wait_beyond_the_warm_up_and_failed_primings_are_signs_of_a_start(
    turns: list[Turn], said: list[str], tmp_path: Path
) -> None:
    run = write(tmp_path, turns)
    assert unsettled(Outcome(run)) == said


def test_the_first_screen_says_which_window_shows_the_start(tmp_path: Path) -> None:
    run = write(tmp_path, turns_of(failed_primings=9))
    shown = dict(opening(gather([run], draws=20)).facts)
    assert shown["Not settled"] == "a/r1: 9 of 20 primings failed"
    whole = write(tmp_path / "whole", turns_of())
    assert "Not settled" not in dict(opening(gather([whole], draws=20)).facts)
