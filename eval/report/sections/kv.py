"""KV that was sent between workers, and what the decode cache saved of it."""

from __future__ import annotations

from eval.document import Section
from eval.formatting import number
from eval.metrics import KvMoved
from eval.report.evidence import Evidence
from eval.tables import COUNT, PERCENT, SECONDS, SIZE, Column, enough, tabulate

_Row = tuple[str, KvMoved]

_COLUMNS: tuple[Column[_Row], ...] = (
    Column("arm", "Arm", lambda row: row[0]),
    Column("transfers", "Requests that moved KV", lambda row: row[1].transfers, COUNT),
    Column("total_bytes", "Moved", lambda row: row[1].total_bytes, SIZE),
    Column("bytes_p50", "A request p50", lambda row: row[1].bytes_p50, SIZE),
    Column(
        "bytes_p90",
        "A request p90",
        lambda row: row[1].bytes_p90 if enough(row[1].transfers, 0.9) else None,
        SIZE,
    ),
    Column(
        "saved_share",
        "Saved by the decode cache",
        lambda row: row[1].saved_share,
        PERCENT,
        lambda row: f"{number(row[1].saved_tokens)} tokens",
    ),
    Column("saved_bytes", "", lambda row: row[1].saved_bytes),
    Column("saved_tokens", "", lambda row: row[1].saved_tokens),
    Column("transfer_p50_s", "Transfer p50", lambda row: row[1].seconds_p50, SECONDS),
)


def section(evidence: Evidence) -> Section | None:
    """A row for each cell that moved KV."""
    rows = [(cell.name, cell.kv) for cell in evidence.cells if cell.kv is not None]
    if not rows:
        return None
    return Section("kv", "KV moved and saved", [], [("", tabulate("kv", rows, _COLUMNS))])
