"""What the router believes a worker holds, beside what real SGLang reports as cached."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from launch import Fleet, fleet, load_topology
from tests.live.conftest import generate, worker_of

Prompt = Callable[[int], list[int]]

TOPOLOGY = """
description = "One colocated worker that publishes KV events, with a cache that overflows"
device = "cpu"
model = "tiny-qwen3-moe"
context_tokens = 16384
max_total_tokens = 6000
chunk_tokens = 1024
base_port = 0
flags = ["--max-running-requests", "16", "--kv-events-config", '{kv_events}']

[engine]
name = "sglang"

[[workers]]
role = "colocated"

[router]
kind = "none"
"""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30.0) as answer:
        return json.loads(answer.read())


class Publishing:
    """A running worker, and where it publishes."""

    def __init__(self, running: Fleet, events: str, replay: str) -> None:
        self.url = worker_of(running, "colocated").url
        self.flags = f"{self.url},id=w,page_size=1,kv_events={events},kv_events_replay={replay}"


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Publishing]:
    folder = tmp_path_factory.mktemp("kv-events")
    events, replay = free_port(), free_port()
    publisher = {
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://127.0.0.1:{replay}",
    }
    path = folder / "sglang-kv-events.toml"
    path.write_text(TOPOLOGY.replace("{kv_events}", json.dumps(publisher)))
    with fleet(load_topology(path), folder, on_progress=print) as running:
        yield Publishing(running, f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}")


@contextmanager
def router(worker: str) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "deltaserve", "route", "--port", str(port)]
    process = subprocess.Popen([*command, "--worker", worker, "--policy", "unified"])
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(200):
            try:
                urllib.request.urlopen(f"{url}/readyz", timeout=5.0)
                break
            except OSError:
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(30)


class Turn(NamedTuple):
    """Cached tokens of one request: believed, reported, and sent before in the session."""

    believed: int
    reported: int
    sent_before: int


def replay(url: str, prompt: Prompt, settle_s: float) -> list[Turn]:
    """Sessions that grow in turns, in random order; together more than the cache holds."""
    numbers = random.Random(3)
    system = prompt(150)
    sessions = [system + prompt(numbers.randrange(200, 700)) for _ in range(8)]
    sent = [0] * len(sessions)
    seen = []
    for _ in range(40):
        which = numbers.randrange(len(sessions))
        answer = generate(url, sessions[which], 4)
        believed = get(f"{url}/decisions?limit=1")["decisions"][0]["cached_tokens"].get("w", 0)
        seen.append(Turn(believed, answer.cached_tokens, sent[which]))
        sent[which] = len(sessions[which])
        sessions[which] = sessions[which] + answer.output_ids + prompt(numbers.randrange(20, 200))
        time.sleep(settle_s)
    return seen


@pytest.mark.timeout(600)
def test_with_kv_events_the_router_knows_what_sglang_will_find_cached_to_the_token(
    worker: Publishing, prompt: Prompt
) -> None:
    # What was there before the router came: it has to ask for a replay.
    early = prompt(500)
    generate(worker.url, early, 4)
    with router(worker.flags) as url:
        time.sleep(2.0)
        answer = generate(url, early, 4)
        (decision,) = get(f"{url}/decisions?limit=1")["decisions"]
        assert decision["prefix_source"] == "events"
        assert decision["cached_tokens"]["w"] == answer.cached_tokens == len(early) - 1
        seen = replay(url, prompt, settle_s=0.5)
    assert [turn.believed for turn in seen] == [turn.reported for turn in seen]
    assert any(turn.reported >= turn.sent_before > 0 for turn in seen), "a hit"
    assert any(turn.reported < turn.sent_before for turn in seen), "an eviction"


@pytest.mark.timeout(600)
def test_without_events_the_error_of_the_estimate_is_measured(
    worker: Publishing, prompt: Prompt
) -> None:
    with router(f"{worker.url},id=w") as url:
        seen = replay(url, prompt, settle_s=0.0)
    errors = [abs(turn.believed - turn.reported) for turn in seen]
    total = sum(turn.reported for turn in seen)
    print(f"estimate: {sum(errors)} tokens off of {total} reported, at most {max(errors)} at once")
    assert sum(errors) < total
