"""Each arm against the baseline, measure by measure, on the requests that both answered."""

from __future__ import annotations

import math

from eval.compare import Comparison
from eval.document import Section
from eval.formatting import Entry, effect, effect_interval, percent
from eval.report.claims import TAGS
from eval.report.evidence import Evidence
from eval.tables import COUNT, PERCENT, Column, tabulate


def section(evidence: Evidence) -> Section | None:
    """The table of all comparisons, with what to make of many of them."""
    if not evidence.comparisons:
        return None

    def floor(item: Comparison) -> str | None:
        return f"±{percent(item.noise_floor)}" if math.isfinite(item.noise_floor) else None

    def interval(item: Comparison) -> str:
        if evidence.once and item.effect.known:
            return "one repeat: no interval"
        return effect_interval(item.measure, item.effect)

    def verdict(item: Comparison) -> str | None:
        return None if evidence.once else str(item.verdict)

    columns: tuple[Column[Comparison], ...] = (
        Column("arm", "Arm", lambda item: item.arm),
        Column("baseline", "", lambda item: item.baseline),
        Column("measure", "Measure", lambda item: item.measure.label),
        Column(
            "change",
            "Change",
            lambda item: Entry(effect(item.measure, item.effect.value)),
            under=interval,
        ),
        Column("effect", "", lambda item: item.effect),
        Column("in_points", "", lambda item: item.measure.in_points),
        Column("primary", "", lambda item: item.primary),
        Column("noise_floor_words", "A/A noise floor", floor),
        Column("noise_floor", "", lambda item: item.noise_floor),
        Column("better_share", "Requests better", lambda item: item.better_share, PERCENT),
        Column("requests", "Requests", lambda item: item.requests, COUNT),
        Column(
            "verdict",
            "Verdict",
            verdict,
            tag=lambda item: TAGS[item.verdict],
        ),
        Column("p_value", "", lambda item: item.p_value),
        Column("holds_after_holm", "Holds after Holm", lambda item: item.holds),
    )
    # One run an arm judges nothing, and a row for each measure, arm and load is long: the table is
    # there for whoever wants it.
    folded = evidence.once or len(evidence.by_load) > 1
    found = Section("comparison", "Arms compared on the same requests", folded=folded)
    found.tables.append(("", tabulate("comparison", evidence.comparisons, columns)))
    found.text.append(
        f"Each arm against {evidence.baseline}, "
        "on the requests that both answered in every run. The interval holds the choice "
        "of sessions and the spread between repeats; the noise floor is what two runs of the same "
        "arm reach. Better or worse is said only outside both."
    )
    judged = [item for item in evidence.comparisons if item.holds is not None]
    if len(judged) > 1:
        expected = 0.05 * len(judged)
        found.text.append(
            f"{len(judged)} comparisons are of primary measures: with no real difference anywhere, "
            f"about {expected:.1f} would still look significant at 5 %. The last column keeps the "
            "chance of any false one at 5 % (Holm)."
        )
    return found
