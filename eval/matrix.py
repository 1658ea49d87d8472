"""The runs that an experiment asks for, in order: arms × loads × repeats, or levels of a search.

Knows nothing of how a run is executed or measured.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from deltaserve.errors import InputError
from eval.experiment import Arm, Experiment, Phases, Replay


@dataclass(frozen=True)
class PlannedRun:
    """One run of the matrix; `cell` is its folder's name under the output folder."""

    arm: Arm
    load: str | None
    repeat: int
    replay: Replay
    set: dict[str, Any] = field(default_factory=dict)
    """Keys of the topology: the experiment's, then the arm's, then the load's."""
    phases: Phases | None = None

    @property
    def cell(self) -> str:
        """`<arm>`, or `<arm>@<load>` where the experiment has loads."""
        return _cell(self.arm, self.load)

    @property
    def folder(self) -> Path:
        return Path(self.cell) / f"r{self.repeat}"

    @property
    def digest(self) -> str:
        """Changes when a setting of the run changes. What the settings led to (the trace's content,
        the vocabulary, the engine's version) is checked beside it: `eval.runner.is_complete`."""
        content = {
            "arm": self.arm.model_dump(exclude={"loads", "priority", "set"}),
            "load": self.load,
            "replay": self.replay.model_dump(),
            "set": self.set,
            "phases": self.phases.model_dump() if self.phases is not None else None,
        }
        return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()


def level_run(experiment: Experiment, arm: Arm, load: float, repeat: int) -> PlannedRun:
    """One level of a search."""
    assert experiment.search is not None
    key = experiment.search.over.removeprefix("replay.")
    value = round(load) if experiment.search.whole else load
    replay = _drawn(experiment, arm, None, repeat).model_copy(update={key: value})
    keys = _merged(experiment.set, arm.set)
    return PlannedRun(arm, f"{load:g}", repeat, replay, keys, experiment.phases)


def plan_runs(experiment: Experiment, only: list[str] | None = None) -> list[PlannedRun]:
    """Every run, interleaved: repeat 1 of all cells in a random order, then repeat 2 and so on;
    cells of a lower `priority` (the higher of their arm's and load's) before all others. `only`
    names the arms (``ARM``), or arms under one load (``ARM@LOAD``), whose runs are wanted.

    Whole rounds come first, so that a run that is stopped early has compared every arm; the order
    inside a round is drawn anew from the experiment's seed, so that slow drift of the machine
    falls on all arms alike.
    """
    wanted = _chosen(experiment, only or [])
    rng = random.Random(experiment.seed)
    levels: dict[int, list[tuple[Arm, str | None, dict[str, Any]]]] = {}
    for arm in experiment.arms:
        for load_name in experiment.loads_of(arm):
            load = experiment.load_named(load_name)
            level = max(arm.priority, load.priority) if load is not None else arm.priority
            keys = _merged(experiment.set, arm.set)
            if load is not None:
                keys = _merged(keys, load.set)
            levels.setdefault(level, []).append((arm, load_name, keys))
    runs: list[PlannedRun] = []
    for _, cells in sorted(levels.items()):
        for repeat in range(1, experiment.repeats + 1):
            rng.shuffle(cells)
            runs += [
                PlannedRun(
                    arm,
                    name,
                    repeat,
                    _drawn(experiment, arm, name, repeat),
                    keys,
                    experiment.phases,
                )
                for arm, name, keys in cells
                if wanted is None or wanted & {arm.name, _cell(arm, name)}
            ]
    return runs


def _chosen(experiment: Experiment, only: list[str]) -> set[str] | None:
    """The arms, and arms under one load (``ARM@LOAD``), that are named; None for all there are."""
    cells = {_cell(arm, load) for arm in experiment.arms for load in experiment.loads_of(arm)}
    arms = [arm.name for arm in experiment.arms]
    for name in only:
        arm, at, load = name.partition("@")
        if arm not in arms:
            names = ", ".join(arms)
            raise InputError(f"--only: no arm is named {arm!r} (the file has {names})")
        if at and name not in cells:
            loads = ", ".join(filter(None, experiment.loads_of(experiment.arms[arms.index(arm)])))
            raise InputError(
                f"--only {name}: arm {arm} has no load {load!r} (it has {loads or 'none'})"
            )
    return set(only) or None


def _cell(arm: Arm, load: str | None) -> str:
    return arm.name if load is None else f"{arm.name}@{load}"


def _drawn(experiment: Experiment, arm: Arm, load: str | None, repeat: int) -> Replay:
    """The replay settings of a round: prompts of its own where `replay.seed` varies."""
    replay = experiment.replay_of(arm, load)
    if "replay.seed" not in experiment.analysis.vary:
        return replay
    first = experiment.seed if replay.seed is None else replay.seed
    return replay.model_copy(update={"seed": first + repeat - 1})


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with the keys of `over`, tables key by key."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged
