"""What KV events cost an SGLang scheduler: ``python -m sglang_ext.bench.event_cost``.

Inserts new prompts into SGLang's own radix cache, as the scheduler does when a prompt has been
prefilled or its KV has arrived, and prints how long that takes by page size, with events and
without, and how much of it was Python's garbage collection: before and after what was there is
frozen, as `launch` does with workers. Needs no GPU. Run it with SGLang's Python, this repository on
``PYTHONPATH``; the scheduler's modules are imported first, for the objects that a collection sees.
"""

from __future__ import annotations

import array
import gc
import importlib
import random
import statistics
import time
from typing import Any

PROMPT_TOKENS = 100_000
PAGES = (1, 16, 64)
REPEATS = 5
_VOCABULARY = 150_000


class _Collections:
    """Seconds spent in garbage collections since the last `take`."""

    def __init__(self) -> None:
        self._begun_s = self._spent_s = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._begun_s = time.perf_counter()
        else:
            self._spent_s += time.perf_counter() - self._begun_s

    def take(self) -> float:
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s


def inserted(cache: Any, prompt: Any, collections: _Collections) -> tuple[float, float]:
    """Seconds that inserting `prompt` into `cache` takes, and those of them in collections."""
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import (  # type: ignore[import-not-found,unused-ignore]
        InsertParams,
    )

    slots = torch.arange(PROMPT_TOKENS, dtype=torch.int64)
    collections.take()
    began_s = time.perf_counter()
    cache.insert(InsertParams(key=prompt, value=slots))
    return time.perf_counter() - began_s, collections.take()


def main() -> None:
    importlib.import_module("sglang.srt.managers.scheduler")
    from sglang.srt.mem_cache.radix_cache import (  # type: ignore[import-not-found,unused-ignore]
        RadixCache,
        RadixKey,
    )

    collections = _Collections()
    made = random.Random(1)
    print(f"{PROMPT_TOKENS:,} new tokens, median of {REPEATS} (the longest), ms")
    print("| page | events | default | of it collections | frozen |")
    print("|---|---|---|---|---|")
    rows: dict[tuple[int, bool], list[str]] = {}
    for frozen in (False, True):
        if frozen:
            gc.collect()
            gc.freeze()
        for page in PAGES:
            for events in (False, True):
                found = []
                for _ in range(REPEATS + 1):
                    tokens = array.array("q", made.choices(range(_VOCABULARY), k=PROMPT_TOKENS))
                    cache = RadixCache.create_simulated(
                        page_size=page, enable_kv_cache_events=events
                    )
                    found.append(inserted(cache, RadixKey(tokens, None), collections))
                    cache.take_events()
                found = found[1:]  # at the first events SGLang may compile what hashes pages
                cells = [_ms([took for took, _ in found])]
                if not frozen:
                    cells.append(_ms([spent for _, spent in found]))
                rows.setdefault((page, events), []).extend(cells)
    for (page, events), cells in rows.items():
        print("|", " | ".join([str(page), "yes" if events else "no", *cells]), "|")


def _ms(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.0f} ({max(seconds) * 1e3:.0f})"


if __name__ == "__main__":
    main()
