"""SGLang's model gateway with our decision, before real SGLang workers on a CPU.

Skipped where the gateway was not built (`make model-gateway`). The same load goes through the
gateway and through our own front, before the same workers with empty caches: where both see the
same facts, they decide the same.
"""

from __future__ import annotations

import http.client
import http.server
import json
import random
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from launch import Fleet, fleet, load_topology
from launch.cache import cache_dir
from tests.live.conftest import VOCABULARY, installed, worker_of
from tests.live.socket_latency import INFO
from tests.live.test_router_live import free_port
from tests.processes import wait_until

BINARY = cache_dir() / "model-gateway/bin/deltaserve-gateway"
pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not BINARY.exists(), reason="not built: make model-gateway"),
]

KEY = "a-key"
LONG, MORE = 3_000, 60
"""Tokens of a session's first prompt, and of what each later turn adds."""
PARAMS: dict[str, dict[str, Any]] = {
    # So that how fast the engines seem to be, which differs from run to run, decides nothing.
    "elastic": {"stall_weight": 20.0, "output_weight": 0.0},
    "selective": {"threshold_tokens": 1_000, "min_cached_share": 0.0},
}


class Route(NamedTuple):
    """Which workers a request got; no prefill worker where it was not separated."""

    answering: str
    prefill: str | None


@contextmanager
def workers(topology: str, folder: Path, *settings: str) -> Iterator[Fleet]:
    installed("sglang")
    overrides = ["base_port=0", "router.kind=none", "context_tokens=8192", *settings]
    with fleet(load_topology(topology, overrides), folder, on_progress=print) as running:
        yield running


@pytest.fixture(scope="module")
def colocated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("colocated")
    with workers("laptop-sglang", folder, "max_total_tokens=32768") as running:
        yield running


@pytest.fixture(scope="module")
def elastic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("elastic")
    with workers("laptop-sglang-elastic", folder, "warm_up=true") as running:
        yield running


def ask(url: str, body: dict[str, Any], path: str = "/generate", **headers: str) -> Any:
    data = json.dumps(body).encode()
    known = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(f"{url}{path}", data, known | headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read() or b"null")


def generation(ids: list[int], tokens: int, **more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}
    return {"input_ids": ids, "sampling_params": sampling} | more


@contextmanager
def streamed(
    url: str, ids: list[int], tokens: int, session: str, **headers: str
) -> Iterator[http.client.HTTPResponse]:
    """A stream whose first token has come; its client leaves at the block's end."""
    known = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
    try:
        body = json.dumps(generation(ids, tokens, stream=True))
        connection.request("POST", "/generate", body, known | {"x-session-id": session} | headers)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        assert answer.readline().startswith(b"data: ")
        yield answer
    finally:
        connection.close()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, OSError, http.client.HTTPException):
        return False


