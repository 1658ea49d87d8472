from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from eval.records import Run

COMMANDS = (
    ["run"],
    ["report"],
    ["import"],
    ["list"],
    ["micro", "interference"],
    ["micro", "lifecycle"],
    ["micro", "cache-sweep"],
    ["micro", "connector-tax"],
)


def deltaserve(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deltaserve", "eval", *map(str, arguments)],
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(command: list[str]) -> None:
    done = deltaserve(*command, "--help")
    assert done.returncode == 0
    assert f"Example: deltaserve eval {' '.join(command)}" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "nothing"], "nothing: no such experiment file; packaged ones:"),
        (["run", "demo", "--set", "repeats"], "--set repeats: expected key=value"),
        (["run", "demo", "--plan", "--only", "x"], "--only: no arm is named 'x'"),
        (["run", "demo", "--set", "arms.vllm.topology=x"], "no topology 'x'"),
        (["report", "nowhere"], "nowhere: no such folder; expected the output of eval run"),
        (["import", "csv", "f", "--arm", "a", "--output", "o"], "format csv: expected one of"),
    ],
)
def test_a_mistake_is_answered_in_one_line_and_exit_status_2(
    arguments: list[str], said: str
) -> None:
    done = deltaserve(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def test_a_plan_lists_the_runs_in_order_and_starts_nothing(tmp_path: Path) -> None:
    done = deltaserve("run", "policy", "--plan", "--output", tmp_path / "x", "--set", "repeats=1")
    assert done.returncode == 0
    assert sorted(done.stdout.split()) == [f"{tmp_path}/x/mine/r1", f"{tmp_path}/x/unified/r1"]
    assert not (tmp_path / "x").exists()


def test_a_report_as_json_is_one_object_on_stdout(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    make_run()
    done = deltaserve("report", tmp_path / "runs", "--output", tmp_path / "report", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["cells"]["a"]["requests"] == 120
    assert (tmp_path / "report.html").is_file()
