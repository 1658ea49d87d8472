"""Phases of a run, and whether its window was a steady state, on made queues."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from deltaserve.errors import InputError
from eval import provenance
from eval.compare import compare_cells
from eval.experiment import Slo
from eval.metrics import measure, session_bootstrap
from eval.noise import Verdict
from eval.outcomes import MEASURES
from eval.records import PHASES_FILE, Run, read_run
from eval.steady import State, steadiness
from replay.results import ErrorInfo, Phase, Result, ResultWriter

WARM_UP_S, MEASURE_S, DRAIN_S = 300.0, 600.0, 60.0
END_S = WARM_UP_S + MEASURE_S


def write_queue(
    folder: Path, *, load: float, seed: int = 0, arm: str = "a", repeat: int = 1
) -> Run:
    """A run of which eight servers take a second a request on average, at a share `load` of what
    they can serve; sessions of five requests."""
    rng = np.random.default_rng(seed)
    count = int(load * 8 * (END_S + DRAIN_S) * 1.3)
    due = np.cumsum(rng.exponential(1 / (load * 8), count))
    due = due[due < END_S + DRAIN_S]
    free = np.zeros(8)
    served = []
    for at_s in due:
        server = int(free.argmin())
        begin_s = max(at_s, free[server])
        free[server] = begin_s + rng.lognormal(-0.3, 0.8)
        first_s = begin_s + 0.05
        served.append((at_s, first_s, max(first_s + 0.01, free[server])))
    return write_served(folder, served, arm=arm, repeat=repeat)


def write_served(
    folder: Path, served: Sequence[tuple[float, float, float]], *, arm: str = "a", repeat: int = 1
) -> Run:
    """A run of requests by when each was sent, had its first token and ended, in seconds."""
    place = folder / arm / f"r{repeat}"
    place.mkdir(parents=True)
    writer = ResultWriter(place / "requests.jsonl")
    for number, (at_s, first_s, end_s) in enumerate(served):
        phase: Phase = "warm_up" if at_s < WARM_UP_S else "measure" if at_s < END_S else "drain"
        stopped = end_s > END_S + DRAIN_S
        writer.write(
            Result(
                request_id=f"r{number}",
                session_id=f"s{number // 5}",
                turn=number % 5,
                input_length=100,
                output_length=5,
                phase=phase,
                scheduled_s=at_s,
                sent_s=at_s,
                first_token_s=None if stopped else first_s,
                finished_s=END_S + DRAIN_S if stopped else end_s,
                arrivals=[] if stopped else [(first_s, 1), (end_s, 5)],
                output_tokens=0 if stopped else 5,
                error=ErrorInfo(kind="cancelled", message="the run ended") if stopped else None,
            )
        )
    writer.close()
    (place / PHASES_FILE).write_text(
        json.dumps(
            {
                "start": "mid",
                "window_start_s": WARM_UP_S,
                "window_end_s": END_S,
                "warm_up_s": WARM_UP_S,
                "measure_s": MEASURE_S,
                "recycle": True,
                "max_think_s": 10.0,
            }
        )
    )
    manifest = {"state": "complete", "arm": {"name": arm}, "repeat": repeat, "topology": {}}
    provenance.write_manifest(place, manifest)
    return read_run(place)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_a_load_that_is_served_is_steady(tmp_path: Path, load: float) -> None:
    for seed in range(5):
        found = steadiness(write_queue(tmp_path, load=load, seed=seed, repeat=seed))
        assert (found.state, found.reasons) == (State.STEADY, [])
        assert found.completions / found.arrivals > 0.95


def test_a_load_beyond_what_can_be_served_is_not_sustained_and_says_why(tmp_path: Path) -> None:
    found = steadiness(write_queue(tmp_path, load=1.2))
    assert found.state is State.NOT_SUSTAINED
    words = "; ".join(found.reasons)
    assert "requests waiting for their first token rose from about" in words
    assert "answers ended while" in words
    assert found.waiting is not None
    assert found.waiting.change > 500


@pytest.mark.parametrize(("late", "state"), [(6, State.STEADY), (9, State.NOT_SUSTAINED)])
def test_what_is_in_flight_at_the_ends_of_a_window_differs_by_chance(
    tmp_path: Path, late: int, state: State
) -> None:
    """Four in flight all along, and some more in the last second. A closed loop of ten agents with
    99 % of its turns in time had six more when its window ended than when it began."""
    due = [*np.arange(0.0, END_S, 20.0), *([END_S - 0.5] * late)]
    served = [(at_s, at_s + 0.1, at_s + 80.0) for at_s in due]
    found = steadiness(write_served(tmp_path, served))
    assert found.arrivals - found.completions == late
    assert found.completions < 0.97 * found.arrivals
    assert found.state is state, found.reasons


def test_a_run_without_a_window_is_not_assessed(make_run: Callable[..., Run]) -> None:
    assert steadiness(make_run()).state is State.NOT_ASSESSED


def test_only_what_was_scheduled_in_the_window_is_measured_and_rates_are_what_came_in_it(
    tmp_path: Path,
) -> None:
    run = write_queue(tmp_path, load=0.8)
    every = run.all_requests
    inside = every["scheduled_s"].between(WARM_UP_S, END_S, inclusive="left")
    assert len(run.requests) == inside.sum() < len(every)
    cell = measure([run], session_bootstrap([run], 100), Slo())
    ttft = run.requests["first_token_s"] - run.requests["scheduled_s"]
    assert cell.measures["ttft_p90"].value == pytest.approx(np.quantile(ttft, 0.9))
    lines = [json.loads(line) for line in (run.folder / "requests.jsonl").open()]
    delivered = 0
    for line in lines:
        before = 0
        for at_s, tokens in line["arrivals"]:
            delivered += (tokens - before) if WARM_UP_S <= at_s < END_S else 0
            before = tokens
    throughput = cell.measures["throughput_output_tps"]
    assert throughput.value == pytest.approx(delivered / MEASURE_S)
    assert throughput.low < throughput.value < throughput.high
    ended = every["finished_s"].between(WARM_UP_S, END_S).sum()
    assert cell.measures["requests_per_s"].value == pytest.approx(ended / MEASURE_S)


def test_what_was_not_sustained_has_no_averages_and_no_verdict(tmp_path: Path) -> None:
    cells = {
        arm: [
            write_queue(tmp_path, load=load, seed=10 * order + r, arm=arm, repeat=r) for r in (1, 2)
        ]
        for order, (arm, load) in enumerate((("a", 0.7), ("b", 1.2)))
    }
    boot = session_bootstrap([run for runs in cells.values() for run in runs], 50)
    found = measure(cells["b"], boot, Slo())
    assert found.unsustained is not None
    assert found.unsustained.startswith("b/r1 did not sustain its load: ")
    assert not found.measures["ttft_p90"].known
    assert not found.measures["throughput_output_tps"].known
    assert found.measures["in_time_share"].value < 0.7
    assert measure(cells["a"], boot, Slo()).measures["ttft_p90"].known
    ttft = [m for m in MEASURES if m.key == "ttft_p90"]
    compared = compare_cells(cells, [("a", "b")], boot, ttft)[0]
    assert compared.verdict is Verdict.UNJUDGED
    assert compared.reason == found.unsustained


def test_a_window_that_says_nothing_sensible_is_named(tmp_path: Path) -> None:
    folder = write_queue(tmp_path, load=0.3).folder
    (folder / PHASES_FILE).write_text('{"window_end_s": 5}')
    with pytest.raises(InputError, match=r"phases\.json: not what a replay writes there"):
        read_run(folder)
    (folder / PHASES_FILE).write_text('{"window_start_s": 5, "window_end_s": 4, "measure_s": 9}')
    with pytest.raises(InputError, match=r"phases\.json: the window ends"):
        read_run(folder)
    (folder / PHASES_FILE).write_text(
        '{"window_start_s": 300, "window_end_s": null, "measure_s": 600}'
    )
    window = read_run(folder).window
    assert window is not None
    assert window.length_s == 600
