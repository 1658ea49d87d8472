"""Workers are asked for every size of step before they serve, and start with empty caches."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from deltaserve.step_sizes import step_sizes
from launch import FleetError, caches, fleet
from launch.engines import Engine
from launch.planning import layout
from launch.topology import Topology
from launch.topology_files import load_topology

from .conftest import Fakes

PAIR = (
    'workers.0.role="prefill"',
    'workers.1.role="elastic"',
    "chunk_tokens=512",
    "warm_up=true",
)


def asked(log: Path) -> list[tuple[str, dict[str, Any]]]:
    lines = [line.split(" ", 2) for line in log.read_text().splitlines() if "asked" in line]
    return [(path, json.loads(body) if body.strip() else {}) for _, path, body in lines]


def test_steps_of_every_range_are_asked_for_with_and_without_a_multiple_of_16() -> None:
    found = step_sizes(2048)
    for tokens in (64, 128, 512, 1024, 1536):
        assert {tokens, tokens + 3} <= set(found)
    assert max(found) == 2048
    assert step_sizes(8192)[-1] == 8192
    assert max(step_sizes(None)) == 4096


def test_workers_prefill_every_size_and_connect_and_are_emptied_then(
    fakes: Fakes, tmp_path: Path
) -> None:
    with fleet(fakes("serve", "serve", overrides=PAIR), tmp_path / "run") as running:
        assert running.timings["warm_up_s"] > 0
        logs = {worker.id: asked(worker.log) for worker in running.workers}
    assert set(logs) == {"prefill-0", "elastic-0"}
    rooms = set()
    for name, calls in logs.items():
        *generated, (_, connecting), (emptied, _), (last, _) = calls
        assert emptied.startswith("/flush_cache")
        # When all that is done: what there is then is left out of garbage collections.
        assert last == "/freeze_gc"
        assert [len(body["input_ids"]) for _, body in generated] == list(step_sizes(512))
        # No prompt may be found in the cache that another left.
        assert len({body["input_ids"][0] for _, body in generated}) == len(generated)
        # A prefill worker would wait for a decode worker that nobody told of the request.
        assert all(("bootstrap_host" in body) == (name == "prefill-0") for _, body in generated)
        # Both halves of one request, so that KV is sent once before anybody waits for it.
        assert connecting["bootstrap_host"] == "127.0.0.1"
        rooms.add((connecting["bootstrap_port"], connecting["bootstrap_room"]))
    assert rooms == {(running.plan.workers[0].ports["bootstrap"], connecting["bootstrap_room"])}
    text = (tmp_path / "run" / "transcript.txt").read_text()
    assert "warm after" in text


def test_a_worker_that_dies_meanwhile_is_told_though_another_does_not_answer(
    fakes: Fakes, tmp_path: Path
) -> None:
    began_s = time.monotonic()
    topology = fakes("die-asked", "hang-asked", overrides=("warm_up=true",))
    with (
        pytest.raises(FleetError, match=r"colocated-0 died \(exit status 3\)"),
        fleet(topology, tmp_path / "run"),
    ):
        pass
    assert time.monotonic() - began_s < 30


def test_without_the_key_a_cpu_fleet_is_not_warmed_up(fakes: Fakes, tmp_path: Path) -> None:
    with fleet(fakes("serve"), tmp_path / "run") as running:
        assert asked(running.workers[0].log) == [("/freeze_gc", {})]


def test_collections_are_left_as_they_are_where_the_key_says_so(
    fakes: Fakes, tmp_path: Path
) -> None:
    with fleet(fakes("serve", overrides=("freeze_gc=false",)), tmp_path / "run") as running:
        assert asked(running.workers[0].log) == []


def test_a_worker_that_cannot_be_frozen_serves_all_the_same(fakes: Fakes, tmp_path: Path) -> None:
    with fleet(fakes("no-freeze", "serve"), tmp_path / "run") as running:
        running.check()
        assert asked(running.workers[1].log) == [("/freeze_gc", {})]
    text = (tmp_path / "run" / "transcript.txt").read_text()
    assert "colocated-0: /freeze_gc: 404 not found" in text


def test_a_worker_that_refuses_ends_the_fleet_and_says_what_it_said(
    fakes: Fakes, tmp_path: Path
) -> None:
    topology = fakes("refuse", overrides=("warm_up=true",))
    said = pytest.raises(FleetError, match="colocated-0: warming up, /generate: 500 out of memory")
    with said, fleet(topology, tmp_path / "run"):
        pass
    assert json.loads((tmp_path / "run/fleet.json").read_text())["state"] == "failed"


def test_vllm_workers_are_warmed_up_by_the_same_prompts(fake_python: Path, tmp_path: Path) -> None:
    fake = [f"engine.python={fake_python}", "router.kind=none", "base_port=0"]
    topology = load_topology("laptop-vllm-pd", [*fake, "chunk_tokens=512", "warm_up=true"])
    with fleet(topology, tmp_path / "run") as running:
        assert running.timings["warm_up_s"] > 0
        logs = {worker.id: asked(worker.log) for worker in running.workers}
    *generated, (_, sent), (emptied, _) = logs["prefill-0"]
    assert [len(body["prompt"]) for _, body in generated] == list(step_sizes(512))
    assert {path for path, _ in generated} == {"/v1/completions"}
    assert sent["kv_transfer_params"]["do_remote_decode"] is True
    assert emptied == "/reset_prefix_cache?reset_external=true"
    (_, received), (emptied, _) = logs["decode-0"]
    assert received["prompt"] == sent["prompt"]
    # What the prefill worker's answer says of where its KV is.
    assert received["kv_transfer_params"]["remote_block_ids"] == [1]
    assert emptied.startswith("/reset_prefix_cache")


def test_a_pair_of_vllm_workers_connects_on_a_cpu_even_when_the_first_handshake_fails(
    fake_python: Path, tmp_path: Path
) -> None:
    fake = [f"engine.python={fake_python}", "router.kind=none", "base_port=0"]
    fake += ['workers.1.environment={ FAKE = "slow-handshake" }']
    with fleet(load_topology("laptop-vllm-pd", fake), tmp_path / "run") as running:
        logs = {worker.id: asked(worker.log) for worker in running.workers}
    transfers = [body["kv_transfer_params"] for path, body in logs["decode-0"] if "v1" in path]
    assert len(transfers) == 2
    # Nothing else was asked: nothing is compiled on a CPU.
    assert [path for path, _ in logs["prefill-0"]][:2] == ["/v1/completions"] * 2
    off = load_topology("laptop-vllm-pd", [*fake, "warm_up=false"])
    with fleet(off, tmp_path / "off") as running:
        assert asked(running.workers[1].log) == []


def attached_to(name: str, *urls: str) -> Topology:
    group = f"workers=[{{ urls = {json.dumps(urls)} }}]"
    return load_topology(name, [group, "router.kind=none"])


@pytest.mark.parametrize("name", ["laptop-sglang", "laptop-vllm"])
def test_the_caches_of_attached_workers_are_emptied_between_runs(
    fake_python: Path, tmp_path: Path, name: str
) -> None:
    fake = [f"engine.python={fake_python}", "router.kind=none", "base_port=0"]
    with fleet(load_topology(name, fake), tmp_path / "theirs") as theirs:
        urls = [worker.url for worker in theirs.workers]
        with fleet(attached_to(name, *urls), tmp_path / "ours") as ours:
            ours.flush_caches()
            ours.flush_caches()
        for worker in theirs.workers:
            flushes = [p for p, _ in asked(worker.log) if "flush" in p or "reset" in p]
            assert len(flushes) == 2


def test_vllms_kv_events_tell_at_once_that_its_cache_is_empty(
    fake_python: Path, tmp_path: Path
) -> None:
    fake = [f"engine.python={fake_python}", "router.kind=none", "base_port=0"]
    fake += ["served_model_name=mine"]
    step = {"model": "mine", "prompt": [16] * 9, "max_tokens": 1, "temperature": 0}
    step |= {"ignore_eos": True}
    group = "workers=[{{ urls = {}, kv_events = {} }}]"
    with fleet(load_topology("laptop-vllm", fake), tmp_path / "theirs") as theirs:
        theirs.flush_caches()
        urls = [worker.url for worker in theirs.workers]
        for worker in theirs.workers:
            # Where it publishes none, there is nothing to tell.
            assert [path.partition("?")[0] for path, _ in asked(worker.log)] == [
                "/reset_prefix_cache"
            ]
        endpoints = ["tcp://127.0.0.1:9"] * len(urls)
        attached = group.format(json.dumps(urls), json.dumps(endpoints))
        ours = load_topology("laptop-vllm", [attached, "router.kind=none", *fake[3:]])
        with fleet(ours, tmp_path / "ours") as running:
            running.flush_caches()
        for worker in theirs.workers:
            _, (emptied, _), (path, body) = asked(worker.log)
            assert emptied.startswith("/reset_prefix_cache")
            assert (path, body) == ("/v1/completions", step)


def test_a_cache_of_which_vllms_kv_events_do_not_tell_that_it_is_empty_is_an_error(
    fake_python: Path, tmp_path: Path
) -> None:
    fake = [f"engine.python={fake_python}", "router.kind=none", "base_port=0", "kv_events=true"]
    fake += ["environment.FAKE=refuse"]
    untold = pytest.raises(
        FleetError, match=r"colocated-0 .* KV events .*/v1/completions: 500 out of memory"
    )
    with fleet(load_topology("laptop-vllm", fake), tmp_path / "run") as running, untold:
        running.flush_caches()


def test_a_cache_that_cannot_be_emptied_is_an_error(
    fakes: Fakes, fake_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caches.flush, "__defaults__", (0.3,))
    busy = pytest.raises(FleetError, match=r"colocated-0 .*/flush_cache: 400 requests are running")
    with fleet(fakes("busy"), tmp_path / "busy") as running, busy:
        running.flush_caches()
    fake = [f"engine.python={fake_python}", "router.kind=none", "base_port=0"]
    off = [*fake, "environment.VLLM_SERVER_DEV_MODE=0"]
    without = pytest.raises(FleetError, match="unless VLLM_SERVER_DEV_MODE=1 is in its environ")
    with fleet(load_topology("laptop-vllm", off), tmp_path / "off") as running, without:
        running.flush_caches()
    held = [*fake, "environment.FAKE=busy"]
    still = pytest.raises(FleetError, match="requests or transfers still hold KV")
    with fleet(load_topology("laptop-vllm", held), tmp_path / "held") as running, still:
        running.flush_caches()


def test_vllm_on_an_open_address_has_no_calls_for_development() -> None:
    plans = [
        layout(
            load_topology("laptop-vllm", [f"host={host}"]),
            Path("/run/x"),
            Engine("vllm", Path("/e/python"), {"vllm": "1"}),
            4,
        )
        for host in ("127.0.0.1", "10.0.0.1")
    ]
    told = [made.workers[0].environment.get("VLLM_SERVER_DEV_MODE") for made in plans]
    assert told == ["1", None]
