"""docs/quickstart.md as a newcomer copies it: its blocks, and a shell that runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

_PAGE = Path(__file__).parents[1] / "docs" / "quickstart.md"


def blocks() -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```", _PAGE.read_text(), re.S | re.M)


def copied(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs `script` in `folder`, with this Python's commands first on the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
    )


def run(script: str, folder: Path) -> str:
    """What `script` prints; it must succeed."""
    done = copied(script, folder)
    assert done.returncode == 0, done.stderr
    return done.stdout
