"""How much load each arm carries under the objective, from searches for capacity."""

from __future__ import annotations

from typing import Any

from eval.document import Figure, Section
from eval.report.evidence import Evidence
from eval.report.figures.curves import JUDGED, capacity_curves, capacity_keys
from eval.report.searches import Search
from eval.tables import LEVEL, NUMBER, PERCENT, RATIO, SECONDS, Column, tabulate

_Level = tuple[Search, dict[str, Any]]

_FOUND: tuple[Column[Search], ...] = (
    Column("arm", "Arm", lambda search: search.arm),
    Column("agents", "Capacity", lambda search: search.agents, LEVEL),
    Column("low", "At least", lambda search: search.low, LEVEL),
    Column("high", "At most", lambda search: search.high, LEVEL),
    Column(
        "per_unit",
        "A GPU or worker",
        lambda search: search.per_unit,
        LEVEL,
        lambda search: search.interval,
    ),
    Column("levels", "Levels tried", lambda search: str(len(search.levels))),
    Column("finished", "Search", lambda search: "done" if search.finished else "levels to try"),
)


def _value(key: str) -> Any:
    return lambda row: row[1].get(key)


def _why_not(row: _Level) -> str:
    return "; ".join(row[1].get("not_met") or [])


def _met(row: _Level) -> str:
    """Whether the level met the objective, and whether its intervals leave no doubt of that."""
    search, level = row
    if level.get("meets") is None:
        return ""
    if search.is_unjudged(level):
        return "yes, stretch unknown"
    return ("yes" if level["meets"] else "no") + (", surely" if level.get("sure") else "")


_LEVELS: tuple[Column[_Level], ...] = (
    Column("arm", "Arm", lambda row: row[0].arm),
    Column("load", "Load", _value("load"), LEVEL),
    Column("meets", "Met", _met),
    Column("not_met", "Why not", _why_not),
    Column("in_time_share", "Turns within the SLO", _value("in_time_share"), PERCENT),
    Column("late_share_p90", "Late share p90", _value("late_share_p90"), PERCENT),
    Column("starved_sessions", "Starved", _value("starved_sessions"), LEVEL),
    Column("longest_wait_s", "Longest wait", _value("longest_wait_s"), SECONDS),
    Column("stretch_p90", "Stretch p90", _value("stretch_p90"), RATIO),
    Column("ttft_p90", "TTFT p90", _value("ttft_p90"), SECONDS),
    Column("tpot_p90", "TPOT p90", _value("tpot_p90"), SECONDS),
    Column("worst_gap_p90", "Worst gap p90", _value("worst_gap_p90"), SECONDS),
    Column("throughput_output_tps", "Output tokens/s", _value("throughput_output_tps"), NUMBER),
    Column("sustained", "Sustained", _value("sustained")),
    Column("violations", "Not valid", lambda row: ", ".join(row[1].get("violations") or [])),
)


def section(evidence: Evidence) -> Section | None:
    """The capacity of each arm, and every level that the search tried."""
    if not evidence.searches:
        return None
    levels = [(search, level) for search in evidence.searches for level in search.levels]
    found = Section("capacity", "Capacity of each arm")
    found.text.append(
        "The most load at which enough turns are within the SLO, hardly any waits beyond patience, "
        "no session starves, and one session in ten at most is late for much of its time or "
        "stretched; the bounds are tested levels: the highest that surely meets it, and the last "
        "below the lowest that surely misses it."
    )
    found.tables.append(("", tabulate("capacity", evidence.searches, _FOUND)))
    if levels:
        found.tables.append(("Levels", tabulate("capacity_levels", levels, _LEVELS)))
    # The rest is drawn over load below, with intervals.
    keys = JUDGED if len(evidence.by_load) > 1 else capacity_keys()
    for key in keys:
        chart = capacity_curves(evidence.searches, key)
        if chart is not None:
            figure = Figure(f"capacity-{key}", f"{chart.title} over load, by arm", chart)
            found.figures.append(figure)
    return found
