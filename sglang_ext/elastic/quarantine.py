"""What a failed transfer may still write to, kept unused for a while: KV pages, metadata buffers.

The prefill worker has been told to stop, but a write that is under way cannot be called back. Where
SGLang has the prefill worker say when it has ended, SGLang keeps them until then; elsewhere, and
where nobody is left to say so, they are kept for a time that a write is sure to have ended in.
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


_POLL_S = 0.01


class Quarantine:
    """What one worker keeps, or has SGLang keep; `agree` is how its ranks agree on the end."""

    def __init__(
        self, scheduler: Any, duration_s: float, agree: Callable[[list[int]], list[int]]
    ) -> None:
        self._scheduler = scheduler
        self._duration_s = duration_s
        self._agree = agree
        self._held: list[_Held] = []

    def __len__(self) -> int:
        return len(self._held) + sglang.elastic().awaiting_acknowledgement(self._queue)

    @property
    def _queue(self) -> Any:
        return self._scheduler.disagg_decode_transfer_queue

    def hold(self, entry: Any, req: Any, *, writer_is_gone: bool) -> None:
        """Keeps the KV of `req`, a stand-in for that of `entry`, unused, and its lock on the cache.

        Also the metadata buffer that its first token was to come to. SGLang has just freed that:
        it is taken back before anybody else can get it. `writer_is_gone` says that the prefill
        worker cannot answer any more: its word is then not waited for.
        """
        index = entry.metadata_buffer_index
        self._queue.req_to_metadata_buffer_idx_allocator.free_slots.remove(index)
        longest_s = self._duration_s if writer_is_gone else None
        if sglang.elastic().keep_until_acknowledged(self._queue, entry, req, longest_s=longest_s):
            return
        if entry.kv_receiver is not None:
            entry.kv_receiver.clear()
            entry.kv_receiver = None
        self._held.append(_Held(time.monotonic() + self._duration_s, req, index))

    def end(self) -> bool:
        """Releases what was kept here for long enough; whether there was anything to look at."""
        if not self._held:
            return False
        now = time.monotonic()
        over = self._agree([int(now >= held.until_s) for held in self._held])
        queue = self._queue
        for held, done in zip(self._held, over, strict=True):
            if done:
                sglang.elastic().release_kv(self._scheduler.tree_cache, held.req)
                # A late write may have left its room there; the next owner looks for its own.
                queue.metadata_buffers.bootstrap_room[held.metadata_index] = 0
                queue.req_to_metadata_buffer_idx_allocator.free(held.metadata_index)
        self._held = [held for held, done in zip(self._held, over, strict=True) if not done]
        return True

    def sit_out(self) -> bool:
        """Waits until all is over, at most the quarantine's duration or SGLang's, and releases it.

        For a paused worker: no step runs that would end it, and until then the worker is not idle,
        which a weight update takes for granted.
        """
        verbs = sglang.elastic()
        verbs.release_acknowledged(self._queue)
        while verbs.awaiting_acknowledgement(self._queue):
            time.sleep(_POLL_S)
            verbs.release_acknowledged(self._queue)
        for held in self._held:
            time.sleep(max(0.0, held.until_s - time.monotonic()))
        return self.end()
