"""Makes workers compile what they compile at first use, before anything is measured."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from deltaserve.step_sizes import step_sizes
from sglang_ext.bench.client import Arm, Client, Prompts
from sglang_ext.bench.samples import Sink

LENGTHS = step_sizes(8192)


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
