"""Which requests of a trace a run sends, how long they are, and what each has to wait for.

Pure: no I/O, no clock. Must not know HTTP or engines.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import NDArray

from deltaserve.errors import InputError
from replay.trace import Request

_SCALE_TOLERANCE = 0.05
_MAX_GROUP = 64


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
    plan of the requests whose answers must have ended first (the last one is what think time counts
    from), and `tree` the conversation that it belongs to: a session with its sub-agents."""

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


@dataclass(slots=True)
class Dropped:
    """Requests of the trace that a run leaves out, and why."""

    over_max_input_tokens: int = 0
    after_a_dropped_one: int = 0
    over_session_limit: int = 0


@dataclass(slots=True)
class Plan:
    requests: list[Planned] = field(default_factory=list)
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
) -> Plan:
    """Selects and scales a trace's requests, in its order.

    `session_limit` bounds conversations (sessions with their sub-agents), `request_limit` what is
    left of them. A request over `max_input_tokens` (after scaling) is left out together with
    everything that depends on it, so that no turn is sent without those before it.
    """
    plan = Plan()
    trees = _Trees()
    started = 0
    position: dict[str, int] = {}
    last_turn: dict[str, int] = {}
    tree_of: dict[str, int] = {}
    cut_sessions: set[str] = set()
    dropped: set[str] = set()
    for request in requests:
        if len(plan.requests) == request_limit:
            break
        parent = request.parent_request_id
        if request.request_id in position or request.request_id in dropped:
            raise InputError(f"request_id {request.request_id}: occurs twice in the trace")
        if parent is not None and parent not in position and parent not in dropped:
            raise InputError(
                f"request_id {request.request_id}: field parent_request_id: expected a request "
                f"earlier in the trace, found {parent}"
            )
        if request.session_id in cut_sessions or parent in dropped:
            cut_sessions.add(request.session_id)
            dropped.add(request.request_id)
            plan.dropped.after_a_dropped_one += 1
            continue
        starts = request.session_id not in tree_of and parent is None
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
        waits = []
        previous = last_turn.get(request.session_id)
        if previous is not None:
            waits.append(previous)
        if parent is not None and position[parent] != previous:
            waits.append(position[parent])
        index = len(plan.requests)
        if request.session_id not in tree_of:
            tree_of[request.session_id] = trees.add()
        tree = tree_of[request.session_id]
        for other in waits:
            trees.join(tree, plan.requests[other].tree)
        position[request.request_id] = last_turn[request.session_id] = index
        plan.requests.append(
            Planned(
                index,
                request.request_id,
                request.session_id,
                request.turn,
                request.timestamp_s,
                input_length,
                max(1, round(request.output_length * scale.effective)),
                scale.block_size,
                np.asarray(hash_ids, dtype=np.int64),
                request.think_time_s or 0.0,
                tuple(waits),
                tree,
            )
        )
    plan.trees = trees.number(plan.requests)
    return plan


class _Trees:
    """Joins sessions that wait for each other, whenever that turns out, into one conversation."""

    def __init__(self) -> None:
        self._root: list[int] = []

    def add(self) -> int:
        self._root.append(len(self._root))
        return len(self._root) - 1

    def join(self, one: int, other: int) -> None:
        one, other = self._find(one), self._find(other)
        self._root[max(one, other)] = min(one, other)

    def _find(self, tree: int) -> int:
        while self._root[tree] != tree:
            self._root[tree] = self._root[self._root[tree]]
            tree = self._root[tree]
        return tree

    def number(self, requests: list[Planned]) -> int:
        """Numbers the conversations in the order of their first requests; returns how many."""
        numbers: dict[int, int] = {}
        for request in requests:
            request.tree = numbers.setdefault(self._find(request.tree), len(numbers))
        return len(numbers)


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
