"""Every measure over load, and throughput against interactivity."""

from __future__ import annotations

from eval.document import Figure, Section
from eval.report.evidence import Evidence
from eval.report.figures.curves import curves, pareto


def section(evidence: Evidence) -> Section | None:
    """One chart a measure where there are several loads, and the Pareto picture of the cells."""
    if len(evidence.cells) < 2:
        return None
    found = Section("curves", "Over load")
    trade = pareto(evidence.cells)
    if len(evidence.by_load) > 1:
        found.text.append("A line an arm; the band is the 95 % interval.")
        found.figures += [
            Figure(f"curve-{key}", f"{chart.title} over load, by arm", chart)
            for key, chart in curves(evidence.cells)
        ]
    else:
        found.title = "Throughput against interactivity"
    if trade is not None:
        found.figures.append(Figure("pareto", "Throughput against interactivity, by arm", trade))
        found.text.append(
            "Interactivity is how fast one answer comes, throughput what the hardware delivers "
            "over all of them: up and to the right is better."
        )
    return found if found.figures else None
