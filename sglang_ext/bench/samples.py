"""Raw samples on disk: one JSON line each, written as soon as it is measured."""

from __future__ import annotations

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
        self._phase = phase

    def write(self, kind: str, **fields: Any) -> None:
        line = {"phase": self._phase, "kind": kind, **fields}
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
