"""What an experiment would do, without doing it: runs in order, expected times, exact commands.

Owns the words of `deltaserve eval run --plan`. Starts and makes nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deltaserve.errors import InputError
from eval import provenance
from eval.endpoint import Endpoint
from eval.execution import cell_order, replay_command
from eval.experiment import Arm, Experiment
from eval.matrix import PlannedRun, level_run, plan_runs
from eval.runner import (
    described,
    expected_run_s,
    is_complete,
    load_topologies,
    measured_s,
    topology_overrides,
)
from eval.site import Site, shared_vocab, with_endpoints
from eval.traces import missing_source, planned_trace, resolve_scale


@dataclass(frozen=True)
class PreviewedCell:
    """A cell's commands; `lacks` is why this machine cannot run them, empty where it can."""

    name: str
    commands: list[str]
    lacks: str = ""


@dataclass(frozen=True)
class PreviewedRun:
    """A run in its place: `state` is complete, skipped (beyond the budget) or to do; `end_s` is
    when it should have ended, in seconds from the start."""

    folder: str
    state: str
    length_s: float
    end_s: float


@dataclass(frozen=True)
class Preview:
    """What `eval run` would do. Of a search `runs` are each arm's first level (the rest depends on
    what that shows) and those that are complete; `search` says how levels are chosen.
    `unmeasured_lengths` says by what lengths will be multiplied that is not known yet."""

    output: str
    traces: dict[str, str]
    missing_trace: str | None
    cells: list[PreviewedCell] = field(default_factory=list)
    runs: list[PreviewedRun] = field(default_factory=list)
    length_source: str = ""
    search: str | None = None
    unmeasured_lengths: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Every field, for JSON."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """Lines: each cell with its commands, then each run with the time by which it should end.
        All but commands and runs begin with ``#``."""
        for trace, state in self.traces.items():
            yield f"# trace: {trace} ({state})"
        if self.unmeasured_lengths:
            yield f"# lengths: {self.unmeasured_lengths}"
        if self.missing_trace is not None:
            yield f"# not on this machine: trace.path: {self.missing_trace}: no such file"
        for cell in self.cells:
            yield f"# {cell.name}"
            if cell.lacks:
                yield f"# not on this machine: {cell.lacks}"
            yield from cell.commands
        if self.search is not None:
            yield f"# {self.search}"
        yield f"# runs in their order; their length is {self.length_source}"
        for number, run in enumerate(self.runs, start=1):
            words = {"complete": "complete", "skipped": "skipped: beyond the budget"}.get(
                run.state, f"{run.length_s / 60:.1f} min, done after {_clock(run.end_s)}"
            )
            yield f"{number:4d}  {run.folder}  {words}"
        states = [run.state for run in self.runs]
        counts = {state: states.count(state) for state in ("complete", "skipped", "to do")}
        told = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
        end_s = max((run.end_s for run in self.runs), default=0.0)
        if self.search is None:
            yield f"# {len(self.runs)} runs: {told}; {_clock(end_s)} h:min left"
        else:
            yield f"# {len(self.runs)} levels: {told}; what they show decides about more"


def preview(
    experiment: Experiment, output: Path, *, site: Site, only: list[str] | None = None
) -> Preview:
    """What `eval run` would do with this experiment.

    Raises `InputError` for a topology or policy that is wrong; what only this machine lacks (an
    engine, the trace) is said.
    """
    site = with_endpoints(site)
    runs = plan_runs(experiment, only)
    topologies = load_topologies(site, experiment, plan_runs(experiment))
    rounds = range(1, experiment.repeats + 1)
    traces = {
        str(trace): "made at the start"
        for trace in (planned_trace(experiment.with_draw(number), output) for number in rounds)
        if not trace.is_file() and str(trace) != experiment.trace.path
    }
    cells = {run.cell: run for run in reversed(runs)}
    if experiment.search is not None:
        arms = {run.arm.name: run.arm for run in sorted(runs, key=_in_order(experiment))}
        cells = {name: level_run(experiment, arm, experiment.search.start, 1)
                 for name, arm in arms.items()}  # fmt: skip
        runs = [run for arm in arms.values() for run in _levels(experiment, arm, output)]
    trace = planned_trace(experiment, output)
    vocab_size = shared_vocab(site, topologies.values())
    now = {name: described(site, topology) for name, topology in topologies.items()}
    source, scheduled = _schedule(experiment, runs, output, now)
    return Preview(
        output=str(output),
        traces=traces,
        missing_trace=missing_source(experiment),
        cells=[
            _cell(cells[name], name, topology, trace, output, site, vocab_size)
            for name, topology in topologies.items()
            if name in cells
        ],
        runs=scheduled,
        length_source=source,
        search=_search_words(experiment),
        unmeasured_lengths=_unmeasured(experiment),
    )


