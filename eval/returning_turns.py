"""What a turn that returns to its cached prefix costs those who decode meanwhile:
`python -m eval.returning_turns RUN...`.

Little of such a turn is computed, and yet an engine takes time for it: it looks the prefix up block
by block, and loads from a host tier what the GPU has dropped. Owns by how much longer the steps
become in which others get their tokens, read off the arrivals of answers; one worker, streamed
answers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from deltaserve.errors import InputError, told_in_one_line
from eval.arrival_steps import Request, arrival_steps, read_requests, waited_alone

MOST_NEW_TOKENS = 1_000
"""A turn with more new tokens does not count as returning: computing them is most of its cost."""
# How long before a turn the pace of those who decode is taken from, and the least steps in it.
_PACE_OF_S = 0.5
_LEAST_STEPS = 8
# They have to decode on after its first token, so that no end of an answer changes the pace.
_ON_FOR_S = 0.05
EDGES_TOKENS = (0, 40_000, 70_000, 100_000, 200_000)
"""Lengths of prompts between which the table's rows are."""


@dataclass(frozen=True)
class Return:
    """A turn that came back while others decoded, and nobody else waited for a first token."""

    prompt_tokens: int
    new_tokens: int
    first_token_s: float
    """From when it was sent."""
    stopped_s: float
    """By how much longer than at their pace before the others' steps took until then, together."""
    longest_s: float
    """The longest of those steps."""


def returns(run: Sequence[Request]) -> Iterator[Return]:
    """The returning turns of a run that had the engine to themselves but for decodes."""
    ends_s = [at_s for at_s, _ in arrival_steps(run)]
    by_sent = sorted(run, key=lambda request: float(request["sent_s"]))
    for at in waited_alone(by_sent):
        request = by_sent[at]
        sent_s, first_s = request["sent_s"], request["first_token_s"]
        new = request["prompt_tokens"] - request["cached_tokens"]
        if new > MOST_NEW_TOKENS:
            continue
        paced_from_s = sent_s - _PACE_OF_S
        if not any(
            other["first_token_s"] < paced_from_s and other["finished_s"] > first_s + _ON_FOR_S
            for other in by_sent[:at]
        ):
            continue
        begun = bisect_right(ends_s, sent_s)
        before = ends_s[bisect_right(ends_s, paced_from_s) : begun]
        if len(before) <= _LEAST_STEPS:
            continue
        pace_s = float(np.median(np.diff(before)))
        within_s = ends_s[begun - 1 : bisect_right(ends_s, first_s)]
        steps_s = [end_s - start_s for start_s, end_s in pairwise(within_s)]
        yield Return(
            prompt_tokens=request["prompt_tokens"],
            new_tokens=new,
            first_token_s=first_s - sent_s,
            stopped_s=sum(max(0.0, step_s - pace_s) for step_s in steps_s),
            longest_s=max(steps_s),
        )


def table(found: Sequence[Return]) -> list[str]:
    """A line for each range of prompt lengths with three turns or more: medians, and of what they
    cost the others the quartiles."""
    heads = ["prompt tokens", "turns", "first token after", "stops the others for"]
    heads += ["longest step", "for 1,000 tokens"]
    lines = [f"| {' | '.join(heads)} |", "|--" * len(heads) + "|"]
    for low, high in pairwise(EDGES_TOKENS):
        of = [each for each in found if low <= each.prompt_tokens < high]
        if len(of) < 3:
            continue
        stopped_ms = 1e3 * np.array([each.stopped_s for each in of])
        least, median, most = np.quantile(stopped_ms, (0.25, 0.5, 0.75))
        first_ms = 1e3 * np.median([each.first_token_s for each in of])
        longest_ms = 1e3 * np.median([each.longest_s for each in of])
        each_ms = np.median(1e3 * stopped_ms / [each.prompt_tokens for each in of])
        lines.append(
            f"| {low:,} to {high:,} | {len(of)} | {first_ms:.0f} ms | "
            f"{median:.0f} ms [{least:.0f}–{most:.0f}] | {longest_ms:.0f} ms | {each_ms:.2f} ms |"
        )
    return lines


app = typer.Typer(add_completion=False, help=__doc__)


@app.command()
def show(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of runs, or their requests.jsonl (or .zst).")
    ],
) -> None:
    """Print what returning turns cost, of all these runs together."""
    found = [each for run in read_requests(runs) for each in returns(run)]
    if not found:
        raise InputError("no turn returned alone while others decoded")
    for line in table(found):
        typer.echo(line)


if __name__ == "__main__":
    with told_in_one_line():
        app()
