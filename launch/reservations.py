"""What a fleet keeps from every other fleet of the same user while it lives: its ports and GPUs.

Owns the lock files in the cache folder, each host's own. An engine opens its ports and takes its
GPU's memory a minute after both were found free; the system drops a lock with the process that
holds it. To ask for a lock is to hold it for a moment, so asking and taking are one at a time.
"""

from __future__ import annotations

import fcntl
import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal, TextIO

from deltaserve.errors import InputError
from deltaserve.locks import lock_at_once
from launch.cache import cache_dir, make_folder


class TakenError(InputError):
    """Another fleet has the port or the GPU."""


@contextmanager
def reserved(ports: Iterable[int], gpus: Iterable[int] = ()) -> Iterator[None]:
    """Keeps them for as long as the block runs; `TakenError` where another fleet has one."""
    wanted = [("port", port, "base_port") for port in sorted(ports)]
    wanted += [("GPU", gpu, "gpus") for gpu in sorted(gpus)]
    with ExitStack() as held:
        for kind, number, key in wanted:
            with _one_at_a_time(kind):
                is_ours = lock_at_once(held.enter_context(_lock_file(kind, number)))
            if not is_ours:
                raise TakenError(
                    f"{kind} {number} belongs to another fleet (deltaserve launch status); end it "
                    f"or change {key}"
                )
        yield


def is_reserved(kind: Literal["port", "GPU"], number: int) -> bool:
    """Whether a fleet has the port or GPU of that number."""
    with _one_at_a_time(kind), _lock_file(kind, number) as lock:
        return not lock_at_once(lock)


@contextmanager
def _one_at_a_time(kind: str) -> Iterator[None]:
    with _open(kind, "all") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _lock_file(kind: str, number: int) -> TextIO:
    return _open(kind, str(number))


def _open(kind: str, name: str) -> TextIO:
    folder = cache_dir() / "reserved" / kind
    make_folder(folder)
    # A home that several machines share holds the locks of each.
    return (folder / f"{socket.gethostname()}-{name}.lock").open("w")
