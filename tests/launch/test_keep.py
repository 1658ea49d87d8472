"""Workers are kept while routers come and go, and are emptied in between."""

from __future__ import annotations

import csv
import os
import signal
import time
import tomllib
from pathlib import Path

import pytest

from launch import Fleet, FleetError, KeptWorkers, fleets, gpus, guard, hardware, sampling
from launch.hardware import GpuSample
from launch.keep import _Recording
from launch.topology import Topology
from launch.topology_files import load_topology
from tests.processes import wait_until, working_in

from .conftest import Fakes


def routed(topology: Topology, policy: str = "unified") -> Topology:
    router = topology.router.model_copy(update={"kind": "deltaserve", "policy": policy})
    return topology.model_copy(update={"router": router})


def test_the_same_workers_serve_behind_one_router_after_the_other(
    fakes: Fakes, tmp_path: Path
) -> None:
    kept = KeptWorkers(tmp_path / "workers")
    pids = []
    for number, policy in enumerate(["unified", "least_requests"]):
        run_dir = tmp_path / f"run{number}"
        with kept.fleet(routed(fakes("serve", "serve"), policy), run_dir) as running:
            pids.append([worker.pid for worker in running.workers])
            assert running.engine_versions["sglang"] == "0.5.23"
            running.check()
        config = tomllib.loads((run_dir / "router.toml").read_text())
        assert config["policy"] == policy
        assert [worker["url"] for worker in config["workers"]]
        assert working_in(run_dir) == []
        assert (run_dir / "processes.csv").read_text().count("unix_s") == 1
    assert pids[0] == pids[1]
    assert None not in pids[0]
    log = (tmp_path / "workers" / "w1" / "logs" / "colocated-0.log").read_text()
    assert log.count("asked /flush_cache") == 2
    kept.close()
    assert working_in(tmp_path / "workers") == []


def test_workers_that_would_be_started_otherwise_are_started_anew(
    fakes: Fakes, tmp_path: Path
) -> None:
    kept = KeptWorkers(tmp_path / "workers")
    with kept.fleet(routed(fakes("serve")), tmp_path / "a") as running:
        first = running.workers[0].pid
    with kept.fleet(
        routed(fakes("serve", overrides=("max_total_tokens=4096",))), tmp_path / "b"
    ) as running:
        assert running.workers[0].pid != first
    kept.close()


def has_died(running: Fleet) -> bool:
    try:
        running.check()
    except FleetError:
        return True
    return False


def test_a_kept_worker_that_died_is_noticed_and_replaced(fakes: Fakes, tmp_path: Path) -> None:
    kept = KeptWorkers(tmp_path / "workers")
    pids = []

    def kill_one() -> None:
        with kept.fleet(routed(fakes("serve")), tmp_path / "a") as running:
            pid = running.workers[0].pid
            assert pid is not None
            pids.append(pid)
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: has_died(running))
            running.check()

    with pytest.raises(FleetError, match="colocated-0 died"):
        kill_one()
    with kept.fleet(routed(fakes("serve")), tmp_path / "b") as running:
        assert running.workers[0].pid not in pids
        running.check()
    kept.close()


