"""Ports of a topology: who gets which, whether they are free, and keeping them.

The layout is pure: the router has the base port, and each worker a block of its own above it. An
engine opens its ports a minute after they were found free, so a fleet reserves them among fleets
for as long as it lives.
"""

from __future__ import annotations

import fcntl
import random
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TextIO

import psutil

from deltaserve.errors import InputError
from launch.cache import cache_dir

BLOCK = 20
"""Ports from one worker's first to the next worker's first."""

# `dist` comes last: vLLM counts up from it for what it opens besides.
_OFFSETS = {
    "http": 0,
    "bootstrap": 1,
    "side_channel": 2,
    "master": 3,
    "kv_events": 4,
    "kv_events_replay": 5,
    "dist": 6,
}


def worker_ports(base_port: int, index: int) -> dict[str, int]:
    """Ports of the worker at `index` (0-based) of a topology with `base_port`."""
    first = base_port + BLOCK * (index + 1)
    return {name: first + offset for name, offset in _OFFSETS.items()}


def free_base(worker_count: int) -> int:
    """A base port above which everything that `worker_count` workers need is free now.

    Raises `InputError` when there is none below the range that the system gives out by itself.
    """
    bases = list(range(20000, 32000, BLOCK * (worker_count + 1)))
    random.shuffle(bases)
    for base in bases:
        needed = [base]
        for index in range(worker_count):
            needed += worker_ports(base, index).values()
        if all(_is_free(port) and not _is_reserved(port) for port in needed):
            return base
    raise InputError("base_port = 0: no free block of ports between 20000 and 32000")


def check_free(wanted: Mapping[int, str]) -> None:
    """Raises `InputError` for the first port in use; `wanted` is port → what it is for."""
    for port, purpose in sorted(wanted.items()):
        if not _is_free(port):
            raise InputError(
                f"port {port} ({purpose}) is in use{_owner(port)}; stop it or change base_port"
            )


@contextmanager
def reserved(wanted: Iterable[int]) -> Iterator[None]:
    """Keeps the ports from every other fleet of this user; `InputError` where one has them."""
    with ExitStack() as held:
        for port in sorted(wanted):
            lock = held.enter_context(_lock_file(port))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(
                    f"port {port} belongs to another fleet (deltaserve launch status); end it or "
                    "change base_port"
                ) from None
        yield


def _is_reserved(port: int) -> bool:
    with _lock_file(port) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _lock_file(port: int) -> TextIO:
    folder = cache_dir() / "ports"
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / f"{port}.lock").open("w")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _owner(port: int) -> str:
    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return ""
    for connection in connections:
        if connection.laddr and connection.laddr.port == port and connection.pid:
            try:
                name = psutil.Process(connection.pid).name()
            except psutil.NoSuchProcess:
                continue
            return f" by pid {connection.pid} ({name})"
    return ""
