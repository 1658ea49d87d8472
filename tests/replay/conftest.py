"""What this room's tests share: random traces that keep the format's promises, a loop whose time is
virtual, and a server that speaks the engines' dialects."""

from __future__ import annotations

import asyncio
import random
import selectors
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import orjson
import pytest
from aiohttp import web

from replay.trace import Request


def make_trace(
    seed: int, requests: int = 40, block_size: int = 4, *, sub_agents: bool = True
) -> list[Request]:
    """A trace of branching sessions: prompts grow, shrink, repeat, and start from other
    sessions'."""
    generator = random.Random(seed)
    sessions: list[list[Request]] = []
    trace: list[Request] = []
    next_id = 0
    now_s = 0.0
    for number in range(requests):
        now_s += generator.choice([0.0, 0.001, 0.5, 3.0])
        parent = None
        if not sessions or generator.random() < 0.3:
            donor = generator.choice(trace) if trace and generator.random() < 0.5 else None
            if donor and sub_agents and generator.random() < 0.3:
                parent = donor.request_id
            sessions.append([])
            history = sessions[-1]
        else:
            history = generator.choice(sessions)
            donor = generator.choice(history)
            if sub_agents and generator.random() < 0.2:
                parent = generator.choice(trace).request_id
        full = donor.input_length // block_size if donor else 0
        kept = generator.randint(0, full) if donor and generator.random() < 0.3 else full
        ids = list(donor.hash_ids[:kept]) if donor else []
        length = kept * block_size + generator.randint(0 if kept else 1, 5 * block_size)
        if donor and generator.random() < 0.1:
            ids, length = list(donor.hash_ids), donor.input_length
        while len(ids) * block_size < length:
            ids.append(next_id)
            next_id += 1
        request = Request(
            request_id=f"r{number}",
            session_id=f"s{sessions.index(history)}",
            turn=len(history),
            timestamp_s=round(now_s, 3),
            input_length=length,
            output_length=generator.randint(1, 9),
            block_size=block_size,
            hash_ids=ids,
            parent_request_id=parent,
            think_time_s=round(generator.random(), 3) if history else None,
        )
        history.append(request)
        trace.append(request)
    return trace


@pytest.fixture(scope="session")
def trace_of() -> Callable[..., list[Request]]:
    return make_trace


