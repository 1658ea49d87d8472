"""A finished run's folder, read into tables.

Owns how result lines, decisions and engine steps become columns, and the derived columns (TTFT,
TPOT, E2E, lag, new tokens). Knows the files of docs/formats.md; not what is compared with what.
A line cut off by a kill is skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pandas as pd
from pydantic import BaseModel, ConfigDict, ValidationError

from deltaserve.errors import InputError
from eval.experiment import Slo, ValidityRules, one_line
from eval.provenance import MANIFEST
from replay.results import RESULTS_FILE, Result, read_results

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
)
_DECISION_COLUMNS = (
    "decision_id",
    "request_id",
    "ts_unix_s",
    "policy",
    "kind",
    "reason",
    "prefill_worker",
    "decode_worker",
    "predicted_s",
    "believed_cached_tokens",
    "noted_cached_tokens",
    "decided_to_first_token_s",
    "outcome",
)


class _Named(BaseModel):
    name: str


class _Manifest(BaseModel):
    """What a manifest must be like to be read: its own fields where they are read without a
    default, and the kind of the others."""

    model_config = ConfigDict(extra="ignore")

    state: str
    arm: _Named
    load: str | None = None
    repeat: int = 1
    order: int = 0
    cell_order: int = 0
    topology: dict[str, Any] = {}
    versions: dict[str, dict[str, Any] | str | None] = {}
    hardware: dict[str, Any] = {}
    source: dict[str, Any] = {}
    timings: dict[str, Any] = {}
    imported: dict[str, Any] = {}
    git: dict[str, Any] | None = None
    replay: dict[str, Any] | None = None
    workers: list[Any] | None = None
    slo: Slo = Slo()
    validity: ValidityRules = ValidityRules()


@dataclass(frozen=True)
class Gaps:
    """Inter-token gaps: the time between two arrivals, over the tokens that the later brought."""

    session: list[str]
    seconds: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.float64]


@dataclass(frozen=True)
class TraceFacts:
    """What the replayed trace makes possible (`trace.json`).

    `best_cached_tokens` holds for each request the longest prefix that came before it in the
    trace, whoever serves it; `possible_cached_tokens` the longest that any other request of this
    run had, of those sent before its first token: more than that was in a cache before the run.
    """

    path: str
    sha256: str
    length_scale: float
    best_cached_tokens: dict[str, int]
    possible_cached_tokens: dict[str, int] = field(default_factory=dict)

    @property
    def planned(self) -> int:
        """Requests that every run was to send."""
        return len(self.best_cached_tokens)


@dataclass(frozen=True)
class Run:
    """One run: its manifest and its tables (one row a request, a KV transfer)."""

    folder: Path
    manifest: dict[str, Any]
    requests: pd.DataFrame
    gaps: Gaps
    transfers: pd.DataFrame
    broken_lines: int
    trace: TraceFacts | None

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
    def length_scale(self) -> float:
        return self.trace.length_scale if self.trace is not None else 1.0


def read_json_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The objects of a JSON Lines file that a program wrote, and how many lines were unreadable.

    A kill may cut the last line; anything else unreadable is counted the same way and reported.
    """
    rows: list[dict[str, Any]] = []
    broken = 0
    if not path.is_file():
        return rows, broken
    with path.open("rb") as file:
        for line in file:
            if not line.strip():
                continue
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError:
                broken += 1
                continue
            if isinstance(row, dict):
                rows.append(row)
            else:
                broken += 1
    return rows, broken


