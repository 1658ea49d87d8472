"""The report's plots, as Plotly specifications without colours of their own for paper and text.

The page sets those, so that one figure serves light and dark. Knows cells of `eval.metrics`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from eval.metrics import QUANTILES, Cell
from eval.records import Run
from eval.stats import Estimate

# Okabe and Ito's palette: told apart by colour-blind readers, on white and on dark grey.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#B5A900")
_CDF_POINTS = 400
_TIMELINE_POINTS = 600


def colours(cells: Sequence[Cell]) -> dict[str, str]:
    """One colour an arm, the same in every figure."""
    arms = list(dict.fromkeys(cell.arm for cell in cells))
    return {arm: PALETTE[i % len(PALETTE)] for i, arm in enumerate(arms)}


def latency_bars(cells: Sequence[Cell], metric: str, title: str) -> go.Figure:
    """p50, p90 and p99 by arm, with 95 % intervals."""
    figure = go.Figure()
    palette = colours(cells)
    for cell in cells:
        estimates = cell.latency[metric]
        figure.add_bar(
            name=cell.name,
            x=[f"p{round(q * 100)}" for q in QUANTILES],
            y=[e.value for e in estimates],
            error_y=_bars(estimates),
            marker_color=palette[cell.arm],
            hovertemplate="%{x}: %{y:.4g} s<extra>" + cell.name + "</extra>",
        )
    figure.update_layout(barmode="group", **layout(title, "", "seconds"))
    figure.update_yaxes(rangemode="tozero")
    return figure


def apc_bars(cells: Sequence[Cell]) -> go.Figure:
    """APC by arm with intervals, and the trace's best possible as a line."""
    palette = colours(cells)
    figure = go.Figure()
    for cell in cells:
        figure.add_bar(
            name=cell.name,
            x=[cell.name],
            y=[cell.apc.value * 100],
            error_y=_bars([cell.apc], 100),
            marker_color=palette[cell.arm],
            hovertemplate="%{y:.1f} %<extra>" + cell.name + "</extra>",
        )
    best = next((cell.best_apc for cell in cells if np.isfinite(cell.best_apc)), None)
    if best is not None:
        figure.add_hline(
            y=best * 100,
            line_dash="dot",
            line_color="#888888",
            annotation_text=f"best possible {best * 100:.1f} %",
            annotation_position="top left",
        )
    figure.update_layout(showlegend=False, **layout("Prompt tokens from cache (APC)", "", "%"))
    figure.update_yaxes(range=[0, 105])
    return figure


def latency_cdf(cells: Sequence[Cell], column: str, title: str) -> go.Figure:
    """The share of requests at or under a latency, on a logarithmic axis."""
    palette = colours(cells)
    figure = go.Figure()
    for cell in cells:
        ok = cell.requests[cell.requests["ok"]]
        values = np.sort(ok[column].dropna().to_numpy(dtype=float))
        if len(values) == 0:
            continue
        shares = np.arange(1, len(values) + 1) / len(values)
        if len(values) > _CDF_POINTS:
            shares = np.linspace(1 / len(values), 1, _CDF_POINTS)
            values = np.quantile(values, shares)
        figure.add_scatter(
            name=cell.name,
            x=values,
            y=shares * 100,
            mode="lines",
            line={"color": palette[cell.arm], "shape": "hv", "width": 2},
            hovertemplate="%{y:.0f} % within %{x:.4g} s<extra>" + cell.name + "</extra>",
        )
    figure.update_layout(**layout(title, "seconds (log)", "% of requests"))
    figure.update_xaxes(type="log", dtick="D2")
    figure.update_yaxes(range=[0, 101])
    return figure


def repeats_strip(cells: Sequence[Cell]) -> go.Figure:
    """TTFT p90 of every single run: how much a rerun moves."""
    palette = colours(cells)
    figure = go.Figure()
    for cell in cells:
        points = [
            float(np.quantile(answered, 0.9)) if len(answered) else None
            for run in cell.runs
            for answered in [run.requests.loc[run.requests["ok"], "ttft_s"]]
        ]
        figure.add_scatter(
            name=cell.name,
            x=[cell.name] * len(points),
            y=points,
            text=[f"repeat {run.repeat}" for run in cell.runs],
            mode="markers",
            marker={"color": palette[cell.arm], "size": 11, "opacity": 0.75},
            hovertemplate="%{text}: %{y:.4g} s<extra>" + cell.name + "</extra>",
        )
    figure.update_layout(showlegend=False, **layout("TTFT p90 of each run", "", "seconds"))
    figure.update_yaxes(rangemode="tozero")
    return figure


