"""Fits how long an engine's steps take, from the steps that its telemetry recorded.

Owns the fit and the calibration file that the simulator reads. Must not know how steps are
simulated beyond the two formulas (`docs/simulator.md`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from scipy.optimize import nnls

from deltaserve.errors import InputError
from eval.reach import QUANTITIES
from replay.trace import numbered_lines

# A step that is further from the formula than this share is not of the kind that it describes (a
# compilation, a pause of the process), and does not count in the next round of the fit.
_PREFILL_TRIM = 0.15
_DECODE_TRIM = 0.3
_ROUNDS = 8
# What a step of an engine at work takes at least; shorter ones are results that came together.
_LEAST_STEP_S = 1e-3
_LEAST_STEPS = 50

FloatArray = NDArray[np.float64]
Row = tuple[float, float, float, float]
"""The three terms of a formula, and what the step took in seconds."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Constants of one kind of step, and how well they describe it.

    `errors` are relative, one a step (`predicted / taken - 1`), of the steps left out as well;
    `predicted_share` is all predicted time over all time taken; `most` the largest second and third
    term of the steps that count: beyond them the formula is extrapolated.
    """

    constants: tuple[float, ...]
    steps: int
    left_out: int
    errors: FloatArray
    predicted_share: float
    most: tuple[float, float]

    @property
    def median_error(self) -> float:
        return float(np.median(np.abs(self.errors)))

    @property
    def p90_error(self) -> float:
        return float(np.quantile(np.abs(self.errors), 0.9))


@dataclass(frozen=True, slots=True)
class Calibration:
    """Fits of both kinds of step; either is None where too few such steps were recorded.

    `attends_all`: the prefills' attention runs over the whole sequence, its cached prefix too.
    `found_token_s`: for each token that a request finds cached, how much longer the step takes in
    which it is let in, where that is known.
    `request_s`: what a request waits for besides its steps, where that is known.
    """

    prefill: Fit | None
    decode: Fit | None
    attends_all: bool = False
    request_s: float | None = None
    found_token_s: float | None = None

    def constants(self) -> dict[str, float]:
        """By their names in a plan of the simulator."""
        found: dict[str, float] = {}
        if self.prefill:
            overhead_s, token_s, pair_s = self.prefill.constants
            found["prefill_overhead_s"] = overhead_s
            found["prefill_tokens_per_s"] = 1 / token_s
            found["prefill_pairs_per_s"] = 1 / pair_s
        if self.decode:
            base_s, request_s, context_token_s = self.decode.constants
            found["decode_base_s"] = base_s
            found["decode_per_request_s"] = request_s
            found["decode_per_context_token_s"] = context_token_s
        if self.found_token_s is not None:
            found["found_token_s"] = self.found_token_s
        if self.request_s is not None:
            found["request_s"] = self.request_s
        return found


def read_steps(paths: list[Path]) -> list[dict[str, Any]]:
    """Steps of files (`*.jsonl`, `*.jsonl.zst`) and of folders of runs (their `steps/*.jsonl`).

    Raises InputError where a path is neither, or no step is in any.
    """
    steps: list[dict[str, Any]] = []
    for path in paths:
        files = [path]
        if path.is_dir():
            files = sorted(path.glob("steps/*.jsonl")) or sorted(path.glob("*.jsonl"))
        for file in files:
            steps.extend(line for line in read_lines(file) if "forward_mode" in line)
    if not steps:
        shown = ", ".join(str(path) for path in paths)
        raise InputError(
            f"{shown}: no engine steps; telemetry writes them to a run's steps/*.jsonl"
        )
    return steps


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """A JSON object a line, of a file that may be compressed; a torn last line is left out. Raises
    InputError where there is no such file, or another line is not JSON."""
    if not path.is_file():
        raise InputError(f"{path}: expected a run's folder or a file of lines")
    for number, line in numbered_lines(path):
        try:
            yield orjson.loads(line)
        except orjson.JSONDecodeError as error:
            if line.endswith(b"\n"):
                raise InputError(f"{path}:{number}: {error}") from None
            return  # a line that was being written when the run ended


def fit(steps: list[dict[str, Any]]) -> Calibration:
    """Fits both formulas on the steps of one or several workers of a kind; a prefill's with the
    pairs of its new tokens, or of the whole sequence where that is off by less than half as much.

    What a step took is the time from the end of the step before it (or its own start, where the
    worker was idle until then) to its end: with overlap scheduling a step is launched while the one
    before it still runs, so that `duration_s` covers both.
    """
    prefill: list[Row] = []
    whole: list[Row] = []
    decode: list[Row] = []
    for before, step, took_s in step_intervals(steps):
        if took_s < _LEAST_STEP_S:
            continue
        kind = step["forward_mode"]
        if kind == "extend" and step["prefill_requests"] == 1 and not step["decode_requests"]:
            new = float(step["prefill_tokens"])
            pairs = new * (step["prefix_tokens"] + new / 2)
            prefill.append((1.0, new, pairs, took_s))
            whole.append((1.0, new, (step["prefix_tokens"] + new) ** 2 / 2, took_s))
        elif kind == "decode" and before["forward_mode"] == "decode":
            used = float(step["kv_used_tokens"])
            decode.append((1.0, float(step["decode_requests"]), used, took_s))
    of_new, of_all = fit_rows(prefill, _PREFILL_TRIM), fit_rows(whole, _PREFILL_TRIM)
    # Steps without much of a prefix cannot tell the two apart: then it is as on a GPU.
    attends_all = bool(of_new and of_all and 2 * of_all.median_error < of_new.median_error)
    return Calibration(
        of_all if attends_all else of_new, fit_rows(decode, _DECODE_TRIM), attends_all
    )


def step_intervals(
    steps: list[dict[str, Any]],
) -> Iterator[tuple[dict[str, Any], dict[str, Any], float]]:
    """Every step but a worker's first, with the one before it and what it took in seconds."""
    by_worker: dict[str, list[dict[str, Any]]] = {}
    for step in steps:
        by_worker.setdefault(step["worker_id"], []).append(step)
    for rows in by_worker.values():
        rows.sort(key=lambda step: float(step["start_unix_s"]))
        ended_s = rows[0]["start_unix_s"] + rows[0]["duration_s"]
        for before, step in pairwise(rows):
            end_s = step["start_unix_s"] + step["duration_s"]
            yield before, step, end_s - max(ended_s, step["start_unix_s"])
            ended_s = max(ended_s, end_s)