def read_run(folder: Path) -> Run:
    """Reads one run folder. Raises `InputError` where it holds no manifest of a run."""
    manifest_path = folder / MANIFEST
    try:
        manifest = orjson.loads(manifest_path.read_bytes())
    except FileNotFoundError:
        raise InputError(f"{folder}: not a run folder (no manifest.json)") from None
    except orjson.JSONDecodeError as error:
        raise InputError(f"{manifest_path}: not JSON: {error}") from None
    if not isinstance(manifest, dict):
        raise InputError(f"{manifest_path}: expected one JSON object, the manifest of a run")
    try:
        _Manifest.model_validate(manifest)
    except ValidationError as error:
        raise InputError(f"{manifest_path}: {one_line(error, manifest)}") from None
    results = read_results(folder) if (folder / RESULTS_FILE).is_file() else []
    trace = _read_trace(folder)
    decisions, broken_lines = read_json_lines(folder / "decisions.jsonl")
    requests = request_table(results)
    requests = _join_decisions(requests, decision_table(decisions))
    for column in ("best_cached_tokens", "possible_cached_tokens"):
        known = {} if trace is None else getattr(trace, column)
        requests[column] = requests["request_id"].map(known).astype(float)
    transfers = _read_transfers(folder / "steps")
    return Run(
        folder=folder,
        manifest=manifest,
        requests=requests,
        gaps=_gaps(results),
        transfers=transfers,
        broken_lines=broken_lines,
        trace=trace,
    )


def request_table(results: Iterable[Result]) -> pd.DataFrame:
    """Results as columns, with `ttft_s`, `tpot_s`, `e2e_s`, `lag_s`, `new_tokens`, `ok`.

    TTFT and E2E count from the scheduled time, so the client's own lateness is inside them and
    stands apart as `lag_s`. TPOT = (last − first)/(tokens − 1), undefined for one token.
    """
    records = []
    for result in results:
        record: dict[str, Any] = {name: getattr(result, name) for name in _REQUEST_COLUMNS}
        record["error_kind"] = None if result.error is None else result.error.kind
        record["error_message"] = None if result.error is None else result.error.message
        arrivals = result.arrivals
        record["last_token_s"] = arrivals[-1][0] if arrivals else result.finished_s
        records.append(record)
    columns = [*_REQUEST_COLUMNS, "error_kind", "error_message", "last_token_s"]
    table = pd.DataFrame.from_records(records, columns=columns)
    for name in (*_FLOATS, "last_token_s"):
        table[name] = pd.to_numeric(table[name]).astype(float)
    for name in ("request_id", "session_id"):
        table[name] = table[name].astype(str)
    table["ok"] = table["error_kind"].isna() & table["first_token_s"].notna()
    table["ttft_s"] = table["first_token_s"] - table["scheduled_s"]
    several = table["output_tokens"] > 1
    table["tpot_s"] = (
        (table["last_token_s"] - table["first_token_s"]) / (table["output_tokens"] - 1)
    ).where(several)
    table["e2e_s"] = table["finished_s"] - table["scheduled_s"]
    table["lag_s"] = table["sent_s"] - table["scheduled_s"]
    table["prompt_tokens"] = table["prompt_tokens"].fillna(table["input_length"])
    table["new_tokens"] = table["prompt_tokens"] - table["cached_tokens"]
    return table


