"""Where a model of the Hugging Face hub lies on this machine, once somebody has downloaded it.

The layout is that of the hub's cache: ``models--ORG--NAME``, in it the commit of each branch in
``refs`` and each commit's files in ``snapshots``.
"""

from __future__ import annotations

import os
from pathlib import Path


def snapshot(name: str) -> Path | None:
    """The folder of the newest download of ``ORG/NAME``; None where there is none."""
    repository = _cache() / f"models--{name.replace('/', '--')}"
    try:
        commit = (repository / "refs" / "main").read_text().strip()
    except (OSError, ValueError):
        return None
    folder = repository / "snapshots" / commit
    return folder if commit and folder.is_dir() else None


def _cache() -> Path:
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if given := os.environ.get(variable):
            return Path(given)
    home = os.environ.get("HF_HOME")
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return (Path(home) if home else Path(caches).expanduser() / "huggingface") / "hub"
