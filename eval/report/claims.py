"""What a report claims: verdicts with their size, why arms have none, and what was left out.

Owns those sentences. Each claim is a tag (better, worse, none, unjudged) and one sentence.
"""

from __future__ import annotations

import math

from eval.compare import Comparison, Verdict
from eval.formatting import effect, effect_interval, seconds
from eval.report.evidence import Evidence

# A client that is late by more than this share of the median TTFT is worth a word.
_LATE_SHARE = 0.2
# A window that is shorter than it was to be, by more than its last answer's end explains.
_CUT_SHARE = 0.02
_MOST_CELLS = 4
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
    for baseline, arm in dict.fromkeys((item.baseline, item.arm) for item in judged):
        pair = [item for item in judged if (item.baseline, item.arm) == (baseline, arm)]
        for verdict in (Verdict.BETTER, Verdict.WORSE, Verdict.NONE):
            same = [item for item in pair if item.verdict is verdict]
            if not same:
                continue
            words = [
                item.measure.label
                if verdict is Verdict.NONE
                else f"{item.measure.label} {effect(item.measure, item.effect.value)} "
                f"({effect_interval(item.measure, item.effect)})"
                f"{'*' if item.holds is False else ''}"
                for item in same
            ]
            line = f"{arm} against {baseline}, {verdict}: {', '.join(words)}."
            said.append((TAGS[verdict], line))
    if any("*" in claim for _, claim in said):
        caution = (
            "* does not hold any more once all comparisons of primary measures in this report are "
            "allowed for (Holm): look again before relying on it."
        )
        said.append(("none", caution))
    return said


def claims(evidence: Evidence) -> list[tuple[str, str]]:
    """What limits the report: why arms have no verdict, and the runs that do not count."""
    said = [("unjudged", words) for words in _unjudged(evidence)]
    said += [("unjudged", words) for words in _late_clients(evidence)]
    said += [("unjudged", words) for words in _cut_windows(evidence)]
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


def _late_clients(evidence: Evidence) -> list[str]:
    """Cells of which the client itself was late by much of what it measured, in one sentence."""
    found = []
    for cell in evidence.cells:
        p50 = cell.latency["ttft"][0].value
        if math.isfinite(p50) and cell.lag_p99_s > _LATE_SHARE * p50:
            found.append(f"{cell.name} {seconds(cell.lag_p99_s)} of {seconds(p50)}")
    if not found:
        return []
    words = "The client itself sent late, so that the tail of TTFT is partly the client's"
    return [f"{words}: {', '.join(found)} (lateness p99 of TTFT p50)."]


def _cut_windows(evidence: Evidence) -> list[str]:
    """Cells that had nothing left to send before their window's time was over, in one sentence."""
    found = []
    for cell in evidence.cells:
        windows = [run.window for run in cell.runs if run.window is not None]
        cut_s = [
            (window.length_s, window.asked_s)
            for window in windows
            if window.asked_s is not None and window.length_s < (1 - _CUT_SHARE) * window.asked_s
        ]
        if cut_s:
            length_s, asked_s = min(cut_s)
            found.append(f"{cell.name} {seconds(length_s)} of {seconds(asked_s)}")
    if not found:
        return []
    words = (
        "Nothing was left to send before the window was over, so that it has the load's end in it"
    )
    more = len(found) - _MOST_CELLS
    told = ", ".join(found[:_MOST_CELLS]) + (f" and {more} more" if more > 0 else "")
    return [f"{words}: {told}. With phases.recycle = true sessions are played again."]


def _unjudged(evidence: Evidence) -> list[str]:
    """Why arms have no verdict at all, and cells no figures."""
    found: list[str] = []
    pairs: dict[tuple[str, str], list[Comparison]] = {}
    for item in evidence.comparisons:
        pairs.setdefault((item.baseline, item.arm), []).append(item)
    unsustained = {cell.name for cell in evidence.cells if cell.unsustained is not None}
    shown = False
    for (baseline, arm), items in pairs.items():
        if any(item.verdict is not Verdict.UNJUDGED for item in items):
            continue
        if {baseline, arm} & unsustained:  # said below, once
            continue
        if evidence.once and any(item.requests for item in items):
            shown = True
            continue
        reasons = list(dict.fromkeys(item.reason for item in items if item.reason))
        found.append(f"{arm} against {baseline}: {'; '.join(reasons)}.")
    if shown:
        found.append(
            "Differences are shown without a verdict: every arm ran once, so nothing shows "
            "how much a rerun would differ. Set repeats = 2 or more."
        )
    found += [
        f"{cell.name}: {cell.unsustained}; no latency or rate of it is given."
        for cell in evidence.cells
        if cell.unsustained is not None
    ]
    return found
