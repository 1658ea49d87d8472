"""How long turns wait where some still wait when a run ends: `python -m eval.waits`.

Owns the product-limit estimate of waits (Kaplan and Meier, 1958) and the lines that it is made
from. A turn that a run's end cuts off has waited for some time and would have waited longer.
Counted as answered then it makes the tail look short, and left out it does so too: the estimate
counts it among those that wait for as long as it was seen to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from scipy import stats

from deltaserve.errors import InputError, told_in_one_line
from eval.records import Run
from eval.run_lines import Row, read_rows, turns_of, write_rows
from eval.sessions_a_gpu import EXPERIMENT, runs_in

KEPT_S = 10.0
"""Waits that were over sooner are counted, and have no line of their own."""
COLUMNS = ("arm", "sessions", "draw", "turns", "wait_s", "answered")


def rows_of(run: Run, arm: str, sessions: int) -> Iterator[Row]:
    """A line for each turn due in a run's window whose wait for its first token, from when it was
    due, took `KEPT_S` or longer, or was not over when the client or the run gave it up (`answered`
    is 0 then). `turns` are all that were due. A run without such turns has one line without a wait.
    """
    turns = turns_of(run)
    given_up_s = turns["finished_s"] - turns["scheduled_s"]
    answered = turns["first_token_s"].notna()
    waits_s = (turns["first_token_s"] - turns["scheduled_s"]).where(answered, given_up_s)
    head = {
        "arm": arm,
        "sessions": str(sessions),
        "draw": str(run.repeat),
        "turns": str(len(turns)),
    }
    kept = waits_s.ge(KEPT_S) | ~answered
    if not kept.any():
        yield {**head, "wait_s": "", "answered": ""}
    for wait_s, came in zip(waits_s[kept], answered[kept], strict=True):
        yield {**head, "wait_s": f"{wait_s:.1f}", "answered": str(int(came))}


def waits(rows: Sequence[Row], quantiles: Iterable[float]) -> list[float]:
    """The waits, in seconds, within which these shares of turns get their first token, by the
    product-limit estimate over all runs of the rows together; infinite where so many were not
    answered that the estimate does not reach that share. Raises `InputError` for no rows."""
    if not rows:
        raise InputError("no lines of waits: expected those of one run at least")
    runs = {(row["arm"], row["sessions"], row["draw"]): int(row["turns"]) for row in rows}
    long = [row for row in rows if row["wait_s"]]
    waits_s = [float(row["wait_s"]) for row in long]
    given_up = [row["answered"] == "0" for row in long]
    short = sum(runs.values()) - len(long)
    observed = stats.CensoredData.right_censored(
        np.array([*waits_s, *[0.0] * short]), np.array([*given_up, *[False] * short])
    )
    over = stats.ecdf(observed).sf
    found = []
    for share in quantiles:
        reached = np.flatnonzero(over.probabilities <= 1 - share + 1e-12)
        found.append(float(over.quantiles[reached[0]]) if len(reached) else float("inf"))
    return found


app = typer.Typer(add_completion=False, help=__doc__, no_args_is_help=True)


@app.command("lines")
def lines_command(
    folder: Annotated[Path, typer.Argument(help="runs of `sessions-a-gpu` or `rules-gpu`")],
    lines: Annotated[Path, typer.Argument(help="CSV file to write")],
) -> None:
    """Keep the long waits of each complete run."""
    found = (
        row
        for run, sessions in runs_in(folder, EXPERIMENT)
        for row in rows_of(run, run.arm, sessions)
    )
    write_rows(lines, found)


@app.command("show")
def show_command(lines: Annotated[Path, typer.Argument(help="CSV file of `lines`")]) -> None:
    """Print how long turns wait, by arm and sessions in flight."""
    for line in table(read_rows(lines, COLUMNS)):
        typer.echo(line)


def table(rows: Sequence[Row]) -> list[str]:
    """A line an arm and number of sessions, of all of its draws."""
    found = ["| simulated: waits within which | 90 % | 95 % | 97 % | 99 % have their first token |"]
    found.append("|--|--|--|--|--|")
    for arm, sessions in dict.fromkeys((row["arm"], row["sessions"]) for row in rows):
        of = [row for row in rows if (row["arm"], row["sessions"]) == (arm, sessions)]
        cells = [_seconds(wait_s) for wait_s in waits(of, (0.9, 0.95, 0.97, 0.99))]
        found.append(f"| `{arm}`, {sessions} in flight | {' | '.join(cells)} |")
    return found


def _seconds(wait_s: float) -> str:
    if wait_s < KEPT_S:
        return f"under {KEPT_S:.0f} s"
    return f"{wait_s:.0f} s" if np.isfinite(wait_s) else "beyond the run"


if __name__ == "__main__":
    with told_in_one_line():
        app()
