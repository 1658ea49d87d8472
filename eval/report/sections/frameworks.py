"""Every SGLang arm against every vLLM arm, so that the stronger of each is in sight."""

from __future__ import annotations

from eval.compare import Comparison, Verdict
from eval.document import Section
from eval.formatting import Entry, effect, effect_interval
from eval.report.claims import TAGS
from eval.report.evidence import Evidence
from eval.tables import Table, plain

_SHOWN = (
    "ttft_p50",
    "ttft_p90",
    "tpot_p90",
    "worst_gap_p90",
    "e2e_p90",
    "throughput_output_tps_per_gpu",
    "in_time_per_s",
    "apc",
)


def section(evidence: Evidence) -> Section | None:
    """One row a pair of arms, one column a measure."""
    found = [item for item in evidence.across if item.measure.key in _SHOWN]
    if not found:
        return None
    by_pair: dict[tuple[str, str], dict[str, Comparison]] = {}
    for item in found:
        by_pair.setdefault((item.arm, item.baseline), {})[item.measure.key] = item
    shown = [key for key in _SHOWN if any(key in items for items in by_pair.values())]
    labels = {item.measure.key: item.measure.label for item in found}
    rows = [
        [Entry(ours), Entry(theirs), *(_entry(items.get(key)) for key in shown)]
        for (ours, theirs), items in by_pair.items()
    ]
    records = [
        {"sglang": item.arm, "vllm": item.baseline, "measure": item.measure.key}
        | {"effect": plain(item.effect.value), "in_points": item.measure.in_points}
        | {"effect_low": plain(item.effect.low), "effect_high": plain(item.effect.high)}
        | {"verdict": str(item.verdict)}
        for item in found
    ]
    table = Table(
        ["SGLang", "vLLM", *(labels[key] for key in shown)],
        rows,
        key="frameworks",
        records=records,
    )
    return Section(
        "frameworks",
        "SGLang against vLLM",
        ["Change from the vLLM arm to the SGLang arm, on the requests that both answered."],
        [("", table)],
    )


def _entry(item: Comparison | None) -> Entry:
    if item is None:
        return Entry("–")
    words = "" if item.verdict is Verdict.UNJUDGED else str(item.verdict)
    return Entry(
        effect(item.measure, item.effect.value),
        effect_interval(item.measure, item.effect),
        TAGS[item.verdict],
        words.replace("no difference beyond noise", "within noise"),
    )