def test_a_router_expects_of_kept_workers_what_it_would_of_its_own(
    fake_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = [GpuSample(0, "NVIDIA H200", 0, 0, 140 * 2**30, 75.0, 0, 0)]
    for module in (hardware, gpus, fleets, sampling):
        monkeypatch.setattr(module, "sample_gpus", lambda: there)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    overrides = [f"engine.python={fake_python}", "base_port=0", "warm_up=false"]
    topology = load_topology("sglang:1", overrides)
    kept = KeptWorkers(tmp_path / "workers")
    with fleets.fleet(topology, tmp_path / "a"):
        pass
    with kept.fleet(topology, tmp_path / "b"):
        pass
    kept.close()
    (alone,), (behind,) = (
        tomllib.loads((tmp_path / name / "router.toml").read_text())["workers"] for name in "ab"
    )
    assert alone["prefill_tokens_per_s"] == 65000.0
    assert behind.keys() == alone.keys()
    assert behind["prefill_tokens_per_s"] == alone["prefill_tokens_per_s"]


def test_a_router_finds_the_bootstrap_of_kept_and_attached_workers_of_mooncake(
    fake_python: Path, tmp_path: Path
) -> None:
    overrides = [f"engine.python={fake_python}", "base_port=0", "transfer_backend=mooncake"]
    topology = load_topology("laptop-vllm-pd", overrides)
    kept = KeptWorkers(tmp_path / "workers")
    with kept.fleet(topology, tmp_path / "a") as running:
        ports = [process.ports["bootstrap"] for process in running.plan.workers]
    kept.close()
    workers = tomllib.loads((tmp_path / "a" / "router.toml").read_text())["workers"]
    assert [worker["bootstrap_port"] for worker in workers] == ports


def test_samples_of_workers_and_router_stay_whole_rows(fakes: Fakes, tmp_path: Path) -> None:
    kept = KeptWorkers(tmp_path / "workers")
    topology = routed(fakes("serve", overrides=("sample_interval_s=0.001",)))
    for number in range(3):
        with kept.fleet(topology, tmp_path / f"{number}"):
            time.sleep(0.5)
        with (tmp_path / f"{number}" / "processes.csv").open(newline="") as file:
            rows = list(csv.reader(file))
        assert rows[0] == list(sampling.PROCESS_COLUMNS)
        assert {len(row) for row in rows} == {len(rows[0])}
        assert {row[1] for row in rows[1:]} == {"router", "colocated-0"}
        for row in rows[1:]:
            assert [float(cell) for cell in (row[0], *row[2:])]
    kept.close()


@pytest.mark.parametrize("before", [None, "", "id,rss\n", "id,rss\na,1\n"])
def test_a_table_that_was_begun_at_any_time_is_copied_with_one_header(
    tmp_path: Path, before: str | None
) -> None:
    source, copy = tmp_path / "workers", tmp_path / "run"
    source.mkdir()
    table = source / "processes.csv"
    if before is not None:
        table.write_text(before)
    recording = _Recording(source)
    table.write_text((before or "id,rss\n") + "b,2\n")
    recording.copy_to(copy)
    recording.close()
    assert (copy / "processes.csv").read_text() == "id,rss\nb,2\n"


@pytest.mark.parametrize("rolls", [0, 1, 2])
@pytest.mark.parametrize("had_older", [False, True])
@pytest.mark.parametrize(("name", "head"), [("processes.csv", "id\n"), ("steps/w-7.jsonl", "")])
def test_a_bounded_file_that_rolls_over_meanwhile_is_copied_whole_and_nothing_before(
    tmp_path: Path, name: str, head: str, had_older: bool, rolls: int
) -> None:
    source, copy = tmp_path / "workers", tmp_path / "run"
    path = source / name
    path.parent.mkdir(parents=True)

    def begin_anew() -> None:
        path.replace(guard.older_log(str(path)))
        path.write_text(head)

    def write(line: str) -> None:
        with path.open("a") as file:
            file.write(f"{line}\n")

    path.write_text(head)
    write("a line of the run before, longer than all that follow")
    if had_older:
        begin_anew()
        write("another line of the run before, longer than all that follow")
    recording = _Recording(source)
    write("0")
    for number in range(rolls):
        begin_anew()
        write(f"{number + 1}")
    recording.copy_to(copy)
    recording.close()
    assert (copy / name).read_text() == head + "".join(f"{n}\n" for n in range(rolls + 1))
    assert [path for path in copy.rglob("*") if path.is_file()] == [copy / name]


def test_what_was_recorded_meanwhile_is_copied_and_nothing_before(
    fakes: Fakes, tmp_path: Path
) -> None:
    kept = KeptWorkers(tmp_path / "workers")
    with kept.fleet(routed(fakes("serve")), tmp_path / "a"):
        steps = tmp_path / "workers" / "w1" / "steps"
        steps.mkdir(exist_ok=True)
        (steps / "colocated-0.jsonl").write_text('{"step": 1}\n')
    with (
        kept.fleet(routed(fakes("serve")), tmp_path / "b"),
        (steps / "colocated-0.jsonl").open("a") as file,
    ):
        file.write('{"step": 2}\n')
    kept.close()
    assert (tmp_path / "a" / "steps" / "colocated-0.jsonl").read_text() == '{"step": 1}\n'
    assert (tmp_path / "b" / "steps" / "colocated-0.jsonl").read_text() == '{"step": 2}\n'
