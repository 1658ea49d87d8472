"""Figures over load: one small chart a measure, a line an arm with its band; throughput against
interactivity; and the levels of a search for capacity."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eval.metrics import Cell
from eval.outcomes import MEASURES
from eval.plot import PALETTE, Axis, Chart, Dots, Line, Rule
from eval.report import loads
from eval.report.arms import per_unit, share_unit
from eval.report.figures import colours
from eval.report.searches import Search
from eval.stats import Estimate
from eval.tables import known_quantile

_NAN = float("nan")


@dataclass(frozen=True)
class Measured:
    """A measure that is drawn over load: its name, unit, factor to that unit, and whether it is
    divided by the arm's GPUs."""

    key: str
    title: str
    unit: str
    of: Callable[[Cell], Estimate | None]
    factor: float = 1.0
    shared: bool = False
    zero: bool = True


def _of(key: str) -> Callable[[Cell], Estimate | None]:
    quantile = next(measure.quantile for measure in MEASURES if measure.key == key)

    def value(cell: Cell) -> Estimate | None:
        found = cell.measures[key]
        return found if quantile is None else known_quantile(found, quantile)

    return value


MEASURED: tuple[Measured, ...] = (
    Measured("ttft_p50", "TTFT p50", "s", _of("ttft_p50")),
    Measured("ttft_p90", "TTFT p90", "s", _of("ttft_p90")),
    Measured("tpot_p90", "TPOT p90", "s", _of("tpot_p90")),
    Measured("worst_gap_p90", "Worst gap p90", "s", _of("worst_gap_p90")),
    Measured("stretch_p90", "Session stretch p90", "×", _of("stretch_p90")),
    Measured("throughput_output_tps", "Output tokens/s", "", _of("throughput_output_tps"),
             shared=True),
    Measured("first_tokens_per_s", "First tokens/s", "", _of("first_tokens_per_s"), shared=True),
    Measured("in_time_per_s", "Turns within the SLO/s", "", _of("in_time_per_s"), shared=True),
    Measured("in_time_share", "Turns within the SLO", "%", _of("in_time_share"), 100.0),
    Measured("late_share_p90", "Late share of sessions p90", "%", _of("late_share_p90"), 100.0),
    Measured("wait_mean_s", "Mean wait for a first token", "s", _of("wait_mean_s")),
    Measured("apc", "Prompt tokens from cache", "%", _of("apc"), 100.0),
    Measured("recomputed_share", "Tokens recomputed", "%", _of("recomputed_share"), 100.0),
)  # fmt: skip


def curves(cells: Sequence[Cell]) -> list[tuple[str, Chart]]:
    """A chart for each measure that any cell has, with its key."""
    found = ((measured.key, _curve(cells, measured)) for measured in MEASURED)
    return [(key, chart) for key, chart in found if chart is not None]


def curve(cells: Sequence[Cell], key: str) -> Chart | None:
    """The chart of one measure; None where no cell has it."""
    return _curve(cells, next(measured for measured in MEASURED if measured.key == key))


def _curve(cells: Sequence[Cell], measured: Measured) -> Chart | None:
    levels = loads.levels(cells)
    unit = share_unit(cells) if measured.shared else ""
    palette = colours(cells)
    marks = []
    for arm in dict.fromkeys(cell.arm for cell in cells):
        own = sorted((c for c in cells if c.arm == arm), key=lambda cell: levels.of[cell.name])
        points = [_point(cell, measured, unit) for cell in own]
        if not any(math.isfinite(point.value) for point in points):
            continue
        marks.append(
            Line(
                arm,
                [levels.of[cell.name] for cell in own],
                [point.value for point in points],
                palette[arm],
                dots=True,
                low=[point.low for point in points],
                high=[point.high for point in points],
            )
        )
    if not marks:
        return None
    title = measured.title + (f" a {unit}" if unit else "")
    return Chart(title, Axis(levels.title), Axis(unit=measured.unit, zero=measured.zero), marks)


