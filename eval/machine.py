"""What the machines did while a run was replayed: samples of GPUs, processes and engines.

Owns `gpu.csv`, `processes.csv` and `engines.csv` as tables with rates in place of counters, and
their means by run. Knows run folders; not what is compared or drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from eval.records import Run

GIB = 2**30


@dataclass(frozen=True)
class Samples:
    """Samples within a replay, `at_s` counting as its results do.

    `processes`: `id`, `cores` (CPU seconds a second since the sample before), `rss_bytes`. `gpus`:
    `index`, `worker`, `gpu` (a name for both), `sm_percent`, `memory_used_bytes`, `power_w`,
    `nvlink_received_bytes` (a counter) and `nvlink_received_bps` (bytes a second). `engines`: `id`,
    `running` and `queued` requests, `kv_used_share` of the pool, as the engine says.
    """

    processes: pd.DataFrame
    engines: pd.DataFrame
    gpus: pd.DataFrame


@dataclass(frozen=True)
class Use:
    """One process over a replay, and its GPUs where it has any; NaN where nothing was sampled.

    `throttled_share` is of samples in which something kept a GPU's clock down (power, heat).
    """

    worker: str
    cores_mean: float
    rss_max_bytes: float
    gpus: int
    sm_mean_percent: float
    memory_max_bytes: float
    power_mean_w: float
    sm_clock_mean_mhz: float
    throttled_share: float
    nvlink_received_bytes: float


def read_samples(run: Run) -> Samples:
    """The samples of a run; empty tables where none were taken."""
    clock = (run.manifest.get("replay") or {}).get("clock") or {}
    origin_s = clock.get("unix_origin_s")
    ended_s = run.all_requests["finished_s"]
    end_s = float(ended_s.max()) if len(ended_s) else float("nan")
    processes = _table(run.folder / "processes.csv", ("unix_s", "id", "cpu_s", "rss_bytes"))
    gpus = _table(
        run.folder / "gpu.csv",
        (
            "unix_s",
            "index",
            "sm_percent",
            "memory_used_bytes",
            "power_w",
            "nvlink_received_bytes",
            "sm_clock_mhz",
        ),
        words=("throttled_by",),
    )
    processes["cores"] = _rate(processes, "id", "cpu_s")
    gpus["nvlink_received_bps"] = _rate(gpus, "index", "nvlink_received_bytes")
    # Where neither column is there an older version sampled: unknown, not unthrottled.
    throttled = gpus["throttled_by"].notna().astype(float)
    gpus["throttled"] = throttled.where(gpus["sm_clock_mhz"].notna())
    owners = _owners(run)
    gpus["worker"] = [owners.get(int(i), "") for i in gpus["index"]]
    gpus["gpu"] = [f"GPU {int(i)} {owners.get(int(i), '')}".strip() for i in gpus["index"]]
    engines = _table(
        run.folder / "engines.csv", ("unix_s", "id", "running", "queued", "kv_used_share")
    )
    tables = []
    for table in (processes, engines, gpus):
        start_s = table["unix_s"].min() if origin_s is None else float(origin_s)
        table["at_s"] = table["unix_s"] - start_s
        inside = (table["at_s"] >= 0) & ~(table["at_s"] > end_s)
        tables.append(table[inside].reset_index(drop=True))
    return Samples(*tables)


def machine_use(samples: Samples) -> list[Use]:
    """Means and maxima by process, in the order of the samples."""
    found = []
    for name in samples.processes["id"].drop_duplicates():
        own = samples.processes[samples.processes["id"] == name]
        gpus = samples.gpus[samples.gpus["worker"] == name]
        found.append(
            Use(
                worker=str(name),
                cores_mean=float(own["cores"].mean()),
                rss_max_bytes=float(own["rss_bytes"].max()),
                gpus=int(gpus["index"].nunique()),
                sm_mean_percent=float(gpus["sm_percent"].mean()),
                memory_max_bytes=float(gpus["memory_used_bytes"].max()),
                power_mean_w=float(gpus["power_w"].mean()),
                sm_clock_mean_mhz=float(gpus["sm_clock_mhz"].mean()),
                throttled_share=float(gpus["throttled"].mean()),
                nvlink_received_bytes=_grown(gpus, "nvlink_received_bytes"),
            )
        )
    return found


def _grown(gpus: pd.DataFrame, counter: str) -> float:
    """How far a counter came, over all GPUs; NaN where it was never read."""
    spans = gpus.groupby("index")[counter].agg(lambda values: values.max() - values.min())
    return float(spans.sum(min_count=1))


def _owners(run: Run) -> dict[int, str]:
    """GPU → the worker that has it, as the manifest says."""
    workers = run.manifest.get("workers") or []
    return {
        int(gpu): str(worker["id"])
        for worker in workers
        if isinstance(worker, dict)
        for gpu in worker.get("gpus") or []
    }


def _table(path: Path, columns: Sequence[str], words: Sequence[str] = ()) -> pd.DataFrame:
    """The columns that are numbers (but for `id`), and those that are `words`."""
    columns = [*columns, *words]
    if not path.is_file() or path.stat().st_size == 0:
        return pd.DataFrame({name: pd.Series(dtype=float) for name in columns})
    # A kill may cut the last line: what is not a whole number there becomes unknown.
    table = pd.read_csv(path, on_bad_lines="skip").reindex(columns=list(columns))
    for name in columns:
        if name != "id" and name not in words:
            table[name] = pd.to_numeric(table[name], errors="coerce")
    known = table[[name for name in columns if name in ("unix_s", "id", "index")]].notna()
    return table[known.all(axis=1)].reset_index(drop=True)


def _rate(table: pd.DataFrame, key: str, counter: str) -> pd.Series[float]:
    """Growth of a counter a second since the sample before; a process that ended takes its CPU
    seconds with it, which is no growth."""
    grown = table.groupby(key)[counter].diff()
    passed_s = table.groupby(key)["unix_s"].diff()
    rate: pd.Series[float] = (grown / passed_s).where(grown >= 0).replace(np.inf, np.nan)
    return rate
