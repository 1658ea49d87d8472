"""Sessions in flight: begun as lanes become free, or as they arrive; turns follow think time.

Owns which session is begun when, where in it, and when each of its turns is due. What sending means
is given as a function; must not know HTTP or files.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from replay.dispatch import AHEAD_S, Dispatch, Groups, Prepare, Send, Waits
from replay.plays import Order, Plays, Tickets


@dataclass(frozen=True, slots=True)
class Start:
    """Where sessions begin. `first_mid` is for those in flight at the start of the run, `later_mid`
    for those that follow; a session that begins in the middle does so after `share` (lowest,
    highest) of its requests. At most `parallel` sessions are primed at a time, and none sends
    another priming request once it has spent `prime_timeout_s` on priming."""

    first_mid: bool = False
    later_mid: bool = False
    share: tuple[float, float] = (0.25, 0.75)
    parallel: int = 1
    prime_timeout_s: float = math.inf


@dataclass(slots=True)
class _Session:
    """A conversation in flight: how many awaited answers each request that is left misses, and
    what has to be primed before the first of them, and when that began. `linger` is the share of
    the first think times that is still to pass."""

    missing: dict[int, int]
    left: int
    play: int
    to_prime: deque[int] = field(default_factory=deque)
    priming_from_s: float = 0.0
    linger: float = 1.0
    first: bool = False


class Lanes(Dispatch):
    """Keeps conversations in flight, each a session with its sub-agents.

    A request becomes due its think time after the end of the last answer that it waits for; think
    times are multiplied by `think_scale` and cut at `max_think_s`. Which conversation comes next,
    and in which play of the trace, the tickets and the order say.
    """

    def __init__(
        self,
        plays: Plays,
        send: Send,
        clock: Callable[[], float],
        order: Order,
        tickets: Tickets,
        *,
        mine: NDArray[np.bool_] | None = None,
        prepare: Prepare = lambda number, due_s: True,
        think_scale: float = 1.0,
        max_think_s: float | None = None,
        start: Start | None = None,
        on_primed: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(plays, send, clock, prepare)
        self._plays = plays
        self._plan = plays.plan
        self._order = order
        self._tickets = tickets
        self._think_scale = think_scale
        self._max_think_s = math.inf if max_think_s is None else max_think_s
        self._from = start or Start()
        self._on_primed = on_primed
        self._mine = np.ones(len(self._plan), dtype=np.bool_) if mine is None else mine
        waits = Waits(self._plan, self._mine)
        self._missing, self._followers = waits.missing, waits.followers
        members = np.flatnonzero(self._mine)
        trees = np.array(self._plan.tree, dtype=np.int64)[members]
        self._members = Groups(trees, members, int(trees.max(initial=-1)) + 1)
        self._live: dict[tuple[int, int], _Session] = {}
        self._waits_for_priming: deque[tuple[int, int]] = deque()
        self._priming = 0
        self._first_left = 0
        self._refill = True
        self._arrivals: Iterator[float] = iter(())
        self._next_arrival_s = math.inf

    async def closed(self, slots: int) -> None:
        """Keeps `slots` conversations in flight until the tickets run out."""
        self._begin_first(slots)
        await self._run()

    async def arriving(self, arrivals: Iterator[float], inflight: int = 0) -> None:
        """Begins a conversation at each of the times, however many are in flight (a partly open
        loop); `inflight` of them are there from the start."""
        self._refill = False
        self._begin_first(inflight)
        self._arrivals = arrivals
        self._next_arrival_s = next(arrivals, math.inf)
        await self._run()

    @property
    def sessions_in_flight(self) -> int:
        """Conversations that were begun and have not ended."""
        return len(self._live)

    def _begin_first(self, count: int) -> None:
        self._first_left = 1  # until all have been begun
        for _ in range(count):
            if not self._begin_next(self._clock(), first=True):
                break
        self._prime_more()
        self._first_done()

    def _first_done(self) -> None:
        self._first_left -= 1
        if not self._first_left:
            self._on_primed()

    def _begin_next(self, at_s: float, *, first: bool = False) -> bool:
        """Begins the next conversation that has a request to send; false where none is left."""
        while (ticket := self._tickets.take()) is not None:
            play, tree = self._order.at(ticket)
            members = self._members.of(tree)
            if members:
                mid = self._from.first_mid if first else self._from.later_mid
                middle = self._order.middle(ticket, self._from.share) if mid else None
                self._begin((play, tree), members, at_s, middle, first)
                return True
        return False

    def _begin(
        self,
        key: tuple[int, int],
        members: list[int],
        at_s: float,
        middle: tuple[float, float] | None,
        first: bool,
    ) -> None:
        play, _ = key
        share, linger = middle or (0.0, 1.0)
        history = min(int(share * len(members)), len(members) - 1)
        left = members[history:]
        session = _Session(
            {index: int(self._missing[index]) for index in left}, len(left), play, linger=linger
        )
        self._live[key] = session
        if not history:
            self._activate(session, at_s, thinks=False)
            return
        for index in members[:history]:
            for follower in self._followers.of(index):
                if follower in session.missing:
                    session.missing[follower] -= 1
        session.first = first
        self._first_left += first
        session.to_prime.extend(self._last_of_history(members, history))
        self._waits_for_priming.append(key)
        if not first:
            self._prime_more()

    def _last_of_history(self, members: list[int], history: int) -> list[int]:
        """The last request before the start of each session that goes on after it."""
        last = {self._plan.session(index): index for index in members[:history]}
        going_on = {self._plan.session(index) for index in members[history:]}
        return [index for session, index in last.items() if session in going_on]

    def _prime_more(self) -> None:
        while self._waits_for_priming and self._priming < self._from.parallel:
            self._priming += 1
            key = self._waits_for_priming.popleft()
            self._live[key].priming_from_s = self._clock()
            self._prime(key)

    def _prime(self, key: tuple[int, int]) -> None:
        """Sends a conversation's next priming request, or lets it begin after the last, or when its
        time for priming is over: a server that let one wait so long lets the next wait as well."""
        session = self._live[key]
        now_s = self._clock()
        if session.to_prime and now_s - session.priming_from_s < self._from.prime_timeout_s:
            index = session.to_prime.popleft()
            self._push(self._plays.number(session.play, index, primes=True), now_s)
            return
        self._priming -= 1
        self._activate(session, now_s, thinks=True)
        if session.first:
            self._first_done()
        self._prime_more()

    def _activate(self, session: _Session, at_s: float, *, thinks: bool) -> None:
        """Makes due what waits for nothing; with the rest of its think time where the session is in
        the middle of its work."""
        for index, missing in session.missing.items():
            if not missing:
                think_s = self._think_s(index) * session.linger if thinks else 0.0
                self._push(self._plays.number(session.play, index), at_s + think_s)

    def _think_s(self, index: int) -> float:
        return min(self._plan.think_time_s[index] * self._think_scale, self._max_think_s)

    def _ended(self, number: int) -> None:
        play, primes, index = self._plays.parts(number)
        key = (play, self._plan.tree[index])
        if primes:
            self._prime(key)
            return
        session = self._live[key]
        now_s = self._clock()
        for follower in self._followers.of(index):
            session.missing[follower] -= 1
            if not session.missing[follower]:
                due_s = now_s + self._think_s(follower)
                self._push(self._plays.number(play, follower), due_s)
        session.left -= 1
        if not session.left:
            del self._live[key]
            if self._refill:
                self._begin_next(now_s)

    def _finished(self) -> bool:
        return not self._heap and self._next_arrival_s == math.inf

    def _ask_ahead(self) -> float:
        # A conversation is begun a little before it arrives, for its first body has to be made.
        while self._next_arrival_s - AHEAD_S <= self._clock():
            if self._begin_next(self._next_arrival_s):
                self._next_arrival_s = next(self._arrivals, math.inf)
            else:
                self._next_arrival_s = math.inf
        return min(super()._ask_ahead(), self._next_arrival_s - AHEAD_S)


def poisson_arrivals(per_hour: float, seed: int, first: int = 0, every: int = 1) -> Iterator[float]:
    """Times in seconds of a Poisson process, endless; `every` processes that begin with different
    `first` share one sequence among them."""
    draws = random.Random(f"arrivals {seed}")
    at_s = 0.0
    number = 0
    while True:
        at_s += draws.expovariate(per_hour / 3600.0)
        if number % every == first:
            yield at_s
        number += 1
