"""Sessions in flight, on virtual time: mid-session starts, priming, recycling, arrivals."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.lanes import Lanes, Start, poisson_arrivals
from replay.plan import Plan, Planned, make_plan
from replay.plays import Order, Plays, TicketCounter
from replay.trace import Request

TraceOf = Callable[..., list[Request]]
Virtually = Callable[..., Any]
_seeds = st.integers(0, 10**6)
_ANSWER_S = 2.0


class _Load:
    """What a load sent: each request with the times at which it was due and answered."""

    def __init__(self) -> None:
        self.sent: list[tuple[float, Planned]] = []
        self.ended: dict[str, float] = {}
        self.primes_in_flight = 0
        self.most_primes = 0
        self.primed_at_s: float | None = None
        self.in_flight: list[tuple[float, int]] = []

    def first(self, requests: list[Planned]) -> dict[str, Planned]:
        found: dict[str, Planned] = {}
        for request in requests:
            found.setdefault(request.session_id, request)
        return found

    def turns(self) -> list[Planned]:
        return [request for _, request in self.sent if not request.primes]

    def primes(self) -> list[Planned]:
        return [request for _, request in self.sent if request.primes]


def _run(
    run_virtually: Virtually,
    plan: Plan,
    *,
    slots: int = 0,
    until_s: float = 1e9,
    count: int | None = None,
    per_hour: float | None = None,
    shuffled: bool = True,
    **options: Any,
) -> _Load:
    load = _Load()

    async def main(clock: Callable[[], float]) -> None:
        async def send(request: Planned, at_s: float) -> None:
            load.sent.append((at_s, request))
            load.primes_in_flight += request.primes
            load.most_primes = max(load.most_primes, load.primes_in_flight)
            load.in_flight.append((clock(), lanes.sessions_in_flight))
            await asyncio.sleep(_ANSWER_S)
            load.primes_in_flight -= request.primes
            load.ended[request.request_id] = clock()

        def primed() -> None:
            assert load.primed_at_s is None
            load.primed_at_s = clock()

        lanes = Lanes(
            Plays(plan.requests),
            send,
            clock,
            Order(plan.trees, 7, shuffled=shuffled),
            TicketCounter(count),
            on_primed=primed,
            **options,
        )
        if per_hour is None:
            task = asyncio.create_task(lanes.closed(slots))
        else:
            arrivals = poisson_arrivals(per_hour, 7)
            task = asyncio.create_task(lanes.arriving(arrivals, slots))
        await asyncio.wait([task], timeout=until_s)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            await task

    run_virtually(main)
    return load


def _sessions(turns: list[int]) -> list[Request]:
    """Sessions of so many turns, each growing by a block a turn; three seconds to think."""
    trace = []
    for number, count in enumerate(turns):
        for turn in range(count):
            trace.append(
                Request(
                    f"{number}.{turn}",
                    f"s{number}",
                    turn,
                    0.0,
                    4 * (turn + 1),
                    5,
                    4,
                    [1000 * number + block for block in range(turn + 1)],
                    None,
                    3.0 if turn else None,
                )
            )
    return trace


@given(seed=_seeds, slots=st.integers(1, 12), parallel=st.integers(1, 3))
def test_lanes_begin_in_the_middle_after_their_prefix_was_primed(
    trace_of: TraceOf, run_virtually: Virtually, seed: int, slots: int, parallel: int
) -> None:
    plan = make_plan(trace_of(seed, requests=80))
    start = Start(first_mid=True, share=(0.25, 0.75), parallel=parallel)
    load = _run(run_virtually, plan, slots=slots, count=plan.trees, start=start)
    assert load.most_primes <= parallel
    # Each turn is sent at most once, and what is left of a conversation that begins in the middle
    # is sent whole: what was not sent is a beginning of the conversation.
    sent = {request.index for request in load.turns()}
    assert len(sent) == len(load.turns())
    begun_mid = 0
    for tree in range(plan.trees):
        members = [r.index for r in plan.requests if r.tree == tree]
        unsent = [index for index in members if index not in sent]
        assert unsent == members[: len(unsent)]
        begun_mid += bool(unsent)
        assert len(unsent) / len(members) <= 0.75
        if unsent:
            assert len(unsent) >= int(0.25 * len(members))
    assert begun_mid <= slots
    # Every session's first turn after t* comes after the prime of the turn before it, which had
    # that turn's prompt and asked for one token.
    ended = load.ended
    for request in load.first(load.turns()).values():
        if request.turn:
            before = next(
                prime for prime in load.primes() if prime.session_id == request.session_id
            )
            assert before.turn == request.turn - 1
            assert before.output_length == 1
            due_s = next(at_s for at_s, other in load.sent if other is request)
            assert due_s >= ended[before.request_id]
            assert due_s <= max(ended.values())
    assert load.primed_at_s is not None


def test_the_window_may_begin_when_all_first_lanes_are_primed(run_virtually: Virtually) -> None:
    plan = make_plan(_sessions([20] * 12))
    start = Start(first_mid=True, parallel=3)
    load = _run(run_virtually, plan, slots=12, count=None, until_s=60.0, start=start)
    primes = load.primes()
    assert len(primes) == 12
    # Twelve lanes, three at a time, two seconds each.
    assert load.primed_at_s == pytest.approx(8.0, abs=1e-3)
    # Lanes are active as soon as theirs is done, the others being primed still, and the rest of
    # their think time differs.
    firsts = [at_s for at_s, r in load.sent if r in load.first(load.turns()).values()]
    assert min(firsts) < 8.0
    assert len({round(at_s, 3) for at_s in firsts}) > 8


@pytest.mark.parametrize("slots", [1, 5, 17])
def test_recycling_keeps_so_many_sessions_in_flight_with_fresh_prompts(
    run_virtually: Virtually, slots: int
) -> None:
    plan = make_plan(_sessions([3, 5, 2, 8, 1]))
    load = _run(run_virtually, plan, slots=slots, count=None, until_s=600.0)
    assert {count for _, count in load.in_flight[slots:]} == {slots}
    plays = {request.play for request in load.turns()}
    assert max(plays) >= 5
    names = [request.request_id for request in load.turns()]
    assert len(set(names)) == len(names)
    for request in load.turns():
        suffix = f"#{request.play}" if request.play else ""
        assert request.session_id == f"s{request.request_id.split('.')[0]}{suffix}"
    # A recycled session is a new agent: it begins with its first turn.
    assert all(request.turn == 0 for request in load.first(load.turns()).values())
    # Each play has every session once; its order is drawn anew.
    orders = []
    for play in range(max(plays) - 1):
        begun = [r.session_id.split("#")[0] for r in load.turns() if r.play == play and not r.turn]
        assert sorted(begun) == [f"s{number}" for number in range(5)]
        orders.append(tuple(begun))
    if slots == 1:
        assert len(set(orders)) > 1


def test_recycled_lanes_may_begin_in_the_middle_too(run_virtually: Virtually) -> None:
    plan = make_plan(_sessions([8] * 4))
    start = Start(first_mid=True, later_mid=True)
    load = _run(run_virtually, plan, slots=2, count=None, until_s=300.0, start=start)
    firsts = load.first(load.turns()).values()
    assert len(firsts) > 6
    assert all(2 <= request.turn <= 6 for request in firsts)
    assert len(load.primes()) >= len(firsts)


def test_the_same_seed_begins_the_same_sessions_at_the_same_turns(run_virtually: Virtually) -> None:
    plan = make_plan(_sessions([9, 20, 30, 4, 17]))

    def begun(slots: int) -> dict[str, int]:
        start = Start(first_mid=True)
        load = _run(run_virtually, plan, slots=slots, count=None, until_s=100.0, start=start)
        return {name: request.turn for name, request in load.first(load.turns()).items()}

    assert begun(5) == begun(5)
    assert len(set(begun(5).values())) > 1


def test_sessions_arrive_at_random_and_their_turns_follow_the_answers(
    run_virtually: Virtually,
) -> None:
    plan = make_plan(_sessions([4] * 50))
    load = _run(run_virtually, plan, per_hour=3600.0, count=1000)
    starts = [at_s for at_s, request in load.sent if not request.turn]
    expected = list(itertools.islice(poisson_arrivals(3600.0, 7), 1000))
    assert starts == pytest.approx(expected, abs=1e-6)
    gaps = [b - a for a, b in itertools.pairwise(starts)]
    mean_s = sum(gaps) / len(gaps)
    assert 0.9 < mean_s < 1.1
    # Of an exponential distribution the standard deviation is the mean.
    deviation_s = (sum((gap - mean_s) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert 0.85 < deviation_s / mean_s < 1.15
    before: dict[str, float] = {}
    for at_s, request in load.sent:
        if request.turn:
            assert at_s == pytest.approx(before[request.session_id] + _ANSWER_S + 3.0, abs=1e-3)
        before[request.session_id] = at_s


def test_processes_share_one_sequence_of_arrivals() -> None:
    whole = list(itertools.islice(poisson_arrivals(100.0, 3), 30))
    parts = [itertools.islice(poisson_arrivals(100.0, 3, first, 3), 10) for first in range(3)]
    assert sorted(itertools.chain(*parts)) == whole
