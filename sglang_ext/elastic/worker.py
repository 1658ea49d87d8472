"""The elastic part of a decode worker's scheduler: two queues, one batch, and memory shared fairly.

Owns which request is where on this worker: local prompts wait in SGLang's own ``waiting_queue``,
where its prefill scheduling finds them; requests whose KV has arrived wait in a second list, which
is shown to SGLang's decode code as its ``waiting_queue`` while that code runs. Each step first lets
transfers in, then merges what has arrived into the running batch, then lets SGLang form a prefill
batch.

Must not know how a transfer works or fails (`fallback`), nor what a step costs (`pacing`).

Every decision that depends on a clock is agreed upon by the ranks of a tensor-parallel group: they
must form the same batch.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sglang_ext.elastic.admission import (
    Place,
    Waiting,
    chunk_that_fits,
    reserved_for_local,
    reserved_for_transfers,
    slots_for_transferred,
)
from sglang_ext.elastic.pacing import ChunkPacer, Step, fit_to_pages
from sglang_ext.elastic.settings import Interference, Settings
from sglang_ext.guards import PluginMismatch

logger = logging.getLogger(__name__)

LOCAL_ROOM = -1
"""Room of a request that came without one; SGLang's check for a missing room lets it pass."""

_RETRY_STEPS = 64


@dataclass(frozen=True)
class _Chunk:
    """What the next prefill batch may be: prompt tokens, and whether decodes ride along."""

    tokens: int | None
    mixed: bool


