"""`deltaserve route` and `deltaserve policy`, as a user runs them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from router_policies import _core
from tests.command_line import deltaserve
from tests.doc_pages import blocks

COMMAND = [sys.executable, "-m", "deltaserve"]


def as_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A router that would serve takes signals and writes its log: in a process of its own."""
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60)


@asynccontextmanager
async def router(
    *arguments: str, ready: bool = True
) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
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
            for _ in range(400 if ready else 0):
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


@pytest.mark.parametrize(
    ("flags", "port"),
    [
        (["--pd-disaggregation", "--prefill={p}", "--decode={d}"], 8998),
        (["--prefill", "{p}", "none", "--decode", "{d}", "--policy", "power_of_two"], 8998),
        (
            [
                *("--prefill-policy", "random", "--decode-policy", "random"),
                *("--decode", "{d}", "--prefill", "{p}", "7000"),
            ],
            7000,
        ),
    ],
)
async def test_every_form_of_sglangs_routers_pd_flags(
    flags: list[str], port: int, mock_worker: Any
) -> None:
    async with mock_worker() as prefill, mock_worker() as decode:
        filled = [flag.format(p=prefill.url, d=decode.url) for flag in flags]
        async with (
            router(*filled) as (url, _),
            aiohttp.ClientSession() as session,
            session.post(f"{url}/generate", json={"input_ids": [1, 2]}) as answer,
        ):
            assert answer.status == 200
        assert prefill.bodies == decode.bodies
        assert decode.bodies[0]["bootstrap_port"] == port


async def test_worker_urls_in_one_word_and_a_worker_without_a_cache(mock_worker: Any) -> None:
    async with mock_worker() as first, mock_worker() as second:
        arguments = [f"--worker-urls={first.url}", "--worker", f"{second.url},prefix_cache=false"]
        async with (
            router(*arguments) as (url, _),
            aiohttp.ClientSession() as session,
            session.get(f"{url}/workers") as answer,
        ):
            workers = (await answer.json())["workers"]
        assert {worker["url"] for worker in workers} == {first.url, second.url}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "policy unified can place no request: no worker is configured"),
        (["--decode", "http://127.0.0.1:1"], "there is no prefill worker"),
        (["--prefill", "http://127.0.0.1:1"], "policy pd can place no request: there is no decode"),
        (
            ["--worker", "http://127.0.0.1:1", "--policy", "pd"],
            "policy pd can place no request: there are no prefill and decode (or elastic) workers",
        ),
        (["--worker", "http://127.0.0.1:1"], None),
    ],
)
async def test_what_is_missing_is_a_warning_at_the_start_and_an_error_of_check(
    arguments: list[str], expected: str | None
) -> None:
    said = await said_until_listening(*arguments)
    assert (expected or "can place no request") in said or expected is None
    assert ("can place no request" in said) == (expected is not None)
    checked = deltaserve("route", "--check", *arguments)
    assert checked.returncode == (2 if expected else 0)
    assert (expected or "") in checked.stderr
    assert "listening" not in checked.stderr


def test_prefill_workers_make_the_policy_pd_unless_the_file_names_one(tmp_path: Path) -> None:
    pair = ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2"]
    config = tmp_path / "router.toml"
    config.write_text("threads = 1\n")
    assert deltaserve("route", "--check", "--config", str(config), *pair).returncode == 0
    config.write_text('policy = "unified"\n')
    named = deltaserve("route", "--check", "--config", str(config), *pair)
    assert named.returncode == 2
    assert "policy unified can place no request" in named.stderr


