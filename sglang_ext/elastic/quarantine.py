"""The KV of failed transfers, kept unused for a while.

The prefill worker has been told to stop, but a write that is under way cannot be called back, and
nothing says when it has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class Quarantine:
    """What one worker keeps; `agree` is how its ranks agree on the end."""

    def __init__(
        self, scheduler: Any, duration_s: float, agree: Callable[[list[int]], list[int]]
    ) -> None:
        self._scheduler = scheduler
        self._duration_s = duration_s
        self._agree = agree
        self._held: list[tuple[float, Any]] = []

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, req: Any) -> None:
        """Keeps the KV of `req` (or of a stand-in for it) unused, and its lock on the cache."""
        self._held.append((time.monotonic() + self._duration_s, req))

    def end(self) -> bool:
        """Releases what has been kept for long enough; whether there was anything to look at."""
        if not self._held:
            return False
        from sglang.srt.mem_cache.common import release_kv_cache

        now = time.monotonic()
        over = self._agree([int(now >= until) for until, _ in self._held])
        for (_, req), done in zip(self._held, over, strict=True):
            if done:
                release_kv_cache(req, self._scheduler.tree_cache, is_insert=False)
        self._held = [entry for entry, done in zip(self._held, over, strict=True) if not done]
        return True

    def sit_out(self) -> bool:
        """Waits until all is over, at most the quarantine's duration, and releases it.

        For a paused worker: no step runs that would end it, and until then the worker is not idle,
        which a weight update takes for granted.
        """
        for until_s, _ in self._held:
            time.sleep(max(0.0, until_s - time.monotonic()))
        return self.end()
