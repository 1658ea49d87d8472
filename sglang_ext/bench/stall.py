"""What a long prompt does to the requests that are decoding when it arrives, and what it waits.

In each repeat, for every arm in turn: streams of one context length decode alone for a moment; then
a prompt arrives by the arm's path. Gaps are per token and seen by the client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from sglang_ext.bench.client import Answer, Arm, Client, Prompts, Streams
from sglang_ext.bench.samples import Sample, Sink
from sglang_ext.bench.statistics import (
    median_interval,
    pooled_quantile_interval,
    quantile,
)

_AFTER_S = 0.2


@dataclass(frozen=True)
class Shape:
    """`decodes` streams with `context_tokens` each, one prompt of `prompt_tokens`."""

    decodes: int
    context_tokens: int
    prompt_tokens: int
    repeats: int
    base_s: float
    stream_tokens: int


async def measure(
    client: Client,
    arms: Sequence[Arm],
    prompts: Prompts,
    shape: Shape,
    sink: Sink,
    say: Callable[[str], None],
) -> None:
    """Writes a ``repeat`` for each arm and repeat; the first round warms up and is marked so."""
    for repeat in range(shape.repeats + 1):
        for arm in arms:
            say(f"stall: {arm.name}, {f'repeat {repeat}' if repeat else 'warm-up'}")
            await _once(client, arm, prompts, shape, repeat, sink)


async def _once(
    client: Client, arm: Arm, prompts: Prompts, shape: Shape, repeat: int, sink: Sink
) -> None:
    await client.flush_arm(arm)
    contexts = [prompts.make(shape.context_tokens) for _ in range(shape.decodes)]
    long_prompt = prompts.make(shape.prompt_tokens)
    streams = Streams(client, arm)
    try:
        await streams.start(contexts, shape.stream_tokens)
        steady_s = client.clock()
        await asyncio.sleep(shape.base_s)
        prompt = await client.ask(arm, long_prompt, 1)
        await asyncio.sleep(_AFTER_S)
        streams.check()
    finally:
        await streams.stop()
    before = gaps(streams.answers, steady_s, prompt.sent_s)
    during = gaps(streams.answers, prompt.sent_s, prompt.first_token_s)
    sink.write(
        "repeat",
        arm=arm.name,
        repeat=repeat,
        warm_up=repeat == 0,
        prompt_tokens=shape.prompt_tokens,
        decodes=shape.decodes,
        ttft_s=prompt.ttft_s,
        cached_tokens=prompt.cached_tokens,
        base_gaps_ms=[round(gap * 1e3, 3) for gap in before],
        gaps_ms=[round(gap * 1e3, 3) for gap in during],
    )


def gaps(answers: Sequence[Answer], from_s: float, to_s: float) -> list[float]:
    """Seconds a token between arrivals that overlap the time given, over all streams."""
    found = []
    for answer in answers:
        for (before_s, before), (after_s, after) in pairwise(answer.arrivals):
            if after_s > from_s and before_s < to_s:
                # Tokens that come together ended the same wait; the first of them waited for it.
                found.append(after_s - before_s)
                found.extend([0.0] * (after - before - 1))
    return found


def summary(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """A row for each arm: medians over repeats, and the p99 of all gaps, with intervals."""
    rows = []
    for arm in dict.fromkeys(s["arm"] for s in samples):
        repeats = [s for s in samples if s["arm"] == arm and not s["warm_up"]]
        if not repeats:
            continue
        rows.append(
            {
                "arm": arm,
                "repeats": len(repeats),
                "prompt_tokens": repeats[0]["prompt_tokens"],
                "decodes": repeats[0]["decodes"],
                "base_itl_p50_ms": median_interval(
                    [quantile(s["base_gaps_ms"], 0.5) for s in repeats]
                ),
                "itl_p50_ms": pooled_quantile_interval([s["gaps_ms"] for s in repeats], 0.5),
                "itl_p99_ms": pooled_quantile_interval([s["gaps_ms"] for s in repeats], 0.99),
                "worst_gap_ms": median_interval([max(s["gaps_ms"]) for s in repeats]),
                "ttft_ms": median_interval([s["ttft_s"] * 1e3 for s in repeats]),
            }
        )
    return rows
