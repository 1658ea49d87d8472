"""The parts of SGLang's decode scheduler that the elastic worker hooks, in small.

Each method does what SGLang's does, as far as memory, locks and queues go, and nothing else: pages
are counts, a transfer is a status that the test sets. The hooks are applied to these classes the
way SGLang's registry applies them to its own, so that a test drives the scheduler and never calls
the plugin. That SGLang really looks like this is what the live tests show.
"""

from __future__ import annotations

import functools
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang_ext import sglang as releases
from sglang_ext.guards import Hook, PlacedHook

FAILED, WAITING, TRANSFERRING, SUCCESS = 0, 2, 3, 4
FAKE_HOST = "2.2.2.2"


class Node:
    """A node of the radix cache: the tokens on the way to it, and how many requests hold it."""

    def __init__(self, key: tuple[int, ...], parent: Node | None) -> None:
        self.key, self.parent = key, parent
        self.children: list[Node] = []
        self.lock_ref = 0
        self.is_in_host = False


@dataclass
class MatchPrefixParams:
    key: tuple[int, ...]


class Tree:
    """A radix cache in which a test inserts paths; locks are counted as in SGLang's."""

    def __init__(self) -> None:
        self.root_node = Node((), None)
        self.evictable = 0
        self.lookups = 0
        self.loads_back = True

    def insert(self, tokens: Iterable[int], is_in_host: bool = False) -> Node:
        """Puts `tokens` in as one node below the longest path that they begin with."""
        key = tuple(tokens)
        length, parent = self.match(key)
        node = Node(key[length:], parent)
        node.is_in_host = is_in_host
        parent.children.append(node)
        self.evictable += len(node.key)
        return node

    def match(self, key: tuple[int, ...]) -> tuple[int, Node]:
        self.lookups += 1
        node, length = self.root_node, 0
        while True:
            for child in node.children:
                if key[length : length + len(child.key)] == child.key:
                    node, length = child, length + len(child.key)
                    break
            else:
                return length, node

    def match_prefix(self, params: MatchPrefixParams) -> Any:
        length, node = self.match(params.key)
        in_host = 0
        while node.is_in_host and node.parent is not None:
            in_host += len(node.key)
            node = node.parent
        return SimpleNamespace(device_prefix_len=length - in_host, host_hit_length=in_host)

    def inc_lock_ref(self, node: Node) -> None:
        while node.parent is not None:
            if node.lock_ref == 0:
                self.evictable -= len(node.key)
            node.lock_ref += 1
            node = node.parent

    def dec_lock_ref(self, node: Node) -> None:
        while node.parent is not None:
            if node.lock_ref == 1:
                self.evictable += len(node.key)
            node.lock_ref -= 1
            node = node.parent

    def evictable_size(self) -> int:
        return self.evictable

    def protected_size(self) -> int:
        return 0

    def is_tree_cache(self) -> bool:
        return True


class MetadataSlots:
    """The metadata buffers that no transfer owns."""

    def __init__(self) -> None:
        self.free_slots: list[int] = []

    def free(self, free_index: int) -> None:
        self.free_slots.append(free_index)


class GrammarManager:
    """Requests whose grammar is being compiled; a test says whose is done."""

    def __init__(self) -> None:
        self.grammar_queue: list[Req] = []
        self.compiled: set[str] = set()

    def has_waiting_grammars(self) -> bool:
        return len(self.grammar_queue) > 0

    def get_ready_grammar_requests(self) -> list[Req]:
        ready = [req for req in self.grammar_queue if req.rid in self.compiled]
        self.grammar_queue = [req for req in self.grammar_queue if req.rid not in self.compiled]
        return ready


class FINISH_ABORT:
    def __init__(self, message: str) -> None:
        self.message = message


@dataclass
class KV:
    """A request's KV record, which is always there."""

    kv_allocated_len: int = 0
    holds_kv: bool = False
    retraction_backup: Any = None


class Stats:
    def __init__(self) -> None:
        self.scheduler_recv_time = 0.0
        self.decode_prealloc_queue_entry_time = 0.0
        self.wait_queue_entry_time = 0.0
        self.disagg_mode: Any = None

    def set_wait_queue_entry_time(self) -> None:
        self.wait_queue_entry_time = float(next(CLOCK))


