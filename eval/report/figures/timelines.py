"""Figures over time: requests in flight, queues, KV pools and machines, with phases shaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from eval.metrics import Cell
from eval.plot import PALETTE, Area, Axis, Chart, Line, Shade
from eval.records import Run

_POINTS = 240
_HEIGHT = 220


def timeline(cell: Cell, shades: Sequence[Shade] = ()) -> Chart:
    """Requests waiting for their first token and requests decoding, over one run."""
    times, waiting, decoding = running_requests(cell.runs[0])
    both = [a + b for a, b in zip(waiting, decoding, strict=True)]
    marks = [
        *shades,
        Area("decoding", times, [0.0] * len(times), decoding, PALETTE[2]),
        Area("waiting for first token", times, decoding, both, PALETTE[5]),
    ]
    return _over_time(f"Requests in flight, {cell.name}", "requests", marks)


def kv_timeline(cell: Cell, steps: pd.DataFrame, shades: Sequence[Shade] = ()) -> Chart:
    """KV pool of each worker over one run: held by running requests, and cached on top of it."""
    marks: list[Line | Shade] = [*shades]
    for i, (worker, rows) in enumerate(steps.groupby("worker_id")):
        part = _thinned(rows)
        total = part["kv_total_tokens"]
        held = 100 * part["kv_used_tokens"] / total
        cached = held + 100 * part["kv_evictable_tokens"] / total
        for values, dash, what in ((held, False, "running"), (cached, True, "with cached")):
            marks.append(_stepped(f"{worker}, {what}", part["at_s"], values, i, dash))
    return _over_time(f"KV pool in use, {cell.name}", "%", marks)


def queue_timeline(cell: Cell, steps: pd.DataFrame, shades: Sequence[Shade] = ()) -> Chart:
    """Requests in each worker's queues, and decoding on it, at every step of one run."""
    lines = (("waiting", True, "queued"), ("decode_requests", False, "decoding"))
    return _request_lines(cell, steps, "worker_id", lines, shades, ", every step")


def load_timeline(cell: Cell, engines: pd.DataFrame, shades: Sequence[Shade] = ()) -> Chart | None:
    """Requests that wait and run on each worker, as the engines say; None where none was asked."""
    if engines.empty:
        return None
    lines = (("queued", True, "queued"), ("running", False, "running"))
    return _request_lines(cell, engines, "id", lines, shades, ", sampled")


def sample_timeline(
    cell: Cell,
    samples: pd.DataFrame,
    by: str,
    column: str,
    what: str,
    unit: str,
    factor: float = 1,
    shades: Sequence[Shade] = (),
) -> Chart | None:
    """One sampled quantity of each worker or GPU over one run; None where it was never read."""
    marks: list[Line | Shade] = [*shades]
    for i, (name, rows) in enumerate(samples.groupby(by, sort=False)):
        known = _thinned(rows[rows[column].notna()])
        if not known.empty:
            y = (known[column] * factor).tolist()
            marks.append(Line(str(name), known["at_s"].tolist(), y, PALETTE[i % len(PALETTE)]))
    if len(marks) == len(shades):
        return None
    return _over_time(f"{what}, {cell.name}", unit, marks)


def running_requests(run: Run) -> tuple[list[float], list[float], list[float]]:
    """Times, requests sent but without a token, and requests decoding, as step functions."""
    table = run.all_requests
    table = table[table["sent_s"].notna() & table["finished_s"].notna()]
    if table.empty:
        return [], [], []
    first = table["first_token_s"].fillna(table["finished_s"])
    changes = np.sort(np.unique(np.concatenate([table["sent_s"], first, table["finished_s"]])))
    if len(changes) > _POINTS:
        changes = np.linspace(changes[0], changes[-1], _POINTS)

    def at(column: Any) -> Any:
        return np.searchsorted(np.sort(np.asarray(column, dtype=float)), changes, side="right")

    begun, answering, ended = at(table["sent_s"]), at(first), at(table["finished_s"])
    return (
        changes.tolist(),
        (begun - answering).astype(float).tolist(),
        (answering - ended).astype(float).tolist(),
    )


def _request_lines(
    cell: Cell,
    table: pd.DataFrame,
    by: str,
    lines: Sequence[tuple[str, bool, str]],
    shades: Sequence[Shade],
    how_often: str,
) -> Chart:
    """`how_often` stands in the title: between samples an engine looks idle that is not."""
    marks: list[Line | Shade] = [*shades]
    for i, (worker, rows) in enumerate(table.groupby(by)):
        part = _thinned(rows)
        for column, dash, what in lines:
            if part[column].max() > 0:
                marks.append(_stepped(f"{worker}, {what}", part["at_s"], part[column], i, dash))
    title = f"Requests in the engines, {cell.name}{how_often}"
    return _over_time(title, "requests", marks)


def _stepped(name: str, x: Any, y: Any, i: int, dash: bool) -> Line:
    return Line(name, list(x), list(y), PALETTE[i % len(PALETTE)], dash=dash, step=True)


def _over_time(title: str, unit: str, marks: Sequence[Any]) -> Chart:
    return Chart(title, Axis("seconds from the start"), Axis(unit, zero=True), marks, _HEIGHT)


def _thinned(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.iloc[:: max(1, len(rows) // _POINTS)]
