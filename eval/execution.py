"""One run: a fleet comes up, the trace is replayed through it, and a folder says what happened.

Owns a run's folder and manifest. Knows nothing of the matrix that the run is part of; measures
nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

import deltaserve
from deltaserve.errors import InputError
from eval import provenance
from eval.endpoint import AttachedFleet, Endpoint
from eval.experiment import Experiment, Phases, Replay
from eval.identity import engine_words
from eval.matrix import PlannedRun
from eval.progress import Progress
from eval.records import TraceFacts, read_run
from eval.site import Site
from eval.traces import (
    flags,
    possible_cached_tokens,
    resolve_scale,
    trace_facts,
    write_facts,
)
from eval.validity import cold_checks, violations
from launch.supervised import Supervised
from replay.options import NOTHING_ANSWERED
from replay.results import RESULTS_FILE, read_results
from replay.trace import digest

_LOOK_EVERY_S = 0.25


@dataclass(frozen=True)
class Assignment:
    """One run of a matrix, the `order`th to begin, with what executing it needs; its folder is in
    `output`."""

    run: PlannedRun
    experiment: Experiment
    output: Path
    trace: Path
    topology: Any
    site: Site
    source: Mapping[str, Any]
    vocab_size: int | None
    order: int

    @property
    def folder(self) -> Path:
        return self.output / self.run.folder


@dataclass(frozen=True)
class Began:
    """A run whose folder has its first manifest: what is known before anything is sent."""

    manifest: dict[str, Any]
    facts: TraceFacts


def begin_manifest(
    assignment: Assignment, replay: Replay, more: Mapping[str, Any] | None = None
) -> Began:
    """Writes the manifest of a run that begins, with what is in `more` too, and `trace.json` beside
    it."""
    run, experiment, trace = assignment.run, assignment.experiment, assignment.trace
    folder = assignment.folder
    facts = trace_facts(trace, replay)
    described = assignment.site.describe(assignment.topology)
    manifest: dict[str, Any] = {
        "state": "running",
        "digest": run.digest,
        "identity": identity(run, trace, assignment.vocab_size, {}),
        "experiment": experiment.name,
        "description": experiment.description,
        "source": dict(assignment.source),
        "arm": run.arm.model_dump(),
        "load": run.load,
        "repeat": run.repeat,
        "order": assignment.order,
        "cell_order": cell_order(experiment, run),
        "seed": experiment.seed,
        "topology": described,
        "policy": described.get("router", {}).get("policy", run.arm.policy),
        "policy_params": described.get("router", {}).get("params", run.arm.policy_params),
        "trace": {"path": facts.path, "sha256": facts.sha256, "requests": facts.planned},
        "length_scale": facts.length_scale,
        "prompt_cost": prompt_cost(experiment, assignment.output),
        **judgement(experiment),
        "hardware": provenance.hardware(),
        "versions": provenance.versions(),
        "git": provenance.git(),
        "started_at": provenance.now(),
        "timings": {},
        **(more or {}),
    }
    # First: a folder without a manifest is not known for a run's.
    provenance.write_manifest(folder, manifest)
    write_facts(folder, facts)
    return Began(manifest, facts)


def prompt_cost(experiment: Experiment, output: Path) -> dict[str, Any] | None:
    """By what the experiment's lengths were multiplied, and what prompts were measured to
    cost; None where it does not ask for that."""
    cost = experiment.prompt_cost
    if cost is None or cost.factor is None:
        return None
    found = provenance.read_prompt_cost(output)
    if found.get("factor") == cost.factor:
        return found
    return {"factor": cost.factor, "tokens": round(cost.factor * cost.tokens), "seconds": {}}


def judgement(experiment: Experiment) -> dict[str, Any]:
    """What a manifest says of how its run is judged: by which objective and rules, in which
    measures, against which arm."""
    return {
        "slo": experiment.slo.model_dump(),
        "validity": experiment.validity.model_dump(),
        "analysis": experiment.analysis.model_dump(),
        "baseline": experiment.baseline_arm,
    }


def execute(assignment: Assignment, progress: Progress) -> dict[str, Any]:
    """Runs the assignment's fleet and the replay through it; returns the run's manifest."""
    run, experiment, trace = assignment.run, assignment.experiment, assignment.trace
    topology, site, vocab_size = assignment.topology, assignment.site, assignment.vocab_size
    folder = assignment.folder
    provenance.fresh_folder(folder)
    replay = resolve_scale(trace, run.replay)
    if replay.vocab_size is None:
        replay = replay.model_copy(update={"vocab_size": vocab_size})
    began = begin_manifest(assignment, replay)
    manifest, facts = began.manifest, began.facts
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
            command = replay_command(
                site.replay, trace, folder, fleet.router_url, replay, run.phases
            )
            if isinstance(topology, Endpoint):
                manifest["gpus"] = topology.gpus
                command += [word for text in topology.headers for word in ("--header", text)]
            if isinstance(fleet, AttachedFleet) and fleet.flushed_by is None:
                # What no run ever sent is in no cache; sessions and times stay those of the seed.
                manifest["prompt_seed"] = time.time_ns()
                command += ["--prompt-seed", str(manifest["prompt_seed"])]
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
    conclude(folder, manifest, failure, experiment, trace, replay, facts)
    provenance.write_manifest(folder, manifest)
    return manifest


def cell_order(experiment: Experiment, run: PlannedRun) -> int:
    """The place of the run's cell in the file's own order of loads and arms; levels of a search
    come by arm and load."""
    if experiment.search is not None:
        arms = [arm.name for arm in experiment.arms]
        return arms.index(run.arm.name) * 1_000_000 + round(float(run.load or 0) * 100)
    cells = [(load, arm.name) for arm in experiment.arms for load in experiment.loads_of(arm)]
    return cells.index((run.load, run.arm.name))


def _with_possible(folder: Path, trace: Path, replay: Replay, facts: TraceFacts) -> TraceFacts:
    """`facts` with what this run's own requests can have left in caches, by when they were sent."""
    results = read_results(folder) if (folder / RESULTS_FILE).is_file() else []
    return dataclasses.replace(
        facts, possible_cached_tokens=possible_cached_tokens(trace, replay, results)
    )


def conclude(
    folder: Path,
    manifest: dict[str, Any],
    failure: str | None,
    experiment: Experiment,
    trace: Path,
    replay: Replay,
    facts: TraceFacts,
) -> None:
    """Adds to `manifest` what the finished run's files say: its state (`failure` None: complete),
    coldness, rules that it broke."""
    write_facts(folder, _with_possible(folder, trace, replay, facts))
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
    program: Sequence[str],
    trace: Path,
    folder: Path,
    url: str,
    replay: Replay,
    phases: Phases | None = None,
) -> list[str]:
    """The `replay run` command line of one run."""
    settings = replay.model_dump(exclude={"fit_input_tokens"}, exclude_none=True)
    if phases is not None:
        settings |= phases.model_dump(exclude_none=True)
    words = [*program, str(trace), "--url", url, "--output", str(folder), *flags(settings)]
    # Said where it is off, too: a preset may have it on.
    return words if replay.splice_outputs else [*words, "--no-splice-outputs"]


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
        while (status := process.wait(_LOOK_EVERY_S)) is None:
            check_fleet()
            progress.count("replaying", results.count(), planned)
    finally:
        process.stop()
    check_fleet()
    done = results.count()
    progress.count("replayed", done, planned)
    # Where every request failed that is a result: the arm carried nothing.
    if status in (0, NOTHING_ANSWERED):
        return None
    if status - 128 in signal.valid_signals():
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