def _point(cell: Cell, measured: Measured, unit: str) -> Estimate:
    found = measured.of(cell)
    if found is None:
        return Estimate(_NAN, _NAN, _NAN, 0)
    factor = measured.factor
    if unit:
        factor *= per_unit(cell, 1.0, unit) or _NAN
    return Estimate(found.value * factor, found.low * factor, found.high * factor, found.n)


def pareto(cells: Sequence[Cell]) -> Chart | None:
    """Output tokens a second a GPU against interactivity (tokens a second of one answer, 1/TPOT at
    the median): up and to the right is better. A line joins the loads of an arm."""
    unit = share_unit(cells)
    levels = loads.levels(cells)
    palette = colours(cells)
    several = len({cell.load for cell in cells}) > 1
    marks: list[Line | Dots] = []
    for arm in dict.fromkeys(cell.arm for cell in cells):
        own = sorted((c for c in cells if c.arm == arm), key=lambda cell: levels.of[cell.name])
        points = []
        for cell in own:
            tpot = cell.latency["tpot"][0]
            rate = per_unit(cell, cell.output_tps, unit) if unit else cell.output_tps
            if tpot.known and tpot.value > 0 and rate is not None:
                points.append((1 / tpot.value, rate, str(cell.load or "")))
        if not points:
            continue
        x, y, names = (list(column) for column in zip(*points, strict=True))
        if len(points) > 1:
            marks.append(Line(f"_{arm}", x, y, palette[arm]))
        # The loads at either end; names of all of them would cover each other.
        names[1:-1] = [""] * len(names[1:-1])
        marks.append(Dots(arm, x, y, palette[arm], names if several else (), marked=several))
    if not marks:
        return None
    title = "Output tokens/s" + (f" a {unit}" if unit else "") + " against interactivity"
    return Chart(
        title,
        Axis("tokens/s of one answer (1/TPOT p50)", zero=True),
        Axis("output tokens/s" + (f" a {unit}" if unit else ""), zero=True),
        marks,
    )


# Keys of a level in capacity.json: what it is, unit, factor, the objective's bound.
_LEVEL_MEASURES = {
    "in_time_share": ("Turns within the SLO", "%", 100.0),
    "late_share_p90": ("Late share of sessions p90", "%", 100.0),
    "stretch_p90": ("Stretch of sessions p90", "×", 1.0),
    "ttft_p90": ("TTFT p90", "s", 1.0),
    "tpot_p90": ("TPOT p90", "s", 1.0),
    "worst_gap_p90": ("Worst gap p90", "s", 1.0),
    "throughput_output_tps": ("Output tokens/s", "", 1.0),
}
# Of these the objective says where the line is.
JUDGED = ("in_time_share", "late_share_p90", "stretch_p90")


def capacity_curves(searches: Sequence[Search], key: str) -> Chart | None:
    """One measure of a search's levels over load, a line an arm; hollow where a level was not
    sustained. None where no level has it."""
    title, unit, factor = _LEVEL_MEASURES[key]
    marks: list[Line | Rule] = []
    for i, search in enumerate(searches):
        points = [
            (float(level["load"]), float(level[key]) * factor)
            for level in search.levels
            if level.get(key) is not None
        ]
        if points:
            x, y = (list(column) for column in zip(*points, strict=True))
            marks.append(Line(search.arm, x, y, PALETTE[i % len(PALETTE)], dots=True))
    if not marks:
        return None
    of_slo = {"in_time_share": "attainment"}.get(key, key)
    bounds = {search.slo[of_slo] for search in searches if search.slo.get(of_slo) is not None}
    if key in JUDGED and len(bounds) == 1:
        marks.append(Rule("objective", y=float(bounds.pop()) * factor))
    what = "sessions an hour" if searches[0].what != "agents" else "agents"
    return Chart(title, Axis(what), Axis(unit=unit, zero=True), marks)


def capacity_keys() -> list[str]:
    """The measures of a level that are drawn."""
    return list(_LEVEL_MEASURES)
