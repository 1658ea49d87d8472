"""Every run in the order in which they ran: whether it counts, and the proof of coldness."""

from __future__ import annotations

import math

from eval.document import Section
from eval.formatting import Entry, number, seconds
from eval.records import Run
from eval.report.evidence import Evidence
from eval.report.facts import engine_entry
from eval.tables import SECONDS, Column, tabulate
from eval.validity import cold_checks

_WORDS = (
    "In the order in which they ran. A worker's first request may find what requests sent "
    "just before it left in a cache (possible tokens), and no more: that is the proof of "
    "coldness."
)


def _timing(run: Run, name: str) -> float:
    told = run.manifest.get("timings", {}).get(name)
    return math.nan if told is None else float(told)


def _engine(run: Run) -> Entry:
    return engine_entry(run.manifest.get("versions", {}).get("engines", {}))


def _cold(run: Run) -> str:
    return ", ".join(
        f"{check.worker}: {check.cached_tokens:.0f} of {check.possible_tokens:.0f}"
        for check in cold_checks(run.all_requests)
    )


def _answered(run: Run, column: str) -> float:
    return float(run.requests.loc[run.requests["ok"], column].sum())


def section(evidence: Evidence) -> Section | None:
    """A row a run, those that are excluded too."""
    broken = {id(run) for run, _ in evidence.excluded}
    columns: tuple[Column[Run], ...] = (
        Column("run", "Run", lambda run: f"{run.cell}/r{run.repeat}"),
        Column(
            "counts",
            "Counts",
            lambda run: "excluded" if id(run) in broken else "valid",
            tag=lambda run: "worse" if id(run) in broken else "better",
        ),
        Column("engine", "Engine", _engine, under=lambda run: _engine(run).interval),
        Column(
            "answered",
            "Answered",
            lambda run: f"{int(run.requests['ok'].sum())} of {len(run.requests)}",
        ),
        Column(
            "cached_tokens",
            "Cached tokens, as the engine reports",
            lambda run: _answered(run, "cached_tokens"),
            under=lambda run: f"of {number(_answered(run, 'prompt_tokens'))}",
        ),
        Column("first_request", "First request: cached of possible tokens, by worker", _cold),
        Column(
            "client_late_p99_s",
            "Client late p99",
            lambda run: float(run.requests["lag_s"].quantile(0.99)),
            SECONDS,
        ),
        Column(
            "replay_s",
            "Replay",
            lambda run: _timing(run, "replay_s"),
            SECONDS,
            lambda run: f"up in {seconds(_timing(run, 'fleet_up_s'))}",
        ),
    )
    # Each arm of a search counts its own runs: when they began comes first.
    in_order = sorted(
        evidence.runs,
        key=lambda run: (str(run.manifest.get("started_at", "")), run.manifest.get("order", 0)),
    )
    return Section(
        "runs",
        "Runs, engines and coldness",
        [_WORDS],
        [("", tabulate("runs", in_order, columns))],
    )
