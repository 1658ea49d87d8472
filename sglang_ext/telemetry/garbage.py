"""One line a garbage collection of Python's that stopped the scheduler for long.

SGLang's scheduler is a Python process with 800,000 objects or more after its imports. A collection
of the oldest generation looks at each of them, and no step is launched meanwhile: every answer in
flight has a gap as long. `launch` takes what is there when a worker is warm out of collections
(`launch/freezing.py`); of a worker that was started otherwise these lines say what its gaps are.
"""

from __future__ import annotations

import gc
import time
from typing import Any

from sglang_ext.telemetry import metrics
from sglang_ext.telemetry.sink import emit, harmless, unix_minus

LEAST_S = 0.005
"""Shorter collections are not told of: the young generations' take a fraction of a millisecond."""

_begun_s = 0.0
_ended: list[dict[str, Any]] = []
_watching = False


def watch() -> None:
    """Has this process note its collections from now on, once."""
    global _watching
    if not _watching:
        _watching = True
        gc.callbacks.append(_note)


def _note(phase: str, info: dict[str, int]) -> None:
    # Only noted here: a collection may begin in the middle of the writing of another line.
    global _begun_s
    now_s = time.monotonic()
    if phase == "start":
        _begun_s = now_s
    elif (duration_s := now_s - _begun_s) >= LEAST_S:
        _ended.append(
            {
                "generation": info["generation"],
                "start_unix_s": _begun_s + unix_minus(time.monotonic),
                "duration_s": duration_s,
                "collected": info["collected"],
            }
        )


@harmless
def write() -> None:
    """Writes the lines of collections that ended since the last call."""
    while _ended:
        fields = _ended.pop(0)
        if (totals := metrics.totals()) is not None:
            totals.collection(fields["generation"], fields["duration_s"])
        emit("garbage_collection", fields)
