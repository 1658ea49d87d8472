"""HTTP framing: content comes out whole however the bytes are cut, connections are used again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.http import Head, ProtocolError, Server, _Body

_cuts = st.lists(st.integers(0, 10**6), max_size=15)


def _pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, *(cut % (len(data) + 1) for cut in cuts), len(data)})
    return [data[begin:end] for begin, end in pairwise(edges)]


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.booleans(), _cuts)
def test_chunks_are_joined_however_they_are_cut(
    chunks: list[bytes], trailers: bool, cuts: list[int]
) -> None:
    stream = b"".join(b"%x;name=value\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    stream += b"0\r\n" + (b"Trailer: x\r\n" if trailers else b"") + b"\r\n"
    body = _Body(chunked=True, length=None)
    content = b""
    for piece in _pieces(stream, cuts):
        assert not body.ended
        content += body.take(piece)
    assert content == b"".join(chunks)
    assert body.ended


def test_a_chunk_without_a_size_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="chunk's size"):
        _Body(chunked=True, length=None).take(b"zz\r\n")


@pytest.mark.parametrize("given", ["", "soon", "-1", "1.5", "\u0663", "Fri, 99 Nov 2026 99:00:00"])
def test_an_answer_that_does_not_say_when_to_come_again(given: str) -> None:
    assert Head(503, {"retry-after": given}).retry_after_s() is None


def test_an_answer_that_says_when_to_come_again() -> None:
    assert Head(503, {}).retry_after_s() is None
    assert Head(503, {"retry-after": "7"}).retry_after_s() == 7.0
    assert Head(503, {"retry-after": "Fri, 27 Nov 2020 12:00:00 GMT"}).retry_after_s() == 0.0
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    found = Head(503, {"retry-after": later}).retry_after_s()
    assert found is not None
    assert 20.0 < found <= 30.0


@given(st.text())
def test_whatever_a_header_says_no_request_fails_by_it(text: str) -> None:
    found = Head(503, {"retry-after": text}).retry_after_s()
    assert found is None or found >= 0.0


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def _with_server(
    answer: Answer, use: Callable[[Server], Awaitable[None]]
) -> list[asyncio.StreamWriter]:
    """Runs `use` against a server that reads a request and answers; returns its connections."""
    connections = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        while head := await reader.readuntil(b"\r\n\r\n"):
            (line,) = [x for x in head.split(b"\r\n") if x.startswith(b"content-length")]
            await reader.readexactly(int(line.split(b":")[1]))
            await answer(reader, writer)

    async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handle(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    listener = await asyncio.start_server(guarded, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    server = Server(f"http://127.0.0.1:{port}")
    try:
        await use(server)
    finally:
        server.close()
        listener.close()
    return connections


class _Watcher:
    def __init__(self) -> None:
        self.head: Head | None = None
        self.content = b""

    def on_connected(self) -> None:
        assert self.head is None

    def on_head(self, head: Head) -> None:
        assert self.head is None
        self.head = head

    def on_body(self, data: bytes) -> None:
        self.content += data


async def _post(server: Server, body: bytes | memoryview = b"{}") -> tuple[Head, bytes]:
    watcher = _Watcher()
    await server.post("/x", {"x-session-id": "a b\r\né"}, body, watcher)
    assert watcher.head
    return watcher.head, watcher.content


@pytest.mark.parametrize(
    ("raw", "content", "connections"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", b"hi", 1),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b"", 1),
        (b"HTTP/1.1 404 No\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n", b"hi", 1),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nConnection: close\r\n\r\nhi", b"hi", 3),
    ],
)
async def test_answers_are_read_whole_and_connections_used_again(
    raw: bytes, content: bytes, connections: int
) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for byte in raw:
            writer.write(bytes([byte]))
            await writer.drain()

    async def use(server: Server) -> None:
        for _ in range(3):
            head, got = await _post(server)
            assert (head.status, got) == (int(raw.split()[1]), content)

    assert len(await _with_server(answer, use)) == connections


async def test_an_answer_without_a_length_ends_with_the_connection() -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nhello")
        writer.close()

    async def use(server: Server) -> None:
        assert (await _post(server))[1] == b"hello"

    await _with_server(answer, use)


@pytest.mark.parametrize(
    "raw", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhi", b"HTTP/1.1 200"]
)
async def test_a_connection_that_ends_early_is_an_error(raw: bytes) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        writer.close()

    async def use(server: Server) -> None:
        with pytest.raises(ProtocolError, match="before the answer's end"):
            await _post(server)

    await _with_server(answer, use)


async def test_what_is_not_http_is_an_error() -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-x\r\n\r\n")

    async def use(server: Server) -> None:
        with pytest.raises(ProtocolError, match=r"expected HTTP/1\.1"):
            await _post(server)

    await _with_server(answer, use)


async def test_a_header_cannot_smuggle_another() -> None:
    seen = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        await answer(reader, writer)

    listener = await asyncio.start_server(handle, "127.0.0.1", 0)
    server = Server(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/base")
    await _post(server)
    server.close()
    listener.close()
    assert seen[0].startswith(b"POST /base/x HTTP/1.1\r\nhost: 127.0.0.1:")
    assert b"x-session-id: a%20b%0D%0A%C3%A9\r\n" in seen[0]
