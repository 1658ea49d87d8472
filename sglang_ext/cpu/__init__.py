"""SGLang on a machine without a GPU: for development, continuous integration and the demo.

Seven things differ there. Kernels: `stubs/` holds an importable ``sgl_kernel`` whose kernels refuse
to run (the launcher puts that folder on ``PYTHONPATH``). KV transfer: SGLang's NIXL manager takes
every KV pool for GPU memory ("VRAM"); on a CPU the pools are host memory and must be registered,
described and transferred as "DRAM". SGLang tells Mooncake which pages to send in pinned memory,
with a CUDA event, and others at once. Waiting: NIXL's progress thread spins as long as a worker
lives (half of a core for each of two idle workers on two cores), so it is left out and NIXL is
polled where SGLang looks at its transfers; and a scheduler that waits for a transfer polls without
pause, on cores that the other worker needs to make progress. The host tier (`host_tier`) is pinned
and copied by CUDA. Pages of several tokens (`pages`) are given out by Triton. And starting
(`starting`), which takes longer there than what is asked afterwards.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from sglang_ext.cpu import host_tier, pages, starting
from sglang_ext.guards import Hook, PluginMismatch
from sglang_ext.sglang import current

_PAUSE_S = 0.0005


def _refuse_other_devices(_result: None, scheduler: Any) -> None:
    """Ends a worker that computes on another device: its KV is not in host memory."""
    device = current().device(scheduler)
    if device != "cpu":
        raise PluginMismatch(
            f"DELTASERVE_SGLANG asks for cpu, and this worker runs on {device}: its KV would be "
            "registered as host memory. Take cpu out, or start the worker with --device cpu"
        )


def _use_host_memory(
    original: Callable[..., None], manager: Any, args: Any, *rest: Any, **options: Any
) -> None:
    """Says of each KV buffer that it is host memory, and leaves NIXL without a progress thread.

    `args` is SGLang's ``KVArgs``; without ``kv_data_mem_kinds`` the manager assumes "VRAM" for
    each of ``kv_data_ptrs`` and tells its peer so. Progress is made where SGLang polls a transfer:
    the sender's threads and the receiver's scheduler do so as long as one is under way.
    """
    import nixl._api

    args.kv_data_mem_kinds = ["DRAM"] * len(args.kv_data_ptrs)
    agent_config = nixl._api.nixl_agent_config
    nixl._api.nixl_agent_config = functools.partial(agent_config, enable_prog_thread=False)
    try:
        original(manager, args, *rest, **options)
    finally:
        nixl._api.nixl_agent_config = agent_config


def _take_no_tensors(_result: None, sender: Any, *_: Any, **__: Any) -> None:
    """Has SGLang tell a sender its pages at once, and not by a copy that a CUDA event ends."""
    sender.supports_host_tensor_indices = False


def _poll_nixl(queue: Any, *_: Any, **__: Any) -> None:
    """Lets the receiving side's NIXL make progress while transfers come in, or are given up.

    The sender's writes wait for it on a CPU, and without a progress thread it works only when
    called.
    """
    if not queue.queue and not queue.has_pending_deferred_releases():
        return
    manager = getattr(queue.scheduler.disagg_decode_prealloc_queue, "kv_manager", None)
    if getattr(manager, "agent", None) is not None:
        current().let_nixl_progress(manager)


def _give_up_the_core(_result: None, scheduler: Any) -> None:
    """Pauses a scheduler that has no batch to run while something is still on its way to it."""
    if not scheduler.is_fully_idle():
        time.sleep(_PAUSE_S)


HOOKS = (
    Hook("scheduler.ready", "after", _refuse_other_devices),
    Hook("nixl.manager", "around", _use_host_memory),
    Hook("kv.sender", "after", _take_no_tensors),
    Hook("nixl.receiving", "before", _poll_nixl),
    Hook("nixl.draining", "before", _poll_nixl),
    Hook("scheduler.idle", "after", _give_up_the_core),
    *host_tier.HOOKS,
    *pages.HOOKS,
    *starting.HOOKS,
)
