"""Simulated runs: a trace and a plan become what the simulator takes, and it is called.

Owns the planned requests' file and the names of packaged calibrations. The simulation itself is
Rust (`simulator/`); must not know engines.
"""

from __future__ import annotations

import hashlib
import math
import random
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import orjson

from deltaserve.errors import InputError
from launch.cache import make_folder, write_atomically
from replay.plan import Plan, Planned, make_plan
from replay.trace import read_trace

PLAN_FILE = "plan.json"
PLANNED_FILE = "planned.jsonl"
FITTED = (
    "prefill_overhead_s",
    "prefill_tokens_per_s",
    "prefill_pairs_per_s",
    "decode_base_s",
    "decode_per_request_s",
    "decode_per_context_token_s",
)
"""What a calibration must say: the constants of both formulas, which `eval calibrate` fits. What
else it may say (reloads, transfers) is as on an H200 where it does not."""
_KINDS = {"prefill": ("prefill", "found"), "decode": ("decode",)}
"""Kinds of step, and how the names of their constants begin."""
_MEDIAN_OF_NORMAL = 0.6745
"""Half of a normal's values are within so many standard deviations."""


def simulate(
    plan: dict[str, Any],
    output: Path,
    *,
    trace: Path | None = None,
    length_scale: float = 1.0,
    max_input_tokens: int | None = None,
    session_limit: int | None = None,
) -> dict[str, Any]:
    """Simulates a plan (`docs/simulator.md`) and writes a run's files to `output`; returns the
    report.

    With a trace, its requests are those that `replay` would send, and the plan names none. A
    worker's `calibration` may be the name of a packaged one, or a calibration file's path. Raises
    InputError with one line where the plan is wrong.
    """
    from router_policies import _core

    plan = dict(plan)
    make_folder(output)
    if trace is not None:
        if "requests" in plan:
            raise InputError("requests: given by the plan and by --trace; expected one of them")
        planned = make_plan(
            read_trace(trace),
            session_limit=session_limit,
            length_scale=length_scale,
            max_input_tokens=max_input_tokens,
            source=trace,
        )
        (output / PLANNED_FILE).write_bytes(_lines(planned))
        plan["requests"] = str((output / PLANNED_FILE).resolve())
    workers = plan.get("workers")
    if isinstance(workers, list):
        plan["workers"] = [_with_constants(worker) for worker in workers]
    (output / PLAN_FILE).write_bytes(orjson.dumps(plan, option=orjson.OPT_INDENT_2))
    try:
        report = _core.simulate(output / PLAN_FILE, output)
    except ValueError as error:
        raise InputError(str(error)) from None
    parsed: dict[str, Any] = orjson.loads(report)
    return parsed


def write_planned(plan: Plan, folder: Path) -> Path:
    """Writes the planned requests to a file in `folder` that is named by their content, unless it
    is there already; returns its path."""
    lines = _lines(plan)
    path = folder / f"{hashlib.sha256(lines).hexdigest()[:16]}.jsonl"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lines)
    return path


def is_plan(what: str) -> bool:
    """Whether `what` names the plan of one run, which has workers, and no experiment, which has
    arms. A file that cannot be read as either is left to the experiment's reader."""
    path = Path(what)
    if path.suffix == ".json":
        return True
    try:
        return "workers" in tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def read_plan(path: Path) -> dict[str, Any]:
    """A plan's file, TOML or JSON; paths in it are relative to it."""
    try:
        data = path.read_bytes()
        plan: Any = tomllib.loads(data.decode()) if path.suffix == ".toml" else orjson.loads(data)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None
    if not isinstance(plan, dict):
        raise InputError(f"{path}: expected a table")
    if isinstance(plan.get("requests"), str):
        plan["requests"] = str((path.parent / plan["requests"]).resolve())
    return plan


