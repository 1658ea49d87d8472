"""The elastic worker's verbs for SGLang 0.5.17 and 0.5.18."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from sglang_ext.sglang.elastic_common import ElasticCommon


class Elastic0517(ElasticCommon):
    """A request's KV is `req.kv` and `req.req_pool_idx` there, its lock is on `req.last_node`."""

    def has_radix_cache(self, scheduler: Any) -> bool:
        return bool(scheduler.server_args.disaggregation_decode_enable_radix_cache)

    def unsupported(self, scheduler: Any) -> Mapping[str, bool]:
        # Together with the decode radix cache SGLang refuses speculative decoding, sliding windows
        # and state-space models itself.
        args = scheduler.server_args
        return {
            "the offloading of decode KV": args.disaggregation_decode_enable_offload_kvcache,
            # SGLang cannot tell there how many copies from it are under way.
            "a host tier before SGLang 0.5.23": scheduler.enable_hierarchical_cache,
            # Their requests own KV while they wait in line, where local prompts must own none.
            "streaming sessions": args.enable_streaming_session,
        }

    def enter_line(self, scheduler: Any, req: Any) -> None:
        pass

    def turn_away(self, scheduler: Any, req: Any) -> None:
        pass

    def end_in_line(self, scheduler: Any, req: Any, abort: Any) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        scheduler.ipc_channels.send_to_tokenizer.send_output(AbortReq(rid=req.rid), req)

    def take_kv(self, req: Any) -> Any:
        stand_in = copy.copy(req)
        req.req_pool_idx = None
        req.kv = None
        return stand_in

    def keep_until_acknowledged(
        self, queue: Any, entry: Any, stand_in: Any, *, longest_s: float | None
    ) -> bool:
        return False

    def awaiting_acknowledgement(self, queue: Any) -> int:
        return 0

    def release_acknowledged(self, queue: Any) -> None:
        pass

    def _more_for_release(self, scheduler: Any) -> dict[str, Any]:
        return {"server_args": scheduler.server_args}

    def allocated_tokens(self, req: Any) -> int | None:
        return None if req.kv is None else int(req.kv.kv_allocated_len)

    def is_in_host_memory(self, req: Any) -> bool:
        return hasattr(req, "kv_cache_cpu")

    def forget_host_copy(self, req: Any) -> None:
        vars(req).pop("kv_cache_cpu", None)

    def came_back(self, tree_cache: Any, req: Any) -> None:
        if req.last_node is None:
            # It has all its KV to itself. Matching it against the tree now, as SGLang would, swaps
            # in pages that it does not hold a lock on and forgets its own.
            req.last_node = tree_cache.root_node
