"""What a decode step costs as the cache fills: scheduler work that grows with cached blocks.

Unique prompts of one shape arrive at a constant rate of concurrency until the cache has filled, so
that batch and context stay alike while only the cache grows. SGLang's own step telemetry gives the
duration of decode-only steps; an engine without it is seen from the client, by the time between
tokens. The slope is that of Theil and Sen over the medians of stretches of time, so that pauses of
the machine do not bend it; its interval is a bootstrap over those stretches, since neighbouring
steps are not independent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np
import pandas as pd

from eval.document import Figure, Section
from eval.formatting import Entry, number
from eval.micro.driver import Bench, answered, driver
from eval.plot import PALETTE, Axis, Chart, Dots, Line
from eval.records import step_table
from eval.stats import Estimate, interval
from eval.tables import Table
from replay.results import Result

SEEN_BEFORE = (
    "Seen before, per 1,000 blocks of 16 tokens: +81 to +95 µs a step with Mooncake's kv_both "
    "connector (it walked the whole cache each step), and between −1.8 and +2.3 µs without it or "
    "with the walk removed, on vLLM 0.18.1, one H20, Qwen3-Coder-30B-A3B."
)
_CAUTION = (
    "The cache fills as time passes, so whatever else changes meanwhile (other work on the "
    "machine, clocks) looks like a slope too: measure on an idle machine, and repeat."
)
BLOCK_TOKENS = 16
_STRETCHES = 40
_WARM_ROUNDS = 3
_DRAWS = 2000


@dataclass(frozen=True)
class Shape:
    """Of every request, how many run at a time, and how many tokens to send in all."""

    input_tokens: int
    output_tokens: int
    concurrency: int
    total_tokens: int


def default_shape(on_cpu: bool, capacity_tokens: int | None) -> Shape:
    """Fills the cache once, or 120,000 tokens of it on a CPU."""
    if on_cpu:
        return Shape(1024, 32, 2, min(capacity_tokens or 120_000, 120_000))
    return Shape(4096, 256, 4, capacity_tokens or 280_000)


@dataclass(frozen=True)
class Sweep:
    """Steps with what was cached at the time; `source` says who timed them."""

    cached_tokens: list[float]
    duration_s: list[float]
    at_s: list[float]
    source: str


async def measure(target: Bench, shape: Shape, say: Callable[[str], None]) -> Sweep:
    """Sends the prompts and collects the steps."""
    results: list[Result] = []
    async with driver(target) as drive:
        for _ in range(_WARM_ROUNDS):  # compile and warm what the shape needs
            prompts = [drive.prompt(shape.input_tokens) for _ in range(shape.concurrency)]
            asked = (drive.ask(prompt, shape.output_tokens, "warm-up") for prompt in prompts)
            for result in await asyncio.gather(*asked):
                answered(result)
        begun_s = drive.clock()
        left = max(1, shape.total_tokens // (shape.input_tokens + shape.output_tokens))
        planned = left

        async def keep_asking(number_: int) -> None:
            nonlocal left
            while left > 0:
                left -= 1
                if (planned - left) % max(1, planned // 10) == 0:
                    say(f"{planned - left} of {planned} prompts")
                prompt = drive.prompt(shape.input_tokens)
                result = await drive.ask(prompt, shape.output_tokens, f"sweep-{number_}")
                results.append(answered(result))

        async with asyncio.TaskGroup() as group:
            for number_ in range(shape.concurrency):
                group.create_task(keep_asking(number_))
        origin_s = drive.unix_origin_s
    steps = step_table(target.folder / "steps", origin_s)
    return from_steps(steps, begun_s) if len(steps) else from_arrivals(results)


def from_steps(steps: pd.DataFrame, begun_s: float) -> Sweep:
    """Decode-only steps of the engine's own telemetry since `begun_s` of the driver's clock."""
    kept = steps[(steps["forward_mode"] == "decode") & (steps["at_s"] >= begun_s)]
    cached = kept["kv_used_tokens"] + kept["kv_evictable_tokens"]
    return Sweep(cached.tolist(), kept["duration_s"].tolist(), kept["at_s"].tolist(), "engine")


def from_arrivals(results: Sequence[Result]) -> Sweep:
    """The client's view: time between tokens, against the tokens of all requests that had ended.

    Gaps in which another request was being prefilled are left out.
    """
    ended = sorted((r.finished_s or 0.0, r.input_length + r.output_tokens) for r in results)
    times = np.array([at for at, _ in ended])
    held = np.concatenate([[0.0], np.cumsum([tokens for _, tokens in ended])])
    begun = np.array([r.sent_s or 0.0 for r in results])
    first = np.array([r.first_token_s or 0.0 for r in results])
    cached, durations, at = [], [], []
    for result in results:
        for i in range(1, len(result.arrivals)):
            (before_s, before), (after_s, after) = result.arrivals[i - 1], result.arrivals[i]
            if after == before or bool(np.any((begun < after_s) & (first > before_s))):
                continue
            cached.append(float(held[np.searchsorted(times, after_s, side="right")]))
            durations.append((after_s - before_s) / (after - before))
            at.append(after_s)
    return Sweep(cached, durations, at, "client")


def slope(sweep: Sweep, seed: int = 0) -> Estimate:
    """Microseconds a step per 1,000 blocks of 16 tokens."""
    order = np.argsort(sweep.at_s)
    x = np.asarray(sweep.cached_tokens)[order] / (1000 * BLOCK_TOKENS)
    y = np.asarray(sweep.duration_s)[order] * 1e6
    if len(x) < 2 * _STRETCHES:
        return Estimate(float("nan"), float("nan"), float("nan"), len(x))
    stretches = np.array_split(np.arange(len(x)), _STRETCHES)
    run = np.array([np.median(x[part]) for part in stretches])
    rise = np.array([np.median(y[part]) for part in stretches])
    with np.errstate(divide="ignore", invalid="ignore"):
        slopes = np.subtract.outer(rise, rise) / np.subtract.outer(run, run)
    slopes[~np.isfinite(slopes)] = np.nan  # a stretch with itself, or with one as full
    rng = np.random.default_rng(seed)
    drawn = (rng.integers(0, _STRETCHES, _STRETCHES) for _ in range(_DRAWS))
    draws = np.array([np.nanmedian(slopes[np.ix_(each, each)]) for each in drawn])
    return interval(float(np.nanmedian(slopes)), draws, len(x))


def sections(sweep: Sweep) -> list[Section]:
    """The slope, and median step durations by fill."""
    found = slope(sweep)
    x = np.asarray(sweep.cached_tokens) / BLOCK_TOKENS
    y = np.asarray(sweep.duration_s) * 1e6
    edges = np.linspace(x.min(), x.max() + 1, 13) if len(x) else np.zeros(2)
    rows, centres, medians = [], [], []
    for low, high in pairwise(edges):
        inside = y[(x >= low) & (x < high)]
        if len(inside) == 0:
            continue
        centres.append(float((low + high) / 2))
        medians.append(float(np.median(inside)))
        rows.append(
            [
                Entry(f"{low:.0f}–{high:.0f}"),
                Entry(str(len(inside))),
                Entry(f"{number(float(np.median(inside)))} µs"),
                Entry(f"{number(float(np.quantile(inside, 0.9)))} µs"),
            ]
        )
    sample = np.linspace(0, len(x) - 1, min(len(x), 1500)).astype(int)
    top = float(np.quantile(y, 0.99)) * 1.15 if len(y) else None
    shown = [i for i in sample if top is None or y[i] <= top]
    figure = Chart(
        "Decode steps",
        Axis("blocks of 16 tokens held by the cache"),
        Axis("one step", "µs", zero=True, high=top),
        (
            Dots("steps", x[shown].tolist(), y[shown].tolist(), PALETTE[0], size=1.6, opacity=0.3),
            Line("median", centres, medians, PALETTE[5], dots=True),
        ),
    )
    finding = (
        f"Slope: {found.value:+.1f} µs a step per 1,000 blocks of {BLOCK_TOKENS} tokens (95 % "
        f"interval {found.low:+.1f} to {found.high:+.1f}; {found.n} decode steps, timed by the "
        f"{sweep.source}). An interval that holds 0 shows no growth."
    )
    return [
        Section(
            "cache-sweep",
            "Step cost against cached blocks",
            [finding, _CAUTION, SEEN_BEFORE],
            [("", Table(["Blocks held", "Steps", "Step p50", "Step p90"], rows))],
            [Figure("cache-sweep", "Decode step duration against cached blocks", figure)],
        )
    ]


def raw(sweep: Sweep) -> dict[str, object]:
    """The slope, for programs."""
    return {"slope_us_per_1000_blocks": asdict(slope(sweep)), "timed_by": sweep.source}
