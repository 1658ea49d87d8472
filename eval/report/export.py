"""The report's figures for programs: one JSON object, or a file a table as CSV or Parquet."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from deltaserve.errors import InputError
from eval.document import write_whole
from eval.metrics import QUANTILES
from eval.outcomes import BY_KEY, MEASURES
from eval.report import facts
from eval.report.answer import answer
from eval.report.arms import arms_table
from eval.report.claims import claims, verdicts
from eval.report.evidence import Evidence
from eval.report.sections import sections
from eval.report.sections.headline import cells_table
from eval.tables import Table, enough
from launch.cache import make_folder


def summary_json(evidence: Evidence) -> dict[str, Any]:
    """The figures of the report, for programs."""

    def estimate(value: Any) -> dict[str, float | None]:
        return {key: _finite(getattr(value, key)) for key in ("value", "low", "high", "n")}

    return {
        "title": facts.title(evidence.runs),
        "simulated": facts.simulated(evidence.runs),
        "answer": answer(evidence),
        "baseline": evidence.baseline,
        "slo": evidence.slo.model_dump(),
        "claims": [line for _, line in (*claims(evidence), *verdicts(evidence))],
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
                        f"p{round(q * 100)}": estimate(value) if enough(value.n, q) else None
                        for q, value in zip(QUANTILES, values, strict=True)
                    }
                    for name, values in cell.latency.items()
                },
                "apc": estimate(cell.apc),
                "best_apc": _finite(cell.best_apc),
                "request_rps": _finite(cell.request_rps),
                "output_tps": _finite(cell.output_tps),
                **{
                    measure.key: estimate(cell.measures[measure.key])
                    for measure in MEASURES
                    if measure.quantile is None or measure.points
                },
                **{key: _finite(value) for key, value in cell.felt.items() if key not in BY_KEY},
                "meets_objective": not cell.not_met,
                "not_met": cell.not_met,
                "unsettled": cell.unsettled,
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
                "effect": estimate(item.effect),
                "in_points": item.measure.in_points,
                "primary": item.primary,
                "holds": item.holds,
                "reason": item.reason,
                "noise_floor": _finite(item.noise_floor),
                "p_value": _finite(item.p_value),
                "verdict": str(item.verdict),
            }
            for item in evidence.comparisons
        ],
        "tables": {
            key: [
                {name: _finite(v) if isinstance(v, float) else v for name, v in record.items()}
                for record in table.records
            ]
            for key, table in tables(evidence).items()
        },
    }


def tables(evidence: Evidence) -> dict[str, Table]:
    """Every table of the report that has a name, and one with a row a cell."""
    every = [table for section in sections(evidence) for _, table in section.tables]
    if evidence.cells:
        every = [arms_table(evidence.cells), cells_table(evidence.cells), *every]
    return {table.key: table for table in every if table.key}


def write_csv(evidence: Evidence, folder: Path) -> list[Path]:
    """Writes each table as `<folder>/<name>.csv`; returns the paths."""
    return _write(evidence, folder, ".csv", "--csv", lambda frame: frame.to_csv(index=False))


def write_parquet(evidence: Evidence, folder: Path) -> list[Path]:
    """Writes each table as `<folder>/<name>.parquet`; raises `InputError` where pyarrow is
    missing."""
    if importlib.util.find_spec("pyarrow") is None:
        raise InputError("--parquet needs pyarrow: pip install pyarrow")
    return _write(evidence, folder, ".parquet", "--parquet", lambda frame: frame.to_parquet())


def _write(
    evidence: Evidence,
    folder: Path,
    suffix: str,
    option: str,
    encode: Callable[[pd.DataFrame], str | bytes],
) -> list[Path]:
    make_folder(folder)
    written = []
    for key, table in tables(evidence).items():
        content = encode(pd.DataFrame.from_records(table.records))
        path = folder / f"{key}{suffix}"
        write_whole(path, content.encode() if isinstance(content, str) else content, option)
        written.append(path)
    return written


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
