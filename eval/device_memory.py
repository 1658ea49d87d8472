"""How a GPU fares by the KV that it holds and by its host tier: `python -m eval.device_memory`.

Owns what is kept of each run of the packaged experiment `sessions-a-gpu` with other sizes of KV
(one CSV line), and how lines become the tables of docs/results/simulated-memory.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from deltaserve.errors import InputError, told_in_one_line
from eval.experiment import Slo
from eval.outcomes import missed
from eval.records import Run
from eval.run_lines import Row, add_lines_command, cell, read_rows, turns_of
from eval.separation import carried_by_draw
from eval.sessions_a_gpu import EXPERIMENT, row_of, runs_in

SIZES = ("device_tokens", "host_tokens")
COLUMNS = ("arm", "sessions", "draw", *SIZES, "within_objective", "requests_per_s")
LEVELS = (8, 10, 12, 16, 24)
"""The sessions in flight of which tables have the share of turns within the objective."""
PER_TOKENS = 100_000


def memory_row(run: Run, arm: str, sessions: int) -> Row:
    """What is kept of a run: what is kept of any with so many sessions in flight, what its worker
    could hold, which part of the objective its turns missed, and how much context was in flight.

    `late`, `slow` and `gap` are shares of the turns due in the window: with a first token that came
    too late or never; of those answered, with more time a token, and with a longer gap. A turn may
    be several of these. `in_flight_tokens` are the prompts and answers of turns between when they
    were due and their end, the mean over the window; for a tenth of the time they are more than
    `in_flight_p90_tokens`. Raises `InputError` where the run's manifest does not say of one worker
    what it holds.
    """
    workers = run.manifest.get("workers") or []
    if len(workers) != 1 or not {"kv_capacity_tokens", "host_kv_tokens"} <= set(workers[0]):
        raise InputError(f"{run.folder}: expected one worker, and what its KV cache holds")
    kept = row_of(run, arm, sessions)
    turns = turns_of(run)
    parts = missed(turns, Slo())
    answered = turns["ok"].to_numpy(dtype=bool)
    mean, p90 = in_flight_tokens(run)
    return {
        "arm": kept.pop("arm"),
        "device_tokens": str(workers[0]["kv_capacity_tokens"]),
        "host_tokens": str(workers[0]["host_kv_tokens"]),
        **kept,
        "late": cell(float(parts["ttft"].mean())),
        "slow": cell(float((parts["tpot"] & answered).mean())),
        "gap": cell(float((parts["worst_gap"] & answered).mean())),
        "in_flight_tokens": cell(mean, ".0f"),
        "in_flight_p90_tokens": cell(p90, ".0f"),
    }


def in_flight_tokens(run: Run) -> tuple[float, float]:
    """The prompts and answers of the turns that are due and not over, in tokens: their mean over
    the run's window, and what they are at most for nine tenths of it. What prompts share counts in
    each."""
    start_s, end_s = run.span_s
    every = run.all_requests
    every = every[every["phase"].ne("prime") & every["scheduled_s"].lt(end_s)]
    tokens = (every["input_length"] + every["output_tokens"].fillna(0)).to_numpy()
    from_s = every["scheduled_s"].clip(lower=start_s).to_numpy()
    until_s = every["finished_s"].fillna(end_s).clip(start_s, end_s).to_numpy()
    at_s = np.concatenate([[start_s], from_s, until_s])
    change = np.concatenate([[0.0], tokens, -tokens])
    order = np.argsort(at_s, kind="stable")
    held = np.cumsum(change[order])
    lasts_s = np.diff(np.append(at_s[order], end_s))
    by_size = np.argsort(held)
    share = np.cumsum(lasts_s[by_size]) / (end_s - start_s)
    p90 = held[by_size][np.searchsorted(share, 0.9)]
    return float(np.sum(held * lasts_s) / (end_s - start_s)), float(p90)


def rows_in(folder: Path) -> Iterator[Row]:
    """A line for each complete run of a folder of the experiment."""
    for run, sessions in runs_in(folder, EXPERIMENT):
        yield memory_row(run, run.arm, sessions)


def agents(rows: Sequence[Row]) -> list[float]:
    """The sessions that one arm carries with one size of memory, a figure a draw."""
    return carried_by_draw(rows, "within_objective")


def table(rows: Sequence[Row], arm: str) -> list[str]:
    """A line for each size of an arm's memory: the sessions that it carries (mean over draws, the
    least and the most) and for each `PER_TOKENS` of the device, the most requests/s, and the share
    of turns within the objective by sessions in flight."""
    of_arm = [row for row in rows if row["arm"] == arm]
    lines = [
        (
            f"| simulated, `{arm}`: KV tokens on the device, of the tier | agents a GPU "
            f"| for each {PER_TOKENS:,} on the device | most requests/s, at "
            f"| turns in time with {' | '.join(map(str, LEVELS))} |"
        ),
        "|--" * (4 + len(LEVELS)) + "|",
    ]
    for device, host in sorted({(int(row[SIZES[0]]), int(row[SIZES[1]])) for row in of_arm}):
        of_size = [
            row for row in of_arm if (row[SIZES[0]], row[SIZES[1]]) == (str(device), str(host))
        ]
        carries = agents(of_size)
        of_each = statistics.fmean(carries) / device * PER_TOKENS
        levels = sorted({int(row["sessions"]) for row in of_size})
        rates = {level: mean(of_size, level, "requests_per_s") for level in levels}
        best = max(rates, key=lambda level: rates[level])
        in_time = [
            f"{100 * mean(of_size, level, 'within_objective'):.0f} %" if level in levels else ""
            for level in LEVELS
        ]
        lines.append(
            f"| {device:,}, {host:,} | {statistics.fmean(carries):.1f} "
            f"[{min(carries):.1f}–{max(carries):.1f}] | {of_each:.2f} "
            f"| {rates[best]:.2f}, {best} | {' | '.join(in_time)} |"
        )
    return lines


def mean(rows: Sequence[Row], level: int, column: str) -> float:
    """A column's mean over draws with so many sessions in flight."""
    return statistics.fmean(float(row[column]) for row in rows if row["sessions"] == str(level))


app = typer.Typer(no_args_is_help=True, add_completion=False)
add_lines_command(app, rows_in)


@app.command("show")
def show_command(
    runs: Annotated[Path, typer.Argument(help="CSV of simulated runs.")],
) -> None:
    """Print a table of each arm."""
    rows = read_rows(runs, COLUMNS)
    for arm in dict.fromkeys(row["arm"] for row in rows):
        typer.echo("\n".join(["", *table(rows, arm)]))


if __name__ == "__main__":
    with told_in_one_line():
        app()
