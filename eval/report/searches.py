"""Searches for capacity, as `capacity.json` files say them: what an arm carries, and every level.

Owns reading those files, and judging their levels again by another objective. Unknown keys are
left out, missing ones are unknown; what would be read as another kind than it is is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from deltaserve.errors import InputError
from eval import search as searching
from eval.experiment import Slo
from eval.experiment_files import one_line
from eval.records import Run
from eval.run_files import Told
from eval.search import CAPACITY_FILE


class _Level(Told):
    """What is read of a level; a measure may be unknown."""

    load: float
    meets: bool | None = None
    not_met: list[str] | None = None
    sure: bool | None = None
    sustained: bool | None = None
    violations: list[str] | None = None
    in_time_share: float | None = None
    late_share_p90: float | None = None
    longest_wait_s: float | None = None
    starved_sessions: float | None = None
    stretch_p90: float | None = None
    ttft_p90: float | None = None
    tpot_p90: float | None = None
    worst_gap_p90: float | None = None
    throughput_output_tps: float | None = None


class _Record(Told):
    """What is read of a search; of another kind than a number its other figures are unknown."""

    arm: str
    slo: dict[str, float | None] | None = None
    levels: list[_Level] | None = None


@dataclass(frozen=True)
class Search:
    """What one arm carries: `agents` in all with its interval, and what is counted (`what`) for
    each GPU or worker (`unit`). `levels` are the levels tried, by load, `slo` the objective that
    they were judged by. A search that is not `finished` has levels to try: it was interrupted, or
    still runs."""

    arm: str
    agents: float
    low: float
    high: float
    per_unit: float
    unit: str = "GPU"
    what: str = "agents"
    over: str = ""
    slo: dict[str, Any] = field(default_factory=dict)
    finished: bool = True
    levels: list[dict[str, Any]] = field(default_factory=list)

    @property
    def interval(self) -> str:
        """The interval of `per_unit`, as words: `3–4`, `at least 3` where no level surely missed
        the objective, `at most 4` where none surely met it."""
        if not (math.isfinite(self.low) and self.agents):
            return ""
        factor = self.per_unit / self.agents
        if not math.isfinite(self.high):
            return f"at least {self.low * factor:.3g}" if self.low else "no level is sure"
        if not self.low:
            return f"at most {self.high * factor:.3g}"
        return f"{self.low * factor:.3g}–{self.high * factor:.3g}"

    @property
    def invalid(self) -> list[dict[str, Any]]:
        """The levels with a run that broke a rule of validity: the capacity rests on them too."""
        return [level for level in self.levels if level.get("violations")]

    @property
    def missed(self) -> dict[str, Any] | None:
        """The lowest level that is known to have missed the objective, where it says why."""
        return next((level for level in self.levels if level.get("not_met")), None)

    @property
    def unjudged(self) -> list[float]:
        """The levels that met the objective though it bounds stretch and no session's is known."""
        return [level["load"] for level in self.levels if self.is_unjudged(level)]

    def is_unjudged(self, level: Mapping[str, Any]) -> bool:
        """Whether a level of this search is one of `unjudged`."""
        is_unknown = "stretch_p90" in level and level["stretch_p90"] is None
        return bool(level.get("meets")) and is_unknown and self.slo.get("stretch_p90") is not None


def find_searches(folders: Sequence[Path]) -> list[Search]:
    """Every search under `folders`. Raises `InputError` for a file that is none."""
    found: dict[Path, list[Search]] = {}
    for folder in folders:
        for path in sorted(folder.rglob(CAPACITY_FILE)):
            found.setdefault(path.resolve(), _read(path))
    return [search for searches in found.values() for search in searches]


def _read(path: Path) -> list[Search]:
    try:
        content = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise InputError(f"{path}: not JSON: {error}") from None
    items = content if isinstance(content, list) else [content]
    found = []
    for item in items:
        if not isinstance(item, dict) or "arm" not in item:
            raise InputError(f"{path}: expected objects with arm, agents, low, high and levels")
        try:
            _Record.model_validate(item)
        except ValidationError as error:
            raise InputError(f"{path}: {one_line(error, item)}") from None
        found.append(_search(item))
    return found


def _search(record: Mapping[str, Any]) -> Search:
    levels = record.get("levels") or []
    unit = "worker" if record.get("per_gpu") is None else "GPU"
    agents = _number(record.get("agents"))
    workers = _number(record.get("workers")) or math.nan
    per_worker = _number(record.get("per_worker", agents / workers))
    return Search(
        arm=str(record["arm"]),
        agents=agents,
        low=_number(record.get("low")),
        high=_number(record.get("high")),
        per_unit=per_worker if unit == "worker" else _number(record.get("per_gpu")),
        unit=unit,
        what="sessions an hour" if "per_hour" in str(record.get("over")) else "agents",
        over=str(record.get("over") or ""),
        slo=record.get("slo") or {},
        finished=bool(record.get("finished", True)),
        levels=sorted(levels, key=lambda level: _number(level.get("load"))),
    )


def judged_again(search: Search, runs: Sequence[Run], slo: Slo) -> Search:
    """What the same levels say under another objective, from the runs that are still there. It is
    not `finished`: under that objective other levels might have been tried."""
    levels: dict[float, list[Run]] = {}
    for run in runs:
        load = _load(run)
        if run.arm == search.arm and load is not None and run.manifest.get("state") == "complete":
            levels.setdefault(load, []).append(run)
    if not levels:
        raise InputError(f"--slo: the runs of {search.arm}'s search are not among those given")
    return _search(searching.judged_again(search.arm, search.over, levels, slo))


def _load(run: Run) -> float | None:
    """A search names its levels by their load."""
    try:
        return None if run.load is None else float(run.load)
    except ValueError:
        return None


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
