"""The short HTTP calls that launch makes of workers and routers: a GET or a POST with a timeout.

Knows nothing of what is asked. Environment proxies are not used: a fleet is asked where it listens.
"""

from __future__ import annotations

import http.client
from urllib.parse import urlsplit


def call(
    method: str, url: str, body: bytes | None = None, *, timeout_s: float, key: str | None = None
) -> tuple[int, bytes]:
    """Status and body of one request to ``http://HOST:PORT/PATH``; a body is sent as JSON, a `key`
    as a bearer's token.

    Raises `OSError` or `http.client.HTTPException` (see `reason`) where nothing answers in time.
    """
    parts = urlsplit(url)
    path = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
    headers = {} if body is None else {"content-type": "application/json"}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def answer_line(path: str, status: int, answer: bytes) -> str:
    """An answer that is not the one hoped for, in a line: what was asked, and how it begins."""
    return f"{path}: {status} {answer[:300].decode(errors='replace').strip()}"


FAILURES = (OSError, http.client.HTTPException)
"""What `call` raises."""


def reason(error: BaseException) -> str:
    """Why a call failed, in a few words."""
    return str(error) or type(error).__name__
