"""Simulated runs of an experiment: every arm, load, repeat and search level of the file as it is.

Owns the folder and the manifest of a simulated run. They have the files of a measured one and say
`simulated`, with the calibration that stands for the machine. The order of runs, resumption and
searches are `eval.runner`'s.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from deltaserve.errors import InputError
from eval import provenance
from eval.execution import Assignment, begin_manifest, conclude, identity
from eval.experiment import Experiment, Simulate
from eval.matrix import plan_runs
from eval.progress import Progress
from eval.reach import beyond, in_words
from eval.records import read_run
from eval.runner import Summary, load_topologies, run_experiment
from eval.simulate import (
    calibration_ranges,
    named_calibration,
    read_calibration,
    simulate,
    write_planned,
)
from eval.simulated_fleet import (
    calibration_name,
    fleet_plan,
    load_plan,
    options,
    session_draws,
)
from eval.site import FleetMaker, Site, launch_site
from eval.traces import Selection, plan_of, resolve_scale, selection

PLANNED_FOLDER = "planned"


def simulate_experiment(
    experiment: Experiment,
    output: Path,
    *,
    source: Mapping[str, Any],
    progress: Progress,
    only: list[str] | None = None,
) -> Summary:
    """Simulates every run of the experiment that has no complete folder yet.

    Repeats differ in nothing but what is drawn, so each round has a seed of its own (as
    `analysis.vary = ["replay.seed"]` says), the same for every arm. Raises `InputError`, with the
    arm's name, for an arm that cannot be simulated, before any run.
    """
    experiment = _with_draws(experiment)
    given = experiment.simulate
    site = simulation_site(given)
    for run in plan_runs(experiment, only):
        try:
            [topology] = load_topologies(site, experiment, [run]).values()
            fleet_plan(topology, given)
            load_plan(options(Path(), output, run.replay, run.phases))
        except InputError as error:
            raise InputError(f"arm {run.arm.name}: {error}") from None
    return run_experiment(
        experiment,
        output,
        site=site,
        source=source,
        progress=progress,
        only=only,
        execute=execute_simulated,
    )


def _with_draws(experiment: Experiment) -> Experiment:
    analysis = experiment.analysis
    if "replay.seed" in analysis.vary:
        return experiment
    analysis = analysis.model_copy(update={"vary": [*analysis.vary, "replay.seed"]})
    return experiment.model_copy(update={"analysis": analysis})


def simulation_site(given: Simulate) -> Site:
    """Topologies as `launch` reads them; nothing is started, and engines need not be installed."""

    @contextlib.contextmanager
    def keeping(_folder: Path) -> Iterator[FleetMaker]:
        yield no_fleet

    def no_fleet(
        _topology: Any, _folder: Path, _say: Callable[[str], None]
    ) -> AbstractContextManager[Any]:
        raise InputError("a simulated run starts no fleet")

    return dataclasses.replace(
        launch_site(),
        check=lambda topology: fleet_plan(topology, given),
        fleet=no_fleet,
        end=lambda _folder: 0,
        keeping=keeping,
        worker_key=lambda topology: orjson.dumps(fleet_plan(topology, given)["workers"]),
        engine=lambda topology: engine_of(topology, given),
    )


def engine_of(topology: Any, given: Simulate) -> dict[str, str]:
    """What stands for the engine's version in a simulated run's identity: its calibration, and what
    of `[simulate]` is in no topology."""
    words = named_calibration(calibration_name(topology, given))
    if given.calibration_spread:
        words += ", its error drawn"
    for name in ("kv_tokens", "host_kv_tokens"):
        if value := getattr(given, name):
            words += f", {name} {value}"
    return {f"simulated {topology.engine.name}": words}


def execute_simulated(assignment: Assignment, progress: Progress) -> dict[str, Any]:
    """Simulates one run into its folder; returns its manifest."""
    run, experiment, trace = assignment.run, assignment.experiment, assignment.trace
    topology, folder = assignment.topology, assignment.folder
    provenance.fresh_folder(folder)
    replay = resolve_scale(trace, run.replay)
    calibration = read_calibration(calibration_name(topology, experiment.simulate))
    # From its first line on the run says what it is: it may be ended at any moment.
    simulated = {"calibration": calibration["name"]}
    began = begin_manifest(assignment, replay, {"simulated": simulated})
    manifest = began.manifest
    engine = engine_of(topology, experiment.simulate)
    # No prompts are made, so none of a vocabulary.
    manifest["identity"] = identity(run, trace, assignment.vocab_size, engine)
    manifest["versions"]["engines"] = engine
    began_s = time.monotonic()
    failure = None
    try:
        asked = options(trace, folder, replay, run.phases)
        plan = fleet_plan(topology, experiment.simulate, asked.seed) | load_plan(asked)
        planned, conversations = _planned(
            trace, selection(replay), assignment.output / PLANNED_FOLDER
        )
        plan["requests"] = str(planned.resolve())
        if "phases" in plan:
            plan["phases"]["draws"] = session_draws(asked, conversations)
        (folder / "replay.json").write_bytes(orjson.dumps({"arguments": asked.record()}))
        manifest["workers"] = _workers(topology, plan["workers"])
        provenance.write_manifest(folder, manifest)
        progress.detail("simulating")
        report = simulate(plan, folder)
        manifest["simulated"]["seconds"] = report["end_s"]
        ranges = calibration_ranges(calibration_name(topology, experiment.simulate))
        extrapolated = beyond(read_run(folder).all_requests, ranges)
        manifest["simulated"]["beyond"] = extrapolated
        for told in in_words([extrapolated]):
            progress.say(f"{run.folder}: extrapolated: {told}")
    except Exception as error:  # the matrix goes on; the reason is kept
        failure = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    manifest["timings"]["total_s"] = time.monotonic() - began_s
    manifest["ended_at"] = provenance.now()
    conclude(folder, manifest, failure, experiment, trace, replay, began.facts)
    provenance.write_manifest(folder, manifest)
    return manifest


# One: runs follow each other that send the same requests, and writing a large trace takes longer
# than simulating it.
@lru_cache(maxsize=1)
def _planned(trace: Path, selected: Selection, folder: Path) -> tuple[Path, int]:
    """The file of planned requests, and how many conversations they are."""
    plan = plan_of(trace, selected)
    return write_planned(plan, folder), plan.trees


def _workers(topology: Any, workers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The simulated workers as a fleet's manifest lists them, with the GPUs that they stand for."""
    found: list[dict[str, Any]] = []
    gpus = 0
    for group, worker in zip(topology.workers, workers, strict=True):
        for number in range(worker["count"]):
            name = worker["id"] if worker["count"] == 1 else f"{worker['id']}-{number}"
            taken = group.tensor_parallel if topology.device == "cuda" else 0
            found.append(
                {
                    "id": name,
                    "role": worker["role"],
                    "engine": worker["engine"],
                    "gpus": list(range(gpus, gpus + taken)),
                    "kv_capacity_tokens": worker["kv_tokens"],
                    "host_kv_tokens": worker["host_kv_tokens"],
                }
            )
            gpus += taken
    return found
