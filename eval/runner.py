"""Runs the matrix, or the search: which run comes next, what is kept, what became of them all.

Owns order, resumption, budget and the exit status. How one run is executed is in
`eval.execution`, how fleets are made in `eval.site`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from deltaserve.errors import InputError
from deltaserve.locks import lock_at_once
from eval import provenance
from eval.endpoint import Endpoint
from eval.execution import Assignment, cell_order, execute, identity, judgement
from eval.experiment import Experiment
from eval.identity import topology_differences
from eval.matrix import PlannedRun, plan_runs
from eval.progress import Progress
from eval.records import read_run
from eval.secrets import without_secrets
from eval.site import Site, shared_vocab, with_endpoints
from eval.traces import conversations, prepare_trace
from eval.validity import violations
from launch.cache import make_folder

Execute = Callable[[Assignment, Progress], dict[str, Any]]
"""How one run is executed; it returns the run's manifest."""


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
            arm = run.arm
            found[run.cell] = (
                Endpoint.of(arm)
                if arm.topology is None
                else site.load(arm.topology, topology_overrides(run))
            )
    return found


def run_experiment(
    experiment: Experiment,
    output: Path,
    *,
    site: Site,
    source: Mapping[str, Any],
    progress: Progress,
    only: list[str] | None = None,
    execute: Execute = execute,
) -> Summary:
    """Executes every run that has no complete folder yet, and returns what became of them.

    `source` says how the experiment was given (file, overrides) and goes into each manifest;
    `execute` does one run, as `eval.execution` does unless told otherwise.
    Bad topologies and traces raise `InputError` before any process starts. A run that fails is
    recorded with its reason, and the rest goes on. KeyboardInterrupt (and SIGTERM) stops the
    fleet and propagates; the interrupted run is redone next time.
    """
    site = with_endpoints(site)
    runs = plan_runs(experiment, only)
    if experiment.keep_workers or experiment.search is not None:
        # A folder of this runner alone: another may be at work on other arms or loads.
        with site.keeping(output / "workers" / unit_of(experiment, runs[0])) as kept:
            site = dataclasses.replace(site, fleet=kept)
            return _run_all(experiment, output, site, source, progress, runs, execute)
    return _run_all(experiment, output, site, source, progress, runs, execute)


def unit_of(experiment: Experiment, run: PlannedRun) -> str:
    """What one runner does at a time, as `--only` names it: the run's arm under its load, or the
    arm of a search, whose levels follow from each other."""
    return run.cell if experiment.search is None else run.arm.name


def unfinished_units(
    experiment: Experiment,
    output: Path,
    *,
    site: Site,
    source: Mapping[str, Any],
    progress: Progress,
    only: list[str] | None = None,
) -> dict[str, Any]:
    """The topology of each unit that has runs to be done, in their order. What all runs need
    (folder, traces) is made, and what is wrong with any of them is raised as `InputError`."""
    site = with_endpoints(site)
    runs = plan_runs(experiment, only)
    matrix = _Matrix(experiment, output, site, source, progress, runs, execute)
    searched = experiment.search is not None
    left = [run for run in runs if searched or not matrix.is_complete(run)]
    return {unit_of(experiment, run): matrix.topology(run) for run in left}


def _run_all(
    experiment: Experiment,
    output: Path,
    site: Site,
    source: Mapping[str, Any],
    progress: Progress,
    runs: Sequence[PlannedRun],
    execute: Execute,
) -> Summary:
    matrix = _Matrix(experiment, output, site, source, progress, runs, execute)
    with _alone_on(output, dict.fromkeys(unit_of(experiment, run) for run in runs)):
        if experiment.search is not None:
            return _search_all(experiment, output, matrix, progress, runs)
        return _run_matrix(experiment, output, site, matrix, progress, runs)


@contextlib.contextmanager
def _alone_on(output: Path, units: Iterable[str]) -> Iterator[None]:
    """Keeps a second runner off these units' folders, whose fleets it would take for left behind
    and end. The system lets go of it with this process, however that ends."""
    with contextlib.ExitStack() as held:
        for unit in units:
            lock = held.enter_context((output / f".{unit}.lock").open("ab"))
            with contextlib.suppress(OSError):  # a file system without locks
                if not lock_at_once(lock):
                    raise InputError(
                        f"{output}: another eval run is at work there on arm {unit}; wait for it, "
                        "or choose another --output"
                    )
        yield


