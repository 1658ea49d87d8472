"""What is kept of a run in one line: what it says is what reports say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from eval.experiment import Slo
from eval.judged import not_met
from eval.outcomes import Outcome
from eval.records import Run
from eval.run_lines import FELT, read_rows, rows_of, write_rows

MakeRun = Callable[..., Run]


def test_a_line_has_the_measures_of_its_run_and_why_the_objective_is_missed(
    make_run: MakeRun, tmp_path: Path
) -> None:
    runs = [
        make_run(arm="quick", load="4", manifest={"identity": {"seed": 3}}),
        make_run(arm="slow", load="8", ttft_s=9.0),
    ]
    slo = Slo(stretch_p90=1e9)
    write_rows(tmp_path / "lines.csv", rows_of(runs, slo))
    quick, slow = read_rows(tmp_path / "lines.csv", ["arm", "not_met"])
    assert (quick["arm"], quick["load"], quick["trace_seed"]) == ("quick", "4", "3")
    assert quick["not_met"] == ""
    for run, line in zip(runs, (quick, slow), strict=True):
        measures = Outcome(run, slo).measures
        for name in FELT:
            assert float(line[name]) == pytest.approx(measures[name], rel=1e-3, abs=1e-3)
        assert line["not_met"] == "; ".join(not_met(measures, slo))
    assert "of turns within the SLO" in slow["not_met"]
