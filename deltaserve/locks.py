"""Locks of files, by which programs keep out of each other's way. The system lets go of them when
the last process that has the file open is gone, however it ended."""

from __future__ import annotations

import fcntl
from typing import IO, Any


def lock_at_once(file: IO[Any] | int) -> bool:
    """Whether the file, by its descriptor too, is this program's alone now, which never waits for
    another that has it. Raises OSError on a file system without locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
