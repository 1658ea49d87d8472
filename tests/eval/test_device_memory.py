"""How a GPU fares by what it holds: what is kept of a run, and the table made of that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deltaserve.errors import InputError
from eval.device_memory import app, in_flight_tokens, memory_row, rows_in, table
from eval.records import Run, read_run
from eval.run_lines import Row, read_rows
from tests.eval.conftest import Recipe, write_run
from tests.eval.test_outcomes import FAILED, run_of, turn

WORKERS = {"workers": [{"id": "w", "kv_capacity_tokens": 5000, "host_kv_tokens": 9000}]}


def made(device: int, host: int, sessions: int, within: float, rate: float, draw: int = 1) -> Row:
    return {
        "arm": "a",
        "device_tokens": str(device),
        "host_tokens": str(host),
        "sessions": str(sessions),
        "draw": str(draw),
        "within_objective": str(within),
        "requests_per_s": str(rate),
    }


@pytest.fixture
def mixed(tmp_path: Path) -> Run:
    """A turn that keeps the objective, and one for each way of missing it."""
    stalled = [(41.0, 1), (41.01, 100), (42.2, 101)]
    return run_of(
        tmp_path / "r",
        [
            turn("good", 0, 0.0),
            turn("late", 0, 10.0, ttft_s=9.0),
            turn("slow", 0, 20.0, tpot_s=0.06),
            turn("gap", 0, 40.0, arrivals=stalled, output_tokens=101, finished_s=42.2),
            turn("failed", 0, 50.0, finished_s=60.0, **FAILED),
        ],
        **WORKERS,
    )


def test_a_line_says_what_the_worker_held_and_which_part_of_the_objective_was_missed(
    mixed: Run,
) -> None:
    row = memory_row(mixed, "a", 4)
    assert (row["device_tokens"], row["host_tokens"], row["sessions"]) == ("5000", "9000", "4")
    assert float(row["within_objective"]) == 0.2
    # The one that failed never had its first token, and has no pace or gap.
    assert (row["late"], row["slow"], row["gap"]) == ("0.4000", "0.2000", "0.2000")


def test_what_is_in_flight_is_what_turns_hold_from_when_they_are_due_to_their_end(
    tmp_path: Path,
) -> None:
    """Worked by hand: 1,000 tokens for 10 s, 4,000 more for the last of these (half a
    second, then one and a half), of a run of 10 s."""
    found: list[float] = []
    for at, due_s in enumerate((9.5, 8.5)):
        both = [turn("a", 0, 0.0), turn("b", 0, due_s, prompt=4000)]
        ended = [one.model_copy(update={"output_tokens": 0, "finished_s": 10.0}) for one in both]
        found += in_flight_tokens(run_of(tmp_path / str(at), ended))
    assert found == pytest.approx([1200.0, 1000.0, 1600.0, 5000.0])


@pytest.mark.parametrize("workers", [{}, {"workers": []}, {"workers": [{"id": "w"}]}])
def test_a_run_that_does_not_say_what_its_worker_holds_is_one_clear_error(
    workers: dict[str, object], tmp_path: Path
) -> None:
    run = read_run(write_run(tmp_path, Recipe(load="2", manifest=workers)))
    with pytest.raises(InputError, match="expected one worker, and what its KV cache holds"):
        memory_row(run, "a", 2)


def test_a_table_has_a_line_for_each_size_of_memory() -> None:
    """What is carried is read off straight lines, draw by draw; other arms stand elsewhere."""
    rows = [
        made(400_000, 10, 8, 1.0, 0.4),
        made(400_000, 10, 12, 0.8, 0.6),
        made(400_000, 10, 8, 0.96, 0.4, draw=2),
        made(400_000, 10, 12, 0.84, 0.4, draw=2),
        made(200_000, 10, 8, 0.5, 0.1),
        made(200_000, 0, 8, 0.4, 0.1),
    ]
    assert table([*rows, {**rows[0], "arm": "b"}], "a")[2:] == [
        "| 200,000, 0 | 0.0 [0.0–0.0] | 0.00 | 0.10, 8 | 40 % |  |  |  |  |",
        "| 200,000, 10 | 0.0 [0.0–0.0] | 0.00 | 0.10, 8 | 50 % |  |  |  |  |",
        "| 400,000, 10 | 10.0 [10.0–10.0] | 2.50 | 0.50, 12 | 98 % |  | 82 % |  |  |",
    ]


def test_the_commands_keep_lines_and_show_them(tmp_path: Path) -> None:
    for load in ("8", "10"):
        write_run(tmp_path / "runs", Recipe(arm="x", load=load, manifest=WORKERS))
    kept = tmp_path / "kept.csv"
    runner = CliRunner()
    assert runner.invoke(app, ["lines", str(tmp_path / "runs"), str(kept)]).exit_code == 0
    assert read_rows(kept) == list(rows_in(tmp_path / "runs"))
    shown = runner.invoke(app, ["show", str(kept)])
    assert shown.exit_code == 0
    assert "\n".join(table(read_rows(kept), "x")) in shown.output


def test_a_wrong_file_is_one_line_and_exit_status_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "eval.device_memory", "show", "nowhere.csv"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    words = "error: nowhere.csv: No such file or directory\n"
    assert (done.returncode, done.stderr) == (2, words)
