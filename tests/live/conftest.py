"""Real engines for the live tests, started the way a user starts them."""

from __future__ import annotations

import os
import random
import socket
import urllib.request
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

from launch import Fleet, Worker
from launch.engines import Environment, environment_for

VOCABULARY = 1024
"""Of the tiny model; ids below 16 are left to special tokens."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.live)


def installed(engine: str) -> Environment:
    """The pinned environment of an engine for a CPU; where it is missing, the test is skipped.

    ``make test-live`` has installed them all and sets ``DELTASERVE_LIVE_REQUIRED``: there a missing
    one fails the test, so that continuous integration cannot pass by skipping an engine.
    """
    environment = environment_for(engine, "cpu")
    if not environment.installed:
        missing = f"not installed: deltaserve launch install {environment.name}"
        if os.environ.get("DELTASERVE_LIVE_REQUIRED"):
            pytest.fail(missing)
        pytest.skip(missing)
    return environment


class Generation:
    """The answer of `/generate`: the tokens, and what the engine says of the request."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.output_ids: list[int] = body["output_ids"]
        self.prompt_tokens: int = body["meta_info"]["prompt_tokens"]
        self.cached_tokens: int = body["meta_info"]["cached_tokens"]


def generate(url: str, input_ids: list[int], output_tokens: int, **fields: Any) -> Generation:
    """Asks an SGLang worker (or a router) for exactly `output_tokens` greedy tokens."""
    body = {
        "input_ids": input_ids,
        "sampling_params": {
            "max_new_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
        },
        **fields,
    }
    request = urllib.request.Request(
        f"{url}/generate", orjson.dumps(body), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60.0) as answer:
        return Generation(orjson.loads(answer.read()))


def cached_of(fleet: Fleet, prompt: list[int]) -> int:
    """Asks through the fleet's router; how much of the prompt the engine found in its cache."""
    assert fleet.router_url is not None
    if fleet.plan.engine.name == "sglang":
        return generate(fleet.router_url, prompt, 4).cached_tokens
    body = {"model": fleet.plan.topology.model, "prompt": prompt, "max_tokens": 4}
    request = urllib.request.Request(
        f"{fleet.router_url}/v1/completions",
        orjson.dumps(body),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60.0) as answer:
        usage = orjson.loads(answer.read())["usage"]
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def scraped(url: str, metric: str) -> float:
    """The sum of a metric on a ``/metrics`` page; `metric` as in ``name{label="value"}``."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30.0) as answer:
        return total_of(answer.read().decode(), metric)


def total_of(page: str, metric: str) -> float:
    """The same of a page that has been read."""
    name, _, label = metric.rstrip("}").partition("{")
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in page.splitlines()
        if line.startswith((f"{name}{{", f"{name} ")) and label in line
    )


def worker_of(fleet: Fleet, role: str) -> Worker:
    """The fleet's only worker of `role`."""
    (worker,) = [worker for worker in fleet.workers if worker.role == role]
    return worker


def processes_of(record: dict[str, Any]) -> list[psutil.Process]:
    """What still runs of the fleet that `record`, a ``fleet.json``, tells of."""
    sessions = {process["pid"] for process in record["processes"]}
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) in sessions and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
    return found


def check_ports_are_free(record: dict[str, Any]) -> None:
    """Fails where a port of that fleet is still held."""
    for process in record["processes"]:
        for port in process["ports"].values():
            with socket.socket() as probe:
                assert probe.connect_ex(("127.0.0.1", port)) != 0, f"port {port} is held"


def check_no_temporary_files(record: dict[str, Any]) -> None:
    """Fails where a folder for temporary files of that fleet's processes is still there."""
    started = [process for process in record["processes"] if not process["attached"]]
    folders = [Path(process["temporary_folder"]) for process in started]
    assert [folder for folder in folders if folder.exists()] == []


def generate_separated(
    fleet: Fleet, input_ids: list[int], output_tokens: int
) -> tuple[Generation, int]:
    """The same through the fleet's prefill and decode workers; also its bootstrap room."""
    room = uuid.uuid4().int >> 65
    (prefill,) = [process for process in fleet.plan.workers if process.role == "prefill"]
    bootstrap = {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": prefill.ports["bootstrap"],
        "bootstrap_room": room,
    }
    with ThreadPoolExecutor(2) as pool:
        halves = [
            pool.submit(generate, url, input_ids, output_tokens, **bootstrap)
            for url in (prefill.url, worker_of(fleet, "decode").url)
        ]
        halves[0].result()
        return halves[1].result(), room


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> Callable[[int], list[int]]:
    """Makes prompts of so many random tokens: each test its own, the same in every run."""
    numbers = random.Random(request.node.name)

    def make(tokens: int) -> list[int]:
        return [numbers.randrange(16, VOCABULARY) for _ in range(tokens)]

    return make
