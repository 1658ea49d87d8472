"""Where a number was measured: hardware, versions, commit, and run folders that say so.

Owns `manifest.json`: its fields, its states (`running`, `complete`, `failed`) and that a state is
never half written. Knows nothing of what is measured.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import orjson
import psutil

import deltaserve
from deltaserve.errors import InputError
from eval.secrets import without_secrets

MANIFEST = "manifest.json"
MEASURING_FOLDER = "prompt-cost"
"""Runs below a folder of this name measure the machine: they are none of the experiment's."""
PROMPT_COST_FILE = "prompt-cost.json"
_PARTIAL = f".{MANIFEST}.partial"
_PACKAGES = ("aiohttp", "numpy", "orjson", "pandas", "pydantic", "scipy")


def now() -> str:
    """The time, as ISO 8601 in UTC with seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def hardware() -> dict[str, Any]:
    """CPU model, cores, memory and GPUs of this machine."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": _gpus(),
        "system": f"{platform.system()} {platform.release()}",
    }


def versions() -> dict[str, Any]:
    """Python's, ours, and of the packages that the numbers pass through."""
    return {
        "deltaserve": deltaserve.__version__,
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in _PACKAGES},
    }


def git() -> dict[str, Any] | None:
    """Commit and whether the tree was changed, where the package is run from a checkout."""
    root = Path(deltaserve.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None

    def ask(*arguments: str) -> str | None:
        try:
            answer = subprocess.run(
                ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return answer.stdout.strip() if answer.returncode == 0 else None

    commit = ask("rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "dirty": bool(ask("status", "--porcelain", "--untracked-files=no"))}


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpus() -> list[dict[str, Any]]:
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            device = pynvml.nvmlDeviceGetHandleByIndex(index)
            found.append(
                {
                    "name": str(pynvml.nvmlDeviceGetName(device)),
                    "memory_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(device).total),
                }
            )
        return found
    finally:
        pynvml.nvmlShutdown()


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Replaces the folder's manifest in one step: a reader sees the old one or the new one.

    Values of keys that name a secret are not written.
    """
    path = folder / MANIFEST
    partial = folder / _PARTIAL
    with partial.open("wb") as file:
        told = without_secrets(manifest)
        file.write(orjson.dumps(told, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The folder's manifest, or None where there is none that can be read."""
    try:
        manifest = orjson.loads((folder / MANIFEST).read_bytes())
    except (FileNotFoundError, NotADirectoryError, orjson.JSONDecodeError):
        return None
    return manifest if isinstance(manifest, dict) else None


def read_prompt_cost(output: Path) -> dict[str, Any]:
    """What prompts were measured to cost for the runs in `output`; empty where nothing was."""
    try:
        found = orjson.loads((output / PROMPT_COST_FILE).read_bytes())
    except (FileNotFoundError, NotADirectoryError, orjson.JSONDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def prompt_cost_words(found: Mapping[str, Any]) -> str:
    """By what all lengths of an experiment were multiplied, and what a prompt then costs."""
    takes = [f"{s:.1f} s on {arm}" for arm, s in (found.get("seconds") or {}).items()]
    cost = f"; one of {found['tokens']:,} tokens takes {', '.join(takes)}" if takes else ""
    return f"all lengths times {found['factor']:g}{cost}"


def fresh_folder(folder: Path) -> None:
    """An empty run folder at `folder`; what an unfinished run left there is removed.

    Refuses (`InputError`) to empty a folder that holds files but no manifest of ours.
    """
    found = list(folder.iterdir()) if folder.exists() else []
    # All that there is where a runner was killed as it wrote the first manifest.
    ours = {path.name for path in found} <= {_PARTIAL}
    if not ours and read_manifest(folder) is None:
        raise InputError(f"{folder}: not empty, and not a run folder; choose another --output")
    # The manifest last: by it the folder is known for a run's, should this be cut short.
    for path in sorted(found, key=lambda path: path.name == MANIFEST):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