async def said_until_listening(*arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "route", "--port", "0", *arguments, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    said = ""
    try:
        while "listening on" not in said:
            line = (await asyncio.wait_for(process.stderr.readline(), 60)).decode()
            assert line, f"the router ended before it listened: {said}"
            said += line
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    return said


async def test_where_gateways_ask_is_said(tmp_path: Path) -> None:
    config = tmp_path / "router.toml"
    config.write_text('[[workers]]\nurl = "http://127.0.0.1:9"\n[picker]\nport = 1\n')
    said = await said_until_listening("--config", str(config), "--picker-port", "0")
    (line,) = [line for line in said.splitlines() if "gateways ask at" in line]
    assert line.rpartition(" ")[2].startswith("127.0.0.1:")


def router_tomls() -> list[str]:
    """Every TOML block of the documentation that has a router's workers in it."""
    texts = [block.text for block in blocks() if block.language == "toml"]
    return [text for text in texts if "[[workers]]" in text and "[engine]" not in text]


async def test_every_router_toml_of_the_documentation_starts(tmp_path: Path) -> None:
    assert router_tomls()
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": [], "model": model})
    )
    (tmp_path / "keys.txt").write_text("a-key-of-a-client\n")
    for block in router_tomls():
        config = tmp_path / "router.toml"
        config.write_text(block)
        said = await said_until_listening("--config", str(config))
        assert "can place no request" not in said


def test_a_wrong_file_is_named_with_its_line_and_field(tmp_path: Path) -> None:
    config = tmp_path / "router.toml"
    for text, expected in [
        ("drain_timeout_s = nan", "router.toml: drain_timeout_s: expected a number from 0 to"),
        ("load_interval_s = 1e300", "router.toml: load_interval_s: expected a number from"),
        ("threads = 100000", "router.toml: threads: expected a number from 1 to 1024"),
        ('port = "x"', "router.toml:1: port: invalid type"),
        ("[picker]\nport = 1\npatience_s = 0", "picker.patience_s: expected a number from"),
    ]:
        config.write_text(text)
        result = as_process("route", "--config", str(config))
        assert result.returncode == 2
        assert result.stderr.count("\n") == 1
        assert expected in result.stderr


def test_the_help_has_an_example_and_every_way_to_name_workers() -> None:
    shown = deltaserve("route", "--help").stdout
    for expected in [
        "Run the router until Ctrl-C or SIGTERM.",
        "deltaserve route --config router.toml\n",
        "--worker-urls URL...",
        "--prefill URL [PORT]",
        "--decode URL",
    ]:
        assert expected in shown
    assert "Run the router.\n" in deltaserve("--help").stdout
    assert "Routing policies: list and explain." in deltaserve("policy", "--help").stdout


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
        (
            ["--worker", "http://127.0.0.1:1,role=cook"],
            "worker http://127.0.0.1:1: role: unknown variant `cook`, expected one of `colocated`",
        ),
        (["--worker", "127.0.0.1:1"], "expected http://HOST:PORT"),
        (
            ["--worker", "http://127.0.0.1:1,id=w,bootstrap_port=99999"],
            "worker w: bootstrap_port: invalid value: integer `99999`, expected a whole number",
        ),
        (
            ["--worker", "http://127.0.0.1:1,prefill_tokens_per_s=nan"],
            "prefill_tokens_per_s: expected a number, not 'nan'",
        ),
        (
            ["--worker", "http://127.0.0.1:1,prefix_cache=maybe"],
            "prefix_cache: expected true or false, not 'maybe'",
        ),
        (["--port", "99999"], "port: invalid value: integer `99999`, expected a whole number"),
        (["--worker-urls"], "--worker-urls: expected URL..."),
        (["--worker-urls", "--policy", "unified"], "--worker-urls: expected URL..."),
        (["--prefill"], "--prefill: expected URL [BOOTSTRAP_PORT]"),
        (
            ["--prefill", "http://127.0.0.1:1", "x"],
            "--prefill http://127.0.0.1:1 x: expected URL [BOOTSTRAP_PORT]",
        ),
        (
            ["--decode", "http://127.0.0.1:1", "http://127.0.0.1:2"],
            "http://127.0.0.1:2: expected one URL",
        ),
        (
            ["--pd-disaggregation", "--worker-urls", "http://127.0.0.1:1"],
            "--pd-disaggregation: expected --prefill and --decode workers",
        ),
        (["--prefill-policy", "random"], "one policy chooses both workers here"),
        (
            ["--prefill-policy", "random", "--decode-policy", "round_robin"],
            "one policy chooses both workers here",
        ),
        (["--policy", "best"], 'unknown policy "best"; known: round_robin'),
        (["--policy", "cache_aware"], "the nearest here: unified (cached tokens and load), or pd"),
        (["--policy", "manual"], "the nearest here: unified"),
        (
            ["--policy-param", "overload_factor=high"],
            'policy_params: overload_factor: invalid type: string "high", expected a number',
        ),
        (["--policy-param", "overload_factor=NaN"], "overload_factor: invalid type: string"),
        (["--policy-param", "overload_factor=-1"], "overload_factor: expected a number of 0 or"),
        (["--config", "/nowhere/router.toml"], "/nowhere/router.toml: No such file"),
        (["--tokenizer", "/nowhere"], "tokenizer: /nowhere: No such file"),
        (["--host", "203.0.113.1", "--port", "1"], "cannot listen on 203.0.113.1:1"),
    ],
)
def test_wrong_input_is_answered_in_one_line(arguments: list[str], expected: str) -> None:
    result = as_process("route", *arguments)
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("\n") == 1
    assert expected in result.stderr
    assert "column" not in result.stderr


