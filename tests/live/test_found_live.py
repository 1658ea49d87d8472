"""Before an engine that somebody started by hand the router needs no flag but its address."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from launch import fleet, load_topology

from .coding_agents import events, router
from .conftest import installed, worker_of

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_admission_is_on_and_prompts_are_counted_exactly(engine: str, tmp_path: Path) -> None:
    installed(engine)
    settings = ["base_port=0", "max_total_tokens=32768", "context_tokens=16384"]
    with fleet(load_topology(f"laptop-{engine}-1", settings), tmp_path / "run") as running:
        model = running.plan.topology.model_name
        with router(tmp_path, "--worker", worker_of(running, "colocated").url) as (url, log):
            (worker,) = ask(f"{url}/workers")["workers"]
            assert worker["engine"] == engine
            assert worker["state"]["admission"]["budget_tokens"] > 0.9 * 32768
            chat = {
                "model": model,
                "max_tokens": 4,
                "messages": [
                    {"role": "system", "content": "You write code."},
                    {"role": "user", "content": "Say hello, in three languages."},
                ],
            }
            told = ask(f"{url}/v1/chat/completions", chat)
        (decided,) = events(log, "decision")
        assert decided["input_tokens"] == told["usage"]["prompt_tokens"]
