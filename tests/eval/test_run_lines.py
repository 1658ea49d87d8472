"""What is kept of a run in one line: of which turns its figures are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eval.experiment import Slo
from eval.metrics import apc, session_bootstrap
from eval.outcomes import MEASURES, estimates, sample
from eval.records import Run, read_run
from eval.rules_a_gpu import rule_row
from eval.rules_a_gpu import table as table_of_rules
from eval.run_lines import figures
from eval.sessions_a_gpu import row_of, table
from eval.stats import SessionBootstrap
from replay.results import ErrorInfo, Result, ResultWriter

MakeRun = Callable[..., Run]
PACE_S = 0.02
KEPT = ("ttft_p50", "ttft_p90", "tpot_p50", "worst_gap_p90")


def run_of(folder: Path, tokens: list[int], *, failed: int = 0) -> Run:
    """A run of a turn a session: answers of so many tokens, `PACE_S` and a little more for each
    session apart; the last `failed` turns are not answered."""
    (folder / "manifest.json").parent.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text('{"arm": {"name": "a"}, "state": "complete"}')
    writer = ResultWriter(folder / "requests.jsonl")
    for number, length in enumerate(tokens):
        answered = number < len(tokens) - failed
        pace_s = PACE_S * (1 + 0.1 * number)
        arrivals = [(0.5 + number + pace_s * at, at + 1) for at in range(length)]
        writer.write(
            Result(
                request_id=f"s{number}:0",
                session_id=f"s{number}",
                turn=0,
                input_length=100,
                output_length=length,
                scheduled_s=float(number),
                sent_s=float(number),
                first_token_s=arrivals[0][0] if answered else None,
                finished_s=arrivals[-1][0],
                arrivals=arrivals if answered else [],
                output_tokens=length if answered else 0,
                prompt_tokens=100,
                cached_tokens=0,
                error=None if answered else ErrorInfo(kind="server_error", message="lost"),
            )
        )
    writer.close()
    return read_run(folder)


def reported(run: Run) -> dict[str, float]:
    """The same quantiles as reports have them."""
    boot = SessionBootstrap(list(run.all_requests["conversation"]), draws=2)
    found = {}
    for measure in MEASURES:
        if measure.key in KEPT:
            [estimate] = estimates(boot, [sample(run, measure, Slo())], [measure])
            found[measure.key] = estimate.value
    return found


@pytest.mark.parametrize("unknown", [0, 3, 6])
def test_a_turn_without_a_pace_is_not_one_of_no_time_a_token(unknown: int, tmp_path: Path) -> None:
    """An answer of one token, or that came all at once, has no time a token and no gap."""
    found = figures(run_of(tmp_path / "run", [*[10] * 5, *[1] * unknown]))
    assert float(found["tpot_p50_s"]) == pytest.approx(1.2 * PACE_S)
    assert float(found["worst_gap_p90_s"]) == pytest.approx(1.36 * PACE_S)


def test_where_no_turn_has_a_pace_the_cell_is_empty(tmp_path: Path) -> None:
    found = figures(run_of(tmp_path / "run", [1, 1]))
    assert found["tpot_p50_s"] == found["worst_gap_p90_s"] == ""
    assert float(found["ttft_p50_s"]) == pytest.approx(0.5)


@pytest.mark.parametrize("failed", [0, 1, 2, 4])
def test_quantiles_are_those_of_reports(failed: int, tmp_path: Path) -> None:
    """Those that fall on a turn that was not answered too: they are beyond every bound."""
    run = run_of(tmp_path / "run", [1, 10, 10, 1, 10, 7, 4, 10, 10, 3, 2], failed=failed)
    found = figures(run)
    for name, value in reported(run).items():
        kept = found[f"{name}_s"]
        assert kept == (f"{value:.4g}" if np.isfinite(value) else ""), name


def without_cached(run: Run, every: int) -> Run:
    """The run as an engine tells it that says of every so-and-so-many-th answer nothing of its
    cache."""
    unsaid = np.arange(len(run.requests)) % every == 0
    table = run.requests.assign(cached_tokens=run.requests["cached_tokens"].mask(unsaid))
    return replace(run, requests=table)


def test_an_answer_whose_cached_tokens_are_unknown_has_not_found_nothing(make_run: MakeRun) -> None:
    run = make_run()
    half = without_cached(run, 2)
    expected = apc(session_bootstrap([half], 2), half.requests[half.requests["ok"]]).value
    assert figures(half)["cached_share"] == f"{expected:.4f}"
    assert float(figures(half)["cached_share"]) > 0.8 * float(figures(run)["cached_share"])


def test_where_an_engine_says_nothing_of_its_cache_the_share_is_empty(make_run: MakeRun) -> None:
    run = without_cached(make_run(load="4"), 1)
    assert figures(run)["cached_share"] == ""
    sessions, rule = row_of(run, "a", 4), rule_row(run, "a", 4)
    assert table([sessions], "cached_share")[2:] == []
    told = {**sessions, "draw": "2", "cached_share": "0.8000"}
    assert table([sessions, told], "cached_share")[2:] == ["| `a` | 0.80 |"]
    assert table_of_rules([rule], 4)[-1].split(" | ")[4] == "–"
