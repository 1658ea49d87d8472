"""kill -9 of replayer, router, worker or a whole campaign's runner: results stay readable, nothing
is left running, and the campaign goes on where it stopped."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from replay.results import read_results
from tests.live.conftest import (
    VOCABULARY,
    check_no_temporary_files,
    check_ports_are_free,
    processes_of,
)

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

DELTASERVE = [sys.executable, "-m", "deltaserve"]


def deltaserve(*arguments: str | Path) -> None:
    done = subprocess.run(
        [*DELTASERVE, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """One SGLang worker behind the router, up and detached."""
    folder = tmp_path / "run"
    settings = ["--set", "workers.0.count=1", "--set", "base_port=0"]
    deltaserve("launch", "up", "laptop-sglang", *settings, "--run-dir", folder, "--detach")
    yield folder
    subprocess.run([*DELTASERVE, "launch", "down", str(folder)], capture_output=True, check=False)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    shape = ["--requests", "400", "--rate", "20", "--length-scale", "0.02", "--seed", "4"]
    deltaserve("replay", "synth", *shape, "--output", path)
    return path


def fleet(run_dir: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((run_dir / "fleet.json").read_text())
    return record


def main_process(run_dir: Path, kind: str) -> psutil.Process:
    """The process that does the work of `kind`: under the guardian that keeps it."""
    (pid,) = [p["pid"] for p in fleet(run_dir)["processes"] if p["kind"] == kind]
    return psutil.Process(pid).children()[0]


def start_replay(run_dir: Path, trace: Path, output: Path) -> subprocess.Popen[bytes]:
    arguments = ["replay", "run", str(trace), "--url", fleet(run_dir)["router_url"]]
    arguments += ["--output", str(output), "--mode", "open", "--timeout-s", "20"]
    arguments += ["--vocab-size", str(VOCABULARY)]
    replayer = subprocess.Popen(
        [*DELTASERVE, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline_s = time.monotonic() + 60
    results = output / "requests.jsonl"
    while not results.exists() or results.stat().st_size == 0:
        assert time.monotonic() < deadline_s, "no result came"
        time.sleep(0.05)
    time.sleep(random.uniform(0.0, 2.0))
    return replayer


def check_nothing_is_left(run_dir: Path) -> None:
    record = fleet(run_dir)
    deltaserve("launch", "down", run_dir)
    assert processes_of(record) == []
    check_ports_are_free(record)
    check_no_temporary_files(record)


def check_is_gone(record: dict[str, Any]) -> None:
    """Waits for the fleet to end by itself, and looks at its ports."""
    deadline_s = time.monotonic() + 30
    while left := processes_of(record):
        assert time.monotonic() < deadline_s, left
        time.sleep(0.2)
    check_ports_are_free(record)
    check_no_temporary_files(record)


def check_readable(run_dir: Path, output: Path) -> None:
    results = list(read_results(output))
    assert any(result.error is None for result in results)
    decisions = (run_dir / "decisions.jsonl").read_bytes().splitlines()
    assert decisions
    for line in decisions[:-1]:
        json.loads(line)


def test_after_a_killed_replayer_the_fleet_serves_on_and_with_its_supervisor_it_is_gone(
    run_dir: Path, trace: Path, tmp_path: Path
) -> None:
    first = start_replay(run_dir, trace, tmp_path / "first")
    first.send_signal(signal.SIGKILL)
    first.wait()
    check_readable(run_dir, tmp_path / "first")
    second = start_replay(run_dir, trace, tmp_path / "second")
    second.send_signal(signal.SIGKILL)
    second.wait()
    check_readable(run_dir, tmp_path / "second")
    record = fleet(run_dir)
    assert len(processes_of(record)) >= 6
    assert any(Path(record["processes"][0]["temporary_folder"]).iterdir())  # the engine's sockets
    os.kill(record["supervisor"]["pid"], signal.SIGKILL)
    check_is_gone(record)
    check_nothing_is_left(run_dir)


@pytest.mark.parametrize("kind", ["router", "worker"])
def test_a_killed_router_or_worker_leaves_readable_results_and_nothing_after_down(
    kind: str, run_dir: Path, trace: Path, tmp_path: Path
) -> None:
    replayer = start_replay(run_dir, trace, tmp_path / "out")
    main_process(run_dir, kind).send_signal(signal.SIGKILL)
    replayer.wait(timeout=120)
    check_readable(run_dir, tmp_path / "out")
    assert any(result.error is not None for result in read_results(tmp_path / "out"))
    check_nothing_is_left(run_dir)


# Whether two sessions are carried is this machine's affair; one alone is measured either way.
EXPERIMENT = """
name = "killed"

[trace.synth]
profile = "coding-sessions"
requests = 400
seed = 3

[replay]
mode = "closed"
length_scale = 0.03
max_input_tokens = 3000
max_think_s = 0.1

[phases]
start = "mid"
warm_up_s = 2
measure_s = 12
drain_s = 5
recycle = true

[slo]
ttft_s = 60.0
tpot_s = 60.0
worst_gap_s = 60.0
stretch_p90 = 1000.0

[validity]
max_client_lag_p99_s = 30.0

[search]
over = "replay.max_inflight_sessions"
start = 2
high = 2
repeats = 1

[[arms]]
name = "one"
topology = "laptop-sglang"
policy = "unified"
set = { "workers.0.count" = 1, base_port = 0 }
"""


def wait_for(what: Path, runner: subprocess.Popen[str], text: str = "") -> None:
    deadline_s = time.monotonic() + 240
    while not what.exists() or text not in what.read_text() or what.stat().st_size == 0:
        assert runner.poll() is None, runner.communicate()
        assert time.monotonic() < deadline_s, f"{what}: no {text!r}"
        time.sleep(0.05)


def test_a_killed_search_leaves_no_engine_and_goes_on_without_repeating_finished_levels(
    tmp_path: Path,
) -> None:
    (tmp_path / "killed.toml").write_text(EXPERIMENT)
    first, second = (tmp_path / "out" / f"one@{load}" / "r1" for load in (2, 1))
    command = [*DELTASERVE, "eval", "run", "killed.toml", "--output", "out"]
    runner = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_for(second / "requests.jsonl", runner)
    finished = (first / "manifest.json").read_bytes()
    assert json.loads(finished)["state"] == "complete"
    records = [fleet(second), fleet(tmp_path / "out" / "workers" / "one" / "w1")]
    runner.send_signal(signal.SIGKILL)
    runner.communicate()
    for record in records:
        check_is_gone(record)
    assert json.loads((second / "manifest.json").read_text())["state"] == "running"
    report = ["eval", "report", str(tmp_path / "out"), "--output"]
    deltaserve(*report, tmp_path / "between")
    assert "so far: the search has levels to try" in (tmp_path / "between.md").read_text()

    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert (first / "manifest.json").read_bytes() == finished
    assert json.loads((second / "manifest.json").read_text())["state"] == "complete"
    found = json.loads((tmp_path / "out" / "one" / "capacity.json").read_text())
    assert found["finished"]
    assert [level["load"] for level in found["levels"]] == [1, 2]
    assert found["per_worker"] == found["agents"]
    deltaserve(*report, tmp_path / "report")
    markdown = (tmp_path / "report.md").read_text()
    assert f"{found['agents']:g} agents a worker" in markdown
    assert "so far" not in markdown
