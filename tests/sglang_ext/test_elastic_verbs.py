"""The elastic worker's verbs, and failed transfers that SGLang keeps itself.

That SGLang really looks like this is what the live tests show.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext import sglang as releases
from sglang_ext.guards import PluginMismatch
from sglang_ext.settings import ElasticSettings
from tests.sglang_ext.fake_sglang import FAILED, FINISH_ABORT, KV, Node, Req
from tests.sglang_ext.test_elastic_worker import prompt, step, transferring

VERBS: Any = releases.RELEASES[-1].elastic
MakeScheduler = Callable[..., Any]


def holding(tokens: int) -> Req:
    """A request with its KV on pages of its own, behind a lock on the tree."""
    req = Req("A", prompt(tokens))
    req.kv, req.lock = KV(tokens, holds_kv=True), Node((), None)
    return req


def test_what_a_stand_in_took_is_its_own_alone() -> None:
    req = holding(30)
    record, lock = req.kv, req.lock
    stand_in = VERBS.take_kv(req)
    assert (stand_in.kv, stand_in.lock) == (record, lock)
    assert VERBS.allocated_tokens(stand_in) == 30
    assert (VERBS.allocated_tokens(req), req.lock) == (None, None)


def test_a_request_that_starts_over_counts_no_retraction_and_expects_no_checksum() -> None:
    req = Req("A", prompt(10))
    req.retraction_count, req.expected_kv_checksum = 2, 77
    VERBS.start_over(req)
    assert (req.retraction_count, req.retracted_stain) == (2, False)
    assert req.expected_kv_checksum == 0, "KV computed here was compared with what never came"
    assert len(req.full_untruncated_fill_ids) == 0


def test_a_backup_from_a_retraction_is_kv_in_host_memory() -> None:
    req = Req("A", prompt(10))
    assert not VERBS.is_in_host_memory(req)
    req.kv.retraction_backup = "tensors"
    assert VERBS.is_in_host_memory(req)
    VERBS.forget_host_copy(req)
    assert not VERBS.is_in_host_memory(req)


def test_what_an_adder_leaves_alone_adds_up() -> None:
    adder = SimpleNamespace(memory_budget=SimpleNamespace(total_offset=100))
    for tokens in (50, -20):
        releases.RELEASES[-1].keep_from_adder(adder, tokens)
    assert VERBS.kept_from_adder(adder) == 130


def test_who_ends_in_line_is_told_the_reason(
    make_scheduler: MakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's own timeouts come as aborts with one; without it they would read like a client's."""
    scheduler = make_scheduler()
    told: list[Any] = []
    monkeypatch.setattr(
        "sglang.srt.managers.scheduler._make_abort_req",
        lambda req, finished_reason: (req.rid, finished_reason),
    )
    scheduler._release_aborted_request = lambda req: told.append("released")
    scheduler.send_abort_output = lambda message, _req: told.append(message)
    VERBS.end_in_line(scheduler, Req("A", prompt(5)), SimpleNamespace(finished_reason="too late"))
    assert told == ["released", ("A", "too late")]


# ------------------------------------------------------------------ failed transfers


@pytest.mark.parametrize(
    ("reason", "waits_s"),
    [("Lost connection with prefill", 0.5), ("Request 7 timed out", 30.0)],
)
def test_sglang_keeps_a_failed_transfer_until_the_prefill_worker_answers_if_it_can(
    make_scheduler: MakeScheduler, reason: str, waits_s: float
) -> None:
    scheduler = make_scheduler(ElasticSettings(quarantine_s=0.5))
    queue = scheduler.disagg_decode_transfer_queue
    entry = transferring(scheduler, Req("A", prompt(600), room=7))
    record, receiver, slot = entry.req.kv, entry.kv_receiver, entry.metadata_buffer_index
    receiver.acknowledges = True
    receiver.status, receiver.message = FAILED, reason
    step(scheduler)
    ((kept, limit_s),) = queue.deferred
    assert limit_s == waits_s
    assert queue.deferred_kv_release_timeout == 30.0, "the next one's limit is SGLang's again"
    assert (kept.req.kv, kept.kv_receiver, kept.metadata_buffer_index) == (record, receiver, slot)
    assert receiver.asked == [True]
    assert kept.req is not entry.req, "the request starts over: the queue must not release it"
    assert not entry.req.kv.holds_kv, "it is prefilled here, on pages of its own"
    assert scheduler.formed[-1].admitted == ["A"]


