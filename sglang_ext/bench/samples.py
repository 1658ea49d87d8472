"""Raw samples on disk: one JSON line each, written as soon as it is measured.

Every line names its phase and the run of that phase, so that a phase can be run again in the same
folder; `fullest` picks the run to report.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from deltaserve.errors import InputError

Sample = dict[str, Any]


class Sink:
    """Appends samples of one phase to ``samples.jsonl`` of `folder`."""

    def __init__(self, folder: Path, phase: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "samples.jsonl").open("ab", buffering=0)
        self._identity = {"phase": phase, "run": time.time_ns()}

    def write(self, kind: str, **fields: Any) -> None:
        line = {**self._identity, "kind": kind, **fields}
        self._file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


def read(folder: Path) -> list[Sample]:
    """The samples of `folder`; a last line that was cut off by a kill is left out."""
    path = folder / "samples.jsonl"
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError as error:
        raise InputError(f"{path}: no samples; run a phase first") from error
    samples = []
    for line in lines:
        if not line:
            continue
        try:
            samples.append(orjson.loads(line))
        except orjson.JSONDecodeError:
            continue
    return samples


def fullest(samples: Sequence[Sample], phase: str) -> list[Sample]:
    """The samples of the run of `phase` that counts most of them, the later of equals."""
    runs: dict[int, list[Sample]] = {}
    for sample in samples:
        if sample["phase"] == phase:
            runs.setdefault(sample["run"], []).append(sample)

    def worth(run: int) -> tuple[int, int]:
        return sum(not sample.get("warm_up") for sample in runs[run]), run

    return runs[max(runs, key=worth)] if runs else []
