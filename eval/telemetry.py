"""What engines wrote while they ran: steps and KV transfers of `steps/*.jsonl`, as tables.

Owns the reading of telemetry. A line cut off by a kill is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pandas as pd


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


def transfer_table(folder: Path) -> pd.DataFrame:
    numbers = ["bytes", "tokens", "saved_bytes", "saved_tokens", "start_unix_s", "end_unix_s"]
    columns = ["worker_id", "room", "ok", *numbers]
    table = pd.DataFrame.from_records(
        [{name: line.get(name) for name in columns} for line in events(folder, "kv_transfer")],
        columns=columns,
    )
    for name in numbers:
        table[name] = pd.to_numeric(table[name]).astype(float)
    return table[table["ok"].eq(True)].reset_index(drop=True)


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