CLOCK = iter(range(1, 10**9))


class Req:
    """A request: bootstrap fields make it a separated one."""

    def __init__(
        self, rid: str, ids: Iterable[int], max_new_tokens: int = 8, room: int | None = None
    ) -> None:
        self.rid = rid
        self.origin_input_ids = list(ids)
        self.output_ids: list[int] = []
        self.sampling_params = SimpleNamespace(max_new_tokens=max_new_tokens, custom_params=None)
        self.bootstrap_host = None if room is None else "prefill"
        self.bootstrap_room = room
        self.priority: int | None = None
        self.time_stats = Stats()
        self.return_logprob = False
        self.input_embeds = None
        self.session = None
        self.logprob = SimpleNamespace()
        self.beam_group: Any = None
        self.is_retracted = False
        self.retraction_count, self.retracted_stain = 0, False
        self.pd_rebootstrap_in_progress = False
        self.pd_rebootstrap_forced_output_id: int | None = None
        self.finished_reason: Any = None
        self.to_finish: Any = None
        self.cached_tokens = 0
        self.kv = KV()
        self.lock: Node | None = None
        self.prefix_len = self.extend_len = self.host_hit_length = 0
        self.expected_kv_checksum = 0

    def init_next_round_input(self, tree_cache: Tree) -> None:
        self.full_untruncated_fill_ids = self.origin_input_ids + self.output_ids
        found = tree_cache.match_prefix(MatchPrefixParams(tuple(self.full_untruncated_fill_ids)))
        self.prefix_len, self.host_hit_length = found.device_prefix_len, found.host_hit_length

    def detach_kv(self) -> KV:
        record, self.kv = self.kv, KV()
        return record

    @property
    def seqlen(self) -> int:
        return len(self.origin_input_ids) + len(self.output_ids)

    def finished(self) -> bool:
        return self.finished_reason is not None

    def set_finish_with_abort(self, error_msg: str) -> None:
        self.origin_input_ids = [0]
        self.to_finish = FINISH_ABORT(error_msg)

    def reset_for_retract(self) -> None:
        assert not self.kv.holds_kv
        self.prefix_len, self.lock = 0, None
        self.is_retracted = True
        self.retraction_count += 1


class Batch:
    """A ``ScheduleBatch``: the running one, or the next."""

    hicache_consumer_index = -1

    def __init__(self, reqs: Iterable[Req] = ()) -> None:
        self.reqs = list(reqs)
        self.batch_is_full = False
        self.is_prefill_only = False
        self.return_logprob = False
        self.decoding_reqs: list[Req] | None = None
        self.has_room = True

    def is_empty(self) -> bool:
        return not self.reqs

    def batch_size(self) -> int:
        return len(self.reqs)

    def new_tokens_required_next_decode(self) -> int:
        return len(self.reqs)

    def check_decode_mem(self) -> bool:
        return self.has_room

    def filter_batch(self) -> None:
        self.reqs = [req for req in self.reqs if not req.finished()]

    def merge_batch(self, other: Batch) -> None:
        self.reqs += other.reqs


@dataclass
class Receiver:
    """A receiver, whose prefill worker may be able to say that its writes have ended."""

    status: int = WAITING
    message: str = "Lost connection with prefill instance"
    acknowledges: bool = False
    asked: list[bool] = field(default_factory=list)

    @property
    def kv_mgr(self) -> Any:
        return SimpleNamespace(enable_deferred_decode_kv_release=self.acknowledges)

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        self.asked.append(force_arm)

    def failure_exception(self) -> None:
        raise RuntimeError(self.message)

    def clear(self) -> None: ...

    def abort(self) -> None:
        self.status = FAILED


@dataclass
class Entry:
    """A ``DecodeRequest``."""

    req: Req
    kv_receiver: Any = field(default_factory=Receiver)
    waiting_for_input: bool = False
    metadata_buffer_index: int = -1


@dataclass
class Plan:
    batch_to_run: Batch | None
    running_batch: Batch


class Pool:
    """The KV pool, counted in tokens, and whose tokens they are."""

    def __init__(self, total: int) -> None:
        self.free = total
        self.events: list[str] = []

    def available_size(self) -> int:
        return self.free


