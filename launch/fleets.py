"""A running topology: started in order, watched, written down in ``fleet.json``, ended whole.

Owns the life of a fleet's processes from the caller's side, and `fleet.json`. What is started is in
the plan; how one process is kept from outliving us is in `launch.supervised`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

from deltaserve.errors import InputError
from launch import checking, guard, planning, sizing
from launch.caches import FlushError, flush
from launch.capacity import Holds, reported
from launch.claims import announced, claim
from launch.freezing import freeze
from launch.gpus import named_gpus
from launch.hardware import GpuError, GpuSample, sample_gpus, sample_until_free
from launch.http_calls import FAILURES, call, reason
from launch.interrupts import held
from launch.kv import worker_kv
from launch.planning import Plan, Process
from launch.record import write_record
from launch.reservations import TakenError, reserved
from launch.sampling import Engines, Sampler
from launch.supervised import Supervised
from launch.topology import Role, Topology
from launch.transcript import Transcript, memory_of
from launch.warmup import WarmUpError, warm_up

_POLL_S = 0.25
_TELL_EVERY_S = 15.0
_LOG_LINES = 25
_PLAN_ATTEMPTS = 3

State = Literal["planned", "starting", "ready", "failed", "stopped"]
Progress = Callable[[str], None]


class FleetError(RuntimeError):
    """A process of the fleet died or never became ready; the message ends with its log's end."""


@dataclass(frozen=True)
class Worker:
    """A ready worker, as those who use it see it; `pid` is None where it was attached."""

    id: str
    role: Role
    url: str
    pid: int | None
    gpus: tuple[int, ...]
    log: Path


@dataclass
class _Member:
    plan: Process
    state: State = "planned"
    running: Supervised | None = None
    started_s: float = 0.0
    ready_after_s: float | None = None
    exit_status: int | None = None
    reason: str | None = None
    """What it failed of."""
    ended_unix_s: float | None = None
    served: bool = True
    """Whether it was ready since it was last started; true of one that was not started yet."""
    holds: Holds = field(default_factory=Holds)
    silence: str | None = None
    """Why it does not count as ready yet."""


