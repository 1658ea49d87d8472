"""Which requests of a trace a run sends, how long they are, and what each has to wait for.

Pure: no I/O, no clock. Must not know HTTP or engines.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from deltaserve.errors import InputError
from replay.trace import Request

_SCALE_TOLERANCE = 0.05
_MAX_GROUP = 64
_NONE = -1


@dataclass(slots=True, frozen=True)
class Scale:
    """How a trace's lengths become a run's lengths.

    Every `group` blocks become one of `block_size` tokens, known by the id of the last: equal
    prefixes stay equal and different ones different. `effective` is the factor that results.
    """

    asked: float
    group: int
    block_size: int
    effective: float


def scale_for(factor: float, block_size: int) -> Scale:
    """The smallest grouping of blocks whose factor is within 5 % of the one asked for."""
    if not 0 < factor <= 1:
        raise InputError(f"--length-scale {factor}: expected a factor above 0 and at most 1")
    best: Scale | None = None
    for group in range(1, _MAX_GROUP + 1):
        exact = group * block_size * factor
        size = max(1, round(exact))
        scale = Scale(factor, group, size, size / (group * block_size))
        if best is None or abs(scale.effective - factor) < abs(best.effective - factor):
            best = scale
        if abs(size / exact - 1) <= _SCALE_TOLERANCE:
            return scale
    raise InputError(
        f"--length-scale {factor}: too small for blocks of {block_size} tokens; the smallest "
        f"possible is about {best.effective if best else 1:.5f}"
    )


@dataclass(slots=True)
class Planned:
    """One request of a run. `trace_s` is its time in the trace, `waits_for` the positions in the
    plan of the requests whose answers must have ended first, and `tree` the conversation that it
    belongs to: a session with its sub-agents. `play` counts how often its session was begun before
    (each time with other prompts); `primes` marks a request that only fills caches."""

    index: int
    request_id: str
    session_id: str
    turn: int
    trace_s: float
    input_length: int
    output_length: int
    block_size: int
    hash_ids: NDArray[np.int64]
    think_time_s: float
    waits_for: tuple[int, ...]
    tree: int
    play: int = 0
    primes: bool = False


class _Strings:
    """Many strings in one buffer."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._ends = array("q", [0])

    def append(self, text: str) -> None:
        self._text += text.encode()
        self._ends.append(len(self._text))

    def __getitem__(self, index: int) -> str:
        return self._text[self._ends[index] : self._ends[index + 1]].decode()


class _IdLists:
    """Many lists of hash ids in one buffer each for first ids and lengths of runs n, n+1, n+2, …:
    a prompt's fresh blocks are numbered in sequence by most sources."""

    def __init__(self) -> None:
        self._firsts = array("q")
        self._lengths = array("i")
        self._ends = array("q", [0])

    def append(self, ids: list[int]) -> None:
        values = np.array(ids, dtype=np.int64)
        edges = np.concatenate(([0], np.flatnonzero(np.diff(values) != 1) + 1, [len(values)]))
        self._firsts.frombytes(values[edges[:-1]].tobytes())
        self._lengths.frombytes(np.diff(edges).astype(np.int32).tobytes())
        self._ends.append(len(self._firsts))

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        begin, end = self._ends[index], self._ends[index + 1]
        firsts = np.array(self._firsts[begin:end], dtype=np.int64)
        lengths = np.array(self._lengths[begin:end], dtype=np.int64)
        skipped = np.cumsum(lengths) - lengths
        return np.repeat(firsts - skipped, lengths) + np.arange(lengths.sum())

    def runs(self, index: int) -> list[tuple[int, int]]:
        """The list as runs: the first id of each, and how many follow each other."""
        kept = slice(self._ends[index], self._ends[index + 1])
        return list(zip(self._firsts[kept], self._lengths[kept], strict=True))