class Rooms:
    """``MetadataBuffers.bootstrap_room``: what a prefill worker wrote into each buffer."""

    def __init__(self) -> None:
        self.written: dict[int, int] = {}

    def __getitem__(self, place: tuple[int, int]) -> Any:
        return SimpleNamespace(item=lambda: self.written.get(place[0], 0))

    def __setitem__(self, index: int, room: int) -> None:
        self.written[index] = room


def classes() -> SimpleNamespace:
    """Fresh classes, to which hooks can be applied without a trace in the next test."""

    class DecodePreallocQueue:
        def __init__(self, scheduler: Any) -> None:
            self.scheduler = scheduler
            self.queue: list[Entry] = []
            self.retracted_queue: list[Req] = []
            self.pending_reqs: list[Entry] = []
            self.held_rebootstrap_reqs: list[Req] = []
            self.num_reserved_decode_tokens = 32
            self._max_ensure_retries = 15

        def add(self, req: Req, is_retracted: bool = False) -> None:
            if is_retracted:
                self.retracted_queue.append(req)
            else:
                self.queue.append(Entry(req))

        def _prealloc_required_tokens(self, req: Req) -> tuple[int, int]:
            return req.seqlen + self.num_reserved_decode_tokens, 0

        def _allocatable_token_budgets(
            self,
            retractable_tokens: int | None = None,
            count_retracted: bool = True,
            extra_reserved_reqs: int = 0,
            reserved_tokens: int | None = None,
            hicache_reserved_tokens: int = 0,
        ) -> int:
            s = self.scheduler
            active = (
                len(s.running_batch.reqs)
                + len(s.disagg_decode_transfer_queue.queue)
                + len(s.waiting_queue)
                + extra_reserved_reqs
            )
            free = s.pool.free + s.tree_cache.evictable_size()
            return int(free - self.num_reserved_decode_tokens * active)

        def _update_handshake_waiters(
            self, rids_to_check: Any = None, pp_good_rids: Any = None, pp_bad_rids: Any = None
        ) -> None:
            for entry in self.queue:
                if entry.kv_receiver.status == WAITING:
                    entry.waiting_for_input = True

        def _pre_alloc(
            self,
            req: Req,
            prefix_indices: Any = None,
            prefix_len: int | None = None,
            total_prefix_len: int | None = None,
        ) -> None:
            pool = self.scheduler.pool
            pool.events.append(f"allocate {req.rid}")
            tokens = req.seqlen - (prefix_len or 0)
            pool.free -= tokens
            req.kv = KV(tokens, holds_kv=True)

        def resume_retracted_reqs(self) -> list[Req]:
            resumed = []
            budget = self._allocatable_token_budgets(count_retracted=False)
            while self.retracted_queue:
                required = self._prealloc_required_tokens(self.retracted_queue[0])[0]
                if required > budget:
                    break
                req = self.retracted_queue.pop(0)
                self._pre_alloc(req)
                budget -= required
                resumed.append(req)
            return resumed

        def pop_preallocated(self) -> list[Entry]:
            self._update_handshake_waiters()
            admitted = []
            s = self.scheduler
            for entry in list(self.queue):
                if not entry.waiting_for_input:
                    continue
                length, node = s.tree_cache.match(tuple(entry.req.origin_input_ids))
                entry.req.lock = node
                s.tree_cache.inc_lock_ref(node)
                budget = self._allocatable_token_budgets(extra_reserved_reqs=len(admitted))
                if entry.req.seqlen - length + self.num_reserved_decode_tokens > budget:
                    s.tree_cache.dec_lock_ref(node)
                    entry.req.lock = None
                    break
                self._pre_alloc(entry.req, None, length, length)
                entry.metadata_buffer_index = len(s.rooms.written) + len(admitted) + 1
                entry.kv_receiver.status = TRANSFERRING
                admitted.append(entry)
                self.queue.remove(entry)
            return admitted

        def hold_rebootstrap(self, req: Req) -> None:
            self.held_rebootstrap_reqs.append(req)

    class DecodeTransferQueue:
        def __init__(self, scheduler: Any) -> None:
            self.scheduler = scheduler
            self.queue: list[Entry] = []
            self.metadata_buffers = SimpleNamespace(bootstrap_room=scheduler.rooms)
            self.req_to_metadata_buffer_idx_allocator = MetadataSlots()
            self.deferred_kv_release_timeout = 30.0
            self.deferred: list[tuple[Entry, float]] = []
            self.acknowledged = False

        def _defer_release(self, entry: Entry) -> None:
            self.deferred.append((entry, self.deferred_kv_release_timeout))

        def num_pending_deferred_releases(self) -> int:
            return len(self.deferred)

        def resolve_deferred_releases(self) -> None:
            if self.acknowledged:
                for entry, _ in self.deferred:
                    release_kv_cache(entry.req, self.scheduler.tree_cache, checkpoint=False)
                    slots = self.req_to_metadata_buffer_idx_allocator
                    slots.free(entry.metadata_buffer_index)
                self.deferred = []

        def _poll_with_metadata_gate(self) -> list[int]:
            return [entry.kv_receiver.status for entry in self.queue]

        def _commit_transfer_to_req(self, decode_req: Entry) -> None:
            req = decode_req.req
            room = self.scheduler.rooms[decode_req.metadata_buffer_index, 0].item()
            if room != req.bootstrap_room:
                req.finished_reason = FINISH_ABORT("Metadata corruption detected")
                decode_req.kv_receiver = None
                return
            req.output_ids.append(99)

        def pop_transferred(self, rids_to_check: Any = None) -> list[Req]:
            polls = self._poll_with_metadata_gate()
            done, left = [], []
            for entry, poll in zip(self.queue, polls, strict=True):
                if poll == SUCCESS:
                    self._commit_transfer_to_req(entry)
                    self.req_to_metadata_buffer_idx_allocator.free(entry.metadata_buffer_index)
                    if not isinstance(entry.req.finished_reason, FINISH_ABORT):
                        done.append(entry.req)
                else:
                    left.append(entry)
            self.queue = left
            return done

    class PrefillAdder:
        def __init__(
            self,
            page_size: int,
            tree_cache: Any,
            token_to_kv_pool_allocator: Any,
            running_batch: Any,
            new_token_ratio: float,
            rem_input_tokens: int,
            rem_chunk_tokens: int | None,
            num_mixed_decode_tokens: int = 0,
        ) -> None:
            self.tree_cache = tree_cache
            self.rem_chunk_tokens = rem_chunk_tokens
            if rem_chunk_tokens is not None:
                self.rem_chunk_tokens = rem_chunk_tokens - num_mixed_decode_tokens
            self.memory_budget = SimpleNamespace(total_offset=0)
            self.free = token_to_kv_pool_allocator.free + tree_cache.evictable_size()
            self.page_size = page_size
            self.added: list[tuple[str, int]] = []

        def ceil_paged_tokens(self, tokens: int) -> int:
            return -(-tokens // self.page_size) * self.page_size

        def _add(self, req: Req, tokens: int) -> None:
            self.added.append((req.rid, tokens))
            req.extend_len = tokens
            if self.rem_chunk_tokens is not None:
                self.rem_chunk_tokens -= self.ceil_paged_tokens(tokens)

        def add_chunked_req(self, req: Req) -> Req | None:
            remaining = req.seqlen - req.prefix_len
            assert self.rem_chunk_tokens is not None
            self._add(req, min(remaining, self.rem_chunk_tokens))
            self.free -= req.extend_len
            return req if req.extend_len < remaining else None

        def add_one_req(
            self, req: Req, has_chunked_req: bool, truncation_align_size: int | None
        ) -> str:
            new = req.seqlen - req.prefix_len
            needed = new + req.sampling_params.max_new_tokens + self.page_size
            if needed >= self.free - self.memory_budget.total_offset:
                return NO_TOKEN
            if self.tree_cache.loads_back:
                req.prefix_len += req.host_hit_length
                new -= req.host_hit_length
            if self.rem_chunk_tokens is not None and new > self.rem_chunk_tokens:
                if self.rem_chunk_tokens < max(1, truncation_align_size or 0):
                    return OTHER
                assert not has_chunked_req, "SGLang's scheduler asserts it"
                new = self.rem_chunk_tokens
            self.free -= needed
            self._add(req, new)
            return CONTINUE

    class Scheduler:
        def __init__(self, tokens: int = 10_000, **fields: Any) -> None:
            self.runtime = Runtime()
            RUNTIME[:] = [self.runtime]
            self.disaggregation_mode = DECODE
            self.enable_decode_hicache = self.enable_hierarchical_cache = False
            self.enable_hicache_storage = self.enable_unified_memory = False
            self.prefill_decode_interval = 0
            self.processed_tokens_counter = 0
            self.dllm_config = None
            self.spec_algorithm = SimpleNamespace(is_none=lambda: True)
            self.is_hybrid_swa = self.is_hybrid_ssm = False
            self.chunked_prefill_size: int | None = 8192
            self.is_mixed_chunk = False
            self.max_prefill_tokens = 16_384
            self.truncation_align_size: int | None = None
            self.page_size = 1
            self.max_total_num_tokens = tokens
            self.enable_overlap = True
            self.enable_lora = False
            self.device = "cuda"
            self.enable_priority_scheduling = False
            self.schedule_low_priority_values_first = True
            self.max_running_requests = 64
            self.pool = self.token_to_kv_pool_allocator = Pool(tokens)
            self.tree_cache = Tree()
            self.rooms = Rooms()
            self.waiting_queue: list[Req] = []
            self.running_batch = Batch()
            self.last_batch: Batch | None = None
            self.chunked_req: Req | None = None
            self._engine_paused = False
            self.grammar_manager = GrammarManager()
            self.req_to_token_pool = SimpleNamespace(size=64, available_size=lambda: 64)
            self.forward_stream = SimpleNamespace(
                synchronize=lambda: self.pool.events.append("wait")
            )
            self.sent: list[Any] = []
            self.output_streamer = SimpleNamespace(
                stream_output=lambda reqs, _: self.sent.extend(req.rid for req in reqs)
            )
            self.metrics_reporter = SimpleNamespace(
                enable_metrics=False, current_scheduler_metrics_enabled=False
            )
            self.batch_result_processor = SimpleNamespace(
                process_batch_result_prebuilt=lambda batch: None
            )
            self.disagg_decode_prealloc_queue = DecodePreallocQueue(self)
            self.disagg_decode_transfer_queue = DecodeTransferQueue(self)
            self.formed: list[SimpleNamespace] = []
            vars(self.runtime).update(fields.pop("runtime", {}))
            vars(self).update(fields)
            self.init_output_streamer()

        def init_output_streamer(self) -> None: ...

        def handle_generate_request(self, recv_req: Any, *, mm_input_error: Any = None) -> None: ...

        def _release_aborted_request(self, req: Req) -> None: ...

        def send_abort_output(self, message: Any, req: Req) -> None:
            self.sent.append(req.rid)

        def _set_or_validate_priority(self, req: Req) -> bool:
            return True

        def _abort_on_queued_limit(self, req: Req) -> bool:
            return False

        def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
            if self.disaggregation_mode == PLAIN:
                self.waiting_queue.append(req)
            else:
                self.disagg_decode_prealloc_queue.add(req, is_retracted)

        def get_next_disagg_decode_batch_to_run(self, running_batch: Batch) -> Plan:
            raise AssertionError("an elastic worker schedules like a colocated one")

        def get_next_batch_to_run(self, running_batch: Batch, last_batch: Any) -> Plan:
            return self.get_new_batch_prefill(running_batch)

        def get_num_allocatable_reqs(self, running_bs: int) -> int:
            return self.max_running_requests - running_bs

        def get_new_batch_prefill(self, running_batch: Batch) -> Plan:
            """Notes what the adder would be given, and takes in every prompt in line that fits."""
            if self.grammar_manager.has_waiting_grammars():
                for req in self.grammar_manager.get_ready_grammar_requests():
                    self._add_request_to_queue(req)
            adder = PrefillAdder(
                self.page_size,
                self.tree_cache,
                self.pool,
                running_batch,
                0.0,
                self.max_prefill_tokens,
                self.chunked_prefill_size,
                running_batch.batch_size() if self.is_mixed_chunk else 0,
            )
            if self.enable_priority_scheduling:
                self.waiting_queue.sort(
                    key=lambda req: (req.priority, req.time_stats.wait_queue_entry_time)
                )
            chunk_limit = adder.rem_chunk_tokens
            if self.chunked_req is not None:
                self.chunked_req = adder.add_chunked_req(self.chunked_req)
            admitted = []
            for req in self.waiting_queue:
                req.init_next_round_input(self.tree_cache)
                added = adder.add_one_req(
                    req,
                    has_chunked_req=self.chunked_req is not None,
                    truncation_align_size=self.truncation_align_size,
                )
                if added != CONTINUE:
                    break
                admitted.append(req)
            self.formed.append(
                SimpleNamespace(
                    chunk_tokens=self.chunked_prefill_size,
                    prompt_tokens=chunk_limit,
                    added=adder.added,
                    mixed=self.is_mixed_chunk,
                    queue=[req.rid for req in self.waiting_queue],
                    admitted=[req.rid for req in admitted],
                )
            )
            self.waiting_queue = [req for req in self.waiting_queue if req not in admitted]
            return Plan(Batch(admitted) if admitted else None, running_batch)

        def get_new_prebuilt_batch(self, running_batch: Batch) -> Batch | None:
            free = self.max_running_requests - running_batch.batch_size()
            taken, self.waiting_queue = self.waiting_queue[:free], self.waiting_queue[free:]
            return Batch(taken) if taken else None

        def process_decode_queue(self) -> None:
            queue = self.disagg_decode_prealloc_queue
            self.waiting_queue.extend(queue.resume_retracted_reqs())
            if queue.retracted_queue:
                return
            self.disagg_decode_transfer_queue.queue.extend(queue.pop_preallocated())
            self.waiting_queue.extend(self.disagg_decode_transfer_queue.pop_transferred())

        def run_batch(self, batch: Any, pp_proxy_tensors: Any = None) -> Any: ...

        def on_idle(self) -> None: ...

        def process_batch_result(self, batch: Any, result: Any) -> None: ...

        def abort_request(self, recv_req: Any) -> None: ...

        def is_fully_idle(
            self, for_health_check: bool = False, ignore_waiting: bool = False
        ) -> bool:
            return (
                self.running_batch.is_empty()
                and self.chunked_req is None
                and not self.waiting_queue
                and not self.disagg_decode_prealloc_queue.queue
                and not self.disagg_decode_transfer_queue.queue
            )

        def flush_cache(self, empty_cache: bool = True) -> bool:
            return self.is_fully_idle()

        def get_internal_state(self, recv_req: Any) -> Any: ...

        def pause_generation(self, recv_req: Any) -> None:
            """Its mode "retract"."""
            self._engine_paused = True
            for req in self.running_batch.reqs:
                self.pool.free += req.kv.kv_allocated_len
                req.kv = KV()
                if req.output_ids:
                    req.pd_rebootstrap_forced_output_id = req.output_ids.pop()
                req.pd_rebootstrap_in_progress = True
                self.disagg_decode_prealloc_queue.hold_rebootstrap(req)
            self.running_batch.reqs = []

        def continue_generation(self) -> None:
            self._engine_paused = False

    class SchedulerLoadInquirer:
        def get_loads(self) -> Any: ...

    class CommonKVManager:
        def _on_heartbeat_success(self, bootstrap_addr: str) -> None: ...

    return SimpleNamespace(**{n: v for n, v in locals().items() if isinstance(v, type)})


CONTINUE, NO_TOKEN, OTHER = "continue", "no token", "other"
DECODE, PLAIN = "decode", "null"


def release_kv_cache(req: Req, tree_cache: Tree, checkpoint: bool = True) -> None:
    """Frees the request's pages and the lock on the node that it stands on."""
    assert req.kv.holds_kv
    assert not checkpoint, "nothing of a failed transfer goes into the cache"
    req.kv = KV()
    if req.lock is not None:
        tree_cache.dec_lock_ref(req.lock)


class Runtime:
    """The resolved configuration of a scheduler, whichever part of ``runtime_context`` has it."""

    def __init__(self) -> None:
        self.attn_tp_size = self.attn_cp_size = self.pp_size = 1
        self.attention_backend = "triton"
        self.prefill_graphs = SimpleNamespace(backend="disabled", bs=None)
        self.disaggregation_decode_enable_radix_cache = True
        self.disaggregation_decode_enable_offload_kvcache = False
        self.disaggregation_decode_retraction_backup = "cpu_tensor"
        # What turns it off.
        self.disaggregation_decode_host_receive_threshold = 1.0
        self.enable_pd_role_switch = self.enable_streaming_session = False
        self.enable_session_radix_cache = self.enable_lmcache = self.enable_flexkv = False
        self.enable_unified_cache_external_linker = False
        self.hicache_write_policy = "write_through"


RUNTIME: list[Runtime] = []
"""That of the scheduler that was made last: a process has one."""


def executor() -> Any:
    graphs = SimpleNamespace(prefill=RUNTIME[0].prefill_graphs)
    return SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=graphs))


