"""Ports of a topology: who gets which, and whether they are free.

The layout is pure: the router has the base port, and each worker a block of its own above it.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Mapping

import psutil

from deltaserve.errors import InputError
from launch.reservations import is_reserved

BLOCK = 20
"""Ports from one worker's first to the next worker's first."""

LARGEST_PORT = 65_535

_FREE_FROM, _FREE_UNTIL = 20_000, 32_000

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


def last_port(base_port: int, worker_count: int) -> int:
    """A topology's last port; with `base_port` 0 where it gets the lowest of the free blocks."""
    return max(worker_ports(base_port or _FREE_FROM, worker_count - 1).values())


def free_base(worker_count: int) -> int:
    """A base port above which everything that `worker_count` workers need is free now.

    Raises `InputError` when there is none below the range that the system gives out by itself.
    """
    bases = list(range(_FREE_FROM, _FREE_UNTIL, BLOCK * (worker_count + 1)))
    random.shuffle(bases)
    for base in bases:
        needed = [base]
        for index in range(worker_count):
            needed += worker_ports(base, index).values()
        if all(_is_free(port) and not is_reserved("port", port) for port in needed):
            return base
    raise InputError(
        f"base_port = 0: no free block of ports between {_FREE_FROM} and {_FREE_UNTIL}"
    )


def check_free(wanted: Mapping[int, str]) -> None:
    """Raises `InputError` for the first port in use; `wanted` is port → what it is for."""
    for port, purpose in sorted(wanted.items()):
        if not _is_free(port):
            raise InputError(
                f"port {port} ({purpose}) is in use{_owner(port)}; stop it, or change base_port "
                "(0 takes free ports)"
            )


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
