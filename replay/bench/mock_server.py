"""A server that answers like SGLang and vLLM with tokens at a fixed pace and stamps what it does.

Reads bodies and throws them away. Written on asyncio's bare protocol so that it takes less of a
core than the client under test. Run as `python -m replay.bench.mock_server PORT TOKENS INTERVAL_S
STAMPS`.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import sys
import time
from pathlib import Path

import orjson

_CHUNKED = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
_END = b"0\r\n\r\n"


class _Answers:
    """The chunks of an answer, the same for every request."""

    def __init__(self, tokens: int) -> None:
        self.sglang = [self._sglang(count, tokens) for count in range(1, tokens + 1)]
        self.openai = [self._openai(count) for count in range(1, tokens + 1)]
        self.sglang.append(_chunk(b"[DONE]") + _END)
        usage = {"prompt_tokens": 1, "total_tokens": 1 + tokens, "completion_tokens": tokens}
        last = orjson.dumps({"id": "m", "choices": [], "usage": usage})
        self.openai.append(_chunk(last) + _chunk(b"[DONE]") + _END)

    @staticmethod
    def _sglang(count: int, tokens: int) -> bytes:
        meta = {
            "id": "m",
            "finish_reason": {"type": "length", "length": tokens} if count == tokens else None,
            "prompt_tokens": 1,
            "cached_tokens": 0,
            "completion_tokens": count,
        }
        record = {"text": "w1 " * count, "output_ids": [1] * count, "meta_info": meta}
        return _chunk(orjson.dumps(record))

    @staticmethod
    def _openai(count: int) -> bytes:
        usage = {"prompt_tokens": 1, "total_tokens": 1 + count, "completion_tokens": count}
        choice = {"index": 0, "text": "w1 ", "logprobs": None, "finish_reason": None}
        return _chunk(
            orjson.dumps(
                {"id": "m", "object": "text_completion", "choices": [choice], "usage": usage}
            )
        )


def _chunk(payload: bytes) -> bytes:
    event = b"data: " + payload + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(event), event)


class _Server:
    """Streams that wait for their next token, by time."""

    def __init__(self, tokens: int, interval_s: float, stamps: Path) -> None:
        self.answers = _Answers(tokens)
        self.interval_s = interval_s
        self.stamps = stamps.open("wb")
        self._due: list[tuple[float, int, _Connection]] = []
        self._count = 0
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def wait(self, connection: _Connection, at_s: float) -> None:
        self._count += 1
        heapq.heappush(self._due, (at_s, self._count, connection))
        if self._timer is None or at_s < self._timer.when():
            if self._timer:
                self._timer.cancel()
            self._timer = self._loop.call_at(self._due[0][0], self._tick)

    def _tick(self) -> None:
        self._timer = None
        now_s = time.monotonic()
        while self._due and self._due[0][0] <= now_s:
            at_s, _, connection = heapq.heappop(self._due)
            if connection.send_next():
                self._count += 1
                heapq.heappush(self._due, (at_s + self.interval_s, self._count, connection))
        if self._due:
            self._timer = self._loop.call_at(self._due[0][0], self._tick)


class _Connection(asyncio.Protocol):
    def __init__(self, server: _Server) -> None:
        self._server = server
        self._head = b""
        self._body_left = 0
        self._chunks: list[bytes] = []
        self._next = 0
        self._arrived_s = 0.0
        self._first_token_s = 0.0
        self._name = ""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        if self._body_left:
            self._body_left -= len(data)
            if self._body_left <= 0:
                self._answer()
            return
        if not self._head:
            self._arrived_s = time.monotonic()
        self._head += data
        end = self._head.find(b"\r\n\r\n")
        if end < 0:
            return
        head, rest = self._head[:end].decode("latin-1"), self._head[end + 4 :]
        self._head = b""
        line, *fields = head.split("\r\n")
        headers = dict(field.lower().split(": ", 1) for field in fields)
        method, path, _ = line.split(" ", 2)
        if method == "GET" or "flush" in path:
            self._reply_json(path)
            return
        self._name = headers.get("x-request-id", "")
        answers = self._server.answers
        self._chunks = answers.sglang if path == "/generate" else answers.openai
        self._body_left = int(headers["content-length"]) - len(rest)
        if self._body_left <= 0:
            self._answer()

    def _reply_json(self, path: str) -> None:
        record: dict[str, object] = {"model_path": "mock", "is_generation": True}
        if path == "/v1/models":
            record = {"object": "list", "data": [{"id": "mock", "owned_by": "sglang"}]}
        body = orjson.dumps(record)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        if self._transport:
            self._transport.write(head % len(body) + body)

    def _answer(self) -> None:
        self._body_left = 0
        self._next = 0
        if self._transport:
            self._transport.write(_CHUNKED)
            self._server.wait(self, time.monotonic() + self._server.interval_s)

    def send_next(self) -> bool:
        """Writes the next chunk; true while there are more."""
        if not self._transport:
            return False
        if not self._next:
            self._first_token_s = time.monotonic()
        self._transport.write(self._chunks[self._next])
        self._next += 1
        if self._next < len(self._chunks):
            return True
        stamp = {
            "request_id": self._name,
            "arrived_s": self._arrived_s,
            "first_token_s": self._first_token_s,
            "finished_s": time.monotonic(),
        }
        self._server.stamps.write(orjson.dumps(stamp, option=orjson.OPT_APPEND_NEWLINE))
        return False


async def _serve(port: int, tokens: int, interval_s: float, stamps: Path) -> None:
    server = _Server(tokens, interval_s, stamps)
    listener = await asyncio.get_running_loop().create_server(
        lambda: _Connection(server), "127.0.0.1", port, backlog=4096
    )
    gc.freeze()
    gc.disable()
    print(listener.sockets[0].getsockname()[1], flush=True)
    try:
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    finally:
        server.stamps.close()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4])))
