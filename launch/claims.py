"""Who has a run folder: one fleet at a time, from before it is planned until it has ended.

Owns the folder's ``.lock`` and what is in it: a start that has no ``fleet.json`` yet can be found,
and ended, by that.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import orjson

from deltaserve.errors import InputError
from deltaserve.locks import lock_at_once
from launch.cache import make_folder
from launch.supervised import is_running, started_at

_LOCK = ".lock"


@dataclass(frozen=True)
class Start:
    """A start of the topology `name`, by the process that is `pid` since `started` on `host`."""

    name: str
    host: str
    pid: int
    started: str
    since_unix_s: float


@contextlib.contextmanager
def claim(run_dir: Path) -> Iterator[TextIO]:
    """Holds `run_dir` for one fleet at a time; raises `InputError` where another has it. Gives the
    file that it is held by."""
    make_folder(run_dir)
    with (run_dir / _LOCK).open("a+") as lock:  # what another has in it stays
        if not lock_at_once(lock):
            raise InputError(
                f"{run_dir}: a fleet is running there; run: deltaserve launch down {run_dir}"
            )
        yield lock


def announce(lock: TextIO, name: str) -> None:
    """From now on others find that this process starts a fleet of the name in the folder held by
    `lock`, until another announces itself there, and also once the folder is let go."""
    pid = os.getpid()
    start = Start(name, socket.gethostname(), pid, started_at(pid) or "", time.time())
    # After what is there: who looks meanwhile finds the one before or this one, and never nobody.
    lock.write(orjson.dumps(asdict(start)).decode() + "\n")
    lock.flush()


@contextlib.contextmanager
def announced(lock: TextIO, name: str) -> Iterator[None]:
    """Within it others find who starts a fleet of the name in the folder held by `lock`."""
    announce(lock, name)
    try:
        yield
    finally:
        lock.truncate(0)


def announced_start(run_dir: Path) -> Start | None:
    """The start in `run_dir` that was announced last, by a process of this host that runs still."""
    try:
        start = Start(**orjson.loads((run_dir / _LOCK).read_bytes().splitlines()[-1]))
    except (OSError, ValueError, TypeError, IndexError):  # nobody's, or not all of it is there yet
        return None
    is_here = start.host == socket.gethostname()
    return start if is_here and is_running(start.pid, start.started) else None
