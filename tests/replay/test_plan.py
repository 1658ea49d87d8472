"""The plan: which requests are sent, how long they are, what they wait for."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaserve.errors import InputError
from replay.plan import make_plan, scale_for
from replay.stats import describe
from replay.trace import Request

TraceOf = Callable[..., list[Request]]


def _request(name: str, session: str, turn: int, **values: object) -> Request:
    made = Request(name, session, turn, 0.0, 8, 2, 4, [0, 1])
    return replace(made, **values)  # type: ignore[arg-type]


def test_a_turn_waits_for_the_turn_before_and_for_its_parent() -> None:
    plan = make_plan(
        [
            _request("a0", "a", 0),
            _request("b0", "b", 0, parent_request_id="a0"),
            _request("a1", "a", 1, parent_request_id="b0"),
            _request("a2", "a", 2, parent_request_id="a1"),
            _request("c0", "c", 0),
        ]
    )
    assert [request.waits_for for request in plan.requests] == [(), (0,), (0, 1), (2,), ()]
    assert [request.tree for request in plan.requests] == [0, 0, 0, 0, 1]
    assert plan.trees == 2


def test_conversations_that_come_to_wait_for_each_other_are_one() -> None:
    plan = make_plan(
        [
            _request("a0", "a", 0),
            _request("b0", "b", 0),
            _request("c0", "c", 0),
            _request("c1", "c", 1, parent_request_id="a0"),
        ]
    )
    assert [request.tree for request in plan.requests] == [0, 1, 0, 0]
    assert plan.trees == 2


@given(seed=st.integers(0, 10**6))
def test_a_plan_holds_what_the_trace_says(trace_of: TraceOf, seed: int) -> None:
    generator = random.Random(seed)
    trace = trace_of(seed)
    if generator.random() < 0.5:  # ids without order, as hashes are
        moved = {n: generator.getrandbits(63) for request in trace for n in request.hash_ids}
        trace = [replace(r, hash_ids=[moved[n] for n in r.hash_ids]) for r in trace]
    plan = make_plan(trace)
    assert len(plan.requests) == len(trace)
    assert plan.requests[-1].index == len(trace) - 1
    assert list(plan.requests.request_ids()) == [request.request_id for request in trace]
    for index, (planned, request) in enumerate(zip(plan.requests, trace, strict=True)):
        assert planned.index == index
        assert planned.request_id == request.request_id
        assert planned.session_id == request.session_id
        assert planned.turn == request.turn
        assert planned.trace_s == request.timestamp_s
        assert planned.think_time_s == (request.think_time_s or 0.0)
        assert planned.hash_ids.tolist() == request.hash_ids
        lengths = (request.input_length, request.output_length)
        assert (planned.input_length, planned.output_length) == lengths
        assert (plan.requests.input_length[index], plan.requests.output_length[index]) == lengths
    waiting, awaited = plan.requests.waits()
    pairs = [(p.index, other) for p in plan.requests for other in p.waits_for]
    assert sorted(zip(waiting.tolist(), awaited.tolist(), strict=True)) == sorted(pairs)


def test_limits_leave_out_requests_and_all_that_depends_on_them() -> None:
    trace = [
        _request("a0", "a", 0),
        _request("b0", "b", 0),
        _request("a1", "a", 1, input_length=12, hash_ids=[0, 1, 2]),
        _request("c0", "c", 0, parent_request_id="a1"),
        _request("a2", "a", 2),
        _request("c1", "c", 1),
        _request("b1", "b", 1),
    ]
    plan = make_plan(trace, max_input_tokens=8)
    assert [request.request_id for request in plan.requests] == ["a0", "b0", "b1"]
    assert plan.dropped.over_max_input_tokens == 1
    assert plan.dropped.after_a_dropped_one == 3
    assert len(make_plan(trace, request_limit=4).requests) == 4
    one = make_plan(trace, session_limit=1)
    assert [request.session_id for request in one.requests] == ["a", "a", "c", "a", "c"]


def test_a_double_id_and_an_unknown_parent_are_named() -> None:
    with pytest.raises(InputError, match="request_id a: occurs twice"):
        make_plan([_request("a", "s", 0), _request("a", "s", 1)])
    with pytest.raises(InputError, match="request_id a: field parent_request_id"):
        make_plan([_request("a", "s", 0, parent_request_id="z")])


@pytest.mark.parametrize("factor", [1.0, 0.5, 0.3, 0.1, 0.02, 0.003])
@pytest.mark.parametrize("block_size", [16, 64, 512])
def test_the_effective_factor_is_within_five_percent_or_refused(
    factor: float, block_size: int
) -> None:
    scale = scale_for(factor, block_size)
    assert abs(scale.effective / factor - 1) <= 0.05
    with pytest.raises(InputError, match="too small"):
        scale_for(1e-5, block_size)


@pytest.mark.parametrize("factor", [0.0, -1.0, 1.5])
def test_a_factor_outside_0_to_1_is_refused(factor: float) -> None:
    with pytest.raises(InputError, match="--length-scale"):
        scale_for(factor, 64)


@given(seed=st.integers(0, 10**6))
@pytest.mark.parametrize("factor", [0.5, 0.1, 0.03])
def test_scaled_blocks_are_equal_where_the_trace_s_are(
    trace_of: TraceOf, factor: float, seed: int
) -> None:
    trace = trace_of(seed, block_size=20)
    plan = make_plan(trace, length_scale=factor)
    scale = plan.scales[20]
    for planned, request in zip(plan.requests, trace, strict=True):
        assert len(planned.hash_ids) == -(-planned.input_length // planned.block_size)
        exact = request.input_length * scale.effective
        assert abs(planned.input_length - exact) <= max(1, scale.block_size)
    for planned, request in zip(plan.requests, trace, strict=True):
        for other, source in zip(plan.requests[:10], trace, strict=False):
            whole = min(request.input_length, source.input_length) // (20 * scale.group)
            for place in range(whole):
                end = (place + 1) * scale.group - 1
                same = request.hash_ids[end] == source.hash_ids[end]
                assert (planned.hash_ids[place] == other.hash_ids[place]) == same


def test_the_best_hit_rate_survives_scaling_by_whole_blocks(trace_of: TraceOf) -> None:
    trace = trace_of(5, requests=200, block_size=20)
    plan = make_plan(trace, length_scale=0.1)
    scaled = [
        replace(
            request,
            input_length=planned.input_length,
            block_size=planned.block_size,
            hash_ids=planned.hash_ids.tolist(),
        )
        for planned, request in zip(plan.requests, trace, strict=True)
    ]
    before, after = describe(trace), describe(scaled)
    assert before["block_sharing"] == after["block_sharing"]
    assert after["best_hit_rate"] == pytest.approx(before["best_hit_rate"], abs=0.03)
