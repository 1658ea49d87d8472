"""SGLang 0.5.23."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_ext.sglang.base import ElasticVerbs, Parallel, Target
from sglang_ext.sglang.v0_5_23_elastic import Elastic0523

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_COMPONENTS = "sglang.srt.managers.scheduler_components"
_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"
_PREALLOCATION = "sglang.srt.disaggregation.decode.DecodePreallocQueue"
_TRANSFER = "sglang.srt.disaggregation.decode.DecodeTransferQueue"
_KV_COMMON = "sglang.srt.disaggregation.common.conn"
_NIXL = "sglang.srt.disaggregation.nixl.conn.NixlKVManager"
_MOONCAKE = "sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager"
_PAGES = "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator"
_HOST_POOL = "sglang.srt.mem_cache.pool_host"

_ADDER_PARAMETERS = (
    "(self, page_size, tree_cache, token_to_kv_pool_allocator, running_batch, "
    "new_token_ratio, rem_input_tokens, rem_chunk_tokens, num_mixed_decode_tokens=0, "
    "priority_scheduling_preemption_threshold=0, max_prefill_bs=0, max_running_requests=None, "
    "prefill_max_requests=None, prefill_delayer_single_pass=None, dllm_config=None, "
    "waiting_queue_len=0, prefill_tile_block_m=64)"
)
_SEND_PARAMETERS = (
    "(self, bootstrap_room, kv_indices, index_slice, is_last_chunk, aux_index=None, "
    "state_indices=None, num_kv_tokens=None, *, wait_event=None, indices_event=None, "
    "trace_ctx=None)"
)

TARGETS: Mapping[str, Target] = {
    # Before a worker's processes are started, in the one that starts them.
    "engine.set_up": Target("sglang.srt.entrypoints.engine._set_envs_and_config", "(server_args)"),
    # The scheduler's life and its steps.
    "scheduler.ready": Target(f"{_SCHEDULER}.init_output_streamer", "(self)"),
    "scheduler.idle": Target(f"{_SCHEDULER}.on_idle", "(self)"),
    "scheduler.is_idle": Target(
        f"{_SCHEDULER}.is_fully_idle", "(self, for_health_check=False, ignore_waiting=False)"
    ),
    "scheduler.run_batch": Target(
        f"{_SCHEDULER}.run_batch", "(self, batch, pp_proxy_tensors=None)"
    ),
    "scheduler.process_result": Target(
        f"{_SCHEDULER}.process_batch_result", "(self, batch, result)"
    ),
    "scheduler.form_prefill": Target(
        f"{_SCHEDULER}.get_new_batch_prefill", "(self, running_batch)"
    ),
    "scheduler.internal_state": Target(f"{_SCHEDULER}.get_internal_state", "(self, recv_req)"),
    "scheduler.generate": Target(
        f"{_SCHEDULER}.handle_generate_request", "(self, recv_req, *, mm_input_error=None)"
    ),
    "scheduler.queue": Target(
        f"{_SCHEDULER}._add_request_to_queue", "(self, req, is_retracted=False)"
    ),
    "scheduler.abort": Target(f"{_SCHEDULER}.abort_request", "(self, recv_req)"),
    "scheduler.pause": Target(f"{_SCHEDULER}.pause_generation", "(self, recv_req)"),
    "scheduler.loads": Target(
        f"{_COMPONENTS}.load_inquirer.SchedulerLoadInquirer.get_loads", "(self)"
    ),
    "scheduler.stream_output": Target(
        f"{_COMPONENTS}.output_streamer.SchedulerOutputStreamer.stream_output",
        "(self, reqs, return_logprob, skip_req=None)",
    ),
    # Forming a batch.
    "adder.made": Target(f"{_ADDER}.__init__", _ADDER_PARAMETERS),
    "adder.add_chunked": Target(f"{_ADDER}.add_chunked_req", "(self, req)"),
    "adder.add_one": Target(
        f"{_ADDER}.add_one_req", "(self, req, has_chunked_req, truncation_align_size)"
    ),
    # Workers that prefill for others.
    "prefill.sent": Target(
        f"{_SCHEDULER}.process_disagg_prefill_inflight_queue", "(self, rids_to_check=None)"
    ),
    # Workers that decode what others prefilled.
    "decode.next_batch": Target(
        f"{_SCHEDULER}.get_next_disagg_decode_batch_to_run", "(self, running_batch)"
    ),
    "decode.take_in": Target(f"{_SCHEDULER}.process_decode_queue", "(self)"),
    "decode.budget": Target(
        f"{_PREALLOCATION}._allocatable_token_budgets",
        "(self, retractable_tokens=None, count_retracted=True, extra_reserved_reqs=0, "
        "reserved_tokens=None, hicache_reserved_tokens=0)",
    ),
    "decode.allocate": Target(
        f"{_PREALLOCATION}._pre_alloc",
        "(self, req, prefix_indices=None, prefix_len=None, total_prefix_len=None)",
    ),
    "decode.handshakes": Target(
        f"{_PREALLOCATION}._update_handshake_waiters",
        "(self, rids_to_check=None, pp_good_rids=None, pp_bad_rids=None)",
    ),
    "decode.hold": Target(f"{_PREALLOCATION}.hold_rebootstrap", "(self, req)"),
    "decode.poll": Target(f"{_TRANSFER}._poll_with_metadata_gate", "(self)"),
    "decode.commit": Target(f"{_TRANSFER}._commit_transfer_to_req", "(self, decode_req)"),
    "decode.transferred": Target(f"{_TRANSFER}.pop_transferred", "(self, rids_to_check=None)"),
    # Moving KV between workers.
    "kv.heartbeat": Target(
        f"{_KV_COMMON}.CommonKVManager._on_heartbeat_success", "(self, bootstrap_addr)"
    ),
    "kv.sender": Target(
        f"{_KV_COMMON}.CommonKVSender.__init__",
        "(self, mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank=False)",
    ),
    "nixl.manager": Target(
        f"{_NIXL}.__init__",
        "(self, args, disaggregation_mode, server_args, is_mla_backend=False)",
    ),
    "nixl.receiving": Target(f"{_TRANSFER}.pop_transferred", "(self, rids_to_check=None)"),
    "nixl.draining": Target(f"{_TRANSFER}.resolve_deferred_releases", "(self)"),
    "nixl.send_request": Target(f"{_NIXL}.add_transfer_request", _SEND_PARAMETERS),
    "nixl.status": Target(f"{_NIXL}.update_status", "(self, bootstrap_room, status)"),
    "mooncake.send_request": Target(f"{_MOONCAKE}.add_transfer_request", _SEND_PARAMETERS),
    "mooncake.status": Target(f"{_MOONCAKE}.update_status", "(self, bootstrap_room, status)"),
    # The host tier.
    "host_tier.pin": Target(
        f"{_HOST_POOL}.common._cuda_host_register",
        "(buffer, registration_granularity_bytes=None)",
    ),
    "host_tier.unpin": Target(f"{_HOST_POOL}.common._cuda_host_unregister", "(buffer)"),
    "host_tier.load": Target(
        f"{_HOST_POOL}.mha.MHATokenToKVPoolHost.load_to_device_per_layer",
        "(self, device_pool, host_indices, device_indices, layer_id, io_backend, *, "
        "is_draft=False)",
    ),
    "host_tier.back_up": Target(
        f"{_HOST_POOL}.mha.MHATokenToKVPoolHost.backup_from_device_all_layer",
        "(self, device_pool, host_indices, device_indices, io_backend)",
    ),
    # Slots in pages of several tokens.
    "pages.extend": Target(
        f"{_PAGES}.alloc_extend",
        "(self, prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, "
        "extend_num_tokens, num_new_pages=None)",
    ),
    "pages.decode": Target(f"{_PAGES}.alloc_decode", "(self, seq_lens, seq_lens_cpu, last_loc)"),
}


class Sglang0523:
    """The adapter for 0.5.23.

    The resolved configuration is in ``runtime_context``; ``server_args`` holds what the command
    line said.
    """

    versions: tuple[str, ...] = ("0.5.23",)
    targets = TARGETS
    elastic: ElasticVerbs = Elastic0523()

    def parallel(self, scheduler: Any) -> Parallel:
        from sglang.srt.runtime_context import get_parallel

        sizes = get_parallel()
        return Parallel(sizes.attn_tp_size, sizes.attn_cp_size, sizes.pp_size)

    def device(self, scheduler: Any) -> str:
        return str(scheduler.device)

    def attention_backends(self, scheduler: Any) -> tuple[str, ...]:
        from sglang.srt.runtime_context import attention_backends

        return tuple(str(backend) for backend in attention_backends())

    def prefill_graph_tokens(self, scheduler: Any) -> int | None:
        from sglang.srt.runtime_context import get_exec

        prefill = get_exec().graph.cuda_graph_config.prefill
        return None if prefill.backend == "disabled" or not prefill.bs else int(max(prefill.bs))

    def can_ride(self, running_batch: Any) -> bool:
        return all(req.beam_group is None for req in running_batch.reqs)

    def prefix_tokens(self, req: Any) -> int:
        return int(req.prefix_len)

    def extend_tokens(self, req: Any) -> int:
        return int(req.extend_len)

    def look_up_cached_tokens(self, tree_cache: Any, req: Any) -> int:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.common import _req_radix_key

        # `match_kv_cache` writes into the request and into its KV record, which a copy would share.
        key = _req_radix_key(tree_cache, req, req.origin_input_ids + req.output_ids)
        match = tree_cache.match_prefix(MatchPrefixParams(key=key))
        return int(match.device_prefix_len + match.host_hit_length)

    def let_nixl_progress(self, manager: Any) -> None:
        # Nothing is sent by NIXL's notifications: there are none to lose.
        manager.agent.get_new_notifs()

    def keep_from_adder(self, adder: Any, tokens: int) -> None:
        adder.memory_budget.total_offset += tokens
