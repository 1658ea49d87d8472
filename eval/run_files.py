"""What the JSON files of a run's folder must be like to be read.

Owns the kind of every field that is read of them, and the line that names the file and the field
where one is of another kind. A field that is not named here may be anything: nothing is read of it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deltaserve.errors import InputError
from eval.experiment import Analysis, Slo, ValidityRules
from eval.experiment_files import one_line


class Told(BaseModel):
    """A table of a file that a program wrote: numbers are no words there, and what a later version
    adds is left alone."""

    model_config = ConfigDict(extra="ignore", strict=True)


class RunFile(Told):
    """One file of a run's folder; `IS` names what it holds."""

    IS: ClassVar[str]


class _Arm(Told):
    name: str


class _Group(Told):
    """A group of a topology's workers."""

    count: int = 1
    tensor_parallel: int = 1
    urls: list[Any] | None = None
    flags: list[str] | None = None
    max_total_tokens: float | None = None
    host_kv_tokens: float | None = None


class _Router(Told):
    admission: dict[str, Any] | None = None


class _Topology(Told):
    device: str | None = None
    engine: dict[str, Any] = {}
    router: _Router | None = None
    workers: list[_Group] | None = None
    flags: list[str] | None = None
    max_total_tokens: float | None = None


class _Versions(Told):
    engines: dict[str, Any] = {}
    deltaserve: str | None = None


class _Hardware(Told):
    gpus: list[dict[str, Any]] = []
    memory_bytes: float = 0.0


class Worker(Told):
    """One of the workers that a run had. Those of a fleet that says no more are names alone."""

    id: str = ""
    gpus: list[int] | None = None


class _Git(Told):
    commit: str = ""


class Arguments(Told):
    """The settings of a replay. Where they have no names, those of its command are read."""

    max_inflight_sessions: float | None = None
    sessions_per_hour: float | None = None
    time_scale: float | None = None
    max_think_s: float | None = None
    start_share: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None


class _Clock(Told):
    unix_origin_s: float | None = None


class _Replay(Told):
    arguments: Arguments | list[Any] | None = None
    clock: _Clock | None = None


class _Imported(Told):
    duration_s: float = math.nan


class _Simulated(Told):
    beyond: dict[str, tuple[float, float]] | None = None


class _Violation(Told):
    rule: str


class _Timings(Told):
    replay_s: float | None = None
    fleet_up_s: float | None = None


class Manifest(RunFile):
    """`manifest.json`."""

    IS = "the manifest of a run"

    state: str
    arm: _Arm
    load: str | None = None
    repeat: int = 1
    order: int = 0
    cell_order: int = 0
    gpus: int | None = None
    topology: _Topology = _Topology()
    versions: _Versions = _Versions()
    hardware: _Hardware = _Hardware()
    source: dict[str, Any] = {}
    timings: _Timings = _Timings()
    imported: _Imported = _Imported()
    git: _Git | None = None
    identity: dict[str, Any] | None = None
    trace: dict[str, Any] | None = None
    replay: _Replay | None = None
    replay_command: list[Any] | None = None
    policy_params: dict[str, Any] | None = None
    workers: list[Worker | str] | None = None
    simulated: _Simulated | None = None
    violations: list[_Violation] | None = None
    slo: Slo = Slo()
    validity: ValidityRules = ValidityRules()
    analysis: Analysis = Analysis()


class Phases(RunFile):
    """`phases.json`. A run that was killed inside its window has no end of it."""

    IS = "the phases of a run"

    window_start_s: float
    window_end_s: float | None = None
    measure_s: float | None = None
    start: str = "cold"
    recycle: bool = False


class Trace(RunFile):
    """`trace.json`."""

    IS = "what is known of a trace"

    path: str
    sha256: str
    length_scale: float
    best_cached_tokens: dict[str, int]
    possible_cached_tokens: dict[str, int] = {}
    last_requests: dict[str, str] = {}


_Table = TypeVar("_Table", bound=RunFile)


def read_table(path: Path, table: type[_Table], prefix: str = "") -> tuple[_Table, dict[str, Any]]:
    """What is read of the file, and all that is in it. Raises `InputError`, in one line that names
    the file, says `prefix` and names the field; where there is no file, `FileNotFoundError`."""
    content = path.read_bytes()
    try:
        document = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise InputError(f"{path}: not JSON: {error}") from None
    if not isinstance(document, dict):
        raise InputError(f"{path}: {prefix}expected one JSON object, {table.IS}")
    try:
        return table.model_validate_json(content), document
    except ValidationError as error:
        raise InputError(f"{path}: {prefix}{one_line(error, document)}") from None
