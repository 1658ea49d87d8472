"""Figures of latencies and of the cache: bars by arm, distributions, repeats, predictions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eval.metrics import QUANTILES, Cell
from eval.plot import Axis, Bars, Chart, Dots, Line, Rule
from eval.report.figures import colours
from eval.serving import quantile_of
from eval.tables import known_quantile

_CDF_POINTS = 200
_SCATTER_POINTS = 400
_NAN = float("nan")

# A bar of less than this share of the axis cannot be told from another.
_LEAST_BAR = 0.05


def latency_bars(cells: Sequence[Cell], metric: str, title: str) -> Chart:
    """p50, p90 and p99 by cell with 95 % intervals, as far as there are enough observations.

    On a logarithmic axis where p99 would make p50 vanish."""
    palette = colours(cells)
    values = {
        cell.name: [
            known_quantile(e, q) for e, q in zip(cell.latency[metric], QUANTILES, strict=True)
        ]
        for cell in cells
    }
    shown = [i for i in range(len(QUANTILES)) if any(row[i] for row in values.values())]
    marks = []
    for cell in cells:
        row = [values[cell.name][i] for i in shown]
        marks.append(
            Bars(
                cell.name,
                [_NAN if e is None else e.value for e in row],
                palette[cell.arm],
                [_NAN if e is None else e.low for e in row],
                [_NAN if e is None else e.high for e in row],
            )
        )
    names = tuple(f"p{round(QUANTILES[i] * 100)}" for i in shown)
    return Chart(title, Axis(categories=names), _axis_of_bars(marks), marks)


def _axis_of_bars(marks: Sequence[Bars]) -> Axis:
    """Seconds from zero; where some bar would vanish beside the longest, on a logarithmic axis that
    begins a factor of two below the least value."""
    ends = [value for mark in marks for value in (*mark.values, *mark.high) if np.isfinite(value)]
    least = [
        value for mark in marks for value in (*mark.values, *mark.low) if 0 < value < float("inf")
    ]
    values = [value for mark in marks for value in mark.values if 0 < value < float("inf")]
    if values and min(values) < _LEAST_BAR * max(ends):
        return Axis(unit="s", log=True, low=min(least) / 2)
    return Axis(unit="s", zero=True)


def apc_bars(cells: Sequence[Cell]) -> Chart:
    """APC by cell with intervals, and the trace's best possible as a line."""
    palette = colours(cells)
    bars = Bars(
        "APC",
        [cell.apc.value * 100 for cell in cells],
        "",
        [cell.apc.low * 100 for cell in cells],
        [cell.apc.high * 100 for cell in cells],
        [palette[cell.arm] for cell in cells],
    )
    marks: list[Bars | Rule] = [bars]
    best = next((cell.best_apc for cell in cells if np.isfinite(cell.best_apc)), None)
    if best is not None:
        marks.append(Rule(f"best possible {best * 100:.1f} %", y=best * 100))
    names = tuple(cell.name for cell in cells)
    return Chart(
        "Prompt tokens from cache (APC)",
        Axis(categories=names),
        Axis(unit="%", low=0.0, high=105.0),
        marks,
    )


def latency_cdf(cells: Sequence[Cell], column: str, title: str) -> Chart:
    """The share of requests at or under a latency, on a logarithmic axis; those that failed are
    under none."""
    palette = colours(cells)
    marks = []
    for cell in cells:
        values = np.sort(cell.requests[column].dropna().to_numpy(dtype=float))
        shares = np.arange(1, len(values) + 1) / len(values) if len(values) else values
        drawn = np.flatnonzero((values > 0) & np.isfinite(values))
        if len(drawn) == 0:
            continue
        if len(drawn) > _CDF_POINTS:
            drawn = drawn[np.linspace(0, len(drawn) - 1, _CDF_POINTS).round().astype(np.int64)]
        values, shares = values[drawn], shares[drawn]
        marks.append(
            Line(cell.name, values.tolist(), (shares * 100).tolist(), palette[cell.arm], step=True)
        )
    return Chart(
        title,
        Axis("time", "s", log=True),
        Axis("requests within", "%", low=0.0, high=101.0),
        marks,
    )


def repeats_strip(cells: Sequence[Cell]) -> Chart:
    """TTFT p90 of every single run: how much a rerun moves. None where it is among failures."""
    palette = colours(cells)
    marks = []
    for i, cell in enumerate(cells):
        points = [quantile_of(run.requests["ttft_s"], 0.9) for run in cell.runs]
        marks.append(
            Dots(
                f"_{cell.name}",
                [float(i)] * len(points),
                points,
                palette[cell.arm],
                [f"repeat {run.repeat}" for run in cell.runs],
                5.5,
                0.75,
            )
        )
    names = tuple(cell.name for cell in cells)
    return Chart("TTFT p90 of each run", Axis(categories=names), Axis(unit="s", zero=True), marks)


def prediction_scatter(cells: Sequence[Cell]) -> Chart | None:
    """Predicted against realised first-token time, where a policy predicts."""
    palette = colours(cells)
    marks: list[Dots | Line] = []
    low, top = float("inf"), 0.0
    for cell in cells:
        known = cell.requests.dropna(subset=["predicted_s", "decided_to_first_token_s"])
        known = known[
            known["ok"] & (known["predicted_s"] > 0) & (known["decided_to_first_token_s"] > 0)
        ]
        if known.empty:
            continue
        sample = known.iloc[:: max(1, len(known) // _SCATTER_POINTS)]
        both = sample[["predicted_s", "decided_to_first_token_s"]]
        low, top = min(low, float(both.min().min())), max(top, float(both.max().max()))
        marks.append(
            Dots(
                cell.name,
                sample["predicted_s"].tolist(),
                sample["decided_to_first_token_s"].tolist(),
                palette[cell.arm],
                size=2.6,
                opacity=0.55,
            )
        )
    if top == 0.0:
        return None
    low = max(low, top / 10_000)
    marks.append(Line("as predicted", [low, top], [low, top], "#888888", dash=True))
    ends = low * 0.9, top * 1.1
    x, y = (Axis(title, "s", True, False, *ends) for title in ("predicted", "realised"))
    return Chart("Seconds to first token", x, y, marks)
