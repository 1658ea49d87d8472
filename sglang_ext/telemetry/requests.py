"""One line a finished request: when it passed each phase on this worker.

The times are SGLang's own (``SchedulerReqTimeStats``), taken whether or not telemetry is on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from sglang_ext.guards import Hook
from sglang_ext.telemetry import metrics, sink
from sglang_ext.telemetry.sink import emit, harmless, unix_minus

# field of SchedulerReqTimeStats → name in the telemetry
_PHASES = {
    "prefill_bootstrap_queue_entry_time": "bootstrap_queued_s",
    "decode_prealloc_queue_entry_time": "preallocation_queued_s",
    "bootstrap_done_time": "bootstrapped_s",
    "decode_transfer_queue_entry_time": "transfer_started_s",
    "wait_queue_entry_time": "queued_s",
    "forward_entry_time": "prefill_started_s",
    "prefill_finished_time": "prefill_finished_s",
    "prefill_transfer_queue_entry_time": "transfer_queued_s",
    "prefill_kv_transfer_finish_time": "transfer_finished_s",
    "decode_prebuilt_finish_time": "decode_ready_s",
    "completion_time": "finished_s",
}
_RECORDED = "_deltaserve_recorded"


_mode = ""


def record_finished(mode: str, candidates: Iterable[Any]) -> None:
    """Writes a line for each request of `candidates` that has finished, once; `mode` is the role.

    Times are Unix seconds, or absent where the request did not pass the phase on this worker.
    """
    for request in candidates:
        if not request.finished() or getattr(request, _RECORDED, False):
            continue
        setattr(request, _RECORDED, True)
        room = request.bootstrap_room
        if room is None:
            # An elastic worker takes the room off a request that falls back.
            room = getattr(request, "deltaserve_room", None)
        stats = request.time_stats
        to_unix_s = unix_minus(time.perf_counter)
        phases = {
            name: getattr(stats, field) + to_unix_s
            for field, name in _PHASES.items()
            if getattr(stats, field)
        }
        if (totals := metrics.totals()) is not None:
            totals.request(phases)
        emit(
            "request",
            {
                "engine_request_id": request.rid,
                "room": room,
                "mode": mode,
                "input_tokens": len(request.origin_input_ids),
                "output_tokens": len(request.output_ids),
                "cached_tokens": request.cached_tokens,
                "finish_reason": type(request.finished_reason).__name__,
                "phases": phases,
            },
        )


@harmless
def _record_prefilled(finished: list[Any], scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """On a prefill worker a request ends when its KV has been sent, not in a batch's result."""
    record_finished(scheduler.disaggregation_mode.value, finished)


def _begin(_result: None, scheduler: Any) -> None:
    global _mode
    sink.settings()
    _mode = scheduler.disaggregation_mode.value


@harmless
def _record_streamed(
    _result: None, _streamer: Any, requests: list[Any], *_args: Any, **_kwargs: Any
) -> None:
    """Requests that end apart from a step's result: in a handshake or a transfer that failed, or on
    a decode worker with the first token, which came with the KV.

    On a prefill worker only those that sent nothing; the others are recorded when it is done.
    """
    if _mode == "prefill":
        requests = [
            request
            for request in requests
            if type(request.finished_reason).__name__ == "FINISH_ABORT"
            and not request.time_stats.prefill_transfer_queue_entry_time
        ]
    record_finished(_mode, requests)


HOOKS = (
    Hook("scheduler.ready", "after", _begin),
    Hook("scheduler.stream_output", "after", _record_streamed),
    Hook("prefill.sent", "after", _record_prefilled),
)
