"""Replays against real SGLang: its cache does what the statistics say that a cache can do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from launch import Fleet, fleet, load_topology
from replay.options import RunOptions
from replay.results import Result, read_results
from replay.runner import run
from replay.stats import TraceStats
from replay.synth import load_profile, synthesise
from replay.trace import Request, write_trace
from tests.live.conftest import VOCABULARY, worker_of

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    overrides = ["workers.0.count=1", "base_port=0", 'router.kind="none"']
    topology = load_topology("laptop-sglang", overrides)
    with fleet(topology, tmp_path_factory.mktemp("sglang"), on_progress=print) as running:
        yield running


def _trace() -> list[Request]:
    """Some 30,000 tokens that the worker's cache of 131,072 holds whole."""
    profile = load_profile("glm-agentic").scaled(0.02, BLOCK_SIZE)
    profile = profile.model_copy(update={"requests_per_s": 20.0, "max_input_tokens": 3000})
    return list(synthesise(profile, seed=5, requests=50))


def _replay(sglang: Fleet, folder: Path, trace: list[Request], **values: Any) -> list[Result]:
    write_trace(folder / "t.jsonl", trace)
    options = RunOptions(
        trace=folder / "t.jsonl",
        url=worker_of(sglang, "colocated").url,
        output=folder / "out",
        mode="closed",
        max_inflight_sessions=1,
        think_scale=0.0,
        record_output_ids=True,
        **values,
    )
    summary = run(options)
    assert summary["errors"] == {}
    record = orjson.loads((folder / "out" / "replay.json").read_bytes())
    assert record["arguments"]["vocab_size"] == VOCABULARY  # as the worker itself says
    return sorted(read_results(folder / "out"), key=lambda result: result.sent_s or 0.0)


@pytest.mark.timeout(600)
def test_cached_tokens_are_those_of_an_infinite_cache_within_a_block(
    sglang: Fleet, tmp_path: Path
) -> None:
    trace = _trace()
    results = _replay(sglang, tmp_path, trace, seed=1)
    by_id = {request.request_id: request for request in trace}
    stats = TraceStats()
    reused = 0
    for result in results:
        predicted = stats.add(by_id[result.request_id]).hit_tokens
        assert result.prompt_tokens == result.input_length
        assert result.cached_tokens is not None
        # An engine computes at least the last token of a prompt.
        assert abs(result.cached_tokens - predicted) <= BLOCK_SIZE, result.request_id
        reused += result.cached_tokens
    assert len(results) == len(trace)
    share = reused / sum(result.input_length for result in results)
    assert share == pytest.approx(stats.result()["best_hit_rate"], abs=0.01)


@pytest.mark.timeout(600)
def test_spliced_answers_are_found_in_the_cache_of_the_worker_that_gave_them(
    sglang: Fleet, tmp_path: Path
) -> None:
    first = list(range(25))
    second = [*first[:-1], *range(1000, 1020)]
    trace = [
        Request("a", "s", 0, 0.0, 390, 200, BLOCK_SIZE, first),
        Request("b", "s", 1, 1.0, 700, 4, BLOCK_SIZE, second),
    ]
    for splice in (False, True):
        folder = tmp_path / str(splice)
        folder.mkdir()
        first_result, result = _replay(
            sglang, folder, trace, seed=2 + splice, splice_outputs=splice
        )
        assert first_result.output_ids is not None
        # What a worker generated is in its cache, but for the last token, which was never fed back.
        held = 390 + 200 - 1 if splice else 384
        assert result.cached_tokens is not None
        assert 0 <= result.cached_tokens - held <= 2


@pytest.mark.timeout(600)
def test_the_same_prompt_gives_the_same_tokens_streamed_in_order(
    sglang: Fleet, tmp_path: Path
) -> None:
    one = Request("a", "s", 0, 0.0, 300, 30, BLOCK_SIZE, list(range(19)))
    again = replace(one, request_id="b", session_id="t", timestamp_s=1.0)
    first, second = _replay(sglang, tmp_path, [one, again], seed=4)
    assert first.output_ids == second.output_ids
    assert first.output_ids is not None
    assert len(first.output_ids) == 30
    assert [count for _, count in first.arrivals] == sorted({c for _, c in first.arrivals})
    assert first.arrivals[-1][1] == 30
    assert len(first.arrivals) > 1
