"""What load a cell was under: how it was made, its level as a number, and its measured window.

Owns reading that out of manifests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eval.metrics import Cell
from eval.plot import Shade
from eval.records import Run


@dataclass(frozen=True)
class Levels:
    """The loads of several cells as numbers: what the number is, and each cell's, by its name."""

    title: str
    of: dict[str, float]


# Settings of the replay that make a level of load, and what the level is then called.
_LEVELS = (
    ("max_inflight_sessions", "sessions in flight"),
    ("sessions_per_hour", "sessions an hour"),
    ("time_scale", "speed of the trace"),
)


def settings(run: Run) -> dict[str, Any]:
    """The replay's settings: what it recorded itself, else the flags of its command."""
    recorded = (run.manifest.get("replay") or {}).get("arguments")
    return recorded if isinstance(recorded, dict) else _flags(run)


def levels(cells: Sequence[Cell]) -> Levels:
    """The load of each cell: the setting in which they differ, else the rate that was answered."""
    for key, title in _LEVELS:
        found = {cell.name: settings(cell.runs[0]).get(key) for cell in cells}
        known = {name: float(value) for name, value in found.items() if value is not None}
        if len(known) == len(found) and len(set(known.values())) > 1:
            return Levels(title, known)
    return Levels("requests a second", {cell.name: cell.request_rps for cell in cells})


def shades(run: Run, end_s: float) -> list[Shade]:
    """The parts of a timeline up to `end_s` that are not measured: warm-up before the window,
    drain after it."""
    found = run.window
    if found is None:
        return []
    before = Shade(0.0, found.start_s, "warm-up")
    after = Shade(found.end_s, max(end_s, found.end_s), "drain")
    return [before, after]


def words(run: Run) -> str:
    """How the load was made, in a sentence's parts."""
    given = settings(run)
    # Of a replay that recorded its settings `max_inflight_sessions` is there in every mode.
    mode = str(given.get("mode") or ("closed" if given.get("max_inflight_sessions") else ""))
    parts = []
    if mode == "closed":
        parts.append(f"closed loop, {given.get('max_inflight_sessions', '?')} sessions in flight")
    elif mode == "sessions":
        parts.append(f"sessions arrive at random, {given.get('sessions_per_hour', '?')} an hour")
    elif mode:
        parts.append("open loop, at the trace's times")
    scale = given.get("time_scale")
    if scale not in (None, 1, 1.0):
        parts.append(f"{scale:g} times as fast as recorded")
    think = given.get("max_think_s")
    if think is not None:
        parts.append(f"think times up to {float(think):g} s")
    if given.get("splice_outputs"):
        parts.append("answers spliced back into the next prompt")
    return ", ".join(parts)


def window_words(run: Run) -> str:
    """What part of the run was measured."""
    found = run.window
    if found is None:
        return "the whole run, its start and end included"
    start = "in the middle of sessions" if found.start == "mid" else "with fresh sessions"
    length = found.length_s
    return f"{length:.0f} s after {found.start_s:.0f} s of warm-up that begins {start}" + (
        ", sessions recycled" if found.recycle else ""
    )


def _flags(run: Run) -> dict[str, Any]:
    """`--max-inflight-sessions 8` → `{"max_inflight_sessions": 8.0}`."""
    command = [str(word) for word in run.manifest.get("replay_command") or []]
    found: dict[str, Any] = {}
    for i, word in enumerate(command):
        if not word.startswith("--"):
            continue
        value = command[i + 1] if i + 1 < len(command) else ""
        key = word.removeprefix("--").replace("-", "_")
        if not value or value.startswith("--"):
            found[key] = True
            continue
        try:
            number = float(value)
            found[key] = int(number) if number.is_integer() else number
        except ValueError:
            found[key] = value
    return found
