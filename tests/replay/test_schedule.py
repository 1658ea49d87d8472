"""The schedule, on virtual time: order, times and the number of sessions in flight."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.lanes import Lanes
from replay.open_loop import OpenLoop
from replay.plan import Plan, Planned, make_plan
from replay.plays import Order, Plays, TicketCounter
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
        self.prepared: dict[int, float] = {}
        self._generator = random.Random(seed)

    def prepare(self, index: int, at_s: float) -> bool:
        if self._generator.random() < 0.2:
            return False
        assert index not in self.sent
        assert at_s <= self.clock() + 1.0 + 1e-6  # bodies that wait take memory
        self.prepared[index] = at_s
        return True

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
        mine = options.pop("mine", None)
        if slots is None:
            await OpenLoop(
                plan.requests,
                log.send,
                clock,
                mine=mine,
                prepare=log.prepare,
                time_scale=time_scale,
                **options,
            ).run(shift_s)
        else:
            await Lanes(
                Plays(plan.requests),
                log.send,
                clock,
                Order(plan.trees, 0, shuffled=False),
                TicketCounter(plan.trees),
                mine=mine,
                prepare=log.prepare,
                **options,
            ).closed(slots)

    run_virtually(main)
    return logs[0]


_seeds = st.integers(0, 10**6)


@given(seed=_seeds, scale=st.sampled_from([0.5, 1.0, 4.0]))
def test_open_loop_sends_at_the_traces_time_or_when_the_answer_before_ended(
    trace_of: TraceOf, run_virtually: Virtually, seed: int, scale: float
) -> None:
    plan = make_plan(trace_of(seed))
    log = _replay(run_virtually, plan, seed, time_scale=scale, max_think_s=0.7)
    assert set(log.sent) == {request.index for request in plan.requests}
    for request in plan.requests:
        ready = max((log.ended[parent] for parent in request.waits_for), default=0.0)
        # A late turn keeps its think time: its tools run all the same.
        ready += min(request.think_time_s / scale, 0.7) if request.waits_for else 0.0
        due_s = max(request.trace_s / scale, ready)
        assert log.due[request.index] == pytest.approx(due_s, abs=1e-6)
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


def _parallel_agents(generator: random.Random) -> tuple[list[Request], dict[str, set[str]]]:
    """A main session whose every turn launches agents, of which the next turn names the one that
    ended last; and by turn, all the requests that it waited for."""
    trace: list[Request] = []
    awaited: dict[str, set[str]] = {}
    now_s = 0.0

    def add(name: str, session: str, turn: int, parent: str | None) -> None:
        nonlocal now_s
        now_s += generator.choice([0.0, 0.5, 3.0])
        trace.append(Request(name, session, turn, now_s, 4, 1, 4, [len(trace)], parent))

    add("m0", "m", 0, None)
    number = 0
    for turn in range(1, 5):
        agents = {}
        for _ in range(generator.randint(0, 4)):
            number += 1
            agents[f"a{number}"] = generator.randint(1, 3)
        asked: list[str] = []
        steps = [agent for agent, turns in agents.items() for _ in range(turns)]
        generator.shuffle(steps)
        for place, agent in enumerate(steps):
            done = steps[:place].count(agent)
            asked.append(f"{agent}-{done}")
            add(asked[-1], agent, done, None if done else f"m{turn - 1}")
        awaited[f"m{turn}"] = {f"m{turn - 1}", *asked}
        # One that nobody waits for asks again after the next turn.
        add(f"b{turn}-0", f"b{turn}", 0, f"m{turn - 1}")
        add(f"m{turn}", "m", turn, asked[-1] if asked else None)
        add(f"b{turn}-1", f"b{turn}", 1, None)
    return trace, awaited


@given(seed=_seeds, slots=st.none() | st.just(1))
def test_a_turn_after_parallel_agents_waits_for_all_of_them(
    run_virtually: Virtually, seed: int, slots: int | None
) -> None:
    trace, awaited = _parallel_agents(random.Random(seed))
    plan = make_plan(trace)
    number = {request.request_id: request.index for request in plan.requests}
    log = _replay(run_virtually, plan, seed, slots=slots)
    for name, others in awaited.items():
        assert all(log.sent[number[name]] >= log.ended[number[other]] for other in others)
    for turn in range(1, 5):
        own = plan.requests[number[f"m{turn}"]].waits_for
        assert number[f"b{turn}-0"] not in own


@given(seed=_seeds, scale=st.sampled_from([1.0, 100.0]), slots=st.none() | st.integers(1, 4))
def test_bodies_are_asked_for_shortly_before_they_are_needed(
    trace_of: TraceOf, run_virtually: Virtually, seed: int, scale: float, slots: int | None
) -> None:
    plan = make_plan(trace_of(seed))
    log = _replay(run_virtually, plan, seed, slots=slots, time_scale=scale)
    for index, at_s in log.prepared.items():
        assert at_s <= log.sent[index]
    assert len(log.prepared) >= len(plan.requests) / 2


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
    left = np.ones(len(plan.requests), dtype=np.bool_)
    left[::3] = False
    log = _replay(run_virtually, plan, seed, slots=slots, mine=left)
    assert set(log.sent) == set(np.flatnonzero(left))


def test_a_shifted_open_loop_starts_with_what_is_due(
    trace_of: TraceOf, run_virtually: Virtually
) -> None:
    plan = make_plan(trace_of(2))
    half = len(plan.requests) // 2
    left = np.arange(len(plan.requests)) >= half
    log = _replay(run_virtually, plan, 2, mine=left, shift_s=plan.requests[half].trace_s)
    assert min(log.sent.values()) == pytest.approx(0.0, abs=1e-6)
    last = plan.requests[-1]
    assert log.due[last.index] >= last.trace_s - plan.requests[half].trace_s - 1e-9
