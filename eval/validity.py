"""Which runs count. A run is excluded by a rule that is named, never by hand.

Owns the rules and the proof of coldness. Knows one run at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from eval.experiment import ValidityRules
from eval.records import Run


@dataclass(frozen=True)
class Violation:
    """A rule that a run broke, and the figures that show it."""

    rule: str
    detail: str


@dataclass(frozen=True)
class ColdCheck:
    """A request that a cold fleet must answer (almost) without its caches.

    `possible_tokens` is what requests of the run itself can have left there by then.
    """

    worker: str
    request_id: str
    cached_tokens: float
    possible_tokens: float


def cold_checks(requests: pd.DataFrame) -> list[ColdCheck]:
    """Each worker's first request, by the time it was sent."""
    known = requests[requests["cached_tokens"].notna()].sort_values("sent_s")
    if known.empty:
        return []
    return _checks(_named(known).drop_duplicates("decode_worker"))


def found_warm(requests: pd.DataFrame, slack_tokens: float) -> list[ColdCheck]:
    """Requests that found more cached than the run itself can have left: each worker's first one,
    and, where the trace is known, those that begin a session."""
    known = requests[requests["cached_tokens"].notna()].sort_values("sent_s")
    if known.empty:
        return []
    begins = known["turn"].eq(0) & known["possible_cached_tokens"].notna()
    first = ~_named(known).duplicated("decode_worker")
    excess = known["cached_tokens"] - known["possible_cached_tokens"].fillna(0.0)
    return _checks(_named(known)[(begins | first) & (excess > slack_tokens)])


def _named(requests: pd.DataFrame) -> pd.DataFrame:
    """Requests with their worker, or all as one fleet's where no worker is known."""
    if requests["decode_worker"].isna().all():
        return requests.assign(decode_worker="fleet")
    return requests


def _checks(requests: pd.DataFrame) -> list[ColdCheck]:
    return [
        ColdCheck(str(worker), str(name), float(cached), float(possible))
        for worker, name, cached, possible in zip(
            requests["decode_worker"],
            requests["request_id"],
            requests["cached_tokens"],
            requests["possible_cached_tokens"].fillna(0.0),
            strict=True,
        )
    ]


def violations(run: Run, rules: ValidityRules) -> list[Violation]:
    """Every rule that `run` breaks; empty for a valid run. What servers fail is no violation.

    `failed`: the run ended without results, or its runner says so. `not_cold`: a worker's first
    request, or one that begins a session, found more in a cache than the run itself can have left
    there, by more than the slack. `client_lag`: the client sent late (p99 over the
    bound), so the load was not the stated one. `client_errors`: too many requests failed by the
    client's or the machine's fault: it could not connect, or asked what no server takes. `dropped`:
    requests of the trace have no result line.
    """
    state = run.manifest.get("state")
    if state != "complete":
        # Its runner would have said how it ended; it was killed, or is still at it.
        unfinished = f"state is {state!r}"
        if state == "running":
            unfinished = "it is still at work, or it was interrupted"
        reason = run.manifest.get("reason") or unfinished
        return [Violation("failed", str(reason))]
    table = run.requests
    if table.empty:
        return [Violation("failed", "no request was measured")]
    found: list[Violation] = []
    warm = found_warm(run.all_requests, rules.cold_slack_tokens)
    if warm:
        worst = max(warm, key=lambda check: check.cached_tokens - check.possible_tokens)
        found.append(
            Violation(
                "not_cold",
                f"{worst.worker}: request {worst.request_id} found {worst.cached_tokens:.0f} "
                f"tokens cached where the run itself can have left {worst.possible_tokens:.0f} "
                f"(slack {rules.cold_slack_tokens}); such requests: {len(warm)}",
            )
        )
    lag = table["lag_s"].dropna()
    if len(lag):
        lag_p99_s = float(np.quantile(lag, 0.99))
        if lag_p99_s > rules.max_client_lag_p99_s:
            found.append(
                Violation(
                    "client_lag",
                    f"requests were sent {lag_p99_s:.3f} s late at p99 "
                    f"(at most {rules.max_client_lag_p99_s:g} s)",
                )
            )
    by_client = table[~table["ok"] & ~table["failed"]]
    if len(by_client) / len(table) > rules.max_error_share:
        kinds = ", ".join(
            f"{count} {kind}" for kind, count in by_client["error_kind"].value_counts().items()
        )
        found.append(
            Violation(
                "client_errors",
                f"{len(by_client)} of {len(table)} requests failed by the client's or the "
                f"machine's fault ({kinds}; at most {rules.max_error_share:.0%})",
            )
        )
    planned = run.trace.planned if run.trace is not None else None
    # A window is as long as it is, whatever part of the trace was sent in it.
    if planned is not None and run.window is None and len(table) < planned:
        found.append(
            Violation("dropped", f"{planned - len(table)} of {planned} requests have no result")
        )
    if table.duplicated(["request_id", "play"]).any():
        found.append(Violation("dropped", "a request has more than one result"))
    return found
