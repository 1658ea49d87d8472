"""Which request waits where on an elastic worker, and in which order.

Local prompts wait in SGLang's own ``waiting_queue``, where its prefill scheduling finds them.
Requests whose KV has arrived wait in a second list, which is shown to SGLang's decode code as its
``waiting_queue`` while that code runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang_ext import sglang
from sglang_ext.elastic.admission import Place

LOCAL_ROOM = -1
"""Room of a request that came without one; SGLang's check for a missing room lets it pass."""


class Queues:
    """The two lists of one scheduler."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.transferred: list[Any] = []
        self._set_aside: list[Any] | None = None
        self._arrivals = itertools.count()

    @property
    def local(self) -> list[Any]:
        """Requests that wait to be prefilled here."""
        queue: list[Any] = (
            self._scheduler.waiting_queue if self._set_aside is None else self._set_aside
        )
        return queue

    @contextmanager
    def hiding_local(self) -> Iterator[None]:
        """Within it, SGLang sees none of the prompts that wait to be prefilled here."""
        queue, self._scheduler.waiting_queue = self._scheduler.waiting_queue, []
        try:
            yield
        finally:
            self._scheduler.waiting_queue = queue

    @contextmanager
    def showing_transferred(self) -> Iterator[None]:
        """Within it, SGLang's ``waiting_queue`` holds the requests whose KV has arrived."""
        self._set_aside, self._scheduler.waiting_queue = (
            self._scheduler.waiting_queue,
            self.transferred,
        )
        try:
            yield
        finally:
            self.transferred = self._scheduler.waiting_queue
            self._scheduler.waiting_queue, self._set_aside = self._set_aside, None

    def is_local(self, req: Any) -> bool:
        """Whether `req` is to be prefilled on this worker.

        Also one with a room and no host to ask for it: SGLang would end the worker.
        """
        return bool(getattr(req, "deltaserve_local", False)) or req.bootstrap_host is None

    def add_local(self, req: Any, *, first: bool = False) -> None:
        """Puts `req` in line to be prefilled here: at its place by arrival, or `first`.

        Its place, because a request that falls back has waited before.
        """
        from sglang.srt.disaggregation.utils import DisaggregationMode

        req.deltaserve_local = True
        if req.bootstrap_room not in (None, LOCAL_ROOM):
            # Telemetry names it: what was sent for this request has it too.
            req.deltaserve_room = req.bootstrap_room
        req.bootstrap_room = None
        # Its phases are those of a colocated request; in decode mode they would be named, and
        # measured, after a transfer that never was.
        req.time_stats.disagg_mode = DisaggregationMode.NULL
        self.number(req)
        queue = self.local
        at = 0
        if not first:
            at = len(queue)
            while at and self._arrival(queue[at - 1]) > self._arrival(req):
                at -= 1
        queue.insert(at, req)
        sglang.elastic().enter_line(self._scheduler, req)
        stats = req.time_stats
        waiting_since_s = stats.wait_queue_entry_time or stats.decode_prealloc_queue_entry_time
        stats.set_wait_queue_entry_time()
        if self._scheduler.enable_priority_scheduling and waiting_since_s:
            # SGLang then sorts the queue itself: by priority, and by this.
            stats.wait_queue_entry_time = waiting_since_s

    def comes_by_transfer(self, req: Any) -> bool:
        """Whether a prefill worker sends the KV of `req`, which is not local.

        SGLang's own health checks only pretend to have one.
        """
        from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

        return bool(req.bootstrap_host != FAKE_BOOTSTRAP_HOST)

    def is_refused(self, req: Any) -> bool:
        """Whether ``--max-queued-requests`` are in line already; `req` has then been answered."""
        return self._set_aside is None and bool(self._scheduler._abort_on_queued_limit(req))

    def abort_waiting(self, request: Any) -> None:
        """Ends the local requests in line that `request` names; they own no memory."""
        s = self._scheduler
        keep = []
        for req in s.waiting_queue:
            if request.abort_all or req.rid.startswith(request.rid):
                sglang.elastic().end_in_line(s, req, request)
            else:
                keep.append(req)
        s.waiting_queue = keep

    def prefill_again(self, req: Any) -> None:
        """Puts a retracted request without a token back in line.

        With overlap scheduling a local request can be thrown out of the batch before its first
        token is noted. It cannot come back to decode; SGLang's transferred requests always can.
        """
        sglang.elastic().forget_host_copy(req)
        self.add_local(req, first=True)

    def number(self, req: Any) -> None:
        """Gives `req` its place in the order of arrival, once; the same on every rank."""
        if getattr(req, "deltaserve_arrival", None) is None:
            req.deltaserve_arrival = next(self._arrivals)

    def _arrival(self, req: Any) -> int:
        return getattr(req, "deltaserve_arrival", None) or 0

    def place(self, req: Any) -> Place:
        """The place of `req` in line: its priority, then when it arrived."""
        s = self._scheduler
        priority = 0
        if s.enable_priority_scheduling and req.priority is not None:
            priority = req.priority if s.schedule_low_priority_values_first else -req.priority
        return Place(priority, self._arrival(req))

    def head(self, queue: list[Any]) -> Any:
        """The request of `queue` that is first in line, None of an empty one."""
        return min(queue, key=self.place) if queue else None

    def ahead_of(self, req: Any) -> list[Any]:
        """The local prompts in line that would be prefilled before `req`."""
        place = self.place(req)
        return [other for other in self.local if self.place(other) < place]

    @property
    def local_head(self) -> Any:
        """The local prompt that SGLang will try first, None where none waits.

        It stops at the first one that does not fit: room kept for another would help nobody.
        """
        if not self.local:
            return None
        if not self._scheduler.enable_priority_scheduling:
            return self.local[0]
        return min(
            self.local,
            key=lambda req: (self.place(req).priority, req.time_stats.wait_queue_entry_time),
        )
