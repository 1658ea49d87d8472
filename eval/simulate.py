"""Simulated runs: a trace and a plan become what the simulator takes, and it is called.

Owns the planned requests' file and the names of packaged calibrations. The simulation itself is
Rust (`simulator/`); must not know engines.
"""

from __future__ import annotations

import hashlib
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from deltaserve.errors import InputError
from launch.cache import write_atomically
from replay.plan import Plan, Planned, make_plan
from replay.trace import read_trace

PLAN_FILE = "plan.json"
PLANNED_FILE = "planned.jsonl"


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
    output.mkdir(parents=True, exist_ok=True)
    if trace is not None:
        if "requests" in plan:
            raise InputError("requests: given by the plan and by --trace; expected one of them")
        planned = make_plan(
            read_trace(trace),
            session_limit=session_limit,
            length_scale=length_scale,
            max_input_tokens=max_input_tokens,
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
    """The constants of a packaged calibration, or of a calibration file."""
    packaged = packaged_calibrations()
    path = packaged.get(name, Path(name))
    if not path.is_file():
        raise InputError(f"calibration {name}: no such file; packaged ones: {', '.join(packaged)}")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None
    return {key: value for key, value in table.items() if not isinstance(value, dict)}


def _with_constants(worker: Any) -> Any:
    if isinstance(worker, dict) and isinstance(worker.get("calibration"), str):
        return {**worker, "calibration": read_calibration(worker["calibration"])}
    return worker


def _lines(plan: Plan) -> bytes:
    return b"".join(orjson.dumps(_line(request)) + b"\n" for request in plan.requests)


def _line(request: Planned) -> dict[str, Any]:
    return {
        "request_id": request.request_id,
        "session_id": request.session_id,
        "turn": request.turn,
        "trace_s": request.trace_s,
        "input_length": request.input_length,
        "output_length": request.output_length,
        "block_size": request.block_size,
        "hash_ids": _runs(request.hash_ids),
        "think_time_s": request.think_time_s,
        "waits_for": request.waits_for,
        "tree": request.tree,
    }


def _runs(ids: NDArray[Any]) -> list[tuple[int, int]]:
    """Ids as runs (first, count) of consecutive ones."""
    starts = np.flatnonzero(np.diff(ids, prepend=ids[:1] - 2) != 1)
    counts = np.diff(starts, append=len(ids))
    return list(zip(ids[starts].tolist(), counts.tolist(), strict=True))
