"""A trace's statistics as one self-contained HTML page with histograms. Owns its looks only."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from replay.stats import PEAK_WINDOW_S
from replay.tables import stats_lines

_BINS = 60
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body{{font-family:system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}}
pre{{background:#f6f6f6;padding:1rem;overflow-x:auto}}</style></head>
<body><h1>{title}</h1><pre>{text}</pre>{figure}</body></html>
"""


def stats_page(name: str, record: dict[str, Any], samples: dict[str, NDArray[Any]]) -> str:
    """The page of a trace's statistics: the table, histograms, arrivals and cache curves."""
    panels: list[tuple[str, str, list[Any], bool]] = [
        ("Input", "tokens", [_histogram(samples["input_tokens"])], True),
        ("Output", "tokens", [_histogram(samples["output_tokens"])], True),
        ("Turns of a session", "turns", [_histogram(samples["turns"])], True),
        ("Arrivals", "seconds", [_arrivals(samples["timestamp_s"])], False),
    ]
    growth = samples["growth_tokens"]
    if len(growth):
        panels.append(("Growth a turn (growing ones)", "tokens", [_histogram(growth)], True))
    if len(samples["think_time_s"]):
        panels.append(("Think time", "seconds", [_histogram(samples["think_time_s"])], True))
    curves = [
        go.Scatter(
            x=[point["cache_tokens"] for point in cache["curve"]],
            y=[point["hit_rate"] for point in cache["curve"]],
            name=f"{cache['instances']} instance(s)",
            showlegend=True,
        )
        for cache in record.get("lru", [])
    ]
    if curves:
        panels.append(("Hit rate of an LRU cache", "tokens of each instance", curves, True))
    rows = -(-len(panels) // 2)
    figure = make_subplots(rows=rows, cols=2, subplot_titles=[panel[0] for panel in panels])
    for number, (_, unit, traces, logarithmic) in enumerate(panels):
        row, column = number // 2 + 1, number % 2 + 1
        for trace in traces:
            figure.add_trace(trace, row=row, col=column)
        kind = "log" if logarithmic else "linear"
        figure.update_xaxes(title_text=unit, type=kind, row=row, col=column)
    figure.update_layout(height=330 * rows, bargap=0, template="plotly_white")
    return _PAGE.format(
        title=escape(name),
        text=escape("\n".join(stats_lines(record))),
        figure=figure.to_html(full_html=False, include_plotlyjs=True),
    )


def _histogram(values: NDArray[Any]) -> Any:
    """Counts over bins of equal ratio; values of 0 or less have no place on such an axis."""
    positive = values[values > 0]
    if not len(positive):
        return go.Bar(x=[], y=[], showlegend=False)
    low, high = float(positive.min()), float(positive.max())
    edges = np.geomspace(low, max(high, low * 1.01) * (1 + 1e-9), _BINS + 1)
    counts, _ = np.histogram(positive, edges)
    centres = np.sqrt(edges[:-1] * edges[1:])
    return go.Bar(x=centres, y=counts, width=np.diff(edges), showlegend=False)


def _arrivals(times: NDArray[np.float64]) -> Any:
    """Requests a second, over windows of `PEAK_WINDOW_S` or of a 500th of the span if that is
    longer."""
    span_s = float(times[-1] - times[0])
    width_s = max(PEAK_WINDOW_S, span_s / 500)
    counts, edges = np.histogram(times, np.arange(times[0], times[-1] + 2 * width_s, width_s))
    return go.Scatter(x=edges[:-1], y=counts / width_s, line_shape="hv", showlegend=False)
