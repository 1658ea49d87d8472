"""What came from a cache, what could have, and what had been there and was computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from eval.document import Figure, Section
from eval.metrics import Cell
from eval.plot import PALETTE, Axis, Chart, Line, Shade
from eval.recomputed import Account, Belady, Recomputed, recomputed
from eval.report import loads
from eval.report.evidence import Evidence
from eval.report.sections.timelines import shown_cells
from eval.tables import COUNT, PERCENT, SECONDS, TOKENS, Column, tabulate

_WORDS = (
    "Best possible: what a cache without end would have served. Recomputed: the difference, what "
    "had been computed before and was computed again; of it, evicted had been on the worker that "
    "was asked, the rest on others only. Best replacement: what one pool of the same capacity "
    "could have kept by knowing the future, an upper bound."
)
_TITLES = ("Cached", "Best possible", "Recomputed")


@dataclass(frozen=True)
class _Row:
    """The account of one run, or of one of its workers."""

    cell: str
    run: int | None
    worker: str
    account: Account
    belady: Belady | None = None


_COLUMNS: tuple[Column[_Row], ...] = (
    Column("arm", "Arm", lambda row: row.cell),
    Column("run", "Run", lambda row: None if row.run is None else f"r{row.run}"),
    Column("worker", "Worker", lambda row: row.worker),
    Column("requests", "Requests", lambda row: row.account.requests, COUNT),
    Column("prompt_tokens", "Prompt tokens", lambda row: row.account.prompt_tokens, TOKENS),
    Column("cached_share", _TITLES[0], lambda row: row.account.cached_share, PERCENT),
    Column("best_share", _TITLES[1], lambda row: row.account.best_share, PERCENT),
    Column("recomputed_share", _TITLES[2], lambda row: row.account.recomputed_share, PERCENT),
    Column("recomputed_tokens", "", lambda row: row.account.recomputed_tokens),
    Column("evicted_tokens", "Evicted tokens", lambda row: row.account.evicted_tokens, TOKENS),
    Column("elsewhere_tokens", "Held elsewhere", lambda row: row.account.elsewhere_tokens, TOKENS),
    Column("recomputed_gpu_s", "Time on it", lambda row: row.account.recomputed_gpu_s, SECONDS),
    Column(
        "best_replacement_share",
        "Best replacement",
        lambda row: None if row.belady is None else row.belady.share,
        PERCENT,
    ),
)


def section(evidence: Evidence) -> Section | None:
    """The account of every run that counts, then of each worker, and its course over time."""
    found = Section("recomputed", "What was recomputed", [_WORDS])
    runs: list[_Row] = []
    workers: list[_Row] = []
    drawn = {i for i, _ in shown_cells(evidence.cells)}
    for i, cell in enumerate(evidence.cells):
        for k, run in enumerate(cell.runs):
            account = recomputed(run)
            if account is None:
                continue
            runs.append(_Row(cell.name, run.repeat, "", account.whole, account.belady))
            workers += [
                _Row(cell.name, run.repeat, worker, part)
                for worker, part in account.by_worker.items()
            ]
            if k == 0 and i in drawn:
                found.figures += _figures(i, cell, account)
    if not runs:
        return None
    found.tables.append(("", tabulate("recomputed", _pooled(runs), _COLUMNS)))
    # For whoever looks for the worker or the run that differs; the exports have them too.
    for heading, key, rows in (
        ("Each run", "recomputed_runs", runs if not evidence.once else []),
        ("Each worker", "recomputed_workers", [row for row in workers if row.worker != "fleet"]),
    ):
        if rows:
            found.tables.append((heading, replace(tabulate(key, rows, _COLUMNS), folded=True)))
    return found


def _pooled(runs: Sequence[_Row]) -> list[_Row]:
    """One row a cell: the sums over its runs."""
    by_cell: dict[str, list[_Row]] = {}
    for row in runs:
        by_cell.setdefault(row.cell, []).append(row)
    found = []
    for cell, rows in by_cell.items():
        sums = {
            name.name: sum(getattr(row.account, name.name) for row in rows)
            for name in fields(Account)
        }
        known = [row.belady for row in rows if row.belady is not None]
        belady = None
        if len(known) == len(rows):
            belady = Belady(
                known[0].capacity_tokens,
                sum(one.cached_tokens for one in known),
                sum(one.prompt_tokens for one in known),
            )
        found.append(_Row(cell, None, "", Account(**sums), belady))
    return found


def _figures(i: int, cell: Cell, account: Recomputed) -> list[Figure]:
    """Shares of all prompt tokens over time, and what each worker recomputed."""
    if account.over_time.empty:
        return []
    shades: Sequence[Shade] = loads.shades(cell.runs[0], float(account.over_time["at_s"].max()))
    whole = account.over_time.groupby("at_s").sum(numeric_only=True).reset_index()
    whole = whole[whole["prompt_tokens"] > 0]
    at = whole["at_s"].tolist()
    lines = []
    for name, column, colour, dash in (
        (_TITLES[0], "cached_tokens", PALETTE[2], False),
        (_TITLES[1], "best_tokens", PALETTE[6], True),
        (_TITLES[2], "recomputed_tokens", PALETTE[5], False),
    ):
        shares = (100 * whole[column] / whole["prompt_tokens"]).tolist()
        lines.append(Line(name, at, shares, colour, dash=dash))
    title = f"Prompt tokens over time, {cell.name}"
    time = Axis("seconds from the start")
    chart = Chart(
        title, time, Axis("of prompt tokens", "%", low=0.0, high=101.0), (*shades, *lines), 220
    )
    found = [Figure(f"recomputed-{i}", title, chart)]
    workers = list(account.over_time.groupby("worker"))
    if len(workers) > 1:
        each = [
            Line(str(name), rows["at_s"].tolist(), rows["recomputed_tokens"].tolist(),
                 PALETTE[k % len(PALETTE)])
            for k, (name, rows) in enumerate(workers)
        ]  # fmt: skip
        title = f"Tokens recomputed by worker, {cell.name}"
        chart = Chart(title, time, Axis("tokens", zero=True), (*shades, *each), 220)
        found.append(Figure(f"recomputed-{i}", title, chart))
    return found
