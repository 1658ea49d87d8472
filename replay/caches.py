"""Prefix caches with LRU eviction: hit rates at every size from one pass over a trace.

Owns Mattson's stack distances (Evaluation techniques for storage hierarchies, IBM Systems Journal
1970) for prefix caches. Must not know trace files or statistics besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Ids up to here index arrays directly; larger ones (hashes) are numbered as they come.
_DIRECT_LIMIT = 1 << 29
_GRID_STEPS_PER_DOUBLING = 2
_GRID_DOUBLINGS = 32


def grown(values: NDArray[Any], top: int) -> NDArray[Any]:
    """`values`, made longer with zeros until index `top` exists."""
    if top < len(values):
        return values
    longer = np.zeros(max(top + 1, 2 * len(values)), dtype=values.dtype)
    longer[: len(values)] = values
    return longer


class DenseIds:
    """Turns hash ids into array indices: small ids are their own; the first large one makes all
    further ids numbers in order of appearance above them."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._base: int | None = None
        self._top = 0

    def of(self, ids: list[int]) -> tuple[NDArray[np.int64], int]:
        """Indices of `ids`, and the largest of them."""
        dense = np.array(ids, dtype=np.int64)
        top = int(dense.max())
        if top >= _DIRECT_LIMIT or self._base is not None:
            dense = self._numbered(ids)
            top = int(dense.max())
        self._top = max(self._top, top)
        return dense, top

    def _numbered(self, ids: list[int]) -> NDArray[np.int64]:
        if self._base is None:
            self._base = self._top + 1
        base, numbers = self._base, self._numbers
        return np.array(
            [i if i < base else numbers.setdefault(i, base + len(numbers)) for i in ids],
            dtype=np.int64,
        )


class _Fenwick:
    """Prefix sums over positions that grow without bound."""

    def __init__(self) -> None:
        self._values = [0] * 2
        self._tree = [0] * 2

    def add(self, position: int, amount: int) -> None:
        while position >= len(self._tree):
            self._double()
        self._values[position] += amount
        while position < len(self._tree):
            self._tree[position] += amount
            position += position & -position

    def _double(self) -> None:
        size = len(self._tree)
        self._values += [0] * size
        # A power of two's cell sums everything up to it; the other new cells start empty.
        self._tree += [0] * size
        self._tree[size] = sum(self._values)

    def up_to(self, position: int) -> int:
        total = 0
        while position:
            total += self._tree[position]
            position &= position - 1
        return total


class _Stack:
    """One instance's LRU stack of blocks, by the request that touched each last."""

    def __init__(self) -> None:
        self.last_touch = np.zeros(1 << 10, dtype=np.int32)
        self.counts = _Fenwick()
        self.blocks = 0
        self.now = 0


class CacheCurve:
    """Hit tokens of LRU prefix caches of every size, for a number of instances.

    A request touches all its blocks at one time; of blocks touched at one time the deepest is
    evicted first, as radix and block caches do. Under that order a block's stack distance is the
    number of blocks touched since, plus those of its own last request above it, and a chain's
    distances increase with depth, so that a hit is always a prefix. Sessions are spread over the
    instances in turn and stay.
    """

    def __init__(self, instances: int, cache_tokens: Sequence[int] = ()) -> None:
        self.instances = instances
        self._stacks = [_Stack() for _ in range(instances)]
        steps = _GRID_DOUBLINGS * _GRID_STEPS_PER_DOUBLING
        grid = np.round(2.0 ** (np.arange(steps) / _GRID_STEPS_PER_DOUBLING + 8)).astype(np.int64)
        self._asked = set(cache_tokens)
        self._sizes_tokens = np.unique(np.concatenate([grid, np.array(cache_tokens, np.int64)]))
        self._hits = np.zeros(len(self._sizes_tokens), dtype=np.int64)

    def add(
        self, dense: NDArray[np.int64], top: int, block_size: int, input_length: int, session: int
    ) -> None:
        """Counts one request's hits at every size, then touches its blocks."""
        stack = self._stacks[session % self.instances]
        stack.last_touch = grown(stack.last_touch, top)
        stack.now += 1
        touched = stack.last_touch[dense]
        edges = np.flatnonzero(np.diff(touched)) + 1
        begin = 0
        capacity = self._sizes_tokens // block_size
        cut = len(dense) * block_size - input_length
        for end in [*edges.tolist(), len(dense)]:
            value = int(touched[begin])
            if not value:
                break
            # The blocks above in this chain, already taken out, were touched later than these.
            newer = begin + stack.blocks - stack.counts.up_to(value)
            blocks = np.clip(capacity - newer, 0, end - begin)
            hits = blocks * block_size
            if end == len(dense) and cut:
                hits -= np.where(blocks == end - begin, cut, 0)
            self._hits += hits
            stack.counts.add(value, begin - end)
            stack.blocks -= end - begin
            begin = end
        stack.last_touch[dense] = stack.now
        stack.counts.add(stack.now, len(dense))
        stack.blocks += len(dense)

    def result(self, input_tokens: int) -> list[dict[str, float]]:
        """Hit rate by size of each instance's cache in tokens, up to where it stops growing (and at
        the sizes that were asked for)."""
        last = int(np.argmax(self._hits == self._hits[-1]))
        return [
            {"cache_tokens": size, "hit_rate": hits / input_tokens}
            for number, (size, hits) in enumerate(
                zip(self._sizes_tokens.tolist(), self._hits.tolist(), strict=True)
            )
            if number <= last or size in self._asked
        ]
