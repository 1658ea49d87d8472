"""SGLang 0.5.22 to 0.5.19, backwards: what differs from the release that came after each."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from sglang_ext.sglang import v0_5_17, v0_5_23
from sglang_ext.sglang.base import ElasticVerbs, NotNeeded, Target
from sglang_ext.sglang.elastic_common import ElasticCommon
from sglang_ext.sglang.v0_5_17 import ByPrefixIndices
from sglang_ext.sglang.v0_5_23 import Sglang0523
from sglang_ext.sglang.v0_5_23_elastic import Elastic0523

_MOONCAKE_SEND = "sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager.add_transfer_request"

TARGETS_0522: Mapping[str, Target | NotNeeded] = {
    **v0_5_23.TARGETS,
    # Receivers still ask NIXL for notifications, which lets it progress.
    "nixl.receiving": v0_5_17.TARGETS["nixl.receiving"],
    "nixl.send_request": v0_5_17.TARGETS["nixl.send_request"],
    "mooncake.send_request": Target(
        _MOONCAKE_SEND,
        "(self, bootstrap_room, kv_indices, index_slice, is_last_chunk, aux_index=None, "
        "state_indices=None, num_kv_tokens=None, trace_ctx=None, wait_event=None)",
    ),
}
TARGETS_0521: Mapping[str, Target | NotNeeded] = {
    **TARGETS_0522,
    "mooncake.send_request": v0_5_17.TARGETS["mooncake.send_request"],
}
TARGETS_0520: Mapping[str, Target | NotNeeded] = {
    **TARGETS_0521,
    "scheduler.is_idle": v0_5_17.TARGETS["scheduler.is_idle"],
}


class Elastic0522(Elastic0523):
    """Who ends in line is answered past the scheduler's own sender of aborts."""

    def unsupported(self, scheduler: Any) -> Mapping[str, bool]:
        return {
            **super().unsupported(scheduler),
            # A transferred request may decode there while another's copy of its prefix is under
            # way. Before 0.5.22 SGLang cannot tell either how many copies are.
            "a host tier before SGLang 0.5.23": scheduler.enable_hierarchical_cache,
        }

    def end_in_line(self, scheduler: Any, req: Any, abort: Any) -> None:
        from sglang.srt.managers.scheduler import _make_abort_req

        self.turn_away(scheduler, req)
        message = _make_abort_req(req, finished_reason=abort.finished_reason)
        scheduler.ipc_channels.send_to_tokenizer.send_output(message, req)


class Elastic0521(Elastic0522):
    """A request's lock is on ``req.last_node``, and its KV is released as in 0.5.17."""

    release_kv = ElasticCommon.release_kv

    def take_kv(self, req: Any) -> Any:
        stand_in = copy.copy(req)
        stand_in.kv = req.detach_kv()
        return stand_in

    def awaiting_acknowledgement(self, queue: Any) -> int:
        return len(queue._deferred_releases)


class Elastic0520(Elastic0521):
    """SGLang waits for the prefill worker's word only where it aborted the transfer itself.

    On each rank for itself: here nobody's word is waited for, and the quarantine keeps what failed.
    """

    start_over = ElasticCommon.start_over
    kept_from_adder = ElasticCommon.kept_from_adder

    def _since_0521(self, disagg: Any) -> Mapping[str, bool]:
        return {}

    def keep_until_acknowledged(
        self, queue: Any, entry: Any, stand_in: Any, *, longest_s: float | None
    ) -> bool:
        if entry.kv_receiver is not None:
            entry.kv_receiver.kv_mgr.clear_deferred_abort_state(entry.req.bootstrap_room)
        return False

    def came_back(self, tree_cache: Any, req: Any) -> None:
        if req.last_node is None:
            # As in 0.5.17: matched against the tree it would stand where it holds no lock.
            req.last_node = tree_cache.root_node_handle(req.extra_key)


class Elastic0519(Elastic0520):
    """The scheduler keeps nothing of requests that wait, and has no external linkers of caches."""

    def _caches_of_others(self, memory: Any) -> bool:
        return bool(memory.enable_lmcache or memory.enable_flexkv)

    def enter_line(self, scheduler: Any, req: Any) -> None:
        """Nothing is noted there."""

    def turn_away(self, scheduler: Any, req: Any) -> None:
        """Nothing is held there."""


class Sglang0522(Sglang0523):
    """The adapter for 0.5.22."""

    versions: tuple[str, ...] = ("0.5.22",)
    targets = TARGETS_0522
    elastic: ElasticVerbs | None = Elastic0522()

    def let_nixl_progress(self, manager: Any) -> None:
        # Notifications say that KV has arrived: SGLang has to see each.
        manager.update_transfer_status()


class Sglang0521(ByPrefixIndices, Sglang0522):
    """The adapter for 0.5.21."""

    versions: tuple[str, ...] = ("0.5.21",)
    targets = TARGETS_0521
    elastic: ElasticVerbs | None = Elastic0521()


class Sglang0520(Sglang0521):
    """The adapter for 0.5.20: its adder has no budget of its own."""

    versions: tuple[str, ...] = ("0.5.20",)
    targets = TARGETS_0520
    elastic: ElasticVerbs | None = Elastic0520()

    def keep_from_adder(self, adder: Any, tokens: int) -> None:
        adder.rem_total_token_offset += tokens


class Sglang0519(Sglang0520):
    """The adapter for 0.5.19."""

    versions: tuple[str, ...] = ("0.5.19",)
    elastic: ElasticVerbs | None = Elastic0519()
