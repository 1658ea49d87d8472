"""The comparison of this client with AIPerf: what it says of two runs whose difference is known."""

from __future__ import annotations

import random
from pathlib import Path

import orjson
import pytest

from replay.bench.beside_aiperf import (
    Answered,
    beside_router,
    figures_of,
    of_aiperf,
    of_router,
    ttft_at_equal_work,
)


def run(seed: int, slower: float, longer: float) -> list[Answered]:
    """900 s of turns whose TTFT follows from their lengths, with minutes in which all is slower."""
    draw = random.Random(seed)
    answered = []
    pace = 1.0
    for number in range(520):
        if number % 35 == 0:
            pace = draw.uniform(0.95, 1.05)
        prompt = int(draw.uniform(2_500, 9_000) * longer)
        new = int(draw.uniform(300, 700) * longer)
        ttft_s = (0.04 + 5e-5 * new + 4e-6 * prompt + 7e-8 * new * prompt) * pace * slower
        answered.append(
            Answered(
                sent_s=number * 1.7,
                ttft_s=ttft_s * draw.uniform(0.97, 1.03),
                decode_s=0.7,
                prompt_tokens=prompt,
                cached_tokens=prompt - new,
                output_tokens=64,
            )
        )
    return answered


def test_other_work_is_no_difference_of_the_clients() -> None:
    first, second = run(1, slower=1.0, longer=1.0), run(2, slower=1.0, longer=1.15)
    assert figures_of(second).ttft_p50 / figures_of(first).ttft_p50 > 1.1
    ratio, low, high = ttft_at_equal_work(first, second)
    assert low < 1 < high
    assert ratio == pytest.approx(1.0, abs=0.03)


def test_a_slower_client_is_found_behind_lighter_work() -> None:
    first, second = run(3, slower=1.0, longer=1.15), run(4, slower=1.12, longer=1.0)
    ratio, low, _ = ttft_at_equal_work(first, second)
    assert ratio == pytest.approx(1.12, abs=0.03)
    assert low > 1.05


def test_aiperfs_records_of_the_profiling_phase_are_read(tmp_path: Path) -> None:
    def record(phase: str, **metrics: float) -> bytes:
        about = {"benchmark_phase": phase, "request_start_ns": 2_500_000_000, "x_request_id": "r"}
        return orjson.dumps(
            {"metadata": about, "metrics": {name: {"value": v} for name, v in metrics.items()}}
        )

    answer = {
        "time_to_first_token": 250.0,
        "request_latency": 1_000.0,
        "input_sequence_length": 5_000,
        "usage_prompt_cache_read_tokens": 4_480,
        "output_sequence_length": 60,
    }
    lines = [record("warmup", **answer), record("profiling", **answer), record("profiling")]
    (tmp_path / "profile_export.jsonl").write_bytes(b"\n".join(lines))
    assert of_aiperf(tmp_path) == [
        Answered(
            sent_s=2.5,
            ttft_s=0.25,
            decode_s=0.75,
            prompt_tokens=5_000,
            cached_tokens=4_480,
            output_tokens=60,
            name="r",
        )
    ]


def test_a_clients_figures_are_held_against_what_a_router_saw_of_the_same_requests(
    tmp_path: Path,
) -> None:
    log = tmp_path / "decisions.jsonl"
    lines = []
    for number in range(3):
        decision = {"event": "decision", "decision_id": f"d{number}", "request_id": f"r{number}"}
        finish = {"event": "finish", "decision_id": f"d{number}", "client_first_token_s": 0.5}
        lines += [decision, finish | {"first_token_s": 0.4, "duration_s": 1.4}]
    lines.append({"event": "finish", "decision_id": "d9", "client_first_token_s": None})
    log.write_bytes(b"\n".join(map(orjson.dumps, lines)))
    seen = of_router(log)

    def answered(name: str) -> Answered:
        return Answered(0.0, 0.51, 1.0, 100, 50, 10, name)

    by_request = beside_router([answered("r0"), answered("r1"), answered("not-there")], seen)
    assert (by_request.requests, by_request.seen) == (3, 2)
    assert by_request.ttft_p50 == pytest.approx(0.51 / 0.5)
    assert by_request.latency_p50 == pytest.approx(1.51 / 1.5)
    assert beside_router([answered("d0")], seen).seen == 1
