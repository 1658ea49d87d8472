"""Samples of a fleet while it runs: its GPUs (``gpu.csv``) and its processes (``processes.csv``).

Owns the two files and the thread that writes them; a row is flushed when it is written, so that a
killed run keeps what it had. Knows processes only by their guardians' pids.
"""

from __future__ import annotations

import csv
import threading
import time
from contextlib import ExitStack
from dataclasses import astuple, fields
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from launch.hardware import GpuSample, sample_gpus
from launch.supervised import members

if TYPE_CHECKING:
    from _csv import Writer

PROCESS_COLUMNS = ("unix_s", "id", "cpu_s", "rss_bytes", "processes")
GPU_COLUMNS = ("unix_s", *(field.name for field in fields(GpuSample)))


class Sampler:
    """Writes a sample of everything every `interval_s` until it is stopped."""

    def __init__(
        self, run_dir: Path, guardians: dict[str, tuple[int, float]], gpus: bool, interval_s: float
    ) -> None:
        """`guardians`: process id → pid and start time of its guardian; `gpus`: also ask NVML."""
        self._run_dir = run_dir
        self._guardians = guardians
        self._gpus = gpus
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends it after the sample being taken."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        with ExitStack() as files:
            processes = self._table(files, "processes.csv", PROCESS_COLUMNS)
            gpus = self._table(files, "gpu.csv", GPU_COLUMNS) if self._gpus else None
            while True:
                unix_s = round(time.time(), 3)
                for id_, (pid, started_unix_s) in self._guardians.items():
                    processes.writerow((unix_s, id_, *_usage(members(pid, started_unix_s))))
                if gpus is not None:
                    gpus.writerows((unix_s, *astuple(gpu)) for gpu in sample_gpus())
                if self._ended.wait(self._interval_s):
                    return

    def _table(self, files: ExitStack, name: str, columns: tuple[str, ...]) -> Writer:
        file = files.enter_context((self._run_dir / name).open("w", buffering=1, newline=""))
        table = csv.writer(file)
        table.writerow(columns)
        return table


def _usage(kin: list[psutil.Process]) -> tuple[float, int, int]:
    """CPU seconds spent so far by the live processes, their resident bytes, and their number."""
    cpu_s, rss_bytes, live = 0.0, 0, 0
    for process in kin:
        try:
            with process.oneshot():
                times = process.cpu_times()
                rss_bytes += process.memory_info().rss
        except psutil.Error:
            continue
        cpu_s += times.user + times.system
        live += 1
    return round(cpu_s, 2), rss_bytes, live
