"""The schedule, on virtual time: order, times and the number of sessions in flight."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.plan import Plan, Planned, make_plan
from replay.schedule import Schedule, TreeQueue
from replay.trace import Request

TraceOf = Callable[..., list[Request]]
Virtually = Callable[..., Any]


class _Log:
    """Sends by waiting for a random time; notes when each request was due, sent and ended."""

    def __init__(self, clock: Callable[[], float], seed: int) -> None:
        self.clock = clock
        self.due: dict[int, float] = {}
        self.sent: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        self.trees: dict[int, int] = {}
        self.most_trees = 0
        self._generator = random.Random(seed)

    async def send(self, request: Planned, at_s: float) -> None:
        import asyncio

        assert request.index not in self.sent
        self.due[request.index] = at_s
        self.sent[request.index] = self.clock()
        self.trees[request.tree] = self.trees.get(request.tree, 0) + 1
        self.most_trees = max(self.most_trees, sum(1 for n in self.trees.values() if n))
        await asyncio.sleep(self._generator.choice([0.0, 0.01, 2.0, 10.0]))
        self.trees[request.tree] -= 1
        self.ended[request.index] = self.clock()


def _replay(
    run_virtually: Virtually, plan: Plan, seed: int, slots: int | None = None, **options: Any
) -> _Log:
    logs = []

    async def main(clock: Callable[[], float]) -> None:
        log = _Log(clock, seed)
        logs.append(log)
        time_scale = options.pop("time_scale", 1.0)
        shift_s = options.pop("shift_s", 0.0)
        done = options.pop("done", frozenset())
        schedule = Schedule(plan.requests, log.send, clock, time_scale=time_scale, done=done)
        if slots is None:
            await schedule.open_loop(shift_s)
        else:
            await schedule.closed_loop(TreeQueue(range(plan.trees)), slots, **options)

    run_virtually(main)
    return logs[0]


_seeds = st.integers(0, 10**6)


@given(seed=_seeds, scale=st.sampled_from([0.5, 1.0, 4.0]))
def test_open_loop_sends_at_the_traces_time_or_when_the_answer_before_ended(
    trace_of: TraceOf, run_virtually: Virtually, seed: int, scale: float
) -> None:
    plan = make_plan(trace_of(seed))
    log = _replay(run_virtually, plan, seed, time_scale=scale)
    assert set(log.sent) == {request.index for request in plan.requests}
    for request in plan.requests:
        ready = max((log.ended[parent] for parent in request.waits_for), default=0.0)
        assert log.due[request.index] == max(request.trace_s / scale, ready)
        assert 0 <= log.sent[request.index] - log.due[request.index] < 1e-6


@given(seed=_seeds, slots=st.integers(1, 6), think_scale=st.sampled_from([0.0, 1.0, 3.0]))
def test_closed_loop_never_exceeds_its_sessions_and_keeps_think_times(
    trace_of: TraceOf, run_virtually: Virtually, seed: int, slots: int, think_scale: float
) -> None:
    plan = make_plan(trace_of(seed))
    log = _replay(run_virtually, plan, seed, slots=slots, think_scale=think_scale, max_think_s=1.5)
    assert set(log.sent) == {request.index for request in plan.requests}
    assert log.most_trees <= slots
    for request in plan.requests:
        if request.waits_for:
            ready = max(log.ended[parent] for parent in request.waits_for)
            think_s = min(request.think_time_s * think_scale, 1.5)
            assert log.sent[request.index] == pytest.approx(ready + think_s, abs=1e-6)


@given(seed=_seeds, slots=st.none() | st.integers(1, 4))
def test_no_turn_is_sent_before_its_parents_answer_has_ended(
    trace_of: TraceOf, run_virtually: Virtually, seed: int, slots: int | None
) -> None:
    plan = make_plan(trace_of(seed))
    log = _replay(run_virtually, plan, seed, slots=slots)
    for request in plan.requests:
        for parent in request.waits_for:
            assert log.sent[request.index] >= log.ended[parent]


def test_closed_loop_without_sub_agents_keeps_all_slots_busy(
    trace_of: TraceOf, run_virtually: Virtually
) -> None:
    plan = make_plan(trace_of(3, requests=80, sub_agents=False))
    log = _replay(run_virtually, plan, 3, slots=4, think_scale=0.0)
    assert log.most_trees == 4


@given(seed=_seeds, slots=st.none() | st.integers(1, 4))
def test_a_resumed_schedule_sends_only_what_is_left(
    trace_of: TraceOf, run_virtually: Virtually, seed: int, slots: int | None
) -> None:
    plan = make_plan(trace_of(seed))
    done = frozenset(request.index for request in plan.requests[::3])
    log = _replay(run_virtually, plan, seed, slots=slots, done=done)
    assert set(log.sent) == {request.index for request in plan.requests} - done


def test_a_shifted_open_loop_starts_with_what_is_due(
    trace_of: TraceOf, run_virtually: Virtually
) -> None:
    plan = make_plan(trace_of(2))
    half = len(plan.requests) // 2
    done = frozenset(range(half))
    log = _replay(run_virtually, plan, 2, done=done, shift_s=plan.requests[half].trace_s)
    assert min(log.sent.values()) == pytest.approx(0.0, abs=1e-6)
    last = plan.requests[-1]
    assert log.due[last.index] >= last.trace_s - plan.requests[half].trace_s - 1e-9
