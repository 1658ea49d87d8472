"""Statistics against the plainest possible count, and LRU caches against a simulated one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaserve.errors import InputError
from replay.stats import TraceStats, describe
from replay.trace import Request

TraceOf = Callable[..., list[Request]]
_seeds = st.integers(0, 10**6)


def _with_large_ids(trace: list[Request]) -> list[Request]:
    """The same trace, its later ids large as hashes are."""

    def large(hash_id: int) -> int:
        return hash_id if hash_id < 20 else 2**62 - hash_id * 2**40

    return [replace(request, hash_ids=[large(i) for i in request.hash_ids]) for request in trace]


@given(seed=_seeds, large=st.booleans())
def test_reuse_is_that_of_a_plain_count(trace_of: TraceOf, seed: int, large: bool) -> None:
    trace = trace_of(seed)
    seen: set[int] = set()
    seen_in: dict[str, set[int]] = {}
    shared = hits = within = 0
    for request in trace:
        mine = seen_in.setdefault(request.session_id, set())
        shared += sum(hash_id in seen for hash_id in request.hash_ids)
        for known, total in ((seen, "hits"), (mine, "within")):
            blocks = 0
            while blocks < len(request.hash_ids) and request.hash_ids[blocks] in known:
                blocks += 1
            tokens = min(blocks * request.block_size, request.input_length)
            if total == "hits":
                hits += tokens
            else:
                within += tokens
        seen.update(request.hash_ids)
        mine.update(request.hash_ids)
    record = describe(_with_large_ids(trace) if large else trace)
    inputs = sum(request.input_length for request in trace)
    assert record["block_sharing"] == shared / sum(len(r.hash_ids) for r in trace)
    assert record["best_hit_rate"] == hits / inputs
    assert record["inconsistent_ids"] == 0
    if hits:
        assert record["reuse"]["within_session"] == within / hits
        assert record["reuse"]["across_sessions"] == 1 - within / hits
    else:
        assert record["reuse"] is None


@given(seed=_seeds)
def test_percentiles_and_means_are_numpys(trace_of: TraceOf, seed: int) -> None:
    trace = trace_of(seed)
    record = describe(trace)
    for key, values in (
        ("input_tokens", [request.input_length for request in trace]),
        ("output_tokens", [request.output_length for request in trace]),
    ):
        p50, p90, p99 = np.percentile(values, [50, 90, 99])
        assert record[key] == {
            "mean": np.mean(values),
            "p50": p50,
            "p90": p90,
            "p99": p99,
            "max": max(values),
        }
    sessions: dict[str, int] = {}
    for request in trace:
        sessions[request.session_id] = sessions.get(request.session_id, 0) + 1
    assert record["sessions"] == len(sessions)
    assert record["multi_turn_share"] == np.mean([count > 1 for count in sessions.values()])


@given(st.lists(st.floats(0, 50), min_size=1, max_size=60))
def test_the_peak_is_the_busiest_ten_seconds(times: list[float]) -> None:
    times.sort()
    stats = TraceStats()
    for number, at_s in enumerate(times):
        stats.add(Request(f"r{number}", "s", number, at_s, 1, 1, 1, [0]))
    most = max(sum(begin <= at_s < begin + 10 for at_s in times) for begin in times)
    assert stats.result()["arrival_rps"]["peak_10s"] == most / 10


def _simulated_hits(trace: list[Request], capacity_blocks: int, instances: int) -> int:
    """Hit tokens of LRU caches that are kept block by block: a request's blocks are touched deepest
    first, so that the deepest is the first to go."""
    caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(instances)]
    order: dict[str, int] = {}
    hits = 0
    for request in trace:
        number = order.setdefault(request.session_id, len(order))
        cache = caches[number % instances]
        blocks = 0
        while blocks < len(request.hash_ids) and request.hash_ids[blocks] in cache:
            blocks += 1
        hits += min(blocks * request.block_size, request.input_length)
        for hash_id in reversed(request.hash_ids):
            cache[hash_id] = None
            cache.move_to_end(hash_id)
        while len(cache) > capacity_blocks:
            cache.popitem(last=False)
    return hits


@given(seed=_seeds, instances=st.integers(1, 3))
def test_cache_curves_equal_caches_that_are_simulated_at_each_size(
    trace_of: TraceOf, seed: int, instances: int
) -> None:
    trace = trace_of(seed, requests=120, block_size=64)
    record = describe(trace, instances=[instances])
    assert record["lru"][0]["instances"] == instances
    inputs = sum(request.input_length for request in trace)
    curve = record["lru"][0]["curve"]
    for point in curve:
        simulated = _simulated_hits(trace, point["cache_tokens"] // 64, instances)
        assert point["hit_rate"] == pytest.approx(simulated / inputs)
    if instances == 1:
        assert curve[-1]["hit_rate"] == pytest.approx(record["best_hit_rate"])


def test_ids_that_stand_for_different_prefixes_are_counted() -> None:
    def request(name: str, ids: list[int]) -> Request:
        return Request(name, "s", 0, 0.0, 3, 1, 1, ids)

    record = describe([request("a", [1, 2, 3]), request("b", [2, 1, 3]), request("c", [9, 2, 8])])
    assert record["inconsistent_ids"] > 0


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(InputError, match="no request"):
        describe([])
