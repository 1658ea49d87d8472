"""Claude Code and Codex, the real ones, go on where a conversation meets what ends it elsewhere."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

from tests.processes import wait_until

from .coding_agents import Agents, events, installed_agents, router
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
    came = [line["residency"]["state"] for line in events(log, "decision")]
    assert came[2] == "resident", came


HELD_S = 40
IMPATIENT_MS = 15_000


@pytest.mark.parametrize("name", ["claude", "codex"])
def test_a_turn_that_waits_for_longer_than_its_agent_is_patient_is_answered_once(
    name: str, tmp_path: Path
) -> None:
    def script(asked: Asked) -> Answer:
        held = asked.headers.get("x-session-id") == "holder"
        return Answer("Fine.", delay_s=HELD_S if held else 0)

    alone = ("--residency", "cap", "--residency-param", "sessions=1")
    with before(tmp_path, script, ",kv_capacity_tokens=200000", *alone) as of:
        agents, worker, log = of
        holder = Thread(target=hold, args=(agents.url,))
        holder.start()
        wait_until(lambda: bool(worker.asked))
        if name == "claude":
            ended = agents.claude("Say hello", API_TIMEOUT_MS=str(IMPATIENT_MS))
        else:
            ended = agents.codex("Say hello", idle_ms=IMPATIENT_MS)
        holder.join()
    assert ended.status == 0, ended
    assert "Fine." in ended.output
    assert len(worker.asked) == 2
    (wait,) = (line for line in events(log, "wait_end") if line["session_id"] != "holder")
    assert wait["waited_s"] > 1.5 * IMPATIENT_MS / 1000


def hold(url: str) -> None:
    """A session that has the only place for `HELD_S`, and says that it ends."""
    tool = {"name": "look", "input_schema": {"type": "object"}}  # without one it is a side call
    asked = [{"role": "user", "content": PART}]
    body = {"model": MODEL, "max_tokens": 8, "messages": asked, "tools": [tool]}
    request = urllib.request.Request(
        f"{url}/v1/messages",
        json.dumps(body).encode(),
        {"content-type": "application/json", "x-session-id": "holder", "x-session-end": "1"},
    )
    urllib.request.urlopen(request, timeout=2 * HELD_S).read()
