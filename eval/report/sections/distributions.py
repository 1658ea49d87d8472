"""Whole distributions of latencies, and each run by itself."""

from __future__ import annotations

from eval.document import Figure, Section
from eval.report.evidence import Evidence
from eval.report.figures import latency
from eval.report.sections.timelines import CHOICE, shown_cells


def section(evidence: Evidence) -> Section | None:
    """Cumulative distributions by cell, and TTFT p90 of every run where there are repeats."""
    if not evidence.cells:
        return None
    found = Section("distributions", "Distributions")
    shown = [cell for _, cell in shown_cells(evidence.cells)]
    if len(shown) < len(evidence.cells):
        found.text.append(f"Of {len(evidence.cells)} cells {len(shown)} are drawn: {CHOICE}.")
    for column, title in (("ttft_s", "Time to first token"), ("tpot_s", "Time per output token")):
        found.figures.append(
            Figure(
                f"cdf-{column}",
                f"{title}: share of requests within",
                latency.latency_cdf(shown, column, title),
            )
        )
    if not evidence.once:
        found.figures.append(
            Figure(
                "repeats",
                "Each run by itself: what a rerun moves",
                latency.repeats_strip(evidence.cells),
            )
        )
    return found
