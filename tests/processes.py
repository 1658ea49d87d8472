"""Finds the processes of a fleet by the folder that they work in."""

from __future__ import annotations

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
