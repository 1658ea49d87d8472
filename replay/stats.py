"""What a trace asks of a server: lengths, arrivals, reuse, and the best that any cache could do.

Owns the definitions of these statistics. Streams a trace once; memory grows with its distinct
blocks (4 bytes each, 8 with cache curves) and its sessions, not with its length in tokens. Must not
know engines.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltaserve.errors import InputError
from replay.caches import CacheCurve, DenseIds, grown
from replay.trace import Request

PEAK_WINDOW_S = 10.0


class Reuse(NamedTuple):
    """Input tokens of a request that an infinite prefix cache holds when it comes, and how many of
    them its own session sent before."""

    hit_tokens: int
    within_session_tokens: int


@dataclass(slots=True)
class Session:
    """A session so far: the block chains that it sent (each extends or departs from another), and
    the last blocks of chains that were only started and then replaced."""

    number: int
    begin_s: float
    first_input_length: int
    end_s: float = 0.0
    requests: int = 0
    last_input_length: int = 0
    input_tokens: int = 0
    reused_tokens: int = 0
    blocks: int = 0
    chains: list[array[int]] = field(default_factory=list)
    tails: set[int] | None = None

    def reused_blocks(self, ids: list[int]) -> int:
        """How many leading blocks of `ids` this session has sent before; remembers `ids`."""
        best, parent = 0, -1
        for number, chain in enumerate(self.chains):
            common = _common_prefix(chain, ids)
            if common > best:
                best, parent = common, number
        if best == len(ids):
            return best
        # A chain's dropped last block had nothing after it, so that it adds one block at most.
        reused = best + (self.tails is not None and ids[best] in self.tails)
        if parent < 0 or best < len(self.chains[parent]) - 1:
            self.chains.append(_compact(ids))
        else:
            if best < len(self.chains[parent]):
                if self.tails is None:
                    self.tails = set()
                self.tails.add(self.chains[parent][-1])
            self.chains[parent] = _compact(ids)
        return reused


def _compact(ids: list[int]) -> array[int]:
    """The ids in 4 bytes each where they fit."""
    try:
        return array("I", ids)
    except OverflowError:
        return array("Q", ids)


def _common_prefix(chain: Sequence[int], ids: Sequence[int]) -> int:
    """Length of the common prefix, by bisection: equal ids at a position mean equal ids before
    it."""
    low, high = 0, min(len(chain), len(ids))
    while low < high:
        middle = (low + high + 1) // 2
        if chain[middle - 1] == ids[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


class TraceStats:
    """Takes a trace's requests in arrival order and describes them.

    With `instances`, it also follows LRU caches of any size, for one instance and for each given
    number of instances among which sessions are spread in turn.
    """

    def __init__(self, instances: Sequence[int] = (), cache_tokens: Sequence[int] = ()) -> None:
        self._dense = DenseIds()
        self._position = np.zeros(1 << 16, dtype=np.uint32)
        self.sessions: dict[str, Session] = {}
        self._inputs = array("q")
        self._outputs = array("q")
        self._times = array("d")
        self._growth = array("q")
        self._think = array("d")
        self._block_sizes: set[int] = set()
        self._blocks = 0
        self._blocks_seen = 0
        self._hit_tokens = 0
        self._within_tokens = 0
        self._broken_ids = 0
        self._curves = {count: CacheCurve(count, cache_tokens) for count in instances}

    def add(self, request: Request) -> Reuse:
        """Counts one request; returns what of its input was seen before."""
        ids = request.hash_ids
        size = request.block_size
        self._block_sizes.add(size)
        self._inputs.append(request.input_length)
        self._outputs.append(request.output_length)
        self._times.append(request.timestamp_s)
        if request.think_time_s is not None and request.turn > 0:
            self._think.append(request.think_time_s)
        session = self.sessions.get(request.session_id)
        if session is None:
            session = self.sessions[request.session_id] = Session(
                len(self.sessions), request.timestamp_s, request.input_length
            )
        elif session.requests:
            self._growth.append(request.input_length - session.last_input_length)
        session.requests += 1
        session.last_input_length = request.input_length
        session.end_s = request.timestamp_s
        session.input_tokens += request.input_length
        session.blocks += len(ids)

        dense, top = self._dense.of(ids)
        self._position = grown(self._position, top)
        before = self._position[dense]
        seen = before != 0
        count = int(np.count_nonzero(seen))
        prefix = len(dense) if count == len(dense) else int(np.argmin(seen))
        places = np.arange(1, len(dense) + 1, dtype=np.uint32)
        self._broken_ids += (
            int(np.count_nonzero(before[:prefix] != places[:prefix])) + count - prefix
        )
        if prefix < len(dense):
            self._position[dense[prefix:]] = places[prefix:]
        self._blocks += len(dense)
        self._blocks_seen += count
        hit_tokens = min(prefix * size, request.input_length)
        self._hit_tokens += hit_tokens
        within = min(session.reused_blocks(ids), prefix)
        within_tokens = min(within * size, request.input_length)
        self._within_tokens += within_tokens
        session.reused_tokens += within_tokens
        for curve in self._curves.values():
            curve.add(dense, top, size, request.input_length, session.number)
        return Reuse(hit_tokens, within_tokens)

    def result(self) -> dict[str, Any]:
        """The statistics as one object that JSON can hold; keys as in docs/formats.md."""
        if not self._inputs:
            raise InputError("the trace holds no request")
        times = np.frombuffer(self._times, dtype=np.float64)
        inputs = np.frombuffer(self._inputs, dtype=np.int64)
        outputs = np.frombuffer(self._outputs, dtype=np.int64)
        input_tokens, output_tokens = int(inputs.sum()), int(outputs.sum())
        sessions = self.sessions.values()
        turns = np.array([session.requests for session in sessions])
        span_s = float(times[-1] - times[0])
        record: dict[str, Any] = {
            "requests": len(inputs),
            "sessions": len(turns),
            "multi_turn_share": float(np.mean(turns > 1)),
            "turns": _distribution(turns),
            "input_tokens": _distribution(inputs),
            "output_tokens": _distribution(outputs),
            "io_ratio": input_tokens / output_tokens,
            "prefill_share": input_tokens / (input_tokens + output_tokens),
            "span_s": span_s,
            "arrival_rps": {
                "mean": len(times) / span_s if span_s > 0 else None,
                "peak_10s": _peak(times) / PEAK_WINDOW_S,
            },
            "block_size": min(self._block_sizes) if len(self._block_sizes) == 1 else None,
            "block_sharing": self._blocks_seen / self._blocks,
            "best_hit_rate": self._hit_tokens / input_tokens,
            "reuse": {
                "within_session": self._within_tokens / self._hit_tokens,
                "across_sessions": 1 - self._within_tokens / self._hit_tokens,
            }
            if self._hit_tokens
            else None,
            "growth_tokens": _distribution(np.frombuffer(self._growth, dtype=np.int64))
            if self._growth
            else None,
            "think_time_s": _distribution(np.frombuffer(self._think, dtype=np.float64))
            if self._think
            else None,
            "session": {
                "first_input_tokens": _distribution(
                    np.array([session.first_input_length for session in sessions])
                ),
                "last_input_tokens": _distribution(
                    np.array([session.last_input_length for session in sessions])
                ),
                "duration_s": _distribution(
                    np.array([session.end_s - session.begin_s for session in sessions])
                ),
                "reused_share": _distribution(
                    np.array([session.reused_tokens / session.input_tokens for session in sessions])
                ),
            },
            "inconsistent_ids": self._broken_ids,
        }
        if self._curves:
            record["lru"] = [
                {"instances": count, "curve": curve.result(input_tokens)}
                for count, curve in self._curves.items()
            ]
        return record

    def samples(self) -> dict[str, NDArray[Any]]:
        """The values behind the distributions, for histograms."""
        return {
            "input_tokens": np.frombuffer(self._inputs, dtype=np.int64),
            "output_tokens": np.frombuffer(self._outputs, dtype=np.int64),
            "timestamp_s": np.frombuffer(self._times, dtype=np.float64),
            "growth_tokens": np.frombuffer(self._growth, dtype=np.int64),
            "think_time_s": np.frombuffer(self._think, dtype=np.float64),
            "turns": np.array([session.requests for session in self.sessions.values()]),
        }


def describe(
    requests: Iterable[Request],
    instances: Sequence[int] = (),
    cache_tokens: Sequence[int] = (),
) -> dict[str, Any]:
    """The statistics of a whole trace."""
    stats = TraceStats(instances, cache_tokens)
    for request in requests:
        stats.add(request)
    return stats.result()


def _distribution(values: NDArray[Any]) -> dict[str, float]:
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return {
        "mean": float(values.mean()),
        "p50": float(p50),
        "p90": float(p90),
        "p99": float(p99),
        "max": float(values.max()),
    }


def _peak(times: NDArray[np.float64]) -> int:
    """The most arrivals within any window of `PEAK_WINDOW_S` (closed at its start, open at its
    end)."""
    begin = np.arange(len(times))
    end = np.searchsorted(times, times + PEAK_WINDOW_S, side="left")
    return int((end - begin).max())
