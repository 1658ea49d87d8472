"""A worker that answers agents by a script: what a real model with random weights cannot do on cue.

Speaks vLLM's `/health`, `/v1/models`, `/v1/messages` and `/v1/responses`, streamed or not, and
keeps what it was asked. A script is a function of a request; it says what the answer is.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

MODEL = "scripted-model"
LARGEST_BODY = 64 << 20


@dataclass(frozen=True)
class Answer:
    """A text, a call of a tool, or an error of that status; `delay_s` after it was asked."""

    text: str = "done"
    tool: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    status: int = 200
    message: str = ""
    delay_s: float = 0.0


@dataclass(frozen=True)
class Asked:
    """A request: path, headers by lowercase names, body, and when it came (monotonic seconds)."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    at_s: float


Script = Callable[[Asked], Answer]


class ScriptedWorker:
    """The worker's address, and all that it was asked, in order."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.asked: list[Asked] = []
        self.url = ""

    async def models(self, _: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "owned_by": "vllm", "max_model_len": 200_000}
        return web.json_response({"object": "list", "data": [model]})

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def count_tokens(self, request: web.Request) -> web.Response:
        return web.json_response({"input_tokens": len(await request.read()) // 4})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        headers = {name.lower(): value for name, value in request.headers.items()}
        asked = Asked(request.path, headers, body, time.monotonic())
        self.asked.append(asked)
        answer = self.script(asked)
        await asyncio.sleep(answer.delay_s)
        if answer.status != 200:
            error = {"type": "internal_error", "message": answer.message, "code": answer.status}
            return web.json_response({"error": error}, status=answer.status)
        make = _messages if request.path == "/v1/messages" else _responses
        whole, events = make(answer, len(orjson.dumps(body)) // 4)
        if not body.get("stream"):
            return web.json_response(whole)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            line = orjson.dumps(event).decode()
            await response.write(f"event: {event['type']}\ndata: {line}\n\n".encode())
        await response.write_eof()
        return response


def _messages(answer: Answer, tokens: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """An Anthropic message, whole and as events."""
    block: dict[str, Any] = {"type": "text", "text": answer.text}
    begun = block | {"text": ""}
    delta: dict[str, Any] = {"type": "text_delta", "text": answer.text}
    if answer.tool:
        begun = {"type": "tool_use", "id": f"toolu_{time.monotonic_ns()}", "name": answer.tool}
        block = begun | {"input": dict(answer.arguments)}
        begun = begun | {"input": {}}
        arguments = orjson.dumps(dict(answer.arguments)).decode()
        delta = {"type": "input_json_delta", "partial_json": arguments}
    stop = "tool_use" if answer.tool else "end_turn"
    usage = {"input_tokens": tokens, "output_tokens": 8}
    head = {
        "id": f"msg_{time.monotonic_ns()}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "stop_sequence": None,
    }
    whole = head | {"content": [block], "stop_reason": stop, "usage": usage}
    start = head | {"content": [], "stop_reason": None, "usage": usage | {"output_tokens": 0}}
    return whole, [
        {"type": "message_start", "message": start},
        {"type": "content_block_start", "index": 0, "content_block": begun},
        {"type": "content_block_delta", "index": 0, "delta": delta},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": stop, "stop_sequence": None},
            "usage": {"output_tokens": 8},
        },
        {"type": "message_stop"},
    ]


def _responses(answer: Answer, tokens: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """An OpenAI response with one message, whole and as events."""
    identity = f"resp_{time.monotonic_ns()}"
    content = {"type": "output_text", "text": answer.text, "annotations": []}
    item = {
        "id": f"msg_{identity}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [content],
    }
    usage = {"input_tokens": tokens, "output_tokens": 8, "total_tokens": tokens + 8}
    usage |= {"input_tokens_details": {"cached_tokens": 0}}
    usage |= {"output_tokens_details": {"reasoning_tokens": 0}}
    head = {"id": identity, "object": "response", "created_at": int(time.time()), "model": MODEL}
    begun = head | {"status": "in_progress", "output": []}
    whole = head | {"status": "completed", "output": [item], "usage": usage}
    at = {"item_id": item["id"], "output_index": 0, "content_index": 0}
    events = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": item | {"content": [], "status": "in_progress"},
        },
        {"type": "response.content_part.added", **at, "part": content | {"text": ""}},
        {"type": "response.output_text.delta", **at, "delta": answer.text},
        {"type": "response.output_text.done", **at, "text": answer.text},
        {"type": "response.content_part.done", **at, "part": content},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": whole},
    ]
    return whole, [event | {"sequence_number": i} for i, event in enumerate(events)]


@contextmanager
def scripted_worker(script: Script) -> Iterator[ScriptedWorker]:
    """The worker, listening until the block ends."""
    worker = ScriptedWorker(script)
    loop = asyncio.new_event_loop()
    app = web.Application(client_max_size=LARGEST_BODY)
    app.router.add_get("/v1/models", worker.models)
    app.router.add_get("/health", worker.health)
    app.router.add_post("/v1/messages/count_tokens", worker.count_tokens)
    for path in ("/v1/messages", "/v1/responses"):
        app.router.add_post(path, worker.generate)
    runner = web.AppRunner(app)

    async def listen() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        worker.url = f"http://127.0.0.1:{port}"

    loop.run_until_complete(listen())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield worker
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
