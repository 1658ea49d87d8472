"""Open loop: when each request of a plan is sent by the trace's own times.

Owns order and time only. What sending means is given as a function; must not know HTTP or files.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from replay.dispatch import AHEAD_S, Dispatch, Prepare, Send, Waits
from replay.plan import PlannedRequests


class OpenLoop(Dispatch):
    """Sends each request at its time in the trace. A turn whose predecessor's answer came late is
    sent its think time after that answer: an agent that waited for its answer still runs its tools.

    Think times are multiplied by `think_scale` and cut at `max_think_s`. Only the requests that
    `mine` marks are sent; none waits for one that it does not mark.
    """

    def __init__(
        self,
        requests: PlannedRequests,
        send: Send,
        clock: Callable[[], float],
        *,
        mine: NDArray[np.bool_] | None = None,
        prepare: Prepare = lambda number, due_s: True,
        time_scale: float = 1.0,
        think_scale: float = 1.0,
        max_think_s: float | None = None,
    ) -> None:
        super().__init__(requests, send, clock, prepare)
        self._plan = requests
        self._time_scale = time_scale
        self._think_scale = think_scale
        self._max_think_s = math.inf if max_think_s is None else max_think_s
        mine = np.ones(len(requests), dtype=np.bool_) if mine is None else mine
        waits = Waits(requests, mine)
        self._missing, self._followers = waits.missing, waits.followers
        # Those that are due in the trace's order: from `_next` on; asked for up to `_next_ahead`.
        self._in_order = np.flatnonzero(mine)
        self._next = 0
        self._next_ahead = 0
        # Late turns, which are due at a time of their own.
        self._late = np.zeros(len(requests), dtype=np.bool_)
        self._shift_s = 0.0
        self._left = len(self._in_order)

    async def run(self, shift_s: float = 0.0) -> None:
        """Sends at the trace's times less `shift_s`, divided by the time scale."""
        self._shift_s = shift_s
        await self._run()

    def _trace_due_s(self, index: int) -> float:
        return (self._plan.trace_s[index] - self._shift_s) / self._time_scale

    def _ended(self, number: int) -> None:
        for follower in self._followers.of(number):
            self._missing[follower] -= 1
            if not self._missing[follower]:
                self._ready(follower)

    def _ready(self, index: int) -> None:
        think_s = self._plan.think_time_s[index] * self._think_scale / self._time_scale
        due_s = self._clock() + min(think_s, self._max_think_s)
        passed = self._next == len(self._in_order) or index < self._in_order[self._next]
        if passed or due_s > self._trace_due_s(index):
            self._late[index] = True
            self._push(index, due_s)
        elif self._next_ahead and index <= self._in_order[self._next_ahead - 1]:
            self._prepare(index, self._trace_due_s(index))

    def _finished(self) -> bool:
        return not self._left

    def _start(self, number: int, at_s: float) -> None:
        self._left -= 1
        super()._start(number, at_s)

    def due_before(self, time_s: float) -> bool:
        if super().due_before(time_s):
            return True
        return self._next < len(self._in_order) and (
            self._trace_due_s(int(self._in_order[self._next])) < time_s
        )

    def _start_due(self) -> None:
        super()._start_due()
        now_s = self._clock()
        while self._next < len(self._in_order):
            index = int(self._in_order[self._next])
            if (at_s := self._trace_due_s(index)) > now_s:
                break
            self._next += 1
            # What waits for an answer still, or is late, becomes due by that answer.
            if not self._missing[index] and not self._late[index]:
                self._start(index, at_s)

    def _ask_ahead(self) -> float:
        now_s = self._clock()
        until_s = super()._ask_ahead()
        self._next_ahead = max(self._next_ahead, self._next)
        while self._next_ahead < len(self._in_order):
            index = int(self._in_order[self._next_ahead])
            at_s = self._trace_due_s(index)
            if at_s - now_s >= AHEAD_S:
                until_s = min(until_s, at_s - AHEAD_S)
                break
            waits = self._missing[index] or self._late[index]
            if not waits and not self._prepare(index, at_s):
                break  # until one was sent
            self._next_ahead += 1
        if self._next < len(self._in_order):
            until_s = min(until_s, self._trace_due_s(int(self._in_order[self._next])))
        return until_s
