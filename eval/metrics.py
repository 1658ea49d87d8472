"""The metrics of one cell (an arm under a load), pooled over its valid runs.

Owns every definition behind a reported number; each function says its own. Knows tables of
`eval.records`; not files, formatting or verdicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from eval.records import Gaps, Run
from eval.stats import UNKNOWN, Array, Estimate, SessionBootstrap, quantile_points

QUANTILES = (0.5, 0.9, 0.99)
LATENCIES = ("ttft", "tpot", "itl", "e2e")
CLASS_BOUNDS_TOKENS = (5_000, 20_000, 50_000)
INTERFERING_PREFILL_TOKENS = 2_048
# A worker with fewer requests has no p90 worth comparing.
MIN_REQUESTS_A_WORKER = 5


@dataclass(frozen=True)
class ClassRow:
    """Requests of one class of new tokens: how many, and their latencies."""

    label: str
    n: int
    share: float
    ttft: list[Estimate]
    tpot: list[Estimate]
    e2e: list[Estimate]


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
class Interference:
    """TPOT p90 of requests that decoded beside a long prefill, over that of the others."""

    index: Estimate
    beside_n: int
    apart_n: int
    beside_tpot_p90_s: float
    apart_tpot_p90_s: float


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


@dataclass(frozen=True)
class Cell:
    """Everything measured for one arm under one load."""

    name: str
    arm: str
    load: str | None
    runs: list[Run]
    requests: pd.DataFrame
    n: int
    errors: dict[str, int]
    latency: dict[str, list[Estimate]]
    mean: dict[str, Estimate]
    apc: Estimate
    best_apc: float
    apc_by_worker: dict[str, Estimate]
    request_rps: float
    input_tps: float
    output_tps: float
    request_rps_by_run: list[float]
    goodput_rps: float
    goodput_share: Estimate
    lag_p99_s: float
    cached_tokens: float
    prompt_tokens: float
    classes: list[ClassRow]
    class_source: str
    workers: list[WorkerRow]
    hotspot: float
    interference: Interference
    kv: KvMoved | None
    decisions: list[DecisionRow]
    engines: dict[str, str] = field(default_factory=dict)


def pool(runs: Sequence[Run]) -> pd.DataFrame:
    """All requests of `runs`, with the column `run` numbering them from 0."""
    return pd.concat([run.requests.assign(run=i) for i, run in enumerate(runs)], ignore_index=True)


def measure(
    runs: Sequence[Run], boot: SessionBootstrap, slo_ttft_s: float, slo_tpot_s: float
) -> Cell:
    """The metrics of one cell from its valid runs (at least one)."""
    table = pool(runs)
    ok = table[table["ok"]]
    scale = runs[0].length_scale
    latency = {name: _quantiles(boot, ok, f"{name}_s") for name in LATENCIES if name != "itl"}
    latency["itl"] = _gap_quantiles(boot, [run.gaps for run in runs])
    met = (
        ok["ttft_s"].le(slo_ttft_s) & (ok["tpot_s"].isna() | ok["tpot_s"].le(slo_tpot_s))
    ).to_numpy()
    good = np.zeros(len(table))
    good[ok.index.to_numpy()[met]] = 1.0
    spans = [_span_s(run) for run in runs]
    span_s = float(sum(spans))
    classes, class_source = class_rows(boot, ok, scale)
    return Cell(
        name=runs[0].cell,
        arm=runs[0].arm,
        load=runs[0].load,
        runs=list(runs),
        requests=table,
        n=len(table),
        errors={str(k): int(v) for k, v in table["error_kind"].value_counts().items()},
        latency=latency,
        mean={
            name: boot.ratio(
                _sessions(ok, f"{name}_s"),
                _values(ok, f"{name}_s"),
                np.ones(int(ok[f"{name}_s"].notna().sum())),
            )
            for name in ("ttft", "tpot", "e2e")
        },
        apc=apc(boot, ok),
        best_apc=best_apc(ok),
        apc_by_worker={
            str(worker): apc(boot, rows) for worker, rows in ok.groupby("decode_worker")
        },
        request_rps=len(ok) / span_s if span_s else float("nan"),
        input_tps=float(ok["prompt_tokens"].sum()) / span_s if span_s else float("nan"),
        output_tps=float(ok["output_tokens"].sum()) / span_s if span_s else float("nan"),
        request_rps_by_run=[
            float(run.requests["ok"].sum()) / span
            for run, span in zip(runs, spans, strict=True)
            if span
        ],
        goodput_rps=float(good.sum()) / span_s if span_s else float("nan"),
        goodput_share=boot.ratio(list(table["session_id"]), good, np.ones(len(table))),
        lag_p99_s=_quantile(table["lag_s"], 0.99),
        cached_tokens=float(ok["cached_tokens"].sum()),
        prompt_tokens=float(ok["prompt_tokens"].sum()),
        classes=classes,
        class_source=class_source,
        workers=worker_rows(ok),
        hotspot=hotspot_index(ok),
        interference=interference(boot, ok, scale),
        kv=kv_moved(runs),
        decisions=decision_rows(ok),
        engines=_engines(runs),
    )


def apc(boot: SessionBootstrap, ok: pd.DataFrame) -> Estimate:
    """Automatic prefix caching rate: cached over prompt tokens, both as the engine reports them."""
    known = ok[ok["cached_tokens"].notna()]
    return boot.ratio(
        list(known["session_id"]),
        known["cached_tokens"].to_numpy(dtype=float),
        known["prompt_tokens"].to_numpy(dtype=float),
    )


def best_apc(ok: pd.DataFrame) -> float:
    """What one infinite cache, in arrival order, would have reused of the same requests."""
    known = ok[ok["best_cached_tokens"].notna()]
    total = float(known["input_length"].sum())
    return float(known["best_cached_tokens"].sum()) / total if total else float("nan")


def trace_new_tokens(ok: pd.DataFrame) -> tuple[pd.Series[float], str]:
    """New tokens of each request for its class, and where they come from.

    By the trace where it is known (input less the longest prefix that any earlier request had):
    a property of the request, so that a class holds the same requests in every arm. Else by
    what the engine reported.
    """
    by_trace = ok["input_length"] - ok["best_cached_tokens"]
    if len(ok) and bool(by_trace.notna().all()):
        return by_trace, "trace"
    return ok["new_tokens"], "engine"


def class_labels(scale: float) -> list[str]:
    """Names of the four classes, with their bounds scaled as the trace's lengths were."""
    low, middle, high = (_tokens(bound * scale) for bound in CLASS_BOUNDS_TOKENS)
    return [f"< {low}", f"{low}–{middle}", f"{middle}–{high}", f"> {high}"]


