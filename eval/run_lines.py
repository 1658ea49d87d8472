"""One CSV line a run: what is kept of many simulated runs, and what tables follow from."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer

from deltaserve.errors import InputError
from eval.records import Run
from eval.stats import quantile_points
from launch.cache import make_folder

Row = dict[str, str]


def cell(value: float, form: str = ".4f") -> str:
    """A number as a cell; nothing where it is none, or beyond every bound."""
    return f"{value:{form}}" if math.isfinite(value) else ""


def turns_of(run: Run) -> pd.DataFrame:
    """The turns scheduled in a run's window that were answered or failed."""
    table = run.requests
    return table[table["ok"] | table["failed"]]


def figures(run: Run) -> Row:
    """The figures of a run that every page of many runs wants, of turns scheduled in its window
    (requests/s: of those that ended in it). Times in seconds; quantiles are of turns that have the
    measured time, with those that failed beyond every bound."""
    counted = turns_of(run)
    answered = counted[counted["ok"]]
    start_s, end_s = run.span_s

    def quantile(column: str, share: float) -> str:
        # An answer of one token, or that came all at once, has no time a token and no gap: it is
        # left out, as in reports. Counted as 0 it would make the others look faster.
        known = np.asarray(counted[column].dropna(), dtype=np.float64)
        return cell(float(quantile_points(known, [share])[0]) if len(known) else math.nan, ".4g")

    # Where an engine does not say what it found, that is unknown, and not nothing.
    told = answered[answered["cached_tokens"].notna()]
    cached, prompt = told["cached_tokens"].sum(), told["prompt_tokens"].sum()
    ended = run.all_requests["finished_s"].between(start_s, end_s) & run.all_requests["ok"]
    ended &= run.all_requests["phase"].ne("prime")
    return {
        "measured_turns": str(len(counted)),
        "requests_per_s": cell(float(ended.sum()) / (end_s - start_s)),
        "cached_share": cell(cached / prompt if prompt else math.nan),
        "ttft_p50_s": quantile("ttft_s", 0.5),
        "ttft_p90_s": quantile("ttft_s", 0.9),
        "tpot_p50_s": quantile("tpot_s", 0.5),
        "worst_gap_p90_s": quantile("worst_gap_s", 0.9),
    }


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Writes each row as it comes, so that what was simulated is kept when the rest is not; all
    have the columns of the first."""
    make_folder(path.parent)
    with path.open("w", newline="") as file:
        writer: csv.DictWriter[str] | None = None
        for row in rows:
            if writer is None:
                writer = csv.DictWriter(file, list(row), lineterminator="\n")
                writer.writeheader()
            writer.writerow(row)
            file.flush()


def read_rows(path: Path, columns: Iterable[str] = ()) -> list[Row]:
    """The rows of such a file. Raises `InputError` where it cannot be read, or lacks one of
    `columns`."""
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            rows, known = list(reader), reader.fieldnames or ()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    missing = [column for column in columns if column not in known]
    if missing:
        raise InputError(f"{path}: has no column {missing[0]}")
    return rows


def add_lines_command(app: typer.Typer, rows_in: Callable[[Path], Iterable[Row]]) -> None:
    """Gives an app the command `lines`, which writes the rows of a folder's runs to a CSV."""

    @app.command("lines")
    def lines_command(
        folder: Annotated[Path, typer.Argument(help="Folder of `eval run` or `eval simulate`.")],
        output: Annotated[Path, typer.Argument(help="CSV to write, a line a run.")],
    ) -> None:
        """Keep a line of each run of the experiment."""
        write_rows(output, rows_in(folder))