class Router:
    """The gateway or our own front, before the workers of a fleet."""

    def __init__(self, name: str, log: Path, ports: list[int], process: Any) -> None:
        self.name = name
        self.log = log
        self.url = f"http://127.0.0.1:{ports[0]}"
        self.metrics = f"http://127.0.0.1:{ports[-1]}/metrics"
        self.process: subprocess.Popen[bytes] = process

    def events(self, event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [line for line in lines if line["event"] == event]

    def routes(self) -> list[Route]:
        """Of all requests, once each has ended."""
        wait_until(lambda: len(self.events("decision")) == len(self.events("finish")))
        return [
            Route(line.get("worker") or line["decode"], line.get("prefill"))
            for line in self.events("decision")
        ]


def command_of(
    name: str, running: Fleet, folder: Path, ports: list[int], policy: str, admission: str
) -> list[str]:
    log = str(folder / f"{name}.jsonl")
    params = PARAMS.get(policy, {})
    if name == "front":
        command = [sys.executable, "-m", "deltaserve", "route", "--port", str(ports[0])]
        command += [f"--policy-param={key}={value}" for key, value in params.items()]
    else:
        command = [str(BINARY), "--port", str(ports[0]), "--policy-params", json.dumps(params)]
        command += ["--api-key", KEY, "--prometheus-port", str(ports[1])]
    for worker in running.plan.workers:
        bootstrap = worker.ports.get("bootstrap")
        assert worker.role is not None
        role = {"colocated": "--worker", "prefill": "--prefill", "elastic": "--decode"}[worker.role]
        if role == "--decode" and name == "front":
            command.append(f"--worker={worker.url},role=elastic")
        else:
            command += [role, worker.url, *([str(bootstrap)] if role == "--prefill" else [])]
    return [*command, "--policy", policy, "--admission", admission, "--decision-log", log]


@contextmanager
def router(
    name: str,
    running: Fleet,
    folder: Path,
    policy: str = "unified",
    admission: str = "off",
    more: tuple[str, ...] = (),
) -> Iterator[Router]:
    ports = [free_port(), free_port()]
    command = [*command_of(name, running, folder, ports, policy, admission), *more]
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        started = Router(name, folder / f"{name}.jsonl", ports, process)
        ready = {"front": "/readyz", "gateway": "/readiness"}[name]
        wait_until(lambda: answers(started.url + ready), 120)
        if name == "gateway":
            # It is ready with the first of its workers; what these say of themselves comes after.
            count = len(running.workers)
            wait_until(lambda: registered(started.url) == count, 120)
            time.sleep(3)
        yield started
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def registered(url: str) -> int:
    request = urllib.request.Request(f"{url}/workers", headers={"authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        shown = json.loads(answer.read())
    return sum(bool(worker["is_healthy"]) for worker in shown["workers"])


def replay(url: str, seed: int) -> None:
    """A session that is alone at first, and others that begin while it gets a long answer."""
    numbers = random.Random(seed)
    prompts = {
        f"s{session}": numbers.choices(range(16, VOCABULARY), k=LONG) for session in range(4)
    }

    def turn(session: str) -> None:
        ask(url, generation(prompts[session], 8), x_session_id=session)
        prompts[session] = prompts[session] + numbers.choices(range(16, VOCABULARY), k=MORE)

    turn("s0")
    with streamed(url, prompts["s0"], 4_000, "s0"):
        for session in ("s1", "s2", "s1", "s3", "s3"):
            turn(session)
    # Its worker has noticed that nobody listens.
    time.sleep(2)
    turn("s0")
    turn("s0")


def named(routes: list[Route]) -> list[Route]:
    """The same, the workers named in the order in which they came: of equal ones any is first."""
    names: dict[str, str] = {}
    for route in routes:
        for worker in (route.prefill, route.answering):
            if worker is not None:
                names.setdefault(worker, f"worker {len(names)}")
    return [
        Route(names[route.answering], route.prefill and names[route.prefill]) for route in routes
    ]


def decided(name: str, running: Fleet, folder: Path, policy: str) -> list[Route]:
    wait_until(lambda: all(has_flushed(worker.url) for worker in running.workers))
    with router(name, running, folder, policy) as started:
        replay(started.url, seed=1)
        routes = started.routes()
    outcomes = [line["outcome"] for line in started.events("finish")]
    assert outcomes.count("client_disconnect") == 1
    assert outcomes.count("ok") == len(routes) - 1 == 8
    return named(routes)


def has_flushed(url: str) -> bool:
    """SGLang refuses to empty the cache of a worker that is at work."""
    try:
        with urllib.request.urlopen(f"{url}/flush_cache", b"", timeout=30):
            return True
    except urllib.error.HTTPError:
        return False


@pytest.mark.parametrize("policy", ["elastic", "selective"])
def test_before_colocated_workers_it_decides_as_our_own_front(
    colocated: Fleet, tmp_path: Path, policy: str
) -> None:
    of_gateway = decided("gateway", colocated, tmp_path, policy)
    of_front = decided("front", colocated, tmp_path, policy)
    assert of_gateway == of_front
    assert len({route.answering for route in of_gateway}) == 2


@pytest.mark.parametrize("policy", ["elastic", "selective"])
def test_before_an_elastic_worker_it_decides_as_our_own_front(
    elastic: Fleet, tmp_path: Path, policy: str
) -> None:
    before = served(elastic)
    of_gateway = decided("gateway", elastic, tmp_path, policy)
    after = served(elastic)
    of_front = decided("front", elastic, tmp_path, policy)
    assert of_gateway == of_front
    separated = sum(route.prefill is not None for route in of_gateway)
    # The first turn of those that begin while others are answered.
    assert 2 <= separated < len(of_gateway)
    # So many the worker got, with and without a prefill worker.
    told = [after[kind] - before[kind] for kind in ("separated", "local")]
    assert told == [separated, len(of_gateway) - separated]


def served(running: Fleet) -> dict[str, int]:
    """What the elastic worker counts: requests that another worker prefilled, and its own."""
    with urllib.request.urlopen(f"{worker_of(running, 'elastic').url}/server_info") as answer:
        (state,) = json.loads(answer.read())["internal_states"]
    counts = state["deltaserve_elastic"]["counts"]
    return {kind: counts.get(kind, 0) for kind in ("separated", "local")}


def test_its_keys_metrics_and_apis_are_the_gateways_own(colocated: Fleet, tmp_path: Path) -> None:
    with router("gateway", colocated, tmp_path) as started:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask(started.url, generation([16, 17], 1), authorization="Bearer another")
        model = colocated.plan.topology.model_name
        said = ask(
            started.url,
            {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
            "/v1/chat/completions",
        )
        assert said["choices"][0]["message"]["role"] == "assistant"
        called = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
        parsed = ask(
            started.url,
            {"text": called, "tool_call_parser": "qwen", "tools": [TOOL]},
            "/parse/function_call",
        )
        assert parsed["tool_calls"][0]["function"]["name"] == "look"
        with urllib.request.urlopen(started.metrics, timeout=30) as page:
            assert b"smg_router_requests_total" in page.read()
        with streamed(started.url, [20] * 100, 4_000, "leaves"):
            pass
        started.routes()
        assert started.events("finish")[-1]["outcome"] == "client_disconnect"


def test_chats_are_counted_in_the_models_tokens(elastic: Fleet, tmp_path: Path) -> None:
    with urllib.request.urlopen(f"{elastic.workers[0].url}/server_info", timeout=30) as answer:
        model = json.loads(answer.read())["tokenizer_path"]
    messages = [{"role": "user", "content": "Where is it? " * 30}]
    body = {"model": elastic.plan.topology.model_name, "messages": messages, "max_tokens": 4}
    more = ("--tokenizer", model)
    with router("gateway", elastic, tmp_path, "selective", more=more) as started:
        ask(started.url, body, "/v1/chat/completions")
        told = ask(started.url, body, "/v1/messages")
        assert told["usage"]["cache_read_input_tokens"] > 0
        counted = ask(started.url, {key: body[key] for key in ("model", "messages")}, COUNT_TOKENS)
        started.routes()
        (chat, *_), (of_chat, of_message) = started.events("decision"), started.events("finish")
    assert chat["input_tokens"] == of_chat["prompt_tokens"] == counted["input_tokens"]
    assert of_message["cached_tokens"] == of_message["prompt_tokens"] - 1


class Mock(http.server.ThreadingHTTPServer):
    """Describes itself as SGLang does, answers requests with `status`, and counts them."""

    status = 200
    asked = 0

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), MockHandler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class MockHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.answer(INFO.get(path), 200 if path in INFO else 404)

    def do_POST(self) -> None:
        assert isinstance(self.server, Mock)
        self.rfile.read(int(self.headers["content-length"]))
        self.server.asked += 1
        meta = {"prompt_tokens": 2, "cached_tokens": 0, "completion_tokens": 1}
        self.answer({"text": "x", "meta_info": meta}, self.server.status)

    def answer(self, known: object, status: int) -> None:
        body = json.dumps(known).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_a_request_that_its_worker_fails_is_answered_by_another(tmp_path: Path) -> None:
    mocks = [Mock(), Mock()]
    log, port = tmp_path / "log.jsonl", free_port()
    command = [str(BINARY), "--port", str(port), "--policy", "round_robin"]
    command += ["--decision-log", str(log)]
    command += [word for mock in mocks for word in ("--worker", mock.url)]
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(command)
    try:
        wait_until(lambda: answers(f"{url}/readiness"))
        wait_until(lambda: registered(url) == 2)
        time.sleep(3)
        mocks[0].status = 500
        for _ in range(6):
            assert ask(url, generation([16, 17], 1))["text"] == "x"
        with urllib.request.urlopen(f"{url}/workers", timeout=30) as answer:
            known = json.loads(answer.read())["workers"]
        (gone,) = [worker["id"] for worker in known if worker["url"] == mocks[0].url]
        request = urllib.request.Request(f"{url}/workers/{gone}", method="DELETE")
        urllib.request.urlopen(request, timeout=30).close()
        wait_until(lambda: registered(url) == 1)
        mocks[1].status = 503
        with pytest.raises(urllib.error.HTTPError, match="503"):
            ask(url, generation([16, 17], 1))
    finally:
        process.terminate()
        process.wait()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    outcomes = [line["outcome"] for line in lines if line["event"] == "finish"]
    for mock in mocks:
        chosen = [line for line in lines if line.get("worker") == mock.url.removeprefix("http://")]
        assert mock.asked == len(chosen) > 0
    assert outcomes.count("ok") == 6
    # The first that failed, as often as its turn came until it was known to; and the last.
    assert 2 <= outcomes.count("worker_error") <= 6


COUNT_TOKENS = "/v1/messages/count_tokens"
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {}}}},
}


def test_sessions_that_do_not_fit_wait_for_their_turn(colocated: Fleet, tmp_path: Path) -> None:
    numbers = random.Random(4)
    prompts = [numbers.choices(range(16, VOCABULARY), k=6_000) for _ in range(16)]
    with router("gateway", colocated, tmp_path, admission="rotate") as started:

        def turns(session: int) -> None:
            for turn in range(2):
                ids = prompts[session] + [16] * MORE * turn
                ask(started.url, generation(ids, 16), x_session_id=f"s{session}")

        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(turns, range(len(prompts))))
        started.routes()
        decisions = started.events("decision")
    assert len(decisions) == 2 * len(prompts)
    assert any(line["admission"]["waited_s"] > 0 for line in decisions), "all fitted at once"
