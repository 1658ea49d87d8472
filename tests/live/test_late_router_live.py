"""A router that comes to an engine that has been up for long, and what that one replays for it."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import urllib.request
from pathlib import Path

import pytest

from launch import KeptWorkers
from launch.topology_files import load_topology
from tests.live.conftest import cached_of, installed
from tests.live.test_router_live import free_port, get, router
from tests.router_policies.conftest import running_worker

BATCHES, TOKENS = 3000, 1024
"""Three times what a replay socket queues; batches as large as a prefill's chunk makes them."""

# The engine's own publisher, which keeps its last 10,000 batches. Batch n is a prompt that begins
# with token n.
PUBLISHER = """
import importlib, sys
module, events, replay = sys.argv[1:4]
batches, tokens = map(int, sys.argv[4:])
kv = importlib.import_module(module)
endpoints = {"endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}"}
publisher = kv.ZmqEventPublisher(0, **endpoints)
fields = {"parent_block_hash": None, "block_size": 1, "lora_id": None}
fields |= {"lora_name": None, "medium": "GPU"}
fields = {name: fields[name] for name in kv.BlockStored.__struct_fields__ if name in fields}
for n in range(batches):
    hashes = list(range(n * tokens + 1, (n + 1) * tokens + 1))
    stored = kv.BlockStored(block_hashes=hashes, token_ids=[n] + [1] * (tokens - 1), **fields)
    publisher.publish(kv.KVEventBatch(ts=0.0, events=[stored]))
while len(publisher._buffer) < batches:
    pass
print("published", flush=True)
sys.stdin.read()
"""
SGLANG, VLLM = "sglang.srt.disaggregation.kv_events", "vllm.distributed.kv_events"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("engine", "module"), [("sglang", SGLANG), ("vllm", VLLM)])
def test_all_that_was_published_before_it_came_is_known(engine: str, module: str) -> None:
    python = installed(engine).python
    events, replay = free_port(), free_port()
    numbers = [str(number) for number in (events, replay, BATCHES, TOKENS)]
    command = [str(python), "-c", PUBLISHER, module, *numbers]
    piped = subprocess.PIPE
    with subprocess.Popen(command, stdin=piped, stdout=piped, text=True) as publisher:
        assert publisher.stdout is not None
        lines = iter(publisher.stdout.readline, "")
        assert "published\n" in lines
        asyncio.run(_comes_late(events, replay))
        publisher.communicate()


async def _comes_late(events: int, replay: int) -> None:
    async with running_worker() as worker:
        flags = f"{worker.url},id=w,kv_events=tcp://127.0.0.1:{events}"
        flags += f",kv_events_replay=tcp://127.0.0.1:{replay},prefix_cache=false"
        await asyncio.to_thread(_knows_all, flags)


def _knows_all(flags: str) -> None:
    with router(flags) as url:

        def believed(batch: int) -> int:
            # The mock worker's streams do not say what was cached, which would correct the router.
            body = json.dumps({"input_ids": [batch] + [1] * TOKENS, "stream": True}).encode()
            json_type = {"content-type": "application/json"}
            request = urllib.request.Request(f"{url}/generate", body, json_type)
            with urllib.request.urlopen(request, timeout=30.0) as answer:
                answer.read()
            (decision,) = get(f"{url}/decisions?limit=1")["decisions"]
            return int(decision["cached_tokens"].get("w", 0))

        # It is ready once it has read all of them, in several answers of the replay socket.
        assert believed(BATCHES - 1) == TOKENS
        unknown = [batch for batch in range(0, BATCHES, 100) if believed(batch) < TOKENS]
        assert unknown == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_of_workers_whose_caches_were_emptied_it_believes_nothing(
    engine: str, tmp_path: Path
) -> None:
    installed(engine)
    topology = load_topology(f"laptop-{engine}-1", ["base_port=0", "kv_events=true"])
    kept = KeptWorkers(tmp_path / "workers")
    prompt = random.Random(1).choices(range(16, 1000), k=600)

    def believed_and_found(run: str) -> list[tuple[int, int]]:
        """Of the prompt, asked twice of a router of its own."""
        told = []
        with kept.fleet(topology, tmp_path / run) as running:
            for _ in range(2):
                found = cached_of(running, prompt)
                (decision,) = get(f"{running.router_url}/decisions?limit=1")["decisions"]
                told.append((sum(decision["cached_tokens"].values()), found))
        return told

    try:
        first, second = believed_and_found("first"), believed_and_found("second")
    finally:
        kept.close()
    for (believed, found), (_, again) in (first, second):
        assert (believed, found) == (0, 0)
        assert again > 500
