"""Waits of which some were not over when a run ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from deltaserve.errors import InputError
from eval.run_lines import Row, read_rows
from eval.waits import COLUMNS, KEPT_S, app, table, waits
from tests.eval.conftest import Recipe, write_run


def lines(turns: int, *long: tuple[float, bool], draw: int = 1) -> list[Row]:
    head = {"arm": "a", "sessions": "8", "draw": str(draw), "turns": str(turns)}
    return [{**head, "wait_s": str(s), "answered": str(int(came))} for s, came in long]


def test_where_all_were_answered_it_is_the_quantile() -> None:
    rng = np.random.default_rng(3)
    every = np.round(rng.exponential(30.0, 500), 1)
    kept = [(s, True) for s in every if s >= KEPT_S]
    found = waits(lines(500, *kept), (0.9, 0.95, 0.99))
    assert found == pytest.approx(np.quantile(every, (0.9, 0.95, 0.99), method="inverted_cdf"))


def test_a_turn_that_still_waits_counts_among_those_that_wait_longer() -> None:
    """Worked by hand: of ten turns six had their token at once, one after 20 s, one was given up
    after 30, one had it after 40, one was given up after 50. After 20 s 3 of 10 wait; at 40 s two
    of these are still watched, and one gets it: half of 0.3 is left, and nobody is seen to end."""
    rows = lines(10, (20.0, True), (30.0, False), (40.0, True), (50.0, False))
    assert waits(rows, (0.6, 0.7, 0.85)) == [0.0, 20.0, 40.0]
    assert waits(rows, (0.86,)) == [float("inf")]
    # Counted as answered when they were given up, nine of ten would seem to wait for 40 s at most.
    naive = lines(10, (20.0, True), (30.0, True), (40.0, True), (50.0, True))
    assert waits(naive, (0.9,)) == [40.0]


def test_draws_are_taken_together() -> None:
    rows = [*lines(10, (20.0, True)), *lines(10, (60.0, True), (70.0, True), draw=2)]
    assert waits(rows, (0.85, 0.9, 0.95)) == [0.0, 20.0, 60.0]
    assert table(rows)[2:] == ["| `a`, 8 in flight | 20 s | 60 s | 70 s | 70 s |"]


def test_no_lines_are_one_clear_error() -> None:
    with pytest.raises(InputError, match="no lines of waits"):
        waits([], (0.9,))


def test_the_commands_keep_long_waits_and_show_them(tmp_path: Path) -> None:
    for repeat, ttft_s in ((1, 0.2), (2, 300.0)):
        write_run(tmp_path / "runs", Recipe(arm="x", load="4", repeat=repeat, ttft_s=ttft_s))
    kept = tmp_path / "kept.csv"
    runner = CliRunner()
    assert runner.invoke(app, ["lines", str(tmp_path / "runs"), str(kept)]).exit_code == 0
    rows = read_rows(kept, COLUMNS)
    quick = [row for row in rows if row["draw"] == "1"]
    assert [row["wait_s"] for row in quick] == [""]
    slow = [row for row in rows if row["draw"] == "2"]
    assert len(slow) == int(slow[0]["turns"]) == int(quick[0]["turns"])
    shown = runner.invoke(app, ["show", str(kept)])
    assert shown.exit_code == 0
    assert "\n".join(table(rows)) in shown.output
    assert "| `x`, 4 in flight |" in shown.output


def test_a_wrong_file_is_one_line_and_exit_status_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "eval.waits", "show", "nowhere.csv"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    words = "error: nowhere.csv: No such file or directory\n"
    assert (done.returncode, done.stderr) == (2, words)
