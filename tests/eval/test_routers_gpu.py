"""Routers side by side before the same workers: the packaged experiment, planned and simulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltaserve.errors import InputError
from eval.experiment_files import load_experiment
from eval.matrix import plan_runs
from eval.progress import Progress
from eval.report import find_runs
from eval.runner import load_topologies
from eval.simulated_runs import simulate_experiment
from eval.site import launch_site
from tests.eval.conftest import write_growing

ARMS = ("stock", "smg", "off", "rotate")
"""Those that differ in the router alone."""
SIMULATED = ["stock", "off", "rotate", "elastic", "selective"]
STAND_IN = (
    # A session stays where it is, a new one goes where the least is in hand.
    "arms.stock.policy=linear",
    "arms.stock.policy_params={overload_factor=1000000.0, alpha=0.0}",
    'arms.stock.set={router={admission={rule="off"}}}',
)
"""Of the stock router in the simulator."""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """40 sessions of four turns, each going on where the one before ended."""
    path = tmp_path / "trace.jsonl"
    write_growing(path, sessions=40, turns=4, tokens=20_000, growth=1_280, apart_s=1.0)
    return path


def test_all_arms_share_the_same_two_workers() -> None:
    experiment, _ = load_experiment("routers-gpu")
    assert experiment.keep_workers
    site = launch_site()
    runs = [run for run in plan_runs(experiment) if run.arm.name in ARMS]
    topologies = load_topologies(site, experiment, runs)
    assert set(topologies) == {f"{arm}@{load}" for arm in ARMS for load in ("20", "24", "32")}
    assert len({site.worker_key(topology) for topology in topologies.values()}) == 1
    routers = {cell.partition("@")[0]: topology.router for cell, topology in topologies.items()}
    told = {arm: (router.kind, router.policy) for arm, router in routers.items()}
    assert told == {
        "stock": ("sglang-router", "cache_aware"),
        "smg": ("smg", "cache_aware"),
        "off": ("deltaserve", "unified"),
        "rotate": ("deltaserve", "unified"),
    }
    assert {arm: routers[arm].admission for arm in ("off", "rotate")} == {
        "off": {"rule": "off"},
        "rotate": {"rule": "rotate"},
    }


def test_its_workers_are_those_of_the_strongest_arm_on_one_gpu() -> None:
    site = launch_site()
    keys = []
    for name, arm in (
        ("routers-gpu", "rotate"),
        ("sessions-a-gpu", "sglang-fp8-host-paced-admission"),
    ):
        experiment, _ = load_experiment(name)
        runs = [run for run in plan_runs(experiment) if run.arm.name == arm]
        topology = next(iter(load_topologies(site, experiment, runs).values()))
        [group] = topology.workers
        keys.append((topology.kv_keys(group), topology.chunk_tokens, topology.mixed_chunk))
        keys[-1] += (topology.pacing_keys(group), topology.environment, topology.kv_events)
    assert keys[0] == keys[1]


def test_it_is_simulated_with_a_policy_of_ours_in_the_stock_routers_place(
    trace: Path, tmp_path: Path
) -> None:
    short = [f"trace.path={trace}", "repeats=1", "phases.warm_up_s=5", "phases.measure_s=30"]

    def simulate(*overrides: str) -> None:
        experiment, _ = load_experiment("routers-gpu", [*short, *overrides])
        with Progress() as progress:
            simulate_experiment(
                experiment, tmp_path / "out", source={}, progress=progress, only=SIMULATED
            )

    with pytest.raises(InputError, match=r"arm stock: router\.kind sglang-router: only our own"):
        simulate()
    simulate(*STAND_IN)
    runs = find_runs([tmp_path / "out"])
    assert {run.arm for run in runs} == set(SIMULATED)
    assert len(runs) == 15
    for run in runs:
        assert run.simulated
        assert run.gpus == 2
        assert len(run.requests) > 20
