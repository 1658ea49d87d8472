"""When each request of a plan is sent: open loop by the trace's times, closed loop by free
sessions.

Owns order and time only. What sending means is given as a function; must not know HTTP or files.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import select
import selectors
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


class _PreciseSelector(selectors.EpollSelector):
    """Wakes to the microsecond: epoll rounds its timeout up to a whole millisecond."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout > 0:
            select.select([self.fileno()], [], [], timeout)
            timeout = 0
        return super().select(timeout)


def precise_loop() -> asyncio.AbstractEventLoop:
    """An event loop whose timers are not late by rounding."""
    return asyncio.SelectorEventLoop(_PreciseSelector())


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
        # Requests that are due at a time of their own (and when to ask for their bodies), and those
        # that are due in the trace's order (from `_next` on; asked for up to `_next_ahead`).
        self._heap: list[tuple[float, int]] = []
        self._ask_at: list[tuple[float, int]] = []
        self._in_order = np.empty(0, dtype=np.int64)
        self._next = 0
        self._next_ahead = 0
        self._shift_s = 0.0
        self._ready: Callable[[int], None] = lambda index: None
        self._ended: Callable[[int], None] = lambda index: None
        self._done: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._left = 0
        self.in_flight = 0

    async def open_loop(self, shift_s: float = 0.0) -> None:
        """Sends at the trace's times less `shift_s`, divided by the time scale."""
        self._shift_s = shift_s
        self._in_order = np.flatnonzero(self._mine)
        self._left = len(self._in_order)

        def ready(index: int) -> None:
            if self._next == len(self._in_order) or index < self._in_order[self._next]:
                self._push(index, self._clock())
            elif self._next_ahead and index <= self._in_order[self._next_ahead - 1]:
                self._prepare(index, self._trace_due_s(index))

        self._ready = ready
        await self._run()

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

        def ready(index: int) -> None:
            think_s = self._requests.think_time_s[index] * think_scale
            if max_think_s is not None:
                think_s = min(think_s, max_think_s)
            self._push(index, self._clock() + think_s)

        def start_next() -> None:
            while (tree := trees.take()) is not None:
                members = by_tree.of(tree)
                for index in members:
                    if not self._missing[index]:
                        self._push(index, self._clock())
                if members:
                    self._left += len(members)
                    return

        def ended(index: int) -> None:
            tree = self._requests.tree[index]
            left_in_tree[tree] -= 1
            if not left_in_tree[tree]:
                start_next()

        self._ready, self._ended = ready, ended
        for _ in range(slots):
            start_next()
        await self._run()

    def _push(self, index: int, at_s: float) -> None:
        """Makes a request due at a time of its own."""
        heapq.heappush(self._heap, (at_s, index))
        if at_s - self._clock() < _AHEAD_S:
            self._prepare(index, at_s)
        else:
            heapq.heappush(self._ask_at, (at_s - _AHEAD_S, index))

    def _trace_due_s(self, index: int) -> float:
        return (self._requests.trace_s[index] - self._shift_s) / self._time_scale

    async def _run(self) -> None:
        self._done = asyncio.get_running_loop().create_future()
        try:
            self._tick()
            await self._done
        finally:
            if self._timer:
                self._timer.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _tick(self) -> None:
        """Starts what is due, asks for what comes next, and sets the timer for the next of both."""
        assert self._done
        if self._done.done():
            return
        try:
            self._start_due()
            until_s = self._ask_ahead()
        except Exception as error:
            self._done.set_exception(error)
            return
        if not self._left and not self.in_flight:
            self._done.set_result(None)
            return
        if self._heap:
            until_s = min(until_s, self._heap[0][0])
        if self._next < len(self._in_order):
            until_s = min(until_s, self._trace_due_s(int(self._in_order[self._next])))
        if self._timer:
            self._timer.cancel()
        if until_s < math.inf:
            delay_s = max(0.0, until_s - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _start_due(self) -> None:
        now_s = self._clock()
        while self._heap and self._heap[0][0] <= now_s:
            at_s, index = heapq.heappop(self._heap)
            self._start(index, at_s)
        while self._next < len(self._in_order):
            index = int(self._in_order[self._next])
            if (at_s := self._trace_due_s(index)) > now_s:
                break
            self._next += 1
            if not self._missing[index]:  # else it is due when what it waits for has ended
                self._start(index, at_s)

    def _ask_ahead(self) -> float:
        """Asks for the bodies of the requests that come next; returns when to ask again."""
        now_s = self._clock()
        while self._ask_at and self._ask_at[0][0] <= now_s:
            at_s, index = heapq.heappop(self._ask_at)
            self._prepare(index, at_s + _AHEAD_S)
        until_s = self._ask_at[0][0] if self._ask_at else math.inf
        self._next_ahead = max(self._next_ahead, self._next)
        while self._next_ahead < len(self._in_order):
            index = int(self._in_order[self._next_ahead])
            at_s = self._trace_due_s(index)
            if at_s - now_s >= _AHEAD_S:
                return min(until_s, at_s - _AHEAD_S)
            if not self._missing[index] and not self._prepare(index, at_s):
                break  # until one was sent
            self._next_ahead += 1
        return until_s

    def _start(self, index: int, at_s: float) -> None:
        self._left -= 1
        self.in_flight += 1
        task = asyncio.create_task(self._send_one(index, at_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_one(self, index: int, at_s: float) -> None:
        try:
            await self._send(self._requests[index], at_s)
        finally:
            self.in_flight -= 1
            for follower in self._followers.of(index):
                self._missing[follower] -= 1
                if not self._missing[follower]:
                    self._ready(follower)
            self._ended(index)
            self._tick()


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
