"""Searches how much load each arm carries, on workers that stay up between levels.

Owns the runs of a search: which one is next (`eval.capacity` says), where it is kept, and
``capacity.json``, the answer so far, written after every level. A level is a run like any other in
a folder of its own (``ARM@LOAD/r1``), so that reports show the curve over load and a search that
was interrupted goes on. Knows runs and their outcomes; not how a run is executed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from eval.capacity import (
    Capacity,
    Level,
    Objective,
    Search,
    SessionOutcome,
    capacity,
    next_load,
)
from eval.experiment import WHOLE_LOADS, Arm, Experiment, Slo
from eval.matrix import PlannedRun, level_run
from eval.outcomes import MEASURES, by_session, estimates, sample
from eval.records import Run, read_run
from eval.stats import Estimate, SessionBootstrap
from eval.steady import not_sustained
from eval.stretch import Alone, alone_from
from launch.cache import write_atomically

Execute = Callable[[PlannedRun], bool]
"""Runs a level where its folder is not complete yet; false where that failed or time ran out."""

CAPACITY_FILE = "capacity.json"
_DRAWS = 200
_SHOWN = (
    "ttft_p50",
    "ttft_p90",
    "ttft_p99",
    "tpot_p90",
    "worst_gap_p90",
    "requests_per_s",
    "throughput_output_tps",
    "apc",
    "recomputed_share",
)


@dataclass(frozen=True)
class Tried:
    """All runs of one load, and what they say whatever other loads show."""

    runs: Sequence[Run]
    sustained: bool
    violations: list[str]
    """The rules of validity that they broke, by name."""
    figures: Mapping[str, Estimate]


def tried(runs: Sequence[Run], slo: Slo) -> Tried:
    """What the repeats of one load say together."""
    return Tried(
        runs,
        sustained=not_sustained(runs) is None,
        violations=sorted(
            {v["rule"] for run in runs for v in run.manifest.get("violations") or []}
        ),
        figures=_figures(runs, slo),
    )


def search_arm(experiment: Experiment, arm: Arm, output: Path, execute: Execute) -> Capacity | None:
    """Runs levels until the search is over, and returns the arm's capacity; None where a level
    failed, or time ran out, before any was measured."""
    assert experiment.search is not None
    search, over = bounds(experiment), experiment.search.over
    slo = experiment.slo
    done: dict[float, Tried] = {}
    found: Capacity | None = None
    while True:
        levels, alone = levels_of(done, slo)
        load = next_load(levels, search, objective(slo))
        if load is None and experiment.search.measures_alone and 1.0 not in done:
            load = 1.0  # what every session's stretch is held against
        if levels:
            found = capacity(levels, search, objective(slo))
            head = {"arm": arm.name, "over": over, "finished": load is None}
            _write(output / arm.name, head | _record(found, done, slo, alone))
        if load is None:
            return found
        before = done[load].runs if load in done else []
        run = level_run(experiment, arm, load, repeat=len(before) + 1)
        if not execute(run):
            return found
        done[load] = tried([*before, read_run(output / run.folder)], slo)


def bounds(experiment: Experiment) -> Search:
    """Where the experiment's search looks."""
    given = experiment.search
    assert given is not None
    return Search(
        start=given.start,
        low=given.low,
        high=given.high,
        tolerance=given.tolerance,
        repeats=given.repeats,
        whole=given.whole,
    )


def objective(slo: Slo) -> Objective:
    """What it means to carry a load."""
    return Objective(slo.attainment, slo.stretch_p90)


def levels_of(done: Mapping[float, Tried], slo: Slo) -> tuple[list[Level], Alone | None]:
    """The runs of each load as levels, and what their sessions' stretch is held against."""
    alone = alone_from([run for level in done.values() for run in level.runs])
    loads = sorted(done)
    return [level_of(done[load], load, slo, alone) for load in loads], alone


def level_of(level: Tried, load: float, slo: Slo, alone: Alone | None) -> Level:
    """The outcomes of all repeats of one load, session by session."""
    tables = [by_session(run, alone, slo) for run in level.runs]
    sessions = [
        SessionOutcome(int(met), int(turns), float(stretch), str(session))
        for table in tables
        for met, turns, stretch, session in zip(
            *(table[name] for name in ("met", "turns", "stretch", "conversation")), strict=True
        )
    ]
    return Level(load, sessions, level.sustained, repeats=len(level.runs))


def by_turns_alone(loads: Sequence[float]) -> str:
    """What is said of levels of whose sessions no stretch is known, which the objective bounds."""
    names = ", ".join(f"{load:g}" for load in loads)
    return f"no session's stretch is known at {names}: judged by turns alone"


def judged_again(
    arm: str, over: str, runs: Mapping[float, Sequence[Run]], slo: Slo
) -> dict[str, Any]:
    """What ``capacity.json`` would hold of these runs, by load, under another objective. Not
    `finished`: by that objective the search might have tried other levels."""
    done = {load: tried(level, slo) for load, level in runs.items()}
    levels, alone = levels_of(done, slo)
    # Of a search's bounds the answer rests on the grid of loads alone.
    found = capacity(levels, Search(start=1.0, whole=over in WHOLE_LOADS), objective(slo))
    return {"arm": arm, "over": over, "finished": False} | _record(found, done, slo, alone)


def _record(
    found: Capacity, done: Mapping[float, Tried], slo: Slo, alone: Alone | None
) -> dict[str, Any]:
    first = next(iter(done.values())).runs[0]
    workers = len(first.manifest.get("workers") or [])
    return {
        "agents": found.value,
        "low": found.low,
        "high": _finite(found.high),
        "gpus": first.gpus,
        "workers": workers,
        "per_gpu": found.value / first.gpus if first.gpus else None,
        "per_worker": found.value / workers if workers else None,
        "slo": slo.model_dump(),
        "alone": alone.source if alone else None,
        "levels": [
            {
                "load": verdict.load,
                "repeats": len(level.runs),
                "meets": verdict.meets,
                "sure": verdict.sure and not verdict.unjudged,
                "sustained": level.sustained,
                "violations": level.violations,
                **_told(
                    {"attainment": verdict.attainment, "stretch_p90": verdict.stretch_p90}
                    | dict(level.figures)
                ),
            }
            for verdict in found.judgements
            for level in [done[verdict.load]]
        ],
    }


def _write(folder: Path, record: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(
        folder / CAPACITY_FILE,
        orjson.dumps(record, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY),
    )


def _figures(runs: Sequence[Run], slo: Slo) -> dict[str, Estimate]:
    """The measures that are shown of a level, by name."""
    names = [name for run in runs for name in run.all_requests["conversation"]]
    boot = SessionBootstrap(names, draws=_DRAWS)
    found = {}
    for measure in MEASURES:
        if measure.key in _SHOWN:
            samples = [sample(run, measure, slo) for run in runs]
            [found[measure.key]] = estimates(boot, samples, [measure])
    return found


def _told(found: Mapping[str, Estimate]) -> dict[str, Any]:
    """Measures by name, and their intervals beside them. Unknown ones, and those that failures put
    beyond every bound, are null."""
    return {
        **{key: _finite(value.value) for key, value in found.items()},
        "intervals": {
            key: [_finite(value.low), _finite(value.high)] for key, value in found.items()
        },
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
