"""Writing whole files: either the new content stands there, or what stood there before."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import orjson

from deltaserve.errors import InputError


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Replaces a file by a record, as `write_file` does."""
    write_file(path, orjson.dumps(record, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def write_file(path: Path, content: bytes) -> None:
    """Replaces a file. Raises `InputError` where it cannot be written (a full disk, a folder that
    is not there), and leaves no part of it behind."""
    part = path.with_suffix(".part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None
