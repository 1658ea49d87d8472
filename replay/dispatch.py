"""Sends requests at the times at which they are due, and has their bodies made shortly before.

Owns the queue of due requests, its timer and the tasks in flight. What makes a request due is
decided by those who build on it (`open_loop`, `lanes`); must not know HTTP or files.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import select
import selectors
from collections.abc import Awaitable, Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from replay.plan import Planned

Send = Callable[[Planned, float], Awaitable[None]]
"""Sends a request that was due at a time (seconds of the schedule's clock) and returns when its
answer has ended, whether well or badly. Must not raise."""

Prepare = Callable[[int, float], bool]
"""Is told that a request will be due at a time; false when it can take no more of them now."""

AHEAD_S = 1.0
"""How long before its time a request's body is asked for."""


class Numbered(Protocol):
    """Requests by number."""

    def __getitem__(self, number: int, /) -> Planned: ...


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


class Dispatch:
    """Sends what was made due, until nothing is due nor in flight nor to come."""

    def __init__(
        self,
        requests: Numbered,
        send: Send,
        clock: Callable[[], float],
        prepare: Prepare = lambda number, due_s: True,
    ) -> None:
        self._requests = requests
        self._send = send
        self._clock = clock
        self._prepare = prepare
        # Requests that are due at a time of their own, and when to ask for their bodies.
        self._heap: list[tuple[float, int]] = []
        self._ask_at: list[tuple[float, int]] = []
        self._done: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.in_flight = 0

    def due_before(self, time_s: float) -> bool:
        """Whether a request that was not sent yet is due before a time."""
        return bool(self._heap) and self._heap[0][0] < time_s

    def _push(self, number: int, at_s: float) -> None:
        """Makes a request due at a time of its own."""
        heapq.heappush(self._heap, (at_s, number))
        if at_s - self._clock() < AHEAD_S:
            self._prepare(number, at_s)
        else:
            heapq.heappush(self._ask_at, (at_s - AHEAD_S, number))

    def _ended(self, number: int) -> None:
        """A request's answer has ended; makes due what waited for it."""
        raise NotImplementedError

    def _finished(self) -> bool:
        """Whether there is nothing left to send. Asked when nothing is in flight."""
        return not self._heap

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
        if not self.in_flight and self._finished():
            self._done.set_result(None)
            return
        if self._heap:
            until_s = min(until_s, self._heap[0][0])
        if self._timer:
            self._timer.cancel()
        if until_s < math.inf:
            delay_s = max(0.0, until_s - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _start_due(self) -> None:
        now_s = self._clock()
        while self._heap and self._heap[0][0] <= now_s:
            at_s, number = heapq.heappop(self._heap)
            self._start(number, at_s)

    def _ask_ahead(self) -> float:
        """Asks for the bodies of the requests that come next; returns when to look again."""
        now_s = self._clock()
        while self._ask_at and self._ask_at[0][0] <= now_s:
            at_s, number = heapq.heappop(self._ask_at)
            self._prepare(number, at_s + AHEAD_S)
        return self._ask_at[0][0] if self._ask_at else math.inf

    def _start(self, number: int, at_s: float) -> None:
        self.in_flight += 1
        task = asyncio.create_task(self._send_one(number, at_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_one(self, number: int, at_s: float) -> None:
        try:
            await self._send(self._requests[number], at_s)
        except Exception as error:
            # For example a full disk: the run ends, for what follows could not be recorded.
            if self._done and not self._done.done():
                self._done.set_exception(error)
        finally:
            self.in_flight -= 1
            if self._done and not self._done.done():
                self._ended(number)
                self._tick()


class Groups:
    """Members by key, in their order; keys are small integers."""

    def __init__(self, keys: NDArray[np.integer], members: NDArray[np.integer], count: int) -> None:
        order = np.argsort(keys, kind="stable")
        self._members = members[order]
        self._ends = np.concatenate(([0], np.cumsum(np.bincount(keys, minlength=count))))

    def of(self, key: int) -> list[int]:
        """The members of one key."""
        if key + 1 >= len(self._ends):
            return []
        found: list[int] = self._members[self._ends[key] : self._ends[key + 1]].tolist()
        return found


class Waits:
    """Which requests of a plan wait for which, among those that `mine` marks."""

    def __init__(self, requests: _Waiting, mine: NDArray[np.bool_]) -> None:
        count = len(mine)
        waiting, awaited = requests.waits()
        counts = mine[waiting] & mine[awaited]
        waiting, awaited = waiting[counts], awaited[counts]
        self.missing = np.bincount(waiting, minlength=count).astype(np.int32)
        self.followers = Groups(awaited, waiting, count)


class _Waiting(Protocol):
    def waits(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]: ...
