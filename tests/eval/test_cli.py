from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from eval.experiment import load_experiment, packaged_experiments
from eval.preview import preview
from eval.records import Run
from eval.runner import launch_site

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
    output = tmp_path / "x"
    settings = ["--set", "repeats=1", "--set", "run_minutes=4"]
    done = deltaserve("run", "policy", "--plan", "--output", output, *settings)
    assert done.returncode == 0
    runs = re.findall(rf"^ +\d+  {output}/(\S+)  (.*)$", done.stdout, re.M)
    assert sorted(name for name, _ in runs) == ["mine/r1", "unified/r1"]
    assert [words for _, words in runs] == [f"4.0 min, done after 0:{n:02d}" for n in (4, 8)]
    assert f"deltaserve launch up laptop-sglang --run-dir {output}/mine/r1 --set" in done.stdout
    assert f"--output {output}/unified/r1 --mode closed --max-inflight-sessions 4" in done.stdout
    assert not output.exists()


@pytest.mark.parametrize("name", packaged_experiments())
def test_every_packaged_experiments_topologies_and_policies_are_known(
    name: str, tmp_path: Path
) -> None:
    experiment, _ = load_experiment(name)
    lines = list(preview(experiment, tmp_path / "x", site=launch_site()))
    assert re.fullmatch(r"# \d+ runs: \d+ to do; \d+:\d\d h:min left", lines[-1])
    assert all(
        re.search(r"not installed; run: deltaserve launch install|in use|no free", line)
        for line in lines
        if line.startswith("# not on this machine")
    )


def test_a_report_as_json_is_one_object_on_stdout(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    make_run()
    done = deltaserve("report", tmp_path / "runs", "--output", tmp_path / "report", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["cells"]["a"]["requests"] == 120
    assert (tmp_path / "report.html").is_file()
