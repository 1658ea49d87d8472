"""What an experiment would do, without doing it: runs in order, expected times, exact commands.

Owns the words of `deltaserve eval run --plan`. Starts and makes nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deltaserve.errors import InputError
from eval.experiment import Experiment, PlannedRun, plan_runs
from eval.runner import (
    Site,
    expected_run_s,
    is_complete,
    load_topologies,
    measured_s,
    replay_command,
    shared_vocab,
    topology_overrides,
)
from eval.traces import planned_trace, resolve_scale


def preview(
    experiment: Experiment, output: Path, *, site: Site, only: list[str] | None = None
) -> Iterator[str]:
    """Lines: each cell with its commands, then each run with the time by which it should end.

    Raises `InputError` for a topology or policy that is wrong; what only this machine lacks (an
    engine, the trace) is said.
    """
    runs = plan_runs(experiment, only)
    topologies = load_topologies(site, experiment, plan_runs(experiment))
    rounds = range(1, experiment.repeats + 1)
    for trace in dict.fromkeys(planned_trace(experiment.with_draw(r), output) for r in rounds):
        if not trace.is_file():
            made = "missing" if experiment.trace.path is not None else "made at the start"
            yield f"# trace: {trace} ({made})"
    trace = planned_trace(experiment, output)
    vocab_size = shared_vocab(site, topologies.values())
    cells = {run.cell: run for run in reversed(runs)}
    for cell, topology in topologies.items():
        if cell not in cells:
            continue
        yield f"# {cell}"
        yield from _commands(cells[cell], topology, trace, output, site, vocab_size)
    yield from _schedule(experiment, runs, output)


def _commands(
    run: PlannedRun, topology: Any, trace: Path, output: Path, site: Site, vocab_size: int | None
) -> Iterator[str]:
    try:
        site.check(topology)
    except InputError as error:
        yield f"# not on this machine: {error}"
    folder = output / run.folder
    check = ["deltaserve", "launch", "up", run.arm.topology, "--run-dir", str(folder)]
    for override in topology_overrides(run):
        check += ["--set", override]
    yield shlex.join(check)
    replay = run.replay
    if replay.fit_input_tokens is not None and trace.is_file():
        replay = resolve_scale(trace, replay)
    if replay.vocab_size is None:
        replay = replay.model_copy(update={"vocab_size": vocab_size})
    described = site.describe(topology)
    url = f"http://{described.get('host', '127.0.0.1')}:{described.get('base_port', 0) or 'PORT'}"
    command = replay_command(("deltaserve", "replay", "run"), trace, folder, url, replay)
    if replay.fit_input_tokens is not None:
        command += ["--length-scale", f"SO_THAT_{replay.fit_input_tokens}_TOKENS_FIT"]
    yield shlex.join(command)


def _schedule(experiment: Experiment, runs: list[PlannedRun], output: Path) -> Iterator[str]:
    spent_s = measured_s(output, runs)
    budget_s = 60 * (experiment.budget_minutes or float("inf"))
    if spent_s:
        source = "measured"
    elif experiment.run_minutes:
        source = "the file's estimate"
    else:
        source = "unknown: set run_minutes"
    yield f"# runs in their order; their length is {source}"
    elapsed_s = 0.0
    counts = {"complete": 0, "skipped": 0, "to do": 0}
    for number, run in enumerate(runs, start=1):
        length_s = expected_run_s(experiment, run, spent_s)
        if is_complete(output / run.folder, run):
            words, state = "complete", "complete"
        elif length_s > budget_s - elapsed_s:
            words, state = "skipped: beyond the budget", "skipped"
        else:
            elapsed_s += length_s
            words = f"{length_s / 60:.1f} min, done after {_clock(elapsed_s)}"
            state = "to do"
        counts[state] += 1
        yield f"{number:4d}  {output / run.folder}  {words}"
    told = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    yield f"# {len(runs)} runs: {told}; {_clock(elapsed_s)} h:min left"


def _clock(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60}:{minutes % 60:02d}"
