"""The headline: every measure of every cell, with intervals and verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from eval.compare import Comparison, Verdict
from eval.document import Figure, Section
from eval.formatting import Entry, change, number, percent, percent_entry, seconds
from eval.metrics import QUANTILES, Cell
from eval.report.arms import per_unit, share_unit
from eval.report.claims import TAGS
from eval.report.evidence import Evidence
from eval.report.figures import latency
from eval.tables import (
    COUNT,
    NUMBER,
    PERCENT,
    SECONDS,
    Column,
    Table,
    known_quantile,
    tabulate,
)


def _latency(name: str, index: int) -> Column[Cell]:
    quantile = QUANTILES[index]
    label = f"p{round(quantile * 100)}"
    return Column(
        f"{name}_{label}_s",
        f"{name.upper()} {label}",
        lambda cell: known_quantile(cell.latency[name][index], quantile),
        SECONDS,
    )


def _gaps(cell: Cell) -> Entry:
    p50, _, p99 = cell.latency["itl"]
    return Entry(f"{seconds(p50.value)} / {seconds(p99.value)}")


_COLUMNS: tuple[Column[Cell], ...] = (
    *(_latency(name, i) for name in ("ttft", "tpot", "e2e") for i in range(len(QUANTILES))),
    Column("itl_p50_p99", "ITL p50 / p99", _gaps),
    Column("apc", "APC", lambda cell: cell.apc, PERCENT),
    Column(
        "errors",
        "Errors",
        lambda cell: Entry(f"{sum(cell.errors.values())} of {cell.n}"),
        under=lambda cell: ", ".join(f"{n} {kind}" for kind, n in cell.errors.items()),
    ),
    Column("request_rps", "Requests / s", lambda cell: cell.request_rps, NUMBER),
    Column("input_tps", "Input tokens / s", lambda cell: cell.input_tps, NUMBER),
    Column("output_tps", "Output tokens / s", lambda cell: cell.output_tps, NUMBER),
    Column(
        "goodput_share",
        "Goodput",
        lambda cell: Entry(f"{percent(cell.goodput_share.value)}, {number(cell.goodput_rps)} / s"),
        under=lambda cell: percent_entry(cell.goodput_share).interval,
    ),
    Column("runs", "Valid runs", lambda cell: len(cell.runs), COUNT),
)


def columns(cells: Sequence[Cell]) -> tuple[Column[Cell], ...]:
    """The measures of a cell; rates by GPU (or worker) too where every cell's number is known."""
    unit = share_unit(cells)
    if not unit:
        return _COLUMNS
    key = unit.lower()
    return (
        *_COLUMNS,
        Column(
            f"output_tps_per_{key}",
            f"Output tokens / s a {unit}",
            lambda cell: per_unit(cell, cell.output_tps, unit),
        ),
        Column(
            f"goodput_rps_per_{key}",
            f"Goodput / s a {unit}",
            lambda cell: per_unit(cell, cell.goodput_rps, unit),
        ),
    )


def section(evidence: Evidence) -> Section | None:
    """The headline's table for each load, and bars of the latencies and of APC."""
    found = Section("headline", "Headline")
    for load, cells in evidence.by_load.items():
        names = {cell.name for cell in cells}
        table = headline(cells, [item for item in evidence.comparisons if item.arm in names])
        found.tables.append((f"Load {load}" if load else "", table))
    if not evidence.cells:
        return found
    best = next((cell.best_apc for cell in evidence.cells if math.isfinite(cell.best_apc)), None)
    against = f" Changes are against {evidence.baseline}." if evidence.comparisons else ""
    found.text.append(
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
        found.figures.append(
            Figure(
                f"bars-{metric}",
                f"{title} by arm, with 95 % intervals",
                latency.latency_bars(evidence.cells, metric, title),
            )
        )
    found.figures.append(
        Figure("apc", "Cached share of prompt tokens by arm", latency.apc_bars(evidence.cells))
    )
    return found


def headline(cells: Sequence[Cell], comparisons: Sequence[Comparison]) -> Table:
    """Rows of measures, columns of cells; under a value its interval, and the verdict."""
    by_key = {(item.measure.key, item.arm): item for item in comparisons}
    measures = columns(cells)
    flat = tabulate("", cells, measures, keep_empty=True)
    rows = []
    for column in measures:
        at = flat.columns.index(column.title)
        key = column.key.removesuffix("_s")
        entries = [
            _judged(row[at], by_key.get((key, cell.name)))
            for cell, row in zip(cells, flat.rows, strict=True)
        ]
        rows.append([Entry(column.title), *entries])
    return Table(["", *(cell.name for cell in cells)], rows, stacked=True)


def cells_table(cells: Sequence[Cell]) -> Table:
    """A row a cell, for programs: what the headline shows, and the numbers behind its words."""
    names: tuple[Column[Cell], ...] = (
        Column("cell", "Cell", lambda cell: cell.name),
        Column("arm", "", lambda cell: cell.arm),
        Column("load", "", lambda cell: cell.load),
        Column("requests", "", lambda cell: cell.n),
        Column("failed", "", lambda cell: sum(cell.errors.values())),
        Column("best_apc", "", lambda cell: cell.best_apc),
        Column("goodput_rps", "", lambda cell: cell.goodput_rps),
        Column("attainment", "", lambda cell: cell.goodput_share),
        Column("itl_p50_s", "", lambda cell: cell.latency["itl"][0].value),
    )
    spoken = {"errors", "goodput_share", "itl_p50_p99"}
    measures = [column for column in columns(cells) if column.key not in spoken]
    return tabulate("cells", cells, (*names, *measures))


def _judged(entry: Entry, item: Comparison | None) -> Entry:
    if item is None:
        return entry
    words = change(item.ratio.value)
    if item.verdict is Verdict.NONE:
        words += ", within noise"
    elif item.verdict is not Verdict.UNJUDGED:
        words += f", {item.verdict}"
    return replace(entry, tag=TAGS[item.verdict], verdict=words)
