"""What of a simulated run is beyond its calibration."""

from __future__ import annotations

import pandas as pd
import pytest

from eval.reach import beyond, in_words, most_at_once

# Two workers; on the first two answers overlap, and a third begins as one of them ends.
REQUESTS = pd.DataFrame(
    [
        ("w0", 0.0, 10.0, 1000),
        ("w0", 5.0, 12.0, 2000),
        ("w0", 10.0, 20.0, 500),
        ("w1", 0.0, 20.0, 700),
        ("w1", None, 20.0, 90_000),
    ],
    columns=["decode_worker", "first_token_s", "finished_s", "prompt_tokens"],
)


def test_what_decodes_at_a_time_is_counted_by_worker() -> None:
    assert most_at_once(REQUESTS) == {"most_requests": 2, "most_context_tokens": 3000}
    assert most_at_once(REQUESTS.iloc[:0]) == {"most_requests": 0, "most_context_tokens": 0}
    fleet = most_at_once(REQUESTS.assign(decode_worker=None))
    assert fleet["most_requests"] == 3


@pytest.mark.parametrize(
    ("ranges", "said"),
    [
        ({"most_requests": 2, "most_context_tokens": 3000}, []),
        ({"most_requests": 1}, ["2 requests that decode at a time, fitted up to 1"]),
        ({}, []),
    ],
    ids=["within", "beyond", "no range stated"],
)
def test_a_quantity_beyond_the_range_is_named(ranges: dict[str, int], said: list[str]) -> None:
    assert in_words([beyond(REQUESTS, ranges)]) == said


def test_of_several_runs_the_most_is_said() -> None:
    told = in_words([{"most_requests": (20, 9)}, {}, {"most_requests": (31, 9)}])
    assert told == ["31 requests that decode at a time, fitted up to 9"]
