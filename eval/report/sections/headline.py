"""The headline: every measure of every cell, with intervals and verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from eval.compare import Comparison, Verdict
from eval.document import Figure, Section
from eval.formatting import DASH, Entry, effect, percent, seconds
from eval.metrics import Cell
from eval.outcomes import MEASURES, Measure
from eval.report.arms import per_unit, share_unit
from eval.report.claims import TAGS
from eval.report.evidence import Evidence
from eval.report.figures import latency
from eval.stats import Estimate
from eval.tables import (
    COUNT,
    NUMBER,
    PERCENT,
    RATIO,
    SECONDS,
    Column,
    Table,
    known_quantile,
    tabulate,
)

_FORMS = {
    "quantile": SECONDS,
    "sessions": SECONDS,
    "rate": NUMBER,
    "share": PERCENT,
    "mean": SECONDS,
}


def _column(measure: Measure) -> Column[Cell]:
    """A compared measure of a cell; a quantile only where enough lies beyond it."""

    def value(cell: Cell) -> Estimate | None:
        found = cell.measures[measure.key]
        return found if measure.quantile is None else known_quantile(found, measure.quantile)

    form = RATIO if measure.column == "stretch" else _FORMS[measure.kind]
    form = PERCENT if measure.points else form
    return Column(measure.key, measure.label, value, form)


def _gaps(cell: Cell) -> Entry:
    p50, _, p99 = cell.latency["itl"]
    return Entry(f"{seconds(p50.value)} / {seconds(p99.value)}" if p50.known else DASH)


def _steady(cell: Cell) -> str:
    """The least steady of the cell's runs: not sustained, not settled, not assessed, steady."""
    states = {str(found.state) for found in cell.steadiness}
    if "not sustained" not in states and cell.unsettled:
        return "not settled"
    return next((state for state in ("not sustained", "not assessed") if state in states), "steady")


def _left_out(cell: Cell) -> Entry:
    """The longest start of a run's window that MSER-5 would leave out."""
    known = [found.left_out_s for found in cell.steadiness if found.left_out_s is not None]
    return Entry(seconds(max(known)) if known else DASH)


def _client_lag(cell: Cell) -> Entry:
    """How late the client itself was, and how much of TTFT that is."""
    share, quantile = _lag_share(cell)
    under = f"{percent(share)} of TTFT {quantile}" if math.isfinite(share) else ""
    return Entry(seconds(cell.lag_p99_s), under)


def _lag_share(cell: Cell) -> tuple[float, str]:
    """The client's lateness over TTFT p90, or over its p50 where too few answers lie beyond a p90;
    and which of them."""
    p50, p90, *_ = cell.latency["ttft"]
    for value, quantile, name in ((p90, 0.9, "p90"), (p50, 0.5, "p50")):
        known = known_quantile(value, quantile)
        if known is not None and known.known and known.value > 0:
            return cell.lag_p99_s / known.value, name
    return float("nan"), ""


def _failures(cell: Cell) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in cell.errors.items())


_FACTS: tuple[Column[Cell], ...] = (
    Column("longest_wait_s", "Longest wait, at least", lambda cell: cell.felt["longest_wait_s"],
           SECONDS),
    Column("starved_sessions", "Sessions starved", lambda cell: cell.felt["starved_sessions"],
           COUNT),
    Column("served_sessions", "Sessions served", lambda cell: cell.felt["served_sessions"], COUNT),
    Column("undecided_turns", "Turns not decided", lambda cell: cell.felt["undecided_turns"],
           COUNT),
    Column("not_met", "Objective", lambda cell: "; ".join(cell.not_met) or "met"),
    Column("errors", "Errors", lambda cell: f"{sum(cell.errors.values())} of {cell.n}",
           under=_failures),
    Column("itl_p50_p99", "ITL p50 / p99", _gaps),
    Column("input_tps", "Tokens prefilled / s", lambda cell: cell.input_tps),
    Column("one_arrival_share", "Answers in one arrival", lambda cell: cell.one_arrival_share,
           PERCENT),
    Column("first_chunk_share", "Tokens in the first arrival", lambda cell: cell.first_chunk_share,
           PERCENT),
    Column("client_lag", "Client late, p99", _client_lag),
    Column("steady", "State", _steady),
    Column("warm_up_left_out", "Warm-up left in the window (MSER-5)", _left_out),
    Column("runs", "Valid runs", lambda cell: len(cell.runs), COUNT),
)  # fmt: skip


def columns(cells: Sequence[Cell]) -> tuple[Column[Cell], ...]:
    """What is said of a cell: every compared measure, then facts; rates by worker too where there
    is no GPU to divide by."""
    measures = tuple(_column(measure) for measure in MEASURES)
    if share_unit(cells) != "worker":
        return (*measures, *_FACTS)
    by_worker: Column[Cell] = Column(
        "throughput_output_tps_per_worker",
        "Output tokens/s a worker",
        lambda cell: per_unit(cell, cell.output_tps, "worker"),
    )
    return (*measures, by_worker, *_FACTS)


def section(evidence: Evidence) -> Section | None:
    """The headline's table for each load, and bars of the latencies and of APC."""
    # Over several loads the curves say it; the tables are there for whoever wants the figures.
    found = Section("headline", "Every figure", folded=len(evidence.by_load) > 1)
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
        ("worst_gap", "Worst gap of an answer"),
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
        entries = [
            _judged(row[at], by_key.get((column.key, cell.name)))
            for cell, row in zip(cells, flat.rows, strict=True)
        ]
        if any(entry.text != DASH for entry in entries):
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
        Column("itl_p50_s", "", lambda cell: cell.latency["itl"][0].value),
        Column("client_lag_p99_s", "", lambda cell: cell.lag_p99_s),
        Column("client_lag_share_of_ttft", "", lambda cell: _lag_share(cell)[0]),
    )
    spoken = {"errors", "itl_p50_p99", "client_lag", "warm_up_left_out"}
    measures = [column for column in columns(cells) if column.key not in spoken]
    return tabulate("cells", cells, (*names, *measures))


def _judged(entry: Entry, item: Comparison | None) -> Entry:
    if item is None or entry.text == DASH:
        return entry
    words = effect(item.measure, item.effect.value)
    if item.verdict is Verdict.NONE:
        words += ", within noise"
    elif item.verdict is not Verdict.UNJUDGED:
        words += f", {item.verdict}"
    return replace(entry, tag=TAGS[item.verdict], verdict=words)