@dataclass
class Fleet:
    """The processes of a plan. Made and ended by `fleet`."""

    plan: Plan
    on_progress: Progress
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds: ``check_s``, ``start_s``, ``warm_up_s`` where there is one, ``stop_s``, and
    ``ready_s.<id>`` (start to readiness)."""
    behind: Fleet | None = None
    """The fleet whose workers this one is attached to, where they are of this process."""

    def __post_init__(self) -> None:
        self._members = [_Member(process) for process in self.plan.processes]
        self._state: State = "planned"
        self._has_come_up = False
        self._made_unix_s = time.time()
        self._ready_unix_s: float | None = None
        self._ended_unix_s: float | None = None
        self._reason: str | None = None
        self._sampler: Sampler | None = None
        self._room: list[str] = []
        self._guardians: dict[str, tuple[int, str]] = {}
        self._transcript = Transcript(
            self.plan.run_dir / "transcript.txt", self.plan.topology.name, self.plan.engine
        )

    @property
    def router_url(self) -> str | None:
        """Where the router answers; None where the topology has none."""
        return self.plan.router.url if self.plan.router else None

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The workers, in the plan's order."""
        if self.behind is not None:
            return self.behind.workers
        found = []
        for member in self._members:
            p = member.plan
            if p.role is not None and (p.attached or member.running):
                pid = member.running.pid if member.running else None
                found.append(Worker(p.id, p.role, p.url, pid, p.gpus, p.log))
        return tuple(found)

    @property
    def engine_versions(self) -> dict[str, str]:
        """Versions of what matters in the engine's environment, by package."""
        if self.behind is not None:
            return self.behind.engine_versions
        return dict(self.plan.engine.versions)

    def check(self, but: Collection[str] = ()) -> None:
        """Raises `FleetError` when a process, other than those of `but`, has died since it was
        started."""
        if self.behind is not None:
            self.behind.check()
        for member in self._members:
            if member.plan.id in but:
                continue
            if member.running and (status := member.running.exit_status()) is not None:
                self._fail(member, f"{member.plan.id} died ({_status(status)})", status)

    def flush_caches(self) -> None:
        """Empties every worker's prefix cache and host tier, attached workers' too, so that a run
        after another starts cold. Raises `FleetError` where a worker cannot."""
        model = self.plan.topology.model_with_kv_events
        for worker in self.plan.workers:
            try:
                flush(
                    self.plan.engine.name,
                    worker.url,
                    worker.keys.to_change,
                    model_with_kv_events=model,
                )
            except FlushError as error:
                raise FleetError(f"{worker.id} ({worker.url}): {error}") from error
        self._transcript.tell("caches flushed")

    def start(self) -> None:
        """Checks the plan, then starts the workers and, when all are ready, the router."""
        began_s = time.monotonic()
        self._write()  # so that `down` finds who checks, which may take long
        planning.move_away_previous(self.plan.run_dir)
        self._check_plan()
        planning.write_files(self.plan)
        self.timings["check_s"] = time.monotonic() - began_s
        self._transcript.tell("checked: engine, flags, ports")
        if why := self.plan.topology.why_no_telemetry:
            self._tell(f"telemetry: not written: {why}")
        self._tell_gpus(sample_gpus)
        self._tell_room()
        self._state = "starting"
        self._write()
        self._start_all([m for m in self._members if m.plan.kind == "worker"])
        if self.plan.topology.connects_pairs:
            self._warm_up()
        self._learn_capacities()
        self._tell_room()
        self._freeze(self.plan.workers)
        self._start_all([m for m in self._members if m.plan.kind == "router"])
        self.timings["start_s"] = time.monotonic() - began_s
        if interval_s := self.plan.topology.sample_interval_s:
            self._sampler = self._sample_every(interval_s)
        self._state, self._ready_unix_s = "ready", time.time()
        self._write()
        self._has_come_up = True
        self._tell(f"{self.plan.topology.name} ready in {self.timings['start_s']:.0f} s")
        self._transcript.table(self._table())

    def _check_plan(self) -> None:
        """Raises `InputError` where this machine cannot start the plan; the record says so as well,
        for who finds the folder later."""
        try:
            checking.check(self.plan)
        except InputError as error:
            self._state, self._reason = "failed", str(error)
            self._transcript.tell(self._reason)
            raise

    def died(self) -> dict[str, str]:
        """Process id → why, of those that have died and were not started again."""
        found = {}
        for member in self._members:
            if member.running and (status := member.running.exit_status()) is not None:
                found[member.plan.id] = f"{member.plan.id} died ({_status(status)})"
                if member.state != "failed":
                    member.state, member.exit_status = "failed", status
                    member.reason, member.ended_unix_s = found[member.plan.id], time.time()
                    self._write()
        return found

    def restart(self, process_id: str) -> None:
        """Starts a process again, at the same address, once it has ended; its log begins anew. One
        that the machine has no memory for now still counts as died."""
        member = self._member(process_id)
        if member.running:
            member.running.stop()
        try:
            self._start(member)
        except OSError as error:
            self._tell(f"{process_id}: cannot be started: {error.strerror}")
            return
        if member.running and member.plan.id in self._guardians:
            self._guardians[process_id] = (member.running.pid, member.running.started)

    def is_ready_again(self, process_id: str) -> bool:
        """Whether a process that was started again is ready; ends it where that takes longer than
        `ready_timeout_s`, so that it counts as died."""
        member = self._member(process_id)
        port = member.plan.ports.get("http")
        member.silence = _silence(member.plan.health_url)
        is_its_own = member.running and (port is None or member.running.listens_on(port))
        if member.silence is None and (is_its_own or member.plan.node is not None):
            if member.plan.unbind and member.running:
                member.running.unbind()
            if member.plan.kind == "worker":
                self._freeze([member.plan])
            member.state, member.served = "ready", True
            self._write()
            return True
        waited_s = time.monotonic() - member.started_s
        if member.running and waited_s > self.plan.topology.ready_timeout_s:
            member.running.stop()
        return False

    def _member(self, process_id: str) -> _Member:
        return next(member for member in self._members if member.plan.id == process_id)

    def stop(self) -> None:
        """Ends every process; raises `FleetError` where one could not be killed."""
        began_s = time.monotonic()
        self._tell("stopping")
        hangs = self._sampler is not None and not self._sampler.stop()
        self._sampler = None
        if hangs:
            self._tell("a sample hangs, and is waited for no longer; GPUs are not asked again")
        members = [m for m in reversed(self._members) if m.running]
        for member in members:
            if member.running:
                member.running.request_stop()
        left: dict[str, list[int]] = {}
        for member in members:
            if member.running:
                if pids := member.running.stop():
                    left[member.plan.id] = pids
                if member.state != "failed":
                    member.state = "stopped"
                    member.exit_status = member.running.exit_status()
                    member.ended_unix_s = time.time()
        self.timings["stop_s"] = time.monotonic() - began_s
        unkilled = "; ".join(f"{id_}: pid {', '.join(map(str, p))}" for id_, p in left.items())
        if unkilled:
            self._state, self._reason = "failed", f"could not be killed: {unkilled}"
        elif self._state != "failed":
            self._state = "stopped"
        self._ended_unix_s = self._ended_unix_s or time.time()
        self._write()
        self._transcript.tell(f"{self._state} after {self.timings['stop_s']:.1f} s")
        if unkilled:
            self._transcript.tell(f"could not be killed: {unkilled}")
        elif members and not hangs:
            self._tell_gpus(lambda: sample_until_free(self.plan.gpu_plan))
        self._transcript.close()
        if unkilled:
            raise FleetError(
                f"processes could not be killed in {guard.GIVE_UP_S:.0f} s ({unkilled}): they wait "
                "in the kernel, as for a GPU's driver, and may still hold GPUs and ports"
            )

    def _tell(self, text: str) -> None:
        self._transcript.tell(text)
        self._progress(text)

    def _progress(self, text: str) -> None:
        """Tells who follows it. Where nobody can be told any more (a pipe whose reader has ended, a
        full disk, a file that was closed) that shall not keep a fleet from ending."""
        with contextlib.suppress(OSError, ValueError):
            self.on_progress(text)

    def _gpus(self, sample: Callable[[], list[GpuSample]]) -> list[GpuSample]:
        wanted = self.plan.gpu_plan
        return [gpu for gpu in sample() if gpu.index in wanted] if wanted else []

    def _tell_gpus(self, sample: Callable[[], list[GpuSample]]) -> None:
        gpus: list[GpuSample] = []
        with contextlib.suppress(GpuError):
            gpus = self._gpus(sample)
        if gpus:
            numbers = ", ".join(str(gpu.index) for gpu in gpus)
            kinds = ", ".join(dict.fromkeys(gpu.name for gpu in gpus))
            self._transcript.tell(f"GPUs {numbers} ({kinds}): {memory_of(gpus)} in use")

    def _tell_room(self) -> None:
        """What fits into the KV caches: as estimated, and once engines have said it, as they do."""
        memory: dict[int, int] = {}
        with contextlib.suppress(GpuError):
            memory = {gpu.index: gpu.memory_total_bytes for gpu in self._gpus(sample_gpus)}
        holds = {m.plan.id: m.holds.kv_tokens for m in self._members if m.holds.kv_tokens}
        for line in sizing.lines(self.plan, memory, holds):
            if line not in self._room:
                self._room.append(line)
                self._tell(line)

    def _table(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [
            ("process", "role", "url", "ready after", "KV tokens", "GPUs", "memory in use")
        ]
        used: dict[int, GpuSample] = {}
        with contextlib.suppress(GpuError):
            used = {gpu.index: gpu for gpu in self._gpus(sample_gpus)}
        for member in self._members:
            p = member.plan
            own = [used[index] for index in p.gpus if index in used]
            rows.append((
                p.id, p.role or "-", p.url, f"{member.ready_after_s or 0.0:.1f} s",
                f"{member.holds.kv_tokens:,}" if member.holds.kv_tokens else "-",
                ", ".join(map(str, p.gpus)) or "-", memory_of(own) if own else "-",
            ))  # fmt: skip
        return rows

    def _sample_every(self, interval_s: float) -> Sampler:
        self._guardians |= {
            m.plan.id: (m.running.pid, m.running.started)
            for m in self._members
            if m.running and m.plan.node is None
        }
        engines = Engines({w.id: w.url for w in self.plan.workers}, self.plan.load_gauges)
        return Sampler(
            self.plan.run_dir,
            self._guardians,
            engines,
            self.plan.gpu_plan,
            interval_s,
            self.plan.topology.log_max_bytes,
        )

    def _start_all(self, waiting: list[_Member]) -> None:
        starting: list[_Member] = []
        told_s = time.monotonic()
        while waiting or starting:
            while waiting and len(starting) < self.plan.parallel_starts:
                member = waiting.pop(0)
                self._start(member)
                starting.append(member)
            self.check()
            for member in list(starting):
                self._look(member)
                if member.state == "ready":
                    starting.remove(member)
            if starting and time.monotonic() - told_s >= _TELL_EVERY_S:
                told_s = time.monotonic()
                for member in starting:
                    waited_s = told_s - member.started_s
                    waiting_for = "starting"
                    if member.plan.attached:
                        waiting_for = f"{member.plan.health_url}: {member.silence}"
                    self._progress(f"{member.plan.id}: {waiting_for}, {waited_s:.0f} s")
            time.sleep(_POLL_S)

    def _learn_capacities(self) -> None:
        """Asks workers how much KV they hold, and tells the router that and not what was asked for:
        one that lets in more than fits has everything recomputed. After the warm-up: SGLang says
        what its host tier holds when it has prefilled something."""
        groups = [group for group in self.plan.topology.workers for _ in range(group.size)]
        workers = [member for member in self._members if member.plan.role is not None]
        for member, group in zip(workers, groups, strict=True):
            plan = member.plan
            found = reported(self.plan.engine.name, plan.url, plan.keys.key)
            kv = worker_kv(self.plan.topology, group)
            asked = (kv.capacity_tokens or 0) * found.ranks
            host_tokens = found.host_tokens or (kv.host_tokens or 0) * found.ranks
            member.holds = Holds(
                found.kv_tokens or kv.capacity_tokens, host_tokens or None, found.ranks
            )
            if found.kv_tokens and found.kv_tokens < 0.99 * asked:
                self._tell(
                    f"{plan.id}: holds {found.kv_tokens:,} KV tokens, not the {asked:,} asked for"
                )
            if kv.has_host_tier and not host_tokens:
                self._tell(
                    f"warning: {plan.id}: how many tokens its host tier holds is not known, so "
                    "that admission counts it as none; host_kv_tokens says it (not host_kv_gb)"
                )
            if found.ranks > 1:
                self._tell(
                    f"warning: {plan.id}: {found.ranks} data-parallel ranks, each with a KV cache "
                    f"of its own: the router takes their {found.kv_tokens:,} tokens for one cache, "
                    "and does not know which rank the engine gives a request to"
                )
        if self.plan.topology.router.kind == "deltaserve":
            planning.write_router_config(self.plan, {m.plan.id: m.holds for m in workers})

    def _warm_up(self) -> None:
        kernels = "kernels that are compiled and " if self.plan.topology.warms_up else ""
        self._tell(f"warming up: {kernels}workers that connect at first use")
        try:
            took_s = warm_up(self.plan, self.check)
        except WarmUpError as error:
            self._fail(next(m for m in self._members if m.plan is error.worker), str(error))
        self.timings["warm_up_s"] = took_s
        self._tell(f"warm after {took_s:.0f} s")

    def _freeze(self, workers: Iterable[Process]) -> None:
        if self.plan.engine.name == "sglang" and self.plan.topology.freeze_gc:
            freeze(workers, self._tell)

    def _start(self, member: _Member) -> None:
        process = member.plan
        member.started_s = time.monotonic()
        if process.attached:
            self._tell(f"{process.id}: attaching to {process.url}")
            member.state = "starting"
            return
        self._tell(f"{process.id}: starting ({process.url})")
        argv, environment = process.started()
        # An interrupt in its midst would leave a process that this fleet does not know of, and that
        # runs on, with its port and GPU, when the fleet has said that it ended.
        with held():
            member.running = Supervised(
                argv,
                environment,
                process.log,
                self.plan.run_dir,
                process.stop_signal,
                self.plan.topology.log_max_bytes,
                # One that is killed leaves sockets and files; a placed one has them on its node.
                own_temporary=process.node is None and "TMPDIR" not in process.environment,
                # Of a series of starts that fail the log before is that of what served.
                keeps_previous_log=member.served,
            )
        member.state, member.served = "starting", False
        self._write()

    def _look(self, member: _Member) -> None:
        """Moves a starting process to ready where it is; raises `FleetError` where it cannot be."""
        waited_s = time.monotonic() - member.started_s
        if member.plan.failures and (line := _said(member.plan.log, member.plan.failures)):
            self._fail(member, f"{member.plan.id}: the engine started without our plugin: {line}")
        member.silence = _silence(member.plan.health_url)
        if member.silence is None:
            self._check_whose(member)
            if member.plan.unbind and member.running:
                member.running.unbind()
            member.state, member.served = "ready", True
            member.ready_after_s = self.timings[f"ready_s.{member.plan.id}"] = waited_s
            self._tell(f"{member.plan.id}: ready after {waited_s:.0f} s")
            self._write()
        elif waited_s > self.plan.topology.ready_timeout_s:
            what = f"{member.plan.id} was not ready after {waited_s:.0f} s"
            self._fail(member, f"{what}: {member.plan.health_url}: {member.silence}")

    def _check_whose(self, member: _Member) -> None:
        """Raises `FleetError` where the answer came from a process that is not of this fleet."""
        port = member.plan.ports.get("http")
        if member.plan.node is not None:  # what runs here only stands for it
            return
        if member.running and port and not member.running.listens_on(port):
            self._fail(member, f"{member.plan.id}: another process answers on its port {port}")

    def _fail(self, member: _Member, what: str, status: int | None = None) -> NoReturn:
        member.state = self._state = "failed"
        member.exit_status = status
        member.reason = self._reason = what
        member.ended_unix_s = self._ended_unix_s = time.time()
        self._write()
        self._transcript.tell(what)
        if member.plan.attached:
            raise FleetError(what)
        tail = log_tail(member.plan.log, _LOG_LINES)
        raise FleetError(f"{what}; the end of {member.plan.log}:\n{tail}")

    def _write(self) -> None:
        """Writes ``fleet.json``. On a full disk a fleet that has come up goes on without, and every
        one ends; one that nobody could find does not come up."""
        summary = {
            "state": self._state,
            "reason": self._reason,
            "made_unix_s": self._made_unix_s,
            "ready_unix_s": self._ready_unix_s,
            "ended_unix_s": self._ended_unix_s,
            "router_url": self.router_url,
            "timings": self.timings,
        }
        try:
            write_record(self.plan, summary, [_state_of(member) for member in self._members])
        except OSError as error:
            if self._state in ("planned", "starting", "ready") and not self._has_come_up:
                raise
            self._progress(f"fleet.json is out of date: {error.strerror}")


@contextlib.contextmanager
def fleet(
    topology: Topology,
    run_dir: Path,
    on_progress: Progress | None = None,
    behind: Fleet | None = None,
) -> Iterator[Fleet]:
    """Brings `topology` up, its files under `run_dir`, and ends it when the block ends in any way.

    `behind` is the fleet whose workers `topology` is attached to, where this process started them.

    Raises `InputError` when it cannot be started as asked, `FleetError` when a process dies.
    """
    run_dir = run_dir.absolute()
    with (
        claim(run_dir) as lock,
        announced(lock, topology.name),  # planning may take long, and fleet.json is of a plan
        contextlib.ExitStack() as kept,
    ):
        made = reserved_plan(topology, run_dir, kept)
        running = Fleet(made, on_progress or (lambda _: None), behind=behind)
        try:
            running.start()
            yield running
        finally:
            # A second Ctrl-C would leave a record of a fleet that is ready, and its processes to
            # the guardians. The end is bounded: what does not leave is killed.
            with held():
                running.stop()


def reserved_plan(topology: Topology, run_dir: Path, kept: contextlib.ExitStack) -> Plan:
    """A plan of `topology` whose ports and GPUs `kept` keeps from other fleets."""
    for attempts_left in reversed(range(_PLAN_ATTEMPTS)):
        made = planning.plan(topology, run_dir)
        try:
            kept.enter_context(reserved(made.ports, made.gpu_plan))
            break
        except TakenError:
            # A fleet planned at the same moment may have been given the same free ports or GPUs.
            chosen_here = topology.base_port == 0 or (made.gpu_plan and not named_gpus(topology))
            if not chosen_here or not attempts_left:
                raise
    return made


def log_tail(log: Path, lines: int) -> str:
    """The last `lines` lines of a log, and of what it held before it was begun anew."""
    found: list[bytes] = []
    for path in (log, Path(guard.older_log(str(log)))):
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 64 * 1024))
            found = file.read().splitlines() + found
        if len(found) >= lines:
            break
    return b"\n".join(found[-lines:]).decode(errors="replace")


