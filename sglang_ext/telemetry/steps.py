"""One line a forward pass: the batch's composition, its duration, queue depths and KV use."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sglang_ext.guards import Hook
from sglang_ext.telemetry import garbage, metrics, requests
from sglang_ext.telemetry.sink import emit, harmless, unix_minus


def _queue_depths(scheduler: Any) -> dict[str, int]:
    """Requests in each of the scheduler's queues; those that the worker's mode lacks are absent."""
    mode = scheduler.disaggregation_mode.value
    depths = {"waiting": len(scheduler.waiting_queue)}
    if mode == "prefill":
        depths["bootstrap"] = len(scheduler.disagg_prefill_bootstrap_queue.queue)
        depths["transfer"] = len(scheduler.disagg_prefill_inflight_queue)
    elif mode == "decode":
        depths["preallocation"] = len(scheduler.disagg_decode_prealloc_queue.queue)
        depths["transfer"] = len(scheduler.disagg_decode_transfer_queue.queue)
        elastic = getattr(scheduler, "deltaserve_elastic", None)
        if elastic is not None:
            depths["arrived"] = len(elastic.queues.transferred)
    return depths


def _record_step(original: Callable[..., None], scheduler: Any, batch: Any, result: Any) -> None:
    """Notes the step that `result` ends.

    ``batch.launch_ts`` is when it was launched (``time.monotonic``). With overlap scheduling a step
    is launched before the previous one's result is processed, so durations may overlap.
    """
    requests_of_step = list(batch.reqs)
    original(scheduler, batch, result)
    _write_step(scheduler, batch, requests_of_step)


@harmless
def _write_step(scheduler: Any, batch: Any, requests_of_step: list[Any]) -> None:
    mode = batch.forward_mode
    if mode.is_idle():
        return
    done_s = time.monotonic()
    decoding = len(batch.decoding_reqs or ())
    if mode.is_decode():
        prefill_requests, prefill_tokens, decode_requests = 0, 0, len(requests_of_step)
    else:
        prefill_requests = len(requests_of_step) - decoding
        prefill_tokens = (batch.extend_num_tokens or 0) - decoding
        decode_requests = decoding
    forward_mode = mode.name.lower()
    duration_s = done_s - batch.launch_ts
    metrics.attach(scheduler)
    garbage.watch()
    garbage.write()
    if (totals := metrics.totals()) is not None:
        totals.step(forward_mode, duration_s, prefill_tokens)
    requests.record_finished(scheduler.disaggregation_mode.value, requests_of_step)
    pool = scheduler.pool_stats_observer.get_pool_stats()
    # The requests that decode come last, and count their whole context as prefix.
    prefixes = (batch.prefix_lens or ())[:prefill_requests]
    emit(
        "step",
        {
            "forward_mode": forward_mode,
            "start_unix_s": batch.launch_ts + unix_minus(time.monotonic),
            "duration_s": duration_s,
            "prefill_requests": prefill_requests,
            "prefill_tokens": prefill_tokens,
            "prefix_tokens": sum(prefixes),
            "decode_requests": decode_requests,
            "queues": _queue_depths(scheduler),
            "kv_used_tokens": pool.full_num_used,
            "kv_evictable_tokens": pool.full_evictable_size,
            "kv_total_tokens": scheduler.max_total_num_tokens,
        },
    )


HOOKS = (Hook("scheduler.process_result", "around", _record_step),)