class _VirtualSelector(selectors.SelectSelector):
    """Never sleeps: what would be waited for becomes time that has passed."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if timeout is None and not ready:
            raise AssertionError("the schedule waits for something that never comes")
        if not ready:
            self.now_s += max(timeout or 0.0, 1e-9)
        return ready


def _run_virtually(main: Callable[[Callable[[], float]], Coroutine[Any, Any, Any]]) -> Any:
    selector = _VirtualSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now_s  # type: ignore[method-assign]
    try:
        return loop.run_until_complete(main(lambda: selector.now_s))
    finally:
        loop.close()


@pytest.fixture(scope="session")
def run_virtually() -> Callable[..., Any]:
    """Runs a coroutine function of a clock on a loop whose time jumps to the next event."""
    return _run_virtually


class FakeEngine:
    """Answers like SGLang or vLLM; without `usage` in its chunks like other servers. `behind` is a
    router that stands before it and names itself as who owns the model. With a `key`
    it refuses requests without that header `authorization`. `faults` maps a request's id to what
    goes wrong, "all" to what does with the others; refusals have the headers `refuses_with`.
    `seen` holds the bodies, with their headers, in the order of arrival."""

    def __init__(
        self,
        dialect: str,
        *,
        incremental: bool = False,
        delay_s: float = 0.0,
        usage: bool = True,
        key: str | None = None,
        behind: str | None = None,
    ) -> None:
        self.usage = usage
        self.behind = behind
        self.key = key
        self.dialect = dialect
        self.incremental = incremental
        self.delay_s = delay_s
        self.model_path = "somewhere/tiny"
        self.faults: dict[str, str] = {}
        self.refuses_with: dict[str, str] = {}
        self.seen: list[dict[str, Any]] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.url = ""

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/v1/models", self._models)
        if self.dialect == "sglang":
            # Routers that speak for several engines pass on the older name alone.
            name = "/get_model_info" if self.behind else "/model_info"
            app.router.add_get(name, self._model_info)
        for path in ("/generate", "/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._answer)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        if self.key and request.headers.get("authorization") != self.key:
            return web.Response(status=401, text="no key")
        root = "tiny" if self.dialect == "sglang" else self.model_path
        model = {"id": "tiny", "owned_by": self.behind or self.dialect, "root": root}
        return web.json_response({"data": [model]})

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": self.model_path, "is_generation": True})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        name = request.headers["x-request-id"]
        self.seen.append({"path": request.path, "headers": request.headers, "body": body})
        if self.key and request.headers.get("authorization") != self.key:
            return web.Response(status=401, text="no key")
        fault = self.faults.get(name, self.faults.get("all"))
        if fault in ("400", "503"):
            return web.Response(status=int(fault), text="no", headers=self.refuses_with)
        if fault == "whole":
            return web.json_response({"detail": "answers are not streamed here"})
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            response = web.StreamResponse(headers={"x-deltaserve-decision-id": f"d-{name}"})
            await response.prepare(request)
            async for event in self._events(request.path, body, fault):
                await response.write(b"data: " + event + b"\n\n")
            if fault == "cut":
                assert request.transport
                request.transport.abort()
            return response
        finally:
            self.in_flight -= 1

    async def _events(
        self, path: str, body: dict[str, Any], fault: str | None
    ) -> AsyncIterator[bytes]:
        if path == "/generate":
            wanted = body["sampling_params"]["max_new_tokens"]
            prompt = body.get("input_ids", body.get("text"))
        else:
            wanted = body["max_tokens"]
            prompt = body.get("prompt", body.get("messages"))
        if fault == "hang":
            await asyncio.sleep(30)
        if fault == "error":
            yield orjson.dumps({"error": {"message": "out of memory", "code": 500}})
            return
        if fault in ("short", "cut"):
            wanted //= 2
        ids = [7 * number % 100 for number in range(wanted)]
        for count in range(1, wanted + 1):
            await asyncio.sleep(self.delay_s)
            if path == "/generate":
                yield orjson.dumps(
                    {
                        "output_ids": ids[count - 1 : count] if self.incremental else ids[:count],
                        "meta_info": {
                            "prompt_tokens": len(prompt),
                            "cached_tokens": 3,
                            "completion_tokens": count,
                            "finish_reason": {"type": "length"} if count == wanted else None,
                        },
                    }
                )
            elif not self.usage:
                yield orjson.dumps({"choices": [{"index": 0, "text": f"w{count}"}]})
            else:
                yield orjson.dumps(
                    {
                        "choices": [{"index": 0, "text": "", "token_ids": ids[count - 1 : count]}],
                        "usage": {"prompt_tokens": len(prompt), "completion_tokens": count},
                    }
                )
        if fault == "cut":
            return
        if path != "/generate":
            usage = {
                "prompt_tokens": len(prompt),
                "completion_tokens": wanted,
                "prompt_tokens_details": {"cached_tokens": 3},
            }
            yield orjson.dumps({"choices": [], "usage": usage})
        yield b"[DONE]"


@pytest.fixture
def engine() -> Iterator[Callable[..., FakeEngine]]:
    """Starts fake engines, each in a thread of its own."""
    stops: list[Callable[[], None]] = []

    def start(dialect: str = "sglang", **options: Any) -> FakeEngine:
        fake = FakeEngine(dialect, **options)
        ready = threading.Event()
        loop = asyncio.new_event_loop()

        async def serve() -> None:
            runner = web.AppRunner(fake.app(), handler_cancellation=True)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            address = runner.addresses[0]
            fake.url = f"http://{address[0]}:{address[1]}"
            ready.set()
            await stopped.wait()
            await runner.cleanup()

        stopped = asyncio.Event()
        thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
        thread.start()
        assert ready.wait(10)

        def stop() -> None:
            loop.call_soon_threadsafe(stopped.set)
            thread.join(10)

        stops.append(stop)
        return fake

    yield start
    for stop in stops:
        stop()