def class_rows(
    boot: SessionBootstrap, ok: pd.DataFrame, scale: float
) -> tuple[list[ClassRow], str]:
    """Latencies by class of new tokens: under 5k, 5–20k, 20–50k, over 50k (times `scale`)."""
    new, source = trace_new_tokens(ok)
    bounds = [bound * scale for bound in CLASS_BOUNDS_TOKENS]
    index = np.searchsorted(bounds, new.to_numpy(dtype=float), side="right")
    rows = []
    for i, label in enumerate(class_labels(scale)):
        part = ok[(index == i) & new.notna().to_numpy()]
        rows.append(
            ClassRow(
                label=label,
                n=len(part),
                share=len(part) / len(ok) if len(ok) else float("nan"),
                ttft=_quantiles(boot, part, "ttft_s"),
                tpot=_quantiles(boot, part, "tpot_s"),
                e2e=_quantiles(boot, part, "e2e_s"),
            )
        )
    return rows, source


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
                ttft_p50_s=_quantile(here["ttft_s"], 0.5),
                ttft_p90_s=_quantile(here["ttft_s"], 0.9),
                tpot_p90_s=_quantile(decoded["tpot_s"], 0.9),
            )
        )
    return rows


def hotspot_index(ok: pd.DataFrame) -> float:
    """The busiest worker's TTFT p90 over the median of the workers' TTFT p90.

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
    median = float(np.median([_quantile(rows["ttft_s"], 0.9) for rows in groups]))
    return _quantile(busiest["ttft_s"], 0.9) / median if median > 0 else float("nan")


def beside_prefill(ok: pd.DataFrame, least_tokens: float) -> pd.Series[bool]:
    """Which requests decoded while another request's prefill of `least_tokens` or more new tokens
    was in hand on the same worker of the same run.

    Seen from the client: a prefill is in hand from the moment its request was sent until its first
    token, which includes its wait in the worker's queue.
    """
    flags = pd.Series(False, index=ok.index)
    heavy = ok[ok["new_tokens"] >= least_tokens]
    keys = ["run", "worker"]
    by_place = dict(list(heavy.rename(columns={"prefill_worker": "worker"}).groupby(keys)))
    for key, rows in ok.rename(columns={"decode_worker": "worker"}).groupby(keys):
        others = by_place.get(key)
        if others is None:
            continue
        starts = others["sent_s"].to_numpy()
        ends = others["first_token_s"].to_numpy()
        for index, begin, end in zip(
            rows.index, rows["first_token_s"], rows["last_token_s"], strict=True
        ):
            flags[index] = bool(np.any((starts < end) & (ends > begin)))
    return flags


def interference(boot: SessionBootstrap, ok: pd.DataFrame, scale: float) -> Interference:
    """TPOT p90 beside a prefill of ≥ 2,048 new tokens (times `scale`), over TPOT p90 without."""
    decoding = ok[ok["tpot_s"].notna()]
    if decoding.empty or decoding["decode_worker"].isna().all():
        return Interference(UNKNOWN, 0, 0, float("nan"), float("nan"))
    # Prefills of requests that themselves got one token still disturb others: look among all.
    flags = beside_prefill(ok, INTERFERING_PREFILL_TOKENS * scale)[decoding.index]
    beside, apart = decoding[flags], decoding[~flags]
    if beside.empty or apart.empty:
        return Interference(
            UNKNOWN,
            len(beside),
            len(apart),
            _quantile(beside["tpot_s"], 0.9),
            _quantile(apart["tpot_s"], 0.9),
        )
    draws = [
        boot.quantile_draws(list(rows["session_id"]), rows["tpot_s"].to_numpy(), [0.9])[:, 0]
        for rows in (beside, apart)
    ]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = draws[0] / draws[1]
    top, bottom = _quantile(beside["tpot_s"], 0.9), _quantile(apart["tpot_s"], 0.9)
    known = ratios[np.isfinite(ratios)]
    low, high = np.quantile(known, [0.025, 0.975]) if len(known) > 1 else (np.nan, np.nan)
    index = Estimate(
        top / bottom if bottom > 0 else float("nan"), float(low), float(high), len(decoding)
    )
    return Interference(index, len(beside), len(apart), top, bottom)


def kv_moved(runs: Sequence[Run]) -> KvMoved | None:
    """Bytes of KV sent between workers, a transfer a request; None where no run recorded one."""
    tables = [run.transfers for run in runs if not run.transfers.empty]
    if not tables:
        return None
    moved = pd.concat(tables, ignore_index=True)
    return KvMoved(
        transfers=len(moved),
        total_bytes=float(moved["bytes"].sum()),
        bytes_p50=_quantile(moved["bytes"], 0.5),
        bytes_p90=_quantile(moved["bytes"], 0.9),
        saved_bytes=float(moved["saved_bytes"].sum()),
        saved_tokens=float(moved["saved_tokens"].sum()),
        seconds_p50=_quantile(moved["end_unix_s"] - moved["start_unix_s"], 0.5),
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
                ttft_p50_s=_quantile(part["ttft_s"], 0.5),
                ttft_p90_s=_quantile(part["ttft_s"], 0.9),
                predicted=int(ratio.notna().sum()),
                error_ratio_p50=_quantile(ratio, 0.5),
                error_ratio_p10=_quantile(ratio, 0.1),
                error_ratio_p90=_quantile(ratio, 0.9),
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


def _engines(runs: Sequence[Run]) -> dict[str, str]:
    found: dict[str, str] = {}
    for run in runs:
        found |= run.manifest.get("versions", {}).get("engines", {})
    return found


def _span_s(run: Run) -> float:
    """Seconds from the first scheduled request to the last answer's end."""
    imported = run.manifest.get("imported")
    if imported is not None:
        return float(imported["duration_s"])
    table = run.requests
    if table["finished_s"].notna().sum() == 0:
        return 0.0
    return float(table["finished_s"].max() - table["scheduled_s"].min())


def _sessions(table: pd.DataFrame, column: str) -> list[str]:
    return list(table.loc[table[column].notna(), "session_id"])


def _values(table: pd.DataFrame, column: str) -> Array:
    return table.loc[table[column].notna(), column].to_numpy(dtype=float)


def _quantiles(boot: SessionBootstrap, table: pd.DataFrame, column: str) -> list[Estimate]:
    return boot.quantiles(_sessions(table, column), _values(table, column), QUANTILES)


def _gap_quantiles(boot: SessionBootstrap, gaps: Sequence[Gaps]) -> list[Estimate]:
    sessions = [name for part in gaps for name in part.session]
    if not sessions:
        return [UNKNOWN for _ in QUANTILES]
    return boot.quantiles(
        sessions,
        np.concatenate([part.seconds for part in gaps]),
        QUANTILES,
        np.concatenate([part.tokens for part in gaps]),
    )


def _quantile(values: pd.Series[float], quantile: float) -> float:
    known = np.asarray(values.dropna(), dtype=np.float64)
    return float(quantile_points(known, [quantile])[0]) if len(known) else float("nan")


def _tokens(value: float) -> str:
    if value >= 1000:
        return f"{value / 1000:.3g}k"
    return f"{value:.0f}"
