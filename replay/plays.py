"""Requests of a plan, addressable again and again: plays with fresh prompts, and priming requests.

A run that keeps N sessions in flight for as long as it is asked to needs more sessions than its
trace has. It therefore plays the trace again, each play with other prompts, so that no cache holds
them. Owns the numbering of those requests and the order of sessions; must not know clocks.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from replay.plan import Planned, PlannedRequests

PRIME_SUFFIX = "~prime"


def in_the_plan(request_id: str, play: int) -> str:
    """The request of the plan that one of a run stands for: that of another play, or one that
    primes caches with its prompt."""
    name = request_id.removesuffix(PRIME_SUFFIX)
    return name.removesuffix(f"#{play}") if play else name


class Plays:
    """The requests of all plays by number, an endless sequence.

    Number `(2 * play + primes) * len(plan) + index` is the request `index` of the plan in that
    play; with `primes` = 1 it is the request that primes caches with its prompt and asks for one
    output token. Numbers below `len(plan)` are therefore the plan's own indices.
    """

    def __init__(self, requests: PlannedRequests) -> None:
        self.plan = requests
        self._count = len(requests)

    def number(self, play: int, index: int, *, primes: bool = False) -> int:
        """The number of a request."""
        return (2 * play + primes) * self._count + index

    def parts(self, number: int) -> tuple[int, bool, int]:
        """Play, whether it is a priming request, and index in the plan."""
        plays, index = divmod(number, self._count)
        return plays // 2, bool(plays % 2), index

    def input_length(self, number: int) -> int:
        """Tokens of a request's prompt."""
        return self.plan.input_length[number % self._count]

    def __getitem__(self, number: int) -> Planned:
        if number < self._count:
            return self.plan[number]
        play, primes, index = self.parts(number)
        request = self.plan[index]
        request.index = number
        request.play = play
        request.primes = primes
        if play:
            request.request_id += f"#{play}"
            request.session_id += f"#{play}"
        if primes:
            request.request_id += PRIME_SUFFIX
            request.output_length = 1
        return request


class Tickets(Protocol):
    """Counts the sessions that were begun, over all processes of a run."""

    def take(self) -> int | None:
        """The next number from 0 on; None where no more sessions are to begin."""


class TicketCounter:
    """Tickets of one process: every `every`th from `first` on, below `count` (None: endless)."""

    def __init__(self, count: int | None = None, first: int = 0, every: int = 1) -> None:
        self._count = count
        self._next = first
        self._every = every

    def take(self) -> int | None:
        if self._count is not None and self._next >= self._count:
            return None
        self._next += self._every
        return self._next - self._every


@dataclass(frozen=True, slots=True)
class Order:
    """Which conversation a ticket stands for: all of the plan's, then all again in the next play.

    `shuffled` draws the order of each play from the seed; otherwise it is the trace's. The same
    ticket is the same conversation however many processes share the tickets.
    """

    conversations: int
    seed: int
    shuffled: bool

    def at(self, ticket: int) -> tuple[int, int]:
        """Play and conversation of a ticket."""
        play, place = divmod(ticket, self.conversations)
        if not self.shuffled:
            return play, place
        return play, int(_shuffled(self.conversations, self.seed, play)[place])

    def middle(self, ticket: int, share: tuple[float, float]) -> tuple[float, float]:
        """Where a ticket's conversation begins that begins in its middle: the share of its requests
        that came before, between the two of `share`, and the share of its first think times that is
        still to pass."""
        draws = random.Random(f"{self.seed} {ticket}")
        return draws.uniform(*share), draws.random()


@lru_cache(maxsize=4)
def _shuffled(count: int, seed: int, play: int) -> NDArray[np.int64]:
    return np.random.default_rng([abs(seed), play]).permutation(count)
