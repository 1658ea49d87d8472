"""Makes workers compile what they compile at first use, before anything is measured.

SGLang's mixture-of-experts kernels are compiled for ranges of tokens a step, and for numbers of
tokens that 16 divides apart from others, each at the first such step: a second each on an H200 with
an empty Triton cache, in the middle of serving.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from sglang_ext.bench.client import Arm, Client, Prompts
from sglang_ext.bench.samples import Sink

_RANGES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
"""Tokens: SGLang's tuned configurations of these kernels (`E=128,N=768` for the H200) name them."""
LENGTHS = tuple(sorted({*_RANGES, *(tokens + 3 for tokens in _RANGES), 8192}))


async def measure(
    client: Client, arms: Sequence[Arm], prompts: Prompts, sink: Sink, say: Callable[[str], None]
) -> None:
    """Writes a ``prompt`` for each arm and length: the first time it was asked, and the second."""

    async def warm(arm: Arm) -> None:
        for length in LENGTHS:
            first_s, second_s = [
                (await client.ask(arm, prompts.make(length), 2)).ttft_s for _ in range(2)
            ]
            sink.write("prompt", arm=arm.name, tokens=length, first_s=first_s, second_s=second_s)
        await client.flush_arm(arm)
        say(f"warm: {arm.name}")

    async with asyncio.TaskGroup() as group:
        for arm in arms:
            group.create_task(warm(arm))
