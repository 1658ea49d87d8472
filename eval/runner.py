"""Runs the matrix: for each run a fresh fleet, one replay, one folder that says what happened.

Owns order, resumption, progress and the exit status. Knows `launch` as "a fleet that comes up and
goes down" and replay as a command that writes a folder; measures nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import orjson

import deltaserve
from deltaserve.errors import InputError
from eval import provenance
from eval.experiment import Experiment, PlannedRun, Replay, plan_runs
from eval.identity import engine_words
from eval.progress import Progress
from eval.records import TraceFacts, read_run
from eval.secrets import without_secrets
from eval.traces import (
    DELTASERVE,
    flags,
    possible_cached_tokens,
    prepare_trace,
    resolve_scale,
    trace_facts,
    write_facts,
)
from eval.validity import cold_checks, violations
from launch.cache import make_folder
from launch.supervised import Supervised
from replay.trace import digest

_LOOK_EVERY_S = 0.25


class Fleet(Protocol):
    """Workers and a router that are up (`launch.fleet` gives one)."""

    @property
    def router_url(self) -> str | None: ...
    @property
    def workers(self) -> Sequence[Any]: ...
    @property
    def engine_versions(self) -> Mapping[str, str]: ...
    @property
    def timings(self) -> Mapping[str, float]: ...
    def check(self) -> None:
        """Raises when a process of the fleet has died since it was started."""


@dataclass(frozen=True)
class Site:
    """How fleets are made here.

    `load` makes a topology from a name and overrides, and `check` raises `InputError` for one that
    cannot be started here; `vocab_size` is of its model, None where unknown; `engine` the versions
    of the engine that it would start, empty where that is known only once it runs.
    """

    load: Callable[[str, list[str]], Any]
    check: Callable[[Any], object]
    fleet: Callable[[Any, Path, Callable[[str], None]], AbstractContextManager[Fleet]]
    describe: Callable[[Any], dict[str, Any]]
    vocab_size: Callable[[Any], int | None]
    end: Callable[[Path], int]
    replay: Sequence[str] = (*DELTASERVE, "replay", "run")
    clock: Callable[[], float] = time.monotonic
    engine: Callable[[Any], Mapping[str, str]] = lambda _topology: {}


def launch_site() -> Site:
    """The real site: topologies and fleets of `launch`."""
    import launch
    from launch.control import down
    from launch.models import is_shape, shape_config
    from launch.policies import with_policy

    def load(name: str, overrides: list[str]) -> launch.Topology:
        topology = launch.load_topology(name, overrides)
        if topology.router.kind == "none":
            raise InputError(f"{name}: router.kind is none; an experiment goes through a router")
        return with_policy(topology)

    def vocab_size(topology: launch.Topology) -> int | None:
        if is_shape(topology.model):
            return int(shape_config(topology.model)["vocab_size"])
        config = Path(topology.model) / "config.json"
        if config.is_file():
            found = orjson.loads(config.read_bytes()).get("vocab_size")
            return None if found is None else int(found)
        return None

    return Site(
        load=load,
        check=lambda topology: launch.plan(topology, Path()),
        fleet=lambda topology, folder, say: launch.fleet(topology, folder, on_progress=say),
        describe=lambda topology: topology.model_dump(mode="json"),
        vocab_size=vocab_size,
        end=lambda folder: down(folder) if (folder / "fleet.json").is_file() else 0,
        engine=lambda topology: launch.plan(topology, Path()).engine.versions,
    )


@dataclass
class Summary:
    """What became of the matrix."""

    complete: int = 0
    kept: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    invalid: list[str] = field(default_factory=list)


def topology_overrides(run: PlannedRun) -> list[str]:
    """The arm's policy and its parameters, and the run's own keys of the topology, as `launch`
    overrides (``key=value``)."""
    arm = run.arm
    words = []
    if arm.policy is not None:
        words.append(f"router.policy={_toml(arm.policy)}")
    words += [f"router.params.{key}={_toml(value)}" for key, value in arm.policy_params.items()]
    return words + [f"{key}={_toml(value)}" for key, value in _flat(run.set)]


def load_topologies(
    site: Site, experiment: Experiment, runs: Iterable[PlannedRun]
) -> dict[str, Any]:
    """The topology of each cell, in the file's order. Raises `InputError` for one that is wrong."""
    found: dict[str, Any] = {}
    for run in sorted(runs, key=lambda run: cell_order(experiment, run)):
        if run.cell not in found:
            found[run.cell] = site.load(run.arm.topology, topology_overrides(run))
    return found


