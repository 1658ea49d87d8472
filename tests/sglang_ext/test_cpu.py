"""Support for workers without a GPU is refused to those that have one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext import cpu
from sglang_ext import sglang as releases
from sglang_ext.guards import PluginMismatch

Started = Callable[[str], None]


@pytest.fixture(autouse=True)
def release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "_current", list(releases.RELEASES))


@pytest.fixture
def started() -> Started:
    """What the hooks do when a worker's scheduler is made."""

    def start(device: str) -> None:
        scheduler = SimpleNamespace(device=device)
        for hook in cpu.HOOKS:
            if hook.point == "scheduler.ready":
                hook.function(None, scheduler)

    return start


def test_a_gpu_worker_is_refused_as_its_kv_is_not_in_host_memory(started: Started) -> None:
    with pytest.raises(PluginMismatch, match="this worker runs on cuda"):
        started("cuda")


def test_a_cpu_worker_is_not(started: Started) -> None:
    started("cpu")


def test_nixl_is_polled_while_a_transfer_comes_in_or_is_given_up_and_not_otherwise() -> None:
    polled: list[str] = []
    nixl = SimpleNamespace(agent=SimpleNamespace(get_new_notifs=lambda: polled.append("agent")))

    def queue(coming: int, given_up: bool, manager: Any) -> Any:
        return SimpleNamespace(
            queue=[SimpleNamespace()] * coming,
            has_pending_deferred_releases=lambda: given_up,
            scheduler=SimpleNamespace(
                disagg_decode_prealloc_queue=SimpleNamespace(kv_manager=manager)
            ),
        )

    of_another_backend = SimpleNamespace()
    cpu._poll_nixl(queue(0, False, nixl))
    cpu._poll_nixl(queue(1, True, of_another_backend))
    assert not polled
    cpu._poll_nixl(queue(2, False, nixl))
    assert polled == ["agent"], "there is one agent a worker"
    cpu._poll_nixl(queue(0, True, nixl))
    assert polled == ["agent"] * 2, "the prefill worker's last write would not end"