class PlannedRequests(Sequence[Planned]):
    """The requests of a plan in the trace's order, made one by one from columns: a few hundred
    bytes a request, which processes forked from this one share."""

    def __init__(self) -> None:
        self.trace_s = array("d")
        self.think_time_s = array("d")
        self.tree = array("i")
        self._request_ids = _Strings()
        self._session_ids: list[str] = []
        self._session = array("i")
        self._turn = array("q")
        self.input_length = array("q")
        self.output_length = array("q")
        self._block_size = array("q")
        self._ids = _IdLists()
        self._previous = array("i")
        self._parent = array("i")
        self._siblings: dict[int, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self.trace_s)

    @overload
    def __getitem__(self, index: int) -> Planned: ...
    @overload
    def __getitem__(self, index: slice) -> list[Planned]: ...
    def __getitem__(self, index: int | slice) -> Planned | list[Planned]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        return Planned(
            index,
            self._request_ids[index],
            self._session_ids[self._session[index]],
            self._turn[index],
            self.trace_s[index],
            self.input_length[index],
            self.output_length[index],
            self._block_size[index],
            self._ids[index],
            self.think_time_s[index],
            self.waits_for(index),
            self.tree[index],
        )

    def id_runs(self, index: int) -> list[tuple[int, int]]:
        """A request's hash ids as runs (first, count) of consecutive ones."""
        return self._ids.runs(index)

    def session(self, index: int) -> int:
        """The number of a request's session."""
        return self._session[index]

    def request_ids(self) -> Iterator[str]:
        """The name of each request."""
        return (self._request_ids[index] for index in range(len(self)))

    def waits_for(self, index: int) -> tuple[int, ...]:
        """The requests whose answers must have ended before this one is sent."""
        waits = (self._previous[index], self._parent[index])
        return tuple(w for w in waits if w != _NONE) + self._siblings.get(index, ())

    def waits(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """All pairs (request, one that it waits for), as two arrays."""
        more = [(index, other) for index, found in self._siblings.items() for other in found]
        index, other = np.array(more, dtype=np.int32).reshape(-1, 2).T
        for column in (self._previous, self._parent):
            awaited = np.array(column, dtype=np.int32)
            waiting = np.flatnonzero(awaited != _NONE).astype(np.int32)
            index = np.concatenate([index, waiting])
            other = np.concatenate([other, awaited[waiting]])
        return index, other

    def _append(
        self,
        request: Request,
        session: int,
        lengths: tuple[int, int, int],
        hash_ids: list[int],
        previous: int,
        parent: int,
    ) -> None:
        self._request_ids.append(request.request_id)
        if session == len(self._session_ids):
            self._session_ids.append(request.session_id)
        self._session.append(session)
        self._turn.append(request.turn)
        self.trace_s.append(request.timestamp_s)
        self.think_time_s.append(request.think_time_s or 0.0)
        for column, value in zip(
            (self.input_length, self.output_length, self._block_size), lengths, strict=True
        ):
            column.append(value)
        self._ids.append(hash_ids)
        self._previous.append(previous)
        self._parent.append(_NONE if parent == previous else parent)

    def _finish(self) -> int:
        """Finds what can be known of a whole plan only; returns the number of conversations."""
        self._wait_for_siblings()
        trees = _Trees(len(self._session_ids))
        sessions = self._session
        for index, other in zip(*(side.tolist() for side in self.waits()), strict=True):
            trees.join(sessions[index], sessions[other])
        # Numbered in the order of their first requests.
        numbers: dict[int, int] = {}
        for session in sessions:
            self.tree.append(numbers.setdefault(trees.root(session), len(numbers)))
        return len(numbers)

    def _wait_for_siblings(self) -> None:
        """A turn whose parent is in a sub-agent waits for all the agents that were launched where
        that one was and have asked their last before it, for a trace can name but one of them."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for index, session in enumerate(self._session):
            first.setdefault(session, index)
            last[session] = index
        launched: dict[int, list[int]] = {}
        for session, index in first.items():
            if self._parent[index] != _NONE:
                launched.setdefault(self._parent[index], []).append(session)
        for index, parent in enumerate(self._parent):
            if parent == _NONE or self._previous[index] == _NONE:
                continue
            launcher = self._parent[first[self._session[parent]]]
            if launcher == _NONE or self._session[launcher] != self._session[index]:
                continue
            found = [last[session] for session in launched[launcher]]
            self._siblings[index] = tuple(
                other for other in found if other < index and other != parent
            )


@dataclass(slots=True)
class Dropped:
    """Requests of the trace that a run leaves out, and why."""

    over_max_input_tokens: int = 0
    after_a_dropped_one: int = 0
    over_session_limit: int = 0


@dataclass(slots=True)
class Plan:
    requests: PlannedRequests = field(default_factory=PlannedRequests)
    trees: int = 0
    dropped: Dropped = field(default_factory=Dropped)
    scales: dict[int, Scale] = field(default_factory=dict)

    def describe(self) -> dict[str, object]:
        """What a run's record says of its selection."""
        return {
            "requests": len(self.requests),
            "conversations": self.trees,
            "dropped": asdict(self.dropped),
            "length_scale": [
                {"trace_block_size": size, **asdict(scale)} for size, scale in self.scales.items()
            ],
        }


def make_plan(
    requests: Iterable[Request],
    *,
    request_limit: int | None = None,
    session_limit: int | None = None,
    length_scale: float = 1.0,
    max_input_tokens: int | None = None,
    source: Path | None = None,
) -> Plan:
    """Selects and scales a trace's requests, in its order. `source` is the file that an error
    names.

    `session_limit` bounds conversations (sessions with their sub-agents), `request_limit` what is
    left of them. A request over `max_input_tokens` (after scaling) is left out together with
    everything that depends on it, so that no turn is sent without those before it.
    """
    plan = Plan()
    place = "" if source is None else f"{source}: "
    started = 0
    position: dict[str, int] = {}
    last_turn: dict[str, int] = {}
    session_of: dict[str, int] = {}
    cut_sessions: set[str] = set()
    dropped: set[str] = set()
    for request in requests:
        if len(plan.requests) == request_limit:
            break
        parent = request.parent_request_id
        if request.request_id in position or request.request_id in dropped:
            raise InputError(f"{place}request_id {request.request_id}: occurs twice in the trace")
        if parent is not None and parent not in position and parent not in dropped:
            raise InputError(
                f"{place}request_id {request.request_id}: field parent_request_id: expected a "
                f"request earlier in the trace, found {parent}"
            )
        if request.session_id in cut_sessions or parent in dropped:
            cut_sessions.add(request.session_id)
            dropped.add(request.request_id)
            plan.dropped.after_a_dropped_one += 1
            continue
        starts = request.session_id not in session_of and parent is None
        if starts and started == session_limit:
            cut_sessions.add(request.session_id)
            dropped.add(request.request_id)
            plan.dropped.over_session_limit += 1
            continue
        scale = plan.scales.get(request.block_size)
        if scale is None:
            scale = scale_for(length_scale, request.block_size)
            plan.scales[request.block_size] = scale
        input_length, hash_ids = _scaled_input(request, scale)
        if max_input_tokens is not None and input_length > max_input_tokens:
            cut_sessions.add(request.session_id)
            dropped.add(request.request_id)
            plan.dropped.over_max_input_tokens += 1
            continue
        started += starts
        index = len(plan.requests)
        output_length = max(1, round(request.output_length * scale.effective))
        plan.requests._append(
            request,
            session_of.setdefault(request.session_id, len(session_of)),
            (input_length, output_length, scale.block_size),
            hash_ids,
            last_turn.get(request.session_id, _NONE),
            _NONE if parent is None else position[parent],
        )
        position[request.request_id] = last_turn[request.session_id] = index
    plan.trees = plan.requests._finish()
    return plan


class _Trees:
    """Joins sessions that wait for each other, whenever that turns out, into one conversation."""

    def __init__(self, sessions: int) -> None:
        self._root = list(range(sessions))

    def join(self, one: int, other: int) -> None:
        one, other = self.root(one), self.root(other)
        self._root[max(one, other)] = min(one, other)

    def root(self, session: int) -> int:
        while self._root[session] != session:
            self._root[session] = self._root[self._root[session]]
            session = self._root[session]
        return session


def _scaled_input(request: Request, scale: Scale) -> tuple[int, list[int]]:
    """Input length and ids after scaling: whole blocks stay whole, the started one stays
    started."""
    if scale.group == 1 and scale.block_size == request.block_size:
        return request.input_length, request.hash_ids
    group_tokens = request.block_size * scale.group
    whole, rest = divmod(request.input_length, group_tokens)
    ids = request.hash_ids[scale.group - 1 :: scale.group][:whole]
    length = whole * scale.block_size
    if rest:
        ids.append(request.hash_ids[-1])
        length += min(scale.block_size, max(1, round(rest * scale.block_size / group_tokens)))
    return length, ids
