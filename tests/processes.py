"""Finds the processes of a fleet by the folder that they work in, and waits for what they do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil


def working_in(folder: Path) -> list[psutil.Process]:
    """Live processes whose working folder is `folder`: all of a fleet, wherever it was placed."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.cwd() == str(folder):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.05)
