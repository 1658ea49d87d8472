"""Real agents' clients (Anthropic's and OpenAI's packages) through our router to real engines.

The packages come with the engines' environments, so that the client runs in the one that serves it.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launch import Fleet, fleet, load_topology

CLIENT = Path(__file__).with_name("agent_client.py")

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]


def asked_by_agents(running: Fleet) -> dict[str, Any]:
    """What the clients saw through the fleet's router."""
    assert running.router_url is not None
    topology = running.plan.topology
    argv = [str(running.plan.engine.python), str(CLIENT), running.router_url, topology.model_name]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


def logged(run_dir: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The decisions and the ends of requests in the router's log."""
    lines = [json.loads(line) for line in (run_dir / "decisions.jsonl").read_text().splitlines()]
    return (
        [line for line in lines if line["event"] == "decision"],
        [line for line in lines if line["event"] == "finish"],
    )


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        # One prefill worker and one that does both: what PD cannot carry is served there alone.
        ("laptop-sglang-elastic", ["kv_events=true"]),
        ("laptop-vllm", ["workers.0.count=1"]),
        # Each request is prefilled on one worker and decoded on another.
        ("laptop-sglang-pd", []),
    ],
)
def test_agents_own_clients_are_answered(name: str, overrides: list[str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with fleet(load_topology(name, ["base_port=0", *overrides]), run_dir) as running:
        seen = asked_by_agents(running)
        running.check()
    decisions, finished = logged(run_dir)
    assert seen["models"] == ["tiny-qwen3-moe"]
    status, error = seen["error"]
    assert status == 400
    assert error["error"]["message"]
    # What the engine counts is what its answer says that it read.
    assert seen["messages"]["counted"] == seen["messages"]["input_tokens"]
    # SGLang on a CPU has no grammar backend that forces a call in the form of the model's template.
    for calls in (seen["messages"]["calls"], seen["chat"]["calls"]):
        assert calls == ["get_weather"] or (name != "laptop-vllm" and not calls)
    outcomes = [line["outcome"] for line in finished]
    assert outcomes.count("ok") >= 8
    assert set(outcomes) <= {"ok", "client_disconnect", "rejected"}
    assert {"chat-1", "responses-1"} <= {line["session_id"] for line in decisions}
    if name.endswith("-pd"):
        assert {line["kind"] for line in decisions} == {"prefill_decode"}

    # The router's tokens of a conversation are those that the engine's answers count.
    def counted(session: str) -> list[int]:
        return [line["input_tokens"] for line in decisions if line["session_id"] == session]

    assert counted("3")[0] == seen["messages"]["input_tokens"]
    assert counted("chat-1")[0] == seen["chat"]["prompt_tokens"]
    assert counted("responses-1")[-1] == seen["responses"]["input_tokens"]
    # And the log has what the engine says: of a prompt that came again, what was in its cache too.
    ends = {line["decision_id"]: line for line in finished}
    for session, api in (("3", "messages"), ("responses-1", "responses")):
        again = [line["decision_id"] for line in decisions if line["session_id"] == session][1]
        end, told = ends[again], seen[api]["again"]
        assert {key: end[key] for key in told} == told, end
        assert 2 * told["cached_tokens"] > told["prompt_tokens"] > 0, told
    reported = {line["decision_id"]: line["prompt_tokens"] for line in finished}
    for line in decisions:
        if tokens := reported.get(line["decision_id"]):
            assert line["input_tokens"] == tokens, line
    assert any(reported.values())