class ElasticWorker:
    """What the plugin adds to one ``Scheduler`` in decode mode.

    `counts` holds what happened since the start: ``local`` and ``separated`` requests, ``fallback``
    and ``fallback_refused`` by reason, ``requeued_chunk`` (a half-prefilled prompt put back for
    lack of memory).
    """

    def __init__(self, scheduler: Any, settings: Settings) -> None:
        self.scheduler = scheduler
        self.settings = settings
        self.transferred: list[Any] = []
        self.quarantine: list[tuple[float, Any]] = []
        self.counts: Counter[str] = Counter()
        self.own_chunk_tokens: int | None = scheduler.chunked_prefill_size
        self.own_mixing: bool = scheduler.is_mixed_chunk
        largest = settings.chunk_tokens or self.own_chunk_tokens or scheduler.max_prefill_tokens
        self.pacer = ChunkPacer(
            target_s=settings.target_itl_s,
            smallest_tokens=settings.min_chunk_tokens,
            largest_tokens=largest,
        )
        self.exporter: Any = None
        self.chunk_tokens: int | None = None
        self.extra_reserved_tokens = 0
        self.scheduling = False
        self._set_aside: list[Any] | None = None
        self._arrivals = itertools.count()
        self._last_result_s: float | None = None
        self._decodes_waited = False
        self._waited_for_step = False
        self._full_at: tuple[int, int] | None = None
        self._full_for_steps = 0

    # ---------------------------------------------------------------- queues

    @property
    def local(self) -> list[Any]:
        """Requests that wait to be prefilled here."""
        queue: list[Any] = (
            self.scheduler.waiting_queue if self._set_aside is None else self._set_aside
        )
        return queue

    @contextmanager
    def hiding_local(self) -> Iterator[None]:
        """Within it, SGLang sees none of the prompts that wait to be prefilled here."""
        queue, self.scheduler.waiting_queue = self.scheduler.waiting_queue, []
        try:
            yield
        finally:
            self.scheduler.waiting_queue = queue

    @contextmanager
    def showing_transferred(self) -> Iterator[None]:
        """Within it, SGLang's ``waiting_queue`` holds the requests whose KV has arrived."""
        self._set_aside, self.scheduler.waiting_queue = (
            self.scheduler.waiting_queue,
            self.transferred,
        )
        try:
            yield
        finally:
            self.transferred = self.scheduler.waiting_queue
            self.scheduler.waiting_queue, self._set_aside = self._set_aside, None

    def is_local(self, req: Any) -> bool:
        """Whether `req` is to be prefilled on this worker."""
        if getattr(req, "deltaserve_local", False):
            return True
        return req.bootstrap_host is None and req.bootstrap_room in (None, LOCAL_ROOM)

    def add_local(self, req: Any, *, first: bool = False) -> None:
        """Puts `req` in line to be prefilled here, at the front where `first`."""
        from sglang.srt.disaggregation.utils import DisaggregationMode

        req.deltaserve_local = True
        req.bootstrap_room = None
        # Its phases are those of a colocated request; in decode mode they would be named, and
        # measured, after a transfer that never was.
        req.time_stats.disagg_mode = DisaggregationMode.NULL
        self.arrive(req)
        if first:
            self.local.insert(0, req)
        else:
            self.local.append(req)
        req.time_stats.set_wait_queue_entry_time()

    def is_separated(self, req: Any) -> bool:
        """Whether `req` comes from a prefill worker; SGLang's own health checks only pretend to."""
        from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

        return bool(req.bootstrap_host != FAKE_BOOTSTRAP_HOST)

    def is_refused(self, req: Any) -> bool:
        """Whether ``--max-queued-requests`` are in line already; `req` has then been answered."""
        return self._set_aside is None and bool(self.scheduler._abort_on_queued_limit(req))

    def abort_waiting(self, request: Any) -> None:
        """Ends the local requests in line that `request` names; they own no memory."""
        from sglang.srt.managers.io_struct import AbortReq

        s = self.scheduler
        keep = []
        for req in s.waiting_queue:
            if request.abort_all or req.rid.startswith(request.rid):
                s.ipc_channels.send_to_tokenizer.send_output(AbortReq(rid=req.rid), req)
            else:
                keep.append(req)
        s.waiting_queue = keep

    def prefill_again(self, req: Any) -> None:
        """Puts a retracted request without a token back in line.

        With overlap scheduling a local request can be thrown out of the batch before its first
        token is noted. It cannot come back to decode; SGLang's transferred requests always can.
        """
        vars(req).pop("kv_cache_cpu", None)
        self.add_local(req, first=True)

    def arrive(self, req: Any) -> None:
        """Gives `req` its place in the order of arrival, once; the same on every rank."""
        if getattr(req, "deltaserve_arrival", None) is None:
            req.deltaserve_arrival = next(self._arrivals)

    def _place(self, req: Any) -> Place:
        s = self.scheduler
        priority = 0
        if s.enable_priority_scheduling and req.priority is not None:
            priority = req.priority if s.schedule_low_priority_values_first else -req.priority
        return Place(priority, getattr(req, "deltaserve_arrival", None) or 0)

    def _head(self, queue: list[Any]) -> Any:
        return min(queue, key=self._place) if queue else None

    # ---------------------------------------------------------------- memory

    def room(self) -> int:
        """KV tokens that are free or can be evicted."""
        s = self.scheduler
        free: int = s.token_to_kv_pool_allocator.available_size()
        return free + int(s.tree_cache.evictable_size())

    def _waiting(self, req: Any, growth: int) -> Waiting | None:
        """`req` with what it needs to be let in, its cached prefix included: that gets pinned."""
        if req is None:
            return None
        return Waiting(self._place(req), int(req.seqlen) + growth + self.scheduler.page_size)

    def _local_head(self) -> Waiting | None:
        from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

        head = self._head(self.local)
        if head is None:
            return None
        remaining = head.sampling_params.max_new_tokens - len(head.output_ids)
        return self._waiting(head, min(max(remaining, 0), CLIP_MAX_NEW_TOKENS))

    def _transfer_head(self) -> Waiting | None:
        preallocation = self.scheduler.disagg_decode_prealloc_queue
        ready = [entry.req for entry in preallocation.queue if entry.waiting_for_input]
        return self._waiting(self._head(ready), preallocation.num_reserved_decode_tokens)

    def _chunk_remaining(self) -> int:
        req = self.scheduler.chunked_req
        if req is None or req.kv is None:
            return 0
        reserve = self.scheduler.disagg_decode_prealloc_queue.num_reserved_decode_tokens
        return max(0, int(req.seqlen) - int(req.kv.kv_allocated_len)) + int(reserve)

    def transfer_budget(self, tokens: int, *, for_retracted: bool) -> int:
        """What is left of the `tokens` that SGLang would let transfers take."""
        preallocation = self.scheduler.disagg_decode_prealloc_queue
        if not preallocation.queue and not preallocation.retracted_queue:
            return tokens
        return tokens - reserved_for_local(
            chunk_remaining=self._chunk_remaining(),
            local_head=None if for_retracted else self._local_head(),
            transfer_head=self._transfer_head(),
        )

    def _reserve_from_local(self, running_batch: Any) -> int:
        preallocation = self.scheduler.disagg_decode_prealloc_queue
        growth = 0
        if not running_batch.is_empty():
            growth = running_batch.new_tokens_required_next_decode()
        return growth + reserved_for_transfers(
            decode_reserve=preallocation.num_reserved_decode_tokens,
            transfers=len(self.scheduler.disagg_decode_transfer_queue.queue)
            + len(self.transferred),
            retracted=sum(
                preallocation._prealloc_required_tokens(req)[0]
                for req in preallocation.retracted_queue
            ),
            local_head=self._local_head(),
            transfer_head=self._transfer_head(),
        )

    def hold(self, req: Any) -> None:
        """Keeps the KV of `req` (or of a stand-in for it) unused for a while, then releases it.

        The prefill worker has been told to stop, but a write that is under way cannot be called
        back, and nothing says when it has ended.
        """
        self.quarantine.append((time.monotonic() + self.settings.quarantine_s, req))

    def sit_out_quarantine(self) -> None:
        """Waits until every quarantine is over and ends them.

        For a paused worker: no step runs that would end them, and until then it is not idle, which
        a weight update takes for granted.
        """
        for until_s, _ in self.quarantine:
            time.sleep(max(0.0, until_s - time.monotonic()))
        self._end_quarantine()

    def _end_quarantine(self) -> None:
        if not self.quarantine:
            return
        from sglang.srt.mem_cache.common import release_kv_cache

        now = time.monotonic()
        over = self.agree([int(now >= until) for until, _ in self.quarantine])
        for (_, req), done in zip(self.quarantine, over, strict=True):
            if done:
                release_kv_cache(req, self.scheduler.tree_cache, is_insert=False)
        self.quarantine = [
            entry for entry, done in zip(self.quarantine, over, strict=True) if not done
        ]
        if self.exporter is not None:
            self.exporter.export()

    def agree(self, values: list[int]) -> list[int]:
        """The smallest of each value over the ranks that must form the same batch."""
        s = self.scheduler
        if s.ps.attn_tp_size == 1 or not values:
            return values
        import torch

        tensor = torch.tensor(values, dtype=torch.int64)
        torch.distributed.all_reduce(
            tensor, op=torch.distributed.ReduceOp.MIN, group=s.attn_tp_cpu_group
        )
        agreed: list[int] = tensor.tolist()
        return agreed

    # ---------------------------------------------------------------- a step

    def next_batch(self, running_batch: Any) -> Any:
        """The next batch: SGLang's choice for a colocated worker, with `prefill` in its midst."""
        s = self.scheduler
        plan = s.get_next_batch_to_run(running_batch, s.last_batch)
        if plan.batch_to_run is None:
            self._last_result_s = None
        return plan

    def prefill(self, original: Callable[..., Any], running_batch: Any) -> Any:
        """Takes in transfers, merges what has arrived, then forms a prefill batch."""
        from sglang.srt.managers.schedule_batch import NextBatchPlan

        s = self.scheduler
        # SGLang's accounting of transfers reads the running requests here; after a step that mixed
        # prefill and decode they would still be in `last_batch`.
        s.running_batch = running_batch
        self._end_quarantine()
        with self.showing_transferred():
            self._take_in_transfers()
            running_batch = self._merge_arrived(running_batch)
        s.running_batch = running_batch

        nobody = s.chunked_req is None and not s.waiting_queue
        if nobody and not s.grammar_manager.has_waiting_grammars():
            self._decodes_waited = False
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        chunk = self._choose_chunk(running_batch)
        if chunk is None:
            self._decodes_waited = False
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)

        s.chunked_prefill_size, s.is_mixed_chunk = chunk.tokens, chunk.mixed
        self.extra_reserved_tokens = self._reserve_from_local(running_batch)
        self._retry_when_room(running_batch)
        held_back: list[Any] = []
        if s.disagg_decode_prealloc_queue.retracted_queue:
            held_back, s.waiting_queue = s.waiting_queue, held_back
        decoding = bool(running_batch.reqs)
        try:
            plan = original(s, running_batch)
        finally:
            s.waiting_queue = held_back + s.waiting_queue
            s.chunked_prefill_size, s.is_mixed_chunk = self.own_chunk_tokens, self.own_mixing
            self.extra_reserved_tokens = 0
        if plan.running_batch.batch_is_full and self._full_at is None:
            self._full_at = self._fullness(plan.running_batch)
            self._full_for_steps = 0
        batch = plan.batch_to_run
        self._decodes_waited = decoding and batch is not None and not batch.decoding_reqs
        return plan

    def _take_in_transfers(self) -> None:
        s = self.scheduler
        preallocation = s.disagg_decode_prealloc_queue
        reserve = preallocation.num_reserved_decode_tokens
        alone = (
            s.running_batch.is_empty()
            and s.chunked_req is None
            and not s.disagg_decode_transfer_queue.queue
            and not self.transferred
            and not self.quarantine
        )
        if alone:
            # With nothing else on the worker the reserve has nobody to protect, and a request
            # close to the pool's size could never be let in.
            preallocation.num_reserved_decode_tokens = 1
        self._waited_for_step = False
        self.scheduling = True
        try:
            s.process_decode_queue()
        finally:
            self.scheduling = False
            preallocation.num_reserved_decode_tokens = reserve
        if preallocation.retracted_queue:
            # SGLang stops here until they are back; but what they wait for may be held by
            # requests whose KV has arrived and only has to be noticed.
            s.waiting_queue.extend(s.disagg_decode_transfer_queue.pop_transferred())
        for req in s.waiting_queue:
            if req.last_node is None:
                # A request that came back from host memory has all its KV to itself. Matching it
                # against the tree now, as SGLang would, swaps in pages that it does not hold a
                # lock on and forgets its own.
                req.last_node = s.tree_cache.root_node

    def before_allocation(self) -> None:
        """Waits, once a step, for the step in flight before pages go to a transfer.

        That step still writes a token for each request that has just ended, into pages that are
        free by now. A transfer or a copy from the host could get them, and be overwritten.
        """
        if not self._waited_for_step:
            self._waited_for_step = True
            self._wait_for_step_in_flight()

    def _wait_for_step_in_flight(self) -> None:
        s = self.scheduler
        if s.enable_overlap and s.device != "cpu":
            s.forward_stream.synchronize()

    def _merge_arrived(self, running_batch: Any) -> Any:
        s = self.scheduler
        if not s.waiting_queue and not s.grammar_manager.has_waiting_grammars():
            return running_batch
        places = min(s.req_to_token_pool.size, s.max_running_requests)
        free = places - running_batch.batch_size()
        local, arrived = self._head(self.local), self._head(s.waiting_queue)
        slots = slots_for_transferred(
            free=free,
            chunk_in_flight=s.chunked_req is not None,
            local_head=None if local is None else self._place(local),
            transferred_head=None if arrived is None else self._place(arrived),
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
        s = self.scheduler
        return (
            self.room() - self._reserve_from_local(running_batch),
            s.get_num_allocatable_reqs(len(running_batch.reqs)),
        )

    def _choose_chunk(self, running_batch: Any) -> _Chunk | None:
        """The next prefill batch's size, or None where this step must not prefill."""
        s = self.scheduler
        chunked = s.chunked_req
        if chunked is None and not s.waiting_queue:
            return _Chunk(self.own_chunk_tokens, self.own_mixing)
        decoding = not running_batch.is_empty() and not running_batch.is_prefill_only
        growth = 0
        if decoding:
            growth = running_batch.new_tokens_required_next_decode()
            if not running_batch.check_decode_mem():
                if chunked is not None:
                    self._requeue_chunked("running requests need its memory")
                return None

        mixed = self.own_mixing
        tokens = self.own_chunk_tokens
        if self.settings.interference is not Interference.STOCK:
            prompts = [*s.waiting_queue, *([chunked] if chunked is not None else [])]
            mixed = (
                decoding
                and not running_batch.return_logprob
                and not any(r.return_logprob or r.input_embeds is not None for r in prompts)
            )
            if decoding and not mixed and self._decodes_waited:
                return None
            tokens = self._paced_tokens(running_batch if decoding else None)

        riding = running_batch.batch_size() if mixed and decoding else 0
        granule = self._granule_tokens()
        if tokens is not None and self.settings.interference is not Interference.STOCK:
            tokens = fit_to_pages(tokens, granule, riding, self.pacer.largest_tokens)
        if chunked is None:
            return _Chunk(tokens, mixed)

        remaining = int(chunked.seqlen) - len(chunked.prefix_indices)
        wanted = remaining if tokens is None else min(remaining, tokens - riding)
        fitting = chunk_that_fits(
            chunk=wanted,
            granule_tokens=granule,
            page_size=s.page_size,
            decode_growth=growth,
            available=self.room(),
        )
        if fitting <= 0:
            if not decoding:
                self._requeue_chunked("there is no memory for its next chunk")
            return None
        return _Chunk(tokens if fitting == wanted else fitting + riding, mixed)

    def _granule_tokens(self) -> int:
        """What a chunk is a multiple of: a page, or what deterministic inference splits prompts at.

        SGLang passes over a prompt whose chunk is smaller than that, for as long as anyone decodes.
        """
        s = self.scheduler
        return math.lcm(s.page_size, s.truncation_align_size or 1)

    def _paced_tokens(self, decoding: Any) -> int:
        pacer = self.pacer
        if self.settings.interference is Interference.MIXED or decoding is None:
            return pacer.largest_tokens
        s = self.scheduler
        prefix = 0 if s.chunked_req is None else len(s.chunked_req.prefix_indices)
        if s.chunked_req is None:
            prefix = self._cached_tokens(self._head(s.waiting_queue))
        tokens = pacer.chunk_tokens(
            prefix, len(decoding.reqs), sum(req.seqlen for req in decoding.reqs)
        )
        self.chunk_tokens = self.agree([tokens])[0]
        return self.chunk_tokens

    def _cached_tokens(self, req: Any) -> int:
        """Tokens of `req` that the radix cache holds, looked up once."""
        if req is None:
            return 0
        known: int | None = getattr(req, "deltaserve_cached_tokens", None)
        if known is None:
            from sglang.srt.managers.schedule_policy import match_prefix_for_req

            # The look-up writes where it ended into the request. This one may stand elsewhere in
            # the tree, with a lock there that has to be given back: a stand-in is looked up.
            stand_in = copy.copy(req)
            match_prefix_for_req(
                self.scheduler.tree_cache, stand_in, req.origin_input_ids + req.output_ids
            )
            known = len(stand_in.prefix_indices)
            req.deltaserve_cached_tokens = known
        return known

    def _requeue_chunked(self, why: str) -> None:
        """Puts a half-prefilled prompt back in line; its KV stays, as evictable cache."""
        from sglang.srt.managers.schedule_batch import release_req

        s = self.scheduler
        req = s.chunked_req
        logger.warning("Elastic: %s goes back to the queue half-prefilled: %s", req.rid, why)
        # Its last chunk may still be written; those pages could be handed to a transfer.
        self._wait_for_step_in_flight()
        s.chunked_req = None
        release_req(
            req=req,
            remaing_req_count=0,
            server_args=s.server_args,
            req_to_token_pool=s.req_to_token_pool,
            token_to_kv_pool_allocator=s.token_to_kv_pool_allocator,
            tree_cache=s.tree_cache,
            hisparse_coordinator=None,
            offload_kv=False,
        )
        self.counts["requeued_chunk"] += 1
        self.add_local(req, first=True)

    # ---------------------------------------------------------------- learning

    def launch(self, original: Callable[..., Any], batch: Any, *rest: Any) -> Any:
        """Runs a batch; under overlap scheduling on a GPU its events time it.

        There results are processed one launch late, and the time between two of them holds the
        launch of the next step: of a step between two of decodes alone, next to nothing is left.
        """
        scheduler = self.scheduler
        late = scheduler.enable_overlap and str(scheduler.server_args.device) == "cuda"
        if not (late and batch.forward_mode.is_extend()):
            return original(scheduler, batch, *rest)
        import torch

        stream = scheduler.forward_stream
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record(stream)
        began_s = time.monotonic()
        result = original(scheduler, batch, *rest)
        launch_s = time.monotonic() - began_s
        ended.record(stream)
        result.deltaserve_times = (began, ended, launch_s)
        return result

    def processed(self, batch: Any, result: Any) -> None:
        """Learns from a finished step: its time is what the decodes in it waited for a token."""
        now = time.monotonic()
        began = self._last_result_s if self._last_result_s is not None else batch.launch_ts
        self._last_result_s = now
        mode = batch.forward_mode
        if not mode.is_extend() or mode.is_prebuilt() or began is None:
            return
        duration_s, launch_s = now - began, 0.0
        if times := getattr(result, "deltaserve_times", None):
            first, last, launch_s = times
            last.synchronize()
            duration_s = first.elapsed_time(last) / 1e3
        riding = {id(req) for req in batch.decoding_reqs or ()}
        prompts = [
            (length, prefix)
            for req, length, prefix in zip(
                batch.reqs, batch.extend_lens, batch.prefix_lens, strict=False
            )
            if id(req) not in riding
        ]
        tokens = sum(length for length, _ in prompts)
        if tokens == 0:
            return
        attended = sum(length * prefix for length, prefix in prompts) / tokens
        context = sum(req.seqlen for req in batch.decoding_reqs or ())
        step = Step(tokens, attended, len(riding), context)
        self.pacer.observe(step, duration_s, launch_s)

    def expected_prefill_s(self, req: Any) -> float:
        """Seconds that prefilling `req` here would take, by the steps seen so far."""
        cached = self._cached_tokens(req)
        return self.pacer.prefill_s([(max(1, int(req.seqlen) - cached), cached)])

    # ---------------------------------------------------------------- accounting

    def is_idle(self) -> bool:
        """Whether the worker holds nothing that SGLang does not know of."""
        return not self.transferred and not self.quarantine

    def state(self) -> dict[str, Any]:
        """Counters and the KV pool's accounts, for ``/server_info``."""
        s = self.scheduler
        pool = s.req_to_token_pool
        return {
            "interference": str(self.settings.interference),
            "target_itl_s": self.settings.target_itl_s,
            "counts": dict(self.counts),
            "pacing": {
                "steps": self.pacer.times.steps,
                "error": self.pacer.times.error,
                "launch_s": self.pacer.times.launch_s,
                "chunk_tokens": self.chunk_tokens,
            },
            "idle": bool(s.is_fully_idle()),
            "queues": {
                "local": len(self.local),
                "prefilling": int(s.chunked_req is not None),
                "transferred": len(self.transferred),
                "preallocation": len(s.disagg_decode_prealloc_queue.queue),
                "transfer": len(s.disagg_decode_transfer_queue.queue),
                "retracted": len(s.disagg_decode_prealloc_queue.retracted_queue),
                "running": len(s.running_batch.reqs),
                "quarantine": len(self.quarantine),
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

    def add_to_loads(self, loads: Any) -> None:
        """Corrects SGLang's load report, which takes all who wait for requests whose KV is here."""
        s = self.scheduler
        pending = sum(int(req.seqlen) for req in self.local)
        uncached = sum(
            int(req.seqlen) - getattr(req, "deltaserve_cached_tokens", 0) for req in self.local
        )
        if s.chunked_req is not None:
            uncached += int(s.chunked_req.seqlen) - len(s.chunked_req.prefix_indices)
        loads.num_waiting_reqs += len(self.transferred)
        loads.num_waiting_uncached_tokens += uncached
        loads.num_total_tokens += pending
        loads.num_active_tokens += pending


_workers: list[ElasticWorker] = []


def attach(scheduler: Any, settings: Settings) -> ElasticWorker:
    """Makes `scheduler` elastic; raises `PluginMismatch` where it cannot be."""
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.environ import envs

    args = scheduler.server_args
    if scheduler.disaggregation_mode is not DisaggregationMode.DECODE:
        raise PluginMismatch(
            "the elastic feature makes a decode worker prefill as well: start it with "
            "--disaggregation-mode decode, or take elastic out of DELTASERVE_SGLANG"
        )
    if not args.disaggregation_decode_enable_radix_cache:
        raise PluginMismatch(
            "an elastic worker prefills from its radix cache: "
            "add --disaggregation-decode-enable-radix-cache"
        )
    unsupported = {
        "pipeline parallelism": scheduler.ps.pp_size > 1,
        "context parallelism": scheduler.ps.attn_cp_size > 1,
        "hierarchical cache": scheduler.enable_decode_hicache
        or scheduler.enable_hierarchical_cache,
        "the staging buffer": envs.SGLANG_DISAGG_STAGING_BUFFER.get(),
        "the offloading of decode KV": args.disaggregation_decode_enable_offload_kvcache,
        "diffusion language models": scheduler.dllm_config is not None,
    }
    for what, asked in unsupported.items():
        if asked:
            raise PluginMismatch(f"an elastic worker does not support {what}: turn one of them off")
    worker = ElasticWorker(scheduler, settings)
    # SGLang leaves the logprobs of prompt tokens to the prefill worker; here that is this one.
    # Requests that came over the wire have none, and nothing is sent for them.
    scheduler.output_streamer.disaggregation_mode = DisaggregationMode.NULL
    # SGLang waits for a prefill worker that may be starting; here nobody has to.
    scheduler.disagg_decode_prealloc_queue._max_ensure_retries = settings.connect_attempts
    _workers.append(worker)
    scheduler.deltaserve_elastic = worker
    return worker


def current() -> ElasticWorker | None:
    """The elastic worker of this process, if its scheduler is one."""
    return _workers[-1] if _workers else None
