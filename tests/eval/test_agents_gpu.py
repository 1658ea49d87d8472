"""The packaged search on a GPU: its strongest arms, what it takes, and what is said of it."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from eval.capacity import Level, SessionOutcome, next_load
from eval.experiment_files import load_experiment
from eval.matrix import plan_runs
from eval.run_lines import Row, read_rows
from eval.runner import load_topologies
from eval.search import bounds, objective
from eval.site import launch_site
from tests.eval.published import RESULTS, command_options, plan_text

STRONGEST = (
    "sglang-fp8-host-paced-residency",
    "sglang-fp8-host-mixed",
    "vllm-fp8-host-4096",
)
WINDOWS = {"180 s": "agents-search", "600 s": "agents-search-600"}
SHIPPED = "agents-search-shipped"


def _topology(name: str, arm: str) -> Any:
    experiment, _ = load_experiment(name)
    [run, *_] = [run for run in plan_runs(experiment) if run.arm.name == arm]
    return next(iter(load_topologies(launch_site(), experiment, [run]).values()))


@pytest.mark.parametrize("arm", STRONGEST)
def test_its_strongest_arms_are_those_that_were_measured(arm: str) -> None:
    here, measured = _topology("agents-gpu", arm), _topology("residency-gpu", arm)
    worker_key = launch_site().worker_key
    assert worker_key(here) == worker_key(measured)
    assert here.router == measured.router


def _levels(carries: float, overrides: list[str]) -> Iterator[float]:
    """Those that the search tries of an arm that carries so many and not one more."""
    experiment, _ = load_experiment("agents-gpu", overrides)
    assert experiment.search is not None
    assert not experiment.search.measures_alone
    done: dict[float, Level] = {}
    while True:
        load = next_load(list(done.values()), bounds(experiment), objective(experiment.slo))
        if load is None:
            return
        assert load not in done
        yield load
        done[load] = Level(load, [SessionOutcome(100 if load <= carries else 50, 100)])


def test_the_search_that_is_planned_takes_at_most_four_levels() -> None:
    overrides, only = command_options("eval run agents-gpu")
    assert set(only) < set(STRONGEST)
    tried = {carries: list(_levels(carries, overrides)) for carries in range(6, 17)}
    assert max(map(len, tried.values())) == 4
    for carries, levels in tried.items():
        assert levels[0] == 10
        assert all(8 <= level <= 14 for level in levels)
        held = [level for level in levels if level <= carries]
        assert max(held, default=0) == (0 if carries < 8 else min(carries, 14))


def _rows(name: str) -> list[Row]:
    return read_rows(RESULTS / "simulated" / f"{name}.csv")


def _by_arm(rows: Iterable[Row]) -> dict[str, dict[str, list[Row]]]:
    """Levels by arm and draw."""
    found: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        found[row["arm"]][row["draw"]].append(row)
    return found


def _agents(name: str, arm: str) -> list[int]:
    """What an arm carries, by draw; of each draw the lines say the same."""
    of_draws = [{int(row["agents"]) for row in rows} for rows in _by_arm(_rows(name))[arm].values()]
    assert all(len(found) == 1 for found in of_draws)
    return [found.pop() for found in of_draws]


@pytest.mark.parametrize("arm", STRONGEST)
def test_what_is_said_to_be_carried_follows_from_the_lines(arm: str) -> None:
    text = plan_text()
    for window, name in WINDOWS.items():
        edges = {0: "under 8", 14: "14 or more"}
        cells = [edges.get(found, str(found)) for found in _agents(name, arm)]
        assert f"\n| `{arm}`, {window} | {' | '.join(cells)} |" in text
    shipped = " | ".join(map(str, _agents(SHIPPED, arm)))
    assert f"\n| `{arm}`, as shipped | {shipped} |" in text


def _shown(row: Row) -> str:
    percent, is_carried = 100 * float(row["within_objective"]), row["carried"] == "True"
    words = f"{row['level']}: {percent:.0f}"
    if round(percent) == 90 and percent < 90:
        words = f"{row['level']}: {percent:.1f}"
    return words if is_carried or percent < 90 else f"{words} †"


@pytest.mark.parametrize("arm", STRONGEST)
def test_the_levels_that_are_shown_are_those_of_the_lines(arm: str) -> None:
    of_draws = _by_arm(_rows(WINDOWS["180 s"]))[arm]
    cells = [", ".join(map(_shown, of_draws[draw])) for draw in ("4", "3", "1")]
    assert f"\n| `{arm}` | {' | '.join(cells)} |\n" in plan_text()
    for row in (row for draw in ("4", "3", "1") for row in of_draws[draw]):
        if _shown(row).endswith("†"):
            assert float(row["stretch_p90"]) > 1000


def test_what_is_said_of_all_searches() -> None:
    short = {arm: _agents(WINDOWS["180 s"], arm) for arm in STRONGEST}
    for carried in short.values():
        assert len(carried) == 8
        assert round(statistics.fmean(max(found, 7) for found in carried)) == 10
    ours, _, vllm = (_agents(WINDOWS["600 s"], arm) for arm in STRONGEST)
    assert [max(a, 7) - max(b, 7) for a, b in zip(ours, vllm, strict=True)] == [1, 1, 1, 1]
    levels = [len(rows) for of in _by_arm(_rows(SHIPPED)).values() for rows in of.values()]
    assert (min(levels), max(levels)) == (5, 9)
    of_one = _by_arm(_rows(WINDOWS["180 s"]))[STRONGEST[0]]["1"]
    shares = [float(row["within_objective"]) for row in of_one]
    assert any(below < above for below, above in pairwise(shares))
    carried = [row for row in _rows(WINDOWS["180 s"]) if row["carried"] == "True"]
    sure = sum(row["sure"] == "True" for row in carried)
    assert f"{sure} of the {len(carried)} levels that are carried are sure" in plan_text()
