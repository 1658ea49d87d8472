"""Where launch keeps what outlives a run: engines, models, flag lists, fleets.

Knows the user's cache folder, how a folder that a user named is made, and how to write a file so
that a reader never sees half of it; knows nothing of what is in the files.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from deltaserve.errors import InputError


def cache_dir() -> Path:
    """``$DELTASERVE_CACHE``, else ``$XDG_CACHE_HOME/deltaserve``, else ``~/.cache/deltaserve``."""
    if chosen := os.environ.get("DELTASERVE_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "deltaserve"


def make_folder(folder: Path) -> None:
    """Makes `folder` where it is not there; raises `InputError` where it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made a folder: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{folder}: cannot be written to: Permission denied")


def write_atomically(path: Path, content: bytes) -> None:
    """Writes `content` so that `path` holds either what it held before or all of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(beside, path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise
