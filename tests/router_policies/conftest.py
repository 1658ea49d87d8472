"""A mock SGLang worker for tests of the command line: answers, and remembers what it was sent."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web


@dataclass
class MockWorker:
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.bodies.append(body)
        if not body.get("stream"):
            return web.json_response({"text": "hello", "meta_info": {"cached_tokens": 0}})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for index in range(3):
            counts = {
                "prompt_tokens": len(body.get("input_ids", [])),
                "completion_tokens": index + 1,
            }
            told = {
                "output_ids": list(range(index + 1)),
                "meta_info": counts | {"cached_tokens": 0},
            }
            event = json.dumps({"text": f"t{index}"} | told)
            await response.write(f"data: {event}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


@asynccontextmanager
async def running_worker() -> AsyncIterator[MockWorker]:
    worker = MockWorker()

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "mock", "object": "model"}]})

    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_get("/v1/models", models)
    for path in ("/generate", "/v1/completions", "/v1/chat/completions"):
        app.router.add_post(path, worker._answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    worker.url = f"http://{host}:{port}"
    try:
        yield worker
    finally:
        await runner.cleanup()


@pytest.fixture
def mock_worker() -> Callable[[], AbstractAsyncContextManager[MockWorker]]:
    """A function that starts a mock worker for the length of an ``async with``."""
    return running_worker
