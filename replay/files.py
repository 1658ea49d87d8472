"""Writing whole JSON files: either the new content stands there, or what stood there before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from deltaserve.errors import InputError


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Replaces a file. Raises `InputError` where it cannot be written (a full disk), and leaves no
    part of it behind."""
    part = path.with_suffix(".part")
    try:
        part.write_bytes(
            orjson.dumps(record, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        )
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None