def run_experiment(
    experiment: Experiment,
    output: Path,
    *,
    site: Site,
    source: Mapping[str, Any],
    progress: Progress,
    only: list[str] | None = None,
) -> Summary:
    """Executes every run that has no complete folder yet, and returns what became of them.

    `source` says how the experiment was given (file, overrides) and goes into each manifest.
    Bad topologies and traces raise `InputError` before any process starts. A run that fails is
    recorded with its reason, and the rest goes on. KeyboardInterrupt (and SIGTERM) stops the
    fleet and propagates; the interrupted run is redone next time.
    """
    runs = plan_runs(experiment, only)
    topologies = load_topologies(site, experiment, plan_runs(experiment))
    cells = {run.cell for run in runs}
    for cell in cells:
        site.check(topologies[cell])
    engines = {cell: site.engine(topologies[cell]) for cell in cells}
    # Of all arms, those left out with `only` as well: their prompts must be the same ones.
    vocab_size = shared_vocab(site, topologies.values())
    make_folder(output)
    traces = {
        repeat: prepare_trace(experiment.with_draw(repeat), output)
        for repeat in sorted({run.repeat for run in runs})
    }
    todo = [
        run
        for run in runs
        if not is_complete(
            output / run.folder,
            run,
            identity(run, traces[run.repeat], vocab_size, engines[run.cell]),
        )
    ]
    (output / "experiment.json").write_bytes(
        orjson.dumps(
            without_secrets({"experiment": experiment.model_dump(), "source": dict(source)}),
            option=orjson.OPT_INDENT_2,
        )
    )
    summary = Summary(kept=len(runs) - len(todo))
    if summary.kept:
        progress.say(f"{summary.kept} of {len(runs)} runs are complete already and are kept")
    for run in todo:
        left = site.end(output / run.folder)
        if left:
            progress.say(f"{run.folder}: ended {left} processes that an earlier runner left")
    started_s = site.clock()
    spent_s = measured_s(output, runs)
    for index, run in enumerate(todo, start=1):
        expected_s = expected_run_s(experiment, run, spent_s)
        left_s = _budget_left_s(experiment, site.clock() - started_s)
        if expected_s > left_s:
            summary.skipped.append(str(run.folder))
            progress.say(
                f"{run.folder}: skipped, about {expected_s / 60:.1f} min but only "
                f"{max(left_s, 0) / 60:.1f} min of the budget are left"
            )
            continue
        progress.say(f"[{index}/{len(todo)}] {run.folder}")
        began_s = site.clock()
        manifest = _execute(
            run,
            experiment,
            output,
            traces[run.repeat],
            topologies[run.cell],
            site=site,
            source=source,
            vocab_size=vocab_size,
            order=runs.index(run) + 1,
            progress=progress,
        )
        spent_s.setdefault(run.cell, []).append(site.clock() - began_s)
        _account(summary, run, manifest, progress)
    return summary


def _account(
    summary: Summary, run: PlannedRun, manifest: dict[str, Any], progress: Progress
) -> None:
    name = str(run.folder)
    if manifest["state"] != "complete":
        summary.failed.append(name)
        progress.say(f"{name}: failed: {manifest['reason']}")
        return
    summary.complete += 1
    if manifest["violations"]:
        summary.invalid.append(name)
    for violation in manifest["violations"]:
        progress.say(f"{name}: invalid ({violation['rule']}): {violation['detail']}")
    minutes = manifest["timings"]["total_s"] / 60
    progress.say(f"{name}: done in {minutes:.1f} min, {manifest['results']} results")


