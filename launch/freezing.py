"""Takes what an SGLang worker holds when it is ready out of Python's garbage collection.

Its scheduler has 800,000 objects after its imports, and more on a GPU. Python looks at every one
of them whenever as many again as a quarter of them have come to stay, and no step is launched
meanwhile: decode steps of 10 ms took 0.4 to 0.95 s then, once or twice a minute
(docs/results/separation.md). SGLang has a call for it, `/freeze_gc`, that it makes nowhere itself;
vLLM freezes its own objects when it starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from launch.http_calls import FAILURES, call, reason
from launch.planning import Process

_TIMEOUT_S = 30.0


def freeze(workers: Iterable[Process], tell: Callable[[str], None]) -> None:
    """Freezes each of the SGLang `workers` that is our own. A worker that refuses serves all the
    same, with longer gaps: `tell` is given what it said."""
    for worker in workers:
        if worker.attached:
            continue
        try:
            status, answer = call("POST", f"{worker.url}/freeze_gc", b"", timeout_s=_TIMEOUT_S)
        except FAILURES as error:
            tell(f"{worker.id}: /freeze_gc: {reason(error)}")
            continue
        if status != 200:
            text = answer[:300].decode(errors="replace").strip()
            tell(f"{worker.id}: /freeze_gc: {status} {text}")
