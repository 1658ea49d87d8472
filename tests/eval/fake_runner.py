"""Stands for `deltaserve eval run … --json`: says what it was given, and what became of it.

FAKE_RUNNER in the environment says how it fares: well (default), `failed`, `dies`, or `hangs` until
it is asked to end; that it hangs and by which signal it ended it notes in the folder
FAKE_RUNNER_NOTES.
"""

import json
import os
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path


def main() -> int:
    words = sys.argv[1:]
    units = [word for flag, word in pairwise(words) if flag == "--only"]
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    print(f"{' '.join(units)} on {gpus}", file=sys.stderr, flush=True)
    how = os.environ.get("FAKE_RUNNER")
    if how == "dies":
        print("error: no such thing", file=sys.stderr)
        return 2
    if how == "hangs":
        asked: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _frame: asked.append(number))
        notes = Path(os.environ["FAKE_RUNNER_NOTES"])
        (notes / f"hangs-{units[0]}").touch()
        while not asked:
            time.sleep(0.02)
        (notes / f"ended-{units[0]}").write_text(str(asked[0]))
        return 130
    failed = [f"{units[0]}/r1"] if how == "failed" else []
    summary = {"complete": 2 * len(units) - len(failed), "kept": 0, "failed": failed}
    print(json.dumps({"output": "out", **summary, "skipped": [], "invalid": []}))
    return 1 if failed else 0


sys.exit(main())
