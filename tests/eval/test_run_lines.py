"""What is kept of a run in one line: of which turns its figures are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from eval.metrics import apc, session_bootstrap
from eval.records import Run
from eval.rules_a_gpu import rule_row
from eval.rules_a_gpu import table as table_of_rules
from eval.run_lines import figures
from eval.sessions_a_gpu import row_of, table

MakeRun = Callable[..., Run]


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