def prepare_abort(req: Req, message: str, status_code: Any = None) -> None:
    req.finished_reason = FINISH_ABORT(message)


def _wrap(original: Callable[..., Any], hook: PlacedHook) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if hook.kind == "around":
            return hook.function(original, *args, **kwargs)
        if hook.kind == "before":
            changed = hook.function(*args, **kwargs)
            if changed is not None:
                args, kwargs = changed
            return original(*args, **kwargs)
        result = original(*args, **kwargs)
        changed = hook.function(result, *args, **kwargs)
        return result if changed is None else changed

    return wrapped


@contextmanager
def installed(monkeypatch: pytest.MonkeyPatch, hooks: Iterable[Hook]) -> Iterator[SimpleNamespace]:
    """The fake SGLang where the plugin imports the real one from, with `hooks` applied."""
    (release,) = releases.RELEASES
    monkeypatch.setattr(releases, "_current", [release])
    made = classes()
    contents: dict[str, dict[str, Any]] = {
        "managers.scheduler": {
            "Scheduler": made.Scheduler,
            "_make_abort_req": lambda req, finished_reason: req.rid,
        },
        "managers.schedule_policy": {
            "PrefillAdder": made.PrefillAdder,
            "CLIP_MAX_NEW_TOKENS": 4096,
            "AddReqResult": SimpleNamespace(OTHER=OTHER),
        },
        "managers.schedule_batch": {
            "FINISH_ABORT": FINISH_ABORT,
            "NextBatchPlan": Plan,
        },
        "managers.scheduler_components.load_inquirer": {
            "SchedulerLoadInquirer": made.SchedulerLoadInquirer
        },
        "disaggregation.decode": {
            "DecodePreallocQueue": made.DecodePreallocQueue,
            "DecodeTransferQueue": made.DecodeTransferQueue,
        },
        "disaggregation.base": {"KVPoll": SimpleNamespace(Failed=FAILED, Success=SUCCESS)},
        "disaggregation.utils": {
            "DisaggregationMode": SimpleNamespace(DECODE=DECODE, NULL=PLAIN),
            "FAKE_BOOTSTRAP_HOST": FAKE_HOST,
            "prepare_abort": prepare_abort,
        },
        "disaggregation.common.conn": {"CommonKVManager": made.CommonKVManager},
        "mem_cache.base_prefix_cache": {"MatchPrefixParams": MatchPrefixParams},
        "mem_cache.common": {
            "release_kv_cache": release_kv_cache,
            "_req_radix_key": lambda _tree, _req, ids: tuple(ids),
        },
        "runtime_context": {
            **dict.fromkeys(
                ("get_disagg", "get_memory", "get_serving", "get_parallel"), lambda: RUNTIME[0]
            ),
            "get_exec": executor,
            "attention_backends": lambda: (RUNTIME[0].attention_backend,) * 2,
        },
        "environ": {
            "envs": SimpleNamespace(SGLANG_DISAGG_STAGING_BUFFER=SimpleNamespace(get=lambda: False))
        },
    }
    for name, attributes in contents.items():
        parts = ["sglang", "srt", *name.split(".")]
        for depth in range(1, len(parts) + 1):
            full = ".".join(parts[:depth])
            if getattr(sys.modules.get(full), "is_fake", False):
                continue
            module = ModuleType(full)
            vars(module).update(is_fake=True, __path__=[])
            monkeypatch.setitem(sys.modules, full, module)
            if depth > 1:
                setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], module)
        vars(sys.modules["sglang.srt." + name]).update(attributes)
    for hook in releases.place(hooks, release):
        path, name = hook.target.rsplit(".", 1)
        owner = pkgutil.resolve_name(path)
        setattr(owner, name, _wrap(getattr(owner, name), hook))
    yield made
