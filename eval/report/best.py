"""Which arm is best by the objective, in one sentence, and the picture of both sides of it: what is
served against what sessions suffer."""

from __future__ import annotations

import math
from collections.abc import Sequence

from eval.compare import Verdict
from eval.formatting import percent, seconds
from eval.metrics import Cell
from eval.plot import Axis, Chart, Dots, Line, Rule
from eval.report.evidence import Evidence
from eval.report.figures import colours

_DECIDES = ("in_time_per_s", "late_share_p90")
_MOST_REASONS = 3


def best(evidence: Evidence) -> str:
    """The arm that alone meets the objective, or is better than every other that does; else that
    none is significant. Empty where there is one arm, or a search says what each carries."""
    arms = dict.fromkeys(cell.arm for cell in evidence.cells)
    if evidence.searches or len(arms) < 2:
        return ""
    return " ".join(_at(load, cells, evidence) for load, cells in _by_load(evidence).items())


def _by_load(evidence: Evidence) -> dict[str, Sequence[Cell]]:
    """The cells by load; of several loads only the highest that some arm meets, or the lowest."""
    groups = [(str(load or ""), cells) for load, cells in evidence.by_load.items()]
    several = [(load, cells) for load, cells in groups if len(cells) > 1] or groups
    met = [(load, cells) for load, cells in several if any(not cell.not_met for cell in cells)]
    return dict([met[-1] if met else several[0]])


def _at(load: str, cells: Sequence[Cell], evidence: Evidence) -> str:
    where = f" at load {load}" if load and len(evidence.by_load) > 1 else ""
    met = [cell for cell in cells if not cell.not_met]
    if not met:
        reasons = "; ".join(
            f"{cell.arm}: {cell.not_met[0]}" for cell in cells[:_MOST_REASONS] if cell.not_met
        )
        return f"No arm meets the objective{where} ({reasons})."
    judged = [
        item
        for item in evidence.comparisons
        if item.measure.key in _DECIDES and item.verdict in (Verdict.BETTER, Verdict.WORSE)
    ]
    for cell in met:
        better = {
            item.baseline if item.verdict is Verdict.BETTER else item.arm
            for item in judged
            if (item.arm if item.verdict is Verdict.BETTER else item.baseline) == cell.name
        }
        if better >= {other.name for other in cells if other is not cell}:
            return f"{cell.arm} is best by the objective{where}: {_words(cell)}."
    names = " and ".join(", ".join(cell.arm for cell in met).rsplit(", ", 1))
    only = "alone " if len(met) == 1 else ""
    verb = "meets" if len(met) == 1 else "meet"
    return f"{names} {only}{verb} the objective{where}; no arm is significantly best."


def _words(cell: Cell) -> str:
    return (
        f"{percent(cell.felt['in_time_share'])} of turns within the SLO, one session in ten late "
        f"for {percent(cell.felt['late_share_p90'])} of its time or more, longest wait "
        f"{seconds(cell.felt['longest_wait_s'])}"
    )


def both_sides(cells: Sequence[Cell]) -> Chart | None:
    """Turns within the SLO a second against the late share of sessions (p90), a dot a cell, its
    arm's loads joined in their order: up and to the left is better. The last one of an arm says its
    longest wait. None where nothing is known of either."""
    palette = colours(cells)
    most = cells[0].slo.late_share_p90
    marks: list[Dots | Line | Rule] = []
    for arm in dict.fromkeys(cell.arm for cell in cells):
        own = [cell for cell in cells if cell.arm == arm]
        points = [
            (100 * cell.felt["late_share_p90"], cell.measures["in_time_per_s"].value, _label(cell))
            for cell in own
        ]
        known = [point for point in points if math.isfinite(point[0]) and math.isfinite(point[1])]
        if known:
            x, y, names = (list(column) for column in zip(*known, strict=True))
            if len(x) > 1:
                marks.append(Line(f"_{arm}", x, y, palette[arm]))
            marks.append(
                Dots(arm, x, y, palette[arm], [""] * (len(x) - 1) + names[-1:], marked=True)
            )
    if not marks:
        return None
    marks.append(Rule("", x=100 * most))
    return Chart(
        "Turns within the SLO a second against the late share of sessions, with the longest wait",
        Axis(f"late share of sessions p90, %; objective: {100 * most:g} at most", zero=True),
        Axis("turns within the SLO/s", zero=True),
        marks,
    )


def _label(cell: Cell) -> str:
    return f"waits {seconds(cell.felt['longest_wait_s'])}"
