"""``transcript.txt``: what a fleet did and when, as a person reads it and a document quotes it.

Owns the file and its table of workers; what happened is told to it. ``fleet.json`` is the same for
programs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from launch.engines import Engine
from launch.hardware import GpuSample
from launch.supervised import keep_previous


class Transcript:
    """Lines with the seconds since it was begun, each written when it is told. Once it is begun,
    what cannot be written is left out: a full disk shall not keep a fleet from ending."""

    def __init__(self, path: Path, name: str, engine: Engine) -> None:
        self._began_s = time.monotonic()
        keep_previous(path)
        self._file = path.open("w", buffering=1)
        versions = ", ".join(f"{package} {is_}" for package, is_ in engine.versions.items())
        began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        self._file.write(f"{name}, {began}\n{versions}\n\n")

    def tell(self, text: str) -> None:
        """One more line."""
        self._write(f"{time.monotonic() - self._began_s:7.1f} s  {text}\n")

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        """A table, its first row the heads of the columns."""
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = (
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )
        self._write("\n" + "\n".join(lines) + "\n\n")

    def close(self) -> None:
        """Nothing can be told any more."""
        with contextlib.suppress(OSError):
            self._file.close()

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._file.write(text)


def memory_of(gpus: Iterable[GpuSample]) -> str:
    """Memory in use, as in ``57.3, 0.5 GiB``."""
    return ", ".join(f"{gpu.memory_used_bytes / 2**30:.1f}" for gpu in gpus) + " GiB"
