"""When each request of a plan is sent: open loop by the trace's times, closed loop by free
sessions.

Owns order and time only. What sending means is given as a function; must not know HTTP or files.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from replay.plan import Planned, PlannedRequests

Send = Callable[[Planned, float], Awaitable[None]]
"""Sends a request that was due at a time (seconds of the schedule's clock) and returns when its
answer has ended, whether well or badly. Must not raise."""

Prepare = Callable[[int, float], bool]
"""Is told that a request will be due at a time; false when it can take no more of them now."""

_AHEAD_S = 1.0


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
      of a conversation when a slot is free.

    A conversation (a session with its sub-agents) holds one slot until its last request has ended.
    Only the requests that `mine` marks are sent; none waits for one that it does not mark.
    """

    def __init__(
        self,
        requests: PlannedRequests,
        send: Send,
        clock: Callable[[], float],
        *,
        mine: NDArray[np.bool_] | None = None,
        prepare: Prepare = lambda index, due_s: True,
        time_scale: float = 1.0,
    ) -> None:
        self._requests = requests
        self._send = send
        self._clock = clock
        self._prepare = prepare
        self._time_scale = time_scale
        self._mine = np.ones(len(requests), dtype=np.bool_) if mine is None else mine
        waiting, awaited = requests.waits()
        counts = self._mine[waiting] & self._mine[awaited]
        waiting, awaited = waiting[counts], awaited[counts]
        self._missing = np.bincount(waiting, minlength=len(requests)).astype(np.int32)
        self._followers = _Groups(awaited, waiting, len(requests))
        # Requests that are due at a time of their own, and those that are due in the trace's order
        # (from `_next` on; bodies were asked for up to `_next_ahead`).
        self._heap: list[tuple[float, int]] = []
        self._in_order = np.empty(0, dtype=np.int64)
        self._next = 0
        self._next_ahead = 0
        self._shift_s = 0.0
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._left = 0
        self.in_flight = 0

    async def open_loop(self, shift_s: float = 0.0) -> None:
        """Sends at the trace's times less `shift_s`, divided by the time scale."""
        self._shift_s = shift_s
        self._in_order = np.flatnonzero(self._mine)
        self._left = len(self._in_order)

        def ready(index: int) -> None:
            at_s = self._trace_due_s(index)
            if self._next == len(self._in_order) or index < self._in_order[self._next]:
                at_s = max(at_s, self._clock())
                heapq.heappush(self._heap, (at_s, index))
            if at_s - self._clock() < _AHEAD_S:
                self._prepare(index, at_s)

        await self._run(ready, lambda index: None)

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
        mine = np.flatnonzero(self._mine)
        tree = np.array(self._requests.tree, dtype=np.int64)[mine]
        by_tree = _Groups(tree, mine, int(tree.max(initial=-1)) + 1)
        left_in_tree = np.bincount(tree)

        def due(index: int, at_s: float) -> None:
            heapq.heappush(self._heap, (at_s, index))
            self._prepare(index, at_s)

        def ready(index: int) -> None:
            think_s = self._requests.think_time_s[index] * think_scale
            due(
                index,
                self._clock() + (think_s if max_think_s is None else min(think_s, max_think_s)),
            )

        def start_next() -> None:
            while (tree := trees.take()) is not None:
                members = by_tree.of(tree)
                for index in members:
                    if not self._missing[index]:
                        due(index, self._clock())
                if members:
                    self._left += len(members)
                    self._wake.set()
                    return

        def ended(index: int) -> None:
            tree = self._requests.tree[index]
            left_in_tree[tree] -= 1
            if not left_in_tree[tree]:
                start_next()

        for _ in range(slots):
            start_next()
        await self._run(ready, ended)

    def _trace_due_s(self, index: int) -> float:
        return (self._requests.trace_s[index] - self._shift_s) / self._time_scale

    async def _run(self, ready: Callable[[int], None], ended: Callable[[int], None]) -> None:
        try:
            while self._left or self.in_flight:
                now_s = self._clock()
                while self._heap and self._heap[0][0] <= now_s:
                    at_s, index = heapq.heappop(self._heap)
                    self._start(index, at_s, ready, ended)
                while self._next < len(self._in_order):
                    index = int(self._in_order[self._next])
                    if (at_s := self._trace_due_s(index)) > now_s:
                        break
                    self._next += 1
                    if not self._missing[index]:  # else it is due when what it waits for has ended
                        self._start(index, at_s, ready, ended)
                await self._wait(self._ask_ahead(now_s))
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ask_ahead(self, now_s: float) -> float:
        """Asks for the bodies of the requests that come next in the trace's order; returns when to
        ask again."""
        self._next_ahead = max(self._next_ahead, self._next)
        while self._next_ahead < len(self._in_order):
            index = int(self._in_order[self._next_ahead])
            at_s = self._trace_due_s(index)
            if at_s - now_s >= _AHEAD_S:
                return at_s - _AHEAD_S
            if not self._missing[index] and not self._prepare(index, at_s):
                break  # until one was sent
            self._next_ahead += 1
        return float("inf")

    async def _wait(self, until_s: float) -> None:
        """Sleeps until a time, the next request is due, or an answer has ended."""
        self._wake.clear()
        if self._heap:
            until_s = min(until_s, self._heap[0][0])
        if self._next < len(self._in_order):
            until_s = min(until_s, self._trace_due_s(int(self._in_order[self._next])))
        if until_s == float("inf"):
            if self._left or self.in_flight:
                await self._wake.wait()
            return
        delay_s = until_s - self._clock()
        if delay_s <= 0:
            await asyncio.sleep(0)
            return
        timer = asyncio.get_running_loop().call_later(delay_s, self._wake.set)
        await self._wake.wait()
        timer.cancel()

    def _start(
        self,
        index: int,
        at_s: float,
        ready: Callable[[int], None],
        ended: Callable[[int], None],
    ) -> None:
        self._left -= 1
        self.in_flight += 1
        task = asyncio.create_task(self._send_one(index, at_s, ready, ended))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_one(
        self,
        index: int,
        at_s: float,
        ready: Callable[[int], None],
        ended: Callable[[int], None],
    ) -> None:
        try:
            await self._send(self._requests[index], at_s)
        finally:
            self.in_flight -= 1
            for follower in self._followers.of(index):
                self._missing[follower] -= 1
                if not self._missing[follower]:
                    ready(follower)
            ended(index)
            self._wake.set()


class _Groups:
    """Members by key, in their order; keys are small integers."""

    def __init__(self, keys: NDArray[np.integer], members: NDArray[np.integer], count: int) -> None:
        order = np.argsort(keys, kind="stable")
        self._members = members[order]
        self._ends = np.concatenate(([0], np.cumsum(np.bincount(keys, minlength=count))))

    def of(self, key: int) -> list[int]:
        if key + 1 >= len(self._ends):
            return []
        found: list[int] = self._members[self._ends[key] : self._ends[key + 1]].tolist()
        return found
