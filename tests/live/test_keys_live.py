"""Real engines that ask for a key are warmed up, emptied and served, and nobody else gets an
answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch import fleet, load_topology
from launch.http_calls import call

from .conftest import installed

KEY, ADMIN = "sk-the-engines-own", "sk-the-administrators"

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    ("name", "asks"),
    [
        ("laptop-sglang", [f'flags=["--api-key", "{KEY}", "--admin-api-key", "{ADMIN}"]']),
        ("laptop-vllm", [f"environment.VLLM_API_KEY={KEY}"]),
    ],
)
def test_a_fleet_whose_engines_ask_for_a_key_serves_who_has_it(
    name: str, asks: list[str], tmp_path: Path
) -> None:
    topology = load_topology(
        name, ["base_port=0", "workers.0.count=1", "warm_up=true", "chunk_tokens=256", *asks]
    )
    installed(topology.engine.name)
    run_dir = tmp_path / "run"
    with fleet(topology, run_dir) as running:
        running.flush_caches()
        assert running.router_url is not None
        body = json.dumps({"model": topology.model, "prompt": "hello", "max_tokens": 4}).encode()
        for url in (running.router_url, running.workers[0].url):
            for key, expected in ((KEY, 200), (None, 401), ("sk-another", 401)):
                asked = f"{url}/v1/completions"
                status, answer = call("POST", asked, body, timeout_s=60.0, key=key)
                assert status == expected, answer
        # The worker's own lists, which the router has asked for.
        status, answer = call("GET", f"{running.router_url}/v1/models", timeout_s=30.0, key=KEY)
        assert [model["id"] for model in json.loads(answer)["data"]] == [topology.model]
    refused = [line for line in running.workers[0].log.read_text().splitlines() if " 401" in line]
    assert len(refused) == 2, refused  # by the test itself
    for path in (run_dir / "fleet.json", run_dir / "router.toml", run_dir / "transcript.txt"):
        assert KEY not in path.read_text()
        assert ADMIN not in path.read_text()
