"""The packaged search on a GPU: its strongest arms, and what it takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from eval.capacity import Level, SessionOutcome, next_load
from eval.experiment_files import load_experiment
from eval.matrix import plan_runs
from eval.runner import load_topologies
from eval.search import bounds
from eval.site import launch_site

STRONGEST = (
    "sglang-fp8-host-paced-admission",
    "sglang-fp8-host-mixed",
    "vllm-fp8-host-4096",
)
# A search that fits into half an hour of a GPU.
SHORT = [
    "phases.warm_up_s=20",
    "phases.measure_s=180",
    "search.start=10",
    "search.low=8",
    "search.high=14",
    "search.alone=false",
    "search.repeats=1",
    "slo.stretch_p90=1000",
]


def _topology(name: str, arm: str) -> Any:
    experiment, _ = load_experiment(name)
    [run, *_] = [run for run in plan_runs(experiment) if run.arm.name == arm]
    return next(iter(load_topologies(launch_site(), experiment, [run]).values()))


@pytest.mark.parametrize("arm", STRONGEST)
def test_its_strongest_arms_are_those_that_were_measured(arm: str) -> None:
    here, measured = _topology("agents-gpu", arm), _topology("admission-gpu", arm)
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
        load = next_load(list(done.values()), bounds(experiment), experiment.slo)
        if load is None:
            return
        assert load not in done
        yield load
        done[load] = Level(load, [SessionOutcome(100 if load <= carries else 50, 100)])


def test_a_short_search_takes_at_most_four_levels() -> None:
    tried = {carries: list(_levels(carries, SHORT)) for carries in range(6, 17)}
    assert max(map(len, tried.values())) == 4
    for carries, levels in tried.items():
        assert levels[0] == 10
        assert all(8 <= level <= 14 for level in levels)
        held = [level for level in levels if level <= carries]
        assert max(held, default=0) == (0 if carries < 8 else min(carries, 14))
