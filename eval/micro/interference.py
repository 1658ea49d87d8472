"""What a long prefill does to decodes that run beside it: decode batch × prefill length.

For each pair: so many streams decode, then one cold prompt of the given length arrives. A stream's
time per token while that prompt is prefilled (from the last token before it was sent to the first
after its own first token), over its time per token before. Where requests are separated the prompt
is prefilled elsewhere, and the index should be near 1.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np

from eval.document import Figure, Section
from eval.formatting import DASH, Entry, seconds
from eval.micro.driver import Bench, Driver, Prompt, answered, driver
from eval.plot import Axis, Chart, Heat
from eval.tables import Table
from replay.results import Result

SEEN_BEFORE = (
    "Seen before: 14× (8 decodes, 2k prefill) to 214× (1 decode, 32k prefill) TPOT p90, on vLLM "
    "0.18.1 with --enforce-eager, one H20, Qwen3-Coder-30B-A3B."
)
_BASELINE_S = 1.5
_STREAM_TOKENS = 4096
_MARKER_TOKENS = 16


@dataclass(frozen=True)
class Grid:
    """Which pairs are measured, how often, and the context each stream has (tokens)."""

    decodes: Sequence[int]
    prefills: Sequence[int]
    context_tokens: int
    repeats: int


def default_grid(on_cpu: bool) -> Grid:
    """Sizes that the hardware can take: a few minutes in all."""
    if on_cpu:
        return Grid(decodes=(1, 2, 4), prefills=(512, 2048, 8192), context_tokens=512, repeats=3)
    return Grid(
        decodes=(1, 2, 4, 8),
        prefills=(2048, 8192, 16384, 32768),
        context_tokens=16384,
        repeats=3,
    )


@dataclass(frozen=True)
class Point:
    """One measured pair: seconds a token before and during, the worst gap, the prompt's TTFT."""

    decodes: int
    prefill_tokens: int
    repeat: int
    before_s: float
    during_s: float
    worst_gap_s: float
    ttft_s: float

    @property
    def index(self) -> float:
        return self.during_s / self.before_s


async def measure(target: Bench, grid: Grid, say: Callable[[str], None]) -> list[Point]:
    """Every pair of the grid, repeats outermost."""
    points = []
    async with driver(target) as drive:
        for prefill in grid.prefills:  # compile and warm what a length needs, outside the figures
            answered(await drive.ask(drive.prompt(prefill), 2, "warm-up"))
        for repeat in range(1, grid.repeats + 1):
            for decodes in grid.decodes:
                contexts = [drive.prompt(grid.context_tokens) for _ in range(decodes)]
                for number, context in enumerate(contexts):
                    answered(await drive.ask(context, 1, f"stream-{number}"))
                for prefill in grid.prefills:
                    say(f"{decodes} decodes, {prefill} tokens, repeat {repeat}")
                    points.append(await _pair(drive, contexts, prefill, repeat))
    return points


async def _pair(drive: Driver, contexts: Sequence[Prompt], prefill: int, repeat: int) -> Point:
    begun = drive.first_tokens
    streams = [
        asyncio.create_task(drive.ask(context, _STREAM_TOKENS, f"stream-{number}"))
        for number, context in enumerate(contexts)
    ]
    try:
        await drive.until_first_tokens(begun + len(streams), timeout_s=300)
        steady_s = drive.clock()
        await asyncio.sleep(_BASELINE_S)
        arriving = answered(await drive.ask(drive.prompt(prefill), 1, "arriving"))
        # Two tokens in a batch with the streams: by then each stream has had its next one.
        answered(await drive.ask(drive.prompt(_MARKER_TOKENS), 2, "marker"))
        await asyncio.sleep(0.3)
    finally:
        for stream in streams:
            stream.cancel()
    results = [await stream for stream in streams]
    await asyncio.sleep(0.3)  # the engine takes the streams out of its batch
    assert arriving.sent_s is not None
    assert arriving.first_token_s is not None
    return point(results, steady_s, arriving.sent_s, arriving.first_token_s, prefill, repeat)


