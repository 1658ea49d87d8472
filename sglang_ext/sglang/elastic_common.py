"""Verbs of the elastic worker that are the same in every release, or nearly.

What a release does differently in them is a method that its adapter overrides.
"""

from __future__ import annotations

from array import array
from typing import Any


class ElasticCommon:
    """What the elastic adapters of all releases begin with."""

    def start_over(self, req: Any) -> None:
        retractions, stained = req.retraction_count, req.retracted_stain
        req.reset_for_retract()
        req.retraction_count, req.retracted_stain = retractions, stained
        req.full_untruncated_fill_ids = array("q")

    def release_kv(self, tree_cache: Any, req: Any) -> None:
        from sglang.srt.mem_cache.common import release_kv_cache

        release_kv_cache(req, tree_cache, is_insert=False)

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
            **self._more_for_release(scheduler),
        )

    def tokens_to_come_back(self, preallocation: Any, req: Any) -> int:
        return int(preallocation._prealloc_required_tokens(req)[0])

    def kept_from_adder(self, adder: Any) -> int:
        return int(adder.rem_total_token_offset)

    def _more_for_release(self, scheduler: Any) -> dict[str, Any]:
        """Parameters of SGLang's `release_req` that only some releases have."""
        return {}
