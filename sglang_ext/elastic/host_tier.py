"""KV that comes back from host memory to an elastic worker: SGLang's HiCache, written through.

SGLang copies it back in two ways. A transferred prompt's prefix is copied beside the steps, and the
request decodes once the copy has ended. A local prompt's is copied just ahead of the step that
reads it, layer by layer. Each way was written for workers that have the other one not: a step may
read pages that are still being copied for a transfer, and a copy may be begun while all places for
copies are taken. This module keeps them apart; what is copied, and when, is SGLang's doing.
"""

from __future__ import annotations

from typing import Any


class HostTier:
    """The host tier of one scheduler, which may have none."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    @property
    def _is_used(self) -> bool:
        return bool(self._scheduler.enable_decode_hicache)

    def may_load(self) -> bool:
        """Whether a step that may bring KV back can be formed now.

        SGLang has events for three copies, and ends the worker where a fourth begins before the
        first has ended. Its transfers look for a place first; its prefill scheduling does not.
        All ranks of a group give the same answer: SGLang notes the end of copies in lockstep.
        """
        return not self._is_used or bool(self._scheduler.tree_cache.has_free_load_back_slot())

    def wait_for_copies(self, batch: Any) -> None:
        """Has the prefill `batch` wait, layer by layer, for copies that others began.

        The tree shows pages as soon as their copy is under way. A batch with a copy of its own
        waits for that one, which comes after all others.
        """
        if not self._is_used or batch is None or batch.hicache_consumer_index >= 0:
            return
        controller = self._scheduler.tree_cache.cache_controller
        if controller.ack_load_queue:
            batch.hicache_consumer_index = controller.layer_done_counter.producer_index

    def tokens_to_restore(self) -> int:
        """KV tokens that transfers under way will need for the prefixes that they bring back."""
        if not self._is_used:
            return 0
        return int(self._scheduler.disagg_decode_prealloc_queue._hicache_pending_restore_tokens())

    def has_failed(self, entry: Any) -> bool:
        """Whether the prefix of `entry`, in the transfer queue, did not come back on this rank."""
        return self._is_used and entry.hicache_restore_status.value == "failed"

    def let_go(self, queue: Any, entry: Any) -> None:
        """Gives back the lock on what was brought back for `entry` of `queue`, which was given up.

        The pages stay in the tree, where the prompt finds them when it is prefilled here.
        """
        if self._is_used:
            queue._clean_hicache_prefetch_resources(entry)
