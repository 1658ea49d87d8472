"""A step of the elastic worker's scheduler.

Each step first lets transfers in, then merges what has arrived into the running batch, then lets
SGLang form a prefill batch. Knows the order of these, and when a full batch is worth another try;
the queues, the memory and the chunks have modules of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from sglang_ext.elastic.admission import slots_for_transferred
from sglang_ext.elastic.chunks import Chunks
from sglang_ext.elastic.host_tier import HostTier
from sglang_ext.elastic.memory import Memory
from sglang_ext.elastic.quarantine import Quarantine
from sglang_ext.elastic.queues import Queues
from sglang_ext.pacing.prefill import PacedPrefill
from sglang_ext.pacing.sharing import Sharing

_RETRY_STEPS = 64


class Steps:
    """The steps of one scheduler.

    `taking_in` is true while transfers are let in, `extra_reserved_tokens` is what the prefill
    batch that is being formed must leave alone.
    """

    def __init__(
        self,
        scheduler: Any,
        queues: Queues,
        memory: Memory,
        host_tier: HostTier,
        quarantine: Quarantine,
        paced: PacedPrefill,
        sharing: Sharing,
        counts: Counter[str],
    ) -> None:
        self._scheduler = scheduler
        self._queues = queues
        self._memory = memory
        self._host_tier = host_tier
        self._quarantine = quarantine
        self._paced = paced
        self._sharing = sharing
        self._chunks = Chunks(
            scheduler, queues, memory, paced, counts, self._wait_for_step_in_flight
        )
        self.taking_in = False
        self.extra_reserved_tokens = 0
        self._waited_for_step = False
        self._full_at: tuple[int, int] | None = None
        self._full_for_steps = 0

    def next_batch(self, running_batch: Any) -> Any:
        """The next batch: SGLang's choice for a colocated worker, with `prefill` in its midst."""
        s = self._scheduler
        plan = s.get_next_batch_to_run(running_batch, s.last_batch)
        if plan.batch_to_run is None:
            self._paced.nothing_runs()
        return plan

    def prefill(self, original: Callable[..., Any], running_batch: Any) -> Any:
        """Takes in transfers, merges what has arrived, then forms a prefill batch."""
        from sglang.srt.managers.schedule_batch import NextBatchPlan

        s = self._scheduler
        # SGLang's accounting of transfers reads the running requests here; after a step that mixed
        # prefill and decode they would still be in `last_batch`.
        s.running_batch = running_batch
        self._quarantine.end()
        with self._queues.showing_transferred():
            self._take_in_transfers()
            running_batch = self._merge_arrived(running_batch)
        s.running_batch = running_batch

        if not self._paced.has_prompts:
            self._paced.decodes_go_on()
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        chunk = self._chunks.choose(running_batch)
        if chunk is None or not self._host_tier.may_load():
            self._paced.decodes_go_on()
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)

        s.chunked_prefill_size, s.is_mixed_chunk = chunk.tokens, chunk.mixed
        held_back = self._behind_retracted()
        if held_back:
            behind = {id(req) for req in held_back}
            s.waiting_queue = [req for req in s.waiting_queue if id(req) not in behind]
        self.extra_reserved_tokens = self._memory.reserve_from_local(
            running_batch, before_retracted=bool(s.waiting_queue)
        )
        self._retry_when_room(running_batch)
        own, had_decodes = self._paced.own, bool(running_batch.reqs)
        try:
            with self._sharing.of(chunk, running_batch):
                plan = original(s, running_batch)
        finally:
            s.waiting_queue = held_back + s.waiting_queue
            s.chunked_prefill_size, s.is_mixed_chunk = own.tokens, own.mixed
            self.extra_reserved_tokens = 0
        if plan.running_batch.batch_is_full and self._full_at is None:
            self._full_at = self._fullness(plan.running_batch)
            self._full_for_steps = 0
        self._host_tier.wait_for_copies(plan.batch_to_run)
        self._paced.chosen(had_decodes, plan.batch_to_run)
        return plan

    def _behind_retracted(self) -> list[Any]:
        """The local prompts that wait until the retracted requests are back.

        All but more important ones. A prompt that fits beside what the retracted ones need to come
        back would have let them come back, earlier in this step; one that only fits without that
        would take what they wait for, and after it the next.
        """
        s = self._scheduler
        retracted = s.disagg_decode_prealloc_queue.retracted_queue
        if not retracted:
            return []
        most_important = min(self._queues.place(req).priority for req in retracted)
        return [
            req for req in s.waiting_queue if self._queues.place(req).priority >= most_important
        ]

    def _take_in_transfers(self) -> None:
        s = self._scheduler
        preallocation = s.disagg_decode_prealloc_queue
        reserve = preallocation.num_reserved_decode_tokens
        alone = (
            s.running_batch.is_empty()
            and s.chunked_req is None
            and not s.disagg_decode_transfer_queue.queue
            and not self._queues.transferred
            and not len(self._quarantine)
            and len(preallocation.queue) + len(preallocation.retracted_queue) == 1
        )
        if alone:
            # With nothing else on the worker the reserve has nobody to protect, and a request
            # close to the pool's size could never be let in. Several at once would fill the pool.
            preallocation.num_reserved_decode_tokens = 1
        self._waited_for_step = False
        self.taking_in = True
        try:
            s.process_decode_queue()
        finally:
            self.taking_in = False
            preallocation.num_reserved_decode_tokens = reserve
        if preallocation.retracted_queue:
            # SGLang stops here until they are back; but what they wait for may be held by
            # requests whose KV has arrived and only has to be noticed.
            s.waiting_queue.extend(s.disagg_decode_transfer_queue.pop_transferred())

    def before_allocation(self) -> None:
        """Waits, once a step, for the step in flight before pages go to a transfer.

        That step still writes a token for each request that has just ended, into pages that are
        free by now. A transfer or a copy from the host could get them, and be overwritten.
        """
        if not self._waited_for_step:
            self._waited_for_step = True
            self._wait_for_step_in_flight()

    def _wait_for_step_in_flight(self) -> None:
        s = self._scheduler
        if s.enable_overlap and s.device != "cpu":
            s.forward_stream.synchronize()

    def _merge_arrived(self, running_batch: Any) -> Any:
        s = self._scheduler
        if not s.waiting_queue and not s.grammar_manager.has_waiting_grammars():
            return running_batch
        places = min(s.req_to_token_pool.size, s.max_running_requests)
        free = places - running_batch.batch_size()
        local, arrived = self._queues.local_head, self._queues.head(s.waiting_queue)
        slots = slots_for_transferred(
            free=free,
            chunk_in_flight=s.chunked_req is not None,
            local_head=None if local is None else self._queues.place(local),
            transferred_head=None if arrived is None else self._queues.place(arrived),
        )
        limit = s.max_running_requests
        s.max_running_requests = running_batch.batch_size() + slots
        try:
            batch = s.get_new_prebuilt_batch(running_batch)
        finally:
            s.max_running_requests = limit
        if not batch:
            return running_batch
        s.batch_result_processor.process_batch_result_prebuilt(batch)
        batch.filter_batch()
        if batch.is_empty():
            return running_batch
        if running_batch.is_empty():
            return batch
        running_batch.merge_batch(batch)
        return running_batch

    def _retry_when_room(self, running_batch: Any) -> None:
        """Undoes ``batch_is_full`` once there is more room than when it was set.

        SGLang undoes it when a running request ends; here room also comes from transfers that
        fail, from ended quarantines and from reservations that lapse.
        """
        if not running_batch.batch_is_full:
            self._full_at = None
            return
        self._full_for_steps += 1
        now = self._fullness(running_batch)
        if (
            running_batch.is_empty()
            or self._full_at is None
            or now[0] > self._full_at[0]
            or now[1] > self._full_at[1]
            or self._full_for_steps >= _RETRY_STEPS
        ):
            running_batch.batch_is_full = False
            self._full_at = None

    def _fullness(self, running_batch: Any) -> tuple[int, int]:
        s = self._scheduler
        return (
            self._memory.available_tokens() - self._memory.reserve_from_local(running_batch),
            s.get_num_allocatable_reqs(len(running_batch.reqs)),
        )