def _execute(
    run: PlannedRun,
    experiment: Experiment,
    output: Path,
    trace: Path,
    topology: Any,
    *,
    site: Site,
    source: Mapping[str, Any],
    vocab_size: int | None,
    order: int,
    progress: Progress,
) -> dict[str, Any]:
    folder = output / run.folder
    provenance.fresh_folder(folder)
    replay = resolve_scale(trace, run.replay)
    if replay.vocab_size is None:
        replay = replay.model_copy(update={"vocab_size": vocab_size})
    facts = trace_facts(trace, replay)
    write_facts(folder, facts)
    described = site.describe(topology)
    manifest: dict[str, Any] = {
        "state": "running",
        "digest": run.digest,
        "identity": identity(run, trace, vocab_size, {}),
        "experiment": experiment.name,
        "source": dict(source),
        "arm": run.arm.model_dump(),
        "load": run.load,
        "repeat": run.repeat,
        "order": order,
        "cell_order": cell_order(experiment, run),
        "baseline": experiment.baseline_arm,
        "seed": experiment.seed,
        "topology": described,
        "policy": described.get("router", {}).get("policy", run.arm.policy),
        "policy_params": described.get("router", {}).get("params", run.arm.policy_params),
        "trace": {"path": facts.path, "sha256": facts.sha256, "requests": facts.planned},
        "length_scale": facts.length_scale,
        "slo": experiment.slo.model_dump(),
        "validity": experiment.validity.model_dump(),
        "analysis": experiment.analysis.model_dump(),
        "hardware": provenance.hardware(),
        "versions": provenance.versions(),
        "git": provenance.git(),
        "started_at": provenance.now(),
        "timings": {},
    }
    provenance.write_manifest(folder, manifest)
    began_s = time.monotonic()
    try:
        with site.fleet(topology, folder, progress.detail) as fleet:
            manifest["timings"]["fleet_up_s"] = time.monotonic() - began_s
            manifest["timings"]["fleet"] = dict(fleet.timings)
            manifest["versions"]["engines"] = dict(fleet.engine_versions)
            manifest["identity"] = identity(run, trace, vocab_size, fleet.engine_versions)
            manifest["workers"] = [_plain(worker) for worker in fleet.workers]
            if fleet.router_url is None:
                raise InputError(f"{run.arm.topology}: has no router")
            command = replay_command(site.replay, trace, folder, fleet.router_url, replay)
            manifest["replay_command"] = command
            provenance.write_manifest(folder, manifest)
            replay_began_s = time.monotonic()
            failure = _replay(command, folder, facts.planned, progress, fleet.check)
            manifest["timings"]["replay_s"] = time.monotonic() - replay_began_s
            down_began_s = time.monotonic()
        manifest["timings"]["fleet_down_s"] = time.monotonic() - down_began_s
    except Exception as error:  # the matrix goes on; the reason is kept
        # The rest of the message is the end of a log, which the folder holds whole.
        first_line = next(iter(str(error).splitlines()), "").rstrip(":")
        failure = f"{type(error).__name__}: {first_line}"
    manifest["timings"]["total_s"] = time.monotonic() - began_s
    manifest["ended_at"] = provenance.now()
    _conclude(folder, manifest, failure, experiment, _with_possible(folder, trace, replay, facts))
    provenance.write_manifest(folder, manifest)
    return manifest


def cell_order(experiment: Experiment, run: PlannedRun) -> int:
    """The place of the run's cell in the file's own order of loads and arms."""
    cells = [(load, arm.name) for arm in experiment.arms for load in experiment.loads_of(arm)]
    return cells.index((run.load, run.arm.name))


def _with_possible(folder: Path, trace: Path, replay: Replay, facts: TraceFacts) -> TraceFacts:
    """`facts` with what this run's own requests can have left in caches, by when they were sent."""
    requests = read_run(folder).all_requests
    sent = requests[requests["sent_s"].notna()]
    answered = requests[requests["first_token_s"].notna()]
    return dataclasses.replace(
        facts,
        possible_cached_tokens=possible_cached_tokens(
            trace,
            replay,
            dict(zip(sent["request_id"], sent["sent_s"], strict=True)),
            dict(zip(answered["request_id"], answered["first_token_s"], strict=True)),
        ),
    )


def _conclude(
    folder: Path,
    manifest: dict[str, Any],
    failure: str | None,
    experiment: Experiment,
    facts: TraceFacts,
) -> None:
    write_facts(folder, facts)
    replayed = folder / "replay.json"
    if replayed.is_file():
        with contextlib.suppress(orjson.JSONDecodeError):
            manifest["replay"] = orjson.loads(replayed.read_bytes())
    run = read_run(folder)
    manifest["results"] = len(run.all_requests)
    manifest["broken_lines"] = run.broken_lines
    manifest["coldness"] = [vars(first) for first in cold_checks(run.all_requests)]
    manifest["state"] = "complete" if failure is None else "failed"
    manifest["reason"] = failure
    run.manifest.update(manifest)
    manifest["violations"] = [vars(found) for found in violations(run, experiment.validity)]


def replay_command(
    program: Sequence[str], trace: Path, folder: Path, url: str, replay: Replay
) -> list[str]:
    """The `replay run` command line of one run."""
    settings = replay.model_dump(exclude={"fit_input_tokens"}, exclude_none=True)
    return [*program, str(trace), "--url", url, "--output", str(folder), *flags(settings)]


