"""Results: whole lines after a kill, the later of two results counts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deltaserve.errors import InputError
from replay.results import ErrorInfo, Result, ResultWriter, drop_torn_line, read_results


def _result(name: str, **values: object) -> Result:
    return Result.model_validate(
        {
            "request_id": name,
            "session_id": "s",
            "turn": 0,
            "input_length": 5,
            "output_length": 2,
            **values,
        }
    )


def _write(path: Path, *results: Result) -> None:
    writer = ResultWriter(path)
    for result in results:
        writer.write(result)
    writer.close()


def test_results_are_read_back_equal_from_the_file_or_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    results = [
        _result("a", scheduled_s=1.0, arrivals=[(1.5, 1), (2.0, 2)], output_ids=[1, 2]),
        _result("b", error=ErrorInfo(kind="timeout", message="no")),
    ]
    _write(path, *results)
    assert read_results(path) == results
    assert read_results(tmp_path) == results


@pytest.mark.parametrize("cut", range(1, 60))
def test_a_torn_last_line_is_dropped_and_can_be_cut_off(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "requests.jsonl"
    _write(path, _result("a"), _result("b"))
    os.truncate(path, path.stat().st_size - cut)
    assert [result.request_id for result in read_results(path)] == ["a"]
    drop_torn_line(path)
    _write(path, _result("c"))
    assert [result.request_id for result in read_results(path)] == ["a", "c"]


def test_a_broken_line_that_is_not_the_last_is_named(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    _write(path, _result("a"))
    with path.open("a") as stream:
        stream.write('{"request_id":"b"}\n')
    with pytest.raises(InputError, match=r"requests\.jsonl:2: field session_id"):
        read_results(path)


def test_the_later_result_for_a_request_counts(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    failed = _result("a", error=ErrorInfo(kind="connect", message=""))
    _write(path, failed, _result("b"), _result("a", output_tokens=2))
    assert [(r.request_id, r.output_tokens) for r in read_results(path)] == [("b", 0), ("a", 2)]


def test_times_are_derived_from_the_schedule_and_the_arrivals() -> None:
    result = _result(
        "a",
        scheduled_s=1.0,
        sent_s=1.25,
        first_token_s=2.0,
        finished_s=9.0,
        output_tokens=5,
        arrivals=[(2.0, 1), (4.0, 5)],
    )
    assert (result.ttft_s(), result.tpot_s(), result.lateness_s()) == (1.0, 0.5, 0.25)
    assert _result("a", output_tokens=1, first_token_s=1.0).tpot_s() is None


def test_tokens_of_the_first_arrival_took_no_time_that_was_seen() -> None:
    """Eight tokens at once, then four: the pace is that of the four."""
    held_back = _result("a", output_tokens=12, arrivals=[(2.0, 8), (2.5, 10), (4.0, 12)])
    assert held_back.tpot_s() == 0.5
    assert held_back.worst_gap_s() == 1.5
    assert held_back.first_chunk_tokens() == 8
    at_once = _result("a", output_tokens=12, arrivals=[(2.0, 12)])
    assert (at_once.tpot_s(), at_once.worst_gap_s()) == (None, None)
    assert at_once.first_chunk_tokens() == 12
    assert _result("a").first_chunk_tokens() is None


def test_reading_results_needs_none_of_the_clients_packages() -> None:
    code = "import sys, replay.results; print('aiohttp' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout == "False\n"
