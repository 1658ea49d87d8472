"""launch against the real engines: their flags, and an end by kill -9 that leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import catalog, control, load_topology, plan, planning
from launch.engines import environment_for
from tests.live.conftest import check_ports_are_free, processes_of

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


@pytest.mark.parametrize("name", catalog())
def test_every_flag_of_a_shipped_topology_is_one_of_the_installed_engines(
    name: str, tmp_path: Path
) -> None:
    engine = load_topology(name).engine.name
    python = environment_for(engine, "cpu").python
    if not python.exists():
        pytest.skip(f"{python} is not installed")
    # vLLM for a CPU has the same parser as vLLM for CUDA.
    topology = load_topology(name, [f"engine.python={python}", "base_port=0"])
    planning.check(plan(topology, tmp_path / "run"), gpus=False)


def test_kill_9_of_the_supervisor_leaves_no_process_of_a_real_engine_and_no_port(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    argv = [sys.executable, "-m", "deltaserve", "launch", "up", "laptop-sglang"]
    argv += ["--set", "workers.0.count=1", "--set", "base_port=0", "--run-dir", str(run_dir)]
    done = subprocess.run([*argv, "--detach"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads((run_dir / "fleet.json").read_text())
    assert len(processes_of(record)) >= 6

    os.kill(record["supervisor"]["pid"], signal.SIGKILL)
    deadline_s = time.monotonic() + 30
    while left := processes_of(record):
        assert time.monotonic() < deadline_s, left
        time.sleep(0.2)
    control.down(run_dir)
    check_ports_are_free(record)