def decision_table(events: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Decision and finish events, one row a decision."""
    rows: dict[str, dict[str, Any]] = {}
    for event in events:
        key = str(event.get("decision_id"))
        if event.get("event") == "decision":
            separated = event.get("kind") == "prefill_decode"
            prefill = event.get("prefill") if separated else event.get("worker")
            decode = event.get("decode") if separated else event.get("worker")
            believed = (event.get("cached_tokens") or {}).get(prefill)
            rows.setdefault(key, {"decision_id": key}).update(
                request_id=event.get("request_id"),
                ts_unix_s=event.get("ts_unix_s"),
                policy=event.get("policy"),
                kind=event.get("kind"),
                reason=event.get("reason"),
                prefill_worker=prefill,
                decode_worker=decode,
                predicted_s=event.get("predicted_s"),
                believed_cached_tokens=believed,
            )
        elif event.get("event") == "finish":
            rows.setdefault(key, {"decision_id": key}).update(
                decided_to_first_token_s=event.get("first_token_s"),
                outcome=event.get("outcome"),
                noted_cached_tokens=event.get("cached_tokens"),
            )
    return pd.DataFrame.from_records(list(rows.values()), columns=list(_DECISION_COLUMNS))


def _join_decisions(requests: pd.DataFrame, decisions: pd.DataFrame) -> pd.DataFrame:
    joined = requests.merge(
        decisions.drop(columns=["request_id"]), on="decision_id", how="left", validate="m:1"
    )
    # vLLM counts the KV that it was sent as cached; the router knows, and notes nothing then.
    unknown = (
        joined["kind"].eq("prefill_decode")
        & joined["outcome"].eq("ok")
        & joined["noted_cached_tokens"].isna()
    )
    joined.loc[unknown, ["cached_tokens", "new_tokens"]] = float("nan")
    joined = joined.drop(columns=["noted_cached_tokens"])
    for name in ("predicted_s", "decided_to_first_token_s", "believed_cached_tokens"):
        joined[name] = pd.to_numeric(joined[name]).astype(float)
    return joined


def _gaps(results: Iterable[Result]) -> Gaps:
    session: list[str] = []
    seconds: list[float] = []
    tokens: list[float] = []
    for result in results:
        if result.error is not None:
            continue
        for (before_s, before), (after_s, after) in pairwise(result.arrivals):
            if after > before:
                session.append(result.session_id)
                seconds.append((after_s - before_s) / (after - before))
                tokens.append(float(after - before))
    return Gaps(session, np.asarray(seconds, dtype=float), np.asarray(tokens, dtype=float))


def _read_trace(folder: Path) -> TraceFacts | None:
    path = folder / "trace.json"
    if not path.is_file():
        return None
    try:
        facts = orjson.loads(path.read_bytes())
        return TraceFacts(
            path=str(facts["path"]),
            sha256=str(facts["sha256"]),
            length_scale=float(facts["length_scale"]),
            best_cached_tokens=dict(facts["best_cached_tokens"]),
            possible_cached_tokens=dict(facts.get("possible_cached_tokens", {})),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: not what a run writes there: {error!r}") from None


def _read_transfers(folder: Path) -> pd.DataFrame:
    numbers = ["bytes", "tokens", "saved_bytes", "saved_tokens", "start_unix_s", "end_unix_s"]
    columns = ["worker_id", "room", "ok", *numbers]
    table = pd.DataFrame.from_records(
        [{name: line.get(name) for name in columns} for line in events(folder, "kv_transfer")],
        columns=columns,
    )
    for name in numbers:
        table[name] = pd.to_numeric(table[name]).astype(float)
    return table[table["ok"].eq(True)].reset_index(drop=True)


def read_steps(run: Run) -> pd.DataFrame:
    """The engine's steps while a run was replayed, with times as the results have them; empty
    where none were recorded."""
    clock = (run.manifest.get("replay") or {}).get("clock") or {}
    steps = step_table(run.folder / "steps", clock.get("unix_origin_s"))
    return steps[steps["at_s"] >= 0].reset_index(drop=True)


def step_table(folder: Path, unix_origin_s: float | None) -> pd.DataFrame:
    """Steps from telemetry files, sorted by time.

    `at_s` counts from `unix_origin_s`, or from the first step; `waiting` is the requests in all of
    the scheduler's queues.
    """
    numbers = [
        "start_unix_s",
        "duration_s",
        "prefill_requests",
        "prefill_tokens",
        "decode_requests",
        "kv_used_tokens",
        "kv_evictable_tokens",
        "kv_total_tokens",
        "waiting",
    ]
    columns = ["worker_id", "forward_mode", *numbers]
    rows = []
    for line in events(folder, "step"):
        row = {name: line.get(name) for name in columns}
        row["waiting"] = sum((line.get("queues") or {}).values())
        rows.append(row)
    table = pd.DataFrame.from_records(rows, columns=columns)
    for name in numbers:
        table[name] = pd.to_numeric(table[name]).astype(float)
    if unix_origin_s is None:
        unix_origin_s = float(table["start_unix_s"].min()) if len(table) else 0.0
    table["at_s"] = table["start_unix_s"] - unix_origin_s
    return table.sort_values("at_s").reset_index(drop=True)


def events(folder: Path, event: str) -> Iterator[dict[str, Any]]:
    """Telemetry lines of one kind, file by file."""
    for path in sorted(folder.glob("*.jsonl")) if folder.is_dir() else []:
        lines, _ = read_json_lines(path)
        for line in lines:
            if line.get("event") == event:
                yield line
