from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from deltaserve.errors import InputError
from eval import provenance
from eval.cli import app
from eval.execution import replay_command
from eval.experiment import (
    Analysis,
    Excerpt,
    Experiment,
    Load,
    Phases,
    Prefixes,
    Replay,
    Sample,
    Slo,
    Trace,
    Turns,
    ValidityRules,
)
from eval.experiment_files import load_experiment
from eval.matrix import plan_runs
from eval.preview import preview
from eval.progress import Progress
from eval.provenance import fresh_folder, read_manifest
from eval.runner import Summary, run_experiment, topology_overrides
from eval.site import FleetMaker, Site
from eval.traces import (
    planned_trace,
    possible_cached_tokens,
    prepare_trace,
    resolve_scale,
    take_excerpt,
    trace_facts,
    write_facts,
)
from replay.plan import make_plan
from replay.results import Result
from replay.trace import Request, read_trace, write_trace

FAKE_REPLAY = (sys.executable, str(Path(__file__).with_name("fake_replay.py")))
TEXT = """
name = "matrix"
repeats = 2
baseline = "one"
[trace]
path = "{trace}"
[[arms]]
name = "one"
topology = "t-one"
policy = "unified"
policy_params = {{ overload_factor = 1.5 }}
[[arms]]
name = "two"
topology = "t-two"
set = {{ max_total_tokens = 1000, router = {{ host = "127.0.0.2" }} }}
"""


@dataclass
class FakeFleet:
    router_url: str | None = "http://127.0.0.1:9"
    workers: Sequence[Any] = ("w0",)
    engine_versions: dict[str, str] = field(default_factory=lambda: {"madeengine": "1.2.3"})
    timings: dict[str, float] = field(default_factory=lambda: {"start_s": 0.0})
    dies_when: Callable[[], bool] = lambda: False

    def check(self) -> None:
        if self.dies_when():
            raise RuntimeError("worker w0 died (SIGKILL); the end of w0.log:\n one\n two")


@dataclass
class FakeSite:
    """Fleets that are nothing; remembers which were up, and refuses those in `broken`."""

    broken: set[str] = field(default_factory=set)
    dying: set[str] = field(default_factory=set)
    up: list[str] = field(default_factory=list)
    down: list[str] = field(default_factory=list)
    run_s: float = 0.0
    now_s: float = 0.0
    kept: list[str] = field(default_factory=list)

    def end(self, folder: Path) -> int:
        """A folder with a file `left` stands for one with a fleet that its runner left behind."""
        left = folder / "left"
        if not left.is_file():
            return 0
        left.unlink()
        return 3

    def site(self) -> Site:
        def load(name: str, overrides: list[str]) -> dict[str, Any]:
            if name == "t-unknown":
                raise InputError("no topology 't-unknown'")
            return {"name": name, "model": "m", "device": "cpu", "overrides": overrides}

        @contextlib.contextmanager
        def fleet(topology: Any, folder: Path, say: Any) -> Iterator[FakeFleet]:
            if topology["name"] in self.broken:
                raise RuntimeError("worker w0 died; the end of w0.log:\n one\n two")
            self.up.append(f"{folder.parent.name}/{folder.name}")
            try:
                hangs = folder / "hanging"
                dies = hangs.is_file if topology["name"] in self.dying else lambda: False
                yield FakeFleet(dies_when=dies)
            finally:
                self.now_s += self.run_s
                self.down.append(f"{folder.parent.name}/{folder.name}")

        @contextlib.contextmanager
        def keeping(folder: Path) -> Iterator[FleetMaker]:
            self.kept.append(f"up {folder.name}")
            yield fleet
            self.kept.append("down")

        return Site(
            load=load,
            check=lambda _topology: None,
            fleet=fleet,
            describe=dict,
            vocab_size=lambda _topology: 1024,
            end=self.end,
            keeping=keeping,
            worker_key=lambda topology: str(topology["name"]).encode(),
            clock=lambda: self.now_s,
            replay=FAKE_REPLAY,
        )


def test_runs_that_want_the_same_workers_follow_each_other_where_workers_are_kept(
    tmp_path: Path, small_trace: Path
) -> None:
    path = tmp_path / "kept.toml"
    arms = "".join(
        f'[[arms]]\nname = "a{n}"\ntopology = "t-{"one" if n % 2 else "two"}"\n' for n in range(6)
    )
    path.write_text(
        f'name = "kept"\nrepeats = 2\nkeep_workers = true\n[trace]\npath = "{small_trace}"\n{arms}'
    )
    fakes = FakeSite()
    summary, _ = execute(load_experiment(str(path))[0], tmp_path / "out", fakes)
    assert summary.complete == 12
    assert len(fakes.kept) == 2
    assert re.fullmatch(r"up a\d", fakes.kept[0]), "a folder of this runner alone"
    odd = [int(run[1]) % 2 for run in fakes.up]
    assert odd in ([0] * 6 + [1] * 6, [1] * 6 + [0] * 6)
    assert [run[-1] for run in fakes.up] == ["1"] * 3 + ["2"] * 3 + ["1"] * 3 + ["2"] * 3


