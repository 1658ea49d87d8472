"""The elastic worker's verbs for SGLang 0.5.23, and failed transfers that SGLang keeps itself.

That SGLang 0.5.23 really looks like this is what the live tests show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext import sglang as releases
from sglang_ext.settings import ElasticSettings
from sglang_ext.sglang.v0_5_17_elastic import Elastic0517
from tests.sglang_ext.fake_sglang import FAILED, FINISH_ABORT, Req
from tests.sglang_ext.test_elastic_worker import prompt, step, transferring
from tests.sglang_ext.test_releases import module

VERBS: Any = releases.select("0.5.23").elastic


class Request:
    """What the verbs touch of a request of 0.5.23: its KV record and its lock."""

    def __init__(self, tokens: int | None) -> None:
        self.rid = "A"
        self.kv = self.record(tokens)
        self.lock: str | None = "lock"
        self.retraction_count, self.retracted_stain = 2, False
        self.expected_kv_checksum = 77

    def record(self, tokens: int | None) -> Any:
        return SimpleNamespace(
            holds_kv=tokens is not None, kv_allocated_len=tokens or 0, retraction_backup=None
        )

    def detach_kv(self) -> Any:
        kv, self.kv = self.kv, self.record(None)
        return kv

    def reset_for_retract(self) -> None:
        assert not self.kv.holds_kv
        self.retraction_count, self.retracted_stain = self.retraction_count + 1, True


def test_what_a_stand_in_took_is_its_own_alone() -> None:
    req = Request(tokens=30)
    record = req.kv
    stand_in = VERBS.take_kv(req)
    assert (stand_in.kv, stand_in.lock) == (record, "lock")
    assert VERBS.allocated_tokens(stand_in) == 30
    assert (VERBS.allocated_tokens(req), req.lock) == (None, None)


def test_a_request_that_starts_over_counts_no_retraction_and_expects_no_checksum() -> None:
    req = Request(tokens=None)
    VERBS.start_over(req)
    assert (req.retraction_count, req.retracted_stain) == (2, False)
    assert req.expected_kv_checksum == 0, "KV computed here was compared with what never came"
    assert len(req.full_untruncated_fill_ids) == 0


def test_a_backup_from_a_retraction_is_kv_in_host_memory() -> None:
    req = Request(tokens=None)
    assert not VERBS.is_in_host_memory(req)
    req.kv.retraction_backup = "tensors"
    assert VERBS.is_in_host_memory(req)
    VERBS.forget_host_copy(req)
    assert not VERBS.is_in_host_memory(req)


def test_who_ends_in_line_is_told_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own timeouts come as aborts with one; without it they would read like a client's."""
    module(
        monkeypatch,
        "managers.scheduler",
        _make_abort_req=lambda req, finished_reason: (req.rid, finished_reason),
    )
    sent: list[Any] = []
    scheduler = SimpleNamespace(
        _release_aborted_request=lambda req: sent.append("released"),
        send_abort_output=lambda message, _req: sent.append(message),
    )
    VERBS.end_in_line(scheduler, Request(None), SimpleNamespace(finished_reason="too late"))
    assert sent == ["released", ("A", "too late")]


# ------------------------------------------------------------------ failed transfers


@dataclass
class Receiver:
    """A receiver of 0.5.23, whose prefill worker is asked to stop at most once."""

    supports: bool = True
    asked: list[bool] = field(default_factory=list)

    @property
    def kv_mgr(self) -> Any:
        return SimpleNamespace(enable_deferred_decode_kv_release=self.supports)

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        self.asked.append(force_arm)


@dataclass
class Entry:
    """An entry of 0.5.23's transfer queue."""

    req: Any
    kv_receiver: Any
    metadata_buffer_index: int = 5


class Queue:
    """The part of 0.5.23's transfer queue that keeps what failed."""

    def __init__(self) -> None:
        self.deferred_kv_release_timeout = 30.0
        self.kept: list[tuple[Entry, float]] = []

    def _defer_release(self, entry: Entry) -> None:
        self.kept.append((entry, self.deferred_kv_release_timeout))


@pytest.mark.parametrize(("longest_s", "waits_s"), [(None, 30.0), (2.0, 2.0)])
def test_sglang_keeps_a_failed_transfer_until_the_prefill_worker_answers(
    longest_s: float | None, waits_s: float
) -> None:
    queue, entry, stand_in = Queue(), Entry("request", Receiver()), object()
    assert VERBS.keep_until_acknowledged(queue, entry, stand_in, longest_s=longest_s)
    ((kept, limit_s),) = queue.kept
    assert (kept.req, kept.kv_receiver, kept.metadata_buffer_index) == (
        stand_in,
        entry.kv_receiver,
        5,
    )
    assert limit_s == waits_s
    assert queue.deferred_kv_release_timeout == 30.0, "the next one's limit is SGLang's again"
    assert entry.kv_receiver.asked == [True]
    assert entry.req == "request", "the request starts over: the queue must not release it"


@pytest.mark.parametrize("receiver", [None, Receiver(supports=False)])
def test_it_does_not_where_there_is_nobody_to_ask(receiver: Receiver | None) -> None:
    queue = Queue()
    entry = Entry("request", receiver)
    assert not VERBS.keep_until_acknowledged(queue, entry, object(), longest_s=None)
    assert not queue.kept