@pytest.mark.parametrize("receiver", [None, SimpleNamespace(acknowledges=False)])
def test_it_does_not_where_there_is_nobody_to_ask(
    make_scheduler: MakeScheduler, receiver: Any
) -> None:
    queue = make_scheduler().disagg_decode_transfer_queue
    if receiver is not None:
        receiver.kv_mgr = SimpleNamespace(enable_deferred_decode_kv_release=False)
    entry = SimpleNamespace(kv_receiver=receiver)
    assert not VERBS.keep_until_acknowledged(queue, entry, object(), longest_s=None)
    assert not queue.deferred


def test_what_sglang_keeps_is_nobodys_and_the_worker_is_not_idle_meanwhile(
    make_scheduler: MakeScheduler,
) -> None:
    scheduler = make_scheduler(ElasticSettings(quarantine_s=0.0, fallback=False))
    shared = scheduler.tree_cache.insert(prompt(160))
    entry = transferring(scheduler, Req("A", prompt(600), room=7))
    queue = scheduler.disagg_decode_transfer_queue
    slots = queue.req_to_metadata_buffer_idx_allocator
    entry.kv_receiver.acknowledges = True
    entry.kv_receiver.status = FAILED
    step(scheduler)
    step(scheduler)
    assert isinstance(entry.req.finished_reason, FINISH_ABORT)
    assert entry.metadata_buffer_index not in slots.free_slots
    assert shared.lock_ref == 1
    assert not scheduler.is_fully_idle()

    queue.acknowledged = True
    scheduler.pause_generation(SimpleNamespace(mode="retract"))
    assert slots.free_slots.count(entry.metadata_buffer_index) == 1
    assert shared.lock_ref == 0
    assert scheduler.flush_cache()


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"spec_algorithm": SimpleNamespace(is_none=lambda: False)}, "speculative decoding"),
        ({"is_hybrid_swa": True}, "sliding windows"),
        ({"is_hybrid_ssm": True}, "state-space models"),
        ({"prefill_decode_interval": 2}, "a prefill-decode interval"),
        ({"enable_unified_memory": True}, "the unified memory pool"),
        ({"enable_hicache_storage": True}, "storage behind the host tier"),
        (
            {
                "enable_hierarchical_cache": True,
                "runtime": {"hicache_write_policy": "write_back"},
            },
            "a host tier that is not written through",
        ),
        ({"runtime": {"disaggregation_decode_retraction_backup": "none"}}, "retraction backups"),
        ({"runtime": {"disaggregation_decode_enable_offload_kvcache": True}}, "the offloading"),
        (
            {"runtime": {"disaggregation_decode_host_receive_threshold": 0.5}},
            "KV received in host memory",
        ),
        ({"runtime": {"enable_pd_role_switch": True}}, "changing roles"),
        ({"runtime": {"enable_streaming_session": True}}, "streaming sessions"),
        ({"runtime": {"enable_session_radix_cache": True}}, "session radix caches"),
        ({"runtime": {"enable_flexkv": True}}, "caches of others"),
        (
            {"runtime": {"disaggregation_decode_enable_radix_cache": False}},
            "prefills from its radix cache",
        ),
    ],
)
def test_what_sglang_allows_beside_a_decode_radix_cache_and_was_not_tried_is_refused(
    make_scheduler: MakeScheduler, fields: dict[str, Any], what: str
) -> None:
    with pytest.raises(PluginMismatch, match=what):
        make_scheduler(**fields)


def test_a_host_tier_that_is_written_through_is_not(make_scheduler: MakeScheduler) -> None:
    assert make_scheduler(enable_hierarchical_cache=True).deltaserve_elastic
