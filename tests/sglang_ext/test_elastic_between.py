"""The elastic worker's verbs for the releases between 0.5.17 and 0.5.23.

That these releases really look like this was shown by live runs (docs/support.md).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext import sglang as releases
from tests.sglang_ext.test_elastic_0_5_23 import Entry, Receiver
from tests.sglang_ext.test_releases import module


def verbs(version: str) -> Any:
    return releases.select(version).elastic


@pytest.mark.parametrize("version", ["0.5.19", "0.5.20", "0.5.21"])
def test_a_stand_in_takes_the_record_and_the_request_has_an_empty_one(version: str) -> None:
    record, empty = object(), object()
    req = SimpleNamespace(kv=record, last_node="locked", rid="A")

    def detach_kv() -> object:
        taken, req.kv = req.kv, empty
        return taken

    req.detach_kv = detach_kv
    stand_in = verbs(version).take_kv(req)
    assert (stand_in.kv, stand_in.last_node, req.kv) == (record, "locked", empty)


@pytest.mark.parametrize("version", ["0.5.19", "0.5.20"])
def test_a_request_back_from_host_memory_starts_from_the_trees_root(version: str) -> None:
    tree = SimpleNamespace(root_node_handle=lambda extra_key: ("root", extra_key))
    req = SimpleNamespace(last_node=None, extra_key="adapter")
    verbs(version).came_back(tree, req)
    assert req.last_node == ("root", "adapter")
    req.last_node = "arrived with a lock there"
    verbs(version).came_back(tree, req)
    assert req.last_node == "arrived with a lock there"


@pytest.mark.parametrize("version", ["0.5.19", "0.5.20"])
def test_the_quarantine_keeps_what_failed_where_ranks_do_not_agree_on_the_prefill_workers_word(
    version: str,
) -> None:
    cleared: list[int] = []
    receiver = SimpleNamespace(
        kv_mgr=SimpleNamespace(clear_deferred_abort_state=cleared.append), abort_notified=True
    )
    entry = SimpleNamespace(kv_receiver=receiver, req=SimpleNamespace(bootstrap_room=7))
    assert not verbs(version).keep_until_acknowledged(None, entry, "stand-in", longest_s=None)
    assert cleared == [7], "what SGLang notes of an aborted room would stay for ever"


def test_sglang_0_5_21_keeps_what_failed_itself() -> None:
    queue = SimpleNamespace(deferred_kv_release_timeout=30.0, _deferred_releases=[])
    queue._defer_release = queue._deferred_releases.append
    receiver = Receiver()

    entry = Entry("request", receiver)
    assert verbs("0.5.21").keep_until_acknowledged(queue, entry, "stand-in", longest_s=2.0)
    assert verbs("0.5.21").awaiting_acknowledgement(queue) == 1
    assert receiver.asked == [True]


@pytest.mark.parametrize(
    ("version", "drops"),
    [("0.5.19", []), ("0.5.20", ["A"]), ("0.5.21", ["A"]), ("0.5.22", ["A"])],
)
def test_who_ends_in_line_is_told_the_reason(
    monkeypatch: pytest.MonkeyPatch, version: str, drops: list[str]
) -> None:
    module(
        monkeypatch,
        "managers.scheduler",
        _make_abort_req=lambda req, finished_reason: (req.rid, finished_reason),
    )
    sent: list[Any] = []
    dropped: list[str] = []
    tokenizer = SimpleNamespace(send_output=lambda message, _req: sent.append(message))
    scheduler = SimpleNamespace(
        _release_aborted_request=lambda req: dropped.append(req.rid),
        ipc_channels=SimpleNamespace(send_to_tokenizer=tokenizer),
    )
    verbs(version).end_in_line(
        scheduler, SimpleNamespace(rid="A"), SimpleNamespace(finished_reason="too late")
    )
    assert sent == [("A", "too late")]
    assert dropped == drops
