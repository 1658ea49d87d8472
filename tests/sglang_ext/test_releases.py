"""The verbs of each release's adapter find the same thing where that release keeps it.

That the releases really keep it there is what the live tests show.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang_ext import sglang as releases
from sglang_ext.sglang.base import Parallel, Release

OLDER, NEWER = releases.select("0.5.17"), releases.select("0.5.23")
BEFORE_0522 = [r for r in releases.RELEASES if r.versions[0] < "0.5.22"]
BEFORE_0521 = [r for r in releases.RELEASES if r.versions[0] < "0.5.21"]


def newest(release: Release) -> str:
    """The name of a release in a test's."""
    return release.versions[-1]


def module(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    """Makes ``sglang.srt.NAME`` importable, with `contents`."""
    parts = ["sglang", "srt", *name.split(".")]
    for depth in range(1, len(parts) + 1):
        full = ".".join(parts[:depth])
        if full not in sys.modules:
            made = ModuleType(full)
            made.__path__ = []
            monkeypatch.setitem(sys.modules, full, made)
    vars(sys.modules["sglang.srt." + name]).update(contents)


def graphs(backend: str, sizes: list[int] | None) -> SimpleNamespace:
    return SimpleNamespace(prefill=SimpleNamespace(backend=backend, bs=sizes))


def settings(monkeypatch: pytest.MonkeyPatch, release: Release, **found: Any) -> Any:
    """A scheduler whose settings are `found`, kept as in `release`."""
    if release is OLDER:
        args = SimpleNamespace(
            device="cuda",
            attention_backend=found["attention"],
            cuda_graph_config=found["graphs"],
        )
        sizes = SimpleNamespace(attn_tp_size=4, attn_cp_size=2, pp_size=1)
        return SimpleNamespace(server_args=args, ps=sizes)
    module(
        monkeypatch,
        "runtime_context",
        get_parallel=lambda: SimpleNamespace(attn_tp_size=4, attn_cp_size=2, pp_size=1),
        attention_backends=lambda: (found["attention"], found["attention"]),
        get_exec=lambda: SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=found["graphs"])),
    )
    # What the command line did not say is None there.
    return SimpleNamespace(device="cuda", server_args=SimpleNamespace(device=None))


@pytest.mark.parametrize("release", releases.RELEASES, ids=newest)
def test_settings_are_the_resolved_ones(monkeypatch: pytest.MonkeyPatch, release: Release) -> None:
    found = {"attention": "fa3", "graphs": graphs("breakable", [512, 4096])}
    scheduler = settings(monkeypatch, release, **found)
    assert release.device(scheduler) == "cuda"
    assert release.parallel(scheduler) == Parallel(4, 2, 1)
    assert set(release.attention_backends(scheduler)) == {"fa3"}
    assert release.prefill_graph_tokens(scheduler) == 4096
    for without in (graphs("disabled", [512]), graphs("breakable", [])):
        scheduler = settings(monkeypatch, release, attention="fa3", graphs=without)
        assert release.prefill_graph_tokens(scheduler) is None


def test_a_prompts_prefix_and_chunk() -> None:
    older = SimpleNamespace(prefix_indices=[0] * 30, extend_range=SimpleNamespace(length=7))
    newer = SimpleNamespace(prefix_len=30, extend_len=7)
    for release in releases.RELEASES:
        req = older if release in BEFORE_0522 else newer
        assert (release.prefix_tokens(req), release.extend_tokens(req)) == (30, 7)


def test_beams_do_not_ride_along_where_there_are_beams() -> None:
    def running(*groups: Any) -> Any:
        return SimpleNamespace(reqs=[SimpleNamespace(beam_group=group) for group in groups])

    assert NEWER.can_ride(running(None, None))
    assert not NEWER.can_ride(running(None, "beam"))
    assert OLDER.can_ride(SimpleNamespace(reqs=[SimpleNamespace()]))


def test_what_an_adder_leaves_alone_adds_up() -> None:
    for release in releases.RELEASES:
        adder = SimpleNamespace(memory_budget=SimpleNamespace(total_offset=100))
        if release in BEFORE_0521:
            adder = SimpleNamespace(rem_total_token_offset=100)
        release.keep_from_adder(adder, 50)
        release.keep_from_adder(adder, -20)
        assert release.elastic is not None
        assert release.elastic.kept_from_adder(adder) == 130


def test_a_look_up_leaves_the_request_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may stand elsewhere in the tree, with a lock there that has to be given back."""

    def match_prefix_for_req(_tree: Any, req: Any, ids: list[int]) -> None:
        req.prefix_indices, req.last_node = ids[:2], "where the look-up ended"
        req.host_hit_length = 1

    module(monkeypatch, "managers.schedule_policy", match_prefix_for_req=match_prefix_for_req)
    module(monkeypatch, "mem_cache.base_prefix_cache", MatchPrefixParams=SimpleNamespace)
    module(monkeypatch, "mem_cache.common", _req_radix_key=lambda _tree, _req, ids: ids)

    def match_prefix(params: Any) -> Any:
        assert not hasattr(params, "req"), "a session's request would be changed"
        return SimpleNamespace(device_prefix_len=len(params.key[:2]), host_hit_length=1)

    tree = SimpleNamespace(match_prefix=match_prefix)
    for release in releases.RELEASES:
        fields = {
            "origin_input_ids": [1, 2, 3, 4],
            "output_ids": [5],
            "prefix_indices": [9],
            "last_node": "here",
        }
        req = SimpleNamespace(**fields)
        assert release.look_up_cached_tokens(tree, req) == 3
        assert vars(req) == fields


def test_a_failed_transfers_kv_is_released_with_the_parameters_of_each_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Any] = []
    module(monkeypatch, "mem_cache.common", release_kv_cache=lambda *_, **more: given.append(more))
    for release in releases.RELEASES:
        assert release.elastic is not None
        release.elastic.release_kv("tree", "stand-in")
        older = release in BEFORE_0522
        assert given.pop() == ({"is_insert": False} if older else {"checkpoint": False})


def test_a_release_has_the_elastic_workers_verbs_or_says_what_is_missing() -> None:
    for release in releases.RELEASES:
        assert (release.elastic is None) == ("elastic" in release.lacking)
