"""When each request of a plan is sent: open loop by the trace's times, closed loop by free
sessions.

Owns order and time only. What sending means is given as a function; must not know HTTP or files.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Protocol

from replay.plan import Planned

Send = Callable[[Planned, float], Awaitable[None]]
"""Sends a request that was due at a time (seconds of the schedule's clock) and returns when its
answer has ended, whether well or badly. Must not raise."""

_LOOKAHEAD = 8


class Trees(Protocol):
    """Where a closed loop gets its next conversation from (shared by processes)."""

    def take(self) -> int | None:
        """The number of the next conversation, or None when there are no more."""


class TreeQueue:
    """Conversations in the order of their first request, for one process."""

    def __init__(self, trees: Iterable[int]) -> None:
        self._left: Iterator[int] = iter(trees)

    def take(self) -> int | None:
        return next(self._left, None)


class Schedule:
    """Runs a plan's requests. A request becomes due when everything that it waits for has ended:

    - open loop: at its time in the trace, or at once if that has passed;
    - closed loop: its think time after the end of the last one that it waits for; the first request
      of a
      conversation when a slot is free.

    A conversation (a session with its sub-agents) holds one slot until its last request has ended.
    """

    def __init__(
        self,
        requests: list[Planned],
        send: Send,
        clock: Callable[[], float],
        *,
        prepare: Callable[[Planned], None] = lambda request: None,
        time_scale: float = 1.0,
        done: frozenset[int] = frozenset(),
    ) -> None:
        self._requests = {request.index: request for request in requests}
        self._send = send
        self._clock = clock
        self._prepare = prepare
        self._time_scale = time_scale
        self._heap: list[tuple[float, int]] = []
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._missing: dict[int, int] = {}
        self._followers: dict[int, list[int]] = {}
        self._left = 0
        for request in requests:
            if request.index in done:
                continue
            self._left += 1
            waits = [
                parent
                for parent in request.waits_for
                if parent in self._requests and parent not in done
            ]
            self._missing[request.index] = len(waits)
            for parent in waits:
                self._followers.setdefault(parent, []).append(request.index)
        self.in_flight = 0

    async def open_loop(self, shift_s: float = 0.0) -> None:
        """Sends at the trace's times less `shift_s`, divided by the time scale."""

        def due(request: Planned) -> float:
            return max((request.trace_s - shift_s) / self._time_scale, self._clock())

        for index, missing in self._missing.items():
            if not missing:
                at_s = (self._requests[index].trace_s - shift_s) / self._time_scale
                heapq.heappush(self._heap, (at_s, index))
        await self._run(due, lambda request: None)

    async def closed_loop(
        self,
        trees: Trees,
        slots: int,
        *,
        think_scale: float = 1.0,
        max_think_s: float | None = None,
    ) -> None:
        """Keeps `slots` conversations in flight; think times are multiplied by `think_scale` and
        cut at `max_think_s`."""
        by_tree: dict[int, list[int]] = {}
        for index in self._missing:
            by_tree.setdefault(self._requests[index].tree, []).append(index)
        left_in_tree = {tree: len(members) for tree, members in by_tree.items()}
        self._left = 0  # other processes may take conversations too: only those taken here count

        def due(request: Planned) -> float:
            think_s = request.think_time_s * think_scale
            return self._clock() + (think_s if max_think_s is None else min(think_s, max_think_s))

        def start_next() -> None:
            while (tree := trees.take()) is not None:
                members = by_tree.get(tree, [])
                for index in members:
                    if not self._missing[index]:
                        heapq.heappush(self._heap, (self._clock(), index))
                if members:
                    self._left += len(members)
                    self._wake.set()
                    return

        def ended(request: Planned) -> None:
            left_in_tree[request.tree] -= 1
            if not left_in_tree[request.tree]:
                start_next()

        for _ in range(slots):
            start_next()
        await self._run(due, ended)

    async def _run(self, due: Callable[[Planned], float], ended: Callable[[Planned], None]) -> None:
        try:
            while self._left or self.in_flight:
                while self._heap and self._heap[0][0] <= self._clock():
                    at_s, index = heapq.heappop(self._heap)
                    self._start(self._requests[index], at_s, due, ended)
                await self._wait()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _wait(self) -> None:
        """Makes the next bodies while there is time, then sleeps until the next request is due or
        an answer's end makes another one due."""
        # Of a heap, the smallest _LOOKAHEAD entries are in its first _LOOKAHEAD levels.
        for at_s, index in heapq.nsmallest(_LOOKAHEAD, self._heap[: 2**_LOOKAHEAD]):
            await asyncio.sleep(0)
            if self._heap and self._heap[0][0] <= self._clock():
                return
            if at_s - self._clock() < 5.0:
                self._prepare(self._requests[index])
        if not self._left and not self.in_flight:
            return
        self._wake.clear()
        if not self._heap:
            await self._wake.wait()
            return
        delay_s = self._heap[0][0] - self._clock()
        if delay_s <= 0:
            await asyncio.sleep(0)
            return
        timer = asyncio.get_running_loop().call_later(delay_s, self._wake.set)
        await self._wake.wait()
        timer.cancel()

    def _start(
        self,
        request: Planned,
        at_s: float,
        due: Callable[[Planned], float],
        ended: Callable[[Planned], None],
    ) -> None:
        self._left -= 1
        self.in_flight += 1
        task = asyncio.create_task(self._send_one(request, at_s, due, ended))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_one(
        self,
        request: Planned,
        at_s: float,
        due: Callable[[Planned], float],
        ended: Callable[[Planned], None],
    ) -> None:
        try:
            await self._send(request, at_s)
        finally:
            self.in_flight -= 1
            for index in self._followers.get(request.index, ()):
                self._missing[index] -= 1
                if not self._missing[index]:
                    follower = self._requests[index]
                    heapq.heappush(self._heap, (due(follower), index))
            ended(request)
            self._wake.set()
