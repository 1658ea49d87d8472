"""The report's figures for programs."""

from __future__ import annotations

import math
from typing import Any

from eval.metrics import QUANTILES
from eval.report.evidence import Evidence


def summary_json(evidence: Evidence) -> dict[str, Any]:
    """The figures of the report, for programs."""

    def estimate(value: Any) -> dict[str, float | None]:
        return {key: _finite(getattr(value, key)) for key in ("value", "low", "high", "n")}

    return {
        "baseline": evidence.baseline,
        "excluded": [
            {"run": f"{run.cell}/r{run.repeat}", "violations": [vars(v) for v in found]}
            for run, found in evidence.excluded
        ],
        "cells": {
            cell.name: {
                "runs": len(cell.runs),
                "requests": cell.n,
                "errors": cell.errors,
                **{
                    f"{name}_s": {
                        f"p{round(q * 100)}": estimate(value)
                        for q, value in zip(QUANTILES, values, strict=True)
                    }
                    for name, values in cell.latency.items()
                },
                "apc": estimate(cell.apc),
                "best_apc": _finite(cell.best_apc),
                "request_rps": _finite(cell.request_rps),
                "output_tps": _finite(cell.output_tps),
                "goodput_share": estimate(cell.goodput_share),
                "hotspot_index": _finite(cell.hotspot),
                "interference_index": estimate(cell.interference.index),
                "engines": cell.engines,
            }
            for cell in evidence.cells
        },
        "comparisons": [
            {
                "measure": item.measure.key,
                "baseline": item.baseline,
                "arm": item.arm,
                "ratio": estimate(item.ratio),
                "noise_floor": _finite(item.noise_floor),
                "p_value": _finite(item.p_value),
                "verdict": str(item.verdict),
            }
            for item in evidence.comparisons
        ],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
