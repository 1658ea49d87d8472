"""The command line in this process, without a Python's start: what it prints and exits with.

What is about processes (signals, fleets that outlive a command, a router that serves) starts one.
"""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from deltaserve.cli import main


def deltaserve(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Calls the console script with these arguments."""
    words = ["deltaserve", *map(str, arguments)]
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    status: object = None
    with mock.patch.object(sys, "argv", words), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            status = ended.code
    assert status is None or isinstance(status, int)
    printed, said = (_text(stream) for stream in (out, err))
    return subprocess.CompletedProcess(words, status or 0, printed, said)


def _text(stream: io.TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()