@pytest.mark.parametrize("flags", [[], ["--check", "--worker", "http://127.0.0.1:1"]])
@pytest.mark.parametrize("keys", ["", ",", " , "])
def test_a_variable_for_keys_without_one_does_not_open_the_router(
    keys: str, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELTASERVE_API_KEYS", keys)
    result = as_process("route", "--port", "0", *flags)
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("\n") == 1
    assert "DELTASERVE_API_KEYS: expected keys, separated by commas, found none" in result.stderr


def test_a_file_for_keys_without_one_is_named_by_the_check(tmp_path: Path) -> None:
    (tmp_path / "keys.txt").write_text("# nobody yet\n")
    config = tmp_path / "router.toml"
    config.write_text(
        'api_keys_file = "keys.txt"\n[[workers]]\nid = "w"\nurl = "http://127.0.0.1:1"\n'
    )
    for flags in ([], ["--check"]):
        result = as_process("route", "--port", "0", "--config", str(config), *flags)
        assert result.returncode == 2, result.stderr
        assert f"api_keys_file: {tmp_path}/keys.txt: expected a key a line" in result.stderr


async def test_sighup_reads_the_keys_again_and_keeps_them_where_it_cannot(
    tmp_path: Path, mock_worker: Any
) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("the-first-key\n")
    config = tmp_path / "router.toml"

    async def statuses(url: str) -> list[int]:
        found = []
        async with aiohttp.ClientSession() as client:
            for key in ("the-first-key", "the-other-key"):
                headers = {"authorization": f"Bearer {key}"}
                async with client.get(f"{url}/metrics", headers=headers) as answer:
                    found.append(answer.status)
        return found

    async def until(url: str, expected: list[int]) -> None:
        for _ in range(100):
            if (found := await statuses(url)) == expected:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(found)

    async with mock_worker() as worker:
        config.write_text(
            f'api_keys_file = "{keys}"\n[[workers]]\nid = "w"\nurl = "{worker.url}"\n'
        )
        async with router("--config", str(config)) as (url, process):
            await until(url, [200, 401])
            # Of the same length and time: only the signal tells that it is another.
            before = keys.stat()
            keys.write_text("the-other-key\n")
            os.utime(keys, ns=(before.st_atime_ns, before.st_mtime_ns))
            await asyncio.sleep(2.5)
            assert await statuses(url) == [200, 401]
            process.send_signal(signal.SIGHUP)
            await until(url, [401, 200])
            keys.write_text("# nobody\n")
            process.send_signal(signal.SIGHUP)
            await asyncio.sleep(0.5)
            assert await statuses(url) == [401, 200]


def test_admission_is_explained_and_its_wrong_settings_are_named() -> None:
    everything = deltaserve("policy", "explain", "admission").stdout
    assert "thunder" in everything
    assert "max_wait_s = 600" in everything
    one = deltaserve("policy", "explain", "admission.lease").stdout
    assert "lease_s = 30" in one
    assert "3076" in one
    rules = json.loads(deltaserve("policy", "explain", "admission", "--json").stdout)["rules"]
    assert [rule["name"] for rule in rules][:3] == ["rotate", "off", "cap"]
    wrong = deltaserve("policy", "explain", "admission.lru")
    assert wrong.returncode == 2
    assert "known rules: rotate, off, cap" in wrong.stderr
    worker = ("--worker", "http://127.0.0.1:1")
    for flags, expected in [
        (("--admission", "lru"), "admission: rule: lru is unknown"),
        (("--admission-param", "fill=2"), "admission: fill: expected a share"),
        (("--admission", "cap", "--admission-param", "sessions=0"), "admission: sessions:"),
        (("--admission", "cap", "--admission-param", "lease_s=1"), "admission: lease_s: unknown"),
        (("--admission-param", "fill"), "--admission-param fill: expected key=value"),
    ]:
        refused = deltaserve("route", "--check", *worker, *flags)
        assert refused.returncode == 2, flags
        assert expected in refused.stderr, refused.stderr
    good = ("--admission", "cap", "--admission-param", "sessions=5")
    assert deltaserve("route", "--check", *worker, *good).returncode == 0


def test_the_address_of_a_collector_of_traces_is_a_flag_and_is_checked() -> None:
    worker = ["route", "--check", "--worker", "http://127.0.0.1:1"]
    assert deltaserve(*worker, "--otlp-endpoint", "http://127.0.0.1:4318").returncode == 0
    refused = deltaserve(*worker, "--otlp-endpoint", "127.0.0.1:4318")
    assert refused.returncode == 2
    assert "otlp_endpoint: expected http://HOST:PORT" in refused.stderr


def test_policies_are_listed_and_explained() -> None:
    listed = json.loads(deltaserve("policy", "list", "--json").stdout)["policies"]
    assert {"round_robin", "unified", "pd"} <= {policy["name"] for policy in listed}
    explained = deltaserve("policy", "explain", "unified").stdout
    assert "overload_factor = 1.3" in explained
    wrong = deltaserve("policy", "explain", "x")
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


def test_a_policy_written_in_python_is_explained(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(EXPLAINED_POLICY)
    explain = [sys.executable, "-P", "-m", "deltaserve", "policy", "explain", "mine:Last"]
    told = subprocess.run(explain, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines() == [
        "mine:Last: The worker that was added last.",
        "",
        "rule      For tests of two lines.",
        "param     skip: must be given",
        "param     why = 'so'",
        f"source    {tmp_path / 'mine.py'}",
    ]
    as_json = subprocess.run([*explain, "--json"], cwd=tmp_path, capture_output=True, text=True)
    builtin = json.loads(deltaserve("policy", "explain", "unified", "--json").stdout)
    assert json.loads(as_json.stdout).keys() == builtin.keys()
    wrong = subprocess.run([*explain[:-1], "mine:First"], cwd=tmp_path, capture_output=True)
    assert wrong.returncode == 2
    assert b"error: policy mine:First: module 'mine' has no attribute 'First'" in wrong.stderr


EXPLAINED_POLICY = '''
class Last:
    """The worker that was added last.

    For tests of
    two lines.
    """

    def __init__(self, skip, why="so"):
        pass

    def decide(self, view):
        return None
'''


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


BROKEN_POLICIES = """
class Raises:
    def __init__(self) -> None:
        raise KeyError("weights\\nof nothing")

class Outside:
    def decide(self, view):
        from router_policies.policy import Local
        return Local(7)
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nowhere.at_all:Class", "No module named 'nowhere'"),
        (":Class", "expected package.module:Class"),
        ("broken_policies:", "expected package.module:Class"),
        ("broken_policies:Missing", "module 'broken_policies' has no attribute 'Missing'"),
        ("broken_policies:Raises", "KeyError: 'weights\\nof nothing'"),
        ("not_python:Class", "SyntaxError: '(' was never closed (not_python.py, line 1)"),
        ("json:JSONDecoder", "expected a class with decide(view)"),
    ],
)
def test_a_policy_that_cannot_be_loaded_is_named(
    name: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_policies.py").write_text(BROKEN_POLICIES)
    (tmp_path / "not_python.py").write_text("(")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = as_process("route", "--policy", name)
    assert result.returncode == 2
    assert result.stderr == f"error: --policy {name}: {expected}\n"


async def test_a_policy_that_chooses_no_candidate_is_in_the_log(
    tmp_path: Path, mock_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_policies.py").write_text(BROKEN_POLICIES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with mock_worker() as worker:
        arguments = ["--policy", "broken_policies:Outside", "--worker", worker.url]
        async with router(*arguments) as (url, process), aiohttp.ClientSession() as session:
            for _ in range(3):
                async with session.post(f"{url}/generate", json={"input_ids": [1]}) as answer:
                    assert answer.status == 503
            process.terminate()
            assert process.stderr is not None
            said = (await asyncio.wait_for(process.stderr.read(), 60)).decode()
    line = "policy broken_policies:Outside: chose slot 7, which has no worker: no candidate"
    assert said.count(line) == 1, said


async def test_ten_bytes_of_a_body_cost_no_more_than_they_are(mock_worker: Any) -> None:
    clients = 200
    async with mock_worker() as worker, router("--worker", worker.url) as (url, process):
        host, _, port = url.removeprefix("http://").partition(":")
        memory = psutil.Process(process.pid).memory_info
        before = memory().rss
        writers = []
        for _ in range(clients):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(
                b'POST /generate HTTP/1.1\r\nhost: r\r\ncontent-length: 60000000\r\n\r\n{"input_id'
            )
            await writer.drain()
            writers.append(writer)
        await asyncio.sleep(1)
        grown = memory().rss - before
        for writer in writers:
            writer.close()
    assert grown / clients < 200_000


def test_the_check_names_what_stands_in_the_way_of_a_worker() -> None:
    def checked(url: str) -> subprocess.CompletedProcess[str]:
        return as_process("route", "--check", "--worker", url)

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.listen(1)
        port = server.getsockname()[1]
        hung = checked(f"http://127.0.0.1:{port}")
    refused = checked(f"http://127.0.0.1:{port}")
    unknown = checked("http://no-such-host.invalid:1")
    for result, status, words in (
        (hung, 1, "no answer within 10 s"),
        (refused, 0, "it refuses connections"),
        (unknown, 1, "its name is not resolved"),
    ):
        assert result.returncode == status, result.stderr
        assert result.stderr.count("\n") == 1
        assert "does not answer /health" in result.stderr
        assert words in result.stderr


async def test_every_path_of_the_table_has_the_methods_that_the_table_says() -> None:
    rows = json.loads(_core.paths())
    said = {path: {*row["methods"].split(", ")} for row in rows for path in row["paths"]}
    assert {"/generate", "/workers/ID/drain", "/sessions/ID"} <= said.keys()
    async with router("--worker", "http://127.0.0.1:9", ready=False) as (url, _):
        found = {}
        async with aiohttp.ClientSession() as session:
            for path in said:
                # A method that no path has is refused with those that the path has.
                async with session.patch(f"{url}{path}") as answer:
                    found[path] = {*answer.headers.get("allow", str(answer.status)).split(", ")}
    assert found == said
