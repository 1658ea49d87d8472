"""The conditions of admission on the packaged experiment `admission`, with made sessions: `rotate`
lets no session starve, does not collapse beyond what fits, and does no harm where all fits."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator

import pytest

from eval.experiment_files import load_experiment
from eval.judged import measures
from eval.outcomes import as_turns, window_of
from eval.progress import Progress
from eval.records import read_run
from eval.simulated_runs import simulate_experiment
from replay.trace import Request, TraceWriter

BLOCK = 64
WAITS_AT_MOST_S = 300.0
"""Claude Code gives up then."""
COLLAPSES_BELOW = 0.7
"""Of the first tokens a second of the same rule where all fits."""


def sessions() -> Iterator[Request]:
    """Coding sessions of 25,000 to 95,000 tokens, whose turns follow each other within seconds."""
    draw = random.Random(11)
    block = 1
    for session in range(80):
        length = draw.randrange(25_000, 55_000)
        ids: list[int] = []
        for turn in range(60):
            ids = ids[:-1]
            fresh = -(-length // BLOCK) - len(ids)
            ids = [*ids, *range(block, block + fresh)]
            block += fresh
            output = draw.randrange(50, 700)
            yield Request(
                request_id=f"s{session}:{turn}",
                session_id=f"s{session}",
                turn=turn,
                timestamp_s=float(turn),
                input_length=length,
                output_length=output,
                block_size=BLOCK,
                hash_ids=ids,
                think_time_s=draw.expovariate(1 / 3),
            )
            length += output + draw.randrange(50, 500)


Cell = Callable[[str], dict[str, float]]


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Cell:
    """The measures of one arm under one load of the packaged experiment, simulated once."""
    folder = tmp_path_factory.mktemp("admission")
    trace = folder / "made.jsonl"
    with TraceWriter(trace) as writer:
        for request in sorted(sessions(), key=lambda request: request.timestamp_s):
            writer.write(request)
    experiment, _ = load_experiment("admission", [f"trace.path={trace}", "repeats=1"])

    @functools.cache
    def measured(name: str) -> dict[str, float]:
        with Progress() as progress:
            summary = simulate_experiment(
                experiment, folder / "out", source={}, progress=progress, only=[name]
            )
        assert summary.complete == 1
        run = read_run(folder / "out" / name / "r1")
        return measures(as_turns(run), window_of(run), experiment.slo)

    return measured


@pytest.mark.parametrize("arm", ["rotate", "rotate-150", "rotate-gpu"])
def test_with_twice_the_sessions_that_fit_nobody_starves(cell: Cell, arm: str) -> None:
    assert cell(f"{arm}@24")["starved_sessions"] == 0


def test_where_the_tiers_hold_all_nobody_waits_for_minutes_on_end(cell: Cell) -> None:
    assert cell("rotate-150@24")["longest_wait_s"] <= WAITS_AT_MOST_S


@pytest.mark.parametrize("tier", ["", "-150"])
def test_more_sessions_than_fit_bring_no_collapse(cell: Cell, tier: str) -> None:
    fits, more = cell(f"rotate{tier}@12"), cell(f"rotate{tier}@24")
    assert more["first_tokens_per_s"] >= COLLAPSES_BELOW * fits["first_tokens_per_s"]


def test_without_a_gate_the_same_sessions_do_collapse(cell: Cell) -> None:
    fits, more = cell("off@12"), cell("off@24")
    assert more["first_tokens_per_s"] < COLLAPSES_BELOW * fits["first_tokens_per_s"]


@pytest.mark.parametrize("tier", ["", "-150"])
def test_where_all_fit_the_gate_does_no_harm(cell: Cell, tier: str) -> None:
    without, found = cell(f"off{tier}@8"), cell(f"rotate{tier}@8")
    assert found["first_tokens_per_s"] >= 0.98 * without["first_tokens_per_s"]
    assert found["late_share_mean"] <= without["late_share_mean"] + 0.02
