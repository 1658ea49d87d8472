"""Fleets from the outside: which are there, how they are, and ending them.

Works from `fleet.json` and the process table alone, so that it can end a fleet whose supervisor was
killed; of a start that has no `fleet.json` yet, from what its folder is held by (`launch.claims`).
A pid is only ever trusted together with the time its process started.
"""

from __future__ import annotations

import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
import psutil

from deltaserve.errors import InputError
from launch.cache import cache_dir
from launch.claims import Start, announced_start
from launch.fleets import FleetError
from launch.supervised import GRACE_S, goes, is_running, processes_of, sweep, terminate
from launch.topology_files import name_in, path_name

_CPU_SAMPLE_S = 0.3
_FOLLOWS_WITHIN_S = 5.0
"""How long a supervisor may take to see that all of its processes have ended."""


@dataclass(frozen=True)
class ProcessStatus:
    """One process of a fleet now. `rss_bytes` and `cpu_percent` are of it and all below it.

    `reason` is what it failed of, `ended_unix_s` when it ended, where that is known.
    """

    id: str
    role: str | None
    pid: int | None
    url: str
    state: str
    rss_bytes: int
    cpu_percent: float
    reason: str | None
    ended_unix_s: float | None
    log: str


@dataclass(frozen=True)
class FleetStatus:
    """A fleet now. `alive` is whether any process of it, or its supervisor, runs.

    `state` is ``planned``, ``starting``, ``ready``, ``failed`` or ``stopped`` as the supervisor
    said last; ``dead`` or ``abandoned`` where it was killed without a word, and its processes are
    gone or run on. `reason` says why it failed, `since_unix_s` since when it is so, where that is
    known. Of a fleet of another host (`host`) only what it wrote down is known.
    """

    name: str
    run_dir: str
    host: str
    state: str
    reason: str | None
    since_unix_s: float | None
    alive: bool
    supervisor_pid: int
    router_url: str | None
    processes: tuple[ProcessStatus, ...]

    @property
    def has_failed(self) -> bool:
        return self.state in ("failed", "dead", "abandoned")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Ended:
    """What `down` ended: how many processes, and whether who supervised or started them ran."""

    processes: int
    supervisor: bool


def default_run_dir(name: str) -> Path:
    """Where a topology runs unless told otherwise; a home may be shared by several hosts."""
    return cache_dir() / "fleets" / socket.gethostname() / path_name(name)


def find_run_dir(name_or_path: str) -> Path:
    """The run folder of a topology's name, a topology file, or a run folder."""
    path = Path(name_or_path)
    if _is_fleets(path):
        return path.absolute()
    name = name_in(path) if path.suffix == ".toml" else name_or_path
    if _is_fleets(default_run_dir(name)):
        return default_run_dir(name)
    raise InputError(
        f"no fleet of the name {name_or_path} here (no fleet.json there or in "
        f"{default_run_dir(name)}); expected a run folder or a topology that was brought up, as "
        "deltaserve launch status lists them"
    )


def known_fleets() -> list[Path]:
    """The run folders of every fleet brought up in the default place."""
    return sorted(filter(_is_fleets, (cache_dir() / "fleets").glob("*/*")))


def status(run_dir: Path) -> FleetStatus:
    """How the fleet in `run_dir` is now."""
    if start := _unrecorded_start(run_dir):
        return _planned(run_dir, start)
    record = _read(run_dir)
    here = record["host"] == socket.gethostname()
    alive_before = {p["id"]: _kin(p, run_dir) if here else [] for p in record["processes"]}
    busy_s = {id_: _cpu_s(tree) for id_, tree in alive_before.items()}
    began_s = time.monotonic()
    if any(alive_before.values()):
        time.sleep(_CPU_SAMPLE_S)
    elapsed_s = max(time.monotonic() - began_s, 1e-9)
    rows = []
    for process in record["processes"]:
        tree = alive_before[process["id"]]
        state = process["state"]
        if here and state in ("starting", "ready") and not tree and not process["attached"]:
            state = "dead"
        spent_s = max(0.0, _cpu_s(tree) - busy_s[process["id"]])
        rows.append(
            ProcessStatus(
                id=process["id"],
                role=process["role"],
                pid=process["pid"],
                url=process["url"],
                state=state,
                rss_bytes=sum(_rss(p) for p in tree),
                cpu_percent=round(100 * spent_s / elapsed_s, 1),
                reason=process.get("reason"),
                ended_unix_s=process.get("ended_unix_s"),
                log=process["log"],
            )
        )
    supervisor = record["supervisor"]
    state, reason = record["state"], record.get("reason")
    unended = state in ("planned", "starting", "ready")
    supervised = unended and (
        not here or is_running(supervisor["pid"], supervisor.get("started", ""))
    )
    alive = supervised or any(alive_before.values())
    if unended and not supervised:
        state = "abandoned" if alive else "dead"
        reason = f"its supervisor (pid {supervisor['pid']}) was killed"
    since_unix_s = record.get("ended_unix_s")
    if state in ("planned", "starting"):
        since_unix_s = record["made_unix_s"]
    elif state == "ready":
        since_unix_s = record.get("ready_unix_s")
    return FleetStatus(
        name=record["topology"]["name"],
        run_dir=str(run_dir),
        host=record["host"],
        state=state,
        reason=reason,
        since_unix_s=since_unix_s,
        alive=alive,
        supervisor_pid=supervisor["pid"],
        router_url=record["router_url"],
        processes=tuple(rows),
    )


