"""SGLang's host tier (HiCache) on a machine without a GPU, where both tiers are host memory.

HiCache pins its host memory by the CUDA runtime and copies pages by CUDA kernels; here nothing is
pinned and pages are copied by torch. Which pages are written, loaded and evicted, and when, stays
SGLang's own doing: only the copies and their speed differ from a GPU's.
"""

from __future__ import annotations

from typing import Any

from sglang_ext.guards import Hook, PluginMismatch


def _leave_unpinned(_buffer: Any, *_: Any, **__: Any) -> None:
    """Pinning makes a GPU's copies fast; the CUDA runtime that does it needs a driver."""


def _load_layer(
    host_pool: Any,
    device_pool: Any,
    host_indices: Any,
    device_indices: Any,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    """Copies one layer's K and V of the tokens at `host_indices` to `device_indices`."""
    _check_layout(host_pool)
    for device, host in (
        (device_pool.k_buffer, host_pool.k_buffer),
        (device_pool.v_buffer, host_pool.v_buffer),
    ):
        device[layer_id][device_indices] = host[layer_id][host_indices]


def _back_up_all_layers(
    host_pool: Any, device_pool: Any, host_indices: Any, device_indices: Any, io_backend: str
) -> None:
    """Copies every layer's K and V of the tokens at `device_indices` to `host_indices`."""
    _check_layout(host_pool)
    for layer_id in range(host_pool.layer_num):
        for device, host in (
            (device_pool.k_buffer, host_pool.k_buffer),
            (device_pool.v_buffer, host_pool.v_buffer),
        ):
            host[layer_id][host_indices] = device[layer_id][device_indices]


def _check_layout(host_pool: Any) -> None:
    if host_pool.layout != "layer_first":
        raise PluginMismatch(
            "on a CPU the host tier is copied layer by layer: start the worker with "
            f"--hicache-mem-layout layer_first, not {host_pool.layout}"
        )


HOOKS = (
    Hook("host_tier.pin", "replace", _leave_unpinned),
    Hook("host_tier.unpin", "replace", _leave_unpinned),
    Hook("host_tier.load", "replace", _load_layer),
    Hook("host_tier.back_up", "replace", _back_up_all_layers),
)