@pytest.fixture
def experiment(tmp_path: Path, small_trace: Path) -> Experiment:
    path = tmp_path / "matrix.toml"
    path.write_text(TEXT.format(trace=small_trace))
    return load_experiment(str(path))[0]


def execute(
    experiment: Experiment, output: Path, fakes: FakeSite, only: list[str] | None = None
) -> tuple[Summary, str]:
    said = io.StringIO()
    with Progress(Console(file=said, width=200)) as progress:
        summary = run_experiment(
            experiment,
            output,
            site=fakes.site(),
            source={"command": "deltaserve eval run matrix.toml"},
            progress=progress,
            only=only,
        )
    return summary, said.getvalue()


def manifest(output: Path, run: str) -> dict[str, Any]:
    found = read_manifest(output / run)
    assert found is not None
    return found


def test_every_run_gets_a_fresh_fleet_and_a_manifest_that_another_machine_can_repeat(
    experiment: Experiment, tmp_path: Path
) -> None:
    fakes = FakeSite()
    output = tmp_path / "out"
    summary, _ = execute(experiment, output, fakes)
    runs = ["one/r1", "one/r2", "two/r1", "two/r2"]
    assert summary.complete == 4
    assert sorted(fakes.up) == sorted(fakes.down) == runs
    for name in runs:
        found = manifest(output, name)
        assert found["state"] == "complete"
        assert found["violations"] == []
        assert found["results"] == found["trace"]["requests"] == 12
        assert found["versions"]["engines"] == {"madeengine": "1.2.3"}
        assert found["hardware"]["cores"] >= 1
        assert len(found["trace"]["sha256"]) == 64
        assert found["coldness"] == [
            {
                "worker": "fleet",
                "request_id": "s0-0",
                "cached_tokens": 0.0,
                "possible_tokens": 0.0,
            }
        ]
        assert {"total_s", "fleet_up_s", "replay_s"} <= found["timings"].keys()
        assert "--vocab-size" in found["replay"]["arguments"]
    overrides = manifest(output, "one/r1")["topology"]["overrides"]
    assert overrides == ['router.policy="unified"', "router.params.overload_factor=1.5"]


def test_an_arms_own_keys_become_overrides_of_its_topology(experiment: Experiment) -> None:
    second = next(run for run in plan_runs(experiment) if run.arm.name == "two")
    assert topology_overrides(second) == [
        "max_total_tokens=1000",
        'router.host="127.0.0.2"',
    ]