def shared_vocab(site: Site, topologies: Iterable[Any]) -> int | None:
    """The vocabulary that every arm's model has, so that all get the same prompts."""
    sizes = [size for size in map(site.vocab_size, topologies) if size is not None]
    return min(sizes, default=None)


def _replay(
    command: list[str],
    folder: Path,
    planned: int,
    progress: Progress,
    check_fleet: Callable[[], None],
) -> str | None:
    """Runs the replay; None, or why it failed. It ends with this process, whatever ends that.

    `check_fleet` raises when a process of the fleet has died: it is asked all the while and once
    more at the end, for a run on seven of eight workers measured something else than its arm.
    """
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    log_path = logs / "replay.log"
    results = _Lines(folder / "requests.jsonl")
    process = Supervised(command, os.environ, log_path, Path.cwd())
    try:
        while (status := process.exit_status()) is None:
            check_fleet()
            progress.count("replaying", results.count(), planned)
            time.sleep(_LOOK_EVERY_S)
    finally:
        process.stop()
    check_fleet()
    done = results.count()
    progress.count("replayed", done, planned)
    if status == 0:
        return None
    if status > 128:
        name = signal.Signals(status - 128).name
        return f"the replay was ended by {name} after {done} of {planned} results"
    last = _last_line(log_path)
    return f"the replay exited with {status}: {last or 'see logs/replay.log'}"


def identity(
    run: PlannedRun, trace: Path, vocab_size: int | None, engine: Mapping[str, str]
) -> dict[str, Any]:
    """What the run is a run of, beside its settings: goes into its manifest."""
    return {
        "trace_sha256": digest(trace),
        "seed": run.replay.seed,
        "vocab_size": run.replay.vocab_size or vocab_size,
        "splice_outputs": run.replay.splice_outputs,
        "engine": engine_words(engine),
        "deltaserve": deltaserve.__version__,
    }


def is_complete(folder: Path, run: PlannedRun, expected: Mapping[str, Any] | None = None) -> bool:
    """Whether `folder` holds the finished run; `InputError` where it was one of other settings, or
    its identity, as far as both say, is not what is `expected` now."""
    manifest = provenance.read_manifest(folder)
    if manifest is None or manifest.get("state") != "complete":
        return False
    if manifest.get("digest") != run.digest:
        raise InputError(
            f"{folder}: holds a finished run with other settings than {run.cell} has now; "
            "choose another --output, or remove that folder"
        )
    was = manifest.get("identity") or {}
    for name, value in (expected or {}).items():
        if value is not None and was.get(name) is not None and was[name] != value:
            raise InputError(
                f"{folder}: holds a finished run with {name.replace('_', ' ')} {was[name]}, which "
                f"is {value} now; choose another --output, or remove that folder"
            )
    return True


def measured_s(output: Path, runs: Sequence[PlannedRun]) -> dict[str, list[float]]:
    """What the finished runs under `output` took in all, by cell."""
    found: dict[str, list[float]] = {}
    for run in runs:
        manifest = provenance.read_manifest(output / run.folder)
        if manifest is not None and manifest.get("state") == "complete":
            found.setdefault(run.cell, []).append(float(manifest["timings"]["total_s"]))
    return found


def expected_run_s(
    experiment: Experiment, run: PlannedRun, spent_s: Mapping[str, list[float]]
) -> float:
    """What runs of the same cell took, else runs of any, else what the file says, else 0."""
    known = spent_s.get(run.cell) or [s for times in spent_s.values() for s in times]
    return sum(known) / len(known) if known else 60 * (experiment.run_minutes or 0.0)


def _budget_left_s(experiment: Experiment, elapsed_s: float) -> float:
    if experiment.budget_minutes is None:
        return float("inf")
    return experiment.budget_minutes * 60 - elapsed_s


class _Lines:
    """Counts the lines of a file that grows, reading each byte once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0
        self._lines = 0

    def count(self) -> int:
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._read_bytes)
            grown = file.read()
            self._read_bytes += len(grown)
            self._lines += grown.count(b"\n")
        return self._lines


def _last_line(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip().removeprefix("error: ") if lines else ""


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | dict | list) else str(value)


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _toml(value: Any) -> str:
    # JSON's strings, numbers, booleans and arrays are TOML's.
    return orjson.dumps(value).decode()


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Within it SIGTERM raises KeyboardInterrupt, so that a stopped runner stops its fleet."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def default_output(experiment: Experiment) -> Path:
    """The folder of the file's `output` key, else `out/<name>` here."""
    return Path(experiment.output or os.path.join("out", experiment.name))
