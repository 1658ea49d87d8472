"""What a run's results come to: counts, latencies and the engine's cached share."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.results import Result


def summarise(results: Iterable[Result], planned: int | None) -> dict[str, Any]:
    """Counts, latencies (p50, p90, p99, in seconds) and the engine's cached share over a run's
    measured results, of which the last of each request counts. `planned` None: as many as were
    scheduled in the measured window. What the client itself broke off is no error of the others."""
    last: dict[str, int] = {}
    errors: dict[int, str] = {}
    rows = array("d")
    others: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    cancelled: Counter[str] = Counter()
    for result in results:
        if result.phase != "measure":
            others[result.phase] += 1
            if result.error is not None:
                (cancelled if result.error.kind == "cancelled" else failed)[result.phase] += 1
            continue
        row = last.setdefault(result.request_id, len(last))
        errors.pop(row, None)
        if result.error:
            errors[row] = result.error.kind
        values = array("d", [math.nan if v is None else v for v in _summary_row(result)])
        rows[row * len(values) : (row + 1) * len(values)] = values
    values_by_column = np.array(rows).reshape(len(last), len(_SUMMARY_COLUMNS)).T
    columns = dict(zip(_SUMMARY_COLUMNS, values_by_column, strict=True))
    good = np.ones(len(last), dtype=np.bool_)
    good[list(errors)] = False
    counted = good & (columns["prompt_tokens"] > 0) & ~np.isnan(columns["cached_tokens"])
    prompt_tokens = columns["prompt_tokens"][counted].sum()
    return {
        "planned": len(last) if planned is None else planned,
        "finished": len(last),
        "ok": int(good.sum()),
        "errors": dict(Counter(errors.values())),
        "not_measured": {
            phase: {"requests": count, "errors": failed[phase]}
            | ({"cancelled": cancelled[phase]} if cancelled[phase] else {})
            for phase, count in others.items()
        },
        "duration_s": _most(columns["finished_s"]) + _most(-columns["sent_s"]),
        "input_tokens": int(columns["input_tokens"][good].sum()),
        "output_tokens": int(columns["output_tokens"][good].sum()),
        "cached_share": float(columns["cached_tokens"][counted].sum() / prompt_tokens)
        if prompt_tokens
        else None,
        "ttft_s": _percentiles(columns["ttft_s"][good]),
        "tpot_s": _percentiles(columns["tpot_s"][good]),
        "e2e_s": _percentiles(columns["e2e_s"][good]),
        "lateness_s": _percentiles(columns["lateness_s"]),
    }


_SUMMARY_COLUMNS = (
    *("input_tokens", "output_tokens", "prompt_tokens", "cached_tokens", "sent_s", "finished_s"),
    *("ttft_s", "tpot_s", "e2e_s", "lateness_s"),
)


def _summary_row(result: Result) -> tuple[float | None, ...]:
    """A result's values for `_SUMMARY_COLUMNS`."""
    return (
        result.input_length,
        result.output_tokens,
        result.prompt_tokens,
        result.cached_tokens,
        result.sent_s,
        result.finished_s,
        result.ttft_s(),
        result.tpot_s(),
        (result.finished_s or 0.0) - (result.scheduled_s or 0.0),
        result.lateness_s(),
    )


def _most(values: NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(known.max()) if len(known) else 0.0


def _percentiles(values: NDArray[np.float64]) -> dict[str, float] | None:
    known = values[~np.isnan(values)]
    if not len(known):
        return None
    p50, p90, p99 = np.percentile(known, [50, 90, 99])
    return {"p50": float(p50), "p90": float(p90), "p99": float(p99)}