def point(
    streams: Sequence[Result],
    steady_s: float,
    sent_s: float,
    first_token_s: float,
    prefill: int,
    repeat: int,
) -> Point:
    """Means over streams; the worst gap is over all of them.

    `steady_s` is when the last stream had begun: gaps before it are left out.
    """
    before, during, gaps = [], [], [0.0]
    for stream in streams:
        steady = [(at, n) for at, n in stream.arrivals if steady_s <= at <= sent_s]
        if len(steady) > 1:
            before.append((steady[-1][0] - steady[0][0]) / (steady[-1][1] - steady[0][1]))
        start = max((a for a in stream.arrivals if a[0] <= sent_s), default=None)
        end = min((a for a in stream.arrivals if a[0] >= first_token_s), default=None)
        if start is None or end is None or end[1] == start[1]:
            continue
        during.append((end[0] - start[0]) / (end[1] - start[1]))
        window = [a for a in stream.arrivals if start[0] <= a[0] <= end[0]]
        gaps += [b[0] - a[0] for a, b in pairwise(window)]
    return Point(
        decodes=len(streams),
        prefill_tokens=prefill,
        repeat=repeat,
        before_s=float(np.mean(before)) if before else float("nan"),
        during_s=float(np.mean(during)) if during else float("nan"),
        worst_gap_s=max(gaps),
        ttft_s=first_token_s - sent_s,
    )


def sections(points: Sequence[Point]) -> list[Section]:
    """Heatmaps of the index and of the worst gap, and the table behind them."""
    decodes = sorted({p.decodes for p in points})
    prefills = sorted({p.prefill_tokens for p in points})

    def chosen(d: int, p: int) -> list[Point]:
        return [x for x in points if x.decodes == d and x.prefill_tokens == p]

    index = [[_median([x.index for x in chosen(d, p)]) for p in prefills] for d in decodes]
    worst = [[_median([x.worst_gap_s for x in chosen(d, p)]) for p in prefills] for d in decodes]
    rows = []
    for d in decodes:
        for p in prefills:
            same = chosen(d, p)
            ratios = [x.index for x in same]
            rows.append(
                [
                    Entry(f"{d} decode" + ("s" if d > 1 else "")),
                    Entry(str(p)),
                    Entry(seconds(_median([x.before_s for x in same]))),
                    Entry(seconds(_median([x.during_s for x in same]))),
                    _index(ratios),
                    Entry(seconds(_median([x.worst_gap_s for x in same]))),
                    Entry(seconds(_median([x.ttft_s for x in same]))),
                ]
            )
    columns = [
        "Running",
        "Prefill tokens",
        "TPOT before",
        "TPOT during",
        "Index",
        "Worst gap",
        "The prompt's TTFT",
    ]
    section = Section(
        "interference",
        "Decodes beside a prefill",
        [
            (
                "Median over repeats; under the index its range. The index is the streams' time "
                "per token while the prompt is prefilled over that before; 1 is none."
            ),
            SEEN_BEFORE,
        ],
        [("", Table(columns, rows))],
    )
    y = tuple(str(d) for d in decodes)
    x = tuple(str(p) for p in prefills)
    for key, title, grid in (
        ("index", "Interference index (×)", index),
        ("worst", "Worst gap between tokens (s)", worst),
    ):
        figure = Chart(
            title,
            Axis("prefill tokens", categories=x),
            Axis("running decodes", categories=y),
            (Heat(grid),),
        )
        words = f"{title}, by running decodes and prefill length"
        section.figures.append(Figure(f"interference-{key}", words, figure))
    return [section]


def raw(points: Sequence[Point]) -> list[dict[str, float]]:
    """The points, for programs."""
    return [asdict(p) | {"index": p.index} for p in points]


def _index(ratios: Sequence[float]) -> Entry:
    known = [ratio for ratio in ratios if np.isfinite(ratio)]
    if not known:
        return Entry(DASH)
    return Entry(f"{_median(known):.3g}×", f"{min(known):.3g}–{max(known):.3g}")


def _median(values: Sequence[float]) -> float:
    known = [value for value in values if np.isfinite(value)]
    return float(np.median(known)) if known else float("nan")
