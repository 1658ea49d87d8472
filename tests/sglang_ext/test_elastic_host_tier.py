"""What an elastic worker does about KV that comes back from host memory.

That SGLang's HiCache really works so is what the live tests show. On a CPU copies end at once: that
a step waits for one is shown here alone.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.settings import ElasticSettings
from tests.sglang_ext.fake_sglang import FAILED, Batch, Req
from tests.sglang_ext.test_elastic_worker import prompt, step, transferring

MakeScheduler = Callable[..., Any]


@pytest.fixture
def make_tiered(make_scheduler: MakeScheduler) -> MakeScheduler:
    """Makes a scheduler with a host tier: three places for copies, none under way."""

    def make(settings: ElasticSettings | None = None, **fields: Any) -> Any:
        scheduler = make_scheduler(settings, **fields)
        scheduler.enable_decode_hicache = True
        controller = SimpleNamespace(
            ack_load_queue=[], layer_done_counter=SimpleNamespace(producer_index=-1)
        )
        tree = scheduler.tree_cache
        tree.cache_controller = controller
        tree.has_free_load_back_slot = lambda: len(controller.ack_load_queue) < 3
        queue = scheduler.disagg_decode_prealloc_queue
        queue._hicache_pending_restore_tokens = lambda: 0
        return scheduler

    return make


def test_no_step_that_may_load_is_formed_while_all_places_for_copies_are_taken(
    make_tiered: MakeScheduler,
) -> None:
    """SGLang would end the worker: its prefill scheduling does not look for a place."""
    scheduler = make_tiered()
    copies = scheduler.tree_cache.cache_controller.ack_load_queue
    copies += ["A", "B", "C"]
    scheduler._add_request_to_queue(Req("local", prompt(100)))
    assert step(scheduler) is None
    assert not scheduler.formed

    copies.pop(0)
    assert [req.rid for req in step(scheduler).reqs] == ["local"]


@pytest.mark.parametrize(
    ("under_way", "own", "waits_for"),
    [(["A's"], -1, 2), ([], -1, -1), (["A's", "its own"], 0, 0)],
    ids=["another's copy", "no copy", "its own copy, which comes after A's"],
)
def test_a_step_waits_for_copies_that_others_began(
    make_tiered: MakeScheduler,
    monkeypatch: pytest.MonkeyPatch,
    under_way: list[str],
    own: int,
    waits_for: int,
) -> None:
    """The tree shows A's pages from the moment on that their copy is under way."""
    scheduler = make_tiered()
    controller = scheduler.tree_cache.cache_controller
    controller.ack_load_queue += under_way
    controller.layer_done_counter.producer_index = 2
    monkeypatch.setattr(Batch, "hicache_consumer_index", own, raising=False)
    scheduler._add_request_to_queue(Req("local", prompt(100)))
    assert step(scheduler).hicache_consumer_index == waits_for


def test_a_local_prompt_leaves_room_for_what_transfers_bring_back(
    make_tiered: MakeScheduler,
) -> None:
    """They have been promised to the prefill worker, which does not send them."""
    scheduler = make_tiered(tokens=1000)
    promised = [600]
    queue = scheduler.disagg_decode_prealloc_queue
    queue._hicache_pending_restore_tokens = lambda: sum(promised)
    scheduler._add_request_to_queue(Req("local", prompt(500)))
    assert step(scheduler) is None

    promised.clear()
    assert [req.rid for req in step(scheduler).reqs] == ["local"]


def test_a_request_whose_prefix_did_not_come_back_is_prefilled_here(
    make_tiered: MakeScheduler,
) -> None:
    scheduler = make_tiered(ElasticSettings(quarantine_s=0.0))
    let_go: list[Any] = []
    queue = scheduler.disagg_decode_transfer_queue
    queue._clean_hicache_prefetch_resources = let_go.append
    entry = transferring(scheduler, Req("A", prompt(600), room=7))
    entry.hicache_restore_status = SimpleNamespace(value="failed")
    entry.kv_receiver.status = FAILED
    assert [req.rid for req in step(scheduler).reqs] == ["A"]
    assert let_go == [entry], "the tree keeps a lock that nobody gives back"
    assert scheduler.deltaserve_elastic.counts["fallback_host_tier"] == 1
