"""Whole distributions of latencies, and each run by itself."""

from __future__ import annotations

from eval.document import Figure, Section
from eval.report.evidence import Evidence
from eval.report.figures import latency


def section(evidence: Evidence) -> Section | None:
    """Cumulative distributions by cell, and TTFT p90 of every run where there are repeats."""
    if not evidence.cells:
        return None
    found = Section("distributions", "Distributions")
    for column, title in (("ttft_s", "Time to first token"), ("tpot_s", "Time per output token")):
        found.figures.append(
            Figure(
                f"cdf-{column}",
                f"{title}: share of requests within",
                latency.latency_cdf(evidence.cells, column, title),
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
