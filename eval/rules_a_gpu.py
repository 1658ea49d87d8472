"""How rules of residency fare before one GPU: `python -m eval.rules_a_gpu`.

Owns what is kept of each run of the packaged experiment `rules-gpu` (one CSV line, simulated or
measured), and how lines become the tables of docs/results/simulated-rules.md.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from deltaserve.errors import told_in_one_line
from eval.experiment import Slo
from eval.outcomes import good, recomputed_tokens
from eval.records import Run
from eval.run_lines import Row, add_lines_command, cell, read_rows, turns_of, write_rows
from eval.sessions_a_gpu import row_of, runs_in

EXPERIMENT = "rules-gpu"
COLUMNS = (
    "requests/s",
    "turns within the objective",
    "of them a second",
    "from cache",
    "TTFT p50",
    "TTFT p90",
    "TTFT p99",
    "longest wait",
    "sessions that got an answer",
    "turns never answered",
)
"""What the page's tables say of a rule."""
RECOMPUTED_TOKENS = 4_000
"""At the least, of a turn that came back to nothing: of others engines compute a few again too."""


def rule_row(run: Run, arm: str, sessions: int) -> Row:
    """What is kept of a run of a rule: what is kept of any with so many sessions in flight, and how
    those fared that waited longest.

    `good_per_s` are the turns due in the window that kept the objective, by the window's seconds: a
    rule that lets few in has a large share of few turns, and not many of these.
    `ttft_p99_s` is of every turn due in the window, and empty where so many got no answer that it
    is beyond the run. `longest_wait_s` is the longest time for which any turn waited for its first
    token in the window or until the run was over, whenever it was due. `sessions_there` had a turn
    under way at some time of the window; `sessions_answered` of them got an answer that ended then.
    """
    start_s, end_s = run.span_s
    turns = turns_of(run)
    ttft_s = turns["ttft_s"].to_numpy(dtype=float)
    every = run.all_requests
    every = every[every["phase"].ne("prime") & (every["ok"] | every["failed"])]
    # A turn whose answer the run's end cut off has waited no longer than to its first token.
    waited_until_s = every["first_token_s"].fillna(every["finished_s"])
    there = every[every["scheduled_s"].lt(end_s) & every["finished_s"].ge(start_s)]
    answered = there[there["ok"] & there["finished_s"].lt(end_s)]
    waits_s = (waited_until_s - every["scheduled_s"])[there.index]
    p99_s = float(np.quantile(ttft_s, 0.99, method="higher")) if len(ttft_s) else math.nan
    return {
        **row_of(run, arm, sessions),
        "good_per_s": cell(float(good(turns, Slo()).sum()) / (end_s - start_s)),
        "ttft_p99_s": cell(p99_s, ".4g"),
        "longest_wait_s": cell(float(waits_s.max()), ".4g"),
        "unanswered": str(int(turns["failed"].sum())),
        "sessions_there": str(there["session_id"].nunique()),
        "sessions_answered": str(answered["session_id"].nunique()),
    }


def rows_in(folder: Path) -> Iterator[Row]:
    """A line for each complete run of a folder of the experiment."""
    for run, sessions in runs_in(folder, EXPERIMENT):
        yield rule_row(run, run.arm, sessions)


def recomputed_row(run: Run, arm: str, sessions: int) -> Row:
    """How many turns with their first token in a run's window came back to nothing: no tier held
    what had been computed for their session before."""
    every = run.all_requests
    there = every[every["phase"].ne("prime") & every["ok"]]
    start_s, end_s = run.span_s
    there = there[there["first_token_s"].ge(start_s) & there["first_token_s"].lt(end_s)]
    recomputed = recomputed_tokens(there).ge(RECOMPUTED_TOKENS).sum()
    return {
        "arm": arm,
        "sessions": str(sessions),
        "draw": str(run.repeat),
        "recomputed_turns": str(int(recomputed)),
    }


def table(rows: Sequence[Row], level: int) -> list[str]:
    """A line a rule, of its runs with so many sessions in flight: means over draws; the p99 of the
    draw in the middle; sessions and turns of all draws."""
    lines = [f"| simulated, {level} in flight | {' | '.join(COLUMNS)} |"]
    lines.append("|--" * (1 + len(COLUMNS)) + "|")
    for arm in dict.fromkeys(row["arm"] for row in rows):
        of_arm = [row for row in rows if (row["arm"], row["sessions"]) == (arm, str(level))]
        if of_arm:
            lines.append(f"| `{arm}` | {' | '.join(_figures(of_arm))} |")
    return lines


def _figures(rows: Sequence[Row]) -> Iterator[str]:
    yield f"{_mean(rows, 'requests_per_s'):.3f}"
    yield f"{100 * _mean(rows, 'within_objective'):.0f} %"
    yield f"{_mean(rows, 'good_per_s'):.3f}"
    cached = _mean(rows, "cached_share")
    yield f"{cached:.2f}" if math.isfinite(cached) else "–"
    yield _seconds(_mean(rows, "ttft_p50_s"), ".2f")
    yield _seconds(_mean(rows, "ttft_p90_s"), ".1f")
    yield _seconds(statistics.median(_values(rows, "ttft_p99_s")), ".0f")
    yield _seconds(_mean(rows, "longest_wait_s"), ".0f")
    answered, there = (
        sum(int(row[column]) for row in rows) for column in ("sessions_answered", "sessions_there")
    )
    yield f"{100 * answered / there:.0f} % of {there}"
    yield str(sum(int(row["unanswered"]) for row in rows))


def _values(rows: Sequence[Row], column: str) -> list[float]:
    """An empty cell is beyond the run."""
    return [float(row[column] or math.inf) for row in rows]