def _in_order(experiment: Experiment) -> Any:
    return lambda run: cell_order(experiment, run)


def _levels(experiment: Experiment, arm: Arm, output: Path) -> Iterator[PlannedRun]:
    """The levels of an arm's search that are complete, and the first, where it is not."""
    assert experiment.search is not None
    found: dict[Path, PlannedRun] = {}
    for folder in sorted(output.glob(f"{arm.name}@*/r*")):
        manifest = provenance.read_manifest(folder)
        if manifest is not None and manifest.get("state") == "complete":
            load = float(folder.parent.name.rpartition("@")[2])
            run = level_run(experiment, arm, load, int(folder.name[1:]))
            found[run.folder] = run
    first = level_run(experiment, arm, experiment.search.start, 1)
    yield from found.values()
    if first.folder not in found:
        yield first


def _search_words(experiment: Experiment) -> str | None:
    search = experiment.search
    if search is None:
        return None
    return (
        f"levels of {search.over}: from {search.start:g}, doubled or halved until one is met and "
        f"one is not ({search.low:g} to {search.high:g}), then between them to within "
        f"{search.tolerance:.0%}, each end up to {search.repeats} times"
        + ("; and one session alone" if search.measures_alone else "")
    )


def _unmeasured(experiment: Experiment) -> str:
    cost = experiment.prompt_cost
    if cost is None or cost.factor is not None:
        return ""
    return (
        "multiplied by what is measured at the start, so that a prompt takes "
        f"{cost.seconds:g} s (prompt_cost)"
    )


def _cell(
    run: PlannedRun,
    name: str,
    topology: Any,
    trace: Path,
    output: Path,
    site: Site,
    vocab_size: int | None,
) -> PreviewedCell:
    lacks = ""
    try:
        site.check(topology)
    except InputError as error:
        lacks = str(error)
    commands = []
    folder = output / run.folder
    headers: list[str] = []
    if isinstance(topology, Endpoint):
        url = topology.url
        headers = [word for text in topology.headers for word in ("--header", text)]
    else:
        up = ["deltaserve", "launch", "up", str(run.arm.topology), "--run-dir", str(folder)]
        for override in topology_overrides(run):
            up += ["--set", override]
        commands.append(shlex.join(up))
        described = site.describe(topology)
        port = described.get("base_port", 0) or "PORT"
        url = f"http://{described.get('host', '127.0.0.1')}:{port}"
    replay = run.replay
    if replay.fit_input_tokens is not None and trace.is_file():
        replay = resolve_scale(trace, replay)
    if replay.vocab_size is None:
        replay = replay.model_copy(update={"vocab_size": vocab_size})
    program = ("deltaserve", "replay", "run")
    command = [*replay_command(program, trace, folder, url, replay, run.phases), *headers]
    if replay.fit_input_tokens is not None:
        # The trace is made at the start, and only then is the factor known.
        command += ["--length-scale", f"SO_THAT_{replay.fit_input_tokens}_TOKENS_FIT"]
    return PreviewedCell(name, [*commands, shlex.join(command)], lacks)


def _schedule(
    experiment: Experiment,
    runs: list[PlannedRun],
    output: Path,
    topologies: Mapping[str, Mapping[str, Any]],
) -> tuple[str, list[PreviewedRun]]:
    """Where the length of runs is from, and each run with when it should have ended. `topologies`
    are by cell, of a search by arm."""
    spent_s = measured_s(output, runs)
    budget_s = 60 * (experiment.budget_minutes or float("inf"))
    if spent_s:
        source = "measured"
    elif experiment.run_minutes:
        source = "the file's estimate"
    else:
        source = "unknown: set run_minutes"
    elapsed_s = 0.0
    found = []
    for run in runs:
        length_s = expected_run_s(experiment, run, spent_s)
        topology = topologies.get(run.cell, topologies.get(run.arm.name))
        if is_complete(output / run.folder, run, topology=topology):
            state = "complete"
        elif length_s > budget_s - elapsed_s:
            state = "skipped"
        else:
            elapsed_s += length_s
            state = "to do"
        found.append(PreviewedRun(str(output / run.folder), state, length_s, elapsed_s))
    return source, found


def _clock(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60}:{minutes % 60:02d}"
