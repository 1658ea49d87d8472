"""The topologies for agents start the engines with the flags that were measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.experiment_files import load_experiment
from eval.matrix import plan_runs
from eval.runner import topology_overrides
from launch.engines import Engine
from launch.planning import layout
from launch.topology_files import load_topology

OURS = "sglang-fp8-host-paced-admission"
VLLM = "vllm-fp8-host-4096"
OF_EXPERIMENT = ("max_total_tokens=", "telemetry=")


@pytest.mark.parametrize(
    ("name", "arm"), [("sglang-agents:1", OURS), ("vllm-agents:1", f"{VLLM}-admission")]
)
def test_the_topologies_for_agents_start_what_was_measured(name: str, arm: str) -> None:
    """But for telemetry, admission's rule and the KV memory, which is that of another GPU there."""
    experiment, _ = load_experiment("admission-gpu", [])
    runs = [run for run in plan_runs(experiment) if run.arm.name == arm]
    given = [word for word in topology_overrides(runs[0]) if not word.startswith(OF_EXPERIMENT)]
    measured = load_topology(str(runs[0].arm.topology), given)
    packaged = load_topology(name, ["text=false"])
    engine = Engine(measured.engine.name, Path("/python"), {measured.engine.name: "0"})
    commands = [layout(of, Path("/run/x"), engine, 8) for of in (measured, packaged)]
    (expected,), (found,) = (made.workers for made in commands)
    assert found.argv == expected.argv
    assert found.environment == expected.environment
    assert packaged.router.policy == measured.router.policy
