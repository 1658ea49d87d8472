"""The KV pool of SGLang's scheduler, which is asked in the same way in every release."""

from __future__ import annotations

from typing import Any


def available_tokens(scheduler: Any) -> int:
    """KV tokens that are free or can be evicted."""
    free: int = scheduler.token_to_kv_pool_allocator.available_size()
    return free + int(scheduler.tree_cache.evictable_size())
