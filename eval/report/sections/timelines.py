"""How a run went: requests in flight, the engines' queues and their KV pools over time."""

from __future__ import annotations

from collections.abc import Sequence

from eval.document import Figure, Section
from eval.machine import read_samples
from eval.metrics import Cell
from eval.records import read_steps
from eval.report import loads
from eval.report.evidence import Evidence
from eval.report.figures import timelines as figures

# A page with every cell of a large matrix would be neither read nor small.
MOST_CELLS = 8
CHOICE = "the highest load of each arm"


def section(evidence: Evidence) -> Section | None:
    """Timelines of each cell's first valid run."""
    found = Section("timelines", "Timelines", folded=len(evidence.cells) > 4)
    found.text.append(
        "Each arm's first valid run: requests in flight as the client saw them, and the engines' "
        "queues and KV pools: of every step where workers recorded them, else as the engine said "
        "every few seconds. What is shaded is not measured."
    )
    shown = shown_cells(evidence.cells)
    if len(shown) < len(evidence.cells):
        found.text.append(f"Of {len(evidence.cells)} cells {len(shown)} are drawn: {CHOICE}.")
    for i, cell in shown:
        if cell.runs[0].manifest.get("imported", {}).get("timed", True):
            found.figures += _figures(i, cell)
    return found if found.figures else None


def shown_cells(cells: Sequence[Cell]) -> list[tuple[int, Cell]]:
    """All cells where they are few; else the highest load of each arm, the first arms."""
    numbered = list(enumerate(cells))
    if len(numbered) <= MOST_CELLS:
        return numbered
    levels = loads.levels(cells).of
    highest: dict[str, tuple[int, Cell]] = {}
    for i, cell in numbered:
        best = highest.get(cell.arm)
        if best is None or levels[cell.name] > levels[best[1].name]:
            highest[cell.arm] = (i, cell)
    return list(highest.values())[:MOST_CELLS]


def _figures(i: int, cell: Cell) -> list[Figure]:
    run = cell.runs[0]
    shades = loads.shades(run, float(run.all_requests["finished_s"].max()))
    flight = figures.timeline(cell, shades)
    found = [Figure(f"timeline-{i}", f"Requests in flight, {cell.name}", flight)]
    steps = read_steps(run)
    if steps.empty:
        sampled = read_samples(run).engines
        queues = figures.load_timeline(cell, sampled, shades)
        kv = figures.sample_timeline(
            cell, sampled, "id", "kv_used_share", "KV pool in use", "%", 100.0, shades
        )
    else:
        queues = figures.queue_timeline(cell, steps, shades)
        kv = figures.kv_timeline(cell, steps, shades)
    for key, words, plot in (
        ("queues", "Requests in the engines", queues),
        ("kv", "KV pool in use", kv),
    ):
        if plot is not None:
            found.append(Figure(f"{key}-{i}", f"{words}, {cell.name}", plot))
    return found
