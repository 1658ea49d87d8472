"""SGLang 0.5.23: what differs from 0.5.17."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_ext.sglang import v0_5_17
from sglang_ext.sglang.base import ElasticVerbs, NotNeeded, Parallel, Target
from sglang_ext.sglang.v0_5_23_elastic import Elastic0523

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_NIXL = "sglang.srt.disaggregation.nixl.conn.NixlKVManager"
_MOONCAKE = "sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager"

_SEND_PARAMETERS = (
    "(self, bootstrap_room, kv_indices, index_slice, is_last_chunk, aux_index=None, "
    "state_indices=None, num_kv_tokens=None, *, wait_event=None, indices_event=None, "
    "trace_ctx=None)"
)

TARGETS: Mapping[str, Target | NotNeeded] = {
    **v0_5_17.TARGETS,
    "scheduler.is_idle": Target(
        f"{_SCHEDULER}.is_fully_idle", "(self, for_health_check=False, ignore_waiting=False)"
    ),
    "scheduler.generate": Target(
        f"{_SCHEDULER}.handle_generate_request", "(self, recv_req, *, mm_input_error=None)"
    ),
    "batch.mixed": NotNeeded("lengths of mixed decodes come from the batch since 0.5.19"),
    "nixl.receiving": v0_5_17.TARGETS["decode.transferred"],
    "nixl.draining": Target(
        "sglang.srt.disaggregation.decode.DecodeTransferQueue.resolve_deferred_releases", "(self)"
    ),
    "nixl.send_request": Target(f"{_NIXL}.add_transfer_request", _SEND_PARAMETERS),
    "mooncake.send_request": Target(f"{_MOONCAKE}.add_transfer_request", _SEND_PARAMETERS),
    "mooncake.heartbeat": NotNeeded("Mooncake's backend uses the common one since 0.5.20"),
    "host_tier.pin": Target(
        "sglang.srt.mem_cache.pool_host.common._cuda_host_register",
        "(buffer, registration_granularity_bytes=None)",
    ),
}


class Sglang0523:
    """The adapter for 0.5.23.

    The resolved configuration is in ``runtime_context`` there; ``server_args`` holds what the
    command line said.
    """

    versions: tuple[str, ...] = ("0.5.23",)
    targets = TARGETS
    lacking: Mapping[str, str] = {}
    elastic: ElasticVerbs | None = Elastic0523()

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
        # Nothing is sent by NIXL's notifications since 0.5.23: there are none to lose.
        manager.agent.get_new_notifs()

    def keep_from_adder(self, adder: Any, tokens: int) -> None:
        adder.memory_budget.total_offset += tokens
