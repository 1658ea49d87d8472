"""Asks a program whether it would take something, by running it: what it says on refusing.

Owns what is made of a program's end and of its last line; knows nothing of what is asked.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def refusal(
    argv: Sequence[str | Path], environment: Mapping[str, str] | None = None, *, silent: str
) -> str | None:
    """The last line that `argv` writes to stderr where it ends with an error (`silent` where it
    writes none); None where it ends well. `environment` is the whole of it; None inherits."""
    done = subprocess.run(
        argv,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or [silent])[-1]
