"""Runs of an experiment at the same time, in runners of their own."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from deltaserve.errors import InputError
from eval import parallel
from eval.cli_options import Given
from eval.endpoint import Endpoint
from eval.experiment_files import load_experiment
from eval.parallel import run_parallel, shared_out
from eval.progress import Progress
from eval.runner import Summary
from eval.site import Site
from tests.eval.test_runner import FakeSite

RUNNER = (sys.executable, str(Path(__file__).with_name("fake_runner.py")))


def site(gpus: tuple[int, ...] = (), needed: int = 0, named: tuple[int, ...] = ()) -> Site:
    return replace(
        FakeSite().site(),
        gpus_needed=lambda _topology: needed,
        gpus_named=lambda _topology: named,
        gpus_free=lambda: gpus,
    )


def units(*workers: str) -> dict[str, Any]:
    return {f"u{at}": {"name": name} for at, name in enumerate(workers)}


@pytest.mark.parametrize(
    ("workers", "asked", "expected"),
    [
        ("one two one two two one", 2, ["u0 u2 u5", "u1 u3 u4"]),
        ("one two one three", 2, ["u0 u2", "u1 u3"]),
        ("one one one two two three", 2, ["u0 u1 u2", "u3 u4 u5"]),
        # More runners than kinds of workers: as many start a kind as its runs are worth.
        ("one one one one", 3, ["u0", "u1", "u2 u3"]),
        ("one one one one one one two two two", 3, ["u0 u1 u2", "u3 u4 u5", "u6 u7 u8"]),
        ("one two", 5, ["u0", "u1"]),
    ],
)
def test_units_that_want_the_same_workers_stay_together(
    workers: str, asked: int, expected: list[str]
) -> None:
    found = shared_out(units(*workers.split()), asked, site())
    assert [" ".join(share.units) for share in found] == expected


@pytest.mark.parametrize(
    ("needed", "asked", "gpus"),
    [(1, 4, [(2,), (3,), (5,)]), (1, 2, [(2,), (3,)]), (2, 4, [(2, 3)])],
)
def test_each_runner_has_gpus_of_its_own(
    needed: int, asked: int, gpus: list[tuple[int, ...]]
) -> None:
    found = shared_out(units(*"abcdef"), asked, site((2, 3, 5), needed))
    assert [tuple(share.gpus or ()) for share in found] == gpus
    assert sorted(unit for share in found for unit in share.units) == list(units(*"abcdef"))


@pytest.mark.parametrize(
    ("topology", "where", "told"),
    [
        ({"name": "t"}, site((), 1), "1 GPUs are needed, 0 are free"),
        ({"name": "t"}, site((0, 1), 1, (1,)), "u0 asks for GPU 1 by number; leave gpus out"),
        (Endpoint("http://127.0.0.1:1"), site(), "u0 is a server elsewhere"),
        (SimpleNamespace(base_port=31000), site(), "u0 has a base_port; leave it out"),
    ],
)
def test_what_cannot_run_beside_others_is_refused(topology: Any, where: Site, told: str) -> None:
    with pytest.raises(InputError, match=told):
        shared_out({"u0": topology}, 2, where)


@pytest.fixture
def given(tmp_path: Path, small_trace: Path, monkeypatch: pytest.MonkeyPatch) -> Given:
    monkeypatch.setattr(parallel, "DELTASERVE", RUNNER)
    path = tmp_path / "e.toml"
    arms = "".join(f'[[arms]]\nname = "{name}"\ntopology = "t-{name}"\n' for name in "ab")
    path.write_text(
        f'name = "e"\nrepeats = 2\n[trace]\npath = "{small_trace}"\n'
        '[[loads]]\nname = "x"\n[[loads]]\nname = "y"\nreplay = { time_scale = 2.0 }\n' + arms
    )
    return Given("run", str(path), path, tmp_path / "out", [], [], parallel=2)


def run(given: Given, where: Site) -> tuple[Summary, str]:
    said = io.StringIO()
    experiment, _ = load_experiment(given.experiment, list(given.overrides))
    with Progress(Console(file=said, width=200)) as progress:
        return run_parallel(experiment, given, site=where, progress=progress), said.getvalue()


def test_what_became_of_all_runs_is_said_together(given: Given) -> None:
    summary, said = run(given, site((0, 1), 1))
    assert summary == Summary(complete=8)
    lines = said.splitlines()
    for number, gpu in ((1, 0), (2, 1)):
        (share,) = [line for line in lines if line.endswith(f" on GPU {gpu}")]
        names = share.removeprefix(f"{number}: ").removesuffix(f" on GPU {gpu}").split(", ")
        assert f"{number}: {' '.join(names)} on {gpu}" in lines
        assert {name[0] for name in names} in ({"a"}, {"b"}), "those of one arm share its workers"
    assert (given.output / "experiment.json").is_file()


def test_runs_that_failed_are_named(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_RUNNER", "failed")
    summary, _ = run(given, site())
    assert (summary.complete, len(summary.failed)) == (6, 2)


def test_a_runner_that_ends_without_a_word_is_an_error(
    given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_RUNNER", "dies")
    with pytest.raises(InputError, match=r"^1: the runner of .* ended with status 2"):
        run(given, site())


def test_one_unit_needs_no_runner_of_its_own(given: Given) -> None:
    alone = replace(given, only=["a@x"])
    assert alone.command.endswith("--only a@x --parallel 2")
    summary, said = run(alone, site())
    assert summary == Summary(complete=2)
    assert (given.output / "a@x" / "r2" / "manifest.json").is_file()
    assert said.startswith("[1/2] a@x/r1")


def noted(folder: Path, what: str) -> list[Path]:
    """What both runners note there."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if len(found := sorted(folder.glob(f"{what}-*"))) == 2:
            time.sleep(0.1)  # the file is there before its text
            return found
        time.sleep(0.05)
    raise AssertionError(f"{len(list(folder.glob(f'{what}-*')))} of 2 runners: {what}")


def test_an_interruption_is_passed_on(
    given: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_RUNNER", "hangs")
    monkeypatch.setenv("FAKE_RUNNER_NOTES", str(tmp_path))

    def interrupt() -> None:
        noted(tmp_path, "hangs")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run(given, site())
    thread.join()
    assert [path.read_text() for path in noted(tmp_path, "ended")] == [str(int(signal.SIGINT))] * 2


def test_runners_end_with_the_process_that_started_them(given: Given, tmp_path: Path) -> None:
    """However that ends: here by kill -9."""
    environment = os.environ | {"FAKE_RUNNER": "hangs", "FAKE_RUNNER_NOTES": str(tmp_path)}
    code = (
        "from pathlib import Path; from eval import parallel; from eval.cli_options import Given; "
        f"from tests.eval.test_parallel import run, site; parallel.DELTASERVE = {RUNNER!r}; "
        f"file = Path({given.experiment!r}); "
        f"run(Given('run', str(file), file, Path({str(given.output)!r}), [], [], 2), site())"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment)
    noted(tmp_path, "hangs")
    parent.kill()
    parent.wait()
    assert [path.read_text() for path in noted(tmp_path, "ended")] == [str(int(signal.SIGTERM))] * 2
