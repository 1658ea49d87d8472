from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval.experiment import ValidityRules
from eval.records import Run
from eval.report import find_runs, gather
from eval.validity import cold_checks, violations

MakeRun = Callable[..., Run]


def broken_rules(run: Run) -> list[str]:
    return [found.rule for found in violations(run, ValidityRules())]


@pytest.mark.parametrize(
    ("recipe", "rule", "said"),
    [
        (
            {"first_cached_tokens": 65},
            "not_cold",
            "found 65 tokens cached where the run itself can have left 0 .slack 64.; .*: 2",
        ),
        ({"lag_s": 0.4}, "client_lag", "0.400 s late at p99"),
        (
            {"errors": 2, "error_kind": "connect"},
            "client_errors",
            "2 of 120 requests failed by the client's or the machine's fault .2 connect",
        ),
        ({"dropped": 1}, "dropped", "1 of 120 requests have no result"),
        ({"manifest": {"state": "running"}}, "failed", "still at work, or it was interrupted"),
        ({"manifest": {"state": "failed", "reason": "it burnt"}}, "failed", "it burnt"),
    ],
)
def test_a_run_that_breaks_a_rule_is_named_with_the_figures(
    make_run: MakeRun, recipe: dict[str, Any], rule: str, said: str
) -> None:
    found = violations(make_run(**recipe), ValidityRules())
    assert found[0].rule == rule
    assert any(re.search(said, item.detail) for item in found)


@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"first_cached_tokens": 64},
        {"lag_s": 0.2},
        {"errors": 1, "error_kind": "client_bug"},
        {"errors": 12, "error_kind": "server_error"},
        {"errors": 12, "error_kind": "timeout"},
        {"errors": 12, "error_kind": "client_error", "error_status": 429},
        {"errors": 120},
    ],
)
def test_a_run_within_the_bounds_is_valid(make_run: MakeRun, recipe: dict[str, Any]) -> None:
    assert broken_rules(make_run(**recipe)) == []


def test_coldness_is_read_from_each_workers_first_request(make_run: MakeRun) -> None:
    run = make_run(first_cached_tokens=5)
    first = cold_checks(run.requests)
    assert {item.worker for item in first} == {"w0", "w1"}
    for item in first:
        served = run.requests[run.requests["decode_worker"] == item.worker]
        assert item.request_id == served.sort_values("sent_s")["request_id"].iloc[0]
        assert item.cached_tokens == 5


def test_what_a_request_sent_just_before_left_in_the_cache_is_no_sign_of_warmth(
    make_run: MakeRun,
) -> None:
    run = make_run(first_cached_tokens=900)
    run.all_requests["possible_cached_tokens"] = run.all_requests["cached_tokens"]
    assert broken_rules(run) == []


def test_a_session_that_begins_with_tokens_nobody_sent_before_shows_a_warm_worker(
    make_run: MakeRun,
) -> None:
    run = make_run()
    run.all_requests["possible_cached_tokens"] = run.all_requests["cached_tokens"]
    begins = run.all_requests.index[run.all_requests["turn"] == 0][-1]
    run.all_requests.loc[begins, "cached_tokens"] += 65
    assert broken_rules(run) == ["not_cold"]
    # A later turn may also find the answer before it, which the trace does not know.
    run.all_requests.loc[begins, "cached_tokens"] -= 65
    later = run.all_requests.index[run.all_requests["turn"] == 2][-1]
    run.all_requests.loc[later, "cached_tokens"] += 65
    assert broken_rules(run) == []


def test_an_invalid_run_is_excluded_from_every_number(make_run: MakeRun, tmp_path: Path) -> None:
    make_run(repeat=1)
    make_run(repeat=2, ttft_s=50.0, first_cached_tokens=900)
    evidence = gather(find_runs([tmp_path / "runs"]))
    assert [(run.repeat, found[0].rule) for run, found in evidence.excluded] == [(2, "not_cold")]
    assert [run.repeat for run in evidence.cells[0].runs] == [1]
    assert evidence.cells[0].latency["ttft"][1].value < 5
