"""What a report shows of arms whose requests failed, and of loads that were no closed loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval.plot import Dots, Line
from eval.records import Run
from eval.report import find_runs, gather, loads, write_report
from eval.report.evidence import Evidence
from eval.report.figures.latency import latency_cdf, repeats_strip

MakeRun = Callable[..., Run]
RunWriter = Callable[..., Path]


def evidence_of(folder: Path) -> Evidence:
    return gather(find_runs([folder]), draws=20)


def test_an_arm_that_answered_nothing_has_a_report(tmp_path: Path, run_writer: RunWriter) -> None:
    folder = run_writer(tmp_path / "runs", errors=120)
    evidence = evidence_of(tmp_path / "runs")
    assert evidence.cells[0].failed == 120
    page, markdown = write_report(evidence, tmp_path / "report")
    assert "120 of 120" in markdown.read_text(), folder
    assert "<svg" in page.read_text()


def test_failed_requests_are_within_no_time_in_the_distribution(
    tmp_path: Path, run_writer: RunWriter
) -> None:
    run_writer(tmp_path / "runs", arm="whole")
    run_writer(tmp_path / "runs", arm="half", errors=60)
    cells = evidence_of(tmp_path / "runs").cells
    chart = latency_cdf(cells, "ttft_s", "TTFT")
    ends = {mark.name: mark.y[-1] for mark in chart.marks if isinstance(mark, Line)}
    assert ends == {"whole": pytest.approx(100.0), "half": pytest.approx(50.0)}


def test_a_run_whose_p90_is_among_failures_has_no_p90(
    tmp_path: Path, run_writer: RunWriter
) -> None:
    run_writer(tmp_path / "runs", repeat=1)
    run_writer(tmp_path / "runs", repeat=2, errors=60)
    [cell] = evidence_of(tmp_path / "runs").cells
    [dots] = [mark for mark in repeats_strip([cell]).marks if isinstance(mark, Dots)]
    assert [math.isfinite(value) for value in dots.y] == [True, False]


def test_a_cache_without_end_serves_no_more_than_the_prompts(
    tmp_path: Path, run_writer: RunWriter
) -> None:
    """The server's own count of a prompt may be below the trace's, as of one that cuts prompts."""
    folder = run_writer(tmp_path / "runs")
    lines = (folder / "requests.jsonl").read_text()
    (folder / "requests.jsonl").write_text(
        lines.replace('"prompt_tokens":', '"prompt_tokens":1,"_":')
    )
    [cell] = evidence_of(tmp_path / "runs").cells
    assert 0 < cell.best_apc <= 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"mode": "open", "max_inflight_sessions": 8, "time_scale": 2.0},
            "open loop, at the trace's times, 2 times as fast as recorded",
        ),
        (
            {"mode": "sessions", "max_inflight_sessions": 8, "sessions_per_hour": 30.0},
            "sessions arrive at random, 30.0 an hour",
        ),
        (
            {"mode": "closed", "max_inflight_sessions": 8},
            "closed loop, 8 sessions in flight",
        ),
    ],
)
def test_the_load_is_told_by_its_mode(
    make_run: MakeRun, arguments: dict[str, Any], words: str
) -> None:
    """A replay records all of its settings: how many sessions a closed loop would have, too."""
    run = make_run(manifest={"replay": {"arguments": arguments}})
    assert loads.words(run) == words
