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
    Search,
    SessionOutcome,
    capacity,
    next_load,
)
from eval.experiment import WHOLE_LOADS, Arm, Experiment, Slo
from eval.matrix import PlannedRun, level_run
from eval.outcomes import MEASURES, Outcome, estimates, sample
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
    "first_tokens_per_s",
    "wait_mean_s",
    "wait_over_60",
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

    outcomes: Sequence[Outcome]
    sustained: bool
    violations: list[str]
    """The rules of validity that they broke, by name."""
    figures: Mapping[str, Estimate]
    longest_wait_s: float

    @property
    def runs(self) -> list[Run]:
        return [outcome.run for outcome in self.outcomes]


def tried(runs: Sequence[Run], slo: Slo) -> Tried:
    """What the repeats of one load say together."""
    outcomes = [Outcome(run, slo) for run in runs]
    return Tried(
        outcomes,
        sustained=not_sustained(runs) is None,
        violations=sorted(
            {v["rule"] for run in runs for v in run.manifest.get("violations") or []}
        ),
        figures=_figures(outcomes),
        longest_wait_s=max(outcome.measures["longest_wait_s"] for outcome in outcomes),
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
        levels, alone = levels_of(done)
        load = next_load(levels, search, slo)
        if load is None and experiment.search.measures_alone and 1.0 not in done:
            load = 1.0  # what every session's stretch is held against
        if levels:
            found = capacity(levels, search, slo)
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


def levels_of(done: Mapping[float, Tried]) -> tuple[list[Level], Alone | None]:
    """The runs of each load as levels, and what their sessions' stretch is held against."""
    alone = alone_from([run for level in done.values() for run in level.runs])
    loads = sorted(done)
    return [level_of(done[load], load, alone) for load in loads], alone


def level_of(level: Tried, load: float, alone: Alone | None) -> Level:
    """The outcomes of all repeats of one load, session by session."""
    tables = [outcome.sessions_against(alone) for outcome in level.outcomes]
    sessions = [
        SessionOutcome(
            met=int(row["met"]),
            turns=int(row["turns"]),
            stretch=float(row["stretch"]),
            session=str(row["conversation"]),
            at_least=bool(row["at_least"]),
            over_patience=int(row["over_patience"]),
            late_share=float(row["late_share"]),
            starved=bool(row["starved"]),
        )
        for table in tables
        for row in table.to_dict("records")
    ]
    return Level(load, sessions, level.sustained, repeats=len(level.runs))


def by_turns_alone(loads: Sequence[float]) -> str:
    """What is said of levels of whose sessions no stretch is known, which the objective bounds."""
    names = ", ".join(f"{load:g}" for load in loads)
    return f"no session's stretch is known at {names}: judged by turns alone"


def why_no_more(load: float, not_met: Sequence[str]) -> str:
    """What is said of the lowest level that missed the objective."""
    return f"with {load:g}: {not_met[0]}"


def judged_again(
    arm: str, over: str, runs: Mapping[float, Sequence[Run]], slo: Slo
) -> dict[str, Any]:
    """What ``capacity.json`` would hold of these runs, by load, under another objective. Not
    `finished`: by that objective the search might have tried other levels."""
    done = {load: tried(level, slo) for load, level in runs.items()}
    levels, alone = levels_of(done)
    # Of a search's bounds the answer rests on the grid of loads alone.
    found = capacity(levels, Search(start=1.0, whole=over in WHOLE_LOADS), slo)
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
                "not_met": verdict.not_met,
                "sure": verdict.sure and not verdict.unjudged,
                "sustained": level.sustained,
                "starved_sessions": verdict.starved,
                "longest_wait_s": _finite(level.longest_wait_s),
                "violations": level.violations,
                **_told(
                    {
                        "in_time_share": verdict.attainment,
                        "stretch_p90": verdict.stretch_p90,
                        "late_share_p90": verdict.late_share_p90,
                    }
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


def _figures(outcomes: Sequence[Outcome]) -> dict[str, Estimate]:
    """The measures that are shown of a level, by name."""
    names = [name for of in outcomes for name in of.run.all_requests["conversation"]]
    boot = SessionBootstrap(names, draws=_DRAWS)
    found = {}
    for measure in MEASURES:
        if measure.key in _SHOWN:
            samples = [sample(outcome, measure) for outcome in outcomes]
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
