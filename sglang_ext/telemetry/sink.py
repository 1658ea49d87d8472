"""Where telemetry goes: one JSON Lines file a process, a few microseconds a line."""

from __future__ import annotations

import functools
import logging
import math
import os
import time
from collections.abc import Callable
from typing import Any, ParamSpec

import orjson

from sglang_ext.telemetry.lines import LineFile

logger = logging.getLogger(__name__)

_DEFAULT_MAX_MB = 4000

_file: LineFile | None = None
_worker_id = os.environ.get("DELTASERVE_WORKER_ID", "")

_P = ParamSpec("_P")
_failed: set[str] = set()


def unix_minus(clock: Callable[[], float]) -> float:
    """What to add to a reading of `clock` to have Unix time, in seconds.

    Asked for anew with every line: over days NTP moves Unix time by more than a step takes.
    """
    return time.time() - clock()


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


def _limit_bytes() -> int:
    text = os.environ.get("DELTASERVE_TELEMETRY_MAX_MB", "").strip() or str(_DEFAULT_MAX_MB)
    try:
        limit_mb = float(text)
    except ValueError:
        limit_mb = math.nan
    if not (math.isfinite(limit_mb) and limit_mb >= 1):
        raise SystemExit(f"DELTASERVE_TELEMETRY_MAX_MB={text!r}: expected a number of at least 1")
    return int(limit_mb * 1e6)


def settings() -> tuple[str, int]:
    """The folder of the lines and how many bytes a process keeps there, as the environment says.

    Raises SystemExit where it says nothing, or what cannot be meant: asked for when a worker
    starts, that does not end it at its first request.
    """
    folder = os.environ.get("DELTASERVE_TELEMETRY_DIR")
    if not folder:
        raise SystemExit("DELTASERVE_SGLANG asks for telemetry: set DELTASERVE_TELEMETRY_DIR")
    return folder, _limit_bytes()


def _open() -> LineFile:
    folder, limit_bytes = settings()
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"{_worker_id or 'worker'}-{os.getpid()}.jsonl")
    return LineFile(path, limit_bytes)


def emit(event: str, fields: dict[str, Any]) -> None:
    """Writes one line: `event`, the worker's id, and `fields` (times in Unix seconds).

    After lines were lost to a full disk, the first one that it takes again is ``lost``, with their
    number.
    """
    global _file
    if _file is None:
        _file = _open()
    if not _file.ready():
        return
    data = _encoded(event, fields)
    if lost := _file.lost_lines:
        if not _file.write(_encoded("lost", {"lines": lost, "until_unix_s": time.time()})):
            return
        _file.lost_lines = 0
    _file.write(data)


def _encoded(event: str, fields: dict[str, Any]) -> bytes:
    line = {"event": event, "worker_id": _worker_id, **fields}
    return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
