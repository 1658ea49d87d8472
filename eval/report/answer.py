"""The report's answer in one sentence: from capacities, else from verdicts, else the figures.

Owns that sentence. It says no more than the data carries: where every arm ran once it names the
figures and says that nothing judges them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from eval.compare import Comparison, Verdict
from eval.formatting import effect, number, percent, seconds
from eval.metrics import Cell
from eval.outcomes import BY_KEY
from eval.report.evidence import Evidence
from eval.report.facts import simulated
from eval.report.searches import Search
from eval.search import by_turns_alone, why_no_more
from eval.tables import enough

_MOST_ARMS = 4
# How rates and shares are named after their value.
_RATES = {
    "throughput_output_tps": "output tokens/s",
    "requests_per_s": "requests/s",
    "first_tokens_per_s": "first tokens/s",
    "in_time_per_s": "turns within the SLO/s",
}
_SHARES = {
    "in_time_share": "of turns within the SLO",
    "apc": "of prompt tokens from cache",
    "recomputed_share": "of prompt tokens recomputed",
}


def answer(evidence: Evidence) -> str:
    """One sentence, or a few short ones where several arms are compared."""
    basis = simulated(evidence.runs)
    return (f"Simulated ({basis}), not measured. " if basis else "") + _answer(evidence)


def _answer(evidence: Evidence) -> str:
    if not evidence.cells:
        return "No run is valid: there is nothing to compare."
    if evidence.searches:
        return _capacities(evidence)
    if len({cell.arm for cell in evidence.cells}) == 1:
        return _alone(evidence.cells, evidence.primary)
    if evidence.once:
        return _unjudged(evidence)
    return _verdicts(evidence)


def _capacities(evidence: Evidence) -> str:
    return " ".join(f"{_capacity(search)}." for search in evidence.searches)


def _capacity(search: Search) -> str:
    """What one arm carries, and what that does not rest on: levels not tried, not judged whole, or
    not valid."""
    invalid = ", ".join(f"{level['load']:g}" for level in search.invalid)
    doubts = [
        *([] if search.finished else ["so far: the search has levels to try"]),
        *([by_turns_alone(search.unjudged)] if search.unjudged else []),
        *([f"a rule of validity was broken at {invalid}"] if invalid else []),
    ]
    after = f", {'; '.join(doubts)}" if doubts else ""
    if search.missed is not None:
        after += f"; {why_no_more(search.missed['load'], search.missed['not_met'])}"
    if math.isfinite(search.per_unit):
        value, interval = f"{search.per_unit:.3g}", search.interval
    else:
        value, interval = f"{search.agents:.3g}", ""
    where = f" a {search.unit}" if math.isfinite(search.per_unit) else " in all"
    if not search.agents > 0:
        return f"{search.arm}: no level met the objective{after}"
    within = f" ({interval})" if interval else ""
    return f"{search.arm} has a capacity of {value} {search.what}{where}{within}{after}"


def _figures(cell: Cell, primary: Sequence[str]) -> str:
    """What the experiment is about, of one cell; the output rate where nothing of it is known."""
    found = [words for key in primary if (words := _figure(cell, key))]
    known = list(dict.fromkeys(found))  # a p50 may stand for itself and for higher quantiles
    if cell.unsustained is not None:
        return ", ".join(["did not sustain its load", *known])
    return ", ".join(known or [f"{number(cell.output_tps)} output tokens/s"])


def _figure(cell: Cell, key: str) -> str:
    """One measure in words; a p50 in place of a higher quantile that too few answers lie beyond.
    Empty where it is unknown."""
    measure = BY_KEY[key]
    value = cell.measures[key]
    if measure.quantile is not None and not enough(value.n, measure.quantile):
        key = f"{key.rpartition('_')[0]}_p50"
        if key not in BY_KEY or not enough(cell.measures[key].n, 0.5):
            return ""
        measure, value = BY_KEY[key], cell.measures[key]
    if not value.known:
        return ""
    if measure.kind == "share":
        return f"{percent(value.value)} {_SHARES.get(key, measure.label)}"
    if measure.kind == "rate":
        return f"{number(value.value)} {_RATES.get(key, measure.label)}"
    if measure.column == "stretch":
        return f"{measure.label} {number(value.value)} ×"
    return f"{measure.label} {seconds(value.value)}"


def _alone(cells: Sequence[Cell], primary: Sequence[str]) -> str:
    ends = cells if len(cells) == 1 else (cells[0], cells[-1])
    return "; ".join(f"{cell.name}: {_figures(cell, primary)}" for cell in ends) + "."


def _unjudged(evidence: Evidence) -> str:
    cells = evidence.cells[:_MOST_ARMS]
    figures = "; ".join(f"{cell.name}: {_figures(cell, evidence.primary)}" for cell in cells)
    more = len(evidence.cells) - len(cells)
    return (
        f"One run an arm, which judges nothing. {figures}"
        + (f"; and {more} more below" if more else "")
        + "."
    )


def _verdicts(evidence: Evidence) -> str:
    """A clause an arm: in which primary measures it is better or worse, at how many loads."""
    arms = {cell.name: cell.arm for cell in evidence.cells}
    by_arm: dict[str, list[Comparison]] = {}
    for item in evidence.comparisons:
        if item.primary and item.verdict is not Verdict.UNJUDGED:
            by_arm.setdefault(arms.get(item.arm, item.arm), []).append(item)
    if not by_arm:
        return "There is no verdict; the reasons stand below."
    clauses = [_clause(arm, items) for arm, items in list(by_arm.items())[:_MOST_ARMS]]
    more = len(by_arm) - _MOST_ARMS
    tail = f"; {more} more arms below" if more > 0 else ""
    beyond = [cell.name for cell in evidence.cells if cell.unsustained is not None]
    if beyond:
        tail += f". Not sustained: {', '.join(beyond)}"
    return f"Against {evidence.baseline}: " + "; ".join(clauses) + tail + "."


def _clause(arm: str, items: Sequence[Comparison]) -> str:
    said = []
    for verdict in (Verdict.BETTER, Verdict.WORSE):
        by_measure: dict[str, list[Comparison]] = {}
        for item in items:
            if item.verdict is verdict:
                by_measure.setdefault(item.measure.label, []).append(item)
        words = [
            f"{label} ({_range(found)}{_at_loads(found, items)})"
            for label, found in by_measure.items()
        ]
        if words:
            said.append(f"{verdict} in {', '.join(words)}")
    return f"{arm} is {' and '.join(said)}" if said else f"{arm} differs in nothing beyond noise"


def _range(items: Sequence[Comparison]) -> str:
    effects = sorted(item.effect.value for item in items)
    low, high = (effect(items[0].measure, value) for value in (effects[0], effects[-1]))
    return low if low == high else f"{low} to {high}"


def _at_loads(found: Sequence[Comparison], items: Sequence[Comparison]) -> str:
    alike = [item for item in items if item.measure.key == found[0].measure.key]
    return f" at {len(found)} of {len(alike)} loads" if len(alike) > 1 else ""
