"""What an elastic worker says of itself, in ``/server_info`` and in SGLang's load report."""

from __future__ import annotations

from typing import Any

from sglang_ext.elastic.worker import ElasticWorker
from sglang_ext.sglang import current


def state(worker: ElasticWorker) -> dict[str, Any]:
    """Counters and the KV pool's accounts, for ``/server_info``."""
    s = worker.scheduler
    pool = s.req_to_token_pool
    return {
        "interference": str(worker.settings.interference),
        "target_itl_s": worker.settings.target_itl_s,
        "counts": dict(worker.counts),
        "pacing": worker.paced.state(),
        "idle": bool(s.is_fully_idle()),
        "queues": {
            "local": len(worker.queues.local),
            "prefilling": int(s.chunked_req is not None),
            "transferred": len(worker.queues.transferred),
            "preallocation": len(s.disagg_decode_prealloc_queue.queue),
            "transfer": len(s.disagg_decode_transfer_queue.queue),
            "retracted": len(s.disagg_decode_prealloc_queue.retracted_queue),
            "running": len(s.running_batch.reqs),
            "quarantine": len(worker.quarantine),
        },
        "kv_tokens": {
            "total": int(s.max_total_num_tokens),
            "free": int(s.token_to_kv_pool_allocator.available_size()),
            "cached": int(s.tree_cache.evictable_size()),
            "locked": int(s.tree_cache.protected_size()),
        },
        "request_slots": {
            "total": int(pool.size + pool.pre_alloc_size),
            "free": int(pool.available_size()),
        },
        "metadata_slots": {
            "total": int(s.req_to_metadata_buffer_idx_allocator.size),
            "free": int(s.req_to_metadata_buffer_idx_allocator.available_size()),
        },
    }


def add_to_loads(worker: ElasticWorker, loads: Any) -> None:
    """Corrects SGLang's load report, which takes all who wait for requests whose KV is here."""
    s = worker.scheduler
    local = worker.queues.local
    pending = sum(int(req.seqlen) for req in local)
    uncached = sum(int(req.seqlen) - getattr(req, "deltaserve_cached_tokens", 0) for req in local)
    if s.chunked_req is not None:
        uncached += int(s.chunked_req.seqlen) - current().prefix_tokens(s.chunked_req)
    loads.num_waiting_reqs += len(worker.queues.transferred)
    loads.num_waiting_uncached_tokens += uncached
    loads.num_total_tokens += pending
    loads.num_active_tokens += pending
