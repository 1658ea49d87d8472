"""launch against the real engines: their flags, one fleet of each kind, workers on a Ray cluster,
and an end by kill -9 that leaves nothing."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from launch import Fleet, FleetError, catalog, checking, fleet, load_topology, plan
from launch.engines import ENVIRONMENTS, install
from launch.http_calls import call
from tests.live.conftest import cached_of, generate_separated, installed, processes_of
from tests.processes import working_in

FAKE_ENGINE = Path(__file__).parent.parent / "launch" / "fake_engine.py"

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


@pytest.mark.parametrize("name", catalog())
def test_every_flag_of_a_shipped_topology_is_one_of_the_installed_engines(
    name: str, tmp_path: Path
) -> None:
    engine = load_topology(name).engine.name
    python = installed(engine).python
    # vLLM for a CPU has the same parser as vLLM for CUDA.
    topology = load_topology(name, [f"engine.python={python}", "base_port=0"])
    checking.check(plan(topology, tmp_path / "run"), gpus=False)


def decisions(run_dir: Path) -> list[dict[str, object]]:
    lines = (run_dir / "decisions.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == "decision"]


def check_the_router_knows_what_it_holds(running: Fleet, asked: list[int], source: str) -> None:
    """Asks a cold fleet twice; the router must have believed what the engine then found."""
    run_dir = running.plan.run_dir
    assert cached_of(running, asked) == 0
    for _ in range(20):  # events arrive a moment after the answer that made them
        second = cached_of(running, asked)
        last = decisions(run_dir)[-1]
        if second and last["prefix_source"] == source and last["cached_tokens"]:
            break
        time.sleep(0.2)
    assert second >= 500
    assert last["prefix_source"] == source
    held = last["cached_tokens"]
    assert isinstance(held, dict)
    assert max(held.values()) >= 500
    running.check()


# Colocated workers of both engines, with KV events: test_admission_live.py. Separated: below.
def test_an_elastic_fleet_answers_and_the_router_knows_what_it_holds(
    prompt: Callable[[int], list[int]], tmp_path: Path
) -> None:
    installed("sglang")
    overrides = ["kv_events=true", "warm_up=true", "base_port=0"]
    with fleet(load_topology("laptop-sglang-elastic", overrides), tmp_path / "run") as running:
        check_the_router_knows_what_it_holds(running, prompt(600), "events")
    record = json.loads((tmp_path / "run" / "fleet.json").read_text())
    assert processes_of(record) == []


def test_separated_workers_serve_their_router_and_one_that_another_fleet_started_and_outlive_it(
    prompt: Callable[[int], list[int]], tmp_path: Path
) -> None:
    separated = load_topology("laptop-sglang-pd", ["warm_up=true", "base_port=0"])
    asked = prompt(900)
    with fleet(separated, tmp_path / "workers") as workers:
        check_the_router_knows_what_it_holds(workers, asked[:600], "estimate")
        asked = asked[600:]
        overrides = ["base_port=0"]
        for number, worker in enumerate(workers.plan.workers):
            overrides.append(f'workers.{number}.urls=["{worker.url}"]')
        bootstrap = workers.plan.workers[0].ports["bootstrap"]
        overrides.append(f"workers.0.bootstrap_ports=[{bootstrap}]")
        with fleet(load_topology("laptop-sglang-pd", overrides), tmp_path / "front") as front:
            assert [worker.pid for worker in front.workers] == [None, None]
            assert cached_of(front, asked) == 0
            assert cached_of(front, asked) >= 250
            assert decisions(tmp_path / "front")[-1]["kind"] == "prefill_decode"
        workers.check()
        assert generate_separated(workers, asked, 4)[0].cached_tokens >= 250
    record = json.loads((tmp_path / "workers" / "fleet.json").read_text())
    assert processes_of(record) == []


def test_stock_routers_serve_in_front_of_the_same_workers(
    prompt: Callable[[int], list[int]], tmp_path: Path
) -> None:
    alone = load_topology("laptop-sglang", ["router.kind=none", "base_port=0", "workers.0.count=1"])
    with fleet(alone, tmp_path / "workers") as workers:
        for kind in ("sglang-router", "smg"):
            install(kind, print)
            front = load_topology(
                "laptop-sglang",
                [
                    "base_port=0",
                    f'workers.0={{ urls = ["{workers.workers[0].url}"] }}',
                    f"router.kind={kind}",
                    "router.policy=cache_aware",
                ],
            )
            with fleet(front, tmp_path / kind) as running:
                assert cached_of(running, asked := prompt(300)) == 0
                assert cached_of(running, asked) >= 250


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[str]:
    """A Ray cluster of two nodes on this machine; its address."""
    install("ray", print)
    ray = ENVIRONMENTS["ray"].folder / "bin" / "ray"
    # Short: Ray makes sockets in it, whose names have a limit.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    common = ["--num-cpus=2", "--disable-usage-stats", "--block"]
    head = ["--head", f"--port={address.rsplit(':', 1)[1]}", "--include-dashboard=false"]
    started = []
    try:
        for role in ([*head, f"--temp-dir={folder}"], [f"--address={address}"]):
            command = [str(ray), "start", *role, *common]
            log = Path(folder, f"node-{len(started)}.log")
            with log.open("wb") as output:
                started.append(
                    subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
                )
            deadline_s = time.monotonic() + 90
            while "--block" not in log.read_text():
                assert started[-1].poll() is None, log.read_text()
                assert time.monotonic() < deadline_s, log.read_text()
                time.sleep(0.2)
        yield address
    finally:
        for node in reversed(started):
            tree = psutil.Process(node.pid).children(recursive=True)
            node.terminate()
            node.wait(30)
            for process in tree:
                if process.is_running():
                    process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def check_for(seconds: float, running: Fleet) -> None:
    """Looks after a fleet for so long."""
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s:
        running.check()
        time.sleep(0.1)


def wait_until_none_works_in(folder: Path) -> None:
    deadline_s = time.monotonic() + 30
    while left := working_in(folder):
        assert time.monotonic() < deadline_s, left
        time.sleep(0.1)


def test_real_workers_on_a_ray_cluster_serve_behind_the_router_and_leave_nothing(
    ray_cluster: str, prompt: Callable[[int], list[int]], tmp_path: Path
) -> None:
    placed = ["placement.kind=ray", f"placement.address={ray_cluster}", "base_port=0"]
    run_dir = tmp_path / "run"
    with fleet(load_topology("laptop-sglang-pd", placed), run_dir) as running:
        nodes = {worker.launcher[4] for worker in running.plan.workers}
        assert len(nodes) == 2
        asked = prompt(300)
        assert cached_of(running, asked) == 0
        assert cached_of(running, asked) >= 250
        assert decisions(run_dir)[-1]["kind"] == "prefill_decode"
        for worker in running.workers:
            assert "Uvicorn running" in worker.log.read_text()
        running.check()
    assert working_in(run_dir) == []


@pytest.fixture
def fake_python(tmp_path: Path) -> Path:
    python = tmp_path / "engine-python"
    python.write_text(f"#!{sys.executable}\n{FAKE_ENGINE.read_text()}")
    python.chmod(0o755)
    return python


def fake_overrides(ray_cluster: str, fake_python: Path) -> list[str]:
    return [
        "placement.kind=ray", f"placement.address={ray_cluster}", f"engine.python={fake_python}",
        "router.kind=none", "base_port=0", "workers.0.count=1",
        'workers.0.environment={ FAKE = "grandchildren" }', "ready_timeout_s=60",
    ]  # fmt: skip


def test_the_death_of_a_placed_worker_is_noticed_and_the_rest_of_it_is_ended(
    ray_cluster: str, fake_python: Path, tmp_path: Path
) -> None:
    topology = load_topology("laptop-sglang", fake_overrides(ray_cluster, fake_python))
    with fleet(topology, tmp_path / "run") as running:
        (engine,) = [p for p in working_in(tmp_path / "run") if p.name() == fake_python.name]
        engine.kill()
        with pytest.raises(FleetError, match=r"colocated-0 died \(signal 9\)(.|\n)*fake engine"):
            check_for(30.0, running)
    wait_until_none_works_in(tmp_path / "run")


def test_kill_9_of_the_supervisor_leaves_nothing_on_the_cluster(
    ray_cluster: str, fake_python: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    argv = [sys.executable, "-m", "deltaserve", "launch", "up", "laptop-sglang"]
    for override in fake_overrides(ray_cluster, fake_python):
        argv += ["--set", override]
    done = subprocess.run(
        [*argv, "--run-dir", str(run_dir), "--detach"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(working_in(run_dir)) >= 4
    os.kill(json.loads((run_dir / "fleet.json").read_text())["supervisor"]["pid"], signal.SIGKILL)
    wait_until_none_works_in(run_dir)


@pytest.mark.parametrize("paced", [False, True])
def test_the_host_tier_on_a_cpu_gives_back_what_was_evicted_until_it_is_flushed(
    paced: bool, tmp_path: Path
) -> None:
    overrides = ["base_port=0", "router.kind=none", f"paced={json.dumps(paced)}"]
    pools = ["max_total_tokens=10000", "context_tokens=8192", "host_kv_tokens=40000"]
    prompts = [random.Random(number).choices(range(16, 1000), k=3000) for number in range(6)]
    with fleet(load_topology("laptop-sglang-1", [*overrides, *pools]), tmp_path / "run") as running:

        def ask(prompt: list[int]) -> tuple[list[int], dict[str, int]]:
            sampling = {"max_new_tokens": 8, "ignore_eos": True, "temperature": 0}
            body = json.dumps({"input_ids": prompt, "sampling_params": sampling}).encode()
            url = f"{running.workers[0].url}/generate"
            status, answer = call("POST", url, body, timeout_s=60.0)
            assert status == 200, answer
            told = json.loads(answer)
            return told["output_ids"], told["meta_info"]["cached_tokens_details"] or {}

        cold = [ask(prompt) for prompt in prompts]
        # The pool holds three of them, so each has gone when its turn comes again.
        warm = [ask(prompt) for prompt in prompts]
        assert not any(cached for _, cached in cold)
        assert [cached for _, cached in warm] == [{"device": 0, "host": 2999}] * 6
        assert [output for output, _ in warm] == [output for output, _ in cold]
        running.flush_caches()
        assert ask(prompts[0]) == cold[0]
