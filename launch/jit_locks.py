"""Locks that nobody holds in torch's folder of compiled extensions.

SGLang compiles an extension when it first needs one, with KV events at a worker's first prompt.
Before 2.14 torch has the others wait until a file called ``lock`` is gone
(`torch.utils.file_baton`). A process that is killed while it compiles leaves it there, and torch
2.14 always does, whose lock is the kernel's and ends with its process: every worker with an older
torch that starts later waits until SGLang's watchdog ends it after 300 s.

So each engine's extensions have a folder of their own. Besides, releases of SGLang give different
sources the same name, and would compile them over each other.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from launch.cache import cache_dir

VARIABLE = "TORCH_EXTENSIONS_DIR"
KERNEL_LOCKS_SINCE = (2, 14)
"""The release of torch that waits for a process and not for a file (torch's issue 189245; 2.11.0
waits for the file, 2.14.1 does not, those between were not looked at)."""


def extensions_dir(python: Path) -> Path:
    """Where extensions of the engine with this interpreter are compiled to."""
    name = hashlib.sha256(str(python).encode()).hexdigest()[:12]
    return cache_dir() / "torch_extensions" / name


def remove_stale(environments: Iterable[Mapping[str, str]], tell: Callable[[str], None]) -> None:
    """Removes the locks that no process of this machine holds from the folders that workers with
    these environments compile to, and tells of each.

    A holder keeps its lock's file open. Processes whose files may not be seen, of other users, do
    not write to this user's cache. Not for a torch from `KERNEL_LOCKS_SINCE` on, which needs none
    of this and keeps the file.
    """
    for folder in {
        environment[VARIABLE] for environment in environments if VARIABLE in environment
    }:
        for lock in Path(folder).glob("*/lock"):
            with suppress(OSError):  # released meanwhile
                if not _is_open(lock.stat()):
                    lock.unlink()
                    tell(f"{lock}: no process holds it, and torch would wait for it; removed")


def _is_open(file: os.stat_result) -> bool:
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):
                    if os.path.samestat(descriptor.stat(), file):
                        return True
    return False
