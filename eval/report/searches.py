"""Searches for capacity, as `capacity.json` files say them: what an arm carries, and every level.

Owns reading those files. Unknown keys are kept out, missing ones are unknown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from deltaserve.errors import InputError

CAPACITY_FILE = "capacity.json"


@dataclass(frozen=True)
class Search:
    """What one arm carries: `agents` in all with its interval, and what is counted (`what`) for
    each GPU or worker (`unit`). `levels` are the levels tried, by load."""

    arm: str
    agents: float
    low: float
    high: float
    per_unit: float
    unit: str = "GPU"
    what: str = "agents"
    levels: list[dict[str, Any]] = field(default_factory=list)

    @property
    def interval(self) -> str:
        """The interval of `per_unit`, as words."""
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.agents):
            return ""
        factor = self.per_unit / self.agents
        return f"{self.low * factor:.3g}–{self.high * factor:.3g}"


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
        levels = [level for level in item.get("levels") or [] if isinstance(level, dict)]
        found.append(
            Search(
                arm=str(item["arm"]),
                agents=_number(item.get("agents")),
                low=_number(item.get("low")),
                high=_number(item.get("high")),
                per_unit=_number(item.get("per_gpu", item.get("per_worker"))),
                unit="GPU" if item.get("per_gpu") is not None else "worker",
                what="sessions an hour" if "per_hour" in str(item.get("over")) else "agents",
                levels=sorted(levels, key=lambda level: _number(level.get("load"))),
            )
        )
    return found


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
