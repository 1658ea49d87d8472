"""What a turn that returns to its cached prefix costs those who decode meanwhile:
`python -m eval.returning_turns RUN...`.

Little of such a turn is computed, and yet an engine takes time for it: it looks the prefix up block
by block, and loads from a host tier what the GPU has dropped. Owns the table of it; by how much
longer the steps become in which others get their tokens is read off the arrivals of answers
(`eval.arrival_steps`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from deltaserve.errors import InputError, told_in_one_line
from eval.arrival_steps import Return, read_requests, returns

EDGES_TOKENS = (0, 40_000, 70_000, 100_000, 200_000)
"""Lengths of prompts between which the table's rows are."""


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
