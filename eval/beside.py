"""Whether an engine's steps take longer while another engine of the same host is at work:
`python -m eval.beside RUN... --other RUN...`.

Runs that go on side by side (`eval run --parallel`) share a host's cores, memory and PCIe. An
engine that is idle for part of the time shows what that costs its neighbour, in one and the same
run: steps of the neighbour that fell into its idle times are compared with those that fell into its
work. Owns that comparison; what a step took is read off telemetry as a calibration does it
(`eval.calibrate`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from deltaserve.errors import InputError, told_in_one_line
from eval.calibrate import FloatArray, read_steps, step_intervals
from eval.spans import covered_s, merged
from eval.stats import Estimate, interval

Step = dict[str, Any]

_PAUSE_S = 0.05
"""Between two steps of an engine at work pass milliseconds; one that pauses longer is idle."""
_ALONE, _BESIDE = 0.05, 0.95
"""The other engine is at work for at most and at least this share of a step."""
_BLOCK_S = 10.0
_DRAWS = 2000
# Steps are compared with steps of the same batch whose contexts differ by less than this.
_DECODE_TOKENS, _PREFILL_TOKENS, _PREFIX_TOKENS = 16_384, 1_024, 8_192


@dataclass(frozen=True)
class Beside:
    """Steps of one kind: how many fell into the other engine's idle times and its work, what they
    took on average in seconds, and how many times as long they took beside it.

    Means are over batches that were seen in both, each counted alike on both sides; the interval is
    over blocks of ten seconds, since steps that follow each other are alike.
    """

    alone: int
    beside: int
    alone_s: float
    beside_s: float
    times: Estimate


def beside(steps: list[Step], others: list[Step]) -> dict[str, Beside]:
    """By kind of step (`prefill`, `decode`), as far as both sides have some.

    Raises InputError where the two engines were never recorded at the same time.
    """
    spans = at_work(others)
    begin_s, end_s = spans[0, 0], spans[-1, 1]
    found: dict[str, list[tuple[tuple[int, ...], bool, float, float]]] = {}
    overlaps = False
    for before, step, took_s in step_intervals(steps):
        to_s = step["start_unix_s"] + step["duration_s"]
        from_s = to_s - took_s
        if from_s < begin_s or to_s > end_s or took_s <= 0:
            continue
        overlaps = True
        share = covered_s(spans, from_s, to_s) / took_s
        batch = _batch(before, step)
        if batch is not None and not _ALONE < share < _BESIDE:
            kind, size = batch
            found.setdefault(kind, []).append((size, share >= _BESIDE, took_s, to_s))
    if not overlaps:
        raise InputError("the two were never at work in the same minutes")
    compared = {kind: _compare(rows) for kind, rows in sorted(found.items())}
    return {kind: of for kind, of in compared.items() if of is not None}


def at_work(steps: Iterable[Step]) -> FloatArray:
    """When an engine was at work (`eval.spans`): its steps, and short pauses between them."""
    spans = sorted(
        (step["start_unix_s"], step["start_unix_s"] + step["duration_s"]) for step in steps
    )
    return merged(np.array(spans), _PAUSE_S)


def _batch(before: Step, step: Step) -> tuple[str, tuple[int, ...]] | None:
    """The kind of a step and its batch, up to what hardly changes its time; None where it is of
    another kind, or follows one (what it took may then be partly the other's)."""
    kind = step["forward_mode"]
    if kind != before["forward_mode"]:
        return None
    if kind == "decode":
        running = int(step["decode_requests"])
        return kind, (running, int(step["kv_used_tokens"]) // _DECODE_TOKENS)
    if kind == "extend" and step["prefill_requests"] == 1 and not step["decode_requests"]:
        new, prefix = int(step["prefill_tokens"]), int(step["prefix_tokens"])
        return "prefill", (new // _PREFILL_TOKENS, prefix // _PREFIX_TOKENS)
    return None


def _compare(rows: Sequence[tuple[tuple[int, ...], bool, float, float]]) -> Beside | None:
    """Mean times over the batches that both sides have, weighted by the smaller number."""
    batches = {batch: at for at, batch in enumerate(dict.fromkeys(row[0] for row in rows))}
    first_s = min(row[3] for row in rows)
    blocks = {int((row[3] - first_s) / _BLOCK_S) for row in rows}
    places = {block: at for at, block in enumerate(sorted(blocks))}
    count = np.zeros((len(places), 2, len(batches)))
    total_s = np.zeros_like(count)
    for batch, is_beside, took_s, at_s in rows:
        cell = places[int((at_s - first_s) / _BLOCK_S)], int(is_beside), batches[batch]
        count[cell] += 1
        total_s[cell] += took_s
    value = _means(count.sum(axis=0), total_s.sum(axis=0))
    if value is None:
        return None
    rng = np.random.default_rng(0)
    weights = rng.multinomial(len(places), np.full(len(places), 1 / len(places)), _DRAWS)
    drawn = (
        _means(np.tensordot(of, count, axes=1), np.tensordot(of, total_s, axes=1)) for of in weights
    )
    ratios = np.array([of[1] / of[0] for of in drawn if of is not None])
    in_both = (count.sum(axis=0) > 0).all(axis=0)
    alone, beside_ = (int(each) for each in count.sum(axis=0)[:, in_both].sum(axis=1))
    return Beside(
        alone, beside_, *value, times=interval(value[1] / value[0], ratios, alone + beside_)
    )


def _means(count: FloatArray, total_s: FloatArray) -> tuple[float, float] | None:
    """What a step takes on either side, in seconds; None where no batch is on both."""
    weight = count.min(axis=0)
    if not weight.any():
        return None
    mean_s = total_s / np.maximum(count, 1)
    alone_s, beside_s = (mean_s @ weight) / weight.sum()
    return float(alone_s), float(beside_s)


def table(found: dict[str, Beside]) -> list[str]:
    """A line for each kind of step."""
    heads = ["steps", "the other idle", "the other at work", "times as long"]
    lines = [f"| {' | '.join(heads)} |", "|--" * len(heads) + "|"]
    for kind, of in found.items():
        lines.append(
            f"| {kind} | {1e3 * of.alone_s:.2f} ms ({of.alone:,}) | "
            f"{1e3 * of.beside_s:.2f} ms ({of.beside:,}) | "
            f"{of.times.value:.3f} [{of.times.low:.3f}–{of.times.high:.3f}] |"
        )
    return lines


app = typer.Typer(add_completion=False, help=__doc__)


@app.command()
def show(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of one worker's runs, or files of its steps.")
    ],
    other: Annotated[
        list[Path], typer.Option("--other", help="The same of the worker beside it; repeatable.")
    ],
) -> None:
    """Print what one worker's steps took while the other was idle, and while it was at work."""
    found = beside(read_steps(runs), read_steps(other))
    if not found:
        raise InputError("no two steps of the same batch, one beside the other's work and one not")
    for line in table(found):
        typer.echo(line)


if __name__ == "__main__":
    with told_in_one_line():
        app()
