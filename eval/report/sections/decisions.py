"""The router's decisions: what it chose, why, and how well it predicted."""

from __future__ import annotations

from eval.document import Figure, Section
from eval.formatting import percent
from eval.metrics import DecisionRow
from eval.report.evidence import Evidence
from eval.report.figures import latency
from eval.report.sections.timelines import MOST_CELLS
from eval.tables import COUNT, RATIO, SECONDS, Column, enough, tabulate

_WORDS = (
    "Realised over predicted first-token time: the median, and 10th to 90th percentile; "
    "1 is a perfect prediction. A dash: the policy predicts nothing."
)

_Row = tuple[str, DecisionRow]


def _spread(row: _Row) -> str:
    item = row[1]
    return f"{item.error_ratio_p10:.2f}–{item.error_ratio_p90:.2f}" if item.predicted else ""


_COLUMNS: tuple[Column[_Row], ...] = (
    Column("arm", "Arm", lambda row: row[0]),
    Column(
        "kind", "Kind", lambda row: "separated" if row[1].kind == "prefill_decode" else row[1].kind
    ),
    Column("reason", "Reason", lambda row: row[1].reason),
    Column("requests", "Requests", lambda row: row[1].n, COUNT, lambda row: percent(row[1].share)),
    Column("share", "", lambda row: row[1].share),
    Column(
        "ttft_p50_s",
        "TTFT p50",
        lambda row: row[1].ttft_p50_s if enough(row[1].n, 0.5) else None,
        SECONDS,
    ),
    Column(
        "ttft_p90_s",
        "TTFT p90",
        lambda row: row[1].ttft_p90_s if enough(row[1].n, 0.9) else None,
        SECONDS,
    ),
    Column(
        "realised_over_predicted_p50",
        "Realised / predicted",
        lambda row: row[1].error_ratio_p50 if row[1].predicted else None,
        RATIO,
        _spread,
    ),
)


def section(evidence: Evidence) -> Section | None:
    """A row for each kind and reason of each cell, and predicted against realised times."""
    rows = [(cell.name, row) for cell in evidence.cells for row in cell.decisions]
    if not rows:
        return None
    found = Section(
        "decisions",
        "The router's decisions",
        [_WORDS],
        [("", tabulate("decisions", rows, _COLUMNS))],
        folded=len(evidence.cells) > MOST_CELLS,
    )
    scatter = latency.prediction_scatter(evidence.cells)
    if scatter is not None:
        found.figures.append(
            Figure("prediction", "Predicted against realised first-token time", scatter)
        )
    return found
