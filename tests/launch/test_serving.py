"""A fleet that is kept serving starts what dies again, after pauses that grow."""

from __future__ import annotations

import errno
import json
import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch import Fleet, fleet, fleets, serving
from launch.serving import KeepServing
from launch.supervised import Supervised
from tests.processes import wait_until, working_in

from .conftest import Fakes


class Failing:
    """Three processes: `a` never lives, `b` lives when it is started again, `c` always."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.dead = {"a": "a died", "b": "b died"}
        self.restarts: list[tuple[str, float]] = []

    def died(self) -> dict[str, str]:
        return dict(self.dead)

    def restart(self, process_id: str) -> None:
        self.restarts.append((process_id, self.now_s))
        if process_id == "b":
            del self.dead["b"]

    def is_ready_again(self, process_id: str) -> bool:
        return process_id == "b"

    def of(self, process_id: str) -> list[float]:
        return [at_s for name, at_s in self.restarts if name == process_id]


def watched(failing: Failing, told: list[str], seconds: int) -> KeepServing:
    keeper = KeepServing(failing, told.append, lambda: failing.now_s)
    look_on(keeper, failing, seconds)
    return keeper


def look_on(keeper: KeepServing, failing: Failing, seconds: int) -> None:
    for _ in range(2 * seconds):
        keeper.look()
        failing.now_s += 0.5


def test_pauses_double_up_to_the_longest_and_one_that_lives_is_left_alone() -> None:
    failing, told = Failing(), []
    watched(failing, told, 400)
    pauses = [after - before for before, after in pairwise([0.0, *failing.of("a")])]
    assert pauses[0] == 1.0
    assert pauses == sorted(pauses)
    assert serving.LONGEST_PAUSE_S <= pauses[-1] <= serving.LONGEST_PAUSE_S + 1
    assert len(failing.of("b")) == 1
    assert "b: serving again after 1 restarts" in told
    assert not failing.of("c")


def test_one_that_has_served_for_long_starts_with_the_first_pause_again() -> None:
    failing, told = Failing(), []
    keeper = watched(failing, told, 10)
    died_soon_s = failing.now_s
    failing.dead["b"] = "b died"
    look_on(keeper, failing, 10)
    assert failing.of("b")[1] - died_soon_s == 2.0
    look_on(keeper, failing, int(serving.FORGIVEN_AFTER_S))
    died_late_s = failing.now_s
    failing.dead["b"] = "b died"
    look_on(keeper, failing, 10)
    assert failing.of("b")[2] - died_late_s == 1.0


def engine_of(running: Fleet, worker: int) -> psutil.Process:
    below = psutil.Process(running.workers[worker].pid).children()
    (engine,) = [process for process in below if "--port" in process.cmdline()]
    return engine


def test_a_worker_that_is_killed_serves_again_at_its_address(fakes: Fakes, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    told: list[str] = []
    overrides = ("sample_interval_s=0.05",)
    with fleet(fakes("serve", "grandchildren", overrides=overrides), run_dir) as running:
        keeper = KeepServing(running, told.append, time.monotonic)
        keeper.look()
        url, first_pid = running.workers[1].url, running.workers[1].pid
        engine_of(running, 1).kill()

        def is_back() -> bool:
            keeper.look()
            return any("serving again" in line for line in told)

        wait_until(is_back)
        assert told[0] == "colocated-1 died (signal 9); starting it again in 1 s"
        assert (running.workers[1].url, running.workers[1].pid != first_pid) == (url, True)
        assert engine_of(running, 1).is_running()
        assert running.died() == {}
        record = json.loads((run_dir / "fleet.json").read_text())
        assert record["state"] == "ready"
        assert [p["state"] for p in record["processes"]] == ["ready", "ready"]
        assert record["processes"][1]["reason"] == "colocated-1 died (signal 9)"
        assert record["processes"][1]["pid"] == running.workers[1].pid
        rows = (run_dir / "processes.csv").read_text().count("colocated-1,")
        wait_until(lambda: (run_dir / "processes.csv").read_text().count("colocated-1,") > rows)
    assert working_in(run_dir) == []


def test_the_log_of_what_served_outlives_starts_that_fail(fakes: Fakes, tmp_path: Path) -> None:
    """A worker crashes; three starts end before they are ready, and the fourth serves. When that
    one crashes its log is the one to keep."""
    with fleet(fakes("serve"), tmp_path / "run") as running:
        [worker] = running.workers
        with worker.log.open("a") as log:
            log.write("the cause of the crash\n")

        def crash() -> None:
            engine_of(running, 0).kill()
            wait_until(lambda: worker.id in running.died())

        def serves() -> bool:
            running.died()
            return running.is_ready_again(worker.id)

        crash()
        before = worker.log.with_name(f"{worker.log.name}.1")
        for _ in range(3):
            running.restart(worker.id)
            assert "the cause of the crash" in before.read_text()
            wait_until(lambda: "fake engine" in worker.log.read_text())
            engine_of(running, 0).kill()
            wait_until(lambda: worker.id in running.died())
        running.restart(worker.id)
        wait_until(serves)
        crash()
        running.restart(worker.id)
        assert "the cause of the crash" not in before.read_text()


@pytest.mark.parametrize(("overrides", "calls"), [((), 1), (("freeze_gc=false",), 0)])
def test_a_worker_that_serves_again_is_frozen_as_at_the_fleets_start(
    fakes: Fakes, tmp_path: Path, overrides: tuple[str, ...], calls: int
) -> None:
    told: list[str] = []
    with fleet(fakes("serve", "serve", overrides=overrides), tmp_path / "run") as running:
        keeper = KeepServing(running, told.append, time.monotonic)
        engine_of(running, 0).kill()

        def is_back() -> bool:
            keeper.look()
            return any("serving again" in line for line in told)

        wait_until(is_back)
        # The log of each has begun anew with its process; the other one is not asked again.
        for worker in running.workers:
            assert worker.log.read_text().count("asked /freeze_gc") == calls, worker.id


def test_workers_are_not_asked_again_when_the_router_serves_again(
    fakes: Fakes, tmp_path: Path
) -> None:
    told: list[str] = []
    topology = fakes("serve", overrides=("router.kind=deltaserve",))
    with fleet(topology, tmp_path / "run", told.append) as running:
        keeper = KeepServing(running, told.append, time.monotonic)
        (router,) = [p for p in working_in(tmp_path / "run") if "--config" in p.cmdline()[:6]]
        router.kill()

        def is_back() -> bool:
            keeper.look()
            return any("router: serving again" in line for line in told)

        wait_until(is_back)
        assert running.workers[0].log.read_text().count("asked /freeze_gc") == 1
    assert not any("/freeze_gc" in line for line in told)


def test_one_that_cannot_be_started_for_want_of_memory_is_tried_again(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    with fleet(fakes("serve"), tmp_path / "run", told.append) as running:
        keeper = KeepServing(running, told.append, time.monotonic)
        engine_of(running, 0).kill()
        refusals = [OSError(errno.ENOMEM, "Cannot allocate memory")]

        def started(*arguments: Any, **more: Any) -> Supervised:
            if refusals:
                raise refusals.pop()
            return Supervised(*arguments, **more)

        monkeypatch.setattr(fleets, "Supervised", started)

        def is_back() -> bool:
            keeper.look()
            return "colocated-0: serving again after 2 restarts" in told

        wait_until(is_back)
        assert any("colocated-0: cannot be started: Cannot allocate" in line for line in told)
        assert running.died() == {}


def test_one_that_is_not_ready_in_time_is_ended_and_counts_as_dead(
    fakes: Fakes, tmp_path: Path
) -> None:
    with fleet(fakes("serve"), tmp_path / "run") as running:
        os.kill(running.workers[0].pid or 0, 9)
        wait_until(lambda: bool(running.died()))
        object.__setattr__(running.plan.topology, "ready_timeout_s", 0.0)
        running.restart("colocated-0")
        wait_until(lambda: running.is_ready_again("colocated-0") or bool(running.died()))
        assert "colocated-0" in running.died()