def fit_rows(rows: list[Row], trim: float) -> Fit | None:
    """Least squares of relative errors with constants of 0 or more; steps far off are left out and
    the rest fitted again."""
    if len(rows) < _LEAST_STEPS:
        return None
    table = np.array(rows)
    terms, took_s = table[:, :3], table[:, 3]
    kept = np.ones(len(table), dtype=np.bool_)
    constants = np.zeros(3)
    for _ in range(_ROUNDS):
        scaled = terms[kept] / took_s[kept, None]
        scale = scaled.max(axis=0)
        scale[scale == 0] = 1.0
        solution, _ = nnls(scaled / scale, np.ones(int(kept.sum())))
        constants = solution / scale
        errors = terms @ constants / took_s - 1
        near = np.abs(errors) < trim
        if near.sum() < _LEAST_STEPS or (near == kept).all():
            break
        kept = near
    errors = terms @ constants / took_s - 1
    # A constant of 0 has no speed; it is then so small that it never shows.
    floor = np.array([0.0, 1e-12, 1e-15])
    return Fit(
        constants=tuple(float(value) for value in np.maximum(constants, floor)),
        steps=len(table),
        left_out=int((~kept).sum()),
        errors=errors,
        predicted_share=float((terms @ constants).sum() / took_s.sum()),
        most=(float(terms[kept, 1].max()), float(terms[kept, 2].max())),
    )


def to_toml(calibration: Calibration, name: str, sources: list[str]) -> str:
    """A calibration file: the constants, and what the fit leaves unexplained."""
    lines = [f'name = "{name}"', ""]
    lines += [f"{key} = {value:.6g}" for key, value in calibration.constants().items()]
    if calibration.attends_all:
        lines.append("attends_all = true")
    for title, fitted in (("prefill", calibration.prefill), ("decode", calibration.decode)):
        lines += ["", f"[fit.{title}]"]
        if fitted is None:
            lines.append("steps = 0  # too few to fit: no constants, and nothing is simulated so")
            continue
        lines += [
            f"steps = {fitted.steps}",
            f"left_out = {fitted.left_out}",
            f"median_relative_error = {fitted.median_error:.4f}",
            f"p90_relative_error = {fitted.p90_error:.4f}",
            f"predicted_share_of_time = {fitted.predicted_share:.4f}",
        ]
        if title == "decode":
            lines += [
                f"{name} = {value:.0f}" for name, value in zip(QUANTITIES, fitted.most, strict=True)
            ]
    shown = ", ".join(f'"{source}"' for source in sources)
    return "\n".join([*lines, "", "[of]", f"runs = [{shown}]", ""])