def _run_matrix(
    experiment: Experiment,
    output: Path,
    site: Site,
    matrix: _Matrix,
    progress: Progress,
    runs: Sequence[PlannedRun],
) -> Summary:
    """All runs, in their order."""
    todo = [run for run in runs if not matrix.is_complete(run)]
    if experiment.keep_workers:
        keys = [site.worker_key(matrix.topology(run)) for run in runs]
        # By the workers that they need, which come in the order that was drawn.
        todo.sort(key=lambda run: keys.index(site.worker_key(matrix.topology(run))))
    matrix.summary.kept = len(runs) - len(todo)
    if matrix.summary.kept:
        progress.say(f"{matrix.summary.kept} of {len(runs)} runs are complete already and are kept")
    for run in todo:
        matrix.end_left_behind(run)
    spent_s = measured_s(output, runs)
    for index, run in enumerate(todo, start=1):
        if not matrix.fits_budget(run, expected_run_s(experiment, run, spent_s)):
            continue
        progress.say(f"[{index}/{len(todo)}] {run.folder}")
        began_s = site.clock()
        matrix.execute(run, order=runs.index(run) + 1)
        spent_s.setdefault(run.cell, []).append(site.clock() - began_s)
    return matrix.summary


def _search_all(
    experiment: Experiment,
    output: Path,
    matrix: _Matrix,
    progress: Progress,
    arms: Sequence[PlannedRun],
) -> Summary:
    """Each arm's search, in the file's order."""
    from eval.search import by_turns_alone, search_arm, why_no_more

    for arm in dict.fromkeys(run.arm.name for run in sorted(arms, key=_in_order(experiment))):
        told = next(run.arm for run in arms if run.arm.name == arm)
        # Those too that the search does not ask for any more, under another objective.
        for folder in sorted(output.glob(f"{arm}@*/r*")):
            matrix.judge(folder)
        done: list[PlannedRun] = []

        def execute(run: PlannedRun, done: list[PlannedRun] = done) -> bool:
            if matrix.is_complete(run):
                matrix.summary.kept += 1
                done.append(run)
                return True
            matrix.end_left_behind(run)
            spent_s = measured_s(output, done)
            if not matrix.fits_budget(run, expected_run_s(experiment, run, spent_s)):
                return False
            progress.say(str(run.folder))
            done.append(run)
            manifest = matrix.execute(run, order=len(done))
            return bool(manifest["state"] == "complete")

        found = search_arm(experiment, told, output, execute)
        if found is not None:
            words = f"{arm}: capacity {found.value:g} ({found.low:g} to {found.high:g})"
            doubt = f"; {by_turns_alone(found.unjudged)}" if found.unjudged else ""
            missed = found.missed
            why = f"; {why_no_more(missed.load, missed.not_met)}" if missed else ""
            progress.say(words + doubt + why)
    return matrix.summary


def _in_order(experiment: Experiment) -> Callable[[PlannedRun], int]:
    return lambda run: cell_order(experiment, run)


