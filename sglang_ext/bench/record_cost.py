"""What telemetry's line for a step costs: ``python -m sglang_ext.bench.record_cost``.

Runs the hook itself on a batch and a scheduler that are made up, into a real file, and prints
microseconds a step beside steps of 5 to 20 ms. With ``prometheus_client`` installed (run it with
SGLang's Python, this repository on ``PYTHONPATH``) the totals for ``/metrics`` are counted too.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from types import SimpleNamespace
from typing import Any

_STEPS = 5000
_REPEATS = 9


def _made_up(requests: int, metrics: bool) -> tuple[Any, Any]:
    """A decode scheduler with full queues, and a decode batch of so many running `requests`."""
    mode = SimpleNamespace(
        name="DECODE", is_idle=bool, is_decode=lambda: True, is_prebuilt=lambda: False
    )
    running = [SimpleNamespace(finished=lambda: False) for _ in range(requests)]
    batch = SimpleNamespace(
        reqs=running,
        forward_mode=mode,
        decoding_reqs=None,
        prefix_lens=None,
        launch_ts=time.monotonic(),
    )
    pool = SimpleNamespace(full_num_used=123_456, full_evictable_size=345_678)
    scheduler = SimpleNamespace(
        disaggregation_mode=SimpleNamespace(value="decode"),
        waiting_queue=[None] * 3,
        disagg_decode_prealloc_queue=SimpleNamespace(queue=[None] * 2),
        disagg_decode_transfer_queue=SimpleNamespace(queue=[None] * 5),
        max_total_num_tokens=592_463,
        pool_stats_observer=SimpleNamespace(get_pool_stats=lambda: pool),
        metrics_reporter=SimpleNamespace(current_scheduler_metrics_enabled=metrics),
        metrics_collector=SimpleNamespace(labels={"model_name": "m", "engine_type": "unified"}),
    )
    return scheduler, batch


def measure(requests: int, metrics: bool) -> list[float]:
    """Microseconds a step beyond the step's own work, `_REPEATS` times."""
    from sglang_ext.telemetry import steps

    scheduler, batch = _made_up(requests, metrics)

    def nothing(scheduler: Any, batch: Any, result: Any) -> None:
        pass

    def passes_s(hooked: bool) -> float:
        began_s = time.perf_counter()
        for _ in range(_STEPS):
            if hooked:
                steps._record_step(nothing, scheduler, batch, None)
            else:
                nothing(scheduler, batch, None)
        return time.perf_counter() - began_s

    passes_s(True)
    return [(passes_s(True) - passes_s(False)) / _STEPS * 1e6 for _ in range(_REPEATS)]


def main() -> None:
    try:
        import prometheus_client  # type: ignore[import-not-found,unused-ignore]  # noqa: F401

        metrics = True
    except ImportError:
        metrics = False
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DELTASERVE_TELEMETRY_DIR"] = folder
        os.environ.setdefault("PROMETHEUS_MULTIPROC_DIR", folder)
        print(f"/metrics {'counted too' if metrics else 'not counted (no prometheus_client)'}")
        for requests in (1, 8, 64):
            found = measure(requests, metrics)
            middle = statistics.median(found)
            print(
                f"{requests:3d} running: {middle:5.1f} µs a step ({min(found):.1f} to "
                f"{max(found):.1f} over {_REPEATS} repeats): {middle / 50:.2f} % of a step of "
                f"5 ms, {middle / 200:.2f} % of 20 ms"
            )


if __name__ == "__main__":
    main()
