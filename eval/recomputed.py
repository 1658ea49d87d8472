"""What was in the cache when it was asked for, what had been there and was computed again, and what
the best possible replacement would have kept.

Owns the account of prompt tokens of one run, by worker and over time. Knows requests, the workers'
steps and their KV capacity; not which policy led there.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from eval.outcomes import recomputed_tokens
from eval.records import Run
from eval.telemetry import step_table

_BINS = 20


@dataclass(frozen=True)
class Account:
    """Prompt tokens of a group of requests, all that are known of both the engine and the trace.

    `cached_tokens` came from a cache; a cache without end would have served `best_tokens`. The
    difference, never negative for a request, was computed again (`recomputed_tokens`). Of it
    `evicted_tokens` had been on the worker that was asked, which gave them up;
    the rest (`elsewhere_tokens`) had been on others only, or was still being computed there.
    `recomputed_gpu_s` is what that took, at the seconds a prompt token that this worker's prefill
    steps took; NaN without telemetry.
    """

    requests: int
    prompt_tokens: float
    cached_tokens: float
    best_tokens: float
    recomputed_tokens: float
    evicted_tokens: float
    recomputed_gpu_s: float

    @property
    def elsewhere_tokens(self) -> float:
        return self.recomputed_tokens - self.evicted_tokens

    @property
    def cached_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else math.nan

    @property
    def best_share(self) -> float:
        return self.best_tokens / self.prompt_tokens if self.prompt_tokens else math.nan

    @property
    def recomputed_share(self) -> float:
        return self.recomputed_tokens / self.prompt_tokens if self.prompt_tokens else math.nan


@dataclass(frozen=True)
class Belady:
    """What the best possible replacement would have served of the same requests in the same order,
    from one pool of `capacity_tokens`: an upper bound, for it knows the future, moves nothing, and
    leaves the whole pool to the cache."""

    capacity_tokens: float
    cached_tokens: float
    prompt_tokens: float

    @property
    def share(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else math.nan


@dataclass(frozen=True)
class Recomputed:
    """One run's account: whole, by the worker that prefilled, and over time: rows of `at_s` (the
    middle of a bin), `worker` and the token columns. `belady` is None where no worker's KV capacity
    is known."""

    whole: Account
    by_worker: dict[str, Account]
    over_time: pd.DataFrame
    belady: Belady | None


def recomputed(run: Run) -> Recomputed | None:
    """The account of a run's measured requests; None where no request is known of both the trace
    and the engine.

    What had been on a worker is told by what was sent there before, in any phase: the session's
    own turns, and for what it shares with others any request at all.
    """
    sent = run.all_requests
    sent = sent[sent["best_cached_tokens"].notna() & sent["sent_s"].notna()].sort_values("sent_s")
    common = _beginnings(sent)
    every = sent[sent["ok"] & sent["cached_tokens"].notna()].reset_index(drop=True)
    measured = every["phase"].eq("measure")
    if not measured.any():
        return None
    places = every["prefill_worker"].fillna("fleet").astype(str)
    again = recomputed_tokens(every)
    table = pd.DataFrame(
        {
            "worker": places,
            "at_s": every["first_token_s"],
            "prompt_tokens": every["prompt_tokens"],
            "cached_tokens": every["cached_tokens"],
            "best_tokens": every["best_cached_tokens"].clip(upper=every["prompt_tokens"]),
            "recomputed_tokens": again,
            "evicted_tokens": _had_been_here(every, places, again, common),
        }
    )
    seconds = prefill_seconds_per_token(run)
    rate = places.map(seconds).astype(float)
    if "fleet" in set(places) and seconds:
        rate = rate.fillna(float(np.mean(list(seconds.values()))))
    table["recomputed_gpu_s"] = table["recomputed_tokens"] * rate
    counted = table[measured]
    return Recomputed(
        whole=_account(counted),
        by_worker={str(name): _account(rows) for name, rows in counted.groupby("worker")},
        over_time=_over_time(counted, run.span_s),
        belady=best_replacement(every, measured, capacity_tokens(run), common),
    )


def _beginnings(sent: pd.DataFrame) -> dict[str, float]:
    """What each session has in common with others: what its first request could have had, answered
    or not (a prompt that primes caches may be given up). `sent` is in the order of sending."""
    best = sent["best_cached_tokens"].clip(upper=sent["prompt_tokens"])
    first = best.groupby(sent["session_id"], sort=False).first()
    return {str(session): float(tokens) for session, tokens in first.items()}


def _had_been_here(
    requests: pd.DataFrame,
    places: pd.Series[str],
    again: pd.Series[float],
    beginnings: Mapping[str, float],
) -> list[float]:
    """Of the tokens computed again those that an earlier request had brought to the same worker: up
    to the longest prompt of the same session there, with its answer where that worker made it, or,
    where the session is new to the worker, up to what sessions have in common."""
    made_here = requests["decode_worker"].fillna("fleet").astype(str).eq(places)
    # Of an answer the engine never reads the last token, so no cache holds it.
    answers = (requests["output_tokens"].fillna(1) - 1).clip(lower=0).where(made_here, 0)
    longest: dict[tuple[str, str], float] = {}
    used: set[str] = set()
    found = []
    for place, session, prompt, answer, cached, best, tokens in zip(
        places,
        requests["session_id"],
        requests["prompt_tokens"],
        answers,
        requests["cached_tokens"],
        requests["best_cached_tokens"],
        again,
        strict=True,
    ):
        here = longest.get((place, session), 0.0)
        if place in used:
            here = max(here, beginnings[session])
        found.append(float(min(tokens, max(0.0, min(here, best) - cached))))
        held = float(prompt + answer)
        longest[place, session] = max(longest.get((place, session), 0.0), held)
        used.add(place)
    return found


def _account(rows: pd.DataFrame) -> Account:
    sums = rows[
        [
            "prompt_tokens",
            "cached_tokens",
            "best_tokens",
            "recomputed_tokens",
            "evicted_tokens",
        ]
    ].sum()
    took_s = rows["recomputed_gpu_s"]
    return Account(
        requests=len(rows),
        **{str(name): float(value) for name, value in sums.items()},
        recomputed_gpu_s=float(took_s.sum()) if took_s.notna().all() else math.nan,
    )


def _over_time(rows: pd.DataFrame, span_s: tuple[float, float]) -> pd.DataFrame:
    edges = np.linspace(*span_s, _BINS + 1)
    middles = (edges[:-1] + edges[1:]) / 2
    place = np.clip(np.searchsorted(edges, rows["at_s"], side="right") - 1, 0, _BINS - 1)
    sums = (
        rows.drop(columns=["at_s"])
        .groupby([rows["worker"], middles[place]])
        .sum(numeric_only=True, min_count=1)
    )
    sums.index.names = ["worker", "at_s"]
    return sums.reset_index().sort_values(["at_s", "worker"]).reset_index(drop=True)


def prefill_seconds_per_token(run: Run) -> dict[str, float]:
    """Seconds of a worker's steps for each prompt token that it computed, by worker, where steps
    were recorded: of the steps that prefill and nothing else, or of all that prefill."""
    steps = step_table(run.folder / "steps", None)
    steps = steps[steps["prefill_tokens"] > 0]
    found = {}
    for worker, rows in steps.groupby("worker_id"):
        pure = rows[rows["decode_requests"].fillna(0) == 0]
        used = pure if pure["prefill_tokens"].sum() > 0 else rows
        found[str(worker)] = float(used["duration_s"].sum() / used["prefill_tokens"].sum())
    return found


def capacity_tokens(run: Run) -> float:
    """KV tokens that all workers hold together, host memory included; NaN where not known of each.

    As the router's configuration says, else as the workers' steps do.
    """
    path = run.folder / "router.toml"
    try:
        workers: list[dict[str, Any]] = tomllib.loads(path.read_text())["workers"]
        own = [float(worker["kv_capacity_tokens"]) for worker in workers]
        if own:
            return sum(own) + sum(float(worker.get("host_kv_tokens") or 0) for worker in workers)
    except (OSError, KeyError, TypeError, ValueError, AttributeError):
        pass
    totals = step_table(run.folder / "steps", None).groupby("worker_id")["kv_total_tokens"].max()
    return float(totals.sum()) if len(totals) and totals.notna().all() else math.nan


def best_replacement(
    requests: pd.DataFrame,
    measured: pd.Series[bool],
    capacity: float,
    beginnings: Mapping[str, float] | None = None,
) -> Belady | None:
    """Belady's rule over sessions: whatever is not asked for again soonest is given up first, here
    the tail of the session whose next turn is furthest away, as much of it as room is wanted.

    Sessions are the unit: a session's turns extend one another, and all of it is wanted at once. A
    session's KV after a turn is its prompt with the answer. What sessions have in common is held
    once, and always: `beginnings` says of each session how much that is, else its first request
    does. `requests` are in the order in which they were sent.
    """
    if not capacity > 0:
        return None
    sessions = list(requests["session_id"])
    prompt = requests["prompt_tokens"].to_numpy(dtype=float)
    best = np.minimum(requests["best_cached_tokens"].to_numpy(dtype=float), prompt)
    after = prompt + requests["output_tokens"].to_numpy(dtype=float)
    next_at = _next_turns(sessions)
    counted = measured.to_numpy(dtype=bool)
    shared = _beginnings(requests) if beginnings is None else beginnings
    # One beginning is the beginning of all, as far as is known here: it takes its room once.
    common = max((shared[session] for session in set(sessions)), default=0.0)
    room = max(0.0, capacity - common)
    held: dict[str, float] = {}
    due: dict[str, float] = {}
    served = total = 0.0
    for i, session in enumerate(sessions):
        own = shared[session]
        kept = held.pop(session, 0.0)
        have, total = own + kept, total - kept
        due.pop(session, None)
        if counted[i]:
            served += min(best[i], have) if capacity >= common else min(best[i], capacity)
        if math.isinf(next_at[i]):
            continue
        held[session] = max(0.0, after[i] - own)
        due[session] = next_at[i]
        total += held[session]
        excess = total - room
        for victim in sorted(held, key=lambda name: -due[name]) if excess > 0 else ():
            given = min(held[victim], excess)
            held[victim] -= given
            total -= given
            excess -= given
            if excess <= 0:
                break
    return Belady(capacity, served, float(prompt[counted].sum()))


def _next_turns(sessions: Sequence[str]) -> list[float]:
    """For each request the place of its session's next one; infinite for the last."""
    found = [math.inf] * len(sessions)
    later: dict[str, int] = {}
    for i in range(len(sessions) - 1, -1, -1):
        found[i] = later.get(sessions[i], math.inf)
        later[sessions[i]] = i
    return found