class _Matrix:
    """What all runs of one experiment here have in common, and how one of them is executed.

    Raises `InputError` for a topology or trace that is wrong before anything is started.
    """

    def __init__(
        self,
        experiment: Experiment,
        output: Path,
        site: Site,
        source: Mapping[str, Any],
        progress: Progress,
        runs: Sequence[PlannedRun],
        execute: Execute,
    ) -> None:
        self.summary = Summary()
        self._execute = execute
        self._experiment, self._output = experiment, output
        self._site, self._source, self._progress = site, source, progress
        self._topologies = load_topologies(site, experiment, plan_runs(experiment))
        cells = {run.cell for run in runs}
        for cell in cells:
            site.check(self._topologies[cell])
        self._engines = {cell: site.engine(self._topologies[cell]) for cell in cells}
        # Of all arms, those left out with `only` as well: their prompts must be the same ones.
        self._vocab_size = shared_vocab(site, self._topologies.values())
        make_folder(output)
        self._traces: dict[int, Path] = {}
        for repeat in sorted({run.repeat for run in runs}):
            self._trace(repeat)
        for words in dict.fromkeys(filter(None, map(self._few_sessions, runs))):
            progress.say(words)
        said = {"experiment": experiment.model_dump(), "source": dict(source)}
        # In one step, since another runner may write the same file.
        unfinished = output / f".experiment-{os.getpid()}.json"
        unfinished.write_bytes(orjson.dumps(without_secrets(said), option=orjson.OPT_INDENT_2))
        unfinished.replace(output / "experiment.json")
        self._started_s = site.clock()

    def topology(self, run: PlannedRun) -> Any:
        """The topology of the run's cell; of its arm, for a level of a search."""
        return self._topologies[self._cell(run)]

    def is_complete(self, run: PlannedRun) -> bool:
        """Whether the run's folder holds it, finished; `InputError` where it holds another. A
        finished run is then judged as the experiment is now."""
        found = is_complete(
            self._output / run.folder,
            run,
            identity(
                run, self._trace(run.repeat), self._vocab_size, self._engines[self._cell(run)]
            ),
            described(self._site, self.topology(run)),
        )
        if found:
            self.judge(self._output / run.folder)
            manifest = provenance.read_manifest(self._output / run.folder) or {}
            if manifest.get("violations"):
                self.summary.invalid.append(str(run.folder))
        return found

    def judge(self, folder: Path) -> None:
        """Has a finished run judged by the objective, rules and measures of the experiment as it is
        now: they are no settings of the run, and one report has one of each."""
        if judge_by(self._experiment, folder):
            self._progress.say(f"{folder}: is judged by the experiment's objective and rules now")

    def end_left_behind(self, run: PlannedRun) -> None:
        """Ends what a runner that was killed left of the run."""
        if left := self._site.end(self._output / run.folder):
            self._progress.say(f"{run.folder}: ended {left} processes that an earlier runner left")

    def fits_budget(self, run: PlannedRun, expected_s: float) -> bool:
        """Whether there is time for the run; says so where there is not."""
        elapsed_s = self._site.clock() - self._started_s
        left_s = _budget_left_s(self._experiment, elapsed_s)
        if expected_s <= left_s:
            return True
        self.summary.skipped.append(str(run.folder))
        self._progress.say(
            f"{run.folder}: skipped, about {expected_s / 60:.1f} min but only "
            f"{max(left_s, 0) / 60:.1f} min of the budget are left"
        )
        return False

    def execute(self, run: PlannedRun, order: int) -> dict[str, Any]:
        """Executes the run; its manifest."""
        assignment = Assignment(
            run,
            self._experiment,
            self._output,
            self._trace(run.repeat),
            self.topology(run),
            site=self._site,
            source=self._source,
            vocab_size=self._vocab_size,
            order=order,
        )
        manifest = self._execute(assignment, self._progress)
        _account(self.summary, run, manifest, self._progress)
        return manifest

    def _few_sessions(self, run: PlannedRun) -> str | None:
        """What is to be said of a run that never has as many sessions in flight as it asks for."""
        asked = run.replay.max_inflight_sessions
        if asked is None or self._experiment.recycles(run.replay):
            return None
        there = conversations(self._trace(run.repeat), run.replay)
        if there >= asked:
            return None
        return (
            f"warning: max_inflight_sessions {asked}: {there} conversations are there to send, so "
            "that so many are never in flight; phases.recycle = true plays them again"
        )

    def _cell(self, run: PlannedRun) -> str:
        return run.cell if run.cell in self._topologies else run.arm.name

    def _trace(self, repeat: int) -> Path:
        if repeat not in self._traces:
            drawn = self._experiment.with_draw(repeat)
            self._traces[repeat] = prepare_trace(drawn, self._output)
        return self._traces[repeat]


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


def described(site: Site, topology: Any) -> dict[str, Any]:
    """A topology as manifests have it; empty for a server elsewhere, which is not asked."""
    if isinstance(topology, Endpoint):
        return {}
    found: dict[str, Any] = without_secrets(site.describe(topology))
    return found


def is_complete(
    folder: Path,
    run: PlannedRun,
    expected: Mapping[str, Any] | None = None,
    topology: Mapping[str, Any] | None = None,
) -> bool:
    """Whether `folder` holds the finished run; `InputError` where it was one of other settings, or
    its identity or topology, as far as both say, is not what is `expected` now."""
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
    # An arm names a file, which may say something else now.
    changed = topology_differences(manifest.get("topology") or {}, topology or {})
    if changed:
        raise InputError(
            f"{folder}: holds a finished run of another topology than {run.arm.topology} is now "
            f"({'; '.join(changed)}); choose another --output, or remove that folder"
        )
    return True


def judge_by(experiment: Experiment, folder: Path) -> bool:
    """Writes what runs of `experiment` are judged by into the manifest of a finished one of it in
    `folder`; whether anything changed."""
    manifest = provenance.read_manifest(folder)
    if manifest is None or manifest.get("state") != "complete":
        return False
    wanted = without_secrets(judgement(experiment))
    if manifest.get("experiment") != experiment.name or wanted.items() <= manifest.items():
        return False
    manifest |= wanted
    run = read_run(folder)
    run.manifest.update(manifest)
    manifest["violations"] = [vars(found) for found in violations(run, experiment.validity)]
    provenance.write_manifest(folder, manifest)
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
