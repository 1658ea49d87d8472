"""The elastic worker's verbs for SGLang 0.5.23."""

from __future__ import annotations

import copy
import dataclasses
from array import array
from collections.abc import Mapping
from typing import Any


class Elastic0523:
    """A request's KV is in its record ``req.kv``, which is never None, its lock ``req.lock``.

    SGLang itself keeps the KV of a failed transfer until the prefill worker acknowledges the abort,
    and starts a request that comes back from host memory at the tree's root.
    """

    def has_radix_cache(self, scheduler: Any) -> bool:
        from sglang.srt.runtime_context import get_disagg

        return bool(get_disagg().disaggregation_decode_enable_radix_cache)

    def unsupported(self, scheduler: Any) -> Mapping[str, bool]:
        from sglang.srt.runtime_context import get_disagg, get_memory, get_serving

        disagg, memory = get_disagg(), get_memory()
        return {
            "the offloading of decode KV": disagg.disaggregation_decode_enable_offload_kvcache,
            # What is evicted has been copied by then. Written back when evicted, it would hold room
            # that local prompts count as free.
            "a host tier that is not written through": (
                scheduler.enable_hierarchical_cache
                and memory.hicache_write_policy != "write_through"
            ),
            # Requests in line would own what is being fetched for them.
            "storage behind the host tier": scheduler.enable_hicache_storage,
            # Requests of sessions own KV while they wait in line, where local prompts own none.
            "streaming sessions": get_serving().enable_streaming_session,
            # SGLang has these three with the decode radix cache. They were not tried here.
            "speculative decoding": not scheduler.spec_algorithm.is_none(),
            "sliding windows": scheduler.is_hybrid_swa,
            "state-space models": scheduler.is_hybrid_ssm,
            # What was thrown out of the batch comes back from there, and from nowhere else.
            "retraction backups other than cpu_tensor": (
                disagg.disaggregation_decode_retraction_backup != "cpu_tensor"
            ),
            "KV received in host memory": disagg.disaggregation_decode_host_receive_threshold < 1,
            "changing roles": disagg.enable_pd_role_switch,
            # It keeps SGLang from forming a prefill batch, in the midst of which transfers come in.
            "a prefill-decode interval": scheduler.prefill_decode_interval > 0,
            "the unified memory pool": scheduler.enable_unified_memory,
            "session radix caches": memory.enable_session_radix_cache,
            "caches of others (LMCache, FlexKV, external linkers)": (
                memory.enable_lmcache
                or memory.enable_flexkv
                or memory.enable_unified_cache_external_linker
            ),
        }

    def enter_line(self, scheduler: Any, req: Any) -> None:
        req.arrival_processed_tokens = scheduler.processed_tokens_counter

    def turn_away(self, scheduler: Any, req: Any) -> None:
        scheduler._release_aborted_request(req)

    def end_in_line(self, scheduler: Any, req: Any, abort: Any) -> None:
        from sglang.srt.managers.scheduler import _make_abort_req

        scheduler._release_aborted_request(req)
        scheduler.send_abort_output(
            _make_abort_req(req, finished_reason=abort.finished_reason), req
        )

    def release_kv(self, tree_cache: Any, req: Any) -> None:
        from sglang.srt.mem_cache.common import release_kv_cache

        release_kv_cache(req, tree_cache, checkpoint=False)

    def take_kv(self, req: Any) -> Any:
        stand_in = copy.copy(req)
        # The copy has the record, `req` an empty one: both releasing it would free it twice.
        stand_in.kv = req.detach_kv()
        req.lock = None
        return stand_in

    def keep_until_acknowledged(
        self, queue: Any, entry: Any, stand_in: Any, *, longest_s: float | None
    ) -> bool:
        receiver = entry.kv_receiver
        if receiver is None or not receiver.kv_mgr.enable_deferred_decode_kv_release:
            return False
        # As SGLang does for a failure that the decode side did not begin. What asked before, an
        # abort or the timeout, has asked once and for all.
        receiver.ensure_abort_notified(force_arm=True)
        own_s = queue.deferred_kv_release_timeout
        queue.deferred_kv_release_timeout = own_s if longest_s is None else longest_s
        try:
            queue._defer_release(dataclasses.replace(entry, req=stand_in))
        finally:
            queue.deferred_kv_release_timeout = own_s
        return True

    def awaiting_acknowledgement(self, queue: Any) -> int:
        return int(queue.num_pending_deferred_releases())

    def release_acknowledged(self, queue: Any) -> None:
        queue.resolve_deferred_releases()

    def start_over(self, req: Any) -> None:
        retractions, stained = req.retraction_count, req.retracted_stain
        req.reset_for_retract()
        req.retraction_count, req.retracted_stain = retractions, stained
        req.full_untruncated_fill_ids = array("q")
        req.expected_kv_checksum = 0

    def put_back(self, scheduler: Any, req: Any) -> None:
        from sglang.srt.managers.schedule_batch import release_req

        release_req(
            req=req,
            remaing_req_count=0,
            req_to_token_pool=scheduler.req_to_token_pool,
            token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
            tree_cache=scheduler.tree_cache,
            hisparse_coordinator=None,
            offload_kv=False,
        )

    def allocated_tokens(self, req: Any) -> int | None:
        return int(req.kv.kv_allocated_len) if req.kv.holds_kv else None

    def tokens_to_come_back(self, preallocation: Any, req: Any) -> int:
        return int(preallocation._prealloc_required_tokens(req)[0])

    def is_in_host_memory(self, req: Any) -> bool:
        return req.kv.retraction_backup is not None

    def forget_host_copy(self, req: Any) -> None:
        req.kv.retraction_backup = None

    def kept_from_adder(self, adder: Any) -> int:
        return int(adder.memory_budget.total_offset)
