"""A server that answers like SGLang and vLLM with tokens at a fixed pace and stamps what it does.

It must take little of the machine, for the client is what is measured: the kernel drops bodies
unread, and each process is one bare loop over its sockets. Run as `python -m
replay.bench.mock_server --help` says; prints its port, ends with its standard input, and then
writes STAMPS.0, STAMPS.1, ….
"""

from __future__ import annotations

import argparse
import gc
import heapq
import multiprocessing
import select
import socket
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import orjson

_CHUNKED = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
_END = b"0\r\n\r\n"
_HEAD_BYTES = 1 << 12
_DROP = bytearray(1 << 20)


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


class _Connection:
    """One connection, one request at a time."""

    def __init__(self, server: _Server, stream: socket.socket) -> None:
        self._server = server
        self.stream = stream
        self._head = b""
        self._body_left = 0
        self._unsent = b""
        self._chunks: list[bytes] = []
        self._next = 0
        self._stamp: dict[str, object] = {}

    def read(self) -> bool:
        """Takes what came; false when the connection has ended."""
        try:
            while self._body_left:
                # Linux drops the bytes without copying them.
                room = min(len(_DROP), self._body_left)
                count = self.stream.recv_into(_DROP, room, socket.MSG_TRUNC)
                if not count:
                    return False
                self._body_left -= count
                if not self._body_left:
                    self._answer()
            data = self.stream.recv(_HEAD_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        if not self._head:
            self._stamp = {"arrived_s": time.monotonic()}
        self._head += data
        head, end, rest = self._head.partition(b"\r\n\r\n")
        if end:
            self._head = b""
            self._begin(head.decode("latin-1"), len(rest))
        return True

    def _begin(self, head: str, body_bytes: int) -> None:
        line, *fields = head.split("\r\n")
        headers = dict(field.lower().split(": ", 1) for field in fields)
        method, path, _ = line.split(" ", 2)
        if method != "POST" or "flush" in path:
            self._reply_json(path)
            return
        self._stamp["request_id"] = headers.get("x-request-id", "")
        answers = self._server.answers
        self._chunks = answers.sglang if path == "/generate" else answers.openai
        self._body_left = int(headers["content-length"]) - body_bytes
        if not self._body_left:
            self._answer()

    def _reply_json(self, path: str) -> None:
        record: dict[str, object] = {"model_path": "mock", "is_generation": True}
        if path == "/v1/models":
            record = {"object": "list", "data": [{"id": "mock", "owned_by": "sglang"}]}
        body = orjson.dumps(record)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._send(head % len(body) + body)

    def _answer(self) -> None:
        self._next = 0
        self._send(_CHUNKED)
        self._server.wait(self, time.monotonic() + self._server.first_s)

    def send_next(self) -> bool:
        """Writes the next chunk; true while there are more."""
        if not self._next:
            self._stamp["first_token_s"] = time.monotonic()
        self._send(self._chunks[self._next])
        self._next += 1
        if self._next < len(self._chunks):
            return True
        self._stamp["finished_s"] = time.monotonic()
        self._server.stamps.append(self._stamp)
        return False

    def _send(self, data: bytes) -> None:
        # A client that falls behind by more than the socket's buffer gets the rest with what
        # follows.
        self._unsent += data
        try:
            self._unsent = self._unsent[self.stream.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent = b""  # gone; its end is noticed by reading


class _Server:
    """One process's connections, and the streams among them that wait for their next token."""

    def __init__(self, answers: _Answers, interval_s: float, first_s: float) -> None:
        self.answers = answers
        self.interval_s = interval_s
        self.first_s = first_s
        self.stamps: list[dict[str, object]] = []
        self._due: list[tuple[float, int, _Connection]] = []
        self._count = 0

    def wait(self, connection: _Connection, at_s: float) -> None:
        self._count += 1
        heapq.heappush(self._due, (at_s, self._count, connection))

    def serve(self, listener: socket.socket, stop: Connection) -> None:
        """Serves until there is something to read from `stop`."""
        poll = select.epoll()
        poll.register(listener, select.EPOLLIN | select.EPOLLEXCLUSIVE)
        poll.register(stop, select.EPOLLIN)
        connections: dict[int, _Connection] = {}
        while True:
            for descriptor, _ in poll.poll(self._send_due()):
                if descriptor == stop.fileno():
                    return
                if descriptor == listener.fileno():
                    try:
                        stream, _ = listener.accept()
                    except BlockingIOError:
                        continue  # another process was faster
                    stream.setblocking(False)
                    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    connections[stream.fileno()] = _Connection(self, stream)
                    poll.register(stream, select.EPOLLIN)
                elif not connections[descriptor].read():
                    connections.pop(descriptor).stream.close()

    def _send_due(self) -> float | None:
        """Sends the tokens that are due; returns the seconds until the next one is."""
        while self._due:
            at_s, _, connection = self._due[0]
            if at_s > (now_s := time.monotonic()):
                return at_s - now_s
            heapq.heappop(self._due)
            if connection.send_next():
                self.wait(connection, at_s + self.interval_s)
        return None


def _work(
    listener: socket.socket,
    stop: Connection,
    answers: _Answers,
    interval_s: float,
    first_s: float,
    stamps: Path,
) -> None:
    server = _Server(answers, interval_s, first_s)
    gc.freeze()
    gc.disable()
    server.serve(listener, stop)
    lines = (orjson.dumps(stamp, option=orjson.OPT_APPEND_NEWLINE) for stamp in server.stamps)
    stamps.write_bytes(b"".join(lines))


def _main(
    processes: int, tokens: int, interval_s: float, stamps: Path, first_s: float | None
) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    listener.setblocking(False)
    answers = _Answers(tokens)
    context = multiprocessing.get_context("fork")
    stopped, stop = context.Pipe(duplex=False)
    workers = [
        context.Process(
            target=_work,
            args=(
                listener,
                stopped,
                answers,
                interval_s,
                interval_s if first_s is None else first_s,
                stamps.with_suffix(f".{number}"),
            ),
        )
        for number in range(processes)
    ]
    for worker in workers:
        worker.start()
    print(listener.getsockname()[1], flush=True)
    sys.stdin.read()
    stop.send(None)  # never received, so that every process sees it
    for worker in workers:
        worker.join()


_MOST_PROCESSES = 64


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m replay.bench.mock_server",
        description="Answers like SGLang and vLLM at a fixed pace, on a free port that it prints; "
        "ends when its standard input does.",
    )
    parser.add_argument(
        "processes", type=int, help=f"processes that serve (at most {_MOST_PROCESSES})"
    )
    parser.add_argument("tokens", type=int, help="tokens of every answer")
    parser.add_argument("interval_s", type=float, help="seconds between tokens")
    parser.add_argument("stamps", type=Path, help="where to write STAMPS.0, STAMPS.1, …")
    parser.add_argument(
        "--first-s", type=float, help="seconds before the first token (default: interval_s)"
    )
    return parser


def _arguments() -> argparse.Namespace:
    parser = _parser()
    found = parser.parse_args()
    if not 1 <= found.processes <= _MOST_PROCESSES:
        parser.error(f"processes {found.processes}: expected 1 to {_MOST_PROCESSES}")
    if found.tokens < 1:
        parser.error(f"tokens {found.tokens}: expected at least 1")
    for name in ("interval_s", "first_s"):
        value = getattr(found, name)
        if value is not None and value < 0:
            parser.error(f"{name} {value}: expected 0 or more")
    return found


if __name__ == "__main__":
    _main(**vars(_arguments()))
