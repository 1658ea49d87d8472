"""What each arm is, as its manifests say: engine, workers by role, GPUs, KV, flags, router.

Owns reading arms out of manifests and the table of arms. Knows nothing of what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eval.formatting import DASH, number
from eval.metrics import Cell
from eval.records import Run
from eval.report.facts import engine_entry
from eval.tables import COUNT, Column, Table, tabulate
from launch.topology import Topology, WorkerGroup

# Keys that have a column of their own or say nothing of how fast an arm is.
_ELSEWHERE = {
    "name", "description", "engine", "workers", "router", "model", "device", "base_port", "host",
    "gpus", "placement", "environment", "max_total_tokens", "sample_interval_s", "hardware",
    "ready_timeout_s", "parallel_starts", "telemetry", "role", "count", "urls", "bootstrap_ports",
}  # fmt: skip


def worker_groups(run: Run) -> list[Mapping[str, Any]]:
    """The topology's groups of workers; empty where the manifest holds none."""
    groups = run.manifest.get("topology", {}).get("workers") or []
    return [group for group in groups if isinstance(group, Mapping)]


def gpu_count(run: Run) -> int:
    """GPUs that the run's workers had; 0 on a CPU and where nothing says."""
    if run.gpus:
        return run.gpus
    said = run.manifest.get("arm", {}).get("gpus")
    if isinstance(said, int):
        return said
    if run.manifest.get("topology", {}).get("device") != "cuda":
        return 0
    return sum(_size(group) * int(group.get("tensor_parallel", 1)) for group in worker_groups(run))


def worker_count(run: Run) -> int:
    """Workers of the run; 0 where nothing says."""
    return sum(_size(group) for group in worker_groups(run)) or len(
        run.manifest.get("workers") or []
    )


def share_unit(cells: Sequence[Cell]) -> str:
    """What figures are divided by: "GPU" where every arm has some, else "worker"; empty where an
    arm's size is unknown."""
    if all(gpu_count(cell.runs[0]) for cell in cells):
        return "GPU"
    return "worker" if all(worker_count(cell.runs[0]) for cell in cells) else ""


def per_unit(cell: Cell, value: float, unit: str) -> float | None:
    """`value` over the cell's GPUs (or workers); None where there is no such unit."""
    count = {"GPU": gpu_count, "worker": worker_count}.get(unit, lambda _: 0)(cell.runs[0])
    return value / count if count else None


def arms_table(cells: Sequence[Cell]) -> Table:
    """A row an arm. Columns that no arm has anything in are left out."""
    arms = list({cell.arm: cell.runs[0] for cell in reversed(cells)}.values())[::-1]
    return tabulate("arms", arms, _COLUMNS)


def _engine(run: Run) -> str:
    return engine_entry(run.manifest.get("versions", {}).get("engines", {})).text


def _workers(run: Run) -> str:
    """`1 prefill + 3 elastic`."""
    counts: dict[str, int] = {}
    for group in worker_groups(run):
        role = str(group.get("role", "colocated"))
        counts[role] = counts.get(role, 0) + _size(group)
    return " + ".join(f"{count} {role}" for role, count in counts.items())


def _kv_tokens(run: Run) -> str:
    """KV capacity of one worker, by role where roles differ."""
    topology = run.manifest.get("topology", {})
    found: dict[str, str] = {}
    for group in worker_groups(run):
        tokens = group.get("max_total_tokens") or topology.get("max_total_tokens")
        host = group.get("host_kv_tokens")
        words = number(float(tokens)) if tokens else "engine's choice"
        found[str(group.get("role", ""))] = words + (f" + {number(host)} in host" if host else "")
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    return ", ".join(f"{role}: {words}" for role, words in found.items())


def _flags(run: Run) -> str:
    """Keys of the topology and of its workers that are not at their defaults."""
    topology = run.manifest.get("topology", {})
    found = list(_changed(topology, Topology))
    for group in worker_groups(run):
        role = str(group.get("role", ""))
        prefix = f"{role}: " if len(worker_groups(run)) > 1 else ""
        found += [f"{prefix}{words}" for words in _changed(group, WorkerGroup)]
    return ", ".join(found)


def _changed(values: Mapping[str, Any], model: Any) -> list[str]:
    fields = model.model_fields
    found = []
    for key, value in values.items():
        if key in _ELSEWHERE or value in (None, [], {}, ""):
            continue
        default = fields[key].default if key in fields else None
        if value == default or (isinstance(value, list) and tuple(value) == default):
            continue
        found.append(" ".join(value) if key == "flags" else f"{key}={_word(value)}")
    return found


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)


def _router(run: Run) -> str:
    router = run.manifest.get("topology", {}).get("router") or {}
    policy = run.manifest.get("policy") or router.get("policy")
    kind = router.get("kind", "deltaserve")
    words = str(policy) if policy else ""
    if kind not in ("deltaserve", "none"):
        words = f"{kind}: {words}" if words else str(kind)
    return words


def _parameters(run: Run) -> str:
    parameters = run.manifest.get("policy_params") or {}
    return ", ".join(f"{key}={_word(value)}" for key, value in parameters.items())


def _admission(run: Run) -> str:
    router = run.manifest.get("topology", {}).get("router") or {}
    # Runs of before 0.3 have the table by its old name.
    admission = router.get("admission") or router.get("residency") or {}
    rest = ", ".join(f"{key}={_word(v)}" for key, v in admission.items() if key != "rule")
    return str(admission.get("rule", "")) + (f" ({rest})" if rest else "")


def _size(group: Mapping[str, Any]) -> int:
    return len(group.get("urls") or ()) or int(group.get("count", 1))


_COLUMNS: tuple[Column[Run], ...] = (
    Column("arm", "Arm", lambda run: run.arm),
    Column("engine", "Engine", _engine),
    Column("url", "Endpoint", lambda run: str(run.manifest.get("arm", {}).get("url") or "")),
    Column("workers", "Workers", _workers),
    Column("gpus", "GPUs", lambda run: gpu_count(run) or None, COUNT),
    Column("kv_tokens", "KV tokens a worker", _kv_tokens),
    Column("router", "Router policy", _router, under=_parameters),
    Column("admission", "Admission", _admission),
    Column("flags", "Not at default", lambda run: _flags(run) or DASH),
)
