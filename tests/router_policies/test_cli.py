"""`deltaserve route` and `deltaserve policy`, as a user runs them."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

COMMAND = [sys.executable, "-m", "deltaserve"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60)


@asynccontextmanager
async def router(*arguments: str) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "route", "--port", "0", *arguments, stderr=asyncio.subprocess.PIPE
    )
    try:
        assert process.stderr is not None
        url = ""
        while not url:
            line = (await asyncio.wait_for(process.stderr.readline(), 60)).decode()
            assert line, "the router ended before it listened"
            if "listening on" in line:
                url = line.split()[-1]
        async with aiohttp.ClientSession() as session:
            for _ in range(400):
                async with session.get(f"{url}/readyz") as response:
                    if response.status == 200:
                        break
                await asyncio.sleep(0.05)
        yield url, process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_static_pd_from_the_flags_of_sglangs_router(tmp_path: Path, mock_worker: Any) -> None:
    log = tmp_path / "decisions.jsonl"
    async with mock_worker() as prefill, mock_worker() as decode:
        arguments = ["--prefill", prefill.url, "8998", "--decode", decode.url]
        async with router(*arguments, "--decision-log", str(log)) as (url, process):
            async with (
                aiohttp.ClientSession() as session,
                session.post(
                    f"{url}/generate", json={"input_ids": [1, 2], "stream": True}
                ) as answer,
            ):
                text = await answer.text()
                assert answer.headers["x-deltaserve-worker"] == decode.url.removeprefix("http://")
            assert text.endswith("data: [DONE]\n\n")
            assert prefill.bodies == decode.bodies
            assert decode.bodies[0]["bootstrap_port"] == 8998
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 30) == 0
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert [event["event"] for event in events] == ["decision", "finish"]
    assert events[0]["policy"] == "pd"


async def test_a_configuration_file_is_enough(tmp_path: Path, mock_worker: Any) -> None:
    async with mock_worker() as worker:
        config = tmp_path / "router.toml"
        config.write_text(
            f'policy = "unified"\ndecision_log = "log.jsonl"\n'
            f'[policy_params]\noverload_factor = 1.5\n[[workers]]\nid = "w"\nurl = "{worker.url}"\n'
        )
        async with router("--config", str(config)) as (url, process):
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{url}/v1/completions", json={"prompt": "hello"}) as answer,
            ):
                assert (await answer.json())["text"] == "hello"
            process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(process.wait(), 30) == 0
    assert (tmp_path / "log.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--worker", "http://127.0.0.1:1,colour=red"], "colour: unknown field"),
        (["--worker", "http://127.0.0.1:1,role=cook"], "unknown variant `cook`"),
        (["--worker", "127.0.0.1:1"], "expected http://HOST:PORT"),
        (
            ["--prefill", "http://127.0.0.1:1", "x"],
            "http://127.0.0.1:1 x: expected URL BOOTSTRAP_PORT",
        ),
        (["--policy", "best"], 'unknown policy "best"; known: round_robin'),
        (["--policy-param", "overload_factor=high"], "policy_params: invalid type"),
        (["--config", "/nowhere/router.toml"], "/nowhere/router.toml: No such file"),
        (["--tokenizer", "/nowhere"], "tokenizer: /nowhere: No such file"),
        (["--host", "203.0.113.1", "--port", "1"], "cannot listen on 203.0.113.1:1"),
    ],
)
def test_wrong_input_is_answered_in_one_line(arguments: list[str], expected: str) -> None:
    result = run("route", *arguments)
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("\n") == 1
    assert expected in result.stderr


def test_policies_are_listed_and_explained() -> None:
    listed = json.loads(run("policy", "list", "--json").stdout)["policies"]
    assert {"round_robin", "unified", "pd"} <= {policy["name"] for policy in listed}
    explained = run("policy", "explain", "unified").stdout
    assert "overload_factor = 1.3" in explained
    wrong = run("policy", "explain", "x")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: policy x: unknown; known: round_robin")


PYTHON_POLICY = """
from router_policies.policy import Local, Route, View

class Last:
    def __init__(self, skip: int = 0) -> None:
        self.skip = skip

    def decide(self, view: View) -> Route | None:
        workers = view.local()
        return Local(workers[-1 - self.skip].slot) if workers else None
"""


async def test_a_policy_written_in_python_decides(
    tmp_path: Path, mock_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(PYTHON_POLICY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with mock_worker() as first, mock_worker() as second:
        workers = ["--worker", f"{first.url},id=first", "--worker", f"{second.url},id=second"]
        arguments = [*workers, "--policy", "mine:Last", "--policy-param", "skip=1"]
        async with router(*arguments) as (url, _), aiohttp.ClientSession() as session:
            async with session.post(f"{url}/generate", json={"input_ids": [1]}) as answer:
                assert answer.headers["x-deltaserve-worker"] == "first"
            async with session.get(f"{url}/decisions") as answer:
                assert (await answer.json())["decisions"][0]["reason"] == "custom"


def test_a_policy_that_cannot_be_loaded_is_named() -> None:
    result = run("route", "--policy", "nowhere.at_all:Class")
    assert result.returncode == 2
    assert result.stderr == "error: --policy nowhere.at_all:Class: No module named 'nowhere'\n"
