"""Latencies by class of new tokens."""

from __future__ import annotations

from eval.document import Section
from eval.formatting import percent
from eval.metrics import ClassRow
from eval.report.evidence import Evidence
from eval.report.sections.timelines import MOST_CELLS
from eval.tables import COUNT, SECONDS, Column, known_quantile, tabulate

_Row = tuple[str, ClassRow]

_COLUMNS: tuple[Column[_Row], ...] = (
    Column("new_tokens", "New tokens", lambda row: f"{row[1].label} tokens"),
    Column("arm", "Arm", lambda row: row[0]),
    Column("requests", "Requests", lambda row: row[1].n, COUNT, lambda row: percent(row[1].share)),
    Column("ttft_p50_s", "TTFT p50", lambda row: known_quantile(row[1].ttft[0], 0.5), SECONDS),
    Column("ttft_p90_s", "TTFT p90", lambda row: known_quantile(row[1].ttft[1], 0.9), SECONDS),
    Column("tpot_p90_s", "TPOT p90", lambda row: known_quantile(row[1].tpot[1], 0.9), SECONDS),
    Column("e2e_p50_s", "E2E p50", lambda row: known_quantile(row[1].e2e[0], 0.5), SECONDS),
)


def section(evidence: Evidence) -> Section | None:
    """A row for each class and cell that has requests."""
    if not evidence.cells:
        return None
    by_trace = all(cell.class_source == "trace" for cell in evidence.cells)
    rows = [
        (cell.name, cell.classes[i])
        for i in range(len(evidence.cells[0].classes))
        for cell in evidence.cells
        if cell.classes[i].n
    ]
    words = "New tokens of a request: its input less " + (
        "the longest prefix that any earlier request of the trace had, so that a class holds "
        "the same requests in every arm."
        if by_trace
        else "what the engine reported as cached."
    )
    return Section(
        "classes",
        "By class of new tokens",
        [words],
        [("", tabulate("classes", rows, _COLUMNS))],
        folded=len(evidence.cells) > MOST_CELLS,
    )
