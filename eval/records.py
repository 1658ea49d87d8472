"""A finished run's folder, read into tables.

Owns how result lines, decisions and engine steps become columns, and the derived columns (TTFT,
TPOT, worst gap, E2E, lag, new tokens). Knows the files of docs/formats.md; not what is compared
with what.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from deltaserve.errors import InputError
from eval.decisions import DECISION_FILES, decision_table, join_decisions
from eval.judged import BROKEN_OFF
from eval.provenance import MANIFEST
from eval.run_files import Manifest, Phases, Trace, read_table
from eval.telemetry import events, read_json_lines, step_table, transfer_table
from replay.plays import in_the_plan
from replay.results import RESULTS_FILE, Result, read_results

__all__ = [
    "Arrivals",
    "Run",
    "TraceFacts",
    "Window",
    "events",
    "read_run",
    "read_steps",
    "request_table",
    "step_table",
]

PHASES_FILE = "phases.json"
_REQUEST_COLUMNS = (
    "request_id",
    "session_id",
    "turn",
    "input_length",
    "output_length",
    "scheduled_s",
    "sent_s",
    "first_token_s",
    "finished_s",
    "output_tokens",
    "prompt_tokens",
    "cached_tokens",
    "decision_id",
    "status",
    "phase",
    "play",
    "best_cached_tokens",
)
_FLOATS = (
    "scheduled_s",
    "sent_s",
    "first_token_s",
    "finished_s",
    "output_tokens",
    "prompt_tokens",
    "cached_tokens",
    "input_length",
    "best_cached_tokens",
    "first_chunk_tokens",
    "worst_gap_s",
    "tpot_s",
    "received_gap_s",
    "received_tpot_s",
)
LATENCY_COLUMNS = ("ttft_s", "tpot_s", "worst_gap_s", "e2e_s")
# Whose fault an error is. These are of the client or the machine it runs on; all others are what
# the servers made of the request, which is an outcome.
CLIENT_FAULTS = ("client_bug", "connect", "client_error")
# Refusals (4xx) that a server gives because it is busy, not because the request is wrong.
_BUSY_STATUS = (408, 425, 429)


@dataclass(frozen=True)
class Arrivals:
    """Every arrival of a run's answers: `seconds` of the run's clock and `tokens` of that request
    received so far. Those of row i of `Run.all_requests` are `starts[i]` to `starts[i + 1]`."""

    starts: npt.NDArray[np.int64]
    seconds: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.int64]

    def of(self, row: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Times and tokens so far of one request."""
        part = slice(self.starts[row], self.starts[row + 1])
        return self.seconds[part], self.tokens[part]

    def gaps(
        self, rows: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """The gaps between arrivals of the requests in `rows`: the row, the seconds a token that
        the later arrival brought, and how many tokens it brought."""
        owner = np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))
        wanted = np.zeros(len(self.starts), dtype=np.bool_)
        wanted[rows] = True
        inside = np.flatnonzero((owner[1:] == owner[:-1]) & wanted[owner[1:]])
        tokens = (self.tokens[inside + 1] - self.tokens[inside]).astype(np.float64)
        seconds = (self.seconds[inside + 1] - self.seconds[inside]) / tokens
        return owner[inside + 1], seconds, tokens


@dataclass(frozen=True)
class Window:
    """The measured part of a run (`phases.json`), in seconds of the run's clock."""

    start_s: float
    end_s: float
    start: str = "cold"
    recycle: bool = False
    asked_s: float | None = None
    """How long it was to last; None: until nothing was left to send."""

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class TraceFacts:
    """What the replayed trace makes possible (`trace.json`).

    `best_cached_tokens` holds for each request the longest prefix that came before it in the
    trace, whoever serves it; `possible_cached_tokens` the longest that any other request of this
    run had, of those sent before its first token: more than that was in a cache before the run.
    `last_requests` is the request that ends each session.
    """

    path: str
    sha256: str
    length_scale: float
    best_cached_tokens: dict[str, int]
    possible_cached_tokens: dict[str, int] = field(default_factory=dict)
    last_requests: dict[str, str] = field(default_factory=dict)

    @property
    def planned(self) -> int:
        """Requests that every run was to send."""
        return len(self.best_cached_tokens)


