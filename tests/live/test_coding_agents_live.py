"""Claude Code and Codex, the real ones, go on where a conversation meets what ends it elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from launch import fleet, load_topology
from tests.processes import wait_until

from .coding_agents import Agents, events, installed_agents, router
from .elastic_fleet import engine_python
from .scripted_worker import MODEL, Answer, Asked, Script, ScriptedWorker, scripted_worker

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

LIMIT_TOKENS = 40_000
PART = "lorem ipsum dolor sit amet " * 1800
"""A message of some 12,000 tokens, as the scripted worker counts them."""


@contextmanager
def before(
    folder: Path, script: Script, worker: str = "", *arguments: str
) -> Iterator[tuple[Agents, ScriptedWorker, Path]]:
    """The agents before a router before a scripted worker; the worker; the decision log."""
    commands = installed_agents()
    with (
        scripted_worker(script) as of,
        router(folder, "--worker", f"{of.url},engine=vllm{worker}", *arguments) as (url, log),
    ):
        yield Agents(commands, folder / "home", url, MODEL), of, log


def tokens(asked: Asked) -> int:
    return len(json.dumps(asked.body)) // 4


def last_words(asked: Asked) -> str:
    return json.dumps(asked.body["messages"][-1]["content"])


def too_long_as_vllm_says(asked: Asked) -> Answer | None:
    if (found := tokens(asked)) <= LIMIT_TOKENS:
        return None
    return Answer(
        status=500,
        message=f"This model's maximum context length is {LIMIT_TOKENS} tokens. However, your "
        f"request has {found} input tokens. Please reduce the length of the input messages.",
    )


def test_a_conversation_that_outgrows_the_context_is_compacted_and_goes_on(tmp_path: Path) -> None:
    def script(asked: Asked) -> Answer:
        if "<summary>" in last_words(asked):
            return Answer("<summary>They said hello.</summary>")
        return too_long_as_vllm_says(asked) or Answer("Fine.")

    with before(tmp_path, script) as (agents, worker, _):
        assert agents.claude("Say hello").output == "Fine.\n"
        for part in range(4):
            ended = agents.claude(f"Part {part}. {PART}", "--continue")
            assert (ended.status, ended.output) == (0, "Fine.\n"), ended
    assert any(tokens(asked) > LIMIT_TOKENS for asked in worker.asked)
    assert any("They said hello." in json.dumps(asked.body) for asked in worker.asked)


def test_codex_says_that_the_prompt_is_too_long_and_asks_no_second_time(tmp_path: Path) -> None:
    with before(tmp_path, lambda asked: too_long_as_vllm_says(asked) or Answer()) as of:
        agents, worker, _ = of
        ended = agents.codex(PART * 4)
    assert ended.status != 0
    assert "context window" in ended.errors + ended.output
    assert len(worker.asked) == 1


def test_a_sub_agent_is_a_session_of_its_own_and_its_parent_keeps_its_place(
    tmp_path: Path,
) -> None:
    def script(asked: Asked) -> Answer:
        is_first = (
            len(asked.body["messages"]) <= 2 and "x-claude-code-agent-id" not in asked.headers
        )
        if is_first:
            task = {"description": "look", "prompt": "Look around", "subagent_type": "Explore"}
            return Answer(tool="Agent", arguments=task)
        return Answer("Fine.")

    with before(tmp_path, script, ",kv_capacity_tokens=200000") as (agents, worker, log):
        assert agents.claude("Say hello").output == "Fine.\n"
    first, of_agent, last = (line["session_id"] for line in events(log, "decision"))
    assert first == last
    assert of_agent.startswith(f"{first}/")
    assert [asked.headers.get("x-claude-code-agent-id") for asked in worker.asked][::2] == [
        None
    ] * 2
    came = [line["admission"]["state"] for line in events(log, "decision")]
    assert came[2] == "resident", came


ALIASES = f"""[models]
"claude-haiku-*" = "{MODEL}"
"""


def test_a_sub_agent_that_asks_for_haiku_is_served_by_the_model_that_there_is(
    tmp_path: Path,
) -> None:
    def script(asked: Asked) -> Answer:
        if asked.body["model"] != MODEL:
            return Answer(status=404, message=f"The model {asked.body['model']} does not exist.")
        if "x-claude-code-agent-id" in asked.headers:
            return Answer("Looked around.")
        if len(asked.body["messages"]) > 2:
            return Answer(last_words(asked))
        task = {"description": "look", "prompt": "Look", "subagent_type": "Explore"}
        return Answer(tool="Agent", arguments=task | {"model": "haiku"})

    config = tmp_path / "router.toml"
    config.write_text(ALIASES)
    with before(tmp_path, script, "", "--config", str(config)) as (agents, worker, _):
        ended = agents.claude("Say hello")
    assert "Looked around." in ended.output, ended
    assert any("x-claude-code-agent-id" in asked.headers for asked in worker.asked)


@pytest.mark.timeout(900)
def test_a_second_session_in_a_folder_has_its_prefix_from_the_first_ones(tmp_path: Path) -> None:
    commands = installed_agents()
    settings = ["base_port=0", f'engine.python="{engine_python()}"']
    settings += ["context_tokens=131072", "max_total_tokens=131072"]
    with fleet(load_topology("laptop-sglang-1", settings), tmp_path / "run") as running:
        assert running.router_url is not None
        model = running.plan.topology.model_name
        agents = Agents(commands, tmp_path / "home", running.router_url, model)
        for words in ("Say hello", "Say goodbye"):
            agents.claude(words, "--tools", "Bash,Read", CLAUDE_CODE_MAX_OUTPUT_TOKENS="16")
    firsts: dict[str, dict[str, Any]] = {}
    for line in events(tmp_path / "run" / "decisions.jsonl", "finish"):
        if line["outcome"] == "ok":
            firsts.setdefault(line["session_id"], line)
    first, second = firsts.values()
    assert (first["cached_tokens"] or 0) < 0.1 * first["prompt_tokens"], firsts
    assert second["cached_tokens"] >= 0.9 * second["prompt_tokens"] > 1000, firsts


HELD_S = 40
IMPATIENT_MS = 15_000
is_long = pytest.mark.skipif(
    "DELTASERVE_LIVE_LONG" not in os.environ, reason="waits for 400 s: DELTASERVE_LIVE_LONG=1"
)
ALONE = (",kv_capacity_tokens=200000", "--admission", "cap", "--admission-param", "sessions=1")


@pytest.mark.timeout(700)
@pytest.mark.parametrize("name", ["claude", "codex"])
@pytest.mark.parametrize(
    ("held_s", "impatient_ms"),
    [(HELD_S, IMPATIENT_MS), pytest.param(400, None, marks=is_long)],
    ids=["impatient", "long"],
)
def test_a_turn_that_waits_for_longer_than_its_agent_is_patient_is_answered_once(
    name: str, held_s: int, impatient_ms: int | None, tmp_path: Path
) -> None:
    with before(tmp_path, held(held_s), *ALONE) as of:
        agents, worker, log = of
        holder = Thread(target=hold, args=(agents.url, held_s))
        holder.start()
        wait_until(lambda: bool(worker.asked))
        if name == "claude":
            patience = {"API_TIMEOUT_MS": str(impatient_ms)} if impatient_ms else {}
            ended = agents.claude("Say hello", **patience)
        elif impatient_ms:
            ended = agents.codex("Say hello", idle_ms=impatient_ms)
        else:
            ended = agents.codex("Say hello")
        holder.join()
    assert ended.status == 0, ended
    assert "Fine." in ended.output
    assert len(worker.asked) == 2
    waits = [line for line in events(log, "wait_end") if line["session_id"] != "holder"]
    # Whoever left and came again has waited since he first came.
    *left, last = waits
    assert {line["end"] for line in left} <= {"left"}, waits
    assert last["end"] == "let_in", waits
    assert last["waited_s"] > held_s / 2, waits


@pytest.mark.timeout(400)
def test_anthropics_and_openais_packages_wait_as_they_come_and_are_answered_once(
    tmp_path: Path,
) -> None:
    python, client = engine_python(), Path(__file__).with_name("waiting_client.py")
    with before(tmp_path, held(HELD_S), *ALONE) as (agents, worker, log):
        holder = Thread(target=hold, args=(agents.url, HELD_S))
        holder.start()
        wait_until(lambda: bool(worker.asked))
        argv = [python, str(client), agents.url, MODEL]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
        holder.join()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["Fine."] * 4
    assert len(worker.asked) == 5
    waits = [line for line in events(log, "wait_end") if line["session_id"] != "holder"]
    assert [line["end"] for line in waits] == ["let_in"] * 4


def held(held_s: float) -> Script:
    """The session "holder" is answered after that time, all others at once."""

    def script(asked: Asked) -> Answer:
        is_holder = asked.headers.get("x-session-id") == "holder"
        return Answer("Fine.", delay_s=held_s if is_holder else 0)

    return script


def hold(url: str, held_s: float) -> None:
    """A session that has the only place for so long, and says that it ends."""
    tool = {"name": "look", "input_schema": {"type": "object"}}  # without one it is a side call
    asked = [{"role": "user", "content": PART}]
    body = {"model": MODEL, "max_tokens": 8, "messages": asked, "tools": [tool]}
    request = urllib.request.Request(
        f"{url}/v1/messages",
        json.dumps(body).encode(),
        {"content-type": "application/json", "x-session-id": "holder", "x-session-end": "1"},
    )
    urllib.request.urlopen(request, timeout=2 * held_s).read()
