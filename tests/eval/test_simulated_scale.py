"""The load that fleets of several sizes are simulated under, and what is said of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.simulated_scale import made_requests, scale


@pytest.mark.parametrize("shorter", [1, 4])
def test_made_prompts_begin_with_the_full_blocks_of_the_one_before(shorter: int) -> None:
    requests = made_requests(shorter=shorter)
    before: list[int] = []
    for line in requests:
        ids = [first + i for first, count in line["hash_ids"] for i in range(count)]
        assert len(ids) == -(-line["input_length"] // line["block_size"])
        assert len(set(ids)) == len(ids)
        if line["turn"]:
            shared = len(before) - 1
            assert ids[:shared] == before[:shared]
            assert ids[shared] != before[shared]
        before = ids
    assert len({line["session_id"] for line in requests}) == 200
    mean = sum(line["input_length"] for line in requests) / len(requests)
    assert 40_000 / shorter < mean < 70_000 / shorter


def test_a_size_says_what_it_took(tmp_path: Path) -> None:
    found = scale(2, 30.0, 2, tmp_path)
    assert found.simulated_s >= 29
    assert found.requests > 10
    assert found.decisions_per_cpu_s > 1
    assert found.peak_bytes > 10_000_000