@dataclass(frozen=True)
class Run:
    """One run: its manifest and its tables (one row a request, a KV transfer).

    `requests` holds the measured requests, those scheduled inside `window`; `all_requests` also
    primes, warm-up and drain (the column `phase`). Without a window they are the same.
    """

    folder: Path
    manifest: dict[str, Any]
    requests: pd.DataFrame
    all_requests: pd.DataFrame
    arrivals: Arrivals
    transfers: pd.DataFrame
    broken_lines: int
    trace: TraceFacts | None
    window: Window | None = None

    @property
    def arm(self) -> str:
        return str(self.manifest["arm"]["name"])

    @property
    def load(self) -> str | None:
        load = self.manifest.get("load")
        return None if load is None else str(load)

    @property
    def cell(self) -> str:
        return self.arm if self.load is None else f"{self.arm}@{self.load}"

    @property
    def repeat(self) -> int:
        return int(self.manifest.get("repeat", 1))

    @property
    def simulated(self) -> str | None:
        """The name of the calibration that a simulated run rests on; None of a measured run."""
        told = self.manifest.get("simulated")
        return str(told.get("calibration", "unknown")) if isinstance(told, dict) else None

    @property
    def length_scale(self) -> float:
        return self.trace.length_scale if self.trace is not None else 1.0

    @property
    def gpus(self) -> int | None:
        """GPUs that the run's workers had; None where the manifest does not say."""
        given = self.manifest.get("gpus")
        if given is not None:
            return int(given)
        workers = [w for w in self.manifest.get("workers") or [] if isinstance(w, dict)]
        return sum(len(w.get("gpus") or []) for w in workers) or None

    @property
    def span_s(self) -> tuple[float, float]:
        """From when to when rates are counted: the window, or the first scheduled request to the
        last answer's end."""
        if self.window is not None:
            return self.window.start_s, self.window.end_s
        imported = self.manifest.get("imported") or {}
        if "duration_s" in imported:
            return 0.0, float(imported["duration_s"])
        if self.requests["finished_s"].notna().sum() == 0:
            return 0.0, 0.0
        return float(self.requests["scheduled_s"].min()), float(self.requests["finished_s"].max())


def read_run(folder: Path) -> Run:
    """Reads one run folder. Raises `InputError` where it holds no manifest of a run."""
    try:
        _, manifest = read_table(folder / MANIFEST, Manifest)
    except FileNotFoundError:
        raise InputError(f"{folder}: not a run folder (no manifest.json)") from None
    results = read_results(folder) if (folder / RESULTS_FILE).is_file() else []
    trace = _read_trace(folder)
    window = _read_window(folder, results)
    logs = [read_json_lines(folder / name) for name in DECISION_FILES]
    decisions = itertools.chain.from_iterable(events for events, _ in logs)
    broken_lines = sum(broken for _, broken in logs)
    table = _with_what_came(request_table(results), window)
    table["window_tokens"] = _tokens_within(results, window)
    table = join_decisions(table, decision_table(decisions))
    if trace is not None:
        names = list(map(in_the_plan, table["request_id"], table["play"]))
        known = pd.Series(names, index=table.index).map(trace.best_cached_tokens).astype(float)
        table["best_cached_tokens"] = table["best_cached_tokens"].fillna(known)
    possible = {} if trace is None else trace.possible_cached_tokens
    table["possible_cached_tokens"] = table["request_id"].map(possible).astype(float)
    measured = table[table["phase"].eq("measure")]
    return Run(
        folder=folder,
        manifest=manifest,
        requests=measured.reset_index(drop=True),
        all_requests=table,
        arrivals=_arrivals(results),
        transfers=transfer_table(folder / "steps"),
        broken_lines=broken_lines,
        trace=trace,
        window=window,
    )


def request_table(results: Iterable[Result]) -> pd.DataFrame:
    """Results as columns; `row` numbers them.

    TTFT and E2E count from the scheduled time, so the client's own lateness is inside them and
    stands apart as `lag_s`. `tpot_s`, `worst_gap_s` and `first_chunk_tokens` are as
    `replay.results` defines them. `ok` requests were answered; `failed` ones the servers did not
    answer whole or in time, and their latencies are infinite (`received_tpot_s` and
    `received_gap_s` are of what was received, of those too); the rest failed by the client's or
    the machine's fault, and their latencies are unknown. `conversation` is the session, the same in
    every play of it.
    """
    records = []
    for result in results:
        record: dict[str, Any] = {name: getattr(result, name) for name in _REQUEST_COLUMNS}
        record["error_kind"] = None if result.error is None else result.error.kind
        record["error_message"] = None if result.error is None else result.error.message
        arrivals = result.arrivals
        record["last_token_s"] = arrivals[-1][0] if arrivals else result.finished_s
        record["first_chunk_tokens"] = result.first_chunk_tokens()
        record["worst_gap_s"] = result.worst_gap_s()
        record["tpot_s"] = result.tpot_s()
        record["received_gap_s"] = record["worst_gap_s"]
        record["received_tpot_s"] = record["tpot_s"]
        records.append(record)
    columns = [
        *_REQUEST_COLUMNS,
        "error_kind",
        "error_message",
        "last_token_s",
        "first_chunk_tokens",
        "worst_gap_s",
        "tpot_s",
        "received_gap_s",
        "received_tpot_s",
    ]
    table = pd.DataFrame.from_records(records, columns=columns)
    table["row"] = np.arange(len(table))
    for name in (*_FLOATS, "last_token_s"):
        table[name] = pd.to_numeric(table[name]).astype(float)
    for name in ("request_id", "session_id"):
        table[name] = table[name].astype(str)
    table["conversation"] = [
        session.removesuffix(f"#{play}") if play else session
        for session, play in zip(table["session_id"], table["play"], strict=True)
    ]
    table["ok"] = table["error_kind"].isna() & table["first_token_s"].notna()
    table["ttft_s"] = table["first_token_s"] - table["scheduled_s"]
    table["e2e_s"] = table["finished_s"] - table["scheduled_s"]
    table["lag_s"] = table["sent_s"] - table["scheduled_s"]
    busy = pd.to_numeric(table["status"]).isin(_BUSY_STATUS)
    by_client = table["error_kind"].isin(CLIENT_FAULTS) & ~busy
    table["failed"] = ~table["ok"] & ~by_client
    for name in LATENCY_COLUMNS:
        table[name] = table[name].mask(table["failed"], np.inf).mask(by_client)
    table["prompt_tokens"] = table["prompt_tokens"].fillna(table["input_length"])
    table["new_tokens"] = table["prompt_tokens"] - table["cached_tokens"]
    return table