def _state_of(member: _Member) -> dict[str, Any]:
    running = member.running
    return {
        "state": member.state,
        "pid": running.pid if running else None,
        "started_unix_s": running.started_unix_s if running else None,
        "started": running.started if running else None,
        "mark": running.mark if running else None,
        "temporary_folder": running and running.temporary_folder and str(running.temporary_folder),
        "ready_after_s": member.ready_after_s,
        "ended_unix_s": member.ended_unix_s,
        "exit_status": member.exit_status,
        "reason": member.reason,
    } | {
        key: tokens
        for key, tokens in (
            ("kv_capacity_tokens", member.holds.kv_tokens),
            ("host_kv_tokens", member.holds.host_tokens),
        )
        if tokens
    }


def _silence(url: str) -> str | None:
    """Why `url` does not count as answered, or None where it does."""
    try:
        status, _ = call("GET", url, timeout_s=2.0)
    except FAILURES as error:
        return reason(error)
    return None if status == 200 else f"HTTP {status}"


def _said(log: Path, failures: tuple[str, ...]) -> str | None:
    with log.open(errors="replace") as file:
        return next((line.strip() for line in file if any(f in line for f in failures)), None)


def _status(status: int) -> str:
    by_signal = status - 128 in signal.valid_signals()
    return f"signal {status - 128}" if by_signal else f"exit status {status}"
