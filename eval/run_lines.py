"""One CSV line a run: what is kept of many simulated runs, and what tables follow from."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

Row = dict[str, str]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Writes each row as it comes, so that what was simulated is kept when the rest is not; all
    have the columns of the first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer: csv.DictWriter[str] | None = None
        for row in rows:
            if writer is None:
                writer = csv.DictWriter(file, list(row), lineterminator="\n")
                writer.writeheader()
            writer.writerow(row)
            file.flush()


def read_rows(path: Path) -> list[Row]:
    """The rows of such a file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