class Keeping(Elastic0517):
    """A release whose SGLang keeps failed transfers until `acknowledged`, in the fake scheduler."""

    def __init__(self) -> None:
        self.kept: list[tuple[Any, Any, float | None]] = []
        self.acknowledged = False

    def keep_until_acknowledged(
        self, queue: Any, entry: Any, stand_in: Any, *, longest_s: float | None
    ) -> bool:
        self.kept.append((entry, stand_in, longest_s))
        return True

    def awaiting_acknowledgement(self, queue: Any) -> int:
        return len(self.kept)

    def release_acknowledged(self, queue: Any) -> None:
        if self.acknowledged:
            for entry, stand_in, _ in self.kept:
                self.release_kv(queue.scheduler.tree_cache, stand_in)
                queue.req_to_metadata_buffer_idx_allocator.free(entry.metadata_buffer_index)
            self.kept = []


@pytest.fixture
def keeping(monkeypatch: pytest.MonkeyPatch) -> Keeping:
    verbs = Keeping()
    monkeypatch.setattr(type(releases.select("0.5.17")), "elastic", verbs)
    return verbs


def test_what_sglang_keeps_is_nobodys_and_the_worker_is_not_idle_meanwhile(
    make_scheduler: Callable[..., Any], keeping: Keeping
) -> None:
    scheduler = make_scheduler(ElasticSettings(quarantine_s=0.0, fallback=False))
    shared = scheduler.tree_cache.insert(prompt(160))
    entry = transferring(scheduler, Req("A", prompt(600), room=7))
    slots = scheduler.disagg_decode_transfer_queue.req_to_metadata_buffer_idx_allocator
    entry.kv_receiver.status = FAILED
    step(scheduler)
    step(scheduler)
    assert isinstance(entry.req.finished_reason, FINISH_ABORT)
    assert entry.metadata_buffer_index not in slots.free_slots
    assert shared.lock_ref == 1
    assert not scheduler.is_fully_idle()

    keeping.acknowledged = True
    scheduler.pause_generation(SimpleNamespace(mode="retract"))
    assert slots.free_slots.count(entry.metadata_buffer_index) == 1
    assert shared.lock_ref == 0
    assert scheduler.flush_cache()


@pytest.mark.parametrize(
    ("reason", "longest_s"),
    [("Lost connection with prefill", 0.5), ("Request 7 timed out", None)],
)
def test_the_word_of_a_prefill_worker_that_is_gone_is_not_waited_for(
    make_scheduler: Callable[..., Any], keeping: Keeping, reason: str, longest_s: float | None
) -> None:
    scheduler = make_scheduler(ElasticSettings(quarantine_s=0.5))
    entry = transferring(scheduler, Req("A", prompt(600), room=7))
    entry.kv_receiver.status, entry.kv_receiver.message = FAILED, reason
    step(scheduler)
    assert [limit_s for _, _, limit_s in keeping.kept] == [longest_s]
    assert entry.req.kv is None, "it is prefilled here, on pages of its own"
    assert scheduler.deltaserve_elastic.queues.local or scheduler.formed[-1].admitted == ["A"]


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("version", ["0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"])
def test_what_newer_sglang_allows_beside_a_decode_radix_cache_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    verbs: Any = releases.select(version).elastic
    tiered = version == "0.5.23"
    disagg = SimpleNamespace(
        disaggregation_decode_enable_radix_cache=True,
        disaggregation_decode_enable_offload_kvcache=False,
        disaggregation_decode_retraction_backup="cpu_tensor",
        disaggregation_decode_host_receive_threshold=1.0,
        enable_pd_role_switch=False,
    )
    memory = SimpleNamespace(
        enable_session_radix_cache=False,
        enable_lmcache=False,
        enable_flexkv=False,
        enable_unified_cache_external_linker=False,
        hicache_write_policy="write_through",
    )
    serving = SimpleNamespace(enable_streaming_session=False)
    module(
        monkeypatch,
        "runtime_context",
        get_disagg=lambda: disagg,
        get_memory=lambda: memory,
        get_serving=lambda: serving,
    )
    speculation = SimpleNamespace(is_none=lambda: True)
    scheduler = SimpleNamespace(
        spec_algorithm=speculation,
        is_hybrid_swa=False,
        is_hybrid_ssm=False,
        prefill_decode_interval=0,
        enable_unified_memory=False,
        enable_hierarchical_cache=tiered,
        enable_hicache_storage=False,
    )
    assert verbs.has_radix_cache(scheduler)
    assert not any(verbs.unsupported(scheduler).values())

    asked: list[tuple[Any, str, Any, str]] = [
        (speculation, "is_none", lambda: False, "speculative decoding"),
        (disagg, "disaggregation_decode_retraction_backup", "none", "retraction backups"),
        (scheduler, "prefill_decode_interval", 2, "a prefill-decode interval"),
        (memory, "enable_flexkv", True, "caches of others"),
        (scheduler, "enable_hicache_storage", True, "storage behind the host tier"),
        (serving, "enable_streaming_session", True, "streaming sessions"),
    ]
    if version >= "0.5.21":
        received = "disaggregation_decode_host_receive_threshold"
        asked += [(disagg, received, 0.5, "KV received in host memory")]
    if tiered:
        asked += [(memory, "hicache_write_policy", "write_back", "a host tier that is not written")]
    else:
        asked += [
            (scheduler, "enable_hierarchical_cache", True, "a host tier before SGLang 0.5.23")
        ]
    for settings, name, value, what in asked:
        with monkeypatch.context() as changed:
            changed.setattr(settings, name, value)
            (refused,) = [
                name for name, is_asked in verbs.unsupported(scheduler).items() if is_asked
            ]
            assert refused.startswith(what)
