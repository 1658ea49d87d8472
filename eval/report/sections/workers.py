"""What each worker did, how even the load was, and what prefills did to decodes beside them."""

from __future__ import annotations

from eval.document import Section
from eval.metrics import Cell, WorkerRow
from eval.report.evidence import Evidence
from eval.tables import COUNT, NUMBER, PERCENT, RATIO, SECONDS, Column, enough, tabulate

_WORDS = (
    "Hotspot index: TTFT p90 of the busiest worker over the median worker's, the mean over runs; "
    "1 is even. Interference index: the pace of decodes while a long prefill was in hand on the "
    "same worker, over that expected of the same requests at the same batch without one; 1 is none."
)

_Row = tuple[str, WorkerRow]


def _when_known(n: int, quantile: float, value: float) -> float | None:
    return value if enough(n, quantile) else None


_WORKERS: tuple[Column[_Row], ...] = (
    Column("arm", "Arm", lambda row: row[0]),
    Column("worker", "Worker", lambda row: row[1].worker),
    Column("requests", "Requests", lambda row: row[1].requests, COUNT),
    Column("busy_s", "Request-seconds", lambda row: row[1].busy_s, SECONDS),
    Column("prefilled_tokens", "Tokens prefilled", lambda row: row[1].prefilled_tokens, NUMBER),
    Column("apc", "APC", lambda row: row[1].apc, PERCENT),
    Column(
        "ttft_p50_s",
        "TTFT p50",
        lambda row: _when_known(row[1].requests, 0.5, row[1].ttft_p50_s),
        SECONDS,
    ),
    Column(
        "ttft_p90_s",
        "TTFT p90",
        lambda row: _when_known(row[1].requests, 0.9, row[1].ttft_p90_s),
        SECONDS,
    ),
    Column(
        "tpot_p90_s",
        "TPOT p90",
        lambda row: _when_known(row[1].requests, 0.9, row[1].tpot_p90_s),
        SECONDS,
    ),
)

_BALANCE: tuple[Column[Cell], ...] = (
    Column("arm", "Arm", lambda cell: cell.name),
    Column("hotspot_index", "Hotspot index", lambda cell: cell.hotspot, RATIO),
    Column("interference_index", "Interference index", lambda cell: cell.interference.index, RATIO),
    Column(
        "beside_tpot_s",
        "Seconds a token beside a long prefill",
        lambda cell: cell.interference.beside_tpot_s,
        SECONDS,
        lambda cell: f"{cell.interference.beside_n} requests",
    ),
    Column(
        "expected_tpot_s",
        "Expected at the same batch without",
        lambda cell: cell.interference.expected_tpot_s,
        SECONDS,
        lambda cell: f"{cell.interference.apart_n} requests never beside one",
    ),
)


def section(evidence: Evidence) -> Section | None:
    """A row a worker, and a row a cell."""
    rows = [(cell.name, row) for cell in evidence.cells for row in cell.workers]
    if not rows:
        return None
    return Section(
        "workers",
        "Workers, hotspots and interference",
        [_WORDS],
        [
            ("", tabulate("workers", rows, _WORKERS)),
            ("", tabulate("balance", evidence.cells, _BALANCE)),
        ],
    )
