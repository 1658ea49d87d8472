"""Programs of Kubernetes that tests start: those of `make kubernetes`, or of this machine."""

from __future__ import annotations

import os
import shutil

from launch.cache import cache_dir


def program(name: str) -> str | None:
    """Its path, if it is there."""
    built = cache_dir() / "kubernetes"
    return shutil.which(name, path=f"{built}{os.pathsep}{os.environ.get('PATH', '')}")
