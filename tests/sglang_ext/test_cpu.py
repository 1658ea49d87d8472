"""Support for workers without a GPU is refused to those that have one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_ext import cpu
from sglang_ext.guards import PluginMismatch


def started(device: str) -> None:
    """What the hooks do when a worker's scheduler is made."""
    scheduler = SimpleNamespace(server_args=SimpleNamespace(device=device))
    for hook in cpu.HOOKS:
        if hook.target.endswith("Scheduler.init_output_streamer"):
            hook.function(None, scheduler)


def test_a_gpu_worker_is_refused_as_its_kv_is_not_in_host_memory() -> None:
    with pytest.raises(PluginMismatch, match="this worker runs on cuda"):
        started("cuda")


def test_a_cpu_worker_is_not() -> None:
    started("cpu")