def _mean(rows: Sequence[Row], column: str) -> float:
    return statistics.fmean(_values(rows, column))


def _seconds(value: float, form: str) -> str:
    return f"{value:{form}} s" if math.isfinite(value) else "–"


def by_draws(rows: Sequence[Row], parts: Sequence[range]) -> list[str]:
    """Turns within the objective a second, by sessions in flight: a mean for each part of the
    draws, so that it shows what a part that nothing was chosen on says."""
    levels = sorted({int(row["sessions"]) for row in rows})
    names = "; ".join(f"draws {part[0]}–{part[-1]}" for part in parts)
    lines = [f"| simulated: {COLUMNS[1]} a second, {names} | {' | '.join(map(str, levels))} |"]
    lines.append("|--" * (1 + len(levels)) + "|")
    for arm in dict.fromkeys(row["arm"] for row in rows):
        cells = []
        for level in levels:
            of = [row for row in rows if (row["arm"], row["sessions"]) == (arm, str(level))]
            means = [
                _mean([row for row in of if int(row["draw"]) in part], "good_per_s")
                for part in parts
            ]
            cells.append("; ".join(f"{mean:.3f}" for mean in means))
        lines.append(f"| `{arm}` | {' | '.join(cells)} |")
    return lines


def caps(rows: Sequence[Row]) -> list[str]:
    """A line a value of `cap`'s `sessions`, whose arms end in it: turns within the objective,
    requests/s, sessions that got an answer; and what it is chosen by, the turns within the
    objective a second, over all levels."""
    levels = sorted({int(row["sessions"]) for row in rows})
    heads = " | ".join(f"{level} in flight" for level in levels)
    lines = [f"| simulated: `sessions` of `cap` | {heads} | in time a second, mean |"]
    lines.append("|--" * (2 + len(levels)) + "|")
    for arm in sorted({row["arm"] for row in rows}, key=_value_of):
        of_arm = [row for row in rows if row["arm"] == arm]
        cells = []
        for level in levels:
            rate, share, *_, answered, _ = _figures(
                [row for row in of_arm if row["sessions"] == str(level)]
            )
            cells.append(f"{share}, {rate}, {answered}")
        mean = _mean(of_arm, "good_per_s")
        lines.append(f"| {_value_of(arm)} | {' | '.join(cells)} | {mean:.4f} |")
    return lines


def frontier(rows: Sequence[Row], parts: Sequence[range]) -> list[str]:
    """A line an arm, the one first that has the most turns within the objective a second over all
    levels: these turns (in brackets those of each part of the draws), the sessions that got an
    answer, and the longest wait."""
    levels = sorted({int(row["sessions"]) for row in rows})
    heads = " | ".join(
        f"{level} in flight: in time a second | answered | longest wait" for level in levels
    )
    names = "; ".join(f"{part[0]}–{part[-1]}" for part in parts)
    lines = [f"| simulated (draws {names}) | {heads} |", "|--" * (1 + 3 * len(levels)) + "|"]
    arms = {row["arm"]: [other for other in rows if other["arm"] == row["arm"]] for row in rows}
    for arm, of_arm in sorted(arms.items(), key=lambda item: -_mean(item[1], "good_per_s")):
        cells = []
        for level in levels:
            of = [row for row in of_arm if row["sessions"] == str(level)]
            by_part = "; ".join(
                f"{_mean([row for row in of if int(row['draw']) in part], 'good_per_s'):.3f}"
                for part in parts
            )
            answered = list(_figures(of))[-2]
            cells.append(
                f"{_mean(of, 'good_per_s'):.3f} ({by_part}) | {answered} "
                f"| {_mean(of, 'longest_wait_s'):.0f} s"
            )
        lines.append(f"| `{arm}` | {' | '.join(cells)} |")
    return lines


def _value_of(arm: str) -> int:
    return int(arm.rpartition("-")[2])


app = typer.Typer(no_args_is_help=True, add_completion=False)
add_lines_command(app, rows_in)


@app.command("recomputed")
def recomputed_command(
    folder: Annotated[Path, typer.Argument(help="Folder of `eval run` or `eval simulate`.")],
    output: Annotated[Path, typer.Argument(help="CSV to write, a line a run.")],
) -> None:
    """Keep of each run how many turns came back to nothing."""
    runs = runs_in(folder, EXPERIMENT)
    write_rows(output, (recomputed_row(run, run.arm, sessions) for run, sessions in runs))


@app.command("show")
def show_command(
    runs: Annotated[Path, typer.Argument(help="CSV of simulated runs.")],
) -> None:
    """Print the page's tables."""
    rows = read_rows(runs, ("arm", "sessions", "draw", "good_per_s", "sessions_there"))
    for level in sorted({int(row["sessions"]) for row in rows}):
        typer.echo("\n".join(["", *table(rows, level)]))


@app.command("caps")
def caps_command(
    runs: Annotated[Path, typer.Argument(help="CSV of simulated runs of arms cap-6, cap-7, …")],
) -> None:
    """Print what each number of sessions that `cap` lets in brings."""
    typer.echo("\n".join(caps(read_rows(runs, ("arm", "sessions", "good_per_s")))))


@app.command("frontier")
def frontier_command(
    runs: Annotated[list[Path], typer.Argument(help="CSVs of simulated runs, draws 1 to 8.")],
    level: Annotated[list[int], typer.Option(help="Sessions in flight.")],
) -> None:
    """Print who is served well against who is served at all, a line an arm."""
    rows = [row for path in runs for row in read_rows(path, ("arm", "sessions", "good_per_s"))]
    of_levels = [row for row in rows if int(row["sessions"]) in level]
    typer.echo("\n".join(frontier(of_levels, (range(1, 5), range(5, 9)))))


if __name__ == "__main__":
    with told_in_one_line():
        app()
