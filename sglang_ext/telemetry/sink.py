"""Where telemetry goes: one JSON Lines file a process, each line one ``write`` of its own.

A line is therefore either whole or absent after a kill, and costs a few microseconds; no thread is
involved, so telemetry cannot fall behind the worker or keep it from ending.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable
from typing import Any, ParamSpec

import orjson

logger = logging.getLogger(__name__)

_descriptor: int | None = None
_worker_id = os.environ.get("DELTASERVE_WORKER_ID", "")

unix_minus_perf_counter_s = time.time() - time.perf_counter()
"""Adds to a ``time.perf_counter()`` reading of this process to give Unix time, in seconds."""

unix_minus_monotonic_s = time.time() - time.monotonic()
"""The same for ``time.monotonic()``."""


_P = ParamSpec("_P")
_failed: set[str] = set()


def harmless(record: Callable[_P, None]) -> Callable[_P, None]:
    """`record`, whose errors are logged once each place and do not reach the worker.

    What observes a worker must not end it, nor break a transfer that it only counts.
    """

    @functools.wraps(record)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            record(*args, **kwargs)
        except Exception:
            if record.__qualname__ not in _failed:
                _failed.add(record.__qualname__)
                logger.exception("Telemetry: %s fails; its lines are missing", record.__qualname__)

    return guarded


def _open() -> int:
    folder = os.environ.get("DELTASERVE_TELEMETRY_DIR")
    if not folder:
        raise SystemExit("DELTASERVE_SGLANG asks for telemetry: set DELTASERVE_TELEMETRY_DIR")
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"{_worker_id or 'worker'}-{os.getpid()}.jsonl")
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def emit(event: str, fields: dict[str, Any]) -> None:
    """Writes one line: `event`, the worker's id, and `fields` (times in Unix seconds)."""
    global _descriptor
    if _descriptor is None:
        _descriptor = _open()
    line = {"event": event, "worker_id": _worker_id, **fields}
    os.write(_descriptor, orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
