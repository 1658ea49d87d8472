"""The metrics of one cell (an arm under a load), pooled over its valid runs.

Owns every definition behind a reported number; each function says its own. Knows tables of
`eval.records`; not files, formatting or verdicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from eval.experiment import Slo
from eval.interference import INTERFERING_PREFILL_TOKENS, Interference, interference
from eval.judged import not_met, product_limit
from eval.outcomes import (
    LATENCY_QUANTILES,
    MEASURES,
    Outcome,
    alike,
    estimates,
    sample,
)
from eval.records import Run
from eval.serving import (
    DecisionRow,
    KvMoved,
    WorkerRow,
    decision_rows,
    hotspot_index,
    kv_moved,
    quantile_of,
    worker_rows,
)
from eval.settled import unsettled
from eval.stats import UNKNOWN, Array, Estimate, SessionBootstrap
from eval.steady import Steadiness, not_sustained, steadiness
from eval.stretch import Alone, alone_from

__all__ = [
    "INTERFERING_PREFILL_TOKENS",
    "LATENCIES",
    "QUANTILES",
    "Cell",
    "ClassRow",
    "DecisionRow",
    "KvMoved",
    "WorkerRow",
    "measure",
]

QUANTILES = LATENCY_QUANTILES
LATENCIES = ("ttft", "tpot", "worst_gap", "itl", "e2e")
# Counts and shares that mean the same whether or not the state was a steady one.
ALWAYS_KNOWN = (
    "in_time_share",
    "wait_over_10",
    "wait_over_30",
    "wait_over_60",
    "wait_over_180",
    "late_share_mean",
    "late_share_p50",
    "late_share_p90",
    "apc",
    "recomputed_share",
)
CLASS_BOUNDS_TOKENS = (5_000, 20_000, 50_000)
_REQUESTS_PER_S = next(m for m in MEASURES if m.key == "requests_per_s")


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
class Cell:
    """Everything measured for one arm under one load.

    `requests` are all measured requests of all runs, failed ones with infinite latencies; `errors`
    counts failures by kind, `failed` those that the servers made. `measures` has every measure that
    arms are compared by, by its key (`eval.outcomes.MEASURES`); `latency` the quantiles by name. Of
    a cell that did not sustain its load (`unsustained` says why) no latency and no rate is known.
    `unsettled` says by run why its window shows the load's start (`eval.settled`).
    `felt` has what has no interval (`eval.judged.measures`), over all runs; `not_met` says why the
    objective is not met, and is empty where it is.
    `one_arrival_share` is of answers that came all at once, `first_chunk_share` of output tokens
    that came with the first arrival.
    """

    name: str
    arm: str
    load: str | None
    runs: list[Run]
    requests: pd.DataFrame
    n: int
    errors: dict[str, int]
    failed: int
    steadiness: list[Steadiness]
    unsustained: str | None
    unsettled: list[str]
    slo: Slo
    gpus: int | None
    alone: Alone | None
    measures: dict[str, Estimate]
    latency: dict[str, list[Estimate]]
    mean: dict[str, Estimate]
    one_arrival_share: float
    first_chunk_share: float
    apc: Estimate
    best_apc: float
    apc_by_worker: dict[str, Estimate]
    request_rps: float
    input_tps: float
    output_tps: float
    request_rps_by_run: list[float]
    felt: dict[str, float]
    not_met: list[str]
    lag_p99_s: float
    cached_tokens: float
    prompt_tokens: float
    classes: list[ClassRow]
    class_source: str
    workers: list[WorkerRow]
    hotspot: float
    hotspot_by_run: list[float]
    interference: Interference
    kv: KvMoved | None
    decisions: list[DecisionRow]
    engines: dict[str, str] = field(default_factory=dict)


def session_bootstrap(runs: Sequence[Run], draws: int) -> SessionBootstrap:
    """Resamples of the sessions of all runs, whichever part of them is measured."""
    return SessionBootstrap(
        [name for run in runs for name in run.all_requests["conversation"]], draws
    )


def alone_by_arm(cells: Mapping[str, Sequence[Run]]) -> dict[str, Alone | None]:
    """What requests take alone, for each arm from its runs under all loads."""
    by_arm: dict[str, list[Run]] = {}
    for runs in cells.values():
        by_arm.setdefault(runs[0].arm, []).extend(runs)
    return {arm: alone_from(runs) for arm, runs in by_arm.items()}


def pool(runs: Sequence[Run]) -> pd.DataFrame:
    """All measured requests of `runs`, with the column `run` numbering them from 0."""
    return pd.concat([run.requests.assign(run=i) for i, run in enumerate(runs)], ignore_index=True)


def measure(
    runs: Sequence[Run], boot: SessionBootstrap, slo: Slo, alone: Alone | None = None
) -> Cell:
    """The metrics of one cell from its valid runs (at least one)."""
    table = pool(runs)
    ok = table[table["ok"]]
    asked = table[table["ok"] | table["failed"]]
    scale = runs[0].length_scale
    unsustained = not_sustained(runs)
    outcomes = [Outcome(run, slo, alone) for run in runs]
    measures: dict[str, Estimate] = {}
    for group in alike(MEASURES):
        found = [UNKNOWN for _ in group]
        if unsustained is None or group[0].key in ALWAYS_KNOWN:
            samples = [sample(outcome, group[0]) for outcome in outcomes]
            found = estimates(boot, samples, group)
        measures |= {m.key: value for m, value in zip(group, found, strict=True)}
    every = pd.concat([outcome.sessions for outcome in outcomes], ignore_index=True)
    [stretch_p90] = product_limit(
        every["stretch"].to_numpy(dtype=float), every["at_least"].to_numpy(dtype=bool), 0.9
    )
    measures["stretch_p90"] = replace(measures["stretch_p90"], value=float(stretch_p90))
    felt = _felt([outcome.measures for outcome in outcomes], every, measures)
    latency = {
        name: [measures[f"{name}_p{round(q * 100)}"] for q in QUANTILES]
        for name in LATENCIES
        if name != "itl"
    }
    latency["itl"] = (
        _gap_quantiles(boot, runs) if unsustained is None else [UNKNOWN for _ in QUANTILES]
    )
    spans = [end_s - start_s for start_s, end_s in (run.span_s for run in runs)]
    prefilled = [_prefilled_tokens(run) for run in runs]
    classes, class_source = class_rows(boot, asked, scale)
    hotspots = [hotspot_index(run.requests[run.requests["ok"]]) for run in runs]
    after_first = ok["output_tokens"] - ok["first_chunk_tokens"]
    output_tokens = float(ok["output_tokens"].sum())
    return Cell(
        name=runs[0].cell,
        arm=runs[0].arm,
        load=runs[0].load,
        runs=list(runs),
        requests=table,
        n=len(table),
        errors={str(k): int(v) for k, v in table["error_kind"].value_counts().items()},
        failed=int(table["failed"].sum()),
        steadiness=[steadiness(run) for run in runs],
        unsustained=unsustained,
        unsettled=[
            f"{outcome.run.cell}/r{outcome.run.repeat}: {'; '.join(signs)}"
            for outcome in outcomes
            if (signs := unsettled(outcome))
        ],
        slo=slo,
        gpus=runs[0].gpus,
        alone=alone,
        measures=measures,
        latency=latency,
        mean={
            name: boot.ratio(
                _sessions(ok, f"{name}_s"),
                _values(ok, f"{name}_s"),
                np.ones(int(ok[f"{name}_s"].notna().sum())),
            )
            for name in ("ttft", "tpot", "e2e")
        },
        one_arrival_share=float((after_first <= 0).mean()) if len(ok) else float("nan"),
        first_chunk_share=(
            float(ok["first_chunk_tokens"].sum()) / output_tokens if output_tokens else float("nan")
        ),
        apc=measures["apc"],
        best_apc=best_apc(ok),
        apc_by_worker={
            str(worker): apc(boot, rows) for worker, rows in ok.groupby("decode_worker")
        },
        request_rps=measures["requests_per_s"].value,
        input_tps=sum(prefilled) / sum(spans) if sum(spans) else float("nan"),
        output_tps=measures["throughput_output_tps"].value,
        request_rps_by_run=[
            estimates(boot, [sample(outcome, _REQUESTS_PER_S)], [_REQUESTS_PER_S])[0].value
            for outcome in outcomes
        ],
        felt=felt,
        not_met=not_met(felt, slo, measures["stretch_p90"].value),
        lag_p99_s=quantile_of(table["lag_s"], 0.99),
        cached_tokens=float(ok["cached_tokens"].sum()),
        prompt_tokens=float(ok["prompt_tokens"].sum()),
        classes=classes,
        class_source=class_source,
        workers=worker_rows(ok),
        hotspot=float(np.nanmean(hotspots)) if np.isfinite(hotspots).any() else float("nan"),
        hotspot_by_run=hotspots,
        interference=interference(boot, runs),
        kv=kv_moved(runs),
        decisions=decision_rows(ok),
        engines=_engines(runs),
    )


def _felt(
    by_run: Sequence[Mapping[str, float]], sessions: pd.DataFrame, measures: Mapping[str, Estimate]
) -> dict[str, float]:
    """What the sessions of all runs felt: counts are sums, waits the longest, shares of all."""
    turns = float(sessions["turns"].sum())
    return {
        key: sum(found[key] for found in by_run)
        for key in (
            "starved_sessions",
            "served_sessions",
            "sessions",
            "judged_turns",
            "undecided_turns",
        )
    } | {
        "longest_wait_s": float(np.nanmax([found["longest_wait_s"] for found in by_run])),
        "wait_over_patience": float(sessions["over_patience"].sum()) / turns if turns else np.nan,
        "in_time_share": measures["in_time_share"].value,
        "late_share_p90": measures["late_share_p90"].value,
    }


def apc(boot: SessionBootstrap, ok: pd.DataFrame) -> Estimate:
    """Automatic prefix caching rate: cached over prompt tokens, both as the engine reports them."""
    known = ok[ok["cached_tokens"].notna()]
    return boot.ratio(
        list(known["conversation"]),
        known["cached_tokens"].to_numpy(dtype=float),
        known["prompt_tokens"].to_numpy(dtype=float),
    )


def best_apc(ok: pd.DataFrame) -> float:
    """What one infinite cache, in arrival order, would have reused of the same requests."""
    known = ok[ok["best_cached_tokens"].notna()]
    total = float(known["prompt_tokens"].sum())
    best = known["best_cached_tokens"].clip(upper=known["prompt_tokens"])
    return float(best.sum()) / total if total else float("nan")


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


def _engines(runs: Sequence[Run]) -> dict[str, str]:
    found: dict[str, str] = {}
    for run in runs:
        found |= run.manifest.get("versions", {}).get("engines", {})
    return found


def _prefilled_tokens(run: Run) -> float:
    """Prompt tokens of the requests whose first token came inside the window."""
    start_s, end_s = run.span_s
    table = run.all_requests[run.all_requests["ok"] & run.all_requests["phase"].ne("prime")]
    inside = table["first_token_s"].between(start_s, end_s) | (run.window is None)
    return float(table.loc[inside, "prompt_tokens"].sum())


def _sessions(table: pd.DataFrame, column: str) -> list[str]:
    return list(table.loc[table[column].notna(), "conversation"])


def _values(table: pd.DataFrame, column: str) -> Array:
    return table.loc[table[column].notna(), column].to_numpy(dtype=float)


def _quantiles(boot: SessionBootstrap, table: pd.DataFrame, column: str) -> list[Estimate]:
    return boot.quantiles(_sessions(table, column), _values(table, column), QUANTILES)


def _gap_quantiles(boot: SessionBootstrap, runs: Sequence[Run]) -> list[Estimate]:
    """Of the gaps between the arrivals of answered requests, each as often as tokens it brought."""
    codes, seconds, tokens = [], [], []
    for run in runs:
        ok = run.requests[run.requests["ok"]]
        code_of_row = np.full(len(run.all_requests), -1, dtype=np.int64)
        code_of_row[ok["row"].to_numpy()] = boot.codes(list(ok["conversation"]))
        rows, gap_s, came = run.arrivals.gaps(ok["row"].to_numpy())
        codes.append(code_of_row[rows])
        seconds.append(gap_s)
        tokens.append(came)
    if not sum(map(len, codes)):
        return [UNKNOWN for _ in QUANTILES]
    return boot.quantiles(
        np.concatenate(codes), np.concatenate(seconds), QUANTILES, np.concatenate(tokens)
    )


def _tokens(value: float) -> str:
    if value >= 1000:
        return f"{value / 1000:.3g}k"
    return f"{value:.0f}"
