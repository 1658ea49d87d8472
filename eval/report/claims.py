"""What a report claims: verdicts with their size, why arms have none, and what was left out.

Owns those sentences. Each claim is a tag (better, worse, none, unjudged) and one sentence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from eval.compare import Comparison, Verdict, holm
from eval.formatting import change, change_interval
from eval.report.evidence import Evidence

TAGS = {
    Verdict.BETTER: "better",
    Verdict.WORSE: "worse",
    Verdict.NONE: "none",
    Verdict.UNJUDGED: "unjudged",
}


def verdicts(evidence: Evidence) -> list[tuple[str, str]]:
    """What each arm is better, worse and no different in, one line each, and which of it would not
    hold once all comparisons are allowed for."""
    said: list[tuple[str, str]] = []
    judged = [item for item in evidence.comparisons if item.verdict is not Verdict.UNJUDGED]
    strict = after_holm(evidence.comparisons)
    for baseline, arm in dict.fromkeys((item.baseline, item.arm) for item in judged):
        pair = [item for item in judged if (item.baseline, item.arm) == (baseline, arm)]
        for verdict in (Verdict.BETTER, Verdict.WORSE, Verdict.NONE):
            same = [item for item in pair if item.verdict is verdict]
            if not same:
                continue
            words = [
                item.measure.label
                if verdict is Verdict.NONE
                else f"{item.measure.label} {change(item.ratio.value)} "
                f"({change_interval(item.ratio)}){'' if strict.get(id(item)) else '*'}"
                for item in same
            ]
            line = f"{arm} against {baseline}, {verdict}: {', '.join(words)}."
            said.append((TAGS[verdict], line))
    if any("*" in claim for _, claim in said):
        caution = (
            f"* does not hold any more once all {len(judged)} comparisons of this report are "
            "allowed for (Holm): look again before relying on it."
        )
        said.append(("none", caution))
    return said


def claims(evidence: Evidence) -> list[tuple[str, str]]:
    """What limits the report: why arms have no verdict, and the runs that do not count."""
    said = [("unjudged", words) for words in _unjudged(evidence)]
    if not evidence.cells:
        said.append(("unjudged", "No run is valid: there is nothing to compare."))
    for run, found in evidence.excluded:
        said.append(
            (
                "worse",
                f"{run.cell}/r{run.repeat} is excluded: "
                + "; ".join(f"{v.rule}: {v.detail}" for v in found)
                + ".",
            )
        )
    return said


def _unjudged(evidence: Evidence) -> list[str]:
    """Why arms have no verdict at all."""
    found: list[str] = []
    pairs: dict[tuple[str, str], list[Comparison]] = {}
    for item in evidence.comparisons:
        pairs.setdefault((item.baseline, item.arm), []).append(item)
    once = all(len(cell.runs) == 1 for cell in evidence.cells)
    shown = False
    for (baseline, arm), items in pairs.items():
        if not any(item.requests for item in items):
            found.append(
                f"{arm} against {baseline}: no request in common, so nothing compares them."
            )
        elif all(item.verdict is Verdict.UNJUDGED for item in items):
            shown = True
            if not once:
                found.append(
                    f"{arm} against {baseline} is shown without a verdict: the requests that both "
                    "answered in every run are of too few sessions."
                )
    if shown and once:
        found.append(
            "Differences are shown without a verdict: every arm ran once, so nothing shows "
            "how much a rerun would differ. Set repeats = 2 or more."
        )
    return found


def after_holm(comparisons: Sequence[Comparison]) -> dict[int, bool]:
    """By identity, which comparisons stay significant when all of them are allowed for."""
    judged = [item for item in comparisons if math.isfinite(item.p_value)]
    kept = holm([item.p_value for item in judged])
    return {id(item): keep for item, keep in zip(judged, kept, strict=True)}
