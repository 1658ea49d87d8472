"""The raw lines of the measured runs that docs/results has pages of."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson
import zstandard

from eval.records import Run, read_run
from eval.run_lines import Row

RESULTS = Path(__file__).parents[2] / "docs" / "results"


# Their tables are counted through, in this order.
RESIDENCY_PAGES = (
    "residency.md",
    "residency-fp8.md",
    "residency-draws.md",
    "residency-slices.md",
    "residency-bf16.md",
)


def residency_text() -> str:
    """The pages of measured residency, one after the other."""
    return "".join((RESULTS / page).read_text() for page in RESIDENCY_PAGES)


def lines(name: str, folder: str = "residency") -> list[dict[str, Any]]:
    """The result lines of a run."""
    return _unpacked(folder, f"{name}.requests.jsonl.zst")


def phases(name: str, folder: str = "residency") -> dict[str, Any]:
    """Where its window was."""
    found: dict[str, Any] = json.loads((RESULTS / folder / f"{name}.phases.json").read_text())
    return found


def decisions(name: str, folder: str = "residency") -> list[dict[str, Any]]:
    """What its router logged."""
    return _unpacked(folder, f"{name}.decisions.jsonl.zst")


def steps(name: str, folder: str) -> list[dict[str, Any]]:
    """What its workers' telemetry wrote, one worker after another."""
    return _unpacked(folder, f"{name}.steps.jsonl.zst")


def served_percent(rows: Iterable[Row]) -> float:
    """Of the sessions that were there in simulated runs, those that got an answer."""
    runs = list(rows)
    answered, there = (
        sum(int(row[column]) for row in runs) for column in ("sessions_answered", "sessions_there")
    )
    return 100 * answered / there


def _bytes(folder: str, name: str) -> bytes:
    packed = (RESULTS / folder / name).read_bytes()
    return zstandard.ZstdDecompressor().decompressobj().decompress(packed)


# A test asks for the same few runs again and again; all of them would not fit in memory.
@lru_cache(maxsize=12)
def _unpacked(folder: str, name: str) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in _bytes(folder, name).splitlines()]


def row(table: int, label: str, text: str | None = None) -> list[str]:
    """The cells of a row of a table in `text`, which is the pages of measured residency where none
    is given; each table begins with its requests/s."""
    text = residency_text() if text is None else text
    block = re.split(r"^(?=\| requests/s \|)", text, flags=re.M)[table + 1]
    found = re.search(rf"^\| {re.escape(label)} \|(.*)\|$", block, re.M)
    assert found, f"table {table} has no row {label}"
    return [cell.strip() for cell in found[1].split("|")]


def says(page: str, *words: str) -> None:
    """A page has all of these."""
    assert [each for each in words if each not in page] == []


def number(cell: str) -> float:
    """The figure that a table's cell begins with."""
    return float(cell.split()[0].rstrip("%").replace("∞", "inf"))


def run_of(
    name: str, folder: Path, results: str = "residency", *, with_decisions: bool = False
) -> Run:
    """A run as reports read it, from its raw lines in the folder `results` of docs/results;
    `folder` is made for it. Only `with_decisions` it knows which worker served what."""
    folder.mkdir()
    manifest = {"arm": {"name": name}, "state": "complete", "repeat": 1}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "requests.jsonl").write_bytes(_bytes(results, f"{name}.requests.jsonl.zst"))
    shutil.copy(RESULTS / results / f"{name}.phases.json", folder / "phases.json")
    if with_decisions:
        (folder / "decisions.jsonl").write_bytes(_bytes(results, f"{name}.decisions.jsonl.zst"))
    return read_run(folder)


def plan_text() -> str:
    """Pages of predictions, which move from one to the other when they have been measured."""
    return "".join((RESULTS / page).read_text() for page in ("plan.md", "predictions.md"))


def command_options(command: str) -> tuple[list[str], list[str]]:
    """The overrides (`--set`) and arms (`--only`) of a command of these pages' plan; a line that
    ends with ``\\`` goes on in the next."""
    [found] = re.findall(rf"^deltaserve {command} ((?:.*\\\n)*.*)$", plan_text(), re.M)
    words = shlex.split(found.replace("\\\n", " "), comments=True)
    pairs = list(zip(words[::2], words[1::2], strict=True))
    overrides, only = (
        [value for flag, value in pairs if flag == name] for name in ("--set", "--only")
    )
    return overrides, only