def test_finished_runs_are_kept_and_unfinished_ones_redone(
    experiment: Experiment, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    execute(experiment, output, FakeSite(), only=["one"])
    unfinished = output / "one" / "r2"
    cut = manifest(output, "one/r2") | {"state": "running"}
    (unfinished / "manifest.json").write_text(json.dumps(cut))
    (unfinished / "left-over").touch()
    kept = (output / "one" / "r1" / "manifest.json").stat().st_mtime_ns
    fakes = FakeSite()
    summary, said = execute(experiment, output, fakes)
    assert summary.kept == 1
    assert sorted(fakes.up) == ["one/r2", "two/r1", "two/r2"]
    assert (output / "one" / "r1" / "manifest.json").stat().st_mtime_ns == kept
    assert not (unfinished / "left-over").exists()
    assert "1 of 4 runs are complete already" in said


def test_what_a_killed_runner_left_running_is_ended_before_anything_starts(
    experiment: Experiment, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    folder = output / "two" / "r1"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text('{"state": "running"}')
    (folder / "left").touch()
    _, said = execute(experiment, output, FakeSite(), only=["two"])
    assert said.startswith("two/r1: ended 3 processes that an earlier runner left")
    assert manifest(output, "two/r1")["state"] == "complete"


def test_a_finished_run_of_other_settings_is_never_taken_for_this_one(
    experiment: Experiment, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    execute(experiment, output, FakeSite())
    changed = experiment.model_copy(update={"replay": Replay(time_scale=2.0)})
    with pytest.raises(InputError, match="holds a finished run with other settings"):
        execute(changed, output, FakeSite())


def test_finished_runs_are_judged_by_the_objective_and_rules_that_the_experiment_has_now(
    experiment: Experiment, tmp_path: Path, small_trace: Path
) -> None:
    output = tmp_path / "out"
    (small_trace.parent / "behave.json").write_text('{"one": "warm"}')
    execute(experiment, output, FakeSite())
    before = manifest(output, "one/r1")
    assert [broken["rule"] for broken in before["violations"]] == ["not_cold"]
    again, _ = execute(experiment, output, FakeSite())
    assert (again.kept, sorted(again.invalid)) == (4, ["one/r1", "one/r2"])
    changed = experiment.model_copy(
        update={
            "slo": Slo(ttft_s=7.0),
            "validity": ValidityRules(cold_slack_tokens=500),
            "analysis": Analysis(primary=["ttft_p50"]),
            "baseline": "two",
        }
    )
    fakes = FakeSite()
    summary, said = execute(changed, output, fakes)
    assert not fakes.up
    assert summary.kept == 4
    assert summary.invalid == []
    assert "one/r1: is judged by the experiment's objective and rules now" in said
    found = manifest(output, "one/r1")
    assert found["slo"]["ttft_s"] == 7.0
    assert found["analysis"]["primary"] == ["ttft_p50"]
    assert found["baseline"] == "two"
    assert found["violations"] == []
    judged = {"slo", "validity", "analysis", "baseline", "violations"}
    assert {key: value for key, value in found.items() if key not in judged} == {
        key: value for key, value in before.items() if key not in judged
    }
    assert manifest(output, "two/r2")["slo"]["ttft_s"] == 7.0
    _, said = execute(changed, output, FakeSite())
    assert "is judged" not in said


def test_a_load_of_more_sessions_than_there_are_is_warned_of_where_none_is_played_again(
    experiment: Experiment, tmp_path: Path
) -> None:
    closed = Replay(mode="closed")
    loads = [Load(name=f"l{n}", replay={"max_inflight_sessions": n}) for n in (4, 5)]
    asked = experiment.model_copy(update={"replay": closed, "loads": loads})
    summary, said = execute(asked, tmp_path / "out", FakeSite())
    assert summary.complete == 8
    assert "max_inflight_sessions 4:" not in said
    assert said.count("warning: max_inflight_sessions 5: 4 conversations are there to send") == 1
    recycled = asked.model_copy(update={"phases": Phases(recycle=True)})
    assert "warning" not in execute(recycled, tmp_path / "recycled", FakeSite())[1]


def test_a_run_that_fails_is_recorded_with_its_reason_and_the_rest_goes_on(
    experiment: Experiment, tmp_path: Path, small_trace: Path
) -> None:
    output = tmp_path / "out"
    (small_trace.parent / "behave.json").write_text('{"two": "fail"}')
    summary, said = execute(experiment, output, FakeSite())
    assert sorted(summary.failed) == ["two/r1", "two/r2"]
    assert summary.complete == 2
    found = manifest(output, "two/r1")
    assert found["state"] == "failed"
    assert found["reason"] == "the replay exited with 1: made to fail"
    assert found["results"] == 3
    assert "two/r1: failed: the replay exited with 1: made to fail" in said


def test_a_fleet_that_does_not_come_up_fails_its_run_in_one_line(
    experiment: Experiment, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    summary, _ = execute(experiment, output, FakeSite(broken={"t-one"}))
    assert sorted(summary.failed) == ["one/r1", "one/r2"]
    reason = manifest(output, "one/r1")["reason"]
    assert reason == "RuntimeError: worker w0 died; the end of w0.log"


def test_a_worker_that_dies_during_the_load_fails_the_run_at_once(
    experiment: Experiment, tmp_path: Path, small_trace: Path
) -> None:
    """The replay would go on for a minute without it."""
    (small_trace.parent / "behave.json").write_text('{"two": "hang"}')
    output = tmp_path / "out"
    began_s = time.monotonic()
    summary, said = execute(experiment, output, FakeSite(dying={"t-two"}))
    assert time.monotonic() - began_s < 30
    assert sorted(summary.failed) == ["two/r1", "two/r2"]
    found = manifest(output, "two/r1")
    assert found["reason"] == "RuntimeError: worker w0 died (SIGKILL); the end of w0.log"
    assert found["results"] == 3
    assert found["violations"][0]["rule"] == "failed"
    assert "two/r1: failed: RuntimeError: worker w0 died (SIGKILL)" in said
    assert not any(str(output / "two").encode() in command for command in commands_running())


def test_a_worker_that_died_at_the_very_end_of_the_load_is_noticed(
    experiment: Experiment, tmp_path: Path
) -> None:
    """Its last answers came, so the replay itself ended well."""
    looks: list[int] = []

    def replayed() -> bool:
        looks.append(1)
        return any((tmp_path / "out").glob("*/*/requests.jsonl")) and all(
            path.read_bytes().count(b"\n") == 12
            for path in (tmp_path / "out").glob("*/*/requests.jsonl")
        )

    site = FakeSite().site()

    @contextlib.contextmanager
    def fleet(topology: Any, folder: Path, say: Any) -> Iterator[FakeFleet]:
        yield FakeFleet(dies_when=replayed)

    with Progress(Console(file=io.StringIO())) as progress:
        summary = run_experiment(
            experiment, tmp_path / "out", site=replace(site, fleet=fleet), source={},
            progress=progress, only=["one"],
        )  # fmt: skip
    assert looks
    assert len(summary.failed) == 2


def test_a_finished_run_on_another_trace_is_never_taken_for_this_one(
    experiment: Experiment, tmp_path: Path, small_trace: Path
) -> None:
    """The same path and settings, other content."""
    output = tmp_path / "out"
    execute(experiment, output, FakeSite())
    requests = list(read_trace(small_trace))
    requests[0].output_length += 1
    write_trace(small_trace, requests)
    with pytest.raises(InputError, match=r"r1: holds a finished run with trace sha256 \w+, which"):
        execute(experiment, output, FakeSite())


def test_each_round_may_have_a_draw_of_its_own_that_all_arms_share(
    experiment: Experiment, tmp_path: Path
) -> None:
    prefixes = Prefixes(
        requests=12, prefixes=4, prefix_tokens=64, suffix_tokens=32, output_tokens=4, block_size=32
    )
    varied = experiment.model_copy(
        update={
            "trace": Trace(prefixes=prefixes),
            "analysis": Analysis(vary=["trace.seed", "replay.seed"]),
        }
    )
    output = tmp_path / "out"
    summary, _ = execute(varied, output, FakeSite())
    assert summary.complete == 4
    found = {
        run: manifest(output, run)["identity"] for run in ("one/r1", "two/r1", "one/r2", "two/r2")
    }
    assert found["one/r1"] == found["two/r1"]
    assert found["one/r2"] == found["two/r2"]
    assert found["one/r1"]["trace_sha256"] != found["one/r2"]["trace_sha256"]
    assert [found[run]["seed"] for run in ("one/r1", "one/r2")] == [0, 1]
    assert execute(varied, output, FakeSite())[0].kept == 4


def test_a_fixed_trace_has_no_draw_to_vary(tmp_path: Path, small_trace: Path) -> None:
    path = tmp_path / "varied.toml"
    path.write_text(TEXT.format(trace=small_trace) + '[analysis]\nvary = ["trace.seed"]\n')
    with pytest.raises(InputError, match=r"analysis\.vary: trace\.seed changes nothing"):
        load_experiment(str(path))
    path.write_text(TEXT.format(trace=small_trace) + '[analysis]\nprimary = ["ttft"]\n')
    with pytest.raises(InputError, match=r"analysis: primary: unknown measure 'ttft'; ttft_p50"):
        load_experiment(str(path))


def test_a_run_on_a_warm_fleet_is_invalid_and_said_to_be(
    experiment: Experiment, tmp_path: Path, small_trace: Path
) -> None:
    (small_trace.parent / "behave.json").write_text('{"one": "warm"}')
    summary, said = execute(experiment, tmp_path / "out", FakeSite())
    assert sorted(summary.invalid) == ["one/r1", "one/r2"]
    assert "one/r1: invalid (not_cold)" in said


def test_killing_the_replay_fails_its_run_with_readable_results(
    experiment: Experiment, tmp_path: Path, small_trace: Path
) -> None:
    (small_trace.parent / "behave.json").write_text('{"two": "hang"}')
    output = tmp_path / "out"

    def kill_hanging() -> None:
        for _ in range(2):
            folder = None
            while folder is None:
                time.sleep(0.05)
                folder = next(iter((output / "two").glob("*/hanging")), None)
            folder.unlink()
            for process in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    if str(folder.parent).encode() in (process / "cmdline").read_bytes():
                        os.kill(int(process.name), signal.SIGKILL)

    killer = threading.Thread(target=kill_hanging, daemon=True)
    killer.start()
    summary, _ = execute(experiment, output, FakeSite())
    killer.join()
    assert sorted(summary.failed) == ["two/r1", "two/r2"]
    assert manifest(output, "two/r1")["reason"] == (
        "the replay was ended by SIGKILL after 3 of 12 results"
    )
    assert manifest(output, "two/r1")["results"] == 3


def test_an_unknown_topology_is_named_before_anything_starts(
    experiment: Experiment, tmp_path: Path
) -> None:
    arm = experiment.arms[1].model_copy(update={"topology": "t-unknown"})
    changed = experiment.model_copy(update={"arms": [experiment.arms[0], arm]})
    fakes = FakeSite()
    with pytest.raises(InputError, match="t-unknown"):
        execute(changed, tmp_path / "out", fakes)
    assert fakes.up == []


def test_a_missing_trace_is_named_before_anything_starts(
    experiment: Experiment, tmp_path: Path, small_trace: Path
) -> None:
    small_trace.unlink()
    fakes = FakeSite()
    with pytest.raises(InputError, match=r"trace\.path: .*small\.jsonl: no such file"):
        execute(experiment, tmp_path / "out", fakes)
    assert fakes.up == []


def test_a_sample_of_single_turns_says_what_to_give(experiment: Experiment, tmp_path: Path) -> None:
    prefixes = Prefixes(
        requests=40, prefixes=4, prefix_tokens=64, suffix_tokens=32, output_tokens=4, block_size=32
    )
    trace = Trace(prefixes=prefixes, sample=Sample(sample_ratio=0.5))
    changed = experiment.model_copy(update={"trace": trace})
    with pytest.raises(InputError, match=r"^trace: .*; give --max-single-turn-ratio 1$"):
        prepare_trace(changed, tmp_path / "out")
    given = trace.sample.model_copy(update={"max_single_turn_ratio": 1.0}) if trace.sample else None
    changed = experiment.model_copy(update={"trace": trace.model_copy(update={"sample": given})})
    assert len(list(read_trace(prepare_trace(changed, tmp_path / "out")))) == 20


def test_a_second_runner_leaves_the_runs_of_the_first_alone(
    experiment: Experiment, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    said: list[str] = []

    class Second(FakeSite):
        """Tries to run the same experiment again while its first fleet is up."""

        def site(self) -> Site:
            site = super().site()

            @contextlib.contextmanager
            def fleet(*given: Any) -> Iterator[Any]:
                if not said:
                    with pytest.raises(InputError) as refused:
                        execute(experiment, output, FakeSite(), only=["one"])
                    said.append(str(refused.value))
                with site.fleet(*given) as up:
                    yield up

            return replace(site, fleet=fleet)

    summary, _ = execute(experiment, output, Second(), only=["one"])
    assert summary.complete == 2
    assert said[0].startswith(f"{output}: another eval run is at work there on arm one")
    # Another arm is nobody's yet, and what the first held is free again.
    assert execute(experiment, output, FakeSite())[0].complete == 2


def test_a_folder_that_is_not_ours_is_never_emptied(experiment: Experiment, tmp_path: Path) -> None:
    precious = tmp_path / "out" / "one" / "r1" / "precious"
    precious.parent.mkdir(parents=True)
    precious.touch()
    with pytest.raises(InputError, match="not a run folder"):
        execute(experiment, tmp_path / "out", FakeSite())
    assert precious.exists()


@pytest.mark.parametrize("dies_in", ["git", "write_manifest"])
def test_a_run_whose_runner_was_killed_as_it_began_is_redone(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_in: str
) -> None:
    def killed(folder: Path | None = None, *_more: object) -> None:
        if folder is not None:
            (folder / ".manifest.json.partial").write_bytes(b"{")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(provenance, dies_in, killed)
        with pytest.raises(KeyboardInterrupt):
            execute(experiment, tmp_path / "out", FakeSite())
    summary, _ = execute(experiment, tmp_path / "out", FakeSite())
    assert summary.complete == 4


def test_a_folder_is_known_for_a_runs_until_all_else_in_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "r1"
    for name in ("a", "logs", "z"):
        (folder / name).mkdir(parents=True)
    (folder / "manifest.json").write_bytes(b'{"state": "running"}')
    (folder / "requests.jsonl").touch()

    def killed(path: Path) -> None:
        (path / "manifest.json").unlink(missing_ok=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        fresh_folder(folder)
    monkeypatch.undo()
    assert (folder / "manifest.json").is_file()
    fresh_folder(folder)
    assert list(folder.iterdir()) == []


def test_a_disk_that_fills_up_leaves_the_facts_that_a_report_reads(
    tmp_path: Path, small_trace: Path
) -> None:
    facts = trace_facts(small_trace, Replay())
    write_facts(tmp_path, facts)
    before = (tmp_path / "trace.json").read_bytes()
    script = (
        "import resource; from pathlib import Path; from dataclasses import replace; "
        "from eval.experiment import Replay; from eval.traces import trace_facts, write_facts; "
        f"facts = trace_facts(Path({str(small_trace)!r}), Replay()); "
        "more = dict.fromkeys(facts.best_cached_tokens, 1 << 30); "
        "facts = replace(facts, possible_cached_tokens=more); "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({len(before) + 1},) * 2); "
        f"write_facts(Path({str(tmp_path)!r}), facts)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "File too large" in done.stderr, done.stderr
    assert (tmp_path / "trace.json").read_bytes() == before


def test_runs_that_the_budget_cannot_hold_are_skipped_last_rounds_first(
    experiment: Experiment, tmp_path: Path
) -> None:
    short = experiment.model_copy(update={"budget_minutes": 1.0, "repeats": 4})
    fakes = FakeSite(run_s=10.0)
    summary, said = execute(short, tmp_path / "out", fakes)
    assert len(fakes.up) == summary.complete == 6
    assert sorted(summary.skipped) == ["one/r4", "two/r4"]
    assert "one/r4: skipped, about 0.2 min but only 0.0 min of the budget are left" in said


@pytest.mark.parametrize(
    ("behaviour", "keys", "said", "status"),
    [
        ({}, ("repeats=2",), "4 runs complete, 0 of them invalid, 0 failed, 0 skipped", 0),
        ({"one": "warm"}, ("repeats=2",), "2 of them invalid, 0 failed, 0 skipped", 1),
        ({}, ("repeats=4", "budget_minutes=1"), "0 of them invalid, 0 failed, 2 skipped", 1),
    ],
    ids=["whole", "invalid", "skipped"],
)
def test_eval_run_ends_with_1_where_runs_are_invalid_or_skipped(
    behaviour: dict[str, str],
    keys: Sequence[str],
    said: str,
    status: int,
    tmp_path: Path,
    small_trace: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (small_trace.parent / "behave.json").write_text(json.dumps(behaviour))
    path = tmp_path / "matrix.toml"
    path.write_text(TEXT.format(trace=small_trace))
    fakes = FakeSite(run_s=10.0)
    monkeypatch.setattr("eval.site.launch_site", fakes.site)
    words = [word for key in keys for word in ("--set", key)]
    done = CliRunner().invoke(app, ["run", str(path), "--output", str(tmp_path / "out"), *words])
    assert said in " ".join(done.output.split())
    assert done.exit_code == status


def test_a_plan_counts_what_is_complete_measured_and_beyond_the_budget(
    experiment: Experiment, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    execute(experiment, output, FakeSite(), only=["one"])
    for run in ("r1", "r2"):
        found = manifest(output, f"one/{run}")
        found["timings"]["total_s"] = 120.0
        (output / "one" / run / "manifest.json").write_text(json.dumps(found))
    short = experiment.model_copy(update={"budget_minutes": 3.0, "run_minutes": 50.0})
    lines = list(preview(short, output, site=FakeSite().site()).lines())
    assert "# runs in their order; their length is measured" in lines
    states = [line.split("  ")[-1] for line in lines if re.match(r" +\d+  ", line)]
    assert sorted(states) == [
        "2.0 min, done after 0:02", "complete", "complete", "skipped: beyond the budget",
    ]  # fmt: skip
    assert lines[-1] == "# 4 runs: 2 complete, 1 skipped, 1 to do; 0:02 h:min left"


RUNNER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_runner import FakeSite
from eval import runner
from eval.experiment_files import load_experiment
from eval.progress import Progress
experiment, _ = load_experiment({experiment!r})
try:
    with runner.sigterm_as_interrupt(), Progress() as progress:
        runner.run_experiment(experiment, Path({output!r}), site=FakeSite().site(), source={{}},
                              progress=progress)
except KeyboardInterrupt:
    sys.exit(130)
"""


def commands_running() -> Iterator[bytes]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield path.read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_runner_goes_on_where_it_stopped(
    experiment: Experiment, tmp_path: Path, small_trace: Path, number: signal.Signals
) -> None:
    output = tmp_path / "out"
    behave = small_trace.parent / "behave.json"
    behave.write_text('{"two": "hang"}')
    script = RUNNER.format(
        tests=str(Path(__file__).parent),
        experiment=str(tmp_path / "matrix.toml"),
        output=str(output),
    )
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(output.glob("two/*/hanging")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(timeout=30) == (-number if number == signal.SIGKILL else 130)
    stopped = next(output.glob("two/*/hanging")).parent
    assert manifest(output, f"two/{stopped.name}")["state"] == "running"
    deadline = time.monotonic() + 30
    while any(str(stopped).encode() in command for command in commands_running()):
        assert number == signal.SIGKILL, "the replay outlived a runner that could stop it"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    behave.unlink()
    finished = len(list(output.glob("one/*/manifest.json")))
    summary, _ = execute(experiment, output, FakeSite())
    assert summary.kept == finished
    assert summary.complete == 4 - finished


def test_fitting_a_trace_chooses_an_explicit_factor_and_never_enlarges(small_trace: Path) -> None:
    shrunk = resolve_scale(small_trace, Replay(fit_input_tokens=100))
    assert shrunk.length_scale == pytest.approx(100 / 384, rel=0.05)
    assert shrunk.fit_input_tokens is None
    facts = trace_facts(small_trace, shrunk)
    assert 0 < max(facts.best_cached_tokens.values()) <= 100
    plan = make_plan(read_trace(small_trace), length_scale=shrunk.length_scale or 1.0)
    assert 90 <= max(request.input_length for request in plan.requests) <= 100
    assert resolve_scale(small_trace, Replay(fit_input_tokens=1000)).length_scale is None


def test_prompts_of_a_few_prefixes_share_exactly_those(
    experiment: Experiment, tmp_path: Path
) -> None:
    shape = Prefixes(
        requests=40, prefixes=4, prefix_tokens=300, suffix_tokens=150, output_tokens=7, rate=2.0
    )
    planned = experiment.model_copy(update={"trace": Trace(prefixes=shape)})
    path = prepare_trace(planned, tmp_path / "out")
    assert path == planned_trace(planned, tmp_path / "out")
    requests = list(read_trace(path))
    assert {(r.input_length, r.output_length, r.turn) for r in requests} == {(450, 7, 0)}
    assert Counter(tuple(r.hash_ids[:3]) for r in requests).most_common()[-1][1] == 10
    own = [block for r in requests for block in r.hash_ids[3:]]
    assert len(set(own)) == len(own) == 80
    assert requests[-1].timestamp_s == 19.5
    facts = trace_facts(path, Replay())
    assert sum(facts.best_cached_tokens.values()) == 36 * 300
    again = prepare_trace(planned, tmp_path / "again")
    assert again.read_bytes() == path.read_bytes()


def test_sessions_of_alike_turns_bring_what_they_say(
    experiment: Experiment, tmp_path: Path
) -> None:
    shape = Turns(sessions=50, turns=4, new_tokens=300, output_tokens=100, think_s=6.0)
    planned = experiment.model_copy(update={"trace": Trace(turns=shape)})
    path = prepare_trace(planned, tmp_path / "out")
    assert path == planned_trace(planned, tmp_path / "out")
    requests = list(read_trace(path))
    assert [r.input_length for r in requests[:4]] == [300, 700, 1100, 1500]
    assert [r.turn for r in requests[:5]] == [0, 1, 2, 3, 0]
    # An answer is in the next prompt; 300 tokens of it are new beyond that.
    for before, after in pairwise(requests):
        shared = after.hash_ids[: len(before.hash_ids)] == before.hash_ids
        assert shared == (before.session_id == after.session_id)
    thinks = [r.think_time_s for r in requests if r.turn]
    assert 5.0 < statistics.fmean(think or 0.0 for think in thinks) < 7.0
    drawn = planned.with_draw(2).trace.turns
    assert drawn is not None
    assert drawn.seed is None  # nothing varies unless the experiment says so
    varied = planned.model_copy(update={"analysis": Analysis(vary=["trace.seed"])}).with_draw(2)
    assert prepare_trace(varied, tmp_path / "out").read_bytes() != path.read_bytes()


def test_an_excerpt_keeps_whole_beginnings_of_the_first_sessions(small_trace: Path) -> None:
    taken = [r.request_id for r in take_excerpt(small_trace, Excerpt(requests=3, turns=2))]
    assert taken == ["s0-0", "s1-0", "s0-1", "s1-1"]
    everything = list(take_excerpt(small_trace, Excerpt(requests=99, turns=99)))
    assert everything == list(read_trace(small_trace))


def test_an_excerpt_leaves_out_what_waits_for_something_left_out(tmp_path: Path) -> None:
    def request(name: str, session: str, turn: int, at_s: float, parent: str | None) -> Request:
        return Request(name, session, turn, at_s, 64, 1, 64, [hash(name) % 1000], parent)

    trace = tmp_path / "agents.jsonl"
    write_trace(
        trace,
        [
            request("a0", "a", 0, 0.0, None),
            request("sub-of-a0", "b", 0, 1.0, "a0"),
            request("a1", "a", 1, 2.0, None),
            request("sub-of-a1", "c", 0, 3.0, "a1"),
            request("after-sub-of-a1", "c", 1, 4.0, None),
        ],
    )
    taken = [r.request_id for r in take_excerpt(trace, Excerpt(requests=9, turns=1))]
    assert taken == ["a0", "sub-of-a0"]


def test_best_possible_reuse_is_the_longest_prefix_that_came_before(small_trace: Path) -> None:
    facts = trace_facts(small_trace, Replay())
    assert facts.best_cached_tokens["s0-0"] == 0
    assert facts.best_cached_tokens["s0-1"] == 128
    assert facts.best_cached_tokens["s3-2"] == 256
    assert facts.planned == 12
    assert trace_facts(small_trace, Replay(request_limit=5)).planned == 5


def a_result(name: str, sent_s: float | None, first_token_s: float | None, play: int = 0) -> Result:
    return Result(
        request_id=name,
        session_id=name[:2],
        turn=int(name[3]),
        input_length=1,
        output_length=1,
        sent_s=sent_s,
        first_token_s=first_token_s,
        play=play,
    )


def test_possible_reuse_counts_what_was_sent_before_a_requests_first_token(
    small_trace: Path,
) -> None:
    def possible(**first_token_s: float) -> dict[str, int]:
        sent_s = {"s0-0": 0.0, "s0-1": 5.0, "s1-0": 6.0}
        named = {name.replace("_", "-"): at for name, at in first_token_s.items()}
        return possible_cached_tokens(
            small_trace,
            Replay(),
            [
                a_result(name, sent_s.get(name), named.get(name))
                for name in sent_s.keys() | named.keys()
            ],
        )

    # Turn 0's two blocks begin turn 1, and may be there as soon as turn 1 was sent, and no sooner.
    assert possible(s0_0=1.0, s0_1=5.5) == {"s0-0": 0, "s0-1": 128}
    assert possible(s0_0=5.2) == {"s0-0": 128}
    assert possible(s1_0=9.0) == {"s1-0": 0}


def test_possible_reuse_counts_requests_that_prime_caches_and_keeps_plays_apart(
    small_trace: Path,
) -> None:
    def possible(*results: Result) -> dict[str, int]:
        return possible_cached_tokens(small_trace, Replay(), results)

    first, second = a_result("s0-0~prime", 0.0, 1.0), a_result("s0-1~prime", 0.0, 2.0)
    assert possible(first, second) == {"s0-0~prime": 128, "s0-1~prime": 128}
    assert possible(first, a_result("s0-1", 5.0, 6.0)) == {"s0-0~prime": 0, "s0-1": 128}
    again = a_result("s0-0#1", 5.0, 6.0, play=1)
    assert possible(first, again) == {"s0-0~prime": 0, "s0-0#1": 0}
    primed_again = a_result("s0-1#1~prime", 7.0, 8.0, play=1)
    assert possible(first, again, primed_again)["s0-1#1~prime"] == 128


def test_replay_settings_become_flags_and_unset_ones_are_left_to_replay() -> None:
    command = replay_command(
        ["replay"],
        Path("t.jsonl"),
        Path("run"),
        "http://r",
        Replay(mode="closed", max_inflight_sessions=3, splice_outputs=True),
    )
    assert command == [
        *("replay", "t.jsonl", "--url", "http://r", "--output", "run"),
        *("--mode", "closed", "--max-inflight-sessions", "3", "--splice-outputs"),
    ]


def test_phases_and_a_preset_reach_the_replay_and_the_runs_digest(tmp_path: Path) -> None:
    text = TEXT.format(trace=tmp_path / "t.jsonl")
    phases = """
[phases]
start = "mid"
start_share = [0.1, 0.9]
warm_up_s = 30
measure_s = 900
recycle = true
[replay]
preset = "agentx"
max_inflight_sessions = 12
splice_outputs = false
"""
    (tmp_path / "e.toml").write_text(text)
    plain = plan_runs(load_experiment(str(tmp_path / "e.toml"))[0])[0]
    (tmp_path / "e.toml").write_text(text + phases)
    run = plan_runs(load_experiment(str(tmp_path / "e.toml"))[0])[0]
    command = replay_command(
        ["replay"], Path("t.jsonl"), Path("run"), "http://r", run.replay, run.phases
    )
    assert command == [
        *("replay", "t.jsonl", "--url", "http://r", "--output", "run"),
        *("--preset", "agentx", "--max-inflight-sessions", "12"),
        *("--start", "mid", "--start-share", "0.1", "0.9"),
        *("--warm-up-s", "30.0", "--measure-s", "900.0", "--recycle", "--no-splice-outputs"),
    ]
    assert plain.replay.splice_outputs
    assert plain.phases is None
    shorter = dataclasses.replace(run, phases=run.phases.model_copy(update={"measure_s": 901.0}))
    assert len({plain.digest, run.digest, shorter.digest}) == 3