def _with_what_came(requests: pd.DataFrame, window: Window | None) -> pd.DataFrame:
    """The requests, with the wait and the pace of answers that the end of the run cut off: of those
    what came is known, and how they ended says nothing of the server."""
    if window is None:
        return requests
    by_us = requests["error_kind"].isin(BROKEN_OFF) & requests["finished_s"].ge(window.end_s)
    came = by_us & requests["first_token_s"].notna()
    known = {
        "ttft_s": requests["first_token_s"] - requests["scheduled_s"],
        "tpot_s": requests["received_tpot_s"],
        "worst_gap_s": requests["received_gap_s"],
    }
    return requests.assign(**{name: requests[name].mask(came, of) for name, of in known.items()})


def _arrivals(results: Sequence[Result]) -> Arrivals:
    counts = [len(result.arrivals) for result in results]
    starts = np.concatenate(([0], np.cumsum(counts, dtype=np.int64))).astype(np.int64)
    seconds = np.empty(int(starts[-1]))
    tokens = np.empty(int(starts[-1]), dtype=np.int64)
    for i, result in enumerate(results):
        if result.arrivals:
            part = slice(starts[i], starts[i + 1])
            seconds[part], tokens[part] = zip(*result.arrivals, strict=True)
    return Arrivals(starts, seconds, tokens)


def _tokens_within(results: Sequence[Result], window: Window | None) -> list[float]:
    """Tokens of each request that arrived inside the window, or at all where there is none."""
    if window is None:
        return [float(result.output_tokens) for result in results]
    found = []
    for result in results:
        by_start = by_end = 0
        for at_s, tokens in result.arrivals:
            if at_s < window.start_s:
                by_start = tokens
            if at_s >= window.end_s:
                break
            by_end = tokens
        found.append(float(max(0, by_end - by_start)))
    return found


def _read_window(folder: Path, results: Sequence[Result]) -> Window | None:
    path = folder / PHASES_FILE
    if not path.is_file():
        return None
    phases, _ = read_table(path, Phases, "not what a replay writes there: ")
    start_s, end_s, asked_s = phases.window_start_s, phases.window_end_s, phases.measure_s
    if end_s is None:
        # A run that was killed inside its window has no end of it yet.
        ended_s = [result.finished_s for result in results if result.finished_s is not None]
        end_s = max(ended_s, default=start_s) if asked_s is None else start_s + asked_s
    window = Window(
        start_s=start_s,
        end_s=end_s,
        asked_s=asked_s,
        start=phases.start,
        recycle=phases.recycle,
    )
    if not window.length_s > 0:
        raise InputError(f"{path}: the window ends ({window.end_s}) before it starts")
    return window


def _read_trace(folder: Path) -> TraceFacts | None:
    path = folder / "trace.json"
    if not path.is_file():
        return None
    facts, _ = read_table(path, Trace, "not what a run writes there: ")
    return TraceFacts(**dict(facts))


def read_steps(run: Run) -> pd.DataFrame:
    """The engine's steps while a run was replayed, with times as the results have them; empty
    where none were recorded."""
    clock = (run.manifest.get("replay") or {}).get("clock") or {}
    steps = step_table(run.folder / "steps", clock.get("unix_origin_s"))
    return steps[steps["at_s"] >= 0].reset_index(drop=True)
