"""What a failed transfer may still write to, kept unused for a while: KV pages, metadata buffers.

The prefill worker has been told to stop, but a write that is under way cannot be called back, and
nothing says when it has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_ext import sglang


@dataclass(frozen=True)
class _Held:
    until_s: float
    req: Any
    metadata_index: int


class Quarantine:
    """What one worker keeps; `agree` is how its ranks agree on the end."""

    def __init__(
        self, scheduler: Any, duration_s: float, agree: Callable[[list[int]], list[int]]
    ) -> None:
        self._scheduler = scheduler
        self._duration_s = duration_s
        self._agree = agree
        self._held: list[_Held] = []

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, req: Any, metadata_index: int) -> None:
        """Keeps the KV of `req` (or of a stand-in for it) unused, and its lock on the cache.

        Also the metadata buffer that its first token was to come to. SGLang has just freed that:
        it is taken back before anybody else can get it.
        """
        queue = self._scheduler.disagg_decode_transfer_queue
        queue.req_to_metadata_buffer_idx_allocator.free_slots.remove(metadata_index)
        self._held.append(_Held(time.monotonic() + self._duration_s, req, metadata_index))

    def end(self) -> bool:
        """Releases what has been kept for long enough; whether there was anything to look at."""
        if not self._held:
            return False
        now = time.monotonic()
        over = self._agree([int(now >= held.until_s) for held in self._held])
        queue = self._scheduler.disagg_decode_transfer_queue
        for held, done in zip(self._held, over, strict=True):
            if done:
                sglang.elastic().release_kv(self._scheduler.tree_cache, held.req)
                # A late write may have left its room there; the next owner looks for its own.
                queue.metadata_buffers.bootstrap_room[held.metadata_index] = 0
                queue.req_to_metadata_buffer_idx_allocator.free(held.metadata_index)
        self._held = [held for held, done in zip(self._held, over, strict=True) if not done]
        return True

    def sit_out(self) -> bool:
        """Waits until all is over, at most the quarantine's duration, and releases it.

        For a paused worker: no step runs that would end it, and until then the worker is not idle,
        which a weight update takes for granted.
        """
        for held in self._held:
            time.sleep(max(0.0, held.until_s - time.monotonic()))
        return self.end()
