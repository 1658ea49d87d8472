"""What workers and the router did: load by worker, hotspots, decisions, KV moved.

Owns the definitions behind the report's tables of workers, decisions and transfers. Knows tables of
`eval.records`; not arms, formatting or verdicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from eval.records import Run
from eval.stats import quantile_points

# A worker with fewer requests has no p90 worth comparing.
MIN_REQUESTS_A_WORKER = 5


@dataclass(frozen=True)
class WorkerRow:
    """What one worker did; `busy_s` sums the time that requests spent on it."""

    worker: str
    requests: int
    busy_s: float
    prefilled_tokens: float
    apc: float
    ttft_p50_s: float
    ttft_p90_s: float
    tpot_p90_s: float


@dataclass(frozen=True)
class KvMoved:
    """KV sent between workers: totals, by request, and what the decode cache saved."""

    transfers: int
    total_bytes: float
    bytes_p50: float
    bytes_p90: float
    saved_bytes: float
    saved_tokens: float
    seconds_p50: float

    @property
    def saved_share(self) -> float:
        """Bytes that the decode worker held already, over all bytes that it needed."""
        needed = self.total_bytes + self.saved_bytes
        return self.saved_bytes / needed if needed else float("nan")


@dataclass(frozen=True)
class DecisionRow:
    """One (kind, reason) of the router, its share, and how it went for those requests."""

    kind: str
    reason: str
    n: int
    share: float
    ttft_p50_s: float
    ttft_p90_s: float
    predicted: int
    error_ratio_p50: float
    error_ratio_p10: float
    error_ratio_p90: float


def worker_rows(ok: pd.DataFrame) -> list[WorkerRow]:
    """One row a worker, prefill and decode workers alike, in the order of their names."""
    rows = []
    names = sorted({*ok["prefill_worker"].dropna(), *ok["decode_worker"].dropna()})
    for name in names:
        prefilled = ok[ok["prefill_worker"] == name]
        decoded = ok[ok["decode_worker"] == name]
        here = ok[(ok["prefill_worker"] == name) | (ok["decode_worker"] == name)]
        prompt = float(decoded["prompt_tokens"].sum())
        rows.append(
            WorkerRow(
                worker=str(name),
                requests=len(here),
                busy_s=_busy_s(ok, str(name)),
                prefilled_tokens=float(prefilled["new_tokens"].sum()),
                apc=float(decoded["cached_tokens"].sum()) / prompt if prompt else float("nan"),
                ttft_p50_s=quantile_of(here["ttft_s"], 0.5),
                ttft_p90_s=quantile_of(here["ttft_s"], 0.9),
                tpot_p90_s=quantile_of(decoded["tpot_s"], 0.9),
            )
        )
    return rows


def hotspot_index(ok: pd.DataFrame) -> float:
    """The busiest worker's TTFT p90 over the median of the workers' TTFT p90, of one run: pooled
    over repeats a hotspot that moves between workers would vanish.

    By the worker that prefills (TTFT is made there); the busiest is the one where requests spent
    the most seconds from sending to first token, summed. NaN with fewer than two workers that
    served at least five requests.
    """
    groups = [
        rows for _, rows in ok.groupby("prefill_worker") if len(rows) >= MIN_REQUESTS_A_WORKER
    ]
    if len(groups) < 2:
        return float("nan")
    busiest = max(groups, key=lambda rows: float((rows["first_token_s"] - rows["sent_s"]).sum()))
    median = float(np.median([quantile_of(rows["ttft_s"], 0.9) for rows in groups]))
    return quantile_of(busiest["ttft_s"], 0.9) / median if median > 0 else float("nan")


def kv_moved(runs: Sequence[Run]) -> KvMoved | None:
    """Bytes of KV sent between workers, a transfer a request; None where no run recorded one."""
    tables = [run.transfers for run in runs if not run.transfers.empty]
    if not tables:
        return None
    moved = pd.concat(tables, ignore_index=True)
    return KvMoved(
        transfers=len(moved),
        total_bytes=float(moved["bytes"].sum()),
        bytes_p50=quantile_of(moved["bytes"], 0.5),
        bytes_p90=quantile_of(moved["bytes"], 0.9),
        saved_bytes=float(moved["saved_bytes"].sum()),
        saved_tokens=float(moved["saved_tokens"].sum()),
        seconds_p50=quantile_of(moved["end_unix_s"] - moved["start_unix_s"], 0.5),
    )


def decision_rows(ok: pd.DataFrame) -> list[DecisionRow]:
    """The router's decisions by kind and reason, with realised over predicted first-token time."""
    rows = []
    known = ok[ok["kind"].notna()]
    for (kind, reason), part in known.groupby(["kind", "reason"], dropna=False):
        ratio = (part["decided_to_first_token_s"] / part["predicted_s"]).where(
            part["predicted_s"] > 0
        )
        rows.append(
            DecisionRow(
                kind=str(kind),
                reason=str(reason),
                n=len(part),
                share=len(part) / len(known),
                ttft_p50_s=quantile_of(part["ttft_s"], 0.5),
                ttft_p90_s=quantile_of(part["ttft_s"], 0.9),
                predicted=int(ratio.notna().sum()),
                error_ratio_p50=quantile_of(ratio, 0.5),
                error_ratio_p10=quantile_of(ratio, 0.1),
                error_ratio_p90=quantile_of(ratio, 0.9),
            )
        )
    return sorted(rows, key=lambda row: -row.n)


def _busy_s(ok: pd.DataFrame, worker: str) -> float:
    prefilling = ok[ok["prefill_worker"] == worker]
    decoding = ok[ok["decode_worker"] == worker]
    return float(
        (prefilling["first_token_s"] - prefilling["sent_s"]).sum()
        + (decoding["finished_s"] - decoding["first_token_s"]).sum()
    )


def quantile_of(values: pd.Series[float], quantile: float) -> float:
    """A quantile of the known values; NaN where there are none."""
    known = np.asarray(values.dropna(), dtype=np.float64)
    return float(quantile_points(known, [quantile])[0]) if len(known) else float("nan")
