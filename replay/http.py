"""HTTP/1.1 as a load generator needs it: the time of arrival is taken where bytes arrive.

Owns connections and the framing of answers. A general client library spends 20 µs and more on a
piece of a stream before the caller sees it, which at thousands of tokens a second is what delays
the time stamps; this one hands bytes on from the socket's own callback. Must not know what they
mean.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Protocol
from urllib.parse import quote, urlsplit

# Shorter than the 5 s after which engines' servers (uvicorn) close an idle connection: a request
# sent on one that is just being closed would count as the engine's failure.
_KEEPALIVE_S = 2.0
_HEAD_END = b"\r\n\r\n"
_IDS = ("x-session-id", "x-request-id")
_VISIBLE = "".join(chr(code) for code in range(33, 127) if chr(code) != "%")


class ProtocolError(Exception):
    """The server sent what is not HTTP/1.1, or closed the connection before the answer's end."""


@dataclass(slots=True)
class Head:
    """Status and headers (names in lower case) of an answer."""

    status: int
    headers: dict[str, str]

    def retry_after_s(self) -> float | None:
        """The seconds of `Retry-After`, or those until its date; None where it says neither."""
        given = self.headers.get("retry-after", "")
        if given.isascii() and given.isdecimal():
            return float(given)
        try:
            return max(0.0, parsedate_to_datetime(given).timestamp() - time.time())
        except (ValueError, OverflowError):
            return None


class Watcher(Protocol):
    """Is told of an exchange's events, from the socket's own callbacks."""

    def on_connected(self) -> None:
        """The request's first byte is written next."""

    def on_head(self, head: Head) -> None:
        """The answer began."""

    def on_body(self, data: bytes) -> None:
        """A piece of the answer's content came."""


@dataclass(slots=True)
class _Body:
    """Takes the framing off an answer's body."""

    chunked: bool
    length: int | None
    ended: bool = False
    _left: int = 0
    _line_end_due: bool = False
    _rest: bytes = b""

    def take(self, data: bytes) -> bytes:
        """The content in `data`; sets `ended` with the last of it."""
        if self.chunked:
            return self._take_chunks(data)
        if self.length is not None:
            self.length -= len(data)
            self.ended = self.length <= 0
        return data

    def _take_chunks(self, data: bytes) -> bytes:
        if self._rest:
            data = self._rest + data
        parts = []
        at = 0
        while True:
            if self._left:
                part = data[at : at + self._left]
                parts.append(part)
                at += len(part)
                self._left -= len(part)
                if self._left:
                    break
                self._line_end_due = True
            if self._line_end_due:
                if len(data) < at + 2:
                    break
                at += 2
                self._line_end_due = False
            end = data.find(b"\r\n", at)
            if end < 0:
                break
            try:
                size = int(data[at:end].partition(b";")[0], 16)
            except ValueError:
                raise ProtocolError(f"expected a chunk's size, found {data[at:end]!r}") from None
            if size == 0:
                # Trailers, if any, end with an empty line like a head does.
                self.ended = data.find(_HEAD_END, end) >= 0
                break
            at = end + 2
            self._left = size
        self._rest = b"" if self.ended else data[at:]
        return parts[0] if len(parts) == 1 else b"".join(parts)


class _Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self.idle_since_s = 0.0
        self.lost = False
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self._body: _Body | None = None
        self._reusable = True
        self._done: asyncio.Future[None] | None = None
        self._watcher: Watcher | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if self._body and not self._body.chunked and self._body.length is None and exc is None:
            self._finish(None)
        else:
            self._finish(ProtocolError("the server closed the connection before the answer's end"))

    def begin(self, head: bytes, body: bytes | memoryview, watcher: Watcher) -> None:
        """Sends a request."""
        assert self._transport
        self._watcher = watcher
        self._body, self._received = None, b""
        self._done = asyncio.get_running_loop().create_future()
        watcher.on_connected()
        self._transport.write(head)
        self._transport.write(body)

    async def end(self) -> bool:
        """Returns when the answer has ended; true if another request may follow."""
        assert self._done
        try:
            await self._done
        except BaseException:
            self.close()
            raise
        finally:
            self._done = self._watcher = None
        return self._reusable and not self.lost

    def close(self) -> None:
        self.lost = True
        if self._transport:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._watcher is None:
            self.close()  # an answer that nobody asked for
            return
        try:
            self._take(data, self._watcher)
        except Exception as error:
            self._finish(error)
            self.close()

    def _take(self, data: bytes, watcher: Watcher) -> None:
        if self._body is None:
            self._received += data
            head, end, data = self._received.partition(_HEAD_END)
            if not end:
                return
            self._read_head(head, watcher)
            assert self._body is not None
            if not data and not self._body.ended:
                return
        if not self._body.ended:
            content = self._body.take(data)
            if content:
                watcher.on_body(content)
        if self._body.ended:
            self._finish(None)

    def _read_head(self, head: bytes, watcher: Watcher) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise ProtocolError(f"expected HTTP/1.1, found {first[:80]!r}")
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        length = headers.get("content-length")
        self._body = _Body(chunked, None if length is None else int(length))
        self._body.ended = not chunked and length == "0"
        closes = headers.get("connection", "").lower() == "close"
        self._reusable = not closes and (chunked or length is not None)
        watcher.on_head(Head(int(rest[:3]), headers))

    def _finish(self, error: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)


@dataclass(slots=True)
class Server:
    """The connections to one server; a new one is made whenever none is idle."""

    url: str
    _idle: list[_Connection] = field(default_factory=list)

    async def post(
        self,
        path: str,
        headers: Mapping[str, str],
        body: bytes | memoryview,
        watcher: Watcher,
    ) -> None:
        """Posts JSON. Of ids (`x-session-id`, `x-request-id`) characters that no header can have
        are percent-encoded; other headers are sent as they are. Raises OSError where no connection
        is made, `ProtocolError`, or what `watcher` raises."""
        place = urlsplit(self.url)
        lines = [
            f"POST {place.path}{path} HTTP/1.1",
            f"host: {place.netloc}",
            "content-type: application/json",
            f"content-length: {len(body)}",
        ]
        lines += [
            f"{name}: {quote(value, safe=_VISIBLE) if name in _IDS else value}"
            for name, value in headers.items()
        ]
        head = "\r\n".join(lines).encode() + _HEAD_END
        connection = await self._connection()
        connection.begin(head, body, watcher)
        del body  # long answers must not keep long prompts in memory
        if await connection.end():
            connection.idle_since_s = time.monotonic()
            self._idle.append(connection)
        else:
            connection.close()

    async def _connection(self) -> _Connection:
        oldest_s = time.monotonic() - _KEEPALIVE_S
        while self._idle:
            connection = self._idle.pop()
            if not connection.lost and connection.idle_since_s >= oldest_s:
                return connection
            connection.close()
        place = urlsplit(self.url)
        secure = place.scheme == "https"
        port = place.port or (443 if secure else 80)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            _Connection, place.hostname or "", port, ssl=secure or None
        )
        return connection

    def close(self) -> None:
        """Closes the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
