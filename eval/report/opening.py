"""The first screen: the answer, what was measured, which arms, and one picture."""

from __future__ import annotations

import math
from collections.abc import Sequence

from eval.document import Figure, Opening
from eval.formatting import DASH, number
from eval.metrics import Cell
from eval.provenance import prompt_cost_words
from eval.records import Run
from eval.report import facts, loads
from eval.report.answer import answer
from eval.report.arms import arms_table
from eval.report.best import best, both_sides
from eval.report.evidence import Evidence
from eval.report.figures import latency
from eval.report.figures.curves import capacity_curves, curve
from eval.report.searches import Search

_MOST_SIGNS = 3


def opening(evidence: Evidence) -> Opening:
    """What a reader should know after ten seconds: one sentence by the objective where arms are
    compared, whose figures are then among the facts."""
    judged = best(evidence)
    basis = "Simulated, not measured: " if judged and facts.simulated(evidence.runs) else ""
    return Opening(
        answer=basis + judged or answer(evidence),
        facts=[(name, words) for name, words in _facts(evidence) if words],
        arms=arms_table(evidence.cells) if evidence.cells else None,
        picture=_picture(evidence),
    )


def _picture(evidence: Evidence) -> Figure | None:
    """Of a search what decided it over load; else what is served against what sessions suffer;
    of one arm TTFT."""
    if not evidence.cells:
        return None
    searched = capacity_curves(evidence.searches, _decided_by(evidence.searches))
    if searched is not None:
        return Figure("opening", f"{searched.title} over load, by arm", searched)
    sides = both_sides(evidence.cells)
    if sides is not None and len({cell.arm for cell in evidence.cells}) > 1:
        return Figure("opening", "What is served against what sessions suffer, by arm", sides)
    if len(evidence.by_load) > 1:
        over_load = curve(evidence.cells, "ttft_p90")
        if over_load is not None:
            return Figure("opening", "TTFT p90 over load, by arm", over_load)
    bars = latency.latency_bars(evidence.cells, "ttft", "Time to first token")
    return Figure("opening", "Time to first token by arm", bars)


def _decided_by(searches: Sequence[Search]) -> str:
    """The measure for which levels missed the objective: stretch where all of them had enough good
    turns, else those."""
    short = [
        level["in_time_share"] < search.slo.get("attainment", 1.0)
        for search in searches
        for level in search.levels
        if level.get("meets") is False and level.get("in_time_share") is not None
    ]
    return "stretch_p90" if short and not any(short) else "in_time_share"


def _facts(evidence: Evidence) -> list[tuple[str, str]]:
    first = evidence.cells[0].runs[0] if evidence.cells else evidence.runs[0]
    return [
        ("Trace", _trace(evidence.runs)),
        ("Requests", _requests(evidence, first)),
        ("Lengths", _lengths(first)),
        ("Prompt cost", _prompt_cost(evidence.runs)),
        ("Load", _load(evidence, first)),
        ("Measured", loads.window_words(first)),
        ("Not settled", _unsettled(evidence.cells)),
        ("Compared", answer(evidence) if best(evidence) else ""),
        ("Objective", _objective(evidence)),
        ("Model", ", ".join(sorted(facts.models(evidence.runs)))),
        ("Machine", "; ".join(sorted(facts.machines(evidence.runs)))),
        ("Runs", _runs(evidence)),
    ]


def _trace(runs: Sequence[Run]) -> str:
    """Name and first digits of the SHA-256 of each trace."""
    found = {}
    for run in runs:
        trace = run.manifest.get("trace") or {}
        path = str(trace.get("path") or (run.trace.path if run.trace is not None else ""))
        sha = str(trace.get("sha256") or (run.trace.sha256 if run.trace is not None else ""))
        if path or sha:
            name = path.replace("\\", "/").rpartition("/")[2]
            found[(name, sha)] = f"{name} (SHA-256 {sha[:12]})" if sha else name
    return "; ".join(found.values())


def _objective(evidence: Evidence) -> str:
    """What makes a turn good, and what meets the objective."""
    slo = evidence.slo
    parts = [f"{slo.attainment * 100:g} % of turns keep that", "no session starves"]
    if math.isfinite(slo.patience_s):
        parts.append(f"at most 1 % of turns wait over {slo.patience_s:g} s")
    if slo.late_share_p90 < 1:
        share = f"{slo.late_share_p90:.0%}"
        parts.append(f"one session in ten at most is late for over {share} of its time")
    if math.isfinite(slo.stretch_p90):
        parts.append(f"stretch p90 is at most {slo.stretch_p90:g}")
    return f"{facts.slo_words(slo)}; met where {', '.join(parts)}"


def _unsettled(cells: Sequence[Cell]) -> str:
    """Which windows show the start of the load, and by what signs; those named are the first."""
    signs = [words for cell in cells for words in cell.unsettled]
    more = f"; and {len(signs) - _MOST_SIGNS} more runs" if len(signs) > _MOST_SIGNS else ""
    return "; ".join(signs[:_MOST_SIGNS]) + more


def _requests(evidence: Evidence, run: Run) -> str:
    """Of one run, or from the least to the most where loads differ in what they let through."""
    tables = [run.requests]
    if len(evidence.by_load) > 1:
        tables = [each.requests for cell in evidence.cells for each in cell.runs]
    requests = [len(table) for table in tables]
    sessions = [table["session_id"].nunique() for table in tables]
    turns = [len(table) / n for table, n in zip(tables, sessions, strict=True) if n]
    words = (
        f"{_span(requests, 'd')} in {_span(sessions, 'd')} sessions, "
        f"{_span(turns or [0.0], '.1f')} turns a session"
    )
    return words + (", in each run" if len(evidence.runs) > 1 else "")


def _span(values: Sequence[float], form: str) -> str:
    """`204`, or `204 to 310` where they differ."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def _lengths(run: Run) -> str:
    table = run.requests
    if table.empty:
        return ""

    def span(column: str) -> str:
        p50, p90 = (float(table[column].quantile(q)) for q in (0.5, 0.9))
        return f"{number(p50)} at the median, {number(p90)} at p90"

    return f"input {span('input_length')}; output {span('output_length')} tokens"


def _prompt_cost(runs: Sequence[Run]) -> str:
    """By what an experiment's lengths were multiplied, so that prompts cost what it asks for."""
    told = (run.manifest.get("prompt_cost") for run in runs)
    return "; ".join(dict.fromkeys(prompt_cost_words(found) for found in told if found))


def _load(evidence: Evidence, run: Run) -> str:
    cells: Sequence[Cell] = evidence.cells
    if len(evidence.by_load) < 2:
        return loads.words(run)
    levels = loads.levels(cells)
    known = sorted({levels.of[cell.name] for cell in cells})
    if len(known) == len(evidence.by_load):
        return f"{len(known)} levels: {', '.join(f'{v:.3g}' for v in known)} {levels.title}"
    return f"{len(evidence.by_load)} levels: {', '.join(str(load) for load in evidence.by_load)}"


def _runs(evidence: Evidence) -> str:
    cells = evidence.cells
    if not cells:
        return DASH
    counts = sorted({len(cell.runs) for cell in cells})
    of_each = "1 of each" if counts == [1] else f"{'–'.join(map(str, counts))} of each"
    excluded = f", {len(evidence.excluded)} excluded" if evidence.excluded else ""
    return f"{sum(len(cell.runs) for cell in cells)} that count ({of_each}){excluded}"
