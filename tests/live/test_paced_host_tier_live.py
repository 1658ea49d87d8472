"""A paced worker with a host tier: short turns on what it holds go along with a long prompt."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launch import fleet, load_topology
from tests.live.conftest import Generation, generate, installed, worker_of

OVERRIDES = [
    "base_port=0",
    "router.kind=none",
    "paced=true",
    "max_total_tokens=14000",
    "context_tokens=8192",
    "host_kv_tokens=32000",
    'environment.DELTASERVE_PACED_TARGET_ITL_MS="600"',
    "chunk_tokens=1024",
]
"""Room for four of the prompts that fill the device; the host tier holds all of the test."""


@pytest.mark.alone
@pytest.mark.timeout(600)
def test_a_short_turn_whose_prefix_is_in_host_memory_does_not_wait_for_a_long_prompt(
    prompt: Callable[[int], list[int]], tmp_path: Path
) -> None:
    installed("sglang")
    topology = load_topology("laptop-sglang-1", OVERRIDES)
    with fleet(topology, tmp_path / "run") as running:
        url = worker_of(running, "colocated").url

        def ask(tokens: list[int], output_tokens: int) -> tuple[Generation, float]:
            answer = generate(url, tokens, output_tokens)
            return answer, time.monotonic()

        conversation = prompt(2000)
        ask(conversation, 2)
        for _ in range(5):
            ask(prompt(3000), 2)
        with ThreadPoolExecutor(3) as pool:
            decode = pool.submit(ask, prompt(40), 1200)
            time.sleep(0.5)
            long = pool.submit(ask, prompt(7000), 2)
            time.sleep(0.1)
            asked_s = time.monotonic()
            short, short_ended_s = ask(conversation + prompt(50), 1)
            assert not decode.done(), "the long prompt was not paced"
            _, long_ended_s = long.result()
            decode.result()
        assert short.cached_tokens == 2000, "it came from the host tier"
        assert short_ended_s - asked_s < 0.7 * (long_ended_s - asked_s)
