"""A search runs levels on kept workers until it knows what the arm carries, and can be resumed."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from deltaserve.errors import InputError
from eval.experiment import Experiment, Slo
from eval.experiment_files import load_experiment
from eval.progress import Progress
from eval.records import Run
from eval.report import find_runs, find_searches, gather
from eval.report.answer import answer
from eval.report.sections.capacity import section
from eval.runner import Summary, run_experiment
from eval.search import level_of, tried
from eval.site import Site
from tests.eval.test_runner import FakeSite

LAX = {"cold_slack_tokens": 1_000_000}
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
recycle = true
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


def run(
    experiment: Experiment, output: Path, fakes: FakeSite, told: StringIO | None = None
) -> Summary:
    """Runs the experiment; what it says of its progress is written to `told`."""
    site: Site = replace(fakes.site(), replay=FAKE)
    with Progress(Console(file=told or StringIO(), width=200)) as progress:
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
    assert loads[12.0]["in_time_share"] < 0.9 < loads[11.0]["in_time_share"]
    assert loads[4.0]["requests_per_s"] > 0
    assert 1.0 in loads, "one session alone, which stretch is held against"
    assert found["alone"].startswith("measured at one session in flight")
    assert fakes.kept == ["up one", "down"]
    assert found["finished"]
    assert found["per_gpu"] is None
    assert found["per_worker"] == 11 / found["workers"]
    assert all(level["violations"] == [] for level in found["levels"])


def test_a_report_names_invalid_levels_and_judges_all_again_by_another_objective(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KNEE", "3")
    monkeypatch.setenv("WARM", "1")
    output = tmp_path / "out"
    run(experiment, output, FakeSite())
    levels = capacity(output)["levels"]
    assert all(level["violations"] == ["not_cold"] for level in levels)
    runs = [replace(r, manifest={**r.manifest, "validity": LAX}) for r in find_runs([output])]
    searches = find_searches([output])
    as_made = gather(runs, draws=20, searches=searches)
    loads = ", ".join(f"{level['load']:g}" for level in levels)
    assert "one has a capacity of 3 agents a worker" in answer(as_made)
    assert f"a rule of validity was broken at {loads}" in answer(as_made)
    assert "so far" not in answer(as_made)
    [strict] = gather(runs, draws=20, searches=searches, slo={"ttft_s": 0.05}).searches
    assert strict.agents == 0
    assert strict.slo["ttft_s"] == 0.05
    for again, before in zip(strict.levels, levels, strict=True):
        assert (again["ttft_p90"], again["in_time_share"]) == (before["ttft_p90"], 0.0)
    assert not strict.finished, "by that objective other levels might have been tried"
    (output / "one" / "capacity.json").write_text('{"arm": "another", "levels": []}')
    with pytest.raises(InputError, match="--slo: the runs of another's search"):
        gather(runs, draws=20, searches=find_searches([output]), slo={"ttft_s": 1.0})


def test_levels_without_a_known_stretch_are_said_to_be_judged_by_turns_alone(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a server that tells no cached tokens: what a session takes alone is not known."""
    monkeypatch.setenv("KNEE", "11")
    monkeypatch.setenv("UNCOUNTED", "1")
    output, told = tmp_path / "out", StringIO()
    run(experiment, output, FakeSite(), told)
    found = capacity(output)
    assert found["alone"] is None
    assert (found["agents"], found["low"]) == (11, 0)
    carried = [level for level in found["levels"] if level["meets"]]
    assert carried
    assert not any(level["sure"] for level in carried)
    assert any(level["sure"] for level in found["levels"] if not level["meets"])
    evidence = gather(find_runs([output]), draws=20, searches=find_searches([output]))
    loads = ", ".join(f"{level['load']:g}" for level in carried)
    doubt = f"no session's stretch is known at {loads}: judged by turns alone"
    assert doubt in answer(evidence)
    assert f"one: capacity 11 (0 to 11); {doubt}" in " ".join(told.getvalue().split())
    shown = section(evidence)
    assert shown is not None
    [levels] = [table for title, table in shown.tables if title == "Levels"]
    said = {row[1].text: row[2].text for row in levels.rows}
    assert said["11"] == "yes, stretch unknown"
    assert said["16"].startswith("no")


def test_a_search_under_another_objective_and_its_report_have_one_objective(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KNEE", "5")
    output = tmp_path / "out"
    run(experiment.model_copy(update={"slo": Slo(ttft_s=0.001)}), output, FakeSite())
    strict = find_searches([output])
    assert strict[0].agents == 0
    # From level 4 on upwards; those below are not asked for again.
    run(experiment, output, FakeSite())
    searches = find_searches([output])
    assert searches[0].agents == 5
    found = gather(find_runs([output]), draws=20, searches=searches)
    assert found.slo == experiment.slo
    assert "a capacity of 5" in answer(found)
    assert "so far" not in answer(found)
    # The answer of before, beside runs that are judged otherwise by now.
    [again] = gather(find_runs([output]), draws=20, searches=strict).searches
    assert Slo.model_validate(again.slo) == experiment.slo
    assert again.agents == 5
    assert not again.finished


def test_a_search_that_was_interrupted_goes_on_and_runs_no_level_twice(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KNEE", "5")
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
    found = capacity(tmp_path / "out")
    assert 4 <= found["agents"] <= 8
    assert not found["finished"]


def test_a_search_that_ran_out_of_time_goes_on_in_a_copy_of_its_folder(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on another machine, later: half an hour of a search is kept and not measured again."""
    monkeypatch.setenv("KNEE", "5")
    whole, first, second = (tmp_path / name for name in ("whole", "first", "second"))
    in_one_go = run(experiment, whole, FakeSite())
    limited = experiment.model_copy(update={"budget_minutes": 2.0, "run_minutes": 0.5})
    begun = run(limited, first, FakeSite(run_s=50.0))
    assert begun.skipped
    assert 0 < begun.complete < in_one_go.complete
    shutil.copytree(first, second)
    shutil.rmtree(first)
    told = StringIO()
    gone_on = run(limited.model_copy(update={"budget_minutes": None}), second, FakeSite(), told)
    assert gone_on.kept == begun.complete
    assert gone_on.kept + gone_on.complete == in_one_go.complete
    assert capacity(second) == capacity(whole)
    calls = [path.read_text() for path in second.glob("one@*/r*/calls")]
    assert calls == ["called\n"] * in_one_go.complete


def test_a_repeat_of_the_same_sessions_makes_no_level_surer(make_run: Callable[..., Run]) -> None:
    runs = [make_run(load="4", repeat=repeat, sessions=12) for repeat in (1, 2, 3)]
    level = level_of(tried(runs, Slo()), 4.0, None)
    assert len(level.sessions) == 36
    assert len({outcome.session for outcome in level.sessions}) == 12
