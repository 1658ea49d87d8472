"""Samples of a fleet while it runs: its GPUs (``gpu.csv``), its processes (``processes.csv``) and
what its engines say of their load (``engines.csv``).

Owns the files and the thread that writes them; a row is flushed when it is written, so that a
killed run keeps what it had. Knows processes only by their guardians' pids, and engines by URL.
"""

from __future__ import annotations

import contextlib
import csv
import re
import threading
import time
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from dataclasses import astuple, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from launch.guard import older_log
from launch.hardware import GpuError, GpuSample, sample_gpus
from launch.http_calls import FAILURES, call
from launch.supervised import members

_PROCESSES, _ENGINES, _GPUS = SAMPLES = ("processes.csv", "engines.csv", "gpu.csv")
PROCESS_COLUMNS = ("unix_s", "id", "cpu_s", "rss_bytes", "processes")
ENGINE_COLUMNS = ("unix_s", "id", "running", "queued", "kv_used_share")
GPU_COLUMNS = ("unix_s", *(field.name for field in fields(GpuSample)))


_ANSWER_WITHIN_S = 1.0

LAST_WITHIN_S = 10.0
"""How long the sample that is being taken when a sampler is stopped is waited for."""


@dataclass(frozen=True)
class Engines:
    """Engines to ask: worker → URL, and the Prometheus gauges of requests that run, requests that
    wait, and the share of the KV pool that requests hold."""

    urls: dict[str, str]
    gauges: tuple[str, str, str]


class _Table:
    """A CSV file of a run. Of its rows `max_bytes` are kept at most, the older half in another file
    (`older_log`) that has the same head; 0 keeps all."""

    def __init__(self, path: Path, columns: tuple[str, ...], max_bytes: int) -> None:
        self._path, self._columns, self._half_bytes = path, columns, max_bytes // 2
        self._older = Path(older_log(str(path)))
        self._open()

    def _open(self) -> None:
        self._file = self._path.open("w", buffering=1, newline="")
        self._rows = csv.writer(self._file)
        self._rows.writerow(self._columns)

    def write(self, rows: Iterable[Iterable[Any]]) -> None:
        """Adds `rows`; each is flushed when it is written."""
        if self._half_bytes and self._file.tell() >= self._half_bytes:
            before = self._file
            self._path.replace(self._older)
            self._open()
            before.close()
        self._rows.writerows(rows)

    def close(self) -> None:
        """Ends it; what is there stays."""
        self._file.close()


class Sampler:
    """Writes a sample of everything every `interval_s` until it is stopped."""

    def __init__(
        self,
        run_dir: Path,
        guardians: dict[str, tuple[int, str]],
        engines: Engines,
        gpus: Collection[int],
        interval_s: float,
        max_bytes: int = 0,
    ) -> None:
        """`guardians`: process id → pid and start of its guardian (`started_at`). Of each file
        `max_bytes` are kept at most, in two; 0 keeps all."""
        self._run_dir = run_dir
        self._guardians = guardians
        self._engines = engines
        self._gpus = gpus
        self._interval_s = interval_s
        self._max_bytes = max_bytes
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def stop(self) -> bool:
        """Ends it after the sample being taken; False where that hangs (a GPU's driver may not
        answer any more) and is waited for no longer."""
        self._ended.set()
        self._thread.join(LAST_WITHIN_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with contextlib.suppress(OSError), ExitStack() as files:
            samples = [
                partial(self._processes, self._table(files, _PROCESSES, PROCESS_COLUMNS)),
                partial(self._loads, self._table(files, _ENGINES, ENGINE_COLUMNS)),
            ]
            if self._gpus:
                samples.append(partial(self._gpu, self._table(files, _GPUS, GPU_COLUMNS)))
            while True:
                # What fails now (a GPU off its bus, a full disk) is left out; the next may not.
                for sample in samples:
                    with contextlib.suppress(GpuError, OSError, psutil.Error):
                        sample()
                if self._ended.wait(self._interval_s):
                    return

    def _processes(self, table: _Table) -> None:
        unix_s = round(time.time(), 3)
        for id_, (pid, started) in self._guardians.items():
            table.write([(unix_s, id_, *_usage(members(pid, started)))])

    def _loads(self, table: _Table) -> None:
        for id_, url in self._engines.urls.items():
            load = engine_load(url, self._engines.gauges)
            table.write([(round(time.time(), 3), id_, *load)])

    def _gpu(self, table: _Table) -> None:
        unix_s = round(time.time(), 3)
        found = [gpu for gpu in sample_gpus() if gpu.index in self._gpus]
        table.write((unix_s, *astuple(gpu)) for gpu in found)

    def _table(self, files: ExitStack, name: str, columns: tuple[str, ...]) -> _Table:
        table = _Table(self._run_dir / name, columns, self._max_bytes)
        files.callback(table.close)
        return table


def engine_load(url: str, gauges: tuple[str, ...]) -> list[float | None]:
    """The gauges as the engine at `url` has them now, summed over their labels (a data-parallel
    engine has one each); None where it does not answer or has no such gauge."""
    try:
        _, body = call("GET", f"{url}/metrics", timeout_s=_ANSWER_WITHIN_S)
    except FAILURES:
        return [None] * len(gauges)
    text = body.decode(errors="replace")
    found: list[float | None] = []
    for gauge in gauges:
        values = re.findall(rf"^{gauge}(?:{{[^}}]*}})? ([-+.\deE]+)$", text, re.M)
        found.append(sum(map(float, values)) if values else None)
    return found


def _usage(tree: list[psutil.Process]) -> tuple[float, int, int]:
    """CPU seconds spent so far by the live processes, their resident bytes, and their number."""
    cpu_s, rss_bytes, live = 0.0, 0, 0
    for process in tree:
        try:
            with process.oneshot():
                times = process.cpu_times()
                rss_bytes += process.memory_info().rss
        except psutil.Error:
            continue
        cpu_s += times.user + times.system
        live += 1
    return round(cpu_s, 2), rss_bytes, live
