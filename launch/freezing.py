"""Takes what an SGLang worker holds when it is warm out of Python's garbage collection.

Its scheduler has 800,000 objects after its imports. Whenever a quarter as many new ones have stayed
for a while, Python looks at all of them, and no step is launched meanwhile: 0.4 to 1 s on a CPU,
and part of what held up decode steps for 0.3 to 0.95 s on GPUs (results/separation.md). SGLang
has a call for that, `/freeze_gc`, which it never makes itself; vLLM freezes when it starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from launch.http_calls import FAILURES, answer_line, call, reason
from launch.planning import Process

_TIMEOUT_S = 30.0


def freeze(workers: Iterable[Process], tell: Callable[[str], None]) -> None:
    """Freezes each of the SGLang `workers` that is our own. A worker that refuses serves all the
    same, with longer gaps: `tell` is given what it said."""
    path = "/freeze_gc"
    for worker in workers:
        if worker.attached:
            continue
        try:
            status, answer = call(
                "POST", worker.url + path, b"", timeout_s=_TIMEOUT_S, key=worker.keys.to_change
            )
        except FAILURES as error:
            tell(f"{worker.id}: {path}: {reason(error)}")
            continue
        if status != 200:
            tell(f"{worker.id}: {answer_line(path, status, answer)}")