def timeline(cell: Cell) -> go.Figure:
    """Requests waiting for their first token and requests decoding, over one run."""
    run = cell.runs[0]
    times, waiting, decoding = running_requests(run)
    figure = go.Figure()
    for name, values, colour in (
        ("decoding", decoding, PALETTE[2]),
        ("waiting for first token", waiting, PALETTE[5]),
    ):
        figure.add_scatter(
            name=name,
            x=times,
            y=values,
            mode="lines",
            stackgroup="one",
            line={"width": 0.5, "color": colour, "shape": "hv"},
            hovertemplate="%{y:.0f} at %{x:.1f} s<extra>" + name + "</extra>",
        )
    title = f"Requests in flight, {cell.name}"
    figure.update_layout(**layout(title, "seconds from the start", "requests", height=270))
    return figure


def kv_timeline(cell: Cell, steps: pd.DataFrame) -> go.Figure:
    """KV pool of each worker over one run: held by running requests, and cached on top of it."""
    figure = go.Figure()
    for i, (worker, rows) in enumerate(steps.groupby("worker_id")):
        part = _thinned(rows)
        colour = PALETTE[i % len(PALETTE)]
        total = part["kv_total_tokens"]
        held = 100 * part["kv_used_tokens"] / total
        cached = held + 100 * part["kv_evictable_tokens"] / total
        for values, dash, what in ((held, "solid", "running"), (cached, "dot", "with cached")):
            figure.add_scatter(
                name=f"{worker}, {what}",
                x=part["at_s"],
                y=values,
                mode="lines",
                line={"color": colour, "dash": dash, "width": 1.5, "shape": "hv"},
                hovertemplate="%{y:.1f} % at %{x:.1f} s<extra>" + f"{worker}, {what}</extra>",
            )
    title = f"KV pool in use, {cell.name}"
    figure.update_layout(**layout(title, "seconds from the start", "%", height=270))
    figure.update_yaxes(rangemode="tozero")
    return figure


def queue_timeline(cell: Cell, steps: pd.DataFrame) -> go.Figure:
    """Requests in each worker's queues, and decoding on it, at every step of one run."""
    lines = (("waiting", "dot", "queued"), ("decode_requests", "solid", "decoding"))
    return _request_lines(cell, steps, "worker_id", lines)


def load_timeline(cell: Cell, engines: pd.DataFrame) -> go.Figure | None:
    """Requests that wait and run on each worker, as the engines say; None where none was asked."""
    if engines.empty:
        return None
    lines = (("queued", "dot", "queued"), ("running", "solid", "running"))
    return _request_lines(cell, engines, "id", lines)


def _request_lines(
    cell: Cell, table: pd.DataFrame, by: str, lines: Sequence[tuple[str, str, str]]
) -> go.Figure:
    figure = go.Figure()
    for i, (worker, rows) in enumerate(table.groupby(by)):
        part = _thinned(rows)
        colour = PALETTE[i % len(PALETTE)]
        for column, dash, what in lines:
            if part[column].max() > 0:
                figure.add_scatter(
                    name=f"{worker}, {what}",
                    x=part["at_s"],
                    y=part[column],
                    mode="lines",
                    line={"color": colour, "dash": dash, "width": 1.2, "shape": "hv"},
                    hovertemplate="%{y:.0f} at %{x:.1f} s<extra>" + f"{worker}, {what}</extra>",
                )
    title = f"Requests in the engines, {cell.name}"
    figure.update_layout(**layout(title, "seconds from the start", "requests", height=270))
    return figure


def sample_timeline(
    cell: Cell, samples: pd.DataFrame, by: str, column: str, what: str, unit: str, factor: float = 1
) -> go.Figure | None:
    """One sampled quantity of each worker or GPU over one run; None where it was never read."""
    figure = go.Figure()
    for i, (name, rows) in enumerate(samples.groupby(by, sort=False)):
        known = _thinned(rows[rows[column].notna()])
        if known.empty:
            continue
        figure.add_scatter(
            name=str(name),
            x=known["at_s"],
            y=known[column] * factor,
            mode="lines",
            line={"color": PALETTE[i % len(PALETTE)], "width": 1.5},
            hovertemplate="%{y:.3g} " + unit + " at %{x:.1f} s<extra>" + str(name) + "</extra>",
        )
    if not figure.data:
        return None
    title = f"{what}, {cell.name}"
    figure.update_layout(**layout(title, "seconds from the start", unit, height=270))
    figure.update_layout(showlegend=True)
    figure.update_yaxes(rangemode="tozero")
    return figure


