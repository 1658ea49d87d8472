"""How a run went: requests in flight, the engines' queues and their KV pools over time."""

from __future__ import annotations

from eval.document import Figure, Section
from eval.machine import read_samples
from eval.metrics import Cell
from eval.records import read_steps
from eval.report.evidence import Evidence
from eval.report.figures import timelines as figures


def section(evidence: Evidence) -> Section | None:
    """Timelines of each cell's first valid run."""
    found = Section("timelines", "Timelines")
    found.text.append(
        "Each arm's first valid run: requests in flight as the client saw them, and the engines' "
        "queues and KV pools: of every step where workers recorded them, else as the engine said "
        "every few seconds."
    )
    for i, cell in enumerate(evidence.cells):
        if cell.runs[0].manifest.get("imported", {}).get("timed", True):
            found.figures += _figures(i, cell)
    return found if found.figures else None


def _figures(i: int, cell: Cell) -> list[Figure]:
    found = [Figure(f"timeline-{i}", f"Requests in flight, {cell.name}", figures.timeline(cell))]
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
            found.append(Figure(f"{key}-{i}", f"{words}, {cell.name}", plot))
    return found
