"""A CSV line for each run of a folder: `python -m eval.run_lines FOLDER CSV`.

Owns what is kept of a run when its turns are not: what was served, what sessions felt, and whether
the objective is met. How that is judged is `eval.judged`'s.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from deltaserve.errors import InputError, errors_in_one_line
from eval.experiment import OBJECTIVES, Slo
from eval.judged import not_met, product_limit
from eval.metrics import alone_by_arm
from eval.outcomes import Outcome
from eval.records import Run
from eval.report import find_runs
from eval.steady import steadiness
from launch.cache import make_folder

Row = dict[str, str]
FELT: Mapping[str, str] = {
    "first_tokens_per_s": ".4f",
    "in_time_share": ".4f",
    "late_share_p90": ".4f",
    "waiting_sessions": ".3f",
    "wait_mean_s": ".4g",
    "longest_wait_s": ".4g",
    "starved_sessions": ".0f",
}
"""What sessions felt, as `eval.judged` measures it, and how it is written."""


def cell(value: float, form: str = ".4f") -> str:
    """A number as a cell; nothing where it is none, or beyond every bound."""
    return f"{value:{form}}" if math.isfinite(value) else ""


def rows_of(runs: Sequence[Run], slo: Slo) -> Iterator[Row]:
    """A row a run: arm, load, trace seed, what sessions felt, stretch, whether the window was
    steady, and why it misses the objective (`not_met`; empty where it meets it). Stretch is against
    what the arm's runs at one session in flight took, where there are any."""
    by_arm: dict[str, list[Run]] = {}
    for run in runs:
        by_arm.setdefault(run.arm, []).append(run)
    alone = alone_by_arm(by_arm)
    for run in runs:
        outcome = Outcome(run, slo, alone[run.arm])
        sessions = outcome.sessions
        [stretch_p90] = product_limit(
            sessions["stretch"].to_numpy(dtype=float),
            sessions["at_least"].to_numpy(dtype=bool),
            0.9,
        )
        reasons = not_met(outcome.measures, slo, float(stretch_p90))
        yield {
            "arm": run.arm,
            "load": run.load or "",
            "trace_seed": str((run.manifest.get("identity") or {}).get("seed", "")),
            **{name: cell(outcome.measures[name], form) for name, form in FELT.items()},
            "stretch_p90": cell(float(stretch_p90), ".4g"),
            "state": str(steadiness(run).state),
            "not_met": "; ".join(reasons),
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


def main(
    folder: Annotated[Path, typer.Argument(help="Folder of `eval run` or `eval simulate`.")],
    output: Annotated[Path, typer.Argument(help="CSV to write, a line a run.")],
    objective: Annotated[
        str, typer.Option(help=f"What is judged by: {', '.join(OBJECTIVES)}.")
    ] = "sessions",
) -> None:
    """Keep a line of each run."""
    if objective not in OBJECTIVES:
        raise InputError(f"--objective {objective}: expected one of {', '.join(OBJECTIVES)}")
    write_rows(output, rows_of(find_runs([folder]), Slo.model_validate({"preset": objective})))


if __name__ == "__main__":
    with errors_in_one_line():
        typer.run(main)
