"""A search runs levels on kept workers until it knows what the arm carries, and can be resumed."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval.experiment import Experiment, load_experiment
from eval.runner import Summary, run_experiment
from eval.site import Site
from tests.eval.test_runner import FakeSite

FAKE = (sys.executable, str(Path(__file__).with_name("fake_server_replay.py")))
TEXT = """
name = "how-many"
keep_workers = true
[trace]
path = "{trace}"
[replay]
mode = "closed"
[phases]
start = "mid"
[slo]
stretch_p90 = 5.0
[search]
over = "replay.max_inflight_sessions"
start = 4
high = 64
repeats = 2
[[arms]]
name = "one"
topology = "t-one"
"""


@pytest.fixture
def experiment(tmp_path: Path, small_trace: Path) -> Experiment:
    path = tmp_path / "search.toml"
    path.write_text(TEXT.format(trace=small_trace))
    return load_experiment(str(path))[0]


def run(experiment: Experiment, output: Path, fakes: FakeSite) -> Summary:
    from io import StringIO

    from rich.console import Console

    from eval.progress import Progress

    site: Site = replace(fakes.site(), replay=FAKE)
    with Progress(Console(file=StringIO(), width=200)) as progress:
        return run_experiment(experiment, output, site=site, source={}, progress=progress)


def capacity(output: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((output / "one" / "capacity.json").read_text())
    return record


def test_the_known_capacity_is_found_with_its_curve(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KNEE", "11")
    fakes = FakeSite()
    summary = run(experiment, tmp_path / "out", fakes)
    assert not summary.failed
    found = capacity(tmp_path / "out")
    assert found["agents"] == 11
    assert found["low"] <= 11 <= found["high"] <= 14
    loads = {level["load"]: level for level in found["levels"]}
    assert loads[11.0]["meets"]
    assert not loads[12.0]["meets"]
    assert loads[12.0]["attainment"] < 0.9 < loads[11.0]["attainment"]
    assert loads[4.0]["requests_per_s"] > 0
    assert 1.0 in loads, "one session alone, which stretch is held against"
    assert found["alone"].startswith("measured at one session in flight")
    assert fakes.kept == ["up workers", "down"]


def test_a_search_that_was_interrupted_goes_on_and_runs_no_level_twice(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KNEE", "11")
    output = tmp_path / "out"
    run(experiment, output, FakeSite())
    whole = capacity(output)
    # As if killed in the middle of the last two levels.
    for number, folder in enumerate(sorted(output.glob("one@*/r*"))[:2]):
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["state"] = "running"
        (folder / "manifest.json").write_text(json.dumps(manifest))
        assert number < 2
    fakes = FakeSite()
    summary = run(experiment, output, fakes)
    assert summary.complete == 2
    assert len(fakes.up) == 2
    assert capacity(output) == whole


def test_where_time_runs_out_the_answer_so_far_stays(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KNEE", "11")
    limited = experiment.model_copy(update={"budget_minutes": 2.0, "run_minutes": 0.5})
    summary = run(limited, tmp_path / "out", FakeSite(run_s=50.0))
    assert summary.skipped
    assert 4 <= capacity(tmp_path / "out")["agents"] <= 8
