"""Measures of two result files, of the same requests."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import orjson
import pytest
import zstandard

from deltaserve.errors import InputError
from eval.calibrate import read_lines as lines_of_steps
from eval.validation import measures, read_lines


def line(turn: int, sent_s: float, ttft_s: float, **changes: Any) -> dict[str, Any]:
    return {
        "session_id": f"s{sent_s:g}",
        "turn": turn,
        "scheduled_s": sent_s,
        "sent_s": sent_s,
        "first_token_s": sent_s + ttft_s,
        "finished_s": sent_s + ttft_s + 4.0,
        "output_tokens": 5,
        "prompt_tokens": 100,
        "cached_tokens": 80,
        "arrivals": [[sent_s + ttft_s, 1], [sent_s + ttft_s + 3.0, 2], [sent_s + ttft_s + 4.0, 5]],
        "error": None,
    } | changes


def test_later_turns_of_the_window_count() -> None:
    lines = [
        line(0, 10.0, 50.0, cached_tokens=0),  # a first turn: in the rate alone
        line(1, 10.0, 2.0),
        line(2, 20.0, 4.0, cached_tokens=40),
        line(1, 5.0, 9.0),  # scheduled before the window, ended in it
        line(3, 30.0, 90.0),  # not answered when the run was cut off
        line(3, 30.0, 1.0, error={"kind": "cancelled", "message": ""}),
    ]
    found = measures(lines, 10.0, 70.0, 100.0)
    assert found["requests"] == 2
    assert found["requests_per_s"] == pytest.approx(4 / 60)
    assert found["apc"] == pytest.approx(0.6)
    assert found["ttft_p50"] == pytest.approx(3.0)
    assert found["tpot_p50"] == pytest.approx(1.0)
    assert found["worst_gap_p90"] == pytest.approx(3.0)


def test_what_sessions_felt_is_of_turns_under_way_when_the_run_was_cut_off() -> None:
    """Both files are cut at the same moment: what the simulation answers later still waits."""
    lines = [
        line(1, 20.0, 1.0, session_id="served", arrivals=[[21.0, 1], [21.1, 5]], finished_s=21.1),
        line(1, 0.0, 95.0, session_id="left"),
        line(1, 200.0, 1.0, session_id="later"),
    ]
    cut = line(1, 0.0, 0.0, session_id="left", first_token_s=None, finished_s=90.0, arrivals=[])
    cut |= {"error": {"kind": "cancelled", "message": ""}, "cached_tokens": None}
    simulated, measured = (
        measures(found, 10.0, 70.0, 90.0) for found in (lines, [lines[0], cut, lines[2]])
    )
    for found in (simulated, measured):
        assert (found["starved_sessions"], found["longest_wait_s"]) == (1, 90)
        assert found["in_time_share"] == 0.5
        assert found["waiting_sessions"] == pytest.approx((60 + 1) / 60)
        assert found["first_tokens_per_s"] == pytest.approx(1 / 60)


def test_a_line_may_say_its_worst_gap() -> None:
    assert measures([line(1, 0.0, 1.0, worst_gap_s=2.5)], 0, 9, 9)["worst_gap_p50"] == 2.5


def test_an_answer_that_came_all_at_once_has_no_pace_and_no_gap() -> None:
    """It is left out; one of which its line says neither arrivals nor a gap, too."""
    at_once = line(1, 0.0, 1.0, arrivals=[[1.0, 5]])
    told = {key: value for key, value in at_once.items() if key != "arrivals"}
    lines = [line(1, 0.0, 1.0), at_once, told | {"worst_gap_s": None}, told]
    found = measures(lines, 0.0, 9.0, 9.0)
    assert found["requests"] == 4
    assert found["tpot_p50"] == pytest.approx(1.0)
    assert found["worst_gap_p50"] == pytest.approx(3.0)
    alone = measures([at_once], 0.0, 9.0, 9.0)
    assert math.isnan(alone["tpot_p50"])
    assert math.isnan(alone["worst_gap_p90"])


def test_tokens_of_the_first_arrival_are_not_counted_for_the_pace() -> None:
    held_back = line(1, 0.0, 1.0, arrivals=[[1.0, 3], [5.0, 5]])
    assert measures([held_back], 0.0, 9.0, 9.0)["tpot_p50"] == pytest.approx(2.0)


def test_packed_files_are_read_and_wrong_lines_are_named(tmp_path: Path) -> None:
    packed = tmp_path / "requests.jsonl.zst"
    packed.write_bytes(zstandard.compress(orjson.dumps(line(1, 0.0, 1.0)) + b"\n"))
    assert read_lines(packed) == [line(1, 0.0, 1.0)]
    packed.write_bytes(packed.read_bytes()[:-5])
    for read in (read_lines, lambda path: list(lines_of_steps(path))):
        with pytest.raises(InputError, match=r"requests\.jsonl\.zst:1: the compressed file is cut"):
            read(packed)
    plain = tmp_path / "requests.jsonl"
    plain.write_bytes(b"{}\n{\n")
    with pytest.raises(InputError, match=r"requests\.jsonl:2"):
        read_lines(plain)
    with pytest.raises(InputError, match=r"none\.jsonl: expected a file of result lines"):
        read_lines(tmp_path / "none.jsonl")