def _thinned(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.iloc[:: max(1, len(rows) // _TIMELINE_POINTS)]


def running_requests(run: Run) -> tuple[list[float], list[float], list[float]]:
    """Times, requests sent but without a token, and requests decoding, as step functions."""
    table = run.all_requests
    table = table[table["sent_s"].notna() & table["finished_s"].notna()]
    if table.empty:
        return [], [], []
    first = table["first_token_s"].fillna(table["finished_s"])
    changes = np.sort(np.unique(np.concatenate([table["sent_s"], first, table["finished_s"]])))
    if len(changes) > _TIMELINE_POINTS:
        changes = np.linspace(changes[0], changes[-1], _TIMELINE_POINTS)

    def at(column: Any) -> Any:
        return np.searchsorted(np.sort(np.asarray(column, dtype=float)), changes, side="right")

    begun, answering, ended = at(table["sent_s"]), at(first), at(table["finished_s"])
    return (
        changes.tolist(),
        (begun - answering).astype(float).tolist(),
        (answering - ended).astype(float).tolist(),
    )


def prediction_scatter(cells: Sequence[Cell]) -> go.Figure | None:
    """Predicted against realised first-token time, where a policy predicts."""
    palette = colours(cells)
    figure = go.Figure()
    low, top = float("inf"), 0.0
    for cell in cells:
        known = cell.requests.dropna(subset=["predicted_s", "decided_to_first_token_s"])
        known = known[known["ok"] & (known["predicted_s"] > 0)]
        if known.empty:
            continue
        sample = known.iloc[:: max(1, len(known) // 1000)]
        both = sample[["predicted_s", "decided_to_first_token_s"]]
        low, top = min(low, float(both.min().min())), max(top, float(both.max().max()))
        figure.add_scatter(
            name=cell.name,
            x=sample["predicted_s"],
            y=sample["decided_to_first_token_s"],
            mode="markers",
            marker={"color": palette[cell.arm], "size": 6, "opacity": 0.6},
            hovertemplate="predicted %{x:.3g} s, was %{y:.3g} s<extra>" + cell.name + "</extra>",
        )
    if top == 0.0:
        return None
    low = max(low, top / 10_000)
    figure.add_scatter(
        name="as predicted",
        x=[low, top],
        y=[low, top],
        mode="lines",
        line={"dash": "dot", "color": "#888888"},
        hoverinfo="skip",
    )
    figure.update_layout(**layout("Seconds to first token", "predicted (log)", "realised (log)"))
    figure.update_xaxes(type="log", dtick="D2")
    figure.update_yaxes(type="log", dtick="D2")
    return figure


def heatmap(
    x: Sequence[str], y: Sequence[str], values: Any, title: str, x_title: str, y_title: str
) -> go.Figure:
    """A labelled grid of numbers."""
    grid = np.asarray(values, dtype=float)
    figure = go.Figure(
        go.Heatmap(
            x=list(x),
            y=list(y),
            z=grid,
            text=[[f"{v:.3g}" if np.isfinite(v) else "" for v in row] for row in grid],
            texttemplate="%{text}",
            colorscale="Viridis",
            showscale=False,
        )
    )
    figure.update_layout(**layout(title, x_title, y_title))
    figure.update_xaxes(type="category")
    figure.update_yaxes(type="category")
    return figure


def _bars(estimates: Sequence[Estimate], factor: float = 1.0) -> dict[str, Any]:
    def gap(one: float, two: float) -> float:
        return max(0.0, (one - two) * factor) if np.isfinite(one - two) else 0.0

    return {
        "type": "data",
        "symmetric": False,
        "array": [gap(e.high, e.value) for e in estimates],
        "arrayminus": [gap(e.value, e.low) for e in estimates],
        "thickness": 1.2,
        "width": 4,
        "color": "#888888",
    }


def layout(title: str, x: str, y: str, height: int = 320) -> dict[str, Any]:
    """Plotly layout that every figure starts from; the page shows the title above the plot."""
    return {
        "title": {"text": title},
        "height": height,
        # The legend above the plot widens the margin as it needs.
        "margin": {"l": 56, "r": 12, "t": 12, "b": 48},
        "xaxis": {"title": {"text": x, "standoff": 6}, "automargin": True},
        "yaxis": {"title": {"text": y}, "automargin": True},
        "legend": {"orientation": "h", "y": 1.02, "x": 0, "yanchor": "bottom"},
        "hoverlabel": {"namelength": -1},
    }
