"""One line a KV transfer: the bytes that were to be moved, and those that the decode cache saved.

Written by the prefill worker, which knows both: the pages it hands to NIXL or Mooncake, and the
prefix that the decode worker said it already holds (``decode_prefix_len``, SGLang pull request
19746).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sglang_ext.guards import Hook
from sglang_ext.telemetry import metrics
from sglang_ext.telemetry.sink import emit, harmless


@dataclass
class _Transfer:
    start_unix_s: float
    pages: int = 0
    chunks: int = 0


_MOST_OPEN = 4096
_open_transfers: dict[int, _Transfer] = {}


@harmless
def _note_chunk(manager: Any, bootstrap_room: int, kv_indices: Any, *_: Any, **__: Any) -> None:
    """Counts a chunk on its way to the threads that send, by whichever call they send it then."""
    pages = len(kv_indices)
    if pages == 0:
        return
    transfer = _open_transfers.setdefault(bootstrap_room, _Transfer(start_unix_s=time.time()))
    if len(_open_transfers) > _MOST_OPEN:
        # A room that never concludes stays: the oldest is one.
        del _open_transfers[next(iter(_open_transfers))]
    transfer.pages += pages
    transfer.chunks += 1


@harmless
def _note_end(manager: Any, bootstrap_room: int, status: Any) -> None:
    """Writes the room's line when the prefill side has sent all of it, or given up."""
    from sglang.srt.disaggregation.base import KVPoll
    from sglang.srt.disaggregation.utils import DisaggregationMode

    if manager.disaggregation_mode != DisaggregationMode.PREFILL:
        return
    if status not in (KVPoll.Success, KVPoll.Failed):
        return
    transfer = _open_transfers.pop(bootstrap_room, None)
    if transfer is None and status == KVPoll.Failed:
        return  # failed before anything was sent, or the failure is already on record
    now_s = time.time()
    receivers = manager.transfer_infos.get(bootstrap_room, {}).values()
    saved_tokens = max((info.decode_prefix_len or 0 for info in receivers), default=0)
    page_size = manager.kv_args.page_size
    bytes_a_page = sum(manager.kv_args.kv_item_lens)
    pages = transfer.pages if transfer else 0
    ok = status == KVPoll.Success
    moved_bytes = pages * bytes_a_page
    saved_bytes = saved_tokens * bytes_a_page // page_size
    emit(
        "kv_transfer",
        {
            "backend": "mooncake" if "mooncake" in type(manager).__module__ else "nixl",
            "room": bootstrap_room,
            "ok": ok,
            "tokens": pages * page_size,
            "bytes": moved_bytes,
            "chunks": transfer.chunks if transfer else 0,
            "saved_tokens": saved_tokens,
            "saved_bytes": saved_bytes,
            "start_unix_s": transfer.start_unix_s if transfer else now_s,
            "end_unix_s": now_s,
        },
    )
    if (totals := metrics.totals()) is not None:
        totals.transfer(ok, moved_bytes, saved_bytes)


HOOKS = (
    Hook("nixl.send_request", "before", _note_chunk),
    Hook("mooncake.send_request", "before", _note_chunk),
    Hook("nixl.status", "before", _note_end),
    Hook("mooncake.status", "before", _note_end),
)
