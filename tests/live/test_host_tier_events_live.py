"""What a real engine's host tier holds, as the router knows it from the engine's events."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launch import fleet, load_topology
from tests.live.conftest import generate, installed
from tests.live.test_router_live import Publishing, get, router

PROMPT_TOKENS = 3000
POOL = ["max_total_tokens=10000", "context_tokens=8192", "host_kv_tokens=16000"]
"""Room for three prompts on the device and five in host memory, which holds copies of the three."""


@pytest.mark.timeout(600)
def test_what_is_left_in_the_host_tier_alone_is_believed_cached(
    prompt: Callable[[int], list[int]], tmp_path: Path
) -> None:
    installed("sglang")
    overrides = ["base_port=0", "router.kind=none", "kv_events=true"]
    with fleet(load_topology("laptop-sglang-1", [*overrides, *POOL]), tmp_path / "run") as running:
        prompts = [prompt(PROMPT_TOKENS) for _ in range(8)]
        with router(Publishing(running, "sglang").flags) as url:

            def ask(tokens: list[int]) -> tuple[int, int]:
                """Tokens that the router believed cached, and that the engine found."""
                found = generate(url, tokens, 2).cached_tokens
                (decision,) = get(f"{url}/decisions?limit=1")["decisions"]
                # Events are published after the step that they tell of.
                time.sleep(0.5)
                return decision["cached_tokens"].get("w", 0), found

            assert [ask(tokens) for tokens in prompts] == [(0, 0)] * 8
            # The device holds three, the host the last five: backwards, the rest comes from there.
            again = [ask(tokens) for tokens in reversed(prompts)]
            whole = PROMPT_TOKENS - 1
            assert again[:5] == [(whole, whole)] * 5
            assert all(believed == found for believed, found in again), again
