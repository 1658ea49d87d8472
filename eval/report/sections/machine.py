"""What workers took of their machine: CPU, memory, GPUs."""

from __future__ import annotations

from eval.document import Figure, Section
from eval.machine import GIB, Use, machine_use, read_samples
from eval.report.evidence import Evidence
from eval.report.figures import timelines as figures
from eval.report.sections.timelines import shown_cells
from eval.tables import COUNT, NUMBER, PERCENT, SIZE, Column, Format, tabulate

_Row = tuple[str, Use]
_WATTS = Format(lambda value: f"{NUMBER.text(value)} W", lambda _: "")

_COLUMNS: tuple[Column[_Row], ...] = (
    Column("arm", "Arm", lambda row: row[0]),
    Column("process", "Process", lambda row: row[1].worker),
    Column("cpu_cores", "CPU cores", lambda row: row[1].cores_mean),
    Column("resident_bytes", "Resident", lambda row: row[1].rss_max_bytes, SIZE),
    Column(
        "gpu_busy_share", "GPU busy", lambda row: _on_gpu(row, "sm_mean_percent", 0.01), PERCENT
    ),
    Column("gpu_memory_bytes", "GPU memory", lambda row: _on_gpu(row, "memory_max_bytes"), SIZE),
    Column("power_w", "Power", lambda row: _on_gpu(row, "power_mean_w"), _WATTS),
    Column("sm_clock_mhz", "SM clock, MHz", lambda row: _on_gpu(row, "sm_clock_mean_mhz"), COUNT),
    Column("throttled_share", "Throttled", lambda row: _on_gpu(row, "throttled_share"), PERCENT),
    Column("nvlink_bytes", "NVLink in", lambda row: _on_gpu(row, "nvlink_received_bytes"), SIZE),
)

# What is drawn: table of samples, a line for each, column, what it is, unit, factor to the unit.
_TIMELINES = (
    ("processes", "id", "cores", "CPU of each process", "cores", 1.0),
    ("gpus", "gpu", "sm_percent", "GPU busy (time any kernel ran)", "%", 1.0),
    ("gpus", "gpu", "memory_used_bytes", "GPU memory in use", "GiB", 1 / GIB),
    ("gpus", "gpu", "power_w", "GPU power", "W", 1.0),
    ("gpus", "gpu", "nvlink_received_bps", "Received over NVLink", "GB/s", 1e-9),
)


def section(evidence: Evidence) -> Section | None:
    """Means and maxima by process of each cell's first valid run, and their course."""
    found = Section("machine", "CPU and GPU", folded=len(evidence.cells) > 4)
    rows: list[_Row] = []
    drawn = {cell.name for _, cell in shown_cells(evidence.cells)}
    for i, cell in enumerate(evidence.cells):
        samples = read_samples(cell.runs[0])
        rows += [(cell.name, use) for use in machine_use(samples)]
        if cell.name not in drawn:
            continue
        for table, by, column, what, unit, factor in _TIMELINES:
            sampled = getattr(samples, table)
            figure = figures.sample_timeline(cell, sampled, by, column, what, unit, factor)
            if figure is not None:
                found.figures.append(Figure(f"{column}-{i}", f"{what}, {cell.name}", figure))
    if not rows:
        return None
    found.text.append(
        "Each arm's first valid run, sampled while requests were replayed: means, and the most "
        "memory. GPU busy is the share of time in which any kernel ran, as NVML says; it is not "
        "how much of the GPU was used."
    )
    found.tables.append(("", tabulate("machine", rows, _COLUMNS)))
    return found


def _on_gpu(row: _Row, name: str, factor: float = 1.0) -> float | None:
    return getattr(row[1], name) * factor if row[1].gpus else None