def _planned(run_dir: Path, start: Start) -> FleetStatus:
    return FleetStatus(
        name=start.name,
        run_dir=str(run_dir),
        host=start.host,
        state="planned",
        reason=None,
        since_unix_s=start.since_unix_s,
        alive=True,
        supervisor_pid=start.pid,
        router_url=None,
        processes=(),
    )


def down(run_dir: Path) -> Ended:
    """Ends the fleet in `run_dir`, also one that is still planned; returns what ran of it.

    The supervisor is asked first; whatever is left after it, or of a fleet without one, is ended
    here. When this returns no process of the fleet runs. Raises `InputError` for a fleet of another
    host, and `FleetError` where a process could not be killed or the supervisor does not leave: it
    may be a program that does more than this fleet, and is not killed.
    """
    start = _unrecorded_start(run_dir)
    if start is not None:
        if not terminate(start.pid, start.started, GRACE_S + 10):
            raise FleetError(
                f"{run_dir}: who starts a fleet there (pid {start.pid}) does not leave"
            )
        if not (run_dir / "fleet.json").exists():
            return Ended(0, True)
    record = _read(run_dir)
    if record["host"] != socket.gethostname():
        raise InputError(f"{run_dir}: its processes are on {record['host']}; end it there")
    started = [p for p in record["processes"] if p["pid"] is not None]
    running = sum(bool(_kin(p, run_dir)) for p in started)
    supervisor, since = record["supervisor"]["pid"], record["supervisor"].get("started", "")
    asked = record["state"] in ("planned", "starting", "ready")
    supervised = start is not None or (asked and is_running(supervisor, since))
    if asked and not terminate(supervisor, since, GRACE_S + 10):
        # What it has started since is written down, too.
        started = [p for p in _read(run_dir)["processes"] if p["pid"] is not None]
    left: list[int] = []
    for process in started:
        terminate(process["pid"], process.get("started", ""), GRACE_S + 5)
        temporary = process.get("temporary_folder")
        left += sweep(
            process["pid"],
            process.get("started", ""),
            process["mark"],
            run_dir,
            Path(temporary) if temporary else None,
        )
    if left:
        raise FleetError(
            f"{run_dir}: could not be killed: pid {', '.join(map(str, left))}; they wait in the "
            "kernel, as for a GPU's driver, and may still hold GPUs and ports"
        )
    if asked and not goes(supervisor, since, _FOLLOWS_WITHIN_S):
        raise FleetError(
            f"{run_dir}: its processes have ended, but its supervisor (pid {supervisor}) does not "
            f"leave; it keeps the folder, ports and GPUs from other fleets until it does (kill -9 "
            f"{supervisor} ends it)"
        )
    return Ended(running, supervised)


def _is_fleets(run_dir: Path) -> bool:
    """Whether a fleet was brought up in `run_dir`, or is just being planned there."""
    return (run_dir / "fleet.json").exists() or announced_start(run_dir) is not None


def _unrecorded_start(run_dir: Path) -> Start | None:
    """The start in `run_dir` that ``fleet.json`` does not tell of yet."""
    start = announced_start(run_dir)
    if start is None or not (run_dir / "fleet.json").exists():
        return start
    supervisor = _read(run_dir)["supervisor"]
    is_recorded = (supervisor["pid"], supervisor.get("started")) == (start.pid, start.started)
    return None if is_recorded else start


_NEEDED = ("host", "state", "topology", "supervisor", "router_url", "processes")


def _read(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "fleet.json"
    try:
        record: dict[str, Any] = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    if missing := [key for key in _NEEDED if key not in record]:
        raise InputError(f"{path}: cannot be read: it has no {missing[0]!r}")
    return record


def _kin(process: dict[str, Any], run_dir: Path) -> list[psutil.Process]:
    """The live processes of one entry of fleet.json: below its guardian, or left by it."""
    pid, started = process["pid"], process.get("started", "")
    return [] if pid is None else processes_of(pid, started, process["mark"], run_dir)


def _cpu_s(tree: list[psutil.Process]) -> float:
    total = 0.0
    for process in tree:
        try:
            times = process.cpu_times()
            total += times.user + times.system
        except psutil.Error:
            continue
    return total


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0