def packaged_calibrations() -> dict[str, Path]:
    """Calibration files that come with the project, by name."""
    folder = Path(str(resources.files("eval"))) / "calibrations"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def read_calibration(name: str) -> dict[str, Any]:
    """The constants of a packaged calibration, or of a calibration file. Raises InputError for one
    that does not say what it is of, or lacks constants: the simulator would take those of another
    model and GPU in their place, under this one's name."""
    table = _calibration_table(name)
    return {key: value for key, value in table.items() if not isinstance(value, dict)}


def calibration_ranges(name: str) -> dict[str, Any]:
    """Up to what of each quantity a calibration's decode steps were fitted, where it says so."""
    found: dict[str, Any] = _calibration_table(name).get("fit", {}).get("decode", {})
    return found


def named_calibration(name: str) -> str:
    """A calibration's name as runs are told apart by: of a file with a digest of what it holds, for
    it may be fitted anew under its name."""
    if name in packaged_calibrations():
        return name
    _calibration_table(name)  # says what is wrong with it
    return f"{name} ({hashlib.sha256(Path(name).read_bytes()).hexdigest()[:8]})"


def drawn_calibration(name: str, seed: int) -> dict[str, Any]:
    """The constants as they may be as well, by the error that the calibration states: those of a
    prefill times one factor, those of a decode step times another, lognormal and drawn by `seed`.

    The error is `[spread]`, a standard deviation of the logarithm, where a guess says it; else that
    of a step of which half of the steps are off by no more than the fit's `median_relative_error`.
    Raises InputError where neither is stated.
    """
    table = _calibration_table(name)
    rng = random.Random(seed)
    drawn = read_calibration(name)
    for kind in _KINDS:
        factor = math.exp(rng.gauss(0.0, _spread(table, name, kind)))
        for key, value in drawn.items():
            if key.startswith(_KINDS[kind]):
                # Twice the time a step is half the tokens a second.
                drawn[key] = value / factor if key.endswith("_per_s") else value * factor
    return drawn


def _spread(table: dict[str, Any], name: str, kind: str) -> float:
    stated = table.get("spread", {}).get(kind)
    if stated is not None:
        return float(stated)
    median = table.get("fit", {}).get(kind, {}).get("median_relative_error")
    if median is None:
        raise InputError(f"calibration {name}: states no error of {kind} steps ([fit], [spread])")
    return float(median) / _MEDIAN_OF_NORMAL


def _calibration_table(name: str) -> dict[str, Any]:
    packaged = packaged_calibrations()
    path = packaged.get(name, Path(name))
    if not path.is_file():
        raise InputError(f"calibration {name}: no such file; packaged ones: {', '.join(packaged)}")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None
    if not isinstance(table.get("name"), str) or not table["name"]:
        raise InputError(f"{path}: name: expected of what it is: model, GPU, engine and version")
    if missing := [key for key in FITTED if key not in table]:
        raise InputError(
            f"{path}: has no {', '.join(missing)}; expected all constants of prefill and decode "
            "steps, fitted (eval calibrate) on runs with 50 or more of each, or written in"
        )
    for key in FITTED:
        if isinstance(table[key], bool) or not isinstance(table[key], int | float):
            raise InputError(f"{path}: {key}: expected a number, not {table[key]!r}")
    return table


def _with_constants(worker: Any) -> Any:
    if isinstance(worker, dict) and isinstance(worker.get("calibration"), str):
        return {**worker, "calibration": read_calibration(worker["calibration"])}
    return worker


def _lines(plan: Plan) -> bytes:
    ids = plan.requests.id_runs
    lines = (_line(request, ids(at)) for at, request in enumerate(plan.requests))
    return b"".join(orjson.dumps(line) + b"\n" for line in lines)


def _line(request: Planned, id_runs: list[tuple[int, int]]) -> dict[str, Any]:
    return {
        "request_id": request.request_id,
        "session_id": request.session_id,
        "turn": request.turn,
        "trace_s": request.trace_s,
        "input_length": request.input_length,
        "output_length": request.output_length,
        "block_size": request.block_size,
        "hash_ids": id_runs,
        "think_time_s": request.think_time_s,
        "waits_for": request.waits_for,
        "tree": request.tree,
    }
