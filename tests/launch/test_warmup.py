"""Workers are asked for every size of step before they serve, and start with empty caches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deltaserve.step_sizes import step_sizes
from launch import FleetError, fleet

from .conftest import Fakes

PAIR = (
    'workers.0.role="prefill"',
    'workers.1.role="elastic"',
    "chunk_tokens=512",
    "warm_up=true",
)


def asked(log: Path) -> list[tuple[str, dict[str, object]]]:
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
        *generated, (_, connecting), (last, _) = calls
        assert last.startswith("/flush_cache")
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


def test_without_the_key_a_cpu_fleet_is_not_warmed_up(fakes: Fakes, tmp_path: Path) -> None:
    with fleet(fakes("serve"), tmp_path / "run") as running:
        assert asked(running.workers[0].log) == []


def test_a_worker_that_refuses_ends_the_fleet_and_says_what_it_said(
    fakes: Fakes, tmp_path: Path
) -> None:
    topology = fakes("refuse", overrides=("warm_up=true",))
    said = pytest.raises(FleetError, match="colocated-0: warming up, /generate: 500 out of memory")
    with said, fleet(topology, tmp_path / "run"):
        pass
    assert json.loads((tmp_path / "run/fleet.json").read_text())["state"] == "failed"
