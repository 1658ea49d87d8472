"""A line for each level that searches tried: `python -m eval.search_lines lines FOLDER CSV`.

Owns what is kept of a search when its runs are not. What a level was judged by is `eval.search`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import typer

from deltaserve.errors import InputError, told_in_one_line
from eval import provenance
from eval.run_lines import Row, add_lines_command, cell
from eval.search import CAPACITY_FILE

_ENDLESS = 1e6  # more than any objective may ask for


def rows_in(folder: Path) -> Iterator[Row]:
    """The levels of every search under `folder`: by arm, draw of sessions and sessions in flight.

    Raises InputError where there is no search."""
    paths = list(folder.rglob(CAPACITY_FILE))
    if not paths:
        raise InputError(f"{folder}: no search ({CAPACITY_FILE})")
    rows = [row for path in paths for row in _levels(path)]
    yield from sorted(rows, key=lambda row: (row["arm"], int(row["draw"]), float(row["level"])))


def _levels(path: Path) -> Iterator[Row]:
    found: dict[str, Any] = orjson.loads(path.read_bytes())
    for level in found["levels"]:
        name = f"{found['arm']}@{level['load']:g}"
        manifest = provenance.read_manifest(path.parent.parent / name / "r1")
        if manifest is None:
            raise InputError(f"{path}: {name}: its run is not there, which says the draw")
        yield {
            "arm": found["arm"],
            "draw": str(manifest["identity"]["seed"]),
            "level": f"{level['load']:g}",
            "runs": str(level["repeats"]),
            "requests_per_s": _cell(level["requests_per_s"]),
            "within_objective": _cell(level["attainment"]),
            "stretch_p90": _stretch(level["stretch_p90"]),
            "sustained": str(level["sustained"]),
            "carried": str(level["meets"]),
            "sure": str(level["sure"]),
            "agents": f"{found['agents']:g}",
        }


def _stretch(value: float | None) -> str:
    """Beyond every bound where that many sessions were left without an answer."""
    return "inf" if value is not None and value > _ENDLESS else _cell(value, ".4g")


def _cell(value: float | None, form: str = ".4f") -> str:
    return cell(math.nan if value is None else value, form)


app = typer.Typer(no_args_is_help=True, add_completion=False)
add_lines_command(app, rows_in)


@app.callback()
def _commands() -> None:
    """Levels of searches as lines."""


if __name__ == "__main__":
    with told_in_one_line():
        app()
