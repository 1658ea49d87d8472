"""What local prompts and transfers leave each other of the KV pool, by `admission`'s rules.

Knows where SGLang keeps the amounts; all of them are KV tokens.
"""

from __future__ import annotations

from typing import Any

from sglang_ext import sglang
from sglang_ext.elastic.admission import Waiting, reserved_for_local, reserved_for_transfers
from sglang_ext.elastic.host_tier import HostTier
from sglang_ext.elastic.queues import Queues
from sglang_ext.sglang.pool import available_tokens


class Memory:
    """The KV pool of one scheduler."""

    def __init__(self, scheduler: Any, queues: Queues, host_tier: HostTier) -> None:
        self._scheduler = scheduler
        self._queues = queues
        self._host_tier = host_tier

    def available_tokens(self) -> int:
        """KV tokens that are free or can be evicted."""
        return available_tokens(self._scheduler)

    def can_ever_hold(self, req: Any) -> bool:
        """Whether SGLang would let `req` in with nothing else on the worker.

        It wants a page beside the prompt's, and accepts prompts that leave none: with pages of
        several tokens such a prompt would wait for ever, and all behind it.
        """
        s = self._scheduler
        return int(req.seqlen) + int(s.page_size) < int(s.max_total_num_tokens)

    def _waiting(self, req: Any, growth: int) -> Waiting | None:
        """`req` with what it needs to be let in, its cached prefix included: that gets pinned."""
        if req is None:
            return None
        return Waiting(
            self._queues.place(req), int(req.seqlen) + growth + self._scheduler.page_size
        )

    def _local_head(self) -> Waiting | None:
        from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

        head = self._queues.local_head
        if head is None:
            return None
        remaining = head.sampling_params.max_new_tokens - len(head.output_ids)
        return self._waiting(head, min(max(remaining, 0), CLIP_MAX_NEW_TOKENS))

    def _transfer_head(self) -> Waiting | None:
        preallocation = self._scheduler.disagg_decode_prealloc_queue
        ready = [entry.req for entry in preallocation.queue if entry.waiting_for_input]
        return self._waiting(self._queues.head(ready), preallocation.num_reserved_decode_tokens)

    def _chunk_remaining(self) -> int:
        req = self._scheduler.chunked_req
        allocated = None if req is None else sglang.elastic().allocated_tokens(req)
        if allocated is None:
            return 0
        reserve = self._scheduler.disagg_decode_prealloc_queue.num_reserved_decode_tokens
        return max(0, int(req.seqlen) - allocated) + int(reserve)

    def transfer_budget(self, tokens: int, *, for_retracted: bool) -> int:
        """What is left of the `tokens` that SGLang would let transfers take."""
        preallocation = self._scheduler.disagg_decode_prealloc_queue
        if not preallocation.queue and not preallocation.retracted_queue:
            return tokens
        return tokens - reserved_for_local(
            chunk_remaining=self._chunk_remaining(),
            local_head=None if for_retracted else self._local_head(),
            transfer_head=self._transfer_head(),
        )

    def reserve_from_local(self, running_batch: Any, *, before_retracted: bool = False) -> int:
        """What a local prompt must leave alone: the others' next tokens, who goes before it, and
        the room for what transfers bring back from host memory.

        A prompt that goes `before_retracted` requests need not leave them what they come back to.
        """
        preallocation = self._scheduler.disagg_decode_prealloc_queue
        promised = self._host_tier.tokens_to_restore()
        if not running_batch.is_empty():
            promised += running_batch.new_tokens_required_next_decode()
        return promised + reserved_for_transfers(
            decode_reserve=preallocation.num_reserved_decode_tokens,
            transfers=len(self._scheduler.disagg_decode_transfer_queue.queue)
            + len(self._queues.transferred),
            retracted=0
            if before_retracted
            else sum(
                sglang.elastic().tokens_to_come_back(preallocation, req)
                for req in preallocation.retracted_queue
            ),
            local_head=self._local_head(),
            transfer_head=self._transfer_head(),
        )
